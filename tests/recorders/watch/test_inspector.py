"""Inspector: attaches, ticks, pushes and detaches, and never disturbs the training."""

from __future__ import annotations

import copy
import gc
import itertools
import math
import weakref
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from recorders.errors import LensError, RecordingWarning, SelectionError, TargetError, TickError
from recorders.monitors.forward import ForwardMonitor
from recorders.monitors.parameters import ParameterMonitor
from recorders.watch.charts import Chart, ChartView
from recorders.watch.inspector import Inspector
from recorders.watch.lenses import Lens, LossMetrics, OutputGradientGeometry, running
from recorders.watch.timeline import Timeline
from reducers import Count, Mean

NORM, CORRELATION = "Output Gradient Norm", "Output Gradient Correlation"


class Seen:
    """A visualizer that remembers what it was shown."""

    def __init__(self) -> None:
        self.shown: list[tuple[int, dict[str, tuple[str, ...]]]] = []

    def show(self, tick: int, charts: Sequence[ChartView]) -> None:
        self.shown.append((tick, {chart.title: chart.layers for chart in charts}))


def small_net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Sequential(nn.Linear(8, 6), nn.Tanh()), nn.Linear(6, 2))


def step(net: nn.Module, batch: int = 8) -> Tensor:
    loss: Tensor = net(torch.randn(batch, 4)).square().mean()
    loss.backward()  # type: ignore[no-untyped-call]
    return loss.detach()


def hooks(*modules: nn.Module) -> int:
    return sum(len(module._forward_hooks) + len(module._forward_pre_hooks) for net in modules for module in net.modules())


def gradients(net: nn.Sequential, x: Tensor) -> dict[str, Tensor]:
    """The gradients of the outputs of the linear layers, by autograd alone."""
    first = net[0](x)
    second = net[2][0](net[1](first))  # type: ignore[index]
    third = net[3](net[2][1](second))  # type: ignore[index]
    found = torch.autograd.grad(third.square().mean(), [first, second, third])
    return dict(zip(("0", "2.0", "3"), found, strict=True))


def test_norms_and_correlations_are_those_of_autograd() -> None:
    net = small_net()
    batches = [torch.randn(8, 4) for _ in range(3)]
    wanted = [gradients(net, x) for x in batches]
    inspector = Inspector(net, OutputGradientGeometry(inplace=False, line_aggregation="median"))
    for x in batches:
        net(x).square().mean().backward()
    inspector.tick_epoch()
    for layer in ("0", "2.0", "3"):
        norms = torch.tensor([float(one[layer].norm()) for one in wanted])
        found = inspector.timeline.at(0)[f"{NORM}/{layer}"]
        assert found["mean"] == pytest.approx(norms.mean().item(), rel=1e-5)
        assert found["median"] == pytest.approx(norms.median().item(), rel=1e-5)
        assert (found["min"], found["max"]) == pytest.approx((norms.min().item(), norms.max().item()), rel=1e-5)
        pairs = itertools.pairwise(wanted)
        cosines = [torch.cosine_similarity(a[layer].ravel(), b[layer].ravel(), dim=0).item() for a, b in pairs]
        assert inspector.timeline.at(0)[f"{CORRELATION}/{layer}"]["mean"] == pytest.approx(sum(cosines) / 2, abs=1e-5)


def test_layers_are_in_network_order_in_every_epoch() -> None:
    """monitorch turns the order round at every epoch."""
    net, seen = small_net(), Seen()
    inspector = Inspector(net, OutputGradientGeometry(), show=seen)
    for _ in range(3):
        step(net)
        inspector.tick_epoch()
    assert [shown[NORM] for _, shown in seen.shown] == [("0", "2.0", "3")] * 3
    assert [tick for tick, _ in seen.shown] == [0, 1, 2]


