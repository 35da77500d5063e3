"""A uniform random sample of all samples."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from reducers.core.reducer import Reducer, check_size
from reducers.core.states import require_state, to_device
from reducers.kernels.chunks import pieces
from reducers.kernels.hashing import bits_of, mix
from reducers.samples.collect import keep
from reducers.samples.slots import apply_indexing, check_slots, merge_slots, pad_slots, sample_inputs
from reducers.state import Result, State

_MAX_INT64 = torch.iinfo(torch.int64).max


@dataclass(frozen=True)
class Reservoir(Reducer):
    """A uniform random selection of k samples, without replacement, from all samples, each with its step, position and id.

    `update(state, x, ids, payload)`: `ids` and `payload` are optional. The first axis of `x` enumerates its samples, and whole
    samples are stored; to draw single elements, flatten first: `Reservoir().premap(torch.ravel)`. Each sample gets a random
    number, its lot, and the k lowest lots are kept. So merging two reservoirs gives a reservoir of both.

    The lot is a hash of the seed, the bits of the whole observation, the position of the sample and its id. So there is no
    generator to save, resuming is exact, and ranks with the same seed draw different lots because their data differ. The
    drawback: a bitwise identical observation with the same ids draws the same lots, so its samples are kept or dropped together
    with their copies. Distinct ids, such as a running number, make the copies independent.

    Args:
        k: number of samples to keep.
        seed: another seed selects other samples.
        x: the observation, with its samples along the first axis; a 0-d tensor is one sample. All samples have the same shape.
        ids: integers, one per sample.
        payload: of shape (samples, ...); each sample is stored with its row. It must always have the same row shape, and must be
            given for all observations or none.

    Returns:
        `value`: of shape (k, ...), in arbitrary order; int64 of shape (k,): `step` (index of the observation among those that are
        not empty, counted across merged states), `position` (index of the sample in its observation) and `id` (-1 if none was
        given); `payload` of shape (k, ...). If there are fewer than k samples, the last slots have step and position -1, and
        zeros for value and payload.

    Raises:
        ArgumentError: `k` is not a positive integer, or `seed` is not a 64-bit integer.
        ReducerTypeError, StateMismatchError: ids or payload do not match the samples, or the sample shape changes.

    Reference: bottom-k sampling: Cohen and Kaplan, "Summarizing data using bottom-k sketches", PODC 2007
    (doi:10.1145/1281100.1281133).

    >>> import torch
    >>> reservoir = Reservoir(k=3, seed=1)
    >>> state = reservoir.update(reservoir.update({}, torch.arange(100.0)), torch.arange(100.0, 200.0))
    >>> result = reservoir.compute(state)
    >>> torch.equal(result["value"], (100 * result["step"] + result["position"]).float())
    True
    """

    k: int = 64
    seed: int = 0

    ordered: ClassVar[bool] = True

    def __post_init__(self) -> None:
        check_size(self, "k")
        check_size(self, "seed", -(2**63), 2**63 - 1)

    def update(self, state: State, *xs: Tensor) -> State:
        x, ids, payload = sample_inputs(self, xs)
        if x.numel() == 0:
            return state
        return self.merge(to_device(state, x.device), self._lift(x.reshape(1) if x.ndim == 0 else x, ids, payload))

    def merge(self, a: State, b: State) -> State:
        return merge_slots(self, a, b, by="lot", descending=False, k=self.k)

    def _check(self, state: State) -> None:
        check_slots(self, state, "lot", self.k)

    def compute(self, state: State) -> Result:
        require_state(self, state)
        return {key: value.clone() for key, value in state.items() if key not in {"observations", "lot"}}

    def _lift(self, x: Tensor, ids: Tensor | None, payload: Tensor | None) -> State:
        lot, order = self._lots(x, ids).sort(stable=True)
        chosen = order[: self.k]
        slots = {
            "value": apply_indexing(x, lambda rows: keep(rows[chosen])),
            "lot": lot[: self.k].clone(),
            "step": torch.zeros_like(chosen),
            "position": chosen.clone(),
            "id": torch.full_like(chosen, -1) if ids is None else ids[chosen],
        }
        if payload is not None:
            slots["payload"] = apply_indexing(payload, lambda rows: keep(rows[chosen]))
        slots = pad_slots(slots, self.k, {"lot": _MAX_INT64, "value": 0, "payload": 0})
        return {**slots, "observations": torch.ones((), dtype=torch.int64, device=x.device)}

    def _lots(self, x: Tensor, ids: Tensor | None) -> Tensor:
        positions = torch.arange(x.shape[0], device=x.device)
        digests = torch.cat([_digest(piece) for piece in pieces(x, (0,))])
        observation_hash = mix(mix(digests, 1) + positions, 2).sum()
        lots = mix(mix(observation_hash + positions, 3), self.seed)
        return lots if ids is None else mix(lots + mix(ids, 4), 5)


def _digest(x: Tensor) -> Tensor:
    """Return a 64-bit hash of each sample: the sum of its bits times odd pseudorandom numbers, modulo 2**64."""
    bits = bits_of(x)
    bits = bits.reshape(x.shape[0], bits.numel() // x.shape[0])
    factors = mix(torch.arange(bits.shape[1], device=x.device), 6) | 1
    return (bits * factors).sum(dim=1)
