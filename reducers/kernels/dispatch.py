"""Which kernel reduces a tensor, by device. A new one is a file, and a line here."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from reducers.kernels.columns import column_dtypes
from reducers.kernels.cpp import library, loop_rows
from reducers.kernels.cpp.sweeping import Asked, loop_plan
from reducers.kernels.cpp.weighting import looped_weights
from reducers.kernels.failing import Kernels, failures, found, has_failed, in_triton, tried
from reducers.state import State

_PLAIN = (Tensor, nn.Parameter)
Merge: TypeAlias = "Callable[[State, State], State]"


SWEEPS = Kernels({"cuda": in_triton("sweep")}, "computes the statistics of a tensor")
ROWS = Kernels(
    {"cuda": in_triton("many"), "cpu": lambda: loop_rows},
    "computes the statistics of many tensors at once",
    "each tensor is reduced by itself, which takes longer",
)
WEIGHTED = Kernels({"cuda": in_triton("weigh")}, "computes weighted statistics")


def troubles() -> tuple[str, ...]:
    """Return what makes reductions slower than they could be: no loops in C++, and kernels that failed."""
    return (*(() if library.in_order() else (library.state(),)), *failures())


def sweep(
    asked: Asked, x: Tensor, axes: tuple[int, ...], state: State, mask: Tensor | None = None, merge: Merge | None = None
) -> State | None:
    """Return the statistics of `x` over `axes`, joined with those of a state, by a kernel that reads `x` once.

    How the loop in C++ reduces tensors of one layout, or that it does not, is found once.

    Args:
        asked: the keys of the state, and which column each is; the magnitude above which an element is active.
        state: what was observed before, with the same keys; or nothing.
        mask: bool, in the shape of `x`: which elements are observed; integers become float64 then, on a GPU.
        merge: joins the state with that of `x` alone, if a kernel does not.

    Returns:
        None if no kernel takes `x`, or its device has none; and inside graphs. If the kernel of a GPU fails, such as without a C
        compiler, there is one warning, and None from then on; without memory there is the error.
    """
    if not asked[0] or x.layout is not torch.strided or torch.compiler.is_compiling():
        return None
    x = x.resolve_neg()
    if x.device.type in SWEEPS and (room := found(SWEEPS, x)) is not None:
        dtype, columns = x.dtype if mask is None or x.is_floating_point() else torch.float64, dict(asked[0])
        before = state if fits(x, axes, columns, state, dtype) else {}
        swept = tried(SWEEPS, x.device, room.swept, x, axes, columns, asked[1], before, *(() if mask is None else (mask,)))
        return swept if before is state or swept is None or merge is None else merge(state, swept)
    if x.device.type != "cpu" or type(x) not in _PLAIN:
        return None
    if mask is None:
        plan = loop_plan(asked, x.shape, x.stride(), x.dtype, axes)
    elif type(mask) in _PLAIN and mask.device.type == "cpu" and mask.dtype is torch.bool:
        plan = loop_plan(asked, x.shape, x.stride(), x.dtype, axes, mask.stride())
    else:
        return None
    if plan is None:
        return None
    swept = plan.run(x, state, mask)
    if swept is not None or not state or merge is None:
        return swept
    alone = plan.run(x, {}, mask)
    return None if alone is None else merge(state, alone)


def device_accumulation(device: str) -> Any:
    """Return the room of what accumulates statistics in place on this type of device, inside CUDA graphs; None if there is none."""
    find = SWEEPS.get(device)
    if find is None or has_failed(SWEEPS, device) or find() is None:
        return None
    from reducers.kernels.triton import accumulate

    return accumulate


def weigh(x: Tensor, weights: Tensor, axes: tuple[int, ...], columns: tuple[str, ...], state: State, merge: Merge) -> State | None:
    """Return weighted statistics of `x` over `axes`, joined with those of a state, by a kernel that reads both tensors once.

    Args:
        weights: in the shape of `x`.
        columns: the keys of the state, names of `reducers.kernels.columns.WEIGHTED`.
        state: what was observed before, with the same keys; or nothing.
        merge: joins the state with that of `x` alone, if a kernel does not.

    Returns:
        None in the same cases as `sweep`.
    """
    if not columns or x.layout is not torch.strided or torch.compiler.is_compiling():
        return None
    room = found(WEIGHTED, x)
    before = state if fits(x, axes, dict(zip(columns, columns, strict=True)), state, torch.float64) else {}
    observed = (x.resolve_neg(), weights.resolve_neg(), axes, columns, before)
    swept = looped_weights(*observed) if room is None else tried(WEIGHTED, x.device, room.weighted_swept, *observed)
    return swept if before is state or swept is None else merge(state, swept)


def device_sweep_rows(
    xs: Sequence[Tensor | None], families: Sequence[tuple[Mapping[str, str], float, State]], tables: Any
) -> tuple[list[State], Any] | None:
    """Return the statistics of many tensors over all their elements, as rows, by a kernel that reads all of them in one launch.

    Args:
        xs: for each row a tensor, or None if the row stays as it is; of one dtype, on one device, at least one of them.
        families: the columns and the threshold of each statistic, as for `sweep`, and its rows until now; {} if none.
        tables: what an earlier call returned for these rows, or None.

    Returns:
        for each statistic its rows now, and the tables for the next call. None in the same cases as `sweep`.
    """
    first = next(x for x in xs if x is not None)
    room = found(ROWS, first)
    return None if room is None else tried(ROWS, first.device, room.swept_rows, xs, families, tables)


def row_dtypes(x: Tensor, columns: Mapping[str, str]) -> dict[str, torch.dtype] | None:
    """Return the dtypes of the rows of a statistic, by key; None if `device_sweep_rows` does not take it, or tensors like `x`."""
    room = found(ROWS, x) if columns else None
    dtypes: dict[str, torch.dtype] | None = None if room is None else room.row_dtypes(columns, x.dtype)
    return dtypes


def fits(x: Tensor, axes: tuple[int, ...], columns: Mapping[str, str], state: State | None, dtype: torch.dtype) -> bool:
    """Return whether the state is one of this reducer, for observations of this shape and of the dtype they are reduced in."""
    if not state:
        return True
    if state.keys() != columns.keys():
        return False
    kept = tuple([size for axis, size in enumerate(x.shape) if axis not in axes])
    for value, wanted in zip(map(state.__getitem__, columns), column_dtypes(tuple(columns.values()), dtype), strict=True):
        if value.shape != kept or value.dtype is not wanted or not value.is_contiguous() or value.is_neg():
            return False
    return True
