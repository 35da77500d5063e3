"""Visualizers: what is drawn and printed is what the timeline holds."""

from __future__ import annotations

import builtins
import io
import math
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from paths import ROOT

from recorders.errors import LensError, MissingExtraError
from recorders.watch.charts import Across, Chart, ChartView, keep_charts
from recorders.watch.replay import replay
from recorders.watch.timeline import Timeline
from recorders.watch.visualizers import MatplotlibVisualizer, TextVisualizer, Visualizer, as_visualizers

pytest.importorskip("rich")
pytest.importorskip("matplotlib")


def row(value: float, nonfinite: float = 0.0) -> dict[str, float]:
    return {"mean": value, "std": value / 4, "min": value / 2, "max": 2 * value, "count": 9.0, "nonfinite": nonfinite}


def view(layers: int = 3, ticks: int = 4, **chart: Any) -> ChartView:
    """Layer i has mean (i + 1) * (tick + 1); the layer called "never" has nothing."""
    timeline = Timeline()
    for tick in range(ticks):
        timeline.append(tick, {f"Norm/layer{i}": row((i + 1.0) * (tick + 1)) for i in range(layers)})
    options = {"unit": "L2 norm", **chart}
    return ChartView(Chart("Norm", ("gradient", "norm"), **options), timeline, (*(f"layer{i}" for i in range(layers)), "never"))


def drawn(charts: ChartView) -> Any:
    visualizer = MatplotlibVisualizer()
    visualizer.show(0, [charts])
    return visualizer.figures.get(charts.title)


def printed(tick: int, *charts: ChartView) -> str:
    file = io.StringIO()
    TextVisualizer(file).show(tick, charts)
    return file.getvalue()


def test_text_has_a_row_a_layer_in_order() -> None:
    lines = [line.split() for line in printed(1, view(lines=("mean", "max"), ranges=("std", "min-max"))).splitlines()]
    assert lines == [
        ["Norm", "(L2", "norm),", "tick", "1"],
        ["layer", "mean", "max", "std", "min-max"],
        ["layer0", "2", "4", "1.5", "\u2026", "2.5", "1", "\u2026", "4"],
        ["layer1", "4", "8", "3", "\u2026", "5", "2", "\u2026", "8"],
        ["layer2", "6", "12", "4.5", "\u2026", "7.5", "3", "\u2026", "12"],
        ["never", *["\u2013"] * 4],
    ]


def test_text_shows_what_was_not_finite_and_leaves_markup_in_names_alone() -> None:
    timeline = Timeline()
    timeline.append(0, {"Norm/[red]out": row(1.0, nonfinite=3.0), "Norm/b": row(1.0)})
    text = printed(0, ChartView(Chart("Norm", ("x",), ranges=None), timeline, ("[red]out", "b")))
    assert [line.split() for line in text.splitlines()][1:] == [
        ["layer", "mean", "non-finite"],
        ["[red]out", "1", "3"],
        ["b", "1", "0"],
    ]


def test_text_leaves_out_charts_without_numbers() -> None:
    charts = view()
    assert printed(0, ChartView(charts.chart, charts.timeline, ("never",))) == ""


def test_figures_have_a_panel_a_layer_with_lines_and_bands() -> None:
    figure = drawn(view(lines=("mean", "max"), ranges=("std", "min-max")))
    assert [axes.get_title("left") for axes in figure.axes] == ["layer0", "layer1", "layer2"]
    panel = figure.axes[1]
    lines = {line.get_label(): line.get_ydata().tolist() for line in panel.get_lines()}
    assert lines["mean"] == [2, 4, 6, 8]
    assert lines["max"] == [4, 8, 12, 16]
    bands = {band.get_label(): band.get_paths()[0].get_extents() for band in panel.collections}
    assert (bands["min to max"].ymin, bands["min to max"].ymax) == (1.0, 16.0)
    assert (bands["mean \u00b1 std"].ymin, bands["mean \u00b1 std"].ymax) == (1.5, 10.0)
    assert sorted(text.get_text() for text in figure.legends[0].get_texts()) == ["max", "mean", "mean \u00b1 std", "min to max"]
    assert figure.get_suptitle() == "Norm"
    assert figure.get_supylabel() == "L2 norm"
    assert "never" in figure.get_supxlabel()


@pytest.mark.slow
def test_many_layers_each_have_a_panel_and_room() -> None:
    figure = drawn(view(layers=26, log_scale=True))
    assert len(figure.axes) == 26
    figure.draw_without_rendering()
    boxes = [axes.get_position() for axes in figure.axes]
    width, height = figure.get_size_inches()
    assert min(box.width * width for box in boxes) > 1.5
    assert min(box.height * height for box in boxes) > 1.0
    assert len({(round(box.x0, 3), round(box.y0, 3)) for box in boxes}) == 26


