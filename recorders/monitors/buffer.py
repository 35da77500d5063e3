"""Buffer: what a monitor has recorded, with the observations that are not reduced yet."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from torch import Tensor

from recorders._torch import is_plain_moment
from recorders.capture import entering
from recorders.capture.accumulators import Accumulators
from recorders.capture.buffers import EMPTY, MonitorState, Pending, flush, new_buffer, new_lift_buffer
from recorders.capture.changes import Changes
from recorders.capture.context import as_monitor
from recorders.capture.graph_buffers import GraphBuffer, GraphRow
from recorders.capture.packs import unpacked
from recorders.capture.slots import new_slots
from recorders.errors import OperandError
from recorders.recordings.placement import Placement
from reducers import Reducer, State
from reducers.combinators.fused import Fused
from reducers.core.states import check_states, without_values
from reducers.kernels.locks import new_lock

__all__ = ["Buffer"]

_LONE = ("",)


class Buffer:
    """States by leaf, counts, and observations that are not reduced yet.

    All of it is one value, `stored`, which is bound by one assignment after everything that can fail. So after an exception at any
    point an observation is either in it or not.

    Attributes:
        stored: the states, the counts and the pending observations.
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
        self.reducer = self.engine = reducer
        self.batchable = reducer.batchable
        self._stored, self.changes = EMPTY, Changes()
        self.failed: list[tuple[Exception, Any]] = []
        self.flush_seconds = 0.0
        self.lock = new_lock()
        self.places: dict[str, Placement] = {}
        self.copies: dict[str, Placement] = {}
        self.accumulators: Mapping[Any, Accumulators] = {}
        self._shapes: dict[str, State] = {}  # kept by `clear`, by leaf

    def fuse(self) -> None:
        """Reduces big observations through `torch.compile` from now on."""
        self.engine = Fused(self.reducer)

    def add_alone(self, x: Tensor) -> bool | None:
        """Adds an observation of one tensor to those pending, if they accept it. The lock must be held.

        Returns:
            None if they do not accept it; otherwise whether there are enough now to flush.
        """
        pending = self.stored.pending.get(_LONE)
        return None if pending is None or not is_plain_moment(x) else pending.add(x.data if x.requires_grad else x)

    def add(self, inputs: Mapping[str, tuple[Tensor, ...]]) -> None:
        """Adds one observation, by leaf: to those pending, or to the states."""
        paths, tensors = tuple(inputs), [xs[0] for xs in inputs.values() if len(xs) == 1]
        alone = self.batchable and len(tensors) == len(paths) > 0
        with self.lock:
            stored = self.stored
            if stored.pending:
                if alone and self._add_pending(paths, tensors):
                    return
                stored = self.flush()
            states = self._checked({path: self.engine.update(stored.states.get(path, {}), *xs) for path, xs in inputs.items()})
            waiting = new_buffer(paths, tensors) or new_slots(self.engine, paths, tensors) if alone else None
            self.stored = stored.after(states, waiting)

    @property
    def stored(self) -> MonitorState:
        """The states, the counts and the pending observations."""
        return self._stored

    @stored.setter
    def stored(self, stored: MonitorState) -> None:
        self._stored = stored
        self.changes.note()

    def place(self, places: Mapping[str, Placement | None]) -> None:
        """Notes which part of a DTensor the next observation of each leaf is of; None is a plain tensor.

        Raises:
            OperandError: earlier observations were of another part, or of a tensor that ranks do not share.
        """
        for path, place in places.items():
            before = self.places.get(path)
            stored = self.stored
            if before != place and (before or path in stored.states or any(path in key for key in stored.pending)):
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

    def add_lifts(self, layout: str, packs: list[Tensor]) -> None:
        """Adds one observation that a compiled graph lifted."""
        with self.lock:
            if self._add_pending((layout,), packs):
                return
            stored = self.flush()
            lifted = unpacked(layout, packs)
            states = self._checked({path: self._merged_copy(stored.states.get(path, {}), one) for path, one in lifted.items()})
            self.stored = stored.after(states, new_lift_buffer(layout, packs, tuple(lifted)))

    @property
    def takes_rows(self) -> bool:
        """Whether observations may wait in a buffer of several monitors: not if their placements or shapes are to be checked."""
        return not self.places and not self._shapes

    def waits_in(self, shared: GraphBuffer, index: int) -> bool:
        """Whether observations wait in this row of a buffer of several monitors."""
        row = self.stored.pending.get(shared.keys[index])
        return isinstance(row, GraphRow) and row.buffer is shared and row.index == index

    @property
    def uncounted_calls(self) -> int:
        """The calls by graphs that are in no counts of the monitor yet."""
        return sum(buffer.rows.calls for buffer in self.graph_buffers)

    @property
    def graph_buffers(self) -> list[GraphBuffer]:
        """The buffers of several monitors in which observations wait."""
        return [row.buffer for row in self.stored.pending.values() if isinstance(row, GraphRow)]

    def wait_in(self, shared: GraphBuffer, index: int) -> None:
        """Lets observations wait in this row, an empty one, from now on."""
        row = GraphRow(shared, index)
        with self.lock:
            self.changes.note()
            stored = self.flush()
            self.stored = stored.moved(row.paths, row)

    def add_empty(self, path: str) -> None:
        """Adds one observation without elements."""
        with self.lock:
            self.stored = self.stored.joined({}, {path: 1})

    def _add_pending(self, key: tuple[str, ...], tensors: list[Tensor]) -> bool:
        """Adds an observation to the pending ones with this key, if they accept it; returns whether they did."""
        pending = self.stored.pending.get(key)
        full = None if pending is None else pending.add_all(tensors)
        if full:
            self.flush()
        return full is not None

    def _checked(self, states: dict[str, State]) -> dict[str, State]:
        """Returns the states, if they have the shapes that were kept. Pending observations have that of one that was checked."""
        for path, shapes in self._shapes.items():
            if states.get(path):
                check_states(self.reducer, shapes, states[path])
        return states

    def _merged_copy(self, state: State, lifted: State) -> State:
        """Merges a copy of `lifted`, because the graph reuses its memory."""
        return self.reducer.merge(state, {key: value.clone() for key, value in lifted.items()})

    def flush(self, exact_only: bool = False) -> MonitorState:
        """Reduces all pending observations, or only those for which no bit depends on when; returns what is stored then."""
        if self.stored.has_pending:
            with self.lock:
                self.changes.note()  # no graph in another thread adds to what is about to be reduced
                watch = entering.joining
                run = as_monitor if watch is None else partial(watch, self, as_monitor)
                self.stored, failed = run(flush, self.stored, self.engine, exact_only)
                self.failed += failed
        return self.stored

    def collect(self, exact_only: bool = False) -> MonitorState:
        """The same, with what graphs accumulated on devices, for which this waits."""
        with self.lock:
            stored = self.flush(exact_only)
            if self.accumulators:
                self.stored = stored = self._with_accumulated(stored, take=True)
                for accumulators in self.accumulators.values():
                    accumulators.forget()
            return stored

    def _with_accumulated(self, stored: MonitorState, *, take: bool) -> MonitorState:
        for accumulators in self.accumulators.values():
            for path, state, count in as_monitor(accumulators.found, getattr(self.reducer, "columns", {}), take):
                try:
                    merged = as_monitor(self.reducer.merge, stored.states.get(path, {}), state)
                    stored = stored.joined(self._checked({path: merged}), {path: count})
                except Exception as error:
                    self.failed.append((error, state))
        return stored

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
            state, failed = as_monitor(flush, self.stored, self.engine)
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
            self.stored = EMPTY
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
                kept.update((key, row) for key, row in stored.pending.items() if isinstance(row, GraphRow))
                added = any(row.count != stored.reduced.get(key, 0) for key, row in stored.pending.items() if key not in kept)
                if self.stored is stored and not added:
                    break
            self.leave_stacks()
            reduced = {key: stored.reduced.get(key, 0) for key in kept}
            self.stored = MonitorState(states, stored.counts, kept, reduced, stored.merged + more)

    def restore(self, stored: MonitorState, places: Mapping[str, Placement]) -> None:
        """Binds what was stored elsewhere, in place of what was recorded."""
        with self.lock:
            self.leave_stacks()
            self.empty_accumulators()
            self.stored = stored
            self.keep_places(places)

    def leave_stacks(self) -> None:
        """Tells those who looked rows of this monitor up that it takes its states elsewhere; the lock must be held."""
