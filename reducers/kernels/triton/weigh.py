"""The launches for weighted sums, as operators that tracers see, and as what eager updates call."""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from typing import List, NamedTuple, Sequence  # noqa: UP035  # what torch 2.8 can read in the signature of an operator

import torch
from torch import Tensor
from torch.library import triton_op

from reducers.kernels.triton.arguments import DTYPES, WARPS, Arguments, bytes_of, kept_shape, tile_constants
from reducers.kernels.triton.lanes import LanePlan, lane_plan
from reducers.kernels.triton.launching import Launch, is_aligned, launcher
from reducers.kernels.triton.sweep import launch_of, on_device
from reducers.kernels.triton.tiling import join_tile
from reducers.kernels.triton.weigh_kernel import join_weighted, weigh

__all__ = ["weighted_swept"]

# how many partial sums there are, by what a state holds
_FIELDS = {
    ("nonfinite", "weight", "sum"): 3,
    ("nonfinite", "weight", "squares", "mean", "m2"): 6,
}


def weighted_swept(
    x: Tensor, weights: Tensor, axes: tuple[int, ...], columns: tuple[str, ...], state: Mapping[str, Tensor] | None = None
) -> dict[str, Tensor] | None:
    """Return weighted sums of `x` over `axes`, joined with those of a state: two launches, which read both tensors once.

    Elements that are not finite, or whose weight is not, are excluded. Nothing waits for the device. Equal tensors give equal bits.

    Args:
        weights: real, in the shape of `x`, of any strides.
        columns: the keys of the state: `nonfinite`, the number of elements that are excluded; then `weight` (the sum of the
            weights) and `sum`, the weighted sum; or `weight`, `squares` (the sum of squared weights), `mean`, and `m2`, the
            weighted sum of squared deviations from the mean.
        state: a state with these keys, which is earlier, contiguous, in the shape of the kept axes.

    Returns:
        `nonfinite` int64, all else float64, in the shape of the kept axes; None if a dtype is not supported, or more than
        `MAX_DIMS` axes are left after merging.
    """
    if columns not in _FIELDS:
        return None
    number, before = _FIELDS[columns], [] if not state else [state[key] for key in columns]
    if type(x) is Tensor and type(weights) is Tensor:  # for which an operator would cost more than the launch
        form = _form(x.shape, x.stride(), x.dtype, weights.stride(), weights.dtype, axes, number)
        if form is None:
            return None
        with on_device(x):
            partials = torch.empty(form.partials, dtype=torch.float64, device=x.device)
            kind = x.get_device(), is_aligned(x), is_aligned(weights)
            form.launch(kind, (bytes_of(x), partials, bytes_of(weights)))
            return dict(zip(columns, _join(partials, form.shape, before, False), strict=True))
    tiles = _plan(x, weights, axes)
    if tiles is None:
        return None
    partials = torch.empty((number, tiles.parts, tiles.kept), dtype=torch.float64, device=x.device)
    weigh_into(x, weights, partials, axes)
    return dict(zip(columns, join_weights(partials, kept_shape(x, axes), before), strict=True))


@triton_op("reducers::weigh", mutates_args={"partials"})
def weigh_into(x: Tensor, weights: Tensor, partials: Tensor, axes: Sequence[int]) -> None:
    """Write the partial weighted sums of `x` into a table, float64 of shape (fields, parts, kept positions). One launch."""
    tiles = _plan(x, weights, tuple(axes))
    assert tiles is not None
    grid, numbers, constants = _arguments(tiles, x.dtype, weights.dtype, partials.shape[0])
    launcher(weigh, True)[grid](bytes_of(x), partials, bytes_of(weights), *numbers, **constants)


@triton_op("reducers::join_weighted", mutates_args={})
def join_weights(partials: Tensor, shape: Sequence[int], state: Sequence[Tensor]) -> List[Tensor]:  # noqa: UP006
    """Return the weighted sums that a table of partial ones stands for, joined with those of a state. One launch.

    Args:
        shape: of the kept axes.
        state: the earlier sums in the order of `columns`, or none.
    """
    return _join(partials, shape, state, True)


