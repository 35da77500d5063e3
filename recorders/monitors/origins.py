"""Where a tensor that is met while a graph is traced comes from, and whether it was met before."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from recorders._torch import compiler
from reducers._torch import constant_in_graphs

__all__ = ["first_sight", "origin_of"]

_sighted: Any = WeakIdKeyDictionary()


def first_sight(tensor: Tensor, sink: Tensor) -> bool:
    """Whether this sink has no hook yet on this version of a traced tensor. The record is freed with the traced tensors."""
    versions = _sighted.setdefault(tensor, WeakIdKeyDictionary())
    if versions.get(sink) == tensor._version:
        return False
    versions[sink] = tensor._version
    return True


class _Answer:
    """The last answer of Dynamo, which works for one thread at a time."""

    origin = ""


def _ask(context: Any) -> None:
    tensor, sink = context.get_local("tensor"), context.get_local("sink")
    node: Any = tensor.as_proxy().node
    _Answer.origin = "unknown"
    with compiler.told_if_missing():
        if node.op != "placeholder" and compiler.is_node_in_reach(context, node):
            _Answer.origin = "made here"
        else:
            given = "given within" if compiler.is_nested(context) else "given"
            _Answer.origin = given if first_sight(tensor.as_fake(), sink.as_fake()) else "hooked"


@constant_in_graphs
def _answer() -> str:
    return _Answer.origin


def origin_of(tensor: Tensor, sink: Tensor) -> str:
    """Called while a graph is traced: where a tensor comes from.

    Returns:
        "made here"; "given" if it is an input of the graph, "given within" if that is seen within a checkpoint; "hooked" if it has
        a hook; "unknown" if this torch does not tell.
    """
    compiler.comptime(_ask)
    origin: str = _answer()
    return origin
