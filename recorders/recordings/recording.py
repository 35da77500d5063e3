"""Recording: results and states without hooks; returned by `recorder.snapshot()`, `load(path)` and `recorder.sync()`."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice
from pathlib import Path
from typing import Any, Literal, NamedTuple, TypeAlias

from recorders._torch import outside_modes, plainly
from recorders.errors import MergeError, SelectionError
from recorders.recordings.display import NET, Names, Rows, ShownAsTable, brief, cut, is_named, listed, printable, shown_name
from recorders.recordings.distributed.differing import Differing
from recorders.recordings.distributed.placement import Placement
from recorders.recordings.history import Past, why_unknown
from recorders.recordings.values import NamedResults, bare
from reducers import Reducer, Result, State
from reducers.core.reducer import check_reducer
from reducers.errors import did_you_mean

Missing: TypeAlias = Literal["error", "keep"]
"""What to do with a name that only some recordings hold."""


@dataclass(frozen=True)
class Progress:
    """What was recorded so far, as a monitor keeps it.

    Attributes:
        counts: the number of observations in the states, by leaf.
        merged: the number of observations that other monitors or recordings have brought in.
        eligible: how many calls `every` has counted, by stream, less one.
    """

    counts: Mapping[str, int] = field(default_factory=dict)
    merged: int = 0
    eligible: Mapping[str, int] = field(default_factory=dict)

    def as_data(self) -> dict[str, Any]:
        """Returns it as data, of which `Progress(**data)` makes it again."""
        return {"counts": dict(self.counts), "merged": self.merged, "eligible": dict(self.eligible)}


class LeftOut(NamedTuple):
    """How many elements were not finite.

    Attributes:
        number: of elements; of rows, if the reducer leaves out rows as a whole.
        of: how many there were; None if the reducer does not count them.

    >>> str(LeftOut(1, 4)), str(LeftOut(3, None)), str(LeftOut(1, 10**6))
    ('25 % of 4 elements not finite', '3 elements not finite', '0.0001 % of 1,000,000 elements not finite')
    """

    number: int
    of: int | None

    def __str__(self) -> str:
        if self.of is None or self.of < self.number:  # a damaged file may say so
            return f"{self.number:,} elements not finite"
        return f"{100 * self.number / self.of:.2g} % of {self.of:,} elements not finite".replace("1e+02 %", "100 %")


def left_out(reducer: Reducer | None, states: Mapping[str, State]) -> dict[str, LeftOut]:
    """The leaves of which elements were left out, and how many; those that do not tell are left out too. Waits for the device."""
    found = {}
    for leaf, state in states.items() if reducer is not None else ():
        try:
            count = outside_modes(reducer.nonfinite, state) if state else None  # type: ignore[union-attr]
            if count is not None and (number := int(count.number)) > 0:
                found[leaf] = LeftOut(number, None if count.of is None else int(count.of))
        except Exception:  # a reducer of the user's may raise anything, and its results are shown all the same
            continue
    return found


@dataclass(frozen=True, eq=False)
class Subrecording(ShownAsTable, Past):
    """What one monitor recorded. It equals itself only, as do recordings: `equals` compares numbers.

    Attributes:
        reducer: the reducer of the states; None if it was loaded from a file and holds a function, or its class is not imported:
            only `saved_results` are known then.
        states: one state per tensor leaf, by the path of the leaf in the operand ("" for a single tensor).
        samples: the number of observations; if calls differed in the leaves that they had, of the leaf that has most.
        saved_results: the results by leaf at the time of saving; None if this was not loaded.
        monitor: the kind of monitor, such as "ForwardMonitor".
        attr: the attribute or parameter that it watched, if any.
        module: the class of its module, such as "Linear".
        functions: the functions given to `apply` and `apply_sample`, in order; each is called with (result, samples).
        recipe: if the reducer is None, its description in the file, to save it again.
        progress: what a monitor needs to go on bit for bit, beside the states; None if this was merged.
        placement: by leaf, which part of a tensor this rank holds, if ranks share the tensor; `sync` merges by it.
        ranks: if it was merged of tensors that ranks share, the ranks. Files do not keep this, nor what follows.
        copies: of how many tensors the copies of several ranks were compared.
        differing: those of which the copies differ.
    """

    reducer: Reducer | None
    states: Mapping[str, State] = field(default_factory=dict)
    samples: int = 0
    saved_results: Mapping[str, Any] | None = None
    monitor: str = ""
    attr: str | None = None
    module: str = ""
    functions: tuple[Callable[[Any, int], Any], ...] = ()
    recipe: Mapping[str, Any] | str | None = None
    progress: Progress | None = None
    placement: Mapping[str, Placement] = field(default_factory=dict)
    ranks: tuple[int, ...] = ()
    copies: int = 0
    differing: tuple[Differing, ...] = ()

    def __repr__(self) -> str:
        gaps = "".join(f", {share}{f' in {leaf}' * bool(leaf)}" for leaf, share in islice(self.left_out().items(), 1))
        shown = brief(bare(dict(islice(self.iter_leaves(), 5))))  # as brief shows four statistics
        return printable(f"<{self.title_shown()}{gaps}, {shown}>")

    def title_shown(self) -> str:
        """The monitor, its module and how often it recorded."""
        what = f"{self.monitor or 'Monitor'}({'unknown' if self.reducer is None else self.reducer})"
        return f"{cut(what, 160)}{f' on {self.module}' if self.module else ''}: {self.samples:,} observations"

    def rows_shown(self) -> Rows:
        """One row for each leaf."""
        number = len(self.saved_results or {}) if self.reducer is None else sum(map(bool, self.states.values()))
        holes = self.left_out()
        return ("leaf", "result"), ([(path, _marked(result, holes.get(path)))] for path, result in self.iter_leaves()), number

    def left_out(self) -> dict[str, LeftOut]:
        """How many elements were left out because they are NaN or infinite, by leaf; of leaves with none, nothing."""
        return left_out(self.reducer, self.states)

    def snapshot(self) -> Subrecording:
        """This itself: nothing changes it any more."""
        return self

    def iter_leaves(self) -> Iterator[tuple[str, Any]]:
        """The paths and results of `leaves`, one by one, each computed when its turn comes."""
        return ((path, self.result_of(path)) for path in self.leaf_names())

    def leaf_names(self) -> list[str]:
        """The paths of the leaves with observations."""
        return list(self.saved_results or {}) if self.reducer is None else [path for path, state in self.states.items() if state]

    def result_of(self, leaf: str) -> Any:
        """The result of one of these leaves."""
        return (self.saved_results or {})[leaf] if self.reducer is None else outside_modes(self._compute, self.states[leaf])

    def _compute(self, state: State) -> Any:
        result: Any = self.reducer.compute(state)  # type: ignore[union-attr]
        for function in self.functions:
            result = function(result, self.samples)
        return result

    @plainly
    def merge(self, other: Subrecording) -> Subrecording:
        """The merged subrecording of both.

        Raises:
            MergeError: the monitors or the reducers differ, or a reducer is unknown: it holds a function, or the module of its
                class is not imported; or two ranks of a group recorded what they share.
        """
        reducer = check_alike(self, other)
        paths = dict.fromkeys([*self.states, *other.states])
        for path in paths if self.placement or other.placement else ():
            self._check_place(other, path)
        states = {path: reducer.merge(self.states.get(path, {}), other.states.get(path, {})) for path in paths}
        placement = {**other.placement, **self.placement}
        samples = self.samples + other.samples
        ranks, differing = tuple(sorted({*self.ranks, *other.ranks})), self.differing + other.differing
        merged = replace(self, states=states, samples=samples, saved_results=None, progress=None, placement=placement)
        return replace(merged, ranks=ranks, copies=max(self.copies, other.copies), differing=differing)

    def _check_place(self, other: Subrecording, leaf: str) -> None:
        mine, theirs = self.placement.get(leaf), other.placement.get(leaf)
        both = self.states.get(leaf) and other.states.get(leaf)
        if both and mine != theirs and ((mine and theirs) or any(place and place.parts for place in (mine, theirs))):
            raise MergeError(
                f"leaf {leaf!r} is {mine or 'whole'} in one and {theirs or 'whole'} in the other: what ranks share is merged of "
                "all ranks at once, by recorder.sync() or recorders.merge(paths)"
            )


@dataclass(frozen=True, repr=False, eq=False)
class Recording(ShownAsTable, NamedResults, Mapping[str, Subrecording]):
    """An ordered mapping from name to `Subrecording`, with aliases: further names of the same ones.

    Attributes:
        subrecordings: by name.
        aliases: names by further name.
        step: the step of the clock at which it was recorded; None if it was merged, or if there was no clock.
        damaged: why a subrecorder could not be read, by name, if damaged ones were to be left out; see `load`.

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
    step: int | None = None
    damaged: Mapping[str, str] = field(default_factory=dict)

    def __getitem__(self, name: str | int) -> Subrecording:
        if name in self.subrecordings:
            return self.subrecordings[name]  # type: ignore[index]
        return self.subrecordings[lookup(name, self.subrecordings, self.aliases)]

    def __iter__(self) -> Iterator[str]:
        return iter(self.subrecordings)

    def __len__(self) -> int:
        return len(self.subrecordings)

    def __contains__(self, name: object) -> bool:
        """Whether a name, a further name or an index stands for a subrecorder; nothing is read for it."""
        return stands_for_one(name, self.subrecordings, self.aliases)

    def keys(self) -> Names:
        return Names(self)

    @property
    def differing(self) -> tuple[Differing, ...]:
        """What ranks should have recorded alike and did not, bit for bit, if this was merged of what many ranks recorded.

        Of recordings that are merged as they are looked at, see `recorders.merge`, it reads them. Files do not keep it.
        """
        return tuple(one for part in self.values() for one in part.differing)

    def title_shown(self) -> str:
        """How much was recorded, and when."""
        return f"Recording of {len(self):,} subrecorders" + ("" if self.step is None else f" at step {self.step:,}")

    def rows_shown(self) -> Rows:
        """One row for each leaf of each subrecorder."""
        return part_rows(self, self.__getitem__)

    def compute(self) -> dict[str, Result]:
        """Results by name, each as deep as `peek` says; subrecordings without observations are left out."""
        return {name: result for name, part in self.items() if (result := part.peek()) is not None}

    def snapshot(self) -> Recording:
        """This itself: nothing changes it any more."""
        return self

    @plainly
    def merge(self, other: Mapping[str, Subrecording], *, missing: Missing = "error") -> Recording:
        """The merged recording of both.

        Args:
            other: what was recorded later.
            missing: "keep" keeps names that only one of them holds; "error" refuses them.

        Raises:
            ValueError: `missing` is neither.
            TypeError: `other` is something else, such as a path.
            MergeError: the names differ, or two subrecordings do not fit together; the message says which.
        """
        check_mapping(other, "merge")
        if missing not in ("error", "keep"):
            raise ValueError(f"merge(missing={missing!r}): choose 'error' or 'keep'")
        if missing == "error":
            check_same_names(self, other, "the first recording", "the second")
        merged: dict[str, Subrecording] = {}
        for name in dict.fromkeys((*self, *other)):  # which may be a further name in one of them
            held = [one[name] for one in (self, other) if name in one]
            try:
                merged[name] = held[0] if len(held) == 1 else held[0].merge(held[1])
            except Exception as error:
                raise MergeError(f"subrecorder {name!r}: {error}") from error
        aliases = {**(other.aliases if isinstance(other, Recording) else {}), **self.aliases}
        return Recording(merged, {alias: name for alias, name in aliases.items() if alias not in merged})

    def save(
        self, path: str | os.PathLike[str], *, layout: Literal["folder", "packed"] = "folder", overwrite: bool = False
    ) -> Path | str:
        """Writes the recording into the folder `path`, and returns the folder; see `recorders.save`, also for errors."""
        return _writers["save"](self, path, layout=layout, overwrite=overwrite)

    def with_reducers(self, reducers: Reducer | Mapping[str, Reducer]) -> Recording:
        """The recording with reducers for those subrecordings that have none because their reducer holds a function.

        Args:
            reducers: one for all of them, or a mapping from name or glob to reducer.
        """
        given = {"*": reducers} if isinstance(reducers, Reducer) else dict(reducers)
        for pattern, reducer in given.items():
            check_reducer(reducer, f"reducers[{pattern!r}]")
        parts = dict(self.subrecordings)
        for name, part in parts.items():
            chosen = next((reducer for pattern, reducer in given.items() if is_named(name, pattern)), None)
            if part.reducer is None and chosen is not None:
                parts[name] = replace(part, reducer=chosen)
        return replace(self, subrecordings=parts)


