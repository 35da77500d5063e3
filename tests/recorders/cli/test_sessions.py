"""Five people's first sessions in a shell, each a text of what they type and what they see; see `sessions/`.

A line that begins with "$ " is typed, and "> " goes on with it. What follows is printed, "..." for anything. A last line "[1]" is
the exit status, if it is not 0.
"""

from __future__ import annotations

import doctest
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from paths import ROOT

pytest.importorskip("rich")
pytestmark = [pytest.mark.slow, pytest.mark.skipif(sys.platform == "win32", reason="needs bash")]

SESSIONS = Path(__file__).parent / "sessions"
STEP = re.compile(r"^\$ (.*\n(?:> ?.*\n)*)((?:(?!\$ ).*\n)*)", re.MULTILINE)


def steps(text: str) -> list[tuple[str, str, int]]:
    """What is typed, what is printed then, and the exit status."""
    found = []
    for typed, printed in STEP.findall(text):
        status = re.search(r"^\[(\d+)\]\n\Z", printed, re.MULTILINE)
        command = re.sub(r"^> ?", "", typed, flags=re.MULTILINE)
        found.append((command, printed[: status.start()] if status else printed, int(status[1]) if status else 0))
    return found


LONG = {"pipe", "quickstart", "resume", "wrong-path"}  # many processes, each of which imports PyTorch


@pytest.mark.parametrize(
    "session",
    [
        pytest.param(path, id=path.stem, marks=[pytest.mark.long] if path.stem in LONG else [])
        for path in sorted(SESSIONS.glob("*.txt"))
    ],
)
def test_a_newcomer_sees_what_he_expects(session: Path, tmp_path: Path) -> None:
    if session.stem == "quickstart":
        pytest.importorskip("sklearn")
        blocks = re.findall(r"^```python\n(.*?)^```", (ROOT / "docs" / "quickstart.md").read_text(), re.MULTILINE | re.DOTALL)
        (tmp_path / "quickstart.py").write_text("".join(blocks))
    tools = tmp_path / ".tools"
    tools.mkdir()
    for name, command in {"python": f'"{sys.executable}"', "recorders": f'"{sys.executable}" -m recorders.cli'}.items():
        (tools / name).write_text(f'#!/bin/sh\nexec {command} "$@"\n')
        (tools / name).chmod(0o755)
    environment = {
        **os.environ,
        "PATH": f"{tools}{os.pathsep}{os.environ['PATH']}",
        "PYTHONPATH": str(ROOT),
        "OMP_NUM_THREADS": "1",
    }
    environment |= {"COLUMNS": "160"}
    found = steps(session.read_text())
    assert len(found) >= 4
    for command, expected, status in found:
        shell = ["bash", "-c", command]
        done = subprocess.run(
            shell, cwd=tmp_path, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False
        )
        printed = re.sub(r"[ \t]+$", "", done.stdout, flags=re.MULTILINE).rstrip("\n") + "\n" * bool(expected)
        fits = doctest.OutputChecker().check_output(expected, printed, doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE)
        assert fits, f"$ {command}\nexpected:\n{expected}\nprinted:\n{printed}"
        assert done.returncode == status, command


def test_a_planted_difference_is_found() -> None:
    assert steps("$ a\n> b\nx\n[2]\n$ c\n") == [("a\nb\n", "x\n", 2), ("c\n", "", 0)]
    assert {path.stem for path in SESSIONS.glob("*.txt")} == {"quickstart", "wrong-path", "pipe", "resume", "diff"}
