"""What a hook hands over: leaves, their paths, and what is detached."""

from __future__ import annotations

from collections import OrderedDict, namedtuple
from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from recorders.capture.operands import as_operand, detached, leaves, pack, shapes, transient

Pair = namedtuple("Pair", ["left", "right"])


@dataclass
class Output:
    logits: Tensor
    states: tuple[Tensor, ...] = ()
    name: str = "text"


@dataclass(frozen=True)
class Frozen:
    value: Tensor


class Graph:
    """A graph of PyTorch Geometric as far as this is concerned: `Data` has tensors by name, `HeteroData` those of each kind."""

    edge_stores = ()

    def __init__(self, **held: object) -> None:
        self.held = held

    def to_dict(self) -> dict[object, object]:
        return {("user", "rates", "film") if key == "rates" else key: value for key, value in self.held.items()}

    def apply(self, function: Callable[[Tensor], Tensor]) -> Graph:
        self.held = {key: function(value) if isinstance(value, Tensor) else value for key, value in self.held.items()}
        return self


class Refuses(type):
    """Classes that raise an error of their own if they are asked for an attribute, as those of dependency injection do."""

    def __getattr__(cls, name: str) -> object:
        raise RuntimeError(f"cannot resolve {name}")


class Refusing(metaclass=Refuses):
    pass


def ones() -> Tensor:
    return torch.ones(2, requires_grad=True) * 1


@pytest.mark.parametrize(
    ("value", "paths"),
    [
        (ones(), [""]),
        ((ones(), ones()), ["0", "1"]),
        ([ones(), [ones()]], ["0", "1.0"]),
        (Pair(ones(), (ones(),)), ["left", "right.0"]),
        ({"a": ones(), "b.c": ones()}, ["a", "b\\.c"]),
        (OrderedDict(x=ones(), y=None), ["x"]),
        (Output(ones(), (ones(), ones())), ["logits", "states.0", "states.1"]),
        (Frozen(ones()), ["value"]),
        (torch.ones(2, 2).max(dim=0), ["0", "1"]),
        ("text", []),
        (None, []),
        (Output, []),
        (Refusing, []),
        (Graph(x=ones(), name="text", edge_index=ones()), ["x", "edge_index"]),
        (Graph(user={"x": ones()}, rates={"edge_index": ones()}), ["user.x", "user rates film.edge_index"]),
    ],
)
def test_leaves_are_named_by_their_paths(value: object, paths: list[str]) -> None:
    assert [path for path, _ in leaves(value)] == paths


@pytest.mark.parametrize(
    "value",
    [
        (ones(), "text"),
        [ones()],
        Pair(ones(), ones()),
        {"a": ones()},
        Graph(x=ones(), name="text"),
        OrderedDict(a=ones()),
        Output(ones(), (ones(),)),
        Frozen(ones()),
    ],
    ids=lambda value: type(value).__name__,
)
def test_detached_keeps_the_structure_and_cuts_the_graph(value: object) -> None:
    copy = detached(value)
    assert type(copy) is type(value)
    assert [path for path, _ in leaves(copy)] == [path for path, _ in leaves(value)]
    assert all(tensor.requires_grad for _, tensor in leaves(value))
    assert not any(tensor.requires_grad for _, tensor in leaves(copy))


def test_inputs_are_packed_by_how_they_were_given() -> None:
    assert pack(("x",), {}) == "x"
    assert pack(("x", "y"), {}) == ("x", "y")
    assert pack((), {"mask": "m"}) == "m"
    assert pack(("x",), {"mask": "m"}) == {"0": "x", "mask": "m"}


def test_numbers_become_tensors_of_full_precision() -> None:
    assert as_operand(0.1).dtype == torch.float64
    assert as_operand(3).dtype == torch.int64
    assert as_operand(True).dtype == torch.bool
    assert as_operand("text") == "text"


def test_transient_tensors_are_known() -> None:
    from torch._subclasses.fake_tensor import FakeTensorMode

    assert not transient(torch.ones(1))
    assert not transient(torch.nn.Parameter(torch.ones(1)))
    assert transient(torch.ones(1, device="meta"))
    with FakeTensorMode():
        assert transient(torch.ones(1))
    seen = []
    torch.func.vmap(lambda x: (seen.append(transient(x)), x)[1])(torch.ones(3))
    assert seen == [True]


def test_shapes_for_messages_are_short() -> None:
    assert shapes(torch.ones(2, 3)) == "(2, 3) float32"
    assert shapes(None) == "no tensor, but NoneType"
    assert shapes([torch.ones(1)] * 20).endswith("and more")