def _marked(result: Any, left_out: LeftOut | None) -> str:
    """A result in a few words, and how many elements it leaves out."""
    return brief(result) if left_out is None else f"{left_out}: {brief(result)}"


def part_rows(names: Mapping[str, Any], part_of: Callable[[str], Subrecording]) -> Rows:
    """One row for each leaf of each subrecorder; each is asked for when it is shown, and errors take the place of results."""

    def rows(name: str) -> list[Sequence[str]]:
        try:
            part = part_of(name)
            what = f"{part.monitor} {part.attr}" if part.attr else part.monitor
            holes = part.left_out()
            leaves = [
                (f"{shown_name(name)}[{path}]" if path else shown_name(name), _marked(result, holes.get(path)))
                for path, result in (part.leaves() or {"": None}).items()
            ]
        except Exception as error:
            return [(shown_name(name), "", "", f"{type(error).__name__}: {error}", "")]
        return [(shown, what, part.module, result, f"{part.samples:,}") for shown, result in leaves]

    return ("name", "monitor", "on", "result", "observations"), map(rows, names), len(names)


_writers: dict[str, Callable[..., Path | str]] = {}


def register_writer(write: Callable[..., Path | str]) -> None:
    """Registers the function that `Recording.save` calls; this module must not import the one that writes files."""
    _writers["save"] = write


