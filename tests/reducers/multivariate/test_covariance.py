"""Covariance and what is read off it: digits in any merge tree, rows left out, layouts, the spectrum, errors."""

from __future__ import annotations

import json
import math
import pickle
from collections.abc import Callable

import laws
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import reducers.kernels.chunks
from recorders import Cell
from reducers import (
    ArgumentError,
    Covariance,
    CrossCovariance,
    DTypeError,
    Moments,
    PatternError,
    ReducerTypeError,
    State,
    StateMismatchError,
    correlation,
    effective_rank,
    eigenvalues,
    explained_variance_ratio,
    from_recipe,
    intrinsic_dimension,
    participation_ratio,
    principal_axes,
    to_recipe,
)

READINGS = [correlation, eigenvalues, explained_variance_ratio, effective_rank, participation_ratio, intrinsic_dimension(0.9)]


def correlated(n: int, d: int, seed: int = 0, centre: float = 0.0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    mix = torch.eye(d) + 0.5 * torch.randn(d, d, generator=generator)
    return torch.randn(n, d, generator=generator) @ mix + centre


def relative(got: torch.Tensor, exact: np.ndarray) -> float:
    return float(np.abs(got.numpy() - exact).max() / np.abs(exact).max())


# Digits


@pytest.mark.parametrize("reducer", [Covariance(), Covariance(correction=0)], ids=str)
def test_far_from_zero_in_any_merge_tree(reducer: Covariance) -> None:
    x = correlated(20_000, 8, centre=1e4)
    exact = np.cov(x.numpy().astype(np.longdouble), rowvar=False, ddof=reducer.correction).astype(float)
    states = laws.lifts(reducer, x.split([1, 4999, 10_000, 37, 4963]))
    left = states[0]
    for state in states[1:]:
        left = reducer.merge(left, state)
    right = states[-1]
    for state in states[-2::-1]:
        right = reducer.merge(state, right)
    for state in (left, right, reducer.update({}, x), laws.run(reducer, x.split(3001))):
        assert relative(reducer.compute(state)["covariance"], exact) < 1e-10


def test_a_thousand_parts_merge_to_one_pass() -> None:
    x, y = correlated(20_000, 5, centre=3.0).double(), correlated(20_000, 3, seed=1).double()
    covariance, cross = Covariance(), CrossCovariance()
    whole = covariance.compute(covariance.update({}, x))
    laws.close(covariance.compute(merged_pairwise(covariance, laws.lifts(covariance, x.split(20)))), whole, rtol=1e-12, atol=1e-12)
    parts = [cross.update({}, *part) for part in zip(x.split(20), y.split(20), strict=True)]
    laws.close(cross.compute(merged_pairwise(cross, parts)), cross.compute(cross.update({}, x, y)), rtol=1e-12, atol=1e-12)


def merged_pairwise(reducer: Covariance | CrossCovariance, states: list[State]) -> State:
    while len(states) > 1:
        states = [reducer.merge(states[i], states[i + 1]) if i + 1 < len(states) else states[i] for i in range(0, len(states), 2)]
    return states[0]


def test_its_diagonal_is_the_variance() -> None:
    x = correlated(300, 4)
    moments = Moments("b d -> d")
    got = Covariance().compute(Covariance().update({}, x))["covariance"].diagonal()
    torch.testing.assert_close(got, moments.compute(moments.update({}, x))["var"], rtol=1e-13, atol=0)


def test_it_is_symmetric_to_the_bit() -> None:
    matrix = Covariance().compute(laws.run(Covariance(), correlated(1000, 33).split(100)))["covariance"]
    assert torch.equal(matrix, matrix.T)


def test_blocks_of_rows_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    x, y = correlated(101, 3), correlated(101, 2, seed=1)
    x[7, 1] = float("nan")
    whole = Covariance().compute(Covariance().update({}, x)), CrossCovariance().compute(CrossCovariance().update({}, x, y))
    monkeypatch.setattr(reducers.kernels.chunks, "CHUNK", 12)
    laws.close(Covariance().compute(Covariance().update({}, x)), whole[0], rtol=1e-13)
    laws.close(CrossCovariance().compute(CrossCovariance().update({}, x, y)), whole[1], rtol=1e-13)


# Layouts and rows


def test_patterns_say_what_is_a_row() -> None:
    x = torch.randn(4, 3, 5, 2)
    channels = Covariance("b c h w -> c")
    exact = np.cov(x.double().movedim(1, 0).reshape(3, -1).numpy())
    assert relative(channels.compute(channels.update({}, x))["covariance"], exact) < 1e-13
    everything = Covariance("b ... -> (...)")
    exact = np.cov(x.double().reshape(4, -1).numpy(), rowvar=False)
    assert relative(everything.compute(everything.update({}, x))["covariance"], exact) < 1e-13


def test_rows_with_holes_are_left_out_and_counted() -> None:
    x = torch.tensor([[1.0, 2.0], [float("nan"), 9.0], [3.0, 1.0], [float("inf"), float("nan")], [5.0, 6.0]])
    result = Covariance().compute(Covariance().update({}, x))
    kept = x[torch.isfinite(x).all(dim=1)].double()
    assert (result["count"].item(), result["nonfinite"].item()) == (3, 2)
    torch.testing.assert_close(result["covariance"], kept.T.cov())
    torch.testing.assert_close(result["mean"], kept.mean(dim=0))


def test_a_hole_in_one_tensor_leaves_out_the_pair() -> None:
    x, y = torch.randn(6, 2), torch.randn(6, 3)
    x[1, 0], y[4, 2] = float("nan"), -float("inf")
    result = CrossCovariance().compute(CrossCovariance().update({}, x, y))
    assert (result["count"].item(), result["nonfinite"].item()) == (4, 2)
    kept = [0, 2, 3, 5]
    exact = np.cov(torch.cat((x, y), dim=1)[kept].double().numpy(), rowvar=False)
    assert relative(result["covariance"], exact[:2, 2:]) < 1e-13
    np.testing.assert_allclose(result["var_y"].numpy(), exact.diagonal()[2:], rtol=1e-13)


def test_one_row_has_a_mean_and_no_covariance() -> None:
    result = Covariance().compute(Covariance().update({}, torch.tensor([[1.0, 2.0]])))
    assert result["mean"].tolist() == [1.0, 2.0]
    assert result["covariance"].isnan().all()
    result = Covariance(correction=0).compute(Covariance(correction=0).update({}, torch.tensor([[1.0, 2.0]])))
    assert result["covariance"].tolist() == [[0.0, 0.0], [0.0, 0.0]]


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.uint16, torch.uint32, torch.int8, torch.bool, torch.bfloat16])
def test_dtypes_are_widened(dtype: torch.dtype) -> None:
    x = torch.tensor([[0.0, 1.0], [1.0, 0.0], [1.0, 1.0]]).to(dtype)
    assert relative(Covariance().compute(Covariance().update({}, x))["covariance"], np.cov(x.double().numpy().T)) < 1e-14


