"""Sums of the elements of a tensor in few buckets, with random signs, from which the length of the tensor can be estimated.

The elements, in order, are blocks of as many elements as there are buckets, k. Element i, at place p of block b, is added to bucket
p + r_b, modulo k, with the sign s_i; r_b and s_i are hashes of b and of i, so nothing is stored, and they are the same everywhere.
Elements of one block never meet, and elements of two blocks meet with the probability 1 / k.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import TypeAlias

import torch
from torch import Tensor
from torch.library import custom_op
from torch.nn.functional import pad

from reducers.kernels.chunks import CHUNK
from reducers.kernels.cpp.sketch import looped_sketches
from reducers.kernels.failing import Kernels, found, tried
from reducers.kernels.hashing import mix, shift_right
from reducers.kernels.precision import real

__all__ = ["FACTS", "sketched"]

FACTS = ("count", "nonfinite", "power", "min", "max")
"""What is known of a tensor beside the sums: how many elements are finite, and how many are not; of the finite ones the sum of the
squares, the least and the greatest, inf and -inf if there are none."""

_GROUP = 64  # elements whose signs are one word
_NOTHING = (0.0, 0.0, 0.0, torch.inf, -torch.inf)

Kernel: TypeAlias = "Callable[..., tuple[Tensor, Tensor] | None]"


@lru_cache(maxsize=1)
def _triton_sketches() -> Kernel | None:
    """The kernel in Triton that adds with random signs; None without Triton."""
    try:
        from reducers.kernels.triton.sketch import sketched
    except ImportError:
        return None
    return sketched


SKETCHES: Kernels[Kernel] = Kernels({"cuda": _triton_sketches}, "adds elements with random signs")


def sketched(xs: Tensor, buckets: int) -> tuple[Tensor, Tensor]:
    """Return the sums of the finite elements of each of several tensors in so many buckets, a multiple of 64, and facts of each.

    Sums are rounded in float64 in an order that depends on the kernel; nothing else does.

    Args:
        xs: tensors of one shape, stacked along the first axis. A complex number is two elements.

    Returns:
        float64 (float32 on devices without it): the sums [rows, buckets], and [rows, 5], the columns of which are `FACTS`.
    """
    if torch.compiler.is_compiling():
        in_graph: tuple[Tensor, Tensor] = as_operator(xs, buckets)
        return in_graph
    xs = torch.view_as_real(xs.resolve_conj()) if xs.is_complex() else xs
    kernel = found(SKETCHES, xs.device) if xs.numel() else None
    if kernel is not None and (swept := tried(SKETCHES, xs.device, kernel, xs.resolve_neg(), buckets)) is not None:
        return swept
    looped = looped_sketches(xs, buckets)
    if looped is not None:
        return looped
    flat = xs.resolve_neg().reshape(xs.shape[0], xs[:1].numel())
    if flat.shape[1] == 0:
        nothing = real(torch.tensor(_NOTHING, device=xs.device))
        return nothing.new_zeros(xs.shape[0], buckets), nothing.repeat(xs.shape[0], 1)
    if xs.device.type != "cpu" or flat.shape[1] < 2 * CHUNK:
        return _summed(flat, buckets, 0)
    size = max(1, CHUNK // buckets)  # blocks of a part
    parts = [_summed(part, buckets, number * size) for number, part in enumerate(torch.split(flat, size * buckets, dim=1))]
    sums, facts = parts[0]
    for more, other in parts[1:]:
        added = facts[:, :3] + other[:, :3]
        least, greatest = torch.minimum(facts[:, 3:4], other[:, 3:4]), torch.maximum(facts[:, 4:], other[:, 4:])
        sums, facts = sums + more, torch.cat((added, least, greatest), dim=1)
    return sums, facts


@custom_op("reducers::sketched", mutates_args=())
def as_operator(xs: Tensor, buckets: int) -> tuple[Tensor, Tensor]:
    """Return what `sketched` returns. Graphs call it as it is: Inductor would narrow some products of integers."""
    return sketched(xs, buckets)


@as_operator.register_fake
def _(xs: Tensor, buckets: int) -> tuple[Tensor, Tensor]:
    number = real(torch.empty(0, device=xs.device))
    return number.new_empty(xs.shape[0], buckets), number.new_empty(xs.shape[0], len(FACTS))


def _summed(flat: Tensor, buckets: int, first: int) -> tuple[Tensor, Tensor]:
    """Return sums and facts of tensors [rows, elements], by PyTorch's operations; the first block has the number `first`."""
    rows, length, device = *flat.shape, flat.device
    value = real(flat)
    finite = torch.isfinite(value)
    value = torch.where(finite, value, 0.0)
    count = finite.sum(dim=1).to(value.dtype)
    least, greatest = torch.where(finite, value, torch.inf).amin(dim=1), torch.where(finite, value, -torch.inf).amax(dim=1)
    facts = torch.stack((count, length - count, value.square().sum(dim=1), least, greatest), dim=1)
    blocks = (length + buckets - 1) // buckets
    value = pad(value, (0, blocks * buckets - length)).reshape(rows, blocks, buckets // _GROUP, _GROUP)
    group = torch.arange(blocks * (buckets // _GROUP), device=device).reshape(blocks, -1, 1) + first * (buckets // _GROUP)
    negative = (mix(group, 7) >> torch.arange(_GROUP, device=device)) & 1
    value = torch.where(negative == 1, -value, value).reshape(rows, blocks * buckets)
    block = torch.arange(blocks, device=device)[:, None]
    turn = shift_right(mix(block + first, 8), 33) % buckets
    places = block * buckets + (torch.arange(buckets, device=device) - turn) % buckets
    return value[:, places].sum(dim=1), facts
