"""An update of a big observation by a loop makes no call that PyTorch splits over threads: on a busy machine each would wait."""

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
from reducers.kernels.cpp.library import loop_for

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


@pytest.mark.parametrize("reducer", [Mean(), Norm(), Extremes(), Moments(), Summary(), Quantile()], ids=repr)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shift", [0, 5])
def test_25_mb_take_no_region_of_pytorch(
    shift: float, dtype: torch.dtype, reducer: Reducer, with_and_without_a_compiler: str
) -> None:
    if with_and_without_a_compiler == "plain calls" or loop_for("sweep", "Float32", 1) is None:
        pytest.skip("of the loop")
    x = torch.randn(64, 128, 768, generator=torch.Generator().manual_seed(0)).add_(shift).to(dtype)
    assert regions(reducer, x) == 0
    assert regions(reducer, x.permute(2, 0, 1)) == 0


def test_a_small_observation_takes_none() -> None:
    assert regions(Summary(), torch.randn(GRAIN - 1)) == 0


@pytest.mark.parametrize("reducer", [Mean(), Norm(), Moments(), Summary(), Quantile()], ids=lambda reducer: type(reducer).__name__)
def test_bits_do_not_depend_on_the_number_of_threads(reducer: Reducer, with_and_without_a_compiler: str) -> None:
    rtol = 1e-12 if with_and_without_a_compiler == "plain calls" or loop_for("sweep", "Float32", 1) is None else 0
    x = torch.randn(1 << 20, generator=torch.Generator().manual_seed(0))
    threads = torch.get_num_threads()
    try:
        found = []
        for number in (1, 2):
            torch.set_num_threads(number)
            found.append(reducer.update({}, x))
    finally:
        torch.set_num_threads(threads)
    torch.testing.assert_close(found[0], found[1], rtol=rtol, atol=rtol)  # PyTorch's own sums depend on it


@pytest.mark.parametrize("layout", ["contiguous", "turned", "every other"])
@pytest.mark.parametrize("bounds", [(None, None), (1e-3, 1e3), (1e20, 1e30), (None, 1e200)], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_counts_of_buckets_are_those_of_few_elements_each(
    dtype: torch.dtype, bounds: tuple[float | None, float | None], layout: str
) -> None:
    low, high = bounds
    x = torch.randn(64, 1024, generator=torch.Generator().manual_seed(0))
    x = (x * torch.tensor([1.0, 1e-4, 1e4, 0.0, -0.0, 1e-40, 3.0, -8.0]).repeat(128)).to(dtype)
    x = {"contiguous": x, "turned": x.t(), "every other": x.repeat_interleave(2, 1)[:, ::2]}[layout]
    quantile = Quantile(low=low, high=high)
    found, plain = quantile.update({}, x), quantile.merge_all([quantile.update({}, part) for part in x.split(16)])
    assert all(found[key].equal(value) and found[key].dtype == value.dtype for key, value in plain.items())


@pytest.mark.parametrize("pattern", ["... d -> d", "b ... -> b", "b c d -> c"])
@pytest.mark.parametrize(
    "reducer", [Mean, Norm, Extremes, Moments, partial(Moments, order=4), Summary, partial(Activity, death=True)]
)
def test_the_loop_takes_kept_axes_in_one_region_of_its_own(
    reducer: Callable[[str], Statistic], pattern: str, with_and_without_a_compiler: str
) -> None:
    if with_and_without_a_compiler == "plain calls" or loop_for("sweep", "Float32", 1) is None:
        pytest.skip("of the loop")
    x = torch.randn(64, 128, 768, generator=torch.Generator().manual_seed(0))
    for observed in (x, x.bfloat16(), torch.where(x > 3, torch.nan, x)):
        assert regions(reducer(pattern), observed) == 0  # calls of PyTorch


@pytest.mark.parametrize(
    "reducer", [Quantile(), Histogram(bins=64, low=-4.0, high=4.0), Histogram(edges=(-1.0, 0.0, 1.0))], ids=repr
)
def test_the_loop_counts_bins_in_one_region_of_its_own(reducer: Statistic, with_and_without_a_compiler: str) -> None:
    if with_and_without_a_compiler == "plain calls" or loop_for("sweep", "Float32", 1) is None:
        pytest.skip("of the loop")
    x = torch.randn(64, 128, 768, generator=torch.Generator().manual_seed(0))
    for observed in (x, x.bfloat16(), torch.where(x > 3, torch.nan, x)):
        assert regions(reducer, observed) == 0
