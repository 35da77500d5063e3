"""The lens on how widely attention is spread."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn

from recorders.monitors.forward import ForwardMonitor
from recorders.watch.charts import Aggregation, Chart
from recorders.watch.lenses.lens import Classes, Lens, OfKind, checked, classes, phase_of, running


def AttentionEntropy(
    record_eval: bool = False,
    evaluation_from_grad: bool = False,
    include: Classes = nn.MultiheadAttention,
    exclude: Classes = (),
    normalize_by_size: bool = False,
    line_aggregation: Aggregation = "mean",
    range_aggregation: Aggregation = ("std", "min-max"),
) -> Lens:
    """A lens on the entropy of the rows of attention: 0 if a query looks at one key, log k if it looks at all k keys alike.

    Watched are modules that return their attention probabilities: as the second of a tuple, as `nn.MultiheadAttention` does if it
    is called with `need_weights=True`, and modules of Hugging Face with `output_attentions=True`; or as their only output, such as
    an `nn.Softmax` that is a module of its own. Their last axis is the keys. Every row of every batch counts once: each query, and
    each head unless the module averages over heads. The entropy of an average (the default of `nn.MultiheadAttention`; give
    `average_attn_weights=False`) is at least the average of the entropies.

    Not visible are probabilities that no module returns: those of `F.scaled_dot_product_attention`, of
    `nn.TransformerEncoderLayer`, which calls its attention with `need_weights=False`, and of all fused kernels. Such a module
    records nothing, and the report of its recorder says how to ask for them.

    Each row is divided by its sum, because dropout changes the sum of those that `nn.MultiheadAttention` returns in training. A
    row without any probability is NaN, is counted as non-finite and left out. With a causal mask the first query has one key, so
    the minimum is 0.

    Args:
        record_eval: record evaluation too, apart from training, in charts of its own.
        evaluation_from_grad: evaluation is when gradients are off; False: when the module is in evaluation mode.
        include: classes of modules to watch.
        exclude: classes of modules to leave out, whatever `include` says.
        normalize_by_size: divide by log k, to compare rows of different lengths: from 0 to 1. A row of one key is NaN then.
        line_aggregation: one or several of "mean", "std", "min", "max".
        range_aggregation: one or several of "std", "min-max"; None for no ranges.

    Charts:
        Attention Entropy: `mean`, `std`, `min` and `max` over all queries and heads, in nats, or as a share of log k; `count` and
            `nonfinite`, how many count and how many are left out. One value a layer and tick.

    Raises:
        LensError: an unknown aggregation, or one that needs every value.

    >>> [(chart.title, chart.unit) for chart in AttentionEntropy().charts]
    [('Attention Entropy', 'nats')]
    """
    unit, most = ("share of log k", 1.0) if normalize_by_size else ("nats", None)
    chart = Chart("Attention Entropy", ("rows",), unit, *checked(True, line_aggregation, range_aggregation), limits=(0.0, most))
    reducer = running().premap(relative_entropies if normalize_by_size else entropies)
    monitor = ForwardMonitor(reducer, eval_update=record_eval, phase=phase_of(evaluation_from_grad), op_=probabilities)
    where = OfKind(False, False, classes(include), classes(exclude))
    return Lens("AttentionEntropy", (chart,), {"rows": monitor}, where, inner=True)  # attention contains its projections


def entropies(probabilities: Tensor) -> Tensor:
    """The entropies of rows [..., k] in nats, each divided by its sum first: [...], in float32 or wider.

    >>> entropies(torch.tensor([[0.5, 0.5, 0.0], [0.0, 0.0, 2.0]]))
    tensor([0.6931, 0.0000])
    """
    wide = probabilities.to(torch.promote_types(probabilities.dtype, torch.float32))
    found: Tensor = torch.special.entr(wide / wide.sum(dim=-1, keepdim=True)).sum(dim=-1)
    return found


def relative_entropies(probabilities: Tensor) -> Tensor:
    """The entropies of distributions over k, divided by the largest that there is, log k.

    >>> relative_entropies(torch.tensor([[0.5, 0.5], [1.0, 0.0]]))
    tensor([1., 0.])
    """
    found = entropies(probabilities)
    return found / math.log(probabilities.shape[-1]) if probabilities.shape[-1] > 1 else torch.full_like(found, torch.nan)


def probabilities(output: Any) -> Any:
    """The probabilities among what attention returns: the second of a tuple, None if there is none, or the output itself."""
    return (*output, None)[1] if isinstance(output, tuple) else output
