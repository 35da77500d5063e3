"""The loops in C++ join an observation to a state: against the merge of two states, and what they leave to it."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import laws
import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from reducers import (
    Activity,
    Count,
    Extremes,
    Max,
    Mean,
    Min,
    Moments,
    Norm,
    Reducer,
    Sparsity,
    StateMismatchError,
    Statistic,
    Sum,
    Summary,
    WeightedMean,
    WeightedMoments,
)
from reducers.kernels.cpp import library

pytestmark = pytest.mark.skipif(not library.in_order(), reason="no C++ compiler")

STATISTICS: list[Callable[[str], Reducer]] = [
    *(Count, Sum, Mean, Min, Max, Extremes, Summary, Moments, Norm, WeightedMean, WeightedMoments),
    lambda pattern: Moments(pattern, order=3),
    lambda pattern: Moments(pattern, order=4),
    *(lambda pattern, p=p: Norm(pattern, p=p) for p in (0, 1, float("inf"))),
    lambda pattern: Sparsity(pattern, eps=0.5),
    lambda pattern: Activity(pattern, eps=0.5),
]
PATTERNS = ("a b c ->", "a b c -> c", "a b c -> b", "a b c -> a b")
DATA: dict[str, Callable[[Tensor], Tensor]] = {
    "normal": lambda x: x,
    "mean 1e4": lambda x: x + 1e4,
    "not finite": lambda x: torch.where(x > 1.2, torch.nan, torch.where(x < -1.5, -torch.inf, x)),
    "nothing finite": lambda x: torch.where(x > 0, torch.nan, torch.inf),
    "zeros": lambda x: x * (x > 0.5),
}


def drawn(kind: str, seed: int, *shape: int) -> Tensor:
    return DATA[kind](torch.randn(shape or (6, 5, 40), generator=torch.Generator().manual_seed(seed)))


def inputs(reducer: Reducer, x: Tensor) -> tuple[Tensor, ...]:
    weighted = isinstance(reducer, (WeightedMean, WeightedMoments))
    return (x, torch.rand(x.shape, generator=torch.Generator().manual_seed(x.numel()))) if weighted else (x,)


def joined_and_merged(reducer: Reducer, *xs: Tensor) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """The state after these observations, one after another, and that of their own states, merged."""
    joined: dict[str, Tensor] = {}
    merged: dict[str, Tensor] = {}
    for x in xs:
        before = {key: value.clone() for key, value in joined.items()}
        after = reducer.update(joined, *inputs(reducer, x))
        laws.same_bits(joined, before)
        assert not {value.data_ptr() for value in after.values()} & {value.data_ptr() for value in joined.values()}
        joined, merged = after, reducer.merge(merged, reducer.update({}, *inputs(reducer, x)))
    return joined, merged


def assert_same(joined: dict[str, Tensor], merged: dict[str, Tensor]) -> None:
    assert joined.keys() == merged.keys()
    for key, value in merged.items():
        assert joined[key].dtype is value.dtype
        scale = merged["m2"].abs().max().item() if key in ("m3", "m4") else 0
        exact = not value.is_floating_point() or key in ("min", "max")
        torch.testing.assert_close(joined[key], value, rtol=0 if exact else 1e-12, atol=0 if exact else 1e-12 * scale)


@pytest.mark.parametrize("kinds", [*itertools.product(DATA, DATA)], ids=" then ".join)
@pytest.mark.parametrize("pattern", PATTERNS)
def test_a_state_is_joined_as_states_are_merged(pattern: str, kinds: tuple[str, str]) -> None:
    for reducer in (made(pattern) for made in STATISTICS):
        xs = [drawn(kind, seed) for seed, kind in enumerate((*kinds, kinds[0]))]
        assert_same(*joined_and_merged(reducer, *xs))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_narrow_floats(dtype: torch.dtype) -> None:
    for reducer in (made("a b c -> c") for made in STATISTICS):
        xs = [drawn(kind, seed).to(dtype) for seed, kind in enumerate(("nothing finite", "normal", "not finite"))]
        assert_same(*joined_and_merged(reducer, *xs))


@pytest.mark.parametrize("shape", [(70_001,), (3, 40_000), (4_099, 11)])
def test_observations_of_several_parts(shape: tuple[int, ...]) -> None:
    for reducer, pattern in itertools.product(STATISTICS, ("... a ->", "... a -> a")):
        assert_same(*joined_and_merged(reducer(pattern), drawn("normal", 1, *shape), drawn("mean 1e4", 2, *shape)))


def test_masked_observations() -> None:
    for reducer in (Summary("a b c -> c"), Moments(order=4), Norm("a b c -> b", p=1), Max()):
        x, mask = drawn("not finite", 3), drawn("normal", 4) > 0.3
        state = reducer.update({}, drawn("mean 1e4", 5))
        assert_same(reducer.update_masked(state, x, mask), reducer.merge(state, reducer.update_masked({}, x, mask)))


class Calls(TorchDispatchMode):
    """The names of the operations that allocate or compute."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, operation: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if operation is not torch.ops.aten.detach.default and not operation.is_view:
            self.names.append(operation.overloadpacket.__name__)
        return operation(*args, **(kwargs or {}))


