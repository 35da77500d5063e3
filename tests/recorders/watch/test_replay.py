"""Replay: what a visualizer gets of a recorded timeline is what it got during the training."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from recorders import Inspector, Timeline, lenses, replay
from recorders.errors import LensError, RecordingNotFoundError, StorageError
from recorders.watch.charts import ChartView
from recorders.watch.visualizers.numbers import numbers


class Looks:
    """A visualizer that looks at everything that charts give, at each tick."""

    def __init__(self) -> None:
        self.seen: dict[int, Any] = {}
        self.charts: Sequence[ChartView] = ()
        self.finished = 0

    def show(self, tick: int, charts: Sequence[ChartView]) -> None:
        timeline = charts[0].timeline
        curves = {
            (view.title, layer, line): found
            for view in charts
            for layer in view.layers
            for line in view.lines
            if (found := view.line(layer, line))[0]
        }
        compared = {view.title: found for view in charts if (found := view.points_by_tick())}
        self.seen[tick] = numbers(tick, charts), curves, compared, timeline.ticks(), len(timeline.ticks()), timeline.steps()
        self.charts = charts

    def flush(self) -> None:
        self.finished += 1


def watched(path: str | Path, visualizer: Looks) -> Timeline:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 1))
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    watching = [lenses.OutputActivation(record_eval=True), lenses.ParameterNorm()]
    with Inspector(net, watching, show=visualizer, optimizer=optimizer, active=2, timeline=Timeline(path)) as inspector:
        for epoch in inspector.range(5):
            if epoch == 1:
                continue  # an empty epoch is not shown
            for _ in range(3):
                loss = net.train()(torch.randn(8, 4)).square().mean()
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                inspector.push_loss(loss)
            if epoch > 2:
                net.eval()(torch.randn(8, 4))
                inspector.push_metric("accuracy", epoch / 10)
    return inspector.timeline


@pytest.mark.parametrize("where", ["memory", "file"])
def test_what_a_visualizer_gets_is_what_it_got_live(where: str, tmp_path: Path) -> None:
    live, again = Looks(), Looks()
    timeline = watched(":memory:" if where == "memory" else tmp_path / "run.db", live)
    replay(timeline if where == "memory" else tmp_path / "run.db", again)
    assert sorted(live.seen) == [0, 2, 3, 4]
    assert again.seen == live.seen
    assert [(view.chart, view.layers) for view in again.charts] == [(view.chart, view.layers) for view in live.charts]
    assert again.finished == live.finished == 1
    assert timeline.ticks() == [0, 1, 2, 3, 4]


def test_a_replay_changes_nothing_and_needs_a_timeline_with_charts(tmp_path: Path) -> None:
    watched(tmp_path / "run.db", Looks()).close()
    before, again = (tmp_path / "run.db").read_bytes(), Looks()
    replay(tmp_path / "run.db", again)
    with pytest.raises(StorageError):
        again.charts[0].timeline.append(9, {"Loss/train": {"mean": 0.0}})
    again.charts[0].timeline.close()
    assert (tmp_path / "run.db").read_bytes() == before
    with pytest.raises(RecordingNotFoundError, match="no timeline"):
        replay(tmp_path / "other.db", again)
    assert not (tmp_path / "other.db").exists()
    with pytest.raises(LensError, match="holds no charts"):
        replay(Timeline(), again)
