"""Charts: descriptions of what to draw of a timeline, and the view of them that visualizers get."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, astuple, dataclass, replace
from typing import Any, NamedTuple, TypeAlias

from recorders.errors import CorruptRecordingError, LensError, SelectionError
from recorders.watch.timeline import Timeline

Aggregation: TypeAlias = "str | Iterable[str] | None"

PUSHED = ("loss", "metric", "pushed")
"""Groups of pushed values that every lens may draw; "pushed" is losses and metrics together."""

LINES = ("mean", "std", "min", "max", "median", "Q1", "Q3")
RANGES = ("std", "min-max", "Q1-Q3")
_NOTE = "charts"
_AXIS = "axis"
_SILENT = "silent"
_LAYERS = "layers"

Series: TypeAlias = tuple[list[int], list[float]]
Band: TypeAlias = tuple[list[int], list[float], list[float]]


def named(aggregation: Aggregation, choices: tuple[str, ...], what: str) -> tuple[str, ...]:
    """One aggregation or several, as a tuple without duplicates; if one is unknown, raises a `LensError` that lists the choices."""
    # A string is one aggregation; it must not be iterated.
    given = () if aggregation is None else (aggregation,) if isinstance(aggregation, str) else tuple(aggregation)
    if unknown := [name for name in given if name not in choices]:
        raise LensError(f"unknown {what} {unknown[0]!r}; choose from {', '.join(map(repr, choices))}")
    return tuple(dict.fromkeys(given))


@dataclass(frozen=True)
class Chart:
    """What to draw: one panel per layer, with lines and shaded ranges over ticks; or one panel that compares the layers.

    Args:
        title: the name of the chart, and the first part of the names of its rows in the timeline, `title/layer`.
        of: the source of the numbers: a group of the lens's monitors, then keys of its result, as in `("gradient", "norm")`; `()`
            if the chart compares.
        unit: the unit of the value axis.
        lines: one or several of "mean", "std", "min", "max", "median", "Q1", "Q3".
        ranges: "std" (mean - std to mean + std), "min-max", "Q1-Q3", several of them, or None.
        log_scale: draw the values on a logarithmic axis.
        shared: give all panels the same value axis, to compare layers; logarithmic panels always share it.
        limits: the smallest and the largest possible value; None for no limit.
        only: the layers to draw; `()` for all.
        across: what the chart compares, from other charts; it has no rows of its own in the timeline.

    Raises:
        LensError: an unknown aggregation.

    >>> Chart("Loss", of=("loss",), lines="median", ranges=("Q1-Q3", "min-max")).lines
    ('median',)
    """

    title: str
    of: tuple[str, ...]
    unit: str = ""
    lines: Aggregation = "mean"
    ranges: Aggregation = ("std", "min-max")
    log_scale: bool = False
    shared: bool = False
    limits: tuple[float | None, float | None] = (None, None)
    only: tuple[str, ...] = ()
    across: tuple[Across, ...] = ()

    def __post_init__(self) -> None:
        object.__setattr__(self, "lines", named(self.lines, LINES, "line aggregation"))
        object.__setattr__(self, "ranges", named(self.ranges, RANGES, "range aggregation"))

    def row(self, layer: str) -> str:
        """The name of one layer of this chart in the timeline."""
        return f"{self.title}/{layer}"


@dataclass(frozen=True)
class ChartView:
    """A chart, the timeline that holds its numbers, and the layers to draw, in network order.

    >>> timeline = Timeline()
    >>> timeline.append(0, {"Loss/train": {"mean": 2.0, "std": 0.5}})
    >>> view = ChartView(Chart("Loss", of=("loss",), ranges="std"), timeline, ("train", "eval"))
    >>> view.line("train", "mean"), view.band("train", "std"), view.line("eval", "mean")
    (([0], [2.0]), ([0], [1.5], [2.5]), ([], []))
    """

    chart: Chart
    timeline: Timeline
    layers: tuple[str, ...]

    @property
    def title(self) -> str:
        return self.chart.title

    @property
    def unit(self) -> str:
        return self.chart.unit

    @property
    def axis(self) -> str:
        """What the ticks are: "epoch", "step" or, if nobody said it, "tick"."""
        return axis_of(self.timeline)

    @property
    def lines(self) -> tuple[str, ...]:
        return named(self.chart.lines, LINES, "line aggregation")

    @property
    def ranges(self) -> tuple[str, ...]:
        return named(self.chart.ranges, RANGES, "range aggregation")

    @property
    def log_scale(self) -> bool:
        return self.chart.log_scale

    @property
    def shared(self) -> bool:
        return self.chart.shared or self.chart.log_scale

    @property
    def is_pushed(self) -> bool:
        """Whether it is of losses or metrics, which belong to no layer."""
        return self.chart.of[:1] in [(group,) for group in PUSHED]

    @property
    def limits(self) -> tuple[float, float]:
        """The smallest and the largest possible value; infinite if there is no limit."""
        low, high = self.chart.limits
        return -math.inf if low is None else low, math.inf if high is None else high

    def series(self, layer: str, statistic: str) -> Series:
        """One statistic of one layer: ticks and values; both are empty if none was recorded."""
        try:
            return self.timeline.series(self.chart.row(layer), statistic)
        except SelectionError:
            return [], []

    def by_layer(self, statistic: str) -> dict[str, dict[int, float]]:
        """One statistic by layer and by tick, in network order; layers without any are left out."""
        rows = {(self.chart.row(layer), statistic): layer for layer in self.layers}
        found = self.timeline.courses(rows)
        return {layer: dict(zip(*found[key], strict=True)) for key, layer in rows.items() if key in found and found[key][0]}

    def line(self, layer: str, aggregation: str) -> Series:
        """One line of one layer: ticks and values."""
        return self.series(layer, aggregation)

    def band(self, layer: str, aggregation: str) -> Band:
        """One shaded range of one layer: ticks, lower ends, upper ends."""
        below, above = _ends(aggregation)
        values = {statistic: dict(zip(*self.series(layer, statistic), strict=True)) for statistic in {*below, *above}}
        ticks = [tick for tick in values[below[0]] if all(tick in known for known in values.values())]
        at = [{statistic: known[tick] for statistic, known in values.items()} for tick in ticks]
        return ticks, [_end(row, below, -1) for row in at], [_end(row, above, 1) for row in at]

    def at(self, tick: int) -> dict[str, dict[str, float]]:
        """All statistics at one tick by layer, in network order; layers without any are left out."""
        rows = self.timeline.at(tick)
        return {layer: rows[self.chart.row(layer)] for layer in self.layers if self.chart.row(layer) in rows}

    def points(self, tick: int) -> list[Point]:
        """What a chart that compares shows at one tick; nothing for other charts."""
        return self.points_of(self.timeline.at(tick)) if self.chart.across else []

    def points_of(self, rows: Mapping[str, Mapping[str, float]]) -> list[Point]:
        """What a chart that compares shows of the rows of one tick, as `Timeline.at` returns them."""
        found: list[Point] = []
        for across in self.chart.across:
            known = {layer: rows.get(f"{across.title}/{layer}", {}).get(across.statistic, math.nan) for layer in self.layers}
            found += across.points(known)
        return found

    def points_by_tick(self) -> dict[int, list[Point]]:
        """What a chart that compares shows at every tick; ticks without points are left out."""
        found: dict[int, list[Point]] = {}
        for across in self.chart.across:
            source = replace(self, chart=Chart(across.title, ()))
            values: dict[int, dict[str, float]] = {}
            for layer, course in source.by_layer(across.statistic).items():
                for tick, value in course.items():
                    values.setdefault(tick, {})[layer] = value
            for tick, known in values.items():
                found.setdefault(tick, []).extend(across.points(known))
        return {tick: found[tick] for tick in sorted(found) if found[tick]}


def network_order(lists: Iterable[Sequence[str]]) -> list[str]:
    """All names once: a new one after the name before it in its own list, or else before the next that is known, or else last.

    >>> network_order([["b", "d"], ["b", "c"], ["a", "b"], ["e"]])
    ['a', 'b', 'c', 'd', 'e']
    """
    after: list[str] = []
    known: set[str] = set()
    for names in lists:
        place = next((after.index(name) - 1 for name in names if name in known), len(after) - 1)
        for name in names:
            if name in known:
                place = after.index(name)
            else:
                place += 1
                after.insert(place, name)
                known.add(name)
    return after


def base_of(layer: str) -> str:
    """The layer in the name of one of its outputs, as "block" in "block[0]"."""
    return layer.rpartition("[")[0] or layer if layer.endswith("]") else layer


def in_order(layers: Iterable[str], known: Iterable[str]) -> list[str]:
    """The layers in the order in which their names are known; those that are not known come last.

    >>> in_order(["train", "2", "1[b]", "1[a]", "0"], known=["0", "1", "2"])
    ['0', '1[b]', '1[a]', '2', 'train']
    """
    place = {name: at for at, name in enumerate(known)}
    return sorted(layers, key=lambda layer: place.get(layer, place.get(base_of(layer), len(place))))


def ends(statistics: Mapping[str, float], aggregation: str) -> tuple[float, float]:
    """Both ends of one range; NaN if a statistic that it needs is missing."""
    below, above = _ends(aggregation)
    return _end(statistics, below, -1), _end(statistics, above, 1)


def _ends(aggregation: str) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """The statistics of each end of a range: one, or a centre and a distance from it."""
    if aggregation == "std":
        return ("mean", "std"), ("mean", "std")
    below, above = aggregation.split("-")
    return (below,), (above,)


def _end(row: Mapping[str, float], parts: tuple[str, ...], sign: int) -> float:
    first, *rest = (row.get(part, math.nan) for part in parts)
    return first + sign * sum(rest)


def axis_of(timeline: Timeline) -> str:
    """What the ticks of a timeline are: "epoch" or "step" if `notes_of_axis` said so, otherwise just "tick"."""
    axis = timeline.notes().get(_AXIS)
    return axis if axis in ("epoch", "step") else "tick"


def notes_of_axis(axis: str) -> dict[str, str]:
    """The note that says what the ticks of a timeline are."""
    return {_AXIS: axis}


def notes_of_layers(kinds: Mapping[str, str], silent: Iterable[str] = ()) -> dict[str, str]:
    """The notes of the classes of layers, in network order, and of layers that are silent without a fault; none without layers."""
    return {_LAYERS: json.dumps(list(kinds.items())), _SILENT: json.dumps(sorted(silent))} if kinds else {}


def layers_of(timeline: Timeline) -> dict[str, str]:
    """What `notes_of_layers` says of kinds: the class of each layer, in network order; empty if nothing was."""
    found = json.loads(timeline.notes().get(_LAYERS, "[]"))
    pairs = (pair for pair in found if isinstance(pair, list) and len(pair) == 2) if isinstance(found, list) else ()
    return {name: kind for name, kind in pairs if isinstance(name, str) and isinstance(kind, str)}


def silent_in(timeline: Timeline) -> set[str]:
    """The layers of which `notes_of_layers` says that they give no output, without a fault, as in evaluation mode."""
    found = json.loads(timeline.notes().get(_SILENT, "[]"))
    return {name for name in found if isinstance(name, str)} if isinstance(found, list) else set()


def notes_of_charts(timeline: Timeline, views: Iterable[ChartView]) -> dict[str, str]:
    """The note of the charts, for `replay`; charts with other titles stay."""
    new = {view.title: view for view in views}
    others = [view for view in charts_of(timeline) if view.title not in new]
    return {_NOTE: json.dumps([{**asdict(view.chart), "layers": view.layers} for view in (*new.values(), *others)])}


def keep_charts(timeline: Timeline, views: Iterable[ChartView]) -> None:
    """Writes the note of the charts into the timeline."""
    for key, text in notes_of_charts(timeline, views).items():
        timeline.note(key, text)


def charts_of(timeline: Timeline) -> list[ChartView]:
    """The charts in a timeline's notes; raises `CorruptRecordingError` if `keep_charts` did not write them."""
    try:
        return [_view(timeline, **entry) for entry in json.loads(timeline.notes().get(_NOTE, "[]"))]
    except (ValueError, TypeError, RecursionError) as error:
        raise CorruptRecordingError(f"{timeline.path}: its note of charts cannot be read: {error}") from error


