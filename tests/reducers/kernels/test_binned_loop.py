"""The loop that counts bins against PyTorch's calls: layouts, ways to cut the work, dtypes, what is not finite, and edges."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from test_loop import DATA, LAYOUTS
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from reducers import Histogram, Quantile, State
from reducers.kernels import counting
from reducers.kernels.cpp import library
from reducers.kernels.cpp.binned import looped_bits

pytestmark = pytest.mark.skipif(not library.in_order(), reason="no C++ compiler")

NORMAL = (-126, 128)
TENTHS = tuple(tenth / 10 for tenth in range(-31, 28))
REDUCERS: dict[str, Quantile | Histogram] = {
    "quantile": Quantile(),
    "quantile of a range": Quantile(bits=7, low=1e-3, high=2.0),
    "bins of one width": Histogram(bins=37, low=-2.3, high=2.9),
    "edges": Histogram(edges=TENTHS),
    "two edges": Histogram(edges=(-0.5, 0.25)),
    "an edge at the end of float32": Histogram(edges=(-1.0, 0.0, 1e39)),
}


@pytest.fixture
def compared(monkeypatch: pytest.MonkeyPatch) -> Callable[[Quantile | Histogram, Tensor, tuple[int, ...]], State]:
    """Asserts that the loop and PyTorch's calls find the same; returns what they found."""

    def compare(reducer: Quantile | Histogram, x: Tensor, axes: tuple[int, ...]) -> State:
        found = reducer.swept(x, axes, {})
        with monkeypatch.context() as patch:
            patch.setattr(counting, "looped_bits", lambda *_: None)
            patch.setattr(counting, "looped_edges", lambda *_: None)
            plain = reducer.lift(x, axes)
        assert found is not None
        assert found.keys() == plain.keys()
        for key, value in plain.items():
            assert found[key].dtype is value.dtype
            assert found[key].is_contiguous()
            assert torch.equal(found[key], value), key
        return found

    return compare


@pytest.mark.parametrize("reducer", REDUCERS)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_layout(layout: str, reducer: str, compared: Any) -> None:
    make, axes = LAYOUTS[layout]
    compared(REDUCERS[reducer], make(), axes)


@pytest.mark.slow
@pytest.mark.parametrize("reducer", REDUCERS)
@pytest.mark.parametrize("data", DATA)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_dtypes_and_data(dtype: torch.dtype, data: str, reducer: str, compared: Any) -> None:
    x = DATA[data](torch.randn(13, 41, 35)).to(dtype)
    for axes in ((0, 1, 2), (0, 1), (0, 2)):
        compared(REDUCERS[reducer], x, axes)


@pytest.mark.parametrize("bits", [1, 5, 12])
@pytest.mark.parametrize("bounds", [(None, None), (1e-3, 1e3), (1e20, 1e30), (None, 1e200), (2.0**-126, 1.0)], ids=str)
def test_magnitudes_of_all_sizes(bounds: tuple[float | None, float | None], bits: int, compared: Any) -> None:
    sizes = [1.0, 0.0, -0.0, 1e-40, -1e-45, 2.0**-126, 1e-30, 1e30, 3.4e38, torch.inf, -torch.inf, torch.nan]
    x = torch.randn(300, 12) * torch.tensor(sizes)
    low, high = bounds
    compared(Quantile(bits=bits, low=low, high=high), x, (0, 1))


def test_ranges_below_what_float32_holds_are_left_to_float64() -> None:
    assert looped_bits(torch.randn(100, 100), (0, 1), 5, (-127, 128), {}) is None
    x = torch.tensor([1e-41, 3e-42]).repeat(5_000)
    assert Quantile(q=1.0, low=1e-45).compute(Quantile(low=1e-45).update({}, x)) == x[0].double()


@pytest.mark.slow
@pytest.mark.parametrize("reducer", REDUCERS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_so_many_zeros_that_each_lane_counts_its_own(
    dtype: torch.dtype, reducer: str, compared: Any, at_several_threads: Callable[[Callable[[], Any]], list[Any]]
) -> None:
    x = torch.randn(6, 90_001).relu()
    x[0] = 0
    x[1] = torch.randn(90_001)  # rows with and without them are counted in two ways
    x[2, ::7] = torch.nan
    x[3, 5:9] = -torch.inf
    at_several_threads(lambda: [compared(REDUCERS[reducer], x.to(dtype), axes) for axes in ((0, 1), (1,))])


@pytest.mark.parametrize("reducer", REDUCERS)
def test_threads_that_share_blocks_count_alike(reducer: str, at_several_threads: Callable[[Callable[[], Any]], list[Any]]) -> None:
    x, few = torch.randn(6, 70_000), torch.randn(50_000, 9)
    x[::2, ::99] = torch.nan
    kind = REDUCERS[reducer]
    one, *others = at_several_threads(lambda: [kind.swept(x, (0, 1), {}), kind.swept(x, (1,), {}), kind.swept(few, (0,), {})])
    for other in others:
        for state, same in zip(one, other, strict=True):
            assert state.keys() == same.keys()
            assert all(torch.equal(value, same[key]) for key, value in state.items())


@pytest.mark.slow
def test_more_elements_of_one_bin_than_32_bits_count() -> None:
    """Tables of threads have 32 bits; rows that overlap in memory are as good as any."""
    x = torch.ones((1 << 20) + 4_097).as_strided((4_097, 1 << 20), (1, 1))
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        found = looped_bits(x, (0, 1), 5, NORMAL, {})
    finally:
        torch.set_num_threads(threads)
    assert found is not None
    assert int(found["counts"].max()) == int(found["counts"].sum()) == x.numel() > 1 << 32


@pytest.mark.parametrize("pattern", ["... ->", "b d -> d"])
@pytest.mark.parametrize("reducer", REDUCERS)
def test_an_update_adds_to_the_state_and_leaves_it_as_it_was(reducer: str, pattern: str) -> None:
    kind = replace(REDUCERS[reducer], pattern=pattern)
    first, second = torch.randn(300, 40), torch.randn(300, 40) * 2
    state = kind.update({}, first)
    before = {key: value.clone() for key, value in state.items()}
    both = kind.update(state, second)
    assert all(torch.equal(value, before[key]) for key, value in state.items())
    merged = kind.merge(state, kind.update({}, second))
    assert all(torch.equal(value, merged[key]) for key, value in both.items())


@pytest.mark.parametrize("reducer", REDUCERS)
def test_masks(reducer: str) -> None:
    x, mask = torch.randn(300, 40), torch.rand(300, 40) > 0.4
    kind = REDUCERS[reducer]
    masked, plain = kind.update_masked({}, x, mask), kind.update({}, x[mask])
    assert all(torch.equal(value, plain[key]) for key, value in masked.items())


def test_what_the_loop_leaves_to_others() -> None:
    x = torch.randn(100, 100)
    assert looped_bits(x.double(), (0, 1), 5, NORMAL, {}) is None
    assert looped_bits(x[:, ::2], (0, 1), 5, NORMAL, {}) is None
    assert Quantile().swept(x[:1, :7], (0, 1), {}) is None  # no run of neighbours
    with FakeTensorMode() as mode:
        assert Quantile().swept(mode.from_tensor(x), (0, 1), {}) is None
        assert Histogram(bins=3, low=0, high=1).swept(mode.from_tensor(x), (0, 1), {}) is None
    found = []
    torch.vmap(lambda row: found.append(looped_bits(row, (0,), 5, NORMAL, {})) or row)(x)
    assert found == [None]
