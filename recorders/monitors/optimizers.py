"""OptimizerMonitor: what a function reads of an optimizer at its steps, such as the learning rate."""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from torch import nn
from torch.optim import Optimizer

from recorders.capture.calls import Call
from recorders.capture.contents import own_parameters
from recorders.monitors.module_parameters import ModuleParameterMonitor
from recorders.monitors.options import MonitorOptions
from recorders.schedule.table import ODD, VALUES, Reading
from reducers import Reducer

if TYPE_CHECKING:
    from typing_extensions import Unpack


def ask_each(parameters: Sequence[Any], optimizer: Optimizer) -> Sequence[Any]:
    """Leaves it to the monitor what is read."""
    return [ODD] * len(parameters)


class OptimizerMonitor(ModuleParameterMonitor):
    """Records a function of the optimizer after each of its steps. Operands: optimizer, module.

    A recorder puts it on the net once, under the name of its group. If several optimizers change parameters of the net, each of
    their steps is an observation.

    Args:
        op_: called with the optimizer and the net; returns a tensor, a number, or nested ones. Or `map_`, which returns a tuple of
            tensors.

    Raises:
        TypeError: neither `op_` nor `map_` is given.

    >>> import torch
    >>> from recorders import Recorder
    >>> from reducers import Collect
    >>> net = torch.nn.Linear(2, 1)
    >>> recorder = Recorder(rate=OptimizerMonitor(Collect(), op_=lambda optimizer: optimizer.param_groups[0]["lr"])).modules(net)
    >>> optimizer = torch.optim.SGD(net.parameters(), lr=0.5)
    >>> schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, gamma=0.5)
    >>> for _ in range(3):
    ...     net(torch.ones(1, 2)).sum().backward()
    ...     optimizer.step()
    ...     schedule.step()
    >>> recorder["rate"].peek()
    tensor([0.5000, 0.2500, 0.1250], dtype=torch.float64)
    """

    of_net = True
    reading = Reading(VALUES, ask_each)

    def __init__(self, reducer: Reducer, module: nn.Module | None = None, **options: Unpack[MonitorOptions]) -> None:
        if options.get("op_") is None and options.get("map_") is None:
            raise TypeError(f"{type(self).__name__} needs a function of the optimizer: op_=lambda optimizer, net: ...")
        super().__init__(reducer, None, module, **options)

    def parameters_of(self, module: nn.Module) -> Iterator[tuple[nn.Module, str, nn.Parameter]]:
        """Yields all parameters of the module and of those inside it, each once: the optimizer of any of them is asked."""
        seen: set[int] = set()
        for prefix, owner in module.named_modules():
            for name, parameter in own_parameters(owner)[1].items():
                if parameter is not None and id(parameter) not in seen:
                    seen.add(id(parameter))
                    yield owner, f"{prefix}.{name}" if prefix else name, parameter

    def notified(self, module: nn.Module, optimizer: Optimizer, leaves: Sequence[tuple[str, nn.Parameter]]) -> None:
        """Records what the function reads of the optimizer that has stepped."""
        if self._due(module, self._training(module), weakref.ref(optimizer)):
            self._see(Call("step", module, values=(optimizer, module)))

    def record_shapes(self) -> None:
        """A dry run has no optimizer."""
