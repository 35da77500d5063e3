"""Checkup: when it looks, what it says once, and what it does about it."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from recorders import Checkup, Recorder, RecordingNotFoundError, TrainingFaultError, learn, presets
from recorders.errors import RecordingWarning
from recorders.watch.diagnosis import checkup as checkups
from recorders.watch.diagnosis.finding import Finding, Findings, fault

ZERO = fault("rate-is-zero", "optimizer", "the learning rate is 0")
LOSS = fault("loss-rises", "loss", "the loss rose")
MOMENTUM = fault("odd-momentum", "optimizer", "its momentum is 1")  # a warning

Tell = Callable[..., list[int]]


@pytest.fixture
def tell(monkeypatch: pytest.MonkeyPatch) -> Tell:
    """Replaces what is found, from the steps on that are given; returns a list of the steps at which somebody looked."""
    monkeypatch.setattr(checkups, "SHARE", 1e9)

    def told(*found: tuple[int, Finding]) -> list[int]:
        looked: list[int] = []

        def findings(recorder: Recorder, **asked: Any) -> Findings:
            looked.append(recorder.clock.step)
            return Findings([one for step, one in found if step <= recorder.clock.step], [])

        monkeypatch.setattr(checkups, "findings", findings)
        return looked

    return told


def steps(checkup: Checkup, count: int) -> None:
    for _ in range(count):
        checkup.recorder.step()
        checkup.step()


def warned(checkup: Checkup, count: int) -> list[str]:
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        steps(checkup, count)
    assert {one.category for one in found} <= {RecordingWarning}
    return [str(one.message) for one in found]


def trained(rate: float, count: int, on_finding: Any = "warn", against: Any = None, seed: int = 0) -> tuple[Checkup, int]:
    """A training that ends when the checkup says so, and the number of its steps."""
    torch.manual_seed(seed)
    net = nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 1))
    optimizer = torch.optim.SGD(net.parameters(), lr=rate)
    with presets.health().modules(net) as recorder:
        checkup = Checkup(recorder, on_finding, against=against)
        for step in range(count):
            optimizer.zero_grad()
            x = torch.randn(16, 4)
            loss = (net(x) - x.sum(1, keepdim=True)).square().mean()
            loss.backward()
            optimizer.step()
            recorder.push("loss", loss)
            checkup.step()
            if checkup.stop:
                return checkup, step + 1
    return checkup, count


def test_a_training_at_a_rate_of_zero_is_told_once() -> None:
    with warnings.catch_warnings(record=True) as given:
        warnings.simplefilter("always")
        checkup, count = trained(0.0, 30)
    assert (count, checkup.stop) == (30, False)
    (told,) = [one for one in given if "the learning rate is 0" in str(one.message)]
    assert str(told.message).startswith("after 10 steps: optimizer: ")
    assert "Try: " in str(told.message)
    assert told.filename == __file__
    assert ("rate-is-zero", "optimizer") in [(one.kind, one.layer) for one in checkup.found]


def test_a_training_at_a_rate_of_zero_is_stopped_or_raises_if_it_may() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        checkup, count = trained(0.0, 30, "stop")
    assert (count, checkup.stop) == (10, True)
    with pytest.raises(TrainingFaultError, match=r"after 10 steps: optimizer: the learning rate is 0 in all 10 steps"):
        trained(0.0, 30, "raise")


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_a_training_that_goes_on_is_compared_with_the_first_steps_of_good_runs(seed: int, tmp_path: Path) -> None:
    good = trained(0.05, 120)[0].recorder.save(tmp_path / "good")
    learn(good, path=tmp_path / "good.json")
    for against in (good, tmp_path / "good.json", learn(good)):
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            healthy, _ = trained(0.05, 100, "raise", against, seed)  # also in the middle, where good runs were further
        assert healthy.found == []
        with warnings.catch_warnings(record=True) as given:
            warnings.simplefilter("always")
            slow, _ = trained(0.01, 12, "warn", against, seed)
        (told,) = [str(one.message) for one in given if "learning rate in the early phase" in str(one.message)]
        assert told.startswith("after 10 steps: optimizer: learning rate in the early phase: 0.01; good runs: 0.05")
        assert ("left-range", "optimizer", "rate-too-low") in [(one.kind, one.layer, one.cause) for one in slow.found]


def test_a_healthy_training_is_left_alone() -> None:
    checkup, count = trained(0.05, 60, "raise")
    assert (checkup.found, checkup.stop, count) == ([], False, 60)


def test_it_looks_early_and_then_seldom(tell: Tell) -> None:
    looked = tell()
    steps(Checkup(presets.health()), 160)
    assert looked == [10, 20, 50, 100, 150]
    looked = tell()
    steps(Checkup(presets.health(), every=25), 60)
    assert looked == [10, 20, 25, 50]
    looked = tell()
    steps(Checkup(presets.health(), every=1), 3)
    assert looked == [1, 2, 3]


def test_later_looks_wait_if_they_would_take_too_much_of_the_time(tell: Tell, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checkups, "SHARE", 1e-9)
    looked = tell()
    checkup = Checkup(presets.health())
    steps(checkup, 160)
    assert looked == [10, 20, 50]
    checkup._pace = checkups.Pace(0.0, 1e9)  # as if enough time had passed
    steps(checkup, 45)
    assert looked == [10, 20, 50, 161, 200]


def test_steps_are_those_of_the_clock_or_else_calls(tell: Tell) -> None:
    looked = tell()
    checkup = Checkup(presets.health())
    for _ in range(12):
        checkup.step()
    assert looked == [0]
    for _ in range(20):
        checkup.recorder.step()
        for _ in range(4):  # micro-batches
            checkup.step()
    assert looked == [0, 10, 20]


def test_a_training_that_goes_on_is_looked_at_when_the_next_look_is_due(tell: Tell) -> None:
    looked = tell()
    recorder = presets.health()
    recorder.clock.step = 475
    steps(Checkup(recorder), 30)
    assert looked == [500]


def test_each_finding_is_told_when_it_comes_and_once(tell: Tell) -> None:
    tell((1, ZERO), (20, LOSS), (20, fault("rate-is-zero", "optimizer", "the learning rate is still 0")))
    checkup = Checkup(presets.health())
    assert warned(checkup, 120) == [f"after 10 steps: {ZERO}", f"after 20 steps: {LOSS}"]
    assert checkup.found == [ZERO, LOSS]


@pytest.mark.parametrize("on_finding", ["stop", "raise"])
def test_what_is_a_warning_is_warned_of(tell: Tell, on_finding: Any) -> None:
    tell((1, MOMENTUM), (50, LOSS))
    checkup = Checkup(presets.health(), on_finding)
    assert warned(checkup, 49) == [f"after 10 steps: {MOMENTUM}"]
    assert not checkup.stop
    if on_finding == "stop":
        assert warned(checkup, 1) == [f"after 50 steps: {LOSS}"]
        assert checkup.stop
    else:
        with pytest.raises(TrainingFaultError, match="after 50 steps: loss: the loss rose"):
            steps(checkup, 1)
        steps(checkup, 100)  # who goes on after it is not stopped again


def test_all_errors_of_one_look_are_in_one_message(tell: Tell) -> None:
    tell((1, MOMENTUM), (1, ZERO), (1, LOSS))
    checkup = Checkup(presets.health(), "raise")
    with pytest.warns(RecordingWarning, match="its momentum is 1"), pytest.raises(TrainingFaultError) as raised:
        steps(checkup, 10)
    assert str(raised.value) == f"after 10 steps: {ZERO}; {LOSS}"
    assert checkup.found == [MOMENTUM, ZERO, LOSS]


@pytest.mark.parametrize("on_finding", ["warn", "stop", "raise"])
def test_a_rule_that_fails_is_one_warning(on_finding: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(recorder: Recorder, **asked: Any) -> Findings:
        raise ZeroDivisionError("division by zero")

    monkeypatch.setattr(checkups, "findings", fails)
    checkup = Checkup(presets.health(), on_finding)
    (told,) = warned(checkup, 50)
    assert told.startswith("`findings` of what was recorded failed, and the training goes on: ZeroDivisionError: division by zero")
    assert (checkup.found, checkup.stop) == ([], False)


def test_wrong_arguments_are_named() -> None:
    with pytest.raises(TypeError, match=r"Checkup takes a Recorder, such as presets.health\(\).modules\(net\); got Linear"):
        Checkup(nn.Linear(1, 1))  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="choose 'warn', 'stop' or 'raise'"):
        Checkup(presets.health(), "halt")  # type: ignore[arg-type]
    with pytest.raises(RecordingNotFoundError, match=r"there is nothing at none\.json"):
        Checkup(presets.health(), against="none.json")
    for every in (0, 2.5, True):
        with pytest.raises(ValueError, match="a whole number of steps"):
            Checkup(presets.health(), every=every)  # type: ignore[arg-type]
