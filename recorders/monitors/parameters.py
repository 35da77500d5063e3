"""Monitors of the values of parameters, and of what the optimizer keeps for them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from recorders.capture.calls import Call
from recorders.capture.operands import as_operand
from recorders.errors import TargetError
from recorders.monitors.base import Monitor
from recorders.monitors.constructor import MonitorConstructor
from recorders.monitors.module_parameters import ModuleParameterMonitor
from recorders.monitors.options import MonitorOptions
from recorders.schedule.table import ODD, VALUES, Reading
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
        self.when, self.reading = when, _VALUES if when == "step" else None
        self.sites = {"step": ("step",), "call": ("forward",), "tick": ("step",)}[when]
        super().__init__(reducer, attr, module, **options)

    if TYPE_CHECKING:  # the same function, with types for the options of this kind

        @classmethod
        def partialconstructor(cls, reducer: Reducer, **options: Unpack[ParameterOptions]) -> MonitorConstructor[Self]: ...

    def _parts(self, call: Call) -> Iterator[tuple[str, Call]]:
        if call.site == "step":
            yield "", call
        elif call.module is not None:
            for path, parameter in self._parameters(call.module):
                yield path, Call("step", call.module, values=(parameter,))

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
        self.key, self.reading = key, Reading(VALUES, _StateOf(key))
        super().__init__(reducer, attr, module, **options)

    if TYPE_CHECKING:  # the same function, with types for the options of this kind

        @classmethod
        def partialconstructor(cls, reducer: Reducer, **options: Unpack[OptimizerStateOptions]) -> MonitorConstructor[Self]: ...

    def operands_of(self, optimizer: Optimizer, path: str, parameter: nn.Parameter) -> tuple[Any, ...] | None:
        if parameter.grad is None:
            return None
        value = self._kept(optimizer, path, parameter)
        return None if value is None else (value, parameter)  # None: SGD without momentum

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


_VALUES = Reading(VALUES, _values)


@dataclass(frozen=True)
class _StateOf:
    """Reads a tensor of the optimizer's state. Of a parameter for which it keeps no tensor by this name, the monitor is asked."""

    key: str

    def __call__(self, parameters: Sequence[Any], optimizer: Optimizer) -> Sequence[Any]:
        try:
            kept = dict(zip(map(id, optimizer.state), optimizer.state.values(), strict=False))  # without a call for each hash
        except Exception:  # the user's own optimizer may keep anything
            return [ODD] * len(parameters)
        found: list[Any] = []
        for parameter in parameters:
            state = kept.get(id(parameter))
            value = state.get(self.key) if isinstance(state, dict) else None
            found.append(None if parameter.grad is None else value if isinstance(value, Tensor) else ODD)
        return found
