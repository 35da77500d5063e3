"""One observation on its way from the operands to the buffer of a monitor: gate, callables, reducer."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from types import MappingProxyType
from typing import Any, Protocol, TypeAlias

from torch import Tensor, nn
from torch.compiler import is_compiling

from recorders._torch import graph_task, is_plain_moment
from recorders.capture.context import as_monitor, capturing
from recorders.capture.cuda_graphs import CAPTURES, IN_CUDA_GRAPH
from recorders.capture.given import Taking, current
from recorders.capture.layouts import Told, in_use, layout_of, of_all
from recorders.capture.operands import (
    as_operands,
    detached,
    leaves,
    plain,
    plain_or_spread,
    recomputing,
    symbolic,
    why_no_numbers,
)
from recorders.errors import GivenError, OperandError
from recorders.monitors.callables import Caller, call
from recorders.monitors.gate import Gate
from recorders.monitors.places import Placed, note_places, seen
from recorders.recordings.placement import Placement
from reducers.core.patterns import fits

__all__ = [
    "NothingToRecordError",
    "Recording",
    "add_alone",
    "add_at_once",
    "check_numbers",
    "is_due",
    "is_ignored",
    "reduce",
    "reduce_at_once",
    "reducer_inputs",
    "report_failures",
    "store",
    "store_lifts",
    "with_given",
    "work",
]

Inputs: TypeAlias = "dict[str, tuple[Tensor, ...]]"
NOTHING: Mapping[str, Told] = MappingProxyType({})


class NothingToRecordError(Exception):
    """The observation is left out and counted; the message is the reason."""


class Recording(Placed, Caller, Taking, Protocol):
    """What a monitor needs to record an observation."""

    gate: Gate
    counts: dict[str, int]
    leaf_calls: dict[str, int]
    filter_: Callable[..., bool] | None
    map_: Callable[..., tuple[Tensor, ...]] | None
    op_: Callable[..., Any] | None
    bare: bool
    dry_run: bool
    doubtful: bool
    patterns: tuple[str, ...]
    dry_run_shapes: dict[str, tuple[int, ...]]

    def _default(self, *operands: Any) -> Any: ...

    def _inputs(self, operands: tuple[Any, ...]) -> Inputs: ...

    def _skip(self, reason: str) -> None: ...

    def _fail(self, error: Exception, module: Any = None, operands: tuple[Any, ...] = ()) -> None: ...


def is_due(monitor: Recording, ask: Callable[[], str], module: nn.Module | None, leaf: object = "") -> bool:
    """Counts a call, and returns whether the gate lets it pass; `ask` returns the reason if it does not.

    Args:
        leaf: the path of what is observed by itself: all leaves of one call are one call.
    """
    if not monitor.gate.on:
        return False
    calls = monitor.counts.get("calls", 0)
    if isinstance(leaf, str) and leaf:
        found = monitor.leaf_calls[leaf] = monitor.leaf_calls.get(leaf, 0) + 1
        monitor.counts["calls"] = max(calls, found)
    else:
        monitor.counts["calls"] = calls + 1
    if CAPTURES and CAPTURES[0]():
        monitor._skip(IN_CUDA_GRAPH)
        return False
    try:
        refusal = ask()
    except Exception as error:  # of the user's `condition`
        monitor._fail(error, module)
        return False
    if refusal:
        monitor._skip(refusal)
    return not refusal


def is_ignored(monitor: Recording) -> bool:
    """Whether to ignore a forward, because it recomputes an earlier one, or a monitor runs it; counts it then."""
    reason = "recomputed by checkpointing" if recomputing() else "called by a monitor" if capturing() else ""
    if reason:
        monitor._skip(reason)
    return bool(reason)


def work(
    monitor: Recording, module: nn.Module | None, operands: tuple[Any, ...], function: Callable[..., None], *args: Any
) -> None:
    """Calls `function(*args)` outside the user's modes, in full precision and without gradients, and reports what fails."""
    try:
        as_monitor(function, *args)
    except NothingToRecordError as reason:
        monitor._skip(str(reason))
    except Exception as error:
        monitor._fail(error, module, operands)
    if monitor.buffer.failed:
        report_failures(monitor)


def report_failures(monitor: Recording) -> None:
    """Reports the pending observations that could not be reduced."""
    while (failure := monitor.buffer.next_failure()) is not None:
        error, observation = failure
        monitor._fail(error, None, (observation,))


def reduce(monitor: Recording, operands: tuple[Any, ...], path: str, told: Told | None = None) -> None:
    """Filters, maps and reduces one observation.

    Args:
        path: that of the leaf, if each leaf is observed by itself.
        told: what a graph told of the operands.
    """
    made_of: Placement | None = None
    if not monitor.bare:
        tensors = [tensor for operand in operands for _, tensor in leaves(operand)]
        if not monitor.dry_run:
            check_numbers(tensors)
        known = of_all(tensors) if told is None else told
        made_of = known.made_of(layout_of(monitor.module, monitor.side), monitor.buffer.shared)
        operands = tuple(map(detached, operands))
        if monitor.filter_ is not None and not call(monitor.filter_, operands, monitor):
            raise NothingToRecordError("filtered out")
    inputs = monitor._inputs(operands)
    if path:
        inputs = {f"{path}.{leaf}" if leaf else path: xs for leaf, xs in inputs.items()}
    if monitor.given:
        inputs = with_given(monitor, inputs)
    if monitor.dry_run:
        monitor.dry_run_shapes.update({leaf: tuple(xs[0].shape) for leaf, xs in inputs.items() if xs})
    store(monitor, inputs, made_of=made_of)


