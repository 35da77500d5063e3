"""Sync: real processes with gloo on loopback. One world of three serves all tests, and groups within it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from world import SIZE, Place, World, alike, returned

from recorders import (
    ForwardInputMonitor,
    ForwardMonitor,
    ParameterGradientMonitor,
    ParameterMonitor,
    Recorder,
    Recording,
    Subrecording,
    merge,
)
from recorders.integrations.cells import Cells
from recorders.recordings.distributed.sync import sync
from reducers import Collect, Count, First, Fold, Geometry, Last, Max, Mean, Min, Moments, Product, Reducer, State, Sum


def bits(recording: Recording) -> dict[str, Any]:
    """All of a recording that two can be compared by, bit for bit."""
    return {
        name: (
            part.monitor,
            part.samples,
            {leaf: {key: exact(value) for key, value in state.items()} for leaf, state in part.states.items()},
        )
        for name, part in recording.items()
    }


def exact(tensor: Tensor) -> tuple[str, tuple[int, ...], list[int]]:
    flat = tensor.resolve_conj().clone(memory_format=torch.contiguous_format).view(-1).view(torch.uint8)
    return str(tensor.dtype), tuple(tensor.shape), flat.tolist()


def one(reducer: Reducer, state: State | None = None, samples: int = 1, name: str = "x") -> Recording:
    return Recording({name: Subrecording(reducer, {"": state} if state else {}, samples, monitor="ForwardMonitor")})


def refused(answers: list[Any]) -> str:
    """The text of the SyncError that all ranks raised."""
    assert [answer.kind for answer in answers] == ["SyncError"] * len(answers)
    assert len({answer.text for answer in answers}) == 1
    return str(answers[0].text)


EVERYTHING = Product(
    moments=Moments("b c -> c"),
    low=Min("b c -> c"),
    high=Max("b c -> c"),
    count=Count(),
    sum=Sum("b c -> c"),
    all=Collect(),
    first=First(),
    last=Last(),
    steps=Geometry(Mean()),
)


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3)).double()


def batch(index: int, rows: int = 6) -> Tensor:
    return torch.randn(rows, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(index)) * 3 + 100


def recorded(batches: list[int]) -> Recorder:
    """A recorder that has seen these batches, forward and backward."""
    model = net()
    recorder = Recorder(out=ForwardMonitor(EVERYTHING), grad=ParameterGradientMonitor(Moments(), when="accumulate")).modules(
        model, types=nn.Linear
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    with recorder:
        for index in batches:
            optimizer.zero_grad()
            model(batch(index, rows=6 - index % 3)).square().mean().backward()
            optimizer.step()
    return recorder


def shard(cuts: list[int], rank: int) -> list[int]:
    return list(range(sum(cuts[:rank]), sum(cuts[: rank + 1])))


def sync_shards(place: Place, cuts: list[int]) -> Any:
    rank, group = place
    recorder = recorded(shard(cuts, rank))
    before = bits(recorder.snapshot())
    merged = recorder.sync(group)
    again = recorder.sync(group)
    return bits(merged), merged.compute(), bits(again) == bits(merged), bits(recorder.snapshot()) == before


def assert_close(actual: Any, expected: Any) -> None:
    torch.testing.assert_close(actual, expected, rtol=1e-12, atol=1e-12, equal_nan=True)


@pytest.mark.parametrize("cuts", [[4, 3, 5], [0, 6, 2], [3, 0, 0]])
def test_three_ranks_equal_one_pass(world: World, cuts: list[int]) -> None:
    answers = returned(world.run(sync_shards, cuts))
    assert all(bitwise == answers[0][0] for bitwise, *_ in answers)
    whole = recorded(list(range(sum(cuts))))
    assert_close(answers[0][1], whole.compute())
    assert [samples for _, samples, _ in answers[0][0].values()] == list(whole.samples.values())


def test_two_ranks_one_without_data_equal_one_pass(world: World) -> None:
    answers = returned(world.run(sync_shards, [5, 0], ranks=(0, 1)))
    assert answers[0][0] == answers[1][0] == bits(recorded([0, 1, 2, 3, 4]).snapshot())


@settings(max_examples=12, suppress_health_check=[HealthCheck.too_slow])
@given(cuts=st.lists(st.integers(0, 3), min_size=SIZE, max_size=SIZE))
def test_any_cut_equals_one_pass(world: World, cuts: list[int]) -> None:
    answers = returned(world.run(sync_shards, cuts))
    assert answers[0][0] == answers[1][0] == answers[2][0]
    assert_close(answers[2][1], recorded(list(range(sum(cuts)))).compute())


def test_nothing_counts_twice_however_often_one_syncs(world: World) -> None:
    for _, _, same_again, untouched in returned(world.run(sync_shards, [2, 1, 3])):
        assert same_again
        assert untouched


def sync_nothing(place: Place) -> Any:
    merged = recorded([]).sync(place[1])
    return list(merged), list(merged.samples.values()), merged.compute()


def test_ranks_that_all_recorded_nothing(world: World) -> None:
    names = ["out/0", "out/2", "grad/0", "grad/2"]
    assert alike(world.run(sync_nothing)) == (names, [0] * 4, {})


def sync_empty(place: Place) -> Any:
    return bits(sync(Recording({}), place[1]))


def test_recordings_without_subrecorders(world: World) -> None:
    assert alike(world.run(sync_empty)) == {}


def collect_unequal(place: Place, rows: list[int]) -> Any:
    rank, group = place
    collect = Collect()
    state = collect.update({}, torch.full((rows[rank], 2), float(rank)))
    merged = sync(one(collect, state), group)
    return merged["x"].peek()[:, 0].tolist(), merged["x"].samples


@pytest.mark.parametrize("rows", [[1, 1000, 37], [0, 3, 1], [5, 0, 0]])
def test_collections_of_unequal_length_arrive_in_rank_order(world: World, rows: list[int]) -> None:
    values, samples = alike(world.run(collect_unequal, rows))
    assert values == [float(rank) for rank in range(SIZE) for _ in range(rows[rank])]
    assert samples == SIZE


def first_and_last(place: Place) -> Any:
    rank, group = place
    both = Product(first=First(), last=Last(), shown=Fold(torch.maximum))
    merged = sync(one(both, both.update({}, torch.tensor(float(rank)))), group)
    return {name: value.item() for name, value in merged["x"].peek().items()}


def test_ordered_reducers_merge_in_rank_order(world: World) -> None:
    assert alike(world.run(first_and_last)) == {"first": 0.0, "last": 2.0, "shown": 2.0}
    assert alike(world.run(first_and_last, ranks=(1, 2))) == {"first": 1.0, "last": 2.0, "shown": 2.0}


ODD_TENSORS: dict[str, Callable[[], Tensor]] = {
    "bfloat16": lambda: torch.tensor([1.5, -0.0, float("nan")], dtype=torch.bfloat16),
    "float16": lambda: torch.tensor([[65504.0], [6e-8]], dtype=torch.float16),
    "float8": lambda: torch.tensor([0.5, 448.0], dtype=torch.float8_e4m3fn),
    "nan with a payload": lambda: torch.tensor([0x7FC12345], dtype=torch.int32).view(torch.float32),
    "bool": lambda: torch.tensor([True, False, True]),
    "int8": lambda: torch.tensor([-128, 127], dtype=torch.int8),
    "uint16": lambda: torch.tensor([0, 65535], dtype=torch.uint16),
    "uint64": lambda: torch.tensor([2**63 + 1], dtype=torch.uint64),
    "int64": lambda: torch.tensor(-(2**63)),
    "complex64": lambda: torch.tensor([1 + 2j, 3 - 4j], dtype=torch.complex64).conj(),
    "complex128": lambda: torch.tensor(0.1 + 0.2j, dtype=torch.complex128),
    "transposed": lambda: torch.arange(6.0).view(2, 3).t(),
    "expanded": lambda: torch.tensor([1.0]).expand(4),
    "one of a strided tensor": lambda: torch.arange(6.0)[1::3][:1],
    "without elements": lambda: torch.empty(0, 3, dtype=torch.float64),
}


def odd_dtypes(place: Place, owner: int) -> Any:
    rank, group = place
    states = {name: {"value": make()} for name, make in ODD_TENSORS.items()} if rank == owner else {}
    merged = sync(Recording({name: Subrecording(Last(), {"leaf": states.get(name, {})}) for name in ODD_TENSORS}), group)
    own = all(
        part.states["leaf"]["value"].untyped_storage().nbytes() == part.states["leaf"]["value"].nbytes for part in merged.values()
    )
    return {name: exact(part.states["leaf"]["value"]) for name, part in merged.items()}, own


@pytest.mark.parametrize("owner", range(SIZE))
def test_every_dtype_arrives_bit_for_bit_in_memory_of_its_own(world: World, owner: int) -> None:
    arrived, own_memory = alike(world.run(odd_dtypes, owner))
    assert arrived == {name: exact(make()) for name, make in ODD_TENSORS.items()}
    assert own_memory


def recording_of(names: list[str], reducer: Reducer, monitor: str = "ForwardMonitor") -> Recording:
    state = reducer.update({}, torch.ones(2, 2))
    return Recording({name: Subrecording(reducer, {"": state}, 1, monitor=monitor) for name in names})


def sync_recordings(place: Place, by_rank: list[Recording]) -> Any:
    rank, group = place
    return bits(sync(by_rank[rank], group))


def test_different_names_fail_on_every_rank_with_both_sides_listed(world: World) -> None:
    here, there = recording_of(["a", "b", "both"], Mean()), recording_of(["both", "c"], Mean())
    text = refused(world.run(sync_recordings, [here, there], ranks=(0, 1)))
    assert "beside what both record, rank 0 records ['a', 'b'] and rank 1 records ['c']" in text
    text = refused(world.run(sync_recordings, [here, here, there]))
    assert "rank 0 records ['a', 'b'] and rank 2 records ['c']" in text
    assert "rank 1" not in text


def test_different_reducers_monitors_or_attributes_fail_on_every_rank(world: World) -> None:
    mean, per_channel = recording_of(["a", "b"], Mean()), recording_of(["a", "b"], Mean("b c -> c"))
    text = refused(world.run(sync_recordings, [mean, per_channel, mean]))
    assert "'a' is ForwardMonitor(Mean(pattern='... ->')) on rank 0 and ForwardMonitor(Mean(pattern='b c -> c')) on rank 1" in text
    gradients = recording_of(["a", "b"], Mean(), monitor="BackwardMonitor")
    text = refused(world.run(sync_recordings, [mean, mean, gradients]))
    assert "'b' is ForwardMonitor(Mean(pattern='... ->')) on rank 0 and BackwardMonitor(Mean(pattern='... ->')) on rank 2" in text
    weight, bias = (Recording({"p": Subrecording(Mean(), monitor="ParameterMonitor", attr=attr)}) for attr in ("weight", "bias"))
    assert "'weight') on rank 0" in refused(world.run(sync_recordings, [weight, weight, bias]))


def test_an_error_lists_no_more_than_one_can_read(world: World) -> None:
    many, few = recording_of([f"layer{index}" for index in range(2000)], Mean()), recording_of(["z"], Mean())
    text = refused(world.run(sync_recordings, [many, few, few]))
    assert "'layer19'] and 1,980 more" in text
    assert "layer20" not in text
    other = recording_of([f"layer{index}" for index in range(2000)], Max())
    text = refused(world.run(sync_recordings, [many, other, other]))
    assert text.count(" on rank 0 and ") == 20
    assert text.endswith("; and more")


def test_the_order_of_names_is_that_of_the_first_rank(world: World) -> None:
    here, there = recording_of(["a", "b"], Mean()), recording_of(["b", "a"], Mean())
    assert list(alike(world.run(sync_recordings, [here, there], ranks=(0, 1)))) == ["a", "b"]


ODD_NAMES = ["", "a/b", "../up", "nul\0inside", "two\nlines", "x" * 300, "Name", "name", "\u00e9", "e\u0301", "lone \ud800"]


def test_names_may_be_any_text(world: World) -> None:
    recording = recording_of(ODD_NAMES, Count())
    merged = alike(world.run(sync_recordings, [recording] * 3))
    assert list(merged) == ODD_NAMES
    assert all(samples == 3 for _, samples, _ in merged.values())


def test_leaves_that_only_some_ranks_met_are_all_kept(world: World) -> None:
    mean = Mean()
    by_rank = [
        Recording({"x": Subrecording(mean, {leaf: mean.update({}, torch.tensor(float(rank))) for leaf in leaves}, 1)})
        for rank, leaves in enumerate([("a",), ("a", "b"), ()])
    ]
    merged = alike(world.run(sync_recordings, by_rank))
    assert {leaf: state["count"][2] for leaf, state in merged["x"][2].items()} == {"a": [2, *[0] * 7], "b": [1, *[0] * 7]}


def test_states_that_do_not_merge_fail_on_every_rank(world: World) -> None:
    reducer = Mean("b c -> c")
    by_rank = [one(reducer, reducer.update({}, torch.ones(2, width)), name="fc") for width in (3, 3, 5)]
    text = refused(world.run(sync_recordings, by_rank))
    assert "rank 2 does not fit those before it: subrecorder 'fc': " in text
    assert "(3,)" in text
    assert "(5,)" in text


def unsendable(place: Place, culprit: int, kind: str) -> Any:
    rank, group = place
    if rank != culprit:
        return bits(sync(recording_of(["fc"], Last()), group))
    value: Any = {
        "sparse": lambda: torch.eye(2).to_sparse(),
        "meta": lambda: torch.empty(2, device="meta"),
        "text": lambda: "no tensor",
        "reducer": lambda: torch.ones(2),
    }[kind]()
    return bits(sync(Recording({"fc": Subrecording(None if kind == "reducer" else Last(), {"": {"value": value}})}), group))


@pytest.mark.parametrize(
    ("kind", "reason"),
    [
        ("sparse", "state 'value' of subrecorder 'fc' is a torch.sparse_coo"),
        ("meta", "state 'value' of subrecorder 'fc' is a meta tensor"),
        ("text", "state 'value' of subrecorder 'fc' is a str"),
        ("reducer", "subrecorder 'fc' has no reducer"),
    ],
)
def test_a_rank_that_cannot_send_leaves_no_other_waiting(world: World, kind: str, reason: str) -> None:
    answers = world.run(unsendable, 1, kind)
    text = refused(answers)
    assert "rank 1 cannot send what it recorded" in text
    assert reason in text
    assert [answer.cause for answer in answers] == ["NoneType", "SyncError", "NoneType"]
    # The group is not out of step: what comes next is right.
    assert alike(world.run(first_and_last))["last"] == 2.0


def functions(place: Place) -> Any:
    rank, group = place
    reducer = Sum().premap(lambda x: x * 2).postmap(lambda total: total + 1)
    model = nn.Sequential(nn.Identity())
    with Recorder(ForwardMonitor(reducer)).modules(model, names="0") as recorder:
        model(torch.tensor(float(rank + 1)))
    recorder.apply(lambda total: total / 10)
    merged = recorder.sync(group)
    return {name: value.item() for name, value in merged.compute().items()}, bits(merged)


def test_reducers_that_hold_functions_are_compared_by_name(world: World) -> None:
    values, _ = alike(world.run(functions))
    assert values == {"0": (2 * (1 + 2 + 3) + 1) / 10}


def unlike_functions(place: Place) -> Any:
    rank, group = place
    recorder = Recorder(ForwardMonitor(Sum())).modules(nn.Sequential(nn.Identity()), names="0")
    return bits((recorder.apply(torch.sqrt) if rank == 0 else recorder).sync(group))


def test_results_that_would_be_shown_differently_are_refused(world: World) -> None:
    assert ".apply(" in refused(world.run(unlike_functions))


COLLECTIVES = [
    *("all_gather", "all_gather_into_tensor", "all_gather_object", "all_reduce", "all_to_all", "all_to_all_single", "barrier"),
    *("broadcast", "broadcast_object_list", "gather", "gather_object", "monitored_barrier", "reduce", "reduce_scatter"),
    *("reduce_scatter_tensor", "scatter", "scatter_object_list", "send", "recv", "isend", "irecv", "batch_isend_irecv"),
]


def noting(calls: list[str], name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    def call(*args: Any, **kwargs: Any) -> Any:
        calls.append(name)
        return function(*args, **kwargs)

    return call


def counted(place: Place, subrecorders: int, unlike: bool) -> list[str]:
    rank, group = place
    calls: list[str] = []
    with pytest.MonkeyPatch.context() as patch:
        for name in COLLECTIVES:
            patch.setattr(dist, name, noting(calls, name, getattr(dist, name)))
        collect = Product(all=Collect(), stats=Moments())
        state = collect.update({}, torch.ones(1 + rank * unlike))
        sync(Recording({str(index): Subrecording(collect, {"": state}, 1) for index in range(subrecorders)}), group)
    return calls


@pytest.mark.parametrize(("unlike", "collectives"), [(False, 2), (True, 3)])
def test_collectives_do_not_grow_with_the_number_of_subrecorders(world: World, unlike: bool, collectives: int) -> None:
    few, many = (alike(world.run(counted, subrecorders, unlike)) for subrecorders in (1, 400))
    assert few == many
    assert len(few) == collectives


def gathered(place: Place, to: Any) -> Any:
    rank, group = place
    calls: list[str] = []
    with pytest.MonkeyPatch.context() as patch:
        for name in COLLECTIVES:
            patch.setattr(dist, name, noting(calls, name, getattr(dist, name)))
        merged = recorded([rank]).sync(group, to=to)
    return merged and bits(merged), calls


def test_only_the_rank_asked_for_gathers_and_merges(world: World) -> None:
    whole = alike([bitwise for bitwise, _ in returned(world.run(gathered, "all"))])
    answers = returned(world.run(gathered, 1))
    assert [bitwise for bitwise, _ in answers] == [None, whole, None]
    assert [calls for _, calls in answers] == [["all_gather", "all_gather", "gather"]] * 3  # what they collected differs
    assert [bitwise is None for bitwise, _ in returned(world.run(gathered, 2, ranks=(1, 2)))] == [True, False]


def sent(place: Place, to: int) -> list[str]:
    calls: list[str] = []
    with pytest.MonkeyPatch.context() as patch:
        for name in COLLECTIVES:
            patch.setattr(dist, name, noting(calls, name, getattr(dist, name)))
        sync(recording_of([str(index) for index in range(to * 200)], Moments()), place[1], to=to)
    return calls


def test_collectives_to_one_rank_do_not_grow_with_the_subrecorders(world: World) -> None:
    assert alike(world.run(sent, 1)) == alike(world.run(sent, 2)) == ["all_gather", "gather"]


def to_several(place: Place, receivers: list[Any]) -> Any:
    rank, group = place
    return sync(recording_of(["a"], Mean()), group, to=receivers[rank])


def test_ranks_that_ask_for_other_receivers_are_refused(world: World) -> None:
    text = refused(world.run(to_several, ["all", 1, "all"]))
    assert "rank 2 calls sync(to='all', missing='error'); rank 1 calls sync(to=1, missing='error')" in text
    text = refused(world.run(to_several, [7, 1, 1]))
    assert "rank 0 cannot send what it recorded: SyncError: to=7 is neither 'all' nor a rank of the group" in text


def oddly_asked(place: Place, options: Sequence[Mapping[str, Any]]) -> Any:
    rank, group = place
    return sync(recording_of(["a"], Mean()), group, **options[rank])


@pytest.mark.parametrize("odd", [None, True, 1.0, "0"])
def test_a_receiver_that_is_no_rank_is_refused(world: World, odd: Any) -> None:
    text = refused(world.run(oddly_asked, [{"to": odd}] * 3))
    assert f"SyncError: to={odd!r} is neither 'all' nor a rank of the group" in text


def test_an_unknown_way_to_merge_names_is_refused(world: World) -> None:
    text = refused(world.run(oddly_asked, [{}, {"missing": "kept"}, {}]))
    assert "rank 1 cannot send what it recorded: ValueError: sync(missing='kept'): choose 'error' or 'keep'" in text
    with pytest.raises(ValueError, match=r"sync\(missing='kept'\): choose 'error' or 'keep'"):
        oddly_asked((0, None), [{"missing": "kept"}])


def inferred(place: Place) -> Any:
    rank, group = place
    with torch.inference_mode():
        recorder = recorded_inference(rank)
        merged = recorder.sync(group)
    states = [state for part in merged.values() for state in part.states.values()]
    continued = {name: part.merge(part).samples for name, part in merged.items()}
    return any(value.is_inference() for state in states for value in state.values()), continued


def recorded_inference(rank: int) -> Recorder:
    model = net()
    with Recorder(ForwardInputMonitor(EVERYTHING)).modules(model, types=nn.Linear) as recorder:
        model(batch(rank))
    return recorder


def test_states_synced_in_inference_mode_are_usable_outside(world: World) -> None:
    assert alike(world.run(inferred)) == (False, {"0": 6, "2": 6})


def kept(place: Place) -> Any:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    model[1].weight = model[0].weight
    with Recorder(ParameterMonitor(Count(), when="tick")).parameters(model, names="*.weight") as recorder:
        recorder.tick()
    merged = recorder.sync(place[1])
    return dict(merged.aliases), merged["1.weight"].samples, [part.attr for part in merged.values()], type(merged).__name__


def test_aliases_and_attributes_are_kept(world: World) -> None:
    assert alike(world.run(kept)) == ({"1.weight": "0.weight"}, 1, ["weight"], "Recording")


def alone(place: Place) -> bool:
    recording = recording_of(["a"], Mean())
    return sync(recording, place[1]) is recording


def test_a_group_of_one_and_no_group_at_all_give_the_recording_as_it_is(world: World) -> None:
    assert world.run(alone, ranks=(1,)) == [True]
    assert alone((0, None))


def test_who_is_not_in_the_group_is_told_so(world: World) -> None:
    (answer,) = world.run(alone, ranks=(0,), group=(1, 2))
    assert answer.kind == "SyncError"
    assert "rank 0 is not in the group" in answer.text


def resumed(place: Place) -> Mapping[str, int]:
    rank, group = place
    merged = recorded([rank]).sync(group)
    fresh = recorded([]).merge(merged)
    return {name: fresh[name].samples for name in fresh}


def test_a_synced_recording_resumes_in_a_fresh_recorder(world: World) -> None:
    assert set(alike(world.run(resumed)).values()) == {3}


def sync_union(place: Place, by_rank: list[Recording]) -> Any:
    rank, group = place
    return bits(sync(by_rank[rank], group, missing="keep"))


def test_names_that_only_some_ranks_record_are_merged_if_asked_for(world: World) -> None:
    by_rank = [recording_of(["a", "both"], Mean()), recording_of(["both", "c"], Sum()), recording_of(["c", "d"], Sum())]
    text = refused(world.run(sync_union, by_rank))
    assert "'both' is ForwardMonitor(Mean(pattern='... ->')) on rank 0 and ForwardMonitor(Sum(pattern='... ->')) on rank 1" in text
    by_rank[1] = recording_of(["both", "c"], Mean())
    by_rank[2] = recording_of(["c", "d"], Mean())
    merged = alike(world.run(sync_union, by_rank))
    assert {name: samples for name, (_, samples, _) in merged.items()} == {"a": 1, "both": 2, "c": 2, "d": 1}
    assert merged == bits(by_rank[0].merge(by_rank[1], missing="keep").merge(by_rank[2], missing="keep"))


def test_a_further_name_of_one_rank_is_merged_with_the_name_of_another(world: World) -> None:
    by_rank = [Recording(recording_of(["a"], Sum()).subrecordings, {"b": "a"}), *(recording_of(["b"], Sum()) for _ in range(2))]
    merged = alike(world.run(sync_union, by_rank))
    assert {name: samples for name, (_, samples, _) in merged.items()} == {"a": 1, "b": 3}
    assert merged == bits(by_rank[0].merge(by_rank[1], missing="keep").merge(by_rank[2], missing="keep"))
    for both in (by_rank[0].merge(by_rank[1], missing="keep"), by_rank[1].merge(by_rank[0], missing="keep")):
        assert ({name: part.samples for name, part in both.items()}, dict(both.aliases)) == ({"a": 1, "b": 2}, {})


def test_a_further_name_of_one_file_is_merged_with_the_name_of_another(tmp_path: Path) -> None:
    Recording(recording_of(["", "a"], Sum()).subrecordings, {"b": "a"}).save(tmp_path / "one")
    recording_of(["", "b", "c"], Sum()).save(tmp_path / "other")
    merged = merge([tmp_path / "one", tmp_path / "other"], missing="keep")
    assert {name: part.samples for name, part in merged.items()} == {"": 2, "a": 1, "b": 2, "c": 1}


def union_with_a_function(place: Place) -> Any:
    rank, group = place
    return bits(sync(recording_of(["x"] if rank else [], Mean().premap(torch.abs)), group, missing="keep"))


def test_a_rank_cannot_merge_with_a_function_that_it_does_not_have(world: World) -> None:
    assert "ranks [0], which do not record it, do not have its function" in refused(world.run(union_with_a_function))


def cells(place: Place) -> Any:
    rank, group = place
    mine = Cells({"mean": Mean(), "top": Max()})
    for _ in range(min(rank, 1)):
        mine.update(torch.full((rank,), float(rank)))
    before = mine.state_dict()
    results = {name: float(result) for name, result in mine.sync(group).items()}  # type: ignore[arg-type]
    torch.testing.assert_close(mine.state_dict(), before, rtol=0, atol=0)
    return results


def test_cells_give_the_results_of_all_ranks_also_of_one_without_batches(world: World) -> None:
    assert alike(world.run(cells)) == {"mean": 5 / 3, "top": 2.0}
