"""Showing: the visualizers of an inspector, whose failures are warnings, and its progress bar."""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Sized

from recorders.errors import RecordingWarning
from recorders.watch.charts import ChartView
from recorders.watch.visualizers import Visualizer
from recorders.watch.visualizers.screen import Screen, screen_of
from recorders.watch.visualizers.visualizer import Pace, finish
from reducers.errors import warn_user


class Showing:
    """Calls visualizers; if one raises, warns once, and goes on with the others."""

    def __init__(self, visualizers: tuple[Visualizer, ...]) -> None:
        self.visualizers = visualizers
        self._failed: set[int] = set()

    def show(self, tick: int, charts: Sequence[ChartView]) -> None:
        """Shows charts after a tick."""
        for visualizer in self.visualizers:
            self._guard(visualizer, f"at tick {tick}", visualizer.show, tick, charts)

    def finish(self) -> None:
        """Lets those that write seldom write what they have."""
        for visualizer in self.visualizers:
            self._guard(visualizer, "when the inspector was detached", finish, visualizer)

    @contextlib.contextmanager
    def bar(self, items: Iterable[object], wanted: bool, charts: Callable[[], Sequence[ChartView]]) -> Iterator[Callable[[], None]]:
        """A progress bar over `items`, if it is wanted, and what advances it."""
        if not wanted:
            yield lambda: None
            return
        bar = ProgressBar(items, charts)
        self._guard(bar, "at the beginning", bar.start)
        try:
            yield lambda: self._guard(bar, "after a tick", bar.advance)
        finally:
            self._guard(bar, "at the end", bar.finish)

    def _guard(self, visualizer: object, when: str, work: Callable[..., None], *arguments: object) -> None:
        try:
            work(*arguments)
        except Exception as error:
            if id(visualizer) not in self._failed:
                self._failed.add(id(visualizer))
                message = f"{type(visualizer).__name__} failed {when}: {type(error).__name__}: {error}"
                warn_user(f"{message}; the timeline has its numbers, and training goes on", RecordingWarning)


_PAUSE, _SHARE = 0.1, 0.02
_LOG_PAUSE = 10.0
"""The least time between two lines in a file, in seconds."""


class ProgressBar:
    """One line: how far, for how long, how long still, and the last figures.

    It is redrawn in place in a terminal or a notebook, together with a table of `TextVisualizer`. If standard output and standard
    error are both something else, lines go to standard error, at most one in 10 seconds.

    Args:
        items: what is gone through; its length is the end of the bar, if it has one.
        charts: returns the charts, of which losses and metrics are shown.
    """

    def __init__(self, items: Iterable[object], charts: Callable[[], Sequence[ChartView]]) -> None:
        self._total = len(items) if isinstance(items, Sized) else None
        self._charts, self._done, self._drawn = charts, 0, -1
        self._started = time.monotonic()
        self._screen: Screen | None = screen_of(sys.stdout) or screen_of(sys.stderr)
        self._pace = Pace(_PAUSE if self._screen else _LOG_PAUSE, _SHARE)

    def start(self) -> None:
        """Draws the bar before the first tick."""
        if self._screen is not None:
            self._draw()

    def advance(self) -> None:
        """Counts a tick; draws the bar if that is due."""
        self._done += 1
        if self._pace.due:
            self._draw()

    def finish(self) -> None:
        """Draws the last state, which stays."""
        if self._drawn < self._done:
            self._draw()
        if self._screen is not None:
            self._screen.leave(self)

    def _draw(self) -> None:
        with self._pace.measured():
            line = _line(self._done, self._total, time.monotonic() - self._started, _figures(self._charts()))
            if self._screen is None:
                print(line, file=sys.stderr)
            else:
                self._screen.put(self, [line[: self._screen.size[0] - 1]])
            self._drawn = self._done


def _figures(charts: Sequence[ChartView]) -> dict[str, float]:
    """The last value of each loss and metric."""
    found: dict[str, float] = {}
    for view in charts:
        if view.lines and view.is_pushed:
            for name in view.layers:
                if values := view.line(name, view.lines[0])[1]:
                    found[f"{name} loss" if view.chart.of[:1] == ("loss",) else name] = values[-1]
    return found


def _line(done: int, total: int | None, taken: float, figures: Mapping[str, float]) -> str:
    """As tqdm writes it, whose users know it."""
    last = "".join(f", {name}={value:.4g}" for name, value in figures.items())
    each = taken / done if done else 0.0
    pace = "?" if not done else f"{each:.2f}s/tick" if each >= 1 else f"{1 / max(each, 1e-9):.2f}ticks/s"
    if not total:
        return f"{done} ticks [{_clock(taken)}, {pace}{last}]"
    share = min(done / total, 1.0)
    eighths = round(share * 10 * 8)
    bar = "\u2588" * (eighths // 8) + (" \u258f\u258e\u258d\u258c\u258b\u258a\u2589"[eighths % 8] if eighths % 8 else "")
    still = _clock(each * max(total - done, 0)) if done else "?"
    return f"{share:4.0%}|{bar:10}| {done}/{total} [{_clock(taken)}<{still}, {pace}{last}]"


def _clock(seconds: float) -> str:
    minutes, second = divmod(round(seconds), 60)
    hours, minute = divmod(minutes, 60)
    return f"{hours}:{minute:02}:{second:02}" if hours else f"{minute:02}:{second:02}"
