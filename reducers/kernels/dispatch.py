"""Which kernel reduces a tensor: by device in eager mode, and inside compiled graphs. A new one is a file, and a line here."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from typing import Any, Protocol, TypeAlias

import torch
from torch import Tensor

from reducers.errors import warn_user
from reducers.kernels.cpu import sweep
from reducers.kernels.inductor import fused_moments
from reducers.kernels.masked import masked_sweep
from reducers.state import State

__all__ = [
    "Slots",
    "device_slots",
    "device_sweep",
    "device_sweep_rows",
    "eager_moments",
    "joinable",
    "masked_moments",
    "new_table",
    "row_dtypes",
    "traced_moments",
    "written",
]

Kernel: TypeAlias = "Callable[..., State | None]"  # of a tensor, axes, and `with_extremes`

EAGER: dict[str, Kernel] = {"cpu": sweep}  # by type of device
TRACED: Kernel = fused_moments


def eager_moments(x: Tensor, axes: tuple[int, ...], with_extremes: bool = False) -> State | None:
    """The moments of `x` over `axes`, and its extremes, by a kernel that may look at numbers; None if no kernel takes `x`."""
    kernel = EAGER.get(x.device.type)
    return None if kernel is None else kernel(x, axes, with_extremes=with_extremes)


def traced_moments(x: Tensor, axes: tuple[int, ...], with_extremes: bool = False) -> State | None:
    """The same inside a graph that is being compiled; None outside of one, or if the kernel does not take `x`."""
    return TRACED(x, axes, with_extremes=with_extremes) if torch.compiler.is_compiling() else None


def masked_moments(x: Tensor, mask: Tensor, axes: tuple[int, ...], columns: Mapping[str, str]) -> State | None:
    """Return the statistics of the elements of `x` that a mask selects, by a kernel for big tensors; None if it does not take them.

    Args:
        columns: the keys of the state, and which statistic each is, as for `device_sweep`.
    """
    if not columns or not _MASKED.issuperset(columns.values()):
        return None
    found = masked_sweep(x, mask, axes)
    return None if found is None else {key: found[column] for key, column in columns.items()}


_MASKED = frozenset(("count", "mean", "m2", "sum", "squares", "peak", "min", "max", "zeros", "nan", "inf"))


@lru_cache(maxsize=1)
def _triton_sweep() -> Kernel | None:
    """The sweep by Triton, which comes with PyTorch for GPUs; None if it is missing."""
    try:
        from reducers.kernels.triton.launch import swept
    except ImportError:
        return None
    return swept


@lru_cache(maxsize=1)
def _triton_rows() -> Any:
    """The room of the sweep of many tensors at once; None if Triton is missing."""
    try:
        from reducers.kernels.triton import many
    except ImportError:
        return None
    return many


SWEEPS: dict[str, Callable[[], Kernel | None]] = {"cuda": _triton_sweep}  # by type of device
ROWS: dict[str, Callable[[], Any]] = {"cuda": _triton_rows}
_failed: list[Exception] = []


def device_sweep(
    x: Tensor, axes: tuple[int, ...], columns: Mapping[str, str], threshold: float = 0.0, state: State | None = None
) -> State | None:
    """Return the statistics of `x` over `axes`, joined with those of a state, by a kernel that reads `x` once.

    Args:
        columns: the keys of the state, and which statistic each is: one of `reducers.kernels.triton.arguments.COLUMNS`.
        threshold: the magnitude above which an element is active.
        state: what was observed before, with the same keys.

    Returns:
        None if no kernel takes `x`, the device has none, or the state does not fit. If a kernel cannot be compiled, such as without
        a C compiler, there is one warning, and None from then on.
    """
    find = SWEEPS.get(x.device.type)
    if find is None or not columns or _failed or torch.compiler.is_compiling():
        return None
    kernel = find()
    if kernel is None or not _fits(x, axes, columns, state):
        return None
    try:
        return kernel(x.resolve_neg(), axes, columns, threshold, state)
    except torch.OutOfMemoryError:
        raise
    except Exception as error:
        _give_up(error)
        return None


def device_sweep_rows(
    xs: Sequence[Tensor | None], families: Sequence[tuple[Mapping[str, str], float, State]], tables: Any
) -> tuple[list[State], Any] | None:
    """Return the statistics of many tensors over all their elements, as rows, by a kernel that reads all of them in one launch.

    Args:
        xs: for each row a tensor, or None if the row stays as it is; of one dtype, on one device, at least one of them.
        families: the columns and the threshold of each statistic, as for `device_sweep`, and its rows until now; {} if none.
        tables: what an earlier call returned for these rows, or None.

    Returns:
        for each statistic its rows now, and the tables for the next call. None in the same cases as `device_sweep`.
    """
    room = _rows_room(next(x for x in xs if x is not None).device)
    if room is None:
        return None
    try:
        found: tuple[list[State], Any] | None = room.swept_rows(xs, families, tables)
        return found
    except torch.OutOfMemoryError:
        raise
    except Exception as error:
        _give_up(error)
        return None


def row_dtypes(x: Tensor, columns: Mapping[str, str]) -> dict[str, torch.dtype] | None:
    """Return the dtypes of the rows of a statistic, by key; None if `device_sweep_rows` does not take it, or tensors like `x`."""
    room = _rows_room(x.device) if columns else None
    found: dict[str, torch.dtype] | None = None if room is None else room.row_dtypes(columns, x.dtype)
    return found


def _rows_room(device: torch.device) -> Any:
    find = ROWS.get(device.type)
    return None if find is None or _failed or torch.compiler.is_compiling() else find()


def _give_up(error: Exception) -> None:
    """Take no kernel of a GPU any more, with one warning."""
    _failed.append(error)
    reason = str(error).strip().splitlines()[:1]
    warn_user(
        f"statistics on the GPU are computed without Triton, which takes longer: {type(error).__name__}: {''.join(reason)}",
        RuntimeWarning,
    )


class Slots(Protocol):
    """How observations of one shape are written, as partial statistics, into the slots of a table, and joined.

    Attributes:
        like: a tensor on the meta device that has this shape, strides and dtype.
        axes: those that are reduced.
        columns: the keys of the state, and which statistic each is.
        size: the bytes of a slot.
    """

    like: Tensor
    axes: tuple[int, ...]
    columns: dict[str, str]
    size: int

    def new_table(self, slots: int, device: torch.device) -> Tensor:
        """Return a table of so many slots."""
        ...

    def write(self, table: Tensor, x: Tensor, slot: int) -> None:
        """Write the partial statistics of an observation into a slot."""

    def join(self, table: Tensor, state: State, first: int, last: int) -> State:
        """Return a state joined with the slots from `first` to `last`, in order. An empty state takes one slot."""
        ...


def _triton_slots() -> Callable[..., Slots | None] | None:
    """The slots of Triton's sweep; None if it is missing."""
    if _triton_sweep() is None:
        return None
    from reducers.kernels.triton.slots import slots_for

    return slots_for


