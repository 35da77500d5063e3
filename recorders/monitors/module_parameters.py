"""ModuleParameterMonitor: the base of monitors of the parameters of a module."""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from recorders.capture.calls import Call
from recorders.capture.contents import own_parameters
from recorders.capture.entering import failure_of
from recorders.errors import TargetError
from recorders.monitors.base import Monitor
from recorders.monitors.buffer import Buffer
from recorders.monitors.options import MonitorOptions, as_names
from recorders.ring.rows import LOCK
from recorders.schedule.table import Reading
from reducers import Reducer
from reducers.errors import did_you_mean
from reducers.execution.stacked import row_parts

if TYPE_CHECKING:
    from typing_extensions import Unpack


class ParameterBuffer(Buffer):
    """The buffer of a monitor whose observations may be in rows of the table of an optimizer; see `recorders.ring.rows`."""

    shared = True

    def __init__(self, reducer: Reducer) -> None:
        super().__init__(reducer)
        self.lock = LOCK


class ModuleParameterMonitor(Monitor):
    """Records parameters of a module: those that it owns itself, or those that `attr` names. Each has a state of its own.

    Args:
        attr: name of a parameter (dots for nested ones) or several; None for all that the module itself owns. Of several names
            those are recorded that the module has; `plan()` and `report()` tell of the others.
    """

    sites = ("step",)
    of_module = True
    buffer_class = ParameterBuffer
    subject = "parameters"
    absence: ClassVar[str] = ""  # why nothing is recorded of a parameter of which there is nothing to read
    reading: Reading | None = None  # what is read at the steps of optimizers, together with what others read

    def __init__(
        self,
        reducer: Reducer,
        attr: str | Sequence[str] | None = None,
        module: nn.Module | None = None,
        **options: Unpack[MonitorOptions],
    ) -> None:
        self.attr = None if attr is None else as_names(attr, type(self).__name__, "a parameter")
        super().__init__(reducer, module, **options)
        computes = type(self).operands is not Monitor.operands  # a subclass may; then the monitor has to be asked
        self._stackable = not (self.has_callables or computes) and not self.given and row_parts(self.reducer) is not None

    def applies(self, module: nn.Module) -> bool:
        return any(True for _ in self._parameters(module))

    def _check(self, module: nn.Module) -> None:
        if self.applies(module):
            return
        if self.attr is None:
            raise TargetError(f"{self.describe(module)}: it owns no parameters itself; put the monitor on the modules inside it")
        wanted = self.attr if isinstance(self.attr, str) else list(self.attr)
        there = [name for name, _ in module.named_parameters()]
        raise TargetError(
            f"{self.describe(module)}: no parameter {wanted!r}; {did_you_mean(wanted, there)}it has {there or 'none'}"
        )

    def missing(self, module: nn.Module) -> list[str]:
        """Returns the names in `attr` of parameters that `module` does not have, or has no longer; the others are recorded."""
        present = {name for name, _ in self._parameters(module)}
        if self.attr is None or isinstance(self.attr, str):
            return [] if self.attr is None or present else [self.attr]
        return [name for name in self.attr if name not in present]

    def parameters_of(self, module: nn.Module) -> Iterator[tuple[nn.Module, str, nn.Parameter]]:
        """Yields the owner, the leaf path and the parameter. They are looked up each time, because parameters may be replaced."""
        if self.attr is None:
            holder, own = own_parameters(module)
            yield from ((holder, name, parameter) for name, parameter in own.items() if parameter is not None)
            return
        for name in (self.attr,) if isinstance(self.attr, str) else self.attr:
            owner_path, _, leaf = name.rpartition(".")
            try:
                owner, own = own_parameters(module.get_submodule(owner_path) if owner_path else module)
                parameter = own.get(leaf)
            except AttributeError:
                continue
            if parameter is not None:
                yield owner, "" if isinstance(self.attr, str) else name, parameter

    def _parameters(self, module: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
        """Yields leaf path and parameter."""
        yield from ((path, parameter) for _, path, parameter in self.parameters_of(module))

    @property
    def joins(self) -> bool:
        """Whether its observations may be reduced together with those of others, without a call of the monitor."""
        return self._stackable and self.gate.only_steps_and_every and not self.buffer.places

    def operands_of(self, optimizer: Optimizer, path: str, parameter: nn.Parameter) -> tuple[Any, ...] | None:
        """Returns the operands of a parameter at a step; None if there is nothing to record."""
        return (parameter,)

    def notified(self, module: nn.Module, optimizer: Optimizer, leaves: Sequence[tuple[str, nn.Parameter]]) -> None:
        """Records these parameters of an optimizer that steps, one by one."""
        found, failed = {}, None
        for path, parameter in leaves:
            try:
                operands = self.operands_of(optimizer, path, parameter)
            except Exception as error:  # the user's own optimizer may keep anything
                failed = failure_of("a monitor of parameters", self._fail, error, module, ()) or failed
                continue
            if operands is not None:
                found[path] = operands
        self._observe(module, found, weakref.ref(optimizer))
        if failed is not None:
            raise failed

    def record_leaf(self, module: nn.Module, path: str, x: Tensor) -> None:
        """Records one parameter, of which the gate was asked."""
        self._see(Call("step", module, values=(x if x.layout is torch.strided else x.to_dense(),)), path)

    def _training(self, module: nn.Module | None) -> bool:
        # PyTorch turns gradients off during a step, but a step is training
        return super()._training(module) if self.gate.phase == "module" else True

    def unseen(self) -> str:
        return "no optimizer step changed its parameters"

    def record_shapes(self) -> None:
        """Records the shapes of the parameters, for a dry run on the meta device."""
        module = self.module
        if module is not None:
            self._observe(module, {path: (parameter, parameter) for path, parameter in self._parameters(module)})

    def _observe(self, module: nn.Module, found: Mapping[str, tuple[Any, ...]], stream: object = "") -> None:
        """Records one observation, with all parameters as its leaves. `stream` is counted by itself for `every`."""
        if found and self._due(module, self._training(module), stream):
            for path, operands in found.items():
                self._see(Call("step", module, values=operands), path)
