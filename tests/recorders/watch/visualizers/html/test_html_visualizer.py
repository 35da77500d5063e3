"""The page of a training that goes on: written at the start, seldom, and at the end."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from pages import filled, held, unpacked
from paths import ROOT
from torch import nn

from recorders import Inspector, RecordingWarning, Timeline, lenses
from recorders.errors import LensError
from recorders.watch.charts import charts_of
from recorders.watch.replay import replay
from recorders.watch.visualizers import HtmlVisualizer, MatplotlibVisualizer, as_visualizers, html_report
from recorders.watch.visualizers.html import visualizer as module


class Clock:
    """Stands for the time, which only passes when told."""

    def __init__(self) -> None:
        self.now = 1000.0

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    monkeypatch.setattr("time.monotonic", made.monotonic)
    return made


def shown(path: Path) -> list[int]:
    ticks: list[int] = held(path.read_text())["runs"][0]["ticks"]
    return ticks


def test_the_page_is_written_at_once_then_seldom_then_at_the_end(tmp_path: Path, clock: Clock) -> None:
    timeline = filled(ticks=6)
    views, page = charts_of(timeline), tmp_path / "report.html"
    visualizer = HtmlVisualizer(page)
    visualizer.show(0, views)
    assert shown(page) == [0]
    clock.now += module.PAUSE - 0.1
    visualizer.show(1, views)
    assert shown(page) == [0]
    clock.now += 0.2
    visualizer.show(2, views)
    assert shown(page) == [0, 1, 2]
    assert held(page.read_text())["live"]
    visualizer.show(3, views)
    visualizer.flush()
    assert shown(page) == [0, 1, 2, 3]
    assert not held(page.read_text())["live"]
    written = page.stat().st_mtime_ns
    visualizer.flush()
    assert page.stat().st_mtime_ns == written


def test_the_page_has_findings_while_the_training_goes_on(tmp_path: Path, clock: Clock) -> None:
    net, page = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 1)), tmp_path / "report.html"
    with torch.no_grad():
        net[0].bias.fill_(-100.0)
    with Inspector(net, lenses.DeadUnits(), show=HtmlVisualizer(page)) as inspector:
        for _ in inspector.range(2):
            net(torch.rand(16, 4)).sum().backward()
            clock.now += 60.0
        found = held(page.read_text())
    assert found["live"]
    assert [one["layer"] for one in found["runs"][0]["findings"]] == ["1"]
    assert "dead" in found["runs"][0]["findings"][0]["what"]


def test_writing_takes_a_small_share_of_the_time(tmp_path: Path, clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    def slow(*_: object) -> Path:
        clock.now += 2.0
        return tmp_path

    monkeypatch.setattr(module, "write_whole", slow)
    timeline = filled()
    visualizer = HtmlVisualizer(tmp_path / "report.html")
    visualizer.show(0, charts_of(timeline))
    clock.now += 0.99 * 2.0 / module.SHARE
    assert not visualizer._live.pace.due
    clock.now += 0.02 * 2.0 / module.SHARE
    assert visualizer._live.pace.due


def test_the_last_page_is_that_of_the_timeline(tmp_path: Path) -> None:
    timeline = filled(ticks=7)
    replay(timeline, f"html:{tmp_path / 'report.html'}")
    live, whole = held((tmp_path / "report.html").read_text()), held(html_report(timeline))
    assert {**live, "made": ""} == {**whole, "made": ""}


def test_a_tick_that_was_recorded_again_replaces_those_after_it(tmp_path: Path) -> None:
    timeline = filled(ticks=4)
    visualizer = HtmlVisualizer(tmp_path / "report.html")
    for tick in range(4):
        visualizer.show(tick, charts_of(timeline))
    timeline.forget(2)
    timeline.append(2, {"Norm/net.a": {"mean": 100.0}, "Norm/late": {"mean": 5.0}})
    visualizer.show(2, charts_of(timeline))
    visualizer.flush()
    report = held((tmp_path / "report.html").read_text())
    assert report["runs"][0]["ticks"] == [0, 1, 2]
    assert unpacked(report)["Norm", "mean", "net.a"] == [1, 2, 100]


def test_a_resumed_training_shows_what_came_before(tmp_path: Path) -> None:
    timeline = filled(ticks=4)
    visualizer = HtmlVisualizer(tmp_path / "report.html")
    visualizer.show(3, charts_of(timeline))
    assert shown(tmp_path / "report.html") == [0, 1, 2, 3]


def inspected(page: Path, epochs: int, timeline: Path | None = None) -> None:
    net = nn.Sequential(nn.Linear(4, 3), nn.ReLU(), nn.Linear(3, 1))
    with Inspector(net, lenses.OutputGradientGeometry(), show=f"html:{page}", timeline=timeline) as inspector:
        for _ in inspector.iter(range(epochs)):
            loss = net(torch.randn(8, 4)).square().mean()
            loss.backward()
            inspector.push_loss(loss)


def test_an_inspector_writes_the_whole_page_when_it_is_detached(tmp_path: Path) -> None:
    inspected(tmp_path / "report.html", 3, tmp_path / "run.db")
    inspected(tmp_path / "report.html", 2, tmp_path / "run.db")
    report = held((tmp_path / "report.html").read_text())
    assert report["runs"][0]["ticks"] == [0, 1, 2, 3, 4]
    assert not report["live"]
    mean = unpacked(report)["Output Gradient Norm", "mean", "0"]
    assert mean == pytest.approx(Timeline(tmp_path / "run.db").series("Output Gradient Norm/0", "mean")[1], rel=1e-6)


def test_a_page_that_cannot_be_written_warns_once_and_training_goes_on(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.warns(RecordingWarning, match="HtmlVisualizer failed at tick 0") as warned:
        inspected(tmp_path / "file" / "report.html", 3)
    assert len(warned) == 1


@pytest.mark.slow
def test_the_end_of_the_process_writes_what_was_not_written(tmp_path: Path) -> None:
    script = f"""
import sys
sys.path.insert(0, {str(ROOT / "tests")!r})
from pages import filled
from recorders.watch.charts import charts_of
from recorders.watch.visualizers import HtmlVisualizer
timeline = filled()
visualizer = HtmlVisualizer({str(tmp_path / "report.html")!r})
for tick in timeline.ticks():
    visualizer.show(tick, charts_of(timeline))
"""
    subprocess.run([sys.executable, "-c", script], check=True, cwd=ROOT)
    assert shown(tmp_path / "report.html") == [0, 1, 2, 3, 4]


def test_charts_of_two_timelines_are_refused(tmp_path: Path) -> None:
    views = [*charts_of(filled()), *charts_of(filled())]
    with pytest.raises(LensError, match="one timeline"):
        HtmlVisualizer(tmp_path / "report.html").show(0, views)
    HtmlVisualizer(tmp_path / "none.html").show(0, [])
    assert not list(tmp_path.iterdir())


def test_names_may_have_targets(tmp_path: Path) -> None:
    (html,) = as_visualizers(f"html:{tmp_path / 'a:b.html'}")
    assert isinstance(html, HtmlVisualizer)
    assert html.path == tmp_path / "a:b.html"
    for wrong in ("html:", "text:out.txt", "cinema:x"):
        with pytest.raises(LensError, match="no visualizer"):
            as_visualizers(wrong)


def test_figures_are_saved_in_the_target_when_the_replay_ends(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    replay(filled(), f"matplotlib:{tmp_path / 'figures'}")
    assert sorted(path.name for path in (tmp_path / "figures").iterdir()) == ["loss.png", "norm.png"]
    MatplotlibVisualizer().flush()
