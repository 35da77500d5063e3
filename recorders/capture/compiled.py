"""Observations inside the user's compiled graphs: the graph lifts them, and operators of this package join the lifts to the State.

No State is in a graph. If a graph rebound it, each leaf would need a second graph, because at the first call there is no State to
join, and a hook on a gradient may rebind nothing at all. If a graph wrote into it, two forwards before their backwards would raise
an error in the user's program: a graph saves the tensor that it writes into for its backward, and autograd finds that the other
forward changed this tensor. So the graph passes each lift to an operator that runs as plain Python. The compiler fuses the lift
with the operation that made the activation. The operator joins and binds States as in eager mode, in memory that no graph reuses.

Nothing in a graph belongs to a single monitor. If everything that the compiler guards is equal, blocks of one class that are each
compiled by themselves share a graph. So the receiver of an observation is an input of the graph: a tensor that holds the receiver's
number. The compiler sees of a monitor only a twin, which all monitors made alike share.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from operator import attrgetter
from typing import Any
from weakref import WeakValueDictionary

import torch
import torch.distributed as dist
from torch import Tensor

from recorders._torch import NoAutocast, NoInference, has_dispatch_modes, make_effectful, no_modes, outside_modes
from recorders.capture import packing
from recorders.capture.gathering import NEXT, Lift, gather, hand_over, hand_over_at_end, packed
from recorders.capture.gathering import from_text as together_from
from recorders.capture.guards import without_new_guards
from recorders.capture.handles import emit_accumulations
from recorders.capture.layouts import as_text, as_text_of_all, from_text
from recorders.capture.operands import is_spread, local_part
from reducers import Reducer, State
from reducers.combinators.in_graphs import GraphObservation, graph_observations, is_faster_outside

__all__ = [
    "emit_call",
    "emit_failure",
    "emit_keep",
    "emit_leaves",
    "find_receiver",
    "find_twin",
    "new_receiver",
    "new_twin_key",
    "operands_of",
    "unpacked",
]

_numbers = itertools.count()
_receivers: WeakValueDictionary[int, Any] = WeakValueDictionary()
_twins: WeakValueDictionary[str, Any] = WeakValueDictionary()


def new_receiver(receiver: Any) -> Tensor:
    """Returns a tensor with a new number, by which graphs identify `receiver`. `receiver` is held weakly.

    When a graph runs, the operators call one of these methods of the receiver for each observation:

    - `receive(layout, packs, stream, told)`: the observation is lifted; `packs` hold one State for each leaf, see `unpacked`;
    - `receive_together(numbers, packs, kept, together)`, of the class: the same for several receivers, by their numbers; what the
      graph `kept` is still to be read; see `Together`;
    - `receive_leaves(leaves, stream, told)`: the graph could not lift the observation; `leaves` are its tensors by path;
    - `receive_call(operands, stream, told)`: callables need the operands; `operands()` returns them;
    - `receive_failure()`: the operands could not be read while the graph was traced;
    - `keep_given()`: a forward begins whose gradient needs what is given now; returns a number by which that is found, or None.

    `told` says which parts of tensors these are, if ranks share them: by path, or of the operands together; see `Told`.
    """
    number = next(_numbers)
    _receivers[number] = receiver
    if not has_dispatch_modes() and not torch.is_inference_mode_enabled():
        return _numbered(number)
    with NoInference(False), no_modes():
        return _numbered(number)


def _numbered(number: int) -> Tensor:
    """A tensor that holds a number, and has it as an attribute, too: those of many are read in a fraction of the time."""
    tensor = torch.tensor(number, device="cpu")
    tensor.number = number  # type: ignore[attr-defined]
    return tensor


def new_twin_key(twin: Any) -> str:
    """Returns a new key by which graphs identify `twin`: a string, because a graph may turn a number into a variable."""
    key = str(next(_numbers))
    _twins[key] = twin
    return key


def find_receiver(receiver: Tensor | int) -> Any:
    """Returns the receiver of this number, or None if it was freed: a graph may outlive the monitor."""
    return _receivers.get(int(receiver))


def find_twin(key: str) -> Any:
    """Returns the twin of this key, or None if it was freed."""
    return _twins.get(key)


def emit_call(receiver: Tensor, operands: Any, stream: str) -> None:
    """Adds a call of the operator that passes on the operands as they are; called while a graph is traced."""
    layout, tensors, numbers = packing.packed(operands)
    if _among_ranks():
        _emit_parts(receiver, layout, tensors, numbers, stream)
    else:
        torch.ops.torch_recorders.receive_call(receiver, stream, layout, tensors, numbers, "")


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def _among_ranks() -> bool:
    """Whether there may be DTensors. Dynamo cannot be asked: it does not tell DTensors from other tensors."""
    return dist.is_available() and dist.is_initialized()


def _emit_parts(receiver: Tensor, layout: str, tensors: list[Tensor], numbers: list[int], stream: str) -> None:
    """A node of the user's graph: the same for operands that may be DTensors; passes on the parts that this rank holds."""
    outside_modes(_emit_local, receiver, layout, tensors, numbers, stream)


