"""The user's program is never changed, and odd modes, shapes and dtypes are recorded right or left out, never wrong."""

from __future__ import annotations

import gc
import sys
import threading
import warnings
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from recorders import (
    BackwardMonitor,
    DifferenceMonitor,
    ForwardInputMonitor,
    ForwardMonitor,
    Recorder,
    RecordingWarning,
    StateMonitor,
)
from reducers import (
    Collect,
    Count,
    FirstNonfinite,
    Geometry,
    History,
    Last,
    Max,
    Mean,
    Moments,
    PerObservation,
    Product,
    Reducer,
    Scan,
    Sum,
    Summary,
)


def test_states_made_in_inference_mode_stay_usable_outside() -> None:
    layer = nn.Linear(3, 2)
    monitor = ForwardMonitor(Product(mean=Mean("b c -> c"), last=Last(), all=Collect()), layer)
    with torch.inference_mode():
        layer(torch.ones(2, 3))
    layer(torch.ones(2, 3))
    assert monitor.samples == 2
    for value in monitor.state.values():
        assert not value.is_inference()
        value.clone().requires_grad_(value.is_floating_point())


def test_in_inference_mode_no_error_is_raised_and_caught_at_each_call() -> None:
    """PyTorch raises one if it is asked how often a tensor was changed there, and to raise it takes longer than to record."""
    layer, raised = nn.Linear(3, 2), []
    monitor = ForwardMonitor(Mean(), layer, op_=lambda output, inputs: output + 1)

    def trace(frame: FrameType, event: str, argument: Any) -> Any:
        if event == "exception" and issubclass(argument[0], RuntimeError):
            raised.append(argument[1])
        return trace

    with torch.inference_mode():
        x, before = torch.ones(2, 3), sys.gettrace()
        sys.settrace(trace)
        try:
            layer(x)
        finally:
            sys.settrace(before)
    assert (monitor.samples, raised) == (1, [])


def test_autocast_does_not_reach_into_a_state() -> None:
    layer = nn.Linear(3, 2)
    plain, mapped = ForwardMonitor(Sum(), layer), ForwardMonitor(Last(), layer, op_=lambda output, inputs: inputs @ inputs.T)
    x = torch.randn(4, 3)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = layer(x)
    assert out.dtype == torch.bfloat16
    assert plain.peek() == out.detach().double().sum()
    assert mapped.peek().dtype == torch.float32


def test_meta_and_fake_tensors_and_transforms_are_left_out_and_break_no_call() -> None:
    from torch._subclasses.fake_tensor import FakeTensorMode

    layer = nn.Linear(3, 2)
    monitor = ForwardMonitor(Mean(), layer)
    parameters = dict(layer.named_parameters())
    x = torch.randn(5, 3)
    expected = layer(x)
    monitor.clear()

    def call(row: Tensor) -> Tensor:
        return torch.func.functional_call(layer, parameters, (row,))

    torch.testing.assert_close(torch.func.vmap(call)(x), expected)
    torch.testing.assert_close(torch.func.grad(lambda row: call(row).sum())(x[0]), layer.weight.sum(0))
    assert monitor.samples == 0
    assert monitor.counts["not a real tensor (meta, fake, vmap or grad)"] == 2
    call(x)
    assert monitor.samples == 1
    meta = nn.Linear(3, 2, device="meta")
    on_meta = ForwardMonitor(Mean(), meta)
    meta(torch.ones(1, 3, device="meta"))
    with FakeTensorMode():
        fake = nn.Linear(3, 2)
        on_fake = ForwardMonitor(Mean(), fake)
        fake(torch.ones(1, 3))
    assert (on_meta.samples, on_fake.samples) == (0, 0)


def test_after_a_forward_that_raised_the_next_call_records_correctly() -> None:
    class Picky(nn.Module):
        state = torch.zeros(1)

        def forward(self, x: Tensor) -> Tensor:
            self.state = x.sum().reshape(1)
            if x.numel() == 0:
                raise ValueError("the user's own")
            return x

    net = Picky()
    kinds = [ForwardMonitor(Collect(), net), ForwardInputMonitor(Collect(), net), StateMonitor(Collect(), "state", net)]
    difference = DifferenceMonitor(Collect(), "state", net)
    with pytest.raises(ValueError, match="the user's own"):
        net(torch.ones(0))
    net(torch.ones(3))
    assert [monitor.peek().tolist() for monitor in kinds] == [[1, 1, 1], [1, 1, 1], [3]]
    assert difference.peek().tolist() == [3]


