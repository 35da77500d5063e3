"""The law of overrides: a method of a subclass is what counts on every path, whatever faster way its base class has."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import reduce
from typing import Any

import pytest
import torch
from cases import CASES, Case
from overridden import MERGING, READING, WHOLE, marked, observations, one_more, overriding, rows_of, same_state, wanted
from torch import Tensor

import reducers
from reducers import (
    CKA,
    Activity,
    Collect,
    Count,
    CrossCovariance,
    GroupBy,
    Histogram,
    Masked,
    Max,
    Mean,
    Moments,
    Norm,
    PerObservation,
    Product,
    Quantile,
    Reducer,
    Sparsity,
    State,
    Statistic,
    Sum,
    Summary,
    WeightedMean,
    WeightedMoments,
)
from reducers.core.fields import Add
from reducers.errors import ReducerTypeError
from reducers.execution.rows import statistics_of
from reducers.execution.stacked import is_stackable, lift_stacked
from reducers.kernels import dispatch

SIZES = {"small": 4, "big": 2800}

Path = Callable[[Reducer, "list[Tensor]"], State]


def _stacked(reducer: Reducer, xs: list[Tensor]) -> State:
    return reducer.update_all({}, torch.stack(xs))


def _then_stacked(reducer: Reducer, xs: list[Tensor]) -> State:
    return reducer.update_all(reducer.update({}, xs[0]), torch.stack(xs[1:]))


def _part(state: State) -> State:
    return {key.removeprefix("a/"): value for key, value in state.items() if key.startswith("a/")}


def _joined(reducer: Reducer, xs: list[Tensor]) -> State:
    return reducer.merge_all([reducer.update({}, x) for x in xs])


def _in_slots(reducer: Reducer, xs: list[Tensor]) -> State:
    """As big observations of a monitor wait; one by one, if they cannot."""
    slots = reducer.slots_for(xs[0])
    if slots is None:
        return reduce(reducer.update, xs, {})
    table = slots.new_table(len(xs), xs[0].device)
    assert all(slots.write(table, x, number) for number, x in enumerate(xs))
    return reducer.update_slots({}, slots, table, 0, len(xs))


def _as_rows(reducer: Reducer, xs: list[Tensor]) -> State:
    """As the parameters of a step; one by one, if they cannot."""
    if not is_stackable(reducer):
        return reduce(reducer.update, xs, {})
    each = lift_stacked(reducer, xs * 3)  # fewer are lifted one by one
    return reduce(reducer.merge, ({key: value[row] for key, value in each.items()} for row in range(len(xs))))


PATHS: dict[str, Path] = {
    "alone": lambda reducer, xs: reduce(reducer.update, xs, {}),
    "stacked": _stacked,
    "stacked later": _then_stacked,
    "in a product": lambda reducer, xs: _part(Product(a=reducer, n=Count()).update_all({}, torch.stack(xs))),
    "mapped": lambda reducer, xs: reducer.postmap(one_more).update_all({}, torch.stack(xs)),
    "premapped": lambda reducer, xs: reducer.premap(torch.clone).update_all({}, torch.stack(xs)),
    "in slots": _in_slots,
    "as rows": _as_rows,
    "merged": _joined,
    "merged in a product": lambda reducer, xs: _part(_joined(Product(a=reducer), xs)),
}


def _without_a_fast_path(case: Case) -> bool:
    """Whether big observations of the reducer take the same path as small ones, and long."""
    return "HeavyHitters" in str(case) or "1e-60" in str(case) or case.grows


def check(case: Case, method: str, size: str) -> list[str]:
    """What is wrong on each path of a case whose reducer has this method of its own."""
    wrong, own = [], overriding(case.reducer, method)
    for dtype in (torch.float32, torch.float64):
        xs = observations(case, SIZES[size], dtype=dtype)
        expected = wanted(case.reducer, method, xs)
        for path in PATHS:
            if case.merges or not path.startswith("merged"):
                try:
                    same_state(PATHS[path](own, xs), expected, path)
                except (AssertionError, RuntimeError) as error:
                    wrong.append(f"{case} {dtype} {path}: {str(error)[:200]}")
    return wrong


@pytest.mark.slow
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("method", [*WHOLE, *MERGING])
def test_every_method_of_a_subclass_is_honoured_on_every_path(method: str, size: str, with_and_without_a_compiler: str) -> None:
    """Each method marks what it is given, or what it returns; so a path that bypasses it finds another state."""
    cases = [case for case in rows_of(method) if size == "small" or not _without_a_fast_path(case)]
    assert [line for case in cases for line in check(case, method, size)] == []


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("method", [*WHOLE, *MERGING])
@pytest.mark.parametrize("kind", [Mean, Summary, Quantile, Histogram])
def test_a_method_of_a_subclass_is_honoured(kind: type[Reducer], method: str, size: str) -> None:
    case = next(case for case in CASES if type(case.reducer) is kind)
    assert check(case, method, size) == []


def masked_ways(reducer: Reducer) -> list[tuple[str, Reducer]]:
    return [
        ("masked", Masked(reducer)),
        ("in a product", Masked(Product(a=reducer))),
        ("mapped", Masked(reducer.postmap(one_more))),
        ("grouped", GroupBy(reducer, 2)),
    ]


def check_masked(case: Case, method: str, size: str) -> list[str]:
    """What is wrong if a mask selects elements; a method may be refused if a message says what to override instead."""
    wrong, own = [], overriding(case.reducer, method)
    for dtype in (torch.float32, torch.float64):
        x = observations(case, SIZES[size], dtype=dtype)[0]
        mask = torch.rand(len(x), generator=torch.Generator().manual_seed(1)) > 0.3
        for (way, plain), (_, marking) in zip(masked_ways(case.reducer), masked_ways(own), strict=True):
            try:
                expected = plain.update({}, marked(x), mask)
            except (ReducerTypeError, RuntimeError):
                continue
            try:
                same_state(marking.update({}, x, mask), expected, way)
            except (ReducerTypeError, AssertionError) as error:
                if isinstance(error, AssertionError) or method == "lift_masked" or "`lift`" not in str(error):
                    wrong.append(f"{case} {dtype} {way}: {str(error)[:200]}")
    return wrong


MASKED = (*WHOLE, "update_masked", "lift_masked")


@pytest.mark.slow
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("method", MASKED)
def test_masked_observations_go_through_every_method_of_a_subclass(
    method: str, size: str, with_and_without_a_compiler: str
) -> None:
    # Integers that are not selected are replaced by others, which `lift` would mark.
    cases = [case for case in rows_of(method) if torch.float32 in case.dtypes and not _without_a_fast_path(case)]
    assert [line for case in cases for line in check_masked(case, method, size)] == []


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("method", MASKED)
@pytest.mark.parametrize("kind", [Mean, Summary, Histogram])
def test_masked_observations_go_through_a_method_of_a_subclass(kind: type[Reducer], method: str, size: str) -> None:
    case = next(case for case in CASES if type(case.reducer) is kind)
    assert check_masked(case, method, size) == []


def test_a_mean_under_a_mask_is_never_refused() -> None:
    x, mask = torch.randn(3000), torch.rand(3000) > 0.5
    for method in MASKED:
        own = Masked(overriding(Mean(), method))
        torch.testing.assert_close(own.compute(own.update({}, x, mask)), (x[mask].double() + 1).mean(), rtol=1e-6, atol=0)


def test_a_predicate_selects_for_the_methods_of_a_subclass() -> None:
    x = torch.randn(3000, 4)
    for method in ("update", "lift", "observe", "swept", "lift_masked", "update_masked"):
        found = overriding(Mean(), method).prefilter(lambda x: x > 0)
        expected = (x[x > 0].double() + 1).mean()
        torch.testing.assert_close(found.compute(found.update({}, x)), expected, rtol=1e-6, atol=0)


@pytest.mark.slow
@pytest.mark.parametrize("method", READING)
def test_results_go_through_the_methods_of_a_subclass(method: str) -> None:
    for case in rows_of(method):
        if case.grows:
            continue
        reducer, own = case.reducer, overriding(case.reducer, method)
        xs = observations(case, 4)
        expected = one_more(reducer.compute(reduce(reducer.update, xs, {})))
        same_state(own.compute(reduce(own.update, xs, {})), expected, str(case))
        both = Product(a=own)
        same_state(both.compute(reduce(both.update, xs, {})), {"a": expected}, f"{case} in a product")
        mapped = own.postmap(lambda result: result)
        same_state(mapped.compute(reduce(mapped.update, xs, {})), expected, f"{case} mapped")
    for reducer in (Mean(), Summary()):
        each = PerObservation(overriding(reducer, method), Collect())
        xs = [torch.randn(4, 3) for _ in range(3)]
        results = [one_more(reducer.compute(reducer.update({}, x))) for x in xs]
        found = each.compute(each.update_all({}, torch.stack(xs)))
        listed = (
            torch.stack(results)
            if isinstance(results[0], Tensor)
            else {k: torch.stack([r[k] for r in results]) for k in results[0]}
        )
        same_state(found, listed, "per observation")


@pytest.mark.parametrize("method", [*WHOLE, *MERGING])
def test_a_statistic_of_each_observation_has_its_own_methods(method: str) -> None:
    xs = [torch.randn(4, 3) for _ in range(3)]
    for reducer in (Mean(), Norm(), Quantile(), Moments().postmap(lambda result: result["mean"])):
        if not isinstance(reducer, Statistic) and method not in ("update", "merge"):
            continue
        each = PerObservation(overriding(reducer, method), Collect())
        state = each.update_all({}, torch.stack(xs))
        same_state(state, reduce(each.update, xs, {}), f"{reducer}")
        over = PerObservation(Mean(), overriding(Sum(), method))
        same_state(over.update_all({}, torch.stack(xs)), reduce(over.update, xs, {}), "over")


@pytest.mark.slow
def test_what_takes_several_at_once_goes_through_the_methods_of_a_subclass() -> None:
    xs = torch.randn(5, 4, 3)
    for case in CASES:
        reducer = case.reducer
        if case.grows or torch.float32 not in case.dtypes or not case.merges or case.trailing != (3,):
            continue
        own = overriding(reducer, "update_all")
        expected = reducer.update_all({}, marked(xs))
        for way in (own, own.postmap(one_more)):
            same_state(way.update_all({}, xs), expected, str(case))
        same_state(_part(Product(a=own).update_all({}, xs)), expected, str(case))
        own = overriding(reducer, "merge_all")
        wanted_state = {key: marked(value) for key, value in _joined(reducer, [*xs]).items()}
        for way in (own, own.postmap(one_more)):
            same_state(_joined(way, [*xs]), wanted_state, f"{case} merge_all")
        same_state(_part(_joined(Product(a=own), [*xs])), wanted_state, f"{case} merge_all")


@pytest.mark.parametrize("method", ["lift", "join", "merge", "update"])
@pytest.mark.parametrize("reducer", [WeightedMean("b c -> c"), WeightedMoments()], ids=str)
def test_weighted_and_paired_statistics_honour_a_method(reducer: Reducer, method: str, with_and_without_a_compiler: str) -> None:
    def weighted(rows: int) -> tuple[Tensor, Tensor]:
        return torch.randn(rows, 3), torch.rand(rows)

    for rows in SIZES.values():
        xs = [weighted(rows) for _ in range(3)]
        own: Any = overriding(reducer, method)
        lifts = [reducer.update({}, marked(x) if method == "lift" else x, weights) for x, weights in xs]
        if method == "update":
            lifts = [reducer.update({}, marked(x), marked(weights)) for x, weights in xs]
        same_state(reduce(lambda state, one: own.update(state, *one), xs, {}), reduce(own.merge, lifts), f"{rows}")
    for pair in (CKA(), CrossCovariance()):
        x, y = torch.randn(2, 4, 3)
        if method in ("join", "merge"):
            one: Any = overriding(pair, method)
            lift = pair.update({}, x, y)
            same_state(one.update(one.update({}, x, y), x, y), one.merge(lift, lift), str(pair))


@pytest.mark.parametrize("kind", [Activity, Sparsity])
def test_a_threshold_of_a_subclass_is_that_of_every_dtype(
    kind: type[Activity] | type[Sparsity], with_and_without_a_compiler: str
) -> None:
    own: Any = type("Own", (kind,), {"threshold": property(lambda self: 1.0)})()
    for rows in SIZES.values():
        x = torch.randn(rows, 3)
        for dtype in (torch.float32, torch.float64):
            same_state(own.update({}, x.to(dtype)), kind(eps=1.0).update({}, x), f"{rows} {dtype}")


def test_a_subclass_may_leave_the_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """Columns that are none, and parts that do not join, are believed."""
    seen: list[tuple[int, ...]] = []

    class Slow(Mean):
        @property
        def columns(self) -> dict[str, str]:
            return {}

    class Whole(Mean):
        @property
        def divisible(self) -> bool:
            return False

        def lift(self, x: Tensor, axes: tuple[int, ...]) -> State:
            seen.append(tuple(x.shape))
            return super().lift(x, axes)

    monkeypatch.setattr(dispatch, "loop_plan", lambda *_: pytest.fail("a loop was called"))
    assert Slow().compute(Slow().update({}, torch.ones(9))) == 1
    assert Whole().compute(Whole().update_all({}, torch.ones(3, 9))) == 1
    Whole().update({}, torch.ones(1 << 18))
    assert seen == [(9,), (9,), (9,), (1 << 18,)]


def test_what_nobody_would_call_is_refused_when_the_class_is_made() -> None:
    with pytest.raises(ReducerTypeError, match=r"the empty state is .. everywhere"):
        type("Prior", (Mean,), {"init": lambda self: {"count": torch.ones(())}})
    for method, instead in (("update", "lift"), ("merge", "join")):
        with pytest.raises(ReducerTypeError, match=rf"`{method}` of its own, .* override `{instead}` instead"):
            type("Both", (Mean,), {method: getattr(Mean, method).__get__, "fields": Mean.fields})


def test_a_method_of_a_mixin_counts_as_one_of_the_subclass() -> None:
    class Magnitudes:
        def lift(self, x: Tensor, axes: tuple[int, ...]) -> State:
            state: State = super().lift(x.abs(), axes)  # type: ignore[misc]
            return state

    own: Any = type("Mixed", (Magnitudes, Mean), {})()
    x = torch.linspace(-1, 1, 1000)
    for found in (own.update({}, x), own.update_all({}, x.view(10, 100))):
        torch.testing.assert_close(own.compute(found), x.double().abs().mean())


def test_a_subclass_vouches_for_what_it_declares() -> None:
    """With the declarations that stand for its methods it is as fast as its base."""

    @dataclass(frozen=True)
    class Squares(Mean):
        fields = {"count": Add(), "sum": Add()}  # noqa: RUF012
        divisible = True  # type: ignore[assignment]

        def lift(self, x: Tensor, axes: tuple[int, ...]) -> State:
            return super().lift(x.double().square(), axes)

        def join(self, a: State, b: State) -> State:
            return super().join(a, b)

    own = Squares()
    assert own.batchable
    assert is_stackable(own)
    assert own.columns == {}
    xs = torch.randn(8, 5)
    torch.testing.assert_close(own.compute(own.update_all({}, xs)), xs.double().square().mean())


WAIT = (
    "Activity",
    "Count",
    "Extremes",
    "Max",
    "Mean",
    "Min",
    "Moments",
    "Norm",
    "Sparsity",
    "Sum",
    "Summary",
    "Histogram",
    "Quantile",
)


def test_the_classes_of_the_package_keep_their_fast_paths() -> None:
    statistics = [getattr(reducers, name) for name in reducers.__all__]
    statistics = [kind for kind in statistics if isinstance(kind, type) and issubclass(kind, Statistic)]
    case_of = {type(case.reducer): case.reducer for case in reversed(CASES)}
    made = {kind.__name__: case_of[kind] for kind in statistics if kind in case_of}
    assert {name for name, one in made.items() if one.batchable} == {*WAIT, "FirstNonfinite", "Idle"}
    assert {name for name, one in made.items() if one.columns} == {*WAIT} - {"Histogram", "Quantile"}
    assert {name for name, one in made.items() if one.stackable} == {*WAIT} - {"Histogram", "Quantile"}
    assert all(one.lifts_together for one in made.values())
    assert {name for name, one in made.items() if one.update_all.__func__ is Reducer.update_all} == set()
    assert {name for name, one in made.items() if type(one).observe is not Statistic.observe} == set()
    assert {name for name, one in made.items() if type(one).swept is not Statistic.swept} == {"Histogram", "Quantile"}
    parts = Product(a=Mean(), b=Summary().postmap(one_more))
    assert len(statistics_of(parts) or ()) == 2
    assert is_stackable(parts)
    assert parts.batchable


def test_kernels_of_the_package_are_called(monkeypatch: pytest.MonkeyPatch) -> None:
    called: list[tuple[str, ...]] = []
    loop_plan = dispatch.loop_plan

    def noted(asked: Any, *rest: Any) -> Any:
        called.append(tuple(asked[0]))
        return loop_plan(asked, *rest)

    monkeypatch.setattr(dispatch, "loop_plan", noted)
    kept = [Mean(), Summary(), Norm(), Max(), Activity("b c -> c")]
    for reducer in kept:
        reducer.update({}, torch.randn(100, 8))
    assert len(called) == len(kept)


def test_a_method_in_place_of_a_property_is_refused() -> None:
    with pytest.raises(ReducerTypeError, match=r"Wrong\.divisible is a method, .* write @property above it"):

        class Wrong(Statistic):
            def divisible(self) -> bool:  # type: ignore[override]
                return False
