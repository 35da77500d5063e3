"""What is asked of `torch.compile` while it traces a program, and of what it has compiled. See `recorders/_torch/__init__.py`."""

from __future__ import annotations

from types import CodeType
from typing import Any

from torch._dynamo.comptime import ComptimeContext

__all__ = ["keep_in_traced_call", "restore_in_traced_call"]


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