def _emit_local(receiver: Tensor, layout: str, tensors: list[Tensor], numbers: list[int], stream: str) -> None:
    with NoAutocast(), torch.no_grad():
        told, parts = as_text_of_all(tensors), [local_part(tensor.detach()) for tensor in tensors]
        torch.ops.torch_recorders.receive_call(receiver, stream, layout, parts, numbers, told)


torch.fx.has_side_effect(_emit_parts)
torch.compiler.allow_in_graph(_emit_parts)  # type: ignore[no-untyped-call]


def emit_leaves(
    receiver: Tensor, key: str, paths: list[str], tensors: list[Tensor], stream: str, handle: Tensor | None = None
) -> None:
    """A node of the user's graph: lifts these leaves, and calls the operator that takes all of them at once.

    Dynamo does not look inside. AOT traces this function in plain Python, so a reducer that cannot be traced does not break the
    graph: it gets the tensors themselves when the graph runs.

    Args:
        handle: that of the receiver, if the graph may accumulate the leaves; see `handles.py`.
    """
    twin = find_twin(key)
    if twin is not None:
        outside_modes(_emit_leaves, receiver, twin, paths, tensors, stream, handle)
    hand_over_at_end(emit_leaves)


def _emit_leaves(receiver: Tensor, twin: Any, paths: list[str], tensors: list[Tensor], stream: str, handle: Tensor | None) -> None:
    reducer: Reducer | None = None if twin.given else twin.reducer  # what is given is no part of the graph
    with NoAutocast(), torch.no_grad():
        told = as_text(dict(zip(paths, tensors, strict=True)))
        leaves = {path: local_part(tensor.detach()) for path, tensor in zip(paths, tensors, strict=True)}
        plain = handle is not None and not any(map(is_spread, tensors))
        if plain and emit_accumulations(handle, twin, reducer, leaves, told):
            return
        lifts = read = None
        if reducer is not None and reducer.liftable:
            # All monitors of a twin are due in the same steps, if nothing else is asked of them.
            alike = twin.gate.only_steps_and_mode and not _among_ranks()
            with contextlib.suppress(Exception), without_new_guards(leaves.values()):  # reported when the leaves are lifted
                read = _read(reducer, leaves) if alike else None
            if read and gather(emit_leaves, twin.twin_key, Lift(receiver, stream, {}, read)):
                return
            # A reducer that reads values or sizes, or fails, gets them, or reports its error, outside the graph.
            with contextlib.suppress(Exception), without_new_guards(leaves.values()):
                lifts = None if is_faster_outside(leaves.values()) else _lifts(reducer, leaves)
            if lifts is not None and alike and gather(emit_leaves, twin.twin_key, Lift(receiver, stream, lifts)):
                return
        hand_over(emit_leaves, twin.twin_key)
        if lifts is None:
            torch.ops.torch_recorders.receive_leaves(receiver, stream, list(leaves), list(leaves.values()), told)
        else:
            layout, packs = packed(lifts)
            torch.ops.torch_recorders.receive(receiver, stream, layout, [torch.stack(pack) for pack in packs], told)


torch.fx.has_side_effect(emit_leaves)  # otherwise the compiler removes the node, because it returns nothing
torch.compiler.allow_in_graph(emit_leaves)  # type: ignore[no-untyped-call]


def emit_failure(receiver: Tensor) -> None:
    """A node of the user's graph: calls the operator that reports a failure."""
    outside_modes(torch.ops.torch_recorders.fail, receiver)


torch.fx.has_side_effect(emit_failure)
torch.compiler.allow_in_graph(emit_failure)  # type: ignore[no-untyped-call]


def emit_keep(receiver: Tensor) -> Tensor:
    """A node of the user's graph: calls the operator that keeps what is given, and returns its number.

    Within activation checkpointing a mode marks operators to be run again in the backward, so this one is called outside of it.
    """
    number: Tensor = outside_modes(torch.ops.torch_recorders.keep_given, receiver)
    return number


torch.compiler.allow_in_graph(emit_keep)  # type: ignore[no-untyped-call]


def _read(reducer: Reducer, leaves: Mapping[str, Tensor]) -> dict[str, list[GraphObservation]] | None:
    """Returns what the loop reads of the leaves, as they are now; None if it does not take all of them."""
    found = {}
    for path, tensor in leaves.items():
        parts = graph_observations(reducer, tensor)
        if parts is None:
            return None
        found[path] = parts
    return found


