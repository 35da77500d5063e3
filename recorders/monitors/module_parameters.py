"""ModuleParameterMonitor: the base of monitors of the parameters of a module."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

from torch import Tensor, nn
from torch.optim import Optimizer

from recorders.capture.batching import LOCK, StepBatch, common
from recorders.capture.stacks import StackRow, StateStack
from recorders.errors import TargetError
from recorders.monitors.base import Monitor
from recorders.monitors.buffer import Buffer
from recorders.monitors.options import MonitorOptions, as_names
from recorders.schedule.readings import Reading, nothing
from reducers import Reducer
from reducers.combinators.stacked import is_stackable
from reducers.errors import did_you_mean

if TYPE_CHECKING:
    from typing_extensions import Unpack

__all__ = ["ModuleParameterMonitor"]


class ParameterBuffer(Buffer):
    """The buffer of a monitor that may be observed together with others, in stacks of states; see `StateStack`."""

    shared = True

    def __init__(self, reducer: Reducer) -> None:
        super().__init__(reducer)
        self.common = common(reducer)
        self.lock = LOCK

    def add(self, inputs: Mapping[str, tuple[Tensor, ...]]) -> None:
        with LOCK:
            if any(isinstance(self.stored.pending.get((path,)), StackRow) for path in inputs):
                self.leave_stacks()
            super().add(inputs)

    def clear(self, keepshape: bool = False) -> None:
        with LOCK:
            self.leave_stacks()
            super().clear(keepshape)

    def leave_stacks(self) -> None:
        StateStack.left += 1


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

    def __init__(
        self,
        reducer: Reducer,
        attr: str | Sequence[str] | None = None,
        module: nn.Module | None = None,
        **options: Unpack[MonitorOptions],
    ) -> None:
        self.attr = None if attr is None else as_names(attr, type(self).__name__, "a parameter")
        super().__init__(reducer, module, **options)
        self._joins = self.bare and not self.given and is_stackable(self.reducer)  # whether it may be observed together with others

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
        """Returns the names in `attr` of parameters that `module` does not have; the others are recorded."""
        if self.attr is None or isinstance(self.attr, str):
            return []
        present = {name for name, _ in self._parameters(module)}
        return [name for name in self.attr if name not in present]

    def _parameters(self, module: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
        """Yields leaf path and parameter. They are looked up each time, because parameters may be replaced."""
        if self.attr is None:
            yield from ((name, parameter) for name, parameter in module._parameters.items() if parameter is not None)
            return
        for name in (self.attr,) if isinstance(self.attr, str) else self.attr:
            owner_path, _, leaf = name.rpartition(".")
            try:
                parameter = (module.get_submodule(owner_path) if owner_path else module)._parameters.get(leaf)
            except AttributeError:
                continue
            if parameter is not None:
                yield "" if isinstance(self.attr, str) else name, parameter

    def _among(self, module: nn.Module, mine: set[int]) -> list[tuple[str, nn.Parameter]]:
        """Returns those whose `id` is in `mine`."""
        there = self._parameters(module) if self.attr is not None else module._parameters.items()
        return [(path, parameter) for path, parameter in there if parameter is not None and id(parameter) in mine]

    def _before_step(self, module: nn.Module, optimizer: Optimizer, mine: set[int], step_batch: StepBatch) -> None:
        """Is called when the optimizer is about to change those in `mine`."""

    def _at_gradients(self, module: nn.Module, optimizer: Optimizer, mine: set[int], step_batch: StepBatch) -> None:
        """Is called when the gradients of those in `mine` are final: before the step or, if a closure computes them, after it."""

    def _after_step(self, module: nn.Module, optimizer: Optimizer, mine: set[int], step_batch: StepBatch) -> None:
        """Is called when the optimizer has changed those in `mine`."""

    def _reading(self, moment: str) -> Reading | None:
        """What is read at a moment of a step, together with what others read; None if the monitor has to be notified."""
        if getattr(type(self), moment) is getattr(ModuleParameterMonitor, moment):
            return nothing
        names = (self.attr,) if isinstance(self.attr, str) else self.attr or ()
        together = (
            self._joins and self.gate.only_steps_and_every and not self.buffer.places and not any("." in name for name in names)
        )
        return self._reads() if together else None

    def _reads(self) -> Reading | None:
        """What is read of each parameter; None if it cannot be said by one function for all monitors."""
        return None

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

    def _observe(
        self, module: nn.Module, found: dict[str, tuple[Any, ...]], stream: object = "", step_batch: StepBatch | None = None
    ) -> None:
        """Records one observation, with all parameters as its leaves. `stream` is counted by itself for `every`."""
        if found and self._due(module, self._training(module), stream):
            if self._joins and step_batch is not None and not self.buffer.places:
                found = step_batch.gather(self, module, found)
            for path, operands in found.items():
                self._record(module, *operands, path=path)
