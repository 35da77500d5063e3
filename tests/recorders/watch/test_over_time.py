"""Findings of a timeline: what is wrong at the end, and since when."""

from __future__ import annotations

import torch
from torch import nn

from recorders import Inspector, Timeline, findings, lenses
from recorders.watch.charts import Chart, ChartView, keep_charts

LAYERS = ("0", "2", "4")


def timeline(title: str, values: dict[str, list[float]], statistic: str = "mean", **more: list[float]) -> Timeline:
    """A timeline with one chart; one row for each layer."""
    made = Timeline()
    for tick in range(len(next(iter(values.values())))):
        rows = {f"{title}/{layer}": {statistic: course[tick]} for layer, course in values.items()}
        for layer, course in more.items():
            rows[f"{title}/{layer}"]["max"] = course[tick]
        made.append(tick, rows)
    keep_charts(made, [ChartView(Chart(title, ("x",)), made, LAYERS)])
    return made


def told(made: Timeline) -> list[tuple[str, int | None]]:
    return [(finding.layer, finding.since) for finding in findings(made)]


def test_nan_is_named_where_and_when_it_began() -> None:
    made = timeline("Output Norm", {"0": [0, 0, 0, 9], "2": [0, 0, 5, 9], "4": [0, 0, 0, 0]}, "nonfinite")
    assert told(made) == [("2", 2)]
    assert "values are NaN or infinite, and in 1 more, since tick 2" in str(findings(made))


def test_dead_units_count_from_the_tick_that_they_stay_dead() -> None:
    made = timeline("Dead Units", {"0": [0.5, 0.1, 0.1, 0.1], "2": [0.5, 0.1, 0.3, 0.4], "4": [0.0, 0.0, 0.0, 0.0]})
    assert told(made) == [("2", 2)]
    assert findings(made)[0].what == "40% of the units are dead: they were never active"


def test_gradients_that_vanish_or_explode_with_depth() -> None:
    vanish = timeline("Output Gradient Norm", {"0": [1.0, 1e-6, 1e-7], "2": [1.0, 1.0, 1.0], "4": [1.0, 1.0, 2.0]})
    assert told(vanish) == [("0", 1)]
    explode = timeline("Output Gradient RMS", {"0": [1.0, 1.0, 1e6], "2": [1.0, 1.0, 1.0], "4": [1.0, 1.0, 2.0]})
    assert told(explode) == [("0", 2)]
    assert "explode" in findings(explode)[0].what
    assert told(timeline("Output Gradient Norm", {"0": [1e-6, 1.0], "2": [1.0, 1.0]})) == []


def test_updates_that_are_too_large_now_or_too_small_all_the_time() -> None:
    large = timeline("Weight Update Ratio", {"0": [1e-3, 0.1, 0.2], "2": [0.1, 1e-3, 1e-3]})
    assert told(large) == [("0", 1)]
    small = timeline("Weight Update Ratio", {"0": [1e-6, 1e-6]}, **{"0": [1e-5, 2e-5]})
    assert told(small) == [("0", 0)]
    assert told(timeline("Weight Update Ratio", {"0": [1e-3, 1e-6]})) == []  # as a training that converges


def test_what_no_lens_shows_is_said() -> None:
    empty = findings(Timeline())
    assert (list(empty), len(empty.unexamined)) == ([], 3)
    assert findings(timeline("Dead Units", {"0": [0.0]})).unexamined[0] == "what the lens OutputGradientGeometry shows"


def test_a_sick_training_that_an_inspector_watched() -> None:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 1))
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
    chosen = [lenses.DeadUnits(), lenses.OutputGradientGeometry(), lenses.UpdateRatio()]
    with Inspector(chosen, net=net, optimizer=optimizer) as inspector:
        for epoch in inspector.range(4):
            if epoch == 2:
                nn.init.constant_(net[2].bias[:8], -100.0)
            for _ in range(5):
                optimizer.zero_grad()
                net(torch.randn(32, 8)).square().mean().backward()
                optimizer.step()
    found = findings(inspector.timeline)
    assert found.unexamined == ()
    assert [(finding.layer, finding.since) for finding in found] == [("3", 2)]
    assert "dead" in found[0].what
