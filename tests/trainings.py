"""One small training that every trainer runs: 2 epochs of 12 batches, 4 to a step, each followed by an evaluation of 3 batches."""

from __future__ import annotations

from collections.abc import Collection

import torch
from torch import Tensor, nn

from recorders import ForwardMonitor, ParameterGradientMonitor, ParameterUpdateMonitor, Recorder
from reducers import Count, Norm, Summary

__all__ = ["EPOCHS", "MICRO_BATCHES", "ROWS", "Net", "alike", "new_net", "new_optimizer", "new_recorder", "plain"]

EPOCHS, MICRO_BATCHES, BATCH = 2, 4, 2
ROWS = torch.randn(24, 3, generator=torch.Generator().manual_seed(1))
"""Of the training; the first 6 are those of the evaluation."""


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(3, 5), nn.ReLU(), nn.Linear(5, 1))

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        return {"loss": self.body(x).square().mean()}


def new_net() -> Net:
    torch.manual_seed(0)
    return Net()


def new_optimizer(net: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(net.parameters(), lr=0.1)


def new_recorder(net: nn.Module) -> Recorder:
    """Training, evaluation, and the first micro-batch of every second step."""
    recorder = Recorder(
        train=ForwardMonitor(Summary(), eval_update=False),
        evaluation=ForwardMonitor(Summary(), train_update=False),
        first=ForwardMonitor(Count(), eval_update=False, every_step=2, condition=lambda: recorder.clock.micro_batch == 0),
        gradient=ParameterGradientMonitor(Norm()),
        update=ParameterUpdateMonitor(Norm()),
    )
    return recorder.modules(net, types=nn.Linear)


def plain(epochs: int = EPOCHS, saves: Collection[int] = range(1, EPOCHS + 1)) -> Recorder:
    """What is recorded in a loop without a trainer, which saves after so many epochs."""
    net = new_net()
    optimizer = new_optimizer(net)
    with new_recorder(net).attach(optimizer) as recorder:
        for epoch in range(1, epochs + 1):
            for number, batch in enumerate(ROWS.split(BATCH)):
                (net(batch)["loss"] / MICRO_BATCHES).backward()
                if number % MICRO_BATCHES == MICRO_BATCHES - 1:
                    optimizer.step()
                    optimizer.zero_grad()
            net.eval()
            with torch.no_grad():
                for batch in ROWS[:6].split(BATCH):
                    net(batch)
            net.train()
            if epoch in saves:
                recorder.state_dict()
    return recorder


def alike(one: Recorder, other: Recorder) -> bool:
    """Whether both recorded the same under the same names, bit for bit, and are at the same step."""
    torch.testing.assert_close(one.compute(), other.compute(), rtol=0, atol=0)
    assert dict(one.samples) == dict(other.samples)
    return one.clock.step == other.clock.step
