"""Observations inside the user's compiled graphs: what is added to a graph while it is traced.

The graph lifts an observation, or passes on tensors to be read; the operators in `operators.py` join what is found to the State.

No State is in a graph. If a graph rebound it, each leaf would need a second graph, because at the first call there is no State to
join, and a hook on a gradient may rebind nothing at all. If a graph wrote into it, two forwards before their backwards would raise
an error in the user's program: a graph saves the tensor that it writes into for its backward, and autograd finds that the other
forward changed this tensor. So the graph passes each lift to an operator that runs as plain Python. The compiler fuses the lift
with the operation that made the activation. The operator joins and binds States as in eager mode, in memory that no graph reuses.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from recorders._torch import NoAutocast, outside_modes
from recorders._torch.compiler import without_new_guards
from recorders.capture.layouts import CHANGES, as_text, as_text_of_all
from recorders.capture.operands import is_spread, local_part
from recorders.graphs.batches import TracedObservation, gather, hand_over, hand_over_at_end
from recorders.graphs.codec import encoded, packed
from recorders.graphs.device import emit_accumulations
from recorders.graphs.operators import can_record
from recorders.graphs.reading import GraphObservation, copied_observation, graph_observations, is_faster_outside
from recorders.graphs.sinks import find_spec
from reducers import Reducer, State
from reducers._torch import constant_in_graphs, in_graphs

__all__ = ["emit_call", "emit_failure", "emit_keep", "emit_leaves"]


def emit_call(sink: Tensor, operands: Any, stream: str) -> None:
    """Adds a call of the operator that passes on the operands as they are; called while a graph is traced."""
    layout, tensors, numbers = encoded(operands)
    if _among_ranks():
        _emit_parts(sink, layout, tensors, numbers, stream)
    else:
        torch.ops.torch_recorders.receive_call(sink, stream, layout, tensors, numbers, "")


@constant_in_graphs
def _among_ranks() -> bool:
    """Whether there may be DTensors. Dynamo cannot be asked: it does not tell DTensors from other tensors."""
    return dist.is_available() and dist.is_initialized()


@in_graphs
def _emit_parts(sink: Tensor, layout: str, tensors: list[Tensor], numbers: list[int], stream: str) -> None:
    """A node of the user's graph: the same for operands that may be DTensors; passes on the parts that this rank holds."""
    outside_modes(_emit_local, sink, layout, tensors, numbers, stream)


def _emit_local(sink: Tensor, layout: str, tensors: list[Tensor], numbers: list[int], stream: str) -> None:
    with NoAutocast(), torch.no_grad():
        info, parts = as_text_of_all(tensors), [local_part(tensor.detach()) for tensor in tensors]
        torch.ops.torch_recorders.receive_call(sink, stream, layout, parts, numbers, info)


@in_graphs  # it returns nothing, and would be removed
def emit_leaves(sink: Tensor, key: str, paths: list[str], tensors: list[Tensor], stream: str, handle: Tensor | None = None) -> None:
    """A node of the user's graph: lifts these leaves, and calls the operator that takes all of them at once.

    Dynamo does not look inside. AOT traces this function in plain Python, so a reducer that cannot be traced does not break the
    graph: it gets the tensors themselves when the graph runs.

    Args:
        handle: that of the sink, if the graph may accumulate the leaves; see `handles.py`.
    """
    spec = find_spec(key)
    if spec is not None:
        outside_modes(_emit_leaves, sink, spec, paths, tensors, stream, handle)
    hand_over_at_end(emit_leaves)


def _emit_leaves(sink: Tensor, spec: Any, paths: list[str], tensors: list[Tensor], stream: str, handle: Tensor | None) -> None:
    reducer: Reducer | None = None if spec.given else spec.reducer  # what is given is no part of the graph
    with NoAutocast(), torch.no_grad():
        info = as_text(dict(zip(paths, tensors, strict=True)))
        leaves = {path: local_part(tensor.detach()) for path, tensor in zip(paths, tensors, strict=True)}
        plain = handle is not None and not any(map(is_spread, tensors))
        if plain and emit_accumulations(handle, spec, reducer, leaves, info):
            return
        states = read = None
        CHANGES.note()  # a net that was spread over ranks is traced again
        # All monitors of a spec are due in the same steps, if nothing else is asked of them, such as what part of a DTensor it is.
        # Of plain tensors that is asked when the graph runs, once, because layouts may be told later.
        alike = spec.gate.only_steps_and_mode and not any(map(is_spread, tensors))
        if reducer is not None and alike and spec.on_error != "raise" and can_record():  # the operator in C++ passes on no error
            with contextlib.suppress(Exception), without_new_guards(leaves.values()):  # reported when the leaves are lifted
                read = _read(reducer, leaves)
            if read and gather(emit_leaves, spec.spec_key, TracedObservation(sink, stream, {}, info, read)):
                return
        if reducer is not None and reducer.liftable:
            # A reducer that reads values or sizes, or fails, gets them, or reports its error, outside the graph.
            with contextlib.suppress(Exception), without_new_guards(leaves.values()):
                states = None if is_faster_outside(leaves.values()) else _lifted(reducer, leaves)
            if states is not None and alike and gather(emit_leaves, spec.spec_key, TracedObservation(sink, stream, states, info)):
                return
        hand_over(emit_leaves, spec.spec_key)
        if states is None:
            torch.ops.torch_recorders.receive_leaves(sink, stream, list(leaves), list(leaves.values()), info)
        else:
            layout, packs = packed(states)
            torch.ops.torch_recorders.receive(sink, stream, layout, [torch.stack(pack) for pack in packs], info)


@in_graphs
def emit_failure(sink: Tensor) -> None:
    """A node of the user's graph: calls the operator that reports a failure."""
    outside_modes(torch.ops.torch_recorders.fail, sink)


@in_graphs
def emit_keep(sink: Tensor) -> Tensor:
    """A node of the user's graph: calls the operator that keeps what is given, and returns its number.

    Within activation checkpointing a mode marks operators to be run again in the backward, so this one is called outside of it.
    """
    number: Tensor = outside_modes(torch.ops.torch_recorders.keep_given, sink)
    return number


def _read(reducer: Reducer, leaves: Mapping[str, Tensor]) -> dict[str, list[GraphObservation]] | None:
    """Returns what is read of the leaves, as they are now; None if one of them cannot be read."""
    for read in (graph_observations, copied_observation):
        found = {path: parts for path, tensor in leaves.items() if (parts := read(reducer, tensor)) is not None}
        if found and len(found) == len(leaves):
            return found
    return None


def _lifted(reducer: Reducer, leaves: Mapping[str, Tensor]) -> dict[str, State]:
    """Lifts the leaves: a lift is an update of the empty state. An empty leaf has no lift, but the tensor itself."""
    return {path: reducer.update({}, tensor) or {"": tensor} for path, tensor in leaves.items()}
