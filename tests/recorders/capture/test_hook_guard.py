"""Whatever a hook is called with, and whatever goes wrong in it, the user's forward, backward and compilation go on."""

from __future__ import annotations

import dataclasses
import pickle
import subprocess
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.utils import counters

from recorders import (
    BackwardInputMonitor,
    BackwardMonitor,
    DifferenceMonitor,
    ForwardInputMonitor,
    ForwardMonitor,
    Monitor,
    MonitorError,
    ParameterMonitor,
    Recorder,
    RecordingWarning,
    StateMonitor,
)
from reducers import Count, Last, Max, Mean, Moments, Quantile, Sum, Summary

KINDS: dict[str, Callable[..., Monitor]] = {
    "out": ForwardMonitor,
    "inp": ForwardInputMonitor,
    "back": BackwardMonitor,
    "into": BackwardInputMonitor,
}


def everything(**options: Any) -> dict[str, Monitor]:
    return {
        **{name: kind(Summary(), **options) for name, kind in KINDS.items()},
        "state": StateMonitor(Summary(), "weight", **options),
        "difference": DifferenceMonitor(Summary(), "weight", **options),
        "value": ParameterMonitor(Summary(), when="call", **options),
    }


# Hooks that others move, and networks that others rebuild


class Float(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.quant, self.conv, self.norm = torch.ao.quantization.QuantStub(), nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4)
        self.relu, self.dequant = nn.ReLU(), torch.ao.quantization.DeQuantStub()

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.dequant(self.relu(self.norm(self.conv(self.quant(x)))))
        return out


QUIET = pytest.mark.filterwarnings(
    "ignore:.*torch.ao.quantization is deprecated.*", "ignore::UserWarning:torch.ao", "ignore:torch.quantize_per_tensor:UserWarning"
)


def prepared(net: nn.Module) -> None:
    net.train()
    net.qconfig = torch.ao.quantization.get_default_qat_qconfig("fbgemm")  # type: ignore[assignment]
    torch.ao.quantization.prepare_qat(net, inplace=True)


def fused(net: nn.Module) -> None:
    net.eval()
    torch.ao.quantization.fuse_modules(net, [["conv", "norm", "relu"]], inplace=True)


@QUIET
@pytest.mark.parametrize("rebuild", [prepared, fused])
@pytest.mark.parametrize("first", [True, False], ids=["monitored first", "monitored later"])
def test_networks_that_are_prepared_for_quantisation_run_as_without_a_recorder(
    rebuild: Callable[[nn.Module], None], first: bool
) -> None:
    def run(recorded: bool) -> tuple[Tensor, Recorder | None]:
        torch.manual_seed(0)
        net = Float()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            recorder = None
            if recorded and first:
                recorder = Recorder(**{name: kind(Summary()) for name, kind in KINDS.items()}).modules(net)
            rebuild(net)
            if recorded and not first:
                recorder = Recorder(**{name: kind(Summary()) for name, kind in KINDS.items()}).modules(net)
            out: Tensor = net(torch.randn(2, 3, 8, 8))
            if out.requires_grad:
                out.sum().backward()
        return out.detach(), recorder

    bare, _ = run(False)
    out, recorder = run(True)
    assert torch.equal(out, bare)
    assert recorder is not None
    assert recorder["out/relu"].samples == 1 or rebuild is fused
    recorder.deregister()


