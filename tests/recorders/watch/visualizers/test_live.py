"""The live table: what it shows of a timeline, where, and how seldom."""

from __future__ import annotations

import io
import math
import os
import re
import subprocess
import sys
import types
from pathlib import Path
from typing import Any

import pytest
import torch
from paths import ROOT
from terminal import Terminal
from torch import nn

from recorders import Inspector, lenses
from recorders.recordings.display import sparkline
from recorders.watch.charts import Chart, ChartView, keep_charts
from recorders.watch.replay import replay
from recorders.watch.timeline import Timeline
from recorders.watch.visualizers import MatplotlibVisualizer, TextVisualizer, live
from recorders.watch.visualizers import matplotlib as figures

pytest.importorskip("rich")


@pytest.fixture(autouse=True)
def always_due(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(live, "PAUSE", 0.0)
    monkeypatch.setattr(live, "SHARE", math.inf)
    for name, value in (("COLUMNS", "90"), ("LINES", "40"), ("TERM", "xterm"), ("WT_SESSION", "1"), ("NO_COLOR", "1")):
        monkeypatch.setenv(name, value)


def views(timeline: Timeline, layers: int) -> list[ChartView]:
    names = tuple(f"layer{number}" for number in range(layers))
    dead = Chart("Dead Units", ("dead",), "share of units", ranges=None, limits=(0.0, 1.0))
    loss = Chart("Loss", ("loss",), "loss", ranges=None)
    return [ChartView(dead, timeline, names), ChartView(loss, timeline, ("train",))]


def shown(values: list[dict[str, float]], layers: int = 2) -> tuple[Terminal, Timeline]:
    """The terminal after ticks with these means by row."""
    timeline, terminal = Timeline(), Terminal(90, 40)
    visualizer, charts = TextVisualizer(terminal), views(timeline, layers)
    keep_charts(timeline, charts)
    for tick, rows in enumerate(values):
        timeline.append(tick, {name: {"mean": value} for name, value in rows.items()})
        visualizer.show(tick, charts)
    visualizer.flush()
    return terminal, timeline


def test_one_table_has_last_value_course_and_range_of_each_row() -> None:
    ticks = [{"Dead Units/layer0": 0.0, "Dead Units/layer1": tick / 70, "Loss/train": 8.0 - tick} for tick in range(8)]
    terminal, _ = shown(ticks)
    assert [line.split() for line in terminal.lines] == [
        ["tick", "7"],
        ["Loss"],
        ["train", "1", "█▇▆▅▄▃▂▁", "1", "…", "8"],
        ["Dead", "Units", "(share", "of", "units)"],
        ["layer0", "0", "▄▄▄▄▄▄▄▄", "0", "…", "0"],
        ["layer1", "0.1", "▁▂▃▄▅▆▇█", "0", "…", "0.1"],
        [],
    ]


def test_findings_come_first_and_values_that_are_not_finite_show() -> None:
    ticks = [{"Dead Units/layer1": 0.75, "Loss/train": [1.0, 2.0, math.nan, math.inf, 0.5][tick]} for tick in range(5)]
    terminal, _ = shown(ticks)
    assert terminal.lines[1].startswith("! layer1, since tick 0: 75% of the units are dead")
    assert terminal.lines[3].split() == ["train", "0.5", "▃█\u00d7\u00d7▁", "0.5", "…", "2"]


def test_values_kept_out_of_the_statistics_show_too_and_missing_ones_are_spaces() -> None:
    timeline, terminal = Timeline(), Terminal(90, 40)
    visualizer = TextVisualizer(terminal)
    view = ChartView(Chart("Norm", ("x",), ranges=None), timeline, ("[red]a",))
    for tick, row in enumerate([{"mean": 1.0}, {"mean": 1.5, "nonfinite": 3.0}, {}, {"mean": 2.0}]):
        timeline.append(tick, {"Norm/[red]a": row} if row else {"other": {"mean": 1.0}})
        visualizer.show(tick, [view])
    assert terminal.lines[2].split() == ["[red]a", "2", "▁\u00d7", "█", "1", "…", "2"]


def test_hundreds_of_layers_fit_and_the_rest_is_counted() -> None:
    def rows(tick: int) -> dict[str, float]:
        still = {f"Dead Units/layer{number}": 0.1 for number in range(300)}
        return {**still, "Dead Units/layer7": 0.1 + 0.005 * tick, "Dead Units/layer250": 0.9, "Loss/train": 1.0}

    terminal, _ = shown([rows(tick) for tick in range(10)], layers=300)
    found = [line.split()[0] for line in terminal.lines if line.startswith("  ")]
    assert len(terminal.lines) <= 31  # three quarters of 40, and the empty one
    assert {"train", "layer7", "layer250"} <= set(found)
    assert terminal.lines[-2] == f"… and {301 - len(found)} more rows, which changed less"
    assert not any("layer250" in line for line in terminal.lines[2:4])
    assert terminal.lines[1].startswith("! layer250, since tick 0: 90%")


@pytest.mark.slow
def test_many_ticks_are_joined_to_the_width_and_resuming_reads_earlier_ones() -> None:
    terminal, timeline = shown([{"Loss/train": float(tick)} for tick in range(1000)])
    course = terminal.lines[2].split()[2]
    assert len(course) <= 24
    assert course[0], course[-1] == "▁█"
    again = Terminal(90, 40)
    visualizer = TextVisualizer(again)
    timeline.append(1000, {"Loss/train": {"mean": 1000.0}})
    visualizer.show(1000, views(timeline, 2))
    assert again.lines[2].split()[2][0] == "▁"
    assert again.lines[2].split()[1] == "1000"


def test_sparklines_of_constants_of_nothing_and_on_logarithmic_axes() -> None:
    assert sparkline([2.0, 2.0]) == "▄▄"
    assert sparkline([None, None]) == "  "
    assert sparkline([]) == ""
    assert sparkline([1e-4, 1e-2, 1.0], log_scale=True) == "▁▅█"
    assert sparkline([-1.0, 0.0, 1.0], log_scale=True) == "▁▅█"
    assert sparkline([-math.inf, math.nan]) == "\u00d7\u00d7"


def test_drawing_is_seldom_and_the_last_tick_is_drawn(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(live, "PAUSE", 1e9)
    terminal, _ = shown([{"Loss/train": float(tick)} for tick in range(200)])
    assert terminal.lines[0] == "tick 199"
    assert terminal.written < 2000  # the first one and the last one


def test_files_have_tables_at_each_tick_and_live_may_be_chosen() -> None:
    timeline = Timeline()
    timeline.append(0, {"Loss/train": {"mean": 1.0}})
    keep_charts(timeline, views(timeline, 1))
    texts = {}
    for name, file, chosen in (("file", io.StringIO(), None), ("terminal", Terminal(), False), ("forced", io.StringIO(), True)):
        replay(timeline, TextVisualizer(file, live=chosen))
        texts[name] = file.getvalue() if name != "terminal" else "\n".join(file.lines)  # type: ignore[attr-defined]
    assert texts["file"].startswith("Loss, tick 0\nlayer")
    assert texts["terminal"].startswith("Loss, tick 0\nlayer")
    assert "\x1b[" not in texts["file"]
    assert "▄" in texts["forced"]


def test_charts_of_several_timelines_are_tables() -> None:
    terminal, charts = Terminal(), []
    for _ in range(2):
        timeline = Timeline()
        timeline.append(0, {"Loss/train": {"mean": 1.0}})
        charts.append(views(timeline, 1)[1])
    TextVisualizer(terminal).show(0, charts)
    assert terminal.lines.count("Loss, tick 0") == 2


class Notebook:
    """What stands for IPython in a kernel: outputs, each with all that it showed."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.outputs: list[list[dict[str, str]]] = []
        self.shell = types.SimpleNamespace(kernel=object(), execution_count=1)
        package, display = types.ModuleType("IPython"), types.ModuleType("IPython.display")
        package.version_info = (9, 0)  # type: ignore[attr-defined]
        package.get_ipython = lambda: self.shell  # type: ignore[attr-defined]
        display.display = self.display  # type: ignore[attr-defined]
        monkeypatch.setitem(sys.modules, "IPython", package)
        monkeypatch.setitem(sys.modules, "IPython.display", display)

    def display(self, data: dict[str, str], raw: bool, display_id: bool) -> Any:
        assert (raw, display_id) == (True, True)
        self.outputs.append([data])
        return types.SimpleNamespace(update=lambda data, raw: self.outputs[-1].append(data))


def test_a_notebook_has_one_output_a_cell(monkeypatch: pytest.MonkeyPatch) -> None:
    notebook, timeline = Notebook(monkeypatch), Timeline()
    visualizer = TextVisualizer()
    for tick in range(3):
        timeline.append(tick, {"Loss/train": {"mean": 1.0}})
        visualizer.show(tick, views(timeline, 1))
    notebook.shell.execution_count = 2
    timeline.append(3, {"Loss/train": {"mean": 1.0}})
    visualizer.show(3, views(timeline, 1))
    texts = [[data["text/plain"][4:10] for data in output] for output in notebook.outputs]
    assert texts == [["tick 0", "tick 1", "tick 2"], ["tick 3"]]


def test_figures_in_a_notebook_are_redrawn_in_place(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("matplotlib")
    monkeypatch.setattr(figures, "_PAUSE", 0.0)
    monkeypatch.setattr(figures, "_SHARE", math.inf)
    notebook, timeline = Notebook(monkeypatch), Timeline()
    visualizer = MatplotlibVisualizer()
    for tick in range(3):
        timeline.append(tick, {"Loss/train": {"mean": float(tick)}})
        visualizer.show(tick, views(timeline, 1))
    visualizer.flush()
    (output,) = notebook.outputs
    assert len({data["image/png"] for data in output}) == 3


@pytest.mark.slow
def test_table_bar_and_prints_of_a_training_in_a_real_terminal(tmp_path: Path) -> None:
    pty = pytest.importorskip("pty")
    script = tmp_path / "training.py"
    script.write_text(
        "import logging, torch\n"
        "logging.basicConfig(level='INFO')\n"
        "from recorders import Inspector, lenses\n"
        "net = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.ReLU(), torch.nn.Linear(4, 1))\n"
        "with Inspector(net, lenses.OutputGradientGeometry(), show='text') as inspector:\n"
        "    for epoch in inspector.range(20, progress=True):\n"
        "        loss = net(torch.ones(8, 4)).square().mean()\n"
        "        loss.backward()\n"
        "        inspector.push_loss(loss)\n"
        "        print('printed', epoch)\n"
        "        logging.info('logged %d', epoch)\n"
    )
    process, reader = pty.fork()
    if process == 0:
        size = {"COLUMNS": "90", "LINES": "30", "TERM": "xterm", "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
        os.execve(sys.executable, [sys.executable, str(script)], {**os.environ, **size})
    written = b""
    try:
        while data := os.read(reader, 65536):
            written += data
    except OSError:  # what Linux says if the other end is closed
        pass
    os.close(reader)
    assert os.waitpid(process, 0)[1] == 0, written.decode()
    terminal = Terminal(90, 30)
    terminal.write(written.decode().replace("\r\n", "\n"))
    lines = terminal.lines
    for epoch in range(20):
        assert lines.count(f"printed {epoch}") == lines.count(f"INFO:root:logged {epoch}") == 1
    assert lines.count("epoch 19") == 1
    assert not any(re.match(r"epoch (?!19)", line) for line in lines)
    (bar,) = [line for line in lines if "20/20" in line]
    assert re.fullmatch(r"100%\|█{10}\| 20/20 \[00:\d\d<00:00, .*, train loss=[\d.e-]+\]", bar)


@pytest.mark.slow
def test_a_pipe_gets_no_escapes_and_a_line_of_progress(tmp_path: Path) -> None:
    script = (
        "import sys\n"
        "from recorders import Inspector, lenses\n"
        "inspector = Inspector(lenses=lenses.LossMetrics(), show='text')\n"
        "for epoch in inspector.range(3, progress=True):\n"
        "    inspector.push_loss(epoch)\n"
    )
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "FORCE_COLOR": ""}
    done = subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, text=True, check=True)
    assert done.stdout.count("Loss, epoch") == 3
    assert "\x1b[" not in done.stdout
    assert re.findall(r"\d/3", done.stderr) == ["1/3", "3/3"]


def test_text_calls_the_ticks_epochs_or_steps_as_the_timeline_does() -> None:
    found = []
    for axis in ("epoch", "step"):
        net, file = nn.Sequential(nn.Linear(2, 2), nn.ReLU()), io.StringIO()
        with Inspector(net, lenses.OutputNorm(), show=TextVisualizer(file)) as inspector:
            net(torch.ones(1, 2))
            inspector.step()
            inspector.tick_epoch() if axis == "epoch" else inspector.tick()
        found.append(file.getvalue().partition("\n")[0])
    assert [line.rpartition(", ")[2] for line in found] == ["epoch 0", "step 1"]
