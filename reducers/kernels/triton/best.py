"""The launches that choose the best elements."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from reducers.kernels.triton.arguments import DTYPES, bytes_of, kept_shape, tile_constants
from reducers.kernels.triton.best_kernel import choose, rank
from reducers.kernels.triton.sweep import on_device
from reducers.kernels.triton.tiling import TilePlan, plan, power_of_two

KEYS = ("value", "step", "position", "id", "observations", "nonfinite")
MAX_K = 32
"""For more, a tile would be read over too often, and PyTorch's own selection is faster."""

_BLOCK = 1024  # elements that are ranked together; a block of fewer than threads compiles badly


def best_elements(
    x: Tensor, view: Tensor, axes: tuple[int, ...], k: int, largest: bool, ids: Tensor | None, state: Mapping[str, Tensor] | None
) -> dict[str, Tensor] | None:
    """Return the slots of `TopK` or `BottomK` after one more observation: two launches, which read `x` once.

    What is allocated is the result, and a table of k elements for each part of `x`. Nothing waits for the device, and the work
    depends on shapes only, so that a CUDA graph may hold it. Equal tensors give equal bits.

    Args:
        x: contiguous; positions are flat indices into it.
        view: `x` with its axes in another order, in the same memory.
        axes: of `view`, to reduce; the others are kept.
        ids: int64, one for each sample along the first axis of `x`.
        state: an earlier result, or nothing.

    Returns:
        the state by `KEYS`. None if the dtype is not supported, `k` is above `MAX_K`, or too many axes are left after merging.
    """
    tiles = plan(view, axes) if x.dtype in DTYPES and k <= MAX_K and x.is_contiguous() else None
    if tiles is None:
        return None
    shape = kept_shape(view, axes)
    before = [] if not state else [state[key] for key in KEYS]
    with on_device(x):
        table, nonfinite = _choose(view, tiles, k, largest)
        results = _rank(x, table, nonfinite, shape, k, largest, ids, before)
    return dict(zip(KEYS, results, strict=True))


def _choose(view: Tensor, tiles: TilePlan, k: int, largest: bool) -> tuple[Tensor, Tensor]:
    """Return the k best elements of each part: int64, of shape (2, kept positions, parts, k); and how many elements of it are not
    finite: int64, of shape (kept positions, parts). One launch.
    """
    table = torch.empty((2, tiles.kept, tiles.parts, k), dtype=torch.int64, device=view.device)
    nonfinite = torch.empty((tiles.kept, tiles.parts), dtype=torch.int64, device=view.device)
    choose[tiles.grid](
        bytes_of(view),
        table,
        nonfinite,
        k,
        *tiles.arguments(),
        SLOTS=power_of_two(k, MAX_K),
        INTEGER=not view.dtype.is_floating_point,
        LARGEST=largest,
        **tile_constants(tiles),
    )
    return table, nonfinite


def _rank(
    x: Tensor,
    table: Tensor,
    nonfinite: Tensor,
    shape: Sequence[int],
    k: int,
    largest: bool,
    ids: Tensor | None,
    state: Sequence[Tensor],
) -> list[Tensor]:
    """Return the k best of a state and of what `_choose` returned, in the order of `KEYS`. One launch.

    Args:
        shape: of the kept axes.
        state: in the order of `KEYS`, or nothing.
    """
    _, kept, parts, _ = table.shape
    dtype = torch.uint8 if x.dtype is torch.bool else x.dtype
    slots = [torch.empty((*shape, k), dtype=kind, device=x.device) for kind in (dtype, *(torch.int64,) * 3)]
    results = [*slots, *(torch.empty(size, dtype=torch.int64, device=x.device) for size in ((), tuple(shape)))]
    worst = float("-inf" if largest else "inf")
    if not dtype.is_floating_point:
        worst = torch.iinfo(dtype).min if largest else torch.iinfo(dtype).max
    rank[(kept, 1, 1)](
        bytes_of(x),
        table,
        nonfinite,
        ids,
        *results,
        *(state or (None,) * len(KEYS)),
        k,
        kept,
        parts,
        x.numel() // x.shape[0] if x.ndim else 1,
        WORST_VALUE=worst,
        SLOTS=power_of_two(k, MAX_K),
        INTEGER=not dtype.is_floating_point,
        LARGEST=largest,
        STATE=len(state) > 0,
        IDS=ids is not None,
        BLOCK=_BLOCK,
        num_warps=4,
    )
    return results
