"""Lifts of a graph that is being traced, gathered up to its end, so that one operator hands all of them over.

An operator of ours costs some 50 us of Python when the graph runs. With one for each layer that is more than small layers take.
What the loop in C++ reads is not lifted by the graph at all: it keeps small leaves, and of big ones a table, and the operator at
its end reads them. Code that the compiler makes for each takes longer to compile than the net, and to run than the loop.
"""

from __future__ import annotations

import ast
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
    run_of_node,
)
from reducers import State
from reducers.combinators.in_graphs import GraphObservation
from reducers.kernels.loop.together import Pack, Reading
from reducers.kernels.loop.together import as_text as text_of_readings

__all__ = ["NEXT", "Lift", "Together", "from_text", "gather", "hand_over", "hand_over_at_end", "packed"]

NEXT = "\x1f"  # separates the fields of a layout
MOST_HELD = 1 << 22  # bytes that a graph keeps for one call: they are still in a cache then


class Lift(NamedTuple):
    """One observation to hand over.

    Attributes:
        states: a State by the path of each leaf.
        read: instead of them, what the loop reads of each leaf, by its path.
    """

    receiver: Tensor
    stream: str
    states: Mapping[str, State]
    read: Mapping[str, Sequence[GraphObservation]] = {}


@dataclass(frozen=True, eq=False)  # found by its text, so each exists once, and is compared by identity
class Together:
    """What a graph tells of observations that it hands over by one call.

    Attributes:
        streams: of each observation.
        layouts: how the states of its leaves are packed.
        spans: which part of which packs is its own.
        readings: what is read into more packs, which follow those of the graph; see `read_together`.
    """

    streams: tuple[str, ...]
    layouts: tuple[str, ...]
    spans: tuple[str, ...]
    readings: str


@lru_cache(maxsize=1024)
def from_text(text: str) -> Together:
    """What `as_text` was given."""
    return Together(*ast.literal_eval(text))


def as_text(together: Together) -> str:
    """The text of it: an argument of an operator, because the same graph may run in another process."""
    return repr((together.streams, together.layouts, together.spans, together.readings))


class Gathered:
    """What was gathered in a graph.

    Attributes:
        lifts: by the key of the twin whose monitors these are for.
        held: the bytes that the graph keeps for them.
    """

    def __init__(self) -> None:
        self.lifts: dict[str, list[Lift]] = {}
        self.held = 0


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
    found.lifts.setdefault(twin, []).append(lift)
    found.held += _held([lift])
    if found.held > MOST_HELD:
        _emit_all(found)
    return True


def hand_over(emit: Any, twin: str) -> None:
    """Hands over what was gathered for the monitors of a twin: what they get next follows it."""
    found = _found(emit)
    if found is not None:
        lifts = found.lifts.pop(twin, [])
        found.held -= _held(lifts)
        _emit(lifts)


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
        at_end_of_backward(lambda: outside_modes(_emit_all, _backwards.pop(task, Gathered())))
    return _backwards[task]


def _held(lifts: Sequence[Lift]) -> int:
    return sum(one.x.nbytes for lift in lifts for parts in lift.read.values() for one in parts)


def _emit_all(found: Gathered) -> None:
    with NoAutocast(), torch.no_grad():
        for lifts in found.lifts.values():
            _emit(lifts)
    found.lifts, found.held = {}, 0


def _emit(lifts: Sequence[Lift]) -> None:
    if len(lifts) == 1 and not lifts[0].read:
        ((receiver, stream, states, _),) = lifts
        layout, packs = packed(states)
        torch.ops.torch_recorders.receive(receiver, stream, layout, [torch.stack(pack) for pack in packs], "")
    elif lifts:
        lifted, more = list[list[Tensor]](), list[list[Pack]]()
        told = [_told(lift, more if lift.read else lifted) for lift in lifts]
        spans = tuple(
            " ".join(f"{index + (len(lifted) if lift.read else 0)} {span}" for index, span in places)
            for lift, (_, places) in zip(lifts, told, strict=True)
        )
        kept, readings = _readings(lifts, more)
        together = Together(tuple(lift.stream for lift in lifts), tuple(layout for layout, _ in told), spans, readings)
        stacked = [torch.stack(pack) for pack in lifted]
        torch.ops.torch_recorders.receive_together([lift.receiver for lift in lifts], stacked, kept, as_text(together))


def _told(lift: Lift, packs: list[list[Any]]) -> tuple[str, list[tuple[int, str]]]:
    """Adds what is handed over to the packs of all; returns its layout, and for each of its packs where it is in those of all."""
    kinds = {path: {key: kind for one in parts for key, kind in one.kinds.items()} for path, parts in lift.read.items()}
    layout, own = packed(kinds or lift.states)
    return layout, [_extend(packs, pack) for pack in own]


def _readings(lifts: Sequence[Lift], packs: Sequence[Sequence[Pack]]) -> tuple[list[Tensor], str]:
    """Returns what the graph keeps, and the text of what is read of it into the packs."""
    places = {id(kind): (index, place) for index, pack in enumerate(packs) for place, kind in enumerate(pack)}
    kept = [one for lift in lifts for parts in lift.read.values() for one in parts]
    readings = [
        Reading(
            one.is_table,
            tuple(one.x.shape),
            one.axes,
            tuple(one.columns.values()),
            one.threshold,
            tuple(places[id(one.kinds[key])] for key in one.columns),
        )
        for one in kept
    ]
    return [one.x for one in kept], text_of_readings(readings, [Pack(len(pack), *pack[0][1:]) for pack in packs]) if kept else ""


def packed(states: Mapping[str, Mapping[str, Any]]) -> tuple[str, list[list[Any]]]:
    """Returns the tensors of states, those of one dtype and shape together, and the layout by which they are found.

    The compiler writes each directly into its stack, so there are fewer tensors to copy.
    """
    packs: list[list[Any]] = []
    layout = ""
    for path, state in states.items():
        for key, value in state.items():
            index = _fitting(packs, value)
            layout += f"{path}{NEXT}{key}{NEXT}{index}{NEXT}{len(packs[index])}{NEXT}"
            packs[index].append(value)
    return layout, packs


def _fitting(packs: list[list[Any]], value: Any) -> int:
    """Returns the index of the pack for tensors like `value`, which may be a new one."""
    for index, pack in enumerate(packs):
        # As texts: to compare the symbol of a graph with a number would be a guard.
        if pack[0].dtype == value.dtype and str(tuple(pack[0].shape)) == str(tuple(value.shape)):
            return index
    packs.append([])
    return len(packs) - 1


def _extend(packs: list[list[Any]], pack: Sequence[Any]) -> tuple[int, str]:
    """Adds tensors to the pack for those like them; returns the index of the pack, and their place in it."""
    index = _fitting(packs, pack[0])
    packs[index].extend(pack)
    return index, f"{len(packs[index]) - len(pack)} {len(pack)}"
