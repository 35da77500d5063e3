"""`recorders report`: one page that shows a run, or two side by side."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from recorders.cli.sources import open_source, working
from recorders.watch.visualizers.html import Run, write_report

__all__ = ["report"]


def report(
    paths: Annotated[list[str], typer.Argument(help="A recording or a timeline, or two to compare.", show_default=False)],
    out: Annotated[Path, typer.Option("--out", "-o", help="The page.")] = Path("report.html"),
    title: Annotated[str, typer.Option(help="Its title.")] = "Training report",
) -> None:
    """Write one page that opens in a browser without a network: findings, heat maps, a panel for each layer."""
    if len(paths) > 2:
        raise typer.BadParameter("give one run, or two to compare")
    runs = [Run.of(open_source(path), path) for path in paths]
    with working("writing"):
        print(write_report(out, *runs, title=title))
