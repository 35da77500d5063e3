"""The launches, as operators that `torch.compile` sees through, and as what eager updates call."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, List, Optional, Sequence  # noqa: UP035  # what torch 2.8 can read in the signature of an operator

import torch
import triton
from torch import Tensor
from torch.library import triton_op, wrap_triton

from reducers.errors import ArgumentError
from reducers.kernels.columns import COLUMNS, column_dtypes
from reducers.kernels.triton.arguments import (
    DTYPES,
    WARPS,
    bytes_of,
    fields,
    join_constants,
    kept_shape,
    many_arguments,
    sweep_arguments,
    sweep_plan,
    swept_dtype,
    takes_columns,
)
from reducers.kernels.triton.join_kernel import join
from reducers.kernels.triton.lanes import MOST_PARTS
from reducers.kernels.triton.sweep_kernel import sweep
from reducers.kernels.triton.tiling import join_tile

__all__ = ["join_partials", "new_partials", "new_results", "sweep_into", "swept", "swept_in_graph"]

OUTPUTS = tuple(name.removesuffix("_out") for name in join.arg_names if name.endswith("_out"))
"""What the kernel that joins writes, in the order of its arguments."""


def swept(
    x: Tensor,
    axes: tuple[int, ...],
    columns: Mapping[str, str],
    threshold: float = 0.0,
    state: Mapping[str, Tensor] | None = None,
    mask: Tensor | None = None,
) -> dict[str, Tensor] | None:
    """Return the statistics of `x` over `axes`, joined with those of a state: two launches, which read `x` once.

    What is allocated are the results and one table of partial statistics. Nothing waits for the device, and the work depends on
    shapes and strides only, so that a CUDA graph may hold it. Equal tensors give equal bits.

    Args:
        columns: the keys of the state, and which of `COLUMNS` each of them is.
        threshold: for `active`, at least 0.
        state: a state of the same keys, shapes and dtypes, which is earlier.
        mask: bool, in the shape of `x`, of any strides: the elements that are observed. Integers are float64 then.

    Returns:
        counts int64; `sum` and `exact` int64 for integers; `min` and `max` in the dtype of `x`; all else float64, in the shape of
        the kept axes. None if the dtype of `x` is not supported, or more than `MAX_DIMS` axes are left after merging.

    Raises:
        ArgumentError: the latter, inside a graph that is being compiled.
    """
    if x.dtype not in DTYPES or not takes_columns(swept_dtype(x, mask), columns.values()):
        return None
    names = ",".join(columns.values())
    before = [] if not state else [state[key] for key in columns]
    if torch.compiler.is_compiling():
        return dict(zip(columns, swept_in_graph(x, axes, names, threshold, before, mask), strict=True))
    if sweep_plan(x, axes, mask) is None:
        return None
    partials = new_partials(x, axes, names, mask)
    shape, dtype = kept_shape(x, axes), swept_dtype(x, mask)
    if type(x) is Tensor:  # for which an operator would cost more than the launch
        with torch.cuda.device(x.device if x.is_cuda else -1):
            _sweep(x, partials, axes, names, threshold, None, False, mask=mask)
            results = _join(partials, shape, names, dtype, before, None, False)
    else:
        sweep_into(x, partials, axes, names, threshold, mask=mask)
        results = join_partials(partials, shape, names, dtype, before)
    return dict(zip(columns, results, strict=True))


def new_partials(x: Tensor, axes: Sequence[int], columns: str, mask: Tensor | None = None) -> Tensor:
    """Return a table for the partial statistics of `x`: int64, of shape (fields, parts, kept positions)."""
    tiles = sweep_plan(x, axes, mask)
    assert tiles is not None
    return torch.empty((fields(columns, swept_dtype(x, mask)), tiles.parts, tiles.kept), dtype=torch.int64, device=x.device)


@triton_op("reducers::sweep", mutates_args={"partials"})
def sweep_into(
    x: Tensor,
    partials: Tensor,
    axes: Sequence[int],
    columns: str,
    threshold: float = 0.0,
    due: Optional[Tensor] = None,  # noqa: UP045
    slot: int = 0,
    mask: Optional[Tensor] = None,  # noqa: UP045
) -> None:
    """Write the partial statistics of `x` into a table as `new_partials` returns it. One launch, and no allocation.

    Args:
        columns: names of `COLUMNS`, with commas between them.
        due: an int32 on the device; if it is 0, nothing is read or written.
        slot: which of the tables, if there are several along a first axis.
        mask: bool, in the shape of `x`: the elements that are observed.
    """
    _sweep(x, partials, axes, columns, threshold, due, True, slot, mask)


@triton_op("reducers::join", mutates_args={})
def join_partials(
    partials: Tensor,
    shape: Sequence[int],
    columns: str,
    dtype: torch.dtype,
    state: Sequence[Tensor],
    due: Optional[Tensor] = None,  # noqa: UP045
    first: int = 0,
    last: int = 1,
) -> List[Tensor]:  # noqa: UP006
    """Return the statistics that a table of partial ones stands for, joined with those of a state. One launch.

    Args:
        shape: of the kept axes.
        columns: names of `COLUMNS`, with commas between them.
        dtype: of the tensor that was swept; float64 for integers under a mask.
        state: the earlier statistics in the order of `columns`, or none.
        due: an int32 on the device; if it is 0, the result is the state.
        first, last: of several tables along a first axis those that are joined, one after another; without a state, one of them.
    """
    return _join(partials, shape, columns, dtype, state, due, True, first, last)


@triton_op("reducers::swept", mutates_args={})
def swept_in_graph(
    x: Tensor,
    axes: Sequence[int],
    columns: str,
    threshold: float,
    state: Sequence[Tensor],
    mask: Optional[Tensor] = None,  # noqa: UP045
) -> List[Tensor]:  # noqa: UP006
    """Return what `swept` does, in the order of `columns`: both launches as one node of a graph."""
    if sweep_plan(x, axes, mask) is None:
        raise ArgumentError(f"shape {tuple(x.shape)} with strides {tuple(x.stride())} has too many axes that cannot be merged")
    partials = new_partials(x, axes, columns, mask)
    _sweep(x, partials, axes, columns, threshold, None, True, mask=mask)
    return _join(partials, kept_shape(x, axes), columns, swept_dtype(x, mask), state, None, True)


def _sweep(
    x: Tensor,
    partials: Tensor,
    axes: Sequence[int],
    columns: str,
    threshold: float,
    due: Tensor | None,
    traced: bool,
    slot: int = 0,
    mask: Tensor | None = None,
    addresses: Tensor | None = None,
    cuts: Tensor | None = None,
    aligned: bool = False,
) -> None:
    if cuts is None:
        grid, numbers, constants = sweep_arguments(x, axes, columns, threshold, mask)
    else:
        grid, numbers, constants = many_arguments(x.dtype, partials.shape[1], columns, threshold, aligned)
    chosen = None if mask is None else bytes_of(mask)
    _launcher(sweep, traced)[grid](
        bytes_of(x), partials, due, chosen, addresses, cuts, *numbers, DUE=due is not None, slot=slot, **constants
    )


def _join(
    partials: Tensor,
    shape: Sequence[int],
    columns: str,
    dtype: torch.dtype,
    state: Sequence[Tensor],
    due: Tensor | None,
    traced: bool,
    first: int = 0,
    last: int = 1,
    cuts: Tensor | None = None,
) -> list[Tensor]:
    names = columns.split(",")
    *_, parts, kept = partials.shape
    results = new_results(shape, columns, dtype, partials.device)
    new, old = ({_output(name): bytes_of(value) for name, value in zip(names, values, strict=False)} for values in (results, state))
    if cuts is None:
        rows, width = join_tile(parts, kept)
    else:  # neither depends on the other tensors, so the result does not
        (kept,), rows, width = shape, MOST_PARTS, 1
    _launcher(join, traced)[(-(-kept // width), 1, 1)](
        partials,
        due,
        *(new.get(name) for name in OUTPUTS),
        *(old.get(name) for name in OUTPUTS),
        kept,
        parts,
        cuts,
        WITH_COUNT="count" in names,
        WITH_NONFINITE="nonfinite" in names,
        STATE=len(state) > 0,
        DUE=due is not None,
        MANY=cuts is not None,
        PARTS=rows,
        COLUMNS=width,
        first=first,
        last=last,
        num_warps=WARPS,
        **join_constants(columns, dtype),
    )
    return results


def new_results(shape: Sequence[int], columns: str, dtype: torch.dtype, device: torch.device) -> list[Tensor]:
    """Return tensors for the statistics of tensors of this dtype, in the order of `columns`."""
    return [torch.empty(shape, dtype=kind, device=device) for kind in column_dtypes(tuple(columns.split(",")), dtype)]


def _output(column: str) -> str:
    """Return which output of the kernel that joins a column is."""
    return "total" if COLUMNS[column].is_total else column


def _launcher(kernel: Any, traced: bool) -> Any:
    """Return the kernel as a tracer sees it; as it is if it is interpreted, which no tracer can see."""
    return wrap_triton(kernel) if traced and isinstance(kernel, triton.runtime.JITFunction) else kernel
