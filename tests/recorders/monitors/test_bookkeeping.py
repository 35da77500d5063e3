"""What a recorded call does beside its update, counted in calls of functions: time would tell of the machine."""

from __future__ import annotations

from collections.abc import Callable
from types import FrameType
from typing import Any

import pytest
import torch
from profiled import calls_of, our_calls_of, profiled
from torch import nn

from recorders import ForwardInputMonitor, ForwardMonitor, Monitor
from recorders.capture.cuda_graphs import CAPTURES
from recorders.monitors import record
from reducers import Mean, Reducer, Summary
from reducers.kernels.cpp import library


def calls(function: Callable[[], Any]) -> int:
    """How many functions are called, those written in C included, once everything is warm."""
    function()
    function()
    return calls_of(function)


@pytest.mark.parametrize("kind", [ForwardMonitor, ForwardInputMonitor])
@pytest.mark.parametrize("gradients", [False, True])
@pytest.mark.usefixtures("without_loops")
def test_a_call_that_is_reduced_at_once_makes_few_others(kind: Callable[..., Monitor], gradients: bool) -> None:
    x, mean, layer, bare = torch.randn(16, 1024), Mean(), nn.Identity(), nn.Identity()
    state = mean.update({}, x)
    monitor = kind(mean, layer)
    with torch.set_grad_enabled(gradients):
        beside = calls(lambda: layer(x)) - calls(lambda: mean.update(state, x)) - calls(lambda: bare(x))
        assert torch.is_grad_enabled() == gradients
    assert monitor.samples == monitor.counts["calls"] == 3
    assert 0 < beside <= 95  # 138 on the way that asks everything


@pytest.mark.skipif(not library.in_order(), reason="no C++ compiler")
@pytest.mark.parametrize("kind", [ForwardMonitor, ForwardInputMonitor])
@pytest.mark.parametrize("reducer", [Mean(), Summary()], ids=str)
def test_a_call_whose_statistics_wait_makes_fewer_than_an_update(reducer: Reducer, kind: Callable[..., Monitor]) -> None:
    x, layer, bare = torch.randn(16, 1024), nn.Identity(), nn.Identity()
    state = reducer.update({}, x)
    monitor = kind(reducer, layer)
    layer(x)
    beside = calls(lambda: layer(x)) - calls(lambda: bare(x))
    assert 0 < beside <= 60
    assert beside < calls(lambda: reducer.update(state, x))
    assert monitor.samples == 4


@pytest.mark.parametrize(
    ("callables", "most"),
    [({"map_": torch.abs}, 60), ({"op_": lambda x: x * 2}, 65), ({"filter_": lambda x: True}, 65)],  # 81 once
    ids=["map_", "op_", "filter_"],
)
def test_an_observation_for_callables_makes_few_calls(callables: dict[str, Any], most: int) -> None:
    x, layer = torch.randn(8, 64), nn.Identity()
    monitor = ForwardMonitor(Summary(), layer, **callables)
    layer(x)
    layer(x)
    assert 0 < our_calls_of(lambda: layer(x)) <= most
    assert monitor.samples == 3


def test_an_observation_that_waits_enters_four_files_by_at_most_eleven_calls() -> None:
    x, layer, entered = torch.randn(8, 64), nn.Identity(), list[str]()
    monitor = ForwardMonitor(Summary(), layer)

    def profile(frame: FrameType, event: str, argument: Any) -> None:
        if event == "call" and "recorders" in frame.f_code.co_filename.split("/")[-3:-1]:
            entered.append(frame.f_code.co_filename)

    for _ in range(3):
        layer(x)
    with profiled(profile):
        layer(x)
    assert monitor.samples == 4
    assert 0 < len(set(entered)) <= 4
    assert len(entered) <= 11


@pytest.mark.skipif(torch.cuda.is_initialized(), reason="CUDA is in use")  # type: ignore[no-untyped-call]
def test_nothing_asks_for_captures_of_a_gpu_that_is_not_in_use() -> None:
    assert CAPTURES == []  # every place asks this list first


@pytest.mark.parametrize("kind", [ForwardMonitor, ForwardInputMonitor])
@pytest.mark.parametrize("size", [4, 1 << 16])
def test_a_call_asks_for_captures_once(size: int, kind: Callable[..., Monitor], monkeypatch: pytest.MonkeyPatch) -> None:
    x, layer, asked = torch.randn(size), nn.Identity(), list[int]()
    monitor = kind(Mean(), layer)
    layer(x)
    monkeypatch.setattr(record, "CAPTURES", [lambda: asked.append(1)])
    layer(x)
    assert (monitor.samples, len(asked)) == (2, 1)


@pytest.mark.parametrize("gradients", [False, True])
def test_modes_of_the_user_are_off_while_a_monitor_works_and_on_after_it(gradients: bool) -> None:
    x, layer = torch.randn(64, 1024), nn.Identity()
    seen: list[tuple[bool, bool, bool]] = []

    def look(y: torch.Tensor) -> torch.Tensor:
        seen.append((torch.is_grad_enabled(), torch.is_inference_mode_enabled(), torch.is_autocast_enabled("cpu")))
        return y

    ForwardMonitor(Mean().premap(look), layer)
    modes = {
        "none": torch.set_grad_enabled(gradients),
        "autocast": torch.autocast("cpu", dtype=torch.bfloat16),
        "inference": torch.inference_mode(),
    }
    for name, mode in modes.items():
        with torch.set_grad_enabled(gradients), mode:
            before = torch.is_grad_enabled(), torch.is_inference_mode_enabled(), torch.is_autocast_enabled("cpu")
            layer(x)
            assert (torch.is_grad_enabled(), torch.is_inference_mode_enabled(), torch.is_autocast_enabled("cpu")) == before, name
    assert seen == [(False, False, False)] * 3
