"""One observation on its way through a monitor: gate, early exit, operands, callables, reducer, buffer."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from itertools import zip_longest
from types import MappingProxyType
from typing import Any, ClassVar, TypeAlias

from torch import Tensor, nn, strided

from recorders._torch import graph_task, is_plain_moment
from recorders.capture.calls import Call
from recorders.capture.context import as_monitor, capturing
from recorders.capture.cuda_graphs import CAPTURES, IN_CUDA_GRAPH
from recorders.capture.given import BatchContext, current
from recorders.capture.layouts import PlacementInfo, even_part, in_use, layout_of
from recorders.capture.operands import (
    as_operands,
    change_count,
    detached,
    is_spread,
    leaves,
    pack,
    plain,
    plain_or_spread,
    shapes,
    symbolic,
    why_no_numbers,
)
from recorders.errors import GivenError, MonitorError, OperandError, RecordingWarning, in_a_line
from recorders.monitors import channels
from recorders.monitors.attachment import Attachment
from recorders.monitors.buffer import NO_PARTS, Buffer
from recorders.monitors.callables import call
from recorders.monitors.gate import Gate
from recorders.monitors.options import OnError
from recorders.recordings.distributed.placement import Placement
from recorders.schedule.clock import Clock
from reducers import Reducer, TensorPart
from reducers.core.patterns import fits
from reducers.errors import warn_user

Inputs: TypeAlias = "dict[str, tuple[Tensor, ...]]"
NOTHING: Mapping[str, PlacementInfo] = MappingProxyType({})


class NothingToRecordError(Exception):
    """The observation is left out and counted; the message is the reason."""


class Observer:
    """Records observations: asks the gate, calls the user's callables, and adds what they return to the buffer.

    A `Monitor` is an observer with a place in a net. All kinds, in eager mode and in graphs, take this one way. Its early exit is
    `_waits`: an observation that nobody maps is added to those that wait, if it is like them.
    """

    buffer_class: ClassVar[type[Buffer]] = Buffer
    side: ClassVar[str] = ""  # "inputs" or "outputs" of a layer if it watches these, or their gradients: they have channels
    of_module: ClassVar[bool] = False  # whether its operands are read of the module alone, not of what that is given or returns
    records_recomputed: bool = False  # whether calls in a recomputation by activation checkpointing count
    attr: Any = None  # the attributes or parameters that the monitor watches, if any
    patterns: tuple[str, ...] = ()  # those that the observation itself is reduced by, as far as they are known

    def __init__(self, reducer: Reducer, options: Mapping[str, Any]) -> None:
        self.reducer = channels.check(reducer, type(self))
        self.gate, self.buffer = Gate(options), self.buffer_class(self.reducer)
        self.name, self.hooks, self.context = "", Attachment(), BatchContext()
        self.filter_: Callable[..., bool] | None = options["filter_"]
        self.map_: Callable[..., Tensor | tuple[Tensor, ...]] | None = options["map_"]
        self.op_: Callable[..., Any] | None = options["op_"]
        self.given: tuple[str, ...] = options["given"]
        self.on_error: OnError = options["on_error"]
        self.counts, self.leaf_calls = dict[str, int](), dict[str, int]()
        self.last_error: str | None = None
        self.compiled = self.dry_run = False  # whether a graph recorded; whether only shapes are recorded
        self.dry_run_shapes: dict[str, tuple[int, ...]] = {}
        self.checks_channels = False  # whether its pattern may not keep channels, which the first observation will show
        self.has_callables = any(function is not None for function in (self.filter_, self.map_, self.op_))
        # Whether its kind computes nothing: the operands are what its site sees, and the reducer gets the first of them.
        kind = type(self)
        self.as_seen = (kind.operands, kind._parts, kind._default) == (Observer.operands, Observer._parts, Observer._default)
        self._may_wait = self.as_seen and not self.has_callables and not self.given and self.buffer.batchable
        self.spec_key = ""  # the key of a `TraceSpec`, if this is the monitor of one
        self._clock: Clock | None = None  # one of its own only if no recorder gives it another

    @property
    def module(self) -> nn.Module | None:
        """The module of the monitor, referenced weakly; None if it has none, or the module no longer exists."""
        return self.hooks.module

    def operands(self, call: Call) -> tuple[Any, ...]:
        """Returns the operands, which `filter_`, `map_` and `op_` get; by default what the site sees, see `Monitor.sites`.

        A subclass may compute others. It must compute the same from the same call, and change nothing: it is called in eager mode,
        and while a graph is traced.
        """
        return call.seen

    def _default(self, *operands: Any) -> Any:
        """Returns what the reducer gets if there is neither `map_` nor `op_`."""
        return operands[0]

    def _training(self, module: nn.Module | None) -> bool:
        """Whether what `module` does now counts as training."""
        return self.gate.training(module)

    def _after(self, module: nn.Module, args: tuple[Any, ...], *rest: Any) -> None:
        """The hook after a forward. With keyword arguments these come before the output; code that moves hooks drops them."""
        if self._passes(module) and not self._waits(rest[-1]):
            self._see(Call("forward", module, args, rest[0] if len(rest) == 2 else {}, rest[-1]))

    def _before(self, module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any] = MappingProxyType({})) -> None:
        """The hook before a forward."""
        if self._passes(module):
            inputs = args[0] if len(args) == 1 and not kwargs else pack(args, kwargs)
            if not self._waits(inputs):
                self._see(Call("forward_pre", module, args, kwargs))

    def _passes(self, module: nn.Module, ask: bool = True) -> bool:
        """Counts a forward of `module`, if it is one of the user's own; returns whether to record it.

        Args:
            ask: whether the gate is asked now; otherwise the call is not counted as one.
        """
        if graph_task() != -1:
            self._skip("recomputed by checkpointing")
            return False
        if capturing():
            self._skip("called by a monitor")
            return False
        if not ask:
            return True
        if self.gate.open and not CAPTURES:  # nothing is left to ask
            self.counts["calls"] = self.counts.get("calls", 0) + 1
            return True
        return self._due(module, self._training(module))

    def _due(self, module: nn.Module | None, training: bool | None, stream: object = "") -> bool:
        """Counts a call; returns whether the gate lets its observation pass.

        Args:
            training: whether it counts as training; None if that was asked when a graph was traced.
            stream: what is counted by itself for `every`. A text is the path of a leaf: all leaves of one call are one call.
        """
        if not self.gate.on:
            return False
        counts = self.counts
        calls = counts.get("calls", 0)
        if stream and isinstance(stream, str):
            found = self.leaf_calls[stream] = self.leaf_calls.get(stream, 0) + 1
            counts["calls"] = max(calls, found)
        else:
            counts["calls"] = calls + 1
        if CAPTURES and CAPTURES[0]():
            self._skip(IN_CUDA_GRAPH)
            return False
        try:
            refusal = self.gate.refusal(training, stream)
        except Exception as error:  # of the user's `condition`
            self._fail(error, module)
            return False
        if refusal:
            counts[refusal] = counts.get(refusal, 0) + 1
        return not refusal

    def _waits(self, x: Any) -> bool:
        """Writes `x`, which passed the gate, into the ring for observations like it; returns whether there is one."""
        if not self._may_wait or type(x) is not Tensor:
            return False
        buffer = self.buffer
        try:
            with buffer.lock:
                pending: Mapping[Any, Any] = buffer._stored.pending  # a property would be one more call for each observation
                ring = pending.get(("", x.shape, x.dtype, x.device)) or pending.get(("", x.dtype, x.device))
                if ring is None or x.layout is not strided or not is_plain_moment(x):
                    return False
                full: bool | None = ring.add((x.data if x.requires_grad else x,))
                if full:
                    buffer.flush()
        except Exception as error:
            if x.is_nested:  # it has no shape, and is recorded by its values
                return False
            self._fail(error, None, (x,))
            return True
        if full:
            report_failures(self)
        return full is not None

    def _see(self, call: Call, path: str = "", info: PlacementInfo | None = None) -> None:
        """Records what a site has seen and the gate has let pass.

        Args:
            path: that of the leaf, if each leaf is observed by itself.
            info: what a graph told of the operands.
        """
        for leaf, part in self._parts(call):
            work(self, part.module, part, self._take, part, path or leaf, info)

    def _parts(self, call: Call) -> Iterable[tuple[str, Call]]:
        """Returns the observations that a call makes, each with its path: usually one, whose leaves have paths of their own."""
        return (("", call),)

    def _take(self, call: Call, path: str, info: PlacementInfo | None) -> None:
        if not (self.as_seen or self.of_module or self.dry_run):  # what a kind computes must be part of no program that is traced
            check_numbers([tensor for seen in call.seen for _, tensor in leaves(seen)])
        call.operands = checked_operands(self, self.operands(call))
        reduce(self, call.operands, path, info)

    def _record(self, module: nn.Module | None, *operands: Any, path: str = "", info: PlacementInfo | None = None) -> None:
        """Records these operands of an observation that passed the gate."""
        work(self, module, operands, reduce, self, operands, path, info)

    def _inputs(self, operands: tuple[Any, ...]) -> Inputs:
        return channels.checked(self, reducer_inputs(self, operands)) if self.checks_channels else reducer_inputs(self, operands)

    def _receive_call(self, operands: Callable[[], Any], stream: str, info: PlacementInfo | None = None) -> None:
        """Records an observation that a compiled graph hands over without lifting it."""
        raise NotImplementedError

    def _skip(self, reason: str) -> None:
        self.counts[reason] = self.counts.get(reason, 0) + 1

    def _fail(self, error: Exception, module: Any = None, operands: tuple[Any, ...] = ()) -> None:
        """Reports an exception of a callable or the reducer, as `on_error` says; the observation is left out."""
        fail(self, error, module, operands)

    def deregister(self) -> Any:
        """Takes the hooks off."""
        raise NotImplementedError

    def describe(self, module: nn.Module | None = None) -> str:
        """Monitor, name and module, for messages."""
        return describe(self, module if module is not None else self.module)


def work(
    monitor: Observer, module: nn.Module | None, seen: tuple[Any, ...] | Call, function: Callable[..., None], *args: Any
) -> None:
    """Calls `function(*args)` outside the user's modes, in full precision and without gradients, and reports what fails.

    Args:
        seen: what a message shows: the operands, or the call that they are made of.
    """
    try:
        as_monitor(function, *args)
    except NothingToRecordError as reason:
        monitor._skip(str(reason))
    except Exception as error:
        monitor._fail(error, module, seen.shown if isinstance(seen, Call) else seen)
    if monitor.buffer.failed:
        report_failures(monitor)


def report_failures(monitor: Observer) -> None:
    """Reports the pending observations that could not be reduced."""
    while (failure := monitor.buffer.next_failure()) is not None:
        error, observation = failure
        monitor._fail(error, None, (observation,))


def reduce(monitor: Observer, operands: tuple[Any, ...], path: str, info: PlacementInfo | None = None) -> None:
    """Filters, maps and reduces one observation.

    Args:
        path: that of the leaf, if each leaf is observed by itself.
        info: what a graph told of the operands.
    """
    made_of: Placement | None = None
    passed: list[tuple[Tensor, PlacementInfo]] = []
    if monitor.has_callables:
        tensors = [tensor for operand in operands for _, tensor in leaves(operand)]
        if not monitor.dry_run:
            check_numbers(tensors)
        if info is not None or in_use() or any(map(is_spread, tensors)):
            known = PlacementInfo.of(tensors) if info is None else info
            made_of = known.made_of(layout_of(monitor.module, monitor.side), monitor.buffer.shared)
            if made_of is not None and info is None and not monitor.dry_run:
                spread = filter(is_spread, tensors)
                passed = [(plain(x), PlacementInfo.of([x], positional=monitor.buffer.positional)) for x in spread]
        operands = tuple(map(detached, operands))
        before = list(map(change_count, tensors))
        if monitor.filter_ is not None and not _decided(call(monitor.filter_, operands, monitor)):
            raise NothingToRecordError("filtered out")
        inputs = monitor._inputs(operands)
        if list(map(change_count, tensors)) != before:
            raise OperandError(
                "filter_, map_ or op_ changed a tensor of the training in place, as x.abs_() does: return a new one, as x.abs() "
                "does, or change a clone of it"
            )
    else:
        inputs = monitor._inputs(operands)
    if path:
        inputs = {f"{path}.{leaf}" if leaf else path: xs for leaf, xs in inputs.items()}
    if monitor.given:
        inputs = with_given(monitor, inputs)
    if monitor.dry_run:
        monitor.dry_run_shapes.update({leaf: tuple(xs[0].shape) for leaf, xs in inputs.items() if xs})
    store(monitor, inputs, _unchanged(inputs, passed) if passed else NOTHING, made_of=made_of)


def _decided(answer: Any) -> Any:
    """What `filter_` answered; raises `OperandError` if it is no single truth value."""
    if isinstance(answer, Tensor) and answer.numel() != 1:
        raise OperandError(
            f"filter_ must return True or False; it returned a tensor of shape {tuple(answer.shape)}: use .any() or .all(), or, to "
            "leave out elements, reducer.prefilter(function) or Masked(reducer)"
        )
    return answer


def _unchanged(inputs: Inputs, passed: Sequence[tuple[Tensor, PlacementInfo]]) -> dict[str, PlacementInfo]:
    """What is known of those inputs that callables returned as they were.

    Args:
        passed: the parts of DTensors that they were given.
    """
    return {path: known for path, xs in inputs.items() for part, known in passed if xs and _same_elements(xs[0], part)}


def _same_elements(x: Tensor, other: Tensor) -> bool:
    return x.dtype is other.dtype and x.device == other.device and x.is_set_to(other)


def store(
    monitor: Observer, inputs: Inputs, info: Mapping[str, PlacementInfo] = NOTHING, *, made_of: Placement | None = None
) -> None:
    """Adds one observation to the buffer; of DTensors what this rank holds.

    Args:
        info: what a graph told of the tensors, by path.
        made_of: the placement of what callables got, if there are any.
    """
    least = 2 if monitor.buffer.by_channels else 1
    if monitor.patterns and any(xs and xs[0].ndim < least for xs in inputs.values()):
        inputs = _with_axes(monitor, inputs)
    plain_only = all(type(x) is Tensor for xs in inputs.values() for x in xs)
    buffer, parts = monitor.buffer, NO_PARTS
    if info or made_of is not None or not plain_only or buffer.places or in_use():
        known = {path: info.get(path) or PlacementInfo.of(xs, positional=buffer.positional) for path, xs in inputs.items()}
        note_places(monitor, known, made_of)
        inputs = inputs if plain_only else {path: tuple(map(plain, xs)) for path, xs in inputs.items()}
        parts = _parts(buffer.places, known, inputs) if buffer.positional else NO_PARTS
    buffer.add(inputs, parts)


def _with_axes(monitor: Observer, inputs: Inputs) -> Inputs:
    """The leaves but for those with fewer axes than the pattern keeps, such as the loss that a model returns beside its logits.

    A lone number is left out only if it is that of a module without channels, such as a loss; so is one number for each sample.
    Else the error of the reducer says what is wrong.

    Raises:
        NothingToRecordError: none is left.
    """
    found = dict(inputs)
    for path, xs in inputs.items():
        axes = xs[0].ndim if xs else 2
        may_lack_them = axes < 2 and (monitor.buffer.by_channels or (path and not axes))
        if may_lack_them and not all(fits(pattern, axes) for pattern in monitor.patterns):
            del found[path]
            what = "one number for each sample" if axes else "a number"
            reason = f"it is {what}, and the pattern keeps {'channels' if axes else 'an axis'}"
            if not found:
                raise NothingToRecordError(f"leaf {path!r}: {reason}" if path else reason)
            monitor._skip(f"leaf {path!r}: {reason}")
    return found


def _parts(places: Mapping[str, Placement], known: Mapping[str, PlacementInfo], inputs: Inputs) -> dict[str, TensorPart]:
    """Which part of a larger tensor an input is, if it is one; if that is not known, parts are taken to be of one size."""
    cut = {path: place for path, place in places.items() if path in inputs and place.parts}
    found = {path: known[path].part or even_part(place, inputs[path][0].shape) for path, place in cut.items()}
    return {path: part for path, part in found.items() if part is not None}


def note_places(monitor: Observer, info: Mapping[str, PlacementInfo], made_of: Placement | None = None) -> None:
    """Notes in the buffer which part of a tensor the states of each leaf are of.

    Raises:
        OperandError: a rank holds a summand; or earlier observations were of another part, or of a whole tensor.
    """
    buffer, layout = monitor.buffer, None if made_of is not None else layout_of(monitor.module, monitor.side)
    places = {path: leaf.placement(layout, buffer.shared) or made_of for path, leaf in info.items()}
    if any(places.values()) or buffer.places:
        buffer.place(places)
        monitor._may_wait = False  # later observations are compared with these


def checked_operands(kind: Observer, operands: Any) -> tuple[Any, ...]:
    """Returns what `operands` of a kind returned.

    Raises:
        OperandError: it is no tuple: the rows of a lone tensor would be taken for operands, and the first of them recorded.
    """
    if not isinstance(operands, tuple) or not operands:
        found = "an empty tuple" if isinstance(operands, tuple) else type(operands).__name__
        raise OperandError(
            f"{type(kind).__name__}.operands(call) must return a tuple of operands, such as (x,); it returned {found}"
        )
    return operands


def check_numbers(tensors: Collection[Tensor]) -> None:
    """Raises `NothingToRecordError` if one of the tensors holds no numbers, as while a program is traced."""
    if reason := why_no_numbers(tensors):
        raise NothingToRecordError(reason)


def reducer_inputs(monitor: Observer, operands: tuple[Any, ...]) -> Inputs:
    """What the reducer gets: what `map_` or `op_` makes of the operands, or the monitor's default; by leaf path.

    Raises:
        NothingToRecordError: that is None, or holds no numbers.
        OperandError: `map_` returned no tensors, `op_` a list of numbers, or there is no tensor at all.
    """
    if monitor.map_ is not None:
        mapped = call(monitor.map_, operands, monitor)
        if type(mapped) is Tensor:  # as nearly always
            return {"": (plain_or_spread(mapped),)}
        mapped = (mapped,) if isinstance(mapped, Tensor) else mapped
        if not isinstance(mapped, tuple) or not all(isinstance(x, Tensor) for x in mapped):
            raise OperandError(
                "map_ must return a tensor, or a tuple of the tensors that the reducer gets, such as (x, weights); it returned "
                f"{type(mapped).__name__}"
            )
        return {"": tuple(plain_or_spread(x) for x in mapped)}
    if monitor.op_ is None:
        value = monitor._default(*operands)
    else:
        returned = call(monitor.op_, operands, monitor)
        if isinstance(returned, list) and _holds_numbers(returned):
            raise OperandError("op_ returned a list of numbers, each of which would be a leaf: return a tensor, not its tolist()")
        value = as_operands(returned)
    if type(value) is Tensor and not monitor.dry_run and is_plain_moment(value) and not value.is_meta:  # as nearly always
        return {"": (plain_or_spread(value),)}
    if value is None:
        raise NothingToRecordError("operand was None")
    tensors = {"": value} if isinstance(value, Tensor) else dict(leaves(value))
    if not tensors:
        if symbolic(value):
            raise NothingToRecordError("traced (torch.fx)")
        raise OperandError(f"no tensor to record in {type(value).__name__}; pick one with op_=lambda ...: tensor")
    if not monitor.dry_run:
        check_numbers(tensors.values())
    return {path: (plain_or_spread(tensor),) for path, tensor in tensors.items()}


def _holds_numbers(value: Any) -> bool:
    """Whether the innermost first item of a nested list is a number."""
    while isinstance(value, list) and value:
        value = value[0]
    return isinstance(value, (int, float))


def with_given(monitor: Observer, inputs: Mapping[str, tuple[Tensor, ...]]) -> Inputs:
    """What the reducer gets, with the values that the monitor takes from the context after the tensors of each leaf.

    Raises:
        GivenError: a value is missing, or its first axis does not fit the observation.
        NothingToRecordError: a value is missing in a dry run.
    """
    block = current()
    found = block.given.get(monitor.context, {})
    if missing := [name for name in monitor.given if name not in found]:
        if monitor.dry_run:
            raise NothingToRecordError("nothing was given")
        reason = block.fault or (f"given are {sorted(found)}" if found else "nothing is given in this thread")
        asked = ", ".join(f"{name}=..." for name in monitor.given)
        raise GivenError(f"{missing} of given={monitor.given} missing ({reason}): run the net in `with recorder.given({asked}):`")
    for name in monitor.given:
        if found[name].changed:
            raise GivenError(f"given {name!r} was changed in place between its forward and its backward: give a clone of it")
        shape = found[name].value.shape
        for leaf, (x, *_) in inputs.items():
            if shape[:1] != x.shape[:1] and shape[:1] not in ((), (1,)):
                where = f"leaf {leaf!r} of the observation" if leaf else "the observation"
                length = f"length {x.shape[0]} along its first axis" if x.ndim else "no axis"
                raise GivenError(
                    f"given {name!r} has length {shape[0]}, but {where} has {length}: give one value for each sample, or pick the "
                    "tensor that it belongs to with op_=lambda ...: tensor"
                )
    further = tuple(found[name].value.to("meta") if monitor.dry_run else found[name].value for name in monitor.given)
    return {leaf: (*xs, *further) for leaf, xs in inputs.items()}


def describe(monitor: Any, module: Any) -> str:
    """The kind of monitor, its name, what it watches, and the class of `module`."""
    name = f" {monitor.name!r}" if monitor.name else ""
    attr = f" of {monitor.attr!r}" if monitor.attr is not None else ""
    return f"{type(monitor).__name__}{name}{attr} on {type(module).__name__ if isinstance(module, nn.Module) else 'no module'}"


def fail(monitor: Any, error: Exception, module: Any, operands: tuple[Any, ...]) -> None:
    """Counts and remembers the failure, and does what `on_error` says.

    Raises:
        MonitorError: `on_error` is "raise".
    """
    if monitor.on_error == "raise" and isinstance(error, MonitorError):
        raise error  # it was raised for a failure within this one
    first = monitor.last_error is None
    others = _others(monitor, error) if first and monitor.on_error != "raise" else 0
    monitor._skip("errors")
    named = zip_longest(monitor.operand_names[: len(operands)], map(shapes, operands), fillvalue="")
    seen = f"; operands: {' | '.join(f'{name} {found}'.strip() for name, found in named)}" if operands else ""
    if found := {name: value for name, (value, _) in current().given.get(monitor.context, {}).items() if name in monitor.given}:
        seen += f"; given: {shapes(found)}"
    message = monitor.last_error = (
        f"{monitor.describe(module if isinstance(module, nn.Module) else None)}: {type(error).__name__}: {in_a_line(error)}{seen}"
    )
    if monitor.on_error == "raise":
        raise MonitorError(message) from error
    if monitor.on_error == "disable":
        monitor.deregister()
        if first and others is not None:
            warn_user(f"{message}; the monitor has been taken off{_shown(others)}", RecordingWarning)
    elif first and others is not None:
        warn_user(f"{message}; this observation is left out, and later ones like it silently{_shown(others)}", RecordingWarning)


def _shown(others: int) -> str:
    if not others:
        return ""
    many = f"{others} more monitors" if others > 1 else "one more monitor"
    return f"; {many} of this recorder may meet the same, without a further warning: report() names all that did"


def _others(monitor: Any, error: Exception) -> int | None:
    """How many other monitors of the recorder are made like this one; None if one of them has warned of the same mistake.

    A monitor that was reset since then has warned of nothing.
    """
    mistake = _mistake(monitor)
    teller = monitor.context.told.get((type(error), mistake), lambda: None)()
    if teller is not None and teller is not monitor and teller.last_error is not None:
        return None
    monitor.context.told[type(error), mistake] = weakref.ref(monitor)
    return sum(other is not monitor and _mistake(other) == mistake for other in list((monitor.context.monitors() or {}).values()))


def _mistake(monitor: Any) -> tuple[Any, ...]:
    """What a mistake may be in: of monitors that were copied from one prototype it is the same."""
    functions = monitor.filter_, monitor.map_, monitor.op_, monitor.gate.condition
    return (
        type(monitor),
        *map(id, functions),
        repr(monitor.reducer),
        repr(monitor.attr) if all(f is None for f in functions) else "",
    )
