"""What each lens writes into the timeline equals the same computed by hand with PyTorch."""

from __future__ import annotations

import copy
import itertools
import math
from collections.abc import Callable, Iterator, Mapping
from statistics import fmean, pstdev
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from recorders import Inspector
from recorders.errors import LensError, SelectionError
from recorders.watch.lenses import (
    Lens,
    LossMetrics,
    OutputActivation,
    OutputNorm,
    ParameterCond,
    ParameterGradientActivation,
    ParameterGradientGeometry,
    ParameterNorm,
    ParameterUpdateGeometry,
)
from recorders.watch.lenses.norms import SampleNorms

Rows = dict[str, dict[str, float]]


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(1, 4, 3, bias=False), nn.ReLU(), nn.Flatten(), nn.Linear(16, 3), nn.Tanh(), nn.Dropout(0.5))


def batches() -> list[Tensor]:
    torch.manual_seed(1)
    return [torch.randn(size, 1, 4, 4) - 0.5 for size in (6, 6, 3)]


def watched(*lenses: Lens, see: Callable[[nn.Sequential], None] = lambda net: None) -> tuple[Rows, Inspector]:
    """The rows of an epoch of three steps; `see` is called after each backward."""
    net = network()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.5)
    inspector = Inspector(net, lenses)
    for x in batches():
        optimizer.zero_grad()
        net(x).square().sum().backward()
        see(net)
        optimizer.step()
    inspector.tick_epoch()
    return inspector.timeline.at(0), inspector


def by_hand(measure: Callable[[nn.Sequential, nn.Sequential], Mapping[str, Any]]) -> dict[str, list[Any]]:
    """What `measure` finds at each of the same steps; it gets the network with its gradients, and as it is after the step."""
    net = network()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.5)
    found: dict[str, list[Any]] = {}
    for x in batches():
        optimizer.zero_grad()
        net(x).square().sum().backward()
        before = copy.deepcopy(net)
        for layer, other in zip(before.parameters(), net.parameters(), strict=True):
            layer.grad = other.grad.clone()  # type: ignore[union-attr]
        optimizer.step()
        for name, value in measure(before, net).items():
            found.setdefault(name, []).append(value)
    return found


def spread_of(values: list[float]) -> dict[str, float]:
    return {
        "mean": fmean(values),
        "std": pstdev(values),
        "min": min(values),
        "max": max(values),
        "count": len(values),
        "nonfinite": 0,
    }


def cosines(tensors: list[Tensor]) -> list[float]:
    return [float(torch.cosine_similarity(a.flatten(), b.flatten(), dim=0)) for a, b in itertools.pairwise(tensors)]


def same(found: Mapping[str, float], values: list[float]) -> None:
    assert found == pytest.approx(spread_of(values), rel=1e-5, abs=1e-6)


def outputs(net: nn.Sequential) -> Iterator[dict[str, Tensor]]:
    """The outputs of each layer of the first forward of each batch, without training."""
    for x in batches():
        found = {}
        for name, layer in net.named_children():
            x = found[name] = layer(x)
        yield found


@pytest.mark.parametrize("normalize", [False, True])
def test_output_norms_are_means_over_samples(normalize: bool) -> None:
    net = network().eval()
    lens = OutputNorm(record_eval=True, normalize_by_size=normalize, include=(nn.Conv2d, nn.Linear), exclude=nn.Tanh)
    inspector = Inspector(net, lens)
    for x in batches():
        net(x)
    inspector.tick_epoch()
    row, title = inspector.timeline.at(0), "Output RMS in Evaluation" if normalize else "Output Norm in Evaluation"
    assert [name for name in row if name.startswith(title)] == [f"{title}/{layer}" for layer in ("0", "1", "3")]
    for layer in ("0", "1", "3"):
        found = [at[layer].flatten(1) for at in outputs(net)]
        scale = math.sqrt(found[0].shape[1]) if normalize else 1
        same(row[f"{title}/{layer}"], [float(x.detach().norm(dim=1).mean()) / scale for x in found])


