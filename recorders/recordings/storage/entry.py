"""One subrecorder in a manifest: what it says, and whether it may be believed."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeAlias, Union

from recorders.errors import StorageError
from recorders.recordings.distributed.placement import is_plain_placement

__all__ = ["MAX_DEPTH", "Entry", "Tree", "check_entry", "is_count", "is_text", "is_text_or_none", "mapping", "matches"]

MAX_DEPTH = 32
"""How deep results may be nested."""

_FILE = re.compile(r"[0-9]{1,20}(-[0-9a-z-]{1,60})?\.safetensors")
_SHA256 = re.compile(r"[0-9a-f]{64}")

Tree: TypeAlias = Union[str, Mapping[str, "Tree"]]
"""The name of a tensor, or trees by key."""


@dataclass(frozen=True)
class Entry:
    """One subrecorder.

    Attributes:
        name: any string.
        file: its file in the generation folder, `bytes` long, with checksum `sha256`; several may share one.
        reducer: the recipe; the repr if the reducer holds a function; None if unknown.
        states: names of tensors by leaf and key.
        values: trees of names of tensors by leaf.
        dtypes: the true dtypes of tensors that are stored as another dtype, by name.
        versions: the versions of the states of reducers, by type of the recipe; those of version 1 are left out.
        progress: what a monitor needs to go on bit for bit, see `recorders.recordings.progress`; None if nothing.
        placement: by leaf, which part of a tensor that ranks share it is, see `recorders.recordings.distributed.placement`.
    """

    name: str
    monitor: str
    attr: str | None
    module: str
    samples: int
    reducer: Mapping[str, Any] | str | None
    file: str
    bytes: int
    sha256: str
    states: Mapping[str, Mapping[str, str]]
    values: Mapping[str, Tree]
    dtypes: Mapping[str, str]
    versions: Mapping[str, int] = field(default_factory=dict)
    progress: Mapping[str, Any] | None = None
    placement: Mapping[str, Any] = field(default_factory=dict)

    def tensors(self) -> list[str]:
        """The names of all tensors in the file that are its own."""
        return [name for state in self.states.values() for name in state.values()] + list(_leaves(self.values))


def _leaves(tree: Tree) -> Iterator[str]:
    if isinstance(tree, str):
        yield tree
    else:
        for node in tree.values():
            yield from _leaves(node)


def matches(pattern: re.Pattern[str]) -> Callable[[Any], bool]:
    """A check: whether a value is a text that the pattern matches from end to end."""
    return lambda value: isinstance(value, str) and pattern.fullmatch(value) is not None


def is_text(value: Any) -> bool:
    """Whether a value is a text."""
    return isinstance(value, str)


def is_text_or_none(value: Any) -> bool:
    """Whether a value is a text or None."""
    return value is None or isinstance(value, str)


def is_count(value: Any) -> bool:
    """Whether a value is an integer from 0 on; True and False are none."""
    return type(value) is int and value >= 0


def mapping(item: Callable[[Any], bool]) -> Callable[[Any], bool]:
    """A check: whether a value is a dict with texts as keys, of which each value passes the check `item`."""

    def fits(value: Any) -> bool:
        if not isinstance(value, dict):
            return False
        for key, part in value.items():  # noqa: SIM110 - a generator takes twice the time
            if not isinstance(key, str) or not item(part):
                return False
        return True

    return fits


def _is_text_by_text(value: Any) -> bool:
    # Without a call for each text: this is half of a small save.
    return isinstance(value, dict) and ({*map(type, value), *map(type, value.values())} <= {str} or mapping(is_text)(value))


def _is_tree(value: Any, depth: int = 0) -> bool:
    if isinstance(value, dict) and depth < MAX_DEPTH:
        return _is_text_by_text(value) or all(isinstance(key, str) and _is_tree(node, depth + 1) for key, node in value.items())
    return isinstance(value, str)


def _is_progress(value: Any) -> bool:
    """Whether this may be what `recorders.recordings.storage.codec` made of a `Progress`."""
    counts = mapping(is_count)
    fields = {"counts": counts, "merged": is_count, "eligible": counts}
    return isinstance(value, dict) and value.keys() == fields.keys() and all(fits(value[key]) for key, fits in fields.items())


_CHECKS: dict[str, tuple[Callable[[Any], bool], str]] = {
    "name": (is_text, "a text"),
    "monitor": (is_text, "a text"),
    "attr": (is_text_or_none, "a text or null"),
    "module": (is_text, "a text"),
    "samples": (is_count, "a count"),
    "reducer": (lambda value: value is None or isinstance(value, (str, dict)), "a recipe, a text or null"),
    "file": (matches(_FILE), "the name of a file in the generation folder"),
    "bytes": (is_count, "a count"),
    "sha256": (matches(_SHA256), "a checksum"),
    "states": (mapping(_is_text_by_text), "tensor names by leaf and key, all texts"),
    "values": (mapping(_is_tree), f"trees of tensor names by leaf, with texts as keys, nested at most {MAX_DEPTH} deep"),
    "dtypes": (_is_text_by_text, "dtypes by tensor name"),
    "versions": (mapping(is_count), "versions by type of reducer"),
    "progress": (lambda value: value is None or _is_progress(value), "counts and texts"),
    "placement": (mapping(is_plain_placement), "rank, sharing, mesh, axes and parts by leaf"),
}


def check_entry(entry: Entry, error: type[StorageError], where: str) -> None:
    """Raises `error` if anything in the entry is invalid."""
    for key, (fits, meaning) in _CHECKS.items():
        if not fits(getattr(entry, key)):
            problem = f"{key!r} must be {meaning} and is {getattr(entry, key)!r:.200}"
            raise error(f"{where} is malformed: subrecorder {entry.name!r:.200}: {problem}")
    tensors = entry.tensors()
    if len(set(tensors)) != len(tensors) or not entry.dtypes.keys() <= set(tensors):
        raise error(f"{where} is malformed: subrecorder {entry.name!r:.200} names a tensor twice, or an unknown one")
