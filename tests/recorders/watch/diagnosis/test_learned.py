"""Learned ranges: runs that differ by their seed raise no alarm, what no fixed limit sees is found, and files may be hostile."""

from __future__ import annotations

import functools
import json
import math
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional

from recorders import (
    CallMonitor,
    CorruptRecordingError,
    Learned,
    NotARecordingError,
    Recorder,
    RecordingNotFoundError,
    SchemaError,
    StorageError,
    Timeline,
    findings,
    learn,
    load,
    presets,
)
from recorders.watch.diagnosis.batches import BATCH, rows_of
from recorders.watch.diagnosis.causes import CAUSES
from recorders.watch.diagnosis.evidence import BatchCourse, Course, Evidence
from recorders.watch.diagnosis.learned import Range
from recorders.watch.diagnosis.left_ranges import left_ranges
from recorders.watch.diagnosis.traits import Key, traits
from reducers import Summary

pytest.importorskip("sklearn")

from sklearn.datasets import load_digits


@functools.cache
def digits() -> tuple[Tensor, Tensor]:
    images, labels = load_digits(return_X_y=True)
    x = torch.tensor(images, dtype=torch.float32)
    return (x - x.mean()) / x.std(), torch.tensor(labels)


def mlp(dropout: float) -> nn.Module:
    return nn.Sequential(
        nn.Linear(64, 32), nn.ReLU(), nn.Dropout(dropout), nn.Linear(32, 32), nn.ReLU(), nn.Dropout(dropout), nn.Linear(32, 10)
    )


def cnn(dropout: float) -> nn.Module:
    convolutions = [nn.Conv2d(1, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 16, 3, stride=2), nn.BatchNorm2d(16)]
    return nn.Sequential(
        nn.Unflatten(1, (1, 8, 8)), *convolutions, nn.ReLU(), nn.Flatten(), nn.Dropout(dropout), nn.Linear(144, 10)
    )


class Transformer(nn.Module):
    """Each row of an image is a token."""

    def __init__(self, dropout: float) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(16, 2, 32, dropout, batch_first=True)
        self.embed, self.place = nn.Linear(8, 16), nn.Parameter(torch.randn(8, 16) / 4)
        self.encoder, self.head = nn.TransformerEncoder(layer, 1, enable_nested_tensor=False), nn.Linear(16, 10)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(self.encoder(self.embed(x.unflatten(1, (8, 8))) + self.place).mean(1))
        return out


Optimizers = Callable[[Any, float, float], torch.optim.Optimizer]
NETS: dict[str, tuple[Callable[[float], nn.Module], Optimizers, float]] = {
    "mlp": (mlp, lambda of, rate, decay: torch.optim.SGD(of, rate, momentum=0.9, weight_decay=decay), 0.05),
    "cnn": (cnn, lambda of, rate, decay: torch.optim.Adam(of, rate, weight_decay=decay), 3e-3),
    "transformer": (Transformer, lambda of, rate, decay: torch.optim.AdamW(of, rate, weight_decay=decay), 3e-3),
}


def train(
    name: str,
    seed: int,
    *,
    rate: float = 1.0,
    decay: float = 1e-3,
    dropout: float = 0.1,
    prepare: Callable[[nn.Module], Any] = lambda net: None,
    change: Callable[[Tensor], Tensor] = lambda x: x,
    shuffled: bool = False,
    summed: bool = False,
    schedule: float = 1.0,
    steps: int = 40,
    held: Callable[[nn.Module], Any] = nn.Module.parameters,
) -> Recorder:
    """A training of digits that is good unless told otherwise; the seed is that of the net and of the order of the data."""
    torch.manual_seed(seed)
    make, optimizers, usual = NETS[name]
    net, (x, labels) = make(dropout), digits()
    prepare(net)
    labels = labels[torch.randperm(len(labels))] if shuffled else labels
    optimizer = optimizers(held(net), rate * usual, decay)
    reduction = "sum" if summed else "mean"
    with presets.health().modules(net) as recorder:
        for some in torch.randperm(len(x)).repeat(2).split(32)[:steps]:
            loss = functional.cross_entropy(net(change(x[some])), labels[some], reduction=reduction)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            optimizer.param_groups[0]["lr"] *= schedule
            recorder.push("loss", loss)
            recorder.push("target", labels[some])
    return recorder