def test_a_smaller_batch_is_weighted_by_its_count_and_one_sample_does_not_broadcast() -> None:
    layer = nn.Identity()
    monitor = ForwardMonitor(Product(mean=Mean("b c -> c"), moments=Moments("b c -> c")), layer)
    data = torch.randn(9, 3)
    for batch in (data[:4], data[4:8], data[8:], data[9:]):
        layer(batch)
    torch.testing.assert_close(monitor.peek()["mean"], data.double().mean(0))
    torch.testing.assert_close(monitor.peek()["moments"]["var"], data.double().var(0))


def test_shapes_and_dtypes_may_change_between_calls_where_nothing_kept_does() -> None:
    layer = nn.Identity()
    monitor = ForwardMonitor(Product(total=Sum(), top=Max(), n=Count()), layer)
    for x in (torch.ones(2, 3), torch.tensor(5.0), torch.ones(0, 3), torch.ones(4, dtype=torch.bfloat16), torch.ones(1, 1, 1)):
        layer(x)
    assert {name: value.item() for name, value in monitor.peek().items()} == {"total": 16.0, "top": 5.0, "n": 12}


def test_non_finite_values_neither_poison_the_state_nor_change_the_users_tensor() -> None:
    layer = nn.Identity()
    monitor = ForwardMonitor(Mean(), layer)
    x = torch.tensor([1.0, float("nan"), float("inf"), 3.0])
    kept = x.clone()
    layer(x)
    layer(torch.tensor([5.0]))
    assert monitor.peek() == 3.0
    torch.testing.assert_close(x, kept, equal_nan=True, rtol=0, atol=0)


def test_no_graph_and_no_activation_is_kept() -> None:
    net = nn.Sequential(nn.Linear(3, 3), nn.ReLU())
    monitors = [
        ForwardMonitor(Last(), net[0]),
        ForwardMonitor(Last(), net[0], map_=lambda output, inputs: (output[0],)),
        ForwardMonitor(Mean("b c -> c"), net[0], op_=lambda output, inputs: output * net[0].weight.sum()),
    ]
    gc.disable()
    try:
        x = torch.ones(2, 3, requires_grad=True) * 1
        hidden = net[0](x)
        dead = weakref.ref(x), weakref.ref(hidden), weakref.ref(hidden.untyped_storage())
        del x, hidden
        assert [ref() for ref in dead] == [None, None, None]
    finally:
        gc.enable()
    for monitor in monitors:
        assert not any(value.requires_grad for value in monitor.state.values())
    assert monitors[1].state["value"].untyped_storage().nbytes() == 3 * 4


@pytest.mark.slow
def test_recording_takes_no_memory_that_grows() -> None:
    layer = nn.Identity()
    monitor = ForwardMonitor(Product(mean=Mean("b c -> c"), moments=Moments(), last=Last()), layer)
    x = torch.ones(2, 3)

    def held() -> int:
        assert monitor.states  # nothing waits then
        gc.collect()
        return sum(issubclass(type(thing), Tensor) for thing in gc.get_objects())

    for _ in range(10):
        layer(x)
    before = held()
    for _ in range(500):
        layer(x)
    assert held() <= before
    assert monitor.samples == 510


@contextmanager
def interrupted_at_line(number: int) -> Iterator[None]:
    """Raises KeyboardInterrupt before the line of this number that runs in the library."""
    left = number

    def trace(frame: FrameType, event: str, _: object) -> object:
        nonlocal left
        if not any(part in frame.f_code.co_filename for part in ("/recorders/", "/reducers/")):
            return None
        if event == "line":
            left -= 1
            if left == 0:
                raise KeyboardInterrupt
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        yield
    finally:
        sys.settrace(before)


