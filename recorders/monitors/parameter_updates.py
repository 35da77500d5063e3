"""Monitor of what optimizer steps change."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from torch import nn
from torch.optim import Optimizer

from recorders.capture.batching import StepBatch
from recorders.capture.kept import Kept, fits
from recorders.monitors.base import Monitor
from recorders.monitors.module_parameters import ModuleParameterMonitor
from recorders.monitors.options import MonitorOptions
from recorders.schedule.readings import Reading, before, change
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

    def __init__(
        self,
        reducer: Reducer,
        attr: str | Sequence[str] | None = None,
        module: nn.Module | None = None,
        **options: Unpack[MonitorOptions],
    ) -> None:
        self.kept = Kept()
        super().__init__(reducer, attr, module, **options)

    def deregister(self) -> Monitor:
        self.kept = Kept()
        return super().deregister()

    def switch(self, active: bool, error: Exception | None) -> None:
        if not active:
            self.kept.memory = {}
        super().switch(active, error)

    def _before_step(self, module: nn.Module, optimizer: Optimizer, mine: set[int], step_batch: StepBatch) -> None:
        found = dict(self._among(module, mine))
        if found and not self._due(module, self._training(module), weakref.ref(optimizer)):
            self.kept.leave_out(found)
            return
        for path, parameter in found.items():
            if self.bare and step_batch.accepts(parameter) and parameter.dtype.is_floating_point:
                copy = self.kept.memory_for(path, parameter)
                step_batch.keep(copy, parameter)
            else:
                copy = parameter.detach().clone()  # a callable may keep it
            self.kept.copies[path] = copy

    def _after_step(self, module: nn.Module, optimizer: Optimizer, mine: set[int], step_batch: StepBatch) -> None:
        for path, parameter in self._among(module, mine):
            kept = self.kept.copies.pop(path, None)
            if kept is None:
                continue
            overwritten = kept is self.kept.memory.get(path)
            if self._joins and overwritten and step_batch.accepts(parameter) and fits(kept, parameter):
                step_batch.add_change(self, module, path, parameter, kept)
            else:
                self._record(module, parameter, kept, path=path)

    def _reading(self, moment: str) -> Reading | None:
        reading = super()._reading(moment)
        return change if reading is before and moment == "_after_step" else reading

    def _reads(self) -> Reading:
        return before

    def _default(self, *operands: Any) -> Any:
        return operands[0].detach() - operands[1] if len(operands) > 1 else operands[0]