@functools.cache
def good(name: str) -> Learned:
    return learn(train(name, 0))


def left(recorder: Recorder, learned: Learned | str | Path) -> list[tuple[str, int | None, str]]:
    found = [finding for finding in findings(recorder, against=learned) if finding.kind == "left-range"]
    assert all(finding.severity == "warning" for finding in found)
    assert all(finding.causes == () or finding.remedy == CAUSES[finding.cause].remedy for finding in found)
    return [(finding.layer, finding.since, finding.what) for finding in found]


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(1, 5))
@pytest.mark.parametrize("name", NETS)
def test_another_seed_and_another_order_raise_no_alarm(name: str, seed: int) -> None:
    assert left(train(name, seed), good(name)) == []


def scale(name: str, factor: float) -> Callable[[nn.Module], Any]:
    def change(net: nn.Module) -> None:
        with torch.no_grad():
            net.get_parameter(name).mul_(factor)

    return change


FAULTS: dict[str, tuple[dict[str, Any], str, str, str]] = {
    "a rate 5 times too high": ({"rate": 5.0}, "optimizer", "learning rate in the early phase", "rate-too-high"),
    "a rate 5 times too low": ({"rate": 0.2}, "optimizer", "learning rate in the early phase", "rate-too-low"),
    "a rate that falls to nothing": ({"schedule": 0.8}, "optimizer", "learning rate in the ", "schedule"),
    "weight decay": ({"decay": 1e-2}, "optimizer", "weight decay", "weight-decay"),
    "dropout": ({"dropout": 0.5}, "(net)", "largest share that a dropout leaves out", "dropout"),
    "inputs not normalised": ({"change": lambda x: 6 * x + 5}, "inputs", "of a typical batch", "inputs-not-normalised"),
    "inputs normalised twice": ({"change": lambda x: x / 6 - 1}, "inputs", "of a typical batch", "inputs-not-normalised"),
    "labels that do not belong to the inputs": ({"shuffled": True}, "loss", "loss in part", "labels-do-not-fit"),
    "a sum in place of a mean": ({"summed": True}, "loss", "loss in ", "wrong-loss"),
}


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("name", NETS)
def test_what_no_fixed_limit_sees_is_found(name: str, fault: str) -> None:
    options, layer, what, cause = FAULTS[fault]
    found = [one for one in findings(train(name, 9, **options), against=good(name)) if one.kind == "left-range"]
    assert any((one.layer, one.cause) == (layer, cause) and what in one.what for one in found), found


@pytest.mark.parametrize("factor", [10.0, 0.1])
@pytest.mark.parametrize(("name", "weight"), [("mlp", "3.weight"), ("cnn", "4.weight"), ("transformer", "embed.weight")])
def test_the_initial_weights_of_one_layer_are_found_in_this_layer(name: str, weight: str, factor: float) -> None:
    found = left(train(name, 9, prepare=scale(weight, factor)), good(name))
    layer = weight.removesuffix(".weight")
    assert (layer, 0) in [(where, since) for where, since, what in found if "norm of weight in the early phase" in what], found


def without(layer: str, instead: nn.Module) -> Callable[[nn.Module], Any]:
    return lambda net: net.set_submodule(layer, instead)


CHANGED: dict[str, tuple[Callable[[nn.Module], Any], list[tuple[str, str, str]]]] = {
    "an activation left out": (
        without("3", nn.Identity()),
        [("3", "a layer of the class Identity; good runs: a layer of the class ReLU", "no-nonlinearity")],
    ),
    "outputs rectified": (
        without("9", nn.Sequential(nn.Linear(144, 10), nn.ReLU())),
        [
            ("9", "a layer of the class Sequential; good runs: a layer of the class Linear", ""),
            ("9.0", "a layer of the class Linear; good runs: no layer of this name was recorded", ""),
            ("9.1", "a layer of the class ReLU; good runs: no layer of this name was recorded", "output-activation"),
        ],
    ),
    "a norm left out": (
        without("5", nn.Identity()),
        [("5", "a layer of the class Identity; good runs: a layer of the class BatchNorm2d", "normalisation")],
    ),
}


@pytest.mark.parametrize("change", CHANGED)
def test_layers_of_other_classes_are_named(change: str) -> None:
    prepare, expected = CHANGED[change]
    found = findings(train("cnn", 9, prepare=prepare), against=good("cnn"))
    assert [(one.layer, one.what, one.cause) for one in found if "a layer of the class" in one.what] == expected


