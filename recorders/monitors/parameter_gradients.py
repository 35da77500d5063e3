"""Monitor of the gradients of parameters."""

from __future__ import annotations

from collections.abc import Sequence
from operator import attrgetter
from typing import TYPE_CHECKING, Any, Literal
from weakref import WeakValueDictionary

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer
from torch.utils.weak import WeakIdKeyDictionary

from recorders.capture.calls import Call
from recorders.capture.switching import remove
from recorders.monitors.base import Monitor
from recorders.monitors.constructor import MonitorConstructor
from recorders.monitors.module_parameters import ModuleParameterMonitor
from recorders.monitors.options import MonitorOptions
from recorders.schedule.table import GRADIENTS, ODD, Reading
from reducers import Reducer

if TYPE_CHECKING:
    from typing_extensions import Self, Unpack

__all__ = ["ParameterGradientMonitor"]


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
        self._hooked: Any = WeakIdKeyDictionary()
        self._hooked_at = WeakValueDictionary[str, nn.Parameter]()
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
        return [*super().all_handles(), *self._hooked.values()]

    def deregister(self) -> Monitor:
        self._restore_hooks()
        for handle in self._hooked.values():
            remove(handle)
        self._hooked = WeakIdKeyDictionary()
        return super().deregister()

    def _hook_new(self, module: nn.Module, *_: Any) -> None:
        """Hooks parameters that have no hook yet. Before every forward, because parameters may be replaced, frozen and unfrozen."""
        for path, parameter in self._parameters(module):
            before = self._hooked_at.get(path)
            if before is not None and before is not parameter and before in self._hooked:
                remove(self._hooked.pop(before))  # FSDP2 would report its gradient a second time, reduced and cut
            self._hooked_at[path] = parameter
            if parameter.requires_grad and parameter not in self._hooked and not is_lazy(parameter):
                self._hooked[parameter] = parameter.register_post_accumulate_grad_hook(self._hook(self._accumulated))  # type: ignore[no-untyped-call]

    def _accumulated(self, parameter: nn.Parameter) -> None:
        module = self.module
        if module is None or parameter.grad is None:
            return
        for path, mine in self._parameters(module):
            if mine is parameter and self._due(module, self._training(module), path):
                self._see(Call("step", module, values=(_dense(parameter.grad), parameter)), path)

    absence = "no gradient (frozen or unused)"

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
