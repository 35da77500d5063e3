"""Monitors of the values of parameters, and of what the optimizer keeps for them."""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from recorders.capture.batching import StepBatch
from recorders.capture.calls import Call
from recorders.capture.entering import failure_of
from recorders.capture.operands import as_operand
from recorders.errors import TargetError
from recorders.monitors.base import Monitor
from recorders.monitors.constructor import MonitorConstructor, checked_recipe
from recorders.monitors.module_parameters import ModuleParameterMonitor
from recorders.monitors.options import MonitorOptions
from recorders.schedule.readings import Reading, nothing
from reducers import Reducer

if TYPE_CHECKING:
    from typing_extensions import Self, Unpack

__all__ = ["OptimizerStateMonitor", "ParameterMonitor"]


class ParameterOptions(MonitorOptions, total=False):
    """The options of `ParameterMonitor`."""

    when: Literal["step", "call", "tick"]


class ParameterMonitor(ModuleParameterMonitor):
    """Records the values of parameters. Operands: value.

    Args:
        when: "step" after every optimizer step that holds the parameter, "call" after every forward of the module,
            "tick" only when `tick()` is called.

    >>> import torch
    >>> from reducers import Norm
    >>> layer = torch.nn.Linear(4, 2)
    >>> monitor = ParameterMonitor(Norm(), "weight", layer, when="tick")
    >>> monitor.tick()
    >>> torch.testing.assert_close(monitor.peek().float(), layer.weight.norm().detach())
    """

    def __init__(
        self,
        reducer: Reducer,
        attr: str | Sequence[str] | None = None,
        module: nn.Module | None = None,
        *,
        when: Literal["step", "call", "tick"] = "step",
        **options: Unpack[MonitorOptions],
    ) -> None:
        if when not in ("step", "call", "tick"):
            raise ValueError(f"ParameterMonitor(when={when!r}): choose 'step', 'call' or 'tick'")
        self.when = when
        self.sites = {"step": ("step",), "call": ("forward",), "tick": ("step",)}[when]
        super().__init__(reducer, attr, module, **options)

    @classmethod
    def partialconstructor(cls, reducer: Reducer, **options: Unpack[ParameterOptions]) -> MonitorConstructor[Self]:
        return checked_recipe(cls, reducer, options, cls._defaults)

    def _parts(self, call: Call) -> Iterator[tuple[str, Call]]:
        if call.module is not None:
            for path, parameter in self._parameters(call.module):
                yield path, Call("values", call.module, values=(parameter,))

    def _after_step(self, module: nn.Module, optimizer: Optimizer, mine: set[int], step_batch: StepBatch) -> None:
        if self.when == "step":
            found = {path: (parameter,) for path, parameter in self._among(module, mine)}
            self._observe(module, found, weakref.ref(optimizer), step_batch)

    def _reads(self) -> Reading:
        return _values if self.when == "step" else nothing

    def _training(self, module: nn.Module | None) -> bool:
        return super()._training(module) if self.when == "step" else Monitor._training(self, module)

    def unseen(self) -> str:
        if self.when == "step":
            return super().unseen()
        return "its module was never called" if self.when == "call" else "tick() was never called"

    def tick(self) -> None:
        """Records the present values, if `when="tick"`."""
        module = self.module
        if self.when == "tick" and self.registered and module is not None:
            self._observe(module, {path: (parameter,) for path, parameter in self._parameters(module)})


class OptimizerStateOptions(MonitorOptions, total=False):
    """The options of `OptimizerStateMonitor`."""

    key: str


class OptimizerStateMonitor(ModuleParameterMonitor):
    """Records a tensor of the optimizer's state for each parameter, after its step. Operands: state tensor, value.

    Args:
        key: the name of the state, such as "exp_avg" or "momentum_buffer".

    >>> import torch
    >>> from reducers import Last
    >>> layer = torch.nn.Linear(1, 1, bias=False)
    >>> monitor = OptimizerStateMonitor(Last(), "exp_avg", "weight", layer)
    >>> optimizer = torch.optim.Adam(layer.parameters())
    >>> layer(torch.ones(1, 1)).sum().backward()
    >>> optimizer.step()
    >>> monitor.peek()
    tensor([[0.1000]])
    """

    def __init__(
        self,
        reducer: Reducer,
        key: str,
        attr: str | Sequence[str] | None = None,
        module: nn.Module | None = None,
        **options: Unpack[MonitorOptions],
    ) -> None:
        if not isinstance(key, str) or not key:
            raise TargetError(f"OptimizerStateMonitor needs the name of a state, such as 'exp_avg'; got {key!r}")
        self.key = key
        super().__init__(reducer, attr, module, **options)

    @classmethod
    def partialconstructor(cls, reducer: Reducer, **options: Unpack[OptimizerStateOptions]) -> MonitorConstructor[Self]:
        return checked_recipe(cls, reducer, options, cls._defaults)

    def _reads(self) -> Reading:
        return _StateOf(self.key)

    def _after_step(self, module: nn.Module, optimizer: Optimizer, mine: set[int], step_batch: StepBatch) -> None:
        found, failed = {}, None
        for path, parameter in self._among(module, mine):
            if parameter.grad is None:
                continue
            try:
                value = self._kept(optimizer, path, parameter)
            except Exception as error:  # the user's own optimizer may keep anything
                failed = failure_of("a monitor of optimizer states", self._fail, error, module, ()) or failed
                continue
            if value is not None:  # SGD without momentum
                found[path] = value, parameter
        self._observe(module, found, weakref.ref(optimizer), step_batch)
        if failed is not None:
            raise failed

    def _kept(self, optimizer: Optimizer, path: str, parameter: nn.Parameter) -> Any:
        """What the optimizer keeps for a parameter."""
        whose = f"{type(optimizer).__name__} keeps"
        state, where = optimizer.state.get(parameter, {}), f"for {path or self.attr!r}"
        if not isinstance(state, Mapping):
            raise TargetError(f"{whose} no states by name {where}, but {state!r:.100}")
        if self.key not in state:
            raise TargetError(f"{whose} no {self.key!r} {where}; it keeps {sorted(map(str, state))}")
        value = as_operand(state[self.key])
        if value is None or isinstance(value, Tensor):
            return value
        try:
            return torch.tensor(value, device="cpu")
        except Exception as error:  # such as of a text, or of lists of unequal lengths
            raise TargetError(f"{whose} no numbers as {self.key!r} {where}, but {value!r:.100}") from error


def _values(parameters: Sequence[Any], optimizer: Optimizer) -> Sequence[Any]:
    return parameters


@dataclass(frozen=True)
class _StateOf:
    """Reads a tensor of the optimizer's state. If the state of a parameter has none of this name, the monitors tell the user."""

    key: str

    def __call__(self, parameters: Sequence[Any], optimizer: Optimizer) -> Sequence[Any]:
        found: list[Any] = []
        for parameter in parameters:
            if parameter.grad is None:
                found.append(None)
                continue
            kept = optimizer.state.get(parameter, {})
            if self.key not in kept:
                return []
            found.append(kept[self.key])
        return found
