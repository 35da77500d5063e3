"""What a PATH on the command line stands for, and the arguments that several verbs have."""

from __future__ import annotations

import os
from argparse import ArgumentParser, ArgumentTypeError
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, TypeAlias

from recorders.cli.output import UsageError, working
from recorders.errors import SelectionError
from recorders.recordings.atomic_files import as_path, is_url
from recorders.recordings.display import is_named, listed, shown_name
from recorders.recordings.recording import Recording
from recorders.streams.files import StreamFiles
from recorders.watch.opened import open_recorded
from recorders.watch.timeline import Timeline
from reducers.errors import did_you_mean

Source: TypeAlias = "Recording | Timeline | StreamFiles"


def add_source(parser: ArgumentParser, *names: str, of: str = "a recording or a timeline", **more: Any) -> None:
    """Adds arguments that are paths, and the option that imports reducers of other packages."""
    for name in names:
        parser.add_argument(name, metavar="PATH" if name.startswith("path") else name.upper(), help=of, **more)
    parser.add_argument("--plugins", action="store_true", help="import the reducers that installed packages offer")


def add_names(parser: ArgumentParser) -> None:
    """Adds the option that chooses names."""
    parser.add_argument("-n", "--names", metavar="GLOB", help="only names that match, such as 'out/*'")


def at_least(least: float, kind: Callable[[str], Any] = int, most: float = 2**63 - 1) -> Callable[[str], Any]:
    """The type of an argument that is a number within bounds."""

    def number(text: str) -> Any:
        found = kind(text)
        if not least <= found <= most:
            raise ArgumentTypeError(f"{text} is not between {least} and {most}")
        return found

    return number


def place(text: str) -> str:
    """The type of an argument that is a folder or a file, to which the standard output does not do."""
    if text == "-":
        raise ArgumentTypeError("a folder is written, which the standard output cannot take: give a path")
    return text


def open_source(path: str) -> Source:
    """What is at a path or a URL; nothing is created or changed."""
    with working(f"reading {path}"):
        return open_recorded(path)


def file_to_write(text: str, paths: Iterable[str]) -> Path:
    """The file of that name; raises `UsageError` if it is what is at one of the paths that are read, or a file of that."""
    target = Path(as_path(text))
    for path in paths:
        if is_url(path):
            continue
        real, source = Path(os.path.realpath(target)), Path(os.path.realpath(as_path(path)))
        if real == source or (source in real.parents and real.suffix in (".json", ".jsonl", ".safetensors")):
            raise UsageError(f"{text} is what is read: give another file")
    return target


def kind_of(source: Source) -> str:
    """What it is, for messages."""
    return {Recording: "a recording", StreamFiles: "a stream"}.get(type(source), "a timeline")


def chosen_names(names: Iterable[str], pattern: str | None) -> list[str]:
    """The names that match a glob; raises `SelectionError` if there are none."""
    every = list(names)
    found = [name for name in every if pattern is None or is_named(name, pattern)]
    if pattern is not None and not found:
        known = [*map(shown_name, every)]
        raise SelectionError(f"nothing is named {pattern!r}; {did_you_mean(pattern, known)}there are {listed(known)}")
    return found
