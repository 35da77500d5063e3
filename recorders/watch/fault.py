"""Findings as data: what a fault is, how bad it must be to be named, and what is known about each kind."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from statistics import median

from torch import Tensor, nn

from recorders.recordings.display import Rows, ShownAsTable

__all__ = [
    "GRADIENT_DECAY",
    "LINEAR",
    "MASSIVE",
    "RECENT",
    "SATURATED_SLOPE",
    "UNIT_SHARE",
    "UPDATE_LIMITS",
    "UPDATE_RANGE",
    "WITHOUT_WEIGHTS",
    "Finding",
    "Findings",
    "fault",
    "gradients_by_depth",
    "is_idle",
    "is_massive",
    "relative_slope",
    "shown_outliers",
    "shown_range",
    "usual_growth",
]

UPDATE_RANGE = (1e-4, 1e-2)
"""The usual size of an update relative to the weights: within a factor of ten of 1e-3.

Rule of thumb by A. Karpathy, course CS231n, "Neural Networks Part 3", section "Ratio of weights:updates".
"""

UPDATE_LIMITS = (1e-5, 1e-1)
"""Beyond these an update is a fault: within a factor of a hundred of Karpathy's 1e-3.

The second factor of ten is ours: small nets that train well, as those in `tests/recorders/watch/test_no_false_alarm.py`, have
typical updates of up to 4e-2.
"""

GRADIENT_DECAY = 1e-4
"""The smallest accepted ratio between the gradient norms of the first quarter of the layers and the last, each by its median.

It is ours; we know of no published one. An optimizer such as SGD moves layers in proportion to their gradients, so no learning rate
keeps all layers in `UPDATE_RANGE` if they differ by more than its width, a factor of 100. This is its square, because layers also
differ in size and in the size of their weights. No net in `tests/recorders/watch/test_no_false_alarm.py` comes near it.
"""

UNIT_SHARE = 0.5
"""The largest accepted share of dead units in a layer, and of saturated ones.

Source: the default of `threshold_layer`, 50 %, of the rules DeadRelu and SaturatedActivation of Amazon SageMaker Debugger. A few
are dead from the start in healthy nets with ReLU and the initialisation of He et al. (arXiv:1502.01852), and more in deep nets.
"""

RECENT = (8, 512, 0.5)
"""For how long a unit that was active before must be idle to be dead: observations, elements, share of the recording.

The share is enough in place of the elements, so that a short recording tells, too; so many observations there must be in any case.
They are ours: a healthy unit that is active in one of 100 elements is idle for 512 with a probability of 0.6 %, and a fault needs
more than `UNIT_SHARE` of such units.
"""

SATURATED_SLOPE = 1 - 0.97**2
"""A unit is saturated if its mean slope is below this share of the steepest slope: that of a tanh whose output is 0.97.

Source of the 0.97: A. Karpathy, "Building makemore Part 3: Activations & Gradients, BatchNorm", who counts outputs beyond it.
"""

MASSIVE = (100.0, 1000.0)
"""An outlier is larger in magnitude than the first, and at least as many times the typical magnitude of its layer as the second.

