"""repeat(): steps that are deterministic, and operators that are not."""

from __future__ import annotations

import random
import time
from collections import Counter, defaultdict, deque
from typing import Any

import numpy
import pytest
import torch
from planted_divergences import Language, Vision, batch, loss
from torch import Tensor, nn

from recorders import ForwardMonitor, Recorder, TargetError, repeat
from reducers import Mean


class Unseeded(nn.Module):
    """Adds noise that no seed determines."""

    def forward(self, x: Tensor) -> Tensor:
        noise = numpy.random.default_rng().normal(size=tuple(x.shape)) * 1e-6
        return x + torch.from_numpy(noise).to(x.dtype)


class UnseededBackward(torch.autograd.Function):
    @staticmethod
    def forward(context: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(context: Any, gradient: Tensor) -> Tensor:
        return gradient * (1 + time.perf_counter_ns() % 1000)


class Backwards(nn.Module):
    def forward(self, x: Tensor) -> Any:
        return UnseededBackward.apply(x)


@pytest.mark.parametrize("net", [Language, Vision])
def test_a_training_step_is_deterministic_and_everything_is_put_back(net: Any) -> None:
    model = net().train()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)

    def step() -> None:
        optimizer.zero_grad()
        x = batch(model) if net is Language else batch(model) + torch.randn(4, 3, 9, 9) * random.random() * numpy.random.rand()
        loss(model(x)).backward()
        optimizer.step()

    step()
    before = {key: value.clone() for key, value in model.state_dict().items()}
    state = {key: value.clone() for key, value in optimizer.state[next(model.parameters())].items()}
    generator = torch.get_rng_state()
    found = repeat(step, 3, modules=[model, optimizer])
    assert not found
    assert "3 runs" in str(found)
    assert all(bool((model.state_dict()[key] == value).all()) for key, value in before.items())
    assert all(bool((optimizer.state[next(model.parameters())][key] == value).all()) for key, value in state.items())
    assert bool((generator == torch.get_rng_state()).all())


