"""Weights & Biases, offline: what is in the file of a run is what the timeline holds; and a stand-in for what needs a server."""

from __future__ import annotations

import json
import math
import struct
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from pages import charted, filled
from torch import nn

from recorders import Inspector, lenses
from recorders.errors import RecordingWarning
from recorders.watch.charts import Chart, charts_of
from recorders.watch.replay import replay
from recorders.watch.visualizers import WandbVisualizer, as_visualizers
from recorders.watch.visualizers.numbers import numbers

wandb = pytest.importorskip("wandb")


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Where offline runs are written; no run is left active."""
    for name, value in {"WANDB_MODE": "offline", "WANDB_DIR": str(tmp_path), "WANDB_SILENT": "true"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.chdir(tmp_path)
    wandb.teardown()
    yield tmp_path
    wandb.teardown()


def records(path: Path) -> Iterator[Any]:
    """The records of the file of a run: a log of LevelDB, after a header of 7 bytes."""
    from wandb.proto.wandb_internal_pb2 import Record

    data, place, kept = path.read_bytes(), 7, b""
    assert data[:4] == b":W&B"
    while place + 7 <= len(data):
        if (room := 32768 - place % 32768) < 7:
            place += room
            continue
        size, kind = struct.unpack("<HB", data[place + 4 : place + 7])
        if place + 7 + size > len(data):
            return  # it is still being written
        kept += data[place + 7 : place + 7 + size]
        place += 7 + size
        if kind in (1, 4):  # whole, or the last part
            yield Record.FromString(kept)
            kept = b""


def runs(folder: Path) -> list[list[Any]]:
    """The records of all runs, which have ended: W&B's own process may still be writing when `finish` returns."""
    deadline = time.monotonic() + 30
    while True:
        paths = sorted(folder.rglob("*.wandb"), key=lambda path: path.stat().st_mtime_ns)
        found = [list(records(path)) if path.stat().st_size > 7 else [] for path in paths]
        if all(map(ended, found)) or time.monotonic() > deadline:
            return found
        time.sleep(0.1)


def history(run: list[Any]) -> list[dict[str, Any]]:
    """The rows of a run, without the clock."""
    rows = [record.history for record in run if record.WhichOneof("record_type") == "history"]
    found = [{"/".join(item.nested_key) or item.key: json.loads(item.value_json) for item in row.item} for row in rows]
    return [{key: value for key, value in row.items() if key not in ("_timestamp", "_runtime")} for row in found]


def ended(run: list[Any]) -> bool:
    return any(record.WhichOneof("record_type") == "exit" for record in run)


@pytest.mark.slow
def test_every_number_of_a_training_is_read_back(folder: Path) -> None:
    net = nn.Sequential(nn.Linear(4, 3), nn.ReLU(), nn.Linear(3, 1))
    watching = [lenses.OutputGradientGeometry(), lenses.OutputNorm(comparison_plot=True)]
    with Inspector(net, watching, show="wandb:project") as inspector:
        for _ in inspector.iter(range(3)):
            loss = net(torch.randn(8, 4)).square().mean()
            loss.backward()
            inspector.push_loss(loss)
    (run,) = runs(folder)
    assert history(run) == [{"_step": tick, "tick": tick, **numbers(tick, inspector.charts)} for tick in range(3)]
    assert ended(run)
    assert {record.run.project for record in run if record.WhichOneof("record_type") == "run"} == {"project"}
    defined = {record.metric.glob_name: record.metric for record in run if record.WhichOneof("record_type") == "metric"}
    assert {view.title + "/*" for view in inspector.charts} <= set(defined)
    assert wandb.run is None


@pytest.mark.slow
def test_of_many_layers_those_that_moved_most_are_logged(folder: Path) -> None:
    replay(filled([f"l{i}" for i in range(4)], ticks=2), WandbVisualizer(most=3))
    (rows,) = map(history, runs(folder))
    assert [row["Norm/layers left out"] for row in rows] == [1.0, 1.0]
    assert [{key.split("/")[1] for key in row if key.endswith("/max")} for row in rows] == [{"l0", "l1", "l2"}] * 2


@pytest.mark.slow
def test_values_that_are_not_finite_are_written_as_they_are(folder: Path) -> None:
    values = [math.nan, math.inf, -math.inf, 1e300]
    timeline = charted([Chart("Norm*", ("x",), ranges=None)], {f"Norm*/{i}": {7: {"mean": each}} for i, each in enumerate(values)})
    replay(timeline, WandbVisualizer(name="one"))
    ((row,),) = map(history, runs(folder))
    assert row["_step"] == 7
    found = [float(row[f"Norm*/{i}/mean"]) for i in range(4)]
    assert math.isnan(found[0])
    assert found[1:] == values[1:]


