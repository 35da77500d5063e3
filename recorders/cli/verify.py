"""`recorders verify`: whether files are whole."""

from __future__ import annotations

import sys
from typing import Annotated

import typer
from rich.progress import track

from recorders.cli.sources import AsJson, console, is_recording, open_source, print_json
from recorders.errors import CorruptRecordingError, RecorderError
from recorders.recordings.storage import offline
from recorders.watch.timeline import Timeline

__all__ = ["verify"]


def verify(
    paths: Annotated[list[str], typer.Argument(help="Recordings and timelines.", show_default=False)], as_json: AsJson = False
) -> None:
    """Check that recordings and timelines are whole: every file, every checksum. Ends with status 1 if one is not."""
    found: dict[str, str] = {}
    for path in track(paths, "checking", console=console(stderr=True), transient=True):
        try:
            found[path] = _checked(path)
        except (RecorderError, OSError) as error:
            found[path] = f"FAILED: {error}"
    if as_json:
        print_json({path: {"whole": not text.startswith("FAILED"), "says": text} for path, text in found.items()})
    else:
        for name, text in found.items():
            print(f"{name}: {text}", file=sys.stderr if text.startswith("FAILED") else sys.stdout)
    if any(text.startswith("FAILED") for text in found.values()):
        raise typer.Exit(1)


def _checked(path: str) -> str:
    source = None if is_recording(path) else open_source(path)
    lost = source.verify() if isinstance(source, Timeline) else offline.verify(path)
    if lost:
        some = "; ".join(f"{'tick ' * isinstance(part, int)}{part}: {reason}" for part, reason in list(lost.items())[:20])
        remedy = "" if source else f"; recorders repair {path} -o NEW keeps the others"
        raise CorruptRecordingError(f"{len(lost)} parts are damaged, the others are whole: {some}{remedy}")
    source = source or open_source(path)
    if isinstance(source, Timeline):
        return f"whole: {len(source.ticks())} ticks of {len(source.names())} names"
    return f"whole: {len(source)} subrecorders, {sum(part.samples for part in source.values()):,} observations"
