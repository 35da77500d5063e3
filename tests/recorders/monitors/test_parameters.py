"""Monitors of parameters, one observation per optimizer step."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_pre_hook

from recorders import (
    Clock,
    ForwardMonitor,
    OptimizerStateMonitor,
    ParameterGradientMonitor,
    ParameterMonitor,
    ParameterUpdateMonitor,
    Recorder,
    RecordingWarning,
    SelectionError,
    TargetError,
)
from reducers import Collect, Count, Last, Norm, Sum


def step(net: nn.Module, optimizer: torch.optim.Optimizer, scale: float = 1.0) -> dict[str, Tensor]:
    """One step; the gradients it used, by name."""
    optimizer.zero_grad()
    (net(torch.randn(4, 3)).square().mean() * scale).backward()
    gradients = {name: parameter.grad.clone() for name, parameter in net.named_parameters() if parameter.grad is not None}
    optimizer.step()
    return gradients


def test_gradients_values_and_updates_of_a_step() -> None:
    net = nn.Linear(3, 2)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.5)
    gradient, value = ParameterGradientMonitor(Last(), module=net), ParameterMonitor(Last(), module=net)
    update, weight = ParameterUpdateMonitor(Last(), module=net), ParameterGradientMonitor(Last(), "weight", net)
    before = {name: parameter.detach().clone() for name, parameter in net.named_parameters()}
    gradients = step(net, optimizer)
    for name, parameter in net.named_parameters():
        torch.testing.assert_close(gradient.peek()[name], gradients[name], rtol=0, atol=0)
        torch.testing.assert_close(value.peek()[name], parameter.detach(), rtol=0, atol=0)
        torch.testing.assert_close(update.peek()[name], parameter.detach() - before[name], rtol=0, atol=0)
    torch.testing.assert_close(weight.peek(), gradients["weight"], rtol=0, atol=0)


def test_callables_get_gradient_and_value_after_and_before() -> None:
    net = nn.Linear(3, 2, bias=False)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.5)
    relative = ParameterUpdateMonitor(Last(), "weight", net, op_=lambda after, before: (after - before).norm() / before.norm())
    alignment = ParameterGradientMonitor(Last(), "weight", net, op_=lambda gradient, value: (gradient * value).sum())
    before = net.weight.detach().clone()
    gradients = step(net, optimizer)
    torch.testing.assert_close(relative.peek(), 0.5 * gradients["weight"].norm() / before.norm())
    torch.testing.assert_close(alignment.peek(), (gradients["weight"] * before).sum())
    assert not relative.peek().requires_grad


def test_accumulated_gradients_are_one_observation_a_step_or_one_a_backward() -> None:
    net = nn.Linear(3, 2)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    final = ParameterGradientMonitor(Collect(), "bias", net)
    running = ParameterGradientMonitor(Collect(), "bias", net, when="accumulate")
    both = ParameterGradientMonitor(Collect(), module=net, when="accumulate", every=2)
    for _ in range(3):
        net(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    assert final.peek().tolist() == [3.0, 3.0]
    assert running.peek().tolist() == [1.0, 1.0, 2.0, 2.0, 3.0, 3.0]
    assert (final.samples, running.samples, both.samples) == (1, 3, 2)
    assert set(both.peek()) == {"weight", "bias"}


def test_only_the_optimizer_that_holds_a_parameter_counts() -> None:
    net = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 2))
    first, second = torch.optim.SGD(net[0].parameters(), lr=0.1), torch.optim.Adam(net[1].parameters())
    monitors = [ParameterUpdateMonitor(Norm(), module=module) for module in net]
    net(torch.ones(1, 3)).sum().backward()
    first.step()
    assert [monitor.samples for monitor in monitors] == [1, 0]
    second.step()
    assert [monitor.samples for monitor in monitors] == [1, 1]


@pytest.mark.parametrize("everywhere", [False, True])
def test_gradients_are_those_that_the_last_hook_before_a_step_leaves(everywhere: bool) -> None:
    net = nn.Linear(3, 1, bias=False)
    recorder = Recorder(ParameterGradientMonitor(Collect(), "weight")).modules(net)
    optimizer = torch.optim.SGD(net.parameters(), 0.1)

    def clip(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        nn.utils.clip_grad_norm_(net.parameters(), 1e-3)

    handle = register_optimizer_step_pre_hook(clip) if everywhere else optimizer.register_step_pre_hook(clip)
    try:
        with recorder:
            step(net, optimizer)
            clipped = net.weight.grad.clone()
            handle.remove()
            step(net, optimizer)
    finally:
        handle.remove()
    assert clipped.norm() < 1.1e-3 < net.weight.grad.norm()
    assert torch.equal(recorder[0].compute(), torch.cat([clipped, net.weight.grad]))


def test_no_hook_stays_on_an_optimizer_whose_step_ended_or_raised() -> None:
    net = nn.Linear(3, 1)
    recorder = Recorder(ParameterGradientMonitor(Last(), "weight")).modules(net)
    optimizer = torch.optim.SGD(net.parameters(), 0.1)

    def fail(*_: Any) -> None:
        raise KeyError

    with recorder:
        step(net, optimizer)
        assert not optimizer._optimizer_step_pre_hooks
        handle = optimizer.register_step_pre_hook(fail)
        with pytest.raises(KeyError):
            step(net, optimizer)
        handle.remove()
        step(net, optimizer)
        assert not optimizer._optimizer_step_pre_hooks
    assert recorder[0].samples == 2


def test_frozen_and_unused_parameters_have_no_gradient_and_are_no_error() -> None:
    net = nn.Linear(3, 2)
    net.bias.requires_grad_(False)
    monitor = ParameterGradientMonitor(Last(), module=net)
    step(net, torch.optim.SGD(net.parameters(), lr=0.1))
    assert set(monitor.peek()) == {"weight"}


def test_values_by_call_and_by_tick() -> None:
    net = nn.Linear(3, 2)
    called, ticked = ParameterMonitor(Collect(), "bias", net, when="call"), ParameterMonitor(Collect(), "bias", net, when="tick")
    net(torch.ones(1, 3))
    net(torch.ones(1, 3))
    ticked.tick()
    assert (called.samples, ticked.samples) == (2, 1)
    step(net, torch.optim.SGD(net.parameters(), lr=0.1))
    assert (called.samples, ticked.samples) == (3, 1)


def test_optimizer_state() -> None:
    net = nn.Linear(3, 2)
    optimizer = torch.optim.Adam(net.parameters())
    monitor = OptimizerStateMonitor(Last(), "exp_avg_sq", module=net)
    ratio = OptimizerStateMonitor(Last(), "exp_avg", "weight", net, op_=lambda state, value: state / value)
    step(net, optimizer)
    torch.testing.assert_close(monitor.peek()["weight"], optimizer.state[net.weight]["exp_avg_sq"], rtol=0, atol=0)
    torch.testing.assert_close(ratio.peek(), (optimizer.state[net.weight]["exp_avg"] / net.weight).detach())


def test_optimizer_state_that_is_not_kept_is_said() -> None:
    net = nn.Linear(3, 2)
    monitor = OptimizerStateMonitor(Last(), "exp_avg", module=net)
    with pytest.warns(RecordingWarning, match="SGD keeps no 'exp_avg' for 'weight'"):
        step(net, torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9))
    assert monitor.peek() is None


def test_gradients_of_fused_optimizers_are_unscaled_and_overflows_left_out() -> None:
    net = nn.Linear(3, 2)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, fused=True)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    monitor = ParameterGradientMonitor(Last(), module=net)
    x = torch.randn(4, 3)
    scaler.scale(net(x).sum()).backward()
    scaler.step(optimizer)
    scaler.update()
    torch.testing.assert_close(monitor.peek()["weight"], x.sum(0).expand(2, 3))
    updates = ParameterUpdateMonitor(Last(), module=net)
    optimizer.zero_grad()
    scaler.scale(net(x).sum() * float("inf")).backward()
    scaler.step(optimizer)
    scaler.update()
    assert (monitor.samples, updates.samples) == (1, 0)


@pytest.mark.parametrize("fused", [False, True])
def test_steps_that_a_scaler_skips_are_not_observed(fused: bool) -> None:
    net = nn.Linear(3, 2)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, fused=fused)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    monitors = [
        ParameterGradientMonitor(Last(), module=net),
        ParameterUpdateMonitor(Last(), module=net),
        ParameterMonitor(Last(), module=net),
    ]
    for factor in (float("nan"), 1.0):
        optimizer.zero_grad()
        scaler.scale(net(torch.ones(1, 3)).sum() * factor).backward()
        scaler.step(optimizer)
        scaler.update()
    assert [monitor.samples for monitor in monitors] == [1, 1, 1]


def test_sparse_gradients_are_made_dense() -> None:
    net = nn.Embedding(5, 2, sparse=True)
    optimizer = torch.optim.SparseAdam(net.parameters())
    monitor = ParameterGradientMonitor(Last(), "weight", net)
    net(torch.tensor([1, 1, 3])).sum().backward()
    optimizer.step()
    assert monitor.peek().tolist() == [[0, 0], [2, 2], [0, 0], [1, 1], [0, 0]]


def test_replaced_parameters_are_followed() -> None:
    net = nn.Linear(3, 2)
    monitor = ParameterUpdateMonitor(Norm(), "weight", net)
    net.load_state_dict({"weight": torch.ones(2, 3), "bias": torch.ones(2)}, assign=True)
    for parameter in net.parameters():
        parameter.requires_grad_(True)
    step(net, torch.optim.SGD(net.parameters(), lr=0.1))
    assert monitor.samples == 1


def test_a_failing_callable_does_not_disturb_the_step() -> None:
    net, twin = nn.Linear(3, 2), nn.Linear(3, 2)
    twin.load_state_dict(net.state_dict())
    ParameterUpdateMonitor(Sum(), module=net, op_=lambda after, before: 1 / 0)
    for model in (net, twin):
        model(torch.ones(1, 3)).sum().backward()
    torch.optim.SGD(twin.parameters(), lr=0.1).step()
    with pytest.warns(RecordingWarning, match="ParameterUpdateMonitor on Linear: ZeroDivisionError"):
        torch.optim.SGD(net.parameters(), lr=0.1).step()
    assert net.weight.equal(twin.weight)


def test_nothing_is_left_behind_when_monitors_go_or_modules_die() -> None:
    from recorders.schedule.steps import _steps

    before = len(_steps.monitors)
    net = nn.Linear(3, 2)
    monitor = ParameterUpdateMonitor(Norm(), module=net)
    assert (len(_steps.monitors), _steps.active) == (before + 1, True)
    monitor.deregister()
    assert len(_steps.monitors) == before
    assert _steps.active == bool(before)
    ParameterUpdateMonitor(Norm(), module=net)
    dead = weakref.ref(net)
    gc.disable()
    try:
        del net
        assert dead() is None
    finally:
        gc.enable()
    assert len(_steps.monitors) == before
    step(nn.Linear(3, 2), torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=0.1))
    assert _steps.active == bool(before)


def test_missing_parameters_are_errors_that_list_what_is_there() -> None:
    with pytest.raises(TargetError, match=r"no parameter 'wieght'; did you mean 'weight'\? it has \['weight', 'bias'\]"):
        ParameterMonitor(Last(), "wieght", nn.Linear(1, 1))
    with pytest.raises(TargetError, match="owns no parameters itself"):
        ParameterMonitor(Last(), module=nn.ReLU())
    with pytest.raises(ValueError, match="'step', 'call' or 'tick'"):
        ParameterMonitor(Last(), when="epoch")  # type: ignore[arg-type]
    with pytest.raises(TargetError, match="name of a state"):
        OptimizerStateMonitor(Last(), "")


@pytest.mark.parametrize("make", [torch.optim.SGD, lambda p: torch.optim.LBFGS(p, max_iter=3)])
def test_gradients_that_a_closure_makes_are_those_of_its_own_step(make: Callable[[Any], torch.optim.Optimizer]) -> None:
    layer = nn.Linear(2, 1)
    gradient, update = ParameterGradientMonitor(Last(), "weight", layer), ParameterUpdateMonitor(Collect(), "weight", layer)
    optimizer = make(layer.parameters())
    made: list[Tensor] = []

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = (layer(torch.ones(1, 2)) - 1).square().sum()
        loss.backward()
        made.append(layer.weight.grad.clone())
        return loss

    for step in (1, 2):
        before = layer.weight.detach().clone()
        optimizer.step(closure=closure) if step == 1 else optimizer.step(closure)
        torch.testing.assert_close(gradient.peek(), made[-1], rtol=0, atol=0)
        torch.testing.assert_close(update.peek()[-1:], layer.weight.detach() - before, rtol=0, atol=0)
        assert (gradient.samples, update.samples) == (step, step)
    assert "no gradient (frozen or unused)" not in gradient.counts


def test_accumulated_gradients_follow_parameters_replaced_frozen_and_thawed() -> None:
    layer = nn.Linear(2, 1, bias=False).requires_grad_(False)
    monitor = ParameterGradientMonitor(Count(), "weight", layer, when="accumulate")
    x = torch.ones(1, 2, requires_grad=True)

    def backward() -> int:
        layer(x).sum().backward()
        return monitor.samples

    assert backward() == 0
    layer.requires_grad_(True)
    assert [backward(), backward()] == [1, 2]
    old = layer.weight
    layer.load_state_dict({"weight": torch.ones(1, 2)}, assign=True)
    assert backward() == 3
    (old * 2).sum().backward()
    assert monitor.samples == 3
    monitor.deregister()
    assert backward() == 3


def test_every_counts_the_steps_of_each_optimizer_apart() -> None:
    layer = nn.Linear(2, 1)
    kinds = [ParameterGradientMonitor, ParameterMonitor, ParameterUpdateMonitor]
    monitors = [kind(Count(), None, layer, every=2) for kind in kinds]
    optimizers = [torch.optim.SGD([layer.weight], lr=0.1), torch.optim.SGD([layer.bias], lr=0.1)]
    for _ in range(4):
        layer(torch.ones(1, 2)).sum().backward()
        for optimizer in optimizers:
            optimizer.step()
    for monitor in monitors:
        assert {path: int(state["count"]) for path, state in monitor.states.items()} == {"weight": 4, "bias": 2}


def test_an_optimizer_that_runs_inside_backward_is_seen_as_any_other() -> None:
    layer = nn.Linear(2, 1)
    monitors = [kind(Collect(), None, layer) for kind in (ParameterGradientMonitor, ParameterUpdateMonitor)]
    optimizers = {parameter: torch.optim.SGD([parameter], lr=0.5) for parameter in layer.parameters()}

    def step_now(parameter: nn.Parameter) -> None:
        optimizers[parameter].step()
        optimizers[parameter].zero_grad()

    for parameter in layer.parameters():
        parameter.register_post_accumulate_grad_hook(step_now)
    for _ in range(2):
        layer(torch.ones(1, 2)).sum().backward()
    assert {path: value.tolist() for path, value in monitors[0].peek().items()} == {"weight": [[1, 1], [1, 1]], "bias": [1, 1]}
    for path, change in monitors[1].peek().items():
        torch.testing.assert_close(change, -0.5 * monitors[0].peek()[path])


def test_lazy_parameters_are_hooked_once_they_are_there() -> None:
    layer = nn.LazyLinear(2)
    monitor = ParameterGradientMonitor(Count(), "weight", layer, when="accumulate")
    layer(torch.ones(1, 3)).sum().backward()
    assert (monitor.samples, monitor.peek()) == (1, 6)


def test_parameters_that_a_conversion_swaps_are_hooked_anew() -> None:
    layer = nn.Linear(2, 1)
    monitors = [ParameterGradientMonitor(Count(), "weight", layer, when="accumulate") for _ in range(2)]
    torch.__future__.set_swap_module_params_on_conversion(True)
    try:
        for step in range(4):
            layer(torch.ones(1, 2, dtype=layer.weight.dtype)).sum().backward()
            layer.zero_grad()
            if step == 1:
                layer.double()
    finally:
        torch.__future__.set_swap_module_params_on_conversion(False)
    assert [monitor.samples for monitor in monitors] == [4, 4]


def test_a_parameter_under_two_names_is_hooked_once_though_one_is_replaced() -> None:
    layer = nn.Linear(2, 2, bias=False)
    layer.register_parameter("tied", layer.weight)
    monitor = ParameterGradientMonitor(Sum(), None, layer, when="accumulate")
    for step in range(3):
        if step == 1:
            layer.weight = nn.Parameter(torch.ones(2, 2))
        (layer(torch.ones(1, 2)).sum() + 2 * layer.tied.sum()).backward()
        layer.zero_grad()
    assert {path: int(value) for path, value in monitor.peek().items()} == {"weight": 4 * (3 + 1 + 1), "tied": 4 * (3 + 2 + 2)}


class SAM(torch.optim.Optimizer):
    """As they are commonly written: the step of the one that it wraps is taken from where the gradients were taken."""

    def __init__(self, params: Any, base: Callable[..., torch.optim.Optimizer], shared: bool = True, **options: Any) -> None:
        super().__init__(params, {"rho": 0.05, **options})
        self.base = base(self.param_groups if shared else self.param_groups[0]["params"], **options)
        if shared:
            self.param_groups = self.base.param_groups

    @torch.no_grad()
    def first_step(self) -> None:
        for parameter in self.param_groups[0]["params"]:
            self.state[parameter]["old"] = parameter.detach().clone()
            parameter.add_(parameter.grad, alpha=0.05)
            parameter.grad = None

    @torch.no_grad()
    def second_step(self) -> None:
        for parameter in self.param_groups[0]["params"]:
            parameter.copy_(self.state[parameter]["old"])
        self.base.step()

    def step(self, closure: Any = None) -> None:
        closure = torch.enable_grad()(closure)
        closure()
        self.first_step()
        closure()
        self.second_step()


class Lookahead(torch.optim.Optimizer):
    """Takes `times` steps of the one that it wraps, and goes half the way."""

    def __init__(self, base: torch.optim.Optimizer, times: int = 2) -> None:
        super().__init__(base.param_groups, {})
        self.base, self.times = base, times

    def step(self, closure: Any = None) -> None:
        old = [parameter.detach().clone() for group in self.param_groups for parameter in group["params"]]
        for _ in range(self.times):
            self.base.step(closure)
        with torch.no_grad():
            for slow, parameter in zip(old, [p for group in self.param_groups for p in group["params"]], strict=True):
                parameter.lerp_(slow, 0.5)


class Derived(torch.optim.SGD):
    """Has no step of its own, but that of its base class, whose hooks fire too once an optimizer of that class was made."""

    def step(self, closure: Any = None) -> Any:
        return super().step(closure)


def all_of(layer: nn.Linear, key: str) -> list[Any]:
    return [
        ParameterMonitor(Collect(), "weight", layer),
        ParameterGradientMonitor(Collect(), "weight", layer),
        ParameterUpdateMonitor(Collect(), "weight", layer),
        OptimizerStateMonitor(Collect(), key, "weight", layer, on_error="raise"),
    ]


@pytest.mark.parametrize("make", [
    lambda p: SAM(p, torch.optim.Adam, lr=0.1),
    lambda p: SAM(p, torch.optim.Adam, shared=False, lr=0.1),
    lambda p: Lookahead(torch.optim.Adam(p, lr=0.1)),
    lambda p: Lookahead(SAM(p, torch.optim.Adam, lr=0.1)),
], ids=["sam", "sam apart", "lookahead", "both"])  # fmt: skip
def test_an_optimizer_that_wraps_another_is_observed_and_counted_once_a_step(make: Callable[[Any], Any]) -> None:
    layer = nn.Linear(2, 1, bias=False)
    optimizer = make(layer.parameters())
    clocks = [Clock().attach(optimizer), Clock().attach(optimizer.base), Clock().attach(optimizer).attach(optimizer.base)]
    monitors = all_of(layer, "exp_avg")
    gradients: list[Tensor] = []

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = layer(torch.ones(1, 2)).square().sum()
        loss.backward()
        gradients.append(layer.weight.grad.clone())
        return loss

    values, used = [layer.weight.detach().clone()], []
    for _ in range(3):
        optimizer.step(closure)
        values.append(layer.weight.detach().clone())
        used.append(gradients[-1])
    assert [monitor.samples for monitor in monitors] == [3] * 4
    assert [clock.step for clock in clocks] == [3] * 3
    value, gradient, update, _ = (monitor.peek() for monitor in monitors)
    torch.testing.assert_close(value, torch.stack(values[1:]).flatten(0, 1), rtol=0, atol=0)
    torch.testing.assert_close(gradient, torch.stack(used).flatten(0, 1), rtol=0, atol=0)
    torch.testing.assert_close(update, torch.stack(values).diff(dim=0).flatten(0, 1), rtol=0, atol=0)


def test_two_halves_of_a_step_by_hand_are_one_step_of_the_optimizer_inside() -> None:
    layer = nn.Linear(2, 1, bias=False)
    optimizer = SAM(layer.parameters(), torch.optim.Adam, lr=0.1)
    clocks, monitors = [Clock().attach(optimizer), Clock().attach(optimizer.base)], all_of(layer, "exp_avg")
    for _ in range(3):
        layer(torch.ones(1, 2)).sum().backward()
        optimizer.first_step()
        layer(torch.ones(1, 2)).sum().backward()
        optimizer.second_step()
    assert [monitor.samples for monitor in monitors] == [3] * 4
    assert [clock.step for clock in clocks] == [3, 3]


def test_an_optimizer_that_calls_the_step_of_its_base_class_is_counted_once() -> None:
    layer = nn.Linear(2, 1, bias=False)
    optimizer, _ = Derived(layer.parameters(), lr=0.1, momentum=0.9), torch.optim.SGD(layer.parameters(), lr=0.1)
    clock, monitors = Clock().attach(optimizer), all_of(layer, "momentum_buffer")
    layer(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    assert [monitor.samples for monitor in monitors] == [1] * 4
    assert clock.step == 1


def test_optimizers_in_turn_and_one_in_anothers_closure_count_each() -> None:
    first, second = nn.Linear(2, 1, bias=False), nn.Linear(2, 1, bias=False)
    outer, inner = torch.optim.SGD(first.parameters(), lr=0.1), torch.optim.SGD(second.parameters(), lr=0.1)
    again = torch.optim.SGD(first.parameters(), lr=0.1)
    clocks = [Clock().attach(optimizer) for optimizer in (outer, inner, again)]
    monitors = [ParameterMonitor(Count(), "weight", layer) for layer in (first, second)]

    def closure() -> Tensor:
        loss = (first(torch.ones(1, 2)) + second(torch.ones(1, 2))).sum()
        loss.backward()
        inner.step()
        return loss

    outer.step(closure)
    again.step()
    assert [monitor.samples for monitor in monitors] == [2, 1]
    assert [clock.step for clock in clocks] == [1, 1, 1]


def test_after_a_step_that_raised_or_was_interrupted_the_next_one_counts() -> None:
    layer = nn.Linear(2, 1, bias=False)
    optimizer = SAM(layer.parameters(), torch.optim.SGD, lr=0.1)
    clock, monitor = Clock().attach(optimizer), ParameterUpdateMonitor(Count(), "weight", layer)

    def fail(error: BaseException) -> None:
        raise error

    for error in (ValueError("the user's own"), KeyboardInterrupt()):
        with pytest.raises(type(error)):
            optimizer.step(lambda error=error: fail(error))
        assert clock.step == 0
        try:
            optimizer.step(lambda error=error: fail(error))
        except BaseException:  # while the one that failed is still to be seen in the traceback
            layer(torch.ones(1, 2)).sum().backward()
            optimizer.step(lambda: layer(torch.ones(1, 2)).sum().backward())
        assert clock.step == 1
        clock.step = 0
    assert monitor.samples == 2


def some_without_bias() -> nn.Module:
    return nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 2, bias=False))


@pytest.mark.parametrize(
    "make",
    [
        lambda attr: ParameterMonitor(Norm(), attr),
        lambda attr: ParameterGradientMonitor(Norm(), attr),
        lambda attr: ParameterUpdateMonitor(Norm(), attr),
        lambda attr: OptimizerStateMonitor(Norm(), "exp_avg", attr),
    ],
    ids=["value", "gradient", "update", "state"],
)
def test_of_several_names_those_are_recorded_that_a_layer_has(make: Callable[[Any], Any]) -> None:
    net = some_without_bias()
    recorder = Recorder(make(("weight", "bias"))).modules(net, types=nn.Linear)
    optimizer = torch.optim.Adam(net.parameters())
    net(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    assert {name: set(recorder[name].peek()) for name in recorder} == {"0": {"weight", "bias"}, "1": {"weight"}}
    assert [row.module for row in recorder.report().rows] == ["Linear", "Linear without bias"]
    assert "on Linear without bias" in str(recorder.plan(torch.ones(1, 2)))


def test_a_name_that_no_layer_has_is_an_error_although_others_are_there() -> None:
    with pytest.raises(SelectionError, match=r"none of the 2 modules selected has .* \['wieght'\], which ParameterMonitor"):
        Recorder(ParameterMonitor(Norm(), ("wieght", "bias"))).modules(some_without_bias(), types=nn.Linear)
    with pytest.raises(TargetError, match=r"no parameter \['a', 'b'\]; it has \['weight', 'bias'\]"):
        ParameterMonitor(Norm(), ("a", "b"), nn.Linear(1, 1))


@pytest.mark.filterwarnings("ignore:.*torch.jit.*is deprecated:DeprecationWarning")
def test_a_part_of_torchscript_leaves_parameters_of_the_others_and_its_own_recorded() -> None:
    part = torch.jit.trace(nn.Sequential(nn.Linear(3, 3), nn.ReLU()), torch.ones(2, 3))
    net = nn.Sequential(nn.Linear(3, 3), part, nn.Linear(3, 2))
    optimizer = torch.optim.SGD(net.parameters(), lr=0.5)
    kinds = {"gradient": ParameterGradientMonitor(Last()), "update": ParameterUpdateMonitor(Last())}
    recorder = Recorder(**kinds).modules(net)
    for number in (1, 2):
        before = {name: parameter.detach().clone() for name, parameter in net.named_parameters()}
        gradients = step(net, optimizer)
        assert len(recorder) == 6
        for name in ("0", "1.0", "2"):
            found = recorder[f"gradient/{name}"]
            assert found.samples == number
            assert bool((found.peek()["weight"] == gradients[f"{name}.weight"]).all())
            moved = net.get_parameter(f"{name}.weight") - before[f"{name}.weight"]
            assert bool((recorder[f"update/{name}"].peek()["weight"] == moved).all())
    plan = recorder.plan(torch.ones(2, 3))
    assert [row.name for row in plan.rows] == [*recorder]


@pytest.mark.filterwarnings("ignore:.*torch.jit.*is deprecated:DeprecationWarning")
def test_a_plan_of_a_part_of_torchscript_leaves_its_sizes_out() -> None:
    part = torch.jit.trace(nn.Sequential(nn.Linear(3, 3), nn.ReLU()), torch.ones(2, 3))
    net = nn.Sequential(nn.Linear(3, 3), part)
    recorder = Recorder(ForwardMonitor(Norm())).modules(net)
    assert [row.name for row in recorder.plan().rows] == [*recorder]
    net(torch.ones(2, 3))
    assert recorder.samples["1"] == 1
