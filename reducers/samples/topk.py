"""The largest and the smallest elements, with their step, position and sample id."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from reducers.core.checks import check_shape
from reducers.core.overrides import Shortcut
from reducers.core.patterns import arrange, validate
from reducers.core.reducer import Reducer, check_size
from reducers.core.states import check_states, require_state, to_device
from reducers.errors import StateMismatchError
from reducers.kernels.binning import kept_shape
from reducers.kernels.chunks import CHUNK
from reducers.kernels.counting import device_best
from reducers.kernels.precision import can_read_values, comparable, count_nonfinite, counts_of, nan_capable, positive_zero
from reducers.samples.slots import apply_indexing, check_slots, merge_slots, pad_slots, sample_inputs
from reducers.state import Nonfinite, Result, State


@dataclass(frozen=True)
class _ExtremeElements(Reducer):
    """Shared implementation of `TopK` and `BottomK`."""

    pattern: str = "... ->"
    k: int = 10

    ordered: ClassVar[bool] = True
    largest: ClassVar[bool] = True
    merges_on_device: ClassVar[bool] = True  # whether a kernel may do what `merge` does
    shortcuts: ClassVar[tuple[Shortcut, ...]] = (*Reducer.shortcuts, Shortcut("merges_on_device", False, frozenset({"merge"})))

    def __post_init__(self) -> None:
        validate(self.pattern)
        check_size(self, "k")

    def update(self, state: State, *xs: Tensor) -> State:
        x, ids, payload = sample_inputs(self, xs)
        if payload is not None and "payload" in state and payload.shape[1:] != state["payload"].shape[state["value"].ndim :]:
            shapes = f"{tuple(state['payload'].shape[state['value'].ndim :])} so far and now met {tuple(payload.shape[1:])}"
            raise StateMismatchError(f"{self!r} keeps payloads of shape {shapes}: pad them to one shape")
        if (
            self.merges_on_device and payload is None and x.numel() and "(" not in self.pattern
        ):  # without which the arranged tensor is a view
            state = to_device(state, x.device)
            chosen = device_best(x, lambda whole: arrange(whole, self.pattern), self.k, self.largest, ids, state)
            if chosen is not None:
                return chosen
        rows, to_positions = self._rows(x)
        if x.numel() == 0:
            return state
        return self.merge(to_device(state, x.device), self._lift(x, rows, to_positions, ids, payload))

    def update_masked(self, state: State, x: Tensor, mask: Tensor) -> State:
        updated = self.update(state, torch.where(mask, nan_capable(x), torch.nan))
        if updated is state:
            return state
        (arranged, axes), (mask, _) = arrange(x, self.pattern), arrange(mask, self.pattern)
        nonfinite = count_nonfinite(arranged, axes, mask)  # what the mask excludes does not count
        return {**updated, "nonfinite": state["nonfinite"].to(x.device) + nonfinite if state else nonfinite}

    def merge(self, a: State, b: State) -> State:
        if not a or not b:
            return a or b
        check_states(self, a, b)
        slots, later = ({key: value for key, value in one.items() if key != "nonfinite"} for one in (a, b))
        merged = merge_slots(self, slots, later, by="value", descending=self.largest, k=self.k)
        return {**merged, "nonfinite": a["nonfinite"] + b["nonfinite"].to(a["nonfinite"].device)}

    def _check(self, state: State) -> None:
        check_slots(self, {key: value for key, value in state.items() if key != "nonfinite"}, "value", self.k)
        check_shape(self, state, "nonfinite", state["step"].shape[:-1], torch.int64)

    def nonfinite(self, state: State) -> Nonfinite | None:
        return Nonfinite(state["nonfinite"].sum(), None) if state else None

    def compute(self, state: State) -> Result:
        require_state(self, state)
        slots = {key: value.clone() for key, value in state.items() if key not in ("observations", "nonfinite")}
        value = slots["value"]
        if value.is_floating_point():  # an empty slot may be one of integers
            value = torch.where(slots["step"] < 0, torch.nan, positive_zero(value))
        return {**slots, "value": value}

    def _rows(self, x: Tensor) -> tuple[Tensor, Callable[[Tensor], Tensor]]:
        """Return the reduced elements along one last axis, and a function from indices along it to flat positions in `x`."""
        arranged, axes = arrange(x, self.pattern)
        if len(axes) == arranged.ndim == x.ndim:
            return arranged.reshape(-1), torch.clone
        kept = [axis for axis in range(arranged.ndim) if axis not in axes]
        elements = 1
        for axis in axes:  # reshape cannot infer -1 if there are no elements
            elements *= arranged.shape[axis]
        rows = arranged.permute(*kept, *axes).reshape(*kept_shape(arranged, axes), elements)
        return rows, lambda chosen: self._positions(chosen, x, [arranged.shape[axis] for axis in axes], [*kept, *axes])

    def _positions(self, chosen: Tensor, x: Tensor, sizes: list[int], order: list[int]) -> Tensor:
        """Return the flat positions in `x` of elements chosen from its rows, without an index tensor of the size of `x`."""
        coordinates: list[Tensor] = []
        for size in reversed(sizes):
            coordinates.insert(0, chosen % size)
            chosen = chosen // size
        for axis, size in reversed(list(enumerate(chosen.shape[:-1]))):
            index = torch.arange(size, device=x.device)
            coordinates.insert(0, index.reshape(-1, *(1,) * (chosen.ndim - 1 - axis)).expand(chosen.shape))
        positions, stride = torch.zeros_like(chosen), 1
        for axis in reversed(range(x.ndim)):
            offset = torch.arange(x.shape[axis], device=x.device) * stride
            offset = offset.reshape(-1, *(1,) * (x.ndim - 1 - axis)).expand(x.shape)
            positions = positions + arrange(offset, self.pattern)[0].permute(order)[tuple(coordinates)]
            stride *= x.shape[axis]
        return positions

    def _lift(
        self, x: Tensor, rows: Tensor, to_positions: Callable[[Tensor], Tensor], ids: Tensor | None, payload: Tensor | None
    ) -> State:
        rows = comparable(rows, type(self).__name__)
        rows = rows.to(torch.uint8) if rows.dtype is torch.bool else rows
        good = _finite_mask(rows)
        usable = rows if good is None else torch.where(good, rows, self._worst(rows.dtype))  # these are chosen last
        chosen = _best_indices(usable, self.k, self.largest)
        value = rows.gather(-1, chosen)
        is_finite = torch.isfinite(value)
        position = torch.where(is_finite, to_positions(chosen), -1)
        sample = position.clamp(min=0) // (x[0].numel() if x.ndim else 1)
        slots = {
            "value": torch.where(is_finite, value, self._worst(value.dtype)),
            "step": torch.where(is_finite, 0, -1),
            "position": position,
            "id": torch.full_like(position, -1) if ids is None else torch.where(is_finite, ids[sample], -1),
        }
        if payload is not None:
            mask = is_finite.reshape(*is_finite.shape, *(1,) * (payload.ndim - 1))
            slots["payload"] = apply_indexing(payload, lambda part: torch.where(mask, part[sample], part.new_zeros(())))
        slots = pad_slots(slots, self.k, {"value": self._worst(value.dtype), "payload": 0})
        slots = {key: value.contiguous() for key, value in slots.items()}
        nonfinite = counts_of(rows, good, (rows.ndim - 1,))["nonfinite"].contiguous()
        return {**slots, "observations": torch.ones((), dtype=torch.int64, device=x.device), "nonfinite": nonfinite}

    def _worst(self, dtype: torch.dtype) -> float:
        if dtype.is_floating_point:
            return -torch.inf if self.largest else torch.inf
        return torch.iinfo(dtype).min if self.largest else torch.iinfo(dtype).max


@dataclass(frozen=True)
class TopK(_ExtremeElements):
    """The k largest finite elements, each with its step, position, sample id and optional payload.

    `update(state, x, ids, payload)`: `ids` and `payload` are optional. The first axis of `x` enumerates its samples. Equal
    elements are ranked by step, then by position, so the result does not depend on the order of merges.

    The step is the index of the observation among those that are not empty; if states are merged, the steps of the second
    continue after the first. Ids identify samples independently of merging; `Masked`, `GroupBy` and `Prefilter` pass on neither ids
    nor a payload.

    Args:
        k: number of elements to keep per kept position.
        x: the observation, with the axes that the pattern names.
        ids: integers, one per sample.
        payload: of shape (samples, ...); each element is stored with the row of its sample. It must always have the same row
            shape, and must be given for all observations or none.

    Returns:
        Tensors of shape `(*kept axes, k)`, best first: `value` in the dtype of the input (bool as uint8, float8 as float32;
        float64 if integers meet floats); `step`, `position` (flat index into the observation, in row-major order, as for
        `torch.unravel_index(position, x.shape)`) and `id` (-1 if none was given), all int64; `payload` of shape
        `(*kept axes, k, ...)`. Empty slots have step and position -1, value NaN (for integers the smallest value of the dtype; the
        largest for `BottomK`), and a payload of zeros.

    Raises:
        ArgumentError: `k` is not a positive integer.
        DTypeError: the input is complex, which has no order, or uint64.
        ReducerTypeError, StateMismatchError: ids or payload do not match the samples.

    >>> import torch
    >>> top = TopK(k=2)
    >>> state = top.update({}, torch.tensor([[1.0, 9.0], [2.0, 3.0]]), torch.tensor([70, 71]))
    >>> result = top.compute(top.update(state, torch.tensor([[5.0, 0.0]]), torch.tensor([72])))
    >>> {name: value.tolist() for name, value in result.items()}
    {'value': [9.0, 5.0], 'step': [0, 1], 'position': [1, 0], 'id': [70, 72]}
    """


@dataclass(frozen=True)
class BottomK(_ExtremeElements):
    """The k smallest finite elements; in all other respects like `TopK`.

    Returns:
        `value`, `step`, `position` and `id`, as those of `TopK`, smallest first.

    >>> import torch
    >>> bottom = BottomK("b c -> c", k=1)
    >>> bottom.compute(bottom.update({}, torch.tensor([[1.0, 9.0], [2.0, 3.0]])))["value"]
    tensor([[1.],
            [3.]])
    """

    largest: ClassVar[bool] = False


def _finite_mask(rows: Tensor) -> Tensor | None:
    """Return which elements are finite; None if all are."""
    if not rows.is_floating_point():
        return None
    if can_read_values(rows) and torch.isfinite(rows.sum(dtype=torch.float64)).item():
        return None
    return torch.isfinite(rows)


def _best_indices(rows: Tensor, k: int, largest: bool) -> Tensor:
    """Return the indices of the k largest (or smallest) elements along the last axis, best first, the earlier first if equal."""
    eager = can_read_values(rows)
    if eager and rows.shape[-1] >= 2 * CHUNK >= 8 * k:
        starts = range(0, rows.shape[-1], CHUNK)
        parts = [_best_indices(rows[..., start : start + CHUNK], k, largest) + start for start in starts]
        candidates = torch.cat(parts, dim=-1)
        return candidates.gather(-1, _best_indices(rows.gather(-1, candidates), k, largest))
    length = rows.shape[-1]
    k = min(k, length)
    value, index = rows.topk(k, dim=-1, largest=largest, sorted=False)
    threshold = value.amin(-1, keepdim=True) if largest else value.amax(-1, keepdim=True)
    if eager and torch.count_nonzero(rows >= threshold if largest else rows <= threshold).item() == value.numel():
        index = index.sort(dim=-1).values
        return index.gather(-1, rows.gather(-1, index).sort(dim=-1, descending=largest, stable=True).indices)
    # topk may choose any of several equal elements: those equal to the k-th are chosen again, by position
    tied = torch.where(rows == threshold, torch.arange(length, device=rows.device), length)
    index = torch.cat((torch.where(value == threshold, length, index), tied.topk(k, dim=-1, largest=False).values), dim=-1)
    index = index.sort(dim=-1).values
    valid = index < length
    value = rows.gather(-1, index.clamp(max=length - 1))
    order = value.sort(dim=-1, descending=largest, stable=True).indices
    missing = (~valid).gather(-1, order).to(torch.uint8)
    return index.gather(-1, order.gather(-1, missing.sort(dim=-1, stable=True).indices[..., :k]))
