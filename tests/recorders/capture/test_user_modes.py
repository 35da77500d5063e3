"""Dispatch and function modes of the user: selective checkpointing, counters, his own. None of them sees what a monitor does."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import pytest
import torch
from cases import CASES, Case
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts
from torch.utils.flop_counter import FlopCounterMode

from recorders import (
    BackwardInputMonitor,
    BackwardMonitor,
    CallMonitor,
    DifferenceMonitor,
    ForwardInputMonitor,
    ForwardMonitor,
    ParameterGradientMonitor,
    ParameterMonitor,
    ParameterUpdateMonitor,
    Recorder,
    StateMonitor,
)
from recorders._torch import outside_modes
from reducers import Covariance, Last, Max, Mean, Moments, Product, Quantile, Reducer, Sum, Summary, TopK

pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute:UserWarning")  # the compiler's own, as it looks at any tensor

Operators = Any
MATMULS = (torch.ops.aten.mm.default, torch.ops.aten.addmm.default, torch.ops.aten.bmm.default, torch.ops.aten.mv.default)


class Seeing(TorchDispatchMode):
    """Keeps the operators it sees."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[Operators] = []

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen.append(function)
        return function(*args, **(kwargs or {}))


class SeeingFunctions(TorchFunctionMode):
    """Keeps the functions it sees."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[object] = []

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen.append(function)
        return function(*args, **(kwargs or {}))


class Inner(nn.Module):
    """What is checkpointed: operators that a monitor uses too, between operators that it does not."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.act, self.second = nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        x = (x * x.abs()).square()
        out: Tensor = self.second(self.act(x)) @ torch.ones(4, 4)
        return out


class Net(nn.Module):
    def __init__(self, policy: Any) -> None:
        super().__init__()
        self.inner, self.head = Inner(), nn.Linear(4, 2)
        self.contexts = partial(create_selective_checkpoint_contexts, policy)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(checkpoint(self.inner, x, use_reentrant=False, context_fn=self.contexts))
        return out


