"""Monitor: a reducer bound to one place of one module."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from torch import Tensor, nn

from recorders._torch import plainly
from recorders.capture.calls import Call
from recorders.capture.hooks import Hook
from recorders.capture.layouts import PlacementInfo
from recorders.errors import TargetError
from recorders.monitors import channels
from recorders.monitors.attachment import name_of_hook, renew_spec
from recorders.monitors.constructor import MonitorConstructor, checked_recipe, rebuild, recipe
from recorders.monitors.gradient_hooks import Watch, receive_gradient
from recorders.monitors.graphs import GraphSink, is_due_in_graph
from recorders.monitors.options import MonitorOptions, check_options, spell_out
from recorders.monitors.record import Observer, report_failures
from recorders.monitors.sites import GRADIENTS, SITES, check_sites, trace_hook
from recorders.monitors.snapshots import copied, merged, snapshot
from recorders.recordings.display import Recorded
from recorders.recordings.history import Past
from recorders.recordings.recording import Subrecording
from recorders.ring.state import MonitorState
from recorders.schedule.clock import Clock
from reducers import Reducer, State

if TYPE_CHECKING:
    from typing_extensions import Self, Unpack


class Monitor(Observer, Recorded, Past):
    """Captures operands at one place of one module, reduces them, and holds the State.

    A kind of monitor is a subclass that declares two things: its `sites`, where it looks, and `operands`, what it makes of what it
    sees there. All else is the same for all kinds: see docs/adding-a-monitor.md.

    An observation passes, in this order: the gate (train/eval, steps, `condition`, `every`), `filter_`, then `map_` or `op_`, then
    `reducer.update`. All callables get detached operands. If one of them raises, the state stays as it was. Inside a compiled graph
    the mode (train/eval) is asked when the graph is traced, and everything else when it runs.

    Args:
        reducer: an instance, such as `Mean("b c -> c")`; immutable, so it may be shared.
        module: registers the monitor on this module at once; without it the monitor serves as a prototype.
        **options: see `MonitorOptions`.

    Attributes:
        sites: where this kind of monitor looks; one of these, or none if values are pushed or read:
            "forward": after each forward; `call.output` and `call.inputs` are there.
            "forward_pre": before each forward; `call.inputs`.
            "around_forward": after each forward; `call.before` is a copy of what `watched` returned before it.
            "output_gradient", "input_gradient": when the gradient of a tensor that the module returned, or was given, comes in the
            backward; `call.gradient`, and `call.tensor` as it was at the forward.
            "step": at the steps of optimizers; see `ModuleParameterMonitor`.
            "forwards_of_two": after the forwards of two modules; see `PairMonitor`.
        gate: decides which observations are recorded.
        buffer: what was recorded.
        hooks: the hooks that are on, and the module.
        counts: the number of calls, and of observations that were not recorded, by reason.
        last_error: the message of the last failure; None if there was none.

    Raises:
        ReducerTypeError: `reducer` is no reducer instance.
        TargetError: `module` is no module, or has not what is to be watched.
        TypeError, ValueError: an option is wrong.
    """

    _defaults: ClassVar[dict[str, Any]]
    sites: tuple[str, ...] = ()
    operand_names: ClassVar[tuple[str, ...]] = ()  # what messages call them
    hooks_change: bool = False  # whether hooks are added while the monitor is on
    subject: ClassVar[Literal["calls", "module", "parameters", "values"]] = "calls"  # what it records of
    of_net: ClassVar[bool] = False  # whether a recorder puts it on the net alone, under the name of its group

    def __init_subclass__(cls, **kwargs: Any) -> None:
        """Spells out `**options` in the signature, so that help and editors show every argument."""
        super().__init_subclass__(**kwargs)
        check_sites(cls)
        cls._defaults = spell_out(cls, Monitor)

    def __init__(self, reducer: Reducer, module: nn.Module | None = None, **options: Unpack[MonitorOptions]) -> None:
        chosen = check_options(type(self).__name__, options)
        super().__init__(reducer, chosen)
        self._options, self.prepend = {**chosen, "steps": self.gate.steps}, chosen["prepend"]
        self.sink = GraphSink(self)
        self.watch = Watch() if self.sites and self.sites[0] in GRADIENTS else None
        # Gradients arrive in a backward, and so do recomputations by activation checkpointing.
        self.records_recomputed = self.watch is not None
        self.hooks_change = self.hooks_change or "input_gradient" in self.sites
        self._functions: tuple[Callable[[Any, int], Any], ...] = ()
        if module is not None:
            self.register(module)

    @classmethod
    def partialconstructor(cls, reducer: Reducer, **options: Unpack[MonitorOptions]) -> MonitorConstructor[Self]:
        """The monitor's arguments except `attr` and `module`, kept as a recipe that is called with those two.

        Raises:
            TypeError: an argument the monitor does not know.
        """
        return checked_recipe(cls, reducer, options, cls._defaults)

    @property
    def constructor(self) -> MonitorConstructor[Self]:
        """The recipe of this monitor, for making others like it."""
        given = {name: self._options[name] if name in self._options else getattr(self, name) for name in self._defaults}
        return recipe(type(self), self.reducer, given, self._defaults)

    @property
    def registered(self) -> bool:
        """Whether the monitor's hooks are on."""
        return bool(self.hooks.handles)

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
        if self.gate.chooses_steps:
            clock.add(self)
            renew_spec(self)

    def register(self, module: nn.Module | None = None) -> Monitor:
        """Puts the hooks on `module`, or on the module that the monitor had before; returns the monitor.

        Raises:
            TargetError: there is no module, or it has not what is to be watched.
        """
        target = module if module is not None else self.module
        if not isinstance(target, nn.Module):
            raise TargetError(f"{self.describe()} needs a torch.nn.Module to sit on and got {target!r}")
        if not self.hooks.resume(target):
            self._check(target)
            self.checks_channels = channels.resolve(self, target)
            self.deregister()
            self.hooks.move(target)
            self._ensure_clock()
            try:
                self.hooks.put_on(target, self._attach(target))
            except RuntimeError as error:  # modules of torch.jit.script take no hooks
                raise TargetError(f"{self.describe(target)}: {error}; leave it out with exclude=torch.jit.ScriptModule") from error
        self.gate.turn(on=True)
        return self

    def deregister(self) -> Monitor:
        """Takes the hooks off; what was recorded stays. Returns the monitor. Hooks that compiled graphs know are suspended."""
        self._restore_hooks()
        if self.watch is not None:
            self.watch.end()
        self.gate.turn(on=False)
        self.hooks.take_off(suspend=self.compiled)
        return self

    def _attach(self, module: nn.Module) -> list[Any]:
        """Puts the hooks on and returns their handles."""
        return [handle for site in self.sites for handle in SITES[site](self, module)]

    def watched(self, call: Call) -> Any:
        """Returns what is looked at before and after a forward, if the site is "around_forward"; before it, it is copied."""
        raise NotImplementedError(f"{type(self).__name__}.watched(call): return what is to be copied before each forward")

    def applies(self, module: nn.Module) -> bool:
        """Whether `module` has what this monitor watches; a Recorder skips modules that do not."""
        return True

    def missing(self, module: nn.Module) -> list[str]:
        """Returns the names in `attr` of what `module` does not have, if the others are recorded."""
        return []

    def _check(self, module: nn.Module) -> None:
        """Raises `TargetError` if `module` does not have what this monitor watches."""
        if not self.applies(module):
            raise TargetError(f"{self.describe(module)}: there is nothing on it for this monitor to watch")

    def _hook(self, run: Callable[..., None], name: str | None = None) -> Hook:
        """A hook that calls `run`. While a graph is traced, `trace_hook` is called with the `name` of the hook, if it has one."""
        return Hook(run, None if name is None else name_of_hook(self, name), self.sink.tensor, self._fail)

    def trace(self, hook: str, sink: Tensor, *args: Any) -> None:
        """Called while a graph is traced, of the monitor of a `TraceSpec`."""
        trace_hook(self, hook, sink, *args)

    def _ensure_clock(self) -> None:
        """Gives a monitor that chooses steps a clock, if it has none."""
        if self.gate.chooses_steps and self._clock is None:
            self.clock.expect(self.module)

    def _restore_hooks(self) -> None:
        """Puts hooks that were taken out for a step back into PyTorch's dictionaries, before hooks are added or removed."""
        if self._clock is not None and self.gate.chooses_steps:
            self._clock.restore_hooks(self)

    def switch(self, active: bool, error: Exception | None) -> None:
        """Starts or stops recording, as the clock says; `error` is the exception that `steps` raised."""
        self.gate.turn(active=active)
        if error is not None:
            self._fail(error, None, ())

    def switchable(self) -> tuple[list[Any], bool]:
        """The handles of the hooks that may be taken out in steps that are not due, and whether these will stay the same."""
        handles = [] if self.compiled else self.all_handles()
        called = bool(self.counts)  # before the first call hooks stay: whether a monitor is called at all is part of the report
        return (handles, not self.hooks_change) if called or not handles else ([], False)

    def all_handles(self) -> list[Any]:
        """The handles of all its hooks that are on."""
        return [*self.hooks.handles]

    def _receive_call(self, operands: Callable[[], Any], stream: str, info: PlacementInfo | None = None) -> None:
        """Records an observation that a compiled graph hands over without lifting it."""
        if self.watch is not None:
            receive_gradient(self, operands, stream, info)
        elif is_due_in_graph(self, stream):
            self._record(self.module, *operands(), path=stream, info=info)

    def push(self, *values: Any) -> None:
        """Records values, if this kind of monitor is given them by hand.

        Raises:
            TargetError: it captures by itself.
        """
        raise TargetError(f"{self.describe()} captures by itself: push into a CallMonitor")

    def tick(self) -> None:
        """Records now, if this kind of monitor does so at ticks."""

    def record_shapes(self) -> None:
        """Records the shapes of what a dry run on the meta device does not come to, such as of parameters."""

    def unseen(self) -> str:
        """Returns why nothing may have come to the monitor, if its kind knows; "" if not."""
        why = "backward was not run, the loss does not use its output, or compiled autograd ran it"
        return f"no gradient came: {why}" if self.seen else ""

    @property
    def seen(self) -> bool:
        """Whether its module was called; or, in a shared graph, the module of a monitor with the same recipe. Gradients only."""
        spec = self.hooks.spec
        return self.watch is not None and (self.watch.seen or (spec is not None and spec.monitor.watch.seen))

    @property
    def partial(self) -> bool:
        """Whether a compiled graph returned a tensor whose gradient is recorded: a hook outside of it misses a part of that."""
        return self.watch is not None and self.watch.partial

    @plainly
    def flush(self) -> MonitorState:
        """Reduces the pending observations, and returns what is stored."""
        stored = self.buffer.collect()
        report_failures(self)
        return stored

    @property
    def samples(self) -> int:
        """The number of calls that passed the gate and the filter; if they differed in leaves, how many had the most frequent."""
        return self.buffer.samples

    @property
    def states(self) -> dict[str, State]:
        """One State per tensor leaf, by the path of the leaf ("" for a lone tensor)."""
        return dict(self.flush().states)

    @property
    def state(self) -> State:
        """All states as one flat State, keys `path/key` (plain `key` for a lone tensor)."""
        return {f"{path}/{key}" if path else key: value for path, state in self.states.items() for key, value in state.items()}

    @plainly
    def snapshot(self) -> Subrecording:
        """What was recorded so far, without hooks. Observations that wait are reduced aside, so looking changes no later result."""
        return snapshot(self, self._functions)

    def saved(self) -> Subrecording:
        """What was recorded so far, to be saved: observations that wait are joined into the states first, see `snapshot`."""
        return snapshot(self, self._functions, save=True)

    @plainly
    def reset(self, keepshape: bool = False) -> None:
        """Deletes what was recorded, not hooks nor functions of `apply`; with `keepshape` states keep the shapes that they had."""
        if self.watch is not None:
            self.watch.forget()
        self.buffer.clear(keepshape)
        self.gate.clear()
        self.counts, self.leaf_calls, self.last_error = {}, {}, None

    clear = reset

    @plainly
    def merge(self, other: Monitor | Subrecording) -> Self:
        """Adds what another monitor, or a subrecording, recorded; returns the monitor.

        Raises:
            MergeError: the reducers or the states do not fit; nothing is changed then.
        """
        theirs = other.snapshot() if isinstance(other, Monitor) else other
        self.buffer.merge(lambda states: merged(self, states, theirs).states, theirs.samples)
        report_failures(self)
        return self

    def apply(self, function: Callable[[Any, int], Any]) -> Self:
        """From now on `peek` and `save` show `function(result, samples)`; states stay mergeable. Returns the monitor.

        Raises:
            TypeError: it is no function.
        """
        if not callable(function):
            raise TypeError(f"{self.describe()}: apply needs a function of a result; got {function!r:.100}")
        self._functions = (*self._functions, function)
        return self

    def __repr__(self) -> str:
        return self.constructor.as_code(self.attr)

    def __reduce__(self) -> tuple[Any, ...]:
        return rebuild, copied(self, self._functions)