def check_recorded(recorded: object, where: str) -> None:
    """Raises `TypeError`, which names `where`, if `recorded` holds no results, as the path of a recording does not."""
    if not isinstance(recorded, Mapping) or not hasattr(recorded, "snapshot"):
        raise TypeError(f"{where} needs a recorder or a recording; got {recorded!r:.100}; of a path give recorders.load(path)")


def check_mapping(recorded: object, where: str) -> None:
    """Raises `TypeError` if `recorded` has nothing by name, as the path of a recording has not."""
    if not isinstance(recorded, Mapping):
        check_recorded(recorded, where)


def check_alike(a: Subrecording, b: Subrecording) -> Reducer:
    """The reducer of both; raises `MergeError` if reducers or monitors differ, or a reducer is unknown."""
    for part in (a, b):
        if part.reducer is None:
            raise MergeError(why_unknown(part.recipe))
    assert a.reducer is not None
    if a.monitor and b.monitor and (a.monitor, a.attr) != (b.monitor, b.attr):
        first, second = (f"{part.monitor}{f' of {part.attr}' if part.attr else ''}" for part in (a, b))
        raise MergeError(f"{first} and {second} look at different things: only what equal monitors recorded can be merged")
    if a.reducer != b.reducer:
        raise MergeError(f"the reducers differ: {a.reducer!r} and {b.reducer!r}; only what equal reducers recorded can be merged")
    return a.reducer


