"""The loops in C++ on random tensors, built so that they look for errors of memory and of arithmetic by themselves."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from paths import ROOT

from reducers.kernels.cpp import build, library

pytestmark = [
    pytest.mark.long,
    pytest.mark.skipif(not library.in_order(), reason="the loops are not built"),
    pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++"),
]

SECONDS = float(os.environ.get("RECORDERS_SANITIZER_SECONDS", "600"))
FLAGS = ("-fsanitize=address,undefined", "-fno-sanitize-recover=undefined", "-fno-omit-frame-pointer", "-g1", "-O1")
PROGRAM = Path(__file__).with_name("random_loops.py")
SETS = library._BETTER_FIRST.get(torch.backends.cpu.get_cpu_capability(), ("DEFAULT",))


@pytest.fixture(scope="module")
def copy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a copy of both packages, whose libraries have the sanitizers in them."""
    root = tmp_path_factory.mktemp("sanitized")
    for package in ("reducers", "recorders"):
        shutil.copytree(build.ROOT / package, root / package, ignore=shutil.ignore_patterns("*.so", "__pycache__"))
    assert build.build(root, FLAGS) == ""
    return root


def run(copy: Path, instructions: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    def runtime(name: str) -> str:
        return subprocess.run(["g++", f"-print-file-name={name}"], capture_output=True, text=True, check=True).stdout.strip()

    environment = {
        **os.environ,
        "LD_PRELOAD": f"{runtime('libasan.so')} {runtime('libstdc++.so')}",
        "ASAN_OPTIONS": "detect_leaks=0:strict_string_checks=1",  # Python's own memory is never given back
        "UBSAN_OPTIONS": "print_stacktrace=1",
        "PYTHONPATH": os.pathsep.join((str(copy), str(ROOT / "tests"))),
        "ATEN_CPU_CAPABILITY": instructions.lower(),
    }
    command = [sys.executable, str(PROGRAM), *arguments]
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=False)


def test_an_error_of_memory_would_be_found(copy: Path) -> None:
    done = run(copy, SETS[0], "planted")
    assert done.returncode != 0
    assert "heap-buffer-overflow" in done.stderr, done.stderr[-2000:]


@pytest.mark.parametrize("instructions", SETS)
def test_random_tensors_are_read_within_their_memory_and_reduced_as_by_pytorch(copy: Path, instructions: str) -> None:
    seed = os.environ.get("RECORDERS_SANITIZER_SEED", "0")
    done = run(copy, instructions, str(SECONDS / len(SETS)), seed)
    assert done.returncode == 0, f"seed {seed}: {done.stdout[-500:]} {done.stderr[:5000]}"
    said, taken = done.stdout.strip().splitlines()
    assert said == f"the loops in C++ are those of {build.loops_for(instructions).name}"
    assert json.loads(taken).keys() == {
        "swept",
        "masked",
        "joined",
        "weighted",
        "bits",
        "edges",
        "rows",
        "slots",
        "digests",
        "sketches",
    }
