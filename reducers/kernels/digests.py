"""Hashes of the bits of whole tensors, which are equal on every device, for every layout, and however the tensor is cut.

The bytes of a tensor, in the order of its elements, are words of 64 bits, and blocks of 512 words; zeros fill up the last. Its hash
are two sums, modulo 2**64. A word adds to the first its product with a coefficient, and to the second that of its bytes in the
opposite order with another, because the highest bits of a factor count for little in a product. A coefficient is an odd hash of
the place in the block, times one of the number of the block. So both sums are linear in the bits: what the parts of a tensor add,
each from where it begins in the whole, adds up to the hash of the whole.
"""

from __future__ import annotations

import math
import sys
import zlib
from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor
from torch.library import custom_op
from torch.nn.functional import pad

from reducers.kernels.chunks import CHUNK
from reducers.kernels.cpp.digest import DigestSlots, looped_digests
from reducers.kernels.cpp.library import loop_for
from reducers.kernels.failing import Kernels, found, in_triton, tried
from reducers.kernels.hashing import GOLDEN, SECOND, mix, mixed, shift_right, words_of
from reducers.kernels.parts import Runs, TensorPart, runs_of
from reducers.kernels.precision import has_memory
from reducers.kernels.waiting import WordSlots, WordTable

_WORDS = 1 << 9  # of a block
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
_NOTHING = (0, 0)
_CODES = {dtype: zlib.crc32(str(dtype).encode()) for dtype in vars(torch).values() if isinstance(dtype, torch.dtype)}
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_COPIED = 1 << 20  # bytes of a part that is copied because its elements are not neighbours: it stays in the cache


DIGESTS = Kernels({"cuda": in_triton("digest")}, "hashes the bits of tensors")


def digests(xs: Tensor, part: TensorPart | None = None) -> list[int] | Tensor:
    """Return the hash of each of several tensors of one shape and dtype, stacked along the first axis; none is empty.

    Shape and dtype count, and the bits of each element, with its place. All NaNs of a dtype are one.

    Args:
        part: of what the tensors are parts; the hashes of all parts add up to that of the whole.

    Returns:
        the two sums of each, one tensor after another, from 0 to below 2**64, of tensors whose memory the CPU may read here; of
        others int64 [rows, 2], which are the same numbers modulo 2**64.
    """
    if torch.compiler.is_compiling():
        shape, start = ((), ()) if part is None else part
        in_graph: Tensor = as_operator(xs, list(shape), list(start))
        return in_graph
    part = None if part is None or part.shape == xs.shape[1:] else part
    whole = xs.shape[1:] if part is None else part.shape
    kinds = [0, 0] if part is not None and any(part.start) else _kinds(_CODES[xs.dtype], whole)
    xs = xs.resolve_conj().resolve_neg()
    if xs.is_complex():
        xs, part = torch.view_as_real(xs), part and TensorPart((*part.shape, 2), (*part.start, 0))
    found: list[Any] = [_hashed(piece, runs, [0, 0] if number else kinds) for number, (piece, runs) in enumerate(runs_of(xs, part))]
    if isinstance(found[0], Tensor):
        return sum(found[1:], found[0])
    return [sum(sums) % 2**64 for sums in zip(*found, strict=True)]


def digest_words(xs: Tensor, part: TensorPart | None = None) -> Tensor:
    """Return what `digests` does, always as int64 [rows, 2], modulo 2**64."""
    hashes = digests(xs, part)
    return hashes if isinstance(hashes, Tensor) else words_of(hashes, xs.device).view(-1, 2)


def absorbed(hashes: Tensor, state: Sequence[Tensor], factor: Sequence[int], power: Sequence[int]) -> list[Tensor] | None:
    """Return the entries of a state of `Digest` after observations with these hashes, by one launch of a kernel; None without one.

    Args:
        hashes: int64 [observations, 2].
        state: the entries before, digest, factor and observations, or nothing.
        factor: the base of the polynomial, two words.
        power: of it, for so many observations.
    """
    room = found(DIGESTS, hashes)
    if room is None:
        return None
    entries: list[Tensor] | None = tried(DIGESTS, hashes.device, room.absorbed, hashes, state, factor, power)
    return entries