class Keeps(nn.Module):
    """What it returns depends on what it keeps in lists within lists."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: dict[str, list[float]] = defaultdict(list)
        self.nested: list[Any] = [{"last": deque([0.0], maxlen=2)}, Counter()]

    def forward(self, x: Tensor) -> Tensor:
        self.seen["sums"].append(float(x.sum()))
        self.nested[0]["last"].append(len(self.seen["sums"]))
        self.nested[1]["calls"] += 1
        return x * self.nested[1]["calls"] + sum(self.nested[0]["last"])


def test_what_a_module_keeps_in_containers_within_others_is_put_back() -> None:
    net = Keeps()
    net(torch.ones(2))
    before = repr((net.seen, net.nested))
    assert not repeat(lambda: net(torch.ones(2)), 3, modules=[net])
    assert repr((net.seen, net.nested)) == before


def test_a_model_that_is_not_put_back_differs() -> None:
    net = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)

    def step() -> None:
        optimizer.zero_grad()
        net(torch.ones(1, 2)).sum().backward()
        optimizer.step()

    found = repeat(step)
    assert "comes from outside of PyTorch" in found.differs
    assert not repeat(step, modules=[net, optimizer])


def test_noise_without_a_seed_is_named() -> None:
    net = nn.Sequential(nn.Linear(4, 4), nn.Sequential(nn.ReLU(), Unseeded()), nn.Linear(4, 4))
    found = repeat(lambda: net(torch.randn(3, 4)).sum().backward(), modules=net)
    assert (found.phase, found.module, found.operator, found.run) == ("forward", "1.1", "aten.lift_fresh.default", 2)
    assert found.source is not None
    assert found.source.text == "return x + torch.from_numpy(noise).to(x.dtype)"
    assert "(3, 4) float64" in found.form
    assert "comes from outside of PyTorch" in found.differs
    assert 0 < found.distance < 10
    assert "Not deterministic: the forwards of run 1 and run 2 part in 1.1." in str(found)


def test_operators_of_the_backward_are_seen() -> None:
    net = nn.Sequential(nn.Linear(4, 4), Backwards(), nn.Linear(4, 4))
    found = repeat(lambda: net(torch.randn(3, 4)).sum().backward(), modules=net)
    assert (found.phase, found.operator) == ("backward", "aten.mul.Tensor")
    assert found.source is not None
    assert found.source.text == "return gradient * (1 + time.perf_counter_ns() % 1000)"


def test_an_operator_of_the_backward_has_the_line_and_the_module_of_its_forward() -> None:
    counter = iter(range(100))

    class Scaled(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            y = x.tanh()
            if y.requires_grad:
                y.register_hook(lambda gradient: gradient + next(counter))
            return y * 3

    net = nn.Sequential(nn.Linear(2, 2), Scaled())
    found = repeat(lambda: net(torch.ones(1, 2)).sum().backward(), modules=net)
    assert found.phase == "backward"
    assert found.operator == "aten.add.Tensor"
    assert found.module == "1"


def test_steps_that_call_other_operators_or_settings_say_so() -> None:
    calls = iter(range(100))

    def other_operator() -> None:
        x = torch.ones(3)
        x.sin() if next(calls) % 2 else x.cos()

    found = repeat(other_operator)
    assert {found.operator, found.operator_b} == {"aten.sin.default", "aten.cos.default"}
    assert repeat(lambda: torch.ones(3) * next(calls)).differs.startswith("its argument 1 is ")
    more = repeat(lambda: [torch.ones(3) for _ in range(next(calls))])
    assert more.differs == "the runs call different operators"


def test_memory_that_was_never_written_counts_for_nothing() -> None:
    assert not repeat(lambda: torch.empty(1000).fill_(1.0) + torch.ones(1000).new_empty(1000).zero_())


def test_memory_that_is_written_part_by_part_counts_for_nothing_until_it_is_read() -> None:
    rows = [torch.arange(500), torch.arange(500, 1000)]

    def by_index() -> Tensor:
        made = torch.empty(1000)
        for index in rows:
            made.index_copy_(0, index, torch.ones(500))
        return made.sin()

    assert not repeat(by_index, 3)
    for layer in (nn.CircularPad2d(2), nn.CircularPad3d(1), nn.Conv2d(3, 4, 3, padding=1, padding_mode="circular")):
        x = torch.randn(2, 3, 6, 6) if not isinstance(layer, nn.CircularPad3d) else torch.randn(2, 3, 4, 4, 4)
        assert not repeat(lambda layer=layer, x=x: layer(x.clone().requires_grad_()).sum().backward(), 3, modules=layer)

    counter = iter(range(100))

    def read_too_early() -> Tensor:
        memory = torch.empty(100)
        memory.numpy()[:] = next(counter)  # whatever was there
        return torch.zeros(100).copy_(memory).sin()

    found = repeat(read_too_early)
    assert found.operator == "aten.sin.default"
    assert "comes from outside of PyTorch" in found.differs


@pytest.mark.parametrize(
    "layer", [nn.LSTM(3, 3, 2, dropout=0.1), nn.GRU(3, 3), nn.RNN(3, 3)], ids=lambda layer: type(layer).__name__
)
def test_recurrent_layers_return_memory_for_their_backward_which_counts_for_nothing(layer: nn.RNNBase) -> None:
    assert not repeat(lambda: layer(torch.randn(4, 2, 3))[0].sum().backward(), 3, modules=layer)


class BeginsWithABuffer(nn.Module):
    """Adds up its loss from a buffer of zero, as layers of vector quantisation do."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 2)
        self.register_buffer("zero", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        return self.zero.requires_grad_() + self.layer(x).square().mean()


def test_gradients_of_buffers_and_whether_a_tensor_requires_them_are_put_back() -> None:
    net = BeginsWithABuffer()

    def step() -> None:
        net.layer.zero_grad()
        net(torch.ones(3, 2)).backward()
        net.layer.bias.requires_grad_(False)

    assert not repeat(step, 3, modules=net)
    assert net.layer.bias.requires_grad
    assert not net.zero.requires_grad
    assert net.zero.grad is None


def test_steps_of_adam_on_complex_weights_which_it_views_as_real_numbers() -> None:
    net = nn.Linear(3, 2, dtype=torch.complex64)
    optimizer = torch.optim.Adam(net.parameters())

    def step() -> None:
        optimizer.zero_grad()
        net(torch.ones(4, 3, dtype=torch.complex64)).abs().sum().backward()
        optimizer.step()

    assert not repeat(step, modules=[net, optimizer])


def test_nested_tensors_are_compared_by_what_they_hold() -> None:
    net, numbers = nn.Sequential(nn.Linear(3, 4), nn.LayerNorm(4)), iter(range(100))

    def nested(more: float = 0.0) -> Tensor:
        parts = [torch.ones(2, 3) + more, torch.ones(5, 3)]
        return net(torch.nested.nested_tensor(parts, layout=torch.jagged)).values().sum()

    assert not repeat(lambda: nested().backward(), 3, modules=net)
    assert repeat(lambda: nested(next(numbers)).backward(), modules=net)


def test_what_the_first_run_makes_for_later_ones_is_a_note() -> None:
    kept: list[Tensor] = []

    def step() -> Tensor:
        if not kept:
            kept.append(torch.arange(3.0).cos())
        return kept[0] * 2

    found = repeat(step)
    assert not found
    assert "the first run called other operators than later ones, which agree" in str(found)


def test_nan_equals_nan_and_one_bit_is_found() -> None:
    calls = iter(range(100))
    assert not repeat(lambda: torch.full((3,), float("nan")) + 1)
    numbers = [numpy.float32(1), numpy.nextafter(numpy.float32(1), numpy.float32(2))]
    assert repeat(lambda: torch.from_numpy(numpy.array([numbers[next(calls) % 2]])) * 2)
    order = [[1.0, 2.0], [2.0, 1.0]]
    assert repeat(lambda: torch.tensor(order[next(calls) % 2]) * 2)


@pytest.mark.parametrize("fails_in", [1, 2])
def test_an_error_of_the_step_is_raised_and_everything_is_put_back(fails_in: int) -> None:
    net, calls = nn.BatchNorm1d(2), []

    def step() -> None:
        calls.append(1)
        net(torch.randn(4, 2))
        net.eval()
        if len(calls) == fails_in:
            raise ZeroDivisionError("of the user")

    before, generator = net.running_mean.clone(), torch.get_rng_state()
    with pytest.raises(ZeroDivisionError, match="of the user"):
        repeat(step, modules=net)
    assert net.training
    assert bool((net.running_mean == before).all())
    assert bool((torch.get_rng_state() == generator).all())


def test_recorders_record_nothing_of_it_and_wrong_arguments_are_errors() -> None:
    net = nn.Linear(2, 2)
    with Recorder(ForwardMonitor(Mean())).modules(net) as recorder:
        assert not repeat(lambda: net(torch.ones(1, 2)), modules=net)
        assert sum(recorder.samples.values()) == 0
    with pytest.raises(ValueError, match="two runs at least"):
        repeat(lambda: None, 1)
    with pytest.raises(TargetError, match="give modules and optimizers; got int"):
        repeat(lambda: None, modules=[3])
