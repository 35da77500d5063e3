"""Monitor of what optimizer steps change."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from recorders.capture.batching import StepBatch
from recorders.monitors.base import Monitor
from recorders.monitors.module_parameters import ModuleParameterMonitor
from recorders.monitors.options import MonitorOptions
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
        self._kept: dict[str, Tensor] = {}
        self._buffers: dict[str, Tensor] = {}
        super().__init__(reducer, attr, module, **options)

    def deregister(self) -> Monitor:
        self._kept, self._buffers = {}, {}
        return super().deregister()

    def switch(self, active: bool, error: Exception | None) -> None:
        if not active:
            self._buffers = {}
        super().switch(active, error)

    def _before_step(self, module: nn.Module, optimizer: Optimizer, mine: set[int], step_batch: StepBatch) -> None:
        found = dict(self._among(module, mine))
        for path in found:
            self._kept.pop(path, None)  # left by a step that was interrupted
        if found and not self._due(module, self._training(module), weakref.ref(optimizer)):
            found = {}
            self._buffers = {}
        for path, parameter in found.items():
            if self.bare and step_batch.accepts(parameter) and parameter.dtype.is_floating_point:
                kept = self._buffers.get(path)
                if kept is None or not _alike(kept, parameter):
                    kept = self._buffers[path] = torch.empty_like(parameter.detach())
                step_batch.keep(kept, parameter)
            else:
                kept = parameter.detach().clone()  # a callable may keep it
            self._kept[path] = kept

    def _after_step(self, module: nn.Module, optimizer: Optimizer, mine: set[int], step_batch: StepBatch) -> None:
        for path, parameter in self._among(module, mine):
            kept = self._kept.pop(path, None)
            if kept is None:
                continue
            if self._joins and kept is self._buffers.get(path) and step_batch.accepts(parameter) and _alike(kept, parameter):
                step_batch.add_change(self, module, path, parameter, kept)
            else:
                self._record(module, parameter, kept, path=path)

    def _default(self, *operands: Any) -> Any:
        return operands[0].detach() - operands[1] if len(operands) > 1 else operands[0]


def _alike(a: Tensor, b: Tensor) -> bool:
    return a.shape == b.shape and a.dtype is b.dtype and a.device == b.device
