"""A training that an inspector of monitorch and one of ours watch, on two copies of a network, for the tests in tests/parity."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from recorders import Inspector
from recorders.watch.lenses import Lens

__all__ = ["Kept", "network", "same_bands", "same_lines", "watch_both"]

SIZES, EPOCHS = (6, 6, 4, 6), 3
_RANGES = {"std": ("-\u03c3", "+\u03c3"), "min-max": ("min", "max"), "Q1-Q3": ("Q1", "Q3")}


def network() -> nn.Sequential:
    """Every layer with parameters has a weight and a bias, because monitorch leaves out those that lack one."""
    layers = (nn.Conv2d(1, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(16, 8), nn.ReLU(), nn.Dropout(0.0), nn.Linear(8, 2))
    return nn.Sequential(*layers).double()


class Kept:
    """What a visualizer of monitorch was handed: by epoch, tag and layer. They hand over the same dicts in every epoch."""

    def __init__(self) -> None:
        self.tags: dict[str, Any] = {}
        self.lines: dict[int, dict[str, dict[str, dict[str, Any]]]] = {}
        self.bands: dict[int, dict[str, dict[str, dict[tuple[str, str], tuple[float, float]]]]] = {}

    def register_tags(self, main_tag: str, tag_attr: Any) -> None:
        self.tags[main_tag] = tag_attr

    def plot_numerical_values(self, epoch: int, main_tag: str, values_dict: Any, ranges_dict: Any = None) -> None:
        for kept, given in ((self.lines, values_dict), (self.bands, ranges_dict or {})):
            here = kept.setdefault(epoch, {}).setdefault(main_tag, {})  # losses and metrics may come under one tag
            for layer, values in given.items():
                here[layer] = {**here.get(layer, {}), **values}

    def plot_probabilities(self, epoch: int, main_tag: str, values_dict: Any) -> None:
        self.plot_numerical_values(epoch, main_tag, values_dict)

    plot_relations = plot_probabilities


def watch_both(
    seed: int,
    theirs: Callable[[torch.optim.Optimizer], Iterable[Any]],
    ours: Iterable[Lens],
    make: Callable[[], nn.Module] = network,
    shape: tuple[int, ...] = (1, 4, 4),
    before_tick: Callable[[Inspector], None] = lambda inspector: None,
    sizes: Iterable[int] = SIZES,
    epochs: int = EPOCHS,
) -> tuple[Kept, Inspector]:
    """Trains two copies of a network with the same batches, then evaluates, in each epoch; `theirs` is given the optimizer."""
    inspectors = pytest.importorskip("monitorch.inspector")
    torch.manual_seed(seed)
    first = make()
    nets = first, copy.deepcopy(first)
    batches = [[torch.randn(size, *shape, dtype=torch.float64) - 0.3 for size in sizes] for _ in range(epochs)]
    optimizers = [torch.optim.SGD(net.parameters(), lr=0.05) for net in nets]
    kept = Kept()
    their = inspectors.PyTorchInspector(list(theirs(optimizers[0])), visualizer=kept, module=nets[0])
    our = Inspector(nets[1], ours)
    for epoch in batches:
        for net, optimizer in zip(nets, optimizers, strict=True):
            run_epoch(net, optimizer, epoch)
        before_tick(our)
        their.tick_epoch()
        our.tick_epoch()
    return kept, our


def run_epoch(net: nn.Module, optimizer: torch.optim.Optimizer, batches: list[Tensor]) -> None:
    net.train()
    for x in batches:
        optimizer.zero_grad()
        net(x).square().mean().backward()
        optimizer.step()
    net.eval()
    with torch.no_grad():
        net(batches[0])


def same_lines(kept: Kept, our: Inspector, tag: str, title: str | None = None, within: float = 1e-9) -> None:
    """Every line of every layer at every epoch of theirs is in our timeline; their epochs are counted from 1."""
    seen = 0
    for epoch, tags in kept.lines.items():
        rows = our.timeline.at(epoch - 1)
        for layer, values in tags[tag].items():
            row = rows[f"{title or tag}/{layer}"]
            assert {name: row[name] for name in values} == pytest.approx(values, rel=within, abs=within)
            seen += len(values)
    assert seen > 0


def same_bands(kept: Kept, our: Inspector, tag: str, *ranges: str, within: float = 1e-9) -> None:
    """The same for these ranges."""
    view = next(chart for chart in our.charts if chart.title == tag)
    for epoch, tags in kept.bands.items():
        for layer, found in tags[tag].items():
            for name in ranges:
                ticks, low, high = view.band(layer, name)
                at = ticks.index(epoch - 1)
                assert (low[at], high[at]) == pytest.approx(found[_RANGES[name]], rel=within, abs=within)
