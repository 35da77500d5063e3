"""The user's program is never changed, and odd modes, shapes and dtypes are recorded right or left out, never wrong."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch
from torch import Tensor, nn

from recorders import DifferenceMonitor, ForwardInputMonitor, ForwardMonitor, Recorder, StateMonitor
from reducers import Collect, Count, Last, Max, Mean, Moments, Product, Sum


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


def test_autocast_does_not_reach_into_a_state() -> None:
    layer = nn.Linear(3, 2)
    plain, mapped = ForwardMonitor(Sum(), layer), ForwardMonitor(Last(), layer, op_=lambda output, inputs: inputs @ inputs.T)
    x = torch.randn(4, 3)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = layer(x)
    assert out.dtype == torch.bfloat16
    assert plain.peek() == out.detach().double().sum()
    assert mapped.peek().dtype == torch.float32


def test_meta_and_fake_tensors_and_transforms_are_left_out_and_do_not_break_the_call() -> None:
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
    assert monitor.tally["not a real tensor (meta, fake, vmap or grad)"] == 2
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


def test_a_smaller_last_batch_is_weighted_by_its_count_and_one_sample_does_not_broadcast() -> None:
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


def test_recording_takes_no_memory_that_grows() -> None:
    layer = nn.Identity()
    monitor = ForwardMonitor(Product(mean=Mean("b c -> c"), moments=Moments(), last=Last()), layer)
    x = torch.ones(2, 3)

    def held() -> int:
        gc.collect()
        return sum(issubclass(type(thing), Tensor) for thing in gc.get_objects())

    for _ in range(10):
        layer(x)
    before = held()
    for _ in range(500):
        layer(x)
    assert held() <= before
    assert monitor.samples == 510


def test_asynchronous_exceptions_do_not_tear_a_state() -> None:
    """An exception between any two operations of an update leaves the state of before or of after."""
    layer = nn.Identity()
    monitor = ForwardMonitor(Product(mean=Mean(), n=Count(), total=Sum()), layer)
    operations = 0

    class Interrupting(torch.overrides.TorchFunctionMode):
        def __init__(self, at: int) -> None:
            super().__init__()
            self.left = at

        def __torch_function__(self, func: object, types: object, args: tuple[object, ...] = (), kwargs: object = None) -> object:
            nonlocal operations
            operations += 1
            self.left -= 1
            if self.left == 0:
                raise KeyboardInterrupt
            return func(*args, **(kwargs or {}))  # type: ignore[operator, dict-item]

    layer(torch.ones(1))
    torn = interrupted = 0
    for at in range(1, 200):
        before = monitor.samples
        try:
            with Interrupting(at):
                layer(torch.ones(1))
        except KeyboardInterrupt:
            interrupted += 1
        result = monitor.peek()
        torn += not (result["n"] == result["total"] == monitor.samples and monitor.samples in (before, before + 1))
    assert interrupted > 20
    assert torn == 0


def test_forward_monitors_are_inside_a_compiled_graph_without_breaks_or_recompiles() -> None:
    from torch._dynamo.utils import counters

    net = nn.Sequential(nn.Linear(3, 4), nn.ReLU(inplace=True), nn.Linear(4, 2))
    recorder = Recorder(
        out=ForwardMonitor(Product(moments=Moments("b c -> c"), top=Max())), inp=ForwardInputMonitor(Mean())
    ).modules(net, leaves=True)
    torch._dynamo.reset()
    counters.clear()
    compiled = torch.compile(net, backend="aot_eager", fullgraph=True)
    batches = [torch.randn(5, 3) for _ in range(12)]
    for batch in batches:
        compiled(batch)
    assert counters["stats"]["unique_graphs"] == 2  # one for the first call, which has no states to add to yet
    assert not counters["graph_break"]
    assert list(recorder.iter_samples()) == [12] * 6
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
    assert list(recorder.iter_samples()) == [4, 4, 4]