OF_THE_LOOP = [made for made in STATISTICS if getattr(made("... ->"), "columns", None)]


@pytest.mark.parametrize("made", OF_THE_LOOP, ids=lambda made: repr(made("... ->")))
def test_an_update_of_a_state_allocates_the_next_one_and_computes_nothing_else(made: Callable[[str], Reducer]) -> None:
    for pattern in ("a b c ->", "a b c -> c"):
        reducer = made(pattern)
        xs = inputs(reducer, drawn("normal", 6))
        state = reducer.update({}, *xs)
        with Calls() as calls:
            reducer.update(state, *xs)
        assert len(calls.names) == len(state)
        assert {*calls.names} <= {"new_empty", "empty"}


def test_counts_beyond_what_a_double_holds_are_exact() -> None:
    x, many = torch.zeros(3, 9), 2**60 + 1
    for reducer in (Summary(), Sparsity(), Count()):
        state = {key: torch.full_like(value, many) for key, value in reducer.update({}, x).items() if not value.is_floating_point()}
        after = reducer.update({**reducer.update({}, x), **state}, x)
        assert {after[key].item() - many for key in state} <= {0, 27}
        assert after["count"].item() == many + 27


def test_numbers_beside_nothing_finite_keep_their_bits() -> None:
    nothing = torch.full((3, 9), torch.nan)
    for reducer in (Moments(), Moments(order=4)):
        state = reducer.update({}, drawn("normal", 7))
        huge = {**state, "mean": torch.full_like(state["mean"], 1e200)}
        laws.same_bits(reducer.update(huge, nothing), {**huge, "nonfinite": huge["nonfinite"] + nothing.numel()})


def test_nan_that_a_state_holds_stays() -> None:
    reducer, x = Extremes(), drawn("normal", 8)
    state = {key: value * torch.nan if value.is_floating_point() else value for key, value in reducer.update({}, x).items()}
    laws.same_bits(reducer.update(state, x), reducer.merge(state, reducer.update({}, x)))


def test_threads_do_not_change_a_bit(at_several_threads: Callable[[Callable[[], Any]], list[Any]]) -> None:
    x, y = drawn("mean 1e4", 9, 300, 4_097), drawn("not finite", 10, 300, 4_097)
    for reducer in (Summary(), Moments("a b -> b", order=4), WeightedMoments("a b -> a")):
        state = reducer.update({}, *inputs(reducer, x))
        first, *others = at_several_threads(lambda state=state, reducer=reducer: reducer.update(state, *inputs(reducer, y)))
        for other in others:
            laws.same_bits(first, other)


def test_a_state_of_another_dtype_or_layout_is_merged() -> None:
    x, reducer = drawn("normal", 11), Summary("a b c -> b c")
    for first in (x.double(), x.bfloat16()):
        state = reducer.update({}, first)
        laws.same_bits(reducer.update(state, x), reducer.merge(state, reducer.update({}, x)))
    state = reducer.update({}, x)
    for other in (
        {key: value.t().contiguous().t() for key, value in state.items()},
        {**state, "mean": torch._neg_view(-state["mean"])},
        {**state, "mean": torch.nn.Parameter(state["mean"])},
    ):
        laws.close(reducer.update(other, x), reducer.update(state, x))


def test_a_state_of_another_shape_or_statistic_is_refused() -> None:
    x = drawn("normal", 12)
    state = Summary("a b c -> c").update({}, x[..., :20])
    with pytest.raises(StateMismatchError, match="shape"):
        Summary("a b c -> c").update(state, x)
    with pytest.raises(StateMismatchError):
        Summary().update(Moments().update({}, x), x)
    with pytest.raises(StateMismatchError):
        Mean().update(Norm().update({}, x), x)


def test_a_statistic_with_a_join_of_its_own_is_not_joined_by_the_loop() -> None:
    class Largest(Sum):
        """The largest sum of an observation."""

        def join(self, a: dict[str, Tensor], b: dict[str, Tensor]) -> dict[str, Tensor]:
            return {"count": a["count"] + b["count"], "sum": torch.maximum(a["sum"], b["sum"])}

    reducer: Statistic = Largest()
    state = reducer.update(reducer.update({}, torch.ones(3, 9)), torch.ones(2, 9))
    assert reducer.compute(state) == 27
