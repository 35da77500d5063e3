"""What health() costs, counted: calls of a step, graph breaks, and what is reduced together; and that it changes no training."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterator
from statistics import median

import laws
import pytest
import torch
from profiled import our_calls_of
from torch import Tensor, nn
from torch._dynamo.utils import counters

from recorders import ForwardMonitor, presets
from recorders.ring.ring import PartialStates
from recorders.ring.rows import LeafRow
from recorders.schedule.steps import _steps
from recorders.watch.diagnosis.steps import Early
from reducers import Activity, Collect, FirstNonfinite, Idle, Norm, PerObservation, Product, Summary


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Small tensors gain nothing by more, and threads wait for each other if the machine is busy."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


class Training:
    def __init__(self, layers: int = 4, recorded: bool = True, width: int = 64) -> None:
        torch.manual_seed(0)
        inner = [part for _ in range(layers) for part in (nn.Linear(width, width), nn.ReLU())]
        self.net = nn.Sequential(*inner, nn.Dropout(0.1), nn.Linear(width, 4))
        self.call: Callable[[Tensor], Tensor] = self.net
        self.optimizer = torch.optim.AdamW(self.net.parameters(), lr=1e-2)
        self.batch, self.target = torch.randn(96, width), torch.randint(4, (96,))
        self.recorder = presets.health().modules(self.net).register() if recorded else None

    def step(self) -> Tensor:
        self.optimizer.zero_grad()
        loss = nn.functional.cross_entropy(self.call(self.batch), self.target)
        torch.autograd.backward(loss)
        self.optimizer.step()
        if self.recorder is not None:
            self.recorder.push("loss", loss)
            self.recorder.push("target", self.target)
        return loss.detach()

    def run(self, steps: int) -> list[Tensor]:
        return [self.step() for _ in range(steps)]


def calls(layers: int, step: int) -> float:
    """The median of the calls of functions of the library in steps that begin after this one: some join what waits."""
    training = Training(layers)
    training.run(8)
    assert training.recorder is not None
    training.recorder.clock.step = step
    training.run(8)
    found = median(our_calls_of(training.step) for _ in range(20))
    training.recorder.deregister()
    return found


@pytest.mark.usefixtures("alone")
def test_steps_between_those_that_record_cost_the_same_for_any_net() -> None:
    small, large = calls(2, 80), calls(12, 80)
    assert large <= small + 5
    assert large <= 40


@pytest.mark.usefixtures("alone")
def test_a_step_that_records_costs_little_for_each_layer() -> None:
    few, many = calls(2, 8), calls(12, 8)
    assert (many - few) / 20 <= 90  # a layer is two modules
    assert few <= 1500


@pytest.mark.parametrize("compiled", [False, True])
def test_losses_and_parameters_are_those_of_the_bare_training(compiled: bool) -> None:
    pair = [Training(recorded=recorded) for recorded in (False, True)]
    losses = []
    for training in pair:
        counters.clear()  # of the graphs of other tests
        if compiled:
            torch.compiler.reset()
            training.call = torch.compile(training.net, fullgraph=True, backend="aot_eager")
        torch.manual_seed(1)
        losses.append(training.run(54))  # with steps that do not record
        assert not counters["graph_break"]
    assert all(map(torch.equal, *losses))
    assert all(map(torch.equal, *(training.net.parameters() for training in pair)))
    recorder = pair[1].recorder
    assert recorder is not None
    assert recorder["output/0"].samples == recorder["weights/0"].samples == sum(map(Early(), range(54)))
    assert recorder["loss"].samples == 54


def test_nothing_is_left_of_a_recorder_that_was_dropped_with_its_net() -> None:
    gone, other = Training(), Training(recorded=False)
    gone.run(2)
    assert gone.recorder is not None
    left = [*map(weakref.ref, gone.recorder.values()), weakref.ref(gone.net), weakref.ref(gone.optimizer)]
    before = len(_steps.told)
    del gone
    gc.collect()
    assert [one() for one in left] == [None] * len(left)
    other.run(1)  # steps of others take nothing more
    assert len(_steps.told) < before


def test_outputs_and_parameters_are_reduced_together() -> None:
    training = Training(width=128)
    training.run(4)
    recorder = training.recorder
    assert recorder is not None
    rings = recorder["output/0"].buffer.stored.rings().values()
    assert [type(ring.codec) for ring in rings] == [PartialStates]
    codec = next(iter(rings)).codec
    assert isinstance(codec, PartialStates)
    assert len(codec.new_memory(2) or ()) == 2  # of the four statistics three read the same columns
    for group in ("weights", "update", "size", "before"):
        assert {type(each) for each in recorder[f"{group}/0"].buffer.stored.pending.values()} == {LeafRow}, group


def test_what_waits_is_what_updates_one_after_another_give() -> None:
    reducer = Product(
        stats=Summary("b c -> c"), activity=Activity("b c -> c"), idle=Idle("b c -> c"), first=FirstNonfinite("b c -> c")
    )
    layer = nn.Identity()
    monitor = ForwardMonitor(reducer, layer)
    state: dict[str, Tensor] = {}
    for seed in range(40):
        x = torch.randn(100, 64, generator=torch.Generator().manual_seed(seed)).relu()
        x[:, 5] *= seed < 20
        x[:, 6] *= 1e-9  # not active
        if seed in (3, 35):
            x[7, seed] = torch.nan
        layer(x)
        state = reducer.update(state, x)
    laws.close(monitor.state, state, rtol=1e-12)
    assert monitor.peek()["idle"]["idle"][[5, 6]].tolist() == [20, 40]
    assert monitor.peek()["first"][[3, 35, 0]].tolist() == [3, 35, -1]


def test_norms_and_updates_of_each_step_are_those_computed_by_hand() -> None:
    training = Training(layers=1)
    recorder, weight = training.recorder, training.net[0].weight
    assert recorder is not None
    assert isinstance(weight, nn.Parameter)
    sizes, gradients, updates, befores = [], [], [], []
    for step in range(70):  # more than a log puts together at once
        recorder.clock.step = 5
        weight.requires_grad_(step % 3 != 1)  # then it has no gradient, and does not change
        before = weight.detach().clone()
        training.step()
        if weight.grad is not None:
            gradients.append(weight.grad.norm())
        updates.append((weight.detach() - before).norm() / before.norm())
        sizes.append(weight.detach().norm())
        befores.append(before.norm())
    found = recorder["weights/0"].leaves()["weight"]["size"], recorder["size/0"].leaves()["weight"]
    torch.testing.assert_close(found[0].float(), torch.stack(gradients), check_dtype=False)
    torch.testing.assert_close(found[1].float(), torch.stack(sizes), check_dtype=False)
    assert recorder["before/0"].leaves()["weight"][1:].equal(found[1][:-1])  # to the bit, by which writes between steps are told
    torch.testing.assert_close(recorder["before/0"].leaves()["weight"].float(), torch.stack(befores), check_dtype=False)
    torch.testing.assert_close(recorder["update/0"].leaves()["weight"]["course"], torch.stack(updates), rtol=1e-5, atol=1e-7)
    assert recorder["update/0"].leaves()["weight"]["ratio"]["count"] == 70


def test_rows_go_on_after_a_reset_and_when_hooks_are_off_and_on_again() -> None:
    training = Training(layers=1)
    recorder = training.recorder
    assert recorder is not None
    training.run(3)
    recorder.deregister()
    training.step()
    recorder.register()
    training.run(2)
    assert len(recorder["size/0"].leaves()["weight"]) == 5
    recorder.reset()
    training.run(2)
    assert len(recorder["size/0"].leaves()["weight"]) == 2


def test_states_of_many_steps_are_those_of_one_after_another() -> None:
    xs, collect = torch.randn(21, 3, 2), Collect()
    for first in (0, 1, 5):
        state: dict[str, Tensor] = {}
        for x in xs:
            state = collect.update(state, x)
        together = collect.update_all(collect.update_all({}, xs[:first]), xs[first:])
        assert together.keys() == state.keys()
        assert all(torch.equal(together[key], state[key]) for key in state)
    each = PerObservation(Norm(), Collect())
    assert each.compute(each.update_all({}, xs)).shape == (21,)


def test_the_next_chosen_step_is_the_one_that_is_said() -> None:
    for early in (Early(), Early(5, 8), Early(3, 100), Early(0, 3), Early(1, 2), Early(50, 64)):
        for step in range(500):
            following = next(later for later in range(step + 1, 700) if early(later))
            assert early.pause_after(step) == following - step - 1
