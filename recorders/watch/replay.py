"""Replay: shows a recorded timeline as during the training."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import replace

from recorders.errors import LensError, SelectionError
from recorders.recordings.display import listed
from recorders.watch.charts import ChartView, charts_of
from recorders.watch.timeline import Timeline
from recorders.watch.visualizers.choice import Visualizers, as_visualizers
from recorders.watch.visualizers.visualizer import finish


def replay(timeline: Timeline | str | os.PathLike[str], show: Visualizers, charts: Sequence[ChartView] | None = None) -> None:
    """Shows a recorded timeline, tick after tick, as during the training.

    At each tick, a visualizer gets the numbers of this tick and of all before it. The charts have the layers that they had at the
    end. Ticks without numbers are passed by.

    Args:
        timeline: for example "run.db".
        show: a visualizer or several, as for `Inspector`.
        charts: what to show; None for the charts that the inspector wrote into the timeline.

    Raises:
        RecordingNotFoundError: there is no file at the path.
        LensError: the timeline contains no charts and none are given, or a visualizer is unknown.

    >>> import sys
    >>> from recorders import Inspector
    >>> from recorders.watch.visualizers import TextVisualizer
    >>> inspector = Inspector(lenses=[])
    >>> for epoch in inspector.range(2):
    ...     inspector.push_loss(1 / (1 + epoch))
    >>> replay(inspector.timeline, TextVisualizer(sys.stdout, width=60))  # doctest: +ELLIPSIS
    Loss, epoch 0
    ...
    Loss, epoch 1
    ...
    """
    source = timeline if isinstance(timeline, Timeline) else Timeline(timeline, read_only=True)
    if not (views := charts_of(source) if charts is None else list(charts)):
        raise LensError(f"{source.path} holds no charts: give charts=[ChartView(Chart(...), timeline, layers)]")
    shown, past = as_visualizers(show), _Past(source)
    views = [replace(view, timeline=past) for view in views]
    for tick in source.ticks():
        past.until(tick)
        if past.at(tick):
            for one in shown:
                one.show(tick, views)
    for one in shown:
        finish(one)


def as_of(timeline: Timeline, tick: int) -> Timeline:
    """The timeline as it was after one of its ticks; raises `SelectionError` if it has no such tick."""
    if tick not in timeline.ticks():
        raise SelectionError(f"no tick {tick!r} in {timeline.path}; there are {listed(timeline.ticks())}")
    past = _Past(timeline)
    past.until(tick)
    return past


class _Past(Timeline):
    """A timeline up to one of its ticks, on the same connection; nothing can be appended to it."""

    def __init__(self, source: Timeline) -> None:
        self.path, self._connection, self._store = source.path, source._connection, source._store.past()

    def until(self, tick: int) -> None:
        """Shows the ticks up to this one."""
        self._store.last = tick
