"""Statistics joined in place, by Triton's interpreter: as in states, whatever the handle says, and when launches are replayed."""

from __future__ import annotations

import importlib.util
import os
from typing import Any

import laws
import pytest
import torch
from torch import Tensor

if os.environ.get("TRITON_INTERPRET") != "1" or importlib.util.find_spec("triton") is None:
    pytest.skip("needs triton (extra gpu-tests) and TRITON_INTERPRET=1", allow_module_level=True)

from triton.runtime.jit import KernelInterface

from reducers.kernels.triton import lanes, tiling
from reducers.kernels.triton.accumulate import accumulate, clear, new_accumulators, new_handle, point, statistics
from reducers.kernels.triton.sweep import swept

CPU = torch.device("cpu")
SUMMARY = {name: name for name in ("count", "mean", "m2", "min", "max", "zeros", "nan", "inf")}
FAMILIES: list[dict[str, str]] = [
    SUMMARY,
    {"count": "count", "mean": "mean", "m2": "m2", "m3": "m3", "m4": "m4"},
    {"count": "count", "sum": "sum"},
    {"sum": "exact"},
    {"max": "max"},
    {"count": "count", "power": "peak"},
    {"count": "count", "active": "active"},
]
DTYPES = (torch.float32, torch.float64, torch.int8, torch.bool)


@pytest.fixture(autouse=True)
def small_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """A small tensor has several parts."""
    monkeypatch.setattr(lanes, "_LANES", 8)
    monkeypatch.setattr(lanes, "_EACH", 8)
    monkeypatch.setattr(tiling, "_MAX_PARTS", 4)


def observations(dtype: torch.dtype) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    first, second, third = (3 * torch.randn(size, 3, generator=generator) for size in (40, 2, 90))
    if dtype.is_floating_point:
        first[:5], second[:] = torch.inf, torch.nan
    return [x.nan_to_num(0, 0, 0).to(dtype) if not dtype.is_floating_point else x.to(dtype) for x in (first, second, third)]


class Accumulated:
    """Accumulators for observations of three kept positions, in slot 5 of a handle."""

    def __init__(self, columns: dict[str, str], dtype: torch.dtype) -> None:
        self.columns, self.names, self.dtype = columns, ",".join(columns.values()), dtype
        self.handle, self.missed = new_handle(CPU)
        self.words = new_accumulators(torch.empty(1, 3, dtype=dtype), (0,), self.names)
        point(self.handle, 5, self.words)

    def add(self, x: Tensor, slot: int = 5) -> None:
        accumulate(x, (0,), self.names, 0.5, self.handle, slot)

    @property
    def count(self) -> int:
        return int(self.words[0])

    @property
    def state(self) -> dict[str, Tensor]:
        return statistics(self.words, self.columns, [3], self.dtype)


def in_turn(columns: dict[str, str], xs: list[Tensor]) -> Any:
    state: dict[str, Tensor] | None = None
    for x in xs:
        state = swept(x, (0,), columns, 0.5, state)
    return state


# Every dtype in a family that makes other kernels of it, and every family in float32.
EACH = [(columns, dtype) for columns in FAMILIES for dtype in DTYPES if dtype is torch.float32 or columns in (SUMMARY, FAMILIES[2])]


@pytest.mark.parametrize(("columns", "dtype"), EACH, ids=lambda part: str(part) if part in DTYPES else ",".join(part.values()))
def test_what_is_accumulated_is_the_state_to_the_bit(columns: dict[str, str], dtype: torch.dtype) -> None:
    xs, found = observations(dtype), Accumulated(columns, dtype)
    for x in xs:
        found.add(x)
    assert found.count == 3
    laws.same_bits(found.state, in_turn(columns, xs))


def test_a_handle_that_is_not_due_reads_and_writes_nothing() -> None:
    found = Accumulated(SUMMARY, torch.float32)
    first, _, second = observations(torch.float32)
    found.add(first)
    before = found.words.clone()
    found.handle.data[:1].fill_(0)
    found.add(second)
    assert found.words.equal(before)
    found.handle.data[:1].fill_(1)
    found.add(second)
    assert found.count == 2


@pytest.mark.parametrize("wrong", ["no accumulators", "another size"])
def test_an_observation_that_does_not_fit_is_counted_and_writes_nothing(wrong: str) -> None:
    found = Accumulated(SUMMARY, torch.float32)
    x = observations(torch.float32)[0]
    found.add(x)
    before = found.words.clone()
    if wrong == "no accumulators":
        found.add(x, slot=6)
    else:
        found.add(torch.cat([x, x], 1))
    assert found.words.equal(before)
    assert found.missed.item() == 1


def test_emptied_accumulators_are_as_new() -> None:
    for dtype in (torch.float32, torch.int8):
        found = Accumulated(SUMMARY, dtype)
        first, _, second = observations(dtype)
        found.add(first)
        clear(found.words, found.names, dtype)
        assert found.count == 0
        found.add(second)
        laws.same_bits(found.state, in_turn(SUMMARY, [second]))


def test_the_square_of_a_huge_mean_times_no_weight_is_not_nan() -> None:
    moments = FAMILIES[1]
    nothing, huge = torch.full((2, 3), torch.nan, dtype=torch.float64), torch.full((2, 3), 1e200, dtype=torch.float64)
    for xs in ([nothing, huge], [huge, nothing]):
        found = Accumulated(moments, torch.float64)
        for x in xs:
            found.add(x)
        assert found.state["count"].tolist() == [2] * 3
        assert found.state["mean"].tolist() == [1e200] * 3
        assert all(found.state[key].tolist() == [0.0] * 3 for key in ("m2", "m3", "m4"))


def test_launches_that_are_replayed_count_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """A CUDA graph runs the launches that it saw, on the memory that it saw, and nothing else."""
    launches: list[Any] = []

    def recorded(kernel: Any, grid: Any) -> Any:
        def run(*args: Any, **kwargs: Any) -> None:
            launches.append(lambda: kernel[grid](*args, **kwargs))

        return run

    found = Accumulated(SUMMARY, torch.float32)
    first, _, second = observations(torch.float32)
    memory = first.clone()
    with monkeypatch.context() as patch:
        patch.setattr(KernelInterface, "__getitem__", recorded)
        found.add(memory)
    assert len(launches) == 2
    assert found.count == 0
    for x in (first, second[:40], first):
        memory.copy_(x)
        for launch in launches:
            launch()
    assert found.count == 3
    laws.same_bits(found.state, in_turn(SUMMARY, [first, second[:40], first]))
