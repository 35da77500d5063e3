"""Sites: where a monitor looks. Each puts hooks on a module, and says what a graph records while one of them is traced."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn

from recorders._torch import compiler
from recorders.capture.calls import Call, keep_for_end, keep_traced, restore_traced, take_kept
from recorders.capture.context import as_monitor
from recorders.capture.hooks import Hook
from recorders.capture.operands import mapped, pack, tracing
from recorders.capture.renewal import hooks_are_on
from recorders.graphs.trace import emit_call
from recorders.monitors.gradient_hooks import attach_to_inputs, attach_to_outputs, trace_watch
from recorders.monitors.graphs import in_due_step, trace, wanted_in_graph
from recorders.monitors.record import Observer, checked_operands
from recorders.schedule.steps import StepHandle
from reducers.errors import did_you_mean


def check_sites(kind: Any) -> None:
    """Raises `TypeError` if a kind of monitor declares a site that does not exist, or puts hooks on by itself."""
    sites, here = kind.sites, f"{kind.__name__}.sites = {kind.sites!r}"
    if not isinstance(sites, tuple) or len(sites) > 1:
        raise TypeError(f"{here}: a tuple of one site, such as ('forward',), because a state is of one kind of observation")
    for site in sites:
        if site not in SITES:
            raise TypeError(f"{here}: there is no such site; {did_you_mean(str(site), list(SITES))}there are {list(SITES)}")
    if "step" in sites and kind.subject != "parameters":
        raise TypeError(f"{here}: derive from a kind that reads parameters, such as ParameterMonitor or ParameterGradientMonitor")
    if "_attach" in vars(kind) and not kind.__module__.startswith("recorders."):
        raise TypeError(
            f"{kind.__name__}._attach: hooks that a kind puts on by itself record nothing in compiled graphs, and twice under "
            f"activation checkpointing; declare sites, one of {list(SITES)}, and override operands(call)"
        )


def copied(tensor: Tensor) -> Tensor:
    """A copy of a tensor, without its autograd graph."""
    return tensor.detach().clone()


def _attach_after(monitor: Any, module: nn.Module) -> list[Any]:
    # A graph guards that a hook gets keyword arguments, in each call; if nobody needs the inputs, these may lack them.
    needs_inputs = not monitor.of_module and (monitor.has_callables or not monitor.as_seen)
    hook = monitor._hook(monitor._after, "forward")
    return [module.register_forward_hook(hook, prepend=monitor.prepend, with_kwargs=needs_inputs)]


def _attach_before(monitor: Any, module: nn.Module) -> list[Any]:
    hook = monitor._hook(monitor._before, "forward_pre")
    return [module.register_forward_pre_hook(hook, prepend=monitor.prepend, with_kwargs=not monitor.of_module)]


# Around a forward: what is there before it is copied, and kept until it ends


def _attach_around(monitor: Any, module: nn.Module) -> list[Any]:
    before = monitor._hook(partial(_keep, monitor), "before")
    after = monitor._hook(partial(_compare, monitor), "after")
    return [
        module.register_forward_pre_hook(before, prepend=monitor.prepend, with_kwargs=not monitor.of_module),
        module.register_forward_hook(after, prepend=monitor.prepend, with_kwargs=not monitor.of_module),
    ]


def _keep(monitor: Any, module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any] = MappingProxyType({})) -> None:
    """Keeps a copy, if the call is recorded: that is decided now, unless there is a `condition`, which may look at the call."""
    gate = monitor.gate
    if tracing() or not gate.on:
        return
    if not gate.active:
        monitor._skip("not in its steps")
        return
    if not monitor._passes(module, ask=gate.condition is None):
        return
    copies: tuple[Any, ...] = ()
    if gate.records_in(monitor._training(module)):
        try:
            copies = (as_monitor(_copy, monitor, Call("around_forward", module, args, kwargs)),)
        except Exception as error:  # a property may raise anything
            monitor._fail(error, module, ())
            return
    keep_for_end(monitor, (copies,))


def _copy(monitor: Any, call: Call) -> Any:
    return mapped(monitor.watched(call), copied)


def _compare(monitor: Any, module: nn.Module, args: tuple[Any, ...], *rest: Any) -> None:
    found = take_kept(monitor)
    if found is None:  # the call is not recorded, or the monitor was put on during the call, or reading failed
        return
    (before,) = found
    gate = monitor.gate
    if not (gate.on and gate.active) or (gate.condition is not None and not monitor._due(module, monitor._training(module))):
        return
    if not before:
        monitor._skip("its mode changed during the call")
        return
    monitor._see(Call("around_forward", module, args, rest[0] if len(rest) == 2 else {}, rest[-1], before=before[0]))


def _attach_to_both(monitor: Any, module: nn.Module) -> list[Any]:
    other = monitor.other_module(module)
    handles = [
        place.register_forward_hook(
            Hook(partial(monitor._arrive, side), _PAIRED[side], monitor.sink.tensor, monitor._fail), prepend=monitor.prepend
        )
        for side, place in (("mine", module), ("other", other))
    ]
    hooks_are_on(other)
    return handles


def _trace_mine(sink: Tensor, module: nn.Module, *args: Any) -> None:
    if not tracing():
        emit_call(sink, args[-1:], "mine")


def _trace_other(sink: Tensor, module: nn.Module, *args: Any) -> None:
    if not tracing():
        emit_call(sink, args[-1:], "other")


_PAIRED = {"mine": _trace_mine, "other": _trace_other}

SITES: Mapping[str, Callable[[Any, nn.Module], list[Any]]] = {
    "forward": _attach_after,
    "forward_pre": _attach_before,
    "around_forward": _attach_around,
    "output_gradient": attach_to_outputs,
    "input_gradient": attach_to_inputs,
    "forwards_of_two": _attach_to_both,
    "step": lambda monitor, module: [StepHandle(module, monitor)],
}
"""What puts the hooks of a site on a module, and returns their handles, by the name by which kinds of monitors declare it."""

GRADIENTS = ("output_gradient", "input_gradient")


# While a graph is traced


def trace_hook(spec: Observer, hook: str, sink: Tensor, module: nn.Module, args: tuple[Any, ...], *rest: Any) -> None:
    """Called while a graph is traced, in place of a hook: adds what the hook would record to the graph.

    Args:
        spec: what the graph knows of the monitor; see `TraceSpec`.
        hook: which of the hooks of the site it is.
        sink: tells the monitors of a spec apart.
    """
    if hook == "forward_pre":
        if wanted_in_graph(spec, module):
            _trace_call(spec, sink, Call("forward_pre", module, args, rest[0] if rest else {}))
    elif hook == "before":
        if not tracing() and in_due_step(spec) and wanted_in_graph(spec, module):
            _keep_in_graph(spec, sink, Call("around_forward", module, args, rest[0] if rest else {}))
    elif hook == "input_gradient":
        trace_watch(spec, sink, module, pack(args, rest[0] if rest else {}))
    elif hook == "output_gradient":
        trace_watch(spec, sink, module, rest[-1])
    else:
        kwargs, output = (rest[0], rest[1]) if len(rest) == 2 else ({}, rest[-1])  # code that moves hooks drops keyword arguments
        if hook == "after":
            _compare_in_graph(spec, sink, module, args, kwargs, output)
        elif wanted_in_graph(spec, module):
            _trace_call(spec, sink, Call("forward", module, args, kwargs, output))


def _keep_in_graph(spec: Any, sink: Tensor, call: Call) -> None:
    value = (mapped(spec.watched(call), copied),)  # noqa: F841  # the next line reads it
    compiler.comptime(keep_traced)


def _compare_in_graph(
    spec: Any, sink: Tensor, module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any], output: Any
) -> None:
    value: tuple[Any] | None = None
    compiler.comptime(restore_traced)
    if value is not None and wanted_in_graph(spec, module):
        _trace_call(spec, sink, Call("around_forward", module, args, kwargs, output, before=value[0]))


def _trace_call(spec: Observer, sink: Tensor, call: Call) -> None:
    if spec.as_seen:  # each method of the spec that is looked up here is guarded
        trace(spec, sink, call.seen)
        return
    for path, part in spec._parts(call):
        if spec.of_module:
            operands = checked_operands(spec, spec.operands(part))
        else:  # computed as in eager mode: without gradients, and in full precision
            with torch.no_grad(), torch.autocast("cpu", enabled=False), torch.autocast("cuda", enabled=False):
                operands = checked_operands(spec, spec.operands(part))
        trace(spec, sink, operands, path)