def drawable(timeline: Timeline) -> Timeline:
    """The timeline; if it has no charts, as one that `append` filled, a copy in memory with a chart of each statistic."""
    if charts_of(timeline) or not timeline.ticks():
        return timeline
    made, steps = Timeline(), timeline.steps()
    charts: dict[str, Chart] = {}
    layers: dict[str, dict[str, None]] = {}
    for tick in timeline.ticks():
        rows: dict[str, dict[str, float]] = {}
        for name, row in timeline.at(tick).items():
            for statistic, value in row.items():
                line = statistic if statistic in LINES else "mean"  # which is drawn; the title says what it is
                chart = charts.setdefault(statistic, Chart(statistic or "value", (), lines=line, ranges=None))
                layers.setdefault(statistic, {})[name] = None
                rows[chart.row(name)] = {line: value}
        made.append(tick, rows, steps.get(tick))
    for key, text in timeline.notes().items():
        made.note(key, text)
    keep_charts(made, [ChartView(chart, made, tuple(layers[statistic])) for statistic, chart in charts.items()])
    return made


def _view(timeline: Timeline, title: str, of: list[str], layers: list[str], limits: list[float | None], **rest: Any) -> ChartView:
    across = tuple(Across(**each) for each in rest.pop("across", ()))
    only = tuple(rest.pop("only", ()))
    if not all(
        isinstance(text, str) for text in (title, *of, *layers, *only, *(text for each in across for text in astuple(each)))
    ):
        raise TypeError("titles, groups and layers are text")
    low, high = (None if end is None else float(end) for end in limits)
    chart = Chart(title, tuple(of), limits=(low, high), only=only, across=across, **rest)
    return ChartView(chart, timeline, tuple(layers))