def _lifts(reducer: Reducer, leaves: Mapping[str, Tensor]) -> dict[str, State]:
    """Lifts the leaves: a lift is an update of the empty state. An empty leaf has no lift, but the tensor itself."""
    return {path: reducer.update({}, tensor) or {"": tensor} for path, tensor in leaves.items()}


@lru_cache(maxsize=4096)
def columns(layout: str) -> tuple[tuple[str, str, int, int], ...]:
    """Returns for each tensor that a graph passes on: its leaf path, key, pack and index in the pack."""
    parts = layout.split(NEXT)
    return tuple(
        (path, key, int(pack), int(index)) for path, key, pack, index in zip(*(parts[i::4] for i in range(4)), strict=False)
    )


def unpacked(layout: str, packs: Sequence[Tensor], dim: int = 0) -> dict[str, State]:
    """Returns the State of an observation by leaf path, as views of the packs; with `dim=1`, of several stacked observations."""
    lifted: dict[str, State] = {}
    for path, key, pack, index in columns(layout):
        state = lifted.setdefault(path, {})
        if key:
            state[key] = packs[pack].select(dim, index)
    return lifted


def operands_of(layout: str, tensors: list[Tensor], numbers: list[int]) -> Any:
    """Returns the operands given to `emit_call`, with cloned tensors, because the graph reuses the memory of its own."""
    return packing.unpacked(layout, [tensor.clone() for tensor in tensors], numbers)


def _call_receiver(method: str, receiver: Tensor, *args: Any) -> Any:
    """Calls a method of the receiver, if it still exists; called by all operators when the graph runs."""

    def call() -> Any:
        found = find_receiver(receiver)
        return None if found is None else getattr(found, method)(*args)

    return outside_modes(call)


def _receive(receiver: Tensor, stream: str, layout: str, packs: list[Tensor], told: str) -> None:
    _call_receiver("receive", receiver, layout, packs, stream, from_text(told))


def _receive_together(receivers: list[Tensor], packs: list[Tensor], kept: list[Tensor], text: str) -> None:
    try:
        numbers = [*map(_number, receivers)]
    except AttributeError:  # the graph handed over copies
        numbers = [*map(int, receivers)]
    first = next(filter(None, map(find_receiver, numbers)), None)
    if first is not None:
        outside_modes(type(first).receive_together, numbers, packs, kept, together_from(text))


_number = attrgetter("number")


def _receive_leaves(receiver: Tensor, stream: str, paths: list[str], tensors: list[Tensor], told: str) -> None:
    _call_receiver("receive_leaves", receiver, dict(zip(paths, tensors, strict=True)), stream, from_text(told))


def _fail(receiver: Tensor) -> None:
    _call_receiver("receive_failure", receiver)


def _receive_call(receiver: Tensor, stream: str, layout: str, tensors: list[Tensor], numbers: list[int], told: str) -> None:
    _call_receiver("receive_call", receiver, lambda: operands_of(layout, tensors, numbers), stream, from_text(told))


def _keep_given(receiver: Tensor) -> Tensor:
    number: Tensor | None = _call_receiver("keep_given", receiver)
    return torch.tensor(-1, device="cpu") if number is None else number


def _no_number(receiver: Tensor) -> Tensor:
    return torch.empty((), dtype=torch.int64, device="cpu")


_library: Any = torch.library.Library("torch_recorders", "DEF")  # type: ignore[no-untyped-call]


def _define(schema: str, run: Callable[..., Any], fake: Callable[..., Any] = lambda *_: None) -> None:
    # A CUDA graph replays kernels and would skip the operator, so CUDA graphs must end before it. They do, because the receiver is
    # on the CPU: the compiler finds no tag behind an effect (torch 2.13).
    _library.define(schema, tags=(torch.Tag.cudagraph_unsafe,))
    name = schema.partition("(")[0]
    _library.impl(name, run, "CompositeExplicitAutograd")
    _library._register_fake(name, fake)
    # Without an effect it would be removed, or run again in a backward. Ordered, because some statistics depend on the order.
    make_effectful(getattr(torch.ops.torch_recorders, name).default)


_define("receive(Tensor receiver, str stream, str layout, Tensor[] packs, str told) -> ()", _receive)
_define("receive_together(Tensor[] receivers, Tensor[] packs, Tensor[] kept, str text) -> ()", _receive_together)
_define("receive_leaves(Tensor receiver, str stream, str[] paths, Tensor[] leaves, str told) -> ()", _receive_leaves)
_define("fail(Tensor receiver) -> ()", _fail)
_define("receive_call(Tensor receiver, str stream, str layout, Tensor[] tensors, SymInt[] numbers, str told) -> ()", _receive_call)
_define("keep_given(Tensor receiver) -> Tensor", _keep_given, _no_number)
