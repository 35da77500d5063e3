"""Monitors of gradients with respect to activations."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from recorders import BackwardInputMonitor, BackwardMonitor, ForwardMonitor, RecordingWarning
from reducers import Collect, Count, Last, Mean, Sum


def reference(net: nn.Sequential, index: int, x: Tensor) -> Tensor:
    """The gradient of `net(x).square().sum()` with respect to the output of module `index`, by hand."""
    hidden = x
    for module in net[: index + 1]:
        hidden = module(hidden)
    kept = hidden.detach().clone().requires_grad_()
    out = kept * 1  # not a leaf, so that a following module may work in place
    for module in net[index + 1 :]:
        out = module(out)
    return torch.autograd.grad(out.square().sum(), kept)[0]


def test_gradient_of_the_output_is_the_one_autograd_gives() -> None:
    net = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))
    monitors = [BackwardMonitor(Last(), module) for module in net]
    x = torch.randn(5, 3)
    net(x).square().sum().backward()
    for index, monitor in enumerate(monitors):
        torch.testing.assert_close(monitor.peek(), reference(net, index, x))


def test_in_place_operations_after_the_module_neither_break_nor_change_the_gradient() -> None:
    net = nn.Sequential(nn.Linear(3, 4), nn.ReLU(inplace=True), nn.Linear(4, 2))
    monitor = BackwardMonitor(Last(), net[0])
    x = torch.randn(5, 3)
    out = net(x)
    out += 1
    (out - 1).square().sum().backward()
    plain = nn.Sequential(net[0], nn.ReLU(), net[2])
    monitor.deregister()
    torch.testing.assert_close(monitor.peek(), reference(plain, 0, x))


def test_the_output_operand_is_the_output_as_it_was() -> None:
    net = nn.Sequential(nn.Linear(3, 4), nn.ReLU(inplace=True))
    monitor = BackwardMonitor(Last(), net[0], op_=lambda gradient, output: output)
    x = torch.randn(5, 3)
    net(x).sum().backward()
    torch.testing.assert_close(monitor.peek(), nn.functional.linear(x, net[0].weight, net[0].bias).detach())


def test_each_leaf_of_a_nested_output_has_its_own_gradient() -> None:
    class Two(nn.Module):
        def forward(self, x: Tensor) -> dict[str, Tensor]:
            return {"a": x * 1, "b": x * 1, "frozen": x.detach()}

    net = Two()
    monitor = BackwardMonitor(Collect(), net)
    x = torch.ones(2, requires_grad=True)
    for _ in range(2):
        out = net(x)
        (out["a"].sum() + 5 * out["b"].sum()).backward()
    assert {path: value.tolist() for path, value in monitor.peek().items()} == {"a": [1.0] * 4, "b": [5.0] * 4}
    assert monitor.samples == 2


def test_gradient_of_the_input_keywords_included() -> None:
    layer = nn.Bilinear(2, 2, 1, bias=False)
    monitor = BackwardInputMonitor(Last(), layer)
    a, b = torch.randn(1, 2, requires_grad=True), torch.randn(1, 2, requires_grad=True)
    layer(a, input2=b).sum().backward()
    torch.testing.assert_close(monitor.peek()["0"], a.grad)
    torch.testing.assert_close(monitor.peek()["input2"], b.grad)


def test_outputs_without_gradient_are_reported_and_no_error() -> None:
    layer = nn.Linear(2, 2).requires_grad_(False)
    monitor = BackwardMonitor(Count(), layer)
    layer(torch.ones(1, 2))
    with torch.no_grad():
        layer(torch.ones(1, 2))
    assert monitor.peek() is None
    assert sum(monitor.counts.values()) == 2
    unused = BackwardMonitor(Count(), nn.Linear(2, 2).requires_grad_(True))
    assert unused.peek() is None


def test_the_same_leaf_given_again_and_again_is_hooked_once() -> None:
    layer = nn.Linear(2, 2)
    monitor = BackwardInputMonitor(Collect(), layer)
    x = torch.ones(1, 2, requires_grad=True)
    for _ in range(3):
        x.grad = None
        layer(x).sum().backward()
    assert monitor.samples == 3
    assert len(x._backward_hooks) == 1
    monitor.deregister()
    assert not x._backward_hooks


def test_a_second_backward_through_the_same_graph_is_a_second_observation() -> None:
    layer = nn.Linear(2, 2)
    monitor = BackwardMonitor(Count(), layer)
    loss = layer(torch.ones(1, 2)).sum()
    loss.backward(retain_graph=True)
    loss.backward()
    assert (monitor.samples, monitor.peek()) == (2, 4)


def test_the_mode_at_the_forward_decides_and_every_counts_gradients() -> None:
    layer = nn.Linear(2, 2)
    training = BackwardMonitor(Count(), layer, eval_update=False)
    seldom = BackwardMonitor(Count(), layer, every=2)
    for step in range(4):
        layer.train(step == 0)
        loss = layer(torch.ones(1, 2)).sum()
        layer.eval()
        loss.backward()
    assert training.samples == 1
    assert seldom.samples == 2


def test_hooks_taken_off_between_forward_and_backward_record_nothing() -> None:
    layer = nn.Linear(2, 2)
    monitor = BackwardMonitor(Count(), layer)
    loss = layer(torch.ones(1, 2)).sum()
    monitor.deregister()
    loss.backward()
    assert monitor.samples == 0


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_inputs_of_nested_checkpoints_are_recorded_once(depth: int) -> None:
    net = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    monitors = [kind(Count(), net[1]) for kind in (BackwardInputMonitor, BackwardMonitor)]

    def nested(x: Tensor, level: int = 0) -> Tensor:
        return net[1](x) + net[1](x) if level == depth else checkpoint(nested, x, level + 1, use_reentrant=False)

    for _ in range(2):
        nested(net[0](torch.randn(2, 3)) * 1).sum().backward()
    assert [monitor.samples for monitor in monitors] == [2, 4]  # one tensor goes in twice, and two come out


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_checkpointed_modules_are_recorded_once(use_reentrant: bool) -> None:
    net = nn.Sequential(nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, 3))
    x = torch.randn(4, 3, requires_grad=True)
    forward = [ForwardMonitor(Collect(), module) for module in net]
    backward = [BackwardMonitor(Collect(), module) for module in net]
    expected = [reference(net, index, x) for index in range(3)]
    for monitor in forward + backward:
        monitor.clear()
    checkpoint(net, x, use_reentrant=use_reentrant).square().sum().backward()
    assert [monitor.samples for monitor in forward + backward] == [1] * 6
    for monitor, gradient in zip(backward, expected, strict=True):
        torch.testing.assert_close(monitor.peek(), gradient)


def test_the_graph_and_the_activations_are_not_kept_alive() -> None:
    layer = nn.Linear(2, 2)
    monitor = BackwardMonitor(Mean(), layer, op_=lambda gradient, output: gradient)
    gc.collect()
    gc.disable()
    try:
        out = layer(torch.ones(1, 2))
        dead = weakref.ref(out)
        out.sum().backward()
        del out
        assert dead() is None
    finally:
        gc.enable()
    assert monitor.samples == 1


def test_a_failing_callable_does_not_disturb_the_backward() -> None:
    layer = nn.Linear(2, 2)
    BackwardMonitor(Sum(), layer, op_=lambda gradient, output: gradient.nothing)
    with pytest.warns(RecordingWarning, match=r"BackwardMonitor on Linear.*nothing"):
        layer(torch.ones(1, 2)).sum().backward()
    torch.testing.assert_close(layer.weight.grad, torch.ones(2, 2))


@pytest.mark.filterwarnings("ignore:The .grad attribute:UserWarning")  # the compiler's own, as it looks at any tensor
def test_gradients_are_recorded_around_a_compiled_graph_too() -> None:
    net = nn.Sequential(nn.Linear(3, 3), nn.ReLU(), nn.Linear(3, 2))
    monitor = BackwardMonitor(Collect(), net[0])
    x = torch.randn(4, 3)
    compiled = torch.compile(net, backend="aot_eager")
    compiled(x).square().sum().backward()
    torch.testing.assert_close(monitor.peek(), reference(net, 0, x))


def test_a_leaf_that_an_optimizer_changes_between_backwards_is_hooked_once() -> None:
    prompt, layer = nn.Parameter(torch.ones(1, 3)), nn.Linear(3, 3)
    monitor = BackwardInputMonitor(Count("b c ->"), layer)
    optimizer = torch.optim.SGD([prompt], lr=0.1)
    for _ in range(4):
        layer(prompt).sum().backward()
        optimizer.step()
    assert monitor.samples == 4


@pytest.mark.parametrize("kind", [BackwardMonitor, BackwardInputMonitor])
def test_a_module_that_keeps_its_output_needs_no_cycle_collector(kind: type[BackwardMonitor] | type[BackwardInputMonitor]) -> None:
    class Keeping(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            self.kept = (x, x * 2)
            return self.kept[1]

    gc.disable()
    try:
        net = Keeping()
        monitor = kind(Last(), net)
        net(torch.ones(2, requires_grad=True)).sum().backward()
        dead = weakref.ref(net)
        del net
        assert dead() is None
    finally:
        gc.enable()
    assert monitor.samples == 1


def test_gradients_batched_by_a_vectorised_jacobian_are_left_out() -> None:
    layer = nn.Linear(2, 3)
    monitor = BackwardMonitor(Mean(), layer)
    jacobian = torch.autograd.functional.jacobian(layer, torch.ones(2), vectorize=True)
    torch.testing.assert_close(jacobian, layer.weight.detach())
    assert (monitor.samples, monitor.last_error) == (0, None)
