"""Digest: a fingerprint of the bits of what was observed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from reducers.core.checks import check_keys, check_shape
from reducers.core.inputs import observation
from reducers.core.reducer import Reducer
from reducers.core.states import check_states, require_state, to_device
from reducers.kernels.digests import absorbed, digests
from reducers.kernels.hashing import mixed
from reducers.kernels.precision import can_read_values
from reducers.state import Result, State

__all__ = ["Digest"]

_PRIME = 2**61 - 1
_FACTOR = mixed(0, 6) % _PRIME  # a random number
_HALF = 2**31 - 1
_KEYS = ("digest", "factor", "observations")


@dataclass(frozen=True)
class Digest(Reducer):
    """A fingerprint of the bits of all observations, in order: two runs with the same digest have observed the same.

    An observation becomes a hash h of the bits of its elements, each with its place, of its shape and of its dtype. The digest of
    h_1 to h_n is the polynomial `h_1 K^(n-1) + ... + h_n`, modulo the prime p = 2^61 - 1, for a fixed K. So the order of
    observations counts, and how the data is cut into observations, and digests merge: `(a, n) (b, m) = (a K^m + b, n + m)`. All
    of it is arithmetic of integers. So the digest of the same bits is the same on every device, for any strides, in compiled
    graphs, and with any number of threads.

    -0.0 differs from 0.0, because what is computed of them may differ. All NaNs of a dtype are one: which of two NaNs an operation
    passes on is up to the processor, and to the order in which a compiler puts them. A quantised tensor is its dequantised
    values. Observations without elements are not counted.

    Two different streams of n observations have the same digest with a probability of about n / 2^61, unless they are made for
    that: it is no cryptographic hash. Ranks that hold parts of one tensor get digests of the parts, which do not become that
    of the whole; compare runs that are spread alike.

    Returns:
        `digest`: int64, from 0 to below 2^61 - 1. `observations`: int64, how many there were.

    Reference: Karp and Rabin, "Efficient randomized pattern-matching algorithms", IBM Journal of Research and Development 31(2),
    1987 (doi:10.1147/rd.312.0249). Of an observation: multilinear hashing of words that are mixed first, as in Lemire and
    Kaser, "Strongly universal string hashing is fast", The Computer Journal 57(11), 2014 (doi:10.1093/comjnl/bxt070).

    >>> import torch
    >>> digest, x = Digest(), torch.tensor([[1.0, 2.0], [3.0, 4.0]])
    >>> one = digest.update({}, x)
    >>> digest.compute(one)["digest"] == digest.compute(digest.update({}, x.T.contiguous().T))["digest"]
    tensor(True)
    >>> digest.compute(one)["digest"] == digest.compute(digest.update({}, x + 1e-7))["digest"]
    tensor(False)
    """

    ordered: ClassVar[bool] = True

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
        state, hashes, number = to_device(state, xs.device), digests(xs), xs.shape[0]
        power = pow(_FACTOR, number, _PRIME)
        if isinstance(hashes, Tensor) and type(self).merge is Digest.merge and (not state or _are_numbers(state)):
            entries = absorbed(hashes, [state[key] for key in _KEYS] if state else [], _FACTOR, power)
            if entries is not None:
                return dict(zip(_KEYS, entries, strict=True))
        return self.merge(state, _lifted(hashes, number, power))

    def merge(self, a: State, b: State) -> State:
        if not a or not b:
            return a or b
        check_states(self, a, b)
        b = to_device(b, a["digest"].device)
        joined = _join_numbers if all(map(can_read_values, (*a.values(), *b.values()))) else _join_tensors
        return joined(a, b)

    def _check(self, state: State) -> None:
        check_keys(self, state, _KEYS)
        for key in _KEYS:
            check_shape(self, state, key, (), torch.int64)

    def compute(self, state: State) -> Result:
        require_state(self, state)
        return {key: state[key].clone() for key in ("digest", "observations")}


def _are_numbers(state: State) -> bool:
    """Return whether a state has the right entries."""
    return state.keys() == {*_KEYS} and all(value.shape == () and value.dtype is torch.int64 for value in state.values())


def _lifted(hashes: list[int] | Tensor, number: int, factor: int) -> State:
    """Return the state of so many observations with these hashes."""
    if isinstance(hashes, Tensor):
        constants = (_constant(value, hashes.device) for value in (factor, number))
        return dict(zip(_KEYS, (_polynomial(hashes), *constants), strict=True))
    digest = 0
    for one in hashes:
        digest = (digest * _FACTOR + (one & _PRIME)) % _PRIME
    return dict(zip(_KEYS, map(_constant, (digest, factor, number)), strict=True))


def _constant(number: int, device: torch.device | str = "cpu") -> Tensor:
    return torch.full((), number, dtype=torch.int64, device=device)


def _join_numbers(a: State, b: State) -> State:
    """Join two states on the CPU, by Python's integers: a fifth of the time that operations on tensors take."""
    (digest, factor, number), (digest_b, factor_b, number_b) = ([state[key].item() for key in _KEYS] for state in (a, b))
    wrapped = (number + number_b + 2**63) % 2**64 - 2**63  # as a tensor would, of counts that a file made up
    joined = (digest * factor_b + digest_b) % _PRIME, factor * factor_b % _PRIME, wrapped
    return dict(zip(_KEYS, map(_constant, map(int, joined)), strict=True))


def _join_tensors(a: State, b: State) -> State:
    """Join two states without a look at their numbers."""
    return {
        "digest": _reduced(_times(a["digest"], b["factor"]) + b["digest"]),
        "factor": _times(a["factor"], b["factor"]),
        "observations": a["observations"] + b["observations"],
    }


def _polynomial(hashes: Tensor) -> Tensor:
    """Return the digest of several observations, int64, of any 64 bits of each."""
    if hashes.shape[0] == 1:
        return _reduced(hashes.reshape(()) & _PRIME)
    powers: Sequence[int] = [1]
    for _ in range(hashes.shape[0] - 1):
        powers = (*powers, powers[-1] * _FACTOR % _PRIME)
    terms = _times(_reduced(hashes & _PRIME), torch.tensor(powers[::-1], device=hashes.device))
    low, high = (terms & _HALF).sum(), (terms >> 31).sum()  # of halves, because few terms add up in 64 bits
    return _reduced(_times(_reduced(high), _constant(2**31, hashes.device)) + _reduced(low))


def _times(a: Tensor, b: Tensor) -> Tensor:
    """Return the product modulo the prime of numbers below it, by products of halves, which fit into int64: 2**61 is 1."""
    high_a, low_a, high_b, low_b = a >> 31, a & _HALF, b >> 31, b & _HALF
    middle = high_a * low_b + low_a * high_b
    parts = 2 * high_a * high_b + (middle >> 30) + ((middle & (2**30 - 1)) << 31)
    return _reduced(_reduced(parts) + _reduced(low_a * low_b))


def _reduced(x: Tensor) -> Tensor:
    """Return numbers from 0 to 2**63 - 1 modulo the prime."""
    x = (x & _PRIME) + (x >> 61)
    return torch.where(x >= _PRIME, x - _PRIME, x)
