"""What merges element by element travels in a few all-reduces: the results are those of gathering, and so is every error."""

from __future__ import annotations

from collections.abc import Sequence
from functools import reduce
from typing import Any

import laws
import pytest
import torch
import torch.distributed as dist
from cases import CASES, Case
from hypothesis import given, settings
from hypothesis import strategies as st
from test_distributed import COLLECTIVES, bits, noting, refused
from torch import Tensor, nn
from world import Place, World, alike, returned

from recorders import ForwardMonitor, ParameterMonitor, Recorder, Recording, Subrecording
from recorders.recordings.distributed.allreduce import Reduction, _decoded, _encoded, _neutral
from recorders.recordings.distributed.merge import Merged, merged_aliases
from recorders.recordings.distributed.protocol import Index, Sent, pack, parse
from recorders.recordings.distributed.sync import sync
from reducers import Count, CountByValue, Extremes, First, Max, Mean, Min, Moments, Norm, Product, Quantile, Sum
from reducers.core.fields import Add, Greatest

CPU = torch.device("cpu")
WHOLE = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)
FLOATS = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
EDGES = [-torch.inf, -3.0, -1e-7, -0.0, 0.0, 6e-8, 2.0, torch.inf, torch.nan]


def pairs(values: Tensor) -> tuple[Tensor, Tensor]:
    """Each value beside each."""
    count = len(values)
    return values.repeat(count), values.repeat_interleave(count)


@pytest.mark.parametrize("op", ["min", "max"])
@pytest.mark.parametrize("dtype", [*FLOATS, *WHOLE, torch.bool], ids=str)
def test_extremes_are_those_of_torch_in_every_dtype(dtype: torch.dtype, op: str) -> None:
    if dtype.is_floating_point:
        values = torch.tensor(EDGES).to(dtype)
    elif dtype is torch.bool:
        values = torch.tensor([False, True])
    else:
        info = torch.iinfo(dtype)
        values = torch.tensor([info.min, info.min + 1, 0, 1, info.max], dtype=dtype)
    a, b = pairs(values)
    merged = _decoded(torch.maximum(_encoded(a, op), _encoded(b, op)), dtype, op)
    torch.testing.assert_close(merged, laws.REDUCTIONS[op](a, b), rtol=0, atol=0, equal_nan=True)
    beside_none = torch.maximum(_encoded(values, op), _encoded(_neutral(dtype, op, CPU).expand(values.shape), op))
    alone = _decoded(beside_none, dtype, op)
    torch.testing.assert_close(alone, values, rtol=0, atol=0, equal_nan=True)
    if dtype.is_floating_point:
        assert torch.equal(torch.signbit(alone)[:-1], torch.signbit(values)[:-1])  # of all but NaN


@pytest.mark.parametrize("dtype", [*WHOLE, torch.float64, torch.complex128], ids=str)
def test_sums_wrap_as_those_of_torch_and_nothing_changes_nothing(dtype: torch.dtype) -> None:
    top = torch.iinfo(dtype).max if dtype in WHOLE else 1e308
    a, b = pairs(torch.tensor([0, 1, top, -0.0 if dtype not in WHOLE else 7], dtype=dtype))
    torch.testing.assert_close(_decoded(_encoded(a, "sum") + _encoded(b, "sum"), dtype, "sum"), a + b, rtol=0, atol=0)
    nothing = _neutral(dtype, "sum", CPU).expand(a.shape).contiguous()
    alone = _decoded(_encoded(a, "sum") + _encoded(nothing, "sum"), dtype, "sum")
    assert torch.equal(alone.view(torch.uint8), a.view(torch.uint8))