@custom_op("reducers::digests", mutates_args=())
def as_operator(xs: Tensor, shape: Sequence[int], start: Sequence[int]) -> Tensor:
    """Return what `digests` returns, as int64. Graphs call it as it is: Inductor would narrow some products of integers.

    Args:
        shape, start: of the part, see `TensorPart`; nothing if the tensors are whole.
    """
    return digest_words(xs, TensorPart(tuple(shape), tuple(start)) if shape else None)


@as_operator.register_fake
def _(xs: Tensor, shape: Sequence[int], start: Sequence[int]) -> Tensor:
    return xs.new_empty((xs.shape[0], 2), dtype=torch.int64)


def digest_slots(x: Tensor) -> WordSlots | None:
    """Return how the hashes of observations like `x` wait in a table; None if no kernel takes them."""
    return loop_slots(x) if found(DIGESTS, x) is None else digest_table(x)


def digest_table(x: Tensor) -> WordTable | None:
    """Return what `digest_slots` does if the device has a kernel; it also writes hashes, two words, to any memory there."""
    room = found(DIGESTS, x)
    return None if room is None or not _is_whole(x) else _table_of(room.digest_table, tuple(x.shape), x.dtype)


def loop_slots(x: Tensor) -> DigestSlots | None:
    """Return how the hashes of observations like `x` wait in a table that the loop writes; None if it does not take them."""
    return _loop_slots(tuple(x.shape), x.dtype) if x.device.type == "cpu" and _is_whole(x) else None


def _is_whole(x: Tensor) -> bool:
    """Return whether a tensor is its bits, one after another, in memory."""
    return bool(x.numel()) and x.is_contiguous() and not (x.is_complex() or x.is_quantized or x.is_neg())


@lru_cache(maxsize=1024)
def _table_of(make: Callable[..., WordTable | None], shape: tuple[int, ...], dtype: torch.dtype) -> WordTable | None:
    return make(torch.empty(shape, dtype=dtype, device="meta"), NANS.get(dtype, _NONE), _kinds(_CODES[dtype], shape))


@lru_cache(maxsize=1024)
def _loop_slots(shape: tuple[int, ...], dtype: torch.dtype) -> DigestSlots | None:
    function, like = loop_for("digest") if sys.byteorder == "little" else None, torch.empty(shape, dtype=dtype, device="meta")
    return function and DigestSlots(like, NANS.get(dtype, _NONE), _kinds(_CODES[dtype], shape), function)


@lru_cache(maxsize=256)
def _kinds(code: int, shape: tuple[int, ...]) -> list[int]:
    """Return what dtype and shape add to the sums of a tensor."""
    kind = code
    for size in shape:
        kind = mixed(kind + size, 4)
    return [mixed(kind, 5), mixed(kind, 6)]


def _hashed(xs: Tensor, runs: Runs, kinds: list[int]) -> list[int] | Tensor:
    """Return the sums of what is added by tensors that are not complex, and of two numbers, their kinds; see `digests`."""
    nans = NANS.get(xs.dtype, _NONE)
    room = found(DIGESTS, xs)
    hashes: Tensor | None = None if room is None else tried(DIGESTS, xs.device, room.hashed, xs, runs, nans, kinds)
    if hashes is not None:
        return hashes
    looped = _looped(xs, runs, nans, kinds) if xs.device.type == "cpu" else None
    if looped is not None:
        return looped
    sums = _of_words(xs) if runs.number == 1 and runs.start == 0 else _of_elements(xs, runs)
    return sums + words_of(kinds, sums.device)


