"""Graphs that accumulate in place, by Triton's interpreter on CPU tensors: the numbers of eager mode, and no need of Python."""

from __future__ import annotations

import gc
import importlib.util
import os
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

if os.environ.get("TRITON_INTERPRET") != "1" or importlib.util.find_spec("triton") is None:
    pytest.skip("needs triton (extra gpu-tests) and TRITON_INTERPRET=1", allow_module_level=True)

from functorch.compile import make_boxed_func
from torch._dynamo.backends.common import aot_autograd
from torch._dynamo.utils import counters
from torch.utils.checkpoint import checkpoint

from recorders import BackwardMonitor, CallMonitor, ForwardInputMonitor, ForwardMonitor, Recorder, load
from recorders.graphs import device as on_device
from reducers import Last, Max, Mean, Moments, Norm, Product, Sum, Summary
from reducers.kernels import dispatch
from reducers.kernels.triton import accumulate, lanes

pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute:UserWarning")  # the compiler's own, as it looks at any tensor


@pytest.fixture(autouse=True)
def on_cpu(fresh_compiler: None, without_loops: None, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """CPU tensors take the way of CUDA tensors."""
    torch.manual_seed(0)
    failed: list[Exception] = []
    monkeypatch.setattr(lanes, "_LANES", 4)  # the interpreter computes whole tiles
    monkeypatch.setattr("reducers.kernels.failing._failed", failed)
    monkeypatch.setitem(dispatch.SWEEPS, "cpu", dispatch.SWEEPS["cuda"])
    yield
    assert failed == []


class Graphs:
    """A backend that keeps the graphs of AOT, forwards and backwards."""

    def __init__(self) -> None:
        self.found: list[torch.fx.GraphModule] = []
        self.backend = aot_autograd(fw_compiler=self._keep, bw_compiler=self._keep)

    def _keep(self, graph: torch.fx.GraphModule, inputs: Any) -> Any:
        self.found.append(graph)
        return make_boxed_func(graph.forward)

    def compile(self, function: Any) -> Any:
        return torch.compile(function, backend=self.backend, fullgraph=True)

    @property
    def observations(self) -> list[torch.fx.Node]:
        """The operators of this package that the graphs hold."""
        effects = [node for graph in self.found for node in graph.graph.nodes if "with_effects" in str(node.target)]
        return [node for node in effects if "torch_recorders" in str(node.args[1])]

    @property
    def operators(self) -> list[str]:
        return [str(node.args[1]) for node in self.observations]


def mlp() -> nn.Module:
    """In float64, so that the kernels and eager mode differ by rounding only."""
    return nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3)).double()


def batches(count: int = 3) -> list[Tensor]:
    return [torch.randn(6, 4, dtype=torch.float64) for _ in range(count)]


def train(call: Callable[[Tensor], Tensor], xs: list[Tensor]) -> None:
    for x in xs:
        torch.autograd.backward(call(x).square().sum())


def handle_of(monitor: Any) -> Any:
    return monitor.sink.tensor.handle_cpu_None


def near(given: Any, wanted: Any) -> None:
    torch.testing.assert_close(given, wanted, rtol=1e-12, atol=1e-12)


def as_eager(recorder: Recorder, net: nn.Module, xs: list[Tensor]) -> None:
    """What was recorded is what eager mode records of these batches."""
    samples, results = list(recorder.samples.values()), recorder.compute()
    recorder.reset()
    with pytest.MonkeyPatch.context() as patch:
        patch.delitem(dispatch.SWEEPS, "cpu")
        train(net, xs)
    assert samples == list(recorder.samples.values())
    near(results, recorder.compute())


def test_forwards_and_gradients_have_the_numbers_of_eager_mode() -> None:
    net, xs, graphs = mlp(), batches(2), Graphs()
    recorder = Recorder(
        out=ForwardMonitor(Summary()), inp=ForwardInputMonitor(Mean()), back=BackwardMonitor(Moments("b c -> c", order=4))
    ).modules(net, types=(nn.Linear, nn.Tanh))
    train(graphs.compile(net), xs)
    assert counters["stats"]["unique_graphs"] == 1
    assert not counters["recompiles"]
    assert graphs.operators == ["torch_recorders.accumulate.default"] * 9
    assert set(recorder.samples.values()) == {2}
    as_eager(recorder, net, xs)


