"""Observations of a graph that is being traced, gathered, so that one operator hands over those of several layers.

What a graph lifts waits up to its end: the operator that takes states costs some 50 us of Python when the graph runs, which for
each layer is more than small layers take. What the loops in C++ read is not lifted at all, because code that the compiler makes for
each layer takes longer to compile than the net, and to run than the loops. The operator that reads it costs some microseconds, so
it comes after a few small layers, or a big one, as long as what they returned is in a cache, and before the graph needs other
memory because this is not free yet.
"""

from __future__ import annotations

import ast
import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple, TypeAlias
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from recorders._torch import (
    NoAutocast,
    at_end_of_backward,
    graph_task,
    is_being_written_down,
    outside_modes,
)
from recorders._torch.compiler import run_of_node
from recorders.capture.entering import guarded
from recorders.graphs.codec import packed, packed_batch
from recorders.graphs.reading import GraphObservation, Pack, TensorReading
from recorders.graphs.reading import as_text as text_of_readings
from recorders.graphs.tables import KEY
from reducers import State
from reducers.kernels.loop.sweeping import are_numbers

__all__ = ["GraphBatch", "TracedObservation", "from_text", "gather", "hand_over", "hand_over_at_end"]

MOST_HELD = 1 << 22  # bytes of tensors that wait to be read: they are still in a cache of the processor then
MOST_TENSORS = 256  # that wait to be read


class TracedObservation(NamedTuple):
    """One observation to hand over.

    Attributes:
        states: a State by the path of each leaf.
        info: which parts of tensors the leaves are; see `layouts.as_text`.
        read: instead of states, what the loop reads of each leaf, by its path.
    """

    sink: Tensor
    stream: str
    states: Mapping[str, State]
    info: str
    read: Mapping[str, Sequence[GraphObservation]] = {}


@dataclass(frozen=True, eq=False)  # found by its text, so each exists once, and is compared by identity
class GraphBatch:
    """What a graph tells of observations that it hands over by one call.

    Attributes:
        streams: of each observation.
        layouts: how the states of its leaves are packed.
        offsets: which part of which packs is its own.
        readings: what is read into these packs; see `reader_of`. "" if the graph lifted them.
        copies: whether the packs hold the tensors as they are, not partial states of them.
        info: which parts of tensors the leaves of each observation are; see `layouts.as_text`.
        key: what the text of all of it begins with.
    """

    streams: tuple[str, ...]
    layouts: tuple[str, ...]
    offsets: tuple[str, ...]
    readings: str
    copies: bool
    info: tuple[str, ...]
    key: str


@lru_cache(maxsize=1024)
def from_text(text: str) -> GraphBatch:
    """What `as_text` was given."""
    streams, layouts, offsets, readings, copies, info = ast.literal_eval(text[KEY:])
    return GraphBatch(streams, layouts, offsets, readings, copies, info, text[:KEY])


def as_text(
    observations: Sequence[TracedObservation],
    layouts: Sequence[str],
    offsets: Sequence[str],
    readings: str = "",
    copies: bool = False,
) -> str:
    """The text of a `GraphBatch`: an argument of an operator, because the same graph may run in another process."""
    streams, info = tuple(seen.stream for seen in observations), tuple(seen.info for seen in observations)
    text = repr((streams, tuple(layouts), tuple(offsets), readings, copies, info))
    return hashlib.sha256(text.encode()).hexdigest()[:KEY] + text


Waiting: TypeAlias = "dict[str, list[TracedObservation]]"
"""What was gathered in a graph, by the key of the spec whose monitors it is for."""


def _is_enough(waiting: Waiting) -> bool:
    """Whether it is time to read what waits to be read."""
    found = [x for observations in waiting.values() for x in _tensors(observations)]
    # The size of a tensor may be a symbol: it is not known then, and may be big.
    if len(found) >= MOST_TENSORS or not all(are_numbers(x.shape) for x in found):
        return True
    return sum(x.nbytes for x in found) > MOST_HELD


_forwards: WeakKeyDictionary[Any, Waiting] = WeakKeyDictionary()
_backwards: dict[int, Waiting] = {}


