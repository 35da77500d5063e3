"""The launches that join partial statistics."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import torch
from torch import Tensor

from reducers.kernels.columns import COLUMNS, column_dtypes
from reducers.kernels.triton.arguments import WARPS, join_constants
from reducers.kernels.triton.join_kernel import OUTPUTS, join
from reducers.kernels.triton.lanes import MOST_PARTS
from reducers.kernels.triton.launching import Launch, launch_of
from reducers.kernels.triton.parts_kernel import join_each
from reducers.kernels.triton.tiling import join_tile, power_of_two

_NOTHING = (None,) * len(OUTPUTS)  # of a state, if there is none
_LANES = 128  # columns that a program joins if parts are joined already: one for each lane


def join_partials(
    partials: Tensor,
    shape: Sequence[int],
    columns: str,
    dtype: torch.dtype,
    state: Sequence[Tensor],
    first: int = 0,
    last: int = 1,
    cuts: Tensor | None = None,
    ready: bool = False,
) -> list[Tensor]:
    """Return the statistics that a table of partial ones stands for, joined with those of a state. One launch.

    Args:
        shape: of the kept axes.
        columns: names of `COLUMNS`, with commas between them.
        dtype: of the tensor that was swept; float64 for integers under a mask.
        state: the earlier statistics in the order of `columns`, or none.
        first, last: of several tables along a first axis those that are joined, one after another; without a state, one of them.
        cuts: how many tensors were cut, each of which is a position.
        ready: whether the table is what `each_joined` returned.
    """
    parts, kept = partials.shape[-2:]
    if cuts is not None:
        kept = shape[0]
    kinds, places = _outputs(columns, dtype)
    device = partials.device
    results = [torch.empty(shape, dtype=kind, device=device) for kind in kinds]
    placed = [None if place is None else results[place] for place in places]
    before = [None if place is None else state[place] for place in places] if state else _NOTHING
    launch = _join_launch(columns, dtype, parts, kept, len(state) > 0, cuts is not None, ready)
    launch(partials.get_device(), (partials, cuts, *placed, *before), first, last)
    return results


@lru_cache(maxsize=4096)
def _join_launch(columns: str, dtype: torch.dtype, parts: int, kept: int, state: bool, many: bool, ready: bool) -> Launch:
    # Of many tensors the tile does not depend on the others, so the result does not.
    rows, width = (MOST_PARTS, 1) if many else (1, power_of_two(kept, _LANES)) if ready else join_tile(parts, kept)
    names = columns.split(",")
    constants = {
        **join_constants(columns, dtype),
        "WITH_COUNT": "count" in names,
        "WITH_NONFINITE": "nonfinite" in names,
        "STATE": state,
        "MANY": many,
        "READY": ready,
        "PARTS": rows,
        "COLUMNS": width,
        "num_warps": max(1, width // 32) if ready else WARPS,
    }
    return launch_of(join, (-(-kept // width), 1, 1), (kept, parts), constants)


@lru_cache(maxsize=1024)
def _outputs(columns: str, dtype: torch.dtype) -> tuple[tuple[torch.dtype, ...], tuple[int | None, ...]]:
    """Return the dtypes of the columns, and for each output of the kernel that joins which column it is; None if it is none."""
    columns_of = tuple(columns.split(","))
    names = ["total" if COLUMNS[name].is_total else name for name in columns_of]
    return column_dtypes(columns_of, dtype), tuple([names.index(name) if name in names else None for name in OUTPUTS])


def each_joined(partials: Tensor, columns: str, dtype: torch.dtype, first: int, last: int) -> Tensor:
    """Return what the parts of each of several tables are together, as tables of one part. One launch, all tables at once.

    Args:
        columns: names of `COLUMNS`, with commas between them.
        dtype: of the tensors that were swept.
        first, last: which of the tables, along the first axis.
    """
    _, number, parts, kept = partials.shape
    joined = torch.empty((last - first, number + 1, 1, kept), dtype=torch.int64, device=partials.device)
    _each_launch(columns, dtype, parts, kept)(partials.get_device(), (partials, joined), first, times=last - first)
    return joined


@lru_cache(maxsize=4096)
def _each_launch(columns: str, dtype: torch.dtype, parts: int, kept: int) -> Launch:
    """Return the launch for one slot."""
    rows, width = join_tile(parts, kept)  # as parts are joined to a state, or sums would have other bits
    constants = {
        **join_constants(columns, dtype),
        "WITH_NONFINITE": "nonfinite" in columns.split(","),
        "PARTS": rows,
        "COLUMNS": width,
        "num_warps": WARPS,
    }
    del constants["WITH_MIN"], constants["WITH_MAX"]
    return launch_of(join_each, (-(-kept // width), 1, 1), (kept, parts), constants)


def new_results(shape: Sequence[int], columns: str, dtype: torch.dtype, device: torch.device) -> list[Tensor]:
    """Return tensors for the statistics of tensors of this dtype, in the order of `columns`."""
    return [torch.empty(shape, dtype=kind, device=device) for kind in _outputs(columns, dtype)[0]]
