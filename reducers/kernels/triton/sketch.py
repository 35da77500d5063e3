"""The launches that add elements with random signs, as operators that tracers see, and as what eager updates call."""

from __future__ import annotations

import math
from functools import lru_cache
from typing import NamedTuple, Sequence, Tuple  # noqa: UP035  # what torch 2.8 can read in the signature of an operator

import torch
from torch import Tensor
from torch.library import triton_op

from reducers.kernels.parts import Runs
from reducers.kernels.triton.arguments import DTYPES, Arguments, bytes_of
from reducers.kernels.triton.launching import Launch, is_aligned, launch_of, launch_traced
from reducers.kernels.triton.sketch_kernel import FACTS, OCTET, join_parts, make_signs, sketch_parts
from reducers.kernels.triton.sweep import on_device
from reducers.kernels.triton.tiling import power_of_two

__all__ = ["MAX_BUCKETS", "SketchTable", "join_sketches", "sketch_into", "sketch_table", "sketched"]

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
    if type(xs) is not Tensor:  # for a plain one an operator would cost more than the launch
        table = torch.empty(plan.table, dtype=torch.float64, device=xs.device)
        sketch_into(xs, table, runs)
        found: tuple[Tensor, Tensor] = join_sketches(table)
        return found
    sums, facts = _results(plan.table, xs.device)
    plan.run(xs, sums, facts)
    return sums, facts


class SketchTable:
    """Writes facts and sums of whole contiguous observations of one shape and dtype, float64 [5] and [buckets]. Three launches."""

    def __init__(self, like: Tensor, buckets: int) -> None:
        self._plan = _plan(1, like.dtype, buckets, Runs(1, like.numel()))

    def write_to(self, x: Tensor, *to: Tensor) -> None:
        """Write those of an observation, which must be like the one that this was made for, in this order."""
        facts, sums = to
        if type(x) is Tensor:
            self._plan.run(x, sums, facts)
            return
        table = torch.empty(self._plan.table, dtype=torch.float64, device=x.device)
        sketch_into(x[None], table, self._plan.runs)
        for one, found in zip((sums, facts), join_sketches(table), strict=True):
            one.copy_(found[0])


def sketch_table(like: Tensor, buckets: int) -> SketchTable | None:
    """Return what writes sketches of observations like this one; None if the kernel does not take them."""
    return SketchTable(like, buckets) if _takes(like.dtype, buckets) else None


def _takes(dtype: torch.dtype, buckets: int) -> bool:
    return dtype in DTYPES and buckets <= MAX_BUCKETS and not buckets & (buckets - 1)


@triton_op("reducers::sketch_parts", mutates_args={"table"})
def sketch_into(xs: Tensor, table: Tensor, runs: Sequence[int]) -> None:
    """Write the sums and facts of parts of tensors into a table, see the kernel `sketch_parts`. Two launches."""
    plan = _plan(xs.shape[0], xs.dtype, _buckets(table.shape), Runs(*runs))
    signs, *turns = plan.new_signs(xs.device)
    launch_traced(make_signs, plan.making, (signs, *turns))
    launch_traced(sketch_parts, plan.adding, (bytes_of(xs), signs.view(torch.int32), *turns, table))


@triton_op("reducers::join_sketches", mutates_args={})
def join_sketches(table: Tensor) -> Tuple[Tensor, Tensor]:  # noqa: UP006
    """Return the sums and facts of tensors from those of their parts. One launch."""
    sums, facts = _results(table.shape, table.device)
    launch_traced(join_parts, _joining(table.shape), (table, sums, facts))
    return sums, facts


class _Plan(NamedTuple):
    """How tensors of one form are sketched.

    Attributes:
        runs: of each tensor.
        table: the shape of the table, see `sketch_parts`.
        octets: of a tensor.
        making, adding, joining: the arguments of the three launches.
        launches: the launches themselves.
    """

    runs: Runs
    table: tuple[int, int, int, int]
    octets: int
    making: Arguments
    adding: Arguments
    joining: Arguments
    launches: tuple[Launch, Launch, Launch]

    def new_signs(self, device: torch.device) -> tuple[Tensor, Tensor, Tensor | None]:
        """Return memory for what `make_signs` writes."""
        words = _OCTET * _buckets(self.table) // _GROUP
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
    joining = _joining(table)
    launches = launch_of(make_signs, *making), launch_of(sketch_parts, *adding), launch_of(join_parts, *joining)
    return _Plan(runs, table, octets, making, adding, joining, launches)


def _joining(table: Sequence[int]) -> Arguments:
    rows, blocks, width, parts = table
    buckets = _buckets(table)
    joined = power_of_two(parts, _JOINED)
    columns = max(1, _AT_ONCE // joined)
    constants = {"WIDTH": width - _FACTS, "PARTS": joined, "COLUMNS": columns, "num_warps": _WARPS}
    return (rows, -(-(buckets + _FACTS) // columns), 1), (parts, buckets, blocks), constants


def _results(table: Sequence[int], device: torch.device) -> tuple[Tensor, Tensor]:
    sums, facts = (torch.empty((table[0], columns), dtype=torch.float64, device=device) for columns in (_buckets(table), _FACTS))
    return sums, facts


def _buckets(table: Sequence[int]) -> int:
    """Return the number of buckets of a table of this shape."""
    return table[1] * (table[2] - _FACTS)


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
