"""Visualizer: the protocol of objects that show charts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, runtime_checkable

from recorders.recordings.extras import require
from recorders.watch.charts import ChartView

__all__ = ["Visualizer", "finish", "require", "shortened"]


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
