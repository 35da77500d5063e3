"""What is not finite is left out of results, and told: in reports, in what is printed and as a finding."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from recorders import ForwardMonitor, ParameterUpdateMonitor, Recorder, RecordingWarning
from recorders.recorder import report
from recorders.watch.diagnosis.findings import findings
from reducers import Collect, Max, Mean, Moments, Norm, Quantile, Reducer, Summary, TopK


class Holed(nn.Module):
    """Makes a quarter of what it gets NaN."""

    def forward(self, x: Tensor) -> Tensor:
        holes = torch.arange(x.numel()).view_as(x) % 4 == 0
        return torch.where(holes, torch.nan, x)


def recorded(reducer: Reducer) -> Recorder:
    net = nn.Sequential(nn.Identity(), Holed())
    recorder = Recorder(ForwardMonitor(reducer)).modules(net, names=["0", "1"])
    with recorder:
        for _ in range(4):
            net(torch.ones(2, 8))
    return recorder


TELLING: list[Any] = [Mean(), Max(), Norm(), Moments(), Quantile(), Mean("b c -> c")]


@pytest.mark.parametrize("reducer", TELLING, ids=str)
def test_a_layer_that_is_a_quarter_nan_is_told(reducer: Reducer) -> None:
    recorder = recorded(reducer)
    clean, holed = recorder.report().rows
    assert "not finite" not in str(clean)
    assert "4 recorded of 4 calls; left out: 25 % of 64 elements not finite" in str(holed)
    assert "1 left out what is not finite" in recorder.report().title_shown()
    assert "25 % of 64 elements not finite" in repr(recorder["1"].snapshot())
    assert repr(recorder).count("25 % of 64 elements not finite") == 1
    assert repr(recorder.snapshot()).count("25 % of 64 elements not finite") == 1
    (finding,) = (one for one in findings(recorder) if "NaN" in one.what)
    assert (finding.layer, finding.what) == (
        "1",
        "25 % of 64 elements not finite: they are NaN or infinite, and results leave them out",
    )
    assert findings(recorder.snapshot()) == findings(recorder)
    assert not any("NaN" in missing for missing in findings(recorder).unexamined)


def test_one_that_does_not_know_of_how_many_tells_the_number() -> None:
    assert "16 elements not finite" in str(recorded(TopK(k=2)).report().rows[1])


def test_what_keeps_all_shows_it() -> None:
    recorder = recorded(Collect())
    assert "not finite" not in str(recorder.report())
    assert recorder["1"].peek().isnan().sum() == 16


def test_the_norm_of_gradients_that_are_all_nan_is_nan() -> None:
    norm = Norm()
    assert norm.compute(norm.update({}, torch.full((3,), torch.nan))).isnan()


def test_a_recorder_warns_once_when_results_are_computed_or_saved(tmp_path: Any) -> None:
    recorder = recorded(Mean())
    recorder.report()
    with pytest.warns(
        RecordingWarning, match=r"ForwardMonitor on Holed \(1\): 25 % of 64 elements not finite: results are of"
    ) as caught:
        recorder.compute()
        recorder.compute()
        recorder.save(tmp_path / "run")
    assert len(caught) == 1
    with pytest.warns(RecordingWarning, match="elements not finite"):
        recorded(Max()).save(tmp_path / "other")


@pytest.mark.parametrize("how", ["save", "save_sharded"])
def test_a_save_looks_at_states_on_other_devices_too(how: str, tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """It waits for them in any case; results are computed without."""
    monkeypatch.setattr(report, "_on_cpu", lambda part: {})  # as if no state were on a CPU
    recorder = recorded(Mean())
    recorder.compute()
    with pytest.warns(RecordingWarning, match="elements not finite"):
        getattr(recorder, how)(tmp_path / "run")


def test_updates_of_weights_that_are_zero_do_not_warn() -> None:
    layer = nn.Linear(2, 2)
    nn.init.zeros_(layer.bias)
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
    ratio = ParameterUpdateMonitor(Summary(), op_=lambda after, before: (after - before).norm() / before.norm())
    with Recorder(ratio).modules(layer) as recorder:
        layer(torch.ones(1, 2)).sum().backward()
        optimizer.step()
        assert "elements not finite" in str(recorder.report())
        recorder.compute()
