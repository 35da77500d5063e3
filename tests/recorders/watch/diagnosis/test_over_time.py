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
    made = timeline("Dead Units", {"0": [0.6, 0.1, 0.1, 0.1], "2": [0.6, 0.1, 0.6, 0.7], "4": [0.0, 0.0, 0.0, 0.0]})
    assert told(made) == [("2", 2)]
    assert findings(made)[0].what == "70% of the units are dead: they were never active"


def test_gradients_that_vanish_or_explode_with_depth() -> None:
    vanish = timeline("Output Gradient Norm", {"0": [1.0, 1e-6, 1e-7], "2": [1.0, 1.0, 1.0], "4": [1.0, 1.0, 2.0]})
    assert told(vanish) == [("0", 1)]
    explode = timeline("Output Gradient RMS", {"0": [1.0, 1.0, 1e6], "2": [1.0, 1.0, 1.0], "4": [1.0, 1.0, 2.0]})
    assert told(explode) == [("0", 2)]
    assert "explode" in findings(explode)[0].what
    assert told(timeline("Output Gradient Norm", {"0": [1e-6, 1.0], "2": [1.0, 1.0]})) == []


def test_updates_that_are_too_large_now_or_too_small_all_the_time() -> None:
    large = timeline("Weight Update Ratio", {"0": [1e-3, 0.2, 0.3], "2": [0.2, 1e-3, 1e-3]})
    assert told(large) == [("0", 1)]
    small = timeline("Weight Update Ratio", {"0": [1e-7, 1e-7]}, **{"0": [1e-6, 2e-6]})
    assert told(small) == [("0", 0)]
    assert told(timeline("Weight Update Ratio", {"0": [1e-3, 1e-6]})) == []  # as a training that converges


def test_of_layers_that_begin_at_one_tick_the_first_observation_counts_then_order() -> None:
    nan = {"nonfinite": 1.0}
    made = Timeline()
    made.append(0, {f"Output Norm/{layer}": nan for layer in ("4", "2")})
    keep_charts(made, [ChartView(Chart("Output Norm", ("output",)), made, LAYERS)])
    assert told(made) == [("2", 0), ("0", None)]  # which gave no output
    made = Timeline()
    made.append(3, {f"First Nonfinite Output/{layer}": {"mean": at} for layer, at in (("0", 8.0), ("2", 7.0), ("4", 7.0))})
    keep_charts(made, [ChartView(Chart("First Nonfinite Output", ("output", "first")), made, LAYERS)])
    assert told(made) == [("2", 3)]
    assert "in observation 7 of the tick, and in 2 more" in findings(made)[0].what


def test_layers_that_stopped_are_found_with_the_tick_and_attention_is_none_of_them() -> None:
    made = Timeline()
    for tick in range(4):
        made.append(tick, {f"Output Norm/{layer}": {"mean": 1.0} for layer in (("0", "2") if tick < 2 else ("0",))})
    made.append(4, {"Loss/train": {"mean": 1.0}})  # an epoch in which lenses did not record
    layers = ("0", "2", "attention.out_proj")
    keep_charts(made, [ChartView(Chart("Output Norm", ("output",)), made, layers)])
    assert told(made) == [("2", 2)]
    assert findings(made)[0].what == "it gives no output any more"


def test_saturation_but_not_of_the_last_layer_and_outliers_by_either_lens() -> None:
    assert told(timeline("Saturated Units", {"0": [0.1, 0.9, 0.8], "2": [0.9, 0.9, 0.1], "4": [1.0, 1.0, 1.0]})) == [("0", 1)]
    for title, large, small in (
        ("Outlier Features", {"largest": 2000.0, "typical": 0.5}, {"largest": 20.0, "typical": 1e-3}),
        (
            "Output Quantiles",
            {"min": -2000.0, "max": 1.0, "Q1": -0.5, "Q3": 0.2},
            {"min": 0.0, "max": 2000.0, "Q1": 0.0, "Q3": 0.0},
        ),
    ):
        made = Timeline()
        for tick in range(3):
            sick = {"2": small if tick == 0 else large, "4": large if tick == 2 else small}
            made.append(tick, {f"{title}/{layer}": row for layer, row in {"0": small, **sick}.items()})
        keep_charts(made, [ChartView(Chart(title, ("output",)), made, LAYERS)])
        assert told(made) == [("2", 1)]
        assert findings(made)[0].what.endswith("2e+03, 4,000 times the typical 0.5, and in 1 more layers")


def test_what_no_lens_shows_is_said() -> None:
    empty = findings(Timeline())
    assert (list(empty), len(empty.unexamined)) == ([], 5)
    assert findings(timeline("Dead Units", {"0": [0.0]})).unexamined[0] == "what the lens Saturation shows"


def test_a_sick_training_that_an_inspector_watched() -> None:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 1))
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
    chosen = [lenses.DeadUnits(), lenses.OutputGradientGeometry(), lenses.UpdateRatio()]
    with Inspector(net, chosen, optimizer=optimizer) as inspector:
        for epoch in inspector.range(4):
            if epoch == 2:
                nn.init.constant_(net[2].bias[:12], -100.0)
            for _ in range(5):
                optimizer.zero_grad()
                net(torch.randn(32, 8)).square().mean().backward()
                optimizer.step()
    found = findings(inspector.timeline)
    assert found.unexamined == ("what the lens Saturation shows", "what the lens Outliers shows")
    assert [(finding.layer, finding.since) for finding in found] == [("3", 2)]
    assert "dead" in found[0].what


def watched(inspector: Inspector, net: nn.Module, epoch: int, factor: float = 1.0) -> None:
    for _ in range(3):
        net(torch.randn(8, 4) * factor).square().mean().backward()
    inspector.tick(epoch)


def test_a_nan_whose_tick_was_forgotten_or_compacted_is_no_finding() -> None:
    net = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 1))
    with Inspector(net, [lenses.NonFinite()]) as inspector:
        for epoch in range(3):
            watched(inspector, net, epoch, float("nan") if epoch == 1 else 1.0)
        assert [finding.kind for finding in findings(inspector.timeline)] == ["nonfinite"]
        inspector.timeline.compact(every=2, before=2)
        assert inspector.timeline.ticks() == [0, 2]
        assert not findings(inspector.timeline)
        watched(inspector, net, 3, float("nan"))
        inspector.timeline.forget(3)
        assert not findings(inspector.timeline)
        inspector.timeline.forget(0)
        inspector.timeline.append(9, {"Train Loss": {"mean": 1.0}})
        assert not findings(inspector.timeline)


def test_a_layer_that_stops_is_found_whether_or_not_evaluations_are_recorded_beside() -> None:
    class Skipping(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second, self.skips = nn.Linear(4, 4), nn.Linear(4, 4), False

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = self.first(x)
            return x if self.skips else self.second(x)

    for record_eval in (False, True):
        net = Skipping()
        with Inspector(net, [lenses.Quantiles(record_eval=record_eval)]) as inspector:
            for epoch in range(4):
                net.skips = epoch >= 2
                watched(inspector, net, epoch)
        assert [(one.kind, one.layer, one.since) for one in findings(inspector.timeline)] == [("never-ran", "second", 2)]
