"""What was recorded, without hooks: what `recorder.snapshot()`, `load(path)` and `recorder.sync()` return."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from recorders._torch import outside_modes
from recorders.errors import MergeError, SelectionError
from recorders.recordings.past import Past
from reducers import Reducer, Result, State
from reducers.core.reducer import check_reducer

__all__ = ["Recording", "Subrecording", "check_same_names", "lookup", "register_writer"]


@dataclass(frozen=True)
class Subrecording(Past):
    """What one monitor recorded.

    Attributes:
        reducer: what made the states; None where a loaded recipe holds a function, so that only `values` are known.
        states: one state per tensor leaf, keyed by the leaf's path in the operand ("" for a lone tensor).
        samples: how many observations were recorded.
        values: results by leaf as they were when saved; None on what was not loaded.
        monitor: the kind of monitor, such as "ForwardMonitor".
        attr: the attribute or parameter it watched, if any.
        module: the class of the module it sat on, such as "Linear".
        functions: what `apply` and `apply_sample` asked to be done to the result, in order; each takes (result, samples).
        recipe: where the reducer is None, what its file says of it, so that saving again loses nothing.
    """

    reducer: Reducer | None
    states: Mapping[str, State] = field(default_factory=dict)
    samples: int = 0
    values: Mapping[str, Any] | None = None
    monitor: str = ""
    attr: str | None = None
    module: str = ""
    functions: tuple[Callable[[Any, int], Any], ...] = ()
    recipe: Mapping[str, Any] | str | None = None

    def leaves(self) -> dict[str, Any]:
        """Result by leaf path; leaves into which nothing was reduced are absent."""
        if self.reducer is None:
            return dict(self.values or {})
        results: dict[str, Any] = {}
        for path, state in self.states.items():
            if state:
                results[path] = outside_modes(self._compute, state)
        return results

    def _compute(self, state: State) -> Any:
        result: Any = self.reducer.compute(state)  # type: ignore[union-attr]
        for function in self.functions:
            result = function(result, self.samples)
        return result

    def peek(self) -> Any:
        """The result: of the lone tensor, or by leaf path where the operand was nested; None where nothing was recorded."""
        leaves = self.leaves()
        if not leaves:
            return None
        return leaves[""] if set(leaves) == {""} else leaves

    def merge(self, other: Subrecording) -> Subrecording:
        """Both together, leaf by leaf.

        Raises:
            MergeError: the reducers differ, or one is unknown because its recipe holds a function.
        """
        if self.reducer is None or other.reducer is None:
            raise MergeError("the reducer holds a function, which files do not keep: pass it, load(path, reducers={name: reducer})")
        if self.reducer != other.reducer:
            raise MergeError(f"the reducers differ: {self.reducer!r} and {other.reducer!r}")
        paths = dict.fromkeys([*self.states, *other.states])
        states = {path: self.reducer.merge(self.states.get(path, {}), other.states.get(path, {})) for path in paths}
        return replace(self, states=states, samples=self.samples + other.samples, values=None)


@dataclass(frozen=True)
class Recording(Mapping[str, Subrecording]):
    """An ordered mapping from name to `Subrecording`, with other names (aliases) for the same ones.

    >>> import torch
    >>> from reducers import Mean
    >>> mean = Mean()
    >>> states = [mean.update({}, torch.tensor(values)) for values in ([1.0, 2.0], [6.0])]
    >>> left, right = (Recording({"loss": Subrecording(mean, {"": state}, samples=1)}) for state in states)
    >>> left.merge(right).compute()
    {'loss': tensor(3., dtype=torch.float64)}
    """

    subrecordings: Mapping[str, Subrecording]
    aliases: Mapping[str, str] = field(default_factory=dict)

    def __getitem__(self, name: str | int) -> Subrecording:
        if name in self.subrecordings:
            return self.subrecordings[str(name)]
        return self.subrecordings[lookup(name, self.subrecordings, self.aliases)]

    def __iter__(self) -> Iterator[str]:
        return iter(self.subrecordings)

    def __len__(self) -> int:
        return len(self.subrecordings)

    def compute(self) -> dict[str, Result]:
        """Result by name; subrecordings into which nothing was reduced are absent."""
        return {name: result for name, part in self.items() if (result := part.peek()) is not None}

    def samples(self, name: str | int) -> int:
        """How many observations one subrecorder recorded."""
        return self[name].samples

    def iter_samples(self) -> Iterator[int]:
        """How many observations each subrecorder recorded, in order."""
        return (part.samples for part in self.values())

    def merge(self, other: Mapping[str, Subrecording]) -> Recording:
        """Both recordings as one.

        Raises:
            MergeError: the names differ, or a pair of subrecordings does not fit; the message says which.
        """
        check_same_names(self, other, "the first recording", "the second")
        merged = {}
        for name, part in self.items():
            try:
                merged[name] = part.merge(other[name])
            except Exception as error:
                raise MergeError(f"subrecorder {name!r}: {error}") from error
        return Recording(merged, self.aliases)

    def save(self, path: str | os.PathLike[str]) -> Path:
        """Writes the recording into the folder `path`; see `recorders.recordings.storage.save`."""
        return _writers["folder"](self, path)

    def with_reducers(self, reducers: Reducer | Mapping[str, Reducer]) -> Recording:
        """The same recording with reducers given by the caller, for those whose recipe holds a function.

        Args:
            reducers: one for all that have none, or a mapping from name or glob pattern to reducer.
        """
        given = {"*": reducers} if isinstance(reducers, Reducer) else dict(reducers)
        for pattern, reducer in given.items():
            check_reducer(reducer, f"reducers[{pattern!r}]")
        parts = dict(self.subrecordings)
        for name, part in parts.items():
            chosen = next((reducer for pattern, reducer in given.items() if name == pattern or fnmatchcase(name, pattern)), None)
            if part.reducer is None and chosen is not None:
                parts[name] = replace(part, reducer=chosen)
        return replace(self, subrecordings=parts)


_writers: dict[str, Callable[[Recording, str | os.PathLike[str]], Path]] = {}


def register_writer(layout: str, write: Callable[[Recording, str | os.PathLike[str]], Path]) -> None:
    """Let `Recording.save` write this layout; files know recordings, and not the reverse."""
    _writers[layout] = write


def check_same_names(first: Iterable[str], second: Iterable[str], this: str, other: str) -> None:
    """Raises `MergeError` if the names differ; `this` and `other` say in the message whose they are."""
    here, there = set(first), set(second)
    if here != there:
        raise MergeError(f"the names differ: only {this} has {sorted(here - there)}, only {other} {sorted(there - here)}")


def lookup(name: str | int, names: Mapping[str, Any], aliases: Mapping[str, str]) -> str:
    """The true name behind a name, an alias or an index.

    Raises:
        SelectionError: there is none; lists what there is.
    """
    if isinstance(name, int):
        if -len(names) <= name < len(names):
            return list(names)[name]
        raise SelectionError(f"no subrecorder {name}: there are {len(names)}")
    if name in names:
        return name
    if name in aliases:
        return aliases[name]
    raise SelectionError(f"no subrecorder {name!r}; there are {list(names)[:20]}{' and more' if len(names) > 20 else ''}")
