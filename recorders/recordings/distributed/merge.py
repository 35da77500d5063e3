"""Merge: what several ranks or files recorded, as one. Data of each is merged in order; what ranks share counts once.

Of a tensor that ranks share each holds a copy or a part: its `Placement` says which. Copies count once if they are equal, bit for
bit, and parts become the whole if the statistic of the whole follows from those of the parts.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache, reduce
from itertools import islice
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from recorders.errors import MergeError, RecordingWarning, StorageError
from recorders.recordings.distributed.differing import Copy, Differing, compared, equal_states, equal_tensors
from recorders.recordings.distributed.placement import Placement
from recorders.recordings.recording import Recording, Subrecording, check_alike
from reducers import Product, Reducer, State, TensorPart
from reducers.errors import warn_user

T = TypeVar("T")

_FIRST = "The first of them counts."
_APART = "Each that differs counts as of a net of its own: either the copies have diverged, or every rank trains a net of its own."


class Merged(Mapping[str, Subrecording]):
    """Subrecordings by name, each merged when it is asked for, each time anew.

    Args:
        recordings: by where they come from, as errors say it; earliest first.
        damaged: if given, subrecordings that cannot be read are left out, and noted here by name and where.
        apart: put the results of reducers that are not known side by side, each with where it comes from in the name of its leaf;
            otherwise they are a `MergeError`.
    """

    def __init__(self, recordings: Mapping[str, Recording], *, damaged: dict[str, str] | None = None, apart: bool = False) -> None:
        self._recordings, self._damaged, self._apart = recordings, damaged, apart
        self._names = dict.fromkeys(name for recording in recordings.values() for name in recording)

    def __getitem__(self, name: str) -> Subrecording:
        merged = merge_parts(self._parts(name), name, self._apart)
        if merged is None:
            raise KeyError(name)
        _warn(merged.differing)
        return merged

    def all(self) -> dict[str, Subrecording]:
        """All of them; warns once of copies that differ. Names of which nothing can be read are left out."""
        parts = {name: merge_parts(self._parts(name), name, self._apart) for name in self._names}
        merged = {name: part for name, part in parts.items() if part is not None}
        _warn([one for part in merged.values() for one in part.differing])
        return merged

    def _parts(self, name: str) -> Iterator[tuple[str, Subrecording]]:
        for where, recording in self._recordings.items():
            here = name if name in recording.subrecordings else recording.aliases.get(name)
            if here is not None and here in recording.subrecordings:
                try:
                    part = recording.subrecordings[here]
                except (StorageError, OSError) as error:
                    if self._damaged is None:
                        raise
                    self._damaged[f"{name} of {where}"] = str(error)
                else:
                    yield where, part

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)

    def __contains__(self, name: object) -> bool:
        return name in self._names


def merged_aliases(recordings: Mapping[str, Recording], names: Mapping[str, object]) -> dict[str, str]:
    """The aliases of all; of one that stands for several names, the first counts."""
    aliases = {alias: name for recording in reversed([*recordings.values()]) for alias, name in recording.aliases.items()}
    return {alias: name for alias, name in aliases.items() if alias not in names and name in names}


def merge_parts(parts: Iterable[tuple[str, Subrecording]], name: str, apart: bool = False) -> Subrecording | None:
    """What was recorded under one name in several places, as one; None if there is nothing.

    What ranks share is needed of all of them at once; of everything else, two are in memory.

    Args:
        parts: each with where it comes from, as errors say it; earliest first.
        name: the name, for errors.
        apart: see `Merged`.

    Raises:
        MergeError: two do not fit together.
    """
    merged: Subrecording | None = None
    unknown: dict[str, Subrecording] = {}
    shared: list[tuple[str, Subrecording]] = []
    for where, part in parts:
        if apart and part.reducer is None and merged is None and not shared:
            unknown[where] = part
        elif shared or part.placement:
            shared += [] if shared or merged is None else [("the first", merged)]
            shared.append((where, part))
        else:
            before = next(iter(unknown.values()), merged)
            merged = part if before is None else _fit(where, name, Subrecording.merge, before, part)
    if unknown:
        return _as_leaves(unknown)
    return _of_ranks(shared, name) if shared else merged


def _fit(where: str, name: str, merge: Callable[..., T], *arguments: Any) -> T:
    try:
        return merge(*arguments)
    except Exception as error:
        raise MergeError(f"{where} does not fit those before it: subrecorder {name!r}: {error}") from error


def _as_leaves(parts: Mapping[str, Subrecording]) -> Subrecording:
    """The results of all as leaves of one subrecording."""
    states = {_at(leaf, where): state for where, part in parts.items() for leaf, state in part.states.items()}
    values = {_at(leaf, where): value for where, part in parts.items() for leaf, value in (part.saved_results or {}).items()}
    placement = {_at(leaf, where): place for where, part in parts.items() for leaf, place in part.placement.items()}
    samples = sum(part.samples for part in parts.values())
    first = next(iter(parts.values()))
    return replace(first, states=states, saved_results=values, samples=samples, progress=None, placement=placement)


def _at(leaf: str, where: str) -> str:
    return f"{leaf}.{where}" if leaf else where


def _warn(differing: Sequence[Differing]) -> None:
    """Warns of copies that differ, once for each thing that was done about them."""
    for consequence, counted in ((_FIRST, True), (_APART, False)):
        found = [one for one in differing if one.first_counts == counted]
        if found:
            more = f"; and {len(found) - 5} more" if len(found) > 5 else ""
            shown = "; ".join(map(str, islice(found, 5)))
            warn_user(f"ranks should hold copies, which differ: {shown}{more}. {consequence}", RecordingWarning)


class _Tensor(NamedTuple):
    """What was recorded of one tensor: its states by what part of it they are of ("" for the whole), and how often."""

    states: Mapping[str, State]
    samples: int
    rank: int
    shared: bool


def _of_ranks(parts: Sequence[tuple[str, Subrecording]], name: str) -> Subrecording:
    """What ranks recorded of tensors that they share, as one."""
    by_rank: dict[int, Subrecording] = {}
    reducer = parts[0][1].reducer
    for number, (where, part) in enumerate(parts):  # what a rank recorded one after another, in several files, comes first
        rank = next((place.rank for place in part.placement.values()), ~number)
        before = by_rank.get(rank)
        by_rank[rank] = part if before is None else _fit(where, name, Subrecording.merge, before, part)
        reducer = _fit(where, name, check_alike, parts[0][1], part)
    assert reducer is not None
    ranks = list(by_rank.values())
    states: dict[str, State] = {}
    samples = []
    comparison = _Comparison(reducer, name, ranks[0].monitor)
    for leaf in dict.fromkeys(leaf for part in ranks for leaf in (*part.states, *part.placement)):
        tensors = _once(_tensors(reducer, ranks, leaf, comparison), leaf, comparison)
        samples.append(sum(tensor.samples for tensor in tensors))
        for tensor in tensors:
            for label, state in tensor.states.items():
                path = f"{leaf}.{label}" if leaf and label else leaf or label
                whose = f"rank {tensor.rank}" if tensor.rank >= 0 else "what a rank has for itself"
                states[path] = _fit(whose, name, reducer.merge, states.get(path, {}), state)
    total = max(samples, default=sum(part.samples for part in ranks))
    told = tuple(sorted(rank for rank in by_rank if rank >= 0))
    merged = replace(ranks[0], states=states, samples=total, saved_results=None, progress=None, placement={})
    return replace(merged, ranks=told, copies=comparison.copies, differing=tuple(comparison.found))


class _Comparison:
    """What was found while the copies of a subrecorder were compared."""

    def __init__(self, reducer: Reducer, name: str, monitor: str) -> None:
        self._reducer, self._name, self._monitor = reducer, name, monitor
        self.found: list[Differing] = []
        self.copies = 0

    def of(self, copies: Sequence[Copy], leaf: str, *, first_counts: bool) -> None:
        """Compare copies of a tensor."""
        if len(copies) > 1:
            self.copies += 1
            one = compared(self._reducer, copies, self._name, leaf, self._monitor, first_counts=first_counts)
            self.found += [] if one is None else [one]


def _tensors(reducer: Reducer, ranks: Sequence[Subrecording], leaf: str, comparison: _Comparison) -> list[_Tensor]:
    """The tensors of a leaf: each rank has one of its own, or ranks of a mesh have parts or copies of one."""
    meshes: dict[int, list[tuple[Placement, State, int]]] = {}
    for number, part in enumerate(ranks):
        if part.placement and leaf not in part.placement and leaf not in part.states:
            continue  # the rank recorded what ranks share, and nothing of this leaf, so it counts no observation of it
        place = part.placement.get(leaf) or Placement(~number)
        key = place.rank if place.home is None else place.home
        meshes.setdefault(key, []).append((place, part.states.get(leaf, {}), part.samples))
    return [_of_mesh(reducer, held, leaf, comparison) for held in meshes.values()]


def _of_mesh(reducer: Reducer, held: Sequence[tuple[Placement, State, int]], leaf: str, comparison: _Comparison) -> _Tensor:
    cells: dict[tuple[tuple[int, int, int], ...], tuple[Placement, State]] = {}
    copies: dict[tuple[tuple[int, int, int], ...], list[Copy]] = {}
    for place, state, samples in held:
        first = cells.get(place.parts)
        if first is None or not first[1]:
            cells[place.parts] = place, state
        if state:
            copies.setdefault(place.parts, []).append(Copy(place.rank, state, samples))
    for of_cell in copies.values():
        comparison.of(of_cell, leaf, first_counts=True)
    whole = join_parts(reducer, dict(cells.values()))
    labelled = {_label(place): state for place, state in cells.values()} if whole is None else {"": whole}
    place = held[0][0]
    return _Tensor(labelled, max(samples for *_, samples in held), place.rank, place.shared)


def _label(place: Placement) -> str:
    return ", ".join(f"part {index} of {count}" for _, index, count in place.parts)


def _once(tensors: Sequence[_Tensor], leaf: str, comparison: _Comparison) -> list[_Tensor]:
    """Those that are not copies of one before. Of tensors that are one of the net, all should be copies."""
    kept: list[_Tensor] = []
    for tensor in tensors:
        if not (tensor.shared and any(before.shared and _same(before, tensor) for before in kept)):
            kept.append(tensor)
    copies, unlike = ([one for one in some if one.shared and any(one.states.values())] for some in (tensors, kept))
    if len(unlike) > 1:
        comparison.of([Copy(one.rank, _labelled(one.states), one.samples) for one in copies], leaf, first_counts=False)
    elif len(copies) > 1:  # which are equal: that was found above
        comparison.copies += 1
    return kept


def _same(a: _Tensor, b: _Tensor) -> bool:
    return equal_states(_labelled(a.states), _labelled(b.states))


def _labelled(states: Mapping[str, State]) -> State:
    """The state of a whole tensor; of one in parts, those of all parts, by keys that no reducer reads."""
    if states.keys() == {""}:
        return states[""]
    return {f"{label}: {key}": value for label, state in states.items() for key, value in state.items()}


def join_parts(reducer: Reducer, cells: Mapping[Placement, State]) -> State | None:
    """The state of a whole tensor from those of its parts, which may be empty; None if parts are missing, or do not make it."""
    if isinstance(reducer, Product):  # each reducer of it in its own way
        product: dict[str, Tensor] = {}
        for name, part in reducer.parts:
            joined = join_parts(part, {place: _beneath(state, f"{name}/") for place, state in cells.items()})
            if joined is None:
                return None
            product |= {f"{name}/{key}": value for key, value in joined.items()}
        return product
    held = {tuple(index for _, index, _ in place.parts): state for place, state in cells.items()}
    first = next(iter(cells))
    if len(held) < math.prod(count for _, _, count in first.parts):
        return None
    states = [held[index] for index in sorted(held) if held[index]]
    if len(states) < 2:
        return states[0] if states else {}
    if first.axes is None:
        return None
    ways = [_way(reducer, first.axes, axis) for axis, _, _ in first.parts]
    if all(way == {} for way in ways):
        return reduce(reducer.join_parts, states)
    if len(ways) > 1 or ways[0] is None:
        return None
    return _side_by_side(states, ways[0])


def _beneath(state: State, prefix: str) -> State:
    return {key.removeprefix(prefix): value for key, value in state.items() if key.startswith(prefix)}


def _side_by_side(states: Sequence[State], along: Mapping[str, int | None]) -> State | None:
    """The states joined along an axis of each tensor; None if a tensor without that axis is not the same in all."""
    if any(state.keys() != along.keys() for state in states):
        return None
    first, joined = states[0], {}
    for key, axis in along.items():
        if axis is None and not all(equal_tensors(state[key], first[key]) for state in states[1:]):
            return None
        joined[key] = first[key] if axis is None else torch.cat([state[key] for state in states], axis)
    return joined


def _way(reducer: Reducer, axes: int, axis: int) -> Mapping[str, int | None] | None:
    """How states of the parts of tensors cut along `axis` become that of the whole.

    Returns:
        {} if `join_parts` of the reducer makes it; the axis of each tensor of the state along which they are put side by side
        (None if it is the same in all); or None if neither is right.
    """
    try:
        return _found_way(reducer, axes, axis)
    except TypeError:  # a reducer with a field that cannot be hashed
        return _found_way.__wrapped__(reducer, axes, axis)


@lru_cache(maxsize=256)
def _found_way(reducer: Reducer, axes: int, axis: int) -> Mapping[str, int | None] | None:
    # A reducer need not say how it treats parts: two observations, once whole and once in parts, show it. Numbers of any size are
    # in them, so that nothing is right by chance. Patterns may ask for axes of a certain length, so several are tried.
    with torch.random.fork_rng(devices=[]):
        for length in (2, 4, 8, 3):
            try:
                return _tried(reducer, axes, axis, length)
            except Exception:
                continue
    return None


def _tried(reducer: Reducer, axes: int, axis: int, length: int) -> Mapping[str, int | None] | None:
    sizes = [length] * axes
    sizes[axis] = 3 * length
    generator = torch.Generator().manual_seed(0)
    draws = [torch.randn((2, *sizes), dtype=torch.float64, generator=generator, device="cpu") for _ in range(2)]
    seen = draws[0] * 10 ** draws[1]

    def state(start: int, stop: int) -> State:
        part = reducer.of_part(TensorPart(tuple(sizes), tuple(start * (one == axis) for one in range(axes))))
        return reduce(part.update, seen.narrow(axis + 1, start, stop - start).clone().unbind(), reducer.init())

    whole, (left, right) = state(0, 3 * length), (state(0, length), state(length, 3 * length))
    if _close(_or_none(lambda: reducer.join_parts(left, right)), whole):
        return {}
    along = {key: _cut(left[key].shape, right[key].shape, whole[key].shape) for key in whole}
    return along if _close(_or_none(lambda: _side_by_side([left, right], along)), whole) else None


def _or_none(make: Any) -> State | None:
    try:
        state: State | None = make()
    except Exception:
        return None
    return state


def _cut(left: Sequence[int], right: Sequence[int], whole: Sequence[int]) -> int | None:
    """The axis along which tensors of the first two shapes make one of the third; None if there is none."""
    longer = [axis for axis, sizes in enumerate(zip(left, right, whole, strict=True)) if len(set(sizes)) > 1]
    return longer[0] if len(longer) == 1 and left[longer[0]] + right[longer[0]] == whole[longer[0]] else None


def _close(a: State | None, b: State) -> bool:
    return a is not None and a.keys() == b.keys() and all(_near(a[key], b[key]) for key in b)


def _near(a: Tensor, b: Tensor) -> bool:
    if a.shape != b.shape or a.dtype is not b.dtype:
        return False
    return bool(torch.equal(a, b) or (a.dtype.is_floating_point and torch.allclose(a, b, rtol=1e-9, atol=0.0, equal_nan=True)))
