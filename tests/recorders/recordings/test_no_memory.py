"""Tensors without memory of their own: each is an error that names it and costs nothing else of a save; no pointer is read."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from recorders import OperandError, Recording, RecordingWarning, StorageError, Stream, Subrecording, Timeline, load
from recorders.recordings.distributed.protocol import pack
from recorders.recordings.storage.tensors import address, as_memory, kept_bytes, why_no_memory
from reducers import Mean

pytestmark = pytest.mark.filterwarnings("ignore:The PyTorch API of MaskedTensors")


def freed(size: int = 0) -> Tensor:
    found = torch.ones(4, 4).t()[1:]
    found.untyped_storage().resize_(size)
    return found


class Wrapper(Tensor):
    """A subclass that has a shape, and no values."""

    @staticmethod
    def __new__(cls) -> Wrapper:
        return Tensor._make_wrapper_subclass(cls, (3,))  # type: ignore[attr-defined, no-any-return]

    @classmethod
    def __torch_dispatch__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return args[0]


def inside(transform: Callable[..., Any], x: Tensor) -> Tensor:
    seen: list[Tensor] = []

    def keep(y: Tensor) -> Tensor:
        seen.append(y)
        return y.sum()

    transform(keep)(x)
    return seen[-1]


def masked() -> Tensor:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return torch.masked.masked_tensor(torch.ones(3), torch.tensor([True, False, True]))


def fake() -> Tensor:
    with FakeTensorMode():
        return torch.ones(3)


def quantised() -> Tensor:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.quint8)


def nested(layout: torch.layout) -> Tensor:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=layout)


WITHOUT: dict[str, Callable[[], Tensor]] = {
    "freed": freed,
    "partly freed": lambda: freed(16),
    "masked": masked,
    "wrapper": Wrapper,
    "fake": fake,
    "meta": lambda: torch.ones(3, device="meta"),
    "sparse": lambda: torch.eye(3).to_sparse(),
    "quantised": quantised,
    "nested": lambda: nested(torch.strided),
    "jagged": lambda: nested(torch.jagged),
    "zero": lambda: torch._efficientzerotensor(3),
    "grad": lambda: inside(torch.func.grad, torch.ones(3)),
    "vmap": lambda: inside(torch.func.vmap, torch.ones(2, 3)),
    "functionalize": lambda: inside(torch.func.functionalize, torch.ones(3)),
    "uninitialized": lambda: torch.nn.UninitializedParameter(),
}
STRIDED = [name for name in WITHOUT if name not in ("sparse", "quantised", "nested", "jagged", "uninitialized")]


@pytest.fixture(params=WITHOUT)
def tensor(request: pytest.FixtureRequest) -> Iterator[Tensor]:
    return WITHOUT[request.param]()


def good(value: float) -> Subrecording:
    return Subrecording(Mean(), {"": Mean().update({}, torch.tensor(value))}, samples=1, monitor="ForwardMonitor")


LAYOUTS: tuple[Literal["folder", "packed"], ...] = ("folder", "packed")


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_result_without_memory_loses_nothing_else(tensor: Tensor, layout: Literal["folder", "packed"], tmp_path: Path) -> None:
    def odd(result: Any, samples: int) -> Any:
        return {"odd": tensor, "even": result}

    part = Subrecording(Mean(), {leaf: Mean().update({}, torch.tensor(2.0)) for leaf in ("a", "b")}, 1, functions=(odd,))
    with pytest.warns(RecordingWarning, match=r"the result of subrecorder 'x': .*'value/a/odd'.*'value/b/odd'"):
        Recording({"first": good(1.0), "x": part, "last": good(3.0)}).save(tmp_path / "run", layout=layout)
    found = load(tmp_path / "run")
    assert {name: part.states for name, part in found.items()}.keys() == {"first", "x", "last"}
    assert found["x"].leaves() == {"a": torch.tensor(2.0), "b": torch.tensor(2.0)}
    kept = found["x"].saved_results
    assert kept is not None
    assert {leaf: list(value) for leaf, value in kept.items()} == {"a": ["even"], "b": ["even"]}
    assert (found["first"].peek(), found["last"].peek()) == (1.0, 3.0)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_state_without_memory_loses_its_subrecorder_only(
    tensor: Tensor, layout: Literal["folder", "packed"], tmp_path: Path
) -> None:
    class Odd(Mean):
        def compute(self, state: Any) -> Any:
            return torch.tensor(0.0)

    part = Subrecording(Odd(), {"leaf": {"total": tensor}}, samples=1)
    kind = r"(tensor of layout|fake tensor|meta tensor|Tensor|MaskedTensor|Wrapper|Uninit\w+|has dtype quint8)"
    with pytest.warns(RecordingWarning, match=rf"subrecorder 'x': 'state/leaf/total' (is an? )?{kind}"):
        Recording({"first": good(1.0), "x": part, "last": good(3.0)}).save(tmp_path / "run", layout=layout)
    assert load(tmp_path / "run").compute() == {"first": 1.0, "last": 3.0}


@pytest.mark.parametrize("name", STRIDED)
def test_no_pointer_is_taken_of_a_tensor_without_memory(name: str, tmp_path: Path) -> None:
    odd = WITHOUT[name]()
    assert why_no_memory(odd)
    for taken in (address, as_memory):
        with pytest.raises(StorageError, match="cannot be read, "):
            taken(odd)  # type: ignore[operator]
    part = Subrecording(Mean(), {"": {"mean": odd}}, samples=1)
    with pytest.raises(Exception, match="state 'mean' of subrecorder 'x'"):
        pack(Recording({"x": part}), torch.device("cpu"), "error", "")
    with Timeline() as timeline, pytest.raises(StorageError):
        timeline.append(0, {}, tensors={"odd": odd})
    if name == "grad":
        return  # its detached values have memory, and are written
    with Stream(tmp_path) as stream, pytest.raises(OperandError, match="'place': "):
        stream.put("place", odd)


def test_memory_is_taken_of_what_has_it() -> None:
    class Plain(Tensor):
        pass

    x = torch.arange(12.0).view(3, 4)
    for has in (x, x.t(), x[1:], x.as_subclass(Plain), torch.nn.Parameter(x), torch.ones(1).expand(5), torch.ones(0)):
        assert why_no_memory(has) == ""
        assert address(has) == has.data_ptr()
    assert bytes(as_memory(x[1:].contiguous())) == bytes(as_memory(x))[16:]
    with pytest.raises(StorageError, match="not contiguous"):
        as_memory(x.t())
    assert kept_bytes(x[1:]) == kept_bytes(torch.empty(12, device="meta")) == 48
    assert kept_bytes(torch.eye(2).to_sparse()) == kept_bytes(freed()) == 0
    assert bytes(as_memory(torch.ones(0, 3))) == b""


def test_a_state_that_is_freed_while_it_is_saved_loses_its_subrecorder_only(tmp_path: Path, monkeypatch: Any) -> None:
    doomed = good(2.0)
    described = __import__("recorders.recordings.storage.save", fromlist=["describe"]).describe

    def describe(tensors: Any, kinds: Any) -> Any:
        found = described(tensors, kinds)
        for value in doomed.states[""].values():
            if any(value is tensor for tensor in tensors.values()):
                value.untyped_storage().resize_(0)
        return found

    monkeypatch.setattr("recorders.recordings.storage.save.describe", describe)
    with pytest.warns(RecordingWarning, match="subrecorder 'x': tensors? of .* cannot be read"):
        Recording({"first": good(1.0), "x": doomed, "last": good(3.0)}).save(tmp_path / "run")
    assert load(tmp_path / "run").compute() == {"first": 1.0, "last": 3.0}
