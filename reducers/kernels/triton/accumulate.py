"""The second launch in place: statistics joined to accumulators on the device, which a CUDA graph may replay without any Python.

Accumulators are found by a handle: a tensor of addresses on the device. A program that passes the handle on only ever reads it, so
neither autograd nor a compiler has to know what the addresses stand for.

- The handle is int64: whether to record at all (1 or 0), the address of a count of observations that found no accumulators, and
  then, for each slot, the address of its accumulators, or 0.
- Accumulators are int64: the number of observations, the number of kept positions, and a table of statistics like that of `sweep`
  for a single part, which ends with the total; floats as the bits of a float64.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache

import torch
from torch import Tensor

from reducers.kernels.columns import COLUMNS, column_dtypes
from reducers.kernels.locks import new_lock
from reducers.kernels.triton.accumulate_kernel import join_in_place
from reducers.kernels.triton.arguments import (
    WARPS,
    family,
    fields,
    join_constants,
    kept_shape,
    range_of,
    sweep_plan,
    takes_columns,
)
from reducers.kernels.triton.launching import Launch, launch_of
from reducers.kernels.triton.sweep import new_partials, on_device, sweep_into
from reducers.kernels.triton.tiling import MAX_DIMS, join_tile, power_of_two

SLOTS = 14  # accumulators of one handle
_FIRST = 2  # the word of a handle that belongs to slot 0; and of accumulators, at which the table begins

_scratch: dict[tuple[torch.device, int], Tensor] = {}
_lock = new_lock()  # between the two launches no other thread may use the same table


def takes(x: Tensor, axes: tuple[int, ...], columns: Mapping[str, str]) -> bool:
    """Return whether the kernels compute the columns of this dtype, and take so many axes, whatever the sizes and strides."""
    return takes_columns(x.dtype, columns.values()) and len(axes) <= MAX_DIMS and x.ndim - len(axes) <= MAX_DIMS


def is_captured() -> bool:
    """Return whether a CUDA graph is being captured on the current stream."""
    return _uses_cuda() and torch.cuda.is_current_stream_capturing()


def _uses_cuda() -> bool:
    """Return whether CUDA is in use; where it is not, tensors on it are no real ones."""
    return bool(torch.cuda.is_initialized())  # type: ignore[no-untyped-call]


def new_handle(device: torch.device) -> tuple[Tensor, Tensor]:
    """Return a handle that is to record, without accumulators; and the count of observations that found none."""
    missed = torch.zeros(1, dtype=torch.int64, device=device)
    handle = torch.zeros(_FIRST + SLOTS, dtype=torch.int64, device=device)
    handle[:1].fill_(1)
    handle[1:2].fill_(missed.data_ptr())  # a fill, because a copy from the host would wait for the device
    return handle, missed


def point(handle: Tensor, slot: int, accumulators: Tensor) -> None:
    """Enter the address of the accumulators of a slot, unseen by autograd."""
    handle.data[_FIRST + slot : _FIRST + slot + 1].fill_(accumulators.data_ptr())


def new_accumulators(x: Tensor, axes: Sequence[int], columns: str) -> Tensor:
    """Return the accumulators for observations with these kept axes, empty.

    Args:
        columns: names of `COLUMNS`, with commas between them.
    """
    kept = math.prod(kept_shape(x, axes))
    words = _new(_FIRST + _rows(columns, x.dtype) * kept, x.device)
    words[1:2].fill_(kept)
    clear(words, columns, x.dtype)
    return words


def clear(words: Tensor, columns: str, dtype: torch.dtype) -> None:
    """Make accumulators empty, in the order of the stream."""
    order, extremes, _, _ = family(columns, dtype)
    words[:1].zero_()
    words[_FIRST:].zero_()
    if extremes:
        low, high = _table(words, columns, dtype)[1 + order : 3 + order]
        if dtype.is_floating_point:
            low.view(torch.float64).fill_(torch.inf)
            high.view(torch.float64).fill_(-torch.inf)
        else:
            low.fill_(range_of(dtype)[1])
            high.fill_(range_of(dtype)[0])


def statistics(words: Tensor, columns: Mapping[str, str], shape: Sequence[int], dtype: torch.dtype) -> dict[str, Tensor]:
    """Return what accumulators hold as the state that `swept` returns.

    Args:
        columns: the keys of the state, and which of `COLUMNS` each of them is.
        shape: of the kept axes.
        dtype: of the observations.
    """
    names = ",".join(columns.values())
    order, extremes, counts, total = family(names, dtype)
    base = 1 + order + 2 * extremes
    place = {name: column.power for name, column in COLUMNS.items() if column.power}
    place |= {"count": 0, "min": 1 + order, "max": 2 + order}
    place |= {"zeros": base, "inf": base + 1, "nan": base + 2, "nonfinite": base + 3 * counts + (total != "")}
    table = _table(words, names, dtype)
    state = {}
    for (key, name), kind in zip(columns.items(), column_dtypes(tuple(columns.values()), dtype), strict=True):
        row = table[place.get(name, base + 3 * counts)]
        number = row.view(torch.float64) if kind.is_floating_point else row
        state[key] = number.to(kind, copy=True).reshape(list(shape))
    return state


def accumulate(x: Tensor, axes: tuple[int, ...], columns: str, threshold: float, handle: Tensor, slot: int) -> None:
    """Join the statistics of `x` over `axes` to the accumulators of a slot: two launches, which read `x` once, and no allocation.

    A CUDA graph may hold both. While one is captured, the table between the two launches is memory of the graph.

    Args:
        columns: names of `COLUMNS`, with commas between them.
        threshold: for `active`, at least 0.
    """
    with _lock:
        partials = _partials(x, axes, columns)
        with on_device(x):
            sweep_into(x, partials, axes, columns, threshold, handle)
            _, parts, kept = partials.shape
            _join_launch(columns, x.dtype, parts, kept)(partials.get_device(), (handle, partials), slot)


@lru_cache(maxsize=4096)
def _join_launch(columns: str, dtype: torch.dtype, parts: int, kept: int) -> Launch:
    rows, width = join_tile(parts, kept)
    constants = {**join_constants(columns, dtype), "PARTS": rows, "COLUMNS": width, "num_warps": WARPS}
    return launch_of(join_in_place, (-(-kept // width), 1, 1), (kept, parts), constants)


def _partials(x: Tensor, axes: tuple[int, ...], columns: str) -> Tensor:
    """Return a table for partial statistics: of the graph that is being captured, or that of all observations of a stream."""
    if is_captured():
        return new_partials(x, axes, columns)
    stream = torch.cuda.current_stream(x.device).cuda_stream if x.is_cuda and _uses_cuda() else 0
    shape = _shape(x.shape, x.stride(), x.dtype, axes, columns)
    size = math.prod(shape)
    shared = _scratch.get((x.device, stream))
    if shared is None or shared.numel() < size or type(shared) is not type(x):
        shared = _scratch[x.device, stream] = _new(power_of_two(size, size), x.device)
    return shared[:size].view(shape)


@lru_cache(maxsize=4096)
def _shape(
    shape: torch.Size, strides: tuple[int, ...], dtype: torch.dtype, axes: tuple[int, ...], columns: str
) -> tuple[int, int, int]:
    """Return the shape of a table for partial statistics of tensors of this layout."""
    tiles = sweep_plan(torch.empty_strided(shape, strides, dtype=dtype, device="meta"), axes)
    assert tiles is not None
    return fields(columns, dtype), tiles.parts, tiles.kept


def _new(size: int, device: torch.device) -> Tensor:
    """Return memory that stays, allocated by another thread.

    While the compiler warms up for a CUDA graph, all that this thread allocates is memory of the graph, which reuses it.
    """

    def allocate() -> Tensor:
        with torch.cuda.stream(stream):
            return torch.empty(size, dtype=torch.int64, device=device)

    if device.type != "cuda" or not _uses_cuda():
        return torch.empty(size, dtype=torch.int64, device=device)
    stream = torch.cuda.current_stream(device)
    with ThreadPoolExecutor(1) as thread:
        return thread.submit(allocate).result()


def _rows(columns: str, dtype: torch.dtype) -> int:
    """Return how many rows the table has: one for each partial statistic, one for the peak, and one for what is not finite."""
    return fields(columns, dtype) + (family(columns, dtype)[3] == "peak") + 1


def _table(words: Tensor, columns: str, dtype: torch.dtype) -> Tensor:
    return words[_FIRST:].view(_rows(columns, dtype), -1)