class Plan:
    """What a sync of these ranks would reduce and gather; one process plays them all."""

    def __init__(self, ranks: Sequence[Recording]) -> None:
        self.packed = [pack(recording, CPU, "keep", "sync(to='all', missing='keep')") for recording in ranks]
        parsed = {packed.manifest: parse(packed.manifest) for packed in self.packed}
        self.reduction = Reduction([*parsed.values()], reduces=True)
        self.indices = [Index(parsed[packed.manifest], self.reduction.paths, self.reduction.counted) for packed in self.packed]
        self.sizes = [index.size for index in self.indices]


def merged_without_processes(ranks: Sequence[Recording]) -> tuple[Recording, Plan]:
    """What `sync` makes of the recordings of these ranks if it reduces."""
    plan = Plan(ranks)
    rows = [index.gathered(packed, CPU) for index, packed in zip(plan.indices, plan.packed, strict=True)]
    assert [len(row) for row in rows] == plan.sizes
    numbers = [plan.reduction.numbers(packed, CPU) for packed in plan.packed]
    arrived: dict[Any, Tensor] = {}
    for kind in numbers[0]:
        arrived[kind] = reduce(torch.maximum if kind == "highest" else torch.add, [each[kind] for each in numbers])
    assert sum(8 * len(each) for each in arrived.values()) == plan.reduction.size
    found = {"what was reduced": plan.reduction.read(ranks[0], arrived)} if arrived else {}
    for rank, (index, row) in enumerate(zip(plan.indices, rows, strict=True)):
        found[f"rank {rank}"] = Recording(Sent(ranks[0], index, row), index.manifest["aliases"])
    parts = Merged(found).all()
    return Recording(parts, merged_aliases(found, parts)), plan


def check_alike(merged: Recording, expected: Recording) -> None:
    """Integers, minima and maxima are equal, float64 up to rounding; and so are names, leaves, keys and counts."""
    assert list(merged) == list(expected)
    for name, part in expected.items():
        assert merged[name].samples == part.samples
        assert list(merged[name].states) == list(part.states)
        for leaf, state in part.states.items():
            other = merged[name].states[leaf]
            assert list(other) == list(state)
            for key, value in state.items():
                rounded = 1e-12 if value.dtype in (torch.float64, torch.complex128) else 0.0
                torch.testing.assert_close(other[key], value, rtol=rounded, atol=rounded, equal_nan=True)
                assert other[key].untyped_storage().nbytes() == other[key].nbytes


@pytest.mark.parametrize("case", [case for case in CASES if case.merges], ids=str)
@settings(max_examples=5)
@given(data=st.data())
def test_every_reducer_merges_over_ranks_as_if_it_were_gathered(case: Case, data: st.DataObject) -> None:
    generator = torch.Generator().manual_seed(data.draw(st.integers(0, 1000)))
    dtype = data.draw(st.sampled_from(case.dtypes))
    counts = data.draw(st.lists(st.integers(0, 2), min_size=2, max_size=4))
    ranks = []
    for count in counts:
        xs = [(torch.randn(4, *case.trailing, generator=generator) * 10).abs().to(dtype) for _ in range(count)]
        ranks.append(Recording({"x": Subrecording(case.reducer, {"leaf": laws.run(case.reducer, xs)}, count)}, {"alias": "x"}))
    expected = reduce(lambda a, b: a.merge(b), ranks)
    merged, _ = merged_without_processes(ranks)
    check_alike(merged, expected)
    assert merged.aliases == expected.aliases


def test_what_is_another_name_on_one_rank_merges_as_if_it_were_gathered() -> None:
    reducer = Sum()

    def recording(*names: str, **aliases: str) -> Recording:
        part = Subrecording(reducer, {"": reducer.update({}, torch.tensor(2.0))}, 1)
        return Recording(dict.fromkeys(names, part), aliases)

    ranks = [recording("a", "c", b="a"), recording("b", "c"), recording("a", "b", "c"), recording("b", "c", d="c")]
    expected = reduce(lambda one, other: one.merge(other, missing="keep"), ranks)
    merged, plan = merged_without_processes(ranks)
    check_alike(Recording({name: merged[name] for name in expected}), expected)
    assert {name: part.samples for name, part in merged.items()} == {"a": 2, "b": 4, "c": 4}
    assert {path[0] for path in plan.reduction.paths} == {"c"}


