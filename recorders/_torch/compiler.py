"""What is asked of `torch.compile` while it traces a program, and of what it has compiled. See `recorders/_torch/__init__.py`."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import wraps
from types import CodeType
from typing import Any

from torch import nn
from torch._dynamo.comptime import ComptimeContext

__all__ = ["drop_graphs", "guard_absent_hooks", "keep_in_traced_call", "restore_in_traced_call"]


def keep_in_traced_call(context: ComptimeContext, name: str, owner: str, callee: CodeType) -> None:
    """Keeps the local variable `name` of the code that is traced, until the traced call ends that called `callee`.

    It is kept with Dynamo's record of that call, and freed with it, however the call ends. What is put into an object from outside
    of the graph, such as a list, is put there again in each call of the graph, and stays there if the traced code raises.

    Args:
        owner: the name of a local variable, a tensor; each tensor has a value of its own.
        callee: what the call calls, perhaps through other functions, to get to the code that is traced.
    """
    here, call = _translators(context, callee)
    vars(call).setdefault(_KEPT, {})[id(context.get_local(owner).as_fake())] = here.symbolic_locals[name]


def restore_in_traced_call(context: ComptimeContext, name: str, owner: str, callee: CodeType) -> None:
    """Sets the local variable `name` to what was kept in this call, and keeps it no longer; leaves it if nothing was kept."""
    here, call = _translators(context, callee)
    kept = vars(call).get(_KEPT, {}).pop(id(context.get_local(owner).as_fake()), None)
    if kept is not None:
        here.symbolic_locals[name] = kept


_KEPT = "_kept_by_torch_recorders"


def _translators(context: ComptimeContext, callee: CodeType) -> tuple[Any, Any]:
    """What Dynamo traces now, and the call around it that calls `callee`."""
    here: Any = context._i_will_not_complain_if_bc_breaks_InstructionTranslator()
    call = here
    while call.f_code is not callee:
        call = call.parent
    return here, call.parent


def drop_graphs(wanted: Callable[[type, type | None], bool]) -> bool | None:
    """Drops the code that the compiler made of programs with certain modules, so that their next call compiles them anew.

    The compiler guards the type of each module that it traces. So it tells which programs these are; all graphs of one function go.

    Args:
        wanted: is called with the class of a module in a program, and that of the module in which it is, None if it is in none.

    Returns:
        None if there was no such code; whether it was dropped. It is not if the user forbids to compile anew, or the compiler has
        no such functions; without these all programs are taken for affected.
    """
    try:
        from torch._C._dynamo.eval_frame import _debug_get_cache_entry_list, reset_code
        from torch._dynamo import convert_frame, eval_frame

        codes = [code for weak in list(convert_frame.input_codes.seen) if (code := weak()) is not None]
        found = [code for code in codes if any(_has(entry, wanted) for entry in _debug_get_cache_entry_list(code))]
        if not found:
            return None
        if eval_frame._stance.stance == "fail_on_recompile":
            return False
        with convert_frame.compile_lock:
            for code in found:
                reset_code(code)
    except (ImportError, AttributeError):
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
    try:
        from torch._dynamo.guards import GuardBuilder

        usual = GuardBuilder.EMPTY_NN_MODULE_HOOKS_DICT
    except (ImportError, AttributeError):  # then only graphs of modules of one class that are compiled apart from each other differ
        return
    if getattr(usual, "asks", None) is not None:
        return

    @wraps(usual)
    def guard_if_wanted(builder: Any, guard: Any) -> None:
        kind = guard.name.rpartition(".")[2]
        if kind in ("_forward_hooks", "_forward_pre_hooks") and wanted(builder.get(guard.originating_source.base), kind):
            builder.SEQUENCE_LENGTH(guard)
        else:
            usual(builder, guard)

    guard_if_wanted.asks = wanted  # type: ignore[attr-defined]
    GuardBuilder.EMPTY_NN_MODULE_HOOKS_DICT = guard_if_wanted  # type: ignore[method-assign]
