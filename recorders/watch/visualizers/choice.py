"""How visualizers are chosen by name, and how a timeline is played back into them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TypeAlias

from recorders.errors import LensError
from recorders.watch.charts import ChartView, charts_of
from recorders.watch.timeline import Timeline
from recorders.watch.visualizers.matplotlib import MatplotlibVisualizer
from recorders.watch.visualizers.text import TextVisualizer
from recorders.watch.visualizers.visualizer import Visualizer

__all__ = ["Visualizers", "as_visualizers", "play"]

Visualizers: TypeAlias = "str | Visualizer | Iterable[str | Visualizer] | None"

KINDS: dict[str, type[Visualizer]] = {"text": TextVisualizer, "matplotlib": MatplotlibVisualizer}


def as_visualizers(given: Visualizers) -> tuple[Visualizer, ...]:
    """One visualizer or several, by name ("text", "matplotlib") or as they are.

    Raises:
        LensError: an unknown name, or something that has no `show`.
        MissingExtraError: the library it draws with is not installed.
    """
    if given is None:
        return ()
    if isinstance(given, (str, Visualizer)):
        return (_made(given),)
    return tuple(_made(one) for one in given)


def _made(given: str | Visualizer) -> Visualizer:
    if isinstance(given, str):
        if given not in KINDS:
            raise LensError(
                f"no visualizer {given!r}: choose from {', '.join(map(repr, KINDS))}, or give an object with show(tick, charts)"
            )
        return KINDS[given]()
    if isinstance(given, type) or not isinstance(given, Visualizer):
        raise LensError(
            f"a visualizer is an object with show(tick, charts), or one of {', '.join(map(repr, KINDS))}; got {given!r}"
        )
    return given


def play(timeline: Timeline, visualizer: Visualizers, charts: Sequence[ChartView] | None = None) -> None:
    """Shows a recorded timeline, tick after tick, as it was shown, or would have been, while it was recorded.

    Args:
        timeline: what was recorded, such as `Timeline("run.db")`.
        visualizer: one or several.
        charts: what to show; as a rule what the inspector wrote into the timeline beside the numbers.

    Raises:
        LensError: the timeline holds no charts and none are given.
    """
    views = charts_of(timeline) if charts is None else list(charts)
    if not views:
        raise LensError(f"{timeline.path} holds no charts: give charts=[ChartView(Chart(...), timeline, layers)]")
    shown = as_visualizers(visualizer)
    for tick in timeline.ticks():
        for one in shown:
            one.show(tick, views)