@pytest.mark.parametrize(("name", "left_out"), [("cnn", "4"), ("transformer", "embed")])
def test_weights_that_good_runs_update_and_this_one_does_not_are_named(name: str, left_out: str) -> None:
    def held(net: nn.Module) -> Any:
        return [weight for path, weight in net.named_parameters() if not path.startswith(f"{left_out}.")]

    found = [one for one in findings(train(name, 9, held=held), against=good(name)) if one.kind == "left-range"]
    told = [(one.layer, one.cause) for one in found if one.what.startswith("no updates; size of an update")]
    assert told == [(left_out, "not-in-optimizer")]
    assert found[0].layer == "optimizer"
    assert "parameters that the optimizer holds" in found[0].what


def test_outputs_and_targets_of_another_shape_are_named() -> None:
    def batches(columns: int) -> Evidence:
        rows = rows_of(torch.randn(12, 32, columns)).repeat(12, 1)
        rows[:, BATCH.index("count")], rows[:, BATCH.index("samples")] = 32 * columns, 32
        columns_of = dict(zip(BATCH, rows.T.tolist(), strict=False))
        return Evidence([], outputs={"": BatchCourse(columns_of, [0.0] * 64)}, loss=Course([1.0] * 12))

    usual = {trait.key: Range(trait.values[0], trait.values[0], trait.margin) for trait in traits(batches(4))}
    found, _ = left_ranges(batches(12), Learned(1, (12, 12), usual))
    assert [(one.layer, one.cause) for one in found] == [("outputs", "wrong-axis")]
    assert "number of elements of a sample" in found[0].what


def test_if_layers_left_no_range_at_first_the_loss_is_told_before_them() -> None:
    early, late = ("weights", "0", "norm of weight", "early"), ("weights", "0", "norm of weight", "late")
    usual = {Key("loss", "loss", "loss", "part 8 of 8"): Range(0.9, 1.1, 0.2), Key(*late): Range(0.0, 0.0, 0.5)}
    loss = Course([2.0] * 40)

    def order(first: float) -> list[str]:
        weights = {"0": {"weight": Course([first] * 10 + [1e3] * 30)}}
        known = Evidence([], loss=loss, weights=weights)
        return [one.layer for one in left_ranges(known, Learned(1, (40, 40), usual | {Key(*early): Range(0.0, 0.0, 0.5)}))[0]]

    assert order(1.0) == ["loss", "0"]
    assert order(1e3) == ["0", "loss"]


@pytest.mark.slow
def test_the_benchmark_scores_what_findings_say(tmp_path: Path) -> None:
    from benchmarks.diagnosis import good_runs

    names = [("mlp", None, 0), ("mlp", "labels-shuffled", 0)]
    for one in [*names, *(("mlp", None, seed) for seed in (1, 2, 3))]:
        good_runs.record(one, tmp_path)
    runs = [load(good_runs.at(one, tmp_path).with_suffix(".rec")) for one in names]
    alone = [{"150": [(one.kind, one.layer, one.causes, one.severity, one.what) for one in findings(run)]} for run in runs]
    told = good_runs.told("mlp", names, alone, tmp_path)
    found = [row.found for way, row in told if way == "the rules and one good run"]
    against = good_runs.at(("mlp", None, 1), tmp_path).with_suffix(".rec")
    for row, run in zip(found, runs, strict=True):
        assert row == [(one.kind, one.layer, one.causes, one.severity, one.what) for one in findings(run, against=against)]
    assert not found[0]
    assert found[1]


def test_since_is_the_step_at_which_it_left() -> None:
    def course(at: int) -> Evidence:
        return Evidence([], loss=Course([2.0 if step < at else 1.0 for step in range(80)]))

    usual = learn(train("mlp", 0))
    usual = Learned(1, (80, 80), {Key("loss", "loss", "loss", "part 2 of 8"): Range(0.9, 1.1, 0.2)})
    (finding,), count = left_ranges(course(17), usual)
    assert (finding.layer, finding.since, count) == ("loss", 10, 1)
    assert finding.what == "loss in part 2 of 8: 2; good runs: 0.9 to 1.1, and up to 1.3 is within the margin"
    assert left_ranges(course(14), usual) == ([], 1)


