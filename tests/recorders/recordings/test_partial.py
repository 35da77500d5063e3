"""Partial merges: merging some of the ranks first changes nothing, whatever they recorded and however they are grouped."""

from __future__ import annotations

import json
import re
import warnings
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from recorders import MergeError, Recording, Subrecording
from recorders.recordings.distributed.partial import PartialMerge, pack_partial, parse_partial, unpack_partial
from recorders.recordings.distributed.placement import Placement
from recorders.recordings.distributed.ranks import merge_ranks
from reducers import EMA, Collect, Covariance, First, Last, Max, Mean, Moments, Norm, Product, Quantile, Reducer, StateMismatchError

CPU = torch.device("cpu")
CALL = "sync(to='all', missing='keep')"
DATA = Product(
    moments=Moments("b c -> c"), ema=EMA("b c -> c", alpha=0.1), all=Collect(), first=First(), last=Last(), low=Quantile()
)
SHARED: list[Reducer] = [Norm(), Product(norm=Norm("o i -> o"), top=Max()), Covariance("i o -> i")]


def merged_by_levels(recordings: list[Recording], shape: tuple[int, ...]) -> list[Recording]:
    """What the first of all ranks holds at the end of the way up, each message packed, read and unpacked."""
    held = [[recording] for recording in recordings]
    for size in reversed(shape):
        over = []
        for start in range(0, len(held), size):
            partial = PartialMerge()
            for bundle in held[start : start + size]:
                manifest, payload = pack_partial(bundle, CPU, "keep", CALL)
                for arrived in unpack_partial(held[start][0], parse_partial(json.loads(manifest)), payload):
                    partial.add(arrived)
            over.append(partial.recordings())
        held = over
    (top,) = held
    return top


