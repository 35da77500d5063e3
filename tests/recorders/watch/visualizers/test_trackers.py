"""Trackers, offline: what the reader of each installed package finds in its files is what the timeline holds."""

from __future__ import annotations

import csv
import json
import math
import os
import posixpath
import subprocess
import sys
import zipfile
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from pages import charted, filled
from paths import ROOT
from torch import nn

from recorders import Inspector, Timeline, lenses
from recorders.errors import LensError, MissingExtraError, RecordingWarning
from recorders.watch.charts import Across, Chart, charts_of
from recorders.watch.replay import replay
from recorders.watch.visualizers import TrackerVisualizer, as_visualizers
from recorders.watch.visualizers.choice import KINDS
from recorders.watch.visualizers.mlflow import mlflow_name, name_of_mlflow
from recorders.watch.visualizers.movers import Movers
from recorders.watch.visualizers.numbers import numbers
from recorders.watch.visualizers.trackio import binned
from reducers import Histogram, Quantile

Series = dict[str, dict[int, float]]
"""Values by name and by step."""

OFFLINE = {
    "CLEARML_OFFLINE_MODE": "1",
    "CLEARML_CACHE_DIR": "clearml",
    "DO_NOT_TRACK": "1",
    "HF_HUB_OFFLINE": "1",
    "MLFLOW_DISABLE_TELEMETRY": "true",
    "MLFLOW_TRACKING_URI": "sqlite:///mlflow.db",
    "TRACKIO_DIR": "trackio",
    "WANDB_MODE": "offline",
    "WANDB_SILENT": "true",
}
"""Nothing is sent, and all is written in the working folder."""

IMPORTS = """
from test_trackers import *
from recorders import ForwardMonitor, Recorder, findings
from recorders.watch.visualizers import MlflowVisualizer, TrackioVisualizer
from reducers import Moments
"""
"""What programs begin with."""

OPTIONS: dict[str, dict[str, Any]] = {
    "aim": {"system_tracking_interval": None, "capture_terminal_logs": False},
    "clearml": {"auto_connect_frameworks": False, "auto_resource_monitoring": False},
    "comet_ml": {"online": False},
    "dvclive": {"dir": "dvclive", "save_dvc_exp": False},
    "swanlab": {"mode": "offline", "logdir": "swanlab"},
    "trackio": {"auto_log_cpu": False, "auto_log_gpu": False},
}


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name, value in OFFLINE.items():
        monkeypatch.setenv(name, value)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def run(folder: Path, code: str) -> str:
    """What a program prints. Each has a process of its own: packages keep threads, runs and folders as long as that lasts."""
    path = os.pathsep.join([str(Path(__file__).parent), str(ROOT), str(ROOT / "tests")])
    done = subprocess.run(
        [sys.executable, "-c", IMPORTS + code],
        cwd=folder,
        env={**os.environ, **OFFLINE, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def wanted(timeline: Timeline) -> Series:
    """The numbers of the charts of a timeline."""
    found: Series = {}
    for tick in timeline.ticks():
        for name, value in numbers(tick, charts_of(timeline)).items():
            found.setdefault(name, {})[tick] = value
    return found


def same(found: Any, expected: Any) -> bool:
    """Whether both have the same, NaN too, in whatever order."""
    return json.dumps(found, sort_keys=True) == json.dumps(expected, sort_keys=True)


def close(found: Series, expected: Series) -> bool:
    """The same, with numbers as float32 has them, which TensorBoard writes."""
    return found == {name: pytest.approx(course, rel=1e-6) for name, course in expected.items()}


def trained(visualizer: Any, path: str = "run.db") -> None:
    """A training whose names have characters that not every tracker takes, and whose ticks are not in a row."""
    net = nn.Sequential()
    for name, module in {"block[0]": nn.Linear(4, 3), "a-b": nn.ReLU(), "last+": nn.Linear(3, 1)}.items():
        net.add_module(name, module)
    watching = [lenses.OutputGradientGeometry(), lenses.OutputNorm(comparison_plot=True)]
    with Inspector(net, watching, show=visualizer, timeline=path) as inspector:
        for epoch in (0, 1, 7):
            loss = net(torch.randn(8, 4)).square().mean()
            loss.backward()
            inspector.push_loss(loss)
            inspector.tick_epoch(epoch)


def of_tensorboard(folder: Path) -> Series:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder / "project"), {"scalars": 0}).Reload()
    return {tag: {one.step: one.value for one in events.Scalars(tag)} for tag in events.Tags()["scalars"]}


