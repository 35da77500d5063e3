"""Lenses of monitorch beside ours: both inspectors watch the same training, and show the same numbers in every epoch."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from parity_monitorch import Kept, same_bands, same_lines, watch_both
from torch import nn

from recorders import Inspector, lenses

theirs = pytest.importorskip("monitorch.lens")

pytestmark = pytest.mark.filterwarnings("ignore:Full backward hook is firing")  # theirs, on the first layer

SEEDS = range(3)
OPTIONS = [{}, {"normalize_by_size": True, "inplace": False}]
IDS = ["norm", "rms"]


def size(options: dict[str, bool]) -> str:
    return "RMS" if options.get("normalize_by_size") else "Norm"


def points(our: Inspector, title: str, tick: int) -> dict[str, float]:
    """What a chart that compares layers shows."""
    view = next(chart for chart in our.charts if chart.title == title)
    return {point.line: point.value for point in view.points(tick)}


def same_numbers(kept: Kept, our: Inspector, title: str, options: dict[str, bool], within: float = 1e-9) -> None:
    """Means and, which they get wrong without inplace=True, deviations and extremes."""
    ours = title.replace("Norm", size(options))
    same_lines(kept, our, title, ours, within)
    if not options:
        same_bands(kept, our, title, "std", "min-max", within=within)


def exact(lens: Any) -> Any:
    """Their lens without the eps that they add to the product of the norms; `test_monitorch.py` asserts what it does."""
    for preprocessor in lens._preprocessors.values() if hasattr(lens, "_preprocessors") else [lens._preprocessor]:
        preprocessor._eps = 0.0
    return lens


def same_correlations(kept: Kept, our: Inspector, title: str) -> None:
    """Theirs has one more in each epoch: 0 for the first, which has no predecessor."""
    for epoch, tags in kept.lines.items():
        for layer, values in tags[title].items():
            row = our.timeline.at(epoch - 1)[f"{title}/{layer}"]
            n = row["count"]
            assert row["mean"] * n / (n + 1) == pytest.approx(values["mean"], abs=1e-9)
            for low, high in (band for name, band in kept.bands[epoch][title][layer].items() if name == ("min", "max")):
                assert (min(row["min"], 0.0), max(row["max"], 0.0)) == pytest.approx((low, high), abs=1e-9)


def same_shares(kept: Kept, our: Inspector, theirs: str, ours: str) -> None:
    for epoch, tags in kept.lines.items():
        assert points(our, ours, epoch - 1) == pytest.approx(tags[theirs][theirs], abs=1e-6)  # they add 1e-7 to the sum


@pytest.mark.row("lens OutputActivation", "warning_plot")
@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"inplace": False, "activation_aggregation": "max", "death_aggregation": "std"},
        {"dropout": False, "include": (nn.Linear,)},
        {"activation": False, "exclude": (nn.ReLU,), "evaluation_from_grad": True},
    ],
    ids=["default", "every value", "include", "dropout"],
)
def test_output_activation(seed: int, options: dict[str, Any]) -> None:
    kept, our = watch_both(seed, lambda _: [theirs.OutputActivation(**options)], [lenses.OutputActivation(**options)])
    of = {"activation": options.get("activation_aggregation", "mean"), "death": options.get("death_aggregation", "mean")}
    for epoch, tags in kept.lines.items():
        rows = our.timeline.at(epoch - 1)
        found = {
            layer: {f"{what}_rate": rows[f"Output {what.title()}/{layer}"][line] for what, line in of.items()}
            for layer in next(chart for chart in our.charts if chart.title == "Output Death").layers
        }
        assert list(found) == list(tags["Output Activations"])
        for layer, rates in tags["Output Activations"].items():
            assert found[layer] == pytest.approx(rates, abs=1e-6)  # float32 there
        worst = tags["Warning Output Activations"]["Warning Output Activations"]
        assert points(our, "Extreme Output Activations Of All Layers", epoch - 1) == pytest.approx(
            {"lowest Output Activation": worst["worst activation_rate"], "highest Output Death": worst["worst death_rate"]},
            abs=1e-6,
        )


@pytest.mark.row("channel_last")
@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("last", [False, True])
def test_units_of_the_last_or_the_second_axis(seed: int, last: bool) -> None:
    kept, our = watch_both(
        seed,
        lambda _: [theirs.OutputActivation(channel_last=last), theirs.OutputNorm(channel_last=last)],
        [lenses.OutputActivation(channel_last=last), lenses.OutputNorm()],
        make=lambda: nn.Sequential(nn.Linear(3, 5), nn.ReLU()).double(),
        shape=(4, 3),
    )
    same_lines(kept, our, "Output Norm")  # all axes together, whatever they are called
    for epoch, tags in kept.lines.items():
        rates = tags["Output Activations"]["1"]
        row = our.timeline.at(epoch - 1)
        assert row["Output Activation/1"]["mean"] == pytest.approx(rates["activation_rate"], abs=1e-6)
        assert row["Output Death/1"]["mean"] == pytest.approx(rates["death_rate"], abs=1e-6)


@pytest.mark.row("lens OutputNorm", "comparison_plot")
@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("options", OPTIONS, ids=IDS)
@pytest.mark.parametrize("kinds", [{}, {"include": (nn.Linear,), "activation": False}])
def test_output_norm(seed: int, options: dict[str, bool], kinds: dict[str, Any]) -> None:
    kept, our = watch_both(seed, lambda _: [theirs.OutputNorm(**options, **kinds)], [lenses.OutputNorm(**options, **kinds)])
    same_numbers(kept, our, "Output Norm", options)
    same_shares(kept, our, "Mean Output Norm Comparison", f"Mean Output {size(options)} Comparison")


@pytest.mark.parametrize("seed", SEEDS)
def test_evaluation_is_apart_here_and_mixed_with_training_there(seed: int) -> None:
    kept, our = watch_both(seed, lambda _: [theirs.OutputNorm(record_eval=True)], [lenses.OutputNorm(record_eval=True)])
    for epoch, tags in kept.lines.items():
        rows = our.timeline.at(epoch - 1)
        for layer, values in tags["Output Norm"].items():
            both = [rows[f"{title}/{layer}"] for title in ("Output Norm", "Output Norm in Evaluation")]
            count = sum(row["count"] for row in both)
            assert sum(row["mean"] * row["count"] for row in both) / count == pytest.approx(values["mean"], rel=1e-9)
            assert both[1]["count"] == 1


@pytest.mark.row("lens OutputGradientGeometry")
@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("options", OPTIONS, ids=IDS)
@pytest.mark.parametrize("skip", [True, False])
def test_output_gradient_geometry(seed: int, options: dict[str, bool], skip: bool) -> None:
    more = {**options, "skip_activation": skip}
    both: Any = [lambda _: [exact(theirs.OutputGradientGeometry(**more))], [lenses.OutputGradientGeometry(**more)]]
    kept, our = watch_both(seed, *both, sizes=(6, 6, 6, 6))  # theirs raises in the backward if a batch is smaller
    same_numbers(kept, our, "Output Gradient Norm", options)
    same_correlations(kept, our, "Output Gradient Correlation")
    alone = {**more, "compute_correlation": False}
    kept, our = watch_both(seed, lambda _: [theirs.OutputGradientGeometry(**alone)], [lenses.OutputGradientGeometry(**alone)])
    same_numbers(kept, our, "Output Gradient Norm", options)
    assert list(kept.tags) == ["Output Gradient Norm"]
    assert len(our.charts) == 1


@pytest.mark.row("lens ParameterNorm, collect_data()", "parameters, with several names")
@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("options", OPTIONS, ids=IDS)
def test_parameter_norm(seed: int, options: dict[str, bool]) -> None:
    lens = theirs.ParameterNorm(**options)

    def more_often(our: Inspector) -> None:
        lens.collect_data()
        our.recorders["ParameterNorm"].tick()

    kept, our = watch_both(seed, lambda _: [lens], [lenses.ParameterNorm(**options)], before_tick=more_often)
    for name in ("Weight", "Bias"):
        same_numbers(kept, our, f"{name} Norm", options)
        same_shares(kept, our, f"{name} Norm Comparison", f"{name} {size(options)} Comparison")
    assert our.timeline.at(0)["Weight RMS/0" if options else "Weight Norm/0"]["count"] == 2


@pytest.mark.row("lenses ParameterGradientActivation, ParameterGradientGeometry")
@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("options", OPTIONS, ids=IDS)
@pytest.mark.parametrize("when", ["step", "accumulate"])
def test_parameter_gradients(seed: int, options: dict[str, bool], when: Any) -> None:
    inplace = options.get("inplace", True)
    kept, our = watch_both(
        seed,
        lambda _: [exact(theirs.ParameterGradientGeometry(**options)), theirs.ParameterGradientActivation(inplace)],
        [lenses.ParameterGradientGeometry(**options, when=when), lenses.ParameterGradientActivation(inplace, when=when)],
    )
    for name in ("Weight", "Bias"):
        same_numbers(kept, our, f"{name} Gradient Norm", options)
        same_correlations(kept, our, f"{name} Gradient Correlation")
    for epoch, tags in kept.lines.items():
        rows = our.timeline.at(epoch - 1)
        for name in ("Weight", "Bias"):
            for layer, rates in tags[f"{name} Gradient Activation"].items():
                found = [rows[f"{name} Gradient {what}/{layer}"]["mean"] for what in ("Activation", "Death")]
                assert found == pytest.approx([rates["activation_rate"], rates["death_rate"]], abs=1e-6)  # float32 there
        worst = tags["Warning Gradient Activations"]["Warning Gradient Activations"]
        shown = points(our, "Extreme Gradient Activations Of All Layers", epoch - 1)  # a line for each parameter; theirs is of both
        low = min(shown["lowest Weight Gradient Activation"], shown["lowest Bias Gradient Activation"])
        high = max(shown["highest Weight Gradient Death"], shown["highest Bias Gradient Death"])
        assert (low, high) == pytest.approx((worst["worst activation_rate"], worst["worst death_rate"]), abs=1e-6)


@pytest.mark.row("lens ParameterUpdateGeometry(optimizer)")
@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("normalize", [False, True])
def test_parameter_updates(seed: int, normalize: bool) -> None:
    """In the first epoch we have one update more: they know the parameters only after the first step."""
    listed: list[list[float]] = []
    kept, our = watch_both(
        seed,
        lambda optimizer: [exact(theirs.ParameterUpdateGeometry(optimizer, normalize_by_size=normalize))],
        [lenses.ParameterUpdateGeometry(normalize_by_size=normalize, inplace=False)],
        before_tick=lambda our: listed.append(our.recorders["ParameterUpdateGeometry"]["bias/3"].peek()["norm"].tolist()),
    )
    first = kept.lines.pop(1), kept.bands.pop(1)
    assert first[0]["Bias Update Norm"]["3"]["mean"] == pytest.approx(np.mean(listed[0][1:]))
    assert first[1]["Bias Update Norm"]["3"]["min", "max"] == pytest.approx((min(listed[0][1:]), max(listed[0][1:])))
    for name in ("Weight", "Bias"):
        same_lines(kept, our, f"{name} Update Norm", f"{name} Update RMS" if normalize else None)
        same_correlations(kept, our, f"{name} Update Correlation")


@pytest.mark.row("line_aggregation, range_aggregation")
@pytest.mark.parametrize("seed", SEEDS)
def test_aggregations_of_every_value(seed: int) -> None:
    """Theirs: "min" is the maximum, "Q3" the first quartile, and quartiles of ranges and medians are the closest observations."""
    names, listed = ("mean", "std", "median", "min", "max", "Q1", "Q3"), []
    options: Any = {"inplace": False, "line_aggregation": names, "range_aggregation": ("std", "min-max", "Q1-Q3")}
    kept, our = watch_both(
        seed,
        lambda _: [theirs.OutputNorm(**options, comparison_plot=False)],
        [lenses.OutputNorm(**options, comparison_plot=False)],
        before_tick=lambda our: listed.append(our.recorders["OutputNorm"]["output/1"].peek().numpy()),
    )
    same_bands(kept, our, "Output Norm", "std", "min-max")
    for epoch, values in enumerate(listed):
        row, there = our.timeline.at(epoch)["Output Norm/1"], kept.lines[epoch + 1]["Output Norm"]["1"]
        band = kept.bands[epoch + 1]["Output Norm"]["1"]["Q1", "Q3"]
        assert {name: row[name] for name in ("mean", "std", "max", "Q1")} == pytest.approx(
            {name: there[name] for name in ("mean", "std", "max", "Q1")}
        )
        assert (row["min"], row["Q3"], row["median"]) == pytest.approx(
            (values.min(), np.quantile(values, 0.75), np.quantile(values, 0.5))
        )
        assert (there["min"], there["Q3"]) == (pytest.approx(row["max"]), pytest.approx(row["Q1"]))
        closest = np.quantile(values, [0.25, 0.5, 0.75], method="closest_observation")
        assert (band[0], there["median"], band[1]) == pytest.approx(closest)
