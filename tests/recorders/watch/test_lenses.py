"""Lenses and charts: aggregations say what they are, and what is drawn is what was recorded."""

from __future__ import annotations

import dataclasses
import math
import pickle

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from recorders.errors import CorruptRecordingError, LensError
from recorders.monitors.gradients import BackwardMonitor
from recorders.watch.charts import Chart, ChartView, charts_of, keep_charts
from recorders.watch.lenses import Lens, LossMetrics, OutputGradientGeometry, collected, not_activation, running, statistics
from recorders.watch.timeline import Timeline
from reducers import Max, Mean, Moments, Product

NUMBERS = st.lists(st.floats(-1e6, 1e6, width=32), min_size=1, max_size=40)


def computed(reducer: object, values: list[float]) -> dict[str, float]:
    state: dict[str, torch.Tensor] = {}
    for value in values:
        state = reducer.update(state, torch.tensor(value, dtype=torch.float64))  # type: ignore[attr-defined]
    found = statistics(reducer.compute(state))  # type: ignore[attr-defined]
    return {name: float(value) for name, value in found.items()}


@settings(max_examples=50)
@given(NUMBERS)
def test_statistics_are_those_of_numpy(values: list[float]) -> None:
    """monitorch gives the maximum for 'min' and the first quartile for 'Q3'."""
    wanted = {"mean": np.mean(values), "std": np.std(values), "min": min(values), "max": max(values), "count": len(values)}
    quartiles = {"Q1": np.quantile(values, 0.25), "median": np.median(values), "Q3": np.quantile(values, 0.75)}
    scale = max(map(abs, values)) + 1e-30
    assert computed(running(), values) == pytest.approx({**wanted, "nonfinite": 0}, rel=1e-9, abs=1e-9 * scale)
    assert computed(collected(), values) == pytest.approx({**wanted, **quartiles, "nonfinite": 0}, rel=1e-9, abs=1e-9 * scale)


@pytest.mark.parametrize("reducer", [running(), collected()])
def test_what_is_not_finite_is_counted_and_kept_out(reducer: object) -> None:
    found = computed(reducer, [1.0, math.nan, 3.0, math.inf, -math.inf])
    assert (found["mean"], found["std"], found["count"], found["nonfinite"]) == (2.0, 1.0, 2, 3)
    nothing = computed(reducer, [math.nan])
    assert all(math.isnan(nothing[name]) for name in ("mean", "std", "min", "max"))
    assert (nothing["count"], nothing["nonfinite"]) == (0, 1)


def test_one_value_spreads_by_nothing() -> None:
    assert computed(running(), [5.0])["std"] == computed(collected(), [5.0])["std"] == 0.0


def test_other_reducers_show_their_scalars() -> None:
    reducer = Product(mean=Mean(), channels=Max("b c -> c"))
    result = reducer.compute(reducer.update({}, torch.tensor([[1.0, 2.0]])))
    assert statistics(result).keys() == {"mean"}  # type: ignore[arg-type]
    moments = Moments()
    found = statistics(moments.compute(moments.update({}, torch.tensor([1.0, 3.0]))))  # type: ignore[arg-type]
    assert float(found["std"]) == pytest.approx(math.sqrt(2))


@pytest.mark.parametrize("name", ["weight", "means", "Min", ""])
def test_a_string_is_one_aggregation_and_an_unknown_one_lists_the_choices(name: str) -> None:
    with pytest.raises(LensError, match=rf"unknown line aggregation '{name}'; choose from 'mean', 'std'"):
        OutputGradientGeometry(line_aggregation=name)
    with pytest.raises(LensError, match=rf"unknown range aggregation '{name}'; choose from 'std', 'min-max', 'Q1-Q3'"):
        OutputGradientGeometry(range_aggregation=["std", name])


@pytest.mark.parametrize(
    ("option", "name"), [("line_aggregation", "median"), ("line_aggregation", "Q1"), ("range_aggregation", "Q1-Q3")]
)
def test_quartiles_need_every_value(option: str, name: str) -> None:
    with pytest.raises(LensError, match=rf"{name!r} needs every value: give inplace=False, or choose from 'mean'|'std'"):
        OutputGradientGeometry(**{option: name})  # type: ignore[arg-type]
    lens = OutputGradientGeometry(inplace=False, **{option: name})  # type: ignore[arg-type]
    assert name in (*lens.charts[0].lines, *lens.charts[0].ranges)  # type: ignore[misc]


def test_aggregations_are_tuples_without_repetition() -> None:
    lens = OutputGradientGeometry(line_aggregation=("mean", "max", "mean"), range_aggregation=None)
    for chart in lens.charts:
        assert (chart.lines, chart.ranges) == (("mean", "max"), ())


