"""Monitor of what optimizer steps change."""

from __future__ import annotations

import weakref
from collections.abc import Container, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from recorders.capture.calls import Call
from recorders.monitors.base import Monitor
from recorders.monitors.module_parameters import ModuleParameterMonitor
from recorders.monitors.options import MonitorOptions
from recorders.schedule.table import CHANGE, Reading, alike
from reducers import Reducer

if TYPE_CHECKING:
    from typing_extensions import Unpack

__all__ = ["ParameterUpdateMonitor"]


class ParameterUpdateMonitor(ModuleParameterMonitor):
    """Records how an optimizer step changes parameters. Operands: after, before; the default is `after - before`.

    While the monitor is on and due it keeps memory for a copy of its parameters, which each step overwrites.

    >>> import torch
    >>> from reducers import Last
    >>> layer = torch.nn.Linear(1, 1, bias=False)
    >>> monitor = ParameterUpdateMonitor(Last(), "weight", layer)
    >>> optimizer = torch.optim.SGD(layer.parameters(), lr=0.5)
    >>> layer(torch.ones(1, 1)).sum().backward()
    >>> optimizer.step()
    >>> monitor.peek()
    tensor([[-0.5000]])
    """

    reading = Reading(CHANGE, lambda parameters, optimizer: parameters)

    def __init__(
        self,
        reducer: Reducer,
        attr: str | Sequence[str] | None = None,
        module: nn.Module | None = None,
        **options: Unpack[MonitorOptions],
    ) -> None:
        self.before: dict[str, Tensor] = {}  # copies of the parameters, by path; those that steps overwrite stay
        super().__init__(reducer, attr, module, **options)

    def deregister(self) -> Monitor:
        self.before = {}
        return super().deregister()

    def switch(self, active: bool, error: Exception | None) -> None:
        if not active:
            self.before = {}
        super().switch(active, error)

    def memory(self, path: str, parameter: Tensor) -> Tensor:
        """Returns memory for a copy of a parameter."""
        before = self.before.get(path)
        if before is None or not alike([before], [parameter]):
            before = self.before[path] = torch.empty_like(parameter.detach())
        return before

    def notified(self, module: nn.Module, optimizer: Optimizer, leaves: Sequence[tuple[str, nn.Parameter]]) -> None:
        due = bool(leaves) and self._due(module, self._training(module), weakref.ref(optimizer))
        for path, parameter in leaves:
            if self.has_callables or not due:
                self.before.pop(path, None)  # a callable may keep what it is given
            if due:
                self.memory(path, parameter).copy_(parameter.detach())

    def changed(self, module: nn.Module, mine: Container[int], *paths: str) -> None:
        """Records the change of those of `mine` that were copied before the step, one by one."""
        for path, parameter in self._parameters(module):
            if id(parameter) in mine and (not paths or path in paths):
                before = self.before.pop(path, None) if self.has_callables else self.before.get(path)
                if before is not None:
                    self._see(Call("step", module, values=(parameter, before)), path)

    def _default(self, *operands: Any) -> Any:
        return operands[0].detach() - operands[1] if len(operands) > 1 else operands[0]
