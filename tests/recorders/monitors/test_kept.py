"""What monitors keep between two calls, such as a clone for a gradient that will come: never longer than it can be recorded."""

from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from recorders import (
    BackwardInputMonitor,
    BackwardMonitor,
    DifferenceMonitor,
    Monitor,
    PairMonitor,
    ParameterUpdateMonitor,
    Recorder,
)
from reducers import Collect, Last

SIZE = 1_234  # of no other tensor


def tensors() -> list[Tensor]:
    """All tensors of the size that is watched, views left out."""
    gc.collect()
    return [x for x in gc.get_objects() if type(x) is Tensor and x.numel() == SIZE and x._base is None]


class Layer(nn.Module):
    """Holds a buffer that its forward changes, and may raise before it returns."""

    def __init__(self) -> None:
        super().__init__()
        self.raises = False
        self.register_buffer("total", torch.zeros(SIZE))

    def forward(self, x: Tensor) -> Tensor:
        self.total = self.total + x.detach()
        if self.raises:
            raise ArithmeticError
        return x * 2


class Rig:
    """A monitor on a layer, and an observation in two halves: between them it keeps something."""

    def __init__(self, **gates: Any) -> None:
        self.layer, self.other = Layer(), nn.Identity()
        self.recorder = Recorder(self.prototype(gates))
        self.recorder.modules(self.layer)
        self.monitor = self.recorder[0]

    def prototype(self, gates: Any) -> Monitor:
        raise NotImplementedError

    def first(self) -> Any:
        """The first half; returns what the second half needs."""
        return self.layer(torch.ones(SIZE, requires_grad=True))

    def second(self, found: Any) -> None:
        found.sum().backward()


class Output(Rig):
    def prototype(self, gates: Any) -> Monitor:
        return BackwardMonitor(Last(), op_=lambda gradient, output: output, **gates)


class Input(Rig):
    def prototype(self, gates: Any) -> Monitor:
        return BackwardInputMonitor(Last(), op_=lambda gradient, given: given, **gates)

    def first(self) -> Any:
        return self.layer(torch.ones(SIZE, requires_grad=True) * 1)


class LeafInput(Input):
    def __init__(self, **gates: Any) -> None:
        super().__init__(**gates)
        self.leaf = torch.ones(SIZE, requires_grad=True)

    def first(self) -> Any:
        return self.layer(self.leaf)


class LeafOutput(Output):
    """The layer returns a leaf of autograd, as a lookup of a parameter does."""

    def __init__(self, **gates: Any) -> None:
        super().__init__(**gates)
        self.leaf = torch.ones(SIZE, requires_grad=True)
        self.layer.forward = lambda x: self.fail() or x  # type: ignore[method-assign, assignment, func-returns-value]

    def fail(self) -> None:
        if self.layer.raises:
            raise ArithmeticError

    def first(self) -> Any:
        return self.layer(self.leaf)


class Pair(Rig):
    def prototype(self, gates: Any) -> Monitor:
        return PairMonitor(Last(), self.other, op_=lambda mine, other: mine + other, **gates)

    def first(self) -> Any:
        with torch.no_grad():
            self.layer(torch.ones(SIZE))

    def second(self, found: Any) -> None:
        with torch.no_grad():
            self.other(torch.ones(SIZE))


class Difference(Rig):
    def prototype(self, gates: Any) -> Monitor:
        return DifferenceMonitor(Last(), "total", **gates)

    def first(self) -> Any:
        """Both halves are in one call."""
        with torch.no_grad():
            self.layer(torch.ones(SIZE))

    def second(self, found: Any) -> None:
        pass


RIGS: dict[str, type[Rig]] = {
    "gradient of an output": Output,
    "gradient of a leaf that is returned": LeafOutput,
    "gradient of an input": Input,
    "gradient of a leaf that is given": LeafInput,
    "pair": Pair,
    "difference": Difference,
}
GRADIENTS = [name for name in RIGS if name.startswith("gradient")]


@pytest.mark.parametrize("what", RIGS)
def test_an_observation_in_two_halves_is_recorded(what: str) -> None:
    rig = RIGS[what]()
    for _ in range(3):
        rig.second(rig.first())
    assert rig.monitor.samples == 3


def kept_after(what: str, act: Callable[[Rig], Any]) -> int:
    """How many tensors the monitor keeps after the first half, and something else that happens; those of its states left out."""
    rig = RIGS[what]()
    rig.second(rig.first())
    rig.monitor.reset()
    before = len(tensors())
    found = rig.first()
    act(rig)
    rig.monitor.buffer.clear()
    del found
    return len(tensors()) - before