def save_everything(context: Any, operator: Operators, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SAVE


def prefer_to_save(context: Any, operator: Operators, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    return CheckpointPolicy.PREFER_SAVE


def save_all_but_matmuls(context: Any, operator: Operators, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    return CheckpointPolicy.PREFER_RECOMPUTE if operator in MATMULS else CheckpointPolicy.MUST_SAVE


POLICIES = {"everything": save_everything, "prefer": prefer_to_save, "all but matmuls": save_all_but_matmuls}
CALLABLES: dict[str, dict[str, Callable[..., Any]]] = {
    "bare": {},
    "mul": {"op_": lambda *xs: xs[0] * 2},
    "mm": {"op_": lambda *xs: xs[0] @ xs[0].T},
    "map": {"map_": lambda *xs: (xs[0].abs().square(),)},
    "filter": {"filter_": lambda *xs: bool(xs[0].abs().sum() >= 0)},
}


def trained(policy: Any, record: Callable[[nn.Module], object], compiled: str = "") -> list[Tensor]:
    """Losses and gradients of three steps."""
    torch.manual_seed(0)
    net = Net(policy)
    _kept = record(net)  # a recorder that is dropped is told of
    call = torch.compile(net, backend=compiled, fullgraph=True) if compiled else net
    losses = []
    for _ in range(3):
        loss = call(torch.randn(5, 4)).square().sum()
        loss.backward()
        losses.append(loss.detach())
    return [*losses, *(parameter.grad for parameter in net.parameters() if parameter.grad is not None)]


def equal(a: Iterable[Tensor], b: Iterable[Tensor]) -> bool:
    return all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


def everywhere(reducer: Reducer, types: type | None = None, **callables: Any) -> Callable[[nn.Module], Recorder]:
    def record(net: nn.Module) -> Recorder:
        return Recorder(
            out=ForwardMonitor(reducer, **callables),
            inp=ForwardInputMonitor(reducer, **callables),
            back=BackwardMonitor(reducer, **callables),
            into=BackwardInputMonitor(reducer, **callables),
        ).modules(net, types=types)

    return record


def operators_of(reducer: Reducer, *callables: Callable[..., Any]) -> list[Operators]:
    """Those that a reducer and callables use by themselves."""
    with Seeing() as mode, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for x in (torch.randn(5, 4), torch.randn(5, 4)):
            for function in callables:
                function(x)
            try:
                reducer.merge(reducer.update({}, x), reducer.update({}, x))
            except Exception:  # it takes more than one tensor: what it did up to there
                continue
    return sorted(set(mode.seen), key=str)


BARE = {name: trained(policy, lambda net: None) for name, policy in POLICIES.items()}


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.filterwarnings("ignore:.*this observation is left out:recorders.RecordingWarning")  # some take other tensors
def test_no_reducer_changes_a_training_under_selective_checkpointing(case: Case) -> None:
    for name, policy in POLICIES.items():
        assert equal(trained(policy, everywhere(case.reducer)), BARE[name])
    own = operators_of(case.reducer)
    if own:
        assert equal(trained(own, everywhere(case.reducer)), trained(own, lambda net: None))


@pytest.mark.slow
@pytest.mark.parametrize("callables", CALLABLES.values(), ids=CALLABLES)
@pytest.mark.parametrize(
    "reducer",
    [Mean(), Mean().premap(torch.abs), Max(), Summary(), Covariance("b d -> d"), Product(a=Summary(), b=Quantile()), TopK(k=2)],
    ids=lambda reducer: type(reducer).__name__,
)
def test_no_callable_changes_a_training_under_selective_checkpointing(reducer: Reducer, callables: dict[str, Any]) -> None:
    own = operators_of(reducer, *callables.values())
    record = everywhere(reducer, **callables)
    for policy, bare in [*((POLICIES[name], BARE[name]) for name in POLICIES), (own, trained(own, lambda net: None))]:
        made: list[Recorder] = []
        assert equal(trained(policy, lambda net, made=made: made.append(record(net))), bare)  # type: ignore[misc]
        assert set(made[0].samples.values()) == {3, 0}
        nothing = [name for name, monitor in made[0].items() if not monitor.samples]
        assert nothing == ["into", "into/inner", "into/inner.first"]  # the batch itself asks for no gradient


def test_the_smallest_case_has_the_gradient_it_should_have() -> None:
    class Small(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(3, 3)

        def forward(self, x: Tensor) -> Tensor:
            x = self.layer(x)
            return (x * x.abs()).square()

    def gradient(recorded: bool) -> Tensor:
        torch.manual_seed(0)
        net = Small()
        if recorded:
            _kept = Recorder(ForwardInputMonitor(Mean(), op_=lambda x: x * 2)).modules(net)
        contexts = lambda: create_selective_checkpoint_contexts([torch.ops.aten.mul.Tensor])  # noqa: E731
        checkpoint(net, torch.randn(4, 3), use_reentrant=False, context_fn=contexts).sum().backward()
        assert net.layer.weight.grad is not None
        return net.layer.weight.grad

    assert torch.equal(gradient(True), gradient(False))


@pytest.mark.slow
@pytest.mark.parametrize("policy", [*POLICIES.values(), [torch.ops.aten.mul.Tensor, *MATMULS]], ids=[*POLICIES, "list"])
@pytest.mark.parametrize("callables", [CALLABLES["bare"], CALLABLES["mul"], CALLABLES["filter"]], ids=["bare", "mul", "filter"])
def test_a_compiled_training_under_selective_checkpointing_is_the_same(policy: Any, callables: dict[str, Any]) -> None:
    statistics = Product(summary=Summary(), top=TopK(k=2), spread=Covariance("b d -> d"), last=Last(), bins=Quantile())

    def run(record: Callable[[nn.Module], object]) -> list[Tensor]:
        torch._dynamo.reset()
        return trained(policy, record, compiled="aot_eager")

    recorders: list[Recorder] = []
    record = everywhere(statistics, nn.Linear, **callables)
    assert equal(run(lambda net: recorders.append(record(net))), run(lambda net: None))
    assert set(recorders[0].samples.values()) == {3, 0}
    samples, results = list(recorders[0].samples.values()), recorders[0].compute()
    trained(policy, lambda net: recorders.append(record(net)))
    assert samples == list(recorders[1].samples.values())
    torch.testing.assert_close(results, recorders[1].compute(), rtol=1e-4, atol=1e-5)


def everything(net: nn.Module) -> Recorder:
    return Recorder(
        out=ForwardMonitor(Summary()),
        inp=ForwardInputMonitor(Moments(), op_=lambda x: x * 2),
        back=BackwardMonitor(Summary(), op_=lambda gradient, output: gradient * output),
        into=BackwardInputMonitor(Quantile()),
        state=StateMonitor(Mean(), "weight"),
        difference=DifferenceMonitor(Max(), "weight"),
        values=ParameterMonitor(Summary()),
        gradients=ParameterGradientMonitor(Summary()),
        arriving=ParameterGradientMonitor(Sum(), when="accumulate"),
        updates=ParameterUpdateMonitor(Moments()),
        loss=CallMonitor(Mean()),
    ).modules(net)


@pytest.mark.parametrize("mode", [Seeing, SeeingFunctions])
def test_a_mode_of_the_user_sees_the_users_program_and_nothing_else(mode: Callable[[], Any]) -> None:
    def seen(recorded: bool) -> list[object]:
        torch.manual_seed(0)
        net = Inner()
        optimizer = torch.optim.Adam(net.parameters())
        recorder = everything(net) if recorded else None
        with mode() as on:
            for _ in range(3):
                loss = net(torch.randn(5, 4)).square().sum()
                if recorder is not None:
                    recorder["loss"].push(loss)  # type: ignore[attr-defined]
                loss.backward()
                optimizer.step()
                if recorder is not None:
                    recorder.compute()
        found: list[object] = on.seen
        return found

    bare = seen(False)
    assert len(bare) > 30
    assert seen(True) == bare


def test_flops_are_those_of_the_net() -> None:
    def flops(recorded: bool) -> int:
        net = Inner()
        if recorded:
            back = BackwardMonitor(Mean(), op_=lambda g, o: g @ o.T)
            _kept = Recorder(out=ForwardMonitor(Covariance("b d -> d")), back=back).modules(net)
        with FlopCounterMode(display=False) as counter:
            net(torch.randn(5, 4)).sum().backward()
        total: int = counter.get_total_flops()
        return total

    assert flops(True) == flops(False) > 0


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
def test_the_users_modes_are_on_again_however_the_work_ends(error: type[BaseException]) -> None:
    def fail() -> None:
        torch.ones(1)
        raise error

    outer, inner, functions = Seeing(), Seeing(), SeeingFunctions()
    with outer, inner, functions:
        with pytest.raises(error):
            outside_modes(fail)
        assert [outer.seen, inner.seen, functions.seen] == [[], [], []]
        torch.ones(1)
    assert len(outer.seen) == len(inner.seen) > 0
    assert len(functions.seen) == 1


def test_the_default_device_of_the_user_holds_for_callables() -> None:
    layer = nn.Identity()
    monitor = ForwardMonitor(Last(), layer, op_=lambda output, inputs: torch.zeros(2))
    with torch.device("meta"):
        layer(torch.ones(1, device="cpu"))
    assert monitor.counts["not a real tensor (meta, fake, vmap or grad)"] == 1
