"""Fields: from one declaration follow join, stacking, all-reduce and kernels, and one that disagrees with `lift` is found."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import laws
import pytest
import torch
from cases import CASES, Case
from torch import Tensor

from reducers import ArgumentError, Count, Max, Mean, Moments, Norm, Reducer, ReducerTypeError, State, Statistic, Summary
from reducers.core.fields import Add, Field, Greatest, Joined, Least
from reducers.kernels.columns import COLUMNS
from reducers.kernels.precision import count_of, finite, real

DECLARED = [case for case in CASES if isinstance(case.reducer, Statistic) and case.reducer.fields]
WIDTHS = (1, 2, 7, 64, 129)


def observations(case: Case, dtype: torch.dtype, width: int) -> list[Tensor]:
    """Observations whose last kept axis has this width, among which some elements are zero, equal or not finite."""
    made = torch.Generator().manual_seed(width)
    xs = [torch.randn(rows, *case.trailing[:-1], width, generator=made, dtype=torch.float64) for rows in (5, 40)]
    if not dtype.is_floating_point:
        return [x.mul(20).abs().to(dtype) for x in xs]
    xs[0][0, ..., 0], xs[0][1, ..., -1], xs[1][::3] = torch.nan, -torch.inf, 0.0
    return [x.to(dtype) for x in xs]


@pytest.mark.parametrize("case", [case for case in DECLARED if not case.same_shape], ids=str)  # batches come side by side
def test_fields_agree_with_lift_and_with_kernels_at_any_width(case: Case, with_and_without_a_compiler: str) -> None:
    for dtype in (dtype for dtype in case.dtypes if not dtype.is_complex):
        for width in WIDTHS:
            laws.declared(case.reducer, observations(case, dtype, width))


def test_what_has_fields_is_known() -> None:
    """A reducer that joins by a few reductions declares them; what cannot be a field joins by itself."""
    kinds = {type(case.reducer) for case in CASES if isinstance(case.reducer, Statistic)}
    own = {kind.__name__ for kind in kinds if kind.join is not Statistic.join}
    assert own == {"Covariance", "EMA", "FirstNonfinite", "Idle", "Moments", "Summary"}
    assert {type(case.reducer).__name__ for case in DECLARED} == {kind.__name__ for kind in kinds} - own | {"Moments", "Summary"}


def test_a_column_that_does_not_exist_is_an_error_when_the_class_is_made() -> None:
    with pytest.raises(ArgumentError, match=r"kernels have no column 'summ'; they have active, count, .*, sum, "):

        @dataclass(frozen=True)
        class Typo(Mean):
            fields: ClassVar[Mapping[str, Field]] = {"count": Add("count"), "sum": Add("summ")}

    for name in COLUMNS:
        assert Add(name).column == name


def test_without_fields_and_without_a_join_states_do_not_merge() -> None:
    @dataclass(frozen=True)
    class Half(Statistic):
        def lift(self, x: Tensor, axes: tuple[int, ...]) -> State:
            return {"total": x.double().sum(dim=axes)}

        def read(self, state: State) -> Tensor:
            return state["total"]

    state = Half().update({}, torch.ones(3))
    with pytest.raises(ReducerTypeError, match="Half has nothing to join states by: declare `fields`, or implement `join`"):
        Half().update(state, torch.ones(3))


def test_all_else_follows_from_the_fields() -> None:
    a, b = (Summary().update({}, torch.randn(40)) for _ in range(2))
    assert Summary().columns == {key: key for key in a}
    assert Summary().reductions_of(a) == {}  # a mean merges with the help of counts
    assert Max().reductions_of(Max().update({}, torch.ones(2))) == {"count": "sum", "nonfinite": "sum", "max": "max"}
    assert [Norm(p=p).columns.get("power") for p in (1, 2, 3, float("inf"))] == ["magnitudes", "squares", None, "peak"]
    assert [len(Moments(order=order).columns) for order in (2, 3, 4)] == [4, 5, 6]
    merged = Summary().merge(a, b)
    assert {key: merged[key] for key in ("min", "zeros")} == {
        "min": torch.minimum(a["min"], b["min"]),
        "zeros": a["zeros"] + b["zeros"],
    }


@dataclass(frozen=True)
class MeanSquare(Statistic):
    """A reducer of the docs, over columns that kernels have."""

    fields: ClassVar[Mapping[str, Field]] = {"count": Add("count"), "power": Add("squares")}

    def lift(self, x: Tensor, axes: tuple[int, ...]) -> State:
        x, mask = finite(x)
        return {"count": count_of(x, mask, axes), "power": real(x).square().sum(dim=axes)}

    def read(self, state: State) -> Tensor:
        return state["power"] / real(state["count"])


def planted(**fields: Field) -> Reducer:
    own: Any = type("Planted", (MeanSquare,), {"fields": fields})
    made: Reducer = own()
    return made


@pytest.mark.parametrize(
    "mutant",
    [
        planted(count=Add("count"), power=Add("magnitudes")),
        planted(count=Add("count"), power=Add("sum")),
        planted(count=Add("zeros"), power=Add("squares")),
        planted(count=Add("count"), power=Joined("squares")),
        planted(count=Add("count"), power=Greatest("squares")),
        planted(count=Least(), power=Add()),
        planted(count=Add()),
        planted(count=Add(), power=Add(), more=Add()),
    ],
    ids=repr,
)
def test_fields_that_disagree_with_lift_are_found(mutant: Reducer) -> None:
    xs = observations(CASES[0], torch.float32, 16)
    laws.declared(MeanSquare("b c -> c"), xs)
    with pytest.raises(AssertionError):
        laws.declared(mutant, xs)


def test_a_statistic_over_columns_is_computed_by_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    called: list[tuple[int, ...]] = []
    lift = MeanSquare.lift
    monkeypatch.setattr(MeanSquare, "lift", lambda self, x, axes: called.append(tuple(x.shape)) or lift(self, x, axes))
    x = torch.randn(300, 64)
    found = MeanSquare("b c -> c").update({}, x)
    torch.testing.assert_close(found["power"], x.double().square().sum(0))
    assert called == []


def test_a_subclass_that_declares_fields_again_has_the_fast_ways_again() -> None:
    @dataclass(frozen=True)
    class Shifted(Count):
        def lift(self, x: Tensor, axes: tuple[int, ...]) -> State:
            return super().lift(x + 1, axes)

        def join(self, a: State, b: State) -> State:
            return super().join(a, b)

    @dataclass(frozen=True)
    class Again(Shifted):
        fields: ClassVar[Mapping[str, Field]] = {"count": Add("count")}

    state = Count().update({}, torch.ones(3))
    assert (Shifted().columns, Shifted().stackable, Shifted().reductions_of(state)) == ({}, False, {})
    assert Again().columns == Count().columns
    assert Again().reductions_of(state) == {"count": "sum", "nonfinite": "sum"}


def test_an_entry_that_no_field_names_is_an_error_and_not_lost() -> None:
    @dataclass(frozen=True)
    class Misnamed(Statistic):
        fields: ClassVar[Mapping[str, Field]] = {"total": Add()}

        def lift(self, x: Tensor, axes: tuple[int, ...]) -> State:
            return {"sum": x.sum(dim=axes)}

        def read(self, state: State) -> Tensor:
            return state["sum"]

    reducer = Misnamed()
    with pytest.raises(ReducerTypeError, match="`lift` returns 'sum', which `fields` do not name: they name 'total'"):
        reducer.update(reducer.update({}, torch.ones(3)), torch.ones(3))