def test_asynchronous_exceptions_do_not_tear_a_state() -> None:
    """An exception between any two operations of an update leaves the state of before or of after."""
    layer = nn.Identity()
    monitor = ForwardMonitor(Product(mean=Mean(), n=Count(), total=Sum()), layer)
    layer(torch.ones(1))
    torn = interrupted = 0
    for at in range(1, 400):
        before = monitor.samples
        try:
            with interrupted_at_line(at):
                layer(torch.ones(1))
                layer(torch.ones(1))  # waits
                layer(torch.ones(1, 1))  # reduced at once, and what waited before it
        except KeyboardInterrupt:
            interrupted += 1
        result = monitor.peek()
        torn += not (result["n"] == result["total"] == monitor.samples and before <= monitor.samples <= before + 3)
    assert interrupted > 40
    assert torn == 0


@pytest.mark.usefixtures("fresh_compiler")
def test_forward_monitors_are_inside_a_compiled_graph_without_breaks_or_recompiles() -> None:
    from torch._dynamo.utils import counters

    net = nn.Sequential(nn.Linear(3, 4), nn.ReLU(inplace=True), nn.Linear(4, 2))
    recorder = Recorder(
        out=ForwardMonitor(Product(moments=Moments("b c -> c"), top=Max())), inp=ForwardInputMonitor(Mean())
    ).modules(net, leaves=True)
    compiled = torch.compile(net, backend="aot_eager", fullgraph=True)
    batches = [torch.randn(5, 3) for _ in range(12)]
    for batch in batches:
        compiled(batch)
    assert counters["stats"]["unique_graphs"] == 1
    assert not counters["graph_break"]
    assert list(recorder.samples.values()) == [12] * 6
    results = recorder.compute()
    recorder.reset()
    for batch in batches:
        net(batch)
    for name, result in recorder.compute().items():
        torch.testing.assert_close(results[name], result)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_on_a_gpu_states_stay_there_and_nothing_synchronises() -> None:
    net = nn.Sequential(nn.Linear(3, 4), nn.ReLU()).cuda()
    recorder = Recorder(ForwardMonitor(Product(moments=Moments("b c -> c"), top=Max()))).modules(net)
    x = torch.randn(5, 3, device="cuda")
    net(x)
    torch.cuda.set_sync_debug_mode("error")
    try:
        for _ in range(3):
            net(x)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert all(value.is_cuda for monitor in recorder.values() for value in monitor.state.values())
    assert list(recorder.samples.values()) == [4, 4, 4]


def test_what_a_monitors_own_callables_call_is_neither_recorded_nor_a_deadlock() -> None:
    net = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    recorder = Recorder(
        op=ForwardMonitor(Count(), op_=lambda output, inputs: net[1](output)),
        premap=ForwardMonitor(Count().premap(lambda x: net[1](x))),
        gradient=BackwardMonitor(Count(), op_=lambda gradient, output: net[1](gradient)),
    ).modules(net, types=nn.Linear)
    net(torch.ones(3, 2)).sum().backward()
    assert list(recorder.samples.values()) == [1] * 6
    assert all(monitor.peek() == 6 for monitor in recorder.values())


def test_a_signal_handler_may_read_a_monitor_in_the_middle_of_its_update() -> None:
    layer = nn.Identity()
    seen: list[int] = []
    monitor = ForwardMonitor(Count().premap(lambda x: (seen.append(monitor.snapshot().samples), x)[1]), layer)
    for _ in range(2):
        layer(torch.ones(1))
    assert seen == [0, 1]
    assert monitor.samples == 2


