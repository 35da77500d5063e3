"""Distances, digests and lines."""

from __future__ import annotations

import math

import pytest
import torch

from recorders.watch.divergence.distance import distance, tolerance_of
from recorders.watch.divergence.operators import digest, rounding


def test_distances_are_relative_to_the_largest_magnitude() -> None:
    a = torch.tensor([1.0, -8.0])
    assert distance(a, a) == 0
    assert distance(a, torch.tensor([2.0, -8.0])) == 1 / 8
    assert distance(a, torch.zeros(3)) == math.inf
    assert distance(torch.tensor([1, 2]), torch.tensor([1, 3])) == 1
    assert distance(torch.tensor([1 + 2j]), torch.tensor([1 + 1j])) == 0.5
    assert distance(torch.empty(0), torch.empty(0)) == 0


def test_nan_and_infinity_must_be_at_the_same_places() -> None:
    a = torch.tensor([1.0, math.nan, math.inf, -math.inf])
    assert distance(a, a.clone()) == 0
    for wrong in (math.nan, 1.0, -math.inf):
        b = a.clone()
        b[2] = wrong
        assert distance(a, b) == math.inf
        assert distance(b, a) == math.inf


@pytest.mark.parametrize("fill", [-1e9, torch.finfo(torch.float32).min])
def test_what_fills_a_mask_hides_no_difference(fill: float) -> None:
    a = torch.tensor([1.0, 2.0, fill, fill])
    assert distance(a, torch.tensor([1.0, 3.0, fill, fill])) == pytest.approx(1 / 3)


def test_the_tolerance_grows_with_the_root_of_the_operators_and_the_coarser_dtype() -> None:
    exact, half = tolerance_of([torch.float32], None), tolerance_of([torch.float32, torch.bfloat16], None)
    assert exact(4) == 2 * exact(1) < 5e-6
    assert 0.0156 < half(1) < 0.016
    assert tolerance_of([torch.float32], 0.1)(100) == 0.1


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64, torch.int64, torch.bool, torch.complex64])
def test_a_digest_knows_bits_their_order_and_the_shape(dtype: torch.dtype) -> None:
    x = (torch.arange(60) % 7).to(dtype).reshape(5, 12)
    same = x.T.contiguous().T
    assert digest(x) == digest(same) == digest(x.clone())
    others = [x.flip(0), x.reshape(12, 5), x.T]
    assert all(digest(x) != digest(other) for other in others)


def test_a_digest_of_many_elements_is_that_of_all() -> None:
    x = torch.zeros(3_000_000)
    before = digest(x)
    x[2_900_000] = 1e-30
    assert digest(x) != before


def test_rounding_moves_by_about_an_eps_and_draws_no_random_numbers() -> None:
    x, state = torch.randn(1000), torch.get_rng_state()
    with rounding(None):
        near = x * 1
    with rounding(torch.bfloat16):
        coarse = x * 1
        infinite = torch.tensor([math.inf, -math.inf]) + 1
    assert 0 < distance(x, near) < 3e-7
    assert bool((coarse == x.bfloat16().float()).all())
    assert infinite.tolist() == [math.inf, -math.inf]
    assert bool((state == torch.get_rng_state()).all())
