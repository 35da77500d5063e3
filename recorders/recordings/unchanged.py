"""What a folder holds before a save: subrecorders that did not change, whose files are taken over, or another net's recording."""

from __future__ import annotations

import contextlib
import operator
import weakref
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any, NamedTuple

from torch import Tensor

from recorders.errors import RecordingExistsError, StorageError
from recorders.recordings.entry import Entry
from recorders.recordings.manifest import Head, Manifest
from recorders.recordings.ranks_manifest import read_manifest, read_rank
from recorders.recordings.recording import Subrecording
from reducers.kernels.locks import new_lock

__all__ = ["LastSave", "Saved", "check_same_net", "forget", "last_saved", "names_at", "remember", "unchanged"]

_FOLDERS = 4
"""Of how many folders this is known."""

_lock = new_lock()
_saves: OrderedDict[str, LastSave] = OrderedDict()


class Saved(NamedTuple):
    """What was saved of a subrecording: its entry, and what tells whether it is still the same. It keeps no tensor alive."""

    entry: Entry
    objects: tuple[Callable[[], Any], ...]
    facts: tuple[Any, ...]
    tensors: tuple[weakref.ref[Tensor], ...]


class LastSave(NamedTuple):
    """What this process saved into a folder last; `parts` are those whose files can be taken over."""

    head: Head
    names: tuple[str, ...]
    parts: Mapping[str, Saved]


def remember(
    root: str, head: Head, names: tuple[str, ...], parts: Mapping[str, Subrecording], entries: Mapping[str, Entry]
) -> None:
    """Notes what a generation of the folder contains; `parts` are those whose files can be taken over."""
    found = {
        name: Saved(entries[name], tuple(map(_held_weakly, _objects(part))), _facts(part), tuple(map(weakref.ref, _tensors(part))))
        for name, part in parts.items()
    }
    with _lock:
        _saves[root] = LastSave(head, names, found)
        _saves.move_to_end(root)
        while len(_saves) > _FOLDERS:
            _saves.popitem(last=False)


def forget(root: str) -> None:
    """Forgets the folder."""
    with _lock:
        _saves.pop(root, None)


def last_saved(root: str, generation: str) -> LastSave | None:
    """What this process saved into the folder last, if `generation` is still the current one."""
    with _lock:
        last = _saves.get(root)
    return last if last is not None and generation == last.head.generation else None


def names_at(root: str, rank: int | None = None) -> Collection[str]:
    """The names in the recording in a folder; of those of a rank, if it is given; none if no manifest of them can be read."""
    try:
        manifest = read_manifest(root, skip=True)
    except (StorageError, OSError):
        return ()
    if isinstance(manifest, Manifest):
        return manifest.lines
    names: dict[str, None] = {}
    for one in manifest.ranks if rank is None else {rank} & manifest.ranks.keys():
        with contextlib.suppress(StorageError, OSError):
            names.update(dict.fromkeys(read_rank(root, manifest, one).lines))
    return names


def check_same_net(names: Collection[str], there: Collection[str], where: str) -> None:
    """Raises `RecordingExistsError` if a recording of the names `there` is that of another net than the one of these names.

    Names are all that tells: of those of the smaller of both recordings, half must be in the other. So one of fewer or of more
    modules of the same net is the same.
    """
    common = set(names).intersection(there)
    if there and 2 * len(common) < max(1, min(len(names), len(there))):
        new, old = ([name for name in some if name not in common][:5] for some in (names, there))
        raise RecordingExistsError(
            f"{where} holds the recording of another net, of {len(there)} subrecorders such as {old}; only {len(common)} of the "
            f"{len(names)} to be saved, such as {new}, are in it: save into another folder, or replace it with overwrite=True"
        )


def unchanged(part: Subrecording, saved: Saved | None) -> bool:
    """Whether a subrecording is what was saved: states are never written into, so the same tensors have the same values."""
    if saved is None or saved.facts != _facts(part):
        return False
    now, then = [*_objects(part), *_tensors(part)], [*(ref() for ref in saved.objects), *(ref() for ref in saved.tensors)]
    return len(now) == len(then) and all(map(operator.is_, now, then))


def _objects(part: Subrecording) -> tuple[Any, ...]:
    return part.reducer, *part.functions


def _held_weakly(found: Any) -> Callable[[], Any]:
    """A reference to a reducer or a function, which may hold tensors; to nothing if it takes none."""
    try:
        return (lambda: None) if found is None else weakref.ref(found)
    except TypeError:
        return lambda: _GONE


_GONE = object()


def _tensors(part: Subrecording) -> list[Tensor]:
    return [tensor for state in part.states.values() for tensor in state.values()] + [x for _, x in _results(part) if _is_tensor(x)]


def _results(part: Subrecording) -> list[tuple[str, Any]]:
    """What was loaded as results, by path."""
    return [(f"{leaf}/{path}", x) for leaf, value in (part.values or {}).items() for path, x in _leaves(value, "")]


def _leaves(value: Any, path: str) -> Iterator[tuple[str, Any]]:
    if isinstance(value, Mapping):
        for key, item in value.items():
            yield from _leaves(item, f"{path}/{key!r}")
    else:
        yield path, value


def _is_tensor(value: Any) -> bool:
    return isinstance(value, Tensor)


def _facts(part: Subrecording) -> tuple[Any, ...]:
    keys = tuple((leaf, tuple(state)) for leaf, state in part.states.items())
    told = part.progress
    counts = () if told is None else (dict(told.counts), dict(told.eligible), told.merged)
    results = None if part.values is None else [(path, None if _is_tensor(x) else x) for path, x in _results(part)]
    described = len(part.functions), part.recipe, results
    return described, part.samples, part.monitor, part.attr, part.module, dict(part.placement), keys, counts
