"""`recorders repair`: what is whole of a damaged recording."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from recorders.recordings.storage import offline

__all__ = ["repair"]


def repair(
    path: Annotated[str, typer.Argument(help="The folder or URL of a damaged recording.", show_default=False)],
    out: Annotated[Path, typer.Option("--out", "-o", help="The folder of the repaired recording.", show_default=False)],
) -> None:
    """Write what is whole of a damaged recording into another folder, and say what is left out."""
    lost = offline.repair(path, out)
    for name, reason in lost.items():
        print(f"left out {name!r}: {reason}")
    print(f"{out}: {len(lost)} parts are left out" if lost else f"{out}: nothing was damaged")
