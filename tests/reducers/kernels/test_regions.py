"""An update of a big observation on the CPU makes few calls that PyTorch splits over threads: on a busy machine each waits."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from reducers import Activity, Extremes, Histogram, Mean, Moments, Norm, Quantile, Reducer, Summary
from reducers.core.statistic import Statistic
from reducers.kernels.cpp.library import sweep_for
from reducers.kernels.rows import row_moments, row_squares, row_sum

pytestmark = pytest.mark.usefixtures("with_and_without_a_compiler")

GRAIN = 1 << 15  # calls on fewer elements run in the thread of the caller
FREE = ("aten.empty", "aten.new_empty", "aten._local_scalar_dense", "aten.detach", "aten.alias")
TWICE = ("aten.bincount",)  # which takes the minimum and the maximum, and counts in the thread of the caller


class _Regions(TorchDispatchMode):
    """Counts the calls that are split over threads."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, call: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = call(*args, **(kwargs or {}))
        name = str(call)
        if not call.is_view and not name.startswith(FREE):
            tensors = [value for value in tree_leaves((args, kwargs, found)) if isinstance(value, Tensor)]
            if max((value.numel() for value in tensors), default=0) >= GRAIN:
                self.count += 2 if name.startswith(TWICE) else 1
        return found


def regions(reducer: Reducer, x: Tensor) -> int:
    state = reducer.update({}, x)
    with _Regions() as counted:
        reducer.update(state, x)
    return counted.count


@pytest.mark.parametrize(
    ("reducer", "most"),
    [(Mean(), 1), (Norm(), 1), (Extremes(), 1), (Moments(), 3), (Summary(), 5), (Quantile(), 13)],
    ids=lambda value: type(value).__name__ if isinstance(value, Reducer) else "",
)
def test_25_mb_take_a_handful_of_regions(reducer: Reducer, most: int) -> None:
    x = torch.randn(64, 128, 768, generator=torch.Generator().manual_seed(0))
    assert regions(reducer, x) <= most
    assert regions(reducer, x.permute(2, 0, 1)) <= most


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_far_from_zero_there_are_a_few_more(dtype: torch.dtype) -> None:
    x = torch.randn(64, 128, 768, generator=torch.Generator().manual_seed(0)).add_(5).to(dtype)
    assert regions(Moments(), x) <= 24
    assert regions(Summary(), x) <= 26


def test_a_small_observation_takes_none() -> None:
    assert regions(Summary(), torch.randn(GRAIN - 1)) == 0


def two_valued(share: float, mean: float, scale: float) -> Tensor:
    """Few magnitudes, whose rounding errors add up instead of averaging out."""
    drawn = torch.rand(1 << 17, generator=torch.Generator().manual_seed(1)) < share
    return (drawn.float() * 2 - 1 + mean).mul_(scale)


@pytest.mark.parametrize("mean", [0.0, 0.3, 0.69, 0.75, 3.0, 1e4])
@pytest.mark.parametrize("scale", [0.1, 1 / 3, 1.7])
@pytest.mark.parametrize("share", [0.5, 0.2])
def test_few_magnitudes_are_exact_wherever_their_mean_is(share: float, mean: float, scale: float) -> None:
    x = two_valued(share, mean, scale)
    wide = x.double()
    exact, m2 = wide.mean().item(), wide.var(correction=0).item() * x.numel()
    found = row_moments(x)
    assert found is not None
    assert abs(found[0] - exact) <= 1e-6 * wide.std().item()
    assert abs(found[1] / m2 - 1) <= 1e-6


def test_a_head_unlike_the_rest_is_found_out() -> None:
    x = torch.randn(1 << 18, generator=torch.Generator().manual_seed(0))
    for head, rest in ((0.0, 100.0), (100.0, 0.0)):
        y = x + rest
        y[: 1 << 15] += head - rest
        found = row_moments(y)
        assert found is not None
        assert found[1] == pytest.approx(y.double().var(correction=0).item() * y.numel(), rel=1e-6)


