"""Monitor: a reducer bound to one place of one module. Recipe, hooks on and off."""

from __future__ import annotations

import threading
import weakref
from abc import abstractmethod
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, ClassVar

from torch import Tensor, nn

from recorders.capture.buffers import EMPTY, MonitorState
from recorders.capture.compiled import new_receiver
from recorders.capture.hooks import Hook
from recorders.capture.switching import hook_of
from recorders.errors import TargetError
from recorders.monitors.capture import Capture
from recorders.monitors.constructor import MonitorConstructor, spelled_out
from recorders.monitors.failures import OnError
from recorders.monitors.results import Results
from recorders.monitors.twins import twin_of
from recorders.schedule.clock import Clock, Phase, Steps, as_steps
from recorders.schedule.stopwatch import Timer
from reducers import Reducer, State
from reducers.combinators.fused import Fused
from reducers.core.reducer import check_reducer

if TYPE_CHECKING:
    from typing_extensions import Self

__all__ = ["Monitor"]


class Monitor(Results):
    """Captures operands at one place of one module, reduces them, and holds the State.

    An observation passes, in this order: the gates (train/eval, steps, `condition`, `every`), `filter_`, then `map_` or `op_`, then
    `reducer.update`. All callables get detached operands. If one of them raises, the state stays as it was. Inside a compiled graph
    the train/eval gate is asked when the graph is traced, and everything else when it runs.

    Args:
        reducer: an instance, such as `Mean("b c -> c")`; immutable, so it may be shared.
        module: registers the monitor on this module at once; without it the monitor serves as a prototype.
        train_update: record while training.
        eval_update: record while evaluating.
        phase: what counts as training: "module", if the module is in training mode, or "grad", if gradients are on. With "grad",
            gradients and optimizer steps always count as training.
        prepend: put the hook before those already registered.
        condition: called without arguments; if it returns False, nothing is recorded.
        steps: the steps of the clock in which to record: `range(100, 200)`, `slice(1000, None)`, the steps themselves, or a
            function of the step, called once a step; all steps if None.
        every_step: record all calls in every n-th step. `Recorder.attach` or `Recorder.step` advances the steps of `monitor.clock`.
            Inside compiled graphs all monitors of one clock that choose steps cost one more graph together.
        every: record every n-th call that passed the other gates, beginning with the first. A compiled graph computes the lifts of
            the other calls too, and discards them; steps that are not chosen cost nothing.
        filter_: called with the operands; if it returns False, nothing is recorded.
        map_: called with the operands; returns the tuple of tensors that the reducer gets.
        op_: called with the operands if `map_` is None; returns the tensor (or nested tensors) that the reducer gets.
        on_error: what to do when a callable or the reducer fails: "warn" (once; the observation is left out and training goes on),
            "disable" (warn, and take the monitor off) or "raise".

    Raises:
        ReducerTypeError: `reducer` is no reducer instance.
        TargetError: `module` is no module, or has not what is to be watched.
    """

    _defaults: ClassVar[dict[str, Any]]

    def __init_subclass__(cls, **kwargs: Any) -> None:
        """Spells out `**options` in the signature, so that help and editors show every argument."""
        super().__init_subclass__(**kwargs)
        signature = spelled_out(cls, Monitor)
        cls.__signature__ = signature  # type: ignore[attr-defined]
        cls._defaults = {name: p.default for name, p in signature.parameters.items() if name not in ("reducer", "attr", "module")}

    def __init__(
        self,
        reducer: Reducer,
        module: nn.Module | None = None,
        *,
        train_update: bool = True,
        eval_update: bool = True,
        phase: Phase = "module",
        prepend: bool = False,
        condition: Callable[[], bool] | None = None,
        steps: Steps | None = None,
        every_step: int = 1,
        every: int = 1,
        filter_: Callable[..., bool] | None = None,
        map_: Callable[..., tuple[Tensor, ...]] | None = None,
        op_: Callable[..., Any] | None = None,
        on_error: OnError = "warn",
    ) -> None:
        kind = type(self).__name__
        self.reducer = check_reducer(reducer, kind)
        for label, number in {"every": every, "every_step": every_step}.items():
            if not isinstance(number, int) or number < 1:
                counted = "steps" if label == "every_step" else "calls"
                raise ValueError(f"{kind}({label}={number!r}): {label} is a whole number of {counted}, at least 1")
        if phase not in ("module", "grad"):
            raise ValueError(f"{kind}(phase={phase!r}): choose 'module' or 'grad'")
        if on_error not in ("raise", "warn", "disable"):
            raise ValueError(f"{kind}(on_error={on_error!r}): choose 'raise', 'warn' or 'disable'")
        for label, function in {"condition": condition, "filter_": filter_, "map_": map_, "op_": op_}.items():
            if function is not None and not callable(function):
                raise TypeError(f"{kind}({label}={function!r}): {label} must be callable")
        self.train_update, self.eval_update, self.prepend = train_update, eval_update, prepend
        self.phase, self.steps, self.every_step = phase, as_steps(steps), every_step
        self.condition, self.every, self.on_error = condition, every, on_error
        self.filter_, self.map_, self.op_ = filter_, map_, op_
        self.name = ""
        self.timer: Timer | None = None  # set while a measured step times this monitor
        self.flush_seconds = 0.0
        self.dry_run = False
        self.dry_run_shapes: dict[str, tuple[int, ...]] = {}
        self.counts: dict[str, int] = {}
        self.last_error: str | None = None
        self._stored = EMPTY
        self._engine = self.reducer
        self._batchable = self.reducer.batchable
        self.bare = filter_ is None and map_ is None and op_ is None
        self._bufferable = self._batchable and self.bare and type(self)._default is Capture._default
        self._always_due = self._bufferable and train_update and eval_update and condition is None and every == 1
        self.compiled = False
        self.receiver, self.twin_key = new_receiver(self), ""
        self._on = True
        self._merged = 0
        self._functions: tuple[Callable[[Any, int], Any], ...] = ()
        self._eligible: dict[object, int] = {}
        self._lock = threading.RLock()  # a signal handler may save in the middle of an update
        self._handles: list[Any] = []
        self._suspended: list[Any] = []
        self._shared_twin: Monitor | None = None
        self._module: weakref.ref[nn.Module] | None = None
        self._module_class = ""
        self.active, self.chooses_steps = True, self.steps is not None or every_step != 1
        self._clock: Clock | None = None  # one of its own only where no recorder gives it another
        if module is not None:
            self.register(module)

    @classmethod
    def partialconstructor(cls, reducer: Reducer, **options: Any) -> MonitorConstructor[Self]:
        """The monitor's arguments except `attr` and `module`, kept as a recipe that is called with those two.

        Raises:
            TypeError: an argument the monitor does not know.
        """
        check_reducer(reducer, f"{cls.__name__}.partialconstructor")
        if unknown := sorted(set(options) - set(cls._defaults)):
            raise TypeError(f"{cls.__name__}.partialconstructor got {unknown}; it takes {list(cls._defaults)}")
        return MonitorConstructor(cls, reducer, tuple(sorted(options.items())))

    @property
    def constructor(self) -> MonitorConstructor[Self]:
        """The recipe of this monitor, for making others like it."""
        given = {name: getattr(self, name) for name in self._defaults}
        changed = sorted(
            (name, value) for name, value in given.items() if value is not self._defaults[name] and value != self._defaults[name]
        )
        return MonitorConstructor(type(self), self.reducer, tuple(changed))

    def fuse(self) -> Monitor:
        """Reduce big observations through `torch.compile` from now on, if it works; return the monitor."""
        self._engine = Fused(self.reducer)
        return self

    @property
    def clock(self) -> Clock:
        """The clock whose steps `steps` and `every_step` choose from: its own or that of its recorder. It can be set."""
        clock = self._clock
        if clock is None:
            clock = self.clock = Clock()
        return clock

    @clock.setter
    def clock(self, clock: Clock) -> None:
        if self._clock is not None:
            self._clock.release(self)
        self._clock = clock
        if self.chooses_steps:
            clock.gate(self)
        for hook in map(hook_of, [*self._handles, *self._suspended]):  # their twin knew the clock before
            if isinstance(hook, Hook) and hook.trace is not None and self.chooses_steps:
                hook.trace = getattr(self._twin(), hook.trace.__name__)

    @property
    def attr(self) -> Any:
        """The attribute or parameter that the monitor watches; None if it watches neither."""
        return getattr(self, "_attr", None)

    @property
    def module(self) -> nn.Module | None:
        """The module of the monitor, referenced weakly; None if it has none, or the module no longer exists."""
        return None if self._module is None else self._module()

    @property
    def registered(self) -> bool:
        """Whether the monitor's hooks are on."""
        return bool(self._handles)

    def register(self, module: nn.Module | None = None) -> Monitor:
        """Put the hooks on `module`, or on the module that the monitor had before; return the monitor.

        Raises:
            TargetError: there is no module, or it has not what is to be watched.
        """
        target = module if module is not None else self.module
        if not isinstance(target, nn.Module):
            raise TargetError(
                f"{self.describe()} needs a torch.nn.Module to sit on and got {'none' if target is None else repr(target)}"
            )
        if target is self.module and (self.registered or self._suspended):
            self._handles, self._suspended, self._on = self._handles or self._suspended, [], True
            return self
        self._check(target)
        self.deregister()
        self._remove_suspended()
        self._module, self._module_class = weakref.ref(target), type(target).__name__
        self._ensure_clock()
        try:
            self._handles = self._attach(target)
        except RuntimeError as error:  # modules of torch.jit.script take no hooks
            kind = type(target).__name__
            raise TargetError(f"{self.describe(target)}: {error}; leave it out of the selection with exclude={kind}") from error
        self._on = True
        return self

    def _ensure_clock(self) -> None:
        """Give a monitor that chooses steps a clock, if it has none."""
        if self.chooses_steps and self._clock is None:
            self.clock = Clock()

    def deregister(self) -> Monitor:
        """Take the hooks off; what was recorded stays. Return the monitor.

        Hooks that are part of a compiled graph stay in the module and record nothing: the compiler keeps no guard on hooks that are
        gone, and might run a graph made without them once they are back.
        """
        self._restore_hooks()
        handles, self._handles, self._on = self._handles, [], False
        if self.compiled:
            self._suspended = handles or self._suspended
            return self
        for handle in handles:
            handle.remove()
        return self

    def _restore_hooks(self) -> None:
        """Put hooks that were taken out for a step back into PyTorch's dictionaries, before hooks are added or removed."""
        if self._clock is not None and self.chooses_steps:
            self._clock.restore_hooks(self)

    def switchable(self) -> tuple[list[Any], bool]:
        """The handles of the hooks that may be taken out in steps that are not due, and whether these will stay the same.

        None of them before the first call: whether a monitor is called at all is part of the report.
        """
        stay = self.compiled or not self.all_handles()
        return ([] if stay or not self.counts else self.all_handles()), stay or (bool(self.counts) and not hasattr(self, "_hooked"))

    def all_handles(self) -> list[Any]:
        """The handles of all its hooks."""
        return [*self._handles, *getattr(self, "_hooked", {}).values()]

    def _remove_suspended(self) -> None:
        """Remove hooks that were left in a module because its graphs guard them."""
        handles, self._suspended = self._suspended, []
        for handle in handles:
            handle.remove()

    def _hook(self, run: Callable[..., None], trace: str | None = None) -> Hook:
        """A hook that calls `run`; in a graph that is being traced, the method `trace` of the twin."""
        traced = None if trace is None else getattr(self._twin(), trace)
        return Hook(run, traced, self.receiver, self._hook_failed)

    def _twin(self) -> Monitor:
        clock = self._clock if self.chooses_steps else None
        twin: Monitor = twin_of(self.constructor, self.attr, self.chooses_steps, clock)
        self._shared_twin = twin
        return twin

    def _hook_failed(self, error: Exception, module: Any) -> None:
        self._fail(error, module if isinstance(module, nn.Module) else None, ())

    def describe(self, module: nn.Module | None = None) -> str:
        """Monitor, name and module, for messages."""
        target = module if module is not None else self.module
        name = f" {self.name!r}" if self.name else ""
        attr = f" of {self.attr!r}" if self.attr is not None else ""
        return f"{type(self).__name__}{name}{attr} on {'no module' if target is None else type(target).__name__}"

    def __repr__(self) -> str:
        parts = [repr(self.reducer), *([repr(self.attr)] if self.attr is not None else [])]
        parts += [f"{name}={value!r}" for name, value in self.constructor.options]
        return f"{type(self).__name__}({', '.join(parts)})"

    def __reduce__(self) -> tuple[Any, ...]:
        return _rebuild, (self.constructor, self.attr, self.name, self.states, self.samples, self._functions)

    @abstractmethod
    def _attach(self, module: nn.Module) -> list[Any]:
        """Puts the hooks on and returns their handles."""

    def applies(self, module: nn.Module) -> bool:
        """Whether `module` has what this monitor watches; a Recorder skips modules that do not."""
        return True

    def _check(self, module: nn.Module) -> None:
        """Raise `TargetError` if `module` does not have what this monitor watches."""
        if not self.applies(module):
            raise TargetError(f"{self.describe(module)}: there is nothing on it for this monitor to watch")


def _rebuild(
    constructor: MonitorConstructor[Monitor], attr: Any, name: str, states: dict[str, State], samples: int, functions: Any
) -> Monitor:
    monitor = constructor(attr)
    monitor.name, monitor._stored, monitor._merged, monitor._functions = name, MonitorState(states, {}, {}), samples, functions
    return monitor
