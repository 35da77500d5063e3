"""What is seen while a net runs: attention that reads one key alone, or all alike, and random numbers."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from recorders.watch.diagnosis.probe.lineage import Lineage

DROPS = frozenset({"native_dropout.default", "fused_dropout.default", "bernoulli_.float", "bernoulli.p"})
"""The operators by which dropout draws."""
DRAWS = frozenset(
    (
        *("bernoulli", "bernoulli_", "binomial", "cauchy_", "exponential_", "geometric_", "log_normal_", "multinomial", "normal"),
        *("normal_", "poisson", "rand", "rand_like", "randint", "randint_like", "randn", "randn_like", "randperm", "random_"),
        "uniform_",
    )
)
"""Other operators that draw random numbers."""
PRODUCTS = frozenset({"addmm", "baddbmm", "bmm", "mm"})
FUSED = {
    "scaled_dot_product_flash_attention_for_cpu": ("dropout_p", "is_causal"),
    "scaled_dot_product_flash_attention": ("dropout_p", "is_causal"),
    "scaled_dot_product_efficient_attention": ("attn_bias", "compute_log_sumexp", "dropout_p", "is_causal"),
    "scaled_dot_product_cudnn_attention": ("attn_bias", "compute_log_sumexp", "dropout_p", "is_causal"),
}
"""By operator, its arguments after query, key and value."""
ROWS = 2048
"""The most queries of a call that are looked at."""
MASKED = -1e8
"""Scores below this are those of masked keys."""
KEPT = 8
"""How many outputs of softmax are followed at a time, to see whether they weigh values."""


@dataclass
class Attention:
    """What the attention of a module was like.

    Attributes:
        queries: how many with at least two keys were seen.
        alone: how many of them read one key alone.
        evenness: the least entropy of a query, relative to that of equal shares.
        spread: the largest difference of scores that is not zero; 0 if all scores are equal.
    """

    queries: int = 0
    alone: int = 0
    evenness: float = math.inf
    spread: float = 0.0

    def add(self, scores: Tensor, alone: float) -> None:
        """Adds queries.

        Args:
            scores: (queries, keys), before the softmax.
            alone: the relative entropy below which a query reads one key alone.
        """
        scores = scores.double()
        kept = scores > MASKED
        keys = kept.sum(1)
        scores, kept, keys = scores[keys > 1], kept[keys > 1], keys[keys > 1]
        if not len(scores) or not scores[kept].isfinite().all():
            return
        shares = scores.masked_fill(~kept, -math.inf).softmax(1)
        relative = torch.special.entr(shares).sum(1) / keys.double().log()
        span = scores.masked_fill(~kept, -math.inf).amax(1) - scores.masked_fill(~kept, math.inf).amin(1)
        self.queries += len(scores)
        self.alone += int((relative < alone).sum())
        self.evenness = min(self.evenness, float(relative.min()))
        self.spread = max(self.spread, float(span.max()))


@dataclass
class Seen:
    """What one run showed; it is called with each operator.

    Attributes:
        alone: the relative entropy below which a query reads one key alone.
        lineage: is told of each operator, too.
        inside: the names of the modules that are running, the innermost last.
        attention: by name of the module.
        dropouts: the names of modules in which a dropout drew.
        draws: whether other random numbers were drawn.
        batch_softmax: the names of modules in which a softmax ran along the first axis.
        query_softmax: those in which one ran along the rows of square matrices, which are queries as a rule.
        reads_ahead: those in which a query may read a later key.
    """

    alone: float
    lineage: Lineage = field(default_factory=Lineage)
    inside: list[str] = field(default_factory=list)
    attention: dict[str, Attention] = field(default_factory=dict)
    dropouts: list[str] = field(default_factory=list)
    draws: bool = False
    batch_softmax: list[str] = field(default_factory=list)
    query_softmax: list[str] = field(default_factory=list)
    reads_ahead: list[str] = field(default_factory=list)
    _followed: dict[int, tuple[Tensor, str, Tensor]] = field(default_factory=dict)

    def __call__(self, operator: str, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        """Looks at a call of an operator, such as "bmm.default"."""
        name, where = operator.partition(".")[0], self.inside[-1] if self.inside else ""
        self.lineage(name, args, output, where)
        if operator in DROPS:
            self.dropouts.append(where)
        elif name in DRAWS:
            self.draws = True
        elif name in ("softmax", "safe_softmax"):
            self._softmax(args[0], args[1], output, where)
        elif name in FUSED:
            self._fused(args, {**dict(zip(FUSED[name], args[3:], strict=False)), **kwargs}, where)
        elif self._followed:
            self._follow(name, args, output)

    def _softmax(self, scores: Tensor, dim: int, output: Tensor, where: str) -> None:
        if dim % max(scores.ndim, 1) == 0 and scores.ndim > 1:
            self.batch_softmax.append(where)
        if scores.ndim > 2 and dim % scores.ndim == scores.ndim - 2 and scores.shape[-1] == scores.shape[-2]:
            self.query_softmax.append(where)
        if scores.ndim > 2 and dim % scores.ndim == scores.ndim - 1:
            self._look_ahead(scores, torch.arange(scores.shape[-2], device=scores.device), where)
        if scores.ndim > 1:
            self._followed[id(output)] = (output, where, _some(scores.movedim(dim, -1).flatten(0, -2)))
            if len(self._followed) > KEPT:
                del self._followed[next(iter(self._followed))]

    def _follow(self, name: str, args: tuple[Any, ...], output: Any) -> None:
        for item in args:
            found = self._followed.get(id(item)) if isinstance(item, Tensor) else None
            if found is None:
                continue
            kept, where, scores = found
            if name in PRODUCTS:  # shares that weigh values
                del self._followed[id(kept)]
                self.attention.setdefault(where, Attention()).add(scores, self.alone)
            elif isinstance(output, Tensor) and output.numel() == kept.numel():  # a view, a copy, a mask or a dropout of it
                self._followed[id(output)] = (output, where, scores)

    def _fused(self, args: tuple[Any, ...], options: dict[str, Any], where: str) -> None:
        query, key = args[0], args[1]
        if options.get("dropout_p"):
            self.dropouts.append(where)
        rows = torch.linspace(
            0, query.shape[-2] - 1, min(query.shape[-2], max(1, ROWS // max(1, query[..., 0, 0].numel()))), device="cpu"
        )
        rows = rows.long().to(query.device)
        if query.ndim > 3 and key.shape[-3] != query.shape[-3]:  # several heads share keys
            key = key.repeat_interleave(query.shape[-3] // key.shape[-3], -3)
        scale = options.get("scale")
        scale = query.shape[-1] ** -0.5 if scale is None else scale
        scores = query[..., rows, :].double() @ key.double().transpose(-1, -2) * scale
        mask = next((options[name] for name in ("attn_mask", "attn_bias") if options.get(name) is not None), None)
        if mask is not None:
            mask = mask.expand(*query.shape[:-1], key.shape[-2])[..., rows, :]
            scores = scores.masked_fill(~mask, -math.inf) if mask.dtype == torch.bool else scores + mask
        if options.get("is_causal"):
            scores = scores.masked_fill(torch.arange(key.shape[-2], device=rows.device) > rows[:, None], -math.inf)
        self._look_ahead(scores, rows, where)
        if scale > 1:
            self.lineage.note_scores(scores, query.shape[-1], where)
        self.attention.setdefault(where, Attention()).add(scores.flatten(0, -2), self.alone)

    def _look_ahead(self, scores: Tensor, rows: Tensor, where: str) -> None:
        """Looks whether any of these queries, by their positions, may read a later key."""
        later = torch.arange(scores.shape[-1], device=rows.device) > rows[:, None]
        if bool((later & (scores > MASKED)).any()):
            self.reads_ahead.append(where)


def _some(rows: Tensor) -> Tensor:
    """Some rows, over the whole."""
    return rows[:: max(1, len(rows) // ROWS)].clone()
