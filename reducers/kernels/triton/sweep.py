"""The launch that reads a tensor, and updates by it: two launches, which read it once."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from reducers.kernels.triton.arguments import (
    DTYPES,
    fields,
    kept_shape,
    many_arguments,
    sweep_arguments,
    sweep_plan,
    swept_dtype,
    takes_columns,
)
from reducers.kernels.triton.join import join_partials
from reducers.kernels.triton.launching import Launch, is_aligned, launch_of
from reducers.kernels.triton.sweep_kernel import sweep


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
    """
    names = ",".join(columns.values())
    before = [] if not state else [state[key] for key in columns]
    form = _form(x.shape, x.stride(), x.dtype, axes, names, None if mask is None else mask.stride())
    if form is None:
        return None
    with on_device(x):
        partials = torch.empty(form.partials, dtype=torch.int64, device=x.device)
        sweep_into(x, partials, axes, names, threshold, mask=mask)
        results = join_partials(partials, form.shape, names, form.dtype, before)
    return dict(zip(columns, results, strict=True))


class _Allocated(NamedTuple):
    """The shape of a table of partial statistics; the shape of the kept axes, and the dtype in which elements are reduced."""

    partials: tuple[int, int, int]
    shape: list[int]
    dtype: torch.dtype


@lru_cache(maxsize=4096)
def _form(
    shape: torch.Size,
    strides: tuple[int, ...],
    dtype: torch.dtype,
    axes: tuple[int, ...],
    columns: str,
    masked: tuple[int, ...] | None,
) -> _Allocated | None:
    """Return what `swept` allocates for tensors of this layout; None if the kernels do not take them."""
    x = torch.empty_strided(shape, strides, dtype=dtype, device="meta")
    mask = None if masked is None else torch.empty_strided(shape, masked, dtype=torch.bool, device="meta")
    wide = swept_dtype(x, mask)
    taken = x.dtype in DTYPES and takes_columns(wide, columns.split(","))
    tiles = sweep_plan(x, axes, mask) if taken else None
    if tiles is None:
        return None
    return _Allocated((fields(columns, wide), tiles.parts, tiles.kept), kept_shape(x, axes), wide)


_HERE = nullcontext()


@lru_cache(maxsize=1)
def _is_alone() -> bool:
    """Return whether this process has one GPU. CUDA is in use, so that this stays."""
    return torch.cuda.device_count() == 1


def on_device(x: Tensor) -> AbstractContextManager[Any]:
    """Makes the device of a tensor the current one, on which kernels are launched."""
    if not x.is_cuda or _is_alone() or x.get_device() == torch.cuda.current_device():
        return _HERE
    return torch.cuda.device(x.device)


def new_partials(x: Tensor, axes: Sequence[int], columns: str, mask: Tensor | None = None) -> Tensor:
    """Return a table for the partial statistics of `x`: int64, of shape (fields, parts, kept positions)."""
    tiles = sweep_plan(x, axes, mask)
    assert tiles is not None
    return torch.empty((fields(columns, swept_dtype(x, mask)), tiles.parts, tiles.kept), dtype=torch.int64, device=x.device)


def sweep_into(
    x: Tensor,
    partials: Tensor,
    axes: Sequence[int],
    columns: str,
    threshold: float = 0.0,
    due: Tensor | None = None,
    mask: Tensor | None = None,
) -> None:
    """Write the partial statistics of `x` into a table as `new_partials` returns it. One launch, and no allocation.

    Args:
        columns: names of `COLUMNS`, with commas between them.
        due: an integer on the device; if it is 0, nothing is read or written.
        mask: bool, in the shape of `x`: the elements that are observed.
    """
    masked = None if mask is None else mask.stride()
    launch = sweep_launch(x.shape, x.stride(), x.dtype, tuple(axes), columns, threshold, masked, due is not None)
    kind = x.get_device(), is_aligned(x), mask is None or is_aligned(mask), None if due is None else due.dtype
    launch(kind, (x, partials, due, mask, None, None), 0)


@lru_cache(maxsize=4096)
def sweep_launch(
    shape: torch.Size,
    strides: tuple[int, ...],
    dtype: torch.dtype,
    axes: tuple[int, ...],
    columns: str,
    threshold: float,
    masked: tuple[int, ...] | None,
    due: bool,
) -> Launch:
    """Return the launch that sweeps tensors of this layout.

    Args:
        masked: the strides of a mask.
        due: whether a flag says if anything is read.
    """
    x = torch.empty_strided(shape, strides, dtype=dtype, device="meta")
    mask = None if masked is None else torch.empty_strided(shape, masked, dtype=torch.bool, device="meta")
    grid, numbers, constants = sweep_arguments(x, axes, columns, threshold, mask)
    return launch_of(sweep, grid, numbers, {**constants, "DUE": due})


@lru_cache(maxsize=1024)
def _many_launch(dtype: torch.dtype, parts: int, columns: str, threshold: float, aligned: bool) -> Launch:
    grid, numbers, constants = many_arguments(dtype, parts, columns, threshold, aligned)
    return launch_of(sweep, grid, numbers, {**constants, "DUE": False})


def sweep_many(x: Tensor, partials: Tensor, columns: str, threshold: float, addresses: Tensor, cuts: Tensor, aligned: bool) -> None:
    """Write the partial statistics of many tensors into a table of shape (fields, parts, 1). One launch, and no allocation.

    Args:
        x: one of the tensors.
        columns: names of `COLUMNS`, with commas between them.
        addresses, cuts: where the tensors are, and how they are cut.
        aligned: whether each of them begins at a multiple of 16 bytes.
    """
    launch = _many_launch(x.dtype, partials.shape[1], columns, threshold, aligned)
    launch((x.get_device(), is_aligned(x)), (x, partials, None, None, addresses, cuts), 0)