@QUIET
def test_hooks_that_were_moved_record_nothing_once_they_are_off() -> None:
    class Moved(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x * 2

    layer, other = nn.Linear(2, 2), Moved()
    recorder = Recorder(out=ForwardMonitor(Count()), inp=ForwardInputMonitor(Count()), back=BackwardMonitor(Count())).modules(layer)
    for hook in layer._forward_hooks.values():
        other.register_forward_hook(hook)
    for pre_hook in layer._forward_pre_hooks.values():
        other.register_forward_pre_hook(pre_hook)
    x = torch.ones(1, 2, requires_grad=True)
    other(x).sum().backward()
    assert list(recorder.samples.values()) == [1, 1, 1]
    recorder.deregister()
    other(x).sum().backward()
    assert list(recorder.samples.values()) == [1, 1, 1]


WITHOUT_PACKAGE = """
import pickle, sys
sys.modules["recorders"] = sys.modules["reducers"] = None  # importing them raises
with open(sys.argv[1], "rb") as file:
    for net, x, expected in pickle.load(file):
        out = net(x)
        out.sum().backward()
        assert out.equal(expected)
"""


def test_a_pickled_model_loads_and_runs_if_this_package_is_not_installed(tmp_path: Path) -> None:
    x, models = torch.ones(1, 2), []
    for due in (True, False):
        net = nn.Sequential(nn.Linear(2, 2), nn.ReLU())
        recorder = Recorder(**everything(every_step=2)).modules(net, types=nn.Linear)
        out = net(x)
        out.sum().backward()
        if not due:
            recorder.step()  # takes the hooks out
        models.append((net, x, out.detach()))
    (tmp_path / "models").write_bytes(pickle.dumps(models))
    subprocess.run([sys.executable, "-c", WITHOUT_PACKAGE, str(tmp_path / "models")], check=True)


@QUIET
def test_quantised_tensors_are_recorded_as_the_numbers_they_stand_for() -> None:
    x = torch.randn(4, 3)
    quantised = torch.quantize_per_tensor(x, 0.05, 0, torch.qint8)
    layer = nn.Identity()
    reducers = {"mean": Mean(), "all": Summary(), "last": Last(), "bins": Quantile(), "moments": Moments("b c -> c"), "top": Max()}
    recorder = Recorder(**{name: ForwardMonitor(reducer) for name, reducer in reducers.items()}).modules(layer)
    for _ in range(3):
        layer(quantised)
    expected = quantised.dequantize()
    torch.testing.assert_close(recorder["mean"].peek(), expected.double().mean())
    torch.testing.assert_close(recorder["last"].peek(), expected)
    assert set(recorder.samples.values()) == {3}
    torch.testing.assert_close(Mean().compute(Mean().update({}, quantised)), expected.double().mean())


@QUIET
def test_leaves_are_modules_that_are_called_and_no_packed_parameters() -> None:
    net = torch.ao.quantization.quantize_dynamic(nn.Sequential(nn.Linear(3, 2), nn.ReLU()), {nn.Linear})
    assert any("_packed_params" in name for name, _ in net.named_modules())
    recorder = Recorder(ForwardMonitor(Mean())).modules(net, leaves=True)
    assert list(recorder) == ["0", "1"]
    net(torch.ones(1, 3))
    assert set(recorder.samples.values()) == {1}


@pytest.mark.parametrize("args", [(), (None,), (1, 2, 3, 4, 5, 6), ("text", object())])
def test_hooks_survive_whatever_they_are_called_with(args: tuple[Any, ...]) -> None:
    layer = nn.Linear(2, 2)
    recorder = Recorder(**everything()).modules(layer)
    hooks = [*layer._forward_hooks.values(), *layer._forward_pre_hooks.values()]
    assert len(hooks) == 8
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RecordingWarning)
        for hook in hooks:
            assert hook(*args) is None  # type: ignore[func-returns-value]
    layer(torch.ones(1, 2))
    assert recorder["out"].samples == 1


# Outputs whose walk raises, or has no end


@dataclasses.dataclass
class Lazy:
    value: Tensor

    def __getattribute__(self, name: str) -> Any:
        if name == "value":
            raise RuntimeError("boom")
        return object.__getattribute__(self, name)


class Raising(dict[str, Tensor]):
    def items(self) -> Any:
        raise RuntimeError("boom")


def itself() -> list[Any]:
    value: list[Any] = [torch.ones(2)]
    value.append(value)
    return value


class Returning(nn.Module):
    """Returns what it is told to."""

    def __init__(self, value: object) -> None:
        super().__init__()
        self.value = value
        self.weight = nn.Parameter(torch.ones(2))

    def forward(self, x: object) -> object:
        return self.value


ODD = {"lazy": lambda: Lazy(torch.ones(1)), "items": Raising, "itself": itself, "object": object}


@pytest.mark.parametrize("make", ODD.values(), ids=ODD)
@pytest.mark.parametrize("callables", [{}, {"op_": lambda *xs: xs[0]}, {"filter_": lambda *xs: True}], ids=["bare", "op", "filter"])
def test_outputs_whose_walk_raises_cost_the_observation_at_most(make: Callable[[], object], callables: dict[str, Any]) -> None:
    value = make()
    net = Returning(value)
    recorder = Recorder(**everything(**callables)).modules(net)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RecordingWarning)
        for _ in range(2):
            assert net(value) is value
    assert recorder["out"].samples == 0
    assert recorder["state"].samples == 2
    recorder.report()


