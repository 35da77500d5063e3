"""What the docstrings of lenses and visualizers say of charts, keys and units is what a training writes."""

from __future__ import annotations

import inspect
import math
import re
from collections.abc import Callable, Iterator

import pytest
import torch
from docstrings import said
from torch import Tensor, nn

from recorders import Inspector, lenses, visualizers
from recorders.watch.charts import ChartView
from recorders.watch.lenses import Chart, Lens
from recorders.watch.timeline import Timeline
from recorders.watch.visualizers.movers import Movers

LENSES: list[Callable[..., Lens]] = [
    thing
    for thing in (getattr(lenses, name) for name in lenses.__all__)
    if inspect.isfunction(thing) and inspect.signature(thing).return_annotation == "Lens"
]
EVERY_VALUE = re.compile(r"With `(?:loss_fn_)?inplace=False`[^.]*")
"""What docstrings say of keys that need every value."""


class Net(nn.Module):
    """Something for each lens to watch."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)
        self.layers = nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8), nn.ReLU(), nn.Dropout(), nn.Tanh(), nn.Linear(8, 1))

    def forward(self, x: Tensor) -> Tensor:
        outputs: Tensor = self.layers(x + self.attention(x, x, x)[0])
        return outputs


def written(lens: Lens, running: bool) -> dict[str, set[str]]:
    """By chart, the keys that a training writes into the timeline."""
    torch.manual_seed(0)
    net = Net()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    with Inspector(net, lens, optimizer=optimizer) as inspector:
        for _ in inspector.range(1):
            for step in range(4):
                x = torch.randn(4, 3, 8)
                if step == 3 and lens.name == "NonFinite":
                    x[0, 0, 0] = math.nan
                optimizer.zero_grad()
                loss = net(x).square().mean()
                loss.backward()
                optimizer.step()
                inspector.push_loss(loss, running=running)
                inspector.push_metric("size", 1.0, running=running)
    keys: dict[str, set[str]] = {chart.title: set() for chart in lens.charts}
    for name, row in inspector.timeline.at(0).items():
        title = name.partition("/")[0]
        if title in keys:  # an inspector has losses of its own
            keys[title] |= row.keys()
    return keys


def charts_of(lens: Callable[..., Lens]) -> Iterator[tuple[str, str]]:
    """Each chart that the docstring names, and what it says of it."""
    before = ""
    for entry in re.split(r"^ {4}(?! )", said(lens, "Charts"), flags=re.MULTILINE)[1:]:
        titles, _, says = re.sub(r"\s+", " ", entry).partition(": ")
        if says.startswith("the same keys"):
            says = f"{before} {says}"
        else:
            before = says
        for title in titles.split(", "):
            yield title, says


@pytest.mark.parametrize("lens", LENSES, ids=lambda lens: lens.__name__)
def test_docstrings_of_lenses_name_the_charts_the_keys_and_the_units_of_a_run(lens: Callable[..., Lens]) -> None:
    told, options = dict(charts_of(lens)), inspect.signature(lens).parameters.keys()
    lists = {"inplace", "loss_fn_inplace"} & options
    for running in (True, False) if lists else (True,):
        made = lens(**dict.fromkeys(lists, running))
        keys = {title: keys_of(says, running) - options for title, says in told.items()}
        assert keys == written(made, running)
    for chart in made.charts:
        says = told[chart.title]
        assert chart.unit.partition(",")[0] in says, chart.title
        assert re.search("[Oo]ne value (of each )?a ", says), chart.title


def keys_of(says: str, running: bool) -> set[str]:
    """The keys that are named; if only running statistics are kept, without those that need every value."""
    return set(re.findall(r"`(\w+)`", EVERY_VALUE.sub("", says) if running else says))


@pytest.mark.parametrize("board", [visualizers.TensorBoardVisualizer, visualizers.WandbVisualizer])
def test_docstrings_of_boards_name_every_number_that_they_write(board: type) -> None:
    timeline = Timeline()
    statistics = ("mean", "std", "min", "max", "median", "Q1", "Q3", "nonfinite")
    timeline.append(0, {f"Norm/{layer}": dict.fromkeys(statistics, 1.0) for layer in "ab"})
    chart = Chart("Norm", ("norm",), lines=("mean", "median"), ranges=("std", "min-max", "Q1-Q3"))
    numbers = Movers(1).numbers(0, [ChartView(chart, timeline, ("a", "b"))])
    names = {name.rpartition("/")[2] for name in numbers} - {*chart.lines}  # type: ignore[misc]
    assert names == set(re.findall(r'"([^"]+)"', (board.__doc__ or "").partition("\n\n")[2].partition("\n\n")[0]))
