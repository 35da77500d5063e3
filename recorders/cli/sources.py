"""What a PATH on the command line stands for, and the options that several commands have."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.text import Text

from recorders.errors import RecordingNotFoundError, SelectionError
from recorders.recordings.atomic_files import as_path, is_url
from recorders.recordings.display import is_named, listed, shown_name
from recorders.recordings.display import rich_table as table
from recorders.recordings.export import plain
from recorders.recordings.recording import Recording
from recorders.recordings.storage.load import load
from recorders.recordings.storage.manifest import recording_of
from recorders.watch.timeline import Timeline
from reducers.errors import did_you_mean

__all__ = [
    "AsJson",
    "Names",
    "Source",
    "console",
    "cut",
    "is_recording",
    "open_source",
    "print_json",
    "selected",
    "table",
    "working",
]

Source = Annotated[
    str, typer.Argument(help="The folder or URL of a recording, or the file of a timeline.", metavar="PATH", show_default=False)
]
Names = Annotated[str | None, typer.Option("--names", "-n", help="Only names that match this glob, such as 'out/*'.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")]


def console(*, stderr: bool = False) -> Console:
    """Where to print: as wide as the terminal, and 160 characters in a file or a pipe."""
    found = Console(highlight=False, stderr=stderr)
    return found if found.is_terminal else Console(highlight=False, stderr=stderr, width=int(os.environ.get("COLUMNS", "160")))


def is_recording(path: str) -> bool:
    """Whether there may be a recording, or a part of one, and no timeline."""
    return is_url(path) or os.path.isdir(as_path(path)) or recording_of(as_path(path)) is not None


def open_source(path: str) -> Recording | Timeline:
    """The recording or the timeline at a path; nothing is created or changed."""
    if is_recording(path):
        with working(f"reading {path}"):
            return load(path)
    if not os.path.exists(as_path(path)):
        raise RecordingNotFoundError(f"there is nothing at {path}: give the folder of a recording, or the file of a timeline")
    return Timeline(path, read_only=True)


def selected(names: Iterator[str] | list[str], pattern: str | None) -> list[str]:
    """The names that match a glob; raises `SelectionError` if there are none."""
    every = list(names)
    found = [name for name in every if pattern is None or is_named(name, pattern)]
    if pattern is not None and not found:
        known = [*map(shown_name, every)]
        raise SelectionError(f"nothing is named {pattern!r}; {did_you_mean(pattern, known)}there are {listed(known)}")
    return found


@contextmanager
def working(what: str) -> Iterator[None]:
    """Shows in a terminal that something is going on."""
    with console(stderr=True).status(what):
        yield


def cut(name: str) -> Text:
    """A name as it is: in a str, rich would read [brackets] as markup."""
    return Text(shown_name(name))


def print_json(value: Any) -> None:
    """Prints a value as JSON; numbers that JSON does not know as text, such as "nan"."""
    print(json.dumps(plain(value), indent=2, ensure_ascii=False))