def of_wandb(folder: Path) -> Series:
    from test_wandb import history, runs

    found: Series = {}
    (one,) = runs(folder)
    for row in history(one):
        for name in row.keys() - {"_step"}:
            found.setdefault(name, {})[row["_step"]] = float(row[name])
    return found


def of_trackio(folder: Path, project: str = "project") -> Series:
    from trackio.sqlite_storage import SQLiteStorage

    found: Series = {}
    (one,) = SQLiteStorage.get_runs(project)
    for row in SQLiteStorage.get_logs(project, one):
        for name in row.keys() - {"step", "timestamp"}:
            found.setdefault(name, {})[row["step"]] = row[name]
    return found


def of_mlflow(folder: Path, experiment: str = "project", run_id: str | None = None) -> Series:
    import mlflow

    client = mlflow.MlflowClient()
    if run_id is None:
        (one,) = client.search_runs([client.get_experiment_by_name(experiment).experiment_id])
        assert one.info.status == "FINISHED"
        run_id = one.info.run_id
    names = client.get_run(run_id).data.metrics
    histories = {name: client.get_metric_history(run_id, name) for name in names}
    return {name_of_mlflow(name): {one.step: one.value for one in history} for name, history in histories.items()}


def of_dvclive(folder: Path) -> Series:
    found: Series = {}
    root = folder / "dvclive" / "plots" / "metrics"
    for path in root.rglob("*.tsv"):
        with path.open() as file:
            step, *_ = rows = list(csv.reader(file, delimiter="\t"))
        assert step[0] == "step"
        found[str(path.relative_to(root).with_suffix(""))] = {int(row[0]): float(row[1]) for row in rows[1:]}
    assert json.loads((folder / "dvclive" / "metrics.json").read_text())
    return found


def of_aim(folder: Path) -> Series:
    from aim import Repo, Run

    (known,) = Repo(str(folder)).list_all_runs()
    found: Series = {}
    for metric in Run(known, repo=str(folder), **OPTIONS["aim"]).metrics():  # without them a reader adds numbers of the system
        rows = metric.dataframe()
        found[metric.name] = dict(zip(rows["step"].tolist(), rows["value"].tolist(), strict=True))
    return found


def of_swanlab(folder: Path) -> Series:
    from swanlab.proto.swanlab.record.v1.record_pb2 import Record
    from swanlab.sdk.internal.core_python.store import DataStoreReader

    (path,) = (folder / "swanlab").rglob("run-*.swanlab")
    reader, found = DataStoreReader(), Series()
    reader.open(path)
    for data in reader:
        record = Record.FromString(data)
        if record.WhichOneof("record_type") == "scalar":
            found.setdefault(record.scalar.key, {})[record.scalar.step] = record.scalar.value.number
    reader.close()
    return found


def of_comet_ml(folder: Path) -> Series:
    (path,) = folder.rglob("*.zip")
    found: Series = {}
    for line in zipfile.ZipFile(path).read("messages.json").decode().splitlines():
        message = json.loads(line)
        if message["type"] == "metric_msg" and not message["payload"]["metric"]["metricName"].startswith("sys."):
            metric = message["payload"]["metric"]
            found.setdefault(metric["metricName"], {})[metric["step"]] = metric["metricValue"]
    return found


def of_clearml(folder: Path) -> Series:
    (path,) = (folder / "clearml").rglob("offline-*.zip")
    found: Series = {}
    for line in zipfile.ZipFile(path).read("metrics.jsonl").decode().splitlines():
        for event in json.loads(line):
            if event["type"] == "training_stats_scalar":
                found.setdefault(event["metric"], {})[event["iter"]] = event["value"]
    return found


