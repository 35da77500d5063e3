"""Sums of the elements of a tensor in few buckets, with random signs, from which the length of the tensor can be estimated.

The elements, in order, are blocks of as many elements as there are buckets, k, in groups of 64. Eight blocks are an octet. The
element at place (q xor x_b) + 64 r_b, modulo k, of block b is added to bucket q, with a sign. The numbers x_b, below 64, and r_b,
below k / 64, are hashes of b, and the sign is one of b and q, so nothing is stored, and all is the same everywhere. Elements of
one block never meet. Elements of two blocks meet with the probability 1 / k, or in one octet at most 8/7 / k: there the lower
three bits of x_b are a t + s, of block t and two hashes of the octet, a and s, as polynomials over bits modulo x^3 + x + 1. So
they are another number in each block of an octet, and a kernel that reads the blocks in the order of these numbers moves no
element within eight. Only the index in the whole tensor counts, so the sums of parts of a tensor add up to those of the whole.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache
from itertools import pairwise

import torch
from torch import Tensor
from torch.library import custom_op
from torch.nn.functional import pad

from reducers.kernels.chunks import CHUNK
from reducers.kernels.cpp.sketch import looped_sketches
from reducers.kernels.failing import Kernels, found, in_triton, tried
from reducers.kernels.hashing import mix, shift_right
from reducers.kernels.parts import Runs, TensorPart, runs_of
from reducers.kernels.precision import real
from reducers.kernels.waiting import KernelWriter

FACTS = ("count", "nonfinite", "power", "min", "max")
"""What is known of a tensor beside the sums: how many elements are finite, and how many are not; of the finite ones the sum of the
squares, the least and the greatest, inf and -inf if there are none."""

_GROUP = 64  # neighbouring buckets; of a block, the signs of what they are added are one word
_NOTHING = (0.0, 0.0, 0.0, torch.inf, -torch.inf)


SKETCHES = Kernels({"cuda": in_triton("sketch")}, "adds elements with random signs")


def sketched(xs: Tensor, buckets: int, part: TensorPart | None = None) -> tuple[Tensor, Tensor]:
    """Return the sums of the finite elements of each of several tensors in so many buckets, a multiple of 64, and facts of each.

    Sums are rounded in float64 in an order that depends on the kernel; nothing else does.

    Args:
        xs: tensors of one shape, stacked along the first axis. A complex number is two elements.
        part: of what the tensors are parts; None if they are whole.

    Returns:
        float64 (float32 on devices without it): the sums [rows, buckets], and [rows, 5], the columns of which are `FACTS`.
    """
    if torch.compiler.is_compiling():
        shape, start = ((), ()) if part is None else part
        in_graph: tuple[Tensor, Tensor] = as_operator(xs, buckets, list(shape), list(start))
        return in_graph
    if xs.is_complex():
        xs, part = torch.view_as_real(xs.resolve_conj()), part and TensorPart((*part.shape, 2), (*part.start, 0))
    return _added([_sketched(piece, buckets, runs) for piece, runs in runs_of(xs, part)])


def sketch_writer(x: Tensor, buckets: int) -> KernelWriter | None:
    """Return what writes the facts and the sums of whole contiguous observations like `x`, float64 [5] and [buckets].

    None if its device has no kernel for them.
    """
    room = found(SKETCHES, x)
    return None if room is None else _writer(room.sketch_table, tuple(x.shape), x.dtype, buckets)


@lru_cache(maxsize=1024)
def _writer(
    make: Callable[..., KernelWriter | None], shape: tuple[int, ...], dtype: torch.dtype, buckets: int
) -> KernelWriter | None:
    return make(torch.empty(shape, dtype=dtype, device="meta"), buckets)


@custom_op("reducers::sketched", mutates_args=())
def as_operator(xs: Tensor, buckets: int, shape: Sequence[int], start: Sequence[int]) -> tuple[Tensor, Tensor]:
    """Return what `sketched` returns. Graphs call it as it is: Inductor would narrow some products of integers.

    Args:
        shape, start: of the part, see `TensorPart`; nothing if the tensors are whole.
    """
    return sketched(xs, buckets, TensorPart(tuple(shape), tuple(start)) if shape else None)


@as_operator.register_fake
def _(xs: Tensor, buckets: int, shape: Sequence[int], start: Sequence[int]) -> tuple[Tensor, Tensor]:
    number = real(torch.empty(0, device=xs.device))
    return number.new_empty(xs.shape[0], buckets), number.new_empty(xs.shape[0], len(FACTS))


def _sketched(xs: Tensor, buckets: int, runs: Runs) -> tuple[Tensor, Tensor]:
    """Return sums and facts of tensors that are not complex; see `sketched`."""
    room = found(SKETCHES, xs) if xs.numel() else None
    swept: tuple[Tensor, Tensor] | None = None
    if room is not None:
        swept = tried(SKETCHES, xs.device, room.sketched, xs.resolve_neg(), buckets, runs)
    if swept is not None:
        return swept
    looped = looped_sketches(xs, buckets, runs)
    if looped is not None:
        return looped
    flat = xs.resolve_neg().reshape(xs.shape[0], runs.number, runs.length)
    if flat.numel() == 0:
        nothing = real(torch.tensor(_NOTHING, device=xs.device))
        return nothing.new_zeros(xs.shape[0], buckets), nothing.repeat(xs.shape[0], 1)
    if xs.device.type != "cpu" or runs.number * runs.length < 2 * CHUNK:
        return _summed(flat, buckets, runs)
    return _added([_summed(piece, buckets, some) for piece, some in _pieces(flat, buckets, runs)])


def _pieces(flat: Tensor, buckets: int, runs: Runs) -> Iterator[tuple[Tensor, Runs]]:
    """Yield pieces that fit the cache of tensors [rows, runs, elements]: some runs, or elements of the only one."""
    number, length, start, stride = runs
    if number > 1:
        size = max(1, CHUNK // length)
        for first in range(0, number, size):
            piece = flat[:, first : first + size]
            yield piece, Runs(piece.shape[1], length, start + first * stride, stride)
        return
    size = max(1, CHUNK // buckets) * buckets  # all but the first begin with a block
    ends = range(size - start % buckets, length, size)
    for first, end in pairwise((0, *ends, length)):
        yield flat[:, :, first:end], Runs(1, end - first, start + first)


def _added(parts: Sequence[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    """Return the sums and facts of elements from those of parts of them."""
    sums, facts = parts[0]
    for more, other in parts[1:]:
        sums, facts = sums + more, join_facts(facts, other)
    return sums, facts


def join_facts(facts: Tensor, other: Tensor) -> Tensor:
    """Return the facts of elements from those of some and of all others."""
    ends = torch.minimum(facts[:, 3:4], other[:, 3:4]), torch.maximum(facts[:, 4:], other[:, 4:])
    return torch.cat((facts[:, :3] + other[:, :3], *ends), dim=1)


def _summed(flat: Tensor, buckets: int, runs: Runs) -> tuple[Tensor, Tensor]:
    """Return sums and facts of tensors [rows, runs, elements], by PyTorch's operations."""
    rows, number, length, device = *flat.shape, flat.device
    value = real(flat)
    finite = torch.isfinite(value)
    value = torch.where(finite, value, 0.0)
    count = finite.sum(dim=(1, 2)).to(value.dtype)
    least = torch.where(finite, value, torch.inf).amin(dim=(1, 2))
    greatest = torch.where(finite, value, -torch.inf).amax(dim=(1, 2))
    facts = torch.stack((count, number * length - count, value.square().sum(dim=(1, 2)), least, greatest), dim=1)
    begin = runs.start + torch.arange(number, device=device)[:, None] * runs.stride  # of each run
    place, first = begin % buckets, begin // buckets
    if number == 1:
        before = runs.start % buckets
        blocks = (before + length + buckets - 1) // buckets
        value = pad(value, (before, blocks * buckets - before - length))
    else:  # each run begins elsewhere in a block, so elements are taken by their index
        blocks = (length + 2 * buckets - 2) // buckets
        index = torch.arange(blocks * buckets, device=device) - place
        there = (index >= 0) & (index < length)
        value = torch.where(there, value.gather(2, index.clamp(0, length - 1).expand(rows, -1, -1)), 0.0)
    block = first + torch.arange(blocks, device=device)  # [runs, blocks]
    group = block[..., None] * (buckets // _GROUP) + torch.arange(buckets // _GROUP, device=device)
    negative = (mix(group, 7)[..., None] >> torch.arange(_GROUP, device=device)) & 1
    turn = mix(block.reshape(-1, 1), 8)
    by = (shift_right(turn, 32) * (buckets // _GROUP) >> 32) * _GROUP
    within = turn & (_GROUP - 8) | _within_eight(block.reshape(-1, 1))
    places = ((torch.arange(buckets, device=device) ^ within) + by) % buckets
    places = places + torch.arange(number * blocks, device=device)[:, None] * buckets
    value = value.reshape(rows, number * blocks * buckets)[:, places]
    return torch.where(negative.reshape(-1, buckets) == 1, -value, value).sum(dim=1), facts


def _within_eight(block: Tensor) -> Tensor:
    """Return the lower three bits of the number by which places in blocks are turned."""
    chosen = mix(shift_right(block, 3), 9)
    factor = 1 + (shift_right(chosen, 32) * 7 >> 32)
    found = chosen & 7
    for bit in range(3):
        found = found ^ torch.where(block >> bit & 1 == 1, factor, 0)
        factor = factor << 1 & 7 ^ (factor >> 2) * 3
    return found