def test_two_layers_meet_in_a_cell() -> None:
    cell = Cell(CrossCovariance())
    x = torch.randn(10, 2)
    for part in x.split(3):
        cell.push(part, part.flip(1))
    torch.testing.assert_close(cell.peek()["covariance"], x.double().T.cov().flip(1))


# Correlation and spectrum


def test_correlations_are_those_of_numpy() -> None:
    x, y = correlated(200, 4, centre=50.0), correlated(200, 3, seed=1)
    got = Covariance().postmap(correlation).compute(Covariance().update({}, x))
    assert relative(got, np.corrcoef(x.double().numpy(), rowvar=False)) < 1e-12
    assert torch.equal(got.diagonal(), torch.ones(4, dtype=torch.float64))
    across = correlation(CrossCovariance().compute(CrossCovariance().update({}, x, y)))
    assert relative(across, np.corrcoef(x.double().numpy(), y.double().numpy(), rowvar=False)[:4, 4:]) < 1e-12


def test_constant_features_have_no_correlation() -> None:
    x = torch.stack((torch.arange(5.0), torch.full((5,), 0.1), -torch.arange(5.0)), dim=1).double()
    got = correlation(Covariance().compute(laws.run(Covariance(), x.split(2))))
    assert got[1].isnan().all()
    assert got[:, 1].isnan().all()
    torch.testing.assert_close(got[[0, 2]][:, [0, 2]], torch.tensor([[1.0, -1.0], [-1.0, 1.0]], dtype=torch.float64))


