"""Skewness and kurtosis: definitions, digits, any merge tree; and the share of zeros."""

from __future__ import annotations

import math

import laws
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from reducers import ArgumentError, DTypeError, Moments, Norm, Sparsity, State, from_recipe

SHAPE = Moments(order=4)


def tree(reducer: Moments, states: list[State], rng: np.random.Generator) -> State:
    """Neighbours merged in random order until one is left."""
    states = list(states)
    while len(states) > 1:
        i = int(rng.integers(len(states) - 1))
        states[i : i + 2] = [reducer.merge(states[i], states[i + 1])]
    return states[0]


@pytest.mark.parametrize(
    "sample",
    [
        lambda rng: rng.normal(size=5000),
        lambda rng: rng.exponential(size=5000),
        lambda rng: rng.standard_t(3, size=5000),
        lambda rng: rng.integers(0, 9, size=5000).astype(float),
        lambda rng: rng.normal(size=5000) + 1e4,
    ],
    ids=["normal", "exponential", "student", "integers", "offset"],
)
def test_definitions_are_those_of_scipy(sample: object) -> None:
    x = sample(np.random.default_rng(0))  # type: ignore[operator]
    result = SHAPE.compute(laws.run(SHAPE, torch.from_numpy(x).split(777)))
    wide = x.astype(np.longdouble)
    np.testing.assert_allclose(result["skewness"].item(), float(stats.skew(wide)), rtol=1e-10, atol=1e-10)
    np.testing.assert_allclose(result["kurtosis"].item(), float(stats.kurtosis(wide)), rtol=1e-10, atol=1e-10)
    np.testing.assert_allclose(result["var"].item(), x.var(ddof=1), rtol=1e-12)


def test_a_thousand_parts_merge_to_one_pass() -> None:
    x = torch.randn(40_000, dtype=torch.float64, generator=torch.Generator().manual_seed(0)).exp()
    whole = SHAPE.compute(SHAPE.update({}, x))
    states = laws.lifts(SHAPE, x.split(40))
    for seed in range(3):
        merged = SHAPE.compute(tree(SHAPE, states, np.random.default_rng(seed)))
        laws.close(merged, whole, rtol=1e-12, atol=0)


@settings(max_examples=20)
@given(seed=st.integers(0, 2**31), scale=st.floats(1e-3, 1e3), shift=st.floats(-1e3, 1e3))
def test_shape_does_not_depend_on_place_and_scale(seed: int, scale: float, shift: float) -> None:
    x = torch.randn(50, dtype=torch.float64, generator=torch.Generator().manual_seed(seed)).square()
    before, after, mirrored = (SHAPE.compute(SHAPE.update({}, y)) for y in (x, x * scale + shift, -x))
    bound = 1e-12 * (1 + abs(shift) / scale)
    assert after["skewness"].item() == pytest.approx(before["skewness"].item(), rel=bound)
    assert after["kurtosis"].item() == pytest.approx(before["kurtosis"].item(), rel=10 * bound)
    assert mirrored["skewness"].item() == pytest.approx(-before["skewness"].item(), rel=1e-12)


@pytest.mark.parametrize("x", [torch.full((1001,), 0.1, dtype=torch.float64), torch.tensor([3.0]), torch.zeros(4)], ids=len)
def test_what_does_not_vary_has_no_shape(x: torch.Tensor) -> None:
    result = SHAPE.compute(laws.run(SHAPE, x.split(7)))
    assert math.isnan(result["skewness"].item())
    assert math.isnan(result["kurtosis"].item())
    assert result["mean"].item() == pytest.approx(x[0].item(), rel=1e-14)


def test_orders_nest() -> None:
    x = torch.randn(9, 3)
    results = [Moments("b c -> c", order=order).compute(Moments("b c -> c", order=order).update({}, x)) for order in (2, 3, 4)]
    assert [list(result) for result in results] == [
        ["count", "mean", "var", "std"],
        ["count", "mean", "var", "std", "skewness"],
        ["count", "mean", "var", "std", "skewness", "kurtosis"],
    ]
    for result in results[1:]:
        laws.close({name: result[name] for name in results[0]}, results[0], rtol=1e-14, atol=0)


def test_recipes_from_before_there_were_orders_still_load() -> None:
    assert from_recipe({"type": "Moments", "pattern": "b c -> c", "correction": 0}) == Moments("b c -> c", 0)


@pytest.mark.parametrize("order", [1, 5, 2.0, "3", None])
def test_orders_out_of_range(order: object) -> None:
    with pytest.raises(ArgumentError, match="order 2, 3 or 4"):
        Moments(order=order)  # type: ignore[arg-type]


def test_complex_numbers_have_no_skewness() -> None:
    with pytest.raises(DTypeError, match=r"complex64.*use order=2"):
        Moments(order=3).update({}, torch.ones(2, dtype=torch.complex64))


def test_sparsity() -> None:
    x = torch.tensor([[0.0, -0.0, 1e-9, -2.0], [0.0, 5.0, float("nan"), float("inf")]])
    assert Sparsity().compute(Sparsity().update({}, x)).item() == 0.5
    near = Sparsity("b c -> c", eps=1e-8)
    assert near.compute(near.update({}, x)).tolist() == [1.0, 0.5, 1.0, 0.0]
    assert Sparsity(eps=127).compute(Sparsity(eps=127).update({}, torch.tensor([-128, 5], dtype=torch.int8))).item() == 0.5
    assert math.isnan(Sparsity().compute(Sparsity().update({}, torch.tensor([float("nan")]))).item())
    assert Sparsity().compute(Sparsity().update({}, torch.tensor([False, True, False, False]))).item() == 0.75
    with pytest.raises(ArgumentError, match="Sparsity takes eps from 0 up"):
        Sparsity(eps=-1)


@settings(max_examples=30)
@given(seed=st.integers(0, 2**31), p=st.sampled_from([0.0, 0.5, 1.0, 2.0, 4.0, math.inf]))
def test_norms_are_those_of_torch(seed: int, p: float) -> None:
    x = torch.randn(37, generator=torch.Generator().manual_seed(seed)).mul(3).round()
    norm, mean = Norm(p=p), Norm(p=p, normalize=True)
    exact = torch.linalg.vector_norm(x.double(), p)
    torch.testing.assert_close(norm.compute(laws.run(norm, x.split(5))), exact, rtol=1e-12, atol=0)
    size = {0.0: 37.0, math.inf: 1.0}.get(p) or 37 ** (1 / p)
    torch.testing.assert_close(mean.compute(laws.run(mean, x.split(5))), exact / size, rtol=1e-12, atol=0)
