"""Activity of units, dead units, and sparsity."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from reducers.core.constants import is_number
from reducers.core.counted import COUNTS
from reducers.core.fields import Add, Field, columns_of
from reducers.core.states import to_device
from reducers.core.statistic import Statistic
from reducers.errors import ArgumentError
from reducers.kernels.chunks import pieces
from reducers.kernels.dispatch import sweep
from reducers.kernels.precision import count_along, count_if, counts_of, finite, real
from reducers.state import Result, State

_FIELDS = {**COUNTS, "active": Add("active")}
_COLUMNS = columns_of(_FIELDS)
_PER_BATCH = {**_FIELDS, "deaths": Add(), "observations": Add()}


@dataclass(frozen=True)
class Activity(Statistic):
    """Share of active elements (`|x| > eps`) of each unit, and which units were never active.

    A unit is one position of the kept axes: with the default pattern, a channel of a batch-first tensor. NaN and infinite
    elements are excluded. A unit is *dead* if it was observed but never active in any observation. The *death rate* treats each
    observation separately: a unit that is active in one of ten batches is dead in the other nine.

    Args:
        eps: largest magnitude that still counts as zero, in the unit of the data.
        death: also return the death rate. It depends on how the data are split into observations.

    Returns:
        `rate`: float64, active share of the finite elements of each unit, NaN if there are none; `dead`: bool per unit; with
        `death=True` also `death`: float64, 0-d, mean over observations of the share of units that are dead in one observation.

    Raises:
        ArgumentError: `eps` is negative or not a number.

    >>> import torch
    >>> activity = Activity(death=True)
    >>> state = activity.update({}, torch.tensor([[0.0, 2.0, 0.0], [0.0, 0.0, 0.0]]))
    >>> result = activity.compute(activity.update(state, torch.tensor([[0.0, 0.0, 3.0], [0.0, 1.0, 1.0]])))
    >>> result["rate"].tolist(), result["dead"].tolist(), result["death"].item()
    ([0.0, 0.5, 0.5], [True, False, False], 0.5)
    """

    pattern: str = "b c ... -> c"
    eps: float = 1e-8
    death: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        _check_eps(self.eps, "Activity")

    @property
    def divisible(self) -> bool:
        return not self.death

    @property
    def fields(self) -> Mapping[str, Field]:  # type: ignore[override]
        return _PER_BATCH if self.death else _FIELDS

    @property
    def threshold(self) -> float:
        return self.eps

    def lift(self, x: Tensor, axes: tuple[int, ...]) -> State:
        if not self.death:
            return _lift_counts(x, axes, self.threshold)
        state = _counts_of_whole(x, axes, self.threshold)
        observed, dead = _observed_and_dead(state)
        units = observed.sum()
        deaths = real(dead.sum()) / real(units.clamp(min=1))
        return {**state, "deaths": deaths, "observations": (units > 0).to(torch.int64)}

    def read(self, state: State) -> Result:
        observed, dead = _observed_and_dead(state)
        result = {"rate": torch.where(observed, real(state["active"]) / real(state["count"]), torch.nan), "dead": dead}
        if self.death:
            result["death"] = state["deaths"] / real(state["observations"])
        return result


def _observed_and_dead(state: State) -> tuple[Tensor, Tensor]:
    observed = state["count"] > 0
    return observed, observed & (state["active"] == 0)


@dataclass(frozen=True)
class Sparsity(Statistic):
    """Share of the finite elements that are zero, or within `eps` of it: `|x| <= eps`.

    Args:
        eps: largest magnitude that still counts as zero, in the unit of the data.

    Returns:
        float64 in [0, 1], in the shape of the kept axes; NaN if there are no finite elements.

    Raises:
        ArgumentError: `eps` is negative or not a number.

    >>> import torch
    >>> sparsity = Sparsity("b c -> c")
    >>> sparsity.compute(sparsity.update({}, torch.tensor([[0.0, 2.0], [0.0, 0.0]])))
    tensor([1.0000, 0.5000], dtype=torch.float64)
    """

    fields: ClassVar[Mapping[str, Field]] = _FIELDS

    eps: float = 0.0

    def __post_init__(self) -> None:
        super().__post_init__()
        _check_eps(self.eps, "Sparsity")

    @property
    def threshold(self) -> float:
        return self.eps

    def lift(self, x: Tensor, axes: tuple[int, ...]) -> State:
        return _lift_counts(x, axes, self.threshold)

    def read(self, state: State) -> Tensor:
        count = state["count"]
        return torch.where(count > 0, real(count - state["active"]) / real(count), torch.nan)


@dataclass(frozen=True)
class Idle(Statistic):
    """For how many observations, up to the last, each unit was not active (`|x| > eps` in none of its elements).

    So a unit that died on the way is known, where `Activity` tells only of units that were never active. A unit of which an
    observation has no finite element counts as active in it. Of an observation of which a mask selects nothing, such as a batch of
    padding, or one without a sample of a group, nothing is counted.

    Args:
        eps: largest magnitude that still counts as zero, in the unit of the data.

    Returns:
        `idle`: int64 per unit, from 0 to `observations`; `observations`: int64, 0-d; `elements`: int64, 0-d, how many elements of
        each unit these had.

    Raises:
        ArgumentError: `eps` is negative or not a number.

    >>> import torch
    >>> idle = Idle("b c -> c")
    >>> state = idle.update({}, torch.tensor([[0.0, 2.0, 0.0], [0.0, 0.0, 3.0]]))
    >>> idle.compute(idle.update(state, torch.tensor([[0.0, 0.0, 3.0]])))["idle"]
    tensor([2, 1, 0])
    """

    ordered: ClassVar[bool] = True
    row_columns: ClassVar[frozenset[str]] = frozenset(_COLUMNS.values())

    pattern: str = "b c ... -> c"
    eps: float = 1e-8

    def __post_init__(self) -> None:
        super().__post_init__()
        _check_eps(self.eps, "Idle")

    @property
    def threshold(self) -> float:
        return self.eps

    @property
    def divisible(self) -> bool:
        return False  # all parts of an observation are of one time

    @property
    def batchable(self) -> bool:
        return True

    def update_all(self, state: State, xs: Tensor) -> State:
        if xs.numel() == 0:
            return state
        each = self._lift_each(xs)
        units = each["idle"][0].numel()
        return self._after(to_device(state, xs.device), each["idle"], each["nonfinite"], xs.numel() // units)

    def update_rows(self, state: State, rows: State) -> State:
        elements = (rows["count"] + rows["nonfinite"])[..., None].flatten(1)[:, :1].sum()  # there may be no kept axis, or no unit
        return self._after(state, _is_idle(rows).to(torch.int64), rows["nonfinite"], elements)

    def _after(self, state: State, idle: Tensor, nonfinite: Tensor, elements: int | Tensor) -> State:
        """Return the state after several observations, each along the first axis; `elements` is how many a unit has in all."""
        trailing = idle.flip(0).cumprod(dim=0).sum(dim=0)
        count = trailing.new_full((), len(idle))
        elements = elements if isinstance(elements, Tensor) else torch.full_like(count, elements)
        return self.merge(state, {"observations": count, "elements": elements, "idle": trailing, "nonfinite": nonfinite.sum(dim=0)})

    def lift(self, x: Tensor, axes: tuple[int, ...]) -> State:
        counts = _counts_of_whole(x, axes, self.threshold)
        idle = _is_idle(counts)
        one = torch.ones((), dtype=torch.int64, device=x.device)
        elements = one * count_along(x, axes)
        return {"observations": one, "elements": elements, "idle": idle.to(torch.int64), "nonfinite": counts["nonfinite"]}

    def lift_masked(self, x: Tensor, mask: Tensor, axes: tuple[int, ...]) -> State:
        state, selected = super().lift_masked(x, mask, axes), mask.sum(dim=axes)
        return {**state, "observations": (selected > 0).any().to(torch.int64), "elements": selected.max()}

    def join(self, a: State, b: State) -> State:
        idle = torch.where(b["idle"] == b["observations"], a["idle"] + b["idle"], b["idle"])
        return {"observations": a["observations"] + b["observations"], "elements": a["elements"] + b["elements"], "idle": idle}

    def read(self, state: State) -> Result:
        return dict(state)


def _is_idle(counts: State) -> Tensor:
    return (counts["count"] > 0) & (counts["active"] == 0)


def _check_eps(eps: float, caller: str) -> None:
    if not is_number(eps) or not eps >= 0:
        raise ArgumentError(f"{caller} takes eps from 0 up and got {eps!r}")


def _counts_of_whole(x: Tensor, axes: tuple[int, ...], eps: float) -> State:
    """Return the counts of an observation of any size, by a kernel or in parts."""
    swept = sweep((tuple(_COLUMNS.items()), eps), x, axes, {})
    if swept is not None:
        return swept
    first, *others = (_lift_counts(part, axes, eps) for part in pieces(x, axes))
    for other in others:
        first = {key: value.add_(other[key]) for key, value in first.items()}
    return {key: value.contiguous() for key, value in first.items()}


def _lift_counts(x: Tensor, axes: tuple[int, ...], eps: float) -> State:
    exact = x.is_complex() or (x.is_floating_point() and x.dtype.itemsize >= 4)  # the magnitude of int8 -128 overflows
    x, mask = finite(x if exact else real(x))
    return {**counts_of(x, mask, axes), "active": count_if(torch.gt, x.abs(), eps, axes)}
