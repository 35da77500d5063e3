"""TensorBoard: what its own reader finds in the files is what the timeline holds."""

from __future__ import annotations

import math
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from pages import charted, filled
from paths import ROOT
from torch import nn

from recorders import Inspector, Timeline, lenses
from recorders.errors import RecordingWarning
from recorders.watch.charts import Across, Chart, charts_of
from recorders.watch.replay import replay
from recorders.watch.visualizers import TensorBoardVisualizer, add_histogram
from recorders.watch.visualizers.numbers import numbers
from reducers import Histogram

accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
layout_pb2 = pytest.importorskip("tensorboard.plugins.custom_scalar.layout_pb2")


def read(folder: Path) -> Any:
    return accumulator.EventAccumulator(str(folder), {"scalars": 0, "tensors": 0}).Reload()


def scalars(folder: Path) -> dict[str, dict[int, float]]:
    """The values of each tag by tick."""
    events = read(folder)
    return {tag: {event.step: event.value for event in events.Scalars(tag)} for tag in events.Tags()["scalars"]}


def layout(folder: Path) -> Any:
    """The layout that TensorBoard takes: the last."""
    return layout_pb2.Layout.FromString(read(folder).Tensors("custom_scalars__config__")[-1].tensor_proto.string_val[0])


def float32(value: float) -> float:
    return torch.tensor(value, dtype=torch.float32).item()


def same(found: float, wanted: float) -> bool:
    return found == float32(wanted) or (math.isnan(found) and math.isnan(wanted))


def watched(folder: Path, epochs: int, timeline: Path | None = None) -> Inspector:
    net = nn.Sequential(nn.Linear(4, 3), nn.ReLU(), nn.Linear(3, 1))
    watching = [lenses.OutputGradientGeometry(), lenses.OutputActivation(), lenses.OutputNorm(comparison_plot=True)]
    with Inspector(net, watching, show=f"tensorboard:{folder}", timeline=timeline) as inspector:
        for _ in inspector.iter(range(epochs)):
            loss = net(torch.randn(8, 4)).square().mean()
            loss.backward()
            inspector.push_loss(loss)
    return inspector


def test_every_number_of_a_training_is_read_back(tmp_path: Path) -> None:
    inspector = watched(tmp_path, 4)
    found = scalars(tmp_path)
    seen = 0
    for view in inspector.charts:
        for layer in view.layers if not view.chart.across else ():
            wanted = {name: view.line(layer, name) for name in view.lines}
            for name in view.ranges:
                ticks, low, high = view.band(layer, name)
                ends = ("mean-std", "mean+std") if name == "std" else name.split("-")
                wanted |= {ends[0]: (ticks, low), ends[1]: (ticks, high)}
            for name, (ticks, values) in wanted.items():
                assert found.pop(f"{view.title}/{layer}/{name}", {}) == dict(zip(ticks, map(float32, values), strict=True))
                seen += len(ticks) == 4
        for tick, points in view.points_by_tick().items():
            for point in points:
                assert found[f"{view.title}/{point.line}"].pop(tick) == float32(point.value)
    assert seen >= 20
    assert {tag for tag, left in found.items() if left} == set()
    assert set(found) == {
        "Mean Output Norm Comparison/1",
        "Extreme Output Activations Of All Layers/lowest Output Activation",
        "Extreme Output Activations Of All Layers/highest Output Death",
    }


def test_a_replay_writes_the_same_and_often_is_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from recorders.watch.visualizers import tensorboard as module

    now = time.time()

    def sleep(seconds: float) -> None:
        nonlocal now
        now += seconds

    monkeypatch.setattr(module.time, "time", lambda: now)
    monkeypatch.setattr(module.time, "sleep", sleep)
    timeline = watched(tmp_path / "live", 3).timeline
    for _ in range(12):  # the names of the last files would be in the wrong order
        replay(timeline, f"tensorboard:{tmp_path / 'again'}")
    assert scalars(tmp_path / "again") == scalars(tmp_path / "live")
    events = read(tmp_path / "again")
    assert all(len(events.Scalars(tag)) <= 3 for tag in events.Tags()["scalars"])


