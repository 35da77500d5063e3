"""Which module and which parameter of one run is which of another: by name, or by what they are and what they compute."""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from recorders.errors import SelectionError
from recorders.recordings.display import listed, shown_name
from recorders.watch.divergence.pairing import Pairs
from recorders.watch.divergence.runs.run import Module, RunTracks, TrackName

__all__ = ["Matched", "matched"]

_NEAR = 0.2
"""How far what two modules get, and what they return, may be apart together: those with one fault are nearer, others farther."""

_WEIGHTS = ("weight", "weight before", "weight after", "weight gradient")


@dataclass(frozen=True)
class Matched:
    """What of the first run belongs to what of the second.

    Attributes:
        modules: names in the second run by those in the first.
        places: places of tracks likewise.
    """

    modules: Mapping[str, str]
    places: Mapping[TrackName, TrackName]


def matched(a: RunTracks, b: RunTracks, names: Mapping[str, str] | None) -> Matched:
    """Match two runs.

    Modules belong together, in this order of preference, if `names` says so, of them or of what they are in; if name, class and
    sizes of outputs are the same; if their first parameters are equal; if they get and return nearly the same at first; if class
    and sizes are the same, in the order of the net; if only the names are the same. Parameters, if their names, or their sizes and
    norms, are the same.

    Raises:
        SelectionError: a name in `names` does not exist.
    """
    pairs = Pairs(list(a.modules.values()), list(b.modules.values()))
    if names:
        _check(a, b, names)
        pairs.match(lambda module: _renamed(module.name, names), lambda module: module.name, within=lambda m: _is_in(m.name, names))
    pairs.match(lambda module: (module.name, module.kind, module.sizes))
    if "" in a.modules and "" in b.modules:
        pairs.add(list(a.modules).index(""), list(b.modules).index(""))
    pairs.match(lambda module: module.weights or None, once=True)
    _add_nearest(pairs, a, b)
    pairs.in_order(lambda module: (module.kind, module.sizes))
    pairs.match(lambda module: (module.kind, module.sizes), once=True)
    pairs.match(lambda module: module.name)
    modules = {pairs.a[first].name: pairs.b[second].name for first, second in sorted(pairs.found.items())}
    places: dict[TrackName, TrackName] = {}
    leaves = {name: _leaves(a, b, name, other) for name, other in modules.items()}
    for place in a.tracks:
        other = modules.get(place.module)
        if other is not None:
            of_weight = place.role in _WEIGHTS or place.role.startswith("state ")
            leaf = leaves[place.module].get(place.leaf, place.leaf) if of_weight else place.leaf
            if TrackName(place.role, other, leaf) in b.tracks:
                places[place] = TrackName(place.role, other, leaf)
    _one_leaf(a, b, modules, places)
    return Matched(modules, places)


class _AtFirst(NamedTuple):
    """What a module got and returned first: sizes and sketches, -1 and nothing if it got no tensor."""

    sizes: tuple[int, int]
    sketches: tuple[Tensor, Tensor]


def _add_nearest(pairs: Pairs[Module], a: RunTracks, b: RunTracks) -> None:
    """Pairs modules of which each gets and returns what is nearest to that of the other, and near enough to be the same."""
    seen_a = {index: _first_seen(a, module) for index, module in enumerate(pairs.a) if index not in pairs.found}
    taken = set(pairs.found.values())
    seen_b = {index: _first_seen(b, module) for index, module in enumerate(pairs.b) if index not in taken}
    far: list[tuple[float, int, int]] = []
    for first, own in seen_a.items():
        for second, other in seen_b.items():
            if own is not None and other is not None and own.sizes == other.sizes:
                apart = sum(map(_apart, own.sketches, other.sketches))
                far += [(apart, first, second)] if apart < _NEAR else []
    for _, first, second in sorted(far):
        pairs.add(first, second)


def _first_seen(run: RunTracks, module: Module) -> _AtFirst | None:
    """None if it returned no tensor."""
    got, returned = (
        next((track for track in run.of(role, module.name).values() if len(track)), None) for role in ("input", "output")
    )
    if returned is None:
        return None
    sketches = torch.zeros(0) if got is None else got.sketch[0], returned.sketch[0]
    return _AtFirst((-1 if got is None else int(got.count[0]), int(returned.count[0])), sketches)


def _apart(a: Tensor, b: Tensor) -> float:
    longer = max(float(torch.linalg.vector_norm(a)), float(torch.linalg.vector_norm(b)))
    return float(torch.linalg.vector_norm(a - b)) / longer if longer else 0.0


def _one_leaf(a: RunTracks, b: RunTracks, modules: Mapping[str, str], places: dict[TrackName, TrackName]) -> None:
    """Operands with one tensor belong together, whatever their paths: a rewrite returns a tensor, the original a tuple."""
    by_place: list[dict[tuple[str, str], list[TrackName]]] = [{}, {}]
    for run, found in zip((a, b), by_place, strict=True):
        for place in run.tracks:
            if place.role not in _WEIGHTS:
                found.setdefault((place.role, place.module), []).append(place)
    for (role, module), own in by_place[0].items():
        others = by_place[1].get((role, modules.get(module, "")), []) if module in modules else []
        left = [place for place in own if place not in places]
        taken = set(places.values())
        rest = [place for place in others if place not in taken]
        if left and rest:
            places.setdefault(left[0], rest[0])


def _leaves(a: RunTracks, b: RunTracks, name: str, other: str) -> dict[str, str]:
    """Names of parameters of a module of the second run by those in the first."""
    own, others = (_parameters(run, module) for run, module in ((a, name), (b, other)))
    pairs = Pairs(list(own.items()), list(others.items()))
    pairs.match(lambda item: item[0])
    pairs.match(lambda item: item[1], once=True)
    pairs.match(lambda item: item[1][0] if isinstance(item[1], tuple) else None, once=True)
    return {pairs.a[first][0]: pairs.b[second][0] for first, second in pairs.found.items()}


def _parameters(run: RunTracks, module: str) -> dict[str, Hashable]:
    found: dict[str, Hashable] = {}
    for place, track in run.tracks.items():
        if place.module == module and place.role in ("weight", "weight before") and len(track):
            found[place.leaf] = int(track.count[0]), f"{float(track.norm[0]):.2g}"
    return found


def _is_in(name: str, names: Mapping[str, str]) -> bool:
    return any(name == outer or name.startswith(f"{outer}.") for outer in names)


def _renamed(name: str, names: Mapping[str, str]) -> str:
    outer = max((outer for outer in names if name == outer or name.startswith(f"{outer}.")), key=len)
    return names[outer] + name[len(outer) :]


def _check(a: RunTracks, b: RunTracks, names: Mapping[str, str]) -> None:
    for run, given, which in ((a, names.keys(), "first"), (b, names.values(), "second")):
        if wrong := [name for name in given if name not in run.modules]:
            known = listed(list(run.modules))
            raise SelectionError(f"names: the {which} run has no module {shown_name(wrong[0])!r}; it has {known}")
