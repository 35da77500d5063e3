"""The launches that add elements with random signs."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from reducers.kernels.parts import Runs
from reducers.kernels.triton.arguments import DTYPES
from reducers.kernels.triton.launching import Launch, is_aligned, launch_of
from reducers.kernels.triton.sketch_kernel import FACTS, OCTET, join_parts, make_signs, sketch_parts
from reducers.kernels.triton.sweep import on_device
from reducers.kernels.triton.tiling import power_of_two

MAX_BUCKETS = 4096
"""For more, the octets of a usual tensor are few."""

_FACTS, _OCTET = int(FACTS.value), int(OCTET.value)
_GROUP = 64  # elements whose signs are one word
_WIDTH = 256  # buckets of a program, at most
_LANES = 32  # buckets of a warp: each thread has eight sums, and reads eight elements of an octet
_PROCESSORS = 132  # of an H100, on which all programs of a tensor run at the same time
_JOINED, _AT_ONCE = 1024, 256  # parts of a column that a program joins at once; numbers, if that is of more columns than one
_SIGNS = 128  # groups of buckets of octets whose signs a program makes
_WARPS = 4


def sketched(xs: Tensor, buckets: int, runs: Runs) -> tuple[Tensor, Tensor] | None:
    """Return what `sketched` of `reducers.kernels.sketches` does of tensors that are not empty and not complex. Three launches.

    Nothing waits for the device. Equal tensors give equal bits.

    Args:
        runs: of each tensor.

    Returns:
        None if the dtype is not supported, or the number of buckets is no power of two, or above `MAX_BUCKETS`.
    """
    if not _takes(xs.dtype, buckets):
        return None
    xs = xs.contiguous()
    plan = _plan(xs.shape[0], xs.dtype, buckets, runs)
    sums, facts = (torch.empty((xs.shape[0], columns), dtype=torch.float64, device=xs.device) for columns in (buckets, _FACTS))
    plan.run(xs, sums, facts)
    return sums, facts


class SketchTable:
    """Writes facts and sums of whole contiguous observations of one shape and dtype, float64 [5] and [buckets]. Three launches."""

    def __init__(self, like: Tensor, buckets: int) -> None:
        self._plan = _plan(1, like.dtype, buckets, Runs(1, like.numel()))

    def write_to(self, x: Tensor, *to: Tensor) -> None:
        """Write those of an observation, which must be like the one that this was made for, in this order."""
        facts, sums = to
        self._plan.run(x, sums, facts)


def sketch_table(like: Tensor, buckets: int) -> SketchTable | None:
    """Return what writes sketches of observations like this one; None if the kernel does not take them."""
    return SketchTable(like, buckets) if _takes(like.dtype, buckets) else None


def _takes(dtype: torch.dtype, buckets: int) -> bool:
    return dtype in DTYPES and buckets <= MAX_BUCKETS and not buckets & (buckets - 1)


class _Plan(NamedTuple):
    """How tensors of one form are sketched: by three launches, by way of a table of this shape, see `sketch_parts`."""

    runs: Runs
    table: tuple[int, int, int, int]
    octets: int
    launches: tuple[Launch, Launch, Launch]

    def new_signs(self, device: torch.device) -> tuple[Tensor, Tensor, Tensor | None]:
        """Return memory for what `make_signs` writes."""
        words = _OCTET * self.table[1] * (self.table[2] - _FACTS) // _GROUP
        signs = torch.empty((self.octets, words), dtype=torch.int64, device=device)
        turns = torch.empty((self.octets, _OCTET), dtype=torch.int32, device=device)
        return signs, turns, torch.empty((self.octets, 2), dtype=torch.int64, device=device) if self.runs.number > 1 else None

    def run(self, xs: Tensor, sums: Tensor, facts: Tensor) -> None:
        """Write the sums and facts of contiguous tensors."""
        with on_device(xs):
            device, (signs, *turns) = xs.get_device(), self.new_signs(xs.device)
            table = torch.empty(self.table, dtype=torch.float64, device=xs.device)
            make, add, join = self.launches
            make(device, (signs, *turns))
            add((device, is_aligned(xs)), (xs, signs.view(torch.int32), *turns, table))
            join((device, is_aligned(sums), is_aligned(facts)), (table, sums, facts))


@lru_cache(maxsize=4096)
def _plan(rows: int, dtype: torch.dtype, buckets: int, runs: Runs) -> _Plan:
    (number, length, start, stride), a_run = runs, _octets(runs, buckets)
    octets, width = number * a_run, min(buckets, _WIDTH)
    double = not dtype.is_floating_point or dtype is torch.float64
    together = 2 if double else 4
    a_part = -(-octets // min(octets, _most_parts(buckets, double)))
    a_part = -(-a_part // together) * together if a_part > together else a_part
    parts, columns, groups = -(-octets // a_part), buckets // width, octets * buckets // _GROUP
    begins = (start, *((stride,) if number > 1 else ()), *((length,) if rows * number > 1 else ()))
    table = rows, columns, width + _FACTS, parts
    constants = {
        "DOUBLE": double,
        "INTEGER": not dtype.is_floating_point,
        "RUNS": number > 1,
        "STRAIGHT": all(begin % 8 == 0 for begin in begins),
        "TOGETHER": together,
        "BUCKETS": buckets,
        "WIDTH": width,
        "num_warps": width // _LANES,
    }
    making = (
        (-(-groups // _SIGNS), 1, 1),
        (octets, length, start, stride, a_run),
        {"BUCKETS": buckets, "RUNS": number > 1, "BLOCK": _SIGNS, "num_warps": _WARPS},
    )
    adding = (rows * parts, columns, 1), (parts, a_part, octets, number, length, start, stride, a_run), constants
    joined = power_of_two(parts, _JOINED)
    together = max(1, _AT_ONCE // joined)
    joining = (
        (rows, -(-(buckets + _FACTS) // together), 1),
        (parts, buckets, columns),
        {"WIDTH": width, "PARTS": joined, "COLUMNS": together, "num_warps": _WARPS},
    )
    launches = launch_of(make_signs, *making), launch_of(sketch_parts, *adding), launch_of(join_parts, *joining)
    return _Plan(runs, table, octets, launches)


def _most_parts(buckets: int, double: bool) -> int:
    warps = 16 if double else 24  # of a processor, which the registers of threads allow
    return max(1, warps * _PROCESSORS // (buckets // _LANES))


def _octets(runs: Sequence[int], buckets: int) -> int:
    """Return of how many octets a run has elements at most."""
    (number, length, start, stride), size = runs, _OCTET * buckets
    if number == 1:
        return (start % size + length - 1) // size + 1
    apart = math.gcd(size, start, stride)  # each run begins at a multiple of it
    return (size - apart + length - 1) // size + 1