def test_the_operator_may_be_in_a_cuda_graph_and_its_inputs_are_on_the_device() -> None:
    operator = torch.ops.torch_recorders.accumulate.default
    assert torch.Tag.cudagraph_unsafe not in operator.tags
    assert torch.Tag.cudagraph_unsafe in torch.ops.torch_recorders.record.default.tags
    net, graphs = mlp(), Graphs()
    Recorder(out=ForwardMonitor(Mean()), back=BackwardMonitor(Mean())).modules(net, types=nn.Linear)
    train(graphs.compile(net), batches(1))
    forward, _ = graphs.found
    placeholders = [node for node in forward.graph.nodes if node.op == "placeholder"]
    numbers = [node for node in placeholders if node.meta["val"].dtype is torch.int64 and node.users]
    # Handles, which a monitor on a GPU has there. The number of a sink, which is on the CPU, has no axis, and no use.
    assert [tuple(node.meta["val"].shape) for node in numbers] == [(2 + accumulate.SLOTS,)] * 4
    for node in graphs.observations:
        handle, x = node.args[2], node.args[-1]
        assert handle.op == "placeholder"
        assert handle.meta["val"].dtype is torch.int64
        assert x.meta["val"].dtype is torch.float64


def test_two_forwards_may_come_before_their_backwards() -> None:
    net, (first, second) = mlp(), batches(2)
    monitor = BackwardMonitor(Sum("b c -> c"), net.get_submodule("0"))
    compiled = Graphs().compile(net)
    outputs = compiled(first), compiled(second)
    for active in (False, True):  # written into the handles, which autograd saved
        monitor.gate.turn(active=active)
    for output, factor in zip(outputs, (1.0, 10.0), strict=True):
        (output * factor).sum().backward()
    assert monitor.samples == 2
    found = monitor.peek()
    monitor.reset()
    for x, factor in ((first, 1.0), (second, 10.0)):
        (net(x) * factor).sum().backward()
    near(found, monitor.peek())


def test_the_training_is_the_same_to_the_bit() -> None:
    def trained(recorded: bool) -> list[Tensor]:
        torch._dynamo.reset()
        torch.manual_seed(0)
        net = mlp()
        if recorded:
            Recorder(out=ForwardMonitor(Mean()), back=BackwardMonitor(Norm())).modules(net, types=nn.Linear)
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
        compiled = Graphs().compile(net)
        for x in batches(2):
            optimizer.zero_grad()
            train(compiled, [x])
            optimizer.step()
        return list(net.parameters())

    for bare, watched in zip(trained(False), trained(True), strict=True):
        assert torch.equal(bare, watched)


class Checkpointed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner, self.head = nn.Sequential(nn.Linear(4, 4), nn.Tanh()), nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(checkpoint(self.inner, x, use_reentrant=False))
        return out


def test_checkpointing_inside_a_graph_counts_nothing_twice() -> None:
    net, xs, graphs = Checkpointed().double(), batches(2), Graphs()
    recorder = Recorder(out=ForwardMonitor(Moments()), back=BackwardMonitor(Mean())).modules(net, types=(nn.Linear, nn.Tanh))
    train(graphs.compile(net), xs)
    assert set(graphs.operators) == {"torch_recorders.accumulate.default"}
    assert set(recorder.samples.values()) == {2}
    as_eager(recorder, net, xs)


def test_forwards_within_a_checkpoint_around_the_graph_call_python_and_count_once() -> None:
    net, xs, graphs = mlp(), batches(2), Graphs()
    recorder = Recorder(out=ForwardMonitor(Moments()), back=BackwardMonitor(Mean())).modules(net, types=nn.Tanh)
    compiled = graphs.compile(net)
    train(lambda x: checkpoint(compiled, x.requires_grad_(), use_reentrant=False), xs)
    assert "torch_recorders.record.default" in graphs.operators
    assert set(recorder.samples.values()) == {2}
    as_eager(recorder, net, xs)


def test_blocks_share_a_graph_and_accumulate_each_for_itself() -> None:
    net, xs = nn.Sequential(*(nn.Sequential(nn.Linear(4, 4), nn.Tanh()) for _ in range(3))).double(), batches(2)
    recorder = Recorder(out=ForwardMonitor(Mean()), back=BackwardMonitor(Max())).modules(net, types=nn.Linear)
    graphs = Graphs()
    for block in net:
        block.compile(backend=graphs.backend, fullgraph=True)
    first = [torch.randn(6, 4, dtype=torch.float64, requires_grad=True) for _ in xs]  # all blocks get inputs with gradients
    train(net, first)
    assert counters["stats"]["unique_graphs"] == 1
    assert not counters["recompiles"]
    assert list(recorder.samples.values()) == [2] * 6
    assert len({monitor.peek() for monitor in recorder.values()}) == 6
    for block in net:
        block._compiled_call_impl = None
    as_eager(recorder, net, first)


