"""Findings: planted faults are found, at the right layer, and a healthy net has none."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from recorders import (
    BackwardMonitor,
    CallMonitor,
    ForwardMonitor,
    ParameterGradientMonitor,
    ParameterUpdateMonitor,
    Recorder,
    RecordingWarning,
    load,
    presets,
)
from recorders.watch.diagnosis.evidence import evidence
from recorders.watch.diagnosis.findings import findings
from recorders.watch.diagnosis.layer_rules import gradients_by_depth
from recorders.watch.diagnosis.net_rules import initial_sizes
from recorders.watch.overview import overview
from recorders.watch.spread import Spread
from reducers import Activity, Collect, Count, Extremes, FirstNonfinite, Idle, Mean, Moments, Norm, Product, Quantile, Summary


def relative_change(after: Tensor, before: Tensor) -> Tensor:
    return (after - before).norm() / before.norm()


def watch(net: nn.Module, ratio: Collect | Summary | None = None) -> Recorder:
    return Recorder(
        out=ForwardMonitor(Product(stats=Summary("b c ... -> c"), activity=Activity(), idle=Idle())),
        grad=BackwardMonitor(Summary()),
        weights=ParameterGradientMonitor(Summary()),
        update=ParameterUpdateMonitor(Product(ratio=ratio or Collect()), op_=relative_change),
        loss=CallMonitor(Summary()),
    ).modules(net, leaves=True)


def train(
    net: nn.Module, recorder: Recorder, rate: float = 1e-3, steps: int = 20, loss: Callable[[Tensor], Tensor] | None = None
) -> None:
    """A regression of noise; `loss` replaces the mean square of the error."""
    torch.manual_seed(1)
    optimizer = torch.optim.Adam([p for p in net.parameters() if p.requires_grad], lr=rate)
    with recorder:
        for _ in range(steps):
            x = torch.randn(32, 8)
            error = net(x) - x.sum(1, keepdim=True)
            value = error.square().mean() if loss is None else loss(error)
            optimizer.zero_grad()
            value.backward()
            optimizer.step()
            recorder.push("loss", value)


def mlp(*activations: nn.Module) -> nn.Sequential:
    torch.manual_seed(2)  # of a net in which no unit is dead from the start, as happens by chance in others
    layers: list[nn.Module] = []
    for number, activation in enumerate(activations):
        layers += [nn.Linear(8 if number == 0 else 32, 32), activation]
    return nn.Sequential(*layers, nn.Linear(32, 1))


def found(recorder: Recorder) -> list[tuple[str, str]]:
    return [(finding.layer, finding.what) for finding in findings(recorder)]


@pytest.mark.parametrize("activation", [nn.ReLU, nn.Tanh, nn.Sigmoid, nn.GELU])
def test_nothing_wrong_with_a_healthy_net(activation: type[nn.Module], tmp_path: Path) -> None:
    net = mlp(activation(), activation())
    recorder = watch(net)
    train(net, recorder)
    assert found(recorder) == []
    assert findings(load(recorder.save(tmp_path / "run"))) == []


def test_dead_units_are_found_where_they_die_and_not_where_they_are_handed_on(tmp_path: Path) -> None:
    net = nn.Sequential(nn.Conv2d(1, 4, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(64, 2))
    nn.init.constant_(net[0].bias[:3], -100.0)
    recorder = Recorder(out=ForwardMonitor(Activity())).modules(net, exclude=nn.Flatten, leaves=True)
    with recorder:
        net(torch.randn(16, 1, 8, 8))
    assert found(recorder) == [("1", "3 of 4 units are dead: they were never active")]
    assert findings(load(recorder.save(tmp_path / "run"))) == findings(recorder)


def test_far_too_large_and_far_too_small_learning_rates_are_found() -> None:
    for rate, word, layers in ((0.5, "too large", {"2"}), (1e-7, "too small", {"optimizer"})):
        net = mlp(nn.Tanh())
        recorder = watch(net)
        train(net, recorder, rate)
        assert {layer for layer, what in found(recorder) if word in what} >= layers


def test_a_fault_of_all_layers_counts_each_once() -> None:
    recorder = presets.health().modules(net := mlp(nn.ReLU()))
    optimizer = torch.optim.SGD(net.parameters(), 100.0)
    with recorder:
        for _ in range(40):
            optimizer.zero_grad()
            loss = net(torch.randn(8, 8)).square().mean()
            loss.backward()
            optimizer.step()
            recorder.push("loss", loss)
    (told,) = [what for _, what in found(recorder) if "too large" in what]
    assert ", in 0 and 1 more of 2 layers" in told


def test_ratios_kept_as_a_summary_serve_as_well() -> None:
    net = mlp(nn.ReLU())
    recorder = watch(net, Summary())
    train(net, recorder, rate=0.5)
    assert any("too large" in what for _, what in found(recorder))


@pytest.mark.parametrize("on_purpose", [True, False])
def test_weights_that_never_change_are_a_fault_unless_on_purpose(on_purpose: bool, tmp_path: Path) -> None:
    net = mlp(nn.ReLU(), nn.ReLU())
    net[2].requires_grad_(not on_purpose)
    recorder = watch(net)
    optimizer = torch.optim.SGD([*net[0].parameters(), *net[4].parameters()], lr=1e-2)
    with recorder:
        net(torch.randn(32, 8)).square().mean().backward()
        optimizer.step()
    frozen = [(layer, what) for layer, what in found(recorder) if "never changed" in what]
    assert frozen == ([] if on_purpose else [("2", "the weights never changed: no optimizer step changed its parameters")])
    loaded = findings(load(recorder.save(tmp_path / "run")))  # which does not tell
    assert not any("never changed" in finding.what for finding in loaded)
    assert loaded.unexamined == ("weights that never changed, perhaps frozen on purpose: 2",)


def test_moments_norms_and_quantiles_serve_as_well() -> None:
    net = nn.Sequential(*(nn.Linear(16, 16, bias=False) for _ in range(6)))
    for layer in net:
        nn.init.normal_(layer.weight, std=0.02)
    with torch.no_grad():
        net[0].weight[3] *= 1e6
    seen: dict[str, list[tuple[str, str]]] = {}
    for reducer in (Summary(), Moments(), Norm(), Quantile(q=(0.0, 0.25, 0.5, 0.75, 1.0))):
        recorder = Recorder(out=ForwardMonitor(reducer), grad=BackwardMonitor(Product(size=reducer))).modules(net, leaves=True)
        with recorder:
            net(torch.randn(8, 16, generator=torch.Generator().manual_seed(0))).sum().backward()
        seen[type(reducer).__name__] = found(recorder)
        unexamined = " ".join(findings(recorder).unexamined)
        assert "NaN and infinity" not in unexamined  # of all it is counted
        assert ("vanish" in unexamined) == isinstance(reducer, Quantile)
    assert seen["Summary"] == seen["Moments"] == seen["Norm"]
    assert "vanish" in seen["Norm"][0][1]
    ((layer, what),) = seen["Quantile"]
    assert layer == "0"
    assert "outlier features" in what


def test_outlier_features_are_named_where_they_begin() -> None:
    net = nn.Sequential(nn.Linear(8, 16), nn.Identity(), nn.Linear(16, 16))
    nn.init.constant_(net[0].bias[3:4], 5000.0)
    with torch.no_grad():
        net[2].weight[:, 3] = 0
    with Recorder(ForwardMonitor(Summary("b c -> c"))).modules(net, leaves=True) as recorder:
        net(torch.randn(64, 8))
    ((layer, what),) = found(recorder)
    assert layer == "0"
    assert what.startswith("outlier features: the largest magnitude is 5e+03, ")
    assert what.endswith(", and in 1 more layers")


def test_the_first_layer_that_gave_nan_is_named_once() -> None:
    class Root(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x.sqrt()

    net = nn.Sequential(nn.Linear(8, 8), Root(), nn.Linear(8, 1))
    recorder = watch(net)
    train(net, recorder, steps=1)
    bad = [(layer, what) for layer, what in found(recorder) if "NaN" in what]
    assert len(bad) == 1
    assert bad[0][0] == "1"
    assert "outputs are NaN or infinite, and in 1 more" in bad[0][1]
    assert "; loss: 1 of 1 values are NaN or infinite" in bad[0][1]


def test_nan_in_gradients_alone_is_found() -> None:
    net = mlp(nn.ReLU())
    recorder = watch(net)
    train(net, recorder, steps=1, loss=lambda error: (error * 0).square().sqrt().sum())
    ((layer, what),) = [each for each in found(recorder) if "NaN" in each[1]]
    assert layer == "2"  # from which it went back
    assert "gradients are NaN" in what
    assert "weight gradients are NaN" in what
    assert "outputs" not in what


def test_the_layer_and_the_step_of_the_first_nan_are_named_if_recorded(tmp_path: Path) -> None:
    net, calls = mlp(nn.ReLU(), nn.ReLU()), 0

    def divide(module: nn.Module, args: object, output: Tensor) -> Tensor:
        nonlocal calls
        calls += 1
        return output / 0 if calls == 3 else output

    net[2].register_forward_hook(divide)
    recorder = Recorder(out=ForwardMonitor(Product(stats=Summary(), first=FirstNonfinite())), loss=CallMonitor(Count())).modules(
        net, leaves=True
    )
    train(net, recorder, steps=6)
    ((layer, what),) = found(recorder)
    assert layer == "2"
    assert "for the first time in observation 2, and in 4 more layers" in what
    with pytest.warns(RecordingWarning, match="elements not finite, and 5 more subrecorders left some out"):
        saved = recorder.save(tmp_path / "run")
    assert findings(load(saved)) == findings(recorder)


def test_a_few_dead_units_are_no_fault() -> None:
    net = nn.Sequential(nn.Linear(4, 20), nn.ReLU())
    recorder = Recorder(out=ForwardMonitor(Activity("b c -> c"))).modules(net, leaves=True)
    for dead in (10, 11):
        nn.init.constant_(net[0].bias, 0.5)
        nn.init.constant_(net[0].bias[:dead], -100.0)
        recorder.reset()
        net(torch.randn(64, 4))
        assert bool(found(recorder)) == (dead == 11)


def test_what_was_not_recorded_is_said() -> None:
    net = mlp(nn.Tanh())
    nothing = findings(Recorder(loss=CallMonitor(Mean())))
    assert [text.partition(":")[0] for text in nothing.unexamined] == [
        "NaN and infinity",
        "layers that never ran",
        "dead units",
        "saturated units",
        "outlier features",
        "gradients that vanish or explode",
        "updates that are too large or too small",
    ]
    assert str(nothing).startswith(
        "nothing was examined, so no fault could be found\nnot examined: NaN and infinity: record a Summary"
    )
    assert repr(nothing).startswith("nothing was examined, so no fault could be found; not examined: NaN and infinity, layers")
    recorder = watch(net)
    train(net, recorder)
    assert findings(recorder).unexamined == ()
    assert findings(recorder).examined == (
        "NaN and infinity: 3 of 3",
        "layers that never ran: 3 of 3",
        "dead units: 3 of 3",
        "saturated units: 1 of 3",
        "outlier features: 2 of 3",
        "gradients that vanish or explode: 3 of 3",
        "updates that are too large or too small: 2 of 3",
    )
    assert str(findings(recorder)).startswith(
        "no fault was found\nexamined: NaN and infinity: 3 of 3, layers that never ran: 3 of 3"
    )
    only = Recorder(out=ForwardMonitor(Summary()), loss=CallMonitor(Summary())).modules(net, leaves=True)
    train(net, only)
    assert len(findings(only).unexamined) == 4


PER_UNIT = (Summary, Moments, Extremes, Norm, lambda pattern: Quantile(pattern, q=(0.0, 0.5, 1.0)))


@pytest.mark.parametrize("reducer", PER_UNIT, ids=["Summary", "Moments", "Extremes", "Norm", "Quantile"])
@pytest.mark.parametrize("dead", [0, 20])
def test_other_statistics_by_unit_tell_of_dead_units(reducer: Any, dead: int) -> None:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, 32), nn.ReLU(), nn.Linear(32, 32))
    nn.init.constant_(net[0].bias, 1.0)
    nn.init.constant_(net[0].bias[:dead], -100.0)
    nn.init.zeros_(net[2].weight)  # which is no activation function: zeros are its business
    nn.init.zeros_(net[2].bias)
    with Recorder(ForwardMonitor(Product(one=reducer("b c -> c")))).modules(net, leaves=True) as recorder:
        net(torch.randn(64, 4))
    assert found(recorder) == [("1", "20 of 32 units are dead: they were never active")] * bool(dead)
    assert any(kind.startswith("dead units: 1 of") for kind in findings(recorder).examined)


def test_pooled_statistics_do_not_tell_of_dead_units() -> None:
    net = mlp(nn.ReLU())
    with Recorder(ForwardMonitor(Summary())).modules(net) as recorder:
        net(torch.randn(8, 8))
    assert any(kind.startswith("dead units: record") for kind in findings(recorder).unexamined)


def test_extremes_beside_moments_tell_of_outlier_features() -> None:
    net = nn.Sequential(nn.Linear(8, 16, bias=False))
    with torch.no_grad():
        net[0].weight[3] *= 1e6
    both = Product(ends=Extremes(), moments=Moments("b c -> c"))
    with Recorder(ForwardMonitor(both)).modules(net, leaves=True) as recorder:
        net(torch.randn(64, 8, generator=torch.Generator().manual_seed(0)))
    ((layer, what),) = found(recorder)
    assert (layer, what[:16]) == ("0", "outlier features")


@pytest.mark.parametrize("sick", [True, False])
def test_the_first_nonfinite_observation_alone_tells(sick: bool) -> None:
    net = mlp(nn.ReLU())
    with Recorder(ForwardMonitor(FirstNonfinite())).modules(net) as recorder:
        net(torch.randn(8, 8))
        net(torch.full((8, 8), math.nan if sick else 1.0))
    what = "outputs are NaN or infinite, for the first time in observation 1, and in 3 more layers"
    assert [finding.what for finding in findings(recorder)] == [what] * sick
    assert findings(recorder).examined == ("NaN and infinity: 4 of 4", "layers that never ran: 4 of 4")


def test_a_list_of_findings_prints_in_short() -> None:
    net = mlp(nn.ReLU())
    with Recorder(ForwardMonitor(Activity())).modules(net, types=nn.ReLU) as recorder:
        nn.init.constant_(net[0].bias, -100.0)
        net(torch.randn(8, 8))
    first = repr(findings(recorder)).splitlines()[0]
    assert first.startswith(
        "1 likely faults; examined: NaN and infinity, layers that never ran, dead units; not examined: units that"
    )


def test_saturated_units_are_found(tmp_path: Path) -> None:
    for activation, scale in ((nn.Tanh(), 100.0), (nn.Sigmoid(), 400.0)):
        net = mlp(activation)
        with torch.no_grad():
            net[0].weight.mul_(scale)
        recorder = Recorder(ForwardMonitor(Summary("b c -> c"))).modules(net)
        with recorder:
            net(torch.randn(256, 8))
        (layer, what), *others = found(recorder)
        assert layer == "1"
        assert "of 32 units are saturated" in what
        assert not others
    # Of a recording without modules only a tanh can be told.
    net = mlp(nn.Tanh())
    with torch.no_grad():
        net[0].weight.mul_(100)
    with Recorder(ForwardMonitor(Summary("b c -> c"))).modules(net, leaves=True) as recorder:
        net(torch.randn(256, 8))
    assert findings(load(recorder.save(tmp_path / "run"))) == findings(recorder)


def test_a_sure_sigmoid_at_the_end_is_no_fault() -> None:
    net = nn.Sequential(nn.Linear(8, 1), nn.Sigmoid())
    with torch.no_grad():
        net[0].weight.mul_(1000)
    with Recorder(ForwardMonitor(Summary("b c -> c"))).modules(net, leaves=True) as recorder:
        net(torch.randn(64, 8))
    assert findings(recorder) == []


def test_vanishing_and_exploding_gradients_are_found_at_the_early_end() -> None:
    for gain, word in ((0.02, "vanish"), (3.0, "explode")):
        torch.manual_seed(0)
        net = nn.Sequential(*(nn.Linear(16, 16, bias=False) for _ in range(10)))
        for layer in net:
            nn.init.normal_(layer.weight, std=gain)
        with Recorder(BackwardMonitor(Summary())).modules(net, leaves=True) as recorder:
            net(torch.randn(8, 16)).sum().backward()
        ((layer_name, what),) = found(recorder)
        assert layer_name == "0"
        assert word in what


def test_a_layer_that_never_ran_is_found_once_with_the_reason(tmp_path: Path) -> None:
    class Forgetful(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.used, self.unused = nn.Linear(8, 1), nn.Linear(8, 1)

        def forward(self, x: Tensor) -> Tensor:
            return self.used(x)

    net = Forgetful()
    recorder = watch(net)
    train(net, recorder)
    ((layer, what),) = [pair for pair in found(recorder) if pair[0] == "unused"]
    assert what.startswith("no output was recorded: its module was never called")
    (loaded,) = [finding for finding in findings(load(recorder.save(tmp_path / "run"))) if finding.layer == layer]
    assert loaded.what == "no output was recorded"


def test_what_was_not_recorded_is_not_judged() -> None:
    net = mlp(nn.ReLU())
    with Recorder(ForwardMonitor(Mean())).modules(net, leaves=True) as recorder:
        net(torch.randn(4, 8))
    assert overview(recorder) == []
    assert findings(recorder) == []


def test_biases_are_left_out_and_the_parameters_of_a_layer_pooled() -> None:
    net = nn.LSTM(4, 8)
    recorder = Recorder(ParameterGradientMonitor(Summary())).modules(net)
    optimizer = torch.optim.SGD(net.parameters(), lr=1e-3)
    with recorder:
        net(torch.randn(3, 2, 4))[0].sum().backward()
        optimizer.step()
    (layer,) = overview(recorder)
    assert layer.weight_gradient is not None
    assert layer.weight_gradient.count == 4 * 8 * 4 + 4 * 8 * 8
    gradients = torch.cat([p.grad.ravel() for name, p in net.named_parameters() if "weight" in name])
    assert layer.weight_gradient.norm == pytest.approx(gradients.norm().item(), rel=1e-6)


def test_outputs_of_a_module_with_several_get_a_row_each() -> None:
    net = nn.LSTM(4, 8)
    with Recorder(out=ForwardMonitor(Summary())).modules(net) as recorder:
        net(torch.randn(3, 2, 4))
    assert [layer.name for layer in overview(recorder)] == ["out:0", "out:1.0", "out:1.1"]


def test_a_second_recording_of_the_same_module_is_kept_apart() -> None:
    net = nn.Sequential(nn.Linear(2, 2))
    recorder = Recorder(
        train=ForwardMonitor(Summary(), eval_update=False), test=ForwardMonitor(Summary(), train_update=False)
    ).modules(net, types=nn.Linear)
    with recorder:
        net(torch.zeros(1, 2))
        net.eval()
        net(torch.ones(1, 2))
    first, second = overview(recorder)
    assert (first.name, second.name) == ("0", "test/0")
    assert first.output is not None
    assert second.output is not None
    assert first.output.mean != second.output.mean


@settings(max_examples=50)
@given(st.lists(st.lists(st.floats(-1e3, 1e3), min_size=3, max_size=3), min_size=1, max_size=20))
def test_spread_pools_units_as_if_they_were_one(rows: list[list[float]]) -> None:
    x = torch.tensor(rows, dtype=torch.float64)
    units = Summary("b c -> c")
    spread = Spread.of(units.compute(units.update({}, x)), observations=1)
    assert spread.count == x.numel()
    assert spread.mean == pytest.approx(x.mean().item(), abs=1e-9)
    assert spread.std == pytest.approx(x.std().item(), rel=1e-9, abs=1e-9)
    assert (spread.low, spread.high) == (x.min().item(), x.max().item())
    assert spread.rms == pytest.approx(x.square().mean().sqrt().item(), rel=1e-9, abs=1e-9)
    assert spread.norm == pytest.approx(x.norm().item(), rel=1e-9, abs=1e-9)


def test_spread_of_nothing_finite() -> None:
    summary = Summary("b c -> c")
    spread = Spread.of(summary.compute(summary.update({}, torch.full((2, 3), math.nan))), observations=1)
    assert (spread.count, spread.nonfinite) == (0, 6)
    assert math.isnan(spread.mean)
    assert math.isnan(spread.norm)


class Wrapper(nn.Module):
    """As the decoder of a BART of Hugging Face: it is configured with tied embeddings, and raises if it is asked for them."""

    config = type("Config", (), {"tie_word_embeddings": True})()

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 1)

    def get_input_embeddings(self) -> nn.Module:
        raise NotImplementedError("not handled for Wrapper")

    def forward(self, x: Tensor) -> Any:
        return self.layer(x)


class Unasked(Wrapper):
    """Its configuration cannot be read."""

    @property
    def config(self) -> Any:  # type: ignore[override]
        raise ValueError("no configuration was loaded")


def test_a_net_that_raises_if_it_is_asked_for_its_embeddings_is_judged() -> None:
    recorder = presets.health().modules(net := Wrapper())
    train(net, recorder)
    found = findings(recorder)
    assert found == []
    assert not any("failed" in line for line in found.unexamined)


def test_a_rule_that_fails_on_a_net_is_told_and_stops_no_other() -> None:
    recorder = presets.health().modules(net := Unasked())
    nn.init.constant_(net.layer.weight, math.nan)
    train(net, recorder)
    found = findings(recorder)
    assert found[0].kind == "nonfinite"
    assert [line for line in found.unexamined if "failed" in line] == [
        "what the rule 'untied' looks at: it failed with ValueError: no configuration was loaded"
    ]


class Towers(nn.Module):
    """A net for pictures and texts that is given texts, whose blocks have a part that none of them calls."""

    def __init__(self) -> None:
        super().__init__()
        self.pictures = nn.Sequential(nn.Linear(8, 8), nn.Sequential(nn.Linear(8, 8), nn.ReLU()), nn.Linear(8, 8))
        self.blocks = nn.ModuleList([nn.ModuleDict({"own": nn.Linear(8, 8), "cross": nn.Linear(8, 8)}) for _ in range(3)])
        self.mask = nn.Parameter(torch.zeros(1, 8))
        self.head = nn.Linear(8, 1)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block["own"](x).relu()  # type: ignore[index]
        result: Tensor = self.head(x)
        return result


def test_parts_of_a_net_that_never_ran_are_told_once_and_those_alike_in_blocks_once() -> None:
    recorder = presets.health().modules(net := Towers())
    train(net, recorder)
    first, second = findings(recorder)
    assert (first.severity, first.kind, first.layer) == ("error", "never-ran", "blocks.0.cross")
    assert first.what.endswith("; and so with 2 more like it, to blocks.2.cross")
    assert (second.severity, second.kind, second.layer) == ("warning", "never-ran", "pictures")
    assert second.what.startswith("none of its 3 layers was called: no output was recorded: its module was never called")


def test_a_parameter_of_zeros_that_no_call_uses_is_no_fault() -> None:
    net = Towers()
    net.pictures, net.blocks = nn.Sequential(), nn.ModuleList()
    recorder = presets.health().modules(net)
    train(net, recorder)
    assert findings(recorder) == []


class BertPooler(nn.Linear):
    """Of Hugging Face: what it returns is for a classifier, which this net has not."""


class Read(nn.Module):
    """Reads the hidden states of an encoder, and not what its pooler returns."""

    def __init__(self, pooler: type[nn.Linear]) -> None:
        super().__init__()
        self.layer, self.pooler, self.head = nn.Linear(8, 8), pooler(8, 8), nn.Linear(8, 1)
        self.correction_bias = nn.Parameter(torch.zeros(1, 4), requires_grad=False)  # as of experts

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.layer(x).relu()
        self.pooler(hidden)
        result: Tensor = self.head(hidden)
        return result


def test_a_pooler_that_nobody_reads_is_a_notice_and_another_layer_a_fault() -> None:
    for kind, faults in ((BertPooler, []), (nn.Linear, [("no-gradient", "pooler")])):
        recorder = presets.health().modules(net := Read(kind))
        train(net, recorder)
        found = findings(recorder)
        assert [(one.kind, one.layer) for one in found] == faults
        assert any(one.kind == "no-gradient" for one in found.notices) != bool(faults)


@pytest.mark.parametrize("shape", [(0, 4), (4, 0)])
@pytest.mark.parametrize("trained", [True, False])
def test_a_layer_without_rows_is_judged(shape: tuple[int, int], trained: bool) -> None:
    """As MobileBERT has one if its embeddings are as wide as its layers."""

    class Empty(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer, self.none = nn.Linear(8, 1), nn.Linear(4, 1, bias=False)
            self.none.weight = nn.Parameter(torch.empty(shape), requires_grad=trained)

        def forward(self, x: Tensor) -> Tensor:
            result: Tensor = self.layer(x)
            return result + self.none(x[:, : shape[1]]).sum()

    recorder = presets.health().modules(net := Empty())
    train(net, recorder)
    assert not any("failed" in line for line in findings(recorder).unexamined)


class Shared(nn.Module):
    """One ReLU in places of 6 and 8 channels; of the latter six units are dead."""

    def __init__(self) -> None:
        super().__init__()
        self.narrow, self.wide, self.act, self.head = nn.Linear(8, 6), nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 1)
        nn.init.constant_(self.wide.bias[:6], -4.0)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.head(self.act(self.wide(self.act(self.narrow(x)))))
        return result


def test_dead_units_are_found_in_each_place_of_a_layer() -> None:
    recorder = presets.health().modules(net := Shared())
    train(net, recorder)
    faults = findings(recorder)
    (fault,) = [*faults, *faults.notices]  # a notice if the loss falls all the same
    assert (fault.kind, fault.layer) == ("dead-units", "act:8 channels")
    assert fault.what == "6 of 8 units are dead: they were never active"


class Experts(nn.Module):
    """Sends each sample to one of three experts, of which the last gets none; its second head is frozen and not called."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))
        self.head, self.unused = nn.Linear(8, 1), nn.Linear(8, 1).requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        choice = (x[:, 0] > 0).long()
        mixed = torch.empty_like(x)
        for number, expert in enumerate(self.experts):
            mixed[choice == number] = expert(x[choice == number]).tanh()
        result: Tensor = self.head(mixed)
        return result


