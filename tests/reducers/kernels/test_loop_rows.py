"""Many tensors in one call of the loop in C++: each row has the bits of an update of its tensor alone."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any

import laws
import pytest
import torch
from torch import Tensor

from reducers import (
    Activity,
    Count,
    Extremes,
    Max,
    Mean,
    Min,
    Moments,
    Norm,
    Product,
    Quantile,
    Sparsity,
    State,
    Statistic,
    Sum,
    Summary,
)
from reducers.execution.rows import RowSweep, swept_dtypes
from reducers.kernels import failing
from reducers.kernels.cpp import library, loop_rows, sweeping
from reducers.kernels.cpp.task import LEAST_RUN

pytestmark = pytest.mark.skipif(not library.in_order(), reason="no C++ compiler")

STATISTICS: list[Statistic] = [
    *(Count(), Sum(), Mean(), Min(), Max(), Extremes(), Summary(), Moments(), Moments(order=4), Sparsity(eps=0.5)),
    *(Norm(), Norm(p=1), Norm(p=float("inf")), Activity("... ->", eps=0.5)),
]
SIZES = (1, 2, 7, 8, 9, 64, 1_000, 32_768, 32_769, 100_003)
DATA: dict[str, Callable[[Tensor], Tensor]] = {
    "normal": lambda x: x,
    "mean 1e4": lambda x: x + 1e4,
    "not finite": lambda x: torch.where(x > 1.2, torch.nan, torch.where(x < -1.5, -torch.inf, x)),
    "nothing finite": lambda x: torch.full_like(x, torch.nan),
}


def drawn(kind: str, *shape: int) -> Tensor:
    return DATA[kind](torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape))))


def swept(reducer: Statistic, xs: Sequence[Tensor | None], state: State | None = None, tables: Any = None) -> State:
    (found,), _ = loop_rows.swept_rows(xs, [(reducer.columns, reducer.threshold, state or {})], tables)
    return found


def row(state: State, index: int) -> State:
    return {key: value[index] for key, value in state.items()}


def assert_row(state: State, index: int, x: Tensor, alone: State) -> None:
    """Below eight elements PyTorch's calls update a tensor alone, and round otherwise."""
    compare = laws.same_bits if x.numel() >= LEAST_RUN else laws.close
    compare(row(state, index), alone)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("reducer", STATISTICS, ids=str)
def test_a_row_has_the_bits_of_its_tensor_alone(reducer: Statistic, dtype: torch.dtype) -> None:
    xs = [drawn(kind, size).to(dtype) for size in SIZES for kind in DATA]
    later = [DATA["mean 1e4"](x.float()).to(dtype) for x in xs]
    first = swept(reducer, xs)
    kept = {key: value.clone() for key, value in first.items()}
    second = swept(reducer, later, first)
    laws.same_bits(first, kept)
    for index, (x, y) in enumerate(zip(xs, later, strict=True)):
        alone = reducer.update({}, x)
        assert_row(first, index, x, alone)
        assert_row(second, index, x, reducer.update(alone, y))


def test_rows_without_a_tensor_stay_as_they_are() -> None:
    reducer = Summary()
    xs = [drawn("normal", size) for size in SIZES]
    first = swept(reducer, xs)
    left_out = {0, 4, 7, 9}
    second = swept(reducer, [None if index in left_out else x for index, x in enumerate(xs)], first)
    for index, x in enumerate(xs):
        alone = reducer.update({}, x)
        assert_row(second, index, x, alone if index in left_out else reducer.update(alone, x))
    empty = swept(reducer, [torch.empty(0) if index in left_out else x for index, x in enumerate(xs)], first)
    laws.same_bits(empty, second)


def test_any_order_of_the_axes_gaps_and_places_in_memory() -> None:
    x, bucket = drawn("normal", 4, 6, 5, 3), drawn("not finite", 300)
    xs = [
        x,
        x.permute(3, 1, 0, 2),
        x.contiguous(memory_format=torch.channels_last),
        x[:, ::2, 1:],
        x[0, :1].expand(6, 5, 3),
        bucket[1:3],
        bucket[3:200],
        torch._neg_view(x),
        torch.nn.Parameter(x[0]),
    ]
    found = swept(Summary(), xs)
    for index, each in enumerate(xs):
        laws.close(row(found, index), Summary().update({}, each.detach()))


def test_threads_do_not_change_a_bit(at_several_threads: Callable[[Callable[[], Any]], list[Any]]) -> None:
    xs = [drawn("mean 1e4", size) for size in (*SIZES, *random.Random(0).choices(range(1, 400), k=300))]
    first, *others = at_several_threads(lambda: swept(Moments(order=4), xs))
    for other in others:
        laws.same_bits(first, other)


def test_tensors_that_move_are_found_and_what_is_told_is_kept() -> None:
    xs = [drawn("normal", size) for size in SIZES]
    families = [(Summary().columns, 0.0, {})]
    (first,), tables = loop_rows.swept_rows(xs, families, None)
    (again,), same = loop_rows.swept_rows(xs, families, tables)
    assert same is tables
    moved = [x.clone() + 1 for x in xs]
    (later,), same = loop_rows.swept_rows(moved, families, tables)
    assert same is tables
    _, other = loop_rows.swept_rows(moved[:3], families, tables)
    assert other is not tables
    laws.same_bits(first, again)
    laws.same_bits(later, swept(Summary(), moved))


def test_a_reducer_made_of_several_is_a_call_for_each(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[int] = []
    in_threads = loop_rows.in_threads
    monkeypatch.setattr(loop_rows, "in_threads", lambda *args: calls.append(args[2]) or in_threads(*args))
    reducer = Product(norm=Norm(), more=Product(moments=Moments(order=4), summary=Summary())).postmap(lambda result: result)
    xs: list[Tensor | None] = [drawn("normal", size) for size in SIZES]
    sweep = RowSweep()
    found = sweep.update(reducer, sweep.update(reducer, {}, xs) or {}, xs)
    assert calls == 6 * [len(SIZES)]
    assert found is not None
    assert {key: value.dtype for key, value in found.items()} == swept_dtypes(reducer, drawn("normal", 3))
    for index, x in enumerate(xs):
        assert x is not None
        assert_row(found, index, x, reducer.update(reducer.update({}, x), x))


def test_what_the_loop_does_not_take_is_left_to_others() -> None:
    x = drawn("normal", 20)
    assert swept_dtypes(Summary(), x) is not None
    assert swept_dtypes(Summary(), x.double()) is None
    assert swept_dtypes(Norm(p=3), x) is None
    assert swept_dtypes(Quantile(), x) is None
    assert loop_rows.row_dtypes({"m2": "m2"}, torch.float32) is None  # which no state can be joined by


def test_no_memory_for_the_loop_is_an_error_that_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("reducers.kernels.failing._failed", [])
    monkeypatch.setattr(loop_rows, "in_threads", lambda *_: 1)
    with pytest.raises(torch.OutOfMemoryError, match="parameters of a step"):
        RowSweep().update(Norm(), {}, [drawn("normal", 20)])
    assert failing._failed == []


def test_without_a_compiler_there_are_no_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    sweeping.call_for.cache_clear()
    monkeypatch.setattr(sweeping, "loop_for", lambda *_: None)
    assert swept_dtypes(Norm(), drawn("normal", 20)) is None
    sweeping.call_for.cache_clear()
