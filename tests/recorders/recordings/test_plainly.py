"""States are made outside of the user's modes, whoever calls, and whatever his defaults are: what is recorded later joins them."""

from __future__ import annotations

import ast
import contextlib
import copy
import inspect
import pickle
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import pytest
import torch
from paths import ROOT
from resumed import bits
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.overrides import TorchFunctionMode
from torch.utils._device import _device_constructors
from torch.utils._python_dispatch import TorchDispatchMode

import recorders
from recorders import (
    BackwardMonitor,
    CallMonitor,
    Cell,
    DifferenceMonitor,
    ForwardMonitor,
    ParameterGradientMonitor,
    ParameterMonitor,
    ParameterUpdateMonitor,
    Recorder,
    Recording,
    StateMonitor,
    Stream,
    StreamDataset,
    load,
)
from reducers import EMA, Covariance, Histogram, History, Last, Mean, Moments, Norm, Quantile, Reducer, Sum, TopK, Window


class Refusing(TorchDispatchMode):
    """A mode of the user that lets nothing through that is not his."""

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise AssertionError(f"the user's mode saw {function}")


class RefusingFunctions(TorchFunctionMode):
    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if getattr(function, "__name__", "") in ("__get__", "__set__"):  # the user's own attributes
            return function(*args, **(kwargs or {}))
        raise AssertionError(f"the user's mode saw {function}")


@contextlib.contextmanager
def default_dtype() -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


@contextlib.contextmanager
def default_device() -> Iterator[None]:
    torch.set_default_device("meta")
    try:
        yield
    finally:
        torch.set_default_device(None)


MODES: dict[str, Callable[[], AbstractContextManager[Any]]] = {
    "inference_mode": torch.inference_mode,
    "no_grad": torch.no_grad,
    "autocast": lambda: torch.autocast("cpu", dtype=torch.bfloat16),
    "FakeTensorMode": FakeTensorMode,
    "dispatch mode": Refusing,
    "function mode": RefusingFunctions,
    "default dtype": default_dtype,
    "default device": default_device,
    "device context": lambda: torch.device("meta"),
}


