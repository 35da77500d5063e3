"""Scan: functions of an observation and the result so far, which go on, and do not merge."""

from __future__ import annotations

from functools import reduce
from pathlib import Path
from typing import Any

import laws
import pytest
import torch
from torch import Tensor, nn

from recorders import Cell, ForwardMonitor, MergeError, Recorder, load
from reducers import EmptyStateError, History, Mean, NotMergeableError, Product, ReducerTypeError, Scan

XS = [torch.tensor([1.0, 2.0]), torch.tensor([3.0, 5.0]), torch.tensor([-1.0, 0.0])]


def decayed(x: Tensor, so_far: Tensor | None) -> Tensor:
    return x if so_far is None else 0.5 * so_far + x


SCAN = Scan(decayed)


def test_the_function_gets_the_observation_and_the_result_so_far() -> None:
    assert SCAN.compute(laws.run(SCAN, XS)).tolist() == [0.25 + 1.5 - 1, 0.5 + 2.5]
    assert SCAN.update({}, torch.empty(0)) == {}
    with pytest.raises(EmptyStateError):
        SCAN.compute({})


@pytest.mark.parametrize(
    ("initial", "before"),
    [
        (2.0, [2, 2]),
        (torch.tensor([2.0, 4.0]), [2, 4]),
        ((2, 4), [2, 4]),
        (lambda x: 2 * x, [2, 4]),
        (torch.tensor([2j, 0]), [2j, 0]),
    ],
)
def test_what_comes_before_the_first_observation(initial: Any, before: list[complex]) -> None:
    scan = Scan(lambda x, s: 0 * x + 0.5 * s, initial)
    assert scan.compute(laws.run(scan, XS)).tolist() == [value / 8 for value in before]


def test_scans_are_compared_by_value() -> None:
    one, other = Scan(decayed, torch.tensor([[1.0, 2.0]])), Scan(decayed, ((1.0, 2.0),))
    assert one == other
    assert hash(one) == hash(other)
    assert one != Scan(decayed, 1.0)


def test_results_may_be_mappings_of_any_depth() -> None:
    def running(x: Tensor, s: Any) -> Any:
        n = 1 if s is None else s["n"] + 1
        total = x if s is None else s["of"]["total"] + x
        return {"n": torch.as_tensor(n), "of": {"total": total, "mean": total / n}}

    scan = Scan(running)
    state = laws.run(scan, XS)
    assert set(state) == {"value/n", "value/of/total", "value/of/mean"}
    result: Any = scan.compute(state)
    assert result["n"].item() == 3
    assert result["of"]["mean"].tolist() == [1, pytest.approx(7 / 3)]


def test_several_inputs_come_before_the_result() -> None:
    scan = Scan(lambda x, gate, s: torch.where(gate, x, s), 0.0)
    state = reduce(lambda s, x: scan.update(s, x, x > 2), XS, {})
    assert scan.compute(state).tolist() == [3, 5]


def test_nothing_is_shared_with_what_the_function_returns() -> None:
    scan = Scan(lambda x, s: {"a": x, "b": x})
    laws.pure(scan, XS, merges=False)


def test_merging_says_that_there_is_none() -> None:
    state = laws.run(SCAN, XS)
    assert SCAN.merge(state, {}) is state
    assert SCAN.merge({}, state) is state
    for reducer in (SCAN, Product(scan=SCAN, mean=Mean()), SCAN.premap(torch.abs)):
        made = laws.run(reducer, XS)
        with pytest.raises(NotMergeableError, match=r"Scan\(.*cannot merge two states.*use Fold"):
            reducer.merge(made, made)
    monitors = []
    for _ in range(2):
        monitors.append(ForwardMonitor(SCAN, module := nn.Identity()))
        module(XS[0])
    with pytest.raises(MergeError, match="cannot merge two states"):
        monitors[0].merge(monitors[1])


@pytest.mark.parametrize("wrong", [3.0, {}, {"a/b": XS[0]}, {"a": 1.0}, None], ids=str)
def test_functions_return_tensors(wrong: Any) -> None:
    with pytest.raises(ReducerTypeError, match="must return a tensor, or a mapping"):
        Scan(lambda x, s: wrong).update({}, XS[0])


def test_arguments_are_checked() -> None:
    with pytest.raises(ReducerTypeError, match="needs a function"):
        Scan(3.0)  # type: ignore[arg-type]
    with pytest.raises(ReducerTypeError, match="initial None, a number"):
        Scan(decayed, "zero")  # type: ignore[arg-type]
    with pytest.raises(ReducerTypeError, match="one tensor at a time"):
        SCAN.update({})


def test_past_results_are_kept() -> None:
    cell = Cell(History(SCAN, duration=2.0))
    for x in XS:
        cell.push(x)
    assert cell.dump().tolist() == [[0.75, 3], [3.5, 6]]


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
def test_a_recording_is_saved_and_goes_on(tmp_path: Path, compiled: bool) -> None:
    net = nn.Sequential(nn.Identity())
    recorder = Recorder(ForwardMonitor(SCAN)).modules(net, types=nn.Identity)
    run = torch.compile(net, backend="eager", fullgraph=True) if compiled else net
    for x in XS[:2]:
        run(x)
    recorder.save(tmp_path / "run")
    loaded = load(tmp_path / "run", reducers={"0": SCAN})["0"]
    laws.same_bits(loaded.peek(), recorder["0"].peek())
    assert SCAN.compute(SCAN.update(dict(loaded.states[""]), XS[2])).tolist() == [0.75, 3]
    run(XS[2])
    assert recorder["0"].peek().tolist() == [0.75, 3]
    assert recorder["0"].samples == 3