class Skipping(nn.Module):
    """`sleeper` runs only when it is told to."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.sleeper, self.last = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 2)
        self.awake = False

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        return self.last(self.sleeper(x) if self.awake else x)  # type: ignore[no-any-return]


def test_a_layer_that_never_ran_has_its_place_and_no_values() -> None:
    """monitorch raises KeyError at the tick."""
    net, seen = Skipping(), Seen()
    inspector = Inspector(net, OutputGradientGeometry(), show=seen)
    for epoch in range(3):
        net.awake = epoch == 1
        step(net)
        inspector.tick_epoch()
    assert [shown[NORM] for _, shown in seen.shown] == [("first", "sleeper", "last")] * 3
    assert inspector.charts[0].line("sleeper", "mean")[0] == [1]
    assert inspector.charts[0].line("last", "mean")[0] == [0, 1, 2]


def test_an_epoch_in_which_nothing_ran_is_an_empty_tick() -> None:
    seen = Seen()
    inspector = Inspector(small_net(), OutputGradientGeometry(), show=seen)
    inspector.tick_epoch()
    assert inspector.timeline.at(0) == {}
    assert seen.shown == []


def test_epochs_do_not_mix() -> None:
    inspector = Inspector(lenses=LossMetrics())
    for values in ([1.0, 3.0], [10.0]):
        for value in values:
            inspector.push_loss(value)
        inspector.tick_epoch()
    assert inspector.timeline.series("Loss/train", "mean") == ([0, 1], [2.0, 10.0])
    assert inspector.timeline.series("Loss/train", "std") == ([0, 1], [1.0, 0.0])
    assert inspector.timeline.series("Loss/train", "count") == ([0, 1], [2.0, 1.0])


def test_losses_and_metrics_are_kept_running_or_whole() -> None:
    inspector = Inspector(lenses=[])
    for value in (1.0, 2.0, 9.0):
        inspector.push_loss(torch.tensor(value, requires_grad=True))
        inspector.push_loss(value, train=False, running=False)
        inspector.push_metric("accuracy", value / 10, running=False)
    inspector.tick_epoch()
    row = inspector.timeline.at(0)
    assert row["Loss/train"]["mean"] == row["Loss/eval"]["mean"] == 4.0
    assert "median" not in row["Loss/train"]
    assert (row["Loss/eval"]["median"], row["Loss/eval"]["Q1"], row["Loss/eval"]["Q3"]) == (2.0, 1.5, 5.5)
    assert row["Metrics/accuracy"]["max"] == pytest.approx(0.9)
    assert [(chart.title, chart.layers) for chart in inspector.charts] == [("Loss", ("train", "eval")), ("Metrics", ("accuracy",))]


def test_a_loss_that_is_nan_is_counted() -> None:
    inspector = Inspector(lenses=[])
    for value in (1.0, math.nan, 3.0):
        inspector.push_loss(value)
    inspector.tick_epoch()
    assert inspector.timeline.at(0)["Loss/train"] == {"mean": 2, "std": 1, "min": 1, "max": 3, "count": 2, "nonfinite": 1}


def test_one_epoch_keeps_a_value_in_one_way() -> None:
    inspector = Inspector(lenses=[])
    inspector.push_metric("accuracy", 0.5)
    with pytest.raises(LensError, match="'accuracy' was pushed with running=True"):
        inspector.push_metric("accuracy", 0.5, running=False)
    inspector.tick_epoch()
    inspector.push_metric("accuracy", 0.5, running=False)
    inspector.tick_epoch()
    assert inspector.timeline.statistics("Metrics/accuracy")[-1] == "Q3"


def test_pushing_does_not_read_the_value() -> None:
    """A meta tensor has no value to read: whatever waits for the device would fail here."""
    inspector = Inspector(lenses=[])
    inspector.push_loss(torch.ones((), device="meta"))
    inspector.push_loss(2.0)
    inspector.tick_epoch()
    assert inspector.timeline.at(0)["Loss/train"]["count"] == 1


def test_what_cannot_be_recorded_warns_and_the_training_goes_on() -> None:
    inspector = Inspector(lenses=[])
    with pytest.warns(RecordingWarning, match="CallMonitor"):
        inspector.push_metric("accuracy", "high")  # type: ignore[arg-type]
    inspector.tick_epoch()


def test_the_loss_module_is_watched_and_let_go() -> None:
    """monitorch leaves its hook on the loss module when it is detached."""
    net, loss_fn = small_net(), nn.MSELoss()
    inspector = Inspector(net, LossMetrics(loss_fn, loss_range="min-max"))
    for target in (0.0, 1.0):
        loss_fn(torch.zeros(3), torch.full((3,), target))
    with torch.no_grad():
        loss_fn(torch.zeros(3), torch.full((3,), 2.0))
    inspector.tick_epoch()
    row = inspector.timeline.at(0)
    assert (row["Loss/train"]["mean"], row["Loss/eval"]["mean"]) == (0.5, 4.0)
    inspector.detach()
    assert hooks(net, loss_fn) == 0
    loss_fn(torch.zeros(3), torch.ones(3))
    inspector.tick_epoch()
    assert inspector.timeline.at(1) == {}


def test_a_copied_loss_module_pushes_nothing_and_a_lost_inspector_is_freed() -> None:
    net, loss_fn = small_net(), nn.MSELoss()
    inspector = Inspector(net, LossMetrics(loss_fn))
    copy.deepcopy(loss_fn)(torch.zeros(3), torch.ones(3))
    inspector.tick_epoch()
    assert inspector.timeline.at(0) == {}
    gone = weakref.ref(inspector)
    del inspector
    gc.collect()
    assert gone() is None
    loss_fn(torch.zeros(3), torch.ones(3))


def test_attaching_and_detaching() -> None:
    net, other = small_net(), small_net()
    inspector = Inspector(
        lenses=[OutputGradientGeometry(), OutputGradientGeometry(normalize_by_size=True, compute_correlation=False)]
    )
    assert not inspector.attached
    assert inspector.attach(net) is inspector
    count = hooks(net)
    inspector.attach(net)
    assert hooks(net) == count > 0
    with pytest.raises(TargetError, match=r"detach\(\) first"):
        inspector.attach(other)
    step(net)
    assert inspector.detach().detach() is inspector
    assert hooks(net) == 0
    inspector.tick_epoch()  # what was recorded before is not lost
    assert inspector.timeline.statistics(f"{NORM}/0")[0] == "mean"
    step(net)
    inspector.attach(other)
    step(other)
    inspector.tick_epoch()
    assert inspector.timeline.series(f"{NORM}/3", "count") == ([0, 1], [1.0, 1.0])


def test_as_a_context_it_detaches() -> None:
    net = small_net()
    with pytest.raises(KeyboardInterrupt), Inspector(net, OutputGradientGeometry()):
        raise KeyboardInterrupt
    assert hooks(net) == 0


def test_what_is_no_network_is_refused() -> None:
    with pytest.raises(TargetError, match="function"):
        Inspector(step, OutputGradientGeometry())  # type: ignore[arg-type]


def test_a_lens_that_finds_nothing_leaves_no_hook() -> None:
    net, loss_fn = nn.Sequential(nn.ReLU(), nn.Tanh()), nn.MSELoss()
    inspector = Inspector(lenses=[LossMetrics(loss_fn), OutputGradientGeometry()])
    with pytest.raises(SelectionError):
        inspector.attach(net)
    assert not inspector.attached
    assert hooks(net, loss_fn) == 0


def test_a_network_that_is_forgotten_is_freed() -> None:
    net = small_net()
    inspector = Inspector(net, OutputGradientGeometry())
    gone = weakref.ref(net)
    del net
    gc.collect()
    assert gone() is None
    inspector.tick_epoch()


def test_depth_watches_blocks_in_place_of_their_parts() -> None:
    inspectors = {depth: Inspector(small_net(), OutputGradientGeometry(), depth=depth) for depth in (None, 0, 1, 2)}
    layers = {depth: inspector.charts[0].layers for depth, inspector in inspectors.items()}
    assert layers == {None: ("0", "2.0", "3"), 0: ("(Sequential)",), 1: ("0", "2", "3"), 2: ("0", "2.0", "3")}


def test_outputs_of_several_tensors_are_several_layers() -> None:
    class Two(nn.Module):
        def forward(self, x: Tensor) -> dict[str, Tensor]:
            return {"left": x * 2, "right": x * 3}

    two = Two()
    net = nn.Sequential(nn.Linear(4, 4), two)
    inspector = Inspector(net, OutputGradientGeometry())
    output = net(torch.ones(2, 4))
    (output["left"].sum() + output["right"].sum()).backward()
    assert inspector.charts[0].layers == ("0", "1")
    inspector.tick_epoch()
    assert inspector.charts[0].layers == ("0", "1[left]", "1[right]")
    assert inspector.timeline.at(0)[f"{NORM}/1[left]"]["mean"] == pytest.approx(math.sqrt(8))


def test_epochs_are_numbered_on_their_own_or_as_told() -> None:
    inspector = Inspector(lenses=[])
    inspector.tick_epoch()
    inspector.tick_epoch(10)
    inspector.tick_epoch()
    assert inspector.timeline.ticks() == [0, 10, 11]
    inspector.push_loss(4.0)
    with pytest.raises(TickError, match="tick 10"):
        inspector.tick_epoch(10)
    inspector.tick_epoch(12)  # what was pushed is still there
    assert inspector.timeline.series("Loss/train", "mean") == ([12], [4.0])


def test_a_timeline_is_continued(tmp_path: Path) -> None:
    for wanted in ([0, 1], [0, 1, 2, 3]):
        inspector = Inspector(lenses=[], timeline=tmp_path / "run.db")
        for _ in inspector.iter("ab"):
            inspector.push_loss(1.0)
        assert inspector.timeline.ticks() == wanted
        inspector.timeline.close()


def test_epochs_that_the_timeline_has_are_refused_before_the_first_of_them_runs(tmp_path: Path) -> None:
    with Inspector(lenses=[], timeline=tmp_path / "run.db") as before:
        for _ in before.range(2):
            before.push_loss(1.0)
    inspector, ran = Inspector(lenses=[], timeline=tmp_path / "run.db"), []
    with pytest.raises(TickError, match=r"run.db has epoch 1 already: call resume\(1\).*range\(2, ...\).*another timeline"):
        ran += inspector.range(1, 4)
    assert (ran, inspector.timeline.ticks()) == ([], [0, 1])
    inspector.resume(1)
    assert ([*inspector.range(1, 4)], inspector.timeline.ticks()) == ([1, 2, 3], [0, 1, 2, 3])
    by_step = Inspector(lenses=[])
    by_step.tick(5)
    with pytest.raises(TickError, match="are steps, and cannot be epochs too"):
        next(by_step.range(2))


def test_loops_tick_after_each_body_and_not_after_a_break() -> None:
    inspector = Inspector(lenses=[])
    for epoch in inspector.range(3, 9, 2):
        inspector.push_loss(float(epoch))
        if epoch == 7:
            break
    assert inspector.timeline.series("Loss/train", "mean") == ([3, 5], [3.0, 5.0])
    inspector.tick_epoch()
    assert inspector.timeline.ticks() == [3, 5, 7]


@pytest.mark.parametrize(("active", "wanted"), [(1, [0, 1, 2, 3]), (2, [0, 2]), (lambda epoch: epoch == 3, [3])])
def test_lenses_watch_in_active_epochs_only_and_losses_are_always_kept(active: object, wanted: list[int]) -> None:
    net = small_net()
    inspector = Inspector(net, OutputGradientGeometry(), active=active)  # type: ignore[arg-type]
    for epoch in inspector.range(4):
        assert (hooks(net) > 0) == (epoch in wanted)
        inspector.push_loss(step(net))
    assert inspector.timeline.series(f"{NORM}/0", "mean")[0] == wanted
    assert inspector.timeline.series("Loss/train", "mean")[0] == [0, 1, 2, 3]


def test_a_visualizer_that_fails_warns_once_and_the_others_are_shown() -> None:
    class Broken:
        def show(self, tick: int, charts: Sequence[ChartView]) -> None:
            raise ZeroDivisionError("no paper")

    seen = Seen()
    inspector = Inspector(lenses=[], show=[Broken(), seen])
    inspector.push_loss(1.0)
    with pytest.warns(RecordingWarning, match=r"Broken failed at tick 0: ZeroDivisionError: no paper"):
        inspector.tick_epoch()
    inspector.push_loss(1.0)
    inspector.tick_epoch()  # a second warning would be an error here
    assert [tick for tick, _ in seen.shown] == [0, 1]


def test_own_lenses_show_any_reducer() -> None:
    scale = Chart("Output Scale", of=("out",))
    mean = Chart("Output Mean", of=("mean",), ranges=None)
    lens = Lens("Scale", (scale, mean), {"out": ForwardMonitor(running()), "mean": ForwardMonitor(Mean())})
    net = nn.Sequential(nn.Linear(2, 2), nn.ReLU())
    inspector = Inspector(net, lens)
    output = net(torch.randn(5, 2))
    inspector.tick_epoch()
    row = inspector.timeline.at(0)
    assert row["Output Scale/1"]["mean"] == pytest.approx(output.mean().item(), rel=1e-5)
    assert row["Output Scale/1"]["std"] == pytest.approx(output.std(correction=0).item(), rel=1e-5)
    assert row["Output Mean/1"]["mean"] == pytest.approx(output.mean().item(), rel=1e-5)


def test_the_training_is_not_changed() -> None:
    plain, watched = small_net(), small_net()
    inspector = Inspector(watched, OutputGradientGeometry(inplace=False))
    for net in (plain, watched):
        torch.manual_seed(1)
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        for _ in range(5):
            optimizer.zero_grad()
            step(net)
            optimizer.step()
    inspector.tick_epoch()
    assert all(torch.equal(a, b) for a, b in zip(plain.parameters(), watched.parameters(), strict=True))


def test_lenses_watch_in_the_steps_of_one_clock_across_epochs() -> None:
    net, seen = small_net(), []
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    lens = Lens(
        "Paces",
        (Chart("Every", of=("every",)), Chart("Own", of=("own",)), Chart("Bias", of=("bias",))),
        {
            "every": ForwardMonitor(Count()),
            "own": ForwardMonitor(Count(), steps=[3, 4]),
            "bias": ParameterMonitor(Count(), "bias", when="tick"),
        },
        where=lambda name, module: name == "0",
    )
    inspector = Inspector(net, [lens, OutputGradientGeometry()], optimizer=optimizer, every_step=3)
    for _ in inspector.range(4):
        for _ in range(5):
            seen.append((inspector.clock.step, inspector.clock.micro_batch))
            step(net)
            step(net)
            assert inspector.clock.micro_batch == 1
            optimizer.step()
    assert seen == [(number, 0) for number in range(20)]
    calls = [2 * len(steps) for steps in ([0, 3], [6, 9], [12], [15, 18])]
    rows = [inspector.timeline.at(epoch) for epoch in range(4)]
    out = 8 * 8  # elements of an output of the first layer
    assert [row["Every/0"]["mean"] for row in rows] == [out * number for number in calls]
    assert [row["Own/0"]["mean"] for row in rows if "Own/0" in row] == [out * 4]
    assert [row["Bias/0"]["mean"] for row in rows] == [8] * 4
    assert all(f"{NORM}/0" in row for row in rows)


def test_steps_by_hand_and_resumed_and_an_optimizer_given_later() -> None:
    net = small_net()
    inspector = Inspector(lenses=Lens("Count", (Chart("Seen", of=("out",)),), {"out": ForwardMonitor(Count())}), every_step=2)
    inspector.attach(net)
    for _ in range(3):
        net(torch.ones(1, 4))
        assert inspector.step() is inspector
    inspector.tick_epoch()
    assert inspector.timeline.at(0)["Seen/3"]["mean"] == 2 * 2
    inspector.clock.step = 101
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    before = hooks(net)
    assert inspector.attach(net, optimizer) is inspector
    assert hooks(net) == before + 1
    step(net, 1)
    optimizer.step()
    net.eval()
    assert (inspector.clock.step, inspector.clock.phase) == (102, "eval")
    step(net, 1)
    inspector.tick_epoch()
    assert inspector.timeline.at(1)["Seen in Evaluation/3"]["mean"] == 2
    inspector.detach()
    assert hooks(net) == 0
    optimizer.step()
    assert inspector.clock.step == 103


def test_a_clock_needs_an_optimizer_and_a_pace() -> None:
    with pytest.raises(TypeError, match=r"a clock is attached to a torch\.optim\.Optimizer"):
        Inspector(lenses=[], optimizer=nn.Linear(1, 1))  # type: ignore[arg-type]
    with pytest.raises(LensError, match="every_step=0"):
        Inspector(lenses=[], every_step=0)


def test_a_network_alone_is_watched_by_lenses_that_suit_any() -> None:
    net = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    with Inspector(net) as inspector:
        for _ in inspector.range(2):
            step(net, 1)
            optimizer.step()
    row = inspector.timeline.at(1)
    assert {"Weight Gradient Norm", "Weight Update Ratio", "Nonfinite Outputs", "Nonfinite Gradients"} <= {
        key.partition("/")[0] for key in row
    }


def test_lenses_in_the_place_of_the_network_are_told() -> None:
    with pytest.raises(TargetError, match=r"the network comes first, and this is a list.*write Inspector\(lenses=\.\.\.\)"):
        Inspector([OutputGradientGeometry()])  # type: ignore[arg-type]


def test_arguments_that_make_no_sense_are_refused() -> None:
    with pytest.raises(LensError, match="several charts are called 'Output Gradient Correlation'"):
        Inspector(lenses=[OutputGradientGeometry(), OutputGradientGeometry(normalize_by_size=True)])
    with pytest.raises(LensError, match="takes lenses"):
        Inspector(lenses=[OutputGradientGeometry])  # type: ignore[list-item]
    with pytest.raises(LensError, match="no visualizer 'cinema'; choose from"):
        Inspector(lenses=[], show="cinema")
    with pytest.raises(LensError, match="active=0"):
        Inspector(lenses=[], active=0)
    with pytest.raises(LensError, match="depth=-1"):
        Inspector(lenses=[], depth=-1)


def test_a_given_timeline_is_used() -> None:
    timeline = Timeline()
    assert Inspector(lenses=[], timeline=timeline).timeline is timeline