def test_of_many_layers_those_that_moved_most_are_written(tmp_path: Path) -> None:
    timeline = filled([f"l{i}" for i in range(300)], ticks=2)
    replay(timeline, [TensorBoardVisualizer(tmp_path / "some"), TensorBoardVisualizer(tmp_path / "all", most=None)])
    some, whole = scalars(tmp_path / "some"), scalars(tmp_path / "all")
    assert some.pop("Norm/layers left out") == {0: 100.0, 1: 100.0}
    assert len({tag.split("/")[1] for tag in some if tag.startswith("Norm/")}) == 200
    assert len({tag.split("/")[1] for tag in whole if tag.startswith("Norm/")}) == 300
    assert all(whole[tag] == curve for tag, curve in some.items())


def test_values_that_are_not_finite_are_written_as_they_are(tmp_path: Path) -> None:
    values = [math.nan, math.inf, -math.inf, 1e300, -1e300, 1e-300]
    rows = {f"Norm/{i}": {0: {"mean": value, "nonfinite": float(i)}} for i, value in enumerate(values)}
    replay(charted([Chart("Norm", ("x",), ranges=None)], rows), f"tensorboard:{tmp_path}")
    found = scalars(tmp_path)
    largest = torch.finfo(torch.float32).max
    for i, wanted in enumerate([math.nan, math.inf, -math.inf, largest, -largest, 0.0]):
        value = found[f"Norm/{i}/mean"][0]
        assert same(value, wanted) or value == pytest.approx(wanted, rel=1e-6)
        assert math.isfinite(value) == math.isfinite(values[i])
    assert {tag for tag in found if tag.endswith("nonfinite")} == {f"Norm/{i}/nonfinite" for i in range(1, 6)}


def test_ticks_that_were_recorded_again_replace_those_after_them(tmp_path: Path) -> None:
    timeline = filled(ticks=4)
    visualizer = TensorBoardVisualizer(tmp_path)
    for tick in range(4):
        visualizer.show(tick, charts_of(timeline))
    timeline.forget(2)
    timeline.append(2, {"Norm/net.a": {"mean": 100.0}})
    visualizer.show(2, charts_of(timeline))
    visualizer.flush()
    found = scalars(tmp_path)
    assert found["Norm/net.a/mean"] == {0: 1.0, 1: 2.0, 2: 100.0}
    assert found["Norm/net.b/mean"] == {0: 2.0, 1: 4.0}


def test_a_resumed_training_goes_on_in_its_folder(tmp_path: Path) -> None:
    watched(tmp_path / "board", 3, tmp_path / "run.db")
    watched(tmp_path / "board", 2, tmp_path / "run.db")
    found = scalars(tmp_path / "board")
    with Timeline(tmp_path / "run.db") as timeline:
        for tick in timeline.ticks():
            for tag, value in numbers(tick, charts_of(timeline)).items():
                assert found[tag].pop(tick) == float32(value)
    assert not any(found.values())
    assert layout(tmp_path / "board").category


def test_the_layout_names_tags_that_exist_and_has_every_layer(tmp_path: Path) -> None:
    layers = [f"l[{i}].$" for i in range(40)]
    row = {"mean": 1.0, "std": 0.5, "min": 0.0, "max": 2.0, "median": 1.0}
    values = {f"Norm/{layer}": {0: row} for layer in layers} | {f"Loss/{name}": {0: {"mean": 1.0}} for name in ("train", "eval")}
    charts = [
        Chart("Norm", ("x",), lines=("mean", "median", "max"), ranges=("std", "min-max")),
        Chart("Share", (), across=(Across("Norm", "share"),)),
        Chart("Loss", ("loss",), ranges=None),
    ]
    replay(charted(charts, values), f"tensorboard:{tmp_path}")
    tags, sections = set(scalars(tmp_path)), layout(tmp_path).category
    assert [(section.title, section.closed) for section in sections] == [
        ("Loss", False),
        ("Norm, l[0].$ to l[15].$", True),
        ("Norm, l[16].$ to l[31].$", True),
        ("Norm, l[32].$ to l[39].$", True),
        ("Share", True),
    ]
    assert [chart.title for chart in sections[0].chart] == ["all layers, mean", "eval", "train"]
    assert [tag for chart in (sections[0].chart[0], sections[4].chart[0]) for tag in chart.multiline.tag] == [
        "Loss/.*/mean$",
        "Share/",
    ]
    panels = {chart.title: chart.margin.series for section in sections[1:4] for chart in section.chart}
    assert sorted(panels) == sorted(layers)
    for layer, series in panels.items():
        named = [[tag.removeprefix(f"Norm/{layer}/") for tag in (one.value, one.lower, one.upper)] for one in series]
        assert named == [["mean", "mean-std", "mean+std"], ["median", "min", "max"]]
        assert {tag for one in series for tag in (one.value, one.lower, one.upper)} <= tags


