"""Where a tensor that is met while a graph is traced comes from, and whether it was met before."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from recorders._torch import ComptimeContext, comptime

__all__ = ["first_sight", "origin_of"]

_sighted: Any = WeakIdKeyDictionary()


def first_sight(tensor: Tensor, receiver: Tensor) -> bool:
    """Whether this receiver has no hook yet on this version of a traced tensor. The record is freed with the traced tensors."""
    versions = _sighted.setdefault(tensor, WeakIdKeyDictionary())
    if versions.get(receiver) == tensor._version:
        return False
    versions[receiver] = tensor._version
    return True


class _Answer:
    """The last answer of Dynamo, which works for one thread at a time."""

    origin = ""


def _in_reach(node: torch.fx.Node, context: ComptimeContext) -> bool:
    """Whether the code that is traced now is part of the graph of `node`, or of a checkpoint in that graph."""
    tracer: Any = context._i_will_not_complain_if_bc_breaks_InstructionTranslator().output.current_tracer
    while tracer.graph is not node.graph and tracer.source_target is torch.ops.higher_order.tag_activation_checkpoint:
        tracer = tracer.parent
    return tracer.graph is node.graph


def _ask(context: ComptimeContext) -> None:
    tensor, receiver = context.get_local("tensor"), context.get_local("receiver")
    node: Any = tensor.as_proxy().node  # type: ignore[union-attr]
    if node.op != "placeholder" and _in_reach(node, context):
        _Answer.origin = "made here"
    else:
        fake: Any = tensor.as_fake()
        tracer: Any = context._i_will_not_complain_if_bc_breaks_InstructionTranslator().output.current_tracer
        given = "given" if tracer.parent is None else "given within"
        _Answer.origin = given if first_sight(fake, receiver.as_fake()) else "hooked"  # type: ignore[arg-type]


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def _answer() -> str:
    return _Answer.origin


def origin_of(tensor: Tensor, receiver: Tensor) -> str:
    """Called while a graph is traced: where a tensor comes from.

    Returns:
        "made here"; "given" if it is an input of the graph, "given within" if that is seen within a checkpoint; "hooked" if it has
        a hook.
    """
    comptime(_ask)
    origin: str = _answer()
    return origin
