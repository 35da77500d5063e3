"""Observations inside the user's compiled graphs: what is added to a graph while it is traced.

The graph passes on the tensors that it observes, and the operators in `operators.py` record them when it runs. No State is in a
graph. If a graph rebound it, each leaf would need a second graph, because at the first call there is no State to join, and a hook
on a gradient may rebind nothing at all. If a graph wrote into it, two forwards before their backwards would raise an error in the
user's program: a graph saves the tensor that it writes into for its backward, and autograd finds that the other forward changed it.

One operator takes the leaves of several layers. It comes after a few small layers, or a big one, as long as what they returned is
in a cache, and before the graph needs other memory because this is not free yet. On a GPU kernels accumulate: see `device.py`.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple, TypeAlias
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from recorders._torch import NoAutocast, at_end_of_backward, graph_task, is_being_traced, outside_modes
from recorders._torch.compiler import run_of_node
from recorders.capture.entering import guarded
from recorders.capture.layouts import CHANGES, as_text
from recorders.capture.operands import is_spread, local_part
from recorders.graphs.caching import cacheable
from recorders.graphs.device import emit_accumulations
from recorders.graphs.operators import can_record, encoded
from recorders.graphs.reading import is_read
from recorders.graphs.sinks import among_ranks, batch_as_text, find_spec
from reducers._torch import in_graphs
from reducers.kernels.cpp.sweeping import are_numbers

TRACING = "the trace of a graph"  # what failed, as a warning says it


def emit_call(sink: Tensor, operands: Any, stream: str) -> None:
    """Adds a call of the operator that passes on the operands of callables; called while a graph is traced."""
    layout, tensors, numbers = encoded(operands)
    if among_ranks():
        _emit_parts(sink, layout, tensors, numbers, stream)
    else:
        torch.ops.torch_recorders.receive_call(sink, stream, layout, tensors, numbers, "")


@in_graphs  # and not kept by the compiler: which part this rank holds becomes part of the graph
def _emit_parts(sink: Tensor, layout: str, tensors: list[Tensor], numbers: list[int], stream: str) -> None:
    """A node of the user's graph: the same for operands that may be DTensors; passes on the parts that this rank holds."""
    outside_modes(_emit_local, sink, layout, tensors, numbers, stream)


def _emit_local(sink: Tensor, layout: str, tensors: list[Tensor], numbers: list[int], stream: str) -> None:
    with NoAutocast(), torch.no_grad():
        info, parts = as_text({"": tensors}), [local_part(tensor.detach()) for tensor in tensors]
        torch.ops.torch_recorders.receive_call(sink, stream, layout, parts, numbers, info)


@cacheable
@in_graphs
def emit_failure(sink: Tensor) -> None:
    """A node of the user's graph: calls the operator that reports a failure."""
    outside_modes(torch.ops.torch_recorders.fail, sink)


@cacheable
@in_graphs
def emit_keep(sink: Tensor) -> Tensor:
    """A node of the user's graph: calls the operator that keeps what is given, and returns its number.

    Within activation checkpointing a mode marks operators to be run again in the backward, so this one is called outside of it.
    """
    number: Tensor = outside_modes(torch.ops.torch_recorders.keep_given, sink)
    return number


class TracedObservation(NamedTuple):
    """One observation to hand over: its leaves by path, and which parts of tensors they are; see `layouts.as_text`."""

    sink: Tensor
    stream: str
    leaves: dict[str, Tensor]
    info: str


@cacheable
@in_graphs  # it returns nothing, and would be removed
def emit_leaves(sink: Tensor, key: str, paths: list[str], tensors: list[Tensor], stream: str, handle: Tensor | None = None) -> None:
    """A node of the user's graph: lets the operator that takes leaves have these, perhaps with those of other layers.

    Dynamo does not look inside. AOT traces this function in plain Python.

    Args:
        handle: that of the sink, if the graph may accumulate the leaves; see `device.py`.
    """
    spec = find_spec(key)
    if spec is not None:
        guarded(TRACING, _emit_leaves, sink, spec, paths, tensors, stream, handle)
    run, last = run_of_node(emit_leaves)
    if last and run in _forwards:
        guarded(TRACING, _emit_all, _forwards.pop(run))


