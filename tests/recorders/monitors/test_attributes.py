"""Monitors of attributes: their values, and how a forward changes them."""

from __future__ import annotations

import contextlib
import gc
import threading
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

from recorders import DifferenceMonitor, ForwardMonitor, RecordingWarning, StateMonitor, TargetError
from reducers import Collect, Count, Last, Sum


class Cell(nn.Module):
    """Adds its input to a trace, in place or not; starts from None where told to."""

    def __init__(self, start: Tensor | None, inplace: bool = True) -> None:
        super().__init__()
        self.trace, self.inplace, self.count = start, inplace, 0
        self.inner = nn.Module()
        self.inner.rate = 0.5

    def forward(self, x: Tensor, fail: bool = False) -> None:
        self.count += 1
        if fail:
            raise ValueError("the user's own")
        if self.trace is None:
            self.trace = x.clone()
        elif self.inplace:
            self.trace += x
        else:
            self.trace = self.trace + x


def test_attributes_are_read_after_the_forward_or_before_it() -> None:
    cell = Cell(torch.zeros(2))
    after = StateMonitor(Collect(), "trace", cell)
    before = StateMonitor(Collect(), "trace", cell, as_prehook=True)
    for _ in range(2):
        cell(torch.ones(2))
    assert after.peek().tolist() == [1, 1, 2, 2]
    assert before.peek().tolist() == [0, 0, 1, 1]


def test_nested_and_numeric_attributes() -> None:
    cell = Cell(None)
    rate = StateMonitor(Last(), "inner.rate", cell)
    count = StateMonitor(Collect(), "count", cell)
    for _ in range(3):
        cell(torch.ones(1))
    assert rate.peek() == 0.5
    assert count.peek().tolist() == [1, 2, 3]


def test_several_attributes_have_states_of_their_own_or_meet_in_a_callable() -> None:
    cell = Cell(torch.zeros(2))
    apart = StateMonitor(Last(), ("trace", "count"), cell)
    together = StateMonitor(Last(), ["trace", "count"], cell, op_=lambda trace, count: trace / count)
    cell(torch.full((2,), 3.0))
    cell(torch.full((2,), 3.0))
    assert {name: value.tolist() for name, value in apart.peek().items()} == {"trace": [6.0, 6.0], "count": 2}
    assert together.peek().tolist() == [3.0, 3.0]


def test_none_is_not_recorded_and_is_no_error() -> None:
    cell = Cell(None)
    monitor = StateMonitor(Collect(), "trace", cell, as_prehook=True)
    cell(torch.ones(1))
    cell(torch.ones(1))
    assert monitor.peek().tolist() == [1.0]


@pytest.mark.parametrize("inplace", [True, False])
def test_difference_of_buffers_changed_in_place_or_replaced(inplace: bool) -> None:
    cell = Cell(torch.zeros(2), inplace)
    monitor = DifferenceMonitor(Collect(), "trace", cell)
    cell(torch.tensor([1.0, 2.0]))
    cell(torch.tensor([10.0, 20.0]))
    assert monitor.peek().tolist() == [1.0, 2.0, 10.0, 20.0]


def test_none_on_one_side_counts_as_zeros_on_both_is_left_out() -> None:
    cell = Cell(None)
    first = DifferenceMonitor(Collect(), "trace", cell)
    cell(torch.tensor([5.0]))
    assert first.peek().tolist() == [5.0]

    class Forgets(nn.Module):
        trace: Tensor | None = torch.tensor([3.0])

        def forward(self) -> None:
            self.trace = None

    forgetful = Forgets()
    second = DifferenceMonitor(Collect(), "trace", forgetful)
    forgetful()
    forgetful()
    assert second.peek().tolist() == [-3.0]
    assert second.counts["operand was None"] == 1


