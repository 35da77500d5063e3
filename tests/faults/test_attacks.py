"""Attacks on recordings in files hold: some of each here, all of them if the long tests run."""

from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from attacks import Tally, at_call, errors, left, recording
from paths import ROOT
from power_loss import power_losses

from recorders.errors import StorageError
from recorders.recordings.storage import commit
from recorders.recordings.storage.save import save

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")


def attacked(folder: Path, *mode: str) -> Sequence[dict[str, Any]]:
    command = [sys.executable, str(ROOT / "benchmarks" / "reliability.py"), *mode]
    environment = {**os.environ, "BENCHMARK_RESULTS": str(folder), "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr
    rows: list[dict[str, Any]] = json.loads((folder / "reliability.json").read_text())["rows"]
    assert [row["examples"] for row in rows if row["broke"]] == []
    return rows


@pytest.mark.slow
def test_some_of_each(tmp_path: Path) -> None:
    rows = attacked(tmp_path, "quick")
    assert len(rows) == 13
    assert all(row["tries"] > 1 for row in rows)


@pytest.mark.long
def test_all_of_them(tmp_path: Path) -> None:
    tries = {row["attack"]: row["tries"] for row in attacked(tmp_path)}
    assert sum(count for attack, count in tries.items() if "fuzzed" in attack) > 20_000


@pytest.mark.slow
def test_a_full_disk_at_every_call(tmp_path: Path) -> None:
    found = errors(tmp_path, codes=[errno.ENOSPC])
    assert found.broke == []
    assert found.outcomes.keys() == {"told, old", "told, new", "saved, new"}
    assert found.outcomes["told, old"] > 100


def test_a_disk_full_during_a_first_save_leaves_room(tmp_path: Path) -> None:
    def fail() -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with at_call(12, fail), pytest.raises(StorageError, match="No space left"):
        save(recording(1), tmp_path / "run")
    assert left(tmp_path / "run") == [".lock"]


@pytest.mark.slow
def test_a_power_loss_finds_a_flush_that_is_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    flush = commit.flush_folder

    def unless_before_the_rename(folder: Path) -> None:
        if not list(Path(folder).glob("manifest-*.tmp")):
            flush(folder)

    monkeypatch.setattr(commit, "flush_folder", unless_before_the_rename)
    found: Tally = power_losses(tmp_path, 40)
    assert found.broke
    assert all("CorruptRecordingError" in told or "FileNotFoundError" in told for told in found.broke)
