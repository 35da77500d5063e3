"""The launches that hash the bits of tensors, as operators that tracers see, and as what eager updates call."""

from __future__ import annotations

from typing import List, Sequence  # noqa: UP035  # what torch 2.8 can read in the signature of an operator

import torch
from torch import Tensor
from torch.library import triton_op
from torch.nn.functional import pad

from reducers.kernels.triton import launching
from reducers.kernels.triton.digest_kernel import absorb, finish, hash_parts

__all__ = ["absorbed", "digest_after", "hash_into", "hashed", "hashes_of"]

_WORDS = 1 << 10  # of a block
_TOGETHER = 4  # blocks of a tile
_MOST_PARTS = 1 << 10
_JOINED = 1 << 10  # parts that are added at once
_WARPS = 4


def hashed(xs: Tensor, kind: int, nans: tuple[int, int, int]) -> Tensor:
    """Return the hashes of several tensors, stacked along the first axis, none of which is empty: int64 [rows]. Two launches.

    Tensors whose bytes do not fill words of 64 bits, or do not begin at one, are copied before.

    Args:
        xs: not complex.
        kind: a hash of shape and dtype, from 0 to below 2**64.
        nans: see `NANS` of `reducers.kernels.digests`; zeros if there is no NaN to replace.
    """
    words = _words(xs)
    blocks = -(-words.shape[1] // _WORDS)
    table = torch.empty((xs.shape[0], min(-(-blocks // _TOGETHER), _MOST_PARTS)), dtype=torch.int64, device=xs.device)
    constants = _constants(xs.dtype.itemsize * 8, nans)
    kind = (kind + 2**63) % 2**64 - 2**63
    if type(xs) is not Tensor:  # for a plain one an operator would cost more than the launch
        hash_into(words, table, constants)
        hashes: Tensor = hashes_of(table, kind)
        return hashes
    with torch.cuda.device(xs.device if xs.is_cuda else -1):
        _hash(words, table, constants, False)
        return _finish(table, kind, False)


def absorbed(hashes: Tensor, state: Sequence[Tensor], factor: int, power: int) -> list[Tensor]:
    """Return the state of `Digest` after observations with these hashes, in order. One launch.

    Args:
        hashes: int64 [rows].
        state: digest, factor and observations before, or nothing.
        factor: the base of the polynomial.
        power: of it, for so many observations.
    """
    if type(hashes) is not Tensor:
        found: list[Tensor] = digest_after(hashes, state, factor, power)
        return found
    with torch.cuda.device(hashes.device if hashes.is_cuda else -1):
        return _absorb(hashes, state, factor, power, False)


@triton_op("reducers::absorb_hashes", mutates_args={})
def digest_after(hashes: Tensor, state: Sequence[Tensor], factor: int, power: int) -> List[Tensor]:  # noqa: UP006
    """Return what `absorbed` does. One launch."""
    return _absorb(hashes, state, factor, power, True)


@triton_op("reducers::hash_parts", mutates_args={"table"})
def hash_into(words: Tensor, table: Tensor, constants: Sequence[int]) -> None:
    """Write the sums of the hashes of parts of tensors, words of 64 bits, into a table, int64 [rows, parts]. One launch."""
    _hash(words, table, constants, True)


@triton_op("reducers::finish_hashes", mutates_args={})
def hashes_of(table: Tensor, kind: int) -> Tensor:
    """Return the hashes of tensors from those of their parts: int64 [rows]. One launch."""
    return _finish(table, kind, True)


def _words(xs: Tensor) -> Tensor:
    """Return the bits of tensors as int64 [rows, words]; zeros fill up the last."""
    rows, size = xs.shape[0], xs.dtype.itemsize
    bits = xs.contiguous().reshape(rows, xs.numel() // rows)
    bits = bits.view({1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[size])
    missing = -bits.shape[1] % (8 // size)
    if missing:
        bits = pad(bits, (0, missing))
    elif bits.storage_offset() * size % 8:
        bits = bits.clone()
    return bits.view(torch.int64)


def _constants(bits: int, nans: tuple[int, int, int]) -> list[int]:
    """Return what the kernel is told of the NaNs in a word: masks of all elements, signed; zeros if there are none."""
    magnitude, highest, nan = nans
    if not magnitude:
        return [0] * 5
    ones = sum(1 << place for place in range(0, 64, bits))
    masks = (magnitude, magnitude - highest, magnitude + 1, nan)
    return [*((mask * ones + 2**63) % 2**64 - 2**63 for mask in masks), bits]


def _hash(words: Tensor, table: Tensor, constants: Sequence[int], traced: bool) -> None:
    (rows, number), parts = words.shape, table.shape[1]
    blocks = -(-number // _WORDS)
    magnitude, above, signs, nan = (one % 2**64 for one in constants[:4])
    launching.launcher(hash_parts, traced)[(parts, rows, 1)](
        words,
        table,
        number,
        blocks,
        -(-blocks // (_TOGETHER * parts)),
        MAGNITUDE=magnitude,
        ABOVE=above,
        SIGNS=signs,
        NANS=nan,
        BITS=constants[4],
        ONE_ROW=rows == 1,
        TOGETHER=_TOGETHER,
        WORDS=_WORDS,
        num_warps=_WARPS,
    )


def _finish(table: Tensor, kind: int, traced: bool) -> Tensor:
    rows, parts = table.shape
    hashes = torch.empty(rows, dtype=torch.int64, device=table.device)
    launching.launcher(finish, traced)[(rows, 1, 1)](table, hashes, parts, kind, BLOCK=_JOINED, num_warps=_WARPS)
    return hashes


def _absorb(hashes: Tensor, state: Sequence[Tensor], factor: int, power: int, traced: bool) -> list[Tensor]:
    results = [torch.empty((), dtype=torch.int64, device=hashes.device) for _ in range(3)]
    launching.launcher(absorb, traced)[(1, 1, 1)](
        hashes, *results, *(state or (None,) * 3), hashes.shape[0], power, FACTOR=factor, STATE=len(state) > 0, num_warps=1
    )
    return results