EVERYTHING = Product(
    count=Count("b c -> c"),
    mean=Mean("b c -> c"),
    quantile=Quantile("b c -> c", low=1e-3, high=1e3),
    ends=Extremes(),
    moments=Moments("b c -> c"),
    order=Product(first=First(), high=Max()),
)
REDUCED = Product(count=Count(), mean=Mean(), ends=Extremes(), norm=Norm(p=float("inf")), quantile=Quantile(low=1e-3, high=1e3))


def of(reducer: Any, *xs: Tensor, names: Sequence[str] = ("x",), leaf: str = "") -> Recording:
    state = laws.run(reducer, xs)
    return Recording(
        {name: Subrecording(reducer, {leaf: state} if xs else {}, len(xs), monitor="ForwardMonitor") for name in names}
    )


def test_what_is_reduced_and_what_is_left() -> None:
    x = torch.tensor([[1.0, -2.0], [3.0, 4.0]])
    _, plan = merged_without_processes([of(EVERYTHING, x), of(EVERYTHING, 2 * x), of(EVERYTHING)])
    left = [*(f"moments/{key}" for key in ("count", "nonfinite", "mean", "m2")), "order/first/value"]
    assert [key for _, _, key in plan.packed[0].tensors if ("x", "", key) not in plan.reduction.paths] == left
    assert plan.sizes[2] == 0
    _, plan = merged_without_processes([of(REDUCED, x), of(REDUCED)])
    assert plan.sizes == [0, 0]
    assert [index.states for index in plan.indices] == [{}, {}]
    _, plan = merged_without_processes([of(Moments(), x), of(Moments(), x)])
    assert plan.reduction.size == 0


def test_states_that_are_unlike_are_gathered_and_merged_as_before() -> None:
    x = torch.ones(2, 2)
    for reducer in (Quantile(), Min(), Product(low=Min(), n=Count())):
        ranks = [of(reducer, x), of(reducer, x.double()), of(reducer, -x)]
        merged, plan = merged_without_processes(ranks)
        assert plan.reduction.size == 0
        check_alike(merged, reduce(lambda a, b: a.merge(b), ranks))
    narrow = Recording({"x": Subrecording(Sum(), {"": {"count": torch.ones(2), "sum": torch.ones(2)}}, 1)})
    assert merged_without_processes([narrow, narrow])[1].reduction.size == 0
    ranks = [of(Min(), x.to(dtype)) for dtype in (torch.bfloat16, torch.bfloat16)]
    assert merged_without_processes(ranks)[0]["x"].states[""]["min"].dtype is torch.bfloat16


def test_extremes_that_are_nan_stay_nan() -> None:
    """No reducer of the house keeps NaN, but yours may."""
    one = torch.ones((), dtype=torch.int64)
    states = [
        {"count": one, "min": torch.tensor(low), "max": torch.tensor(high)}
        for low, high in [(1.0, 2.0), (torch.nan, torch.nan), (0.0, 5.0)]
    ]
    merged, _ = merged_without_processes([Recording({"x": Subrecording(Extremes(), {"": state}, 1)}) for state in states])
    assert all(merged["x"].states[""][name].isnan() for name in ("min", "max"))


def test_leaves_that_only_some_ranks_met_are_all_kept_in_order() -> None:
    x = torch.ones(2, 2)
    ranks = [of(EVERYTHING), of(EVERYTHING, x, leaf="b"), of(EVERYTHING, x, 2 * x, leaf="a"), of(EVERYTHING, 3 * x, leaf="b")]
    merged, _ = merged_without_processes(ranks)
    check_alike(merged, reduce(lambda a, b: a.merge(b), ranks))
    assert list(merged["x"].states) == ["b", "a"]


