"""`recorders diff`: what changed between two runs."""

from __future__ import annotations

import math
from argparse import ArgumentParser
from dataclasses import asdict

from recorders.cli.output import console, filled, print_json
from recorders.cli.sources import add_source, at_least, kind_of, open_source
from recorders.errors import NotARecordingError
from recorders.recordings.display import number, printable, shown_name
from recorders.streams.files import StreamFiles
from recorders.watch.compare import Change, Comparison, compare

__all__ = ["add_arguments", "run"]

_FAIL_OVER = "end with status 1 if any change is larger, or a layer, statistic or shape is not the same in both"


def add_arguments(parser: ArgumentParser) -> None:
    """Adds what `run` takes."""
    add_source(parser, "first", "second")
    parser.add_argument("--tick", type=int, help="the tick of two timelines; the last in common if none is given")
    parser.add_argument("--top", type=at_least(1), default=20, metavar="N", help="the number of changes to show")
    parser.add_argument("--fail-over", type=float, default=math.inf, metavar="SIZE", help=_FAIL_OVER)


def run(first: str, second: str, tick: int | None = None, top: int = 20, fail_over: float = math.inf, as_json: bool = False) -> int:
    """Show what changed between two recordings or timelines, largest change first.

    Changes of means and quartiles are given in standard deviations, others as the logarithm of the ratio. What only one has is
    listed, and shapes that differ.
    """
    one, other = open_source(first), open_source(second)
    if isinstance(one, StreamFiles) or isinstance(other, StreamFiles) or kind_of(one) != kind_of(other):
        kinds = f"{first} is {kind_of(one)} and {second} is {kind_of(other)}"
        raise NotARecordingError(f"{kinds}: give two of one kind")
    found = compare(one, other, tick=tick)
    changes = [change for change in found.changes if change.score][:top]
    if as_json:
        lists = {
            "changes": [asdict(change) for change in changes],
            "only_first": found.only_first,
            "only_second": found.only_second,
            "reshaped": [asdict(one) for one in found.reshaped],
        }
        print_json(lists)
    else:
        _print(found, changes)
    return int(fail_over < math.inf and found.exceeds(fail_over))


def _print(found: Comparison, changes: list[Change]) -> None:
    screen = console()
    headings = ("name", "statistic", "at", "first", "second", "change")
    rows = [[_cells(change) for change in changes]]
    others = "" if found.is_comparable else " that both have in one shape"
    nothing = f"no difference in {len(found.changes)} statistics{others}"
    screen.print(filled((headings, rows, len(changes)), numbers=3) if changes else nothing)
    for line in found.rest():
        screen.print(printable(line))


def _cells(change: Change) -> list[str]:
    at = ", ".join(map(str, change.index))
    return [shown_name(change.name), change.statistic, at, number(change.first), number(change.second), f"{change.score:.2g}"]
