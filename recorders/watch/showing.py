"""Showing: the visualizers of an inspector and its progress bar, whose failures are warnings."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Sequence

from recorders.errors import RecordingWarning
from recorders.watch.charts import ChartView
from recorders.watch.progress import ProgressBar
from recorders.watch.visualizers import Visualizer
from recorders.watch.visualizers.visualizer import finish
from reducers.errors import warn_user

__all__ = ["Showing"]


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
