"""How many files of this package a save and a load pass: who reads them reads no more."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import recorders
from recorders import ForwardMonitor, Recorder, Recording, load, save
from recorders.recordings.storage.save import Layout
from reducers import Summary

PACKAGE = Path(recorders.__file__).parent


def entered(call: Callable[[], object]) -> set[str]:
    """The files of `recorders` of which a function is called."""
    files: set[str] = set()

    def note(frame: Any, event: str, _: Any) -> None:
        path = Path(frame.f_code.co_filename)
        if event == "call" and path.is_relative_to(PACKAGE):
            files.add(str(path.relative_to(PACKAGE)))

    before = sys.getprofile()
    sys.setprofile(note)
    try:
        call()
    finally:
        sys.setprofile(before)
    return files


@pytest.mark.parametrize("layout", ["folder", "packed"])
def test_save_and_load_pass_few_files(tmp_path: Path, layout: Layout) -> None:
    net = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.ReLU())
    recorder = Recorder(ForwardMonitor(Summary("b c -> c"))).children(net)
    net(torch.ones(2, 3))
    kept: Recording = recorder.snapshot()
    for _ in range(2):  # a new folder, and one that holds a recording
        assert len(entered(lambda: save(kept, tmp_path / "run", layout=layout))) <= 9
        assert len(entered(lambda: recorder.save(tmp_path / "all", layout=layout))) <= 22  # with the monitors that are looked at
    assert len(entered(lambda: load(tmp_path / "run"))) <= 9
    assert len(entered(lambda: load(tmp_path / "run").compute())) <= 10
