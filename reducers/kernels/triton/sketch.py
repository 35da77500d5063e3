"""The launches that add elements with random signs, as operators that tracers see, and as what eager updates call."""

from __future__ import annotations

import math
from typing import Sequence, Tuple  # noqa: UP035  # what torch 2.8 can read in the signature of an operator

import torch
from torch import Tensor
from torch.library import triton_op

from reducers.kernels.parts import Runs
from reducers.kernels.triton import launching
from reducers.kernels.triton.arguments import DTYPES, bytes_of
from reducers.kernels.triton.sketch_kernel import join_parts, make_signs, sketch_parts

__all__ = ["MAX_BUCKETS", "join_sketches", "sketch_into", "sketched"]

MAX_BUCKETS = 4096
"""For more, the sums of a program would take too many registers."""

_FACTS = 5
_GROUP = 64  # elements whose signs are one word
_EACH = 16  # elements of a tile that a thread reads; half as many of float64
_MOST_WARPS = 16
_ALL_WARPS = 1 << 12  # of the programs of a tensor, at most
_JOINED, _COLUMNS = 512, 4  # parts, and columns of the table, that a program joins at once
_SIGNS = 512  # groups whose signs a program makes
_WARPS = 4


def sketched(xs: Tensor, buckets: int, runs: Runs) -> tuple[Tensor, Tensor] | None:
    """Return what `sketched` of `reducers.kernels.sketches` does of tensors that are not empty and not complex. Three launches.

    Nothing waits for the device. Equal tensors give equal bits.

    Args:
        runs: of each tensor.

    Returns:
        None if the dtype is not supported, or the number of buckets is no power of two, or above `MAX_BUCKETS`.
    """
    if xs.dtype not in DTYPES or buckets > MAX_BUCKETS or buckets & (buckets - 1):
        return None
    xs = xs.contiguous()
    tiles = -(-runs.number * _slots(runs, buckets) // _together(xs.dtype, buckets))
    a_part = -(-tiles // min(tiles, _most_parts(buckets)))
    table = torch.empty((xs.shape[0], -(-tiles // a_part), buckets + _FACTS), dtype=torch.float64, device=xs.device)
    if type(xs) is not Tensor:  # for a plain one an operator would cost more than the launch
        sketch_into(xs, table, runs)
        found: tuple[Tensor, Tensor] = join_sketches(table)
        return found
    with torch.cuda.device(xs.device if xs.is_cuda else -1):
        _sketch(xs, table, runs, False)
        return _join(table, False)


@triton_op("reducers::sketch_parts", mutates_args={"table"})
def sketch_into(xs: Tensor, table: Tensor, runs: Sequence[int]) -> None:
    """Write the sums and facts of parts of tensors into a table, float64 [rows, parts, buckets + 5]. Two launches."""
    _sketch(xs, table, runs, True)


@triton_op("reducers::join_sketches", mutates_args={})
def join_sketches(table: Tensor) -> Tuple[Tensor, Tensor]:  # noqa: UP006
    """Return the sums and facts of tensors from those of their parts. One launch."""
    return _join(table, True)


def _warps(buckets: int) -> int:
    """Return how many warps a program has: no thread of 64 in a warp is without a bucket, so sums of blocks stay in one thread."""
    return min(max(_WARPS, buckets // 128), buckets // 64, _MOST_WARPS)


def _most_parts(buckets: int) -> int:
    return _ALL_WARPS // _warps(buckets)


def _together(dtype: torch.dtype, buckets: int) -> int:
    """Return how many slots a tile has."""
    each = _EACH // 2 if _is_double(dtype) or _warps(buckets) == _MOST_WARPS else _EACH
    return max(1, each * 32 * _warps(buckets) // buckets)


def _is_double(dtype: torch.dtype) -> bool:
    return not dtype.is_floating_point or dtype is torch.float64


def _slots(runs: Sequence[int], buckets: int) -> int:
    """Return of how many blocks a run has elements at most."""
    number, length, start, stride = runs
    if number == 1:
        return (start % buckets + length - 1) // buckets + 1
    apart = math.gcd(buckets, start, stride)  # each run begins at a multiple of it
    return (buckets - apart + length - 1) // buckets + 1


def _sketch(xs: Tensor, table: Tensor, runs: Sequence[int], traced: bool) -> None:
    (rows, parts, width), (number, length, start, stride) = table.shape, runs
    buckets = width - _FACTS
    a_run, groups, together = _slots(runs, buckets), buckets // _GROUP, _together(xs.dtype, buckets)
    slots = number * a_run
    signs = torch.empty((slots, groups), dtype=torch.int64, device=xs.device)
    turns = torch.empty(slots, dtype=torch.int32, device=xs.device)
    origins = torch.empty((slots, 2), dtype=torch.int64, device=xs.device) if number > 1 else None
    launching.launcher(make_signs, traced)[(-(-slots * groups // _SIGNS), 1, 1)](
        signs,
        turns,
        origins,
        slots,
        length,
        start,
        stride,
        a_run,
        BUCKETS=buckets,
        RUNS=number > 1,
        BLOCK=_SIGNS,
        num_warps=_WARPS,
    )
    launching.launcher(sketch_parts, traced)[(rows * parts, 1, 1)](
        bytes_of(xs),
        signs.view(torch.int32),
        turns,
        origins,
        table,
        parts,
        -(-slots // (together * parts)),
        slots,
        number,
        length,
        start,
        stride,
        a_run,
        DOUBLE=_is_double(xs.dtype),
        INTEGER=not xs.dtype.is_floating_point,
        RUNS=number > 1,
        TOGETHER=together,
        BUCKETS=buckets,
        num_warps=_warps(buckets),
    )


def _join(table: Tensor, traced: bool) -> tuple[Tensor, Tensor]:
    rows, parts, width = table.shape
    sums = torch.empty((rows, width - _FACTS), dtype=torch.float64, device=table.device)
    facts = torch.empty((rows, _FACTS), dtype=torch.float64, device=table.device)
    launching.launcher(join_parts, traced)[(rows, -(-width // _COLUMNS), 1)](
        table, sums, facts, parts, width - _FACTS, PARTS=_JOINED, COLUMNS=_COLUMNS, num_warps=_WARPS
    )
    return sums, facts
