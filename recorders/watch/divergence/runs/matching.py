"""Which module and which parameter of one run is which of another: by name, or by what they are and what they compute."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from recorders.errors import SelectionError
from recorders.recordings.display import listed, shown_name
from recorders.watch.divergence.pairing import Pairs
from recorders.watch.divergence.runs.run import Module, RunTracks, TrackName

_NEAR = 0.2
"""How far what two modules get, and what they return, may be apart together: those with one fault are nearer, others farther."""

_WEIGHTS = ("weight", "weight before", "weight after", "weight gradient")


@dataclass(frozen=True)
class Matched:
    """Names of modules, and places of tracks, in the second run by those in the first."""

    modules: Mapping[str, str]
    places: Mapping[TrackName, TrackName]


def matched(a: RunTracks, b: RunTracks, names: Mapping[str, str] | None) -> Matched:
    """Match two runs.

    Modules belong together, in this order of preference, if `names` says so, of them or of what they are in; if name, class and
    sizes of outputs are the same; if their first parameters are equal, or have equal norms; if parts of them belong together; if
    they get and return nearly the same at first; if they are parts of what belongs together, in order, and sizes are the same; if
    class and sizes are the same, in the order of the net; if only the names are the same. Parameters, if their names, or sizes and
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
    pairs.match(_bits, once=True)
    pairs.match(_precise, once=True)
    _add_families(pairs)
    _add_nearest(pairs, a, b)
    pairs.match(_rough, once=True)
    _add_families(pairs, inner=True)
    pairs.in_order(lambda module: (module.kind, module.sizes))
    pairs.match(lambda module: (module.kind, module.sizes), once=True)
    pairs.match(lambda module: module.name)
    modules = {pairs.a[first].name: pairs.b[second].name for first, second in sorted(pairs.found.items())}
    places: dict[TrackName, TrackName] = {}
    leaves = {name: _leaves(a.modules[name], b.modules[other]) for name, other in modules.items()}
    for place in a.tracks:
        other = modules.get(place.module)
        if other is not None:
            of_weight = place.role in _WEIGHTS or place.role.startswith("state ")
            leaf = leaves[place.module].get(place.leaf, place.leaf) if of_weight else place.leaf
            if TrackName(place.role, other, leaf) in b.tracks:
                places[place] = TrackName(place.role, other, leaf)
    _one_leaf(a, b, modules, places)
    return Matched(modules, places)


def _bits(module: Module) -> Hashable:
    return tuple(sorted((weight.elements, weight.digest or 0) for weight in module.weights.values())) or None


def _precise(module: Module) -> Hashable:
    """A parameter that is transposed has the same norm, but for the order in which it is added up."""
    return tuple(sorted((weight.elements, f"{weight.norm:.9g}") for weight in module.weights.values())) or None


def _rough(module: Module) -> Hashable:
    """And one in another dtype nearly the same."""
    return tuple(sorted((weight.elements, f"{weight.norm:.2g}") for weight in module.weights.values())) or None


def _add_families(pairs: Pairs[Module], inner: bool = False) -> None:
    """Pairs modules whose parts belong together; if `inner`, also parts of modules that do, in order, if sizes are the same."""
    parts_a, parts_b = (_parts(items) for items in (pairs.a, pairs.b))
    outer_b = {part: outer for outer, parts in parts_b.items() for part in parts}
    before = -1
    while before < len(pairs.found):
        before = len(pairs.found)
        for outer in sorted(parts_a, reverse=True):  # the innermost first
            found = [pairs.found[part] for part in parts_a[outer] if part in pairs.found]
            votes = Counter(outer_b[part] for part in found if part in outer_b)
            if votes:
                pairs.add(outer, votes.most_common(1)[0][0])
            taken = set(pairs.found.values())
            others = [part for part in parts_b.get(pairs.found.get(outer, -1), ()) if part not in taken]
            for part in parts_a[outer] if inner else ():
                like = next((other for other in others if _alike(pairs.a[part], pairs.b[other])), None)
                if part not in pairs.found and like is not None:
                    others.remove(like)
                    pairs.add(part, like)


def _parts(modules: Sequence[Module]) -> dict[int, list[int]]:
    """The modules directly in each, by their places."""
    places = {module.name: place for place, module in enumerate(modules)}
    found: dict[int, list[int]] = {}
    for name, place in places.items():
        outer = name.rpartition(".")[0] if name else None
        while outer and outer not in places:  # such as a list of modules, which is never called
            outer = outer.rpartition(".")[0]
        if outer is not None and outer in places:
            found.setdefault(places[outer], []).append(place)
    return found


def _alike(a: Module, b: Module) -> bool:
    counts = [sorted(weight.elements for weight in module.weights.values()) for module in (a, b)]
    return bool(a.sizes or a.weights) and a.sizes == b.sizes and counts[0] == counts[1]


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
    sketches = torch.zeros(0, device="cpu") if got is None else got.sketch[0], returned.sketch[0]
    return _AtFirst((-1 if got is None else int(got.count[0]), int(returned.count[0])), sketches)


def _apart(a: Tensor, b: Tensor) -> float:
    longer = max(float(torch.linalg.vector_norm(a)), float(torch.linalg.vector_norm(b)))
    return float(torch.linalg.vector_norm(a - b)) / longer if longer else 0.0


def _one_leaf(a: RunTracks, b: RunTracks, modules: Mapping[str, str], places: dict[TrackName, TrackName]) -> None:
    """Operands with one tensor belong together, whatever their paths: a rewrite returns a tensor, the original a tuple."""
    by_place: list[dict[tuple[str, str], list[TrackName]]] = [{}, {}]
    for run, found in zip((a, b), by_place, strict=True):
        for place in run.tracks:
            if place.role not in (*_WEIGHTS, "buffer"):
                found.setdefault((place.role, place.module), []).append(place)
    for (role, module), own in by_place[0].items():
        others = by_place[1].get((role, modules.get(module, "")), []) if module in modules else []
        left = [place for place in own if place not in places]
        taken = set(places.values())
        rest = [place for place in others if place not in taken]
        if left and rest:
            places.setdefault(left[0], rest[0])


def _leaves(a: Module, b: Module) -> dict[str, str]:
    """Names of parameters of a module of the second run by those in the first."""
    pairs = Pairs(list(a.weights.items()), list(b.weights.items()))
    pairs.match(lambda item: item[0])
    pairs.match(lambda item: item[1], once=True)
    pairs.match(lambda item: (item[1].elements, f"{item[1].norm:.9g}"), once=True)
    pairs.match(lambda item: item[1].elements, once=True)
    return {pairs.a[first][0]: pairs.b[second][0] for first, second in pairs.found.items()}


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