def test_a_logarithmic_axis_cuts_ranges_that_reach_zero() -> None:
    timeline = Timeline()
    timeline.append(0, {"Norm/a": {"mean": 1.0, "std": 3.0, "min": 0.1, "max": 9.0}, "Norm/b": row(100.0)})
    timeline.append(1, {"Norm/a": {"mean": 0.0, "std": 0.0, "min": 0.0, "max": 0.0}, "Norm/b": row(100.0)})
    figure = drawn(ChartView(Chart("Norm", ("x",), log_scale=True), timeline, ("a", "b")))
    figure.draw_without_rendering()
    assert [axes.get_yscale() for axes in figure.axes] == ["log", "log"]
    assert figure.axes[0].get_ylim() == figure.axes[1].get_ylim() == pytest.approx((0.1 / 1.3, 200 * 1.3))
    assert math.isnan(figure.axes[0].get_lines()[0].get_ydata()[1])
    assert "log scale" in figure.get_supylabel()


def test_limits_cut_ranges_and_shared_axes_agree() -> None:
    timeline = Timeline()
    timeline.append(0, {"C/a": {"mean": 0.9, "std": 0.5}, "C/b": {"mean": -0.5, "std": 0.1}})
    timeline.append(1, {"C/a": {"mean": 0.9, "std": 0.5}, "C/b": {"mean": -0.5, "std": 0.1}})
    figure = drawn(ChartView(Chart("C", ("x",), ranges="std", shared=True, limits=(-1.0, 1.0)), timeline, ("a", "b")))
    bounds = figure.axes[0].collections[0].get_paths()[0].get_extents()
    assert (bounds.ymin, bounds.ymax) == pytest.approx((0.4, 1.0))
    assert figure.axes[0].get_ylim() == figure.axes[1].get_ylim() == pytest.approx((-0.68, 1.08))


def test_values_that_are_not_finite_leave_a_gap() -> None:
    timeline = Timeline()
    for tick, value in enumerate([1.0, math.nan, math.inf, 2.0]):
        timeline.append(tick, {"Norm/a": {"mean": value}})
    figure = drawn(ChartView(Chart("Norm", ("x",), ranges=None), timeline, ("a",)))
    assert [math.isnan(value) for value in figure.axes[0].get_lines()[0].get_ydata()] == [False, True, True, False]
    figure.draw_without_rendering()


@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("log_scale", [False, True])
def test_one_tick_and_constants_can_be_drawn(shared: bool, log_scale: bool) -> None:
    figure = drawn(view(ticks=1, shared=shared, log_scale=log_scale))
    figure.draw_without_rendering()
    assert figure.axes[0].get_lines()[0].get_marker() == "o"


def test_names_with_dollars_are_not_mathematics_and_long_ones_keep_their_end() -> None:
    timeline = Timeline()
    names = ("$broken", "model." + "x" * 200 + ".weight")
    timeline.append(0, {f"Norm/{name}": row(1.0) for name in names})
    figure = drawn(ChartView(Chart("Norm", ("x",)), timeline, names))
    figure.draw_without_rendering()
    titles = [axes.get_title("left") for axes in figure.axes]
    assert titles[0] == "$broken"
    assert titles[1].startswith("\u2026x")
    assert titles[1].endswith("x.weight")


def test_figures_are_saved_under_the_names_of_their_charts(tmp_path: Path) -> None:
    visualizer = MatplotlibVisualizer()
    first = view()
    other = ChartView(Chart("../Loss & Co", ("loss",)), first.timeline, ("never",))
    visualizer.show(0, [first, other])
    (path,) = visualizer.save(tmp_path / "new" / "folder")
    assert path == tmp_path / "new" / "folder" / "norm.png"
    assert path.read_bytes().startswith(b"\x89PNG")


def test_titles_that_make_the_same_file_name_do_not_overwrite_each_other(tmp_path: Path) -> None:
    timeline = Timeline()
    timeline.append(0, {"A b/x": row(1.0), "a-B/x": row(1.0), "\u00e4/x": row(1.0)})
    visualizer = MatplotlibVisualizer()
    visualizer.show(0, [ChartView(Chart(title, ("x",)), timeline, ("x",)) for title in ("A b", "a-B", "\u00e4")])
    assert [path.name for path in visualizer.save(tmp_path)] == ["a-b.png", "a-b-2.png", "chart.png"]


class Seen:
    def __init__(self) -> None:
        self.shown: list[tuple[int, list[str]]] = []

    def show(self, tick: int, charts: Sequence[ChartView]) -> None:
        self.shown.append((tick, [chart.title for chart in charts]))


def test_a_recorded_file_is_played_back(tmp_path: Path) -> None:
    recorded = view(lines=("mean", "min"))
    with Timeline(tmp_path / "run.db") as timeline:
        for tick in recorded.timeline.ticks():
            timeline.append(tick, recorded.timeline.at(tick))
        keep_charts(timeline, [recorded])
    seen, file, figures = Seen(), io.StringIO(), MatplotlibVisualizer()
    with Timeline(tmp_path / "run.db") as timeline:
        replay(timeline, [seen, TextVisualizer(file), figures])
        (figure,) = figures.figures.values()
    assert seen.shown == [(tick, ["Norm"]) for tick in range(4)]
    assert file.getvalue() == "".join(printed(tick, recorded) for tick in range(4))
    assert [axes.get_title("left") for axes in figure.axes] == ["layer0", "layer1", "layer2"]