def test_traced_and_exported_programs_hold_nothing_of_a_monitor() -> None:
    from torch.fx.experimental.proxy_tensor import make_fx

    def nodes(net: nn.Module) -> list[int]:
        exported = [torch.export.export(net, (x,), strict=strict) for strict in (False, True)]
        graphs = [*(program.graph for program in exported), make_fx(net)(x).graph]
        return [len(graph.nodes) for graph in graphs]

    x = torch.ones(3, 2)
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2)).eval()
    bare = nodes(net)
    recorder = Recorder(
        out=ForwardMonitor(Moments()),
        inp=ForwardInputMonitor(Mean(), filter_=lambda x: bool(x.sum() > 0)),
        back=BackwardMonitor(Mean()),
        diff=DifferenceMonitor(Last(), "weight"),
    ).modules(net, leaves=True)
    net(x)
    recorded = list(recorder.samples.values())
    assert nodes(net) == bare
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warnings.filterwarnings("ignore", message=".*torch.jit.*is deprecated", category=DeprecationWarning)
        traced = torch.jit.trace(net, x, check_trace=False)
    assert traced.inlined_graph.findAllNodes("aten::sum") == []
    assert list(recorder.samples.values()) == recorded
    assert all(monitor.last_error is None for monitor in recorder.values())


def test_callables_do_not_see_tensors_without_numbers() -> None:
    layer = nn.Linear(2, 2, device="meta")
    monitor = ForwardMonitor(Mean(), layer, filter_=lambda output, inputs: output.sum().item() > 0)
    with torch.inference_mode(), torch.autocast("cpu", dtype=torch.bfloat16):
        layer(torch.ones(1, 2, device="meta"))
    assert monitor.last_error is None
    assert monitor.counts["not a real tensor (meta, fake, vmap or grad)"] == 1


class Returns(nn.Module):
    def __init__(self, value: object) -> None:
        super().__init__()
        self.value = value

    def forward(self) -> object:
        return self.value


def endless() -> dict[str, object]:
    value: dict[str, object] = {"x": torch.ones(1)}
    value["itself"] = value
    return value


def test_outputs_that_cannot_even_be_described_do_not_break_the_call() -> None:
    net = Returns(endless())
    ForwardMonitor(Mean(), net)
    with pytest.warns(RecordingWarning, match="unknown shape"):
        assert net() is net.value


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("layout", [torch.strided, torch.jagged])
@pytest.mark.parametrize("shape", [(), (4,), (2, 4)])
def test_nested_tensors_are_recorded_row_by_row_without_padding(layout: torch.layout, shape: tuple[int, ...]) -> None:
    parts = [torch.randn(length, *shape) for length in (3, 5)]
    nested = torch.nested.nested_tensor(parts, layout=layout, requires_grad=True)
    net = nn.Identity()
    kinds = {"out": ForwardMonitor(Moments()), "inp": ForwardInputMonitor(Collect()), "grad": BackwardMonitor(Sum())}
    recorder = Recorder(None, **kinds).modules(net)
    for _ in range(2):
        nested.grad = None  # PyTorch accumulates none of a nested tensor
        (net(nested) * 2).to_padded_tensor(0.0).sum().backward()
    rows = torch.cat([part.flatten(0, max(part.ndim - 2, 0)) for part in parts])
    assert torch.equal(recorder["inp"].compute(), torch.cat([rows, rows]))
    assert recorder["out"].compute()["count"] == 2 * rows.numel()
    torch.testing.assert_close(recorder["out"].compute()["mean"], rows.double().mean())
    assert recorder["grad"].compute() == 4 * rows.numel()


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_an_encoder_in_evaluation_records_the_tokens_that_its_mask_leaves() -> None:
    encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), 2).eval()
    padding = torch.arange(5) >= torch.tensor([[3], [5]])
    x = torch.randn(2, 5, 8)
    recorder = Recorder(ForwardMonitor(Mean("channels"))).modules(encoder, names="layers.*.norm2")
    with torch.no_grad(), recorder:
        encoder(x, src_key_padding_mask=padding)
    with torch.no_grad():
        encoder.enable_nested_tensor = False
        wanted = encoder(x, src_key_padding_mask=padding)[~padding].double().mean(0)
    torch.testing.assert_close(recorder["layers.1.norm2"].compute(), wanted, rtol=1e-5, atol=1e-6)
    encoder.enable_nested_tensor = True
    by_axes = Recorder(ForwardMonitor(Mean("b t d -> d"))).modules(encoder, names="layers.1.norm2")
    with torch.no_grad(), by_axes, pytest.warns(RecordingWarning, match=r"\(8, 8\) does not fit.*nested, of 2 tensors, float32"):
        encoder(x, src_key_padding_mask=padding)


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated")
def test_a_recorded_net_that_is_scripted_says_what_to_do() -> None:
    net = nn.Sequential(nn.Linear(2, 1))
    recorder = Recorder(ForwardMonitor(Mean())).modules(net)
    with pytest.raises(AttributeError, match=r"script the net before it is recorded, or call recorder.deregister\(\)"):
        torch.jit.script(net)
    recorder.deregister()
    assert torch.jit.script(net)(torch.ones(1, 2)).shape == (1, 1)


