"""Parameters of a step as on a GPU, by Triton's interpreter on CPU tensors: the same numbers as one by one.

Run with triton (extra `gpu-tests`) and TRITON_INTERPRET=1, in a process of their own: the variable changes what triton compiles.
"""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from test_batched import BOTH, Still, Zoo, alone, monitors, rows, train
from torch import Tensor, nn

if os.environ.get("TRITON_INTERPRET") != "1" or importlib.util.find_spec("triton") is None:
    pytest.skip("needs triton (extra gpu-tests) and TRITON_INTERPRET=1", allow_module_level=True)

from recorders import Monitor, OptimizerStateMonitor, ParameterGradientMonitor, ParameterMonitor, ParameterUpdateMonitor, Recorder
from reducers import Activity, Moments, Norm, Reducer, Summary
from reducers.kernels import dispatch
from reducers.kernels.triton import many

KINDS = [ParameterMonitor, ParameterGradientMonitor, ParameterUpdateMonitor, OptimizerStateMonitor]


@pytest.fixture(autouse=True)
def launched(without_loops: None, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """CPU tensors of a step take the kernels for many tensors. How many rows had a tensor, for each time they were launched."""
    given: list[int] = []
    sweep = many.swept_rows

    def noted(xs: Any, *rest: Any) -> Any:
        given.append(sum(x is not None for x in xs))
        return sweep(xs, *rest)

    failed: list[Exception] = []
    monkeypatch.setattr("reducers.kernels.failing._failed", failed)
    monkeypatch.setitem(dispatch.ROWS, "cpu", dispatch.ROWS["cuda"])
    monkeypatch.setattr(many, "swept_rows", noted)
    yield given
    assert failed == []


def close(found: Any, wanted: Any) -> None:
    """Asserts a relative error below a millionth; of means near 0 that of the numbers, which are around 1 or 0.01."""
    if isinstance(wanted, dict):
        assert found.keys() == wanted.keys()
        for key, value in wanted.items():
            close(found[key], value)
    elif wanted is not None:
        torch.testing.assert_close(found.double(), wanted.double(), rtol=1e-6, atol=1e-8, equal_nan=True)


def stepped(net: nn.Module, **gradients: Tensor | None) -> None:
    """One step in which parameters have these gradients, by name; the others none."""
    for name, parameter in net.named_parameters():
        parameter.grad = gradients.get(name.replace(".", "_"))
    Still(net.parameters()).step()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.filterwarnings("ignore:.*keeps no 'exp_avg'")
def test_the_same_as_one_by_one(kind: type[Monitor], launched: list[int]) -> None:
    """Tied, frozen, sparse, empty and big parameters, and one that has a gradient in some steps."""
    torch.manual_seed(0)
    net = Zoo()
    together = Recorder(monitors(kind, BOTH)).modules(net)
    apart = Recorder(monitors(kind, BOTH, op_=alone(kind))).modules(net)
    train(net, 3)
    assert len(launched) >= 6  # of two optimizers in three steps
    assert min(launched) < max(launched)
    assert any(rows(monitor) for monitor in together.values())
    for name, monitor in apart.items():
        assert together.samples[name] == monitor.samples
        assert together[name].counts == monitor.counts
        close(together[name].peek(), monitor.peek())


@pytest.mark.parametrize("reducer", [Norm(), Moments(order=4), Activity("... ->"), Summary()], ids=repr)
def test_parameters_without_a_gradient_and_such_as_come_and_go(reducer: Reducer) -> None:
    net = nn.ModuleDict({"a": nn.Linear(3, 2), "b": nn.Linear(40, 2)})
    recorder = Recorder(ParameterGradientMonitor(reducer)).modules(net)
    draw = torch.Generator().manual_seed(0)
    a, b, wide = (torch.randn(shape, generator=draw) for shape in ((2, 3), (2, 40), (5, 3)))
    wide[0, 0] = torch.nan
    stepped(net, a_weight=a, b_weight=b)
    stepped(net, b_weight=b + 1e4)
    stepped(net, a_weight=a + 1e4)
    net["a"].weight = nn.Parameter(torch.zeros(5, 3))  # another parameter, of another size
    stepped(net, a_weight=wide, b_weight=b.t().contiguous().t())
    recorder["b"].clear()
    stepped(net, a_weight=wide, b_weight=b)
    recorder["a"].deregister()
    stepped(net, a_weight=wide, b_weight=b)
    expected = {"a": [a, a + 1e4, wide, wide], "b": [b, b]}
    for name, tensors in expected.items():
        state: dict[str, Tensor] = {}
        for x in tensors:
            state = reducer.update(state, x.double())
        close(recorder[name].peek()["weight"], reducer.compute(state))


def test_a_step_is_the_same_bits_twice_and_whoever_looks() -> None:
    found = []
    for looks in (False, False, True):
        torch.manual_seed(0)
        net = Zoo()
        recorder = Recorder(ParameterGradientMonitor(Norm())).modules(net)
        train(net, 2, lambda step, recorder=recorder, looks=looks: [looks and one.states for one in recorder.values()])
        found.append({name: monitor.states for name, monitor in recorder.items()})
        recorder.deregister()
    first, *others = found
    for other in others:
        for name, states in first.items():
            for path, state in states.items():
                assert all(other[name][path][key].equal(value) for key, value in state.items()), (name, path)


def test_an_interrupted_step_is_recorded_by_none(monkeypatch: pytest.MonkeyPatch) -> None:
    net = nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 2).double())
    recorder = Recorder(ParameterGradientMonitor(Norm())).modules(net)
    ones = {"0_weight": torch.ones(2, 3), "1_weight": torch.ones(2, 2).double()}
    stepped(net, **ones)
    join = many.join_partials
    for after in (0, 1):  # in the first group, and when that is joined already
        left = after

        def interrupted(*args: Any, **options: Any) -> Any:
            nonlocal left
            if left == 0:
                raise KeyboardInterrupt
            left -= 1
            return join(*args, **options)

        with monkeypatch.context() as patch:
            patch.setattr(many, "join_partials", interrupted)
            with pytest.raises(KeyboardInterrupt):
                stepped(net, **{name: 5 * x for name, x in ones.items()})
    stepped(net, **ones)
    assert set(recorder.samples.values()) == {2}
    assert [float(monitor.peek()["weight"]) ** 2 for monitor in recorder.values()] == pytest.approx([12, 8])


def test_a_recording_goes_on_from_states_that_were_saved(tmp_path: Any) -> None:
    whole, parts = nn.Linear(3, 2), nn.Linear(3, 2)
    gradients = [torch.randn(2, 3, generator=torch.Generator().manual_seed(seed)) for seed in range(4)]
    recorder = Recorder(ParameterGradientMonitor(Summary())).modules(nn.ModuleDict({"layer": whole}))
    for x in gradients:
        stepped(whole, weight=x)
    for half in (gradients[:2], gradients[2:]):
        resumed = Recorder(ParameterGradientMonitor(Summary())).modules(nn.ModuleDict({"layer": parts}))
        if half[0] is not gradients[0]:
            resumed.resume(tmp_path / "run")
        for x in half:
            stepped(parts, weight=x)
        resumed.save(tmp_path / "run", overwrite=True)
        resumed.deregister()
    for key, value in recorder["layer"].states["weight"].items():
        # PyTorch merges what was saved with the first step after it, in the same float64 but another order of roundings.
        torch.testing.assert_close(resumed["layer"].states["weight"][key], value, rtol=1e-15, atol=0, msg=key)
