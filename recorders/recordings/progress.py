"""Progress: what a monitor needs, beside its states, to go on bit for bit as if it had not been saved and loaded."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from torch import Tensor

from reducers import State

__all__ = ["PendingRows", "Progress"]


@dataclass(frozen=True)
class PendingRows:
    """Observations of some leaves that wait to be reduced together.

    Attributes:
        paths: the paths of the leaves.
        layout: how a compiled graph packed their lifts; None if they are observations.
        rows: those that are not reduced yet, one tensor for each leaf or pack, stacked along a first axis.
        start: how many observations before them are in the states already.
        capacity: the number of observations at which they are reduced.
    """

    paths: tuple[str, ...]
    layout: str | None
    rows: tuple[Tensor, ...]
    start: int
    capacity: int


@dataclass(frozen=True)
class Progress:
    """What was recorded so far, as a monitor keeps it.

    Attributes:
        before: the states by leaf without what is pending.
        counts: the number of observations in these states, by leaf.
        merged: the number of observations that other monitors or recordings have brought in.
        eligible: how many calls `every` has counted, by stream, less one.
        pending: observations that are not in the states yet.
        stacked: the leaves whose states are rows of a stack of several monitors.
    """

    before: Mapping[str, State] = field(default_factory=dict)
    counts: Mapping[str, int] = field(default_factory=dict)
    merged: int = 0
    eligible: Mapping[str, int] = field(default_factory=dict)
    pending: tuple[PendingRows, ...] = ()
    stacked: tuple[str, ...] = ()