READERS: dict[str, Callable[[Path], Series]] = {
    "aim": of_aim,
    "clearml": of_clearml,
    "comet_ml": of_comet_ml,
    "dvclive": of_dvclive,
    "mlflow": of_mlflow,
    "swanlab": of_swanlab,
    "tensorboard": of_tensorboard,
    "trackio": of_trackio,
    "wandb": of_wandb,
}


def read(name: str, folder: Path, *arguments: str) -> Series:
    """What is read in a process of its own, as by somebody who looks at it later."""
    text = run(folder, f"print('\\n' + json.dumps(READERS[{name!r}](Path.cwd(), *{arguments!r})))")
    return {key: {int(step): value for step, value in course.items()} for key, course in json.loads(text.splitlines()[-1]).items()}


@pytest.mark.slow
@pytest.mark.parametrize("name", READERS)
def test_every_number_of_a_training_is_read_back_by_the_package(name: str, folder: Path) -> None:
    pytest.importorskip("accelerate")
    if find_spec(name) is None:
        pytest.skip(f"{name} is not installed")
    run(folder, f"trained(TrackerVisualizer({name!r}, 'project', **OPTIONS.get({name!r}, {{}})))")
    with Timeline(folder / "run.db", read_only=True) as timeline:
        expected = wanted(timeline)
    assert len(expected) > 15
    assert close(read(name, folder), expected)


PROGRAMS = {
    "clearml": "given = TrackerVisualizer('clearml', 'project', **OPTIONS['clearml'])",
    "mlflow": "given = MlflowVisualizer('project')",
    "trackio": "given = TrackioVisualizer('project', **OPTIONS['trackio'])",
}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("clearml", {"Norm/1/mean": {0: 2.0}}),
        ("mlflow", {"Norm/0/mean": {0: math.nan}, "Norm/1/mean": {0: 2.0}, "Norm/2/mean": {0: sys.float_info.max}}),
        ("trackio", {"Norm/0/mean": {0: math.nan}, "Norm/1/mean": {0: 2.0}, "Norm/2/mean": {0: math.inf}}),
    ],
)
def test_values_that_are_not_finite_are_no_zeros(name: str, expected: Series, folder: Path) -> None:
    if find_spec(name) is None or find_spec("accelerate") is None:
        pytest.skip(f"{name} is not installed")
    values = "{f'Norm/{i}': {0: {'mean': value}} for i, value in enumerate((math.nan, 2.0, math.inf))}"
    run(folder, f"{PROGRAMS[name]}\nreplay(charted([Chart('Norm', ('x',), ranges=None)], {values}), given)")
    assert same(read(name, folder), expected)


@pytest.mark.slow
def test_trackio_has_numbers_histograms_and_each_finding_once(folder: Path) -> None:
    pytest.importorskip("trackio")
    out = run(
        folder,
        """
net = nn.Sequential(nn.Linear(4, 3), nn.ReLU())
visualizer = TrackioVisualizer('project', **OPTIONS['trackio'])
with Inspector(net, lenses.Quantiles(), show=visualizer, timeline='run.db') as inspector:
    for epoch in inspector.range(3):
        net(torch.arange(32.0).reshape(8, 4))
        inspector.push_loss(math.nan if epoch else 1.0)
        monitors = {'shares': ForwardMonitor(Histogram(bins=2, low=-1.0, high=1.0)), 'sizes': ForwardMonitor(Moments())}
        with Recorder(**monitors).modules(net, types=nn.ReLU) as recorder:
            net(torch.tensor([[0.5] * 4, [2.0] * 4]))
        visualizer.add_histograms(recorder, step=epoch)
        visualizer.add_histograms(inspector.recorders['Quantiles'], step=epoch, bins=4)
    for finding in findings(inspector.timeline):
        visualizer.alert(finding)  # was told
from trackio.sqlite_storage import SQLiteStorage
assert sys.modules['trackio'].context_vars.current_run.get() is None
print('\\n' + json.dumps([of_trackio(Path()), SQLiteStorage.get_alerts('project'), wanted(inspector.timeline)]))
""",
    )
    found, alerts, expected = json.loads(out.splitlines()[-1])
    histograms = {name: found.pop(name) for name in list(found) if name.endswith("histogram")}
    assert same(found, expected)
    assert set(histograms) == {"output/0/histogram", "output/1/histogram", "shares/1/histogram"}
    assert histograms["shares/1/histogram"]["2"]["_type"] == "trackio.histogram"
    assert histograms["shares/1/histogram"]["2"]["bins"] == [-1.0, 0.0, 1.0]
    assert [sum(histograms["output/0/histogram"][step]["values"]) for step in "012"] == [30.0] * 3  # of 10 samples
    told = [(one["title"], one["level"], one["step"]) for one in alerts]
    assert {("train: nonfinite", "error", tick) for tick in (1, 2)} & set(told)  # when it was looked for
    assert len(told) == len(set(told))


