"""The recipes of the cookbook: each runs by itself, prints what is shown below it, and is short."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from paths import ROOT

PAGE = (ROOT / "docs" / "cookbook.md").read_text()
INTRODUCTION, *SECTIONS = re.split(r"^## ", PAGE, flags=re.MULTILINE)
RECIPES = {section.splitlines()[0]: section for section in SECTIONS if "```python" in section}
BY_TORCHRUN = "Training by torchrun"


def parts(section: str) -> tuple[str, str]:
    """The one Python block of a section, and the output that is shown right below it."""
    (found,) = re.findall(r"^```python\n(.*?)^```\n\n```text\n(.*?)^```", section, flags=re.MULTILINE | re.DOTALL)
    return found


@pytest.fixture(scope="module")
def setup() -> str:
    (block,) = re.findall(r"^```python\n(.*?)^```", INTRODUCTION, flags=re.MULTILINE | re.DOTALL)
    return f"{block}\n"


def test_there_are_thirteen_recipes_of_at_most_15_lines() -> None:
    assert len(RECIPES) == 13
    for title, section in RECIPES.items():
        lines = [line for line in parts(section)[0].splitlines() if line.strip()]
        assert len(lines) <= 15, title
        assert not re.search(r"\b(global|lambda)\b", "\n".join(lines)), title


@pytest.mark.parametrize("page", ["presets.md", "streams.md"])
def test_workflows_on_other_pages_have_at_most_25_lines_a_block(page: str) -> None:
    for block in re.findall(r"^```python\n(.*?)^```", (ROOT / "docs" / page).read_text(), flags=re.MULTILINE | re.DOTALL):
        assert sum(bool(line.strip()) for line in block.splitlines()) <= 25


@pytest.mark.parametrize("title", [title for title in RECIPES if title != BY_TORCHRUN])
def test_a_recipe_runs_by_itself_and_prints_what_is_shown(
    title: str, setup: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    torch.manual_seed(0)
    recipe, shown = parts(RECIPES[title])
    exec(compile(setup + recipe, title, "exec"), {"__name__": "__main__"})
    assert capsys.readouterr().out == shown


@pytest.mark.slow
def test_the_recipe_of_torchrun_runs_in_two_processes(setup: str, tmp_path: Path) -> None:
    recipe, shown = parts(RECIPES[BY_TORCHRUN])
    (tmp_path / "script.py").write_text(setup + recipe)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "script.py"]
    settings = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    ended = subprocess.run(command, cwd=tmp_path, env=settings, capture_output=True, text=True, timeout=300)
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout == shown
