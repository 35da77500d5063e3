"""Before torch 2.13 nothing can be recorded inside a compiled graph: one warning says so, and the network computes the same."""

from __future__ import annotations

import warnings

import pytest
import torch
from torch import nn

from recorders import BackwardMonitor, ForwardMonitor, Recorder, RecordingWarning
from recorders.capture import hooks
from reducers import Mean


@pytest.fixture(autouse=True)
def _old(monkeypatch: pytest.MonkeyPatch, fresh_compiler: None) -> None:
    monkeypatch.setattr(hooks, "CAPTURES_IN_GRAPHS", False)
    hooks._warn_of_old_torch.cache_clear()


def test_an_old_torch_is_told_of_once_and_the_network_computes_the_same() -> None:
    net = nn.Sequential(nn.Linear(3, 3), nn.ReLU(), nn.Linear(3, 2))
    x = torch.randn(4, 3)
    expected = torch.autograd.grad(net(x).sum(), net[0].weight)[0]
    recorder = Recorder(out=ForwardMonitor(Mean()), grad=BackwardMonitor(Mean())).modules(net, types=nn.Linear)
    with pytest.warns(RecordingWarning, match=r"torch 2\.13 or later") as told:
        for _ in range(3):
            net.zero_grad()
            torch.compile(net, backend="aot_eager")(x).sum().backward()
    assert len(told) == 1
    assert net[0].weight.grad is not None
    torch.testing.assert_close(net[0].weight.grad, expected)
    assert [recorder.samples[name] for name in recorder] == [0] * 4


def test_eager_mode_is_not_warned_of() -> None:
    layer = nn.Linear(3, 2)
    with warnings.catch_warnings(), Recorder(ForwardMonitor(Mean())).modules(layer) as recorder:
        warnings.simplefilter("error")
        layer(torch.ones(1, 3))
    assert recorder.samples[0] == 1
