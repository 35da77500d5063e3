"""A user's own gatherer, preprocessor, lens and visualizer for monitorch beside the same written here; and its numerical tools."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from recorders import Call, Inspector, Monitor
from recorders.watch.charts import ChartView
from recorders.watch.lenses import Chart, Lens, collected, running, statistics
from reducers import Activity, Collect, Geometry, State, Statistic, Summary

gatherer, preprocessor = pytest.importorskip("monitorch.gatherer"), pytest.importorskip("monitorch.preprocessor")
lens, visualizer = pytest.importorskip("monitorch.lens"), pytest.importorskip("monitorch.visualizer")
numerical, inspectors = pytest.importorskip("monitorch.numerical"), pytest.importorskip("monitorch.inspector")

SEEDS = range(3)


class InputGatherer(gatherer.AbstractGatherer):
    """Hands over the input of a module before its forward."""

    def __init__(self, module: nn.Module, preprocessors: list[Any], name: str, inspector_state: Any) -> None:
        super().__init__(inspector_state)
        self.preprocessors, self.name = preprocessors, name
        self.handle = module.register_forward_pre_hook(self)

    @gatherer.AbstractGatherer.requires_active_inspector_state
    def __call__(self, module: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        for one in self.preprocessors:
            one.process_tensor(self.name, inputs[0])

    def detach(self) -> None:
        super().detach()
        self.handle.remove()


class Peaks(preprocessor.AbstractTensorPreprocessor):
    """The largest magnitude of an epoch by layer."""

    def __init__(self) -> None:
        self.peaks: dict[str, float] = {}

    def process_tensor(self, name: str, x: Tensor) -> None:
        self.peaks[name] = max(self.peaks.get(name, 0.0), float(x.detach().abs().max()))

    def reset(self) -> None:
        self.peaks = {}

    def start_sync(self, dst_rank: int = 0) -> None: ...
    def finish_sync(self) -> None: ...

    @property
    def value(self) -> dict[str, float]:
        return self.peaks


class InputPeak(lens.AbstractLens):
    """The peaks of the inputs of linear layers."""

    def __init__(self) -> None:
        self.preprocessor, self.gatherers, self.data = Peaks(), [], {}

    def register_leaf_module(self, module: nn.Module, module_name: str, inspector_state: Any) -> None:
        if isinstance(module, nn.Linear):
            self.gatherers.append(InputGatherer(module, [self.preprocessor], module_name, inspector_state))

    def detach_from_module(self) -> None:
        for one in self.gatherers:
            one.detach()

    def introduce_tags(self, visualizer_: Any) -> None:
        visualizer_.register_tags("Input Peak", visualizer.TagAttributes(False, False, False, visualizer.TagType.NUMERICAL))

    def finalize_epoch(self) -> None:
        self.data = OrderedDict((name, {"peak": value}) for name, value in self.preprocessor.value.items())

    def vizualize(self, visualizer_: Any, epoch: int) -> None:
        visualizer_.plot_numerical_values(epoch, "Input Peak", self.data)

    def reset_epoch(self) -> None:
        self.preprocessor.reset()

    def start_sync(self, dst_rank: int) -> None: ...
    def finish_sync(self) -> None: ...


class Listing(visualizer.AbstractVisualizer):
    """A list of what was shown."""

    def __init__(self) -> None:
        self.shown: list[tuple[int, str, str, float]] = []

    def register_tags(self, main_tag: str, tag_attr: Any) -> None: ...

    def plot_numerical_values(self, epoch: int, main_tag: str, values_dict: Any, ranges_dict: Any = None) -> None:
        self.shown += [(epoch - 1, main_tag, layer, values["peak"]) for layer, values in values_dict.items()]

    def plot_probabilities(self, *args: Any) -> None: ...
    def plot_relations(self, *args: Any) -> None: ...


class InputMonitor(Monitor):
    """The gatherer, here: where it looks, and what it takes of what it sees there."""

    sites = ("forward_pre",)

    def operands(self, call: Call) -> tuple[Any, ...]:
        return (call.args[0],)


@dataclass(frozen=True)
class Peak(Statistic):
    """The preprocessor, here: a statistic of one tensor, and how two join."""

    def lift(self, x: Tensor, axes: tuple[int, ...]) -> State:
        return {"peak": x.abs().amax(dim=axes)}

    def join(self, a: State, b: State) -> State:
        return {"peak": torch.maximum(a["peak"], b["peak"])}

    def read(self, state: State) -> Tensor:
        return state["peak"]


class OurListing:
    """The visualizer, here: one method."""

    def __init__(self) -> None:
        self.shown: list[tuple[int, str, str, float]] = []

    def show(self, tick: int, charts: Sequence[ChartView]) -> None:
        for chart in charts:
            self.shown += [(tick, chart.title, layer, row["mean"]) for layer, row in chart.at(tick).items()]


@pytest.mark.row("AbstractGatherer, AbstractPreprocessor, AbstractLens, AbstractVisualizer")
@pytest.mark.parametrize("seed", SEEDS)
def test_what_users_write_themselves(seed: int) -> None:
    torch.manual_seed(seed)
    net = nn.Sequential(nn.Linear(4, 3), nn.ReLU(), nn.Linear(3, 2)).double()
    listed, mine = Listing(), OurListing()
    there = inspectors.PyTorchInspector([InputPeak()], visualizer=listed, module=net)
    chart = Chart("Input Peak", ("input",), ranges=None)
    ours = Lens("InputPeak", (chart,), {"input": InputMonitor(Peak())}, where=lambda name, module: isinstance(module, nn.Linear))
    here = Inspector(net, ours, show=mine)
    for _ in range(3):
        for size in (5, 5, 2):
            net(torch.randn(size, 4, dtype=torch.float64))
        there.tick_epoch()
        here.tick_epoch()
    assert mine.shown == listed.shown
    assert len(mine.shown) == 6
    for inspector in (there, here):
        inspector.detach()
    assert not any(module._forward_pre_hooks for module in net.modules())


@pytest.mark.row("monitorch.numerical")
@pytest.mark.parametrize("seed", SEEDS)
def test_running_values_and_their_points_and_ranges(seed: int) -> None:
    torch.manual_seed(seed)
    values, reducer = torch.randn(20, dtype=torch.float64), Summary(correction=0)
    first, second = numerical.RunningMeanVar(), numerical.RunningMeanVar()
    ours: list[State] = [{}, {}]
    for value in values[:12]:
        first.append(value)
        ours[0] = reducer.update(ours[0], value)
    for value in values[12:]:
        second.update(float(value))
        ours[1] = reducer.update(ours[1], value)
    first.merge(second)
    merged: Any = reducer.compute(reducer.merge(*ours))
    theirs = [len(first), first.mean, first.var, first.min_, first.max_]
    assert [float(merged[name]) for name in ("count", "mean", "var", "min", "max")] == pytest.approx(theirs, abs=1e-9)

    row = statistics(running().compute(running().update({}, values)))  # type: ignore[arg-type]
    every = statistics(collected().compute(collected().update({}, values)))  # type: ignore[arg-type]
    for name in ("mean", "std", "min", "max"):
        assert float(row[name]) == pytest.approx(numerical.extract_point(first, name), abs=1e-9)
    assert float(every["Q1"]) == pytest.approx(numerical.extract_point(values.tolist(), "Q1"), abs=1e-9)
    mean, std = float(row["mean"]), float(row["std"])
    assert (mean - std, mean + std) == pytest.approx(numerical.extract_range(first, "std"), abs=1e-9)


@pytest.mark.row("monitorch.numerical")
@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("shape", [(6, 5), (6, 5, 3), (6, 5, 3, 2)], ids=["2d", "3d", "4d"])
def test_geometry_and_activation_of_tensors(seed: int, shape: tuple[int, ...]) -> None:
    torch.manual_seed(seed)
    theirs = numerical.GeometryComputation(normalize=True, correlation=True, inplace=False, eps=0.0)
    ours, state = Geometry(Collect(), normalize=True), {}
    for _ in range(4):
        x = torch.randn(shape, dtype=torch.float64)
        theirs.update(x)
        state = ours.update(state, x)
    found: Any = ours.compute(state)
    norms, products = theirs.value
    assert (found["norm"].tolist(), found["correlation"].tolist()) == (
        pytest.approx(norms, abs=1e-9),
        pytest.approx(products[1:], abs=1e-9),
    )
    active = x > 0.5
    for batch, pattern in ((True, "b c ... -> c"), (False, "c ... -> c")):
        rates = Activity(pattern).compute(Activity(pattern).update({}, active))["rate"]  # type: ignore[index]
        wanted = numerical.reduce_activation_to_activation_rates(active, batch=batch)
        assert rates.tolist() == pytest.approx(wanted.double().tolist(), abs=1e-6)  # float32 there