@pytest.mark.parametrize("explicit", [False, True])
def test_the_run_of_the_program_keeps_all_of_its_rows(folder: Path, explicit: bool) -> None:
    """The program logs 10 steps for each tick, or numbers its steps itself, by tens; ticks are ahead of them, and behind."""
    timeline = charted([Chart("Loss", ("loss",), ranges=None)], {"Loss/train": {t: {"mean": t / 8} for t in range(20, 24)}})
    mine, visualizer = wandb.init(), WandbVisualizer("another")
    for tick in timeline.ticks():
        for step in range(10):
            mine.log({"mine": step}, **({"step": (tick - 20) * 100 + step * 10} if explicit else {}))
        visualizer.show(tick, charts_of(timeline))
        if tick == 21:
            visualizer.flush()
            assert wandb.run is mine
    visualizer.show(23, charts_of(timeline))  # two ticks without a step of the program
    mine.log({"mine": 10})
    mine.finish()
    (run,) = runs(folder)
    rows = history(run)
    assert [row["mine"] for row in rows if "mine" in row] == [*range(10)] * 4 + [10]
    assert [(row["tick"], row["Loss/train/mean"]) for row in rows if "tick" in row] == [
        (tick, tick / 8) for tick in (20, 21, 22, 23, 23)
    ]


def test_a_run_that_follows_has_its_own_numbers(folder: Path) -> None:
    """As in cross-validation: the program's first run, then its second, then none."""
    timeline, visualizer = filled(ticks=2), WandbVisualizer("own")
    for _ in range(2):
        with wandb.init(project="program"):
            for tick in range(2):
                visualizer.show(tick, charts_of(timeline))
    replay(timeline, visualizer)
    found = runs(folder)
    assert [[row["tick"] for row in history(run)] for run in found] == [[0, 1]] * 3
    assert [len([1 for record in run if record.metric.glob_name == "Norm/*"]) > 0 for run in found] == [True] * 3
    assert all(ended(run) for run in found)


class Server:
    """Stands for the module `wandb`, with a server that does not answer, or nobody logged in."""

    Settings = SimpleNamespace

    def __init__(self, answers: bool, logged_in: bool, mode: str = "online") -> None:
        self.run: Any = None
        self.answers, self.logged_in, self.mode = answers, logged_in, mode
        self.asked: list[str] = []
        self.logged: list[tuple[int, bool]] = []

    def setup(self) -> Any:
        return SimpleNamespace(settings=SimpleNamespace(mode=self.mode))

    def login(self, timeout: float) -> bool:
        self.asked.append("login")
        return self.logged_in

    def init(self, mode: str | None = None, **_: Any) -> Any:
        self.asked.append(mode or self.mode)
        if self.asked[-1] == "online" and not self.answers:
            raise ConnectionError("no answer")
        self.run = SimpleNamespace(define_metric=lambda *_, **__: None, log=self.log, finish=self.finish)
        return self.run

    def log(self, data: dict[str, Any], step: int, commit: bool) -> None:
        self.logged.append((step, commit))

    def finish(self) -> None:
        self.asked.append("finish")
        self.run = None


@pytest.mark.parametrize(
    ("server", "asked", "why"),
    [
        (Server(True, True), ["login", "online", "finish"], None),
        (Server(True, False), ["login", "offline", "finish"], "nobody is logged in"),
        (Server(False, True), ["login", "online", "offline", "finish"], "no answer"),
        (Server(False, False, "offline"), ["offline", "finish"], None),
        (Server(False, False, "disabled"), ["disabled", "finish"], None),
    ],
)
def test_without_a_server_the_run_is_offline(server: Server, asked: list[str], why: str | None) -> None:
    visualizer, timeline = WandbVisualizer("project"), filled(ticks=3)
    visualizer._wandb = server
    if why is None:
        replay(timeline, visualizer)
    else:
        with pytest.warns(RecordingWarning, match=rf"{why}.*offline"):
            replay(timeline, visualizer)
    assert server.asked == asked
    assert server.logged == [(0, True), (1, True), (2, True)]
    replay(timeline, visualizer)
    assert server.asked[len(asked) :] == (asked if why is None else ["offline", "finish"])


def test_what_cannot_be_logged_warns_once_and_training_goes_on(folder: Path) -> None:
    inspector = Inspector(lenses=[], show=WandbVisualizer("project", mode="nonsense"))
    with pytest.warns(RecordingWarning, match="WandbVisualizer failed at tick 0") as warned:
        for _ in inspector.range(3):
            inspector.push_loss(1.0)
    assert len(warned) == 1
    assert inspector.timeline.ticks() == [0, 1, 2]


def test_making_one_starts_nothing(folder: Path) -> None:
    (made,) = as_visualizers("wandb:project")
    assert isinstance(made, WandbVisualizer)
    made.flush()
    assert wandb.run is None
    assert runs(folder) == []
