"""Presets: recorders for what everybody records, ready for `.modules(net)`."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

from torch import Tensor, nn

from recorders.capture.channels import channel_axis
from recorders.monitors.forward import ForwardInputMonitor, ForwardMonitor
from recorders.monitors.parameters import ParameterUpdateMonitor
from recorders.recorder.recorder import Recorder
from recorders.watch.diagnosis.health import health
from recorders.watch.divergence.runs.fingerprints import fingerprints
from recorders.watch.lenses.attention import entropies, probabilities
from recorders.watch.lenses.distribution import Outliers
from recorders.watch.lenses.health import update_ratio as ratio_of
from recorders.watch.lenses.lens import Lens, running
from recorders.watch.lenses.noise import GradientNoise
from reducers import Collect, Masked, Norm, PerObservation, Product, Quantile, Summary
from reducers.errors import ArgumentError

__all__ = [
    "attention_entropy",
    "calibration",
    "fingerprints",
    "gradient_noise",
    "health",
    "mup_coordinates",
    "outliers",
    "outputs",
    "update_ratio",
]


def outputs() -> Recorder:
    """What each module puts out: its mean, variance and extremes, over all calls and elements.

    Returns:
        A recorder.
        Results of each module, each 0-d: those of `Summary`, in the unit of the output, `var` in its square.

    >>> import torch
    >>> net = torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.ReLU())
    >>> with outputs().modules(net) as recorder:
    ...     _ = net(torch.zeros(4, 2))
    >>> recorder["1"].peek()["count"]
    tensor(12)
    """
    return Recorder(ForwardMonitor(Summary()))


def calibration(*, per_channel: bool = False, group_size: int | None = None, mantissa_bits: int = 7) -> Recorder:
    """How inputs and outputs of layers are distributed: what `recorders.calibration` makes ranges, scales and files of.

    The subrecorders are `input/layer` and `output/layer`. Both have `values`, a `Quantile` from 1e-6 to 1e6; inputs also have
    `squares`, the `Norm` of each channel, which is the importance of the weights that it meets. One pass serves all methods and
    formats.

    Counts, minima and maxima merge exactly, so ranks give the ranges of one pass, bit for bit. Sums of squares are in float64, and
    differ by rounding at most.

    A distribution takes 82 KB, with 5 bits 20 KB. So `per_channel` is for some layers, and for groups `group_size` costs less.

    Args:
        per_channel: a distribution for each channel of inputs and outputs, in place of one for each tensor; groups of any size, and
            whole tensors, follow from it exactly.
        group_size: a distribution for each group of so many neighbouring channels of the inputs, and of groups of any multiple.
        mantissa_bits: of `Quantile`: quantiles have a relative error of at most `1 / (2**(mantissa_bits + 1) + 1)`, 0.39 % with 7.

    Returns:
        A recorder.
        Results of `input/layer` and `output/layer`, float64: `values`, minimum, median and maximum, [3], or [3, channels] or [3,
        groups], in the unit of the data. Of inputs also `squares`, [channels]: the square root of the sum of the squares.

    Raises:
        ArgumentError: a number is out of range, or both `per_channel` and `group_size` are given.
    """
    if group_size is not None and (per_channel or type(group_size) is not int or group_size < 1):
        raise ArgumentError(f"calibration takes per_channel or a positive group_size and got {per_channel} and {group_size!r}")
    values = Quantile("channels" if per_channel else "... ->", q=(0.0, 0.5, 1.0), bits=mantissa_bits, low=1e-6, high=1e6)
    if group_size is None:
        inputs = ForwardInputMonitor(Product(values=values, squares=Norm("channels")))
    else:
        grouped = Product(values=replace(values, pattern="... g c -> g"), squares=Norm("... g c -> (g c)"))
        inputs = ForwardInputMonitor(grouped, map_=partial(_groups, size=group_size))
    return Recorder(input=inputs, output=ForwardMonitor(Product(values=values)))


def outliers() -> Recorder:
    """Features that stick out, which make numbers of few bits coarse: what the lens `Outliers` shows, of every layer.

    Returns:
        A recorder.
        Results of each layer, each 0-d: `peak` with `mean`, float64, the largest magnitude in standard deviations. `kurtosis`
        with `mean`, float64, the excess over that of a normal distribution; both without a unit. `features` with `outliers` and
        `features`, int64, how many features reach a magnitude of 6 and how many there are, and `mean`, the share. In it also,
        float64, in the unit of the data: `largest`, the largest magnitude, and `typical`, the median over features of their root
        mean squares.
    """
    return _of(Outliers(record_eval=True))


def update_ratio() -> Recorder:
    """How much a step changes weights, relative to their norm: what the lens `UpdateRatio` shows, of every weight.

    Returns:
        A recorder.
        Results of each layer with a weight: `ratio`, [steps], float32 or wider, without a unit: the norm of the change of the
        weight at each step over the norm of the weight before.
    """
    return Recorder(ParameterUpdateMonitor(Product(ratio=Collect()), "weight", op_=ratio_of))


def gradient_noise(batch_size: int) -> Recorder:
    """Up to which batch size more samples make a step better: what the lens `GradientNoise` shows, of every parameter.

    Args:
        batch_size: the number of samples that a step uses, over all micro-batches and ranks.

    Returns:
        A recorder.
        Results of `weight/layer` and `bias/layer`, each 0-d: `count` and `nonfinite`, int64, how many steps count and how many
        are left out. From two steps on, float64: `noise` and `signal`, both in the square of the unit of the gradient, and
        `mean`, their ratio times `batch_size`, in samples; without it if the signal is not above 0.

    Raises:
        LensError: `batch_size` is not a positive number.
    """
    return _of(GradientNoise(batch_size=batch_size))


def attention_entropy(mask: str | None = None, *, per_head: bool = False) -> Recorder:
    """How widely attention is spread over its keys: what the lens `AttentionEntropy` shows.

    It watches `nn.MultiheadAttention` and classes whose names end with Attention, if they return their probabilities: the former
    with `need_weights=True`, those of transformers with `attn_implementation="eager"`. `report()` names those that do not.

    Args:
        mask: the name of a mask of queries, of shape (batch, time), that `recorder.given` gives: those that are False, such as
            padding, are left out. None if all count.
        per_head: whether each head is apart. If a module returns the mean of its heads, as `nn.MultiheadAttention` does without
            `average_attn_weights=False`, that counts as one head.

    Returns:
        A recorder.
        Results of each attention, each 0-d: those of `Summary` over all queries and heads, in nats: `count`, `mean`, `var`,
        `min`, `max`, `absmax`, `zeros`, `nan` and `inf`. With `per_head`, each of shape (heads,).
    """
    found = Summary("... head -> head") if per_head else running()
    if mask is not None:
        return Recorder(_AttentionMonitor(Masked(found), op_=_entropies_by_head, given=mask))
    if per_head:
        return Recorder(_AttentionMonitor(found, op_=_entropies_by_head))
    return Recorder(_AttentionMonitor(found.premap(entropies), op_=probabilities))


def mup_coordinates() -> Recorder:
    """The mean magnitude of each output in each training forward: if it grows or shrinks with the width, so should the rates not.

    That is the coordinate check of G. Yang et al., "Tensor Programs V" (arXiv:2203.03466), appendix D.1: record some steps of nets
    of several widths, and compare the same step and layer.

    Returns:
        A recorder.
        Results of each module: [forwards], float64, the mean magnitude of its output, in the unit of the output.
    """
    return Recorder(ForwardMonitor(PerObservation(Norm(p=1, normalize=True), Collect()), eval_update=False))


class _AttentionMonitor(ForwardMonitor):
    """A monitor that a recorder puts on attention only."""

    def applies(self, module: nn.Module) -> bool:
        return any(kind.__name__.endswith("Attention") for kind in type(module).__mro__)


def _groups(x: Tensor, *, size: int, module: nn.Module) -> Tensor:
    """The input of a layer, with its channels as groups of so many along the last two axes."""
    axis = channel_axis(module)
    last = x.movedim(1 if axis is None else axis, -1)
    return last.reshape(*last.shape[:-1], -1, size)


def _entropies_by_head(output: Any) -> Any:
    """The entropies of attention, (batch, time, heads); None if there are no probabilities."""
    found = probabilities(output)
    if found is None:
        return None
    found = entropies(found)
    return found.movedim(1, -1) if found.ndim == 3 else found.unsqueeze(-1)  # heads come before queries


def _of(lens: Lens) -> Recorder:
    """A recorder with the monitors of a lens; of one monitor the subrecorders have the names of the modules."""
    monitors = tuple(lens.monitors.values())
    return Recorder(monitors[0]) if len(monitors) == 1 else Recorder(None, budget=None, **lens.monitors)
