"""`recorders merge`: several recordings as one."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from recorders.cli.sources import working
from recorders.errors import StorageError
from recorders.recordings.atomic_files import as_path, is_url
from recorders.recordings.storage import offline

__all__ = ["merge"]


def merge(
    paths: Annotated[list[str], typer.Argument(help="Folders or URLs of recordings, earliest first.", show_default=False)],
    out: Annotated[str, typer.Option("--out", "-o", help="The folder or URL of the merged recording.", show_default=False)],
    keep: Annotated[bool, typer.Option("--keep", help="Keep names that only some of them hold.")] = False,
) -> None:
    """Merge recordings, as if one process had recorded all of it."""
    if len(paths) < 2:
        raise typer.BadParameter("give two recordings or more")
    target = Path() if is_url(out) else Path(as_path(out))
    if not is_url(out) and target.exists() and any(target.iterdir() if target.is_dir() else [target]):
        raise StorageError(f"{out} exists already: choose another folder, or remove it")
    merged = offline.merge(paths, missing="keep" if keep else "error")
    with working(f"merging {len(paths)} recordings of {len(merged)} subrecorders"):
        print(merged.save(out))
