"""Capture: what happens between a hook and a State. Gates, callables, reducing, and what to do when any of it fails."""

from __future__ import annotations

import threading
import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.compiler import is_compiling

from recorders.clock import Chosen, Clock, Phase
from recorders.compiled import hand_over, unpacked
from recorders.errors import MonitorError, OperandError, RecordingWarning
from recorders.held import Held, place, place_of_lifts, settled
from recorders.operands import NoAutocast, NoInference, detached, graph_task, leaves, recomputing, shapes, tracing, transient, usual
from reducers import Reducer, State

__all__ = ["Capture", "OnError", "capturing"]

OnError = Literal["raise", "warn", "disable"]


_LONE = ("",)


class _Own(threading.local):
    """Whether this thread is at work for a monitor: what its callables and reducers call is none of the user's program."""

    working = False


_own = _Own()


def capturing() -> bool:
    """Whether this thread is at work for a monitor."""
    return _own.working


class Capture(ABC):
    """The part of a Monitor that records: the only thing in the house that mutates, and it mutates by rebinding.

    The states and their counts are one attribute, `_held`, which is bound at once, after all that can fail.
    """

    reducer: Reducer
    train_update: bool
    eval_update: bool
    phase: Phase
    condition: Callable[[], bool] | None
    steps: Chosen
    every_step: int
    every: int
    active: bool
    gated: bool
    filter_: Callable[..., bool] | None
    map_: Callable[..., tuple[Tensor, ...]] | None
    op_: Callable[..., Any] | None
    on_error: OnError
    rehearsing: bool
    rehearsed: dict[str, tuple[int, ...]]
    tally: dict[str, int]
    last_error: str | None
    compiled: bool
    _held: Held
    _engine: Reducer
    _gathers: bool
    _open: bool
    _plain: bool
    _graph_name: str
    _eligible: dict[object, int]
    _asleep: list[Any]
    _clock: Clock | None
    _lock: threading.RLock

    @abstractmethod
    def describe(self, module: nn.Module | None = None) -> str:
        """Monitor, name and module, for messages."""

    @abstractmethod
    def deregister(self) -> Any:
        """Takes the hooks off."""

    def _default(self, *operands: Any) -> Any:
        """What the reducer gets where neither `map_` nor `op_` is given."""
        return operands[0]

    def _skip(self, reason: str) -> bool:
        if torch.compiler.is_compiling():  # a counter in Python would compile the graph anew at every call
            return False
        self.tally[reason] = self.tally.get(reason, 0) + 1
        return False

    def _passed_by(self) -> bool:
        """Whether this forward is none of the user's own, or was seen before."""
        if torch.compiler.is_compiling():
            return tracing()
        if recomputing():
            return not self._skip("recomputed by checkpointing")
        return _own.working and not self._skip("called by a monitor")

    def switch(self, active: bool, error: Exception | None) -> None:
        """Records from now on or not; `error` is what asking `steps` raised."""
        self.active = active
        if error is not None:
            self._fail(error, None, ())

    def _awake(self) -> bool:
        """Whether to record in this step; inside a graph, which must not differ for each monitor, whether any of its clock does."""
        if torch.compiler.is_compiling():
            return self._clock is None or not self.gated or self._clock.busy
        return self.active and not self._asleep

    def _training(self, module: nn.Module | None) -> bool:
        """Whether what `module` does now counts as training."""
        return module.training if self.phase == "module" and module is not None else torch.is_grad_enabled()

    def _due(self, module: nn.Module | None, training: bool, stream: object = "") -> bool:
        """The gates, in order: train/eval, steps, condition, every (counted apart for each stream of observations)."""
        wanted = self.train_update if training else self.eval_update
        if torch.compiler.is_compiling():
            return wanted and self._awake() and (self.condition is None or self.condition())
        if self._asleep:
            return False
        self.tally["calls"] = self.tally.get("calls", 0) + 1
        if not wanted:
            if self.phase == "grad":
                return self._skip("not recorded with gradients on" if training else "not recorded with gradients off")
            return self._skip("not recorded in train mode" if training else "not recorded in eval mode")
        if not self.active:
            return self._skip("not in its steps")
        if self.condition is not None:
            try:
                if not self.condition():
                    return self._skip("condition was false")
            except Exception as error:
                self._fail(error, module, ())
                return False
        return self._counted(stream)

    def _counted(self, stream: object) -> bool:
        """The last gate."""
        if self.every == 1:
            return True
        eligible = self._eligible[stream] = self._eligible.get(stream, -1) + 1
        return eligible % self.every == 0 or self._skip("not due (every)")

    def _record(self, module: nn.Module | None, *operands: Any, path: str = "") -> None:
        """Filter, map and reduce; then bind the new states, at once.

        Args:
            path: of the leaf the operands belong to, where each leaf is observed by itself.
        """
        if torch.compiler.is_compiling():
            if not torch.compiler.is_exporting():
                with torch.no_grad():
                    self._reduce(operands, path)
            return
        outer, _own.working = _own.working, True
        try:
            with NoInference(False), NoAutocast():
                torch._C._set_grad_enabled(False)  # until NoInference ends
                self._reduce(operands, path)
        except Exception as error:
            self._fail(error, module, operands)
        finally:
            _own.working = outer

    def _reduce(self, operands: tuple[Any, ...], path: str) -> None:
        if self.filter_ is None and self.map_ is None and self.op_ is None:
            inputs = self._mapped(operands)
        elif self._unreal(tensor for operand in operands for _, tensor in leaves(operand)):
            return
        else:
            operands = tuple(map(detached, operands))
            if self.filter_ is not None and not self.filter_(*operands):
                self._skip("filtered out")
                return
            inputs = self._mapped(operands)
        if inputs is None:
            return
        if path:
            inputs = {f"{path}.{leaf}" if leaf else path: xs for leaf, xs in inputs.items()}
        if self.rehearsing:
            self.rehearsed.update({leaf: tuple(xs[0].shape) for leaf, xs in inputs.items() if xs})
        if torch.compiler.is_compiling():
            hand_over(self._graph_name, self.reducer, inputs, path)
            return
        self._bind(inputs)

    def _quick(self, x: object) -> bool:
        """The way of most hooks on small layers: whether every gate is open, and `x` now waits for others like it."""
        if not self._open or not self.active or self._asleep or _own.working or graph_task() != -1 or not self._waits(x):
            return False
        self.tally["calls"] = self.tally.get("calls", 0) + 1
        return True

    def _waits(self, x: object) -> bool:
        """Whether `x`, which passed the gates, is an observation that now waits for others like it."""
        if type(x) is not Tensor or is_compiling() or not self._plain:
            return False
        try:
            with self._lock:
                waiting = self._held.waiting.get(_LONE)
                if waiting is None or not usual(x) or not waiting.takes(x):
                    return False
                if waiting.add(x.data if x.requires_grad else x):
                    self._settled()
        except Exception as error:
            self._fail(error, None, (x,))
        return True

    def _bind(self, inputs: Mapping[str, tuple[Tensor, ...]]) -> None:
        """One observation: it waits for others like it, or new states are bound, at once."""
        paths, tensors = tuple(inputs), [xs[0] for xs in inputs.values() if len(xs) == 1]
        alone = self._gathers and len(tensors) == len(paths) > 0
        with self._lock:
            waiting = self._held.waiting.get(paths) if alone else None
            if waiting is not None and waiting.takes_all(tensors):
                if waiting.add_all(tensors):
                    self._settled()
                return
            held = self._settled()
            states = {path: self._engine.update(held.states.get(path, {}), *xs) for path, xs in inputs.items()}
            self._held = held.after(states, place(paths, tensors) if alone else None)

    def _settled(self) -> Held:
        """What is held, with nothing that waits; observations that cannot be reduced are left out, and told of."""
        held = self._held
        if not held.anything_waits:
            return held
        outer, _own.working = _own.working, True
        try:
            with self._lock, NoInference(False), NoAutocast():
                torch._C._set_grad_enabled(False)
                self._held, failed = settled(self._held, self._engine)
        finally:
            _own.working = outer
        for error, item in failed:
            self._fail(error, None, (item,))
        return self._held

    def take(self, layout: str, packs: list[Tensor], stream: str) -> None:
        """What a compiled graph lifted, at the moment it runs: the gate that counts, then the new states, bound at once."""
        if self._asleep or self._belated():
            return
        self.compiled = True
        self.tally["calls"] = self.tally.get("calls", 0) + 1
        if not self.active:  # the graph records for others of the clock
            self._skip("not in its steps")
            return
        if not self._counted(stream):
            return
        try:
            with self._lock:
                waiting = self._held.waiting.get((layout,))
                if waiting is not None and waiting.takes_all(packs):
                    if waiting.add_all(packs):
                        self._settled()
                    return
                held = self._settled()
                lifted = unpacked(layout, packs)
                states = {path: self._joined(held.states.get(path, {}), state) for path, state in lifted.items()}
                self._held = held.after(states, place_of_lifts(layout, packs, tuple(lifted)))
        except Exception as error:
            self._fail(error, None, tuple(packs))

    def _joined(self, state: State, lifted: State) -> State:
        """The graph reuses the memory of what it hands over."""
        return self.reducer.merge(state, {key: value.clone() for key, value in lifted.items()})

    def _belated(self) -> bool:
        """Whether a compiled graph hands over what was seen before."""
        return recomputing() and not self._skip("recomputed by checkpointing")

    def _mapped(self, operands: tuple[Any, ...]) -> Mapping[str, tuple[Tensor, ...]] | None:
        """By leaf path what the reducer gets; None where there is nothing to record."""
        if self.map_ is not None:
            mapped = self.map_(*operands)
            if not isinstance(mapped, tuple) or not all(isinstance(x, Tensor) for x in mapped):
                raise OperandError(f"map_ must return a tuple of tensors, such as (x,); it returned {type(mapped).__name__}")
            found = {"": tuple(x.detach() for x in mapped)}
        else:
            value = self._default(*operands) if self.op_ is None else self.op_(*operands)
            if value is None:
                self._skip("operand was None")
                return None
            there = {"": value} if isinstance(value, Tensor) else dict(leaves(value))
            if not there:
                raise OperandError(f"no tensor to record in {type(value).__name__}; pick one with op_=lambda ...: tensor")
            if self._unreal(there.values()):
                return None
            found = {path: (tensor.detach(),) for path, tensor in there.items()}
        return found

    def _unreal(self, tensors: Iterable[Tensor]) -> bool:
        """Whether these tensors hold no numbers of this moment; then they are not recorded, and counted."""
        if self.rehearsing or torch.compiler.is_compiling():
            return False
        if tracing():
            return not self._skip("traced (torch.jit.trace or make_fx)")
        return any(map(transient, tensors)) and not self._skip("not a real tensor (meta, fake, vmap or grad)")

    def _fail(self, error: Exception, module: nn.Module | None, operands: tuple[Any, ...]) -> None:
        if self.on_error == "raise" and isinstance(error, MonitorError):
            raise error  # told already
        seen = f"; operands: {' | '.join(map(shapes, operands))}" if operands else ""
        message = f"{self.describe(module)}: {type(error).__name__}: {error}{seen}"
        first = self.last_error is None
        self._skip("errors")
        self.last_error = message
        if self.on_error == "raise":
            raise MonitorError(message) from error
        if self.on_error == "disable":
            self.deregister()
            if first:
                warnings.warn(f"{message}; the monitor has been taken off", RecordingWarning, stacklevel=4)
        elif first:
            warnings.warn(
                f"{message}; this observation is left out, and later ones like it silently", RecordingWarning, stacklevel=4
            )
