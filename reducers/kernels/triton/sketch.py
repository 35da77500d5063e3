"""The launches that add elements with random signs, as operators that tracers see, and as what eager updates call."""

from __future__ import annotations

from typing import Tuple  # noqa: UP035  # what torch 2.8 can read in the signature of an operator

import torch
from torch import Tensor
from torch.library import triton_op

from reducers.kernels.triton import launching
from reducers.kernels.triton.arguments import DTYPES, bytes_of
from reducers.kernels.triton.sketch_kernel import join_parts, make_signs, sketch_parts

__all__ = ["MAX_BUCKETS", "join_sketches", "sketch_into", "sketched"]

MAX_BUCKETS = 4096
"""For more, the sums of a program would take too many registers."""

_FACTS = 5
_GROUP = 64  # elements whose signs are one word
_TILE = 1024  # elements
_MOST_PARTS = 512
_JOINED, _COLUMNS = 32, 32  # parts, and columns of the table, that a program joins at once
_SIGNS = 512  # groups whose signs a program makes
_WARPS = 4


def sketched(xs: Tensor, buckets: int) -> tuple[Tensor, Tensor] | None:
    """Return what `sketched` of `reducers.kernels.sketches` does of tensors that are not empty and not complex. Three launches.

    Nothing waits for the device. Equal tensors give equal bits.

    Returns:
        None if the dtype is not supported, or the number of buckets is no power of two, or above `MAX_BUCKETS`.
    """
    if xs.dtype not in DTYPES or buckets > MAX_BUCKETS or buckets & (buckets - 1):
        return None
    xs = xs.contiguous()
    tiles = -(-(xs.numel() // xs.shape[0]) // (buckets * _together(buckets)))
    a_part = -(-tiles // min(tiles, _MOST_PARTS))
    table = torch.empty((xs.shape[0], -(-tiles // a_part), buckets + _FACTS), dtype=torch.float64, device=xs.device)
    if type(xs) is not Tensor:  # for a plain one an operator would cost more than the launch
        sketch_into(xs, table)
        found: tuple[Tensor, Tensor] = join_sketches(table)
        return found
    with torch.cuda.device(xs.device if xs.is_cuda else -1):
        _sketch(xs, table, False)
        return _join(table, False)


@triton_op("reducers::sketch_parts", mutates_args={"table"})
def sketch_into(xs: Tensor, table: Tensor) -> None:
    """Write the sums and facts of parts of tensors into a table, float64 [rows, parts, buckets + 5]. Two launches."""
    _sketch(xs, table, True)


@triton_op("reducers::join_sketches", mutates_args={})
def join_sketches(table: Tensor) -> Tuple[Tensor, Tensor]:  # noqa: UP006
    """Return the sums and facts of tensors from those of their parts. One launch."""
    return _join(table, True)


def _together(buckets: int) -> int:
    """Return how many blocks a tile has."""
    return max(1, _TILE // buckets)


def _sketch(xs: Tensor, table: Tensor, traced: bool) -> None:
    rows, parts, width = table.shape
    buckets, length = width - _FACTS, xs.numel() // rows
    blocks, groups = -(-length // buckets), buckets // _GROUP
    signs = torch.empty((blocks, groups), dtype=torch.int64, device=xs.device)
    turns = torch.empty(blocks, dtype=torch.int32, device=xs.device)
    launching.launcher(make_signs, traced)[(-(-blocks * groups // _SIGNS), 1, 1)](
        signs, turns, blocks * groups, BUCKETS=buckets, BLOCK=_SIGNS, num_warps=_WARPS
    )
    launching.launcher(sketch_parts, traced)[(parts, rows, 1)](
        bytes_of(xs),
        signs,
        turns,
        table,
        length,
        blocks,
        -(-blocks // (_together(buckets) * parts)),
        DOUBLE=not xs.dtype.is_floating_point or xs.dtype is torch.float64,
        INTEGER=not xs.dtype.is_floating_point,
        TOGETHER=_together(buckets),
        BUCKETS=buckets,
        num_warps=_WARPS * max(1, buckets // _TILE),
    )


def _join(table: Tensor, traced: bool) -> tuple[Tensor, Tensor]:
    rows, parts, width = table.shape
    sums = torch.empty((rows, width - _FACTS), dtype=torch.float64, device=table.device)
    facts = torch.empty((rows, _FACTS), dtype=torch.float64, device=table.device)
    launching.launcher(join_parts, traced)[(rows, -(-width // _COLUMNS), 1)](
        table, sums, facts, parts, width - _FACTS, PARTS=_JOINED, COLUMNS=_COLUMNS, num_warps=_WARPS
    )
    return sums, facts
