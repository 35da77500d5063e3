"""Observations of a graph that is being traced, gathered, so that one operator hands over those of several layers.

What a graph lifts waits up to its end: the operator that takes lifts costs some 50 us of Python when the graph runs, which for each
layer is more than small layers take. What the loops in C++ read is not lifted at all, because code that the compiler makes for each
layer takes longer to compile than the net, and to run than the loops. The operator that reads it costs some microseconds, so it
comes after a few small layers, or a big one, as long as what they returned is in a cache, and before the graph needs other memory
because this is not free yet.
"""

from __future__ import annotations

import ast
import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple
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
from recorders.capture.packs import packed, packed_together
from reducers import State
from reducers.combinators.in_graphs import GraphObservation
from reducers.kernels.loop.reading import Pack, Reading
from reducers.kernels.loop.reading import as_text as text_of_readings
from reducers.kernels.loop.sweeping import are_numbers
from reducers.kernels.loop.tables import KEY

__all__ = ["Lift", "Together", "from_text", "gather", "hand_over", "hand_over_at_end"]

MOST_HELD = 1 << 22  # bytes of tensors that wait to be read: they are still in a cache of the processor then
MOST_TENSORS = 256  # that wait to be read


class Lift(NamedTuple):
    """One observation to hand over.

    Attributes:
        states: a State by the path of each leaf.
        told: which parts of tensors the leaves are; see `layouts.as_text`.
        read: instead of states, what the loop reads of each leaf, by its path.
    """

    receiver: Tensor
    stream: str
    states: Mapping[str, State]
    told: str
    read: Mapping[str, Sequence[GraphObservation]] = {}


@dataclass(frozen=True, eq=False)  # found by its text, so each exists once, and is compared by identity
class Together:
    """What a graph tells of observations that it hands over by one call.

    Attributes:
        streams: of each observation.
        layouts: how the states of its leaves are packed.
        spans: which part of which packs is its own.
        readings: what is read into these packs; see `reader_of`. "" if the graph lifted them.
        copies: whether the packs hold the tensors as they are, not lifts of them.
        told: which parts of tensors the leaves of each observation are; see `layouts.as_text`.
        key: what the text of all of it begins with.
    """

    streams: tuple[str, ...]
    layouts: tuple[str, ...]
    spans: tuple[str, ...]
    readings: str
    copies: bool
    told: tuple[str, ...]
    key: str


@lru_cache(maxsize=1024)
def from_text(text: str) -> Together:
    """What `as_text` was given."""
    streams, layouts, spans, readings, copies, told = ast.literal_eval(text[KEY:])
    return Together(streams, layouts, spans, readings, copies, told, text[:KEY])


def as_text(lifts: Sequence[Lift], layouts: Sequence[str], spans: Sequence[str], readings: str = "", copies: bool = False) -> str:
    """The text of a `Together`: an argument of an operator, because the same graph may run in another process."""
    streams, told = tuple(lift.stream for lift in lifts), tuple(lift.told for lift in lifts)
    text = repr((streams, tuple(layouts), tuple(spans), readings, copies, told))
    return hashlib.sha256(text.encode()).hexdigest()[:KEY] + text


class Gathered:
    """What was gathered in a graph.

    Attributes:
        lifts: by the key of the twin whose monitors these are for.
    """

    def __init__(self) -> None:
        self.lifts: dict[str, list[Lift]] = {}

    def is_enough(self) -> bool:
        """Whether it is time to read what waits to be read."""
        found = [x for lifts in self.lifts.values() for x in _tensors(lifts)]
        # The size of a tensor may be a symbol: it is not known then, and may be big.
        if len(found) >= MOST_TENSORS or not all(are_numbers(x.shape) for x in found):
            return True
        return sum(x.nbytes for x in found) > MOST_HELD


_forwards: WeakKeyDictionary[Any, Gathered] = WeakKeyDictionary()
_backwards: dict[int, Gathered] = {}


def gather(emit: Any, twin: str, lift: Lift) -> bool:
    """Keeps a lift to the end of the graph that is being traced; returns False if its end cannot be told.

    Args:
        emit: the function whose nodes in the graph lift.
        twin: the key of the twin.
    """
    found = _found(emit)
    if found is None:
        return False
    waiting = found.lifts.setdefault(twin, [])
    waiting.append(lift)
    if found.is_enough():
        _emit_what_is_read(found)
    else:
        waiting[-1] = _as_it_is(lift)
    return True


