"""Singular values of weights and what follows from them: against NumPy, for convolutions, for weights that are not finite."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from recorders import ParameterMonitor, Recorder
from reducers import ArgumentError, Last, Mean, condition_number, singular_values, spectral_norm, stable_rank

FUNCTIONS = [condition_number, singular_values, spectral_norm, stable_rank]
each = pytest.mark.parametrize("function", FUNCTIONS, ids=lambda function: function.__name__)


@settings(max_examples=40)
@given(
    shape=st.lists(st.integers(1, 5), min_size=2, max_size=4),
    seed=st.integers(0, 2**31),
    dtype=st.sampled_from([torch.float32, torch.float64, torch.bfloat16, torch.complex64]),
)
def test_they_are_those_of_numpy(shape: list[int], seed: int, dtype: torch.dtype) -> None:
    weight = torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)
    matrix = weight.to(torch.complex128 if dtype.is_complex else torch.float64).reshape(shape[0], -1).numpy()
    values = np.linalg.svd(matrix, compute_uv=False)
    np.testing.assert_allclose(singular_values(weight).numpy(), values, rtol=1e-10, atol=1e-12 * values[0])
    assert spectral_norm(weight).item() == pytest.approx(values[0], rel=1e-12)
    assert stable_rank(weight).item() == pytest.approx(np.linalg.norm(matrix) ** 2 / values[0] ** 2, rel=1e-12)
    assert 1 - 1e-12 <= stable_rank(weight).item() <= len(values) + 1e-12
    if values[-1] > 1e-4 * values[0]:
        assert condition_number(weight).item() == pytest.approx(values[0] / values[-1], rel=1e-9)
    assert all(function(weight).dtype == torch.float64 for function in FUNCTIONS)


@pytest.mark.parametrize("p", [1, 2, math.inf, "fro", "nuc"])
def test_condition_numbers_of_every_order(p: float | str) -> None:
    weight = torch.randn(6, 6, generator=torch.Generator().manual_seed(0))
    matrix = weight.double().numpy()
    exact = np.linalg.norm(matrix, p) * np.linalg.norm(np.linalg.inv(matrix), p)
    assert condition_number(weight, p).item() == pytest.approx(exact, rel=1e-10)
    assert condition_number(torch.zeros(3, 3), p).item() == math.inf
    assert condition_number(torch.diag(torch.tensor([1.0, 0.0])), p).item() == math.inf
    assert math.isnan(condition_number(torch.full((2, 2), math.inf), p).item())


def test_the_condition_number_is_not_upside_down() -> None:
    """monitorch takes p=-2, for which torch gives the smallest over the largest singular value."""
    weight = torch.diag(torch.tensor([10.0, 1.0]))
    assert torch.linalg.cond(weight, -2).item() == pytest.approx(0.1)
    assert condition_number(weight).item() == 10
    for p in (-2, -1, -math.inf, 0, 3, math.nan, "2", None):
        with pytest.raises(ArgumentError, match="takes p = 1, 2, inf"):
            condition_number(weight, p)  # type: ignore[arg-type]
    with pytest.raises(ArgumentError, match=r"needs a square matrix and got \(2, 12\)"):
        condition_number(torch.randn(2, 3, 2, 2), p=1)


@each
@pytest.mark.parametrize("hole", [math.nan, math.inf, -math.inf])
def test_weights_that_are_not_finite_give_nan_and_raise_nothing(function: object, hole: float) -> None:
    weight = torch.eye(3)
    weight[1, 2] = hole
    assert function(weight).isnan().all()  # type: ignore[operator]
    assert weight[1, 2].item() == hole or math.isnan(hole)


def test_other_shapes() -> None:
    vector = torch.tensor([3.0, 4.0])
    assert singular_values(vector).tolist() == pytest.approx([5.0])
    assert spectral_norm(torch.tensor(-2.0)).item() == 2
    assert condition_number(vector).item() == 1
    assert math.isnan(stable_rank(torch.zeros(2, 2)).item())
    empty = torch.empty(0, 3)
    assert spectral_norm(empty).item() == 0
    assert math.isnan(condition_number(empty).item())
    assert singular_values(torch.ones(2, 2, dtype=torch.bool)).tolist() == pytest.approx([2.0, 0.0], abs=1e-15)


def test_a_rotation_is_well_conditioned() -> None:
    turn = torch.linalg.qr(torch.randn(7, 7, generator=torch.Generator().manual_seed(0)))[0]
    assert condition_number(turn).item() == pytest.approx(1, rel=1e-6)
    assert stable_rank(turn).item() == pytest.approx(7, rel=1e-6)


@each
def test_gradients_are_left_alone(function: object) -> None:
    layer = nn.Linear(3, 2)
    assert not function(layer.weight).requires_grad  # type: ignore[operator]


@pytest.mark.usefixtures("fresh_compiler")
@each
def test_it_traces(function: object) -> None:
    weight = torch.randn(3, 4)
    torch.testing.assert_close(torch.compile(function, backend="eager", fullgraph=True)(weight), function(weight))  # type: ignore[operator]


def test_on_parameters_and_before_reducers() -> None:
    net = nn.Sequential(nn.Conv2d(2, 3, 3), nn.Linear(4, 4))
    recorder = Recorder(ParameterMonitor(Last(), op_=spectral_norm, when="tick")).parameters(net, names="*weight")
    with recorder:
        for monitor in recorder.values():
            monitor.tick()
    exact = [torch.linalg.matrix_norm(layer.weight.detach().double().flatten(1), 2) for layer in net]
    torch.testing.assert_close([monitor.peek() for monitor in recorder.values()], exact)
    conditions = Mean().premap(condition_number)
    state = conditions.update(conditions.update({}, torch.diag(torch.tensor([10.0, 1.0]))), torch.eye(2))
    assert conditions.compute(state).item() == 5.5
