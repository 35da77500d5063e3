"""Histogram: edges as NumPy has them, exactly, for all dtypes, and nothing lost."""

from __future__ import annotations

from functools import reduce

import laws
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from reducers import ArgumentError, DTypeError, Histogram
from reducers.distributions import histogram as histograms


def counted(histogram: Histogram, x: Tensor) -> dict[str, Tensor]:
    return histogram.compute(histogram.update({}, x))


def assert_like_numpy(histogram: Histogram, x: Tensor) -> None:
    result = counted(histogram, x)
    values, edges = x.double().numpy(), result["edges"].numpy()
    np.testing.assert_array_equal(result["counts"].numpy(), np.histogram(values[~np.isnan(values)], bins=edges)[0])
    assert result["under"] == (values < edges[0]).sum()
    assert result["over"] == (values > edges[-1]).sum()
    assert result["nan"] == np.isnan(values).sum()
    assert sum(int(result[name].sum()) for name in ("counts", "under", "over", "nan")) == x.numel()


@settings(max_examples=80)
@given(
    values=st.lists(st.floats(width=32) | st.integers(-8, 8).map(lambda i: i / 4), min_size=1, max_size=60),
    bins=st.integers(1, 40),
    ends=st.tuples(st.floats(-100, 100), st.floats(0.01, 100)),
    dtype=st.sampled_from((torch.float64, torch.float32, torch.bfloat16)),
)
def test_equal_bins_are_those_of_numpy(values: list[float], bins: int, ends: tuple[float, float], dtype: torch.dtype) -> None:
    low, high = ends[0], ends[0] + ends[1]
    histogram = Histogram(bins=bins, low=low, high=high)
    np.testing.assert_array_equal(counted(histogram, torch.zeros(1))["edges"].numpy(), np.linspace(low, high, bins + 1))
    assert_like_numpy(histogram, torch.tensor(values, dtype=torch.float64).to(dtype))


@settings(max_examples=80)
@given(
    values=st.lists(st.floats() | st.integers(-8, 8).map(lambda i: i / 4), min_size=1, max_size=60),
    edges=st.lists(st.floats(allow_nan=False, allow_infinity=False), min_size=2, max_size=10, unique=True).map(sorted).map(tuple),
    dtype=st.sampled_from((torch.float64, torch.float32)),
)
def test_any_edges_are_those_of_numpy(values: list[float], edges: tuple[float, ...], dtype: torch.dtype) -> None:
    x = torch.cat((torch.tensor(values, dtype=torch.float64), torch.tensor(edges, dtype=torch.float64))).to(dtype)
    assert_like_numpy(Histogram(edges=edges), x)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_elements_on_and_next_to_an_edge(dtype: torch.dtype) -> None:
    for histogram in (
        Histogram(bins=7, low=0.1, high=0.8),
        Histogram(bins=1000, low=-1.0, high=1.0),
        Histogram(edges=(0.1, 0.3, 0.7)),
    ):
        edges = counted(histogram, torch.zeros(1))["edges"].to(dtype)
        infinity = torch.tensor(torch.inf, dtype=dtype)
        assert_like_numpy(histogram, torch.cat((edges, edges.nextafter(infinity), edges.nextafter(-infinity))))


def test_bins_too_narrow_to_calculate_their_number() -> None:
    histogram = Histogram(bins=64, low=1e6, high=1e6 + 1)  # in float32 sixteen edges fall together
    x = 1e6 + torch.rand(1000, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    assert_like_numpy(histogram, x)
    assert_like_numpy(histogram, x.float())


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.bool, torch.uint16])
def test_integers(dtype: torch.dtype) -> None:
    assert_like_numpy(Histogram(bins=5, low=0.0, high=50.0), torch.arange(0, 100).to(dtype))


def test_float8() -> None:
    x = torch.linspace(-3, 3, 50).to(torch.float8_e4m3fn)
    assert_like_numpy(Histogram(bins=5, low=-2.0, high=2.0), x)


def test_units_and_big_tensors() -> None:
    x = torch.randn(40, 64, 128, generator=torch.Generator().manual_seed(0))
    histogram = Histogram("b c d -> c", bins=16, low=-3.0, high=3.0)
    state = histogram.update({}, x)
    for unit in (0, 63):
        expected = np.histogram(x[:, unit].double().numpy(), bins=np.linspace(-3, 3, 17))[0]
        np.testing.assert_array_equal(histogram.compute(state)["counts"][unit].numpy(), expected)
    laws.same_bits(reduce(histogram.merge, [histogram.update({}, part) for part in x.split(7)]), state)
    x[3, 5, 7] = float("nan")
    result = counted(histogram, x)
    assert result["nan"].sum() == result["nan"][5] == 1
    assert state["counts"].sum() == x.numel()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({}, "either edges, or"),
        ({"bins": 4}, "either edges, or"),
        ({"bins": 0, "low": 0.0, "high": 1.0}, "bins, an integer from 1"),
        ({"bins": 4, "low": 1.0, "high": 0.0}, "cannot fit"),
        ({"bins": 4, "low": 0.0, "high": float("inf")}, "finite low and high"),
        ({"bins": 4, "low": 1.0, "high": 1.0 + 2**-52}, "cannot fit"),
        ({"edges": (1.0,)}, "at least two"),
        ({"edges": (1.0, 1.0)}, "strictly increasing"),
        ({"edges": (2**53, 2**53 + 1)}, "strictly increasing as floats"),
        ({"edges": (0, 10**400)}, "finite edges"),
        ({"bins": 4, "low": 0.0, "high": 10**400}, "finite low and high"),
        ({"edges": (0.0, float("nan"))}, "finite edges"),
        ({"edges": (0.0, 1.0), "low": 0.0}, "got both"),
    ],
)
def test_arguments(arguments: dict[str, object], message: str) -> None:
    with pytest.raises(ArgumentError, match=message):
        Histogram(**arguments)  # type: ignore[arg-type]


def test_edges_of_forgotten_histograms_are_not_kept_on_a_cpu() -> None:
    kept = histograms._kept_bounds.cache_info().currsize
    for edge in range(200):
        Histogram(edges=(0.0, 1.0 + edge)).update({}, torch.ones(1 << 14))
    assert histograms._kept_bounds.cache_info().currsize == kept
    assert histograms._recent_bounds.cache_info().currsize <= 64


def test_complex_numbers_have_no_order() -> None:
    with pytest.raises(DTypeError, match="no order"):
        Histogram(edges=(0.0, 1.0)).update({}, torch.ones(2, dtype=torch.complex64))


@pytest.mark.parametrize(
    "ends", [(-1e300, 1e300), (-1e39, 1e39), (-3e38, 3e38), (0.0, 1e39), (0.0, 1e-44), (-1e-40, 1e-40), (-1e-38, 2e-38)]
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_equal_bins_that_float32_can_hardly_hold(dtype: torch.dtype, ends: tuple[float, float]) -> None:
    low, high = ends
    shares = torch.linspace(-0.1, 1.1, 97, dtype=torch.float64)
    x = torch.cat((low * (1 - shares) + high * shares, torch.tensor([0.0, torch.inf, -torch.inf, torch.nan]))).to(dtype)
    for observed in (x, x.repeat(100)):  # by PyTorch's calls, and by the loop
        assert_like_numpy(Histogram(bins=7, low=low, high=high), observed)