def hand_over(emit: Any, twin: str) -> None:
    """Hands over what was gathered for the monitors of a twin: what they get next follows it."""
    found = _found(emit)
    if found is not None:
        _emit(found.lifts.pop(twin, []))


def hand_over_at_end(emit: Any) -> None:
    """Hands over all that was gathered, if the node that runs now is the last one of the graph that lifts."""
    run, last = run_of_node(emit)
    if last and run in _forwards:
        outside_modes(_emit_all, _forwards.pop(run))


def _found(emit: Any) -> Gathered | None:
    """What was gathered in the graph, or the backward, that is being traced; None if there is none whose end can be told."""
    run, _ = run_of_node(emit)
    if run is not None:
        return _forwards.setdefault(run, Gathered())
    task = graph_task()
    if task == -1 or not is_being_written_down():
        return None
    if task not in _backwards:
        _backwards.clear()  # of a backward whose trace failed
        _backwards[task] = Gathered()
        at_end_of_backward(lambda: guarded("the end of a traced backward", _emit_all, _backwards.pop(task, Gathered())))
    return _backwards[task]


def _emit_what_is_read(found: Gathered) -> None:
    for twin, lifts in found.lifts.items():
        _emit([lift for lift in lifts if lift.read])
        found.lifts[twin] = [lift for lift in lifts if not lift.read]


def _emit_all(found: Gathered) -> None:
    with NoAutocast(), torch.no_grad():
        for lifts in found.lifts.values():
            _emit(lifts)
    found.lifts = {}


def _emit(lifts: Sequence[Lift]) -> None:
    lifted, read = [lift for lift in lifts if not lift.read], [lift for lift in lifts if lift.read]
    if len(lifted) == 1:
        (only,) = lifted
        layout, packs = packed(only.states)
        stacked = [torch.stack(pack) for pack in packs]
        torch.ops.torch_recorders.receive(only.receiver, only.stream, layout, stacked, only.told)
    elif lifted:
        layouts, spans, packs = packed_together(lift.states for lift in lifted)
        text = as_text(lifted, layouts, spans)
        stacked = [torch.stack(pack) for pack in packs]
        torch.ops.torch_recorders.receive_together([lift.receiver for lift in lifted], stacked, text)
    for copies in (False, True):
        some = [lift for lift in read if _is_copied(lift) == copies]
        if some:
            layouts, spans, packs = packed_together(map(_kinds, some))
            text = as_text(some, layouts, spans, _readings(some, packs), copies)
            torch.ops.torch_recorders.record([lift.receiver for lift in some], _tensors(some), text)


def _kinds(lift: Lift) -> dict[str, dict[str, Pack]]:
    """Returns the shape and the dtype of each tensor of the states that will be read, by path and key."""
    return {path: {key: kind for one in parts for key, kind in one.kinds.items()} for path, parts in lift.read.items()}


def _is_copied(lift: Lift) -> bool:
    return not any(one.columns for one in _parts([lift]))


def _as_it_is(lift: Lift) -> Lift:
    """Returns the lift with copies of what is to be read: layers that follow may write into it. The compiler makes few of them."""
    return lift._replace(read={path: [one._replace(x=one.x.clone()) for one in parts] for path, parts in lift.read.items()})


def _parts(lifts: Sequence[Lift]) -> list[GraphObservation]:
    return [one for lift in lifts for parts in lift.read.values() for one in parts]


def _tensors(lifts: Sequence[Lift]) -> list[Tensor]:
    return [one.x for one in _parts(lifts)]


def _readings(lifts: Sequence[Lift], packs: Sequence[Sequence[Pack]]) -> str:
    """Returns the text of what is read into the packs."""
    places = {id(kind): (index, place) for index, pack in enumerate(packs) for place, kind in enumerate(pack)}
    readings = [
        Reading(one.axes, tuple(one.columns.values()), one.threshold, tuple(places[id(kind)] for kind in one.kinds.values()))
        for one in _parts(lifts)
    ]
    return text_of_readings(readings, [Pack(len(pack), *pack[0][1:]) for pack in packs])