def test_norms_of_samples_join_as_those_of_the_parts() -> None:
    torch.manual_seed(0)
    x, norms = torch.randn(3, 40), SampleNorms(normalize=True)
    x[1, 7] = math.nan
    parts = [norms.update({}, part) for part in x.split(10, dim=1)]
    whole = norms.compute(norms.merge_all(parts))
    assert torch.allclose(whole, norms.compute(norms.update({}, x)), equal_nan=True)
    assert torch.allclose(whole.float(), x.square().mean(1).sqrt(), equal_nan=True)


def test_output_norms_that_are_not_finite_are_counted() -> None:
    net = nn.Sequential(nn.Identity(), nn.ReLU())
    inspector = Inspector(net, OutputNorm())
    for x in (torch.ones(2, 4), torch.tensor([[1.0, math.nan], [1.0, 1.0]]), torch.tensor([[math.inf]]), torch.ones(0, 4)):
        net(x)
    inspector.tick_epoch()
    row = inspector.timeline.at(0)["Output Norm/1"]
    assert (row["mean"], row["count"], row["nonfinite"]) == (2.0, 1, 2)


@pytest.mark.parametrize("last", [False, True])
def test_output_activations_and_deaths_are_of_each_batch(last: bool) -> None:
    torch.manual_seed(0)
    net, seen = nn.Sequential(nn.ReLU()), [torch.randn(size, 3, 5) - 1.5 for size in (4, 4, 2)]
    inspector = Inspector(net, OutputActivation(inplace=False, channel_last=last, death_aggregation="median"))
    for x in seen:
        net(x)
    inspector.tick_epoch()
    row = inspector.timeline.at(0)
    active = [(x > 0).double().mean(dim=(0, 1 if last else 2)) for x in seen]
    for title, values in (
        ("Activation", [float(a.mean()) for a in active]),
        ("Death", [float((a == 0).double().mean()) for a in active]),
    ):
        found = row[f"Output {title}/0"]
        assert found.pop("median") == pytest.approx(sorted(values)[1])
        same({name: value for name, value in found.items() if name not in ("Q1", "Q3")}, values)


@pytest.mark.parametrize("from_grad", [False, True])
@pytest.mark.parametrize("record_eval", [False, True])
def test_evaluation_is_told_by_the_module_or_by_gradients(record_eval: bool, from_grad: bool) -> None:
    net = nn.Sequential(nn.ReLU())
    options = {"record_eval": record_eval, "evaluation_from_grad": from_grad}
    inspector = Inspector(net, [OutputActivation(**options), OutputNorm(**options)])  # type: ignore[arg-type]
    for training in (True, False):
        for gradients in (True, False):
            net.train(training)
            with torch.set_grad_enabled(gradients):
                net(torch.ones(2, 3))
    inspector.tick_epoch()
    row = inspector.timeline.at(0)
    for title in ("Output Norm", "Output Activation", "Output Death"):
        assert row[f"{title}/0"]["count"] == 2
        assert (f"{title} in Evaluation/0" in row) == record_eval
        assert row.get(f"{title} in Evaluation/0", {"count": 2})["count"] == 2


def test_lenses_of_outputs_watch_the_kinds_that_their_options_say() -> None:
    net = nn.Sequential(nn.Linear(2, 2), nn.ReLU(), nn.Dropout(), nn.GELU(), nn.MultiheadAttention(2, 1), nn.AlphaDropout())
    layers = lambda lens: Inspector(copy.deepcopy(net), lens).charts[0].layers  # noqa: E731
    assert layers(OutputActivation()) == ("1", "2", "3", "5")
    assert layers(OutputActivation(dropout=False)) == ("1", "3")
    assert layers(OutputActivation(activation=False, exclude=nn.AlphaDropout)) == ("2",)
    assert layers(OutputNorm()) == ("1", "3")
    assert layers(OutputNorm(activation=False, include=nn.Linear)) == ("0", "4.out_proj")


