"""`recorders show`: what a recording or a timeline holds."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from rich.table import Table
from rich.text import Text
from torch import Tensor

from recorders.cli.sources import AsJson, Names, Source, console, cut, open_source, print_json, selected, table
from recorders.recordings.recording import Recording
from recorders.recordings.shown import number
from recorders.watch.compare import results_by_name
from recorders.watch.findings import findings
from recorders.watch.timeline import Timeline

__all__ = ["show", "sparkline", "timeline_table"]

_LISTED = 64  # elements of one tensor in JSON
_BARS = "\u2581\u2582\u2583\u2584\u2585\u2586\u2587\u2588"


def show(path: Source, names: Names = None, as_json: AsJson = False) -> None:
    """Show what a recording or a timeline holds."""
    source = open_source(path)
    if isinstance(source, Timeline):
        rows, faults = selected(source.names(), names), findings(source)
        data, shown = (_timeline_data(source, rows), None) if as_json else ({}, timeline_table(source, rows))
    else:
        chosen = selected(list(source), names)
        part = Recording({name: source[name] for name in chosen})
        data, shown, faults = _recording_data(source, chosen), _recording_table(part), findings(source)
    if as_json:
        print_json(
            {**data, "findings": [asdict(fault) for fault in faults], "examined": faults.examined, "unexamined": faults.unexamined}
        )
    else:
        console().print(shown)
        console().print(Text(f"\n{faults}"))


def _recording_table(recording: Recording) -> Table:
    headings, rows = recording.rows_shown()
    found = table(*headings, numbers=1)
    for row in rows:
        found.add_row(*map(Text, row))
    return found


def _recording_data(recording: Recording, names: Sequence[str]) -> dict[str, Any]:
    parts: dict[str, Any] = {}
    for name in names:
        part = recording[name]
        leaves = results_by_name(Recording({name: part}))
        found = {leaf.removeprefix(name): {path: _data(x) for path, x in result.items()} for leaf, result in leaves.items()}
        parts[name] = {
            "monitor": part.monitor,
            "attr": part.attr,
            "module": part.module,
            "reducer": None if part.reducer is None else repr(part.reducer),
            "observations": part.samples,
            "results": found,
        }
    return {"kind": "recording", "subrecorders": parts, "aliases": dict(recording.aliases)}


def _data(x: Tensor) -> Any:
    """A tensor as numbers; as its shape and extremes if it is big (`export` writes all)."""
    if x.numel() > _LISTED:
        return {"shape": list(x.shape), "min": x.min().item(), "max": x.max().item()}
    return x.tolist()


def timeline_table(timeline: Timeline, names: Sequence[str]) -> Table:
    """One row for each name and statistic: the last value, and how it went."""
    found = table("name", "statistic", "over time", "ticks", "last", numbers=2)
    for name in names:
        for statistic in timeline.statistics(name):
            ticks, values = timeline.series(name, statistic)
            found.add_row(cut(name), statistic, sparkline(values), str(len(ticks)), number(values[-1]) if values else "")
    return found


def _timeline_data(timeline: Timeline, names: Sequence[str]) -> dict[str, Any]:
    series: dict[str, Any] = {}
    for name in names:
        for statistic in timeline.statistics(name):
            ticks, values = timeline.series(name, statistic)
            series.setdefault(name, {})[statistic] = {"ticks": ticks, "values": values}
    return {"kind": "timeline", "ticks": timeline.ticks(), "series": series}


def sparkline(values: Sequence[float], width: int = 24) -> str:
    """Values over time as small bars, the newest on the right; a cross for what is not finite.

    >>> sparkline([0.0, 1.0, 2.0, float("nan")])
    '\u2581\u2585\u2588\u00d7'
    """
    shown = [values[index * len(values) // width] for index in range(width - 1)] + [values[-1]] if len(values) > width else values
    finite = [value for value in shown if math.isfinite(value)]
    low, high = min(finite, default=0.0), max(finite, default=0.0)
    scale = (len(_BARS) - 1) / (high - low) if high > low else 0.0
    return "".join(_BARS[round((value - low) * scale)] if math.isfinite(value) else "\u00d7" for value in shown)