def test_the_spectrum_of_a_known_matrix() -> None:
    spectrum = torch.tensor([8.0, 4.0, 2.0, 2.0, 0.0], dtype=torch.float64)
    turn = torch.linalg.qr(torch.randn(5, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(0)))[0]
    matrix = turn @ spectrum.diag() @ turn.T
    torch.testing.assert_close(eigenvalues(matrix), spectrum, rtol=1e-12, atol=1e-12)
    assert (eigenvalues(matrix) >= 0).all()
    torch.testing.assert_close(explained_variance_ratio(matrix), spectrum / 16, rtol=1e-12, atol=1e-12)
    assert participation_ratio(matrix).item() == pytest.approx(256 / 88, rel=1e-12)
    entropy = -(0.5 * math.log(0.5) + 0.25 * math.log(0.25) + 2 * 0.125 * math.log(0.125))
    assert effective_rank(matrix).item() == pytest.approx(math.exp(entropy), rel=1e-12)


@pytest.mark.parametrize(("threshold", "needed"), [(0.1, 1), (0.5, 1), (0.51, 2), (0.75, 2), (0.8, 3), (0.9, 4), (1.0, 4)])
def test_the_component_that_crosses_the_threshold_is_included(threshold: float, needed: int) -> None:
    spectrum = torch.tensor([8.0, 4.0, 2.0, 2.0, 0.0])
    assert intrinsic_dimension(threshold)(spectrum.diag()).item() == needed


def test_intrinsic_dimension_counts_one_more_than_delve() -> None:
    """delve counts the components whose cumulated share is still below the threshold, and so gives 0 for data on a line."""
    line = torch.arange(10.0).unsqueeze(1) * torch.tensor([1.0, 2.0, 3.0])
    result = Covariance().compute(Covariance().update({}, line))
    assert (explained_variance_ratio(result).cumsum(0) < 0.99).sum().item() == 0
    assert intrinsic_dimension(0.99)(result).item() == 1


@settings(max_examples=30)
@given(seed=st.integers(0, 2**31), d=st.integers(1, 6), scale=st.floats(1e-6, 1e6))
def test_dimensions_lie_in_their_bounds_and_do_not_see_turns_and_scale(seed: int, d: int, scale: float) -> None:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(20, d, dtype=torch.float64, generator=generator)
    turn = torch.linalg.qr(torch.randn(d, d, dtype=torch.float64, generator=generator))[0]
    one, other = (Covariance().compute(Covariance().update({}, z)) for z in (x, scale * x @ turn))
    for reading in (effective_rank, participation_ratio):
        assert 1 - 1e-12 <= reading(one).item() <= d + 1e-12
        assert reading(other).item() == pytest.approx(reading(one).item(), rel=1e-9)
    assert participation_ratio(one).item() <= effective_rank(one).item() + 1e-12
    assert 1 <= intrinsic_dimension(0.9)(one).item() <= d


def test_principal_axes_are_those_of_a_one_shot_decomposition() -> None:
    x = correlated(200, 5)
    values, vectors = principal_axes(Covariance().compute(Covariance().update({}, x)))
    centred = (x - x.mean(dim=0)).double()
    _, singular, right = torch.linalg.svd(centred)
    torch.testing.assert_close(values, singular.square() / 199, rtol=1e-6, atol=1e-9)
    torch.testing.assert_close((vectors.T @ right.T).abs(), torch.eye(5, dtype=torch.float64), rtol=0, atol=1e-5)
    torch.testing.assert_close((centred @ vectors).var(dim=0), values, rtol=1e-6, atol=1e-9)
    assert (vectors.gather(0, vectors.abs().argmax(dim=0, keepdim=True)) > 0).all()
    assert principal_axes(torch.zeros(0, 0)).vectors.shape == (0, 0)
    assert all(part.isnan().all() for part in principal_axes(torch.full((3, 3), torch.nan)))
    with pytest.raises(ArgumentError, match=r"covariance matrix \[d, d\]"):
        principal_axes(torch.ones(2, 3))


@pytest.mark.parametrize("reading", READINGS, ids=lambda reading: getattr(reading, "__name__", repr(reading)))
def test_what_is_not_defined_is_nan_and_raises_nothing(reading: Callable[..., torch.Tensor]) -> None:
    constant = Covariance().compute(Covariance().update({}, torch.full((7, 3), 0.1)))
    single = Covariance().compute(Covariance().update({}, torch.ones(1, 3)))
    holes = torch.eye(3)
    holes[0, 1] = float("nan")
    for undefined in (constant, single, holes, torch.full((3, 3), float("inf"))):
        got = reading(undefined)
        if isinstance(reading, intrinsic_dimension):
            assert got.item() == 0
        elif undefined is constant and reading is eigenvalues:
            assert got.tolist() == [0.0, 0.0, 0.0]
        elif undefined is holes and reading is correlation:
            assert got[0, 1].isnan()
        else:
            assert got.isnan().all()