class _Form(NamedTuple):
    """The shape of a table of partial sums, that of the kept axes, and the launch that fills the table."""

    partials: tuple[int, int, int]
    shape: list[int]
    launch: Launch


@lru_cache(maxsize=4096)
def _form(
    shape: torch.Size,
    strides: tuple[int, ...],
    dtype: torch.dtype,
    weight_strides: tuple[int, ...],
    weight_dtype: torch.dtype,
    axes: tuple[int, ...],
    number: int,
) -> _Form | None:
    """Return what tensors and weights of this layout need; None if the kernels do not take them."""
    x = torch.empty_strided(shape, strides, dtype=dtype, device="meta")
    tiles = _plan(x, torch.empty_strided(shape, weight_strides, dtype=weight_dtype, device="meta"), axes)
    if tiles is None:
        return None
    launch = launch_of(weigh, *_arguments(tiles, dtype, weight_dtype, number))
    return _Form((number, tiles.parts, tiles.kept), kept_shape(x, axes), launch)


def _plan(x: Tensor, weights: Tensor, axes: tuple[int, ...]) -> LanePlan | None:
    if x.dtype not in DTYPES or weights.dtype not in DTYPES:
        return None
    return lane_plan(x, axes, weights, double=_is_double(x.dtype) or _is_double(weights.dtype), shared=True)


def _is_double(dtype: torch.dtype) -> bool:
    """Return whether there are numbers of this dtype that are not numbers of float32."""
    return not dtype.is_floating_point or dtype is torch.float64


def _arguments(tiles: LanePlan, dtype: torch.dtype, weight_dtype: torch.dtype, number: int) -> Arguments:
    inner, _, other_inner, other_run, other_kept, *_ = others = tiles.other_arguments()
    near = other_kept if tiles.axis == 0 else other_run if tiles.inner_rows == 1 else other_inner
    quick = inner == tiles.inner_rows
    constants = {
        **tile_constants(tiles),
        "MOMENTS": number > 3,
        "DOUBLE": _is_double(dtype),
        "WEIGHTS_DOUBLE": _is_double(weight_dtype),
        "QUICK": quick,
        "SHARED": quick and near == 0 and tiles.vector > 1,
        "CLOSE": near == 1 and tiles.vector > 1,
        "KEPT_DIMS": len(tiles.kept_sizes) if tiles.kept > 1 else 0,
        "INNER": tiles.inner_rows,
        "UNROLL": tiles.unroll,
        "LANES": tiles.lanes,
        "VECTOR": tiles.vector,
        "num_warps": max(1, tiles.lanes // 32),
    }
    return tiles.grid, (*tiles.arguments(), *others), constants


def _join(partials: Tensor, shape: Sequence[int], state: Sequence[Tensor], traced: bool) -> list[Tensor]:
    number, parts, kept = partials.shape
    kinds = (torch.int64, *(torch.float64,) * (4 if number > 3 else 2))
    results = [torch.empty(shape, dtype=kind, device=partials.device) for kind in kinds]
    none = (None,) * (5 - len(results))
    tensors = partials, *results, *none, *(state or (None,) * len(results)), *none
    of = number, parts, kept, len(state) > 0
    if traced:
        grid, numbers, constants = _join_arguments(*of)
        launcher(join_weighted, True)[grid](*tensors, *numbers, **constants)
    else:
        _join_launch(*of)(partials.get_device(), tensors)
    return results


def _join_arguments(number: int, parts: int, kept: int, state: bool) -> Arguments:
    rows, width = join_tile(parts, kept)
    constants = {"MOMENTS": number > 3, "STATE": state, "PARTS": rows, "COLUMNS": width, "num_warps": WARPS}
    return (-(-kept // width), 1, 1), (kept, parts), constants


@lru_cache(maxsize=4096)
def _join_launch(number: int, parts: int, kept: int, state: bool) -> Launch:
    return launch_of(join_weighted, *_join_arguments(number, parts, kept, state))
