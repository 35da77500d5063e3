"""`recorders plot`: the charts of a timeline as figures."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from recorders.cli.sources import open_source, working
from recorders.errors import NotARecordingError
from recorders.watch.replay import replay
from recorders.watch.timeline import Timeline
from recorders.watch.visualizers.matplotlib import MatplotlibVisualizer

__all__ = ["plot"]


def plot(
    path: Annotated[str, typer.Argument(help="The file of a timeline.", show_default=False)],
    out: Annotated[Path, typer.Option("--out", "-o", help="The folder for the figures.")] = Path("recorders-plots"),
    dpi: Annotated[float, typer.Option(min=10, max=1000, help="Dots per inch.")] = 120,
) -> None:
    """Draw the charts of a timeline, one PNG for each."""
    timeline = open_source(path)
    if not isinstance(timeline, Timeline):
        raise NotARecordingError(f"{path} is a recording, which has no charts: recorders show {path}, or export it")
    visualizer = MatplotlibVisualizer()
    with working("drawing"):
        replay(timeline, visualizer)
        paths = visualizer.save(out, dpi)
    for each in paths:
        print(each)
