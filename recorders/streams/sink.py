"""RowSink: the buffer of a monitor that hands what the monitor records to a stream; the monitor itself counts rows."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from recorders.capture.operands import plain, why_no_numbers
from recorders.errors import OperandError
from recorders.monitors.buffer import NO_PARTS, Buffer
from recorders.recordings.storage.tensors import MAX_RANK, why_no_memory
from reducers import Reducer, State, TensorPart
from reducers.core.inputs import observation
from reducers.core.states import require_state


@dataclass(frozen=True)
class RowCount(Reducer):
    """How many rows were observed; the first `axes` axes of an observation are rows.

    Returns:
        A 0-d int64 tensor.

    >>> count = RowCount(axes=2)
    >>> count.compute(count.update({}, torch.ones(2, 3, 8)))
    tensor(6)
    """

    axes: int = 1

    def update(self, state: State, *xs: Tensor) -> State:
        return self.merge(state, {"rows": torch.tensor(math.prod(observation(self, xs).shape[: self.axes]), device="cpu")})

    def merge(self, a: State, b: State) -> State:
        return {"rows": a["rows"] + b["rows"]} if a and b else a or b

    def compute(self, state: State) -> Tensor:
        require_state(self, state)
        return state["rows"].clone()


class RowSink(Buffer):
    """Hands each leaf of an observation to `put`, and counts the rows that are accepted.

    Args:
        put: called with the name of the place, the tensor, and `axes`; returns how many rows were accepted.
        name: of the monitor; a leaf with a path is the place `name/path`.
    """

    def __init__(self, reducer: Reducer, put: Callable[[str, Tensor, int], int], name: str, axes: int) -> None:
        super().__init__(reducer)
        self._put, self._name, self._axes = put, name, axes

    def add(self, inputs: Mapping[str, tuple[Tensor, ...]], parts: Mapping[str, TensorPart] = NO_PARTS) -> None:
        accepted = {path: xs for path, xs in inputs.items() if self._put(self._place(path), xs[0], self._axes)}
        if accepted:
            super().add(accepted, {path: part for path, part in parts.items() if path in accepted})

    def _place(self, path: str) -> str:
        return f"{self._name}/{path}" if self._name and path else self._name or path


def rows_of(place: str, value: Tensor, axes: int) -> Tensor:
    """The plain tensor whose rows are to be written; raises `OperandError` if they could not be written, or not be read back."""
    if not isinstance(place, str) or place.encode("utf-16", "surrogatepass").decode("utf-16", "surrogatepass") != place:
        raise OperandError(f"{place!r:.100} is no name of a place: give a text, without a character in two halves")
    if not isinstance(value, Tensor) or (reason := why_no_numbers([value])):
        raise OperandError(f"{place!r}: {reason if isinstance(value, Tensor) else f'a {type(value).__name__} is no tensor'}")
    try:
        x = plain(value)
    except (OperandError, RuntimeError) as error:  # the latter of a tensor that left a transform of torch.func
        raise OperandError(f"{place!r}: {error!s:.200}") from error
    if x.layout is torch.strided and (reason := why_no_memory(x)):
        raise OperandError(f"{place!r}: a tensor {reason} has no rows: put a copy that is plain")
    if x.ndim - axes > MAX_RANK:
        raise OperandError(f"{place!r}: rows of {x.ndim - axes} axes; {MAX_RANK} can be read back")
    return x
