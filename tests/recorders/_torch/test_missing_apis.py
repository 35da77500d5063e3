"""On a torch without one of the private APIs that this package uses: what is off is told, all else is recorded as ever."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from paths import ROOT

from recorders._torch import CAPTURES_IN_GRAPHS
from reducers._torch import declared

COMPILER = ("torch._dynamo", "torch._C._dynamo", "torch._higher_order_ops", "torch.fx", "torch.ops")
NAMES = [name for name in declared() if not name.startswith(COMPILER)]
OF_COMPILER = [name for name in declared() if name.startswith(COMPILER)]


def without(folder: Path, kind: str, *names: str) -> dict[str, Any]:
    """What happens without each of these private APIs, and without none."""
    command = [sys.executable, str(ROOT / "tests/taken_away.py"), str(folder), kind, "none", *names]
    found = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    return {answer["name"]: answer for answer in map(json.loads, found.stdout.splitlines())}


def check(answer: dict[str, Any], whole: dict[str, Any], alone: dict[str, Any] | None = None) -> None:
    """The training is never changed; what is not recorded as ever is told, once, by a warning and by reports."""
    assert "failed" not in answer, answer["failed"]
    told = [text for text in answer["told"] if text.startswith("RecordingWarning")]
    missing = answer["missing"]
    for message in missing:
        assert sum(message in text and "All else is recorded as usual" in text for text in told) == 1, (message, told)
    assert all("is left out" in text or any(message in text for message in missing) for text in told), told
    for way, (training, numbers, _) in answer["found"].items():
        assert training == (alone or whole["plain"])[way], way
        if numbers != whole["found"][way][1]:
            assert missing, way
            for name, (samples, values) in numbers.items():  # nothing is recorded twice, or wrongly: it is there, or left out
                most, right = whole["found"][way][1][name]
                assert samples <= most, (way, name)
                assert samples < most or values == {key: pytest.approx(value, rel=1e-6) for key, value in right.items()}, (
                    way,
                    name,
                )
    *_, (_, _, troubles) = answer["found"].values()
    assert set(missing) <= set(troubles)
    if alone is None:
        assert answer["found"]["plainly"][1] == whole["found"]["plainly"][1]


@pytest.mark.slow
def test_without_any_of_them_no_training_changes_nets_are_recorded_and_files_read(tmp_path: Path) -> None:
    """All at once, in a process that has not imported the compiler. Then much is off: what is told of is not compared."""
    name = "+".join(NAMES)
    answers = without(tmp_path, "fresh", name)
    answer, whole = answers[name], answers["none"]
    assert "failed" not in answer, answer["failed"]
    assert {way: found[0] for way, found in answer["found"].items()} == whole["plain"]
    assert answer["found"]["plainly"][1] == whole["found"]["plainly"][1]
    assert len(answer["missing"]) > 10
    assert all(sum(message in text for text in answer["told"]) == 1 for message in answer["missing"])


@pytest.fixture(scope="module")
def eager(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return without(tmp_path_factory.mktemp("eager"), "eager", *NAMES)


@pytest.mark.long
@pytest.mark.parametrize("name", ["none", *NAMES])
def test_without_one_of_them_eager_nets_are_recorded_as_ever_or_it_is_told(name: str, eager: dict[str, Any]) -> None:
    check(eager[name], eager["none"])
    if name != "none":
        assert all(name in message for message in eager[name]["missing"])


@pytest.fixture(scope="module")
def in_graphs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return without(tmp_path_factory.mktemp("compiled"), "compiled", *OF_COMPILER)


@pytest.mark.long
@pytest.mark.skipif(not CAPTURES_IN_GRAPHS, reason="recording in graphs needs a later torch")
@pytest.mark.parametrize("name", ["none", *OF_COMPILER])
def test_without_one_of_them_compiled_nets_compute_the_same_and_what_is_off_is_told(name: str, in_graphs: dict[str, Any]) -> None:
    check(in_graphs[name], in_graphs["none"], {"compiled": in_graphs["none"]["alone"]})
    if name != "none":
        assert all(name in message for message in in_graphs[name]["missing"])
