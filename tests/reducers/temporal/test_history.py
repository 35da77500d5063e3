"""History: results of the past, on reducers, cells, monitors and loaded recordings; every definition as a plain loop."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path

import laws
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from recorders import Cell, ForwardMonitor, Recorder, load
from reducers import (
    EMA,
    ArgumentError,
    Collect,
    Count,
    EmptyStateError,
    History,
    Last,
    Mean,
    NearestTrace,
    NoHistoryError,
    Product,
    Reducer,
    ReducerTypeError,
    StateMismatchError,
    Summary,
    TimeSince,
    from_recipe,
    to_recipe,
)

RAMP = [torch.tensor([float(step), 10.0 * step]) for step in range(6)]
RECORD = History(Last(), step_time=0.5, duration=1.5, inclusive=True)
STATE = laws.run(RECORD, RAMP)  # [5, 50] at time 0, [4, 40] at 0.5, [3, 30] at 1, [2, 20] at 1.5


@pytest.mark.parametrize(
    ("step_time", "duration", "inclusive", "slots"),
    [
        (1.0, 0.0, False, 1),
        (1.0, 0.0, True, 1),
        (1.0, 3.0, False, 3),
        (1.0, 3.0, True, 4),
        (2.0, 3.0, False, 2),
        (0.1, 0.3, False, 3),
        (0.1, 1.1, True, 12),
        (0.7, 4.9, False, 7),
    ],
)
def test_how_many_results_are_kept(step_time: float, duration: float, inclusive: bool, slots: int) -> None:
    history = History(Last(), step_time, duration, inclusive)
    assert history.slots == slots
    state = laws.run(history, [torch.tensor(float(step)) for step in range(20)])
    assert history.dump(state).tolist() == [float(19 - back) for back in range(slots)]


def test_dump_gives_what_there_is_newest_first() -> None:
    early = laws.run(RECORD, RAMP[:2])
    assert RECORD.dump(early).tolist() == [[1, 10], [0, 0]]
    assert RECORD.dump(STATE).tolist() == [[5, 50], [4, 40], [3, 30], [2, 20]]
    assert RECORD.latest(STATE).tolist() == RECORD.compute(STATE).tolist() == [5, 50]


@pytest.mark.parametrize("time", [0.0, 0.5, 1.0, 1.5, 0.5 + 9e-8, 1.5 + 9e-8, -9e-8])
@pytest.mark.parametrize("how", ["previous", "next", "nearest", "linear", "elapsed"])
def test_at_the_time_of_a_result_it_is_that_result(time: float, how: str) -> None:
    expected = [5 - round(time * 2), 50 - 10 * round(time * 2)]
    assert RECORD.view(STATE, time, how).tolist() == expected
    assert RECORD.view(STATE, torch.tensor([time, time], dtype=torch.float64), how).tolist() == expected


@pytest.mark.parametrize(
    ("how", "value"),
    [
        ("next", 4.0),
        ("previous", 3.0),  # 0.7 ago lies between 4 (0.5 ago) and 3 (1.0 ago): 0.3 after 3
        ("nearest", 4.0),
        ("linear", 3.0 + 0.3 / 0.5),
        ("expdecay", 3.0 * math.exp(-0.3 / 2.0)),
        ("elapsed", 3.3),
    ],
)
def test_between_two_results(how: str, value: float) -> None:
    constant = {"time_constant": 2.0} if how == "expdecay" else {}
    scalar = RECORD.view(STATE, 0.7, how, **constant)
    assert scalar[0].item() == pytest.approx(value)
    several = RECORD.view(STATE, torch.full((2, 3), 0.7), how, tolerance=1e-6, **constant)
    assert several.shape == (2, 3)
    assert several[0].tolist() == pytest.approx([value] * 3)


def test_halfway_the_earlier_is_the_nearest() -> None:
    assert RECORD.view(STATE, 0.25, "nearest").tolist() == [4, 40]
    assert RECORD.view(STATE, 0.24, "nearest").tolist() == [5, 50]


def by_loop(results: list[Tensor], times: Tensor, step_time: float, tolerance: float, how: str, tau: float) -> Tensor:
    """The definition, one time after another; `results` newest first, each of shape (3,), `times` of shape (3, d)."""
    found = torch.empty(times.shape, dtype=torch.float64)
    for element in range(times.shape[0]):
        for index, time in enumerate(times[element].tolist()):
            exact = round(time / step_time)
            if abs(exact * step_time - time) <= tolerance:
                found[element, index] = results[exact][element]
                continue
            older, newer = math.ceil(time / step_time), math.floor(time / step_time)
            since = older * step_time - time
            before, after = results[older][element].item(), results[newer][element].item()
            found[element, index] = {
                "previous": before,
                "next": after,
                "nearest": after if since / step_time > 0.5 else before,
                "linear": before + (after - before) / step_time * since,
                "expdecay": before * math.exp(-since / tau),
                "elapsed": before + since,
            }[how]
    return found


@settings(max_examples=60)
@given(
    seed=st.integers(0, 10_000),
    steps=st.integers(1, 9),
    step_time=st.sampled_from((0.1, 1.0, 2.5)),
    how=st.sampled_from(("previous", "next", "nearest", "linear", "expdecay", "elapsed")),
    tolerance=st.sampled_from((1e-7, 0.05)),
)
def test_views_equal_the_definition(seed: int, steps: int, step_time: float, how: str, tolerance: float) -> None:
    generator = torch.Generator().manual_seed(seed)
    xs = list(torch.randn(steps, 3, generator=generator, dtype=torch.float64))
    history = History(Last(), step_time, 4 * step_time, inclusive=True)
    state = laws.run(history, xs)
    results = xs[::-1][:5]
    times = torch.rand(3, 4, generator=generator, dtype=torch.float64) * (len(results) - 1) * step_time
    times[:, 0] = (times[:, 0] / step_time).round() * step_time
    expected = by_loop(results, times, step_time, tolerance, how, tau=3.0)
    got = history.view(state, times, how, tolerance=tolerance, time_constant=3.0)
    laws.close(got, expected, rtol=1e-12, atol=1e-12)
    laws.close(history.view(state, times[:, 1], how, tolerance=tolerance, time_constant=3.0), expected[:, 1], 1e-12, 1e-12)
    one = history.view(state, times[1, 2].item(), how, tolerance=tolerance, time_constant=3.0)
    assert one[1].item() == pytest.approx(expected[1, 2].item(), rel=1e-12)


def test_each_element_at_a_time_of_its_own() -> None:
    assert RECORD.view(STATE, torch.tensor([0.0, 1.5])).tolist() == [5, 20]
    assert RECORD.view(STATE, torch.tensor([1.0])).tolist() == [3, 30]
    assert RECORD.view(STATE, torch.tensor([[0.0, 1.5]])).tolist() == [[5, 2], [50, 20]]
    single = History(Mean(), duration=3.0)
    means = laws.run(single, [torch.tensor(value) for value in (0.0, 2.0, 7.0)])
    assert single.view(means, torch.tensor([0.0, 1.0, 1.5])).tolist() == [3.0, 1.0, 0.5]


@pytest.mark.parametrize(
    ("reducer", "how"),
    [
        (EMA(alpha=0.5), "linear"),
        (Mean("a -> a"), "linear"),
        (NearestTrace(time_constant=3.0), "expdecay"),
        (TimeSince(torch.signbit), "elapsed"),
        (Last(), "previous"),
    ],
    ids=lambda value: value if isinstance(value, str) else type(value).__name__,
)
def test_by_default_the_reducer_chooses(reducer: Reducer, how: str) -> None:
    history = History(reducer, duration=3.0)
    state = laws.run(history, [torch.tensor([1.0, -1.0]), torch.tensor([-1.0, 1.0]), torch.tensor([1.0, 0.5])])
    laws.same_bits(history.view(state, 0.7), history.view(state, 0.7, how))


def test_named_results_are_viewed_name_by_name() -> None:
    history = History(Product(s=Summary(), last=Last()), duration=3.0)
    state = laws.run(history, RAMP)
    seen = history.view(state, 0.5, "linear")
    assert seen["last"].tolist() == [4.5, 45]
    assert seen["s"]["count"].item() == 11
    assert history.dump(state)["s"]["max"].tolist() == [50, 40, 30]
    assert history.view(state, 0.5)["s"]["count"].dtype == torch.int64


@pytest.mark.parametrize("time", [-0.1, 1.6, math.nan, math.inf, torch.tensor([0.0, 1.6])])
def test_out_of_range_is_an_error(time: float | Tensor) -> None:
    with pytest.raises(ArgumentError, match=r"4 results so far reach from 0 \(the newest\) to 1.5"):
        RECORD.view(STATE, time)


def test_what_was_not_recorded_yet_is_out_of_range() -> None:
    early = laws.run(RECORD, RAMP[:2])
    assert RECORD.view(early, 0.5).tolist() == [0, 0]
    with pytest.raises(ArgumentError, match="2 results so far"):
        RECORD.view(early, 1.0)
    for ask in (RECORD.latest, RECORD.dump, RECORD.compute, lambda state: RECORD.view(state, 0.0)):
        with pytest.raises(EmptyStateError):
            ask({})


def square(before: Tensor, after: Tensor, elapsed: Tensor, step_time: float) -> Tensor:
    assert before.shape == after.shape == elapsed.shape
    return before + (after - before) * (elapsed / step_time) ** 2


def test_an_interpolation_of_your_own() -> None:
    assert RECORD.view(STATE, 0.7, square).tolist() == [pytest.approx(3.36), pytest.approx(33.6)]
    assert RECORD.view(STATE, torch.tensor([[0.7, 0.5]]), square).tolist() == [[pytest.approx(3.36), 4], [pytest.approx(33.6), 40]]


def test_outside_of_the_results() -> None:
    times = torch.tensor([-0.5, 0.0, 0.7, 1.5, 2.0, math.inf], dtype=torch.float64)
    assert RECORD.view(STATE, 2.0, extrapolation=0.0).tolist() == [0, 0]
    assert RECORD.view(STATE, -1.0, extrapolation="nearest").tolist() == [5, 50]
    assert RECORD.view(STATE, times[None], extrapolation=math.inf)[0].tolist() == [math.inf, 5, 3, 2, math.inf, math.inf]
    assert RECORD.view(STATE, times[None], "linear", extrapolation="nearest")[0].tolist() == [5, 5, pytest.approx(3.6), 2, 2, 2]
    assert RECORD.view(STATE, times[None], extrapolation=lambda x, e: x + e)[0].tolist() == [5.5, 5, 3, 2, 1.5, -math.inf]
    counts = History(Count(), duration=2.0)
    assert counts.view(laws.run(counts, RAMP), 1.5, extrapolation=0).dtype == torch.int64
    assert counts.view(laws.run(counts, RAMP), 1.5, extrapolation=math.nan).dtype == torch.float64
    with pytest.raises(ArgumentError, match="asked for time nan"):
        RECORD.view(STATE, math.nan, extrapolation=0.0)
    with pytest.raises(ArgumentError, match="no extrapolation 'linear'"):
        RECORD.view(STATE, 9.0, extrapolation="linear")


def test_each_element_decays_with_a_time_constant_of_its_own() -> None:
    constants = torch.tensor([1.0, 4.0])
    for time in (0.7, torch.tensor([0.7, 0.7]), torch.tensor([[0.7, 0.2, 0.0]])):
        both = RECORD.view(STATE, time, "expdecay", time_constant=constants)
        for element, constant in enumerate(constants.tolist()):
            alone = RECORD.view(STATE, time, "expdecay", time_constant=constant)
            torch.testing.assert_close(both[element], alone[element], rtol=1e-12, atol=0)


def test_views_are_checked() -> None:
    with pytest.raises(ArgumentError, match="no interpolation 'cubic'"):
        RECORD.view(STATE, 0.0, "cubic")
    with pytest.raises(ArgumentError, match="no time constant"):
        RECORD.view(STATE, 0.0, "expdecay")
    with pytest.raises(ArgumentError, match=r"times of shape \(3,\) do not fit results of shape \(2,\)"):
        RECORD.view(STATE, torch.zeros(3))
    with pytest.raises(ArgumentError, match=r"times of shape \(1, 2, 2\)"):
        RECORD.view(STATE, torch.zeros(1, 2, 2))


def test_arguments_are_checked() -> None:
    with pytest.raises(ReducerTypeError, match=r"write Mean\(\)"):
        History(Mean)  # type: ignore[arg-type]
    for wrong in ({"step_time": 0}, {"step_time": math.inf}, {"duration": -1}, {"duration": math.nan}, {"duration": "1"}):
        with pytest.raises(ArgumentError, match=next(iter(wrong))):
            History(Last(), **wrong)  # type: ignore[arg-type]
    with pytest.raises(ArgumentError, match="give both the same"):
        History(NearestTrace(time_constant=2.0, step_time=0.5), step_time=1.0)
    with pytest.raises(AttributeError):
        RECORD.duration = 3.0  # type: ignore[misc]


def test_states_that_grow_are_refused() -> None:
    history = History(Collect(), duration=3.0)
    with pytest.raises(StateMismatchError, match="a reducer that grows has none"):
        laws.run(history, RAMP)
    with pytest.raises(StateMismatchError):
        laws.run(RECORD, [torch.zeros(2), torch.zeros(3)])


@settings(max_examples=40)
@given(sizes=st.lists(st.integers(0, 5), min_size=1, max_size=4), duration=st.integers(0, 6), seed=st.integers(0, 1000))
def test_merged_histories_were_never_apart(sizes: list[int], duration: int, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    for reducer in (Last(), EMA(alpha=0.3), Mean("a -> a")):
        history = History(reducer, duration=float(duration))
        parts = [[torch.randn(2, generator=generator) for _ in range(size)] for size in sizes]
        merged: dict[str, Tensor] = {}
        for part in parts:
            merged = history.merge(merged, laws.run(history, part))
        whole = [x for part in parts for x in part]
        if whole:
            laws.close(history.dump(merged), history.dump(laws.run(history, whole)), 1e-12, 1e-12)
            expected = [reducer.compute(laws.run(reducer, whole[: len(whole) - back])) for back in range(len(whole))][
                : history.slots
            ]
            laws.close(history.dump(merged), torch.stack(expected), 1e-12, 1e-12)


def test_observations_without_elements_are_no_steps() -> None:
    assert RECORD.update(STATE, torch.empty(0, 2)) is STATE
    assert RECORD.update({}, torch.empty(0, 2)) == {}


def test_results_may_be_written_into() -> None:
    for result in (RECORD.view(STATE, 0.0), RECORD.view(STATE, 0.0, "linear"), RECORD.dump(STATE), RECORD.latest(STATE)):
        result.fill_(-1)
    assert RECORD.dump(STATE).tolist() == [[5, 50], [4, 40], [3, 30], [2, 20]]


def test_a_recipe_of_it_is_data() -> None:
    assert from_recipe(to_recipe(RECORD)) == RECORD


def cell() -> Cell:
    made = Cell(RECORD)
    for x in RAMP:
        made.push(x)
    return made


def monitor() -> ForwardMonitor:
    module = nn.Identity()
    made = ForwardMonitor(RECORD, module)
    for x in RAMP:
        module(x)
    return made


@pytest.mark.parametrize("make", [cell, monitor, lambda: monitor().snapshot()], ids=["cell", "monitor", "subrecording"])
def test_cells_and_monitors_look_back(make: Callable[[], Cell | ForwardMonitor]) -> None:
    holder = make()
    assert holder.latest().tolist() == holder.peek().tolist() == [5, 50]
    assert holder.view(0.25, "linear").tolist() == [4.5, 45]
    assert holder.view(torch.tensor([0.0, 0.5]), tolerance=1e-3).tolist() == [5, 40]
    assert holder.view(0.25, "expdecay", time_constant=1.0)[0].item() == pytest.approx(4 * math.exp(-0.25))
    assert holder.dump().shape == (4, 2)
    assert holder.view(9.0, extrapolation=-1.0).tolist() == [-1, -1]
    with pytest.raises(ArgumentError, match="reach from 0"):
        holder.view(9.0)


@pytest.mark.parametrize("holder", [Cell(Mean()), ForwardMonitor(Mean()), ForwardMonitor(Mean()).snapshot()], ids=type)
def test_without_history_there_is_no_past(holder: Cell) -> None:
    for ask in (holder.latest, holder.dump, lambda: holder.view(0.0)):
        with pytest.raises(NoHistoryError, match=r"History\(Mean\(pattern='... ->'\), step_time"):
            ask()


def test_monitors_of_nothing_and_of_several_tensors() -> None:
    class Pair(nn.Module):
        def forward(self, x: Tensor) -> dict[str, Tensor]:
            return {"a": x, "b": -x}

    module = Pair()
    made = ForwardMonitor(RECORD, module)
    assert made.latest() is None
    assert made.dump() is None
    module(RAMP[1])
    assert {path: value.tolist() for path, value in made.view(0.0).items()} == {"a": [1, 10], "b": [-1, -10]}


def test_a_loaded_recording_looks_back(tmp_path: Path) -> None:
    net = nn.Sequential(nn.Linear(2, 2))
    recorder = Recorder(ForwardMonitor(History(EMA(alpha=0.5), duration=2.0))).modules(net, types=nn.Linear)
    with recorder:
        for x in RAMP:
            net(x)
    recorder.save(tmp_path / "run")
    loaded = load(tmp_path / "run")["0"]
    laws.same_bits(loaded.dump(), recorder["0"].dump())
    laws.same_bits(loaded.view(0.5), recorder["0"].view(0.5))


def test_clear_may_keep_the_shape() -> None:
    made = cell()
    made.clear(keepshape=True)
    assert made.latest() is None
    with pytest.raises(StateMismatchError, match=r"keeps shape"):
        made.push(torch.zeros(3))
    made.push(torch.zeros(2))
    assert made.dump().tolist() == [[0, 0]]
    made.clear()
    made.push(torch.zeros(3))
    assert made.dump().tolist() == [[0, 0, 0]]
