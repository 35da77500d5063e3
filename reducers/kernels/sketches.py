"""Sums of the elements of a tensor in few buckets, with random signs, from which the length of the tensor can be estimated.

The elements, in order, are blocks of as many elements as there are buckets, k. Element i, at place p of block b, is added to bucket
p + r_b, modulo k, with the sign s_i; r_b and s_i are hashes of b and of i, so nothing is stored, and they are the same everywhere.
Elements of one block never meet, and elements of two blocks meet with the probability 1 / k.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.library import custom_op
from torch.nn.functional import pad

from reducers.kernels.chunks import CHUNK
from reducers.kernels.cpp.sketch import looped_sketch
from reducers.kernels.hashing import mix, shift_right
from reducers.kernels.precision import finite, real

__all__ = ["sketched"]

_GROUP = 64  # elements whose signs are one word


def sketched(x: Tensor, buckets: int) -> Tensor:
    """Return the sums of the finite elements of `x` in so many buckets, a multiple of 64: float64 [buckets].

    Sums are rounded in float64 in an order that depends on the kernel; nothing else does.
    """
    if torch.compiler.is_compiling():
        found: Tensor = as_operator(x, buckets)
        return found
    looped = looped_sketch(x, buckets)
    if looped is not None:
        return looped
    flat, _ = finite(x.resolve_neg().reshape(-1))
    if x.device.type != "cpu" or flat.shape[0] < 2 * CHUNK:
        return _summed(flat, buckets, 0)
    size = max(1, CHUNK // buckets)  # blocks of a part
    sums = torch.zeros(buckets, dtype=real(flat[:0]).dtype, device=x.device)
    for number, part in enumerate(torch.split(flat, size * buckets)):
        sums = sums + _summed(part, buckets, number * size)
    return sums


@custom_op("reducers::sketched", mutates_args=())
def as_operator(x: Tensor, buckets: int) -> Tensor:
    """Return what `sketched` returns. Graphs call it as it is: Inductor would narrow some products of integers."""
    return sketched(x, buckets)


@as_operator.register_fake
def _(x: Tensor, buckets: int) -> Tensor:
    return real(x.new_empty(0)).new_empty(buckets)


def _summed(flat: Tensor, buckets: int, first: int) -> Tensor:
    blocks = (flat.shape[0] + buckets - 1) // buckets
    value = pad(real(flat), (0, blocks * buckets - flat.shape[0])).reshape(blocks, buckets // _GROUP, _GROUP)
    device = flat.device
    group = torch.arange(blocks * (buckets // _GROUP), device=device).reshape(blocks, -1, 1) + first * (buckets // _GROUP)
    negative = (mix(group, 7) >> torch.arange(_GROUP, device=device)) & 1
    value = torch.where(negative == 1, -value, value).reshape(blocks, buckets)
    turn = shift_right(mix(torch.arange(blocks, device=device) + first, 8), 33) % buckets
    places = (torch.arange(buckets, device=device) - turn[:, None]) % buckets
    return value.gather(1, places).sum(dim=0)
