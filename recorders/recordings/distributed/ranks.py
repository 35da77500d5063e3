"""What several ranks recorded, as one: a tensor that ranks share counts once, parts of a tensor become the whole."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import reduce
from itertools import islice
from typing import NamedTuple, TypeAlias

from recorders.errors import RecordingWarning
from recorders.recordings.display import listed
from recorders.recordings.distributed.placement import Placement, equal_states, join_parts
from recorders.recordings.recording import Recording, Subrecording, check_alike
from reducers import Reducer, State
from reducers.errors import warn_user

__all__ = ["Differing", "all_aliases", "by_name", "differing_shown", "merge_ranks", "merge_subrecordings", "warn_differing"]

Differing: TypeAlias = dict[str, dict[str, list[int]]]
"""Which ranks differ, by what was done about it and by what was recorded."""

_APART = "Each that differs counts as of a net of its own: either the copies have diverged, or every rank trains a net of its own."


class _Tensor(NamedTuple):
    """What was recorded of one tensor: its states by what part of it they are of ("" for the whole), and how often."""

    states: Mapping[str, State]
    samples: int
    rank: int
    shared: bool


def merge_ranks(recordings: Sequence[Recording]) -> Recording:
    """The recordings of several ranks, in their order, as one. Names that only some hold are kept.

    Raises:
        MergeError: reducers or states do not fit.

    Warns:
        RecordingWarning: copies of a tensor differ between ranks.
    """
    differing: Differing = {}
    parts = {name: merge_subrecordings(held, name, differing) for name, held in by_name(recordings).items()}
    warn_differing(differing)
    return Recording(parts, all_aliases(recordings))


def by_name(recordings: Sequence[Recording]) -> dict[str, list[Subrecording]]:
    """The subrecordings of each name, in the order of the recordings that hold it."""
    held: dict[str, list[Subrecording]] = {}
    for recording in recordings:
        for name, part in recording.items():
            held.setdefault(name, []).append(part)
    return held


def all_aliases(recordings: Sequence[Recording]) -> dict[str, str]:
    """The aliases of all recordings, of which the first count; names of subrecorders are left out."""
    names = {name for recording in recordings for name in recording}
    aliases = {alias: name for recording in reversed(recordings) for alias, name in recording.aliases.items()}
    return {alias: name for alias, name in aliases.items() if alias not in names}


def warn_differing(differing: Differing) -> None:
    """Warns of copies that differ."""
    for text in differing_shown(differing):
        warn_user(text, RecordingWarning)


def differing_shown(differing: Differing) -> list[str]:
    """A warning for each thing that was done about copies that differ."""
    texts = []
    for consequence, found in differing.items():
        shown = [f"{what} on ranks {listed(dict.fromkeys(ranks))}" for what, ranks in islice(found.items(), 5)]
        more = f"; and {len(found) - 5} more" if len(found) > 5 else ""
        texts.append(f"ranks should hold copies, which differ: {'; '.join(shown)}{more}. {consequence}")
    return texts


def _note(differing: Differing, consequence: str, what: str, *ranks: int) -> None:
    differing.setdefault(consequence, {}).setdefault(what, []).extend(ranks)


def merge_subrecordings(parts: Sequence[Subrecording], name: str, differing: Differing) -> Subrecording:
    """The subrecordings of one name as one; adds to `differing` what ranks should have recorded alike and did not."""
    if not any(part.placement for part in parts):
        return reduce(Subrecording.merge, parts)
    by_rank: dict[int, Subrecording] = {}
    for number, part in enumerate(parts):  # what a rank recorded one after another, in several files, comes first
        rank = next((place.rank for place in part.placement.values()), ~number)
        by_rank[rank] = by_rank[rank].merge(part) if rank in by_rank else part
    ranks = list(by_rank.values())
    for part in ranks:
        check_alike(ranks[0], part)
    reducer = ranks[0].reducer
    assert reducer is not None
    states: dict[str, State] = {}
    samples = []
    for leaf in dict.fromkeys(leaf for part in ranks for leaf in (*part.states, *part.placement)):
        what = f"{name!r}{f', leaf {leaf!r}' if leaf else ''} ({parts[0].monitor})"
        tensors = _once(_tensors(reducer, ranks, leaf, what, differing), what, differing)
        samples.append(sum(tensor.samples for tensor in tensors))
        for tensor in tensors:
            for label, state in tensor.states.items():
                path = f"{leaf}.{label}" if leaf and label else leaf or label
                states[path] = reducer.merge(states.get(path, {}), state)
    total = max(samples, default=sum(part.samples for part in ranks))
    return replace(ranks[0], states=states, samples=total, saved_results=None, progress=None, placement={})


def _tensors(reducer: Reducer, ranks: Sequence[Subrecording], leaf: str, what: str, differing: Differing) -> list[_Tensor]:
    """The tensors of a leaf: each rank has one of its own, or ranks of a mesh have parts or copies of one."""
    meshes: dict[int, list[tuple[Placement, State, int]]] = {}
    for number, part in enumerate(ranks):
        if part.placement and leaf not in part.placement and leaf not in part.states:
            continue  # the rank recorded what ranks share, and nothing of this leaf, so it counts no observation of it
        place = part.placement.get(leaf) or Placement(~number)
        key = place.rank if place.home is None else place.home
        meshes.setdefault(key, []).append((place, part.states.get(leaf, {}), part.samples))
    return [_of_mesh(reducer, held, what, differing) for held in meshes.values()]


def _of_mesh(reducer: Reducer, held: Sequence[tuple[Placement, State, int]], what: str, differing: Differing) -> _Tensor:
    cells: dict[tuple[tuple[int, int, int], ...], tuple[Placement, State]] = {}
    for place, state, _ in held:
        first = cells.get(place.parts)
        if first is None or not first[1]:
            cells[place.parts] = place, state
        elif state and not equal_states(first[1], state):
            _note(differing, "The first of them counts.", what, first[0].rank, place.rank)
    whole = join_parts(reducer, dict(cells.values()))
    labelled = {_label(place): state for place, state in cells.values()} if whole is None else {"": whole}
    place = held[0][0]
    return _Tensor(labelled, max(samples for *_, samples in held), place.rank, place.shared)


def _label(place: Placement) -> str:
    return ", ".join(f"part {index} of {count}" for _, index, count in place.parts)


def _once(tensors: Sequence[_Tensor], what: str, differing: Differing) -> list[_Tensor]:
    """Those that are not copies of one before. Of tensors that are one of the net, all should be copies."""
    kept: list[_Tensor] = []
    for tensor in tensors:
        if tensor.shared and any(before.shared and _same(before, tensor) for before in kept):
            continue
        first = next((before for before in kept if before.shared and any(before.states.values())), None)
        if tensor.shared and first is not None and any(tensor.states.values()):
            _note(differing, _APART, what, first.rank, tensor.rank)
        kept.append(tensor)
    return kept


def _same(a: _Tensor, b: _Tensor) -> bool:
    return a.states.keys() == b.states.keys() and all(equal_states(state, b.states[label]) for label, state in a.states.items())
