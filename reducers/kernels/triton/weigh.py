"""The launches for weighted sums."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from reducers.kernels.triton.arguments import DTYPES, WARPS, Arguments, kept_shape, tile_constants
from reducers.kernels.triton.lanes import LanePlan, lane_plan
from reducers.kernels.triton.launching import Launch, is_aligned, launch_of
from reducers.kernels.triton.sweep import on_device
from reducers.kernels.triton.tiling import join_tile
from reducers.kernels.triton.weigh_kernel import join_weighted, weigh

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
    form = _form(x.shape, x.stride(), x.dtype, weights.stride(), weights.dtype, axes, number)
    if form is None:
        return None
    with on_device(x):
        partials = torch.empty(form.partials, dtype=torch.float64, device=x.device)
        form.launch((x.get_device(), is_aligned(x), is_aligned(weights)), (x, partials, weights))
        return dict(zip(columns, _join(partials, form.shape, before), strict=True))


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


def _join(partials: Tensor, shape: Sequence[int], state: Sequence[Tensor]) -> list[Tensor]:
    number, parts, kept = partials.shape
    kinds = (torch.int64, *(torch.float64,) * (4 if number > 3 else 2))
    results = [torch.empty(shape, dtype=kind, device=partials.device) for kind in kinds]
    none = (None,) * (5 - len(results))
    tensors = partials, *results, *none, *(state or (None,) * len(results)), *none
    _join_launch(number, parts, kept, len(state) > 0)(partials.get_device(), tensors)
    return results


@lru_cache(maxsize=4096)
def _join_launch(number: int, parts: int, kept: int, state: bool) -> Launch:
    rows, width = join_tile(parts, kept)
    constants = {"MOMENTS": number > 3, "STATE": state, "PARTS": rows, "COLUMNS": width, "num_warps": WARPS}
    return launch_of(join_weighted, (-(-kept // width), 1, 1), (kept, parts), constants)
