"""Subrecorders that did not change since they were last saved, whose files the next generation takes over."""

from __future__ import annotations

import operator
import threading
import weakref
from collections import OrderedDict
from collections.abc import Mapping
from typing import Any, NamedTuple

from torch import Tensor

from recorders.recordings.entry import Entry
from recorders.recordings.manifest import Head
from recorders.recordings.recording import Subrecording

__all__ = ["Saved", "forget", "last_saved", "remember", "unchanged"]

_FOLDERS = 4
"""Of how many folders this is known."""

_lock = threading.Lock()
_saves: OrderedDict[str, tuple[Head, Mapping[str, Saved]]] = OrderedDict()


class Saved(NamedTuple):
    """What was saved of a subrecording: its entry, and what tells whether it is still the same. It keeps no tensor alive."""

    entry: Entry
    objects: tuple[Any, ...]
    facts: tuple[Any, ...]
    tensors: tuple[weakref.ref[Tensor], ...]


def remember(root: str, head: Head, parts: Mapping[str, Subrecording], entries: Mapping[str, Entry]) -> None:
    """Notes what a generation of the folder contains."""
    found = {
        name: Saved(entries[name], _objects(part), _facts(part), tuple(map(weakref.ref, _tensors(part))))
        for name, part in parts.items()
    }
    with _lock:
        _saves[root] = (head, found)
        _saves.move_to_end(root)
        while len(_saves) > _FOLDERS:
            _saves.popitem(last=False)


def forget(root: str) -> None:
    """Forgets the folder."""
    with _lock:
        _saves.pop(root, None)


def last_saved(root: str, generation: str) -> tuple[Head | None, Mapping[str, Saved]]:
    """What this process saved into the folder last, if `generation` is still the current one."""
    with _lock:
        head, found = _saves.get(root, (None, {}))
    return (head, found) if head is not None and generation == head.generation else (None, {})


def unchanged(part: Subrecording, saved: Saved | None) -> bool:
    """Whether a subrecording is what was saved: states are never written into, so the same tensors have the same values."""
    if saved is None or saved.facts != _facts(part):
        return False
    now, then = [*_objects(part), *_tensors(part)], [*saved.objects, *(ref() for ref in saved.tensors)]
    return len(now) == len(then) and all(map(operator.is_, now, then))


def _objects(part: Subrecording) -> tuple[Any, ...]:
    return part.reducer, part.recipe, part.functions, part.values


def _tensors(part: Subrecording) -> list[Tensor]:
    # With observations that wait, `states` are computed anew for every snapshot.
    states = part.progress.before if part.progress is not None and part.progress.before else part.states
    return [tensor for state in states.values() for tensor in state.values()]


def _facts(part: Subrecording) -> tuple[Any, ...]:
    keys = tuple((leaf, tuple(state)) for leaf, state in part.states.items())
    told = part.progress
    waiting = () if told is None else tuple((rows.paths, rows.start, [len(row) for row in rows.rows]) for rows in told.pending)
    counts = () if told is None else (dict(told.counts), dict(told.eligible), told.merged)
    return part.samples, part.monitor, part.attr, part.module, keys, waiting, counts
