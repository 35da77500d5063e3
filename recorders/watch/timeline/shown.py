"""How a timeline is shown: a row for each series, with its course as small bars."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

from recorders.recordings.display import Rows, ShownAsTable, number, shown_name

if TYPE_CHECKING:
    from recorders.watch.timeline.store import Course

__all__ = ["SeriesTable", "sparkline"]

_BARS = "\u2581\u2582\u2583\u2584\u2585\u2586\u2587\u2588"


class SeriesTable(ShownAsTable):
    """The part of a `Timeline` that shows it."""

    path: str

    def names(self) -> list[str]:
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
        chosen = self.names() if names is None else names
        headings = ("name", "statistic", "over time", "ticks", "last")
        return headings, map(self._rows_of, chosen), len(chosen)

    def _rows_of(self, name: str) -> list[Sequence[str]]:
        courses = ((statistic, *self.series(name, statistic)) for statistic in self.statistics(name))
        return [
            (shown_name(name), statistic, sparkline(values), str(len(ticks)), number(values[-1]) if values else "")
            for statistic, ticks, values in courses
        ]


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