def test_only_what_is_asked_for_leaves_a_hook() -> None:
    net = Returning(Lazy(torch.ones(1)))
    for kind in (ForwardMonitor, BackwardMonitor):
        monitor = kind(Mean(), net, on_error="raise")
        with pytest.raises(MonitorError, match="boom"):
            net(torch.ones(1))
        monitor.deregister()


def test_outputs_without_tensors_are_told_of_by_the_report() -> None:
    net = Returning("text")
    recorder = Recorder(BackwardMonitor(Mean())).modules(net)
    net(torch.ones(1))
    row = recorder.report().rows[0]
    assert row.skipped == {"there is no tensor in it": 1}
    assert "no tensor" in row.reason


# Subclasses of tensors


class Named(Tensor):
    """A subclass as users write them: its results are of the subclass too."""


def test_states_are_plain_tensors_whatever_the_operands_are() -> None:
    layer = nn.Identity()
    reducers = {"mean": Mean(), "last": Last(), "bins": Quantile(), "all": Summary("b c -> c")}
    recorder = Recorder(**{name: ForwardMonitor(reducer) for name, reducer in reducers.items()}).modules(layer)
    x = torch.randn(4, 3).as_subclass(Named)
    for _ in range(3):
        assert type(layer(x)) is Named
    assert set(recorder.samples.values()) == {3}
    assert {type(value) for monitor in recorder.values() for value in monitor.state.values()} == {Tensor}
    state = Mean().update({}, x)
    assert {type(value) for value in state.values()} == {Tensor}


def test_traces_of_fx_are_told_of_by_the_report_and_not_warned_of() -> None:
    class Leaf(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x + 1

    class Tracer(torch.fx.Tracer):
        def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
            return False

    net = nn.Sequential(nn.Linear(2, 2), Leaf())
    recorder = Recorder(**{name: kind(Mean()) for name, kind in KINDS.items()}).modules(net)
    graph = Tracer().trace(net)
    assert len([node for node in graph.nodes if node.op == "call_function"]) == 2
    assert set(recorder.samples.values()) == {0}
    assert any("traced (torch.fx)" in row.skipped for row in recorder.report().rows)


# Inside compiled graphs


def boom(*_: object) -> Any:
    raise ValueError("boom")


FAILING: dict[str, Callable[[], Monitor]] = {
    "op": lambda: ForwardMonitor(Mean(), op_=boom),
    "map": lambda: ForwardInputMonitor(Mean(), map_=boom),
    "filter": lambda: ForwardMonitor(Mean(), filter_=boom),
    "condition": lambda: ForwardMonitor(Mean(), condition=boom),
    "premap": lambda: ForwardMonitor(Mean().premap(boom)),
    "pattern": lambda: ForwardMonitor(Mean("b c h w -> c")),
    "op of a gradient": lambda: BackwardMonitor(Mean(), op_=boom),
    "pattern of a gradient": lambda: BackwardMonitor(Mean("b c h w -> c")),
    "premap of a gradient": lambda: BackwardMonitor(Mean().premap(boom)),
    "not a tuple": lambda: ForwardMonitor(Mean(), map_=lambda *xs: [xs[0]]),
    "missing": lambda: ForwardMonitor(Mean(), op_=lambda output, inputs: output.nothing),
}


@pytest.mark.usefixtures("fresh_compiler")
@pytest.mark.filterwarnings("ignore:The .grad attribute:UserWarning")
@pytest.mark.parametrize(
    "make",
    [
        pytest.param(make, id=name, marks=() if name in ("condition", "op of a gradient") else pytest.mark.slow)
        for name, make in FAILING.items()
    ],
)
def test_what_fails_in_a_monitor_ends_no_compilation(make: Callable[[], Monitor]) -> None:
    def run(record: bool) -> tuple[list[Tensor], Recorder | None]:
        torch._dynamo.reset()
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(3, 3), nn.ReLU(), nn.Linear(3, 2))
        recorder = Recorder(bad=make(), good=ForwardMonitor(Sum())).modules(net[0]) if record else None
        call = torch.compile(net, backend="aot_eager", fullgraph=True)
        losses = []
        for _ in range(2):
            loss = call(torch.randn(4, 3)).square().sum()
            loss.backward()
            losses.append(loss.detach())
        return [*losses, *(p.grad for p in net.parameters() if p.grad is not None)], recorder

    bare, _ = run(False)
    counters.clear()
    with pytest.warns(RecordingWarning, match="bad") as caught:
        out, recorder = run(True)
    assert len([item for item in caught if issubclass(item.category, RecordingWarning)]) == 1
    assert all(torch.equal(a, b) for a, b in zip(out, bare, strict=True))
    assert counters["stats"]["unique_graphs"] == 1
    assert not counters["graph_break"]
    assert recorder is not None
    assert recorder["good"].samples == 2
    assert recorder["bad"].samples == 0
    assert recorder["bad"].counts["errors"] == 2