@pytest.mark.slow
@pytest.mark.parametrize("act", ["reset", "clear", "deregister"])
@pytest.mark.parametrize("what", RIGS)
def test_nothing_is_kept_after_a_monitor_is_reset_or_taken_off(what: str, act: str) -> None:
    assert kept_after(what, lambda rig: getattr(rig.monitor, act)()) == 0


@pytest.mark.slow
@pytest.mark.parametrize("what", [name for name in RIGS if name != "difference"])
def test_clones_go_at_once_when_a_monitor_is_taken_off_though_the_graph_stays(what: str) -> None:
    rig = RIGS[what]()
    before = len(tensors())
    found = rig.first()
    without = len(tensors())
    rig.monitor.deregister()
    assert len(tensors()) < without
    del found
    assert len(tensors()) <= before


@pytest.mark.slow
@pytest.mark.parametrize("what", RIGS)
def test_nothing_is_kept_of_a_forward_that_raises(what: str) -> None:
    rig = RIGS[what]()
    rig.second(rig.first())
    rig.layer.raises = True
    counts = []
    for _ in range(4):
        with pytest.raises(ArithmeticError):
            rig.first()
        counts.append(len(tensors()))
    assert len(set(counts)) == 1
    samples = rig.monitor.samples
    rig.second(torch.zeros(1, requires_grad=True))
    assert rig.monitor.samples == samples
    rig.layer.raises = False
    rig.second(rig.first())
    assert rig.monitor.samples == samples + 1


NOT_DUE: dict[str, dict[str, Any]] = {
    "mode": {"train_update": False},
    "grad mode": {"phase": "grad", "train_update": False, "eval_update": False},
    "steps": {"steps": [7]},
    "every_step": {"every_step": 5},
    "every": {"every": 5},
}


