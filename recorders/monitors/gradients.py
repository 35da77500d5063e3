"""Monitors of gradients with respect to activations, by hooks on the tensors themselves: see `gradient_hooks.py`."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch.distributed as dist
from torch import Tensor

from recorders.monitors.base import Monitor

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


class BackwardMonitor(Monitor):
    """Records the gradient of the loss with respect to what a module returns. Operands: gradient, output.

    Each tensor leaf of the output has a gradient of its own, and so a state of its own. Nothing is recorded for outputs without a
    gradient (frozen, unused, under `no_grad`). The output is cloned only if there are callables, which get it.

    >>> import torch
    >>> from reducers import Sum
    >>> layer = torch.nn.Linear(2, 3)
    >>> monitor = BackwardMonitor(Sum(), layer)
    >>> (layer(torch.ones(1, 2)) * 2).sum().backward()
    >>> monitor.peek()
    tensor(6., dtype=torch.float64)
    """

    sites = ("output_gradient",)
    operand_names = ("gradient", "output")
    side = "outputs"


def global_gradient(gradient: Tensor, *, group: ProcessGroup | None = None) -> Tensor:
    """An `op_` for gradients with respect to outputs and inputs: those of the mean loss of all ranks, not of the loss of this rank.

    Under data parallelism the loss of a rank is the mean over its part of the batch, so gradients with respect to outputs are
    `world_size` times those of one process with the whole batch. This divides by the number of ranks, 1 without a process group.
    Gradients of parameters need no scaling, because DDP and FSDP2 average them.

    Args:
        gradient: any shape.
        group: the data parallel ranks, all by default; `functools.partial(global_gradient, group=...)` names fewer.

    Returns:
        the gradient divided by the number of ranks.

    >>> import torch
    >>> from reducers import Sum
    >>> layer = torch.nn.Linear(2, 3)
    >>> monitor = BackwardMonitor(Sum(), layer, op_=global_gradient)
    >>> (layer(torch.ones(1, 2)) * 2).sum().backward()  # in one process
    >>> monitor.peek()
    tensor(6., dtype=torch.float64)
    """
    among_ranks = dist.is_available() and dist.is_initialized()
    return gradient / dist.get_world_size(group) if among_ranks else gradient


class BackwardInputMonitor(Monitor):
    """Records the gradient of the loss with respect to what a module is given. Operands: gradient, input.

    This is the total gradient of that tensor, from all its uses: if a residual connection takes the same tensor past the module,
    that path counts too.

    >>> import torch
    >>> from reducers import Last
    >>> layer = torch.nn.ReLU()
    >>> monitor = BackwardInputMonitor(Last(), layer)
    >>> layer(torch.tensor([-1.0, 3.0], requires_grad=True)).sum().backward()
    >>> monitor.peek()
    tensor([0., 1.])
    """

    sites = ("input_gradient",)
    operand_names = ("gradient", "input")
    side = "inputs"
