"""Buffer: what a monitor has recorded, with the observations that are not reduced yet."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from recorders.capture import entering
from recorders.capture.context import as_monitor
from recorders.errors import OperandError
from recorders.graphs.device import Accumulators
from recorders.graphs.ring import GraphRing, Share
from recorders.recordings.distributed.placement import Placement
from recorders.ring.changes import Changes
from recorders.ring.ring import Copies, PartialStates, Pending, Ring, bytes_of, partial_states_of
from recorders.ring.state import EMPTY, MonitorState, flush, leaf_and_state
from reducers import Reducer, State, TensorPart
from reducers.core.states import check_states, without_values
from reducers.kernels.locks import new_lock

NO_PARTS: Mapping[str, TensorPart] = MappingProxyType({})
MOST_RINGS = 6  # of a monitor
SHAPES = 3  # of a leaf, each of which has a ring of copies


class Buffer:
    """States by leaf, counts, and observations that are not reduced yet.

    All of it is one value, `stored`, which is bound by one assignment after everything that can fail. So after an exception at any
    point an observation is either in it or not.

    Attributes:
        stored: the states, the counts and the pending observations.
        positional: whether the reducer asks which part of a tensor it observes.
        by_channels: whether observations with another number of channels have leaves of their own, see `leaf_and_state`. What a
            rank holds a part of has not: where the part is, is known by the leaf.
        lock: is held while `stored` changes; reentrant, because a signal handler may read in the middle of an update.
        failed: pending observations that could not be reduced, each with its error; the monitor reports and removes them.
        flush_seconds: seconds that reducing pending observations has taken while steps were measured.
        shared: whether the tensors are those of the net, of which all ranks have copies or parts.
        places: which part of a tensor that ranks share the states of a leaf are of, by leaf.
        accumulators: what graphs on a GPU accumulate there, by device; it is no part of `stored` until somebody looks.
        changes: is told when `stored` or a placement changes.
        copies: the placements of tensors of which ranks hold copies, if a file or a pickle told them; for a process without a rank.
    """

    shared: bool = False

    def __init__(self, reducer: Reducer) -> None:
        self.reducer = reducer
        self.batchable = reducer.batchable
        self.positional = reducer.of_part(TensorPart((1,), (0,))) != reducer
        self.by_channels = False
        self._stored, self.changes = EMPTY, Changes()
        self._graph_calls = 0  # the rows of rings of graphs in which nothing waits any more
        self.failed: list[tuple[Exception, Any]] = []
        self.flush_seconds = 0.0
        self.lock = new_lock()
        self.places: dict[str, Placement] = {}
        self.copies: dict[str, Placement] = {}
        self.accumulators: Mapping[Any, Accumulators] = {}
        self._shapes: dict[str, State] = {}  # kept by `clear`, by leaf

    def add(self, inputs: Mapping[str, tuple[Tensor, ...]], parts: Mapping[str, TensorPart] = NO_PARTS) -> None:
        """Adds one observation, by leaf: to a ring, or to the states. What fails changes nothing.

        Args:
            parts: which part of a larger tensor a leaf is, if the reducer asks for it.
        """
        paths, tensors = tuple(inputs), [xs[0] for xs in inputs.values() if len(xs) == 1]
        waits = self.batchable and not parts and len(tensors) == len(paths) > 0
        for x in tensors:
            waits = waits and type(x) is Tensor and x.layout is torch.strided
        with self.lock:
            before = self._stored
            keys: tuple[Any, ...] = ()
            if waits and before.pending:
                keys = _key_of_copies(paths, tensors), _key_of_partial(paths, tensors)
            for key in keys:
                ring = before.pending.get(key)
                full = ring.add(tensors) if isinstance(ring, Ring) else None
                if full:
                    self.flush()
                if full is not None:
                    return
            if keys and _is_for_bigger(before.pending.get(keys[1]), tensors):
                keys = keys[:1]
            stored = self.flush()
            old = stored.states
            if parts or self.by_channels:
                updated = self._updated(old, inputs, parts)
            else:
                updated = {path: self.reducer.update(old.get(path, {}), *xs) for path, xs in inputs.items()}
            states = self._checked(updated)
            stored = stored.after(states)
            codecs = self._codecs(stored, paths, tensors) if waits else []
            self.stored = self._with_ring(stored, before, paths, codecs, keys) if codecs or stored.pending else stored

    def _updated(
        self, states: Mapping[str, State], inputs: Mapping[str, tuple[Tensor, ...]], parts: Mapping[str, TensorPart]
    ) -> dict[str, State]:
        """Returns the new states of the leaves of an observation."""
        updated = {}
        for path, xs in inputs.items():
            join = partial(self._joined, self._reducer_of(parts.get(path)), xs)
            apart = self.by_channels and not self.places
            leaf, state = leaf_and_state(path, states, join) if apart else (path, join(states.get(path, {})))
            updated[leaf] = state
        return updated

    def _joined(self, reducer: Reducer, xs: tuple[Tensor, ...], state: State) -> State:
        """Returns a state with an observation."""
        return reducer.update(state, *xs)

    def _reducer_of(self, part: TensorPart | None) -> Reducer:
        return self.reducer if part is None else self.reducer.of_part(part)

    def _with_ring(
        self,
        stored: MonitorState,
        before: MonitorState,
        paths: tuple[str, ...],
        codecs: Sequence[tuple[Any, Copies | PartialStates]],
        keys: Collection[Any],
    ) -> MonitorState:
        """Returns `stored`, which includes all that waits, with an empty ring for observations like this one, if there is room.

        Args:
            before: what was stored before the flush.
            codecs: how it may be written, the best first, each with the key of its ring.
            keys: of the rings that there may be for it, which did not take it, and are dropped.
        """
        kept = {key: one for key, one in stored.pending.items() if key not in keys and self._stays(one, paths)}
        others = {key: one for key, one in kept.items() if isinstance(one, Ring)}
        if len(others) >= MOST_RINGS:  # those in which nothing has waited since the last flush make room
            others = {key: one for key, one in others.items() if before.number_in(key)}
        for key, codec in codecs if len(others) < MOST_RINGS else ():
            ring = Ring(key, codec, len(others) + 1)
            if ring.rows > 1:  # all share the memory of the monitor from now on; none holds anything
                renewed = {other: one.renewed(len(others) + 1) for other, one in others.items()}
                rings = {other: one for other, one in renewed.items() if one is not None}
                return stored.waiting_in({key: one for key, one in kept.items() if not isinstance(one, Ring)} | rings | {key: ring})
        return stored.waiting_in(kept)

    def _codecs(
        self, stored: MonitorState, paths: tuple[str, ...], tensors: list[Tensor]
    ) -> list[tuple[Any, Copies | PartialStates]]:
        """Returns what may be written of observations like this one, the best first, each with the key of its ring.

        Copies take the least time, but a ring for each shape. So after a few shapes all others wait as partial states in one ring.
        Until then that ring is one for those that are too big to be copied: small ones would cost as much there.
        """
        found: list[tuple[Any, Copies | PartialStates]] = []
        size = bytes_of(tensors)
        if 0 < size <= Copies.largest:
            copies = Copies(paths, tensors)
            found.append((_key_of_copies(paths, tensors), copies))
            rings = stored.rings().values()
            if sum(ring.paths == paths for ring in rings) < SHAPES and copies.room.capacity(copies.size, len(rings) + 1) > 1:
                return found
        least = Copies.largest + 1 if size > Copies.largest and not self.reducer.ordered else 0
        states = partial_states_of(self.reducer, paths, tensors, least)
        if states is not None:
            key = _key_of_partial(paths, tensors)
            refused = key in stored.pending and not _is_for_bigger(stored.pending[key], tensors)
            found.insert(len(found) if refused else 0, (key, states))
        return found

    def _stays(self, waiting: Pending, paths: Collection[str]) -> bool:
        """Whether observations of these leaves may wait elsewhere beside what waits here; both are reduced in any order then."""
        if isinstance(waiting, Ring) and (waiting.sealed or not self.reducer.ordered):
            return not waiting.sealed
        return not any(path in paths for path in waiting.paths)

    @property
    def stored(self) -> MonitorState:
        """The states, the counts and the pending observations."""
        return self._stored

    @stored.setter
    def stored(self, stored: MonitorState) -> None:
        for each in self._stored.pending.values():
            if isinstance(each, Share) and stored.pending.get(each.key) is not each:
                self._graph_calls += each.count
        self._stored = stored
        self.changes.note()

    def place(self, places: Mapping[str, Placement | None]) -> None:
        """Notes which part of a DTensor the next observation of each leaf is of; None is a plain tensor.

        Raises:
            OperandError: earlier observations were of another part, or of a tensor that ranks do not share.
        """
        for path, place in places.items():
            before, stored = self.places.get(path), self.stored
            waits = any(path in waiting.paths and waiting.count for waiting in stored.pending.values())
            if before != place and (before or path in stored.states or waits):
                now, then = place or "a plain tensor", before or "a plain tensor"
                raise OperandError(
                    f"the tensor is {now}, and was {then} in earlier observations, which do not fit together: reset() the recorder "
                    "after the net is spread over ranks"
                )
        self.places = {**self.places, **{path: place for path, place in places.items() if place is not None}}
        self.changes.note()

    def keep_places(self, places: Mapping[str, Placement]) -> None:
        """Takes over the placements of states that were recorded elsewhere."""
        self.places = {path: place for path, place in places.items() if place.home is not None}
        self.copies = {path: place for path, place in places.items() if place.home is None}
        self.changes.note()

    @property
    def takes_rows(self) -> bool:
        """Whether observations may wait in a ring of several monitors: not if their placements or shapes are to be checked."""
        return not self.places and not self._shapes

    def waits_in(self, shared: GraphRing, index: int) -> bool:
        """Whether observations wait in this part of a ring of several monitors."""
        row = self._stored.pending.get(shared.batch.paths[index])
        return isinstance(row, Share) and row.ring is shared and row.index == index

    @property
    def graph_calls(self) -> int:
        """The calls in graphs that are in no counts of the monitor, because their rows were added to rings of several monitors."""
        return self._graph_calls + sum(ring.count for ring in self.graph_rings)

    @property
    def graph_rings(self) -> list[GraphRing]:
        """The rings of several monitors in which observations wait."""
        return [row.ring for row in self.stored.pending.values() if isinstance(row, Share)]

    def wait_in(self, shared: GraphRing, index: int) -> None:
        """Lets observations wait in this part of an empty ring from now on."""
        with self.lock:
            self.changes.note()
            self.stored = self.flush().moved(Share(shared, index))

    def add_empty(self, path: str) -> None:
        """Adds one observation without elements."""
        with self.lock:
            self.stored = self.stored.joined({}, {path: 1})

    def _checked(self, states: dict[str, State]) -> dict[str, State]:
        """Returns the states, if they have the shapes that were kept. Pending observations have that of one that was checked."""
        for path, shapes in self._shapes.items():
            if states.get(path):
                check_states(self.reducer, shapes, states[path])
        return states

    def flush(self, seal: bool = False) -> MonitorState:
        """Joins all that waits into the states; returns what is stored then.

        Args:
            seal: whether nothing may wait beside it any more: the next observation finds the monitor as if it had been loaded.
        """
        if self._stored.has_pending or (seal and self._stored.pending):
            with self.lock:
                self.changes.note()  # no graph in another thread adds to what is about to be reduced
                watch = entering.joining
                run = as_monitor if watch is None else partial(watch, self, as_monitor)
                apart = self.by_channels and not self.places
                self.stored, failed = run(flush, self._stored, self.reducer, seal, apart)
                self.failed += failed
        return self._stored

    def collect(self, seal: bool = False) -> MonitorState:
        """Joins all that waits, and what graphs accumulated on devices, for which this waits; returns what is stored then."""
        with self.lock:
            stored = self.flush(seal)
            if self.accumulators:
                self.stored = stored = self._with_accumulated(stored, take=True)
                for accumulators in self.accumulators.values():
                    accumulators.forget()
            return stored

    def _with_accumulated(self, stored: MonitorState, *, take: bool) -> MonitorState:
        for accumulators in self.accumulators.values():
            for path, state, count in as_monitor(accumulators.found, getattr(self.reducer, "columns", {}), take):
                try:
                    leaf, merged = as_monitor(self._merged, stored.states, path, state)
                    stored = stored.joined(self._checked({leaf: merged}), {leaf: count})
                except Exception as error:
                    self.failed.append((error, state))
        return stored

    def _merged(self, states: Mapping[str, State], path: str, state: State) -> tuple[str, State]:
        """Returns the leaf of a state that was accumulated elsewhere, and what it is merged with what is there."""
        if self.by_channels and not self.places:
            return leaf_and_state(path, states, lambda before: self.reducer.merge(before, state))
        return path, self.reducer.merge(states.get(path, {}), state)

    @property
    def samples(self) -> int:
        """The number of observations of the leaf that has most. Waits for devices on which graphs accumulate."""
        stored = self.stored
        for accumulators in self.accumulators.values():
            stored = stored.joined({}, accumulators.counts())
        return stored.samples

    def read(self) -> MonitorState:
        """What is stored, with pending observations reduced, but aside: they stay pending, so reading changes no later result."""
        with self.lock:
            if not self.stored.has_pending:
                return self._with_accumulated(self.stored, take=False)
            state: MonitorState
            state, failed = as_monitor(flush, self.stored, self.reducer, False, self.by_channels and not self.places)
            if failed:
                self.stored = state
                self.failed += failed
            return self._with_accumulated(state, take=False)

    def next_failure(self) -> tuple[Exception, Any] | None:
        """Removes the first of `failed` and returns it; None if there is none. Several threads may do so at once."""
        with self.lock:
            return self.failed.pop(0) if self.failed else None

    def clear(self, keepshape: bool = False) -> None:
        """Deletes everything; if `keepshape`, later states must have the shapes of those that are deleted."""
        with self.lock:
            kept = {path: without_values(state) for path, state in self.collect().states.items()} if keepshape else {}
            self._shapes = {**self._shapes, **kept} if keepshape else {}
            self.places, self.copies = {}, {}
            self.stored, self._graph_calls = EMPTY, 0
            self.empty_accumulators()

    def empty_accumulators(self) -> None:
        """Deletes what graphs accumulated on devices, without waiting for these."""
        for accumulators in self.accumulators.values():
            accumulators.clear()

    def merge(self, merged: Callable[[Mapping[str, State]], Mapping[str, State]], more: int) -> None:
        """Merges states that `more` observations made: `merged` returns those of both.

        What comes while they are merged counts as if it had come after: by a signal handler, or by a graph in another thread.
        """
        with self.lock:
            while True:
                stored = self.collect()
                states = dict(merged(stored.states))
                # Graphs add rows without the lock: those that came since wait on, and are reduced into the new states.
                kept: dict[tuple[str, ...], Pending] = {}
                kept.update((key, row) for key, row in stored.pending.items() if isinstance(row, Share))
                added = any(stored.number_in(key) for key in stored.pending if key not in kept)
                if self.stored is stored and not added:
                    break
            reduced = {key: stored.reduced.get(key, 0) for key in kept}
            self.stored = MonitorState(states, stored.counts, kept, reduced, stored.merged + more)

    def restore(self, stored: MonitorState, places: Mapping[str, Placement]) -> None:
        """Binds what was stored elsewhere, in place of what was recorded."""
        with self.lock:
            self.empty_accumulators()
            self.stored = stored
            self.keep_places(places)


def _is_for_bigger(waiting: Pending | None, tensors: Sequence[Tensor]) -> bool:
    """Whether this is a ring for observations that are bigger than this one."""
    return isinstance(waiting, Ring) and isinstance(waiting.codec, PartialStates) and waiting.codec.is_for_bigger(tensors)


def _key_of_copies(paths: tuple[str, ...], tensors: Sequence[Tensor]) -> Any:
    """Returns the key of the ring for copies of observations like this one: without a path twice, and flat if it is one tensor."""
    if len(paths) == 1:
        return paths[0], tensors[0].shape, tensors[0].dtype, tensors[0].device
    return paths, *((x.shape, x.dtype, x.device) for x in tensors)


def _key_of_partial(paths: tuple[str, ...], tensors: Sequence[Tensor]) -> Any:
    """Returns the key of the ring for the partial states of observations like this one, of any shape."""
    if len(paths) == 1:
        return paths[0], tensors[0].dtype, tensors[0].device
    return paths, *((x.dtype, x.device) for x in tensors)
