"""Capture: from a hook to a State: the gates, the callables, the reducer, and the one assignment that binds new states."""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.compiler import is_compiling

from recorders._torch import graph_task, is_plain_moment
from recorders.capture.buffers import MonitorState, flush, new_buffer, new_lift_buffer
from recorders.capture.compiled import emit_call, emit_leaves, unpacked
from recorders.capture.context import as_monitor, capturing
from recorders.capture.operands import detached, leaves, plain, recomputing, symbolic, tracing, why_no_numbers
from recorders.errors import MonitorError, OperandError
from recorders.monitors.failures import OnError, failure_message, react_to_failure
from recorders.schedule.clock import Chosen, Clock, Phase
from recorders.schedule.stopwatch import Timer, entrance, exclude, now
from reducers import Reducer, State

__all__ = ["Capture"]

_LONE = ("",)


class Capture(ABC):
    """The part of a Monitor that records. One assignment binds states and counts, `_stored`, after everything that can fail."""

    reducer: Reducer
    train_update: bool
    eval_update: bool
    phase: Phase
    condition: Callable[[], bool] | None
    steps: Chosen
    every_step: int
    every: int
    active: bool
    chooses_steps: bool
    filter_: Callable[..., bool] | None
    map_: Callable[..., tuple[Tensor, ...]] | None
    op_: Callable[..., Any] | None
    on_error: OnError
    dry_run: bool
    dry_run_shapes: dict[str, tuple[int, ...]]
    counts: dict[str, int]
    last_error: str | None
    compiled: bool
    timer: Timer | None
    flush_seconds: float
    receiver: Tensor
    twin_key: str
    bare: bool
    _on: bool
    _stored: MonitorState
    _engine: Reducer
    _batchable: bool
    _always_due: bool
    _bufferable: bool
    _eligible: dict[object, int]
    _clock: Clock | None
    _lock: threading.RLock

    @property
    @abstractmethod
    def module(self) -> nn.Module | None:
        """The module the monitor sits on."""

    @abstractmethod
    def describe(self, module: nn.Module | None = None) -> str:
        """Monitor, name and module, for messages."""

    @abstractmethod
    def deregister(self) -> Any:
        """Takes the hooks off."""

    def _default(self, *operands: Any) -> Any:
        """Return what the reducer gets if there is neither `map_` nor `op_`."""
        return operands[0]

    def _skip(self, reason: str) -> bool:
        self.counts[reason] = self.counts.get(reason, 0) + 1
        return False

    def _is_ignored_call(self) -> bool:
        """Whether to ignore this forward: it recomputes an earlier one, or a monitor runs it."""
        if recomputing():
            return not self._skip("recomputed by checkpointing")
        return capturing() and not self._skip("called by a monitor")

    def switch(self, active: bool, error: Exception | None) -> None:
        """Start or stop recording, as the clock says; `error` is the exception that `steps` raised."""
        self.active = active
        if error is not None:
            self._fail(error, None, ())

    def _wanted_in_graph(self, module: nn.Module | None) -> bool:
        """Whether a graph that is being traced records calls of `module`. Asked of a twin; other gates are asked at run time.

        Of the steps a graph knows no more than whether any monitor of the clock records in them: there are two graphs.
        """
        wanted = self.train_update if self._training(module) else self.eval_update
        return wanted and self._awake_in_graph() and not tracing()

    def _awake_in_graph(self) -> bool:
        return not self.chooses_steps or self._clock is None or self._clock.busy

    def _trace(self, receiver: Tensor, module: nn.Module | None, *operands: Any, path: str = "") -> None:
        """Add one observation to a graph that is being traced. Called on a twin, for the monitor that `receiver` names."""
        if self.bare:
            found = list(leaves(self._default(*operands), path))
            if found:
                emit_leaves(receiver, self.twin_key, [leaf for leaf, _ in found], [tensor for _, tensor in found], path)
                return
        emit_call(receiver, operands, path)

    def _training(self, module: nn.Module | None) -> bool:
        """Whether what `module` does now counts as training."""
        return module.training if self.phase == "module" and module is not None else torch.is_grad_enabled()

    def _due(self, module: nn.Module | None, training: bool, stream: object = "") -> bool:
        """The gates, in order: train/eval, steps, condition, every (counted apart for each stream of observations)."""
        wanted = self.train_update if training else self.eval_update
        if not self._on:
            return False
        self.counts["calls"] = self.counts.get("calls", 0) + 1
        if not wanted:
            if self.phase == "grad":
                return self._skip("not recorded with gradients on" if training else "not recorded with gradients off")
            return self._skip("not recorded in train mode" if training else "not recorded in eval mode")
        return self._due_now(module, stream)

    def _due_now(self, module: nn.Module | None, stream: object) -> bool:
        """Ask all gates but train/eval. A compiled graph asks these when it runs."""
        if not self.active:
            return self._skip("not in its steps")
        if self.condition is not None:
            try:
                if not self.condition():
                    return self._skip("condition was false")
            except Exception as error:
                self._fail(error, module, ())
                return False
        if self.every == 1:
            return True
        eligible = self._eligible[stream] = self._eligible.get(stream, -1) + 1
        return eligible % self.every == 0 or self._skip("not due (every)")

    def _record(self, module: nn.Module | None, *operands: Any, path: str = "") -> None:
        """Filter, map and reduce one observation; then bind the new states by one assignment.

        Args:
            path: of the leaf the operands belong to, where each leaf is observed by itself.
        """
        self._run(module, operands, lambda: self._reduce(operands, path))

    def _run(self, module: nn.Module | None, operands: tuple[Any, ...], reduce: Callable[[], None]) -> None:
        """Call `reduce` outside the user's modes, in full precision and without gradients; report exceptions."""
        try:
            as_monitor(reduce)
        except Exception as error:
            self._fail(error, module, operands)

    def _reduce(self, operands: tuple[Any, ...], path: str) -> None:
        if self.bare:
            inputs = self._reducer_inputs(operands)
        elif self._holds_no_numbers(tensor for operand in operands for _, tensor in leaves(operand)):
            return
        else:
            operands = tuple(map(detached, operands))
            if self.filter_ is not None and not self.filter_(*operands):
                self._skip("filtered out")
                return
            inputs = self._reducer_inputs(operands)
        if inputs is None:
            return
        if path:
            inputs = {f"{path}.{leaf}" if leaf else path: xs for leaf, xs in inputs.items()}
        if self.dry_run:
            self.dry_run_shapes.update({leaf: tuple(xs[0].shape) for leaf, xs in inputs.items() if xs})
        self._store(inputs)

    def _buffer_at_once(self, x: object) -> bool:
        """Buffer `x` if no gate has to be asked, as for most hooks on small layers; return whether it was buffered."""
        if not (self._always_due and self.active and self._on) or capturing() or graph_task() != -1 or not self._buffer_alone(x):
            return False
        self.counts["calls"] = self.counts.get("calls", 0) + 1
        return True

    def _buffer_alone(self, x: object) -> bool:
        """Buffer `x`, which passed the gates, if a buffer accepts it; return whether it was buffered."""
        if type(x) is not Tensor or is_compiling() or not self._bufferable:
            return False
        try:
            with self._lock:
                pending = self._stored.pending.get(_LONE)
                if pending is None or not is_plain_moment(x) or not pending.accepts(x):
                    return False
                if pending.add(x.data if x.requires_grad else x):
                    self._flush()
        except Exception as error:
            self._fail(error, None, (x,))
        return True

    def _store(self, inputs: Mapping[str, tuple[Tensor, ...]]) -> None:
        """Buffer one observation, or reduce it and bind the new states by one assignment."""
        paths, tensors = tuple(inputs), [xs[0] for xs in inputs.values() if len(xs) == 1]
        alone = self._batchable and len(tensors) == len(paths) > 0
        with self._lock:
            pending = self._stored.pending.get(paths) if alone else None
            if pending is not None and pending.accepts_all(tensors):
                if pending.add_all(tensors):
                    self._flush()
                return
            stored = self._flush()
            states = {path: self._engine.update(stored.states.get(path, {}), *xs) for path, xs in inputs.items()}
            self._stored = stored.after(states, new_buffer(paths, tensors) if alone else None)

    def _flush(self) -> MonitorState:
        """Reduce all buffered observations; return the new state. Observations that fail are left out and reported."""
        stored = self._stored
        if not stored.has_pending:
            return stored
        with self._lock:
            started = now()
            self._stored, failed = as_monitor(flush, self._stored, self._engine)
            self.flush_seconds += exclude(self.timer, started)
        for error, item in failed:
            self._fail(error, None, (item,))
        return self._stored

    @entrance
    def take(self, layout: str, packs: list[Tensor], stream: str) -> None:
        """Record an observation that a compiled graph lifted. Called when the graph runs."""
        if self._due_in_graph(stream):
            self._run(None, tuple(packs), lambda: self._take(layout, packs))

    @entrance
    def take_leaves(self, leaves: dict[str, Tensor], stream: str) -> None:
        """Record an observation that the graph could not lift."""
        if self._due_in_graph(stream):
            self._run(None, (leaves,), lambda: self._store({path: (plain(tensor),) for path, tensor in leaves.items()}))

    @entrance
    def take_call(self, operands: Callable[[], Any], stream: str) -> None:
        """Record an observation whose operands callables need."""
        if self._due_in_graph(stream):
            self._record(self.module, *operands(), path=stream)

    def take_failure(self) -> None:
        """Report operands that could not be read while the graph was traced."""
        if self._due_in_graph(""):
            reason = "its operands could not be read while the graph was traced; run the module without torch.compile to see why"
            self._fail(OperandError(reason), None, ())

    def _due_in_graph(self, stream: str) -> bool:
        if not self._on or self._is_recomputed():
            return False
        self.compiled = True
        self.counts["calls"] = self.counts.get("calls", 0) + 1
        return self._due_now(None, stream)

    def _take(self, layout: str, packs: list[Tensor]) -> None:
        with self._lock:
            pending = self._stored.pending.get((layout,))
            if pending is not None and pending.accepts_all(packs):
                if pending.add_all(packs):
                    self._flush()
                return
            held = self._flush()
            lifted = unpacked(layout, packs)
            states = {path: self._joined(held.states.get(path, {}), state) for path, state in lifted.items()}
            self._stored = held.after(states, new_lift_buffer(layout, packs, tuple(lifted)))

    def _joined(self, state: State, lifted: State) -> State:
        """Merge copies: the graph reuses the memory of the lifts."""
        return self.reducer.merge(state, {key: value.clone() for key, value in lifted.items()})

    def _is_recomputed(self) -> bool:
        """Whether the graph is recomputing a forward that was recorded."""
        return recomputing() and not self._skip("recomputed by checkpointing")

    def _reducer_inputs(self, operands: tuple[Any, ...]) -> Mapping[str, tuple[Tensor, ...]] | None:
        """Return what the reducer gets, by leaf path; None if there is nothing to record."""
        if self.map_ is not None:
            mapped = self.map_(*operands)
            if not isinstance(mapped, tuple) or not all(isinstance(x, Tensor) for x in mapped):
                raise OperandError(f"map_ must return a tuple of tensors, such as (x,); it returned {type(mapped).__name__}")
            found = {"": tuple(plain(x) for x in mapped)}
        else:
            value = self._default(*operands) if self.op_ is None else self.op_(*operands)
            if value is None:
                self._skip("operand was None")
                return None
            there = {"": value} if isinstance(value, Tensor) else dict(leaves(value))
            if not there:
                if symbolic(value):
                    self._skip("traced (torch.fx)")
                    return None
                raise OperandError(f"no tensor to record in {type(value).__name__}; pick one with op_=lambda ...: tensor")
            if self._holds_no_numbers(there.values()):
                return None
            found = {path: (plain(tensor),) for path, tensor in there.items()}
        return found

    def _holds_no_numbers(self, tensors: Iterable[Tensor]) -> bool:
        """Whether these tensors hold no numbers, so that the observation is left out and counted."""
        reason = "" if self.dry_run else why_no_numbers(tensors)
        return bool(reason) and not self._skip(reason)

    def _fail(self, error: Exception, module: nn.Module | None, operands: tuple[Any, ...]) -> None:
        if self.on_error == "raise" and isinstance(error, MonitorError):
            raise error  # it was raised for a failure within this one
        first = self.last_error is None
        self._skip("errors")
        self.last_error = failure_message(self.describe(module), error, operands)
        react_to_failure(self.last_error, error, self.on_error, first, self.deregister)
