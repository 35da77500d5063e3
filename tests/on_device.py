"""A training on a device, with everything recorded: for the tests of GPUs."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from recorders import (
    BackwardMonitor,
    ForwardInputMonitor,
    ForwardMonitor,
    Monitor,
    ParameterGradientMonitor,
    ParameterMonitor,
    ParameterUpdateMonitor,
    Recorder,
)
from reducers import Norm, Product, Quantile, Summary

__all__ = ["adam", "batches", "everything", "made", "train"]


class Net(nn.Module):
    """A convolution, attention, norms and linear layers."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm, self.qkv = nn.Conv1d(8, 32, 3, padding=1), nn.LayerNorm(32), nn.Linear(32, 96)
        self.up, self.act, self.down = nn.Linear(32, 256), nn.GELU(), nn.Linear(256, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(self.conv(x).transpose(1, 2))
        q, k, v = self.qkv(x).chunk(3, dim=-1)
        x = x + (q @ k.transpose(1, 2)).div(8).softmax(-1) @ v
        y: Tensor = self.down(self.act(self.up(x)))
        return y


def made(device: torch.device) -> nn.Module:
    torch.manual_seed(0)
    return Net().to(device)


def batches(device: torch.device, number: int = 4) -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(16, 8, 40, generator=generator).to(device) for _ in range(number)]


def everything(net: nn.Module, optimizer: torch.optim.Optimizer) -> Recorder:
    monitors: dict[str, Monitor] = {
        "into": ForwardInputMonitor(Summary()),
        "out": ForwardMonitor(Product(summary=Summary("b ... c -> c"), quantile=Quantile())),
        "back": BackwardMonitor(Summary()),
        "grad": ParameterGradientMonitor(Norm()),
        "weight": ParameterMonitor(Summary(), when="step"),
        "update": ParameterUpdateMonitor(Norm()),
    }
    return Recorder(**monitors).modules(net, leaves=True).attach(optimizer)


def train(
    net: nn.Module, optimizer: torch.optim.Optimizer, xs: list[Tensor], call: Any = None, autocast: bool = False
) -> list[Tensor]:
    """Trains the network, and returns the losses."""
    losses = []
    for x in xs:
        optimizer.zero_grad()
        with torch.autocast(x.device.type, torch.bfloat16, enabled=autocast):
            loss = (call or net)(x).float().square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    return losses


def adam(net: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(net.parameters(), lr=1e-2, fused=True)