def test_output_gradient_geometry_is_what_its_options_say() -> None:
    plain = OutputGradientGeometry()
    assert [chart.title for chart in plain.charts] == ["Output Gradient Norm", "Output Gradient Correlation"]
    assert [chart.log_scale for chart in OutputGradientGeometry(log_scale=True).charts] == [True, False]
    rms = OutputGradientGeometry(normalize_by_size=True, compute_correlation=False)
    assert [(chart.title, chart.unit) for chart in rms.charts] == [("Output Gradient RMS", "root mean square")]
    assert plain.where("act", nn.Tanh()) is False
    assert OutputGradientGeometry(skip_activation=False).where("act", nn.Tanh()) is True


def test_activations_are_told_by_where_torch_defines_them() -> None:
    class Mine(nn.ReLU):
        pass

    for module in (nn.ReLU(), nn.Softmax(dim=1), nn.PReLU(), nn.GLU(), nn.Tanhshrink()):
        assert not not_activation("", module)
    for module in (nn.Linear(1, 1), nn.MultiheadAttention(4, 2), nn.Identity(), nn.Dropout(), Mine()):
        assert not_activation("", module)


def test_loss_metrics_heeds_every_option() -> None:
    """monitorch ignores `metrics_range`."""
    lens = LossMetrics(loss_line="max", loss_range=None, metrics_line=("mean", "min"), metrics_range="std", log_scale=True)
    loss, metrics = lens.charts
    assert (loss.lines, loss.ranges, loss.log_scale) == (("max",), (), True)
    assert (metrics.lines, metrics.ranges, metrics.log_scale) == (("mean", "min"), ("std",), False)


def test_a_lens_without_charts_or_with_charts_of_nothing_is_refused() -> None:
    with pytest.raises(LensError, match="no charts"):
        Lens("empty", ())
    with pytest.raises(LensError, match=r"'out'.*\['grad', 'loss', 'metric', 'pushed'\]"):
        Lens("wrong", (Chart("Output", ("out",)),), {"grad": BackwardMonitor(running())})


def test_lenses_are_frozen_and_picklable() -> None:
    lens = OutputGradientGeometry()
    with pytest.raises(dataclasses.FrozenInstanceError):
        lens.name = "other"  # type: ignore[misc]
    copy = pickle.loads(pickle.dumps(lens))
    assert copy.charts == lens.charts
    assert copy.monitors["gradient"].reducer == lens.monitors["gradient"].reducer


def view(*ranges: str) -> ChartView:
    timeline = Timeline()
    row = {"mean": 2.0, "std": 0.5, "min": 1.0, "max": 4.0, "median": 1.75, "Q1": 1.5, "Q3": 2.25}
    timeline.append(0, {"Norm/a": row, "Norm/b": {"mean": 1.0}})
    timeline.append(2, {"Norm/a": {name: 10 * value for name, value in row.items()}})
    return ChartView(Chart("Norm", ("gradient", "norm"), ranges=ranges), timeline, ("a", "b", "never"))


@pytest.mark.parametrize(
    ("aggregation", "low", "high"),
    [("std", [1.5, 15.0], [2.5, 25.0]), ("min-max", [1.0, 10.0], [4.0, 40.0]), ("Q1-Q3", [1.5, 15.0], [2.25, 22.5])],
)
def test_ranges_have_the_right_ends(aggregation: str, low: list[float], high: list[float]) -> None:
    assert view(aggregation).band("a", aggregation) == ([0, 2], low, high)


def test_views_are_empty_where_nothing_was_recorded() -> None:
    charts = view("std")
    assert charts.line("a", "median") == ([0, 2], [1.75, 17.5])
    assert charts.line("never", "mean") == ([], [])
    assert charts.band("b", "std") == ([], [], [])
    assert list(charts.at(0)) == ["a", "b"]
    assert list(charts.at(2)) == ["a"]


def test_charts_are_kept_in_the_timeline() -> None:
    first = view("std", "min-max")
    other = ChartView(dataclasses.replace(first.chart, title="Other", limits=(0.0, None)), first.timeline, ("x",))
    keep_charts(first.timeline, [first])
    keep_charts(first.timeline, [other])
    assert charts_of(first.timeline) == [other, first]
    assert charts_of(Timeline()) == []


@pytest.mark.parametrize(
    "note", ["{", "3", "[3]", '[{"title": "x"}]', '[{"title": 1, "of": [], "layers": [], "limits": [null, null]}]']
)
def test_a_damaged_note_of_charts_is_corrupt(note: str) -> None:
    timeline = Timeline()
    timeline.note("charts", note)
    with pytest.raises(CorruptRecordingError, match="charts"):
        charts_of(timeline)
