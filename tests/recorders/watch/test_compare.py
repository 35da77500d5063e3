"""Comparing two runs: what changed, largest change first."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

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


def test_what_only_one_has_is_listed_and_shapes_that_differ_are_left_out() -> None:
    one = Recorder(a=CallMonitor(Last()), b=CallMonitor(Last())).push("a", torch.zeros(2)).push("b", 1.0)
    other = Recorder(a=CallMonitor(Last()), c=CallMonitor(Last())).push("a", torch.zeros(3)).push("c", 1.0)
    comparison = compare(one, other)
    assert (comparison.changes, comparison.only_first, comparison.only_second) == ((), ("b",), ("c",))
    assert str(comparison) == "no difference\nonly in the first: ['b']\nonly in the second: ['c']"


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
