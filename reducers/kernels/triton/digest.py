"""The launches that hash the bits of tensors."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from functools import lru_cache

import torch
from torch import Tensor
from torch.nn.functional import pad

from reducers.kernels.hashing import signed
from reducers.kernels.parts import Runs
from reducers.kernels.triton.digest_kernel import absorb, finish, hash_parts
from reducers.kernels.triton.launching import Launch, is_aligned, launch_of
from reducers.kernels.triton.sweep import on_device

_WORDS = 1 << 9  # of a block
_TOGETHER = 4  # slots of a tile
_MOST_PARTS = 1 << 10
_JOINED = 1 << 10  # parts that are added at once
_ABSORBED = 1 << 7  # hashes that are absorbed at once
_WARPS = 4


def hashed(xs: Tensor, runs: Runs, nans: tuple[int, int, int], kinds: Sequence[int]) -> Tensor | None:
    """Return the two sums of each of several tensors, stacked along the first axis, none of which is empty: int64 [rows, 2].

    Two launches, or one if the tensors are small. What does not fill words of 64 bits, or does not begin at one, is copied before.

    Args:
        xs: not complex.
        runs: of each tensor.
        nans: see `NANS` of `reducers.kernels.digests`; zeros if there is no NaN to replace.
        kinds: what is added to the two sums of each tensor.

    Returns:
        None if runs begin at different bytes of a word, or are more than int32 counts.
    """
    found = _words(xs, runs)
    if found is None or found[1].number * _slots(found[1]) >= 2**31:
        return None
    words, runs = found
    table = torch.empty((xs.shape[0], _parts(runs), 2), dtype=torch.int64, device=xs.device)
    launch = _launch(xs.shape[0], table.shape[1], tuple(_constants(xs.dtype.itemsize * 8, nans)), tuple(_signed(kinds)), runs)
    with on_device(xs):
        launch((xs.get_device(), is_aligned(words)), (words, table), 0)
        return _sums(table)


class DigestTable:
    """How hashes of whole contiguous observations of one shape and dtype wait in a table, int64 [slots, parts, 2]: see `Slots`.

    An observation is one launch, which writes the sums of its parts. Another adds these up, for all slots at once.
    """

    def __init__(self, like: Tensor, nans: tuple[int, int, int], kinds: Sequence[int]) -> None:
        size = like.dtype.itemsize
        self.like, runs = like, Runs(1, -(-like.numel() * size // 8), 0)
        self._parts, self._is_words = _parts(runs), like.numel() * size % 8 == 0
        self.form, self.size = ("digest", self._parts), 16 * self._parts
        self._launch = _launch(1, self._parts, tuple(_constants(size * 8, nans)), tuple(_signed(kinds)), runs)

    def new_table(self, slots: int, device: torch.device) -> Tensor:
        """Return a table of so many slots. What adds up their parts is compiled then."""
        table = torch.empty((slots, self._parts, 2), dtype=torch.int64, device=device)
        self.words(table, 0, 1)
        return table

    def write(self, table: Tensor, x: Tensor, slot: int) -> bool:
        """Write the sums of the parts of an observation, which must be like `like`, into a slot: one launch if it is words."""
        is_words = self._is_words and x.data_ptr() % 8 == 0
        words = x.view(-1).view(torch.int64) if is_words else self._copied(x)
        with on_device(x):
            self._launch((x.get_device(), is_aligned(words)), (words, table), slot)
        return True

    def write_to(self, x: Tensor, *to: Tensor) -> None:
        """Write the hash of an observation into memory of two words: two launches, or one if it has one part."""
        (words,) = to
        table = words.view(1, 1, 2) if self._parts == 1 else words.new_empty((1, self._parts, 2))
        self.write(table, x, 0)
        if self._parts > 1:
            with on_device(table):
                _finish(table, words)

    def _copied(self, x: Tensor) -> Tensor:
        found = _words(x[None], Runs(1, x.numel(), 0))
        assert found is not None  # of one run
        return found[0]

    def words(self, table: Tensor, first: int, last: int) -> Tensor:
        """Return the hashes in the slots from `first` to `last`, int64 [slots, 2]: at most one launch."""
        with on_device(table):
            return _sums(table[first:last]).clone() if self._parts == 1 else _sums(table[first:last])


def digest_table(like: Tensor, nans: tuple[int, int, int], kinds: Sequence[int]) -> DigestTable | None:
    """Return how the hashes of whole observations like this one, which has no memory, wait; None if the kernel does not take them.

    Args:
        nans, kinds: see `hashed`.
    """
    words = -(-like.numel() * like.dtype.itemsize // 8)
    return DigestTable(like, nans, kinds) if _slots(Runs(1, words, 0)) < 2**31 else None


def absorbed(hashes: Tensor, state: Sequence[Tensor], factor: Sequence[int], power: Sequence[int]) -> list[Tensor]:
    """Return the state of `Digest` after observations with these hashes, in order. One launch.

    Args:
        hashes: int64 [rows, 2].
        state: digest, factor and observations before, or nothing.
        factor: the base of the polynomial, two words.
        power: of it, for so many observations.
    """
    results = [torch.empty(shape, dtype=torch.int64, device=hashes.device) for shape in ((2,), (2,), ())]
    tensors = hashes, *results, *(state or (None,) * 3)
    with on_device(hashes):
        launch = _absorb_launch(hashes.shape[0], tuple(_signed(power)), tuple(_signed(factor)), len(state) > 0)
        launch((hashes.get_device(), *(one is None or is_aligned(one) for one in tensors)), tensors)
    return results


@lru_cache(maxsize=256)
def _absorb_launch(rows: int, power: tuple[int, ...], factor: tuple[int, ...], state: bool) -> Launch:
    constants = {"FACTOR": factor[0], "OTHER_FACTOR": factor[1], "STATE": state, "BLOCK": _ABSORBED, "num_warps": 1}
    return launch_of(absorb, (1, 1, 1), (rows, *power), constants)


def _words(xs: Tensor, runs: Runs) -> tuple[Tensor, Runs] | None:
    """Return the bits of tensors as words, int64 [rows, words of all runs], and the runs in words; None if they are not words.

    Zeros fill up the first and the last word of each run. They add nothing.
    """
    rows, size = xs.shape[0], xs.dtype.itemsize
    a_word = 8 // size
    if runs.number > 1 and runs.stride % a_word:
        return None
    bits = xs.contiguous().reshape(rows, runs.number, runs.length)
    bits = bits.view({1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[size])
    before = runs.start % a_word
    after = -(before + runs.length) % a_word
    if before or after:
        bits = pad(bits, (before, after))
    elif bits.storage_offset() * size % 8:
        bits = bits.clone()
    length = (before + runs.length + after) // a_word
    return bits.view(torch.int64).reshape(rows, -1), Runs(runs.number, length, runs.start // a_word, runs.stride // a_word)


def _slots(runs: Sequence[int]) -> int:
    """Return in how many blocks a run has words at most."""
    number, length, start, stride = runs
    if number == 1:
        return (start % _WORDS + length - 1) // _WORDS + 1
    apart = math.gcd(_WORDS, start, stride)  # each run begins at a multiple of it
    return (_WORDS - apart + length - 1) // _WORDS + 1


def _constants(bits: int, nans: tuple[int, int, int]) -> list[int]:
    """Return what the kernel is told of NaNs: of all elements of 32 bits, or of one of 64, and last the bits of an element.

    All are signed. Zeros if there is no NaN.
    """
    magnitude, highest, nan = nans
    if not magnitude:
        return [0] * 5
    ones = sum(1 << place for place in range(0, max(32, bits), bits))
    return [*_signed(mask * ones for mask in (magnitude, magnitude - highest, magnitude + 1, nan)), bits]


def _signed(numbers: Iterable[int]) -> list[int]:
    """Return integers below 2**64 as int64."""
    return [signed(number) for number in numbers]


def _parts(runs: Runs) -> int:
    """Return in how many parts a tensor is hashed."""
    tiles = -(-runs.number * _slots(runs) // _TOGETHER)
    return -(-tiles // -(-tiles // min(tiles, _MOST_PARTS)))


def _sums(table: Tensor) -> Tensor:
    """Return the sums of tensors from those of their parts, int64 [rows, 2]: a launch, unless there is one part of each."""
    if table.shape[1] == 1:
        return table[:, 0]
    return _finish(table, table.new_empty((table.shape[0], 2)))


@lru_cache(maxsize=4096)
def _launch(rows: int, parts: int, constants: tuple[int, ...], kinds: tuple[int, ...], runs: Runs) -> Launch:
    (number, length, start, stride), a_run = runs, _slots(runs)
    slots = number * a_run
    magnitude, above, signs, nan = (one % 2**64 for one in constants[:4])
    even = (start, *((stride,) if number > 1 else ()), *((length,) if rows * number > 1 else ()))
    named = {
        "MAGNITUDE": magnitude,
        "ABOVE": above,
        "SIGNS": signs,
        "NAN": nan,
        "BITS": constants[4],
        "RUNS": number > 1,
        "PAIRS": all(one % 2 == 0 for one in even),
        "EVEN": length % 2 == 0,
        "TOGETHER": _TOGETHER,
        "WORDS": _WORDS,
        "num_warps": _WARPS,
    }
    numbers = *kinds, parts, -(-slots // (_TOGETHER * parts)), slots, number, length, start, stride, a_run
    return launch_of(hash_parts, (rows * parts, 1, 1), numbers, named)


def _finish(table: Tensor, hashes: Tensor) -> Tensor:
    rows, parts, _ = table.shape
    _finish_launch(rows, parts)((table.get_device(), is_aligned(table), is_aligned(hashes)), (table, hashes))
    return hashes


@lru_cache(maxsize=4096)
def _finish_launch(rows: int, parts: int) -> Launch:
    return launch_of(finish, (rows, 1, 1), (parts,), {"BLOCK": _JOINED, "num_warps": _WARPS})
