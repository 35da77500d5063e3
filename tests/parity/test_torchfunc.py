"""The recorders of torchfunc beside ours, with their own classes: `pip install '.[parity]'`, or these tests skip."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from recorders import ForwardInputMonitor, ForwardMonitor, Recorder
from reducers import Fold, Whole

SEEDS = range(3)


class Tupled(nn.Linear):
    """torchfunc iterates over what a module returns: over a tuple, as here, or over the rows of a lone tensor."""

    def forward(self, x: Tensor) -> tuple[Tensor]:  # type: ignore[override]
        return (super().forward(x),)


# Its recorders of gradients use hooks that PyTorch has replaced, and number the layers in the order in which gradients come.
RECORDERS = {"ForwardInput": ForwardInputMonitor, "ForwardPre": ForwardInputMonitor, "ForwardOutput": ForwardMonitor}


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("kind", RECORDERS)
@pytest.mark.parametrize("summed", [False, True], ids=["list", "reduction"])
def test_torchfunc_recorders(kind: str, seed: int, summed: bool) -> None:
    recorders = pytest.importorskip("torchfunc.hooks.recorders")
    torch.manual_seed(seed)
    net = nn.Sequential(Tupled(3, 4)).double()
    seen: list[Tensor] = []

    def condition() -> bool:
        return len(seen) != 1

    theirs = getattr(recorders, kind)(condition=condition, reduction=torch.add if summed else None)
    theirs.children(net, types=nn.Linear)
    ours = Recorder(RECORDERS[kind](Fold(torch.add) if summed else Whole(), condition=condition)).children(net, types=nn.Linear)
    for _ in range(4):
        x = torch.randn(5, 3, dtype=torch.float64)
        net(x)
        seen.append(x)
    found = ours[0].peek()
    found = found["0"] if kind == "ForwardOutput" else found  # the path of the leaf
    mine = [found] if summed else list(found.values())
    expected = [theirs[0]] if summed else theirs[0]
    assert len(mine) == len(expected) == (1 if summed else 3)
    for one, other in zip(mine, expected, strict=True):
        torch.testing.assert_close(one, other.detach(), rtol=1e-9, atol=1e-9)
