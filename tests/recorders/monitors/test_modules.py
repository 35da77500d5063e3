"""ModuleMonitor: a function of a module, at ticks."""

from __future__ import annotations

import pickle
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from recorders import ForwardMonitor, ModuleMonitor, Recorder, RecordingWarning, load
from reducers import Collect, Count, Last


def scale(module: nn.Module) -> Tensor:
    weight = module.weight
    assert isinstance(weight, Tensor)
    return weight.norm()


def test_records_at_ticks_only_and_takes_part_in_all_that_recorders_do(tmp_path: Path) -> None:
    net = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2))
    recorder = Recorder(ModuleMonitor(Collect(), op_=scale)).modules(net, types=nn.Linear)
    net(torch.ones(1, 3)).sum().backward()
    assert [row.reason for row in recorder.report().rows] == ["tick() was never called"] * 2
    expected = []
    for _ in range(2):
        recorder.tick()
        expected.append(scale(net[2]).item())
        with torch.no_grad():
            net[2].weight.mul_(2)
    assert recorder["2"].peek().tolist() == expected
    recorder.deregister().tick()
    assert recorder["2"].samples == 2
    recorder.save(tmp_path / "run")
    assert load(tmp_path / "run")["2"].peek().tolist() == expected
    assert pickle.loads(pickle.dumps(recorder))["2"].peek().tolist() == expected


def test_runs_without_gradients_and_is_not_recorded_by_others() -> None:
    layer = nn.Linear(2, 2)
    outputs = ForwardMonitor(Count(), layer)
    seen = []

    def forwards(module: nn.Module) -> Tensor:
        y = module(torch.ones(1, 2))
        seen.append(y.requires_grad)
        assert isinstance(y, Tensor)
        return y

    monitor = ModuleMonitor(Last(), layer, op_=forwards)
    monitor.tick()
    assert (monitor.samples, outputs.samples, seen) == (1, 0, [False])


def test_takes_numbers_nested_results_and_the_gate() -> None:
    layer = nn.Linear(2, 3)
    monitor = ModuleMonitor(
        Last(), layer, op_=lambda layer: {"size": layer.in_features, "share": 0.5, "w": layer.weight}, eval_update=False
    )
    monitor.tick()
    layer.eval()
    monitor.tick()
    found = monitor.peek()
    assert (monitor.samples, found["size"].item(), found["share"].item(), found["w"].shape) == (1, 2, 0.5, (3, 2))


def test_names_what_fails_and_needs_a_function() -> None:
    with pytest.raises(TypeError, match=r"op_=lambda module"):
        ModuleMonitor(Last())
    net = nn.Sequential(nn.ReLU())
    recorder = Recorder(ModuleMonitor(Last(), op_=scale)).modules(net, types=nn.ReLU)
    with pytest.warns(RecordingWarning, match="'0'.*has no attribute 'weight'"):
        recorder.tick()
    assert recorder["0"].samples == 0
