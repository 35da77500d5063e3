"""`recorders replay`: a timeline shown again, by any visualizer."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Annotated

import typer

from recorders.cli.sources import open_source, working
from recorders.errors import NotARecordingError
from recorders.watch.replay import replay as show_again
from recorders.watch.timeline import Timeline

__all__ = ["replay"]

Targets = Annotated[
    list[str],
    typer.Argument(help="text, html:PAGE, matplotlib:FOLDER, tensorboard:FOLDER or wandb:PROJECT.", show_default=False),
]


def replay(
    path: Annotated[str, typer.Argument(help="The file of a timeline.", show_default=False)],
    targets: Targets,
) -> None:
    """Show a timeline again, tick after tick, as during the training."""
    timeline = open_source(path)
    if not isinstance(timeline, Timeline):
        raise NotARecordingError(f"{path} is a recording, which has no ticks: recorders report {path}")
    with nullcontext() if "text" in targets else working("replaying"):
        show_again(timeline, targets)