def store(monitor: Recording, inputs: Inputs, told: Mapping[str, Told] = NOTHING, *, made_of: Placement | None = None) -> None:
    """Adds one observation to the buffer; of DTensors what this rank holds.

    Args:
        told: what a graph told of the tensors, by path.
        made_of: the placement of what callables got, if there are any.
    """
    plain_only = all(type(x) is Tensor for xs in inputs.values() for x in xs)
    if told or made_of is not None or not plain_only or monitor.buffer.places or in_use():
        note_places(monitor, {path: told.get(path) or seen(xs) for path, xs in inputs.items()}, made_of)
        inputs = inputs if plain_only else {path: tuple(map(plain, xs)) for path, xs in inputs.items()}
    monitor.buffer.add(inputs)


def store_lifts(monitor: Recording, layout: str, packs: list[Tensor], told: Mapping[str, Told]) -> None:
    """Adds one observation that a compiled graph lifted to the buffer."""
    if monitor.buffer.places or in_use() or any(leaf.axes is None for leaf in told.values()):
        note_places(monitor, told)
    monitor.buffer.add_lifts(layout, packs)


def add_alone(monitor: Recording, x: Any) -> bool:
    """Adds `x`, which passed the gate, to the pending observations if they accept it; returns whether they did."""
    buffer = monitor.buffer
    if not buffer.stored.pending or type(x) is not Tensor or not monitor._may_wait or is_compiling():
        return False
    try:
        with buffer.lock:
            full = buffer.add_alone(x)
            if full:
                buffer.flush()
    except Exception as error:
        monitor._fail(error, None, (x,))
        return True
    if full:
        report_failures(monitor)
    return full is not None


def add_at_once(monitor: Recording, x: Any) -> bool:
    """The same for a monitor whose gate asks for nothing but steps, as most on small layers do: counts the call, too."""
    gate = monitor.gate
    if not (gate.active and gate.on) or capturing() or graph_task() != -1 or (CAPTURES and CAPTURES[0]()):
        return False
    if not add_alone(monitor, x):
        return False
    monitor.counts["calls"] = monitor.counts.get("calls", 0) + 1
    return True


def reduce_at_once(monitor: Recording, module: nn.Module, x: Any, *others: Any) -> bool:
    """Records `x`, which `add_at_once` refused, if it is a plain tensor that is reduced as it is; returns whether it was recorded.

    Each is one of many small costs on the usual way: the gate that asks for nothing, operands that are not mapped, several leaves.

    Args:
        others: the other operands, for messages.
    """
    gate, buffer = monitor.gate, monitor.buffer
    if not (gate.active and gate.on) or capturing() or graph_task() != -1 or is_compiling() or monitor.dry_run or monitor.doubtful:
        return False
    if type(x) is not Tensor or not monitor._may_wait or not is_plain_moment(x) or x.is_meta or x.is_quantized:
        return False
    if buffer.places or in_use() or (CAPTURES and CAPTURES[0]()):
        return False
    monitor.counts["calls"] = monitor.counts.get("calls", 0) + 1
    work(monitor, module, (x, *others), buffer.add, {"": (x.detach(),)})
    return True


def check_numbers(tensors: Iterable[Tensor]) -> None:
    """Raises `NothingToRecordError` if one of the tensors holds no numbers, as while a program is traced."""
    if reason := why_no_numbers(tensors):
        raise NothingToRecordError(reason)


def reducer_inputs(monitor: Recording, operands: tuple[Any, ...]) -> Inputs:
    """What the reducer gets: what `map_` or `op_` makes of the operands, or the monitor's default; by leaf path.

    Raises:
        NothingToRecordError: that is None, or holds no numbers.
        OperandError: `map_` returned no tuple of tensors, or there is no tensor at all.
    """
    if monitor.map_ is not None:
        mapped = call(monitor.map_, operands, monitor)
        if not isinstance(mapped, tuple) or not all(isinstance(x, Tensor) for x in mapped):
            raise OperandError(f"map_ must return a tuple of tensors, such as (x,); it returned {type(mapped).__name__}")
        return {"": tuple(plain_or_spread(x) for x in mapped)}
    value = monitor._default(*operands) if monitor.op_ is None else as_operands(call(monitor.op_, operands, monitor))
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
    if len(tensors) > 1 and monitor.patterns:
        tensors = _fitting(monitor, tensors)
    return {path: (plain_or_spread(tensor),) for path, tensor in tensors.items()}


def _fitting(monitor: Recording, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """The leaves but for numbers (0-d) if the reducer keeps axes; all if there are only numbers, so that the error says it.

    A model of Hugging Face returns its loss, which has no channels, beside its logits, which have. Other leaves that do not fit the
    pattern are an error, as a single tensor would be.
    """
    found = {path: x for path, x in tensors.items() if x.ndim or all(fits(pattern, 0) for pattern in monitor.patterns)}
    if not found or len(found) == len(tensors):
        return tensors
    if not (monitor.dry_run or is_compiling()):
        for path in tensors.keys() - found.keys():
            monitor._skip(f"leaf {path!r}: it is a number, and the pattern keeps an axis")
    return found


def with_given(monitor: Recording, inputs: Mapping[str, tuple[Tensor, ...]]) -> Inputs:
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
