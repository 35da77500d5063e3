"""The tutorial of a rewrite: its three commands find the fault, as docs/rewrite.md shows."""

from __future__ import annotations

import os
import re
import subprocess
import sys

import pytest
from paths import ROOT

pytestmark = pytest.mark.slow
PAGE = (ROOT / "docs" / "rewrite.md").read_text()


def shown(name: str) -> list[str]:
    found = re.search(rf"<!-- {name} -->\n```\n(.*?)```", PAGE, flags=re.DOTALL)
    assert found is not None
    return found[1].splitlines()


def test_three_commands_find_the_fault(tmp_path: os.PathLike[str]) -> None:
    pytest.importorskip("transformers")
    pytest.importorskip("rich")
    commands = re.findall(r"```shell\n(.*?)```", PAGE, flags=re.DOTALL)
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "examples")]), "COLUMNS": "300"}
    printed = []
    for command in [*commands[0].splitlines(), commands[1]]:
        text = command.replace("python ", f"{sys.executable} ").replace("examples/", f"{ROOT}/examples/")
        text = text.replace("recorders diff", f"{sys.executable} -m recorders.cli diff")
        done = subprocess.run(text, shell=True, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=240)
        assert done.returncode == 0, done.stderr
        printed.append(done.stdout.splitlines())
    assert [line for line in shown("answer") if line not in printed[2]] == []
    operators = "\n".join(printed[3])
    assert [line for line in shown("operators") if line not in operators] == []
