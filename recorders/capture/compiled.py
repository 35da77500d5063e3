"""Inside the user's compiled graphs: observations are lifted there, and join the State outside, by operators of our own.

No State is in a graph. Were one rebound in it, each leaf would need a second graph, for there is nothing to join at the first call,
and a hook on a gradient may rebind nothing at all. Were it written in place, two forwards before their backwards would end in an
error in the user's program: a graph saves what its backward writes into, and finds it changed by the first of the two. So the graph
hands each lift, which it fuses with what made the activation, to an operator that runs as plain Python: states join and are bound
as in eager mode, in memory of their own, which no graph reuses.

Nothing in a graph belongs to one monitor alone. Blocks of one class that are compiled each by itself share a graph, if all that the
compiler guards is the same for each of them. So the receiver of an observation is an input of the graph, a tensor that holds its
number; and what the compiler sees of a monitor is a twin, which all monitors that are made alike have in common.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from typing import Any
from weakref import WeakValueDictionary

import torch
from torch import Tensor

from recorders._torch import NoAutocast, NoInference, has_dispatch_modes, make_effectful, no_modes, outside_modes
from recorders.capture import packing
from reducers import Reducer, State

__all__ = ["emit_call", "emit_leaves", "find_receiver", "find_twin", "new_receiver", "new_twin_key", "operands_of", "unpacked"]

_NEXT = "\x1f"


_numbers = itertools.count()
_receivers: WeakValueDictionary[int, Any] = WeakValueDictionary()
_twins: WeakValueDictionary[str, Any] = WeakValueDictionary()


def new_receiver(receiver: Any) -> Tensor:
    """The number of `receiver`, as the tensor by which graphs know it. It is called by the operators' names when the graph runs:

    - `take(layout, packs, stream)`: one observation, lifted, the State of it alone for each of its leaves, packed;
    - `take_leaves(leaves, stream)`: one that the graph could not lift, its tensors by leaf path;
    - `take_call(operands, stream)`: one whose operands callables ask for; `operands()` makes them;
    - `take_failure()`: one whose operands could not be read while the graph was traced.
    """
    number = next(_numbers)
    _receivers[number] = receiver
    if not has_dispatch_modes() and not torch.is_inference_mode_enabled():
        return torch.tensor(number, device="cpu")
    with NoInference(False), no_modes():
        return torch.tensor(number, device="cpu")


def new_twin_key(twin: Any) -> str:
    """The name under which graphs know `twin`: a string, because a graph may make a variable of a number."""
    key = str(next(_numbers))
    _twins[key] = twin
    return key


def find_receiver(receiver: Tensor) -> Any:
    """Whose number it is; None if it is no more, for a graph may outlive the monitor."""
    return _receivers.get(int(receiver))


def find_twin(key: str) -> Any:
    """The twin of this name."""
    return _twins.get(key)


def emit_call(receiver: Tensor, operands: Any, stream: str) -> None:
    """Called while a graph is traced: a call of the operator that hands the operands on as they are."""
    layout, tensors, numbers = packing.packed(operands)
    torch.ops.torch_recorders.take_call(receiver, stream, layout, tensors, numbers)


def emit_leaves(receiver: Tensor, key: str, paths: list[str], tensors: list[Tensor], stream: str) -> None:
    """A node of the user's graph: the lift of these leaves, and a call of the operator that takes all of them at once.

    The compiler's front end does not look inside. It runs where the graph is traced behind the front end, in plain Python, so
    that a reducer that no graph can hold costs no graph: it gets the tensors themselves when the graph runs.
    """
    twin = find_twin(key)
    if twin is not None:
        outside_modes(_emit_leaves, receiver, twin.reducer, paths, tensors, stream)


def _emit_leaves(receiver: Tensor, reducer: Reducer, paths: list[str], tensors: list[Tensor], stream: str) -> None:
    with NoAutocast(), torch.no_grad():
        leaves = {path: tensor.detach() for path, tensor in zip(paths, tensors, strict=True)}
        try:
            layout, packs = _packed_lifts(reducer, leaves)
        except Exception:  # it looks at numbers, or fails: in eager mode it gets them, or tells what is wrong
            torch.ops.torch_recorders.take_leaves(receiver, stream, list(leaves), list(leaves.values()))
        else:
            torch.ops.torch_recorders.take(receiver, stream, layout, packs)


torch.fx.has_side_effect(emit_leaves)  # it returns nothing, and would be removed
torch.compiler.allow_in_graph(emit_leaves)  # type: ignore[no-untyped-call]


def _packed_lifts(reducer: Reducer, leaves: Mapping[str, Tensor]) -> tuple[str, list[Tensor]]:
    """The lifts by leaf path. By the laws of reducers a lift is an update of the empty state.

    What is empty has no lift; the tensor itself stands for it. Tensors of one dtype and shape go as one, which the compiler makes
    of them where it computes them: there are fewer to copy.
    """
    packs: list[list[Tensor]] = []
    layout = ""
    for path, tensor in leaves.items():
        for key, value in (reducer.update({}, tensor) or {"": tensor}).items():
            index = 0
            for pack in packs:
                if pack[0].dtype == value.dtype and pack[0].shape == value.shape:
                    break
                index += 1
            if index == len(packs):
                packs.append([])
            layout += f"{path}{_NEXT}{key}{_NEXT}{index}{_NEXT}{len(packs[index])}{_NEXT}"
            packs[index].append(value)
    return layout, [torch.stack(pack) for pack in packs]


@lru_cache(maxsize=4096)
def columns(layout: str) -> tuple[tuple[str, str, int, int], ...]:
    """Leaf path, key, pack and place in it, of each tensor that a graph hands over."""
    parts = layout.split(_NEXT)
    return tuple(
        (path, key, int(pack), int(place)) for path, key, pack, place in zip(*(parts[i::4] for i in range(4)), strict=False)
    )


def unpacked(layout: str, packs: Sequence[Tensor], dim: int = 0) -> dict[str, State]:
    """By leaf path the State of an observation, as views of the packs; with `dim=1` of several, which are stacked."""
    lifted: dict[str, State] = {}
    for path, key, pack, place in columns(layout):
        state = lifted.setdefault(path, {})
        if key:
            state[key] = packs[pack].select(dim, place)
    return lifted


def operands_of(layout: str, tensors: list[Tensor], numbers: list[int]) -> Any:
    """What was handed to `emit_call`, in memory of its own: the graph reuses that of what it hands over."""
    return packing.unpacked(layout, [tensor.clone() for tensor in tensors], numbers)


def _received(method: str, receiver: Tensor, *args: Any) -> None:
    """What all operators do when the graph runs."""

    def hand_over() -> None:
        found = find_receiver(receiver)
        if found is not None:
            getattr(found, method)(*args)

    outside_modes(hand_over)


def _take(receiver: Tensor, stream: str, layout: str, packs: list[Tensor]) -> None:
    _received("take", receiver, layout, packs, stream)


def _take_leaves(receiver: Tensor, stream: str, paths: list[str], tensors: list[Tensor]) -> None:
    _received("take_leaves", receiver, dict(zip(paths, tensors, strict=True)), stream)


def _fail(receiver: Tensor) -> None:
    _received("take_failure", receiver)


def _take_call(receiver: Tensor, stream: str, layout: str, tensors: list[Tensor], numbers: list[int]) -> None:
    _received("take_call", receiver, lambda: operands_of(layout, tensors, numbers), stream)


_library: Any = torch.library.Library("torch_recorders", "DEF")  # type: ignore[no-untyped-call]


def _define(schema: str, run: Callable[..., None]) -> None:
    # replaying kernels would pass the operator by, so CUDA graphs end before it
    _library.define(schema, tags=(torch.Tag.cudagraph_unsafe,))
    name = schema.partition("(")[0]
    _library.impl(name, run, "CompositeExplicitAutograd")
    _library._register_fake(name, lambda *_: None)
    # without an effect it would be removed, for it returns nothing; ordered, for some statistics depend on what came first
    make_effectful(getattr(torch.ops.torch_recorders, name).default)


_define("take(Tensor receiver, str stream, str layout, Tensor[] packs) -> ()", _take)
_define("take_leaves(Tensor receiver, str stream, str[] paths, Tensor[] leaves) -> ()", _take_leaves)
_define("fail(Tensor receiver) -> ()", _fail)
_define("take_call(Tensor receiver, str stream, str layout, Tensor[] tensors, SymInt[] numbers) -> ()", _take_call)
