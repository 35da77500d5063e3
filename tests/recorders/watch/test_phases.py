"""Phases: what is recorded in evaluation is apart from training, whatever the data are."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from recorders import BackwardMonitor, ForwardMonitor, Inspector, ModuleMonitor, ParameterMonitor, lenses
from recorders.watch.charts import charts_of
from recorders.watch.lens_set import apart
from recorders.watch.lenses import Across, Chart, Lens, running
from reducers import Max, Mean

IN = " in Evaluation"


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))


def epoch(model: nn.Module, evaluate: bool, gradients: bool = False) -> None:
    """Trains on numbers about 1, and in the middle evaluates on numbers about 1,000."""
    for batch in range(4):
        model.train()(torch.randn(16, 4)).square().mean().backward()
        if batch == 1 and evaluate:
            with torch.set_grad_enabled(gradients):
                loss = model.eval()(1000 * torch.randn(16, 4)).square().mean()
            if gradients:
                loss.backward()


WATCHING = {
    "OutputNorm": lenses.OutputNorm,
    "OutputActivation": lenses.OutputActivation,
    "DeadUnits": lenses.DeadUnits,
    "NonFinite": lenses.NonFinite,
    "Quantiles": lenses.Quantiles,
    "Outliers": lenses.Outliers,
    "EffectiveRank": lenses.EffectiveRank,
    "OutputGradientGeometry": lenses.OutputGradientGeometry,
}


@pytest.mark.parametrize("name", WATCHING)
def test_an_evaluation_within_an_epoch_changes_no_number_of_training(name: str) -> None:
    """And with `record_eval`, the numbers of evaluation are those of evaluation alone."""
    found = []
    for evaluate, options in ((False, {}), (True, {}), (True, {"record_eval": True})):
        model = net()
        with Inspector(model, WATCHING[name](**options)) as inspector:
            for number in inspector.range(2):
                torch.manual_seed(number)
                epoch(model, False)
                if evaluate:
                    model.eval()(1000 * torch.randn(16, 4)).square().mean().backward()
        found.append([inspector.timeline.at(tick) for tick in range(2)])
    alone, by_default, recorded = found
    assert by_default == alone
    for tick in range(2):
        assert {row: values for row, values in recorded[tick].items() if IN not in row} == alone[tick]
        apart_from = {row for row in recorded[tick] if IN in row}
        assert apart_from <= {row.replace("/", f"{IN}/", 1) for row in alone[tick]}
        assert apart_from


def test_evaluation_that_differs_strongly_is_mixed_with_nothing() -> None:
    model = net()
    kinds = {"out": ForwardMonitor(running()), "largest": ForwardMonitor(Max()), "gradient": BackwardMonitor(running())}
    own = Lens("Own", (*(Chart(group, (group,)) for group in kinds), Chart("worst", (), across=(Across("out", "max"),))), kinds)
    with Inspector(model, own) as inspector:
        for number in inspector.range(2):
            epoch(model, evaluate=number == 1, gradients=True)
            titles = [chart.title for chart in inspector.charts]
            assert titles == [*kinds, "worst"]
    row = inspector.timeline.at(1)
    for group in kinds:
        for layer in ("0", "1", "2"):
            largest = "mean" if group == "largest" else "max"
            assert row[f"{group}{IN}/{layer}"][largest] > 50 * row[f"{group}/{layer}"][largest]
    assert (row["out/0"]["count"], row[f"out{IN}/0"]["count"]) == (4 * 16 * 8, 16 * 8)
    assert [f"{IN}" in name for name in inspector.timeline.at(0)] == [False] * 9
    titles = [chart.title for chart in inspector.charts]
    assert titles == [name for group in (*kinds, "worst") for name in (group, group + IN)]
    assert [chart.title for chart in charts_of(inspector.timeline)] == titles
    worst = {chart.title: chart.points(1)[0].value for chart in inspector.charts if chart.chart.across}
    assert worst["worst"] == max(row[f"out/{layer}"]["mean"] for layer in "012")
    assert worst["worst" + IN] == max(row[f"out{IN}/{layer}"]["mean"] for layer in "012")


def test_every_batch_of_evaluation_counts_whatever_the_pace_of_steps() -> None:
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    with Inspector(model, lenses.OutputNorm(record_eval=True), optimizer=optimizer, every_step=10) as inspector:
        for _ in range(13):
            model(torch.randn(2, 4)).sum().backward()
            optimizer.step()
        for _ in range(3):
            model.eval()(torch.randn(2, 4))
        inspector.tick_epoch()
    row = inspector.timeline.at(0)
    assert (row["Output Norm/1"]["count"], row[f"Output Norm{IN}/1"]["count"]) == (2, 3)


def test_what_has_no_phase_or_records_one_phase_stays_as_it_is() -> None:
    kinds = {
        "trained": ForwardMonitor(Mean(), eval_update=False),
        "tested": ForwardMonitor(Mean(), train_update=False),
        "weight": ParameterMonitor(Mean(), "weight", when="tick"),
        "module": ModuleMonitor(Mean(), op_=lambda module: module.training),
    }
    lens = Lens("Own", tuple(Chart(group, (group,)) for group in kinds), kinds)
    assert apart(lens) == lens


def test_modules_that_are_trained_in_evaluation_mode() -> None:
    """Such as batch norms whose statistics are frozen."""
    for from_grad, wanted in ((False, {"2"}), (True, {"0", "2"})):
        model = net()
        model[0].eval()
        inspector = Inspector(model, lenses.OutputGradientGeometry(evaluation_from_grad=from_grad))
        model(torch.randn(3, 4)).sum().backward()
        inspector.tick_epoch()
        rows = inspector.timeline.at(0)
        assert {row.rpartition("/")[2] for row in rows} == wanted