def warned(recordings: list[Recording]) -> tuple[Recording, list[str]]:
    """The recordings merged, and the warnings without the ranks that they list."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        merged = merge_ranks(recordings)
    return merged, [re.sub(r" on ranks \[[\d, ]*\]", "", str(warning.message)) for warning in caught]


def assert_same(actual: Recording, expected: Recording) -> None:
    assert list(actual) == list(expected)
    assert actual.aliases == expected.aliases
    for name, part in expected.items():
        assert actual[name].samples == part.samples
        assert not actual[name].placement
        assert actual[name].monitor == part.monitor
        assert list(actual[name].states) == list(part.states)
        torch.testing.assert_close(actual[name].leaves(), part.leaves(), rtol=1e-12, atol=1e-12, equal_nan=True)


def values(seed: int, *shape: int) -> Tensor:
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed)) + 3


SHAPES = [(2, 2), (2, 3), (4, 2), (2, 3, 4), (2, 1, 3), (3, 2, 2), (1, 5)]


@st.composite
def jobs(draw: st.DrawFn) -> tuple[tuple[int, ...], list[Recording]]:
    """A mesh, and what its ranks recorded: data of their own, plain copies, and parts and copies of DTensors."""
    shape = draw(st.sampled_from(SHAPES))
    ranks = range(torch.Size(shape).numel())
    shared = draw(st.sampled_from(SHARED))
    parts = draw(st.integers(1, 4))
    kinds = draw(st.lists(st.sampled_from(["data", "copy", "mesh 0", "mesh 1", "none"]), min_size=len(ranks), max_size=len(ranks)))
    homes = {kind: kinds.index(kind) for kind in kinds}
    of_net = draw(st.booleans())
    recordings = []
    for rank, kind in zip(ranks, kinds, strict=True):
        held: dict[str, Subrecording] = {}
        if draw(st.integers(0, 4)):
            rows = draw(st.integers(0, 2))
            state = DATA.update({}, values(rank, rows, 2)) if rows else {}
            held["data"] = Subrecording(DATA, {"": state} if state else {}, 1, monitor="ForwardMonitor")
        if kind != "none":
            cell = draw(st.integers(0, parts - 1))
            place = {
                "data": None,
                "copy": Placement(rank, shared=True),
            }.get(kind, Placement(rank, of_net, homes[kind], 2, ((0, cell, parts),) if parts > 1 else ()))
            states, placement = {}, {}
            for leaf in draw(st.lists(st.sampled_from(["", "a"]), unique=True, max_size=2)):
                seed = draw(st.sampled_from([0, 0, 0, 1]))
                states[leaf] = shared.update({}, values(seed, 3, 2)) if draw(st.integers(0, 5)) else {}
                if place:
                    placement[leaf] = place
            held["weight"] = Subrecording(shared, states, draw(st.sampled_from([2, 2, 3])), placement=placement)
        recordings.append(Recording(held, {"alias": "data"} if "data" in held else {}))
    return shape, recordings


@settings(max_examples=100, deadline=None)
@given(jobs())
def test_merging_dimension_by_dimension_is_merging_all_at_once(job: tuple[tuple[int, ...], list[Recording]]) -> None:
    shape, recordings = job
    try:
        expected, warnings_expected = warned(recordings)
    except StateMismatchError:  # a part of one tensor, and the whole of another one, under one name
        with pytest.raises((StateMismatchError, MergeError)):
            warned(merged_by_levels(recordings, shape))
        return
    actual, warnings_given = warned(merged_by_levels(recordings, shape))
    assert_same(actual, expected)
    assert warnings_given == warnings_expected


def job_of(shape: tuple[int, ...], placed: Any) -> list[Recording]:
    """What each rank of a mesh recorded: an output, and a weight placed as `placed(rank)` says."""
    recordings = []
    for rank in range(torch.Size(shape).numel()):
        weight = Norm().update({}, values(0, 3, 2))
        recordings.append(
            Recording(
                {
                    "output": Subrecording(DATA, {"": DATA.update({}, values(rank, 4, 2))}, 1),
                    "weight": Subrecording(Norm(), {"": weight}, 1, placement={"": placed(rank)}),
                }
            )
        )
    return recordings


def test_copies_leave_a_level_as_one_recording_however_many_ranks_there_are() -> None:
    recordings = job_of((2, 3, 4), lambda rank: Placement(rank, shared=True))
    (top,) = merged_by_levels(recordings, (2, 3, 4))
    assert top.samples["output"] == 24
    assert top.samples["weight"] == 1
    assert_same(merge_ranks([top]), merge_ranks(recordings))


def test_of_shards_with_copies_in_each_machine_one_of_each_shard_is_kept() -> None:
    recordings = job_of((6, 4), lambda rank: Placement(rank, True, 0, 2, ((0, rank % 4, 4),)))
    top = merged_by_levels(recordings, (6, 4))
    assert [list(recording) for recording in top] == [["output", "weight"], ["weight"], ["weight"], ["weight"]]
    assert_same(merge_ranks(top), merge_ranks(recordings))


def test_copies_that_differ_are_kept_until_all_ranks_are_there() -> None:
    recordings = job_of((2, 2), lambda rank: Placement(rank, shared=True))
    other = Subrecording(Norm(), {"": Norm().update({}, values(1, 3, 2))}, 1, placement={"": Placement(2, shared=True)})
    recordings[2] = Recording({**recordings[2], "weight": other})
    top = merged_by_levels(recordings, (2, 2))
    assert [recording.samples["weight"] for recording in top] == [1, 1]
    merged, (warning,) = warned(top)
    assert "'weight'" in warning
    assert merged.samples["weight"] == 2


def test_data_of_each_rank_is_not_taken_for_a_copy() -> None:
    mean = Mean()
    state = mean.update({}, torch.ones(3))
    partial = PartialMerge()
    for rank in range(4):
        partial.add(Recording({"x": Subrecording(mean, {"": state}, 1, placement={"": Placement(rank)})}))
    assert len(partial.recordings()) == 4


def test_states_that_do_not_merge_name_the_subrecorder() -> None:
    mean = Mean("b c -> c")
    partial = PartialMerge()
    partial.add(Recording({"fc": Subrecording(mean, {"": mean.update({}, torch.ones(2, 3))}, 1)}))
    with pytest.raises(MergeError, match="subrecorder 'fc'"):
        partial.add(Recording({"fc": Subrecording(mean, {"": mean.update({}, torch.ones(2, 5))}, 1)}))


FORGED: list[Any] = [
    None,
    [],
    {},
    {"manifests": [], "recordings": []},
    {"manifests": ["x"], "recordings": [0]},
    {"manifests": ['{"error": "x"}'], "recordings": [0]},
    {"manifests": [3], "recordings": [0]},
    {"manifests": ["\ud800"], "recordings": [0]},
    {"manifests": ["[" * 100_000], "recordings": [0]},
]
SOUND = json.loads(pack_partial([Recording({})], CPU, "error", "sync(to='all', missing='error')")[0])
FORGED += [{**SOUND, "recordings": numbers} for numbers in ([], [1], [-1], [True], ["0"], 0, None)]
FORGED += [{**SOUND, "more": 1}]


@pytest.mark.parametrize("data", FORGED, ids=range(len(FORGED)))
def test_a_partial_merge_that_nobody_can_have_sent(data: Any) -> None:
    with pytest.raises(ValueError):
        parse_partial(data)
