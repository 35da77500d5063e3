"""What the lenses on health, distributions, ranks and attention write, beside the same computed by hand with PyTorch."""

from __future__ import annotations

import math
import pickle
from collections.abc import Callable, Iterator
from statistics import median
from typing import Any

import pytest
import torch
from scipy import stats
from torch import Tensor, nn

from recorders import Inspector, findings, lenses
from recorders.errors import LensError, RecordingWarning
from recorders.watch.diagnosis.limits import UPDATE_RANGE
from recorders.watch.lenses.attention import entropies, relative_entropies
from recorders.watch.lenses.distribution import OUTLIER
from recorders.watch.lenses.health import update_ratio
from reducers.core.channels import with_channels

EPOCHS = 3
ALL = (
    lenses.UpdateRatio,
    lenses.DeadUnits,
    lenses.NonFinite,
    lenses.Quantiles,
    lenses.Outliers,
    lenses.EffectiveRank,
    lenses.AttentionEntropy,
    lenses.GradientNoise,
)


class Net(nn.Module):
    """Layers without parameters, without a bias, with units that are dead, and one that only some epochs run."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.conv, self.act, self.flat = nn.Conv2d(1, 4, 3, bias=False), nn.ReLU(), nn.Flatten()
        self.norm, self.last, self.tanh, self.seldom = nn.LayerNorm(16), nn.Linear(16, 5), nn.Tanh(), nn.Linear(5, 5)
        with torch.no_grad():
            self.conv.weight[1] = -self.conv.weight[1].abs()

    def forward(self, x: Tensor, seldom: bool = False) -> Tensor:
        found: Tensor = self.tanh(self.last(self.norm(self.flat(self.act(self.conv(x))))))
        return self.seldom(found) if seldom else found


def batches(epoch: int) -> list[Tensor]:
    torch.manual_seed(epoch + 1)
    return [torch.rand(size, 1, 4, 4) + (0.5 if epoch else 0) for size in (6, 6, 3)]


def train(net: Net, epoch: int, see: Callable[[Net], None] = lambda net: None) -> None:
    """The steps of an epoch; `see` is called before each optimizer step and after it."""
    optimizer = torch.optim.SGD(net.parameters(), lr=0.005)
    for x in batches(epoch):
        optimizer.zero_grad()
        net(x, seldom=epoch == 1).square().sum().backward()
        see(net)
        optimizer.step()
        see(net)


def watched(*chosen: lenses.Lens) -> Inspector:
    net = Net()
    inspector = Inspector(net, chosen)
    for epoch in inspector.range(EPOCHS):
        train(net, epoch)
    return inspector


def seen() -> Iterator[dict[str, list[Tensor]]]:
    """The outputs of each layer in each epoch of the same training, by plain hooks."""
    net, found = Net(), dict[str, list[Tensor]]()

    def after(name: str, output: Tensor) -> None:
        found.setdefault(name, []).append(output.detach().clone())

    for name, layer in net.named_children():
        layer.register_forward_hook(lambda _, __, output, name=name: after(name, output))
    for epoch in range(EPOCHS):
        found = {}
        train(net, epoch)
        yield found


def rows_of(inspector: Inspector, title: str) -> list[dict[str, dict[str, float]]]:
    """The rows of a chart in each epoch, by layer."""
    start = f"{title}/"
    rows = [inspector.timeline.at(epoch) for epoch in range(EPOCHS)]
    return [{name.removeprefix(start): row for name, row in at.items() if name.startswith(start)} for at in rows]


@pytest.mark.parametrize("inplace", [True, False])
def test_update_ratios_are_those_of_each_step(inplace: bool) -> None:
    inspector = watched(lenses.UpdateRatio(inplace=inplace, parameters=("weight", "bias")))
    weights, biases = rows_of(inspector, "Weight Update Ratio"), rows_of(inspector, "Bias Update Ratio")
    assert {*weights[0]} == {"conv", "norm", "last", "seldom"}
    net, kept = Net(), dict[str, list[Tensor]]()

    def see(net: Net) -> None:
        for name, parameter in net.named_parameters():
            kept.setdefault(name, []).append(parameter.detach().clone())

    for epoch in range(EPOCHS):
        kept.clear()
        train(net, epoch, see)
        for name, values in kept.items():
            layer, parameter = name.split(".")
            row = (weights if parameter == "weight" else biases)[epoch][layer]
            ratios = [float((b - a).norm() / a.norm()) for a, b in zip(values[::2], values[1::2], strict=True)]
            finite = [ratio for ratio in ratios if math.isfinite(ratio)]
            assert row["nonfinite"] == len(ratios) - len(finite)
            for statistic, function in (("mean", lambda x: sum(x) / len(x)), ("min", min), ("max", max)):
                assert row[statistic] == pytest.approx(function(finite), rel=1e-5, abs=1e-9)
            assert inplace or row["median"] == pytest.approx(median(finite), rel=1e-5, abs=1e-9)
    assert "conv" not in biases[0]  # it has none
    assert biases[0]["norm"]["nonfinite"] == 1  # its bias begins at zero
    lowest = [point for point in inspector.charts[2].points(0) if point.line == "lowest Weight Update Ratio"]
    assert [point.layer for point in lowest] == ["seldom"]  # it did not run, and SGD leaves it as it is
    assert all(f"{end:.0e}" in inspector.charts[0].unit for end in UPDATE_RANGE)


def test_update_ratios_in_half_precision_do_not_overflow() -> None:
    before = torch.full((100_000,), 300.0, dtype=torch.float16)
    assert float(update_ratio(before + 3, before)) == pytest.approx(0.01, rel=1e-3)


def test_units_are_dead_if_no_batch_of_the_epoch_made_them_active() -> None:
    inspector = watched(lenses.DeadUnits(include=nn.LayerNorm))
    rows, dead_in_one_batch = rows_of(inspector, "Dead Units"), 0
    for epoch, found in enumerate(seen()):
        assert {*rows[epoch]} == {"act", "norm", "tanh"}
        for layer, row in rows[epoch].items():
            active = [(x.abs() > 1e-8).transpose(0, 1).flatten(1).any(dim=1) for x in found[layer]]
            dead = ~torch.stack(active).any(dim=0)
            assert row == {"mean": float(dead.double().mean()), "dead": int(dead.sum()), "units": len(dead)}
            dead_in_one_batch += sum(int((~batch).sum()) for batch in active)
        assert rows[epoch]["act"]["dead"] >= 1
        assert [point.layer for point in inspector.charts[1].points(epoch)] == ["act"]
    assert dead_in_one_batch > 0


def test_dead_units_of_the_last_axis_and_of_which_nothing_was_finite() -> None:
    net = nn.Sequential(nn.ReLU())
    inspector = Inspector(net, lenses.DeadUnits(channel_last=True, record_eval=True))
    x = torch.tensor([1.0, -1.0, -1.0, math.nan]).expand(2, 5, 4)
    net(x)
    net.eval()(torch.tensor([0.0, 0.0, 1.0, math.nan]).expand(2, 5, 4))
    inspector.tick_epoch()
    row = inspector.timeline.at(0)
    assert row["Dead Units/0"] == row["Dead Units in Evaluation/0"] == {"mean": 2 / 3, "dead": 2, "units": 3}


def test_nonfinite_elements_are_counted_and_their_first_observation_named() -> None:
    net = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Identity(), nn.Linear(4, 2))
    inspector = Inspector(net, lenses.NonFinite())
    for epoch in inspector.range(EPOCHS):
        for step in range(3):
            x = torch.ones(5, 3)
            if epoch == 1 and step == 2:
                x[0, 0] = math.inf
                x[1, 1] = math.nan
            net(x).sum().backward()
    outputs, gradients = rows_of(inspector, "Nonfinite Outputs"), rows_of(inspector, "Nonfinite Gradients")
    first, later = rows_of(inspector, "First Nonfinite Output"), rows_of(inspector, "First Nonfinite Gradient")
    assert {layer: row["mean"] for layer, row in outputs[0].items()} == dict.fromkeys("0123", 0)
    assert {layer: row["mean"] for layer, row in gradients[1].items()} == dict.fromkeys("0123", 0)
    assert first[0] == first[2] == later[1] == {}
    bad = ~net[0](torch.tensor([[math.inf, 1.0, 1.0], [1.0, math.nan, 1.0]])).isfinite()
    assert outputs[1]["0"] == {"mean": bad.sum(), "nan": 4, "inf": 4, "share": float(bad.sum()) / 60}
    assert {layer: row["mean"] for layer, row in first[1].items()} == dict.fromkeys("0123", 2)
    across = next(chart for chart in inspector.charts if chart.title == "First Nonfinite Output Of All Layers")
    assert [(point.layer, point.value) for point in across.points(1)] == [("0", 2.0)]
    assert across.points(0) == across.points(2) == []


def test_nonfinite_gradients_are_found_though_outputs_are_finite() -> None:
    net = nn.Sequential(nn.Linear(2, 2), nn.Identity())
    inspector = Inspector(net, lenses.NonFinite())
    for scale in (1.0, math.nan):
        (net(torch.ones(4, 2)) * scale).sum().backward()
    with torch.no_grad():
        net(torch.ones(4, 2))
    inspector.tick_epoch()
    row = inspector.timeline.at(0)
    assert (row["Nonfinite Outputs/0"]["mean"], row["Nonfinite Gradients/0"]["mean"]) == (0, 8)
    assert row["Nonfinite Gradients/0"]["share"] == 0.5
    assert row["First Nonfinite Gradient/0"] == row["First Nonfinite Gradient/1"] == {"mean": 1}


@pytest.mark.parametrize("bits", [5, 9])
def test_quantiles_are_those_of_all_elements_of_the_epoch(bits: int) -> None:
    rows = rows_of(watched(lenses.Quantiles(bits=bits)), "Output Quantiles")
    for epoch, found in enumerate(seen()):
        assert {*rows[epoch]} == {*found}
        assert ("seldom" in found) == (epoch == 1)
        for layer, tensors in found.items():
            ordered = torch.cat([x.flatten() for x in tensors]).sort().values.double()
            for name, share in (("Q1", 0.25), ("median", 0.5), ("Q3", 0.75)):
                wanted = float(ordered[max(math.ceil(share * len(ordered)), 1) - 1])
                assert rows[epoch][layer][name] == pytest.approx(wanted, rel=1 / (2 ** (bits + 1) + 1))
            assert (rows[epoch][layer]["min"], rows[epoch][layer]["max"]) == (float(ordered[0]), float(ordered[-1]))


def test_quantiles_of_outliers_stay_in_bounded_memory() -> None:
    net = nn.Sequential(nn.Identity())
    inspector = Inspector(net, lenses.Quantiles())
    sizes = set()
    for step in range(4):
        net(torch.randn(1000) * 10**step)
        states = inspector.recorders["Quantiles"]["output/0"].states
        sizes.add(sum(x.nbytes for x in states[""].values()))
    assert len(sizes) == 1
    assert sizes.pop() < 140_000


def test_outliers_are_those_of_scipy_over_the_epoch() -> None:
    inspector = watched(lenses.Outliers(threshold=1.5, include=(nn.Linear, nn.LayerNorm, nn.Flatten)))
    peaks, shapes, shares = (rows_of(inspector, title) for title in ("Output Peak", "Output Kurtosis", "Outlier Features"))
    for epoch, found in enumerate(seen()):
        assert {*peaks[epoch]} == {"flat", "norm", "last", *(["seldom"] if epoch == 1 else [])}
        for layer in peaks[epoch]:
            rows = torch.cat(found[layer]).double()
            outliers = (rows.abs() >= 1.5).any(dim=0)
            assert peaks[epoch][layer]["mean"] == pytest.approx(float(rows.abs().max() / rows.std()), rel=1e-5)
            assert shapes[epoch][layer]["mean"] == pytest.approx(stats.kurtosis(rows.flatten().numpy()), rel=1e-5, abs=1e-6)
            wanted = {"mean": float(outliers.double().mean()), "outliers": int(outliers.sum()), "features": rows.shape[1]}
            assert {name: shares[epoch][layer][name] for name in wanted} == wanted
            assert shares[epoch][layer]["largest"] == pytest.approx(float(rows.abs().max()), rel=1e-6)
            assert shares[epoch][layer]["typical"] == pytest.approx(float(rows.square().mean(dim=0).sqrt().median()), rel=1e-5)
    assert shares[0]["norm"]["mean"] > 0


def test_outlier_features_of_channels_and_of_constants() -> None:
    net = nn.Sequential(nn.Identity())
    inspector = Inspector(net, lenses.Outliers(channel_last=False, include=nn.Identity))
    x = torch.zeros(4, 3, 5)
    net(x)
    inspector.tick_epoch()
    x[1, 2, 3] = -OUTLIER
    net(x)
    inspector.tick_epoch()
    before, after = inspector.timeline.at(0), inspector.timeline.at(1)
    assert math.isnan(before["Output Kurtosis/0"]["mean"])
    assert before["Outlier Features/0"]["mean"] == 0
    assert after["Outlier Features/0"] == {"mean": 1 / 3, "outliers": 1, "features": 3, "largest": 6, "typical": 0}
    with pytest.raises(LensError, match="positive magnitude"):
        lenses.Outliers(threshold=0)


def test_effective_ranks_are_those_of_the_covariance_of_the_epoch() -> None:
    inspector = watched(lenses.EffectiveRank(include=(nn.Linear, nn.LayerNorm)))
    rows = rows_of(inspector, "Output Effective Rank")
    for epoch, found in enumerate(seen()):
        assert {*rows[epoch]} == {"norm", "last", *(["seldom"] if epoch == 1 else [])}
        for layer, row in rows[epoch].items():
            x = torch.cat(found[layer]).double()
            shares = torch.linalg.eigvalsh(torch.cov(x.T)).clamp(min=0)
            shares = shares / shares.sum()
            wanted = math.exp(float(torch.special.entr(shares).sum()))
            assert row == pytest.approx({"mean": wanted, "share": wanted / x.shape[1], "rows": 15}, rel=1e-4)


def test_effective_ranks_of_channels_leave_out_what_is_too_wide() -> None:
    net = nn.Sequential(nn.Conv2d(1, 3, 2), nn.Conv2d(3, 9, 1))
    lens = lenses.EffectiveRank(include=nn.Conv2d, channel_last=False, most_features=8)
    inspector = Inspector(net, lens)
    torch.manual_seed(0)
    x = torch.randn(4, 1, 5, 5)
    net(x)
    report = str(inspector.recorders["EffectiveRank"].report())
    inspector.tick_epoch()
    rows = net[0](x).transpose(0, 1).flatten(1).detach().double()
    shares = torch.linalg.eigvalsh(torch.cov(rows)).clamp(min=0)
    wanted = math.exp(float(torch.special.entr(shares / shares.sum()).sum()))
    assert inspector.timeline.at(0)["Output Effective Rank/0"]["mean"] == pytest.approx(wanted, rel=1e-5)
    assert "Output Effective Rank/1" not in inspector.timeline.at(0)
    assert "filtered out" in report
    with pytest.raises(LensError, match="at least 1"):
        lenses.EffectiveRank(most_features=0)


class Attending(nn.Module):
    """Attention that returns its weights, one that does not, and one whose probabilities come from a softmax of its own."""

    def __init__(self, average: bool, dropout: float) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.seen = nn.MultiheadAttention(8, 2, dropout=dropout, batch_first=True)
        self.unseen, self.softmax = nn.MultiheadAttention(8, 2, batch_first=True), nn.Softmax(dim=-1)
        self.layer, self.average = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), average
        self.found: dict[str, list[Tensor]] = {}

    def forward(self, x: Tensor) -> Tensor:
        mixed, weights = self.seen(x, x, x, average_attn_weights=self.average)
        own = self.softmax(x @ x.transpose(1, 2))
        for name, rows in (("seen", weights), ("softmax", own)):
            self.found.setdefault(name, []).append(rows.detach())
        found: Tensor = self.layer(self.unseen(mixed + own @ x, x, x, need_weights=False)[0])
        return found


@pytest.mark.parametrize("normalize", [False, True])
@pytest.mark.parametrize(("average", "dropout"), [(True, 0.0), (False, 0.0), (False, 0.4)])
def test_entropies_are_those_of_each_row_of_attention(normalize: bool, average: bool, dropout: float) -> None:
    net = Attending(average, dropout)
    lens = lenses.AttentionEntropy(include=(nn.MultiheadAttention, nn.Softmax), normalize_by_size=normalize)
    inspector = Inspector(net, lens)
    for epoch in inspector.range(EPOCHS):
        net.found.clear()
        for size in (4, 2):
            net(torch.randn(size, 6, 8, generator=torch.Generator().manual_seed(epoch)))
        recorder = inspector.recorders["AttentionEntropy"]
        assert {part.partition("/")[2] for part, monitor in recorder.items() if monitor.samples} == {"seen", "softmax"}
        assert "if it is asked: need_weights=True, or attn_implementation='eager'" in str(recorder.report())
        wanted = {}
        for name, batch in net.found.items():
            rows = torch.cat([x.flatten(0, -2) for x in batch]).double()
            shares = rows / rows.sum(dim=1, keepdim=True)
            entropy = -(shares * shares.log()).nan_to_num().sum(dim=1)[rows.sum(dim=1) > 0] / (math.log(6) if normalize else 1)
            wanted[name] = entropy, int((rows.sum(dim=1) == 0).sum())
    for name, (entropy, empty) in wanted.items():
        row = inspector.timeline.at(EPOCHS - 1)[f"Attention Entropy/{name}"]
        assert (row["count"], row["nonfinite"]) == (len(entropy), empty)
        assert row["mean"] == pytest.approx(float(entropy.mean()), rel=1e-5)
        assert row["std"] == pytest.approx(float(entropy.std(correction=0)), rel=1e-4)
        assert (row["min"], row["max"]) == pytest.approx((float(entropy.min()), float(entropy.max())), rel=1e-4, abs=1e-6)
    assert inspector.charts[0].layers == ("seen", "unseen", "softmax", "layer.self_attn")


def test_attention_with_one_key_has_no_relative_entropy() -> None:
    assert relative_entropies(torch.ones(3, 1)).isnan().all()
    assert entropies(torch.ones(3, 1)).tolist() == [0, 0, 0]


def test_findings_read_what_the_lenses_on_health_record() -> None:
    net = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 1))
    nn.init.constant_(net[0].bias, -100.0)
    inspector = Inspector(net, [lenses.UpdateRatio(), lenses.DeadUnits(), lenses.NonFinite()])
    optimizer = torch.optim.SGD(net.parameters(), lr=10.0)
    for _ in range(3):
        (net(torch.ones(4, 4)) - 1).square().sum().backward()
        optimizer.step()
    with torch.no_grad():
        net(torch.full((1, 4), math.nan))
    recorders = inspector.recorders
    assert any("8 of 8 units are dead" in finding.what for finding in findings(recorders["DeadUnits"]))
    assert "NaN or infinite" in findings(recorders["NonFinite"])[0].what
    (still,) = findings(recorders["UpdateRatio"])  # of all layers, so it is told once, of the optimizer
    assert still.layer == "optimizer"
    assert still.what.startswith("the weights never changed")


@pytest.mark.parametrize("make", ALL, ids=lambda make: make.__name__)
def test_lenses_are_data_that_pickle_and_read_no_value_in_hooks(make: Any) -> None:
    lens = make()
    again = pickle.loads(pickle.dumps(lens))
    assert again.charts == lens.charts
    assert {name: monitor.reducer for name, monitor in again.monitors.items()} == {n: m.reducer for n, m in lens.monitors.items()}
    meta = torch.ones(4, 6, 6, device="meta")  # it has no values, so whoever looks at them raises
    for name, monitor in lens.monitors.items():
        operands = (meta, meta) if make is lenses.UpdateRatio else ((meta, meta),) if make is lenses.AttentionEntropy else (meta,)
        assert monitor.filter_ is None or monitor.filter_(*operands, module=nn.Linear(1, 1)) is True
        x = monitor.op_(*operands) if monitor.op_ is not None else operands[0]
        reducer = with_channels(monitor.reducer, "... c -> c")
        state = reducer.update(reducer.update({}, x), x)
        assert state, name
        assert {value.device.type for value in state.values()} == {"meta"}


def test_layers_that_do_not_fit_a_lens_cost_one_warning_and_not_the_training() -> None:
    net = nn.Sequential(nn.Identity())
    inspector = Inspector(net, lenses.EffectiveRank(include=nn.Identity))
    net(torch.ones(()))  # a number has no channels, nor has one number for each sample, and they are left out
    net(torch.ones(3))
    with pytest.warns(RecordingWarning, match="complex64"):
        net(torch.ones(3, 2, dtype=torch.complex64))
    net(torch.randn(6, 3, generator=torch.Generator().manual_seed(0)))
    inspector.tick_epoch()
    assert inspector.timeline.at(0)["Output Effective Rank/0"]["rows"] == 6


def test_options_that_cannot_be_are_refused() -> None:
    for option in ({"line_aggregation": "mean"}, {"range_aggregation": "std"}):
        with pytest.raises(LensError, match="is no quantile"):
            lenses.Quantiles(**option)
    with pytest.raises(LensError, match="no charts"):
        lenses.NonFinite(outputs=False, gradients=False)
    for make in (lenses.UpdateRatio, lenses.AttentionEntropy):
        with pytest.raises(LensError, match="'median' needs every value"):
            make(line_aggregation="median")


@pytest.mark.filterwarnings("ignore:.*torch.jit.*is deprecated:DeprecationWarning")
def test_matrices_of_a_part_of_torchscript_are_found_by_a_lens_on_parameters() -> None:
    part = torch.jit.trace(nn.Sequential(nn.Linear(3, 3), nn.ReLU()), torch.ones(2, 3))
    net = nn.Sequential(nn.Linear(3, 3), part)
    inspector = Inspector(net, lenses.ParameterCond())
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    net(torch.ones(2, 3)).sum().backward()
    optimizer.step()
    inspector.tick_epoch()
    assert {name.rpartition("/")[2] for name in inspector.timeline.at(0)} >= {"0", "1.0"}
