"""Averages and traces that fade, time since an event, differences, first failures: definitions as loops, and edges."""

from __future__ import annotations

import json
import math
from itertools import pairwise
from typing import Any

import laws
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from reducers import (
    EMA,
    ArgumentError,
    Collect,
    ConditionalCumulativeTrace,
    ConditionalNearestTrace,
    CumulativeTrace,
    Difference,
    EmptyStateError,
    FirstNonfinite,
    History,
    Last,
    Mean,
    NearestTrace,
    Reducer,
    ReducerTypeError,
    ScaledCumulativeTrace,
    ScaledNearestTrace,
    StateMismatchError,
    Sum,
    TimeSince,
    from_recipe,
    to_recipe,
)


def events(seed: int, steps: int = 40) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(0, 3, (5,), generator=generator).float() for _ in range(steps)]


def above(x: Tensor) -> Tensor:
    return x > 1


TRACES: list[tuple[Reducer, Any]] = [
    (NearestTrace(time_constant=20.0, amplitude=0.7), lambda h, s, fade: 0.7 if h == 1 else fade * s),
    (CumulativeTrace(time_constant=20.0, amplitude=0.7), lambda h, s, fade: fade * s + (0.7 if h == 1 else 0)),
    (
        NearestTrace(time_constant=20.0, target=1.5, tolerance=0.5),
        lambda h, s, fade: 1.0 if abs(h - 1.5) <= 0.5 else fade * s,
    ),
    (
        ScaledNearestTrace(time_constant=20.0, amplitude=0.5, criterion=above, scale=3.0),
        lambda h, s, fade: 3 * h + 0.5 if h > 1 else fade * s,
    ),
    (
        ScaledCumulativeTrace(time_constant=20.0, amplitude=0.5, criterion=above, scale=3.0),
        lambda h, s, fade: fade * s + (3 * h + 0.5 if h > 1 else 0),
    ),
]


@pytest.mark.parametrize(("reducer", "rule"), TRACES, ids=lambda value: type(value).__name__)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64])
def test_traces_follow_their_recursion_at_every_step(reducer: Reducer, rule: Any, dtype: torch.dtype) -> None:
    state: dict[str, Tensor] = {}
    expected = [0.0] * 5
    for x in events(0):
        state = reducer.update(state, x.to(dtype))
        expected = [rule(h, s, math.exp(-1 / 20)) for h, s in zip(x.tolist(), expected, strict=True)]
        assert reducer.compute(state).tolist() == pytest.approx(expected, rel=1e-13)


@pytest.mark.parametrize(
    ("conditional", "scaled"),
    [
        (ConditionalNearestTrace(time_constant=5.0, scale=2.0), ScaledNearestTrace(time_constant=5.0, scale=2.0, criterion=above)),
        (
            ConditionalCumulativeTrace(time_constant=5.0, amplitude=-1.0),
            ScaledCumulativeTrace(time_constant=5.0, amplitude=-1.0, criterion=above),
        ),
    ],
    ids=["nearest", "cumulative"],
)
def test_a_condition_beside_the_input_is_a_criterion(conditional: Reducer, scaled: Reducer) -> None:
    state: dict[str, Tensor] = {}
    for x in events(1):
        state = conditional.update(state, x, above(x))
    laws.same_bits(conditional.compute(state), scaled.compute(laws.run(scaled, events(1))))


def test_conditions_are_spread_over_the_axes_they_lack() -> None:
    trace = ConditionalNearestTrace(time_constant=1.0, amplitude=0.0)
    spread = trace.update({}, torch.ones(2, 3), torch.tensor([1, 0]))
    assert trace.compute(spread).tolist() == [[1, 1, 1], [0, 0, 0]]
    with pytest.raises(ArgumentError, match=r"condition of shape \(3,\) for an observation of shape \(2, 3\)"):
        trace.update({}, torch.ones(2, 3), torch.ones(3))
    with pytest.raises(ReducerTypeError, match="takes an observation and its condition"):
        trace.update({}, torch.ones(2, 3))


def test_steps_and_time_constants_share_their_unit() -> None:
    fine = NearestTrace(time_constant=0.02, step_time=0.001)
    coarse = NearestTrace(time_constant=20.0)
    laws.close(fine.compute(laws.run(fine, events(2))), coarse.compute(laws.run(coarse, events(2))), rtol=1e-12)


def test_each_element_may_have_a_time_constant_of_its_own() -> None:
    constants = torch.tensor([2.0, 5.0, 20.0])
    both = ScaledCumulativeTrace(time_constant=constants, criterion=above)
    xs = [torch.stack([x, -x])[:, :3] for x in events(3, 3)]
    for column, tau in enumerate(constants.tolist()):
        alone = ScaledCumulativeTrace(time_constant=tau, criterion=above)
        expected = alone.compute(laws.run(alone, [x[:, column] for x in xs]))
        torch.testing.assert_close(both.compute(laws.run(both, xs))[:, column], expected, rtol=1e-12, atol=0)
    history = History(CumulativeTrace(time_constant=constants, amplitude=1j), duration=2.0)
    state = laws.run(history, [torch.ones(3), torch.zeros(3)])
    torch.testing.assert_close(history.view(state, 0.25), 1j * torch.exp(-0.75 / constants.double()), rtol=1e-12, atol=0)
    written = from_recipe(json.loads(json.dumps(to_recipe(history))))
    assert written == history
    assert hash(written) == hash(history)
    with pytest.raises(ArgumentError, match=r"shape \(3,\), which does not broadcast to .* \(2,\)"):
        both.update({}, torch.ones(2))


