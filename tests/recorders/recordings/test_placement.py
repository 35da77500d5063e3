"""How states of parts and copies of a tensor become the state of the whole."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from recorders import MergeError, Recording, RecordingWarning, Subrecording
from recorders.recordings.distributed.merge import Merged
from recorders.recordings.distributed.placement import Placement, from_plain, is_plain_placement, to_plain
from reducers import EMA, Covariance, Geometry, Last, Max, Mean, Moments, Norm, PerObservation, Product, Quantile, Reducer


def merge_ranks(recordings: list[Recording]) -> dict[str, Subrecording]:
    return Merged({f"rank {rank}": recording for rank, recording in enumerate(recordings)}).all()


WHOLE: dict[str, tuple[Reducer, tuple[int, ...]]] = {
    "norm": (Norm(), (0, 1)),
    "norm of rows": (Norm("o i -> o"), (0, 1)),
    "quantiles": (Quantile(), (0, 1)),
    "moments of columns": (Moments("o i -> i"), (0, 1)),
    "last": (Last(), (0, 1)),
    "average over time": (EMA(alpha=0.5), (0, 1)),
    "covariance of columns": (Covariance("o i -> i"), (0,)),
    "several": (Product(norm=Norm("o i -> o"), last=Last(), top=Max()), (0, 1)),
}
APART: dict[str, Reducer] = {
    "covariance of rows": Covariance("i o -> i"),
    "in another order of time": EMA("... ->", alpha=0.5),
    "norm of each observation": PerObservation(Norm(), over=Mean()),
    "norm of the tensor before": Geometry(),
    "a function of all elements": Norm().premap(lambda x: x / x.sum()),
}


def observations() -> list[Tensor]:
    return list(torch.randn(3, 5, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(1)).unbind())


def state(reducer: Reducer, xs: list[Tensor]) -> Any:
    made: Any = {}
    for x in xs:
        made = reducer.update(made, x)
    return made


def recorded(reducer: Reducer, place: Placement | None, xs: list[Tensor]) -> Recording:
    placement = {} if place is None else {"": place}
    return Recording(
        {"x": Subrecording(reducer, {"": state(reducer, xs)}, len(xs), monitor="ParameterMonitor", placement=placement)}
    )


def in_parts(reducer: Reducer, axis: int, count: int, axes: int | None = 2) -> list[Recording]:
    """What ranks hold that have equal parts, of which the last may be smaller, or empty."""
    cuts = [list(x.split(-(-x.shape[axis] // count), axis)) for x in observations()]
    for parts in cuts:
        parts += [parts[0].narrow(axis, 0, 0)] * (count - len(parts))
    places = [Placement(rank, True, 0, axes, ((axis, rank, count),)) for rank in range(count)]
    return [recorded(reducer, place, [parts[place.rank] for parts in cuts]) for place in places]


@pytest.mark.parametrize("count", [2, 4])
@pytest.mark.parametrize("name", WHOLE)
def test_parts_become_the_whole(name: str, count: int) -> None:
    reducer, axes = WHOLE[name]
    for axis in axes:
        merged = merge_ranks(in_parts(reducer, axis, count))
        assert merged["x"].samples == 3
        assert not merged["x"].placement
        expected = reducer.compute(state(reducer, observations()))
        torch.testing.assert_close(merged["x"].peek(), expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("name", APART)
def test_parts_that_do_not_make_the_whole_stay_apart(name: str) -> None:
    parts = in_parts(APART[name], 0, 2)
    merged = merge_ranks(parts)["x"]
    assert list(merged.states) == ["part 0 of 2", "part 1 of 2"]
    for found, part in zip(merged.leaves().values(), parts, strict=True):
        torch.testing.assert_close(found, part["x"].peek(), rtol=0, atol=0)


def test_parts_of_which_some_are_missing_or_a_function_saw_stay_apart() -> None:
    assert list(merge_ranks(in_parts(Norm(), 0, 4)[:2])["x"].states) == ["part 0 of 4", "part 1 of 4"]
    assert list(merge_ranks(in_parts(Norm(), 0, 2, axes=None))["x"].states) == ["part 0 of 2", "part 1 of 2"]


def test_what_ranks_share_counts_once_and_what_is_their_own_counts_for_each() -> None:
    xs = observations()
    copies = [recorded(Norm(), Placement(rank, shared=True), xs) for rank in range(3)]
    assert merge_ranks(copies)["x"].samples == 3
    own = [recorded(Norm(), None, xs) for _ in range(3)]
    assert merge_ranks(own)["x"].samples == 9
    without = [recorded(Norm(), None, []), *copies]
    torch.testing.assert_close(merge_ranks(without)["x"].peek(), copies[0]["x"].peek(), rtol=0, atol=0)
    with pytest.warns(
        RecordingWarning, match=r"'x' \(ParameterMonitor\) on rank 3, unlike ranks 0, 1 and 2. Each that differs counts as of a net"
    ):
        merged = merge_ranks([*copies, recorded(Norm(), Placement(3, shared=True), xs[:2])])
    assert merged["x"].samples == 5


def test_one_rank_at_several_times_comes_before_the_ranks_together() -> None:
    first, second = (recorded(Norm(), Placement(0, shared=True), xs) for xs in (observations()[:1], observations()[1:]))
    whole = merge_ranks([first, second, recorded(Norm(), Placement(1, shared=True), observations())])["x"]
    assert whole.samples == 3


def test_states_that_do_not_merge_name_the_rank_and_the_subrecorder() -> None:
    xs = observations()
    narrow = [x[:, :2] for x in xs]
    reducer = Mean("o i -> i")
    placed = [recorded(reducer, Placement(rank, shared=True), each) for rank, each in enumerate((xs, narrow))]
    with pytest.raises(MergeError, match=r"^rank 1 does not fit those before it: subrecorder 'x': "):
        merge_ranks(placed)
    with pytest.raises(MergeError, match=r"^what a rank has for itself does not fit those before it: subrecorder 'x': "):
        merge_ranks([placed[0], recorded(reducer, None, narrow)])
    with pytest.raises(MergeError, match=r"^rank 1 does not fit those before it: subrecorder 'x': the reducers differ"):
        merge_ranks([placed[0], recorded(Mean(), Placement(1, shared=True), xs)])


def test_data_of_a_rank_and_copies_of_others_merge_in_any_order() -> None:
    xs = observations()
    own, copies = recorded(Norm(), None, xs), [recorded(Norm(), Placement(rank, shared=True), xs) for rank in (1, 2)]
    for order in ([own, own, *copies], [*copies, own, own], [own, copies[0], own, copies[1]]):
        merged = merge_ranks(order)["x"]
        assert merged.samples == 9
        assert not merged.placement
        norm = float(copies[0]["x"].compute()) * 3**0.5
        assert abs(float(merged.compute()) - norm) < 1e-12 * norm


def test_parts_are_not_merged_two_at_a_time() -> None:
    first, second = in_parts(Norm(), 0, 2)
    with pytest.raises(MergeError, match=r"is part 0 of 2 along axis 0 on rank 0 in one and part 1 .* recorders.merge\(paths\)"):
        first.merge(second)
    assert first.merge(first)["x"].placement == first["x"].placement


def test_a_probe_leaves_the_random_numbers_of_the_user_alone() -> None:
    torch.manual_seed(0)
    merge_ranks(in_parts(Norm("i o -> i"), 1, 2))
    drawn = torch.rand(1)
    torch.manual_seed(0)
    assert torch.equal(drawn, torch.rand(1))


def test_a_placement_as_data() -> None:
    place = Placement(3, True, 0, 2, ((0, 1, 4), (1, 0, 2)))
    assert is_plain_placement(to_plain(place))
    assert from_plain(to_plain(place)) == place


FORGED: list[Any] = [
    None,
    [0, True, None, 2],
    [-1, True, None, 2, []],
    [True, True, None, 2, []],
    [0, 1, None, 2, []],
    [0, True, None, 65, []],
    [0, True, None, 2, [[2, 0, 2]]],
    [0, True, None, 2, [[0, 2, 2]]],
    [0, True, None, 2, [[0, 0]]],
    [0, True, 2**70, 2, []],
    [0, True, None, 2, [[0, 0, 2]] * 65],
]


@pytest.mark.parametrize("data", FORGED)
def test_a_placement_that_nobody_can_have_written(data: Any) -> None:
    assert not is_plain_placement(data)