def test_operands_are_after_and_before() -> None:
    cell = Cell(torch.tensor([2.0]))
    ratio = DifferenceMonitor(Last(), "trace", cell, op_=lambda after, before: after / before)
    mapped = DifferenceMonitor(Last(), "trace", cell, map_=lambda after, before: (before,))
    filtered = DifferenceMonitor(Last(), "trace", cell, filter_=lambda after, before: bool(before > 2))
    cell(torch.tensor([4.0]))
    assert (ratio.peek().item(), mapped.peek().item(), filtered.peek()) == (3.0, 2.0, None)
    cell(torch.tensor([6.0]))
    assert (ratio.peek().item(), mapped.peek().item(), filtered.peek().item()) == (2.0, 6.0, 6.0)


def test_after_a_forward_that_raised_the_next_call_records_correctly() -> None:
    cell = Cell(torch.tensor([0.0]))
    monitor = DifferenceMonitor(Collect(), "trace", cell)
    with pytest.raises(ValueError, match="the user's own"):
        cell(torch.ones(1), fail=True)
    cell(torch.tensor([7.0]))
    assert monitor.peek().tolist() == [7.0]


class Stop(BaseException):
    """Passes by what waits for exceptions, as KeyboardInterrupt does."""


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt, Stop])
def test_an_interrupted_forward_retains_nothing_and_the_next_call_is_recorded(
    error: type[BaseException], monkeypatch: pytest.MonkeyPatch
) -> None:
    kept: list[StorageWeakRef] = []

    class Interrupted(nn.Module):
        trace = torch.zeros(1)
        fail = True

        def forward(self, depth: int) -> None:
            if depth:
                self(depth - 1)
            elif self.fail:
                raise error
            self.trace = self.trace + 1

    def clone(tensor: Tensor) -> Tensor:
        copy = original(tensor)
        kept.append(StorageWeakRef(copy.untyped_storage()))
        return copy

    net, original = Interrupted(), Tensor.clone
    monitors = [DifferenceMonitor(Collect(), "trace", net), DifferenceMonitor(Count(), "trace", net)]
    monkeypatch.setattr(Tensor, "clone", clone)
    gc.disable()
    try:
        for _ in range(20):
            with pytest.raises(error):
                net(2)
            assert all(storage.expired() for storage in kept)
    finally:
        gc.enable()
        monkeypatch.undo()
    assert len(kept) == 20 * 3 * 2
    net.fail = False
    net(2)
    assert monitors[0].peek().tolist() == [1.0, 2.0, 3.0]
    assert monitors[1].samples == 3


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
def test_an_inner_call_that_fails_early_leaves_the_outer_one_alone(error: type[BaseException]) -> None:
    class Recovering(nn.Module):
        total = torch.zeros(1)

        def forward(self, depth: int) -> None:
            if depth:
                with contextlib.suppress(error):
                    self(depth - 1)
            self.total = self.total + 1

    def refuse(module: nn.Module, args: tuple[int]) -> None:
        if args[0] == 0:
            raise error

    net = Recovering()
    net.register_forward_pre_hook(refuse)
    monitor = DifferenceMonitor(Collect(), "total", net)
    net(2)
    assert monitor.peek().tolist() == [1.0, 2.0]


def test_a_value_before_that_cannot_be_read_is_not_taken_for_zeros() -> None:
    class Moody(nn.Module):
        calm = True

        @property
        def mood(self) -> Tensor:
            if not self.calm:
                raise RuntimeError("not today")
            return torch.ones(1)

        def forward(self) -> None:
            self.calm = True

    net = Moody()
    monitor = DifferenceMonitor(Collect(), "mood", net)
    net.calm = False
    with pytest.warns(RecordingWarning, match="not today"):
        net()
    net()
    assert monitor.peek().tolist() == [0.0]