def gather(emit: Any, spec: str, seen: TracedObservation) -> bool:
    """Keeps an observation to the end of the graph that is being traced; returns False if its end cannot be told.

    Args:
        emit: the function whose nodes in the graph lift.
        spec: the key of the spec.
    """
    found = _found(emit)
    if found is None:
        return False
    waiting = found.setdefault(spec, [])
    waiting.append(seen)
    if _is_enough(found):
        _emit_what_is_read(found)
    else:
        waiting[-1] = _as_it_is(seen)
    return True


def hand_over(emit: Any, spec: str) -> None:
    """Hands over what was gathered for the monitors of a spec: what they get next follows it."""
    found = _found(emit)
    if found is not None:
        _emit(found.pop(spec, []))


def hand_over_at_end(emit: Any) -> None:
    """Hands over all that was gathered, if the node that runs now is the last one of the graph that lifts."""
    run, last = run_of_node(emit)
    if last and run in _forwards:
        outside_modes(_emit_all, _forwards.pop(run))


def _found(emit: Any) -> Waiting | None:
    """What was gathered in the graph, or the backward, that is being traced; None if there is none whose end can be told."""
    run, _ = run_of_node(emit)
    if run is not None:
        return _forwards.setdefault(run, {})
    task = graph_task()
    if task == -1 or not is_being_written_down():
        return None
    if task not in _backwards:
        _backwards.clear()  # of a backward whose trace failed
        _backwards[task] = {}
        at_end_of_backward(lambda: guarded("the end of a traced backward", _emit_all, _backwards.pop(task, {})))
    return _backwards[task]


def _emit_what_is_read(found: Waiting) -> None:
    for spec, observations in found.items():
        _emit([seen for seen in observations if seen.read])
        found[spec] = [seen for seen in observations if not seen.read]


def _emit_all(found: Waiting) -> None:
    with NoAutocast(), torch.no_grad():
        for observations in found.values():
            _emit(observations)
    found.clear()


def _emit(observations: Sequence[TracedObservation]) -> None:
    lifted, read = [seen for seen in observations if not seen.read], [seen for seen in observations if seen.read]
    if len(lifted) == 1:
        (only,) = lifted
        layout, packs = packed(only.states)
        stacked = [torch.stack(pack) for pack in packs]
        torch.ops.torch_recorders.receive(only.sink, only.stream, layout, stacked, only.info)
    elif lifted:
        layouts, offsets, packs = packed_batch(seen.states for seen in lifted)
        text = as_text(lifted, layouts, offsets)
        stacked = [torch.stack(pack) for pack in packs]
        torch.ops.torch_recorders.receive_batch([seen.sink for seen in lifted], stacked, text)
    for copies in (False, True):
        some = [seen for seen in read if _is_copied(seen) == copies]
        if some:
            layouts, offsets, packs = packed_batch(map(_kinds, some))
            text = as_text(some, layouts, offsets, _readings(some, packs), copies)
            torch.ops.torch_recorders.record([seen.sink for seen in some], _tensors(some), text)


def _kinds(seen: TracedObservation) -> dict[str, dict[str, Pack]]:
    """Returns the shape and the dtype of each tensor of the states that will be read, by path and key."""
    return {path: {key: kind for one in parts for key, kind in one.kinds.items()} for path, parts in seen.read.items()}


def _is_copied(seen: TracedObservation) -> bool:
    return not any(one.columns for one in _parts([seen]))


def _as_it_is(seen: TracedObservation) -> TracedObservation:
    """Returns it with copies of what is to be read: layers that follow may write into that. The compiler makes few of them."""
    return seen._replace(read={path: [one._replace(x=one.x.clone()) for one in parts] for path, parts in seen.read.items()})


def _parts(observations: Sequence[TracedObservation]) -> list[GraphObservation]:
    return [one for seen in observations for parts in seen.read.values() for one in parts]


def _tensors(observations: Sequence[TracedObservation]) -> list[Tensor]:
    return [one.x for one in _parts(observations)]


def _readings(observations: Sequence[TracedObservation], packs: Sequence[Sequence[Pack]]) -> str:
    """Returns the text of what is read into the packs."""
    places = {id(kind): (index, place) for index, pack in enumerate(packs) for place, kind in enumerate(pack)}
    readings = [
        TensorReading(one.axes, tuple(one.columns.values()), one.threshold, tuple(places[id(kind)] for kind in one.kinds.values()))
        for one in _parts(observations)
    ]
    return text_of_readings(readings, [Pack(len(pack), *pack[0][1:]) for pack in packs])