def test_layers_that_only_some_batches_use_are_not_compared() -> None:
    always, seldom, stopped = [1.0] * 20, [1.0, 1.0, 0.0, 1.0] * 5, [1.0] * 10 + [0.0] * 10
    gradients = {"experts.0": seldom, "experts.1": always, "gate": always, "dead": stopped, "other": seldom[:10]}
    known = Evidence([], gradients={name: {"weight": Course(values)} for name, values in gradients.items()})
    assert {trait.key.where for trait in traits(known)} == {"gate", "dead"}


def test_what_was_given_to_the_net_is_told_before_what_came_of_it() -> None:
    found = left(train("cnn", 9, rate=20.0, change=lambda x: 6 * x + 5), good("cnn"))
    order = [0 if where in ("inputs", "optimizer", "(net)", "target") else 2 if where == "loss" else 1 for where, _, _ in found]
    assert order == sorted(order)
    assert {0, 1} <= {*order}


def test_several_good_runs_have_wider_margins() -> None:
    runs = [train("mlp", seed) for seed in range(3)]
    one, several = learn(runs[0]), learn(*runs)
    assert (several.runs, several.steps, several.ranges.keys()) == (3, (40, 40), one.ranges.keys())
    for key, usual in one.ranges.items():
        low, high, margin = several.ranges[key]
        assert low <= usual.low <= usual.high <= high
        assert usual.margin <= margin


def test_most_layers_at_once_are_told_once() -> None:
    found = left(train("transformer", 9, rate=10.0), good("transformer"))
    several = [what for _, _, what in found if "more layers left their ranges" in what]
    assert any("the updates of" in what for what in several)
    places = [(where, what.partition(" in ")[0]) for where, _, what in found]
    assert len(places) == len({*places})


def test_a_run_of_another_length_is_compared_in_its_first_steps_only() -> None:
    short = train("mlp", 5, steps=15)
    assert left(short, good("mlp")) == []
    told = findings(short, against=good("mlp")).examined
    all_of_it = findings(train("mlp", 5), against=good("mlp")).examined
    counts = [int(one.split()[-2]) for lines in (told, all_of_it) for one in lines if one.startswith("ranges of good runs")]
    assert 0 < 2 * counts[0] < counts[1]
    assert left(train("mlp", 5, steps=15, rate=5.0), good("mlp"))[0][0] == "optimizer"


def test_against_takes_what_was_learned_its_file_and_a_recording(tmp_path: Path) -> None:
    run = train("mlp", 1)
    saved = run.save(tmp_path / "run")
    learned = learn(saved, path=tmp_path / "good.json")
    assert Learned.load(tmp_path / "good.json").ranges.keys() == learned.ranges.keys()
    sick = train("mlp", 2, rate=5.0)
    expected = [(layer, since) for layer, since, _ in left(sick, learned)]
    for against in (tmp_path / "good.json", str(tmp_path / "good.json"), saved, str(saved)):
        assert [(layer, since) for layer, since, _ in left(sick, against)] == expected
    (tmp_path / "link.json").symlink_to(tmp_path / "good.json")
    assert len(left(sick, tmp_path / "link.json")) == len(expected)


def test_without_good_runs_nothing_is_compared() -> None:
    run = train("mlp", 1)
    assert not any("ranges" in line for line in findings(run).examined + findings(run).unexamined)
    assert any(
        line.startswith("ranges of good runs: record both") for line in findings(run, against=Learned(1, (0, 0), {})).unexamined
    )


def test_a_recording_without_what_health_records_teaches_nothing() -> None:
    recorder = Recorder(other=CallMonitor(Summary()))
    recorder.push("other", torch.ones(3))
    assert learn(recorder).ranges == {}


def test_misuse_is_named(tmp_path: Path) -> None:
    with pytest.raises(TypeError, match="learn needs a good run at least"):
        learn()
    with pytest.raises(TypeError, match="a timeline does not hold"):
        findings(Timeline(":memory:"), against=good("mlp"))
    with pytest.raises(RecordingNotFoundError, match="there is nothing at"):
        findings(train("mlp", 1, steps=2), against=tmp_path / "none.json")
    with pytest.raises(StorageError, match="cannot save what was learned"):
        (tmp_path / "file").write_text("")
        good("mlp").save(tmp_path / "file" / "good.json")
    with pytest.raises(StorageError, match="is a URL"):
        good("mlp").save("s3://bucket/good.json")


