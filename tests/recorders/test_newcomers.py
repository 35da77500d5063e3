"""What a newcomer tries: fourteen tasks, whose numbers are right, and mistakes, which are told with what to do, or are none."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import newcomer_mistakes
import newcomer_tasks
import pytest
import torch
from newcomer_mistakes import MISTAKES

from recorders import Recorder, RecordingWarning
from recorders.recorder.plan import Plan

SLOW_MISTAKES = {name for name, mistake in MISTAKES.items() if mistake.slow}


def rows(names: Any, slow: set[str]) -> list[Any]:
    return [pytest.param(name, marks=pytest.mark.slow) if name in slow else name for name in names]


def same(found: Any, wanted: Any) -> None:
    """Asserts that two results are equal: float64 up to the order of additions, float32 to its last bits."""
    if isinstance(found, tuple):
        assert len(found) == len(wanted)
        for one, other in zip(found, wanted, strict=True):
            same(one, other)
    elif isinstance(found, torch.Tensor) and found.is_floating_point():
        tolerance = 1e-12 if found.dtype is torch.float64 else 1e-6
        torch.testing.assert_close(found, wanted, rtol=tolerance, atol=tolerance)
    elif isinstance(found, torch.Tensor):
        assert torch.equal(found, wanted)
    else:
        assert found == wanted


@pytest.fixture(autouse=True)
def _in_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize("name", rows(newcomer_tasks.TASKS, newcomer_tasks.SLOW))
def test_task(name: str) -> None:
    if "table" in name:
        pytest.importorskip("pandas")
    same(*newcomer_tasks.TASKS[name]())


@pytest.mark.parametrize("name", rows(MISTAKES, SLOW_MISTAKES))
def test_mistake_is_told_with_what_to_do_or_is_none(name: str, request: pytest.FixtureRequest) -> None:
    mistake = MISTAKES[name]
    if mistake.slow:
        request.getfixturevalue("fresh_compiler")
    if mistake.way == "raises":
        with pytest.raises(mistake.kind or Exception) as caught:
            mistake.function()
        message = str(caught.value)
    elif mistake.way == "warns":
        with warnings.catch_warnings(record=True) as seen:
            warnings.simplefilter("always", RecordingWarning)
            mistake.function()
        message = "\n".join(str(one.message) for one in seen)
    elif mistake.way == "reports":
        returned = mistake.function()
        told = returned[0] if isinstance(returned, tuple) else returned
        assert isinstance(told, (Recorder, Plan))
        message = str(told.report() if isinstance(told, Recorder) else told)
    else:
        same(*mistake.function())
        message = ""
    assert [text for text in mistake.texts if text not in message] == [], message


def test_there_are_as_many_as_were_asked_for() -> None:
    assert len(newcomer_tasks.TASKS) == 14
    assert len(MISTAKES) >= 65
    assert all(mistake.texts for mistake in MISTAKES.values() if mistake.way != "right")
    assert newcomer_mistakes.BATCH.shape == (10, 8)