def test_one_graph_serves_steps_that_are_due_and_those_that_are_not() -> None:
    net, xs = mlp(), batches(5)
    recorder = Recorder(
        out=ForwardMonitor(Mean(), every_step=2), back=BackwardMonitor(Mean(), every_step=2), all=ForwardMonitor(Max())
    ).modules(net, types=nn.Tanh)
    compiled = Graphs().compile(net)
    for x in xs:
        train(compiled, [x])
        recorder.step()
    assert counters["stats"]["unique_graphs"] == 1
    assert not counters["recompiles"]
    assert list(recorder.samples.values()) == [3, 3, 5]
    recorder.deregister()
    reference = Recorder(out=ForwardMonitor(Mean()), back=BackwardMonitor(Mean())).modules(net, types=nn.Tanh)
    train(net, xs[::2])
    near([monitor.peek() for monitor in recorder.values()][:2], [monitor.peek() for monitor in reference.values()])


def test_looking_resetting_and_eager_forwards_in_between() -> None:
    net, xs = mlp(), batches(4)
    recorder = Recorder(ForwardMonitor(Summary("b c -> c"))).modules(net, types=nn.Tanh)
    (monitor,) = recorder.values()
    compiled = Graphs().compile(net)
    compiled(xs[0])
    recorder.reset()
    assert monitor.samples == 0
    for number, x in enumerate(xs):
        (net if number == 2 else compiled)(x)
        assert monitor.samples == number + 1
        recorder.compute()  # aside
        if number == 1:
            assert monitor.states[""]["count"].tolist() == [12] * 5  # taken out of the accumulators
    reducer = Summary("b c -> c")
    near(monitor.peek(), reducer.compute(reducer.update({}, torch.cat([net[:2](x) for x in xs]))))


def test_reset_keeps_shapes_and_a_monitor_that_is_off_records_nothing() -> None:
    net, xs = mlp(), batches(2)
    recorder = Recorder(ForwardMonitor(Mean("b c -> c"))).modules(net, types=nn.Tanh)
    compiled = Graphs().compile(net)
    compiled(xs[0])
    (monitor,) = recorder.values()
    monitor.reset(keepshape=True)
    recorder.deregister()
    compiled(xs[0])
    assert list(recorder.samples.values()) == [0]
    recorder.register()
    compiled(xs[1])
    assert list(recorder.samples.values()) == [1]
    near(monitor.peek(), net[:2](xs[1]).mean(0))


def test_a_file_holds_what_was_accumulated_and_who_goes_on_counts_it_once(tmp_path: Any) -> None:
    net, xs = mlp(), batches(2)
    recorder = Recorder(ForwardMonitor(Moments())).modules(net, types=nn.Tanh)
    compiled = Graphs().compile(net)
    compiled(xs[0])
    recorder.save(tmp_path / "file")
    compiled(xs[1])
    both = recorder.compute()
    assert list(load(tmp_path / "file").samples.values()) == [1]
    recorder.resume(tmp_path / "file")
    assert list(recorder.samples.values()) == [1]
    compiled(xs[1])
    assert list(recorder.samples.values()) == [2]
    near(recorder.compute(), both)


class TwoSizes(nn.Module):
    def forward(self, x: Tensor, wide: bool) -> Tensor:
        return x * 2 if wide else x[:, :2] * 2


def test_sizes_that_change_are_accumulated_apart_and_never_out_of_bounds() -> None:
    net = TwoSizes()
    total, kept = ForwardMonitor(Sum(), net), ForwardMonitor(Sum("b c -> c"), net)
    compiled = Graphs().compile(lambda x, wide: net(x, wide))  # hooks of the module that is compiled itself are no part of it
    ones = torch.ones(3, 4, dtype=torch.float64)
    for size, wide in ((3, True), (2, False), (5, True), (3, True)):
        compiled(ones[:1].expand(size, 4), wide)
    assert total.samples == 4
    assert total.peek().item() == 2 * 4 * (3 + 5 + 3) + 2 * 2 * 2
    with pytest.warns(UserWarning, match="shape"):  # as in eager mode: a state of another shape
        states = kept.states
    assert states[""]["sum"].tolist() == [22.0] * 4
    assert kept.samples == 3