# Files from anywhere


def written(path: Path, content: Any) -> Path:
    path.write_text(content if isinstance(content, str) else json.dumps(content))
    return path


HEAD = {"format": "torch-recorders learned", "schema": 1, "runs": 1, "steps": [5, 5]}
ROW = ["loss", "loss", "loss", "early", 0.0, 1.0, 0.5]


@pytest.mark.parametrize(
    "row",
    [
        None,
        ROW[:6],
        [*ROW, 1.0],
        [1, *ROW[1:]],
        ["x" * 1001, *ROW[1:]],
        [*ROW[:4], "0", 1.0, 0.5],
        [*ROW[:4], True, 1.0, 0.5],
        [*ROW[:4], 2.0, 1.0, 0.5],
        [*ROW[:4], 0.0, 1.0, -0.5],
        [*ROW[:4], 0.0, 1e301, 0.5],
        [*ROW[:4], 0, 10**400, 0.5],
        [*ROW[:4], [0.0], 1.0, 0.5],
    ],
)
def test_a_row_that_learn_cannot_have_written_is_refused(row: Any, tmp_path: Path) -> None:
    with pytest.raises(CorruptRecordingError, match="row 2 of its ranges"):
        Learned.load(written(tmp_path / "x.json", {**HEAD, "ranges": [ROW, row]}))


@pytest.mark.parametrize(
    ("content", "error"),
    [
        ("", NotARecordingError),
        ("{", NotARecordingError),
        ("[" * 100_000, NotARecordingError),
        ("[]", NotARecordingError),
        ("{}", NotARecordingError),
        ('{"format": NaN}', NotARecordingError),
        ({**HEAD, "schema": 2, "ranges": []}, SchemaError),
        ({**HEAD, "schema": "1", "ranges": []}, CorruptRecordingError),
        ({**HEAD, "schema": True, "ranges": []}, CorruptRecordingError),
        ({**HEAD, "ranges": {}}, CorruptRecordingError),
        (HEAD, CorruptRecordingError),
        ({**HEAD, "steps": 5, "ranges": []}, CorruptRecordingError),
        ({**HEAD, "steps": [5], "ranges": []}, CorruptRecordingError),
        ({**HEAD, "steps": [5, -1], "ranges": []}, CorruptRecordingError),
        ({**HEAD, "steps": [5, 10**300], "ranges": []}, CorruptRecordingError),
        ({**HEAD, "runs": True, "ranges": []}, CorruptRecordingError),
    ],
)
def test_a_file_that_learn_cannot_have_written_is_refused(content: Any, error: type[StorageError], tmp_path: Path) -> None:
    with pytest.raises(error, match=r"x\.json"):
        Learned.load(written(tmp_path / "x.json", content))


def test_a_file_of_other_bytes_and_one_that_is_too_long_are_refused(tmp_path: Path) -> None:
    (tmp_path / "x.json").write_bytes(b"\xff\xfe")
    with pytest.raises(NotARecordingError):
        Learned.load(tmp_path / "x.json")
    with (tmp_path / "x.json").open("wb") as file:
        file.truncate(2**24 + 1)
    with pytest.raises(CorruptRecordingError, match="at most"):
        Learned.load(tmp_path / "x.json")


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="this system has no named pipes")
def test_a_pipe_is_refused_without_waiting(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "x.json")
    with pytest.raises(CorruptRecordingError, match="not a regular file"):
        Learned.load(tmp_path / "x.json")


numbers = st.floats(-1e299, 1e299)


@settings(max_examples=50)
@given(numbers, numbers, numbers.map(abs), st.lists(numbers, min_size=4, max_size=40))
def test_ranges_from_anywhere_compare_without_errors(one: float, other: float, margin: float, values: list[float]) -> None:
    ends = sorted([one, other])
    losses = Key("loss", "loss", "loss", "early")
    learned = Learned(1, (len(values), len(values)), {losses: Range(ends[0], ends[1], margin)})
    found, _ = left_ranges(Evidence([], loss=Course(values)), learned)
    assert all(not math.isnan(float(finding.what.split()[5].rstrip(";"))) for finding in found)
