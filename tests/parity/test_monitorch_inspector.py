"""The inspector of monitorch beside ours: attaching, epochs, activity, names, and what is pushed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from parity_monitorch import Kept, network, run_epoch, same_lines, watch_both
from torch import nn

from recorders import Inspector, Timeline, lenses
from recorders.errors import TargetError
from recorders.watch.charts import ChartView
from recorders.watch.replay import replay
from recorders.watch.visualizers import MatplotlibVisualizer, TextVisualizer

theirs, inspectors = pytest.importorskip("monitorch.lens"), pytest.importorskip("monitorch.inspector")

SEEDS = range(3)


def nested() -> nn.Sequential:
    inner = nn.Sequential(nn.Linear(2, 2), nn.Sequential(nn.Linear(2, 2), nn.ReLU()))
    return nn.Sequential(nn.Linear(2, 2), inner, nn.ReLU())


def both(net: nn.Module, *args: Any, **kwargs: Any) -> tuple[Any, Kept, Inspector]:
    """Both inspectors on one network, with a lens on the norms of outputs."""
    kept = Kept()
    there = inspectors.PyTorchInspector(
        [theirs.LossMetrics(metrics=["accuracy"]), theirs.OutputNorm()], visualizer=kept, module=net
    )
    return there, kept, Inspector(net, [lenses.LossMetrics(), lenses.OutputNorm()])


@pytest.mark.row("PyTorchInspector(lenses, module, visualizer)", "LossMetrics", "push_loss, push_metric")
@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("separate", [True, False])
@pytest.mark.parametrize("running", [True, False])
def test_losses_and_metrics(seed: int, separate: bool, running: bool) -> None:
    """Theirs ignores `metrics_range`."""
    torch.manual_seed(seed)
    options: Any = {
        "metrics": ["accuracy"],
        "separate_loss_and_metrics": separate,
        "loss_line": ("mean", "max"),
        "loss_range": "min-max",
    }
    kept = Kept()
    lens = theirs.LossMetrics(**options, metrics_line=("mean", "max"), metrics_range="std")
    there = inspectors.PyTorchInspector([lens], visualizer=kept, module=network())
    here = Inspector(network(), lenses.LossMetrics(**options, metrics_range="std"))
    for epoch in range(3):
        for value in torch.rand(5).tolist():
            for inspector in (there, here):
                inspector.push_loss(value, train=True, running=running)
                inspector.push_loss(value**2, train=False, running=running)
                inspector.push_metric("accuracy", value / 2, running=running)
                inspector.push_metric("speed", 1.0, running=running)
        there.tick_epoch()
        here.tick_epoch()
        rows = here.timeline.at(epoch)
        loss, metrics = ("Loss", "Metrics") if separate else ("Loss & Metrics", "Loss & Metrics")
        mark = "" if separate else " loss"
        for name, of in (
            ("train_loss", f"{loss}/train{mark}"),
            ("val_loss", f"{loss}/eval{mark}"),
            ("accuracy", f"{metrics}/accuracy"),
        ):
            tag = metrics if name == "accuracy" else loss
            lines, bands = (found[epoch + 1][tag][tag] for found in (kept.lines, kept.bands))
            assert (rows[of]["mean"], rows[of]["max"]) == pytest.approx((lines[f"{name} mean"], lines[f"{name} max"]), abs=1e-9)
            if name != "accuracy":
                assert (rows[of]["min"], rows[of]["max"]) == pytest.approx(bands[f"{name} min", f"{name} max"], abs=1e-9)
            else:
                assert not any("accuracy" in part for band in bands for part in band)
        assert lens.loss(train=True) == pytest.approx(here.timeline.series(f"{loss}/train{mark}", "mean")[1][-1], abs=1e-9)
    assert all("speed" not in chart.layers for chart in here.charts)


@pytest.mark.row("train_loss_str, non_train_loss_str", "LossMetrics.loss(train=...)")
def test_names_of_losses() -> None:
    names: Any = {"train_loss_str": "learn", "non_train_loss_str": "test"}
    kept, lens = Kept(), theirs.LossMetrics()
    there = inspectors.PyTorchInspector([lens], visualizer=kept, module=network(), **names)
    here = Inspector(network(), lenses.LossMetrics(), **names)
    for inspector in (there, here):
        inspector.push_loss(2.0, train=True)
        inspector.push_loss(3.0, train=False)
        inspector.tick_epoch()
    assert kept.lines[1]["Loss"]["Loss"] == {"learn mean": 2.0, "test mean": 3.0}
    assert {name: row["mean"] for name, row in here.timeline.at(0).items()} == {"Loss/learn": 2.0, "Loss/test": 3.0}
    assert lens.loss(train=False) == here.timeline.series("Loss/test", "mean")[1][-1]
    assert [chart.layers for chart in Inspector(lenses=[], train_loss_str="a").charts] == []


@pytest.mark.row("attach, detach")
def test_attaching_and_detaching() -> None:
    """Theirs leaves the hook on the loss module, moves to another network by itself, and counts epochs anew when detached."""
    net, other, loss_fn = network(), network(), nn.MSELoss()
    there = inspectors.PyTorchInspector([theirs.LossMetrics(loss_fn=loss_fn), theirs.OutputNorm()], visualizer=Kept())
    here = Inspector(lenses=[lenses.LossMetrics(loss_fn), lenses.OutputNorm()])
    for inspector in (there, here):
        assert inspector.attach(net) is inspector
    run_epoch(net, torch.optim.SGD(net.parameters(), lr=0.1), [torch.ones(2, 1, 4, 4, dtype=torch.float64)])
    loss_fn(torch.zeros(2), torch.ones(2))
    for inspector in (there, here):
        inspector.tick_epoch()
        inspector.detach()
    assert not any(module._forward_hooks for module in net.modules())
    assert len(loss_fn._forward_hooks) == 1
    assert (there.state.counter, here.epoch) == (0, 1)
    with pytest.raises(AssertionError, match="must be attached"):
        there.detach()
    here.detach()
    there.attach(net).attach(other)
    with pytest.raises(TargetError, match=r"detach\(\) first"):
        here.attach(net).attach(other)


@pytest.mark.row("tick_epoch, tick", "iter, range")
@pytest.mark.parametrize("seed", SEEDS)
def test_epochs(seed: int) -> None:
    """Ours are numbered from 0, theirs from 1; `tick_epoch(n)` is epoch n here, and the number of the next one there."""
    torch.manual_seed(seed)
    net = nn.Sequential(nn.ReLU())
    there, kept, here = both(net)
    for _ in zip(there.iter("ab"), here.iter("ab"), strict=True):
        net(torch.randn(3, 4, dtype=torch.float64))
        there.push_loss(1.0, train=True)
    for number, _ in zip(here.range(10, 14, 2), there.range(10, 14, 2), strict=True):
        net(torch.full((1, 4), float(number)))
        there.push_loss(1.0, train=True)
    assert here.timeline.ticks() == [0, 1, 10, 12]
    assert list(kept.lines) == [1, 2, 3, 4]
    found = [here.timeline.at(tick)["Output Norm/0"]["mean"] for tick in here.timeline.ticks()]
    assert found == pytest.approx([tags["Output Norm"]["0"]["mean"] for tags in kept.lines.values()], abs=1e-9)
    for inspector in (there, here):
        net(torch.ones(1, 4))
        inspector.push_loss(1.0, train=True)
        inspector.tick_epoch(20)
    assert (list(kept.lines)[-1], there.state.counter) == (5, 20)
    assert (here.timeline.ticks()[-1], here.epoch) == (20, 21)


@pytest.mark.row("is_active_fn")
@pytest.mark.parametrize("seed", SEEDS)
def test_activity(seed: int) -> None:
    """Every second epoch is the second, fourth, ... there, and the first, third, ... here; a function is given those numbers.

    What is pushed in epochs that are not active counts in the next active one there, and in its own epoch here.
    """
    torch.manual_seed(seed)
    net = nn.Sequential(nn.ReLU()).double()
    lens: Any = [theirs.LossMetrics(), theirs.OutputNorm()]
    kept = Kept()
    there = inspectors.PyTorchInspector(lens, visualizer=kept, module=net, is_active_fn=2)
    seconds = Inspector(net, [lenses.OutputNorm()], active=lambda epoch: (epoch + 1) % 2 == 0)
    firsts = Inspector(net, [lenses.OutputNorm()], active=2)
    for epoch in range(4):
        net(torch.randn(3, 4, dtype=torch.float64))
        for inspector in (there, seconds, firsts):
            inspector.push_loss(float(epoch), train=True)
            inspector.tick_epoch()
    assert list(kept.lines) == [2, 4]
    same_lines(kept, seconds, "Output Norm")
    assert firsts.timeline.series("Output Norm/0", "mean")[0] == [0, 2]
    assert [kept.lines[epoch]["Loss"]["Loss"]["train_loss mean"] for epoch in (2, 4)] == [0.5, 2.5]
    assert seconds.timeline.series("Loss/train", "mean") == ([0, 1, 2, 3], [0.0, 1.0, 2.0, 3.0])


@pytest.mark.row("depth of the inspector")
@pytest.mark.parametrize(
    ("depth", "wanted", "above"), [(0, {""}, set()), (1, {"0", "1", "2"}, set()), (2, {"1.0", "1.1"}, {"0", "2"})]
)
def test_depth(depth: int, wanted: set[str], above: set[str]) -> None:
    """Both count the network as 0. All leaves are None here and -1 there; leaves above the level are watched here only."""
    there, _ = inspectors.PyTorchInspector._traverse_module_inclusion_tree(nested(), depth)
    assert {name for _, name in there} == wanted
    here = Inspector(nested(), lenses.OutputGradientGeometry(skip_activation=False), depth=depth).charts[0].layers
    assert {"" if name == "(Sequential)" else name for name in here} == wanted | above


@pytest.mark.row("module_name_prefix")
@pytest.mark.parametrize("prefix", [".", "/"])
def test_names_of_layers(prefix: str) -> None:
    kept, net = Kept(), nested()
    there = inspectors.PyTorchInspector([theirs.OutputActivation()], visualizer=kept, module=net, module_name_prefix=prefix)
    net(torch.ones(3, 2))
    there.tick_epoch()
    here = Inspector(net, lenses.OutputActivation()).charts[0].layers
    assert [name.replace(prefix, ".") for name in kept.lines[1]["Output Activations"]] == list(here) == ["1.1.1", "2"]


class Shown:
    """Keeps what it is shown at each tick."""

    def __init__(self) -> None:
        self.shown: list[tuple[int, dict[str, dict[str, dict[str, float]]]]] = []

    def show(self, tick: int, charts: list[ChartView]) -> None:
        self.shown.append((tick, {chart.title: chart.at(tick) for chart in charts}))


@pytest.mark.row("RecorderVisualizer, PlayerVisualizer")
@pytest.mark.parametrize("seed", SEEDS)
def test_a_recorded_training_is_played_back(seed: int, tmp_path: Path) -> None:
    visualizers = pytest.importorskip("monitorch.visualizer.RecorderPlayerVisualizer")
    torch.manual_seed(seed)
    net, live, file = network(), Shown(), str(tmp_path / "theirs.pkl")
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    there = inspectors.PyTorchInspector([theirs.OutputNorm()], visualizer=visualizers.RecorderVisualizer(file), module=net)
    here = Inspector(net, lenses.OutputNorm(), show=live, timeline=tmp_path / "run.db")
    for _ in range(3):
        run_epoch(net, optimizer, list(torch.randn(2, 4, 1, 4, 4, dtype=torch.float64)))
        there.tick_epoch()
        here.tick_epoch()
    here.timeline.close()
    there.visualizer.close()
    kept, again = Kept(), Shown()
    visualizers.PlayerVisualizer(file, kept).playback()
    with Timeline(tmp_path / "run.db") as timeline:
        replay(timeline, again)
        same_lines(kept, Inspector(lenses=[], timeline=timeline), "Output Norm")
    assert again.shown == live.shown
    assert len(again.shown) == 3


@pytest.mark.row("MatplotlibVisualizer, PrintVisualizer")
@pytest.mark.parametrize("seed", SEEDS)
def test_figures_and_prints_show_the_same_numbers(seed: int, capsys: pytest.CaptureFixture[str]) -> None:
    drawn = pytest.importorskip("monitorch.visualizer.MatplotlibVisualizer").MatplotlibVisualizer()
    plt = pytest.importorskip("matplotlib.pyplot")
    plt.switch_backend("agg")
    kept, our = watch_both(seed, lambda _: [theirs.OutputNorm()], [lenses.OutputNorm()])
    for tag, attributes in kept.tags.items():
        drawn.register_tags(tag, attributes)
    for epoch, tags in kept.lines.items():
        drawn.plot_numerical_values(epoch, "Output Norm", tags["Output Norm"], kept.bands[epoch]["Output Norm"])
        drawn.plot_relations(epoch, "Mean Output Norm Comparison", tags["Mean Output Norm Comparison"])
    their_lines = [line.get_ydata() for axes in drawn.show_fig().axes for line in axes.get_lines() if line.get_label() == "mean"]
    mine = MatplotlibVisualizer()
    mine.show(2, our.charts)
    figures = mine.figures
    our_lines = [line.get_ydata() for axes in figures["Output Norm"].axes for line in axes.get_lines()]
    assert len(our_lines) == len(their_lines) == 2
    for found, wanted in zip(our_lines, their_lines, strict=True):
        assert found == pytest.approx(list(wanted), abs=1e-9)
    (comparison,) = figures["Mean Output Norm Comparison"].axes
    assert len(comparison.collections) == 2
    plt.close("all")

    capsys.readouterr()
    TextVisualizer().show(2, our.charts)
    rows = [line.split() for line in capsys.readouterr().out.splitlines()]
    printed = pytest.importorskip("monitorch.visualizer.PrintVisualizer").PrintVisualizer()
    printed.plot_numerical_values(3, "Output Norm", kept.lines[3]["Output Norm"], kept.bands[3]["Output Norm"])
    text = capsys.readouterr().out
    for layer, values in kept.lines[3]["Output Norm"].items():
        assert repr(values["mean"]) in text
        assert any(row[:2] == [layer, f"{values['mean']:.4g}"] for row in rows)
