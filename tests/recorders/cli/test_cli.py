"""The command `recorders`, in processes of its own: exit status, messages, and machines that lack things."""

from __future__ import annotations

import itertools
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from paths import ROOT
from torch import nn

from recorders import load
from recorders.cli import main


def recorders(*arguments: str, cwd: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-W", "error", "-m", "recorders.cli", *arguments],
        cwd=cwd,
        env={**os.environ, "PYTHONPATH": str(ROOT), **environment},
        capture_output=True,
        text=True,
        timeout=300,
    )


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--version"]) == 0
    assert re.match(r"torch-recorders .+ \(torch .+\)\n.*C\+\+.*\n$", capsys.readouterr().out)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["dance"], "dance"),
        (["demo", "--epochs", "0"], "--epochs"),
        (["demo", "--epochs", "many"], "--epochs"),
        (["demo", "--seed", "-1"], "--seed"),
        (["demo", "--seed", str(2**63)], "--seed"),
        (["show"], "argument"),
        (["export", "run", "--to", "table.txt"], "FILE.csv"),
        (["merge", "run", "--to", "x"], "two recordings or more"),
    ],
)
def test_what_cannot_be_parsed_ends_with_status_2(arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(arguments) == 2
    assert said in " ".join(capsys.readouterr().err.split())


def test_without_a_command_the_help_is_shown(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 2
    shown = capsys.readouterr()
    assert all(name in shown.out + shown.err for name in ("demo", "show", "diff", "report", "check", "export", "merge"))


@pytest.mark.slow
@pytest.mark.parametrize(("library", "extra"), [("matplotlib", "demo"), ("rich", "demo"), ("sklearn", "demo")])
def test_a_missing_extra_ends_with_the_command_that_brings_it(library: str, extra: str, tmp_path: Path) -> None:
    (tmp_path / library).mkdir()
    (tmp_path / library / "__init__.py").write_text(f"raise ModuleNotFoundError('No module', name='{library}')")
    done = recorders("demo", cwd=tmp_path, PYTHONPATH=f"{tmp_path}{os.pathsep}{ROOT}")
    assert done.returncode == 2
    assert done.stderr == f"recorders: {library} is not installed: pip install torch-recorders[{extra}]\n"
    assert done.stdout == ""


@pytest.mark.slow
def test_a_bare_machine_without_home_terminal_or_unicode(tmp_path: Path) -> None:
    pytest.importorskip("sklearn")
    (tmp_path / "file").touch()
    done = recorders(
        "demo", "--epochs", "1", cwd=tmp_path, HOME="/proc/none", MPLCONFIGDIR=str(tmp_path / "file"), PYTHONIOENCODING="ascii"
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    assert done.stdout.isascii()
    assert "recording: recorders-demo/recording" in done.stdout.splitlines()
    assert sorted(path.name for path in (tmp_path / "recorders-demo").iterdir()) == ["overview.png", "recording"]


@pytest.mark.slow
def test_a_foreign_folder_ends_with_status_1_and_one_line(tmp_path: Path) -> None:
    pytest.importorskip("sklearn")
    (tmp_path / "thesis.tex").touch()
    done = recorders("demo", "--to", str(tmp_path), cwd=tmp_path)
    assert done.returncode == 1
    assert done.stderr.startswith(f"recorders: {tmp_path} holds ['thesis.tex']")
    assert done.stderr.count("\n") == 1
    assert done.stdout == ""


def test_ctrl_c_saves_and_ends_with_status_130(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("sklearn")
    forwards = itertools.count()

    def interrupt(module: nn.Module, args: object, output: object) -> None:
        if isinstance(module, nn.Linear) and next(forwards) == 5:
            signal.raise_signal(signal.SIGINT)

    threads = torch.get_num_threads()
    handle = nn.modules.module.register_module_forward_hook(interrupt)
    usual = signal.signal(signal.SIGINT, signal.default_int_handler)  # processes in the background ignore it
    try:
        assert main(["demo", "--to", str(tmp_path)]) == 130
    finally:
        signal.signal(signal.SIGINT, usual)
        handle.remove()
        torch.set_num_threads(threads)
    assert "Interrupted after 5 steps: what was recorded until then is saved." in capsys.readouterr().out
    assert load(tmp_path / "recording").samples["loss"] == 5