def _looped(xs: Tensor, runs: Runs, nans: tuple[int, int, int], kinds: list[int]) -> list[int] | None:
    """Return the sums by the loop; None if there is none."""
    rows, size = xs.shape[0], xs.dtype.itemsize
    if rows > 1 or runs.number > 1 or xs.is_contiguous() or xs.nbytes < 2 * _COPIED:
        return looped_digests(xs.contiguous(), rows, runs, nans, kinds)
    sums = kinds
    for part, first in _parts(xs[0]):
        more = looped_digests(part.contiguous(), 1, Runs(1, part.numel(), runs.start + first // size), nans, _NOTHING)
        if more is None:
            return None
        sums = [one + other for one, other in zip(sums, more, strict=True)]
    return sums


def _parts(x: Tensor) -> Iterator[tuple[Tensor, int]]:
    """Yield parts of `x` along its first axis, each with the byte at which it begins."""
    while len(x) == 1:
        x = x[0]
    a_row = x.nbytes // len(x)
    step = BLOCK // math.gcd(BLOCK, a_row)  # rows whose bytes are whole blocks
    step *= max(1, _COPIED // (step * a_row))
    for start in range(0, len(x), step):
        yield x[start : start + step], start * a_row


def _of_words(xs: Tensor) -> Tensor:
    """Return the sums of whole tensors by PyTorch's operations, int64 [rows, 2]."""
    rows = xs.shape[0]
    bits = xs.contiguous().view(_INTEGERS[xs.dtype.itemsize]).reshape(rows, -1)
    parts = torch.split(bits, CHUNK * 8 // xs.dtype.itemsize, dim=1) if xs.device.type == "cpu" else (bits,)
    places = torch.arange(_WORDS, device=xs.device)
    sums = bits.new_zeros((rows, 2), dtype=torch.int64)
    for number, part in enumerate(parts):
        words = _words(_without_nans(part, xs.dtype))
        blocks = torch.arange(words.shape[1], device=xs.device) + number * (CHUNK // _WORDS)
        sums = sums + _added(words, places, blocks[:, None])
    return sums


def _of_elements(xs: Tensor, runs: Runs) -> Tensor:
    """Return the sums of parts by PyTorch's operations, int64 [rows, 2]: each element is a word of which it is alone."""
    size = xs.dtype.itemsize
    a_word = 8 // size
    bits = xs.contiguous().view(_INTEGERS[size]).reshape(xs.shape[0], runs.number, runs.length)
    sums = bits.new_zeros((xs.shape[0], 2), dtype=torch.int64)
    step = max(1, CHUNK // runs.length)
    for first in range(0, runs.number, step):
        some = _without_nans(bits[:, first : first + step], xs.dtype).to(torch.int64)
        number = torch.arange(first, first + some.shape[1], device=xs.device)[:, None]
        index = runs.start + number * runs.stride + torch.arange(runs.length, device=xs.device)
        some = some if size == 8 else (some & ((1 << 8 * size) - 1)) << (index % a_word * (8 * size))
        word = index // a_word
        sums = sums + _added(some, word % _WORDS, word // _WORDS)
    return sums


def _added(words: Tensor, places: Tensor, blocks: Tensor) -> Tensor:
    """Return what words [rows, m, n] add to the sums of each row, int64 [rows, 2].

    Args:
        places: of the words in their blocks.
        blocks: the numbers of these.
    """
    factor = blocks * GOLDEN
    factor = (factor ^ shift_right(factor, 32)) * SECOND | 1
    swapped = factor << 32 | shift_right(factor, 32) | 1
    one = words * ((mix(places, 1) | 1) * factor)
    other = _reversed(words) * ((mix(places, 2) | 1) * swapped)
    return torch.stack((one.sum(dim=(1, 2)), other.sum(dim=(1, 2))), dim=1)


def _reversed(words: Tensor) -> Tensor:
    """Return int64 with the bytes of each in the opposite order."""
    for by, mask in ((8, 0x00FF00FF00FF00FF), (16, 0x0000FFFF0000FFFF)):
        words = (words & mask) << by | shift_right(words, by) & mask
    return words << 32 | shift_right(words, 32)


def _without_nans(bits: Tensor, dtype: torch.dtype) -> Tensor:
    """Return bits in which all NaNs of the dtype are one."""
    magnitude, highest, nan = NANS.get(dtype, _NONE)
    return torch.where((bits & magnitude) > highest, nan, bits) if magnitude else bits


def _words(bits: Tensor) -> Tensor:
    """Return integers [rows, elements] of any size as words, int64 [rows, blocks, words of a block]."""
    rows, number, size = bits.shape[0], bits.shape[1], bits.dtype.itemsize
    a_block = BLOCK // size
    blocks = (number + a_block - 1) // a_block
    bits = pad(bits, (0, blocks * a_block - number))
    if sys.byteorder == "little" and has_memory(bits):
        return bits.reshape(-1).view(torch.int64).reshape(rows, blocks, _WORDS)
    if size == 8:
        return bits.reshape(rows, blocks, _WORDS)
    shifts = torch.arange(0, 64, 8 * size, device=bits.device)  # vmap has no views of another size
    wide = bits.to(torch.int64) & ((1 << 8 * size) - 1)
    return (wide.reshape(rows, blocks, _WORDS, 8 // size) << shifts).sum(dim=3)
