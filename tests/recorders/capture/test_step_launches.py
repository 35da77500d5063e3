"""What monitors of parameters cost at an optimizer step on a GPU: launches, copies, waits and memory, with fake CUDA tensors."""

from __future__ import annotations

import copy
import importlib.util
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from launches import Counted, _Counter, _WithoutGuards, fake_kernels
from test_batched import BOTH, Still
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from recorders import Monitor, ParameterGradientMonitor, ParameterMonitor, ParameterUpdateMonitor, Recorder
from recorders.capture import entering
from recorders.schedule import table
from reducers import Activity, Max, Mean, Moments, Norm, Product, Statistic, Sum, Summary
from reducers.kernels import dispatch

if importlib.util.find_spec("triton") is None:
    pytest.skip("needs triton (extra gpu-tests)", allow_module_level=True)

SHAPES = ((64, 64), (768, 768), (768,), (3072, 768), (3072,), (768, 3072), (), (64,), (50, 7), (1,))
COPY, SWEEP, JOIN = "aten.copy_.default", "sweep", "join"


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Fake CUDA tensors are recorded as true ones are. Tensors that are alive at once have different addresses."""
    from reducers.kernels.triton import many

    monkeypatch.setattr("reducers.kernels.failing._failed", [])
    monkeypatch.setattr(many, "_address", id)
    monkeypatch.setattr(table, "as_monitor", lambda call, *args: torch.no_grad()(call)(*args))
    monkeypatch.setattr(entering, "outside_modes", lambda call, *args: call(*args))
    monkeypatch.setattr(table, "accepts", lambda x: x.numel() > 0)
    with FakeTensorMode(allow_non_fake_inputs=True), _WithoutGuards(), fake_kernels():
        yield


def network(count: int, dtypes: tuple[torch.dtype, ...] = (torch.float32,)) -> nn.Module:
    """So many parameters of mixed shapes, ten a module."""
    places = range(count)
    parameters = [
        nn.Parameter(torch.empty(SHAPES[place % 10], device="cuda", dtype=dtypes[place // 10 % len(dtypes)])) for place in places
    ]
    return nn.ModuleList([nn.ParameterList(parameters[start : start + 10]) for start in places[::10]])


def new_gradients(net: nn.Module, seldom: bool = False) -> None:
    for place, parameter in enumerate(net.parameters()):
        parameter.grad = None if seldom and place % 3 == 1 else torch.empty_like(parameter)


def counted(monitor: Monitor, net: nn.Module, between: Callable[[nn.Module], Any] = lambda net: None) -> Counted:
    """What the last of three steps costs."""
    new_gradients(net)
    before = [parameter.grad for parameter in net.parameters()]  # stay, so that later ones are at other addresses
    recorder, optimizer = Recorder(monitor).modules(net), Still(net.parameters())
    for _ in range(2):
        optimizer.step()
        between(net)
    with _Counter(1) as counter:
        optimizer.step()
    assert len(before) == sum(1 for _ in net.parameters())
    assert {monitor.samples for monitor in recorder.values()} == {3}
    recorder.deregister()
    return counter.counted


FAMILIES = [Norm(), Norm(p=1), Mean(), Sum(), Max(), Activity("... ->"), Summary(), Moments(), Moments(order=4)]


@pytest.mark.parametrize("reducer", FAMILIES, ids=repr)
def test_a_step_is_two_launches_and_one_copy_of_addresses(reducer: Statistic, device: None) -> None:
    net = network(200)
    found = counted(ParameterGradientMonitor(reducer), net, new_gradients)
    assert found.names == [COPY, SWEEP, JOIN]
    assert found.waits == 0
    # What the rows hold, and the table of partial statistics, of which there are at most ten for 32,768 elements or a tensor.
    assert found.allocations == len(reducer.columns) + 1
    elements = sum(parameter.numel() for parameter in net.parameters())
    assert found.largest <= 10 * (elements / 32_768 + 200)


def test_two_thousand_parameters_cost_no_more(device: None) -> None:
    found = counted(ParameterGradientMonitor(Norm()), network(2_000), new_gradients)
    assert (found.names, found.waits, found.allocations) == ([COPY, SWEEP, JOIN], 0, 4)


def test_tensors_that_stay_where_they_are_cost_no_copy(device: None) -> None:
    for monitor in (ParameterGradientMonitor(Norm()), ParameterMonitor(Norm())):
        found = counted(monitor, network(20))
        assert (found.names, found.waits, found.allocations) == ([SWEEP, JOIN], 0, 4)


def test_parameters_without_a_gradient_cost_nothing(device: None) -> None:
    turns = iter(range(2))
    found = counted(ParameterGradientMonitor(Mean()), network(20), lambda net: new_gradients(net, seldom=next(turns) == 1))
    assert (found.names, found.waits, found.allocations) == ([COPY, SWEEP, JOIN], 0, 4)


def test_each_dtype_and_each_statistic_adds_two_launches(device: None) -> None:
    found = counted(ParameterGradientMonitor(Mean()), network(40, (torch.float32, torch.bfloat16)), new_gradients)
    assert found.names == 2 * [COPY, SWEEP, JOIN]
    product = Product(norm=Norm(), more=Product(mean=Mean(), summary=Summary()))
    found = counted(ParameterGradientMonitor(product), network(20), new_gradients)
    assert found.names == [COPY, *3 * [SWEEP, JOIN]]
    assert (found.waits, found.allocations) == (0, 3 + 3 + 8 + 3)


def test_updates_cost_their_snapshot_and_difference_beside(device: None) -> None:
    found = counted(ParameterUpdateMonitor(Norm()), network(20))
    assert found.names == ["aten._foreach_copy_.default", "aten._foreach_sub_.List", "aten._foreach_neg_.default", SWEEP, JOIN]
    assert (found.waits, found.allocations) == (0, 4)  # the rows of three entries, and the table


def test_without_the_kernels_launches_grow_with_the_parameters(device: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dispatch, "ROWS", {})
    assert counted(ParameterGradientMonitor(Norm()), network(100), new_gradients).launches > 100


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_a_step_on_a_gpu_waits_for_nothing_and_is_as_on_a_cpu(request: pytest.FixtureRequest) -> None:
    request.addfinalizer(lambda: torch.cuda.set_sync_debug_mode("default"))
    torch.manual_seed(0)
    here = nn.Sequential(nn.Linear(300, 400), nn.Linear(400, 3).double(), nn.LayerNorm(5))
    there = copy.deepcopy(here).cuda()
    recorders = [Recorder(ParameterGradientMonitor(BOTH)).modules(net) for net in (here, there)]
    for turn in range(4):
        torch.cuda.set_sync_debug_mode("error" if turn > 1 else "default")  # what is compiled before may wait
        for parameter, other in zip(here.parameters(), there.parameters(), strict=True):
            parameter.grad = torch.randn(parameter.shape, dtype=parameter.dtype)
            other.grad = parameter.grad.pin_memory().to("cuda", non_blocking=True)
        for net in (here, there):
            Still(net.parameters()).step()
    torch.cuda.set_sync_debug_mode("default")
    for name, monitor in recorders[0].items():
        for path, state in monitor.states.items():
            for key, value in state.items():
                torch.testing.assert_close(recorders[1][name].states[path][key].cpu(), value, rtol=1e-6, atol=1e-7)


def test_a_launch_that_fails_loses_no_observation(device: None, monkeypatch: pytest.MonkeyPatch) -> None:
    from reducers.kernels.triton import many

    failed: list[Exception] = []
    monkeypatch.setattr("reducers.kernels.failing._failed", failed)
    net = network(20)

    def break_kernels(net: nn.Module) -> None:
        def broken(*args: Any) -> Any:
            raise RuntimeError("Failed to find C compiler.")

        monkeypatch.setattr(many, "swept_rows", broken)

    with pytest.warns(RuntimeWarning, match="failed on .*, which takes longer: RuntimeError: Failed to find C compiler"):
        found = counted(ParameterGradientMonitor(BOTH), net, break_kernels)
    assert found.names.count(SWEEP) > 20  # tensors are reduced apart from each other
    assert len(failed) == 1
