"""Monitor of whatever a function computes from a module."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from torch import nn

from recorders.monitors.base import Monitor
from recorders.monitors.options import MonitorOptions
from reducers import Reducer

if TYPE_CHECKING:
    from typing_extensions import Unpack

__all__ = ["ModuleMonitor"]


class ModuleMonitor(Monitor):
    """Records a function of a module whenever `tick()` is called, such as the rank of its weights. Operand: the module.

    Args:
        op_: called with the module, without gradients; returns a tensor, a number, or nested tensors. Or `map_`, which
            returns a tuple of tensors.

    Raises:
        TypeError: neither `op_` nor `map_` is given.

    >>> import torch
    >>> from reducers import Last
    >>> layer = torch.nn.Linear(4, 2)
    >>> monitor = ModuleMonitor(Last(), layer, op_=lambda layer: torch.linalg.matrix_rank(layer.weight))
    >>> monitor.tick()
    >>> monitor.peek()
    tensor(2)
    """

    when: ClassVar[str] = "tick"
    subject = "module"

    def __init__(self, reducer: Reducer, module: nn.Module | None = None, **options: Unpack[MonitorOptions]) -> None:
        if options.get("op_") is None and options.get("map_") is None:
            raise TypeError("ModuleMonitor needs a function of the module: ModuleMonitor(Last(), op_=lambda module: ...)")
        super().__init__(reducer, module, **options)

    def unseen(self) -> str:
        return "tick() was never called"

    def tick(self) -> None:
        """Records what the function computes now, unless the monitor is off."""
        module = self.module
        if module is not None and self._due(module, self._training(module)):
            self._record(module, module)
