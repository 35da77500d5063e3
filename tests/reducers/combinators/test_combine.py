"""Product, premap and postmap: the laws by which they are made of their parts."""

from __future__ import annotations

import laws
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from reducers import (
    Activity,
    Collect,
    EmptyStateError,
    Max,
    Mean,
    Moments,
    PerObservation,
    Product,
    Reducer,
    ReducerTypeError,
    StateMismatchError,
    Sum,
    Summary,
)

PARTS: dict[str, Reducer] = {"mean": Mean("b c -> c"), "top": Max(), "all": Collect(), "deep": Product(summary=Summary("b c -> c"))}


def stream(seed: int, sizes: list[int]) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(size, 3, generator=generator) for size in sizes]


@settings(max_examples=25)
@given(seed=st.integers(0, 1000), sizes=st.lists(st.integers(1, 4), min_size=1, max_size=4))
def test_a_product_is_its_parts_side_by_side(seed: int, sizes: list[int]) -> None:
    xs = stream(seed, sizes)
    product = Product(**PARTS)
    state = laws.run(product, xs)
    laws.same_bits(product.compute(state), {name: part.compute(laws.run(part, xs)) for name, part in PARTS.items()})
    apart = {f"{name}/{key}": value for name, part in PARTS.items() for key, value in laws.run(part, xs).items()}
    laws.same_bits(state, apart)


@settings(max_examples=25)
@given(seed=st.integers(0, 1000), sizes=st.lists(st.integers(1, 4), min_size=1, max_size=4))
def test_premap_and_postmap_laws(seed: int, sizes: list[int]) -> None:
    xs = stream(seed, sizes)
    inner = Mean("b c -> c")
    premapped = inner.premap(torch.square).premap(torch.sin)
    laws.same_bits(laws.run(premapped, xs), laws.run(inner, [x.sin().square() for x in xs]))
    postmapped = inner.postmap(torch.square).postmap(torch.sin)
    state = laws.run(inner, xs)
    laws.same_bits(laws.run(postmapped, xs), state)
    laws.same_bits(postmapped.compute(state), inner.compute(state).square().sin())


def test_premap_may_take_several_tensors() -> None:
    error = Mean().premap(lambda output, target: (output - target).abs())
    state = error.update({}, torch.tensor([1.0, 5.0]), torch.tensor([2.0, 2.0]))
    assert error.compute(state).item() == 2
    swapped = Mean().premap(lambda a, b: (b,))
    assert swapped.compute(swapped.update({}, torch.zeros(2), torch.ones(2))).item() == 1


def test_ordered_when_a_part_is() -> None:
    assert not Product(a=Mean(), b=Max()).ordered
    assert Product(a=Mean(), b=Collect()).ordered
    assert Product(a=Mean(), b=Collect().premap(abs)).postmap(dict).ordered


def test_a_product_without_observations() -> None:
    product = Product(a=Mean(), b=Sum())
    assert product.update({}, torch.empty(0)) == {}
    assert product.merge({}, {}) == {}
    with pytest.raises(EmptyStateError):
        product.compute({})


def test_parts_are_checked() -> None:
    with pytest.raises(ReducerTypeError, match="at least one"):
        Product()
    with pytest.raises(ReducerTypeError, match="without '/'"):
        Product(**{"a/b": Mean()})
    with pytest.raises(ReducerTypeError, match=r"Product\(a=...\) needs a reducer instance.*write Mean\(\)"):
        Product(a=Mean)  # type: ignore[arg-type]
    with pytest.raises(ReducerTypeError, match="Premap needs a function"):
        Mean().premap(None)  # type: ignore[arg-type]
    assert Product(self=Mean()).parts == (("self", Mean()),)


def test_the_state_of_another_reducer_is_refused() -> None:
    product = Product(a=Mean())
    with pytest.raises(StateMismatchError, match="no part 'b'"):
        product.update(Product(b=Mean()).update({}, torch.ones(2)), torch.ones(2))
    with pytest.raises(StateMismatchError, match="different keys"):
        Product(a=Moments()).merge(product.update({}, torch.ones(2)), Product(a=Moments()).update({}, torch.ones(2)))


def test_equality_and_repr() -> None:
    product = Product(a=Mean(), b=Max("b c -> c"))
    assert product == Product(a=Mean(), b=Max("b c -> c"))
    assert product != Product(a=Mean(), b=Max())
    assert repr(product) == "Product(a=Mean(pattern='... ->'), b=Max(pattern='b c -> c'))"


def test_results_of_an_observation_keep_their_names_whatever_these_are() -> None:
    inner = Product(**{"a:b": Mean(), "a": Product(deep=Max())})
    per = PerObservation(inner, PerObservation(Sum(), Collect()))
    state = per.update(per.update({}, torch.tensor([1.0, 3.0])), torch.tensor([5.0]))
    result = per.compute(state)
    assert result["a:b"].tolist() == [2, 5]
    assert result["a"]["deep"].tolist() == [3, 5]


def by_value(state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Depends on values, so it cannot be computed for many states at once."""
    return {"mean": state["mean"], "positive": torch.tensor(float(state["mean"].item() > 0))}


@pytest.mark.parametrize(
    "inner",
    [
        Moments("b c -> c").postmap(lambda moments: {"mean": moments["mean"], "deep": {"var": moments["var"].mean()}}),
        Mean("observation c -> observation"),
        Max("b c -> (c b)"),
        Activity("b c -> c", death=True),
        Moments().postmap(by_value),
        Product(mean=Mean("b c -> c"), top=Max()),
        Mean().premap(torch.abs),
        Collect(),
    ],
    ids=["postmap", "axis of that name", "parentheses", "indivisible", "by value", "product", "premap", "collect"],
)
@settings(max_examples=10)
@given(seed=st.integers(0, 1000), count=st.integers(1, 5), before=st.integers(0, 2))
def test_observations_reduced_together_each_count_as_one(inner: Reducer, seed: int, count: int, before: int) -> None:
    per = PerObservation(inner, Product(all=Collect(), stats=Summary()))
    xs = stream(seed, [4] * (before + count))
    together = per.update_all(laws.run(per, xs[:before]), torch.stack(xs[before:]))
    laws.agree(per, together, laws.run(per, xs))


def test_results_that_differ_in_shape_are_reduced_one_by_one() -> None:
    varying = Sum().postmap(lambda total: torch.zeros(int(total.item())))
    per = PerObservation(varying, Sum())
    assert per.compute(per.update_all({}, torch.tensor([[1.0, 1.0], [3.0, 0.0]]))).tolist() == 0.0
    assert per.update_all({}, torch.zeros(3, 0)) == {}