_SHOWN = ("share", "min", "max")


class Point(NamedTuple):
    """One value of a comparison at one tick: the line that it belongs to, and the layer that it comes from."""

    line: str
    layer: str
    value: float


@dataclass(frozen=True)
class Across:
    """What a chart compares: one statistic of all layers of another chart, at each tick.

    Args:
        title: the title of the other chart, in the same lens.
        show: "share" for a line per layer: its part of the sum over layers. "min" or "max" for one line: the lowest or the highest
            value of all layers.
        statistic: the statistic of the other chart, such as "mean".

    Raises:
        LensError: `show` is unknown.

    >>> Across("Norm", "share").points({"a": 1.0, "b": 3.0})
    [Point(line='a', layer='a', value=0.25), Point(line='b', layer='b', value=0.75)]
    >>> Across("Norm", "max").points({"a": 1.0, "b": 3.0})
    [Point(line='highest Norm', layer='b', value=3.0)]
    """

    title: str
    show: str
    statistic: str = "mean"

    def __post_init__(self) -> None:
        if self.show not in _SHOWN:
            raise LensError(f"a comparison cannot show {self.show!r}; choose from {', '.join(map(repr, _SHOWN))}")

    def points(self, values: Mapping[str, float]) -> list[Point]:
        """The values to draw at one tick, from those of the layers; values that are not finite are left out."""
        finite = {layer: value for layer, value in values.items() if math.isfinite(value)}
        if self.show == "share":
            total = sum(finite.values())
            return [Point(layer, layer, value / total) for layer, value in finite.items()] if total else []
        if not finite:
            return []
        layer = (min if self.show == "min" else max)(finite, key=finite.__getitem__)
        return [Point(f"{'lowest' if self.show == 'min' else 'highest'} {self.title}", layer, finite[layer])]