def check_same_names(first: Iterable[str], second: Iterable[str], this: str, other: str) -> None:
    """Raises `MergeError` if the names differ; `this` and `other` say in the message whose they are."""
    check_mapping(second, "merge")
    here, there = set(first), set(second)
    if here != there:
        mine, theirs = listed(sorted(here - there)), listed(sorted(there - here))
        raise MergeError(
            f"the names differ: only {this} has {mine}, only {other} {theirs}; record the same modules, or merge recordings with "
            "missing='keep', as in recorders.merge(paths, missing='keep')"
        )


def stands_for_one(name: object, names: Mapping[str, Any], aliases: Mapping[str, str]) -> bool:
    """Whether a name, an alias or an index stands for one of the names, without the search for similar ones that an error takes."""
    if isinstance(name, int):
        return -len(names) <= name < len(names)
    return name in names or name in aliases or (name == NET and ("" in names or "" in aliases))


def lookup(name: str | int, names: Mapping[str, Any], aliases: Mapping[str, str]) -> str:
    """The name that a name, an alias or an index stands for; if there is none, raises a `SelectionError` that lists all names."""
    if isinstance(name, int):
        if -len(names) <= name < len(names):
            return list(names)[name]
        raise SelectionError(f"no subrecorder {name}: there are {len(names)}")
    if name in names:
        return name
    if name in aliases:
        return aliases[name]
    if name == NET and ("" in names or "" in aliases):
        return aliases.get("", "")
    known = [shown_name(other) for other in names]
    raise SelectionError(f"no subrecorder {name!r}; {did_you_mean(name, [*known, *aliases])}there are {listed(known)}")