def _emit_leaves(sink: Tensor, spec: Any, paths: list[str], tensors: list[Tensor], stream: str, handle: Tensor | None) -> None:
    with NoAutocast(), torch.no_grad():
        info = as_text(dict(zip(paths, tensors, strict=True)))
        leaves = {path: local_part(x.detach()).resolve_conj().resolve_neg() for path, x in zip(paths, tensors, strict=True)}
        whole = not any(map(is_spread, tensors))
        if handle is not None and whole and emit_accumulations(handle, spec, leaves, info):
            return
        CHANGES.note()  # a net that was spread over ranks is traced again
        # All monitors of a spec are due in the same steps, if nothing else is asked of them, such as what part of a DTensor it is.
        # Of plain tensors that is asked when the graph runs, once, because layouts may be told later.
        read = whole and not spec.given and spec.gate.only_steps_and_mode and can_record()
        read = read and all(is_read(spec.reducer, x) for x in leaves.values())
        _gather((spec.spec_key, read), TracedObservation(sink, stream, leaves, info))


MOST_HELD = 1 << 22  # bytes of tensors that wait to be handed over: they are still in a cache of the processor then
MOST_TENSORS = 256  # that wait

Waiting: TypeAlias = "dict[tuple[str, bool], list[TracedObservation]]"
"""What was gathered in a graph, by the key of the spec whose monitors it is for, and by whether the loops in C++ may read it."""

_forwards: WeakKeyDictionary[Any, Waiting] = WeakKeyDictionary()
_backwards: dict[int, Waiting] = {}


def _gather(key: tuple[str, bool], seen: TracedObservation) -> None:
    """Lets an observation wait up to the end of the graph that is being traced, or less; not at all if its end cannot be told."""
    found = _found()
    if found is None:
        _emit(key, [seen])
        return
    waiting = found.setdefault(key, [])
    waiting.append(seen)
    if _is_enough(found):
        _emit_all(found)
    else:  # as it is now: layers that follow may write into it. The compiler makes few of these copies
        waiting[-1] = seen._replace(leaves={path: x.clone() for path, x in seen.leaves.items()})


def _is_enough(waiting: Waiting) -> bool:
    found = [x for observations in waiting.values() for seen in observations for x in seen.leaves.values()]
    # The size of a tensor may be a symbol: it is not known then, and may be big.
    if len(found) >= MOST_TENSORS or not all(are_numbers(x.shape) for x in found):
        return True
    return sum(math.prod(x.shape) * x.itemsize for x in found) > MOST_HELD  # `nbytes` raises if a stride is a symbol


def _found() -> Waiting | None:
    """What was gathered in the graph, or the backward, that is being traced; None if there is none whose end can be told."""
    run, _ = run_of_node(emit_leaves)
    if run is not None:
        return _forwards.setdefault(run, {})
    task = graph_task()
    if task == -1 or not is_being_traced():
        return None
    if task not in _backwards:
        _backwards.clear()  # of a backward whose trace failed
        _backwards[task] = {}
        at_end_of_backward(lambda: guarded("the end of a traced backward", _emit_all, _backwards.pop(task, {})))
    return _backwards[task]


def _emit_all(found: Waiting) -> None:
    with NoAutocast(), torch.no_grad():
        for key, observations in found.items():
            _emit(key, observations)
    found.clear()


def _emit(key: tuple[str, bool], observations: list[TracedObservation]) -> None:
    """Adds the call of the operator."""
    paths = tuple(tuple(seen.leaves) for seen in observations)
    text = batch_as_text(tuple(seen.stream for seen in observations), paths, tuple(seen.info for seen in observations), key[1])
    tensors = [x for seen in observations for x in seen.leaves.values()]
    torch.ops.torch_recorders.record([seen.sink for seen in observations], tensors, text)
