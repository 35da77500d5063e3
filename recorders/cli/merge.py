"""`recorders merge`: several recordings as one."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.progress import track

from recorders.cli.sources import console
from recorders.errors import StorageError
from recorders.recordings.loading import load
from recorders.recordings.recording import Recording
from recorders.recordings.storage import save

__all__ = ["merge"]


def merge(
    paths: Annotated[list[Path], typer.Argument(help="The folders of recordings, earliest first.", show_default=False)],
    out: Annotated[Path, typer.Option("--out", "-o", help="The folder of the merged recording.", show_default=False)],
    keep: Annotated[bool, typer.Option("--keep", help="Keep names that only some of them hold.")] = False,
) -> None:
    """Merge recordings, as if one process had recorded all of it."""
    if len(paths) < 2:
        raise typer.BadParameter("give two recordings or more")
    if out.exists() and any(out.iterdir() if out.is_dir() else [out]):
        raise StorageError(f"{out} exists already: choose another folder, or remove it")
    merged: Recording | None = None
    for path in track(paths, "merging", console=console(stderr=True), transient=True):
        part = load(path)
        merged = part if merged is None else merged.merge(part, missing="keep" if keep else "error")
    assert merged is not None
    print(save(merged, out))