@pytest.mark.slow
def test_a_line_is_enough_for_a_tracker(folder: Path) -> None:
    pytest.importorskip("trackio")
    out = run(
        folder,
        """
net = nn.Sequential(nn.Linear(4, 3), nn.ReLU())
optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
with Inspector(net, show='trackio', timeline='run.db') as inspector:
    for epoch in inspector.range(2):
        net(torch.ones(8, 4)).sum().backward()
        optimizer.step()
print('\\n' + json.dumps([of_trackio(Path(), 'recorders'), wanted(inspector.timeline)]))
""",
    )
    found, expected = json.loads(out.splitlines()[-1])
    assert same(found, expected)
    assert {"Weight Gradient Norm", "Weight Update Ratio", "Nonfinite Outputs"} <= {name.partition("/")[0] for name in expected}


@pytest.mark.slow
def test_the_runs_of_the_program_are_used_and_stay_open(folder: Path) -> None:
    pytest.importorskip("mlflow")
    pytest.importorskip("trackio")
    run(
        folder,
        """
import mlflow, trackio
given = [TrackioVisualizer('another'), MlflowVisualizer('another')]
mine = trackio.init(project='project', **OPTIONS['trackio'])
with mlflow.start_run(experiment_id=mlflow.create_experiment('project')):
    mlflow.log_metric('mine', 1.0, step=40)
    trackio.log({'mine': 1.0}, step=40)
    replay(filled(ticks=2), given)
    assert mlflow.active_run() and trackio.context_vars.current_run.get() is mine
    mlflow.log_metric('mine', 2.0, step=41)
    trackio.log({'mine': 2.0})
assert mlflow.MlflowClient().get_experiment_by_name('another') is None
trackio.finish()
""",
    )
    expected = {"mine": {40: 1.0, 41: 2.0}, **wanted(filled(ticks=2))}
    assert same(read("mlflow", folder), expected)
    assert same(read("trackio", folder), expected)


@pytest.mark.slow
def test_a_run_of_mlflow_is_not_the_active_one_and_is_written_by_one_call_a_tick(folder: Path) -> None:
    pytest.importorskip("mlflow")
    out = run(
        folder,
        """
import mlflow
from mlflow.tracking._tracking_service.client import TrackingServiceClient
calls, log_batch = [], TrackingServiceClient.log_batch
def counted(self, run_id, metrics=(), *given, **rest):
    calls.append(len(metrics))
    return log_batch(self, run_id, metrics, *given, **rest)
TrackingServiceClient.log_batch = counted
visualizer, timeline = MlflowVisualizer(run_name='first', most=None), filled([f'l{i}' for i in range(300)], ticks=3)
mlflow.set_experiment('mine')
for tick in timeline.ticks():
    visualizer.show(tick, charts_of(timeline))
    assert mlflow.active_run() is None
    with mlflow.start_run():  # the program's own
        pass
(one,) = mlflow.MlflowClient().search_runs([mlflow.get_experiment_by_name('mine').experiment_id], "run_name = 'first'")
assert one.info.status == 'RUNNING'
visualizer.flush()
assert mlflow.get_run(one.info.run_id).info.status == 'FINISHED'
print('\\n' + json.dumps([calls, one.info.run_id]))
""",
    )
    calls, run_id = json.loads(out.splitlines()[-1])
    assert calls == [1501] * 3  # more than MLflow takes in one batch
    expected = wanted(filled([f"l{i}" for i in range(300)], ticks=3))
    assert same(read("mlflow", folder, "mine", run_id), expected)