@pytest.mark.parametrize("when", ["step", "accumulate"])
def test_gradient_geometry_and_activation_of_parameters(when: Any) -> None:
    lenses = ParameterGradientGeometry(when=when), ParameterGradientActivation(when=when)
    gradients = by_hand(lambda net, _: {name: parameter.grad for name, parameter in net.named_parameters()})
    gradients = {name.replace(".weight", " Weight").replace(".bias", " Bias"): values for name, values in gradients.items()}
    row, inspector = watched(*lenses)
    assert set(gradients) == {"0 Weight", "3 Weight", "3 Bias"}
    for name, values in gradients.items():
        layer, parameter = name.split()
        same(row[f"{parameter} Gradient Norm/{layer}"], [float(x.norm()) for x in values])
        same(row[f"{parameter} Gradient Correlation/{layer}"], cosines(values))
        active = [(x.abs() > 1e-8).double().flatten(1 if x.ndim > 1 else 0) for x in values]
        units = [x.mean(dim=1) if x.ndim > 1 else x for x in active]
        same(row[f"{parameter} Gradient Activation/{layer}"], [float(x.mean()) for x in units])
        same(row[f"{parameter} Gradient Death/{layer}"], [float((x == 0).double().mean()) for x in units])
    assert [chart.layers for chart in inspector.charts if chart.title == "Bias Gradient Norm"] == [("3",)]


def test_gradients_at_a_step_are_final_and_those_at_a_backward_are_not() -> None:
    clip = lambda net: nn.utils.clip_grad_norm_(net.parameters(), 1e-3)  # noqa: E731
    norms = {}
    for when in ("step", "accumulate"):
        row, _ = watched(ParameterGradientGeometry(parameters="weight", when=when), see=clip)  # type: ignore[arg-type]
        norms[when] = row["Weight Gradient Norm/3"]["max"]
    assert norms["step"] <= 1e-3 < norms["accumulate"]


@pytest.mark.parametrize("normalize", [False, True])
def test_norms_of_parameters_and_geometry_of_updates(normalize: bool) -> None:
    row, _ = watched(
        ParameterNorm(normalize_by_size=normalize), ParameterUpdateGeometry(normalize_by_size=normalize), ParameterCond()
    )
    size = "RMS" if normalize else "Norm"
    for layer in ("0", "3"):
        at = lambda net, layer=layer: net.get_submodule(layer).weight.detach()  # noqa: E731
        updates = by_hand(lambda before, after, at=at: {"": at(after) - at(before)})[""]
        scale = math.sqrt(updates[0].numel()) if normalize else 1
        same(row[f"Weight Update {size}/{layer}"], [float(x.norm()) / scale for x in updates])
        same(row[f"Weight Update Correlation/{layer}"], cosines(updates))
        last = by_hand(lambda before, after, at=at: {"": at(after)})[""][-1]
        same(row[f"Weight {size}/{layer}"], [float(last.norm()) / scale])
        values = torch.linalg.svdvals(last.flatten(1).double())
        same(row[f"Weight Condition Number/{layer}"], [float(values[0] / values[-1])])


def test_condition_numbers_are_above_one_and_of_matrices_only() -> None:
    net = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2), nn.Linear(2, 2), nn.LazyLinear(2))
    with torch.no_grad():
        net[0].weight.copy_(torch.diag(torch.tensor([10.0, 1.0])))
        net[2].weight.fill_(1.0)
    inspector = Inspector(net, ParameterCond())
    net(torch.ones(4, 2))
    inspector.tick_epoch()
    row = inspector.timeline.at(0)
    assert inspector.charts[0].layers == ("0", "2", "3")
    assert row["Weight Condition Number/0"]["mean"] == pytest.approx(10.0)  # p=-2 would give 0.1
    singular = row["Weight Condition Number/2"]
    assert singular["nonfinite"] == 1 or singular["mean"] > 1e7


