"""Resident memory does not grow while a long training is recorded. Run: python -m pytest -m long tests/test_memory.py"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from paths import ROOT


@pytest.mark.long
@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="resident memory is read from /proc")
def test_resident_memory_over_100_000_steps_grows_by_less_than_5_mb() -> None:
    """In a process of its own, by the script that keeps its last figure in benchmarks/results/soak.json."""
    paths = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    subprocess.run([sys.executable, ROOT / "benchmarks" / "memory.py"], check=True, env={**os.environ, "PYTHONPATH": paths})
    result = json.loads((ROOT / "benchmarks" / "results" / "soak.json").read_text())
    assert result["steps"] == 100_000
    assert result["highest MB"] - result["start MB"] < 5
    assert result["growth MB"] < 5


def test_the_last_figure_that_was_measured_is_within_the_bound() -> None:
    result = json.loads((ROOT / "benchmarks" / "results" / "soak.json").read_text())
    assert result["steps"] >= 100_000
    assert result["growth MB"] < 5
