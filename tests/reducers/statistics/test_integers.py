"""Statistics of integers against Python's integers, which never overflow: all dtypes, with their extremes, on every path."""

from __future__ import annotations

from collections.abc import Callable
from fractions import Fraction
from functools import reduce
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from reducers import EMA, Extremes, GroupBy, Masked, Mean, Moments, Norm, Product, Reducer, State, Sum, Summary
from reducers.execution.stacked import lift_stacked

DTYPES = [torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.uint16, torch.uint32]
EXACT = 2**53


@st.composite
def integers(draw: Any) -> tuple[torch.dtype, list[int]]:
    dtype = draw(st.sampled_from(DTYPES))
    low, high = torch.iinfo(dtype).min, torch.iinfo(dtype).max
    one = st.one_of(st.integers(low, high), st.sampled_from([low, low + 1, high - 1, high, high // 2 + 1, 0, 1]))
    return dtype, draw(st.lists(one, min_size=2, max_size=12))


def _grouped(reducer: Reducer, xs: Tensor) -> State:
    state = GroupBy(reducer, 1).update({}, xs, torch.zeros(len(xs), dtype=torch.int64))
    return {key: value[0] for key, value in state.items()}


PATHS: dict[str, Callable[[Reducer, Tensor], State]] = {
    "whole": lambda reducer, xs: reducer.update({}, xs),
    "alone": lambda reducer, xs: reduce(reducer.update, xs.unbind(), {}),
    "stacked": lambda reducer, xs: reducer.update_all({}, xs[:, None]),
    "merged": lambda reducer, xs: reducer.merge_all([reducer.update({}, x) for x in xs.unbind()]),
    "big": lambda reducer, xs: reducer.update({}, xs.expand(3 << 16, len(xs)).contiguous()),
    "masked": lambda reducer, xs: Masked(reducer).update({}, xs, torch.ones(len(xs))),
    "grouped": _grouped,
    "in a graph": lambda reducer, xs: torch.compile(reducer.update, backend="eager", dynamic=True)({}, xs),
}


def check(path: str, dtype: torch.dtype, numbers: list[int]) -> None:
    xs = torch.tensor(numbers, dtype=dtype)
    times = 3 << 16 if path == "big" else 1
    count, most = len(numbers), max(map(abs, numbers))
    mean = Fraction(sum(numbers), count)
    var = sum((number - mean) ** 2 for number in numbers) / count
    exact = most * count * times < EXACT
    slack = 0.0 if exact and dtype is not torch.int64 else 2e-15 * most
    found = PATHS[path](Mean(), xs)
    assert abs(Mean().compute(found).item() - float(mean)) <= slack + 1e-15 * abs(float(mean)), (path, numbers)
    for reducer in (Moments(correction=0), Summary(correction=0)):
        result = reducer.compute(PATHS[path](reducer, xs))
        assert abs(result["mean"].item() - float(mean)) <= 4e-15 * most, (path, reducer, numbers)
        std = float(var) ** 0.5
        assert abs(result["var"].item() - float(var)) <= 1e-12 * float(var) + 1e-14 * most * (std + 1e-15 * most), (path, numbers)
    wide = Summary().compute(PATHS[path](Summary(), xs))
    if path not in ("masked", "grouped"):  # these are documented to be float64
        ends = Extremes().compute(PATHS[path](Extremes(), xs))
        assert (wide["min"].item(), wide["max"].item()) == (min(numbers), max(numbers)) == (ends["min"].item(), ends["max"].item())
        assert wide["absmax"].item() == min(most, 2**63 - 1)
    assert wide["zeros"].item() == numbers.count(0) * times
    norm = Norm(p=float("inf"))
    assert norm.compute(PATHS[path](norm, xs)).item() == float(most)
    added = sum(numbers) * times
    if -(2**63) <= added < 2**63 and path not in ("masked", "grouped"):
        assert Sum().compute(PATHS[path](Sum(), xs)).item() == added


@pytest.mark.parametrize("path", [path for path in PATHS if path not in ("in a graph", "big")])
@settings(max_examples=30)
@given(drawn=integers())
def test_integers_are_reduced_as_python_does(path: str, drawn: tuple[torch.dtype, list[int]]) -> None:
    check(path, *drawn)


@pytest.mark.slow
@pytest.mark.parametrize("path", ["in a graph", "big"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_extreme_integers_are_reduced_as_python_does(path: str, dtype: torch.dtype) -> None:
    low, high = torch.iinfo(dtype).min, torch.iinfo(dtype).max
    for numbers in ([high] * 4, [low, low], [low, 1], [low, high, 0], [high // 2 + 1] * 4):
        check(path, dtype, numbers)


@pytest.mark.parametrize("path", [path for path in PATHS if path != "in a graph"])
def test_what_int64_cannot_hold(path: str) -> None:
    check(path, torch.int64, [2**62] * 4)
    check(path, torch.int64, [-(2**63), 1])
    check(path, torch.bool, [1, 0, 1])


def test_rows_of_parameters_and_averages_do_not_wrap() -> None:
    xs = [torch.full((4,), 2**62) for _ in range(8)]
    for reducer in (Mean(), Product(a=Mean(), b=Moments())):
        rows = lift_stacked(reducer, xs)
        found = reducer.compute({key: value[3] for key, value in rows.items()})
        assert (found if isinstance(found, Tensor) else found["a"]).item() == 2.0**62
    ema = EMA("b c -> c", alpha=0.5)
    assert ema.compute(ema.update({}, torch.full((4, 1), 2**62))).item() == 2.0**62


def test_a_state_that_was_saved_with_an_integer_sum_goes_on() -> None:
    """Means of int64 had integer sums; files with these are loaded, and what comes now is added."""
    before = {"count": torch.tensor(2), "nonfinite": torch.tensor(0), "sum": torch.tensor(6)}
    Mean().check(before)
    after = Mean().update(before, torch.tensor([3, 6]))
    assert Mean().compute(after).item() == 15 / 4


@pytest.mark.parametrize("dtype", [dtype for dtype in DTYPES if dtype.itemsize == 4], ids=str)
def test_a_mean_of_more_integers_than_int64_can_add_up(dtype: torch.dtype) -> None:
    for number in (torch.iinfo(dtype).min, torch.iinfo(dtype).max):
        state = Mean().update({}, torch.tensor([number] * 4).to(dtype))
        for _ in range(32):  # as 2**34 elements
            state = Mean().merge(state, state)
        assert Mean().compute(state).item() == number