@pytest.mark.slow
def test_all_trackers_of_an_accelerator_get_the_numbers_beside_those_of_the_program(folder: Path) -> None:
    for name in ("accelerate", "wandb", "dvclive", "tensorboard"):
        if find_spec(name) is None:
            pytest.skip(f"{name} is not installed")
    run(
        folder,
        """
from accelerate import Accelerator
accelerator = Accelerator(cpu=True, log_with=['wandb', 'tensorboard', 'dvclive'], project_dir='.')
accelerator.init_trackers('project', init_kwargs={'dvclive': OPTIONS['dvclive']})
visualizer, timeline = TrackerVisualizer(accelerator), filled(ticks=3)
for tick in timeline.ticks():
    for step in range(10):
        accelerator.log({'mine': float(step)}, step=tick * 10 + step)
    live = accelerator.get_tracker('dvclive', unwrap=True)
    before = live.step
    visualizer.show(tick, charts_of(timeline))
    assert live.step == before
visualizer.flush()
accelerator.log({'mine': 10.0}, step=30)
accelerator.end_training()
""",
    )
    expected = wanted(filled(ticks=3))
    mine = {"mine": {10 * tick + step: float(step) for tick in range(3) for step in range(10)} | {30: 10.0}}
    assert close(read("tensorboard", folder), {**expected, **mine})
    assert same(read("dvclive", folder), {**expected, **mine})
    found = read("wandb", folder)
    assert found.pop("mine") == mine["mine"]
    ticks = found.pop("tick")
    assert list(ticks.values()) == [0.0, 1.0, 2.0]
    assert {name: {int(ticks[step]): value for step, value in course.items()} for name, course in found.items()} == expected


class Fake:
    """What accelerate's trackers have in common."""

    def __init__(self, name: str = "fake", fails: bool = False) -> None:
        self.name, self.fails = name, fails
        self.logged: list[tuple[int, dict[str, float]]] = []

    def log(self, values: dict[str, float], step: int) -> None:
        if self.fails:
            raise ConnectionError("no answer")
        self.logged.append((step, values))


def test_a_tracker_that_fails_warns_once_and_the_others_go_on() -> None:
    works = Fake()
    accelerator = SimpleNamespace(log=print, trackers=[Fake(fails=True), works], is_main_process=True)
    inspector = Inspector(lenses=[], show=TrackerVisualizer(accelerator))
    with pytest.warns(RecordingWarning, match="TrackerVisualizer failed at tick 0: ConnectionError: no answer") as warned:
        for _ in inspector.range(3):
            inspector.push_loss(1.0)
    assert len(warned) == 1
    assert inspector.timeline.ticks() == [step for step, _ in works.logged] == [0, 1, 2]


def test_an_accelerator_logs_on_its_main_process_and_needs_trackers() -> None:
    tracker, charts = Fake(), charts_of(filled(ticks=1))
    TrackerVisualizer(SimpleNamespace(log=print, trackers=[tracker], is_main_process=False)).show(0, charts)
    assert tracker.logged == []
    with pytest.raises(LensError, match="init_trackers"):
        TrackerVisualizer(SimpleNamespace(log=print, trackers=[], is_main_process=True)).show(0, charts)


def test_a_tracker_that_was_started_belongs_to_the_program() -> None:
    tracker = Fake()  # has no finish
    visualizer, timeline = TrackerVisualizer(tracker), filled(ticks=2)
    replay(timeline, visualizer)
    replay(timeline, visualizer)
    assert [step for step, _ in tracker.logged] == [0, 1, 0, 1]
    assert tracker.logged[1][1] == numbers(1, charts_of(timeline))


