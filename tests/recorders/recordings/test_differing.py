"""Copies that differ: which ranks are named, and from which observation on; and where a merged recording carries it."""

from __future__ import annotations

import pickle
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from recorders import Recording, RecordingWarning, Subrecording
from recorders.recordings.distributed.differing import Differing
from recorders.recordings.distributed.merge import Merged
from recorders.recordings.distributed.placement import Placement
from reducers import Collect, Digest, Mean, Norm, PerObservation, Product, Reducer, Summary

DIGESTS = PerObservation(Digest(), Collect())
LISTING: dict[str, Reducer] = {
    "digests": DIGESTS,
    "norms": PerObservation(Norm(), Collect()),
    "a product": Product(spread=Summary(), deep=Product(size=PerObservation(Norm(), Collect()))),
    "two lists": Product(digest=DIGESTS, size=PerObservation(Norm(), Collect())),
}


def recorded(reducer: Reducer, place: Placement | None, xs: list[Tensor]) -> Recording:
    state: Any = {}
    for x in xs:
        state = reducer.update(state, x)
    placement = {} if place is None else {"weight": place}
    return Recording(
        {"value/0": Subrecording(reducer, {"weight": state}, len(xs), monitor="ParameterMonitor", placement=placement)}
    )


def merged(recordings: list[Recording]) -> Recording:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RecordingWarning)
        return Recording(Merged({f"rank {rank}": one for rank, one in enumerate(recordings)}).all())


def of_ranks(reducer: Reducer, ranks: int, change: Callable[[int, int, Tensor], Tensor]) -> Recording:
    """What so many ranks recorded of six steps; `change` is asked for what a rank has at a step."""
    steps = list(torch.randn(6, 3, 4, generator=torch.Generator().manual_seed(0)).unbind())
    copies = [Placement(rank, shared=True) for rank in range(ranks)]
    return merged([recorded(reducer, one, [change(one.rank, step, x) for step, x in enumerate(steps)]) for one in copies])


@pytest.mark.parametrize("name", LISTING)
def test_the_rank_that_is_unlike_most_is_named_with_the_first_observation(name: str) -> None:
    found = of_ranks(LISTING[name], 3, lambda rank, step, x: x + (rank == 1 and step >= 4))
    assert found.differing == (Differing("value/0", "weight", "ParameterMonitor", (1,), (0, 1, 2), 4),)
    assert (found["value/0"].ranks, found["value/0"].copies) == ((0, 1, 2), 1)


def test_the_majority_is_that_of_the_first_observation_that_differs() -> None:
    found = of_ranks(DIGESTS, 3, lambda rank, step, x: x + rank * (step >= 2 + rank))
    (one,) = found.differing
    assert (one.ranks, one.observation) == ((1,), 3)


def test_without_a_majority_all_ranks_are_named() -> None:
    for ranks, apart in ((2, 2), (4, 2), (3, 3)):
        (one,) = of_ranks(DIGESTS, ranks, lambda rank, step, x, apart=apart: x + rank % apart).differing  # type: ignore[misc]
        assert (one.ranks, one.observation) == (tuple(range(ranks)), 0)


def test_one_bit_is_seen_and_equal_copies_are_told_as_compared() -> None:
    def flipped(rank: int, step: int, x: Tensor) -> Tensor:
        bits = x.clone()
        bits.view(torch.int32)[2, 3] ^= int(rank == 2 and step == 5)
        return bits

    (one,) = of_ranks(DIGESTS, 3, flipped).differing
    assert (one.ranks, one.observation) == ((2,), 5)
    equal = of_ranks(DIGESTS, 3, lambda rank, step, x: x)
    assert equal.differing == ()
    assert equal["value/0"].copies == 1


def test_a_rank_that_observed_less_differs_from_there_on() -> None:
    xs = list(torch.randn(4, 2, generator=torch.Generator().manual_seed(0)).unbind())
    found = merged([recorded(DIGESTS, Placement(rank, shared=True), xs[: 4 - 2 * (rank == 1)]) for rank in range(3)])
    (one,) = found.differing
    assert (one.ranks, one.observation) == ((1,), 2)


@pytest.mark.parametrize("reducer", [Mean(), Digest(), Collect()])
def test_a_reducer_that_lists_no_observations_tells_the_rank_alone(reducer: Reducer) -> None:
    (one,) = of_ranks(reducer, 3, lambda rank, step, x: x + (rank == 1 and step >= 4)).differing
    assert (one.ranks, one.observation) == ((1,), None)


def test_what_ranks_have_for_themselves_is_not_compared() -> None:
    xs = list(torch.randn(4, 2).unbind())
    found = merged([recorded(DIGESTS, None, xs[rank:]) for rank in range(2)])
    assert (found.differing, found["value/0"].copies) == ((), 0)


def test_copies_of_a_dtensor_say_that_the_first_counts() -> None:
    places = [Placement(rank, shared=True, home=0, axes=2) for rank in range(3)]
    found = merged([recorded(DIGESTS, place, [torch.full((2, 2), float(place.rank == 2))]) for place in places])
    (one,) = found.differing
    assert (one.ranks, one.observation, one.first_counts) == ((2,), 0, True)


def test_it_is_warned_of_with_the_ranks_and_the_observation() -> None:
    recordings = {f"rank {rank}": recorded(DIGESTS, Placement(rank, True), [torch.tensor(float(rank == 1))]) for rank in range(3)}
    parts = Merged(recordings)
    told = (
        r"'value/0', leaf 'weight' \(ParameterMonitor\) on rank 1, unlike ranks 0 and 2, from observation 0 on. Each that differs"
    )
    with pytest.warns(RecordingWarning, match=told):
        parts.all()
    with pytest.warns(RecordingWarning, match=told):
        assert len(Recording(parts).differing) == 1  # merged as it is looked at


def test_it_survives_further_merges_and_pickling() -> None:
    apart = of_ranks(DIGESTS, 3, lambda rank, step, x: x + (rank == 1))
    equal = of_ranks(DIGESTS, 3, lambda rank, step, x: x)
    assert apart.merge(equal).differing == equal.merge(apart).differing == apart.differing
    assert pickle.loads(pickle.dumps(apart)).differing == apart.differing