def test_numbers_of_a_trace_may_be_complex() -> None:
    xs = [torch.tensor([1 + 1j, 2.0]), torch.tensor([0.5, 1 + 1j])]
    trace = CumulativeTrace(time_constant=1.0, target=1 + 1j, amplitude=2j)
    assert trace.compute(laws.run(trace, xs)).tolist() == [pytest.approx(2j / math.e), 2j]
    scaled = ScaledNearestTrace(time_constant=1.0, criterion=lambda x: x.real > 0.6, scale=1j, amplitude=1)
    assert scaled.compute(laws.run(scaled, xs)).tolist() == [pytest.approx(1j / math.e), 1j]


@settings(max_examples=60)
@given(
    seed=st.integers(0, 10_000),
    cuts=st.lists(st.integers(0, 40), max_size=5),
    reducer=st.sampled_from([*(reducer for reducer, _ in TRACES), EMA(alpha=0.05), TimeSince(above, 0.1, "nan")]),
)
def test_merged_in_any_number_of_parts(seed: int, cuts: list[int], reducer: Reducer) -> None:
    xs = events(seed)
    bounds = [0, *sorted(cuts), len(xs)]
    merged: dict[str, Tensor] = {}
    for start, end in pairwise(bounds):
        merged = reducer.merge(merged, laws.run(reducer, xs[start:end]))
    laws.close(reducer.compute(merged), reducer.compute(laws.run(reducer, xs)), rtol=1e-12, atol=1e-14)


def test_long_streams_neither_overflow_nor_stall() -> None:
    constant = torch.full((2,), 0.1, dtype=torch.float64)
    average, trace = EMA(alpha=1e-3), CumulativeTrace(time_constant=10.0, target=0.1)
    for reducer, expected in ((average, 0.1), (trace, 1 / (1 - math.exp(-0.1)))):
        state = laws.run(reducer, [constant] * 200)
        for _ in range(15):  # 6.5 million steps, doubled up
            state = reducer.merge(state, state)
        assert reducer.compute(state).tolist() == pytest.approx([expected] * 2, rel=1e-9)


def test_missing_values_leave_averages_and_traces_as_they_were() -> None:
    xs = [torch.tensor([math.nan, 1.0]), torch.tensor([2.0, math.inf]), torch.tensor([4.0, 2.0])]
    average = EMA(alpha=0.5)
    assert average.compute(laws.run(average, xs[:1])).isnan().tolist() == [True, False]
    assert average.compute(laws.run(average, xs)).tolist() == [3, 1.5]
    trace = ScaledCumulativeTrace(time_constant=1.0, amplitude=0.0, criterion=torch.ones_like)
    with pytest.raises(ReducerTypeError, match=r"must return a bool tensor of shape \(2,\); got torch.float32"):
        laws.run(trace, xs)
    trace = ScaledCumulativeTrace(time_constant=1.0, amplitude=0.0, criterion=lambda x: x.isnan() | (x > 0))
    expected = [2 * math.exp(-1) + 4, math.exp(-2) + 2]
    assert trace.compute(laws.run(trace, xs)).tolist() == pytest.approx(expected)


def test_ends_of_alpha() -> None:
    xs = [torch.tensor([1.0]), torch.tensor([5.0]), torch.tensor([3.0])]
    assert [EMA(alpha=alpha).compute(laws.run(EMA(alpha=alpha), xs)).item() for alpha in (0, 1)] == [1, 3]


def test_an_average_of_batch_means_takes_batches_of_any_size() -> None:
    average = EMA("b c -> c", alpha=0.25)
    state = laws.run(average, [torch.tensor([[1.0, 0.0], [3.0, 0.0]]), torch.tensor([[10.0, 4.0]])])
    assert average.compute(state).tolist() == [4, 1]


def test_complex_averages() -> None:
    average = EMA(alpha=0.5)
    state = laws.run(average, [torch.tensor([1 + 2j]), torch.tensor([3 - 2j]), torch.tensor([complex(math.nan, 0)])])
    assert average.compute(state).tolist() == [2 + 0j]


def test_time_since_counts_exactly() -> None:
    since = TimeSince(above, step_time=0.1)
    state = since.update({}, torch.tensor([2.0]))
    quiet = laws.run(since, [torch.zeros(1)] * 1000)
    for _ in range(100):
        state = since.merge(state, quiet)
    assert since.compute(state).item() == 0.1 * 100_000