@pytest.mark.parametrize(
    ("made", "match"),
    [
        (lambda: as_visualizers("tracker"), "takes a name that accelerate knows after the colon"),
        (lambda: as_visualizers("tracker:"), "takes a name that accelerate knows after the colon"),
        (lambda: as_visualizers("mlflow:"), "takes an experiment after the colon"),
        (lambda: TrackerVisualizer(object()), r"a name, an Accelerator, or an object with log\(values, step\)"),
        (lambda: TrackerVisualizer(Fake), "an object with log"),
        (lambda: TrackerVisualizer(Fake(), mode="offline"), "was started before"),
        (lambda: TrackerVisualizer(Fake(), most=0), "at least 1"),
    ],
)
def test_what_cannot_be_is_told_at_once(made: Callable[[], object], match: str) -> None:
    with pytest.raises(LensError, match=match):
        made()


@pytest.mark.parametrize("name", sorted(READERS.keys() - KINDS.keys()))
def test_a_tracker_without_the_word_before_its_name_is_told_what_to_write(name: str) -> None:
    for show in (name, f"{name}:project"):
        with pytest.raises(LensError, match=f'no visualizer {show!r}, which is a tracker: write "tracker:{show}"'):
            Inspector(lenses=[], show=show)


def test_names_of_trackers_are_those_of_accelerate(folder: Path) -> None:
    pytest.importorskip("accelerate")
    with pytest.raises(LensError, match=r"no tracker 'nobody'; choose from 'aim', 'clearml', .*'wandb'"):
        as_visualizers("tracker:nobody")
    for name in READERS:
        if find_spec(name) is None:
            with pytest.raises(MissingExtraError, match=rf"{name} is not installed: pip install torch-recorders\[trackers\]"):
                as_visualizers(f"tracker:{name}")
    pytest.importorskip("tensorboard")
    (made,) = as_visualizers("tracker:tensorboard:project")
    assert isinstance(made, TrackerVisualizer)
    made.flush()
    assert list(folder.iterdir()) == []  # making one starts nothing
    replay(filled(ticks=2), made)
    assert close(of_tensorboard(folder), wanted(filled(ticks=2)))


@pytest.mark.slow
def test_trackio_and_mlflow_by_name_start_nothing_until_the_first_tick(folder: Path) -> None:
    pytest.importorskip("mlflow")
    pytest.importorskip("trackio")
    run(
        folder,
        """
given = as_visualizers(['trackio:project', 'mlflow:project'])
for one in given:
    one.flush()
assert not any(Path().iterdir())
replay(filled(ticks=2), given)
""",
    )
    for name in ("mlflow", "trackio"):
        assert same(read(name, folder), wanted(filled(ticks=2)))


def many(values: dict[int, dict[int, float]], layers: int = 6) -> Timeline:
    """A chart whose layers have the value 1, and at a tick those given."""
    rows = {f"Norm/{i}": {tick: {"mean": values.get(tick, {}).get(i, 1.0)} for tick in range(4)} for i in range(layers)}
    charts = [Chart("Norm", ("x",), ranges=None), Chart("Share", (), across=(Across("Norm", "share"),))]
    return charted(charts, rows)


def chosen(timeline: Timeline, most: int | None) -> list[list[str]]:
    """The layers of the chart "Norm" that are kept at each tick."""
    movers = Movers(most)
    found = [movers.numbers(tick, charts_of(timeline)) for tick in timeline.ticks()]
    return [[name.split("/")[1] for name in one if name.startswith("Norm/") and name.endswith("/mean")] for one in found]


def test_layers_that_moved_most_are_kept_and_a_number_tells_of_the_others() -> None:
    timeline = many({1: {4: 100.0, 5: 0.1, 3: 2.0}, 2: {4: 100.0, 5: 0.1, 3: 2.0}, 3: {4: 100.0, 5: 0.1, 3: math.nan}})
    # At first all are equal; then 4 moved by two orders of magnitude, 5 by one; then nothing moved; then one was not finite.
    assert chosen(timeline, 2) == [["0", "1"], ["4", "5"], ["4", "5"], ["3", "4"]]
    movers, charts = Movers(2), charts_of(timeline)
    found = movers.numbers(0, charts)
    assert found["Norm/layers left out"] == found["Share/layers left out"] == 4.0
    assert {name for name in found if name.startswith("Share")} == {"Share/0", "Share/1", "Share/layers left out"}
    assert chosen(timeline, 6) == chosen(timeline, None) == [[str(i) for i in range(6)]] * 4
    assert Movers(6).numbers(0, charts) == numbers(0, charts)


