"""Digest: a fingerprint of the bits of what was observed."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import ClassVar

import torch
from torch import Tensor

from reducers.core.checks import check_keys, check_shape
from reducers.core.inputs import check_equally_often, check_part, checked_part, observation
from reducers.core.reducer import Reducer
from reducers.core.states import check_states, require_state, to_device
from reducers.kernels.digests import absorbed, digest_slots, digest_words, digests
from reducers.kernels.hashing import mix, mixed, shift_right, signed, words_of
from reducers.kernels.parts import TensorPart
from reducers.kernels.precision import can_read_values
from reducers.kernels.waiting import WordSlots
from reducers.state import Result, State

Pair = tuple[int, int]

_FACTOR: Pair = (mixed(0, 6) & ~1, mixed(1, 6) | 1)  # random; one of K, K^2 and K^3 less 1 is even, so few factors of 2 are lost
_KEYS = ("digest", "factor", "observations")


@dataclass(frozen=True)
class Digest(Reducer):
    """A fingerprint of the bits of all observations, in order: two runs with the same digest have observed the same.

    An observation becomes a hash h of the bits of its elements, each with its place, of its shape and of its dtype. The digest of
    h_1 to h_n is the polynomial `h_1 K^(n-1) + ... + h_n`, for a fixed K, in a ring of pairs of integers modulo 2^64. So the order
    of observations counts, and how the data is cut into observations, and digests merge: `(a, n) (b, m) = (a K^m + b, n + m)`. All
    of it is arithmetic of integers. So the digest of the same bits is the same on every device, for any strides, in compiled
    graphs, and with any number of threads.

    The hash is linear in the bits, so ranks that hold parts of one tensor get that of the whole: each observes its part with
    `of_part`, and `join_parts` adds them up. Recorders do so for DTensors.

    -0.0 differs from 0.0, because what is computed of them may differ. All NaNs of a dtype are one: which of two NaNs an operation
    passes on is up to the processor, and to the order in which a compiler puts them. A quantised tensor is its dequantised
    values. Observations without elements are not counted.

    A change within 8 bytes changes the hash for certain. Two different streams have the same digest with a probability of at most
    about 2^-50, and of 2^-63 if they differ in more than a few bits of each number, unless they are made for that: it is no
    cryptographic hash.

    Args:
        part: of which tensor the observations are parts; None if they are whole.

    Returns:
        `digest`: int64, not negative. `observations`: int64, how many there were.

    Reference: multilinear hashing, as in Lemire and Kaser, "Strongly universal string hashing is fast", The Computer Journal
    57(11), 2014 (doi:10.1093/comjnl/bxt070); Karp and Rabin, "Efficient randomized pattern-matching algorithms", IBM Journal of
    Research and Development 31(2), 1987 (doi:10.1147/rd.312.0249).

    >>> import torch
    >>> from reducers import TensorPart
    >>> digest, x = Digest(), torch.tensor([[1.0, 2.0], [3.0, 4.0]])
    >>> one = digest.update({}, x)
    >>> digest.compute(one)["digest"] == digest.compute(digest.update({}, x.T.contiguous().T))["digest"]
    tensor(True)
    >>> digest.compute(one)["digest"] == digest.compute(digest.update({}, x + 1e-7))["digest"]
    tensor(False)
    >>> left, right = (digest.of_part(TensorPart((2, 2), (0, column))).update({}, x[:, column, None]) for column in (0, 1))
    >>> digest.compute(one)["digest"] == digest.compute(digest.join_parts(left, right))["digest"]
    tensor(True)
    """

    part: TensorPart | None = field(default=None, repr=False)

    ordered: ClassVar[bool] = True

    def __post_init__(self) -> None:
        check_part(self)

    @property
    def batchable(self) -> bool:
        return True

    def update(self, state: State, *xs: Tensor) -> State:
        x = observation(self, xs)
        return self._updated(state, x[None]) if x.numel() else state

    def update_all(self, state: State, xs: Tensor) -> State:
        if xs.numel() == 0:
            return state
        xs = observation(self, (xs,))
        return self._updated(state, xs)

    def _updated(self, state: State, xs: Tensor) -> State:
        return self._with_hashes(state, digests(xs, checked_part(self, xs)), xs.shape[0], xs.device)

    def lift_each(self, xs: Tensor) -> State:
        xs = observation(self, (xs,))
        return self._of_each(digest_words(xs, checked_part(self, xs)))

    def slots_for(self, x: Tensor) -> WordSlots | None:
        return digest_slots(x) if self.part is None else None

    def lifted_slots(self, slots: WordSlots, table: Tensor, first: int, last: int) -> State:
        return self._of_each(slots.words(table, first, last))

    def update_slots(self, state: State, slots: WordSlots, table: Tensor, first: int, last: int) -> State:
        words = slots.words(table, first, last)
        return self._with_hashes(state, words.flatten().tolist() if can_read_values(words) else words, last - first, words.device)

    def _with_hashes(self, state: State, hashes: list[int] | Tensor, number: int, device: torch.device) -> State:
        """Return the state after so many observations with these hashes, two words of each."""
        plain = type(self).merge is Digest.merge and (not state or _fits(state))
        if plain and not isinstance(hashes, Tensor) and all(map(can_read_values, state.values())):
            return _after(state, hashes)
        state, power = to_device(state, device), _power(number)
        if plain and isinstance(hashes, Tensor):
            entries = absorbed(hashes, [state[key] for key in _KEYS] if state else [], _FACTOR, power)
            if entries is not None:
                return dict(zip(_KEYS, entries, strict=True))
        return self.merge(state, _lifted(hashes, number, power))

    def _of_each(self, hashes: Tensor) -> State:
        """Return the states of observations with these hashes, int64 [n, 2], stacked along the first axis."""
        factor = words_of(_FACTOR, hashes.device).expand_as(hashes)
        return dict(zip(_KEYS, (hashes, factor, torch.ones_like(hashes[:, 0])), strict=True))

    def merge(self, a: State, b: State) -> State:
        if not a or not b:
            return a or b
        check_states(self, a, b)
        b = to_device(b, a["digest"].device)
        joined = _join_numbers if all(map(can_read_values, (*a.values(), *b.values()))) else _join_tensors
        return joined(a, b)

    def of_part(self, part: TensorPart) -> Digest:
        return replace(self, part=part)

    def join_parts(self, a: State, b: State) -> State:
        if not a or not b:
            return a or b
        check_states(self, a, b)
        b = to_device(b, a["digest"].device)
        check_equally_often(self, int(a["observations"]), int(b["observations"]))
        return {**a, "digest": a["digest"] + b["digest"]}

    def _check(self, state: State) -> None:
        check_keys(self, state, _KEYS)
        for key in _KEYS:
            check_shape(self, state, key, () if key == "observations" else (2,), torch.int64)

    def compute(self, state: State) -> Result:
        require_state(self, state)
        return {"digest": digest_of(state["digest"]), "observations": state["observations"].clone()}

    def compute_each(self, states: State) -> Result:
        return self.compute(states)


def digest_of(words: Tensor) -> Tensor:
    """Return the digest of observations from the two sums of each, int64 [..., 2]: not negative, int64 [...]."""
    if words.ndim == 1 and can_read_values(words):  # by Python's integers, as in `_after`
        one, other = words.tolist()
        return torch.tensor(mixed(mixed(one, 7) + other, 8) >> 1, device="cpu")
    first, second = words.unbind(-1)
    return shift_right(mix(mix(first, 7) + second, 8), 1)


def _fits(state: State) -> bool:
    """Return whether a state has the right entries."""
    shapes = {key: () if key == "observations" else (2,) for key in _KEYS}
    return state.keys() == shapes.keys() and all(
        state[key].shape == shape and state[key].dtype is torch.int64 for key, shape in shapes.items()
    )


def _power(number: int) -> Pair:
    """Return the power of the factor."""
    found, square = (1, 0), _FACTOR
    while number:
        if number % 2:
            found = _times(found, square)
        square, number = _times(square, square), number // 2
    return found


def _times(a: Pair, b: Pair) -> Pair:
    """Return the product of two numbers `a[0] + a[1] w`, modulo 2**64; `w**2 + w + 1` is 0."""
    ends = a[1] * b[1]
    return (a[0] * b[0] - ends) % 2**64, (a[0] * b[1] + a[1] * b[0] - ends) % 2**64


def _products(a: Tensor, b: Tensor) -> Tensor:
    """Return what `_times` does, of int64 [..., 2]."""
    (a0, a1), (b0, b1) = a.unbind(-1), b.unbind(-1)
    ends = a1 * b1
    return torch.stack((a0 * b0 - ends, a0 * b1 + a1 * b0 - ends), dim=-1)


def _lifted(hashes: list[int] | Tensor, number: int, power: Pair) -> State:
    """Return the state of so many observations with these hashes, two words of each."""
    if isinstance(hashes, Tensor):
        factor, count = words_of(power, hashes.device), torch.full((), number, dtype=torch.int64, device=hashes.device)
        return dict(zip(_KEYS, (_polynomial(hashes), factor, count), strict=True))
    return _after({}, hashes)


def _after(state: State, hashes: list[int]) -> State:
    """Return the state after observations with these hashes, two words of each, by Python's integers.

    They take a fifth of the time that operations on small tensors take.
    """
    digest, factor, number = _numbers(state) if state else ((0, 0), (1, 0), 0)
    for first, second in zip(hashes[::2], hashes[1::2], strict=True):
        digest, factor = _times(digest, _FACTOR), _times(factor, _FACTOR)
        digest = digest[0] + first, digest[1] + second
    return _state(digest, factor, number + len(hashes) // 2)


def _state(digest: Pair, factor: Pair, number: int) -> State:
    entries = [*map(signed, digest)], [*map(signed, factor)], signed(number)  # which wraps around, as a tensor would
    return {key: torch.tensor(entry, device="cpu") for key, entry in zip(_KEYS, entries, strict=True)}


def _join_numbers(a: State, b: State) -> State:
    """Join two states on the CPU; see `_after`."""
    (digest, factor, number), (digest_b, factor_b, number_b) = (_numbers(state) for state in (a, b))
    before = _times(digest, factor_b)
    return _state((before[0] + digest_b[0], before[1] + digest_b[1]), _times(factor, factor_b), number + number_b)


def _numbers(state: State) -> tuple[Pair, Pair, int]:
    (first, second), (one, other) = state["digest"].tolist(), state["factor"].tolist()
    return (first, second), (one, other), int(state["observations"])


def _join_tensors(a: State, b: State) -> State:
    """Join two states without a look at their numbers."""
    return {
        "digest": _products(a["digest"], b["factor"]) + b["digest"],
        "factor": _products(a["factor"], b["factor"]),
        "observations": a["observations"] + b["observations"],
    }


def _polynomial(hashes: Tensor) -> Tensor:
    """Return the digest of several observations, int64 [2], of the hashes of each, int64 [n, 2]."""
    if hashes.shape[0] == 1:
        return hashes.reshape(2)
    powers = [(1, 0)]
    for _ in range(hashes.shape[0] - 1):
        powers.append(_times(powers[-1], _FACTOR))
    return _products(hashes, torch.stack([words_of(power, hashes.device) for power in powers[::-1]])).sum(dim=0)