def test_an_expert_without_samples_and_a_frozen_layer_without_calls_are_notices() -> None:
    recorder = presets.health().modules(net := Experts())
    train(net, recorder)
    faults = findings(recorder)
    assert faults == []
    told = {notice.layer: notice.what for notice in faults.notices}
    assert told["experts.2"] == "all it was given was empty, without samples"
    assert told["unused"].startswith("no output was recorded: its module was never called")
    assert [layer.name for layer in overview(recorder) if layer.empty] == ["experts.2"]


class OneShare(nn.Module):
    """Weighs what it reads by a softmax over one score, so that the layer of scores has no effect."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.score, self.head = nn.Linear(8, 8), nn.Linear(8, 1), nn.Linear(8, 1)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.layer(x).relu()
        result: Tensor = self.head(hidden * self.score(hidden).softmax(-1))
        return result


def test_a_layer_without_gradients_is_told_as_that_alone() -> None:
    recorder = presets.health().modules(net := OneShare())
    torch.manual_seed(3)
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-3)  # whose weight decay changes it by one in 100,000
    with recorder:
        for _ in range(20):
            x = torch.randn(32, 8)
            optimizer.zero_grad()
            loss = (net(x) - x.sum(1, keepdim=True)).square().mean()
            loss.backward()
            optimizer.step()
            recorder.push("loss", loss)
    assert [(one.kind, one.layer) for one in findings(recorder)] == [("no-gradient", "score")]


def test_gradients_that_are_zero_at_the_end_do_not_explode() -> None:
    assert [*gradients_by_depth({"0": 1.0, "1": 1.0, "2": 0.5, "3": 0.0})] == []
    (one,) = gradients_by_depth({"0": 1e9, "1": 1.0, "2": 0.0, "3": 1e-3})
    assert one.what == "gradients explode on their way back: their norm is 1.0e-03 at 3 and 1.0e+09 here"


def test_nothing_of_a_net_changes_if_it_is_judged_or_planned() -> None:
    parametrised = nn.utils.parametrizations.spectral_norm
    net = nn.Sequential(parametrised(nn.Linear(8, 8)), nn.LayerNorm(8), nn.ReLU(), parametrised(nn.Linear(8, 1)))
    recorder = presets.health().modules(net)
    train(net, recorder)
    before = {name: value.clone() for name, value in net.state_dict().items()}
    findings(recorder)
    findings(recorder, example=torch.randn(8, 8))
    recorder.plan(torch.randn(8, 8))
    assert all(torch.equal(value, before[name]) for name, value in net.state_dict().items())


class Detector(nn.Module):
    """Has two heads, of which that of classes begins at the logarithm of how rare these are."""

    def __init__(self, activated: bool, bias: float) -> None:
        super().__init__()
        self.classes = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 4), *[nn.Tanh()] * activated)
        self.boxes = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 1))
        nn.init.constant_(self.classes[2].bias, bias)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.boxes(x) + self.classes(x).sigmoid().mean(1, keepdim=True)
        return result


@pytest.mark.parametrize(("activated", "bias"), [(False, -12.0), (True, -12.0), (False, 12.0)])
def test_the_head_of_a_detector_may_begin_with_a_bias_far_below_zero(activated: bool, bias: float) -> None:
    recorder = presets.health().modules(net := Detector(activated, bias))
    train(net, recorder)
    kinds = [(one.kind, one.layer) for one in initial_sizes(evidence(recorder))]
    assert kinds == [("large-initial-bias", "classes.2")] * (activated or bias > 0)


@pytest.mark.parametrize("held", ["sparse", "mapping"])
def test_inputs_of_other_forms_are_recorded_as_far_as_they_can_be_without_a_warning(held: str) -> None:
    class Fixed(dict):  # type: ignore[type-arg]
        """Takes only tensors with as many rows as it has, as a TensorDict does."""

        def __setitem__(self, key: str, value: Tensor) -> None:
            if key in self and len(value) != len(self[key]):
                raise RuntimeError("batch dimension mismatch")
            super().__setitem__(key, value)

    class Reads(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(8, 1)

        def forward(self, x: Tensor, held: Any) -> Tensor:
            result: Tensor = self.layer(held @ x if isinstance(held, Tensor) else x + held["more"])
            return result

    recorder = presets.health().modules(net := Reads())
    optimizer = torch.optim.Adam(net.parameters())
    example = (torch.randn(6, 8), torch.eye(6).to_sparse() if held == "sparse" else Fixed(more=torch.randn(6, 8)))
    for _ in range(12):
        net(*example).square().mean().backward()
        optimizer.step()
    rows = recorder["inputs"].peek()
    second = "1" if held == "sparse" else "1.more"
    assert {name: tuple(row.shape) for name, row in rows.items()} == {"0": (12, 76), second: (12, 76)}
    if held == "sparse":
        unexamined = findings(recorder, example=example).unexamined
        assert any("holds a sparse or nested tensor, of which no samples can be taken" in line for line in unexamined)


class CallsItself(nn.Module):
    """Runs no hooks, as modules of GPyTorch."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(8))

    def __call__(self, x: Tensor) -> Tensor:
        return x * self.scale


