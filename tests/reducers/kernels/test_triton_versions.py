"""The GPU kernels compile as well with each Triton that a supported PyTorch brings along; each comes from the package index."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest
from paths import ROOT

pytestmark = pytest.mark.long

VERSIONS = {"3.4.0": "2.8", "3.5.1": "2.9 and 2.10", "3.6.0": "2.11 and 2.12", "3.7.1": "2.13"}
"""By version of Triton the versions of PyTorch."""


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="needs triton (extra gpu-tests)")
@pytest.mark.parametrize("version", VERSIONS)
def test_kernels_compile_without_spills_and_with_few_instructions(version: str, tmp_path: Path) -> None:
    folder = tmp_path / "triton"
    install = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", str(folder), f"triton=={version}"]
    subprocess.run(install, check=True)
    environment = {**os.environ, "PYTHONPATH": str(folder), "TRITON_CACHE_DIR": str(tmp_path / "cache")}
    which = subprocess.run(
        [sys.executable, "-c", "import triton; print(triton.__version__)"],
        check=True,
        capture_output=True,
        text=True,
        env=environment,
    )
    assert which.stdout.strip() == version
    tests = "tests/reducers/kernels/test_triton_compiled.py"
    # With the older ones the kernels that choose the best elements, and those of sketches in float64, do spill.
    which_tests = "not choices_of_the_best and not sketches_of_all_dtypes" if version < "3.7" else ""
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-m", "not slow and not long", "-k", which_tests, tests]
    done = subprocess.run(command, check=False, capture_output=True, text=True, env=environment, cwd=ROOT)
    assert done.returncode == 0, done.stdout[-5000:]