def test_a_module_without_inputs_has_none_to_record_and_no_error() -> None:
    net = Returns(torch.ones(1))
    recorder = Recorder(out=ForwardMonitor(Mean()), inp=ForwardInputMonitor(Mean())).modules(net)
    net()
    assert list(recorder.samples.values()) == [1, 0]
    assert recorder["inp"].counts["operand was None"] == 1


@pytest.mark.usefixtures("fresh_compiler")
def test_hooks_outside_a_compiled_graph_are_not_compiled_by_themselves() -> None:
    from torch._dynamo.utils import counters

    net = nn.Sequential(nn.Linear(3, 2), nn.ReLU())
    recorders = [
        Recorder(out=ForwardMonitor(reducer), inp=ForwardInputMonitor(reducer)).modules(net)
        for reducer in (Mean(), Max(), Sum(), Count())
    ]
    net.compile(backend="eager")  # the hooks of the outermost module run outside of its graph
    for _ in range(3):
        net(torch.randn(4, 3))
    assert counters["stats"]["unique_graphs"] == 1
    assert {samples for recorder in recorders for samples in recorder.samples.values()} == {3}


@pytest.mark.usefixtures("fresh_compiler")
def test_a_mistake_met_while_compiling_is_said_and_does_not_break_the_call() -> None:
    net = nn.Sequential(nn.Linear(3, 2), nn.ReLU())
    recorder = Recorder(wrong=ForwardMonitor(Mean("b c h w -> c")), right=ForwardMonitor(Mean())).modules(net, types=nn.Linear)
    compiled = torch.compile(net, backend="eager")
    x = torch.randn(4, 3)
    with pytest.warns(RecordingWarning, match="needs 4 axes, got 2"):
        out = compiled(x)
    torch.testing.assert_close(out, net(x))
    assert list(recorder.samples.values()) == [0, 2]


def scaled(x: Tensor, state: Tensor) -> Tensor:
    return 0.5 * state + x.double().sum()


TOGETHER = [PerObservation(Mean(), Summary()), Geometry(), FirstNonfinite(), History(Last(), duration=40.0), Scan(scaled, 0.0)]


@pytest.mark.parametrize("reducer", TOGETHER, ids=lambda reducer: type(reducer).__name__)
def test_what_began_in_inference_mode_goes_on_outside_with_the_same_numbers(reducer: Reducer) -> None:
    observed = [torch.randn(8, 64) for _ in range(12)]
    layer, other = nn.ReLU(), nn.ReLU()
    mixed, plain = ForwardMonitor(reducer, layer), ForwardMonitor(reducer, other)
    with torch.inference_mode():
        for x in observed[:6]:
            layer(x)
    for x in observed[6:]:
        layer(x)
    for x in observed:
        other(x)
    torch.testing.assert_close(mixed.peek(), plain.peek())
    torch.func.vmap(layer)(torch.randn(3, 8, 64))  # leaves no tensor of a transform behind
    assert mixed.samples == 12
    torch.testing.assert_close(mixed.peek(), plain.peek())


def test_four_threads_lose_none_of_the_observations_taken_together() -> None:
    layer = nn.Identity()
    monitors = [ForwardMonitor(reducer, layer) for reducer in (Geometry(), PerObservation(Mean(), Summary()))]

    def forwards() -> None:
        for _ in range(200):
            layer(torch.randn(4, 8))

    threads = [threading.Thread(target=forwards) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    geometry, means = (monitor.peek() for monitor in monitors)
    assert (geometry["norm"]["count"], geometry["correlation"]["count"], means["count"]) == (800, 799, 800)
