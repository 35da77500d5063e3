"""The launches for weighted sums, as operators that tracers see, and as what eager updates call."""

from __future__ import annotations

from collections.abc import Mapping
from typing import List, Sequence  # noqa: UP035  # what torch 2.8 can read in the signature of an operator

import torch
from torch import Tensor
from torch.library import triton_op

from reducers.kernels.triton.arguments import DTYPES, WARPS, bytes_of, kept_shape, tile_constants
from reducers.kernels.triton.sweep import _launcher
from reducers.kernels.triton.tiling import TilePlan, join_tile, plan
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
    if x.dtype not in DTYPES or weights.dtype not in DTYPES or columns not in _FIELDS:
        return None
    tiles = plan(x, axes, weights, double=True)
    if tiles is None:
        return None
    partials = torch.empty((_FIELDS[columns], tiles.parts, tiles.kept), dtype=torch.float64, device=x.device)
    shape, before = kept_shape(x, axes), [] if not state else [state[key] for key in columns]
    if type(x) is Tensor:  # for which an operator would cost more than the launch
        with torch.cuda.device(x.device if x.is_cuda else -1):
            _weigh(x, weights, partials, tiles, False)
            results = _join(partials, shape, before, False)
    else:
        weigh_into(x, weights, partials, axes)
        results = join_weights(partials, shape, before)
    return dict(zip(columns, results, strict=True))


@triton_op("reducers::weigh", mutates_args={"partials"})
def weigh_into(x: Tensor, weights: Tensor, partials: Tensor, axes: Sequence[int]) -> None:
    """Write the partial weighted sums of `x` into a table, float64 of shape (fields, parts, kept positions). One launch."""
    tiles = plan(x, tuple(axes), weights, double=True)
    assert tiles is not None
    _weigh(x, weights, partials, tiles, True)


@triton_op("reducers::join_weighted", mutates_args={})
def join_weights(partials: Tensor, shape: Sequence[int], state: Sequence[Tensor]) -> List[Tensor]:  # noqa: UP006
    """Return the weighted sums that a table of partial ones stands for, joined with those of a state. One launch.

    Args:
        shape: of the kept axes.
        state: the earlier sums in the order of `columns`, or none.
    """
    return _join(partials, shape, state, True)


def _weigh(x: Tensor, weights: Tensor, partials: Tensor, tiles: TilePlan, traced: bool) -> None:
    _launcher(weigh, traced)[tiles.grid](
        bytes_of(x),
        partials,
        *tiles.arguments(),
        bytes_of(weights),
        *tiles.other_arguments(),
        MOMENTS=partials.shape[0] > 3,
        INNER=tiles.inner_rows,
        **tile_constants(tiles),
    )


def _join(partials: Tensor, shape: Sequence[int], state: Sequence[Tensor], traced: bool) -> list[Tensor]:
    fields, parts, kept = partials.shape
    moments = fields > 3
    kinds = (torch.int64, *(torch.float64,) * (4 if moments else 2))
    results = [torch.empty(shape, dtype=kind, device=partials.device) for kind in kinds]
    none = (None,) * (5 - len(results))
    rows, width = join_tile(parts, kept)
    _launcher(join_weighted, traced)[(-(-kept // width), 1, 1)](
        partials,
        *results,
        *none,
        *(state or (None,) * len(results)),
        *none,
        kept,
        parts,
        MOMENTS=moments,
        STATE=len(state) > 0,
        PARTS=rows,
        COLUMNS=width,
        num_warps=WARPS,
    )
    return results
