"""Timeline: scalars over time in one SQLite file, one row per (tick, name, statistic)."""

from __future__ import annotations

import json
import os
from collections.abc import ItemsView, Iterable, Iterator, Mapping, Sequence, ValuesView
from typing import Any, Literal

import torch
from torch import Tensor

from recorders.errors import CorruptRecordingError, SelectionError, TickError, require
from recorders.recordings.display import Names, Rows, ShownAsTable, listed, number, shown_name, sparkline
from recorders.recordings.export import Backend, plain
from recorders.recordings.values import are_close, chosen
from recorders.watch.timeline.connection import MEMORY, Connection, located
from recorders.watch.timeline.rows import TimelineRows, numbers_of, step_of, tensors_as_bytes, texts_of, tick_of
from recorders.watch.timeline.schema import Series
from recorders.watch.timeline.selection import Chosen, ChosenTicks, Row, frame, selected
from recorders.watch.timeline.store import Course, Store

_AT_ONCE = 500  # names whose courses are read together, if all are shown


class Timeline(ShownAsTable, Mapping[str, dict[str, Course]]):
    """An append-only table of scalars over time, in one SQLite file.

    It is read like a mapping from name to the statistics of that name, each as its ticks and values.

    Each tick is written in one transaction and is on the disk when `append` returns: if the process is killed, the file holds every
    appended tick completely. Threads may share a timeline, and so may processes, also forked ones.

    Every number, name and note has a checksum, which is checked when it is read.

    Args:
        path: the file, which is created or continued; ":memory:" for a timeline in memory; with `read_only` also a URL, which is
            read as it is when it is opened.
        read_only: never write into the file, and create no file beside it: for folders that cannot be written.
        damaged: "error", or "skip" to leave out what is damaged, with a warning; `Timeline.damaged` says what that is.

    Raises:
        RecordingNotFoundError: with `read_only`, there is no file.
        NotARecordingError: the file is something else; it is not changed.
        SchemaError: the file has a newer schema.
        CorruptRecordingError: the file is empty, or a damaged timeline. So do all methods that read, when they meet damage.
        StorageError: the file cannot be opened or written, or a later write fails (disk full, locked by another process).

    >>> with Timeline() as timeline:
    ...     timeline.append(1, {"loss": {"mean": 0.9, "max": 1.5}})
    ...     timeline.append(2, {"loss": {"mean": 0.5}})
    ...     timeline.series("loss", "mean"), timeline.at(1)
    (([1, 2], [0.9, 0.5]), {'loss': {'mean': 0.9, 'max': 1.5}})
    """

    def __init__(
        self, path: str | os.PathLike[str] = MEMORY, *, read_only: bool = False, damaged: Literal["error", "skip"] = "error"
    ) -> None:
        if damaged not in ("error", "skip"):
            raise ValueError(f"damaged is 'error' or 'skip'; got {damaged!r}")
        self.path = located(path)
        self._store = Store(self.path, damaged == "skip")
        self._connection = Connection(self.path, read_only)

    @property
    def damaged(self) -> Mapping[int | str, str]:
        """With `damaged="skip"`, what was left out so far, and why: ticks, or tables by name."""
        return self._store.damaged

    def append(
        self,
        tick: int,
        rows: TimelineRows,
        step: int | None = None,
        *,
        tensors: Mapping[str, Tensor] | None = None,
        notes: Mapping[str, str] | None = None,
    ) -> None:
        """Writes one tick in one transaction.

        Args:
            tick: a new whole number, such as an epoch.
            rows: numbers, or tensors of one element, by name and by statistic; also NaN and infinities. Tensors are copied to the
                CPU in one transfer for each device and dtype.
            step: the number of optimizer steps that ended before this tick; None if it is not known.
            tensors: small tensors by name, such as a histogram, of any shape and dtype, at most 1 MiB each; kept bit for bit.
            notes: texts by key, written as by `note`, in the same transaction.

        Raises:
            TickError: the tick exists already (it is never overwritten: `forget` it first), or is not a whole number.
            TypeError: a value is neither a number nor a tensor of one element, or a name is no text.
            StorageError: a tensor is too big, or sparse.
        """
        tick, step = tick_of(tick), step_of(step)
        values, stored, texts = numbers_of(rows), tensors_as_bytes(tensors or {}), texts_of(notes or {})
        with self._connection.writing() as db:
            self._store.add_tick(db, tick, step, values, stored)
            self._store.add_notes(db, texts)

    def forget(self, since: int) -> int:
        """Removes the ticks from `since` on, for a training that goes back to a checkpoint; returns their number."""
        with self._connection.writing() as db:
            gone = {tick for tick in self._store.ticks(db) if tick >= since}
            self._store.remove_ticks(db, gone)
        return len(gone)

    def compact(self, every: int, before: int) -> int:
        """Removes, of the ticks before `before`, those that are no multiples of `every`, and gives their space back to the disk.

        The ticks are removed in one transaction: if the process is killed, either all or none of them are gone. The file is then
        written anew beside itself, whole or not at all, which takes as much space as it has.

        Returns:
            The number of ticks that were removed.

        >>> with Timeline() as timeline:
        ...     for epoch in range(8):
        ...         timeline.append(epoch, {"loss": {"mean": 1 / (1 + epoch)}})
        ...     timeline.compact(every=3, before=6), timeline.ticks()
        (4, [0, 3, 6, 7])
        """
        if every < 1:
            raise TickError(f"compact(every={every}): give a number of at least 1")
        with self._connection.writing() as db:
            gone = {tick for tick in self._store.ticks(db) if tick < before and tick % every}
            self._store.remove_ticks(db, gone)
        self._connection.vacuum()
        return len(gone)

    def __getitem__(self, name: str) -> dict[str, Course]:
        """The statistics of one name over time: of each its ticks, ascending, and its values.

        Raises:
            SelectionError: there is no such name; lists those that exist.
        """
        with self._connection.reading() as db:
            ids = {key.statistic: number for key, number in self._store.ids(db).items() if key.name == name}
            found = self._store.courses(db, ids.values(), self._store.ticks(db)) if ids else {}
            known = [*self._store.names(db)]
        if not ids:
            raise SelectionError(f"no {name!r} in {self.path}; there are {listed(known)}")
        return {statistic: found[number] for statistic, number in ids.items()}

    def __iter__(self) -> Iterator[str]:
        """All names, in the order in which they were first appended."""
        with self._connection.reading() as db:
            return iter([*self._store.names(db)])

    def __len__(self) -> int:
        """The number of names."""
        with self._connection.reading() as db:
            return len(self._store.names(db))

    def __contains__(self, name: object) -> bool:
        with self._connection.reading() as db:
            return name in self._store.names(db)

    def keys(self) -> Names:
        """All names, in the order in which they were first appended."""
        return Names(dict.fromkeys(self))

    def items(self) -> ItemsView[str, dict[str, Course]]:
        """All names, each with its statistics over time. The file is read once."""
        with self._connection.reading() as db:
            ids = self._store.ids(db)
            found = self._store.courses(db, ids.values(), self._store.ticks(db))
        made: dict[str, dict[str, Course]] = {}
        for key, at in ids.items():
            made.setdefault(key.name, {})[key.statistic] = found[at]
        return made.items()

    def values(self) -> ValuesView[dict[str, Course]]:
        """The statistics over time of each name."""
        return dict(self.items()).values()

    # It changes as it is written, so two of them are equal only if they are one.
    __eq__ = object.__eq__
    __hash__ = object.__hash__

    @property
    def samples(self) -> dict[str, int]:
        """The number of ticks at which each name has numbers."""
        return {name: len({tick for ticks, _ in courses.values() for tick in ticks}) for name, courses in self.items()}

    def peek(self) -> dict[str, dict[str, float]]:
        """The newest value of every statistic, by name.

        >>> with Timeline() as timeline:
        ...     timeline.append(0, {"loss": {"mean": 0.9, "max": 1.5}})
        ...     timeline.append(1, {"loss": {"mean": 0.5}})
        ...     timeline.peek(), timeline.samples, timeline.value("loss", stat="mean")
        ({'loss': {'mean': 0.5, 'max': 1.5}}, {'loss': 2}, 0.5)
        """
        found = {name: {key: values[-1] for key, (_, values) in courses.items() if values} for name, courses in self.items()}
        return {name: newest for name, newest in found.items() if newest}

    compute = peek

    def value(self, name: str, *, stat: str | None = None) -> float:
        """The newest value of one statistic, which may be left out if there is one.

        Raises:
            SelectionError: there is no such name or statistic, or several to choose from; lists them.
        """
        newest = {key: values[-1] for key, (_, values) in self[name].items() if values}
        return newest[chosen(newest, stat, "stat", "statistics", f"{name!r} in {self.path}")]

    def equals(self, other: object, *, rtol: float = 0.0, atol: float = 0.0) -> bool:
        """Whether another timeline has the same numbers of the same names at the same ticks.

        Numbers may differ by `atol + rtol * abs(number of the other)`; NaN equals NaN. Steps, notes and tensors are not compared.

        >>> with Timeline() as one, Timeline() as other:
        ...     one.append(0, {"loss": {"mean": 0.5}})
        ...     other.append(0, {"loss": {"mean": 0.5001}})
        ...     one.equals(other), one.equals(other, rtol=0.01)
        (False, True)
        """
        if not isinstance(other, Timeline):
            return False
        mine, theirs = dict(self.items()), dict(other.items())
        return mine.keys() == theirs.keys() and all(
            courses.keys() == theirs[name].keys()
            and all(
                ticks == theirs[name][key][0] and are_close(_tensor(values), _tensor(theirs[name][key][1]), rtol, atol)
                for key, (ticks, values) in courses.items()
            )
            for name, courses in mine.items()
        )

    def ticks(self) -> list[int]:
        """All ticks, ascending."""
        with self._connection.reading() as db:
            return list(self._store.ticks(db))

    def stored_ticks(self) -> Mapping[int, object]:
        """All ticks, ascending, with what was stored of each: it differs if a tick was written anew with other numbers."""
        with self._connection.reading() as db:
            return dict(self._store.ticks(db))

    def steps(self) -> dict[int, int]:
        """The number of optimizer steps that ended before each tick; ticks of which it is not known are left out."""
        with self._connection.reading() as db:
            return {number: tick.step for number, tick in self._store.ticks(db).items() if tick.step is not None}

    def statistics(self, name: str) -> list[str]:
        """The statistics of one name, in the order in which they were first appended.

        Raises:
            SelectionError: there is no such name; lists those that exist.
        """
        with self._connection.reading() as db:
            found = list(self._store.names(db).get(name, ()))
        if not found:
            raise SelectionError(f"no {name!r} in {self.path}; there are {listed(self)}")
        return found

    def series(self, name: str, statistic: str) -> Course:
        """One statistic over time: its ticks, ascending, and its values.

        Raises:
            SelectionError: there is no such name or statistic; lists those that exist.
        """
        with self._connection.reading() as db:
            number = self._store.ids(db).get(Series(name, statistic))
            if number is not None:
                return self._store.courses(db, [number], self._store.ticks(db))[number]
        raise SelectionError(f"{name!r} in {self.path} has no statistic {statistic!r}; there are {listed(self.statistics(name))}")

    def at(self, tick: int) -> dict[str, dict[str, float]]:
        """All values at one tick, by name and by statistic.

        Raises:
            SelectionError: there is no such tick.
        """
        if (rows := self._rows(tick)) is None:
            raise SelectionError(f"no tick {tick!r} in {self.path}; there are {listed(self.ticks())}")
        found: dict[str, dict[str, float]] = {}
        for row in rows:
            found.setdefault(row.name, {})[row.statistic] = row.value
        return found

    def courses(self, keys: Iterable[tuple[str, str]]) -> dict[tuple[str, str], Course]:
        """`series` of each (name, statistic) that was recorded. Many are read together: the file is read once."""
        with self._connection.reading() as db:
            known: Mapping[Any, int] = self._store.ids(db)
            wanted = {known[key]: key for key in keys if key in known}
            return {wanted[number]: course for number, course in self._store.courses(db, wanted, self._store.ticks(db)).items()}

    def select(self, names: Chosen = None, statistics: Chosen = None, ticks: ChosenTicks = None) -> list[Row]:
        """Rows by name, statistic and tick, without reading the others.

        Args:
            names: a glob, such as `"Loss/*"`, a name, or several of them; None for all.
            statistics: the same for statistics.
            ticks: a slice of ticks without its end, as in `range`; or the ticks themselves, such as `range(0, 100, 10)`.

        Returns:
            The rows of each name and statistic together, in the order in which these first came together; their ticks ascend.

        Raises:
            SelectionError: a name or a statistic stands for nothing; lists those that exist.

        >>> with Timeline() as timeline:
        ...     for epoch in range(3):
        ...         timeline.append(epoch, {"Loss/train": {"mean": 1.0 - epoch, "max": 2.0}, "Norm/0": {"mean": 3.0}})
        ...     [(row.tick, row.value) for row in timeline.select("Loss/*", "mean", slice(1, None))]
        [(1, 0.0), (2, -1.0)]
        """
        with self._connection.reading() as db:
            found = selected(self._store, db, names, statistics, ticks)
            return [Row(tick, *series, value) for series, course in found for tick, value in zip(*course, strict=True)]

    def to_frame(
        self, backend: Backend | None = None, *, names: Chosen = None, statistics: Chosen = None, ticks: ChosenTicks = None
    ) -> Any:
        """The rows of `select` as a data frame with the columns tick, step, name, statistic and value.

        Args:
            backend: "pandas" or "polars"; None for pandas if it is installed, else Polars.
            names, statistics, ticks: as in `select`.

        Raises:
            SelectionError: as in `select`.
            MissingExtraError: the library is not installed.
        """
        with self._connection.reading() as db:
            return frame(selected(self._store, db, names, statistics, ticks), self._store.ticks(db), backend)

    def to_xarray(self) -> Any:
        """An `xarray.DataTree` with a node for each name, whose variables are the statistics over "tick"; NaN where one is missing.

        Raises:
            MissingExtraError: xarray is not installed.
        """
        xarray = require("xarray", "xarray")
        nodes = {}
        for name, courses in self.items():
            data = {key.replace("/", "|"): _labelled(xarray, course) for key, course in courses.items()}
            nodes[f"/{name}"] = xarray.Dataset(data)
        return xarray.DataTree.from_dict(nodes)

    def to_json(self) -> str:
        """All ticks, steps and series as JSON; NaN and infinities are the texts "nan", "inf" and "-inf".

        >>> with Timeline() as timeline:
        ...     timeline.append(0, {"loss": {"mean": 0.5}}, step=10)
        ...     print(timeline.to_json())
        {"kind": "timeline", "ticks": [0], "steps": {"0": 10}, "series": {"loss": {"mean": {"ticks": [0], "values": [0.5]}}}}
        """
        return json.dumps(plain(self.as_data(list(self))), allow_nan=False)

    def as_data(self, names: Iterable[str]) -> dict[str, Any]:
        """What `to_json` writes, of some names."""
        chosen = set(names)
        series = {
            name: {key: {"ticks": ticks, "values": values} for key, (ticks, values) in courses.items()}
            for name, courses in self.items()
            if name in chosen
        }
        return {"kind": "timeline", "ticks": self.ticks(), "steps": self.steps(), "series": series}

    def tensor(self, name: str, tick: int) -> Tensor:
        """A tensor that was appended, in its shape and dtype, on the CPU.

        Raises:
            SelectionError: the tick has no such tensor; lists those that exist.

        >>> import torch
        >>> with Timeline() as timeline:
        ...     timeline.append(0, {"loss": {"mean": 0.5}}, tensors={"histogram": torch.tensor([3, 1])})
        ...     timeline.tensors(), timeline.tensor("histogram", 0)
        ({'histogram': [0]}, tensor([3, 1]))
        """
        with self._connection.reading() as db:
            found = self._store.tick(db, tick)
            names = list(self._store.tensors_of(tick, found)) if found else []
            if found and name in names:
                tensor = self._store.tensor(db, tick, found, name)
                if tensor is None:
                    raise CorruptRecordingError(f"{self.path} is damaged at tick {tick}: {self.damaged[tick]}")
                return tensor
        raise SelectionError(f"no tensor {name!r} at tick {tick} in {self.path}; there are {listed(names)}")

    def tensors(self) -> dict[str, list[int]]:
        """The names of all tensors, each with the ticks that have it."""
        with self._connection.reading() as db:
            return self._store.tensors(db)

    def ids(self) -> Mapping[tuple[str, str], int]:
        """The ids of all series by name and statistic, as in `numbers`."""
        with self._connection.reading() as db:
            return dict[tuple[str, str], int](self._store.ids(db).items())

    def numbers(self, tick: int) -> tuple[list[int], list[float]]:
        """All values at one tick: the ids of their series, ascending, and the values. For thousands of them faster than `at`."""
        with self._connection.reading() as db:
            found = self._store.tick(db, tick)
            ids, values = self._store.numbers(db, tick, found) if found else ([], ())
            return list(ids), list(values)

    def note(self, key: str, text: str) -> None:
        """Writes a text into the file, such as how to draw the numbers; replaces an earlier text with the same key."""
        with self._connection.writing() as db:
            self._store.add_notes(db, texts_of({key: text}))

    def notes(self) -> dict[str, str]:
        """All texts by key."""
        with self._connection.reading() as db:
            return dict(self._store.notes(db))

    def verify(self) -> dict[int | str, str]:
        """Reads all of the file, and SQLite's own pages.

        Returns:
            What is damaged, and why: ticks, or tables by name; empty if the file is whole.
        """
        with self._connection.reading() as db:
            store = Store(self.path, skip=True, warn=False)
            store.check(db)
        return store.damaged

    def close(self) -> None:
        """Closes the file; a timeline in memory is lost. Closing twice is harmless."""
        self._connection.close()

    def __repr__(self) -> str:
        return self.title_shown()  # no rows: the file may be closed

    def title_shown(self) -> str:
        """Where it is."""
        return f"Timeline({self.path!r})"

    def rows_shown(self, names: Sequence[str] | None = None) -> Rows:
        """One row for each statistic of each name, or of some: the last value, and how it went."""
        with self._connection.reading() as db:
            statistics = {name: list(found) for name, found in self._store.names(db).items()}
        chosen = [*statistics] if names is None else names
        return ("name", "statistic", "over time", "ticks", "last"), self._rows_of(statistics, chosen), len(chosen)

    def _rows_of(self, statistics: Mapping[str, Sequence[str]], names: Sequence[str]) -> Iterator[list[Sequence[str]]]:
        for start in range(0, len(names), _AT_ONCE):
            part = names[start : start + _AT_ONCE]
            courses = self.courses((name, statistic) for name in part for statistic in statistics[name])
            for name in part:
                yield [_row(name, statistic, *courses[name, statistic]) for statistic in statistics[name]]

    def __bool__(self) -> bool:
        return True

    def __enter__(self) -> Timeline:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _rows(self, tick: int) -> list[Row] | None:
        """All rows of a tick; None if there is no such tick."""
        with self._connection.reading() as db:
            if (found := self._store.tick(db, tick)) is None:
                return None
            names = self._store.series(db)
            values = zip(*self._store.numbers(db, tick, found), strict=True)
            return [Row(tick, *names[number], value) for number, value in values if number in names]


def _row(name: str, statistic: str, ticks: Sequence[int], values: Sequence[float]) -> Sequence[str]:
    last = number(values[-1]) if values else ""
    return shown_name(name), statistic, sparkline(_thinned(values)), str(len(ticks)), last


def _thinned(values: Sequence[float], width: int = 24) -> Sequence[float]:
    """So many of the values; the last one is among them."""
    return [values[index * len(values) // width] for index in range(width - 1)] + [values[-1]] if len(values) > width else values


def _tensor(values: Iterable[float]) -> Tensor:
    return torch.tensor([*values], dtype=torch.float64, device="cpu")


def _labelled(xarray: Any, course: Course) -> Any:
    ticks, values = course
    return xarray.DataArray([*values], coords={"tick": [*ticks]}, dims="tick")
