"""What the command line writes goes where it is told: through links and pipes, to readers that stop, in any encoding."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch

from recorders import Recording, Subrecording, save
from recorders.cli import main
from reducers import Mean

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="needs pipes")


@pytest.fixture
def run(tmp_path: Path) -> Path:
    state = Mean("b c -> c").update({}, torch.ones(2, 60))
    parts = {f"layer.{n}": Subrecording(Mean("b c -> c"), {"": state}, 1) for n in range(60)}
    parts["half \ud800"] = parts["layer.0"]
    return Path(save(Recording(parts), tmp_path / "run", layout="packed"))


def test_files_are_written_through_links_and_into_pipes(run: Path, tmp_path: Path) -> None:
    pipe, link, target = tmp_path / "pipe", tmp_path / "link.csv", tmp_path / "deep" / "target.csv"
    target.parent.mkdir()
    target.write_text("before")
    link.symlink_to(target)
    assert main(["export", str(run), "--to", str(link), "--names", "layer.1"]) == 0
    assert link.is_symlink()
    assert target.read_text().startswith("name,leaf")
    os.mkfifo(pipe)
    read: list[str] = []
    reader = threading.Thread(target=lambda: read.append(pipe.read_text()))
    reader.start()
    assert main(["export", str(run), "--to", f"csv:{pipe}", "--names", "layer.1"]) == 0
    reader.join(60)
    assert read == [target.read_text()]
    assert pipe.is_fifo()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["deep", "link.csv", "pipe", "run"]


@pytest.mark.slow
def test_a_reader_that_stops_ends_the_command_in_silence(run: Path) -> None:
    command = [sys.executable, "-m", "recorders.cli", "show", str(run), "--json"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as program:
        assert program.stdout is not None
        assert program.stdout.read(1) == b"{"
        program.stdout.close()
        assert program.stderr is not None
        said = program.stderr.read()
        assert (program.wait(60), said) == (141, b"")


@pytest.mark.slow
@pytest.mark.parametrize("options", [["--json"], []], ids=str)
def test_a_name_that_cannot_be_encoded_is_printed_escaped(run: Path, options: list[str]) -> None:
    done = subprocess.run([sys.executable, "-m", "recorders.cli", "show", str(run), *options], capture_output=True, check=False)
    assert done.returncode == 0, done.stderr
    assert b"half \\ud800" in done.stdout
