"""How a timeline is shown: a row for each series, with its course as small bars."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from recorders.recordings.display import Rows, ShownAsTable, number, shown_name

if TYPE_CHECKING:
    from recorders.watch.timeline.store import Course

__all__ = ["LOST", "SeriesTable", "sparkline"]

LOST = "\u00d7"
_BARS = "\u2581\u2582\u2583\u2584\u2585\u2586\u2587\u2588"


class SeriesTable(ShownAsTable):
    """The part of a `Timeline` that shows it."""

    path: str

    def __iter__(self) -> Iterator[str]:
        """All names."""
        raise NotImplementedError

    def statistics(self, name: str) -> list[str]:
        """The statistics of one name."""
        raise NotImplementedError

    def series(self, name: str, statistic: str) -> Course:
        """Ticks and values."""
        raise NotImplementedError

    def __repr__(self) -> str:
        return self.title_shown()  # no rows: the file may be closed

    def title_shown(self) -> str:
        """Where it is."""
        return f"Timeline({self.path!r})"

    def rows_shown(self, names: Sequence[str] | None = None) -> Rows:
        """One row for each statistic of each name, or of some: the last value, and how it went."""
        chosen = [*self] if names is None else names
        headings = ("name", "statistic", "over time", "ticks", "last")
        return headings, map(self._rows_of, chosen), len(chosen)

    def _rows_of(self, name: str) -> list[Sequence[str]]:
        courses = ((statistic, *self.series(name, statistic)) for statistic in self.statistics(name))
        return [
            (shown_name(name), statistic, sparkline(_thinned(values)), str(len(ticks)), number(values[-1]) if values else "")
            for statistic, ticks, values in courses
        ]


def sparkline(values: Sequence[float | None], log_scale: bool = False) -> str:
    """One mark for each value, from the lowest to the highest; a cross if it is not finite, a space if it is None.

    >>> sparkline([0.0, 1.0, None, math.nan, 4.0, 8.0])
    '\u2581\u2582 \u00d7\u2585\u2588'
    """
    finite = [value for value in values if value is not None and math.isfinite(value)]
    scaled = math.log if log_scale and all(value > 0 for value in finite) else float
    low, high = (scaled(min(finite)), scaled(max(finite))) if finite else (0.0, 0.0)
    steps = len(_BARS) - 1

    def mark(value: float | None) -> str:
        if value is None or not math.isfinite(value):
            return " " if value is None else LOST
        return _BARS[round((scaled(value) - low) / (high - low) * steps) if high > low else steps // 2]

    return "".join(map(mark, values))


def _thinned(values: Sequence[float], width: int = 24) -> Sequence[float]:
    """So many of the values; the last one is among them."""
    return [values[index * len(values) // width] for index in range(width - 1)] + [values[-1]] if len(values) > width else values
