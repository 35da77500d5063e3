"""Recordings merged name by name: of each, one subrecording is read at a time."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace

from recorders.errors import MergeError, StorageError
from recorders.recordings.distributed.ranks import Differing, merge_subrecordings, warn_differing
from recorders.recordings.recording import Recording, Subrecording

__all__ = ["Merged", "merged_aliases"]


class Merged(Mapping[str, Subrecording]):
    """Subrecordings by name, each merged when it is asked for, each time anew.

    Args:
        recordings: by where they come from, as errors say it; earliest first.
        lost: if given, subrecordings that cannot be read are left out, and noted here by name and where.
        apart: put the results of reducers that are not known side by side, each with where it comes from in the name of its leaf;
            otherwise they are a `MergeError`.
    """

    def __init__(self, recordings: Mapping[str, Recording], *, lost: dict[str, str] | None = None, apart: bool = False) -> None:
        self._recordings, self._lost, self._apart = recordings, lost, apart
        self._names = dict.fromkeys(name for recording in recordings.values() for name in recording)

    def __getitem__(self, name: str) -> Subrecording:
        differing: Differing = {}
        merged = self.merge(name, differing)
        warn_differing(differing)
        return merged

    def all(self) -> dict[str, Subrecording]:
        """All of them; warns once of copies that differ. Names of which nothing can be read are left out."""
        differing: Differing = {}
        parts = {}
        for name in self._names:
            try:
                parts[name] = self.merge(name, differing)
            except KeyError:
                if self._lost is None:
                    raise
        warn_differing(differing)
        return parts

    def merge(self, name: str, differing: Differing) -> Subrecording:
        """What all recorded under a name; adds to `differing` what should be copies and is not.

        What ranks share is needed of all of them at once; of everything else, two are in memory.
        """
        merged: Subrecording | None = None
        unknown: dict[str, Subrecording] = {}
        shared: list[Subrecording] = []
        for where, part in self._parts(name):
            if self._apart and part.reducer is None and merged is None and not shared:
                unknown[where] = part
            elif shared or part.placement:
                shared += [part] if shared or merged is None else [merged, part]
            else:
                before = next(iter(unknown.values()), merged)
                merged = part if before is None else _joined(before, part, name, where)
        if unknown:
            return _side_by_side(unknown)
        if shared:
            merged = merge_subrecordings(shared, name, differing)
        if merged is None:
            raise KeyError(name)
        return merged

    def _parts(self, name: str) -> Iterator[tuple[str, Subrecording]]:
        for where, recording in self._recordings.items():
            if name in recording.subrecordings:
                try:
                    part = recording.subrecordings[name]
                except (StorageError, OSError) as error:
                    if self._lost is None:
                        raise
                    self._lost[f"{name} of {where}"] = str(error)
                else:
                    yield where, part

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)

    def __contains__(self, name: object) -> bool:
        return name in self._names


def _joined(merged: Subrecording, part: Subrecording, name: str, where: str) -> Subrecording:
    try:
        return merged.merge(part)
    except Exception as error:
        raise MergeError(f"subrecorder {name!r} of {where} does not fit those before: {error}") from error


def _side_by_side(parts: Mapping[str, Subrecording]) -> Subrecording:
    """The results of all as leaves of one subrecording."""
    states = {_at(leaf, where): state for where, part in parts.items() for leaf, state in part.states.items()}
    values = {_at(leaf, where): value for where, part in parts.items() for leaf, value in (part.saved_results or {}).items()}
    placement = {_at(leaf, where): place for where, part in parts.items() for leaf, place in part.placement.items()}
    samples = sum(part.samples for part in parts.values())
    first = next(iter(parts.values()))
    return replace(first, states=states, saved_results=values, samples=samples, progress=None, placement=placement)


def _at(leaf: str, where: str) -> str:
    return f"{leaf}.{where}" if leaf else where


def merged_aliases(recordings: Mapping[str, Recording], names: Mapping[str, Subrecording]) -> dict[str, str]:
    """The aliases of all; of one that stands for several names, the first counts."""
    aliases = {alias: name for recording in reversed([*recordings.values()]) for alias, name in recording.aliases.items()}
    return {alias: name for alias, name in aliases.items() if alias not in names and name in names}
