"""`recorders show`: what a recording or a timeline holds."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, replace
from itertools import chain
from typing import Any

from rich.table import Table
from rich.text import Text

from recorders.cli.sources import AsJson, Names, Source, console, open_source, print_json, selected, table
from recorders.recordings.display import Rows
from recorders.recordings.export import as_data
from recorders.watch.findings import findings
from recorders.watch.timeline import Timeline

__all__ = ["show", "timeline_table"]

_LISTED = 64  # elements of one tensor in JSON


def show(path: Source, names: Names = None, as_json: AsJson = False) -> None:
    """Show what a recording or a timeline holds."""
    source = open_source(path)
    if isinstance(source, Timeline):
        rows, faults = selected(source.names(), names), findings(source)
        data, shown = (_timeline_data(source, rows), None) if as_json else ({}, timeline_table(source, rows))
    else:
        chosen = selected(list(source), names)
        part = replace(source, subrecordings={name: source[name] for name in chosen})
        data, shown, faults = as_data(part, _LISTED), _filled(part.rows_shown(), numbers=1), findings(source)
    if as_json:
        print_json(
            {**data, "findings": [asdict(fault) for fault in faults], "examined": faults.examined, "unexamined": faults.unexamined}
        )
    else:
        console().print(shown)
        console().print(Text(f"\n{faults}"))


def _filled(shown: Rows, numbers: int) -> Table:
    """A table of all rows; the last columns are numbers."""
    headings, items, _ = shown
    found = table(*headings, numbers=numbers)
    for row in chain.from_iterable(items):
        found.add_row(*map(Text, row))
    return found


def timeline_table(timeline: Timeline, names: Sequence[str]) -> Table:
    """One row for each name and statistic: the last value, and how it went."""
    return _filled(timeline.rows_shown(names), numbers=2)


def _timeline_data(timeline: Timeline, names: Sequence[str]) -> dict[str, Any]:
    series: dict[str, Any] = {}
    for name in names:
        for statistic in timeline.statistics(name):
            ticks, values = timeline.series(name, statistic)
            series.setdefault(name, {})[statistic] = {"ticks": ticks, "values": values}
    return {"kind": "timeline", "ticks": timeline.ticks(), "series": series}
