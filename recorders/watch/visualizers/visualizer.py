"""Visualizer: the protocol of objects that show charts, and how often they do."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Protocol, runtime_checkable

from recorders.watch.charts import ChartView


@runtime_checkable
class Visualizer(Protocol):
    """An object with a method `show`; if it has a method `flush()` too, that is called when the training, or the replay, ends."""

    def show(self, tick: int, charts: Sequence[ChartView]) -> None:
        """Shows charts after a tick; the views give the numbers of this tick and of all before it."""


def finish(visualizer: Visualizer) -> None:
    """Calls `flush` if the visualizer has it."""
    flush = getattr(visualizer, "flush", None)
    if callable(flush):
        flush()


def shortened(text: str, room: int) -> str:
    """A name cut off at its beginning if it is too long: the ends of layer names differ."""
    return text if len(text) <= room else "\u2026" + text[1 - room :]


class Pace:
    """Says when work is due again: after a pause, and so seldom that it takes at most a share of the time.

    >>> pace = Pace(pause=60.0, share=0.02)
    >>> with pace.measured():
    ...     pass
    >>> pace.due
    False
    """

    def __init__(self, pause: float, share: float) -> None:
        self._pause, self._share, self._next = pause, share, 0.0

    @property
    def due(self) -> bool:
        return time.monotonic() >= self._next

    @contextmanager
    def measured(self) -> Iterator[None]:
        """Measures the work of the block, also if it fails."""
        started = time.monotonic()
        try:
            yield
        finally:
            ended = time.monotonic()
            self._next = ended + max(self._pause, (ended - started) / self._share)
