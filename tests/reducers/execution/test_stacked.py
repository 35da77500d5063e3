"""Many tensors lifted at once: the same as each by itself."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import pytest
import torch
from names import name_of
from torch import Tensor

from reducers import Activity, Count, Max, Mean, Min, Moments, Norm, Product, Quantile, Reducer, State, Statistic, Sum, Summary
from reducers.core.fields import Add, Field
from reducers.execution.stacked import is_stackable, lift_stacked

EACH = [
    Count(),
    Sum(),
    Mean(),
    Min(),
    Max(),
    Norm(),
    Norm(p=0),
    Norm(p=1),
    Norm(p=3),
    Norm(p=float("inf")),
    Moments(),
    Moments(order=4),
    Summary(),
    Activity("... ->"),
    Product(norm=Norm(), more=Product(summary=Summary(), mean=Mean())),
    Moments().postmap(lambda result: result["var"]),
]
SIZES = {
    "of one size": [(64,)] * 40,
    "of few sizes": [(64,), (8, 16), (640,)] * 9,
    "of odd sizes": [(size,) for size in range(1, 60)],
    "of many odd sizes": [(size,) for size in (*range(1, 70), *range(500, 530), 8191)],
    "small and big": [(3, 3), (), (200, 100), (7,), (9000,), (2, 5, 5)] * 3,
    "few": [(5,), (300,)],
    "more than a matrix": [(4096,)] * 37,
}


def alike(found: State, wanted: State) -> None:
    assert list(found) == list(wanted)
    for key, value in wanted.items():
        assert (found[key].dtype, found[key].shape) == (value.dtype, value.shape), key
        exact = not value.is_floating_point() or value.dtype is not torch.float64
        torch.testing.assert_close(found[key], value, rtol=0 if exact else 1e-12, atol=0 if exact else 1e-9, equal_nan=True)


@pytest.mark.parametrize("reducer", EACH, ids=name_of)
@pytest.mark.parametrize("sizes", SIZES.values(), ids=list(SIZES))
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
def test_each_row_is_the_lift_of_its_tensor(reducer: Reducer, sizes: list[tuple[int, ...]], dtype: torch.dtype) -> None:
    assert is_stackable(reducer)
    xs = [torch.randn(size).to(dtype) for size in sizes]
    xs[0].view(-1)[:1], xs[-1].view(-1)[-1:] = torch.nan, -torch.inf
    before = [x.clone() for x in xs]
    stacked = lift_stacked(reducer, xs)
    for index, x in enumerate(xs):
        alike({key: value[index] for key, value in stacked.items()}, reducer.update({}, x))
    assert all(torch.equal(x.nan_to_num(), y.nan_to_num()) for x, y in zip(xs, before, strict=True))


@pytest.mark.parametrize("reducer", EACH, ids=name_of)
def test_stacks_merge_row_by_row(reducer: Reducer) -> None:
    xs, ys = ([torch.randn(size) for size in (3, 4, 5, 6, 9000)] for _ in range(2))
    merged = reducer.merge(lift_stacked(reducer, xs), lift_stacked(reducer, ys))
    for index, (x, y) in enumerate(zip(xs, ys, strict=True)):
        alike({key: value[index] for key, value in merged.items()}, reducer.update(reducer.update({}, x), y))


def test_any_layout_and_numbers_that_are_complex_or_whole() -> None:
    xs = [torch.randn(4, 6).t(), torch.randn(2, 3, 4)[:, 1:], torch.randn(1).expand(5), torch.randn(24)[::2], torch.randn(3, 4)]
    for reducer in (Norm(), Summary()):
        stacked = lift_stacked(reducer, xs)
        for index, x in enumerate(xs):
            alike({key: value[index] for key, value in stacked.items()}, reducer.update({}, x))
    for xs in ([torch.randn(n, dtype=torch.complex64) for n in (2, 3, 4, 4, 4, 4)], [torch.arange(n) for n in (2, 3, 4, 4, 4, 4)]):
        stacked = lift_stacked(Mean(), xs)
        for index, x in enumerate(xs):
            alike({key: value[index] for key, value in stacked.items()}, Mean().update({}, x))


def test_states_hold_nothing_of_the_tensors_and_no_graph() -> None:
    xs = [torch.ones(size, requires_grad=True) for size in (4, 4, 4, 4, 9000, 2)]
    stacked = lift_stacked(Max(), xs)
    with torch.no_grad():
        for x in xs:
            x.zero_()
    assert stacked["max"].tolist() == [1] * 6
    assert not stacked["max"].requires_grad


def test_what_keeps_axes_or_cuts_no_tensor_or_joins_no_elements_does_not_stack() -> None:
    @dataclass(frozen=True)
    class Plain(Statistic):
        def lift(self, x: Tensor, axes: tuple[int, ...]) -> State:
            return {"sum": x.sum(dim=axes)}

        def join(self, a: State, b: State) -> State:
            return {"sum": a["sum"] + b["sum"]}

        def read(self, state: State) -> Tensor:
            return state["sum"]

    @dataclass(frozen=True)
    class Marked(Plain):
        fields: ClassVar[Mapping[str, Field]] = {"sum": Add()}

    others = [
        Summary("a b ->"),
        Norm("... d -> d"),
        Quantile(),
        Activity("... ->", death=True),
        Plain(),
        Product(a=Norm(), b=Plain()),
    ]
    assert [is_stackable(reducer) for reducer in others] == [False] * 6
    assert is_stackable(Marked())
    assert lift_stacked(Marked(), [torch.ones(n) for n in (2, 3, 3, 3, 3)])["sum"].tolist() == [2, 3, 3, 3, 3]


def test_odd_sizes_take_as_many_lifts_as_there_are_binary_digits(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[tuple[int, ...]] = []
    usual = Norm.lift

    def lift(self: Norm, x: Tensor, axes: tuple[int, ...]) -> State:
        calls.append(tuple(x.shape))
        return usual(self, x, axes)

    monkeypatch.setattr(Norm, "lift", lift)
    xs = [torch.randn(size) for size in range(64, 1_024)]
    stacked = lift_stacked(Norm(), xs)
    assert len(calls) == 10 + 1  # of each power of two one matrix, but of 512 two
    assert sum(rows * length for rows, length in calls) == sum(map(len, xs))  # none is padded
    torch.testing.assert_close(stacked["power"], torch.stack([x.double().square().sum() for x in xs]), rtol=1e-12, atol=0)


@pytest.mark.parametrize("sizes", [[5, 9, 33] * 40, [*range(1, 200)] * 2, [4096] * 33, [7000, 6999] * 9], ids=str)
def test_equal_tensors_give_equal_bits(sizes: list[int]) -> None:
    values = {size: torch.randn(size) for size in sizes}
    stacked = lift_stacked(Moments(order=4), [values[size] for size in sizes])
    for key, rows in stacked.items():
        first: dict[int, Tensor] = {}
        for size, row in zip(sizes, rows, strict=True):
            assert torch.equal(first.setdefault(size, row), row), (key, size)
