"""What is chosen of a timeline, and a data frame of it."""

from __future__ import annotations

import math
import sqlite3
from collections.abc import Collection, Iterable, Iterator, Mapping
from fnmatch import fnmatchcase
from typing import Any, NamedTuple, TypeAlias

from recorders.errors import SelectionError
from recorders.recordings.display import listed
from recorders.recordings.export import Backend, as_frame
from recorders.watch.timeline.schema import Series, Tick
from recorders.watch.timeline.store import Course, Store

Chosen: TypeAlias = "str | Collection[str] | None"
"""A glob or a name, several of them, or None for all."""
ChosenTicks: TypeAlias = "slice | Collection[int] | None"
"""A slice of ticks without its end, the ticks themselves, or None for all."""


_COLUMNS = {"tick": "int64", "step": "Int64", "name": "string", "statistic": "string", "value": "float64"}
"""The columns of a table of rows, with their kinds; the step may be missing."""


class Row(NamedTuple):
    """One value of one statistic of one name at one tick."""

    tick: int
    name: str
    statistic: str
    value: float


def selected(
    store: Store, db: sqlite3.Connection, names: Chosen, statistics: Chosen, ticks: ChosenTicks
) -> Iterator[tuple[Series, Course]]:
    """What `Timeline.select` returns, by series."""
    ids = store.ids(db)
    some = _chosen((key.name for key in ids), names, "name")
    kinds = _chosen((key.statistic for key in ids), statistics, "statistic")
    wanted = {number: key for key, number in ids.items() if key.name in some and key.statistic in kinds}
    found = store.courses(db, wanted, _chosen_ticks(store.ticks(db), ticks))
    yield from ((wanted[number], course) for number, course in found.items())


def frame(found: Iterable[tuple[Series, Course]], ticks: Mapping[int, Tick], backend: Backend | None) -> Any:
    """A data frame of what was selected."""
    made: dict[str, list[Any]] = {name: [] for name in _COLUMNS}
    for series, (numbers, values) in found:
        made["tick"] += numbers
        made["step"] += [ticks[number].step for number in numbers]
        made["name"] += [series.name] * len(numbers)
        made["statistic"] += [series.statistic] * len(numbers)
        made["value"] += values
    return as_frame(made, _COLUMNS, backend)


def _chosen(known: Iterable[str], wanted: Chosen, what: str) -> set[str]:
    """Of what is known, what a glob or a name stands for, or any of several; raises `SelectionError` if one stands for nothing."""
    every = list(dict.fromkeys(known))
    if wanted is None:
        return set(every)
    found: set[str] = set()
    for pattern in [wanted] if isinstance(wanted, str) else wanted:
        some = [name for name in every if name == pattern or fnmatchcase(name, pattern)]
        if not some:
            raise SelectionError(f"no {what} {pattern!r}; there are {listed(every)}")
        found.update(some)
    return found


def _chosen_ticks(known: Mapping[int, Tick], wanted: ChosenTicks) -> dict[int, Tick]:
    """Of all ticks, those in a slice or in a collection."""
    if isinstance(wanted, slice):
        if wanted.step not in (None, 1):
            raise SelectionError(f"a slice of ticks has no step; got {wanted}: give the ticks, such as range(0, 100, 10)")
        start, stop = (-math.inf if wanted.start is None else wanted.start), (math.inf if wanted.stop is None else wanted.stop)
        return {number: tick for number, tick in known.items() if start <= number < stop}
    if wanted is not None and not isinstance(wanted, Collection):
        raise SelectionError(f"ticks={wanted!r:.100}: give a slice of ticks, or several, such as [3]")
    return {number: tick for number, tick in known.items() if wanted is None or number in wanted}