def test_a_layer_that_is_on_the_board_stays_unless_another_moved_twice_as_far() -> None:
    timeline = many({1: {4: 10.0}, 2: {4: 100.0, 5: 99.0}, 3: {4: 1000.0, 5: 99.0 * 101.0}})
    assert chosen(timeline, 1) == [["0"], ["4"], ["4"], ["5"]]


@pytest.mark.parametrize(("before", "now"), [(0.0, 1e-300), (1e-300, -1e300), (1e300, 1e-300), (math.nan, 1.0), (math.inf, 1.0)])
def test_any_numbers_can_be_compared(before: float, now: float) -> None:
    assert chosen(many({0: {5: before}, 1: {5: now}}), 1)[1] == ["5"]


@given(st.text())
def test_names_for_mlflow_are_what_it_takes_and_can_be_read_back(name: str) -> None:
    made = mlflow_name(name)
    assert len(made) <= 250
    if len(made) < 250:
        assert name_of_mlflow(made) == name
    assert set(made) <= set("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789_-./ ")
    assert not name or (posixpath.normpath(made) == made and not made.startswith((".", "/")))


@pytest.mark.parametrize(
    "text", ["-2b-", "-2b", "+2b-", "a-", "-+-", "--a", "//", "/../", "./a/", "a/.", "Norm/block[0]/mean+std", "\n/"]
)
def test_names_for_mlflow_that_look_like_codes(text: str) -> None:
    test_names_for_mlflow_are_what_it_takes_and_can_be_read_back.hypothesis.inner_test(text)


def test_a_distribution_in_bins() -> None:
    quantile, x = Quantile("b c -> c", bits=9), torch.randn(4000, 3, generator=torch.Generator().manual_seed(0))
    counts, edges = binned(quantile, quantile.update({}, x), bins=16)
    exact = torch.histogram(x.double().flatten(), edges)
    assert counts.sum() == 12_000
    assert (edges[0], edges[-1]) == (x.min().double(), x.max().double())
    assert (counts - exact.hist).abs().max() < 30  # of 12,000 elements
    assert [part.tolist() for part in binned(quantile, quantile.update({}, torch.full((4, 1), 2.0)), 2)] == [
        [0.0, 4.0],
        [1.5, 2.0, 2.5],
    ]
    assert [part.tolist() for part in binned(quantile, quantile.update({}, torch.full((4, 1), math.nan)), 2)] == [[], []]
    histogram = Histogram("b c -> c", bins=2, low=0.0, high=2.0)
    counts, edges = binned(histogram, histogram.update({}, torch.tensor([[0.5, 1.5], [9.0, 1.0]])))
    assert (counts.tolist(), edges.tolist()) == ([1.0, 2.0], [0.0, 1.0, 2.0])


def test_names_that_are_too_long_for_mlflow_stay_apart() -> None:
    names = [f"{'layer.' * 60}{i}/mean+std" for i in range(100)]
    made = [mlflow_name(name) for name in names]
    assert {len(name) for name in made} == {250}
    assert len(set(made)) == 100


@pytest.mark.slow
def test_mlflow_takes_names_of_any_length(folder: Path) -> None:
    pytest.importorskip("mlflow")
    layers = ["layer." * 60 + end for end in "ab"]
    out = run(
        folder,
        f"""
visualizer, timeline = MlflowVisualizer('project'), filled({layers!r}, ticks=2)
replay(timeline, visualizer)
print('\\n' + json.dumps([of_mlflow(Path()), [mlflow_name(f'Norm/{{layer}}/mean') for layer in {layers!r}]]))
""",
    )
    found, names = json.loads(out.splitlines()[-1])
    assert [found[name] for name in names] == [{"0": 1.0, "1": 2.0}, {"0": 2.0, "1": 4.0}]