Source: M. Sun et al., "Massive Activations in Large Language Models" (arXiv:2402.17762), who compare with the median magnitude. The
criterion of T. Dettmers et al. (arXiv:2208.07339), a magnitude of 6, holds for the hidden states of large transformers only: nets
without normalisation, and logits, reach it in health.
"""


def _kinds_in(*files: str) -> frozenset[str]:
    """The names of the classes of `torch.nn` that are defined in these files."""
    kinds = [kind for kind in vars(nn).values() if isinstance(kind, type) and issubclass(kind, nn.Module)]
    return frozenset(kind.__name__ for kind in kinds if kind.__module__.rpartition(".")[2] in files)


LINEAR = _kinds_in("linear", "conv", "sparse", "normalization", "batchnorm", "instancenorm") | {"Conv1D"}
"""Classes whose outputs are zero only if their weights are, which is how some are initialised: that is no death of units."""
WITHOUT_WEIGHTS = _kinds_in("activation", "dropout", "pooling", "padding", "flatten", "loss", "distance", "upsampling") - {
    "PReLU",
    "MultiheadAttention",
} | {"Identity"}
"""Classes without weights: that one is not called, as the dropout of attention that is fused, is no fault."""


@dataclass(frozen=True)
class Finding:
    """One likely fault.

    Attributes:
        layer: the layer, or the name of a pushed value such as "loss".
        what: what was found, with numbers.
        why: why it matters.
        remedy: what to try first.
        since: the first tick of a timeline from which on it held to the end; None if that is not known.
    """

    layer: str
    what: str
    why: str
    remedy: str
    since: int | None = None

    def __str__(self) -> str:
        since = "" if self.since is None else f", since tick {self.since}"
        return f"{self.layer}: {self.what}{since}. {self.why} Try: {self.remedy}"


class Findings(ShownAsTable, list[Finding]):
    """A list of likely faults, with what was examined and what could not be.

    Attributes:
        examined: each kind of fault that was looked for, with how many layers tell of it.
        unexamined: each kind of fault that was not looked for, with what to record for it.
        notices: what healthy nets have too, but fewer of: dead units that are not most of their layer.

    >>> Findings([], ["NaN and infinity: record a Summary of the loss"], examined=["dead units: 2 of 7"])
    no fault was found; examined: dead units; not examined: NaN and infinity
    >>> Findings([], ["dead units: record Activity"])
    nothing was examined, so no fault could be found; not examined: dead units
    """

    def __init__(
        self,
        found: Iterable[Finding],
        unexamined: Iterable[str],
        examined: Iterable[str] = (),
        notices: Iterable[Finding] = (),
    ) -> None:
        super().__init__(found)
        self.examined, self.unexamined, self.notices = tuple(examined), tuple(unexamined), tuple(notices)

    @property
    def verdict_if_empty(self) -> str:
        """What it means that no fault is in the list."""
        return "no fault was found" if self.examined else "nothing was examined, so no fault could be found"

    def __str__(self) -> str:
        lines = [str(finding) for finding in self] or [self.verdict_if_empty]
        lines += [f"notice: {notice.layer}: {notice.what}" for notice in self.notices]
        lines += [f"examined: {', '.join(self.examined)}"] * bool(self.examined)
        return "\n".join([*lines, *(f"not examined: {missing}" for missing in self.unexamined)])

    def title_shown(self) -> str:
        """How many faults there are, what was examined and what was not."""
        parts = [f"{len(self):,} likely faults" if self else self.verdict_if_empty]
        for label, kinds in (("examined", self.examined), ("not examined", self.unexamined)):
            parts += [f"{label}: {', '.join(kind.partition(':')[0] for kind in kinds)}"] * bool(kinds)
        return "; ".join(parts)

    def rows_shown(self) -> Rows:
        """One row for each finding and each notice."""
        told = [*((one, one.what) for one in self), *((one, f"notice: {one.what}") for one in self.notices)]
        rows = ([(one.layer, "" if one.since is None else f"{one.since}", what, one.remedy)] for one, what in told)
        return ("layer", "since tick", "what", "try"), rows, len(told)


_ADVICE = {
    "nonfinite": (
        "One NaN or infinity makes all weights NaN at the next step.",
        "a smaller learning rate, gradient clipping, no log or division of values that can be zero; also check the inputs",
    ),
    "never ran": (
        "A layer that is not called does not contribute to the result and learns nothing.",
        "call the module itself in forward, or remove it",
    ),
    "dead": (
        "Nothing passes through them and no gradient comes back, so they seldom recover.",
        "a smaller learning rate, a fresh initialisation with biases at zero, or a leaky activation",
    ),
    "saturated": (
        "There the curve is flat, so hardly any gradient passes.",
        "smaller initial weights, normalisation before the activation, or a smaller learning rate",
    ),
    "vanishing": (
        "Layers near the input learn little or nothing.",
        "normalisation layers, residual connections, ReLU in place of saturating activations, initialisation by fan-in",
    ),
    "exploding": (
        "No learning rate suits both ends of the net: what suits one end is far too much for the other.",
        "normalisation layers, smaller initial weights, gradient clipping",
    ),
    "outliers": (
        "They make numbers of few bits coarse, and one feature decides what the next layer sees.",
        "find the weight that is far too large; weight decay, normalisation, or keeping these features in 16 bits",
    ),
    "frozen": (
        "The layer learns nothing.",
        "give its parameters to the optimizer; if it is frozen on purpose, set requires_grad=False",
    ),
    "too large": ("The weights change at random rather than improve.", "a learning rate smaller by as much, or a warm-up"),
    "too small": ("The layer hardly learns.", "a larger learning rate, for this layer at least"),
}
"""By kind of fault, why it matters and what to try first."""


def fault(kind: str, layer: str, what: str, since: int | None = None) -> Finding:
    """A finding of a kind that is known."""
    return Finding(layer, what, *_ADVICE[kind], since)


def gradients_by_depth(norms: Mapping[str, float], since: int | None = None) -> Iterator[Finding]:
    """At most one finding: that gradients of the first layers are much smaller, or larger, than those of the last.

    The medians of the first and of the last quarter are compared, not single layers: within a block the gradients of keys of
    attention may be smaller by orders of magnitude, and those of embeddings larger, in health.

    Args:
        norms: by layer, in network order.
        since: the tick since when.

    >>> norms = {"0": 1e-9, "2": 1e-6, "4": 1e-3, "6": 1.0}
    >>> [(finding.layer, finding.what) for finding in gradients_by_depth(norms)]
    [('0', 'gradients vanish on their way back: their norm is 1.0e+00 at 6 and 1.0e-09 here')]
    """
    known = [(norm, name) for name, norm in norms.items() if math.isfinite(norm)]
    if len(known) < 2:
        return
    quarter, third = max(len(known) // 4, 1), max(len(known) // 3, 1)
    first, last = (median(norm for norm, _ in part) for part in (known[:quarter], known[-quarter:]))
    early, late = known[:third], known[-third:]  # in which the layer is named
    if first < GRADIENT_DECAY * last:
        (low, where), (high, other) = min(early), max(late)
        what = f"gradients vanish on their way back: their norm is {high:.1e} at {other} and {low:.1e} here"
        yield fault("vanishing", where, what, since)
    elif last < GRADIENT_DECAY * first:
        (high, where), (low, other) = max(early), min(late)
        what = f"gradients explode on their way back: their norm is {low:.1e} at {other} and {high:.1e} here"
        yield fault("exploding", where, what, since)


def usual_growth(start: int, end: int) -> float:
    """The sum of the updates, relative to the weights before each, of weights that grow from zero in equal steps.

    It is 1 + 1/2 + 1/3 and so on, for the steps from `start`, counted from 0, to before `end`. A fresh small head, or an adapter
    that begins at zero, has such updates in health, and they are far above `UPDATE_LIMITS` in the first steps.

    >>> usual_growth(0, 4), usual_growth(3, 4)
    (1.8333333333333333, 0.3333333333333333)
    """
    return sum(1 / step for step in range(max(start, 1), end))


def is_idle(idle: Tensor, observations: int, elements: int) -> Tensor:
    """Whether units that were idle for so many of all observations, with so many elements of each unit, have died on the way.

    >>> import torch
    >>> is_idle(torch.tensor([60, 5, 0]), observations=100, elements=6400)
    tensor([ True, False, False])
    """
    least, many, share = RECENT
    enough = min(many / max(elements / max(observations, 1), 1), share * observations)
    return (idle >= least) & (idle >= enough)


def is_massive(largest: float, typical: float) -> bool:
    """Whether a magnitude is an outlier among values of this typical magnitude.

    >>> is_massive(2000.0, 0.5), is_massive(2000.0, 50.0), is_massive(5.0, 1e-6), is_massive(2000.0, 0.0)
    (True, False, False, False)
    """
    above, times = MASSIVE
    return typical > 0 and largest > above and largest >= times * typical


def relative_slope(mean: Tensor, square: Tensor, curve: str) -> Tensor:
    """The mean slope of a "tanh" or "sigmoid", relative to its steepest, from the means of its outputs and of their squares.

    >>> import torch
    >>> half, one = torch.tensor(0.5), torch.tensor(1.0)
    >>> relative_slope(half, half.square(), "sigmoid"), relative_slope(one, one, "tanh")
    (tensor(1.), tensor(0.))
    """
    return 1 - square if curve == "tanh" else 4 * (mean - square)  # tanh' = 1 - tanh^2; sigmoid' = sigmoid - sigmoid^2, at most 1/4


def shown_outliers(largest: float, typical: float, more: int) -> str:
    """How far outliers stick out, and in how many more layers they do."""
    what = f"outlier features: the largest magnitude is {largest:.2g}, {largest / typical:,.0f} times the typical {typical:.2g}"
    return what + (f", and in {more} more layers" if more else "")


def shown_range(ratio: float) -> str:
    """The size of an update, with the usual range."""
    low, high = UPDATE_RANGE
    return f"{ratio:.1e} of their norm; {low:.0e} to {high:.0e} is usual"
