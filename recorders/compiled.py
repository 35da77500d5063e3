"""Inside the user's compiled graphs: observations are lifted there, and join the State outside, by an operator of our own.

No State is in a graph. Were one rebound in it, each leaf would need a second graph, for there is nothing to join at the first call,
and a hook on a gradient may rebind nothing at all. Were it written in place, two forwards before their backwards would end in an
error in the user's program: a graph saves what its backward writes into, and finds it changed by the first of the two. So the graph
hands each lift, which it fuses with what made the activation, to an operator that runs as plain Python: states join and are bound
as in eager mode, in memory of their own, which no graph reuses.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any, Protocol
from weakref import WeakValueDictionary

import torch
from torch import Tensor
from torch._higher_order_ops.effects import _EffectType, _register_effectful_op

from recorders.operands import NoAutocast, NoInference
from reducers import Reducer, State

__all__ = ["enrol", "hand_over", "unpacked"]

_NEXT = "\x1f"


class _Taker(Protocol):
    """What a graph hands its lifts to."""

    def take(self, layout: str, packs: list[Tensor], stream: str) -> None:
        """One observation, lifted: the State of it alone for each of its leaves, packed."""


_numbers = itertools.count()
_takers: WeakValueDictionary[str, _Taker] = WeakValueDictionary()


def enrol(taker: _Taker) -> str:
    """The name under which a graph knows `taker`: a string, because a graph may make a variable of a number."""
    name = str(next(_numbers))
    _takers[name] = taker
    return name


def hand_over(name: str, reducer: Reducer, inputs: Mapping[str, tuple[Tensor, ...]], stream: str) -> None:
    """Called while a graph is traced: lifts by leaf path, and a call of the operator that takes all of them at once.

    By the laws of reducers a lift is an update of the empty state. What is empty has no lift; the tensor itself stands for it.
    Tensors of one dtype and shape go as one, which the compiler makes of them where it computes them: there are fewer to copy.
    """
    packs: list[list[Tensor]] = []
    layout = ""
    for path, xs in inputs.items():
        for key, value in (reducer.update({}, *xs) or {"": xs[0]}).items():
            index = 0
            for pack in packs:
                if pack[0].dtype == value.dtype and pack[0].shape == value.shape:
                    break
                index += 1
            if index == len(packs):
                packs.append([])
            layout += f"{path}{_NEXT}{key}{_NEXT}{index}{_NEXT}{len(packs[index])}{_NEXT}"
            packs[index].append(value)
    torch.ops.torch_recorders.take(name, stream, layout, [torch.stack(pack) for pack in packs])


@lru_cache(maxsize=4096)
def columns(layout: str) -> tuple[tuple[str, str, int, int], ...]:
    """Leaf path, key, pack and place in it, of each tensor that a graph hands over."""
    parts = layout.split(_NEXT)
    return tuple(
        (path, key, int(pack), int(place)) for path, key, pack, place in zip(*(parts[i::4] for i in range(4)), strict=False)
    )


def unpacked(layout: str, packs: Sequence[Tensor], dim: int = 0) -> dict[str, State]:
    """By leaf path the State of an observation, as views of the packs; with `dim=1` of several, which are stacked."""
    lifted: dict[str, State] = {}
    for path, key, pack, place in columns(layout):
        state = lifted.setdefault(path, {})
        if key:
            state[key] = packs[pack].select(dim, place)
    return lifted


def _take(name: str, stream: str, layout: str, packs: list[Tensor]) -> None:
    taker = _takers.get(name)
    if taker is None:  # a graph may outlive the monitor
        return
    with NoInference(False), NoAutocast():
        torch._C._set_grad_enabled(False)
        taker.take(layout, packs, stream)


_library: Any = torch.library.Library("torch_recorders", "DEF")  # type: ignore[no-untyped-call]
# replaying kernels would pass the operator by, so CUDA graphs end before it
_library.define("take(str name, str stream, str layout, Tensor[] packs) -> ()", tags=(torch.Tag.cudagraph_unsafe,))
_library.impl("take", _take, "CompositeExplicitAutograd")
_library._register_fake("take", lambda *_: None)
# without an effect it would be removed, for it returns nothing; ordered, for some statistics depend on what came first
_register_effectful_op(torch.ops.torch_recorders.take.default, _EffectType.ORDERED)