# With `every` a gradient keeps a clone: which gradients come, and in which order, is not known when a forward runs.
@pytest.mark.parametrize(("what", "gates"), [(w, g) for w in RIGS for g in NOT_DUE if g != "every" or w not in GRADIENTS])
def test_what_will_not_be_recorded_is_not_cloned(what: str, gates: str, monkeypatch: pytest.MonkeyPatch) -> None:
    rig = RIGS[what](**NOT_DUE[gates])
    rig.second(rig.first())
    rig.recorder.step()
    samples = rig.monitor.samples
    cloned: list[int] = []
    clone = Tensor.clone

    def noting(x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        cloned.append(x.numel())
        return clone(x, *args, **kwargs)

    monkeypatch.setattr(Tensor, "clone", noting)
    for _ in range(2):
        rig.second(rig.first())
    assert SIZE not in cloned
    assert rig.monitor.samples == samples


@pytest.mark.parametrize("condition", [True, False])
@pytest.mark.parametrize("what", ["pair", "difference"])
def test_every_counts_what_passes_the_condition(what: str, condition: bool) -> None:
    rig = RIGS[what](every=2, **({"condition": lambda: True} if condition else {}))
    for _ in range(5):
        rig.second(rig.first())
    assert rig.monitor.samples == 3


class Double(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x * 2


def test_a_leaf_is_seen_as_it_is_in_each_call_and_not_as_it_was_in_the_first() -> None:
    layer, leaf = Double(), torch.ones(1, requires_grad=True)
    monitor = BackwardInputMonitor(Collect(), layer, op_=lambda gradient, given: given)

    def forward(value: float) -> Tensor:
        with torch.no_grad():
            leaf.fill_(value)
        return layer(leaf)

    for value in (1.0, 5.0):
        forward(value).backward()
    for loss in [forward(2.0), forward(3.0)]:
        loss.backward()
    assert monitor.peek().flatten().tolist() == [1.0, 5.0, 2.0, 3.0]


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("kind", [BackwardInputMonitor, BackwardMonitor])
def test_a_gradient_of_a_leaf_without_a_call_of_its_module_is_not_recorded(kind: type[Monitor], compiled: bool) -> None:
    layer = nn.Linear(2, 2) if kind is BackwardInputMonitor else nn.Identity()
    net = nn.Sequential(layer, nn.Linear(2, 2))
    leaf = torch.ones(1, 2, requires_grad=True)
    monitor = kind(Collect(), layer, op_=lambda gradient, seen: seen)  # type: ignore[call-arg]
    run = torch.compile(net, backend="aot_eager") if compiled else net
    called = 0
    loss = None
    for step in range(6):
        if step % 2 == 0:
            loss = run(leaf).sum()  # the graph of the step before lives until now
            called += 1
        else:
            loss = (leaf * 3).sum()
        loss.backward()
        assert monitor.samples == called
    assert loss is not None


def test_a_second_backward_and_two_forwards_before_it_are_observations_of_a_leaf() -> None:
    layer, leaf = nn.Linear(2, 2), torch.ones(1, 2, requires_grad=True)
    monitor = BackwardInputMonitor(Collect(), layer)
    loss = layer(leaf).sum()
    loss.backward(retain_graph=True)
    loss.backward()
    first, second = layer(leaf).sum(), layer(leaf).sum()
    first.backward()
    second.backward()
    assert monitor.samples == 4
    (layer(leaf) + layer(leaf)).sum().backward()  # its total gradient, once
    (leaf * 2).sum().backward()
    assert monitor.samples == 5


def test_what_waited_for_a_partner_is_no_half_of_a_later_pair() -> None:
    def paired(between: Callable[[Recorder], Any], **gates: Any) -> list[list[float]]:
        first, second = nn.Identity(), nn.Identity()
        recorder = Recorder(PairMonitor(Collect(), second, op_=lambda mine, other: torch.stack((mine, other)), **gates))
        recorder.modules(first)
        first(torch.tensor(1.0))
        between(recorder)
        second(torch.tensor(2.0))
        first(torch.tensor(3.0))
        second(torch.tensor(4.0))
        found = recorder[0].peek()
        return [] if found is None else found.reshape(-1, 2).tolist()

    assert paired(lambda recorder: None) == [[1.0, 2.0], [3.0, 4.0]]
    assert paired(lambda recorder: recorder.reset()) == [[3.0, 2.0]]
    assert paired(lambda recorder: recorder.deregister().register()) == [[3.0, 2.0]]


@pytest.mark.slow
def test_updates_keep_no_copies_of_parameters_after_they_are_taken_off() -> None:
    layer = nn.Linear(1, SIZE, bias=False)
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
    monitor = ParameterUpdateMonitor(Last(), "weight", layer)
    layer.weight.grad = torch.ones_like(layer.weight)
    before = len(tensors())
    optimizer.step()
    assert len(tensors()) > before
    monitor.deregister()
    monitor.reset()
    assert len(tensors()) == before


class Catching(nn.Module):
    """Goes on when its layer raises."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor) -> Tensor:
        try:
            found: Tensor = self.layer(x)
        except ArithmeticError:
            found = x * 3
        return found


class Counting(nn.Module):
    """Calls itself, and may raise in any depth."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("total", torch.zeros(SIZE))
        self.raises_at = -1

    def forward(self, x: Tensor, depth: int) -> Tensor:
        self.total += 10**depth
        if depth == self.raises_at:
            raise ArithmeticError
        if depth:
            try:
                return self(x, depth - 1) * 2
            except ArithmeticError:
                pass
        return x * 2


@pytest.mark.slow
@pytest.mark.parametrize("run", ["eager", "compiled", "compiled with fullgraph"])
def test_a_forward_that_raises_and_is_caught_keeps_no_value_before_it(run: str) -> None:
    layer = Layer()
    net = Catching(layer)
    monitor = DifferenceMonitor(Last(), "total", layer)
    called: Any = net if run == "eager" else torch.compile(net, backend="aot_eager", fullgraph="full" in run)
    counts = set()
    with torch.no_grad():
        called(torch.ones(SIZE))
        layer.raises = True
        for index in range(5):
            called(torch.ones(SIZE))
            counts |= {len(tensors())} if index else set()
        assert len(counts) == 1
        layer.raises = False
        for _ in range(2):
            called(torch.ones(SIZE))
    assert monitor.samples == 3
    assert monitor.peek().unique().tolist() == [1.0]


@pytest.mark.parametrize("run", ["eager", "compiled"])
def test_of_calls_within_calls_each_has_its_own_value_before_it(run: str) -> None:
    layer = Counting()
    monitor = DifferenceMonitor(Collect(), "total", layer, op_=lambda after, before: (after - before)[0])
    called: Any = layer if run == "eager" else torch.compile(layer, backend="aot_eager")
    with torch.no_grad():
        called(torch.ones(2), 2)
        assert monitor.peek().tolist() == [1.0, 11.0, 111.0]
        monitor.reset()
        layer.raises_at = 1
        called(torch.ones(2), 2)
    assert monitor.peek().tolist() == [110.0]


def test_threads_keep_their_values_before_apart() -> None:
    layer = Layer()
    monitor = DifferenceMonitor(Collect(), "total", layer, op_=lambda after, before: (after - before)[0])
    dead: list[Any] = []

    def run(value: float) -> None:
        x = torch.full((SIZE,), value)
        dead.append(weakref.ref(x))
        for index in range(20):
            layer.raises = index % 3 == 2
            try:
                with torch.no_grad():
                    layer(x)
            except ArithmeticError:
                pass

    threads = [threading.Thread(target=run, args=(1.0,)) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert monitor.samples > 0
    assert [reference() for reference in dead] == [None] * 3
    assert len(tensors()) == 1
