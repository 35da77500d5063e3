"""MonitorState: the states of a monitor, how many observations made them, and the rings in which others wait."""

from __future__ import annotations

import re
from collections.abc import Callable, Hashable, Iterable, Mapping
from contextlib import suppress
from types import MappingProxyType
from typing import Any, NamedTuple

from recorders.ring.ring import Pending, Ring
from reducers import Reducer, State, StateMismatchError

_APART = re.compile(r"(.*\.)?\d+ channels", re.DOTALL)
MOST_APART = 8  # leaves of a monitor for other numbers of channels


class MonitorState(NamedTuple):
    """What a monitor has recorded, bound by one assignment after everything that can fail.

    Attributes:
        states: by leaf path.
        counts: the number of observations in the states, by leaf path.
        pending: what observations wait in, by its key.
        reduced: the number of observations of each of these that the states include already.
        merged: the number of observations that other monitors or recordings have brought in.
    """

    states: dict[str, State]
    counts: dict[str, int]
    pending: dict[Any, Pending]
    reduced: Mapping[Any, int] = MappingProxyType({})
    merged: int = 0

    @property
    def has_pending(self) -> bool:
        """Whether there are observations that the states do not include."""
        return bool(self.pending) and any(map(self.number_in, self.pending))

    def number_in(self, key: Any) -> int:
        """Returns how many observations wait under this key."""
        return self.pending[key].count - self.reduced.get(key, 0)

    @property
    def samples(self) -> int:
        """The number of observations of the leaf that has most, with all its numbers of channels."""
        counts = dict[str, int]()
        for leaf, count in self.counts.items():
            _count(counts, [path_of(leaf)], count)
        for key, pending in self.pending.items():
            _count(counts, pending.paths, self.number_in(key))
        return self.merged + max(counts.values(), default=0)

    def rings(self) -> dict[Hashable, Ring]:
        """The rings that take further observations, by key."""
        return {key: pending for key, pending in self.pending.items() if isinstance(pending, Ring) and not pending.sealed}

    def after(self, states: Mapping[str, State]) -> MonitorState:
        """Returns this with new states of these leaves, and one observation more."""
        return self.joined(states, dict.fromkeys(states, 1))

    def joined(self, states: Mapping[str, State], counts: Mapping[str, int]) -> MonitorState:
        """Returns this with new states of these leaves, into which so many observations more were merged."""
        total = {**self.counts, **{path: self.counts.get(path, 0) + count for path, count in counts.items()}}
        return MonitorState({**self.states, **states}, total, self.pending, self.reduced, self.merged)

    def moved(self, pending: Pending) -> MonitorState:
        """Returns this with `pending`, of which the states include nothing, as all that observations of its leaves wait in."""
        kept = {key: other for key, other in self.pending.items() if not any(path in pending.paths for path in other.paths)}
        return self.waiting_in({**kept, pending.key: pending})

    def waiting_in(self, pending: Mapping[Any, Pending]) -> MonitorState:
        """Returns this with `pending` in place of what observations wait in; the states include nothing of what is new."""
        reduced = {key: count for key, count in self.reduced.items() if key in pending and pending[key] is self.pending.get(key)}
        return MonitorState(self.states, self.counts, dict(pending), reduced, self.merged)


EMPTY = MonitorState({}, {}, {})


def leaf_and_state(path: str, states: Mapping[str, State], join: Callable[[State], State]) -> tuple[str, State]:
    """Returns the leaf that an observation belongs to, by its number of channels, and the new state of this leaf.

    A layer without weights, such as a ReLU, may be called in several places of a net, which have different numbers of channels. The
    first of these is at `path`, and each other has a leaf of its own, such as "256 channels".

    Args:
        join: returns a state with the observation.

    Raises:
        StateMismatchError: the observation differs in more than the number of channels from those in the states, or there were
            so many numbers of channels that they are none, but lengths of sequences.
    """
    try:
        return path, join(states.get(path, {}))
    except StateMismatchError:
        leaf = _leaf_of(path, states, join({}))
        if leaf == path:
            raise
        return leaf, join(states.get(leaf, {}))


def _leaf_of(path: str, states: Mapping[str, State], alone: State) -> str:
    """Returns the leaf that has as many channels as the state of an observation; `path` if none may have."""
    before, found = states.get(path, {}), set[int]()
    for key, x in alone.items():
        old = before[key].shape if key in before else x.shape
        sizes = {now for now, then in zip(x.shape, old, strict=True) if now != then} if len(old) == x.ndim else set()
        found |= sizes - {1} or sizes  # of one observation, 1 may be how many are kept
    if len(found) != 1:
        return path
    leaf = f"{path}.{found.pop()} channels".removeprefix(".")
    is_room = leaf in states or sum(other != path_of(other) for other in states) < MOST_APART
    return leaf if is_room else path


def path_of(leaf: str) -> str:
    """Returns the path of the tensor whose observations are in a leaf, see `leaf_and_state`."""
    return leaf.rpartition(".")[0] if _APART.fullmatch(leaf) else leaf


def flush(
    stored: MonitorState, reducer: Reducer, seal: bool = False, by_channels: bool = False
) -> tuple[MonitorState, list[tuple[Exception, Any]]]:
    """Joins all that waits into the states; returns the new state, and the observations that failed with their errors.

    Args:
        seal: whether nothing more may wait beside what is joined: the next observation finds the monitor as if it had been loaded.
        by_channels: whether observations with another number of channels have leaves of their own, see `leaf_and_state`.
    """
    states, counts = dict(stored.states), dict(stored.counts)
    failed: list[tuple[Exception, Any]] = []
    left: dict[Any, Pending] = {}
    reduced: dict[Any, int] = {}
    rings = len(stored.rings())
    for key, pending in stored.pending.items():
        if seal:
            pending.seal()
        start, count = stored.reduced.get(key, 0), pending.count
        try:
            if count != start:
                states.update(pending.joined(reducer, states, start, count))
                _count(counts, pending.paths, count - start)
        except Exception:
            failed += _join_in_parts(pending, reducer, states, counts, start, count, by_channels)
        # By the count from before: a graph in another thread may have added observations since.
        following = pending.successor(count, rings)
        if following is not None:
            left[key] = following
        if following is pending:
            reduced[key] = count
    return MonitorState(states, counts, left, reduced, stored.merged), failed


def _join_in_parts(
    pending: Pending,
    reducer: Reducer,
    states: dict[str, State],
    counts: dict[str, int],
    start: int,
    stop: int,
    by_channels: bool,
) -> list[tuple[Exception, Any]]:
    """Joins observations that could not be joined to their leaves at once; returns those that failed."""

    def join(start: int, stop: int) -> None:
        leaves = {path: path for path in pending.paths}
        if by_channels:
            alone = pending.joined(reducer, {}, start, start + 1)
            leaves |= {path: _leaf_of(path, states, state) for path, state in alone.items()}
        before = {path: states.get(leaf, {}) for path, leaf in leaves.items()}
        found = pending.joined(reducer, before, start, stop)
        states.update((leaves[path], state) for path, state in found.items())
        _count(counts, leaves.values(), stop - start)

    if by_channels:  # all in one ring have as many channels
        with suppress(Exception):
            join(start, stop)
            return []
    failed: list[tuple[Exception, Any]] = []
    for position in range(start, stop):  # one by one, to leave out only those at fault
        try:
            join(position, position + 1)
        except Exception as error:
            failed.append((error, pending.observation(position)))
    return failed


def _count(counts: dict[str, int], paths: Iterable[str], observations: int) -> None:
    for path in paths:
        counts[path] = counts.get(path, 0) + observations
