"""Hashes of the bits of whole tensors, which are equal on every device, for every layout, and however the work is cut.

The bytes of a tensor, in the order of its elements, are words of 64 bits, and blocks of 1,024 words; zeros fill up the last. A
word becomes another by a bijection that spreads its bits, and is multiplied by an odd weight, a hash of its place in the block. The
hash of a block is the sum, modulo 2**64: a change within one word changes it for certain, any other change with about the
probability for random numbers. The sum of the hashes of all blocks, each mixed with the number of the block, is that of the tensor.
"""

from __future__ import annotations

import math
import sys
import zlib
from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache
from typing import TypeAlias

import torch
from torch import Tensor
from torch.library import custom_op
from torch.nn.functional import pad

from reducers.kernels.chunks import CHUNK
from reducers.kernels.cpp.digest import looped_digests
from reducers.kernels.failing import Kernels, found, tried
from reducers.kernels.hashing import GOLDEN, mix, mixed, shift_right
from reducers.kernels.precision import has_memory

__all__ = ["BLOCK", "NANS", "absorbed", "digests"]

_WORDS = 1 << 10  # of a block
BLOCK = 8 * _WORDS
"""Bytes of a block."""

NANS = {
    torch.float64: ((1 << 63) - 1, 0x7FF << 52, 0xFFF << 51),
    torch.float32: (0x7FFFFFFF, 0x7F800000, 0x7FC00000),
    torch.float16: (0x7FFF, 0x7C00, 0x7E00),
    torch.bfloat16: (0x7FFF, 0x7F80, 0x7FC0),
    torch.float8_e5m2: (0x7F, 0x7C, 0x7E),
    torch.float8_e4m3fn: (0x7F, 0x7E, 0x7F),
}
"""Of dtypes with more than one NaN: the bits without the sign, infinity or the highest number, and the NaN that stands for all."""

_NONE = (0, 0, 0)
_CODES = {dtype: zlib.crc32(str(dtype).encode()) for dtype in vars(torch).values() if isinstance(dtype, torch.dtype)}
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_COPIED = 1 << 20  # bytes of a part that is copied because its elements are not neighbours: it stays in the cache

Hashed: TypeAlias = "Callable[..., Tensor]"
Absorbed: TypeAlias = "Callable[..., list[Tensor]]"


@lru_cache(maxsize=1)
def _triton_digests() -> tuple[Hashed, Absorbed] | None:
    """The kernels in Triton that hash bits, and that join hashes; None without Triton."""
    try:
        from reducers.kernels.triton.digest import absorbed, hashed
    except ImportError:
        return None
    return hashed, absorbed


DIGESTS: Kernels[tuple[Hashed, Absorbed]] = Kernels({"cuda": _triton_digests}, "hashes the bits of tensors")


def digests(xs: Tensor) -> list[int] | Tensor:
    """Return the hash of each of several tensors of one shape and dtype, stacked along the first axis; none is empty.

    Shape and dtype count, and the bits of each element, in order. All NaNs of a dtype are one.

    Returns:
        integers from 0 to below 2**64, of tensors whose memory the CPU may read here; of others int64, which are the same numbers
        modulo 2**64.
    """
    if torch.compiler.is_compiling():
        in_graph: Tensor = as_operator(xs)
        return in_graph
    rows, shape, code = xs.shape[0], xs.shape[1:], _CODES[xs.dtype]
    xs = xs.resolve_conj().resolve_neg()
    xs = torch.view_as_real(xs) if xs.is_complex() else xs
    kind = code
    for size in shape:
        kind = mixed(kind + size, 4)
    kernels = found(DIGESTS, xs.device)
    hashes: Tensor | None = None if kernels is None else tried(DIGESTS, xs.device, kernels[0], xs, kind, NANS.get(xs.dtype, _NONE))
    if hashes is not None:
        return hashes
    looped = _looped(xs, rows)
    if looped is None:
        return mix(_hashed(xs, rows) + ((kind + 2**63) % 2**64 - 2**63), 5)
    return [mixed(one + kind, 5) for one in looped]


