"""Charts that compare the layers of others: shares, and the worst layer, in text and as figures."""

from __future__ import annotations

import io
import math
from typing import Any

import pytest
from torch import nn

from recorders.errors import CorruptRecordingError, LensError
from recorders.monitors.forward import ForwardMonitor
from recorders.watch.charts import Across, Chart, ChartView, Point, charts_of, keep_charts
from recorders.watch.lenses import Lens, OutputActivation, OutputNorm, running
from recorders.watch.timeline import Timeline
from recorders.watch.visualizers import MatplotlibVisualizer, TextVisualizer

pytest.importorskip("rich")
pytest.importorskip("matplotlib")

SHARES = Chart("Comparison", (), "share", across=(Across("Norm", "share"),))
WORST = Chart("Warning", (), "share", across=(Across("Norm", "min", "max"), Across("Norm", "max")))


def view(chart: Chart, ticks: int = 3, layers: tuple[str, ...] = ("a", "b", "[red]c")) -> ChartView:
    """Layer i has mean (i + 1) * (tick + 1), but layer b none at tick 1, and a maximum ten times as big."""
    timeline = Timeline()
    for tick in range(ticks):
        means = {layer: (i + 1.0) * (tick + 1) for i, layer in enumerate(layers) if (layer, tick) != ("b", 1)}
        timeline.append(tick, {f"Norm/{layer}": {"mean": mean, "max": 10 * mean} for layer, mean in means.items()})
    return ChartView(chart, timeline, layers)


def figure(charts: ChartView) -> Any:
    visualizer = MatplotlibVisualizer()
    visualizer.show(0, [charts])
    return visualizer.figures.get(charts.title)


def printed(tick: int, charts: ChartView) -> list[list[str]]:
    file = io.StringIO()
    TextVisualizer(file).show(tick, [charts])
    return [line.split() for line in file.getvalue().splitlines()]


def test_shares_are_parts_of_the_sum_over_the_layers_that_ran() -> None:
    charts = view(SHARES)
    assert [(point.line, point.value) for point in charts.points(0)] == [("a", 1 / 6), ("b", 2 / 6), ("[red]c", 3 / 6)]
    assert [(point.line, point.value) for point in charts.points(1)] == [("a", 1 / 4), ("[red]c", 3 / 4)]
    assert charts.points_by_tick() == {tick: charts.points(tick) for tick in range(3)}


def test_the_worst_layer_is_named() -> None:
    charts = view(WORST)
    assert charts.points(1) == [Point("lowest Norm", "a", 20.0), Point("highest Norm", "[red]c", 6.0)]
    assert list(charts.points_by_tick()) == [0, 1, 2]


def test_what_is_not_finite_is_not_compared() -> None:
    values = {"a": 1.0, "b": math.nan, "c": math.inf, "d": 3.0}
    assert Across("Norm", "share").points(values) == [Point("a", "a", 0.25), Point("d", "d", 0.75)]
    assert Across("Norm", "max").points(values) == [Point("highest Norm", "d", 3.0)]
    assert Across("Norm", "max").points({"a": math.nan}) == Across("Norm", "share").points({"a": 0.0}) == []


def test_text_shows_shares_and_the_worst_layers() -> None:
    assert printed(0, view(SHARES))[1:] == [["layer", "share"], ["a", "16.7%"], ["b", "33.3%"], ["[red]c", "50.0%"]]
    assert printed(1, view(WORST)) == [
        ["Warning", "(share),", "tick", "1"],
        ["value", "layer"],
        ["lowest", "Norm", "20", "a"],
        ["highest", "Norm", "6", "[red]c"],
    ]


@pytest.mark.parametrize("ticks", [1, 3])
def test_figures_of_shares_are_stacked_to_one_and_labelled(ticks: int) -> None:
    drawn = figure(view(SHARES, ticks))
    drawn.draw_without_rendering()
    (axes,) = drawn.axes
    assert [text.get_text() for text in axes.texts] == ["a", "b", "[red]c"]
    assert axes.get_ylim() == (0.0, 1.0)
    if ticks == 1:
        assert sum(bar.get_height() for bar in axes.patches) == pytest.approx(1.0)
    else:
        assert len(axes.collections) == 3


def test_figures_of_the_worst_name_the_last_layer() -> None:
    drawn = figure(view(WORST))
    (axes,) = drawn.axes
    assert [text.get_text() for text in axes.get_legend().get_texts()] == [
        "lowest Norm: 30, layer a",
        "highest Norm: 9, layer [red]c",
    ]
    assert [line.get_ydata().tolist() for line in axes.get_lines()] == [[10, 20, 30], [3, 6, 9]]
    assert drawn.get_suptitle() == "Warning"


def test_comparisons_without_a_number_are_left_out() -> None:
    charts = ChartView(SHARES, Timeline(), ("a",))
    assert figure(charts) is None
    charts.timeline.append(0, {})
    assert printed(0, charts) == []


def test_comparisons_are_kept_in_the_timeline_and_a_damaged_note_is_told() -> None:
    charts = view(WORST)
    keep_charts(charts.timeline, [charts])
    assert charts_of(charts.timeline) == [charts]
    note = charts.timeline.notes()["charts"]
    for wrong in (note.replace('"Norm"', "3"), note.replace('"min"', '"sum"'), note.replace('"show"', '"shows"')):
        charts.timeline.note("charts", wrong)
        with pytest.raises(CorruptRecordingError, match="charts"):
            charts_of(charts.timeline)


def test_lenses_compare_charts_that_they_have() -> None:
    of = {"out": ForwardMonitor(running())}
    with pytest.raises(LensError, match=r"compares 'Norm'; the lens has \['Other'\]"):
        Lens("wrong", (Chart("Other", ("out",)), SHARES), of)
    with pytest.raises(LensError, match="no charts"):
        Lens("wrong", (SHARES,), of)
    with pytest.raises(LensError, match="cannot show 'sum'; choose from 'share', 'min', 'max'"):
        Across("Norm", "sum")
    assert [chart.title for chart in OutputActivation(warning_plot=False).charts] == ["Output Activation", "Output Death"]
    assert [chart.title for chart in OutputNorm(comparison_aggregation="max").charts] == [
        "Output Norm",
        "Max Output Norm Comparison",
    ]
    assert len(OutputNorm(comparison_plot=False, include=nn.Linear).charts) == 1