def test_charts_that_come_later_are_in_the_layout(tmp_path: Path) -> None:
    visualizer, first, more = TensorBoardVisualizer(tmp_path), filled(ticks=1), filled(("late",), ticks=2)
    visualizer.show(0, charts_of(first)[:1])
    visualizer.show(1, charts_of(more))
    visualizer.flush()
    assert [section.title for section in layout(tmp_path).category] == ["Loss", "Norm"]


def test_flushing_and_going_on_loses_nothing(tmp_path: Path) -> None:
    timeline, visualizer = filled(ticks=4), TensorBoardVisualizer(tmp_path)
    visualizer.flush()
    for tick in range(4):
        visualizer.show(tick, charts_of(timeline))
        visualizer.flush()
        assert len(scalars(tmp_path)["Norm/net.a/mean"]) == tick + 1
    assert scalars(tmp_path)["Norm/net.a/mean"] == {0: 1.0, 1: 2.0, 2: 3.0, 3: 4.0}


def test_a_folder_that_cannot_be_written_warns_once_and_training_goes_on(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.warns(RecordingWarning, match="TensorBoardVisualizer failed at tick 0") as warned:
        watched(tmp_path / "file" / "board", 3)
    assert len(warned) == 1


@pytest.mark.slow
def test_the_end_of_the_process_writes_what_was_not_written(tmp_path: Path) -> None:
    script = f"""
import os, sys
sys.path.insert(0, {str(ROOT / "tests")!r})
from pages import filled
from recorders.watch.charts import charts_of
from recorders.watch.visualizers import TensorBoardVisualizer, add_histogram
timeline = filled()
visualizer = TensorBoardVisualizer({str(tmp_path)!r})
for tick in timeline.ticks():
    visualizer.show(tick, charts_of(timeline))
    if tick == 2 and (child := os.fork()):
        os.waitpid(child, 0)
    elif tick == 2:
        sys.exit()
"""
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    subprocess.run([sys.executable, "-c", script], check=True, cwd=ROOT, env=environment)
    assert scalars(tmp_path)["Norm/net.a/mean"] == {tick: tick + 1.0 for tick in range(5)}


def test_without_a_folder_a_run_is_named_for_the_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    visualizer = TensorBoardVisualizer()
    assert not list(tmp_path.iterdir())
    visualizer.show(0, charts_of(filled(ticks=1)))
    visualizer.flush()
    assert visualizer.folder.parent.name == "runs"
    assert "Loss/train/mean" in scalars(tmp_path / visualizer.folder)


def test_a_histogram_is_written_with_its_own_bins(tmp_path: Path) -> None:
    writer = pytest.importorskip("torch.utils.tensorboard").SummaryWriter(str(tmp_path))
    histogram = Histogram("b c -> c", edges=(-1.0, 0.0, 0.5, 4.0))
    x = torch.tensor([[-0.5, 0.0], [0.25, 4.0], [9.0, torch.nan]])
    add_histogram(writer, "out/0", histogram.compute(histogram.update({}, x)), 7)
    writer.close()
    event = accumulator.EventAccumulator(str(tmp_path), {"tensors": 0, "histograms": 0}).Reload().Histograms("out/0")[0]
    found = event.histogram_value
    assert (event.step, found.num, found.min, found.max) == (7, 4, -1.0, 4.0)
    assert (found.bucket_limit, found.bucket) == ([0.0, 0.5, 4.0], [1, 2, 1])