def absorbed(hashes: Tensor, state: Sequence[Tensor], factor: int, power: int) -> list[Tensor] | None:
    """Return the entries of a state of `Digest` after observations with these hashes, by one launch of a kernel; None without one.

    Args:
        state: the entries before, digest, factor and observations, or nothing.
        factor: the base of the polynomial.
        power: of it, for so many observations.
    """
    kernels = found(DIGESTS, hashes.device)
    if kernels is None:
        return None
    entries: list[Tensor] | None = tried(DIGESTS, hashes.device, kernels[1], hashes, state, factor, power)
    return entries


@custom_op("reducers::digests", mutates_args=())
def as_operator(xs: Tensor) -> Tensor:
    """Return what `digests` returns, as int64. Graphs call it as it is: Inductor would narrow some products of integers."""
    hashes = digests(xs)
    if isinstance(hashes, Tensor):
        return hashes
    return torch.tensor([(one + 2**63) % 2**64 - 2**63 for one in hashes], device=xs.device)


@as_operator.register_fake
def _(xs: Tensor) -> Tensor:
    return xs.new_empty(xs.shape[0], dtype=torch.int64)


def _looped(xs: Tensor, rows: int) -> list[int] | None:
    """Return the sums of the blocks of each tensor, by the loop; None if there is none."""
    nans = NANS.get(xs.dtype, _NONE)
    if xs.device.type != "cpu":
        return None
    if rows > 1 or xs.is_contiguous() or xs.nbytes < 2 * _COPIED:
        return looped_digests(xs.contiguous(), rows, 0, nans)
    whole = 0
    for part, first in _parts(xs[0]):
        hashes = looped_digests(part.contiguous(), 1, first, nans)
        if hashes is None:
            return None
        whole += hashes[0]
    return [whole % 2**64]


def _parts(x: Tensor) -> Iterator[tuple[Tensor, int]]:
    """Yield parts of `x` along its first axis that begin with a block, each with the number of that block."""
    while len(x) == 1:
        x = x[0]
    a_row = x.nbytes // len(x)
    step = BLOCK // math.gcd(BLOCK, a_row)  # rows whose bytes are whole blocks
    step *= max(1, _COPIED // (step * a_row))
    for start in range(0, len(x), step):
        yield x[start : start + step], start * a_row // BLOCK


def _hashed(xs: Tensor, rows: int) -> Tensor:
    """Return the sums of the blocks of each tensor, by PyTorch's operations: int64 [rows]."""
    bits = xs.contiguous().view(_INTEGERS[xs.dtype.itemsize]).reshape(rows, -1)
    magnitude, highest, nan = NANS.get(xs.dtype, _NONE)
    parts = torch.split(bits, CHUNK * 8 // xs.dtype.itemsize, dim=1) if xs.device.type == "cpu" else (bits,)
    weights = mix(torch.arange(_WORDS, device=xs.device), 1) | 1
    sums = []
    for number, part in enumerate(parts):
        if magnitude:
            part = torch.where((part & magnitude) > highest, nan, part)
        blocks = _spread(_words(part)) * weights
        places = torch.arange(blocks.shape[1], device=xs.device) + number * (CHUNK // _WORDS)
        sums.append(mix(mix(blocks.sum(dim=2), 2) + places, 3).sum(dim=1))
    return sums[0] if len(sums) == 1 else torch.stack(sums).sum(dim=0)


def _words(bits: Tensor) -> Tensor:
    """Return integers [rows, elements] of any size as words, int64 [rows, blocks, words of a block]."""
    rows, number, size = bits.shape[0], bits.shape[1], bits.dtype.itemsize
    a_block = BLOCK // size
    blocks = (number + a_block - 1) // a_block
    bits = pad(bits, (0, blocks * a_block - number))
    if sys.byteorder == "little" and has_memory(bits):
        return bits.view(torch.int64).reshape(rows, blocks, _WORDS)
    if size == 8:
        return bits.reshape(rows, blocks, _WORDS)
    shifts = torch.arange(0, 64, 8 * size, device=bits.device)  # vmap has no views of another size
    wide = bits.to(torch.int64) & ((1 << 8 * size) - 1)
    return (wide.reshape(rows, blocks, _WORDS, 8 // size) << shifts).sum(dim=3)


def _spread(words: Tensor) -> Tensor:
    """Return words whose bits are spread over them by a bijection; zero stays zero."""
    words = (words ^ shift_right(words, 32)) * GOLDEN
    return words ^ shift_right(words, 32)
