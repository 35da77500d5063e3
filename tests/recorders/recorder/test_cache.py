"""Activations by name in one line."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import recorders
from recorders import SelectionError


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.h = nn.ModuleList([nn.Linear(3, 3), nn.LSTM(3, 4, batch_first=True)])
        self.relu = nn.ReLU(inplace=True)
        self.unused = nn.Linear(1, 1)

    def forward(self, x: Tensor, scale: float = 1.0) -> dict[str, Tensor]:
        y = self.relu(self.h[0](x))
        y, _ = self.h[1](y)
        return {"out": self.relu(y) * scale}


def on(net: nn.Module) -> int:
    return sum(len(module._forward_hooks) for module in net.modules())


def test_outputs_are_detached_copies_by_name() -> None:
    net, x = Net(), torch.randn(2, 5, 3)
    found = recorders.cache(net, ["h.*", "relu", "unused"])(x, scale=2.0)
    assert list(found) == ["h.0", "relu", "h.1", "relu:1"]
    assert torch.equal(found["h.0"], net.h[0](x))  # before the activation overwrote it
    assert torch.equal(found["relu"], net.h[0](x).relu())
    assert [part.shape for part in (found["h.1"][0], *found["h.1"][1])] == [(2, 5, 4), (1, 2, 4), (1, 2, 4)]
    assert not any(part.requires_grad for part in (found["h.0"], found["h.1"][0]))
    whole = recorders.cache(net, "")
    assert torch.equal(whole(x, scale=2.0)[""]["out"], net(x, scale=2.0)["out"])
    assert torch.equal(whole(x)[""]["out"], net(x)["out"])
    assert on(net) == 0


def test_hooks_go_also_if_the_call_fails_and_names_must_exist() -> None:
    net = Net()
    with pytest.raises(RuntimeError, match="shapes"):
        recorders.cache(net, "*")(torch.ones(2, 5, 7))
    assert on(net) == 0
    with pytest.raises(SelectionError, match=r"no module named 'h\.7'"):
        recorders.cache(net, "h.7")


def test_a_net_that_was_compiled_before_is_seen(fresh_compiler: None) -> None:
    net = nn.Sequential(nn.Linear(3, 3), nn.ReLU())
    compiled, x = torch.compile(net, backend="eager"), torch.randn(2, 3)
    compiled(x)
    assert torch.equal(recorders.cache(compiled, "0")(x)["0"], net[0](x))
