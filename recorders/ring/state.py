"""MonitorState: the states of a monitor, how many observations made them, and the rings in which others wait."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

from recorders.ring.ring import Pending, Ring
from reducers import Reducer, State

__all__ = ["EMPTY", "MonitorState", "flush"]


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
        """The number of observations of the leaf that has most."""
        counts = dict(self.counts)
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


def flush(stored: MonitorState, reducer: Reducer, seal: bool = False) -> tuple[MonitorState, list[tuple[Exception, Any]]]:
    """Joins all that waits into the states; returns the new state, and the observations that failed with their errors.

    Args:
        seal: whether nothing more may wait beside what is joined: the next observation finds the monitor as if it had been loaded.
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
        except Exception:  # then one by one, to leave out only those at fault
            for position in range(start, count):
                try:
                    states.update(pending.joined(reducer, states, position, position + 1))
                    _count(counts, pending.paths, 1)
                except Exception as error:
                    failed.append((error, pending.observation(position)))
        # By the count from before: a graph in another thread may have added observations since.
        following = pending.successor(count, rings)
        if following is not None:
            left[key] = following
        if following is pending:
            reduced[key] = count
    return MonitorState(states, counts, left, reduced, stored.merged), failed


def _count(counts: dict[str, int], paths: Iterable[str], observations: int) -> None:
    for path in paths:
        counts[path] = counts.get(path, 0) + observations