def test_charts_may_be_given_for_playing_and_must_be_known() -> None:
    charts = view()
    with pytest.raises(LensError, match="holds no charts"):
        replay(charts.timeline, Seen())
    seen = Seen()
    replay(charts.timeline, seen, [charts])
    assert len(seen.shown) == 4


def test_visualizers_are_chosen_by_name_or_given() -> None:
    seen = Seen()
    assert as_visualizers(None) == ()
    assert as_visualizers(seen) == (seen,)
    assert [type(one) for one in as_visualizers(["text", "matplotlib", seen])] == [TextVisualizer, MatplotlibVisualizer, Seen]
    assert all(isinstance(one, Visualizer) for one in as_visualizers(["text", "matplotlib"]))
    with pytest.raises(LensError, match="'text', 'matplotlib'"):
        as_visualizers("cinema")
    for wrong in (Seen, 3):
        with pytest.raises((LensError, TypeError), match=r"show|iterable"):
            as_visualizers(wrong)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("name", "library", "extra"),
    [
        ("text", "rich", "cli"),
        ("matplotlib", "matplotlib", "plot"),
        ("tensorboard", "tensorboard", "tensorboard"),
        ("wandb", "wandb", "wandb"),
    ],
)
def test_a_missing_library_names_the_extra(monkeypatch: pytest.MonkeyPatch, name: str, library: str, extra: str) -> None:
    real = builtins.__import__

    def absent(module: str, *args: Any, **kwargs: Any) -> Any:
        if module.partition(".")[0] == library:
            raise ImportError(module)
        return real(module, *args, **kwargs)

    for module in [module for module in sys.modules if module.partition(".")[0] == library]:
        monkeypatch.setitem(sys.modules, module, None)  # what Python itself puts there for a module that must not be found
    monkeypatch.setattr(builtins, "__import__", absent)
    with pytest.raises(MissingExtraError, match=rf"{library} is not installed: pip install torch-recorders\[{extra}\]"):
        as_visualizers(name)


@pytest.mark.slow
def test_importing_brings_no_drawing_library_in() -> None:
    script = "import sys, recorders.watch.inspector; assert not {'rich', 'matplotlib', 'tensorboard', 'wandb'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", script], check=True, timeout=300, cwd=ROOT, env={**os.environ, "PYTHONPATH": str(ROOT)})


def test_axes_show_no_values_that_cannot_be() -> None:
    timeline = Timeline()
    for tick in range(2):
        timeline.append(tick, {f"{title}/a": {"mean": 0.0} for title in ("Share", "Ratio")})
    share = Chart("Share", ("x",), ranges=None, shared=True, limits=(0.0, 1.0))
    ratio = Chart("Ratio", ("x",), ranges=None, shared=True, limits=(0.0, None))
    shown = MatplotlibVisualizer()
    shown.show(1, [ChartView(chart, timeline, ("a",)) for chart in (share, ratio)])
    for title in ("Share", "Ratio"):
        low, high = shown.figures[title].axes[0].get_ylim()
        assert -0.1 < low < 0
        assert 0.9 < high < 1.1


@pytest.mark.parametrize("log_scale", [True, False])
def test_a_comparison_has_the_limits_of_its_chart(log_scale: bool) -> None:
    timeline = Timeline()
    for tick in range(2):
        timeline.append(tick, {"Ratio/a": {"mean": 1e-3}, "Ratio/b": {"mean": 1e-1}})
    worst = Chart("Worst", (), log_scale=log_scale, limits=(0.0, None), across=(Across("Ratio", "max"), Across("Ratio", "min")))
    shown = MatplotlibVisualizer()
    shown.show(1, [ChartView(worst, timeline, ("a", "b"))])
    low, high = shown.figures["Worst"].axes[0].get_ylim()
    assert low < 1e-3 < 1e-1 < high < 1


def test_many_layers_are_a_heat_map() -> None:
    charts = view(layers=40, ticks=5, log_scale=True)
    axes, bar = drawn(charts).axes
    [image] = axes.get_images()
    values = image.get_array()
    assert values.shape == (40, 5)  # "never" has no row
    assert float(values[39, 4]) == 200.0
    assert [text.get_text() for text in axes.get_yticklabels()][:2] == ["layer0", "layer1"]
    assert (axes.get_xlabel(), bar.get_ylabel()) == (charts.axis, "mean, L2 norm")


def test_a_heat_map_leaves_out_what_was_not_recorded_or_not_finite() -> None:
    timeline = Timeline()
    for tick, value in enumerate([1.0, math.nan, 0.0, 4.0]):
        timeline.append(tick, {"Norm/a": {"mean": value}, **({"Norm/b": {"mean": 2.0}} if tick > 2 else {})})
    charts = ChartView(Chart("Norm", ("x",), ranges=None, log_scale=True), timeline, ("a", "b"))
    visualizer = MatplotlibVisualizer(panels=1)
    visualizer.show(3, [charts])
    values = visualizer.figures["Norm"].axes[0].get_images()[0].get_array()
    assert values.mask.tolist() == [[False, True, True, False], [True, True, True, False]]
