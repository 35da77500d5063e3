"""Findings as data: what a fault is, how bad it must be to be named, and what is known about each kind."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

__all__ = ["DEAD_SHARE", "GRADIENT_DECAY", "SATURATED_SLOPE", "UPDATE_RANGE", "Finding", "Findings", "fault", "shown_range"]

UPDATE_RANGE = (1e-4, 1e-2)
"""The usual size of an update relative to the weights: within a factor of ten of 1e-3.

Rule of thumb by A. Karpathy, course CS231n, "Neural Networks Part 3", section "Ratio of weights:updates".
"""

GRADIENT_DECAY = 1e-4
"""The smallest accepted ratio between the gradient norms of two layers."""

DEAD_SHARE = 0.2
"""The largest accepted share of dead units in a layer.

A few are dead from the start in healthy nets with ReLU and the initialisation of He et al. (arXiv:1502.01852), as in the healthy
net of `examples/find_faults.py`, and more in deep nets, as in its net of 12 layers; tests say that neither raises an alarm.
"""

SATURATED_SLOPE = 0.05
"""A unit is saturated if its mean slope is below this share of the steepest slope."""


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


class Findings(list[Finding]):
    """A list of likely faults, and what could not be examined.

    Attributes:
        unexamined: each kind of fault that was not looked for, with what to record for it.
    """

    def __init__(self, found: Iterable[Finding], unexamined: Iterable[str]) -> None:
        super().__init__(found)
        self.unexamined = tuple(unexamined)

    def __str__(self) -> str:
        lines = [str(finding) for finding in self] or ["no fault was found"]
        return "\n".join([*lines, *(f"not examined: {missing}" for missing in self.unexamined)])


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
    "frozen": (
        "The layer learns nothing, which is right only if it was frozen on purpose.",
        "give its parameters to the optimizer, set requires_grad, and use its output in the loss",
    ),
    "too large": ("The weights change at random rather than improve.", "a learning rate smaller by as much, or a warm-up"),
    "too small": ("The layer hardly learns.", "a larger learning rate, for this layer at least"),
}
"""By kind of fault, why it matters and what to try first."""


def fault(kind: str, layer: str, what: str, since: int | None = None) -> Finding:
    """A finding of a kind that is known."""
    return Finding(layer, what, *_ADVICE[kind], since)


def shown_range(ratio: float) -> str:
    """The size of an update, with the usual range."""
    low, high = UPDATE_RANGE
    return f"{ratio:.1e} of their norm; {low:.0e} to {high:.0e} is usual"
