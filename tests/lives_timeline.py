"""The life of a timeline: what happens to its file is drawn by chance, beside a dictionary that keeps the same."""

from __future__ import annotations

import math
import multiprocessing
import random
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from recorders import Timeline
from recorders.errors import SelectionError, TickError

__all__ = ["TimelineLife"]

NAMES = ("loss", "Loss/train", "grad norm", "größe", "a'b", "x" * 300, "")
STATISTICS = ("mean", "max", "p99", "", "ü")
VALUES = (0.0, -0.0, 1.5, -1e300, 5e-324, math.inf, -math.inf, math.nan, 2**53 + 1, True, 3)


def same(one: float, other: float) -> bool:
    return math.copysign(1, one) == math.copysign(1, other) and one == other if one == one else other != other


class TimelineLife:
    """A file with a few handles, and what should be in it.

    Args:
        folder: where the file is.
        seed: what happens.
    """

    def __init__(self, folder: Path, seed: int) -> None:
        self.chance = random.Random(seed)
        self.path = folder / f"{seed}.db"
        self.handles = [Timeline(self.path)]
        self.happened: list[str] = []
        self.ticks: dict[int, dict[tuple[str, str], float]] = {}
        self.steps: dict[int, int] = {}
        self.tensors: dict[int, dict[str, Tensor]] = {}
        self.notes: dict[str, str] = {}
        self.order: dict[tuple[str, str], None] = {}  # of series, as they were first appended

    @property
    def one(self) -> Timeline:
        return self.chance.choice(self.handles)

    # What happens

    def _drawn(self) -> dict[str, Any]:
        chance = self.chance
        names = chance.sample(NAMES, chance.randint(0, 4))
        rows = {name: {key: chance.choice(VALUES) for key in chance.sample(STATISTICS, chance.randint(0, 3))} for name in names}
        given: dict[str, Any] = {"rows": rows}
        if chance.random() < 0.5:
            given["step"] = chance.randint(0, 10**12)
        if chance.random() < 0.4:
            kinds = torch.float32, torch.bfloat16, torch.int64, torch.bool, torch.complex64
            sizes = (), (0,), (3,), (2, 0, 4), (64, 3)
            given["tensors"] = {
                name: (torch.randn(chance.choice(sizes)) * 3).to(chance.choice(kinds)) for name in chance.sample(NAMES, 2)
            }
        if chance.random() < 0.3:
            given["notes"] = {chance.choice(NAMES): chance.choice(["", "text", "ß" * 5000])}
        return given

    def _as_given(self, rows: dict[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
        """The same numbers, of which some are tensors."""
        return {
            name: {
                key: torch.tensor(value, dtype=torch.float64) if self.chance.random() < 0.2 else value
                for key, value in statistics.items()
            }
            for name, statistics in rows.items()
        }

    def _keep(self, tick: int, given: dict[str, Any]) -> None:
        self.ticks[tick] = {
            (name, key): float(value) for name, statistics in given["rows"].items() for key, value in statistics.items()
        }
        self.order.update(dict.fromkeys(self.ticks[tick]))
        if "step" in given:
            self.steps[tick] = given["step"]
        self.tensors[tick] = given.get("tensors", {})
        self.notes.update(given.get("notes", {}))

    def _new_tick(self) -> int:
        newest = max(self.ticks, default=0)
        tick = self.chance.choice([newest + 1, newest + 1, newest + 7, -3, self.chance.randint(-(2**62), 2**62)])
        return tick if tick not in self.ticks else newest + 1

    def append(self) -> None:
        tick, given = self._new_tick(), self._drawn()
        self.one.append(tick, **{**given, "rows": self._as_given(given["rows"])})
        self._keep(tick, given)

    def append_again(self) -> None:
        if self.ticks:
            with pytest.raises(TickError):
                self.one.append(self.chance.choice([*self.ticks]), **self._drawn())

    def append_what_is_no_number(self) -> None:
        wrong = {"rows": {"loss": {"mean": "text"}}}, {"rows": {"loss": {"mean": torch.zeros(2)}}}, {"rows": {3: {"mean": 1.0}}}
        with pytest.raises(TypeError):
            self.one.append(self._new_tick(), **self.chance.choice(wrong))  # type: ignore[arg-type]

    def append_in_threads(self) -> None:
        drawn = [(2**62 + len(self.ticks) + number, self._drawn()) for number in range(3)]
        for number, (tick, _) in enumerate(drawn):
            while tick in self.ticks or tick in [other for other, _ in drawn[:number]]:
                tick += 1
            drawn[number] = tick, drawn[number][1]
        handle = self.one
        threads = [threading.Thread(target=handle.append, args=(tick,), kwargs=given) for tick, given in drawn]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        self._keep_in_the_order_of_the_file(drawn)

    def append_in_a_process(self) -> None:
        drawn = [(self._new_tick(), self._drawn())]
        process = multiprocessing.get_context("fork").Process(target=self.one.append, args=drawn[0][:1], kwargs=drawn[0][1])
        process.start()
        process.join()
        assert process.exitcode == 0
        self._keep_in_the_order_of_the_file(drawn)

    def _keep_in_the_order_of_the_file(self, drawn: list[tuple[int, dict[str, Any]]]) -> None:
        """Which of several threads was first is seen only in the file."""
        known = dict(self.order)
        for tick, given in drawn:
            notes = given.pop("notes", {})
            self._keep(tick, given)
            self.notes.update({key: self.one.notes()[key] for key in notes})
            assert len(drawn) > 1 or all(self.notes[key] == text for key, text in notes.items())
        found = [series for series in self.one.ids() if series in self.order]
        assert set(found) == set(self.order)
        self.order = {**known, **dict.fromkeys(found)}

    def forget(self) -> None:
        since = self.chance.choice([*self.ticks, 0, max(self.ticks, default=0) + 1])
        gone = {tick for tick in self.ticks if tick >= since}
        assert self.one.forget(since) == len(gone)
        self._remove(gone)

    def compact(self) -> None:
        every, before = self.chance.randint(1, 4), self.chance.choice([*self.ticks, 0])
        gone = {tick for tick in self.ticks if tick < before and tick % every}
        assert self.one.compact(every, before) == len(gone)
        self._remove(gone)

    def _remove(self, gone: set[int]) -> None:
        for tick in gone:
            del self.ticks[tick], self.tensors[tick]
            self.steps.pop(tick, None)

    def note(self) -> None:
        key, text = self.chance.choice(NAMES), self.chance.choice(["", "another", "\0x"])
        self.one.note(key, text)
        self.notes[key] = text

    def open_another(self) -> None:
        self.handles.append(Timeline(self.path))

    def close_one(self) -> None:
        handle = self.handles.pop(self.chance.randrange(len(self.handles)))
        handle.close()
        if not self.handles:
            self.handles.append(Timeline(self.path))

    def read_only(self) -> None:
        with Timeline(self.path, read_only=True) as timeline:
            self.check(timeline)

    def look(self) -> None:
        self.check(self.one)

    # What is checked

    def check(self, timeline: Timeline) -> None:
        assert timeline.ticks() == sorted(self.ticks)
        assert timeline.steps() == self.steps
        assert timeline.notes() == self.notes
        assert {name: ticks for name, ticks in timeline.tensors().items() if ticks} == {
            name: sorted(tick for tick, found in self.tensors.items() if name in found)
            for name in NAMES
            if any(name in found for found in self.tensors.values())
        }
        for tick, tensors in self.tensors.items():
            for name, tensor in tensors.items():
                found = timeline.tensor(name, tick)
                assert (found.dtype, found.shape) == (tensor.dtype, tensor.shape)
                assert (
                    found.contiguous().view(-1).numpy(force=True).tobytes() == tensor.view(-1).numpy(force=True).tobytes()
                    if (tensor.dtype is not torch.bfloat16)
                    else torch.equal(found, tensor)
                )
        courses = {(name, key): course for name, statistics in timeline.items() for key, course in statistics.items()}
        self._check_courses(courses)
        self._check_courses(timeline.courses(self.order))
        for tick, values in self.ticks.items():
            at = {(name, key): value for name, statistics in timeline.at(tick).items() for key, value in statistics.items()}
            assert at.keys() == values.keys()
            assert all(same(at[series], value) for series, value in values.items())
        rows = timeline.select() if any(self.ticks.values()) else []
        assert [(row.tick, row.name, row.statistic) for row in rows] == [
            (tick, *series) for series in self.order for tick in sorted(self.ticks) if series in self.ticks[tick]
        ]
        assert timeline.verify() == {}
        with pytest.raises(SelectionError):
            timeline.series("not there", "mean")

    def _check_courses(self, courses: Any) -> None:
        wanted = {series: [tick for tick in sorted(self.ticks) if series in self.ticks[tick]] for series in self.order}
        for series, ticks in wanted.items():
            found, values = courses.get(series, ([], []))
            assert list(found) == ticks, series
            assert all(same(value, self.ticks[tick][series]) for tick, value in zip(ticks, values, strict=True)), series
        assert set(courses) <= set(wanted)

    def live(self, moments: int = 40) -> None:
        """So many things happen; at the end all is compared, by a handle that is opened then."""
        things = {
            self.append: 10.0,
            self.look: 2.0,
            self.append_again: 1.0,
            self.append_what_is_no_number: 1.0,
            self.append_in_threads: 1.0,
            self.append_in_a_process: 0.5,
            self.forget: 0.7,
            self.compact: 0.7,
            self.note: 1.0,
            self.open_another: 1.0,
            self.close_one: 1.0,
            self.read_only: 1.0,
        }
        try:
            for thing in self.chance.choices([*things], [*things.values()], k=moments):
                self.happened.append(thing.__name__)
                thing()
            self.look()
            for handle in self.handles:
                handle.close()
            with Timeline(self.path) as timeline:
                self.check(timeline)
        except Exception as error:
            raise AssertionError(
                f"{type(error).__name__}: {error}\nin the life of a timeline: {'; '.join(self.happened)}"
            ) from error
