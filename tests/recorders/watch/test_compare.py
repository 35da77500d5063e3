"""Comparing two runs: what changed, largest change first."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from recorders import BackwardMonitor, CallMonitor, ForwardMonitor, Recorder, Recording, SelectionError, Timeline, compare
from reducers import Activity, Collect, Count, Last, Product, Summary


def run(seed: int, planted: str | None = None) -> Recording:
    """A short training of a small net; `planted` is a layer whose weights are scaled at the start."""
    torch.manual_seed(0)
    net = nn.Sequential(*(module for _ in range(4) for module in (nn.Linear(16, 16), nn.LayerNorm(16), nn.Tanh())))
    if planted is not None:
        with torch.no_grad():
            net.get_submodule(planted).weight.mul_(4)
    kinds = {"out": ForwardMonitor(Product(all=Summary(), units=Summary("b c -> c"))), "grad": BackwardMonitor(Summary())}
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
    torch.manual_seed(seed)
    with Recorder(**kinds).modules(net, leaves=True) as recorder:
        for _ in range(20):
            optimizer.zero_grad()
            net(torch.randn(64, 16)).square().mean().backward()
            optimizer.step()
    return recorder.snapshot()


@pytest.mark.parametrize("planted", ["0", "3", "6", "9"])
def test_a_planted_change_is_named_first(planted: str) -> None:
    changes = compare(run(1), run(2, planted)).changes
    assert changes[0].name.endswith(f"/{planted}")
    noise = compare(run(1), run(2)).changes
    assert changes[0].score > 2 * noise[0].score


def test_equal_runs_have_no_difference() -> None:
    comparison = compare(run(1), run(1))
    assert all(change.score == 0 for change in comparison.changes)
    assert str(comparison) == "no difference"


def recorded(*values: float, name: str = "x") -> Recorder:
    recorder = Recorder(**{name: CallMonitor(Product(s=Summary(), all=Collect(), n=Count()))})
    for value in values:
        recorder.push(name, value)
    return recorder


def test_sizes_of_changes() -> None:
    changes = {change.statistic: change for change in compare(recorded(1.0, 3.0), recorded(5.0, 7.0)).changes}
    assert changes["s.mean"].score == pytest.approx(4 / math.sqrt(2))  # in standard deviations
    assert changes["s.var"].score == 0
    assert changes["all"].score == pytest.approx(math.log(5))  # of the first element, which changed most
    assert changes["all"].index == (0,)
    assert "s.count" not in changes
    zero = {change.statistic: change.score for change in compare(recorded(0.0, 0.0), recorded(-1.0, 2.0)).changes}
    assert zero["all"] == 1.0
    opposite = {change.statistic: change.score for change in compare(recorded(-1.0), recorded(1.0)).changes}
    assert opposite["all"] == 2.0


def test_nonfinite_values_come_first() -> None:
    first, *_ = compare(recorded(1.0, 2.0), recorded(1.0, float("nan"))).changes
    assert first.score == math.inf
    assert compare(recorded(float("nan")), recorded(float("nan"))).changes[0].score == 0


def wide(*columns: float, **more: float) -> Recorder:
    """What a layer gave, as wide as there are columns, beside other layers."""
    recorder = Recorder(layer=CallMonitor(Summary("b c -> c")), **{name: CallMonitor(Last()) for name in more})
    recorder.push("layer", torch.tensor([columns]))
    for name, value in more.items():
        recorder.push(name, value)
    return recorder


def leaves(**values: Tensor) -> Recorder:
    return Recorder(x=CallMonitor(Last())).push("x", values)


def row(**statistics: float) -> Timeline:
    timeline = Timeline()
    timeline.append(0, {"Loss/train": statistics})
    return timeline


ONE = torch.ones(2)
DIFFERENT: dict[str, tuple[Any, Any, str]] = {
    "a layer that is wider": (
        lambda: wide(1.0, 2.0),
        lambda: wide(1.0, 2.0, 3.0),
        "shapes differ: layer count: shape [2] -> [3]; layer mean: ",
    ),
    "a layer of one run only": (lambda: wide(1.0), lambda: wide(1.0, b=1.0), "only in the second: ['b']"),
    "a layer that recorded nothing in one run": (
        lambda: wide(1.0),
        lambda: Recorder(layer=CallMonitor(Summary("b c -> c"))),
        "only in the first: ['layer']",
    ),
    "a silent layer of one run only": (
        lambda: wide(1.0),
        lambda: Recorder(layer=CallMonitor(Summary("b c -> c")), b=CallMonitor(Last())).push("layer", torch.ones(1, 1)),
        "only in the second: ['b']",
    ),
    "a leaf of one run only": (lambda: leaves(a=ONE, b=ONE), lambda: leaves(a=ONE), "only in the first: ['x[b]']"),
    "a leaf, and none that has a name": (
        lambda: leaves(a=ONE),
        lambda: Recorder(x=CallMonitor(Last())).push("x", ONE),
        "only in the first: ['x[a]']\nonly in the second: ['x']",
    ),
    "a leaf, and nothing recorded": (
        lambda: leaves(a=ONE),
        lambda: Recorder(x=CallMonitor(Last())),
        "only in the first: ['x[a]']",
    ),
    "a statistic that vanished": (
        lambda: Recorder(x=CallMonitor(Product(s=Summary(), n=Last()))).push("x", 1.0),
        lambda: Recorder(x=CallMonitor(Product(s=Summary()))).push("x", 1.0),
        "only in the first: ['x n']",
    ),
    "a count that vanished": (
        lambda: Recorder(x=CallMonitor(Product(s=Last(), n=Count()))).push("x", 1.0),
        lambda: Recorder(x=CallMonitor(Product(s=Last()))).push("x", 1.0),
        "only in the first: ['x n']",
    ),
    "another number of steps": (
        lambda: Recorder(x=CallMonitor(Collect())).push("x", 1.0).push("x", 1.0),
        lambda: Recorder(x=CallMonitor(Collect())).push("x", 1.0),
        "shapes differ: x: shape [2] -> [1]",
    ),
    "a statistic of one timeline only": (
        lambda: row(mean=1.0, std=0.5),
        lambda: row(mean=1.0),
        "only in the first: ['Loss/train std']",
    ),
}


@pytest.mark.parametrize("what", DIFFERENT)
def test_shapes_that_differ_and_what_only_one_run_has_are_differences(what: str) -> None:
    one, other, told = DIFFERENT[what]
    found = compare(one(), other())
    assert told in str(found)
    assert "no difference" not in str(found)
    assert (found.exceeds(0), found.exceeds(1e9), found.is_comparable) == (True, True, False)
    mirrored = compare(other(), one())
    assert mirrored.exceeds(0)
    assert (mirrored.only_second, mirrored.only_first) == (found.only_first, found.only_second)
    for run_of in (one, other):
        assert (str(compare(run_of(), run_of())), compare(run_of(), run_of()).exceeds(0)) == ("no difference", False)


def test_complex_numbers_are_compared() -> None:
    one, other = (leaves(a=torch.tensor([1 + 1j, 2 + part * 1j]).conj()) for part in (1, -1))
    (change,) = compare(one, other).changes
    assert (change.index, change.score) == ((1, 1), 2.0)


def test_leaves_and_bools_are_compared() -> None:
    kinds = [Recorder(x=CallMonitor(Activity("b c -> c"))).push("x", {"p": torch.tensor([[one, 1.0]])}) for one in (0.0, 1.0)]
    first, *_ = compare(*kinds).changes
    assert (first.name, first.statistic, first.index) == ("x[p]", "rate", (0,))


def test_timelines_are_compared_at_a_tick_that_both_have() -> None:
    one, other = Timeline(), Timeline()
    for tick in range(3):
        one.append(tick, {"Loss/train": {"mean": 1.0, "std": 0.5}})
        other.append(tick, {"Loss/train": {"mean": 1.0 + tick, "std": 0.5}} if tick else {})
    assert compare(one, other).changes[0].score == pytest.approx(4.0)
    assert compare(one, other, tick=1).changes[0].score == pytest.approx(2.0)
    assert compare(one, other, tick=0).only_first == ("Loss/train",)
    with pytest.raises(SelectionError, match="have not tick 7 in both"):
        compare(one, other, tick=7)
    with pytest.raises(SelectionError, match="have not a tick in common"):
        compare(one, Timeline())
    with pytest.raises(TypeError, match="two recordings or two timelines"):
        compare(one, recorded(1.0))