class Training:
    """A net whose observations wait, and do not, with a monitor of each way of keeping a state."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3))
        self.optimizer = torch.optim.SGD(self.net.parameters(), lr=0.01)
        kinds = {
            "mean": ForwardMonitor(Mean("b c -> c")),
            "moments": ForwardMonitor(Moments()),
            "window": ForwardMonitor(Window(Mean(), 3)),
            "history": ForwardMonitor(History(Mean(), 4.0)),
            "ema": ForwardMonitor(EMA(alpha=0.5)),
            "top": ForwardMonitor(TopK(k=2)),
            "bins": ForwardMonitor(Histogram(bins=8, low=-3.0, high=3.0)),
            "quantile": BackwardMonitor(Quantile()),
            "covariance": ForwardMonitor(Covariance()),
            "every": ForwardMonitor(Last(), every=2),
            "value": ParameterMonitor(Norm()),
            "update": ParameterUpdateMonitor(Norm()),
            "gradient": ParameterGradientMonitor(Norm()),
            "state": StateMonitor(Sum(), "weight"),
            "difference": DifferenceMonitor(Sum(), "weight"),
        }
        self.recorder = Recorder(**kinds, loss=CallMonitor(Mean())).modules(self.net, names="0").attach(self.optimizer)

    def train(self, begin: int, end: int) -> Training:
        for step in range(begin, end):
            self.optimizer.zero_grad()
            loss = self.net(torch.randn(5, 4, generator=torch.Generator().manual_seed(step))).square().mean()
            loss.backward()
            self.optimizer.step()
            self.recorder.push("loss", loss.detach())
            self.recorder.push("loss", 0.5)
        return self

    @property
    def facts(self) -> dict[str, Any]:
        return {name: (monitor.samples, bits(monitor.states)) for name, monitor in self.recorder.items()}


def loaded_again(run: Training, saved: Path) -> None:
    run.recorder.load_state_dict(torch.load(saved / "state.pt", weights_only=True))


ENTRANCES: dict[str, Callable[[Training, Path], object]] = {
    "resume": lambda run, saved: run.recorder.resume(saved / "run"),
    "resume packed": lambda run, saved: run.recorder.resume(saved / "packed"),
    "resume what is loaded": lambda run, saved: run.recorder.resume(load(saved / "run")),
    "resume what is mapped": lambda run, saved: run.recorder.resume(load(saved / "packed", mmap=True)),
    "load_state_dict": loaded_again,
    "merge": lambda run, saved: run.recorder.merge(load(saved / "run")),
    "merge recordings": lambda run, saved: run.recorder.merge(Recording({}).merge(load(saved / "run"), missing="keep")),
    "merge files": lambda run, saved: run.recorder.merge(recorders.merge([saved / "run"])),
    "merge monitors": lambda run, saved: [run.recorder[name].merge(part) for name, part in load(saved / "run").items()],
    "reset": lambda run, saved: run.recorder.reset(),
    "reset with shapes": lambda run, saved: [monitor.reset(keepshape=True) for monitor in run.recorder.values()],
    "snapshot": lambda run, saved: run.recorder.resume(run.recorder.snapshot()),
    "states": lambda run, saved: [monitor.states for monitor in run.recorder.values()],
    "compute": lambda run, saved: run.recorder.compute(),
    "sync": lambda run, saved: run.recorder.sync(),
    "report": lambda run, saved: run.recorder.report(),
    "off and on": lambda run, saved: run.recorder.deregister().register(),
    "save": lambda run, saved: run.recorder.resume(str(run.recorder.save(saved / "again", overwrite=True))),
    "copy": lambda run, saved: run.recorder.merge(copy.deepcopy(run.recorder)),
    "pickle": lambda run, saved: run.recorder.merge(pickle.loads(pickle.dumps(run.recorder))),
}


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder, run = tmp_path_factory.mktemp("saved"), Training().train(0, 5)
    run.recorder.save(folder / "run")
    run.recorder.save(folder / "packed", layout="packed")
    torch.save(run.recorder.state_dict(), folder / "state.pt")
    run.recorder.deregister()
    return folder


WITHIN = [(entrance, mode) for entrance in ENTRANCES for mode in MODES]
SEEING = ("FakeTensorMode", "dispatch mode", "function mode")
COPIED = [(entrance, mode) for entrance in ("copy", "pickle") for mode in SEEING]
"""Python's own copies of tensors are the user's calls, which his modes see."""


@pytest.mark.slow
@pytest.mark.parametrize(("entrance", "mode"), [pair for pair in WITHIN if pair not in COPIED])
def test_what_is_recorded_after_a_call_within_a_mode_is_what_it_is_without(entrance: str, mode: str, saved: Path) -> None:
    found = []
    for context in (contextlib.nullcontext, MODES[mode]):
        run = Training().train(0, 2)
        with context():
            ENTRANCES[entrance](run, saved)
        run.train(5, 9)
        assert {name: monitor.last_error for name, monitor in run.recorder.items() if monitor.last_error} == {}
        assert all(not x.is_inference() for monitor in run.recorder.values() for x in monitor.state.values())
        found.append(run.facts)
        run.recorder.deregister()
    assert found[1] == found[0]


OBSERVING = [mode for mode in MODES if mode not in SEEING]


@pytest.mark.parametrize("mode", OBSERVING)
def test_what_begins_within_a_mode_goes_on_outside_of_it(mode: str) -> None:
    found = []
    for context in (contextlib.nullcontext, MODES[mode]):
        run, x = Training(), torch.randn(5, 4, generator=torch.Generator().manual_seed(0))
        with context(), torch.autocast("cpu", enabled=False):
            run.net(x)
            run.recorder.push("loss", 1.0)
            run.recorder["every/0"].reset()
        run.train(0, 3)
        assert {name: monitor.last_error for name, monitor in run.recorder.items() if monitor.last_error} == {}
        found.append({name: facts for name, facts in run.facts.items() if name != "quantile/0"})  # gradients are off in some
        run.recorder.deregister()
    assert found[1] == found[0]


CELLS: list[Reducer] = [Mean(), Moments("b c -> c"), Window(Mean(), 3), History(Mean(), 4.0), EMA(alpha=0.5), Quantile(), TopK(k=2)]
CELL_CALLS: dict[str, Callable[[Cell, Tensor], object]] = {
    "push": lambda cell, x: cell.push(x),
    "call": lambda cell, x: cell(x),
    "merge": lambda cell, x: cell.merge(copy.deepcopy(cell)),
    "load": lambda cell, x: cell.load_state_dict(cell.state_dict()),
    "clear": lambda cell, x: cell.clear(),
}


@pytest.mark.parametrize("mode", ["inference_mode", "no_grad", "default dtype", "default device"])
@pytest.mark.parametrize("call", CELL_CALLS)
@pytest.mark.parametrize("reducer", CELLS, ids=lambda reducer: type(reducer).__name__)
def test_a_cell_that_is_used_within_a_mode_goes_on_outside_of_it(reducer: Reducer, call: str, mode: str) -> None:
    found, xs = [], torch.randn(8, 3, 2)
    for context in (contextlib.nullcontext, MODES[mode]):
        cell = Cell(reducer)
        cell.push(xs[0])
        with context():
            CELL_CALLS[call](cell, xs[1])
        for x in xs[2:]:
            cell.push(x)
        found.append(bits(cell.state))
        assert not any(x.is_inference() for x in cell.state.values())
    assert found[1] == found[0]


def test_a_stream_is_written_and_read_with_any_default_device(tmp_path: Path) -> None:
    x = torch.arange(12.0).reshape(6, 2)
    with default_device():
        with Stream(tmp_path / "stream") as stream:
            stream.put("x", x)
            stream.put("n", x[:, 0])
            for part, ids in zip(x.split(2), ([3, 1], [2, 0], [5, 4]), strict=True):
                with stream.given(ids=ids):
                    stream.put("y", part)
        data = StreamDataset(tmp_path / "stream", ["x", "n"])
        read = [data[index] for index in range(len(data))]
        part = data[1:3]
        chosen = data[[0, 2]]
    assert len(read) == len(data) == 6
    assert all(value.device.type == "cpu" for value in (*read[0].values(), *part.values()) if isinstance(value, Tensor))
    assert torch.equal(part["x"], x[1:3])
    assert torch.equal(chosen["x"], x[[0, 2]])


CONSTRUCTORS = {function.__name__ for function in _device_constructors()}


def factories(path: Path) -> Iterator[str]:
    """The calls of PyTorch in a file that make a tensor on the default device."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in CONSTRUCTORS:
            of_torch = isinstance(node.func.value, ast.Name) and node.func.value.id == "torch"
            if of_torch and not any(keyword.arg == "device" for keyword in node.keywords):
                yield f"{path.relative_to(ROOT)}:{node.lineno}: {ast.unparse(node)}"


def test_no_tensor_is_made_on_the_default_device_of_the_user() -> None:
    files = [path for package in ("reducers", "recorders") for path in (ROOT / package).rglob("*.py") if path.name != "tutorial.py"]
    assert len(files) > 200
    assert [call for path in files for call in factories(path)] == []


def test_every_public_call_that_makes_states_is_in_the_table() -> None:
    named = {"resume", "load_state_dict", "merge", "reset", "snapshot", "compute", "sync", "report", "save"}
    assert named <= {name.split()[0] for name in ENTRANCES}
    known = {
        *named,
        "samples",
        "iter_samples",
        "apply",
        "apply_sample",
        "clear",
        "state_dict",
        "save_sharded",
        "save_in_background",
    }
    mine = {
        name for name, _ in inspect.getmembers(recorders.recorder.results.Results, inspect.isfunction) if not name.startswith("_")
    }
    made = {name for name in mine if name in vars(recorders.recorder.results.Results)}
    assert made - known <= {"keys", "rows_shown"}
