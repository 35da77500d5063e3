"""The largest and the smallest elements, and where they came from."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from reducers.core.patterns import arrange, validate
from reducers.core.reducer import Reducer
from reducers.core.states import check_states, require_state, to_device
from reducers.errors import ArgumentError
from reducers.exemplars.slots import after, first, moved, sample_inputs
from reducers.kernels.binning import kept_shape
from reducers.kernels.chunks import CHUNK
from reducers.kernels.precision import comparable, infinite_to_nan, nan_capable
from reducers.state import Result, State

__all__ = ["BottomK", "TopK"]


@dataclass(frozen=True)
class _Ends(Reducer):
    """The k elements at one end, as `TopK` says."""

    pattern: str = "... ->"
    k: int = 10

    ordered: ClassVar[bool] = True
    largest: ClassVar[bool] = True

    def __post_init__(self) -> None:
        validate(self.pattern)
        if not isinstance(self.k, int) or self.k < 1:
            raise ArgumentError(f"{type(self).__name__} takes a positive whole number as k and got {self.k!r}")

    def update(self, state: State, *xs: Tensor) -> State:
        x, ids, payload = sample_inputs(self, xs)
        rows, places = self._rows(x)
        if x.numel() == 0:
            return state
        return self.merge(to_device(state, x.device), self._lift(x, rows, places, ids, payload))

    def update_masked(self, state: State, x: Tensor, mask: Tensor) -> State:
        return self.update(state, torch.where(mask, nan_capable(x), torch.nan))

    def merge(self, a: State, b: State) -> State:
        if not a or not b:
            return a or b
        check_states(self, a, b)
        b = to_device(b, a["observations"].device)
        a_slots, b_slots = ({key: value for key, value in state.items() if key != "observations"} for state in (a, b))
        slots = first(after(a_slots, b_slots, a["observations"]), "value", self.k, self.largest)
        return {**slots, "observations": a["observations"] + b["observations"]}

    def compute(self, state: State) -> Result:
        require_state(self, state)
        slots = {key: value.clone() for key, value in state.items() if key != "observations"}
        return {**slots, "value": infinite_to_nan(slots["value"])}

    def _rows(self, x: Tensor) -> tuple[Tensor, Callable[[Tensor], Tensor]]:
        """The reduced elements along one last axis, and what turns indices along it into flat places in `x`."""
        arranged, axes = arrange(x, self.pattern)
        if len(axes) == arranged.ndim == x.ndim:
            return arranged.reshape(-1), torch.clone
        kept = [axis for axis in range(arranged.ndim) if axis not in axes]
        elements = 1
        for axis in axes:  # -1 cannot be told where there are no elements
            elements *= arranged.shape[axis]
        rows = arranged.permute(*kept, *axes).reshape(*kept_shape(arranged, axes), elements)
        return rows, lambda chosen: self._places(chosen, x, [arranged.shape[axis] for axis in axes], [*kept, *axes])

    def _places(self, chosen: Tensor, x: Tensor, sizes: list[int], order: list[int]) -> Tensor:
        """Flat places in `x` of what was chosen from its rows, without an index for every element of `x`."""
        coordinates: list[Tensor] = []
        for size in reversed(sizes):
            coordinates.insert(0, chosen % size)
            chosen = chosen // size
        for axis, size in reversed(list(enumerate(chosen.shape[:-1]))):
            number = torch.arange(size, device=x.device)
            coordinates.insert(0, number.reshape(-1, *(1,) * (chosen.ndim - 1 - axis)).expand(chosen.shape))
        places, stride = torch.zeros_like(chosen), 1
        for axis in reversed(range(x.ndim)):
            along = torch.arange(x.shape[axis], device=x.device) * stride
            along = along.reshape(-1, *(1,) * (x.ndim - 1 - axis)).expand(x.shape)
            places = places + arrange(along, self.pattern)[0].permute(order)[tuple(coordinates)]
            stride *= x.shape[axis]
        return places

    def _lift(
        self, x: Tensor, rows: Tensor, places: Callable[[Tensor], Tensor], ids: Tensor | None, payload: Tensor | None
    ) -> State:
        rows = comparable(rows, type(self).__name__)
        rows = rows.to(torch.uint8) if rows.dtype is torch.bool else rows
        chosen = _first_indices(self._usable(rows), self.k, self.largest)
        value = rows.gather(-1, chosen)
        found = torch.isfinite(value)
        position = torch.where(found, places(chosen), -1)
        sample = position.clamp(min=0) // (x[0].numel() if x.ndim else 1)
        slots = {
            "value": torch.where(found, value, self._worst(value.dtype)),
            "step": torch.where(found, 0, -1),
            "position": position,
            "id": torch.full_like(position, -1) if ids is None else torch.where(found, ids[sample], -1),
        }
        if payload is not None:
            there = found.reshape(*found.shape, *(1,) * (payload.ndim - 1))
            slots["payload"] = moved(payload, lambda part: torch.where(there, part[sample], part.new_zeros(())))
        missing = self.k - chosen.shape[-1]
        if missing > 0:
            slots = {key: self._padded(key, value, found.ndim - 1, missing) for key, value in slots.items()}
        slots = {key: value.contiguous() for key, value in slots.items()}
        return {**slots, "observations": torch.ones((), dtype=torch.int64, device=x.device)}

    def _usable(self, rows: Tensor) -> Tensor:
        """`rows` with what is not finite where it cannot be chosen."""
        if not rows.is_floating_point():
            return rows
        if rows.device.type == "cpu" and not torch.compiler.is_compiling() and torch.isfinite(rows.sum(dtype=torch.float64)).item():
            return rows
        return torch.where(torch.isfinite(rows), rows, self._worst(rows.dtype))

    def _worst(self, dtype: torch.dtype) -> float:
        if dtype.is_floating_point:
            return -torch.inf if self.largest else torch.inf
        return torch.iinfo(dtype).min if self.largest else torch.iinfo(dtype).max

    def _padded(self, key: str, value: Tensor, axis: int, missing: int) -> Tensor:
        fill = {"value": self._worst(value.dtype), "payload": 0}.get(key, -1)
        shape = [*value.shape[:axis], missing, *value.shape[axis + 1 :]]
        return torch.cat((value, torch.full(shape, fill, dtype=value.dtype, device=value.device)), dim=axis)


@dataclass(frozen=True)
class TopK(_Ends):
    """The k largest finite elements, each with the step, sample and place it came from, and a payload if wanted.

    `update(state, x, ids, payload)`: `ids` and `payload` may be left out. The first axis of `x` is that of its samples. Equal
    elements are ranked by time, then by place, so that the result does not depend on how states were merged.

    A step is the number of the observation, from 0, among those with elements; where states are merged, those of the second
    count on from the first. Ids tell samples apart whatever was merged.

    Args:
        k: how many elements to keep for each kept position.
        x: the observation, as the pattern names its axes.
        ids: integers, one for each sample.
        payload: of shape (samples, ...): the row of the sample is kept with each of its elements. Always the same shape, and in
            all observations or none.

    Returns:
        Tensors of shape (*kept axes, k), best first: `value` in the dtype of the input (bool as uint8, float8 as float32);
        `step`, `position` (flat, row by row, in its observation: `torch.unravel_index(position, x.shape)` gives the axes), `id`
        (-1 where none was given), all int64; `payload` of shape (*kept axes, k, ...). Slots for which there were no elements have
        step and position -1, value NaN (for integers the least), and a payload of zeros.

    Raises:
        ArgumentError: `k` is not a positive whole number.
        DTypeError: the input is complex, which has no order, or uint64.
        ReducerTypeError, StateMismatchError: ids or payload do not fit the samples.

    >>> import torch
    >>> top = TopK(k=2)
    >>> state = top.update({}, torch.tensor([[1.0, 9.0], [2.0, 3.0]]), torch.tensor([70, 71]))
    >>> result = top.compute(top.update(state, torch.tensor([[5.0, 0.0]]), torch.tensor([72])))
    >>> {name: value.tolist() for name, value in result.items()}
    {'value': [9.0, 5.0], 'step': [0, 1], 'position': [1, 0], 'id': [70, 72]}
    """


@dataclass(frozen=True)
class BottomK(_Ends):
    """The k smallest finite elements; else as `TopK`.

    Returns:
        What `TopK` does, smallest first.

    >>> import torch
    >>> bottom = BottomK("b c -> c", k=1)
    >>> bottom.compute(bottom.update({}, torch.tensor([[1.0, 9.0], [2.0, 3.0]])))["value"]
    tensor([[1.],
            [3.]])
    """

    largest: ClassVar[bool] = False


def _first_indices(rows: Tensor, k: int, largest: bool) -> Tensor:
    """Indices of the k greatest (least) elements along the last axis, best first, of equal ones the earlier; fewer if there are."""
    eager = rows.device.type == "cpu" and not torch.compiler.is_compiling()
    if eager and rows.shape[-1] >= 2 * CHUNK >= 8 * k:
        starts = range(0, rows.shape[-1], CHUNK)
        parts = [_first_indices(rows[..., start : start + CHUNK], k, largest) + start for start in starts]
        survivors = torch.cat(parts, dim=-1)
        return survivors.gather(-1, _first_indices(rows.gather(-1, survivors), k, largest))
    length = rows.shape[-1]
    k = min(k, length)
    value, index = rows.topk(k, dim=-1, largest=largest, sorted=False)
    edge = value.amin(-1, keepdim=True) if largest else value.amax(-1, keepdim=True)
    if eager and torch.count_nonzero(rows >= edge if largest else rows <= edge).item() == value.numel():
        index = index.sort(dim=-1).values
        return index.gather(-1, rows.gather(-1, index).sort(dim=-1, descending=largest, stable=True).indices)
    # topk is free to choose among equals: those at the edge are chosen anew, by place
    tied = torch.where(rows == edge, torch.arange(length, device=rows.device), length)
    index = torch.cat((torch.where(value == edge, length, index), tied.topk(k, dim=-1, largest=False).values), dim=-1)
    index = index.sort(dim=-1).values
    there = index < length
    value = rows.gather(-1, index.clamp(max=length - 1))
    order = value.sort(dim=-1, descending=largest, stable=True).indices
    missing = (~there).gather(-1, order).to(torch.uint8)
    return index.gather(-1, order.gather(-1, missing.sort(dim=-1, stable=True).indices[..., :k]))
