"""Inside the user's compiled graphs: observations are lifted there, and join the State outside, by an operator of our own.

No State is in a graph. Were one rebound in it, each leaf would need a second graph, for there is nothing to join at the first call,
and a hook on a gradient may rebind nothing at all. Were it written in place, two forwards before their backwards would end in an
error in the user's program: a graph saves what its backward writes into, and finds it changed by the first of the two. So the graph
hands each lift, which it fuses with what made the activation, to an operator that runs as plain Python: states join and are bound
as in eager mode, in memory of their own, which no graph reuses.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from typing import Any, Protocol
from weakref import WeakValueDictionary

import torch
from torch import Tensor
from torch._higher_order_ops.effects import _EffectType, _register_effectful_op

from recorders.operands import NoAutocast, NoInference
from reducers import Reducer, State

__all__ = ["enrol", "hand_over"]


class _Taker(Protocol):
    """What a graph hands its lifts to."""

    def take(self, lifted: dict[str, State], stream: str) -> None:
        """One observation, lifted: by leaf path the State of it alone."""


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
    """
    paths, keys, values = [], [], []
    for path, xs in inputs.items():
        for key, value in (reducer.update({}, *xs) or {"": xs[0]}).items():
            paths.append(path)
            keys.append(key)
            values.append(value)
    torch.ops.torch_recorders.take(name, stream, paths, keys, values)


def _take(name: str, stream: str, paths: list[str], keys: list[str], values: list[Tensor]) -> None:
    taker = _takers.get(name)
    if taker is None:  # a graph may outlive the monitor
        return
    lifted: dict[str, State] = {path: {} for path in paths}
    with NoInference(False), NoAutocast():
        torch._C._set_grad_enabled(False)
        for path, key, value in zip(paths, keys, values, strict=True):
            if key:
                lifted[path][key] = value.clone()  # the graph reuses the memory of what it hands over
        taker.take(lifted, stream)


_library: Any = torch.library.Library("torch_recorders", "DEF")  # type: ignore[no-untyped-call]
# replaying kernels would pass the operator by, so CUDA graphs end before it
_library.define("take(str name, str stream, str[] paths, str[] keys, Tensor[] values) -> ()", tags=(torch.Tag.cudagraph_unsafe,))
_library.impl("take", _take, "CompositeExplicitAutograd")
_library._register_fake("take", lambda *_: None)
# without an effect it would be removed, for it returns nothing; ordered, for some statistics depend on what came first
_register_effectful_op(torch.ops.torch_recorders.take.default, _EffectType.ORDERED)