SLOTS: dict[str, Callable[[], Callable[..., Slots | None] | None]] = {"cuda": _triton_slots}  # by type of device


def device_slots(x: Tensor, axes: tuple[int, ...], columns: Mapping[str, str], threshold: float = 0.0) -> Slots | None:
    """Return how observations like `x` wait as partial statistics, or None; the arguments are those of `device_sweep`."""
    find = SLOTS.get(x.device.type)
    if find is None or not columns or _failed or torch.compiler.is_compiling():
        return None
    slots_for = find()
    return None if slots_for is None else slots_for(x, axes, columns, threshold)


def joinable(slots: Slots, state: State) -> bool:
    """Return whether the state is a non-empty one with which the slots can be joined."""
    return bool(state) and _fits(slots.like, slots.axes, slots.columns, state)


def new_table(slots: Slots, number: int, device: torch.device) -> Tensor | None:
    """Return a table of so many slots; None if there is no memory for it, or the kernels cannot be compiled."""
    if _failed:
        return None
    try:
        return slots.new_table(number, device)
    except torch.OutOfMemoryError:
        return None
    except Exception as error:
        _give_up(error)
        return None


def written(slots: Slots, table: Tensor, x: Tensor, slot: int) -> bool:
    """Write an observation into a slot of a table; return whether that was done. If it fails, there is the one warning.

    A CUDA graph that is captured would write the slot again whenever it is replayed, whatever is in it then. So nothing is written.
    """
    if _failed or (type(x) is Tensor and x.is_cuda and torch.cuda.is_current_stream_capturing()):
        return False
    try:
        slots.write(table, x, slot)
    except torch.OutOfMemoryError:
        raise
    except Exception as error:
        _give_up(error)
        return False
    return True


def _fits(x: Tensor, axes: tuple[int, ...], columns: Mapping[str, str], state: State | None) -> bool:
    """Return whether the state is one of this reducer, for observations of this shape and dtype."""
    if not state:
        return True
    if len(state) != len(columns) or not all(key in state for key in columns):
        return False
    kept = [size for axis, size in enumerate(x.shape) if axis not in axes]
    integer = not x.dtype.is_floating_point
    for key, column in columns.items():
        value = state[key]
        own = column in ("min", "max")
        counted = column in ("count", "zeros", "nan", "inf", "active") or (integer and column in ("sum", "exact"))
        wanted = x.dtype if own else torch.int64 if counted else torch.float64
        if list(value.shape) != kept or value.dtype is not wanted or not value.is_contiguous():
            return False
    return True
