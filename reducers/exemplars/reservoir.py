"""A uniform sample of what was seen."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from reducers.core.reducer import Reducer
from reducers.core.states import check_states, require_state, to_device
from reducers.errors import ArgumentError
from reducers.exemplars.collect import keep
from reducers.exemplars.slots import after, first, moved, sample_inputs
from reducers.kernels.chunks import pieces
from reducers.kernels.hashing import bits_of, mix
from reducers.state import Result, State

__all__ = ["Reservoir"]

_LAST = torch.iinfo(torch.int64).max


@dataclass(frozen=True)
class Reservoir(Reducer):
    """A uniform random sample of k samples, without replacement, from everything seen, each with where it came from.

    `update(state, x, ids, payload)`: `ids` and `payload` may be left out. The first axis of `x` is that of its samples, and whole
    samples are kept; to draw single elements, flatten them first: `Reservoir().premap(torch.ravel)`. Every sample draws a lot,
    and the k lowest lots stay, so merging two reservoirs is again a reservoir of both.

    The lot is a hash of the seed, of the bits of the whole observation, of the place of the sample in it and of its id. So there is
    no generator to save, resuming is exact, and ranks draw differently because their data differ, from one seed. The price: an
    observation that comes again bit for bit, with the same ids, draws the same lots, so its samples stay or go together with
    their copies; ids that tell the copies apart, such as a running number, make them independent.

    Args:
        k: how many samples to keep.
        seed: another seed draws another sample.
        x: the observation, its samples along the first axis; a 0-d tensor is one sample. All samples have one shape.
        ids: integers, one for each sample.
        payload: of shape (samples, ...): the row of a sample is kept with it. Of one shape, and in all observations or none.

    Returns:
        `value`: of shape (k, ...), in no particular order; int64 of shape (k,): `step` (number of the observation, from 0, among
        those with elements, counting on over what is merged), `position` (place of the sample in its observation) and `id` (-1
        where none was given); `payload` of shape (k, ...). While fewer than k samples were seen the last slots have step and
        position -1, and zeros for value and payload.

    Raises:
        ArgumentError: `k` is not a positive whole number, or `seed` none of 64 bits.
        ReducerTypeError, StateMismatchError: ids or payload do not fit the samples, or samples change their shape.

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
        if not isinstance(self.k, int) or self.k < 1:
            raise ArgumentError(f"Reservoir takes a positive whole number as k and got {self.k!r}")
        if not isinstance(self.seed, int) or not -(2**63) <= self.seed < 2**63:
            raise ArgumentError(f"Reservoir takes a whole number of 64 bits as seed and got {self.seed!r}")

    def update(self, state: State, *xs: Tensor) -> State:
        x, ids, payload = sample_inputs(self, xs)
        if x.numel() == 0:
            return state
        return self.merge(to_device(state, x.device), self._lift(x.reshape(1) if x.ndim == 0 else x, ids, payload))

    def merge(self, a: State, b: State) -> State:
        if not a or not b:
            return a or b
        check_states(self, a, b)
        b = to_device(b, a["observations"].device)
        a_slots, b_slots = ({key: value for key, value in state.items() if key != "observations"} for state in (a, b))
        slots = first(after(a_slots, b_slots, a["observations"]), "lot", self.k, descending=False)
        return {**slots, "observations": a["observations"] + b["observations"]}

    def compute(self, state: State) -> Result:
        require_state(self, state)
        return {key: value.clone() for key, value in state.items() if key not in {"observations", "lot"}}

    def _lift(self, x: Tensor, ids: Tensor | None, payload: Tensor | None) -> State:
        lot, order = self._lots(x, ids).sort(stable=True)
        chosen = order[: self.k]
        slots = {
            "value": moved(x, lambda rows: keep(rows[chosen])),
            "lot": lot[: self.k].clone(),
            "step": torch.zeros_like(chosen),
            "position": chosen.clone(),
            "id": torch.full_like(chosen, -1) if ids is None else ids[chosen],
        }
        if payload is not None:
            slots["payload"] = moved(payload, lambda rows: keep(rows[chosen]))
        missing = self.k - chosen.shape[0]
        if missing > 0:
            slots = {key: _padded(key, value, missing) for key, value in slots.items()}
        return {**slots, "observations": torch.ones((), dtype=torch.int64, device=x.device)}

    def _lots(self, x: Tensor, ids: Tensor | None) -> Tensor:
        places = torch.arange(x.shape[0], device=x.device)
        each = torch.cat([_digest(piece) for piece in pieces(x, (0,))])
        whole = mix(mix(each, 1) + places, 2).sum()
        lots = mix(mix(whole + places, 3), self.seed)
        return lots if ids is None else mix(lots + mix(ids, 4), 5)


def _digest(x: Tensor) -> Tensor:
    """A number for each sample that hardly any other sample shares: a sum of its bits times odd random numbers, modulo 2**64."""
    bits = bits_of(x)
    bits = bits.reshape(x.shape[0], bits.numel() // x.shape[0])
    factors = mix(torch.arange(bits.shape[1], device=x.device), 6) | 1
    return (bits * factors).sum(dim=1)


def _padded(key: str, value: Tensor, missing: int) -> Tensor:
    fill = {"lot": _LAST, "value": 0, "payload": 0}.get(key, -1)
    return torch.cat((value, torch.full((missing, *value.shape[1:]), fill, dtype=value.dtype, device=value.device)))
