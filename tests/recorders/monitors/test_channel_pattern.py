"""The pattern "channels" in monitors: resolved when they are placed, and what is said if a pattern takes tokens for channels."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from recorders import (
    BackwardMonitor,
    CallMonitor,
    ForwardInputMonitor,
    ForwardMonitor,
    Monitor,
    ParameterMonitor,
    Recorder,
    RecordingWarning,
    StateMonitor,
    TargetError,
    load,
)
from reducers import Activity, Covariance, GroupBy, Masked, Mean, Moments, PerObservation, Product, Reducer, Summary, TopK, Window


def tokens() -> nn.Sequential:
    return nn.Sequential(nn.Linear(8, 6), nn.ReLU(), nn.LayerNorm(6))


NESTED: list[tuple[Reducer, Reducer]] = [
    (Product(a=Mean("channels"), b=Moments()), Product(a=Mean("... c -> c"), b=Moments())),
    (Masked(Mean("channels")), Masked(Mean("... c -> c"))),
    (GroupBy(Mean("channels"), groups=2), GroupBy(Mean("... c -> c"), groups=2)),
    (PerObservation(Mean("channels"), Summary()), PerObservation(Mean("... c -> c"), Summary())),
    (Window(Mean("channels"), 3), Window(Mean("... c -> c"), 3)),
    (Covariance("channels"), Covariance("... c -> c")),
    (TopK("channels", k=2), TopK("... c -> c", k=2)),
    (Mean("channels").postmap(torch.sqrt), Mean("... c -> c").postmap(torch.sqrt)),
    (Mean("channels").premap(torch.abs), Mean("... c -> c").premap(torch.abs)),
]


@pytest.mark.parametrize(("given", "wanted"), NESTED, ids=lambda reducer: type(reducer).__name__)
def test_reducers_inside_others_are_resolved(given: Reducer, wanted: Reducer) -> None:
    monitor = ForwardMonitor(given, nn.Linear(2, 3))
    assert monitor.reducer == monitor.buffer.reducer == wanted
    assert monitor.constructor.reducer == wanted


@pytest.mark.parametrize("kind", [ForwardMonitor, ForwardInputMonitor, BackwardMonitor])
def test_outputs_inputs_and_gradients_have_the_axis_of_the_layer(kind: Callable[..., Monitor]) -> None:
    conv = nn.Conv2d(2, 3, 1)
    monitor, last = kind(Mean("channels"), conv), kind(Mean("channels")).register(nn.Linear(2, 3))
    assert (monitor.reducer, last.reducer) == (Mean("b c ... -> c"), Mean("... c -> c"))
    conv(torch.ones(4, 2, 5, 5, requires_grad=True)).sum().backward()
    assert monitor.peek().shape == (2 if kind is ForwardInputMonitor else 3,)


def test_a_recording_holds_the_resolved_pattern_and_merges(tmp_path: Path) -> None:
    net = tokens()
    runs = []
    for _ in range(2):
        with Recorder(ForwardMonitor(Activity("channels"))).modules(net, leaves=True) as recorder:
            net(torch.randn(3, 5, 8))
        recorder.save(tmp_path / str(len(runs)))
        runs.append(load(tmp_path / str(len(runs))))
        assert "pattern='... c -> c'" in str(recorder.plan(torch.ones(3, 5, 8)))
    assert {part.reducer for run in runs for part in run.values()} == {Activity("... c -> c")}
    merged = runs[0].merge(runs[1])
    assert merged["1"].samples == 2
    assert merged["1"].peek()["rate"].shape == (6,)
    again = Recorder(ForwardMonitor(Activity("channels"))).modules(net, leaves=True)
    assert list(again.resume(tmp_path / "0")) == list(runs[0])


def test_equal_monitors_share_a_place_and_added_ones_know_the_net() -> None:
    net = nn.Sequential(nn.Conv2d(1, 2, 1), nn.ReLU())
    recorder = Recorder(a=ForwardMonitor(Mean("channels")), b=ForwardMonitor(Mean("b c ... -> c"))).modules(net)
    assert recorder.aliases == {"b": "a", "b/0": "a/0", "b/1": "a/1"}
    recorder.add("mine", ForwardMonitor(Moments("channels")), net[1])
    assert recorder["mine"].reducer == Moments("b c ... -> c")


def test_compiled_graphs_record_channels() -> None:
    net = tokens()
    recorder = Recorder(ForwardMonitor(Mean("channels"))).modules(torch.compile(net, backend="eager", fullgraph=True))
    for x in torch.randn(2, 3, 5, 8):
        torch.compile(net, backend="eager", fullgraph=True)(x)
    assert {name: tuple(monitor.peek().shape) for name, monitor in recorder.items()} == dict.fromkeys(recorder, (6,))
    assert recorder["1"].reducer == Mean("... c -> c")


@pytest.mark.parametrize(
    "make",
    [
        lambda: CallMonitor(Mean("channels")),
        lambda: ParameterMonitor(Product(a=Mean("channels"))),
        lambda: StateMonitor(Mean("channels"), "weight"),
    ],
)
def test_what_is_no_layer_has_no_channels(make: Callable[[], Any]) -> None:
    with pytest.raises(TargetError, match=r"'channels' is an axis of what a layer .* write the pattern"):
        make()


def test_tokens_taken_for_channels_warn_once_a_recorder() -> None:
    net = tokens()
    recorder = Recorder(ForwardMonitor(Product(active=Activity(), stats=Summary()))).modules(net)
    with pytest.warns(RecordingWarning, match="counts tokens as channels; use the pattern 'channels'") as told:
        net(torch.randn(3, 5, 8))
    net(torch.randn(3, 5, 8))
    assert len(told) == 1
    assert recorder["0"].samples == 2
    with pytest.warns(RecordingWarning, match=r"Linear keeps axis 1 of shape \(3, 5, 6\)"):
        ForwardMonitor(Mean("b c d -> c"), net[0])
        net(torch.randn(3, 5, 8))


@pytest.mark.parametrize("pattern", ["b t d -> t", "b c -> c", "... c -> c", "... ->", "b ... c -> c", "channels"])
def test_other_patterns_and_shapes_do_not_warn(pattern: str) -> None:
    layer = nn.Linear(8, 6)
    monitor = ForwardMonitor(Mean(pattern), layer)
    mapped = ForwardMonitor(Mean("b c ... -> c"), layer, op_=lambda output: output.transpose(1, -1))
    fine = ForwardMonitor(PerObservation(Mean("b c ... -> c").premap(lambda x: x.mT), Summary("b c ... -> c")), layer)
    layer(torch.randn(3, 8) if pattern == "b c -> c" else torch.randn(3, 5, 8))
    assert (monitor.samples, mapped.samples, fine.samples) == (1, 1, 1)


def test_a_convolution_without_a_batch_warns() -> None:
    conv = nn.Conv2d(1, 2, 1)
    monitor = ForwardMonitor(Mean("channels"), conv)
    with pytest.warns(RecordingWarning, match="without a batch"):
        conv(torch.ones(1, 5, 5))
    assert monitor.samples == 1


def test_an_axis_that_nobody_tells_is_the_second_and_warns_if_it_matters() -> None:
    net = nn.Sequential(nn.ReLU())
    alone, recorder = ForwardMonitor(Mean("channels"), net[0]), Recorder(ForwardMonitor(Mean("channels"))).modules(net)
    assert alone.reducer == recorder["0"].reducer == Mean("b c ... -> c")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        net(torch.ones(2, 3))
    recorder.deregister()
    other = Recorder(ForwardMonitor(Mean("channels"))).modules(net)
    with pytest.warns(RecordingWarning, match=r"use the pattern '... c -> c', or say .*register_channel_axis\(") as told:
        net(torch.ones(2, 3, 4))
    assert len(told) == 1
    assert other["0"].peek().shape == (3,)
