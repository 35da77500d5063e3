"""What the verbs print: tables, JSON, messages. Names are from anywhere, and are printed so that no terminal obeys them."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from itertools import chain
from typing import TYPE_CHECKING, Any

from recorders.errors import MissingExtraError, require
from recorders.recordings.display import FittingTable, Rows, printable
from recorders.recordings.export import plain

if TYPE_CHECKING:
    from rich.console import Console


class UsageError(Exception):
    """The arguments do not fit together."""


def console(*, stderr: bool = False) -> Console:
    """Where to print: as wide as the terminal, and 160 characters in a file or a pipe."""
    kind = require("rich.console", "cli").Console
    found: Console = kind(highlight=False, markup=False, stderr=stderr)
    wide = os.environ.get("COLUMNS", "")
    width = (int(wide) if wide.isdecimal() else 0) or 160
    return found if found.is_terminal else kind(highlight=False, markup=False, stderr=stderr, width=width)


def filled(shown: Rows, numbers: int) -> FittingTable:
    """A table of all rows; the last columns are numbers. Cells are of one line."""
    require("rich", "cli")
    headings, items, _ = shown
    cells = ([printable(cell).replace("\n", "\\n") for cell in row] for row in chain.from_iterable(items))
    return FittingTable(headings, [*cells], numbers)


def print_json(value: Any, *, indent: int | None = 2) -> None:
    """Prints a value as JSON, in ASCII; numbers that JSON does not know as text, such as "nan"."""
    print(json.dumps(plain(value), indent=indent), flush=indent is None)


def print_written(paths: Sequence[object], as_json: bool, **more: Any) -> None:
    """Prints where something was written, if not to the standard output."""
    if as_json and paths:
        print_json({"written": [*map(str, paths)], **more})
    for path in () if as_json else paths:
        print(printable(path))


def complain(problem: object, as_json: bool, kind: str = "error", what: str = "") -> None:
    """Prints an error or a warning to the standard error."""
    text = what or str(problem)
    entry = {kind: {"type": type(problem).__name__, "message": text.split("\nusage: ")[0]}}
    prefix = "warning: " if kind == "warning" else ""
    with suppress(OSError, ValueError):  # nobody listens any more
        print(json.dumps(entry) if as_json else f"recorders: {prefix}{printable(text)}", file=sys.stderr, flush=True)


@contextmanager
def working(what: str) -> Iterator[None]:
    """Shows in a terminal that something is going on."""
    if not sys.stderr.isatty():
        yield
        return
    try:
        status = console(stderr=True).status(printable(what))
    except MissingExtraError:
        yield
        return
    with status:
        yield