@pytest.mark.parametrize(("initial", "first"), [("inf", math.inf), ("zero", 0.0), ("nan", math.nan)])
def test_time_since_nothing(initial: Any, first: float) -> None:
    since = TimeSince(above, 0.5, initial)
    state = laws.run(since, [torch.zeros(1)])
    assert since.compute(state).item() == pytest.approx(first, nan_ok=True)
    assert since.compute(laws.run(since, [torch.zeros(1)] * 2, state)).item() == pytest.approx(first + 1, nan_ok=True)
    assert since.compute(since.update(state, torch.tensor([2.0]))).item() == 0


def test_shapes_must_not_change() -> None:
    for reducer in (EMA(alpha=0.5), NearestTrace(time_constant=1.0), TimeSince(above)):
        with pytest.raises(StateMismatchError, match="kept axes must not change"):
            laws.run(reducer, [torch.zeros(4), torch.zeros(3)])


def test_differences_of_integers_do_not_wrap() -> None:
    change = Difference(Collect())
    assert change.compute(
        laws.run(change, [torch.tensor([0, 255], dtype=torch.uint8), torch.tensor([255, 0], dtype=torch.uint8)])
    ).tolist() == [255, -255]
    assert change.compute(laws.run(change, [torch.tensor([True]), torch.tensor([False])])).tolist() == [-1]


def test_differences_across_seams_and_shapes() -> None:
    change = Difference(Sum())
    xs = [torch.tensor([1.0, 2.0]), torch.tensor([4.0, 9.0]), torch.tensor([7.0]), torch.tensor([5.0])]
    assert change.compute(change.update({}, xs[0])) == {}
    with pytest.raises(EmptyStateError):
        change.compute({})
    for cut in range(5):
        merged = change.merge(laws.run(change, xs[:cut]), laws.run(change, xs[cut:]))
        assert change.compute(merged).item() == 10 - 2
    assert change.update(merged, torch.empty(0)) is merged


def test_the_first_failure_is_found_and_stays() -> None:
    when = FirstNonfinite("b c -> c")
    fine, broken = torch.zeros(2, 3), torch.tensor([[0.0, math.nan, 0.0], [math.inf, 0.0, 0.0]])
    state = laws.run(when, [fine, fine, broken, fine, broken])
    assert when.compute(state).tolist() == [2, 2, -1]
    assert when.compute(when.merge(laws.run(when, [fine] * 3), state)).tolist() == [5, 5, -1]
    assert when.compute(when.merge(state, state)).tolist() == [2, 2, -1]
    assert when.compute(laws.run(when, [torch.ones(2, 3).long()])).tolist() == [-1, -1, -1]


def test_the_first_failure_of_all_is_found_without_a_pattern() -> None:
    when = FirstNonfinite()
    xs = [torch.zeros(3), torch.zeros(7), torch.tensor(-math.inf), torch.zeros(0)]
    assert when.compute(laws.run(when, xs)).item() == 2


@pytest.mark.parametrize(
    ("make", "told"),
    [
        (lambda: EMA(alpha=1.1), "alpha from 0 to 1"),
        (lambda: EMA(alpha="0.5"), "alpha from 0 to 1"),  # type: ignore[arg-type]
        (lambda: NearestTrace(time_constant=torch.tensor([1.0, 0.0])), "finite time_constant above 0"),
        (lambda: NearestTrace(time_constant=1.0, amplitude=complex(0, math.inf)), "finite amplitude"),
        (lambda: NearestTrace(time_constant=1.0, step_time=(1.0, 2.0)), "finite step_time above 0"),
        (lambda: NearestTrace(time_constant=0), "finite time_constant above 0"),
        (lambda: CumulativeTrace(time_constant=1.0, step_time=-1), "finite step_time above 0"),
        (lambda: CumulativeTrace(time_constant=1.0, amplitude=math.nan), "finite amplitude"),
        (lambda: NearestTrace(time_constant=1.0, tolerance=-1), "tolerance from 0 up"),
        (lambda: NearestTrace(time_constant=1.0, target=math.inf), "finite target"),
        (lambda: ConditionalNearestTrace(time_constant=1.0, scale=math.inf), "finite scale"),
        (lambda: TimeSince(above, 0), "finite step_time above 0"),
        (lambda: TimeSince(above, 1.0, "never"), "initial 'inf', 'zero' or 'nan'"),  # type: ignore[arg-type]
    ],
)
def test_arguments_are_checked(make: Any, told: str) -> None:
    with pytest.raises(ArgumentError, match=told):
        make()


def test_functions_and_reducers_are_checked() -> None:
    with pytest.raises(ReducerTypeError, match="TimeSince needs a function"):
        TimeSince(None)  # type: ignore[arg-type]
    with pytest.raises(ReducerTypeError, match="needs a criterion"):
        ScaledNearestTrace(time_constant=1.0, criterion=1)  # type: ignore[arg-type]
    with pytest.raises(ReducerTypeError, match=r"write Mean\(\)"):
        Difference(Mean)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "reducer",
    [EMA(alpha=0.5), NearestTrace(time_constant=1), ConditionalCumulativeTrace(time_constant=2.0), Difference(Last())],
    ids=repr,
)
def test_recipes(reducer: Reducer) -> None:
    assert from_recipe(to_recipe(reducer)) == reducer