def test_a_module_with_a_call_of_its_own_may_have_run_without_its_hooks() -> None:
    net = nn.Sequential(CallsItself(), nn.Linear(8, 1))
    recorder = Recorder(output=ForwardMonitor(Summary())).modules(net)
    net(torch.ones(2, 8)).sum().backward()
    (row,) = (row for row in recorder.report().rows if row.name == "output/0")
    assert row.reason.endswith("has a __call__ of its own that runs no hooks, as classes of GPyTorch have")
    assert findings(recorder) == []


@pytest.mark.parametrize("rate", [0.05, 0.0])
def test_weights_that_no_optimizer_changes_are_a_fault_unless_the_loss_falls(rate: float) -> None:
    torch.manual_seed(0)
    recorder = presets.health().modules(net := nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 1)))
    x = torch.randn(64, 8)
    for _ in range(20):
        net.zero_grad()
        loss = (net(x) - x.sum(1, keepdim=True)).square().mean()
        loss.backward()
        recorder.push("loss", loss)
        recorder.step()
        for parameter in net.parameters():
            parameter.data -= rate * parameter.grad  # type: ignore[operator]
    faults = findings(recorder)
    assert ("frozen" in {one.kind for one in faults}) == (rate == 0)
    assert ("frozen" in {one.kind for one in faults.notices}) == (rate > 0)


@pytest.mark.parametrize("exclude", [nn.ReLU, None])
@pytest.mark.parametrize("activated", [True, False])
def test_layers_between_which_something_was_not_selected_are_not_taken_for_linear(exclude: Any, activated: bool) -> None:
    net = nn.Sequential(nn.Linear(8, 16), nn.ReLU() if activated else nn.Dropout(0.1), nn.Linear(16, 1))
    recorder = presets.health().modules(net, exclude=exclude)
    train(net, recorder)
    assert ("linear-net" in {one.kind for one in findings(recorder)}) != activated
