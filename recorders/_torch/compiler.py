"""What is asked of `torch.compile`: before it traces a program, while it does, and of what it has compiled.

Nothing here imports Dynamo. What asks it of something does so when a program is traced, or if Dynamo is imported; what it must know
before is told by `reducers._torch.when_dynamo_is_imported`. See `needs.py` for what happens if a private API is gone.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import wraps
from types import CodeType
from typing import Any

from torch import fx, nn

from recorders._torch import MODES_STAY, warn_of_missing
from reducers._torch import (
    MissingInTorchError,
    constant_in_graphs,
    dynamo_is_imported,
    or_else,
    reach,
    tell_dynamo,
    when_dynamo_is_imported,
)


def comptime(call: Callable[[Any], None]) -> None:
    """Calls `call` with what Dynamo knows, while it traces the caller. Call it as an attribute of this module."""
    raise RuntimeError("this torch has no torch._dynamo.comptime")  # a traced hook catches it, and reports a failure


def _break() -> None:
    raise RuntimeError("this torch has no torch._dynamo.graph_break")  # `must_be_one_graph` lets nobody come here


# Dynamo knows its own functions, and what it finds by their names here.
when_dynamo_is_imported(lambda: globals().update(comptime=reach("torch._dynamo.comptime.comptime")))
when_dynamo_is_imported(lambda: globals().update(_break=reach("torch._dynamo.graph_break")))


def has_compiled() -> bool:
    """Whether `torch.compile` has looked at any program in this process."""
    if not dynamo_is_imported():
        return False
    counters = or_else("torch._dynamo.utils.counters", None)
    return counters is None or bool(counters["frames"])


def run_of_node(target: Any) -> tuple[fx.Interpreter | None, bool]:
    """The run of an FX graph of which a node calls `target` now, as AOT does, and whether no later node of the graph calls it.

    The run is None if there is none: in a backward, and if a graph runs as Python code.
    """
    frame = sys._getframe(1)
    while frame is not None:
        if frame.f_code.co_name == "run_node":
            run, node = frame.f_locals.get("self"), frame.f_locals.get("n")
            if isinstance(run, fx.Interpreter) and isinstance(node, fx.Node):
                return (run, _is_last(node)) if node.target is target else (None, False)
        frame = frame.f_back  # type: ignore[assignment]
    return None, False


def _is_last(node: fx.Node) -> bool:
    later = node.next
    while later.op != "root":
        if later.target is node.target:
            return False
        later = later.next
    return True


_not_effectful: list[str] = []


def make_effectful(operator: Any) -> None:
    """Keep `operator`, which returns nothing, in compiled graphs, in its order: a graph drops what has no effect."""
    try:
        register = reach("torch._higher_order_ops.effects._register_effectful_op")
        register(operator, reach("torch._higher_order_ops.effects._EffectType").ORDERED)
    except MissingInTorchError as error:
        _not_effectful.append(str(error))


def keep_graphs_with(functions: Mapping[str, str]) -> None:
    """Let the compiler keep graphs on disk that call these functions, by full name, each with a text of what it does now."""
    try:
        config = reach("torch._inductor.config")
        config.unsafe_marked_cacheable_functions = {**config.unsafe_marked_cacheable_functions, **functions}
    except (MissingInTorchError, AttributeError):
        return  # they are compiled anew in each process


def why_no_graphs() -> str:
    """Why nothing is recorded inside compiled graphs; "" if it is."""
    return _not_effectful[0] if _not_effectful else MODES_STAY


def _set_strategy(code: CodeType, outside: str, inside: str) -> None:
    try:
        action = reach("torch._C._dynamo.eval_frame._FrameAction")
        strategy = reach("torch._C._dynamo.eval_frame._FrameExecStrategy")(getattr(action, outside), getattr(action, inside))
        reach("torch._C._dynamo.eval_frame.set_code_exec_strategy")(code, strategy)
    except MissingInTorchError:
        return


def never_trace(function: Callable[..., Any]) -> None:
    """Run `function`, and all that it calls, as plain Python if it is called outside of a graph while Dynamo is on.

    If a frame that is being traced calls it, Dynamo traces it all the same.
    """
    _set_strategy(function.__code__, "SKIP", "SKIP")


def never_trace_what_it_defines(function: Callable[..., Any]) -> None:
    """As `never_trace`, for the functions that are defined within `function`."""
    for constant in function.__code__.co_consts:
        if isinstance(constant, CodeType):
            _set_strategy(constant, "SKIP", "SKIP")


def skip_frames(code: CodeType | None, skip: bool) -> None:
    """Run calls of `code` as plain Python, or as usual again. Dynamo sees the functions that it calls in either case."""
    if code is not None:
        _set_strategy(code, "SKIP" if skip else "DEFAULT", "DEFAULT")


def compile_always(function: Any) -> None:
    """Trace `function`, or the one that it wraps in the end, as if it had been given to `torch.compile` itself.

    Dynamo leaves frames alone that show no tensors at their start, unless they are the function that the user compiles.
    """
    function = inspect.unwrap(function)
    if inspect.isfunction(function):
        when_dynamo_is_imported(lambda: _compile_always(function.__code__))


def _compile_always(code: CodeType) -> None:
    reach("torch._dynamo.eval_frame.always_optimize_code_objects")[code] = True


def break_graph() -> bool:
    """Called while Dynamo traces: end the graph here; return False if the user demands one graph (`fullgraph=True`)."""
    if must_be_one_graph():
        return False
    _break()
    return True


@constant_in_graphs
def must_be_one_graph() -> bool:
    """Whether the user demands one graph of the frame that is being traced."""
    try:
        reach("torch._dynamo.graph_break")
        tracer = reach("torch._dynamo.symbolic_convert.InstructionTranslator").current_tx()
        return bool(tracer.one_graph or tracer.error_on_graph_break)
    except (MissingInTorchError, AttributeError):
        return True  # then no graph is broken that must not be


def keep_in_traced_call(context: Any, name: str, owner: str, callee: CodeType) -> None:
    """Keeps the local variable `name` of the code that is traced, until the traced call ends that called `callee`.

    It is kept with Dynamo's record of that call, and freed with it, however the call ends. What is put into an object from outside
    of the graph, such as a list, is put there again in each call of the graph, and stays there if the traced code raises.

    Args:
        owner: the name of a local variable, a tensor; each tensor has a value of its own.
        callee: what the call calls, perhaps through other functions, to get to the code that is traced.
    """
    with told_if_missing():
        here, call = _translators(context, callee)
        vars(call).setdefault(_KEPT, {})[id(context.get_local(owner).as_fake())] = here.symbolic_locals[name]


def restore_in_traced_call(context: Any, name: str, owner: str, callee: CodeType) -> None:
    """Sets the local variable `name` to what was kept in this call, and keeps it no longer; leaves it if nothing was kept."""
    with told_if_missing():
        here, call = _translators(context, callee)
        kept = vars(call).get(_KEPT, {}).pop(id(context.get_local(owner).as_fake()), None)
        if kept is not None:
            here.symbolic_locals[name] = kept


def _translator(context: Any) -> Any:
    name = "torch._dynamo.comptime.ComptimeContext._i_will_not_complain_if_bc_breaks_InstructionTranslator"
    return reach(name)(context)


_KEPT = "kept by torch_recorders"


def _translators(context: Any, callee: CodeType) -> tuple[Any, Any]:
    """What Dynamo traces now, and the call around it that calls `callee`."""
    here: Any = _translator(context)
    call = here
    while call.f_code is not callee:
        call = call.parent
    return here, call.parent


@contextmanager
def told_if_missing() -> Iterator[None]:
    """Ends a block in which a private API is missing, and tells of it."""
    try:
        yield
    except MissingInTorchError:
        warn_of_missing()


def is_node_in_reach(context: Any, node: fx.Node) -> bool:
    """Whether the code that is traced now is part of the graph of `node`, or of a checkpoint in that graph."""
    tracer, checkpoint = _tracer(context), or_else("torch.ops.higher_order.tag_activation_checkpoint", None)
    while tracer.graph is not node.graph and checkpoint is not None and tracer.source_target is checkpoint:
        tracer = tracer.parent
    return bool(tracer.graph is node.graph)


def is_nested(context: Any) -> bool:
    """Whether the code that is traced now is part of a graph within another one, such as that of a checkpoint."""
    return _tracer(context).parent is not None


def _tracer(context: Any) -> Any:
    return reach("torch._dynamo.output_graph.OutputGraph.current_tracer").__get__(_translator(context).output)


def drop_graphs(wanted: Callable[[type, type | None], bool]) -> bool | None:
    """Drops the code that the compiler made of programs with certain modules, so that their next call compiles them anew.

    The compiler guards the type of each module that it traces. So it tells which programs these are; all graphs of one function go.

    Args:
        wanted: is called with the class of a module in a program, and that of the module in which it is, None if it is in none.

    Returns:
        None if there was no such code, or this torch cannot tell, of which there is a warning; otherwise whether it was dropped. It
        is not if the user forbids to compile anew.
    """
    if not dynamo_is_imported():
        return None
    try:
        seen = reach("torch._dynamo.convert_frame.input_codes").seen
        entries = reach("torch._C._dynamo.eval_frame._debug_get_cache_entry_list")
        codes = [code for weak in list(seen) if (code := weak()) is not None]
        found = [code for code in codes if any(_has(entry, wanted) for entry in entries(code))]
        if not found:
            return None
        if reach("torch._dynamo.eval_frame._stance").stance == "fail_on_recompile":
            return False
        reset = reach("torch._C._dynamo.eval_frame.reset_code")
        with reach("torch._dynamo.convert_frame.compile_lock"):
            for code in found:
                reset(code)
    except MissingInTorchError:
        warn_of_missing()
        return None
    except AttributeError:
        return False
    return True


def _has(entry: Any, wanted: Callable[[type, type | None], bool]) -> bool:
    kinds = dict(_guarded(entry.guard_manager.root))
    for source, kind in kinds.items():
        if isinstance(kind, type) and issubclass(kind, nn.Module):
            around = kinds.get(source.rpartition("._modules[")[0])
            if wanted(kind, around):
                return True
    return False


def _guarded(manager: Any) -> Iterator[tuple[str, Any]]:
    """What is guarded: where it is found, and its type."""
    yield manager.get_source(), manager.get_type_of_guarded_value()
    for child in manager.get_child_managers():
        yield from _guarded(child)
    if hasattr(manager, "get_key_value_managers"):
        for _, value in manager.get_key_value_managers().values():
            if value is not None:
                yield from _guarded(value)


def guard_absent_hooks(wanted: Callable[[nn.Module, str], bool]) -> None:
    """Lets the compiler guard that a module has no hooks if `wanted(module, "_forward_hooks")`, and the same for pre-hooks.

    It guards no absent hooks otherwise. Modules of one class may share a graph. If one of them has hooks and another has none,
    the graph made for the one without would be run for the other, too. The setting `skip_nnmodule_hook_guards` would guard the
    absent hooks of all modules, in each call.
    """
    when_dynamo_is_imported(lambda: _guard_absent_hooks(wanted))


def _guard_absent_hooks(wanted: Callable[[nn.Module, str], bool]) -> None:
    usual = reach("torch._dynamo.guards.GuardBuilder.EMPTY_NN_MODULE_HOOKS_DICT")

    @wraps(usual)
    def guard_if_wanted(builder: Any, guard: Any) -> None:
        kind = guard.name.rpartition(".")[2]
        asked = kind in ("_forward_hooks", "_forward_pre_hooks")
        if asked and wanted(builder.get(guard.originating_source.base), kind):
            builder.SEQUENCE_LENGTH(guard)
        else:
            usual(builder, guard)

    reach("torch._dynamo.guards.GuardBuilder").EMPTY_NN_MODULE_HOOKS_DICT = guard_if_wanted


class _Callbacks(list[Any]):
    """Callbacks of the compiler. `torch._dynamo.reset()` clears the list; ours stay in it."""

    def clear(self) -> None:
        self[:] = [callback for callback in self if getattr(callback, "__module__", "") == __name__]


_installers: dict[Callable[[], object], Callable[[], bool]] = {}


def before_compiling(call: Callable[[], object]) -> bool:
    """Calls `call()` before Dynamo looks at a program, from now on.

    Returns:
        False if this torch cannot tell: then `call` was called if Dynamo is imported, and is called as soon as it is.
    """
    install = _installers.get(call)
    if install is None:
        install = _installers[call] = _installer(call)
        when_dynamo_is_imported(lambda: install() or call())
    if not dynamo_is_imported():
        return True
    tell_dynamo()
    return install()


def _installer(call: Callable[[], object]) -> Callable[[], bool]:
    """A function that puts the callback in place, if it is not; it returns False if this torch has no place for it."""

    def callback(found: Any) -> None:
        triggers = or_else("torch._dynamo.callback.CallbackTrigger", None)
        if triggers is None or found.callback_trigger is triggers.DYNAMO:
            call()

    def install() -> bool:
        handler = or_else("torch._dynamo.callback.callback_handler", None)
        if handler is not None and callback not in handler.start_callbacks:
            # If a function that was compiled calls `backward`, Dynamo is on when that is compiled in turn. It would trace the
            # callback, and for that wait for the lock that it holds while callbacks run.
            never_trace(callback)
            handler.start_callbacks = _Callbacks([*handler.start_callbacks, callback])
        return handler is not None

    return install
