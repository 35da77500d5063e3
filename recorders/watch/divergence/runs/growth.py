"""Growth: how far two runs are apart at a step."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Growth:
    """How far two runs are apart at a step, relative to their size; NaN if it is not known.

    Attributes:
        step: the step.
        output: what the net returns; if that was not recorded, the layer whose output differs most.
        gradient: the gradients of all parameters, as one vector.
        weight: all parameters before the step.
    """

    step: int
    output: float
    gradient: float
    weight: float