@pytest.mark.parametrize("reading", READINGS, ids=lambda reading: getattr(reading, "__name__", repr(reading)))
def test_readings_are_plain_and_survive_pickling(reading: Callable[..., torch.Tensor]) -> None:
    reducer = Covariance().postmap(reading)
    copied = pickle.loads(pickle.dumps(reducer))
    assert copied == reducer
    state = reducer.update({}, correlated(20, 3))
    laws.same_bits(copied.compute(state), reducer.compute(state))
    laws.same_bits(reading(Covariance().compute(state)["covariance"]), reducer.compute(state))
    with pytest.raises(ArgumentError, match=r"covariance matrix \[d, d\]"):
        reading(torch.ones(2, 3))


# Errors


@pytest.mark.parametrize("pattern", ["... ->", "b c h -> c h", "b ... -> ...", "b ... d -> ... d", "b -> 1"])
def test_one_axis_is_kept(pattern: str) -> None:
    with pytest.raises(PatternError, match="must keep one axis"):
        Covariance(pattern)
    with pytest.raises(PatternError, match="must keep one axis"):
        CrossCovariance("b d -> d", pattern)


def test_rows_must_be_pairs() -> None:
    with pytest.raises(PatternError, match="in different orders"):
        CrossCovariance("b t d -> d", "t b d -> d")
    tokens_and_pixels = CrossCovariance("b t d -> d", "b c h w -> c")
    tokens_and_pixels.update({}, torch.randn(2, 6, 3), torch.randn(2, 4, 3, 2))
    with pytest.raises(PatternError, match=r"\(2, 6, 3\) has 12 and \(2, 4, 3, 3\) has 18"):
        tokens_and_pixels.update({}, torch.randn(2, 6, 3), torch.randn(2, 4, 3, 3))


def test_errors_name_their_cause() -> None:
    with pytest.raises(ArgumentError, match=r"CrossCovariance takes a finite correction"):
        CrossCovariance(correction=-1)
    with pytest.raises(ArgumentError, match="Covariance takes a finite correction"):
        Covariance(correction=math.nan)
    with pytest.raises(ArgumentError, match="threshold above 0 and at most 1"):
        intrinsic_dimension(0)
    without_a_threshold = Covariance().postmap(intrinsic_dimension)
    with pytest.raises(ArgumentError, match=r"got a covariance: write \.postmap\(intrinsic_dimension\(0\.99\)\)"):
        without_a_threshold.compute(without_a_threshold.update({}, torch.ones(2, 2)))
    with pytest.raises(DTypeError, match=r"view_as_real"):
        Covariance().update({}, torch.ones(2, 2, dtype=torch.complex64))
    with pytest.raises(DTypeError, match="uint64"):
        Covariance().update({}, torch.ones(2, 2, dtype=torch.uint64))
    with pytest.raises(ReducerTypeError, match=r"two tensors at a time; got \(Tensor\)"):
        CrossCovariance().update({}, torch.ones(2, 2))
    state = CrossCovariance().update({}, torch.ones(2, 2), torch.ones(2, 3))
    with pytest.raises(StateMismatchError, match="the kept axes must not change"):
        CrossCovariance().update(state, torch.ones(2, 2), torch.ones(2, 4))


def test_complex_numbers_as_the_error_says() -> None:
    x = torch.randn(9, 2, dtype=torch.complex64)
    parts = Covariance("b d part -> (d part)").premap(torch.view_as_real)
    assert (
        relative(parts.compute(parts.update({}, x))["covariance"], np.cov(torch.view_as_real(x).double().reshape(9, 4).T)) < 1e-13
    )


@pytest.mark.parametrize("reducer", [Covariance("b c h -> (c h)", 0), CrossCovariance("b p -> p", "b q t -> (q t)", 0.5)], ids=str)
def test_recipes(reducer: Covariance | CrossCovariance) -> None:
    assert from_recipe(json.loads(json.dumps(to_recipe(reducer)))) == reducer
    laws.copies(reducer)
