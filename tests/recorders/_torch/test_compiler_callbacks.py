"""Programs that call `backward` in a function that is compiled: Dynamo is on when the backward is compiled in turn."""

from __future__ import annotations

import subprocess
import sys

PROGRAM = """
import torch
from torch import nn
from recorders import ForwardMonitor, Recorder
from reducers import Count

torch.manual_seed(0)
net = nn.Sequential(nn.Linear(3, 3), nn.Tanh())
optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
recorder = Recorder(ForwardMonitor(Count(), every_step=8)).modules(net, types=nn.Linear).attach(optimizer)

def forward_and_backward(x):
    loss = net(x).square().sum()
    loss.backward()
    return loss.detach()

def train(call, rows):
    optimizer.zero_grad()
    loss = call(torch.ones(rows, 3))
    optimizer.step()
    return loss.item()

for _ in range(12):
    train(forward_and_backward, 2)  # in most steps the hook is out, and the compiler is asked to say when it looks at a program
compiled = torch.compile(forward_and_backward, backend="aot_eager")
print(all(train(compiled, rows) > 0 for rows in (2, 2, 5, 5)), recorder[0].samples)
"""


def test_a_compiled_step_with_its_backward_does_not_wait_for_itself() -> None:
    """The callback by which hooks are put back runs under a lock of Dynamo, which would trace it and wait for that lock."""
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", PROGRAM], capture_output=True, text=True, timeout=120, check=True)
    assert done.stdout.split() == ["True", "2"]