def test_several_leaves_and_pushed_values_and_none() -> None:
    layer, pushed = nn.Linear(4, 4).double(), CallMonitor(Sum())

    def run(x: Tensor) -> Tensor:
        y = layer(x)
        pushed.push({"first": y[0], "others": y[1:], "none": y[:0]})
        return y

    compiled, x = Graphs().compile(run), torch.randn(6, 4, dtype=torch.float64)
    compiled(x)
    compiled(x)
    y = layer(x)
    assert pushed.samples == 2
    near({name: pushed.leaves()[name] for name in ("first", "others")}, {"first": 2 * y[0].sum(), "others": 2 * y[1:].sum()})


def test_what_needs_python_calls_it() -> None:
    net, graphs = mlp(), Graphs()
    recorder = Recorder(
        condition=ForwardMonitor(Mean(), condition=lambda: False),
        every=ForwardMonitor(Mean(), every=2),
        last=ForwardMonitor(Last()),
        both=ForwardMonitor(Product(a=Mean(), b=Last())),
        op=ForwardMonitor(Mean(), op_=lambda output, inputs: output),
    ).modules(net, types=nn.Tanh)
    compiled = graphs.compile(net)
    for x in batches(2):
        compiled(x)
    assert "torch_recorders.accumulate.default" not in graphs.operators
    assert list(recorder.samples.values()) == [0, 1, 2, 2, 2]


def test_what_kernels_do_not_take_is_handed_over_by_the_number_on_the_cpu() -> None:
    net, graphs = nn.Tanh(), Graphs()
    monitor = ForwardMonitor(Mean("a b c -> c"), net)
    with pytest.warns(UserWarning, match="does not fit"):
        graphs.compile(net)(torch.ones(2, 3))
    assert graphs.operators == ["torch_recorders.record.default"]
    assert graphs.observations[0].args[2][0].meta["val"].ndim == 0
    assert monitor.samples == 0


def test_the_copy_of_a_handle_that_a_cuda_graph_makes_finds_its_monitor() -> None:
    net = nn.Tanh()
    monitor = ForwardMonitor(Mean(), net)
    graphs = Graphs()
    x = torch.randn(6, 4, dtype=torch.float64)
    graphs.compile(net)(x)
    arguments = graphs.observations[0].args[3:-1]
    handle = handle_of(monitor)
    assert on_device.owner_of(handle) is on_device.owner_of(handle.clone()) is monitor.sink
    torch.ops.torch_recorders.accumulate(handle.clone(), *arguments, x)
    assert monitor.samples == 2


def test_a_cuda_graph_runs_no_python_and_finds_the_accumulators(monkeypatch: pytest.MonkeyPatch) -> None:
    net = nn.Tanh()
    monitor = ForwardMonitor(Mean(), net)
    compiled = Graphs().compile(net)
    x = torch.randn(6, 4, dtype=torch.float64)
    compiled(x)
    monkeypatch.setattr(accumulate, "is_captured", lambda: True)
    with monkeypatch.context() as patch:
        patch.setattr(on_device, "owner_of", lambda handle: pytest.fail("a replay has no Python"))
        compiled(x)
    assert monitor.samples == 2
    handle = handle_of(monitor)
    torch.ops.torch_recorders.accumulate(handle, 9, "", "count,sum", [0, 1], 0.0, "", x)  # of which it knows nothing
    assert monitor.samples == 2
    monitor.flush()
    assert monitor.counts["no memory for it on the device when a CUDA graph ran"] == 1


def test_a_monitor_that_is_freed_before_the_backward_leaves_its_memory_to_the_graph() -> None:
    net = mlp()
    monitor = BackwardMonitor(Mean(), net.get_submodule("0"))
    compiled = Graphs().compile(net)
    train(compiled, batches(1))
    output = compiled(batches(1)[0])
    freed, handle = weakref.ref(monitor), handle_of(monitor)
    words = weakref.ref(handle.memory[0][0].words)
    del handle, net, compiled, monitor
    torch._dynamo.reset()
    gc.collect()
    assert freed() is None
    assert words() is not None
    output.sum().backward()
    del output
    gc.collect()
    assert words() is None