class Scaled(nn.Module):
    """A module that owns a parameter and contains another module."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.inside = nn.Parameter(torch.full((3,), 2.0)), nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        scaled: Tensor = self.inside(x) * self.weight
        return scaled


@pytest.mark.parametrize(("depth", "wanted"), [(None, ("0", "0.inside")), (0, ()), (1, ("0",)), (2, ("0", "0.inside"))])
def test_parameters_of_modules_that_contain_modules_count(depth: int | None, wanted: tuple[str, ...]) -> None:
    inspector = Inspector(lenses=ParameterNorm(parameters="weight"), depth=depth)
    if not wanted:
        with pytest.raises(SelectionError, match="anything to watch"):
            inspector.attach(nn.Sequential(Scaled()))
        return
    inspector.attach(nn.Sequential(Scaled())).tick_epoch()
    assert inspector.charts[0].layers == wanted


def test_a_lens_asked_for_by_one_name_takes_no_letters_and_errors_name_the_option() -> None:
    assert list(ParameterNorm(parameters="weight").monitors) == ["weight"]
    for lens in (OutputActivation, ParameterGradientActivation):
        with pytest.raises(LensError, match="'median' needs every value"):
            lens(activation_aggregation="median")
        with pytest.raises(LensError, match="death_aggregation is one aggregation"):
            lens(death_aggregation=("mean", "max"))  # type: ignore[arg-type]
    with pytest.raises(LensError, match="unknown line aggregation 'middle'"):
        OutputNorm(comparison_aggregation="middle")
    with pytest.raises(TypeError):
        ParameterUpdateGeometry(torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=1.0))  # type: ignore[misc]


def test_losses_of_a_module_by_its_mode_with_every_value_and_named_as_wanted() -> None:
    net, loss_fn = network(), nn.MSELoss()
    lens = LossMetrics(loss_fn, "median", evaluation_from_grad=False, loss_fn_inplace=False, metrics=("accuracy",))
    inspector = Inspector(net, lens, train_loss_str="train_loss", non_train_loss_str="val_loss")
    for training in (True, False):
        loss_fn.train(training)
        for error in (1.0, 2.0, 4.0):
            loss_fn(torch.zeros(3), torch.full((3,), error))
    inspector.push_metric("accuracy", 0.5)
    inspector.push_metric("speed", 3.0)
    inspector.tick_epoch()
    row = inspector.timeline.at(0)
    assert row["Loss/train_loss"]["median"] == row["Loss/val_loss"]["median"] == 4.0
    assert row["Metrics/speed"]["mean"] == 3.0
    assert [(chart.title, chart.layers) for chart in inspector.charts] == [
        ("Loss", ("train_loss", "val_loss")),
        ("Metrics", ("accuracy",)),
    ]
    with pytest.raises(LensError, match="different names"):
        Inspector(lenses=[], train_loss_str="eval")


def test_losses_and_metrics_share_a_chart_if_wanted() -> None:
    inspector = Inspector(lenses=LossMetrics(separate_loss_and_metrics=False, metrics="accuracy"))
    inspector.push_loss(2.0)
    inspector.push_metric("accuracy", 0.5)
    inspector.push_metric("train", 7.0)
    inspector.tick_epoch()
    assert [(chart.title, chart.layers) for chart in inspector.charts] == [("Loss & Metrics", ("train loss", "accuracy"))]
    assert {name: row["mean"] for name, row in inspector.timeline.at(0).items()} == {
        "Loss & Metrics/train loss": 2.0,
        "Loss & Metrics/accuracy": 0.5,
        "Loss & Metrics/train": 7.0,
    }


def test_metrics_of_training_and_of_evaluation_are_named_as_losses_are() -> None:
    inspector = Inspector(lenses=LossMetrics(separate_loss_and_metrics=False), non_train_loss_str="valid")
    for train in (True, False):
        inspector.push_loss(2.0 - train, train=train)
        inspector.push_metric("accuracy", 0.5 + 0.25 * train, train=train)
    inspector.tick_epoch()
    assert {name: row["mean"] for name, row in inspector.timeline.at(0).items()} == {
        "Loss & Metrics/train loss": 1.0,
        "Loss & Metrics/valid loss": 2.0,
        "Loss & Metrics/train accuracy": 0.75,
        "Loss & Metrics/valid accuracy": 0.5,
    }


def test_the_recorders_of_lenses_are_there_by_name() -> None:
    net = network()
    rms = ParameterNorm(normalize_by_size=True, comparison_plot=False)
    inspector = Inspector(lenses=[ParameterNorm(inplace=False), rms, LossMetrics()])
    assert inspector.recorders == {}
    inspector.attach(net)
    assert list(inspector.recorders) == ["ParameterNorm", "ParameterNorm 2"]
    inspector.recorders["ParameterNorm"].tick()
    inspector.tick_epoch()
    row = inspector.timeline.at(0)
    assert (row["Weight Norm/0"]["count"], row["Weight RMS/0"]["count"]) == (2, 1)
    assert inspector.recorders["ParameterNorm"]["weight/0"].samples == 0  # the epoch has ended
