"""`recorders watch`: a timeline as it grows."""

from __future__ import annotations

import time
from typing import Annotated

import typer
from rich.live import Live
from rich.table import Table
from rich.text import Text

from recorders.cli.show import timeline_table
from recorders.cli.sources import Names, console, open_source, selected
from recorders.errors import NotARecordingError
from recorders.watch.timeline import Timeline

__all__ = ["watch"]


def watch(
    path: Annotated[str, typer.Argument(help="The file of a timeline.", show_default=False)],
    names: Names = None,
    every: Annotated[float, typer.Option(min=0.1, help="Seconds between two looks.")] = 1.0,
    until: Annotated[int | None, typer.Option(help="Stop when this tick is there.", show_default=False)] = None,
) -> None:
    """Show a timeline while a training writes it; stop with Ctrl+C."""
    timeline = open_source(path)
    if not isinstance(timeline, Timeline):
        raise NotARecordingError(f"{path} is a recording, which does not grow: recorders show {path}")
    with Live(_look(timeline, names), console=console(), auto_refresh=False, vertical_overflow="visible") as live:
        while until is None or until not in timeline.ticks():
            time.sleep(every)
            live.update(_look(timeline, names), refresh=True)


def _look(timeline: Timeline, names: str | None) -> Table | Text:
    if not timeline.ticks():
        return Text(f"{timeline.path} holds no ticks yet")
    return timeline_table(timeline, selected(timeline.names(), names))