def reducing(place: Place, scenario: Any, *arguments: Any) -> Any:
    """A scenario with all-reduces, however few ranks there are."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("recorders.recordings.distributed.collectives.REDUCE_FROM", 2)
        return scenario(place, *arguments)


def recorded(rank: int, steps: int) -> Recorder:
    torch.manual_seed(rank)
    model = nn.Sequential(nn.Linear(3, 2), nn.Identity())
    with torch.no_grad():
        model[0].weight.fill_(rank // 2)
    with Recorder(out=ForwardMonitor(EVERYTHING), reduced=ForwardMonitor(REDUCED)).modules(model, types=nn.Identity) as recorder:
        for _ in range(steps):
            model(torch.randn(5, 3))
    return recorder


def both_ways(place: Place, steps: list[int], threshold: int | None) -> Any:
    rank, group = place
    recorder = recorded(rank, steps[rank])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("recorders.recordings.distributed.collectives.REDUCE_FROM", 1000)
        expected = recorder.sync(group)
        if threshold:
            patch.setattr("recorders.recordings.distributed.collectives.REDUCE_FROM", threshold)
        else:
            patch.undo()
        handle, to_one = recorder.sync(group, async_op=True), recorder.sync(group, to=1, async_op=True)
        merged = recorder.sync(group)
        again, alone = handle.wait(), to_one.wait()
    check_alike(merged, expected)
    assert bits(again) == bits(merged)
    if alone is not None:
        check_alike(alone, expected)
    return alone is None, bits(merged)


@pytest.mark.slow
@pytest.mark.parametrize("steps", [[2, 3], [0, 2], [0, 0], [2, 0, 3], [1, 2, 1]])
def test_reduced_and_gathered_give_the_same(world: World, steps: list[int]) -> None:
    answers = returned(world.run(both_ways, steps, 2, ranks=tuple(range(len(steps)))))
    assert [absent for absent, _ in answers] == [rank != 1 for rank in range(len(steps))]
    assert all(bitwise == answers[0][1] for _, bitwise in answers)


@pytest.mark.long
@pytest.mark.parametrize("steps", [[2, 3, 1, 2], [0, 2, 0, 1], [0, 0, 0, 0]])
def test_four_ranks_reduce_without_being_told(four: World, steps: list[int]) -> None:
    answers = returned(four.run(both_ways, steps, None))
    assert all(bitwise == answers[0][1] for _, bitwise in answers)


def counted(place: Place, subrecorders: int, reducer: Any, unlike: bool, to: Any) -> list[str]:
    rank, group = place
    calls: list[str] = []
    recording = of(reducer, *[torch.ones(2, 2)] * (1 - unlike * rank), names=[str(index) for index in range(subrecorders)])
    with pytest.MonkeyPatch.context() as patch:
        for name in COLLECTIVES:
            patch.setattr(dist, name, noting(calls, name, getattr(dist, name)))
        sync(recording, group, to=to)
    return calls


LENGTHS = MANIFESTS = STATES = ["all_gather"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("reducer", "unlike", "to", "collectives"),
    [
        (EVERYTHING, False, "all", [*LENGTHS, *STATES, *["all_reduce"] * 3]),
        (EVERYTHING, True, "all", [*LENGTHS, *MANIFESTS, *STATES, *["all_reduce"] * 3]),
        (EVERYTHING, True, 1, [*LENGTHS, *MANIFESTS, "gather", *["reduce"] * 3]),
        (REDUCED, False, "all", [*LENGTHS, *["all_reduce"] * 3]),
        (Count(), False, "all", [*LENGTHS, "all_reduce"]),
        (Max(), False, "all", [*LENGTHS, *["all_reduce"] * 2]),
        (Moments(), False, "all", [*LENGTHS, *STATES]),
    ],
)
def test_at_most_six_collectives_for_any_number_of_monitors(
    world: World, reducer: Any, unlike: bool, to: Any, collectives: list[str]
) -> None:
    for subrecorders in (2, 120):
        assert alike(world.run(reducing, counted, subrecorders, reducer, unlike, to, ranks=(0, 1))) == collectives


@pytest.mark.slow
def test_scenarios_of_gathering_give_the_same_with_all_reduces(world: World) -> None:
    from test_distributed import assert_close, collect_unequal, odd_dtypes, recording_of, sync_shards, sync_union
    from test_distributed import recorded as recorded_net

    for cuts in ([4, 3, 5], [0, 2, 0]):
        answers = returned(world.run(reducing, sync_shards, cuts))
        assert all(answer[0] == answers[0][0] and answer[2:] == (True, True) for answer in answers)
        assert_close(answers[0][1], recorded_net(list(range(sum(cuts)))).compute())
    assert alike(world.run(reducing, collect_unequal, [0, 3, 1])) == alike(world.run(collect_unequal, [0, 3, 1]))
    assert alike(world.run(reducing, odd_dtypes, 1)) == alike(world.run(odd_dtypes, 1))
    by_rank = [recording_of(["a", "both"], Mean()), recording_of(["both", "c"], Mean()), recording_of([], Mean())]
    assert alike(world.run(reducing, sync_union, by_rank)) == alike(world.run(sync_union, by_rank))


def unmergeable(place: Place) -> Any:
    rank, group = place
    return sync(of(CountByValue("b c -> c", values=2), torch.ones(2, 3 + rank // 2, dtype=torch.int64)), group)


def test_shapes_that_differ_give_the_error_of_gathering(world: World) -> None:
    text = refused(world.run(reducing, unmergeable))
    assert text == refused(world.run(unmergeable))
    assert "rank 2 does not fit those before it" in text


def spread(place: Place) -> Any:
    """Copies of parameters, which are gathered, beside outputs, which are reduced."""
    rank, group = place
    model = nn.parallel.DistributedDataParallel(nn.Linear(3, 2), process_group=group)
    recorder = Recorder(out=ForwardMonitor(REDUCED), value=ParameterMonitor(REDUCED, when="tick")).modules(model.module)
    torch.manual_seed(rank)
    with recorder:
        model(torch.randn(4, 3))
        recorder.tick()
    merged = recorder.sync(group)
    own = recorder.snapshot()["value"].states
    assert all(torch.equal(merged["value"].states[leaf][key], own[leaf][key]) for leaf in own for key in own[leaf])
    return bits(merged), merged["value"].samples, merged["out"].samples, merged["out"].peek()["count"].item()


def test_copies_count_once_beside_what_is_reduced(world: World) -> None:
    _, copies, outputs, count = alike(world.run(reducing, spread, ranks=(0, 1)))
    assert (copies, outputs, count) == (1, 2, 16)


def skewed(place: Place) -> Any:
    """Rank 1 has another version of a reducer."""
    rank, group = place
    with pytest.MonkeyPatch.context() as patch:
        if rank == 1:
            patch.setattr(Mean, "fields", {"count": Greatest("count"), "sum": Add("sum")})
        return sync(of(Mean(), torch.ones(2)), group) and "merged"


def test_ranks_whose_reducers_merge_otherwise_are_refused(world: World) -> None:
    answers = world.run(reducing, skewed)
    assert [answer.kind for answer in answers] == ["SyncError"] * 3
    assert all("is that another version?" in answer.text for answer in answers)


def short_of_memory(place: Place) -> Any:
    group = place[1]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("recorders.recordings.distributed.sync.free_memory", lambda: 400_000)
        return sync(of(Quantile(), torch.ones(2)), group)["x"].samples


def test_what_is_reduced_needs_no_memory_for_the_states_of_all_ranks(world: World) -> None:
    assert alike(world.run(reducing, short_of_memory)) == 3
    assert "400000 are free" in refused(world.run(short_of_memory))
