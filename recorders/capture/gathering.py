"""Lifts of a graph that is being traced, gathered up to its end, so that one operator hands all of them over.

An operator of ours costs some 50 us of Python when the graph runs. With one for each layer that is more than small layers take.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
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

__all__ = ["NEXT", "Lift", "gather", "hand_over", "hand_over_at_end", "packed"]

NEXT = "\x1f"  # separates the fields of a layout


class Lift(NamedTuple):
    """One lifted observation: its receiver, its stream, and a State by the path of each leaf."""

    receiver: Tensor
    stream: str
    states: Mapping[str, State]


Gathered = dict[str, list[Lift]]  # by the key of the twin whose monitors these are for

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
    found.setdefault(twin, []).append(lift)
    return True


def hand_over(emit: Any, twin: str) -> None:
    """Hands over what was gathered for the monitors of a twin: what they get next follows it."""
    found = _found(emit)
    if found is not None:
        _emit(found.pop(twin, []))


def hand_over_at_end(emit: Any) -> None:
    """Hands over all that was gathered, if the node that runs now is the last one of the graph that lifts."""
    run, last = run_of_node(emit)
    if last and run in _forwards:
        outside_modes(_emit_all, _forwards.pop(run))


def _found(emit: Any) -> Gathered | None:
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
        at_end_of_backward(lambda: outside_modes(_emit_all, _backwards.pop(task, {})))
    return _backwards[task]


def _emit_all(found: Gathered) -> None:
    with NoAutocast(), torch.no_grad():
        for lifts in found.values():
            _emit(lifts)


def _emit(lifts: Sequence[Lift]) -> None:
    if len(lifts) == 1:
        ((receiver, stream, states),) = lifts
        layout, packs = packed(states)
        torch.ops.torch_recorders.receive(receiver, stream, layout, [torch.stack(pack) for pack in packs], "")
    elif lifts:
        layouts, spans, all_packs = [], [], list[list[Tensor]]()
        for lift in lifts:
            layout, packs = packed(lift.states)
            layouts.append(layout)
            spans.append(" ".join(f"{_extend(all_packs, pack)} {len(pack)}" for pack in packs))
        receivers, streams = [lift.receiver for lift in lifts], [lift.stream for lift in lifts]
        torch.ops.torch_recorders.receive_together(receivers, streams, layouts, spans, [torch.stack(pack) for pack in all_packs])


def packed(states: Mapping[str, State]) -> tuple[str, list[list[Tensor]]]:
    """Returns the tensors of states, those of one dtype and shape together, and the layout by which they are found.

    The compiler writes each directly into its stack, so there are fewer tensors to copy.
    """
    packs: list[list[Tensor]] = []
    layout = ""
    for path, state in states.items():
        for key, value in state.items():
            index = _fitting(packs, value)
            layout += f"{path}{NEXT}{key}{NEXT}{index}{NEXT}{len(packs[index])}{NEXT}"
            packs[index].append(value)
    return layout, packs


def _fitting(packs: list[list[Tensor]], value: Tensor) -> int:
    """Returns the index of the pack for tensors like `value`, which may be a new one."""
    for index, pack in enumerate(packs):
        if pack[0].dtype == value.dtype and pack[0].shape == value.shape:
            return index
    packs.append([])
    return len(packs) - 1


def _extend(packs: list[list[Tensor]], pack: Sequence[Tensor]) -> str:
    """Adds tensors to the pack for those like them; returns the index of the pack, and their place in it."""
    index = _fitting(packs, pack[0])
    packs[index].extend(pack)
    return f"{index} {len(packs[index]) - len(pack)}"
