"""Monitors of parameters: of their values, gradients and updates, and of what the optimizer keeps for them."""

from __future__ import annotations

import weakref
from collections.abc import Container, Iterator, Mapping, Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer

from recorders._torch import address_of, drop_accumulate_hooks, hooks_ref
from recorders.capture.calls import Call
from recorders.capture.hooks import Hook
from recorders.capture.operands import as_operand
from recorders.capture.switching import remove
from recorders.errors import TargetError
from recorders.monitors.base import Monitor
from recorders.monitors.callables import together_of
from recorders.monitors.constructor import MonitorConstructor
from recorders.monitors.module_parameters import ModuleParameterMonitor
from recorders.monitors.options import MonitorOptions
from recorders.monitors.record import store, work
from recorders.schedule.table import CHANGE, GRADIENTS, ODD, VALUES, Reading, alike
from reducers import Reducer
from reducers.execution.stacked import row_parts

if TYPE_CHECKING:
    from typing_extensions import Self, Unpack


class ParameterOptions(MonitorOptions, total=False):
    """The options of `ParameterMonitor`."""

    when: Literal["step", "call", "tick"]


class ParameterMonitor(ModuleParameterMonitor):
    """Records the values of parameters. Operands: value.

    Args:
        when: "step" after every optimizer step that holds the parameter, "call" after every forward of the module,
            "tick" only when `tick()` is called.

    Raises:
        ValueError: `when` is none of these.

    >>> import torch
    >>> from reducers import Norm
    >>> layer = torch.nn.Linear(4, 2)
    >>> monitor = ParameterMonitor(Norm(), "weight", layer, when="tick")
    >>> monitor.tick()
    >>> torch.testing.assert_close(monitor.peek().float(), layer.weight.norm().detach())
    """

    operand_names = ("value",)

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
            self._observe(module, {path: (value,) for path, value in self._parameters(module)})


@dataclass(frozen=True)
class _AccumulateHook:
    """A hook that is called when a gradient was accumulated in a parameter.

    It holds no weak reference to the parameter: PyTorch refuses to swap tensors that have one, and conversions of nets may do so
    (`torch.utils.swap_tensors`).

    Attributes:
        handle: that of the hook.
        parameter: the `id` of the parameter.
        contents: the address of what a swap exchanges.
    """

    handle: Any
    parameter: int
    contents: int

    def is_on(self, parameter: nn.Parameter) -> bool:
        """Whether PyTorch calls it for this parameter."""
        same = (self.parameter, self.contents) == (id(parameter), address_of(parameter))
        return same and hooks_ref(self.handle)() is not None  # otherwise this is another parameter, at the same place in memory

    def take_off(self, parameter: nn.Parameter) -> None:
        """Removes the hook, which is not on `parameter`; after a swap with all of our hooks that are beside it.

        PyTorch calls no hook of before the swap, nor one that is put beside them. If there are hooks of the user, they stay.
        """
        remove(self.handle)
        hooks = hooks_ref(self.handle)()
        if self.parameter == id(parameter) and hooks is not None and all(isinstance(hook, Hook) for hook in hooks.values()):
            drop_accumulate_hooks(parameter)


class ParameterGradientOptions(MonitorOptions, total=False):
    """The options of `ParameterGradientMonitor`."""

    when: Literal["step", "accumulate"]


