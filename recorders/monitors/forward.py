"""Monitors of what modules return and are given, of values pushed by hand, and of what a function computes from a module."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor, nn

from recorders._torch import outside_modes
from recorders.capture import entering
from recorders.capture.entering import timed
from recorders.capture.operands import as_operands
from recorders.errors import OperandError
from recorders.graphs.caching import content_of
from recorders.graphs.sinks import new_spec_key
from recorders.monitors.base import Monitor
from recorders.monitors.gate import NOT_IN_STEPS
from recorders.monitors.graphs import trace, wanted_in_graph
from recorders.monitors.options import MonitorOptions
from reducers import Reducer

if TYPE_CHECKING:
    from typing_extensions import Unpack


class ForwardMonitor(Monitor):
    """Records what a module returns. Operands: output, inputs.

    The inputs are the tensor itself if the call had one, a tuple if it had several, a dict if some were keywords, and None if it
    had none. They are as the module leaves them: `ReLU(inplace=True)` has changed its input; `ForwardInputMonitor` gets it before.
    Forwards that activation checkpointing runs again during backward are not recorded twice.

    >>> import torch
    >>> from reducers import Mean
    >>> layer = torch.nn.ReLU()
    >>> monitor = ForwardMonitor(Mean(), layer)
    >>> _ = layer(torch.tensor([-1.0, 3.0]))
    >>> monitor.peek()
    tensor(1.5000, dtype=torch.float64)
    """

    sites = ("forward",)
    operand_names = ("output", "inputs")
    side = "outputs"


class ForwardInputMonitor(Monitor):
    """Records the inputs of a module, keyword arguments included, before the module can change them in place. Operands: inputs.

    >>> import torch
    >>> from reducers import Max
    >>> layer = torch.nn.Linear(2, 1)
    >>> monitor = ForwardInputMonitor(Max(), layer)
    >>> _ = layer(input=torch.tensor([[1.0, 7.0]]))
    >>> monitor.peek()
    tensor(7.)
    """

    sites = ("forward_pre",)
    operand_names = ("inputs",)
    side = "inputs"


class CallMonitor(Monitor):
    """Records values that the user pushes: losses, metrics, anything that no hook gets. Operands: the values pushed.

    >>> from reducers import Mean
    >>> loss = CallMonitor(Mean())
    >>> for value in (3.0, 1.0):
    ...     loss.push(value)
    >>> loss.peek()
    tensor(2., dtype=torch.float64)
    """

    subject = "values"

    def __init__(self, reducer: Reducer, module: nn.Module | None = None, **options: Unpack[MonitorOptions]) -> None:
        super().__init__(reducer, module, **options)
        self.spec_key = new_spec_key(self, content_of(self))  # code that pushes inside a graph uses the monitor itself, not a spec

    def unseen(self) -> str:
        return "nothing was pushed"

    def deregister(self) -> Monitor:
        """Takes the monitor off its module; pushed values are still recorded. Returns the monitor."""
        super().deregister()
        self.gate.turn(on=True)
        return self

    def push(self, *values: Any) -> None:
        """Records one observation: tensors (which stay on their device), Python numbers, or nested values of them."""
        if torch.compiler.is_compiling():
            if wanted_in_graph(self, self.module):
                trace(self, self.sink.tensor, tuple(map(as_operands, values)))
        elif not self.gate.active and self.gate.only_steps and entering.timing is None:  # in steps that are not due, which are many
            self.counts["calls"] = self.counts.get("calls", 0) + 1
            self._skip(NOT_IN_STEPS)
        else:
            outside_modes(timed, self, self._pushed, *values)

    def _pushed(self, *values: Any) -> None:
        module = self.module
        self._ensure_clock()
        if self.on_error == "disable" and self.last_error is not None:
            self._skip("pushed after the failure that took it off")
        elif self._due(module, self._training(module)) and not (len(values) == 1 and self._waits(values[0])):
            self._record(module, *values)

    def _inputs(self, operands: tuple[Any, ...]) -> dict[str, tuple[Tensor, ...]]:
        if len(operands) > 1 and not self.has_callables:
            raise OperandError(
                f"push got {len(operands)} values, of which one would be recorded: push each by itself, or say what to do with "
                "them by map_=lambda a, b: (a, b)"
            )
        return super()._inputs(tuple(map(as_operands, operands)))

    def _training(self, module: nn.Module | None) -> bool:
        if (
            module is None and self.gate.phase == "module"
        ):  # without a module there is no mode, so any mode that is recorded will do
            return self.gate.train_update
        return super()._training(module)


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