def test_a_module_that_calls_itself_keeps_its_levels_apart() -> None:
    class Recursive(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.total = torch.zeros(1)

        def forward(self, depth: int) -> None:
            self.total += 1
            if depth:
                self(depth - 1)

    net = Recursive()
    monitor = DifferenceMonitor(Collect(), "total", net)
    net(2)
    assert monitor.peek().tolist() == [1.0, 2.0, 3.0]


def test_threads_have_stacks_of_their_own() -> None:
    class Steps(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.values = threading.local()

        @property
        def value(self) -> Tensor:
            return getattr(self.values, "value", torch.zeros(1))

        def forward(self, amount: float) -> None:
            self.values.value = self.value + amount

    net = Steps()
    monitor = DifferenceMonitor(Sum(), "value", net)
    threads = [threading.Thread(target=lambda a=amount: [net(a) for _ in range(200)]) for amount in (1.0, 2.0, 3.0, 4.0)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert monitor.peek() == 200 * 10.0


@pytest.mark.parametrize("kind", [StateMonitor, DifferenceMonitor])
def test_a_missing_attribute_is_an_error_that_lists_what_is_there(kind: type[StateMonitor]) -> None:
    with pytest.raises(
        TargetError, match=r"Cell has no attribute 'tarce'; did you mean 'trace'\? it has \[.*'trace'.*such as None"
    ):
        kind(Last(), "tarce", Cell(None))
    with pytest.raises(TargetError, match="name of an attribute"):
        kind(Last(), "")


def test_an_attribute_that_vanishes_is_left_out_and_said() -> None:
    cell = Cell(torch.zeros(1))
    monitor = StateMonitor(Last(), "inner.rate", cell)
    del cell.inner.rate
    with pytest.warns(RecordingWarning, match="has no attribute 'inner.rate'"):
        cell(torch.ones(1))
    assert monitor.peek() is None


def test_a_parametrized_attribute_is_refused_because_reading_it_changes_the_model() -> None:
    layer = nn.utils.parametrizations.spectral_norm(nn.Linear(4, 4))
    before = {name: value.clone() for name, value in layer.state_dict().items()}
    for kind in (StateMonitor, DifferenceMonitor):
        with pytest.raises(TargetError, match=r"put a ForwardMonitor on the module '0.parametrizations.weight' instead"):
            kind(Last(), "0.weight", nn.Sequential(layer))
    assert all(torch.equal(value, before[name]) for name, value in layer.state_dict().items())
    monitor = ForwardMonitor(Last(), layer.parametrizations.weight)
    layer(torch.ones(1, 4))
    assert monitor.samples == 1
    assert monitor.peek().shape == (4, 4)


def test_a_module_without_output_called_while_an_exception_is_handled_is_recorded() -> None:
    class Counting(nn.Module):
        count = torch.zeros(1)

        def forward(self) -> None:
            self.count = self.count + 1

    net = Counting()
    monitor = DifferenceMonitor(Last(), "count", net)
    try:
        raise ValueError
    except ValueError:
        net()
    assert monitor.peek().tolist() == [1.0]


def test_a_property_that_raises_does_not_break_the_call() -> None:
    class Moody(nn.Module):
        calm = True

        @property
        def mood(self) -> Tensor:
            if not self.calm:
                raise RuntimeError("not today")
            return torch.ones(1)

        def forward(self, x: Tensor) -> Tensor:
            return x

    net = Moody()
    monitors = [StateMonitor(Last(), "mood", net), DifferenceMonitor(Last(), "mood", net)]
    net.calm = False
    with pytest.warns(RecordingWarning, match="not today"):
        net(torch.ones(1))
    assert [monitor.samples for monitor in monitors] == [0, 0]


def test_numpy_attributes_are_taken_as_tensors() -> None:
    layer = nn.Identity()
    layer.scale, layer.table, layer.names = np.float32(0.5), np.arange(3), np.array([object()])
    for attr, expected in (("scale", 0.5), ("table", [0, 1, 2])):
        monitor = StateMonitor(Last(), attr, layer)
        layer(None)
        assert monitor.peek().tolist() == expected
        monitor.deregister()
    StateMonitor(Last(), "names", layer)
    with pytest.warns(RecordingWarning, match="no tensor to record in ndarray"):
        layer(None)


class Nested(nn.Module):
    """Changes tensors within containers in place, and adds or removes some."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        pair = torch.zeros(2), torch.ones(2)
        self.held: Any = {"tuple": pair, "list": [*pair], "dict": {"a": pair[0], "b": {"c": pair[1]}}}[kind]
        self.kind = kind

    def forward(self, x: Tensor) -> Tensor:
        first = self.held["a"] if self.kind == "dict" else self.held[0]
        first.add_(x)
        return x


@pytest.mark.parametrize("kind", ["tuple", "list", "dict"])
@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
def test_nested_attributes_are_subtracted_leaf_by_leaf(kind: str, compiled: bool, fresh_compiler: None) -> None:
    net = Nested(kind)
    plain = DifferenceMonitor(Collect(), "held", net)
    pick = (lambda a, b: a["a"] - b["a"]) if kind == "dict" else (lambda a, b: a[0] - b[0])
    picked = DifferenceMonitor(Collect(), "held", net, op_=pick)
    call = torch.compile(nn.Sequential(net), backend="aot_eager") if compiled else net
    for value in (1.0, 2.0):
        call(torch.full((2,), value))
    first, second = ("a", "b.c") if kind == "dict" else ("0", "1")
    assert {path: result.tolist() for path, result in plain.peek().items()} == {first: [1, 1, 2, 2], second: [0, 0, 0, 0]}
    assert picked.peek().tolist() == [1, 1, 2, 2]


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
def test_an_attribute_of_another_shape_has_no_difference_and_ends_no_compilation(compiled: bool, fresh_compiler: None) -> None:
    class Keeps(nn.Module):
        last = torch.zeros(1, 2)

        def forward(self, x: Tensor) -> Tensor:
            self.last = x
            return x * 2

    net = Keeps()
    monitor = DifferenceMonitor(Count(), "last", net)
    call = torch.compile(nn.Sequential(net), backend="aot_eager", fullgraph=True) if compiled else net
    with pytest.warns(RecordingWarning, match="could not be read" if compiled else "has another shape than before"):
        for rows in (3, 3, 4, 4, 5):
            assert torch.equal(call(torch.ones(rows, 2)), torch.full((rows, 2), 2.0))
    assert (monitor.samples, monitor.counts["errors"], int(monitor.peek())) == (3, 2, 6 + 6 + 8)


def test_leaves_that_come_or_go_count_as_zeros() -> None:
    class Moves(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.held: dict[str, Any] = {"old": torch.ones(2), "none": None}

        def forward(self) -> None:
            self.held = {"new": torch.full((2,), 3.0), "none": torch.ones(1)}

    net = Moves()
    monitor = DifferenceMonitor(Last(), "held", net)
    net()
    assert {path: result.tolist() for path, result in monitor.peek().items()} == {"old": [-1, -1], "new": [3, 3], "none": [1]}


def test_a_difference_without_a_tensor_is_an_error_that_says_so() -> None:
    layer = nn.Identity()
    layer.held = ("a", None)
    DifferenceMonitor(Last(), "held", layer)
    with pytest.warns(RecordingWarning, match="no tensor to record in tuple"):
        layer(torch.ones(1))


def test_a_difference_is_of_one_attribute() -> None:
    with pytest.raises(TargetError, match="make one monitor for each"):
        DifferenceMonitor(Last(), ("a", "b"))  # type: ignore[arg-type]


@pytest.mark.parametrize("dtype", [torch.bool, torch.uint8, torch.int8])
def test_differences_of_booleans_and_small_integers_do_not_wrap(dtype: torch.dtype) -> None:
    layer = nn.Identity()
    layer.spikes = torch.tensor([0, 1, 1]).to(dtype)
    monitor = DifferenceMonitor(Last(), "spikes", layer)
    layer.register_forward_hook(
        lambda module, args, output: setattr(module, "spikes", torch.tensor([1, 0, 1]).to(dtype)), prepend=True
    )
    layer(torch.ones(1))
    assert monitor.peek().tolist() == [1, -1, 0]
