"""What monitors know of nets is freed with these."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from recorders import BackwardMonitor, ForwardMonitor, Monitor, Recorder
from reducers import Mean

CALLABLES: dict[str, Callable[[nn.Module], Callable[..., Any]]] = {
    "op_": lambda net: lambda x, *_: x * net.scale,
    "map_": lambda net: lambda x, *_: (x * net.scale,),
    "filter_": lambda net: lambda *_: net.scale > 0,
    "condition": lambda net: lambda: bool(net.scale > 0),
}


@pytest.mark.parametrize("name", CALLABLES)
@pytest.mark.parametrize("kind", [ForwardMonitor, BackwardMonitor])
def test_a_compiled_net_to_which_a_callable_refers_is_freed_with_its_recorder(kind: Callable[..., Monitor], name: str) -> None:
    def trained() -> list[weakref.ref[Any]]:
        torch._dynamo.reset()
        net = nn.Sequential(nn.Linear(4, 4))
        net.scale = torch.tensor(2.0)
        recorder = Recorder(kind(Mean(), **{name: CALLABLES[name](net)})).modules(net, types=nn.Linear)
        with recorder:
            torch.compile(net, backend="eager", fullgraph=True)(torch.ones(2, 4)).sum().backward()
        assert recorder["0"].samples == 1
        return [weakref.ref(net), weakref.ref(recorder)]

    held = trained()
    torch._dynamo.reset()
    gc.collect()
    assert [one() for one in held] == [None, None]
