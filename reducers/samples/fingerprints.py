"""Fingerprints: a digest and a sketch of each observation, to find where two runs part."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import ClassVar

import torch
from torch import Tensor

from reducers.core.checks import check_shape
from reducers.core.inputs import check_equally_often, check_part, checked_part, observation
from reducers.core.reducer import Reducer, check_size
from reducers.core.states import require_state, to_device
from reducers.errors import ArgumentError, StateError
from reducers.kernels.cpp.digest import DigestSlots
from reducers.kernels.cpp.library import ELEMENTS, loop_for
from reducers.kernels.cpp.sketch import SketchWriter
from reducers.kernels.digests import digest_table, digest_words, loop_slots
from reducers.kernels.parts import TensorPart
from reducers.kernels.precision import eps_of, no_sum
from reducers.kernels.sketches import FACTS, join_facts, sketch_writer, sketched
from reducers.kernels.waiting import KernelWriter
from reducers.samples.collect import Collect
from reducers.state import Result, State
from reducers.statistics.digest import digest_of

_COLLECT = Collect()
_KINDS = ("digest", "sketch")  # of blocks: the words of digests, int64 [n, 2], and float64 [n, facts, eps and projections]
_WORDS = 2  # of a digest
_COLUMNS = (*FACTS, "eps")


@dataclass(frozen=True)
class Fingerprints(Reducer):
    """The digest and the sketch of each observation, one after another: they tell at which observation two runs part, and how far.

    Two observations with the same digest are the same, bit for bit, see `Digest`; `sketch_distance` of their sketches tells how
    far others are apart, see `Sketch`. Observations without elements are not counted.

    Args:
        k: number of projections of a sketch, a multiple of 64. Of 64, distances have a standard error of 9 %, and an observation
            takes 576 bytes.
        part: of which tensor the observations are parts, see `Digest`; None if they are whole.

    Returns:
        of n observations `digest`, int64 [n]; `sketch`, float64 [n, k]; `norm` [n], the Euclidean norm of the finite elements of
        each; `nonfinite` [n] and `count` [n], int64, how many elements are not finite, and are; `eps` [n], how far apart numbers
        of its dtype are, relative to their size: `torch.finfo(dtype).eps`, and 0 of integers.

    Raises:
        ArgumentError: `k` is not a multiple of 64.
        DTypeError: an observation is uint64.

    >>> import torch
    >>> from reducers import sketch_distance
    >>> fingerprints, states = Fingerprints(), [{}, {}]
    >>> for step in range(3):
    ...     x = torch.linspace(-1, 1, 1000) * (step + 1)
    ...     states = [fingerprints.update(state, x + shift * (step > 1)) for state, shift in zip(states, (0.0, 0.01))]
    >>> a, b = map(fingerprints.compute, states)
    >>> a["digest"] == b["digest"]
    tensor([ True,  True, False])
    >>> sketch_distance(a, b)["relative"].round(decimals=3)
    tensor([0.0000, 0.0000, 0.0060], dtype=torch.float64)
    """

    k: int = 64
    part: TensorPart | None = field(default=None, repr=False)

    ordered: ClassVar[bool] = True
    bounded: ClassVar[bool] = False

    def __post_init__(self) -> None:
        check_size(self, "k")
        if self.k % 64:
            raise ArgumentError(f"Fingerprints takes k, a multiple of 64, and got {self.k}")
        check_part(self)

    @property
    def batchable(self) -> bool:
        return True

    def update(self, state: State, *xs: Tensor) -> State:
        x = observation(self, xs)
        return self._appended(state, x[None]) if x.numel() else state

    def update_all(self, state: State, xs: Tensor) -> State:
        xs = observation(self, (xs,))
        return self._appended(state, xs) if xs.numel() else state

    def slots_for(self, x: Tensor) -> FingerprintSlots | None:
        if self.part is not None:
            return None
        digests, sketches = digest_table(x), sketch_writer(x, self.k)
        if digests is not None and sketches is not None:
            return FingerprintTable(digests.like, eps_of(x), self.k, digests, sketches)
        hashes, function = loop_slots(x), loop_for("sketch", ELEMENTS[x.dtype]) if x.dtype in ELEMENTS else None
        if hashes is None or function is None:
            return None
        return LoopFingerprints(hashes.like, eps_of(x), self.k, hashes, SketchWriter(hashes.like, self.k, function))

    def update_slots(self, state: State, slots: FingerprintSlots, table: Tensor, first: int, last: int) -> State:
        if first == last:
            return state
        words, rows = table[first:last].split_with_sizes([_WORDS, len(_COLUMNS) + self.k], dim=1)
        return _appended(to_device(state, table.device), words, rows.contiguous().view(torch.float64))

    def _appended(self, state: State, xs: Tensor) -> State:
        if xs.dtype is torch.uint64:
            raise no_sum(xs, repr(self))
        part = checked_part(self, xs)
        sums, facts = sketched(xs, self.k, part)
        rows = torch.cat([facts, torch.full_like(facts[:, :1], eps_of(xs)), sums], dim=1)
        return _appended(state, digest_words(xs, part), rows)

    def merge(self, a: State, b: State) -> State:
        return _joined({kind: _COLLECT.merge(_part(a, kind), _part(b, kind)) for kind in _KINDS})

    def of_part(self, part: TensorPart) -> Fingerprints:
        return replace(self, part=part)

    def join_parts(self, a: State, b: State) -> State:
        if not a or not b:
            return a or b
        states = (a, to_device(b, a["digest/0"].device))
        words, rows = ([_COLLECT.compute(_part(state, kind)) for state in states] for kind in _KINDS)
        check_equally_often(self, len(words[0]), len(words[1]))
        facts = join_facts(*(block[:, : len(FACTS)] for block in rows))
        eps = torch.maximum(*(block[:, len(FACTS), None] for block in rows))
        sums = rows[0][:, len(_COLUMNS) :] + rows[1][:, len(_COLUMNS) :]
        new = dict(zip(_KINDS, (words[0] + words[1], torch.cat((facts, eps, sums), dim=1)), strict=True))
        return _joined({kind: _COLLECT.update({}, block) for kind, block in new.items()})

    def _check(self, state: State) -> None:
        parts = {kind: _part(state, kind) for kind in _KINDS}
        if sum(map(len, parts.values())) != len(state) or len({len(part) for part in parts.values()}) > 1:
            raise StateError(f"{self!r} has no such state: its keys are {sorted(state)!r:.200}")
        for part in parts.values():
            _COLLECT.check(part)
        for block in range(len(parts["digest"])):
            length = len(state[f"digest/{block}"])
            check_shape(self, state, f"digest/{block}", (length, 2), torch.int64)
            check_shape(self, state, f"sketch/{block}", (length, len(_COLUMNS) + self.k), torch.float64, torch.float32)

    def compute(self, state: State) -> Result:
        require_state(self, state)
        digest, rows = (_COLLECT.compute(_part(state, kind)) for kind in _KINDS)
        found: Mapping[str, Tensor] = dict(zip(_COLUMNS, rows.unbind(1), strict=False))
        return {
            "digest": digest_of(digest),
            "sketch": rows[:, len(_COLUMNS) :].clone(),
            "norm": found["power"].sqrt(),
            "nonfinite": found["nonfinite"].to(torch.int64),
            "count": found["count"].to(torch.int64),
            "eps": found["eps"].clone(),
        }


class FingerprintSlots:
    """How fingerprints of whole contiguous observations of one shape and dtype wait in a table: see `Slots`.

    A table is int64 [slots, words of a digest, facts, eps and projections]; all but the digests are the bits of float64.
    """

    def __init__(self, like: Tensor, eps: float, k: int) -> None:
        self.like, self._eps, self._columns = like, eps, _WORDS + len(_COLUMNS) + k
        self.form, self.size = ("fingerprint", k, eps), 8 * self._columns

    def new_table(self, slots: int, device: torch.device) -> Tensor:
        """Return a table of so many slots."""
        table = torch.empty((slots, self._columns), dtype=torch.int64, device=device)
        table.view(torch.float64)[:, _WORDS + len(FACTS)] = self._eps
        return table

    def write(self, table: Tensor, x: Tensor, slot: int) -> bool:
        """Write the fingerprint of an observation, which must be like `like`, into a slot; False if it could not be read."""
        raise NotImplementedError


class LoopFingerprints(FingerprintSlots):
    """Those of a CPU."""

    def __init__(self, like: Tensor, eps: float, k: int, digests: DigestSlots, sketches: SketchWriter) -> None:
        super().__init__(like, eps, k)
        self._digests, self._sketches = digests, sketches

    def write(self, table: Tensor, x: Tensor, slot: int) -> bool:
        start = table.data_ptr() + self.size * slot
        facts = start + 8 * _WORDS
        return self._digests.write_at(start, x) and self._sketches.write_at(facts, facts + 8 * len(_COLUMNS), x)


class FingerprintTable(FingerprintSlots):
    """Those of a device, whose kernels write an observation in five launches."""

    def __init__(self, like: Tensor, eps: float, k: int, digests: KernelWriter, sketches: KernelWriter) -> None:
        super().__init__(like, eps, k)
        self._digests, self._sketches = digests, sketches

    def write(self, table: Tensor, x: Tensor, slot: int) -> bool:
        words, facts, _, sums = table[slot].split_with_sizes([_WORDS, len(FACTS), 1, self._columns - _WORDS - len(_COLUMNS)])
        self._digests.write_to(x, words)
        self._sketches.write_to(x, facts.view(torch.float64), sums.view(torch.float64))
        return True


def _part(state: State, kind: str) -> State:
    return {key.removeprefix(f"{kind}/"): value for key, value in state.items() if key.startswith(f"{kind}/")}


def _appended(state: State, words: Tensor, rows: Tensor) -> State:
    """Return the state after several observations, whose fingerprints come along the first axis; as one after another."""
    new = dict(zip(_KINDS, (words, rows), strict=True))
    return _joined({kind: _COLLECT.update_all(_part(state, kind), block[:, None]) for kind, block in new.items()})


def _joined(parts: Mapping[str, State]) -> State:
    return {f"{kind}/{key}": value for kind, part in parts.items() for key, value in part.items()}
