"""`recorders diff`: what changed between two runs."""

from __future__ import annotations

import math
from dataclasses import asdict
from typing import Annotated

import typer
from rich.text import Text

from recorders.cli.sources import AsJson, Source, console, cut, open_source, print_json, table
from recorders.errors import NotARecordingError
from recorders.recordings.display import number
from recorders.watch.compare import Change, Comparison, compare
from recorders.watch.timeline import Timeline

__all__ = ["diff"]

_FAIL_OVER = "End with status 1 if any change is larger, or a layer, statistic or shape is not the same in both."


def diff(
    first: Source,
    second: Source,
    tick: Annotated[int | None, typer.Option(help="The tick of two timelines; the last in common if none is given.")] = None,
    top: Annotated[int, typer.Option(min=1, help="The number of changes to show.")] = 20,
    fail_over: Annotated[float, typer.Option(help=_FAIL_OVER, show_default=False)] = math.inf,
    as_json: AsJson = False,
) -> None:
    """Show what changed between two recordings or timelines, largest change first.

    Changes of means and quartiles are given in standard deviations, others as the logarithm of the ratio. What only one has is
    listed, and shapes that differ.
    """
    one, other = open_source(first), open_source(second)
    if isinstance(one, Timeline) is not isinstance(other, Timeline):
        raise NotARecordingError(f"one of {first} and {second} is a recording and the other a timeline: give two of one kind")
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
    if fail_over < math.inf and found.exceeds(fail_over):
        raise typer.Exit(1)


def _print(found: Comparison, changes: list[Change]) -> None:
    screen = console()
    rows = table("name", "statistic", "at", "first", "second", "change", numbers=3)
    for change in changes:
        at = ", ".join(map(str, change.index))
        rows.add_row(cut(change.name), change.statistic, at, number(change.first), number(change.second), f"{change.score:.2g}")
    others = "" if found.is_comparable else " that both have in one shape"
    screen.print(rows if changes else f"no difference in {len(found.changes)} statistics{others}")
    for line in found.rest():
        screen.print(Text(line))