@pytest.mark.parametrize("size", [1, 127, 1024, 1025, 40_000, (1 << 22) + 129])
def test_what_does_not_fill_a_row_is_added_too(size: int) -> None:
    x = torch.rand(size, generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(row_sum(x), x.double().sum(), rtol=1e-7, atol=0)
    torch.testing.assert_close(row_squares(x), x.double().square().sum(), rtol=1e-6, atol=0)


@pytest.mark.parametrize("reducer", [Mean(), Norm(), Moments(), Summary(), Quantile()], ids=lambda reducer: type(reducer).__name__)
def test_bits_do_not_depend_on_the_number_of_threads(reducer: Reducer) -> None:
    x = torch.randn(1 << 20, generator=torch.Generator().manual_seed(0))
    threads = torch.get_num_threads()
    try:
        found = []
        for number in (1, 2):
            torch.set_num_threads(number)
            found.append(reducer.update({}, x))
    finally:
        torch.set_num_threads(threads)
    assert all(value.equal(found[1][key]) for key, value in found[0].items())


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["contiguous", "turned", "every other"])
@pytest.mark.parametrize("bits", [1, 5, 7])
@pytest.mark.parametrize("bounds", [(None, None), (1e-3, 1e3), (1e20, 1e30), (None, 1e200)], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_counts_of_patterns_are_those_of_buckets(
    dtype: torch.dtype, bounds: tuple[float | None, float | None], bits: int, layout: str
) -> None:
    low, high = bounds
    x = torch.randn(512, 1024, generator=torch.Generator().manual_seed(0))
    x = (x * torch.tensor([1.0, 1e-4, 1e4, 0.0, -0.0, 1e-40, 3.0, -8.0]).repeat(128)).to(dtype)
    x = {"contiguous": x, "turned": x.t(), "every other": x.repeat_interleave(2, 1)[:, ::2]}[layout]
    quantile = Quantile(bits=bits, low=low, high=high)
    found, plain = quantile.observe(x, (0, 1)), quantile.lift(x, (0, 1))
    assert all(found[key].equal(value) and found[key].dtype == value.dtype for key, value in plain.items())
    assert bits > 5 or regions(quantile, x) <= 10


@pytest.mark.parametrize("pattern", ["... d -> d", "b ... -> b", "b c d -> c"])
@pytest.mark.parametrize(
    "reducer", [Mean, Norm, Extremes, Moments, partial(Moments, order=4), Summary, partial(Activity, death=True)]
)
def test_the_loop_takes_kept_axes_in_one_region_of_its_own(
    reducer: Callable[[str], Statistic], pattern: str, with_and_without_a_compiler: str
) -> None:
    if with_and_without_a_compiler == "plain calls" or sweep_for(1, "Float32") is None:
        pytest.skip("of the loop")
    x = torch.randn(64, 128, 768, generator=torch.Generator().manual_seed(0))
    for observed in (x, x.bfloat16(), torch.where(x > 3, torch.nan, x)):
        assert regions(reducer(pattern), observed) == 0  # calls of PyTorch


@pytest.mark.parametrize(
    "reducer", [Quantile(), Histogram(bins=64, low=-4.0, high=4.0), Histogram(edges=(-1.0, 0.0, 1.0))], ids=repr
)
def test_the_loop_counts_bins_in_one_region_of_its_own(reducer: Statistic, with_and_without_a_compiler: str) -> None:
    if with_and_without_a_compiler == "plain calls" or sweep_for(1, "Float32") is None:
        pytest.skip("of the loop")
    x = torch.randn(64, 128, 768, generator=torch.Generator().manual_seed(0))
    for observed in (x, x.bfloat16(), torch.where(x > 3, torch.nan, x)):
        assert regions(reducer, observed) == 0