class ParameterGradientMonitor(ModuleParameterMonitor):
    """Records the gradients of parameters. Operands: gradient, value.

    Args:
        when: "step" records the final gradient as the optimizer uses it: accumulated, clipped, unscaled; if a closure computes the
            gradients, the last ones. "accumulate" records the accumulated gradient after every backward, scaled if a GradScaler
            scales. Under DDP and FSDP2 "step" is the global gradient, reduced over ranks, and "accumulate" that of this rank.
            Sparse gradients are converted to dense tensors.

    >>> import torch
    >>> from reducers import Sum
    >>> layer = torch.nn.Linear(2, 1)
    >>> monitor = ParameterGradientMonitor(Sum(), "weight", layer)
    >>> optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
    >>> layer(torch.tensor([[1.0, 2.0]])).sum().backward()
    >>> optimizer.step()
    >>> monitor.peek()
    tensor(3., dtype=torch.float64)
    """

    operand_names = ("gradient", "value")

    def __init__(
        self,
        reducer: Reducer,
        attr: str | Sequence[str] | None = None,
        module: nn.Module | None = None,
        *,
        when: Literal["step", "accumulate"] = "step",
        **options: Unpack[MonitorOptions],
    ) -> None:
        if when not in ("step", "accumulate"):
            raise ValueError(f"ParameterGradientMonitor(when={when!r}): choose 'step' or 'accumulate'")
        self.when, self.reading = when, _GRADIENTS if when == "step" else None
        self._hooked: dict[str, _AccumulateHook] = {}
        super().__init__(reducer, attr, module, **options)
        self.buffer.shared = when == "step"

    if TYPE_CHECKING:  # the same function, with types for the options of this kind

        @classmethod
        def partialconstructor(cls, reducer: Reducer, **options: Unpack[ParameterGradientOptions]) -> MonitorConstructor[Self]: ...

    def _attach(self, module: nn.Module) -> list[Any]:
        if self.when == "step":
            return super()._attach(module)
        self._hook_new(module)
        return [module.register_forward_pre_hook(self._hook(self._hook_new))]

    hooks_change = True  # a parameter that is replaced gets a new one

    def all_handles(self) -> list[Any]:
        return [*super().all_handles(), *(hook.handle for hook in self._hooked.values())]

    def deregister(self) -> Monitor:
        self._restore_hooks()
        for hook in self._hooked.values():
            remove(hook.handle)
        self._hooked = {}
        return super().deregister()

    def _hook_new(self, module: nn.Module, *_: Any) -> None:
        """Hooks parameters that have no hook yet. Before every forward, because parameters may be replaced, frozen and unfrozen."""
        for path, parameter in self._parameters(module):
            before = self._hooked.get(path)
            if before is not None and before.is_on(parameter):
                continue
            if before is not None:
                del self._hooked[path]
                if before not in self._hooked.values():
                    before.take_off(parameter)  # FSDP2 would report its gradient a second time, reduced and cut
            tied = next((hook for hook in self._hooked.values() if hook.is_on(parameter)), None)
            if tied is not None:
                self._hooked[path] = tied
            elif parameter.requires_grad and not is_lazy(parameter):
                handle = parameter.register_post_accumulate_grad_hook(self._hook(self._accumulated))  # type: ignore[no-untyped-call]
                self._hooked[path] = _AccumulateHook(handle, id(parameter), address_of(parameter))

    def _accumulated(self, parameter: nn.Parameter) -> None:
        module = self.module
        if module is None or parameter.grad is None:
            return
        for path, mine in self._parameters(module):
            if mine is parameter and self._due(module, self._training(module), path):
                self._see(Call("step", module, values=(_dense(parameter.grad), parameter)), path)

    absence = "no gradient (frozen or unused)"

    def unseen(self) -> str:
        if self.when == "accumulate":
            without = "torch.autograd.grad and compiled autograd call no such hook"
            return f"no gradient was accumulated: call backward() while hooks are on; {without}"
        return f"{super().unseen()}, and gradients are recorded at these: call optimizer.step() while hooks are on"

    def operands_of(self, optimizer: Optimizer, path: str, parameter: nn.Parameter) -> tuple[Any, ...] | None:
        gradient = parameter.grad
        if gradient is None:
            self._skip(self.absence)
            return None
        # PyTorch sets it only on fused optimizers under a GradScaler, which unscale by themselves
        scale = getattr(optimizer, "grad_scale", None)
        return _dense(gradient) if scale is None else _dense(gradient) / scale, parameter


def _gradients(parameters: Sequence[Any], optimizer: Optimizer) -> Sequence[Any]:
    """The gradients; if they are scaled, the monitors are asked: copies of all at once would double the memory."""
    if getattr(optimizer, "grad_scale", None) is not None:
        return [ODD] * len(parameters)
    return [*map(_grad, parameters)]


_grad = attrgetter("grad")
_GRADIENTS = Reading(GRADIENTS, _gradients)


def _dense(gradient: Tensor) -> Tensor:
    return gradient if gradient.layout is torch.strided else gradient.to_dense()


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

    operand_names = ("after", "before")
    reading: Reading | None = Reading(CHANGE, lambda parameters, optimizer: parameters)

    def __init__(
        self,
        reducer: Reducer,
        attr: str | Sequence[str] | None = None,
        module: nn.Module | None = None,
        **options: Unpack[MonitorOptions],
    ) -> None:
        self.before: dict[str, Tensor] = {}  # copies of the parameters, by path; those that steps overwrite stay
        super().__init__(reducer, attr, module, **options)
        together = together_of(self)
        if together is not None and type(self).operands is Monitor.operands and not self.given:
            self.reading = Reading(CHANGE, as_they_are, together)
            self._stackable = row_parts(self.reducer, numbers=True) is not None

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

    def record_leaf(self, module: nn.Module, path: str, x: Tensor) -> None:
        if self.reading is None or self.reading.together is None:
            super().record_leaf(module, path, x)
        else:  # what `op_` would make of it
            work(self, module, (x,), store, self, {path: (x,)})

    def _default(self, *operands: Any) -> Any:
        return operands[0].detach() - operands[1] if len(operands) > 1 else operands[0]


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

    operand_names = ("state", "value")

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


def as_they_are(parameters: Sequence[Any], optimizer: Optimizer) -> Sequence[Any]:
    """Reads the parameters themselves. For `Reading`."""
    return parameters


_VALUES = Reading(VALUES, as_they_are)


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
