"""Showing: the visualizers of an inspector, whose failures are warnings."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence

from recorders.errors import RecordingWarning
from recorders.watch.charts import ChartView
from recorders.watch.visualizers import Visualizer
from recorders.watch.visualizers.visualizer import finish

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

    def _guard(self, visualizer: Visualizer, when: str, work: Callable[..., None], *arguments: object) -> None:
        try:
            work(*arguments)
        except Exception as error:
            if id(visualizer) not in self._failed:
                self._failed.add(id(visualizer))
                message = f"{type(visualizer).__name__} failed {when}: {type(error).__name__}: {error}"
                warnings.warn(f"{message}; the timeline has its numbers, and training goes on", RecordingWarning, stacklevel=5)