@pytest.mark.usefixtures("fresh_compiler")
def test_complex_outputs_in_a_graph_are_left_out_as_in_eager_mode() -> None:
    class Complex(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return torch.complex(x, x)

    layer = Complex()
    monitor = ForwardMonitor(Summary(), layer)
    call = torch.compile(nn.Sequential(layer), backend="aot_eager", fullgraph=True)
    with pytest.warns(RecordingWarning, match="DTypeError"):
        assert call(torch.ones(2)).is_complex()
    assert monitor.samples == 0


@pytest.mark.usefixtures("fresh_compiler")
def test_callables_in_a_graph_see_what_they_see_in_eager_mode() -> None:
    @dataclasses.dataclass
    class Out:
        logits: Tensor
        loss: Tensor | None
        kind: str

    class Net(nn.Module):
        def forward(self, x: Tensor, *, scale: float, parts: list[Tensor], flag: bool, count: int) -> Out:
            return Out(x * scale + parts[0] + count, None, "plain")

    seen: list[Any] = []

    def keep(output: Out, inputs: Any) -> Tensor:
        seen.append((output.loss, output.kind, inputs["scale"], inputs["flag"], inputs["count"], len(inputs["parts"])))
        return output.logits * inputs["scale"]

    layer = Net()
    monitor = ForwardMonitor(Sum(), layer, op_=keep, filter_=lambda output, inputs: inputs["count"] != 2)

    class Outer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = layer

        def forward(self, x: Tensor, count: int) -> Tensor:
            out: Tensor = self.layer(x, scale=0.5, parts=[x, x], flag=True, count=count).logits
            return out

    net = Outer()
    call = torch.compile(net, backend="aot_eager", fullgraph=True)
    for count in (1, 2, 3, 4):
        call(torch.ones(3), count)
    compiled, seen[:] = (monitor.samples, monitor.peek(), list(seen)), []
    monitor.clear()
    for count in (1, 2, 3, 4):
        net(torch.ones(3), count)
    assert (monitor.samples, monitor.peek(), seen) == compiled
    assert [item[4] for item in seen] == [1, 3, 4]


@pytest.mark.usefixtures("fresh_compiler")
def test_on_error_raise_in_a_graph_raises_when_it_runs() -> None:
    layer = nn.ReLU()
    ForwardMonitor(Mean(), layer, op_=boom, on_error="raise")
    call = torch.compile(nn.Sequential(layer), backend="aot_eager", fullgraph=True)
    with pytest.raises(MonitorError, match="boom"):
        call(torch.ones(2))


@pytest.mark.usefixtures("fresh_compiler")
@pytest.mark.parametrize("kind", [StateMonitor, DifferenceMonitor])
def test_an_attribute_that_raises_in_a_graph_ends_no_compilation(kind: Callable[..., Monitor]) -> None:
    class Moody(nn.Module):
        calm = True

        @property
        def mood(self) -> Tensor:
            if not self.calm:
                raise ValueError("boom")
            return torch.ones(1)

        def forward(self, x: Tensor) -> Tensor:
            return x * 2

    layer = Moody()
    monitor = kind(Mean(), "mood", layer)
    layer.calm = False
    call = torch.compile(nn.Sequential(layer), backend="aot_eager", fullgraph=True)
    with pytest.warns(RecordingWarning, match="could not be read while the graph was traced"):
        assert torch.equal(call(torch.ones(2)), torch.full((2,), 2.0))
    assert monitor.samples == 0
