"""Monitors on parameters: values, gradients, updates and optimizer state, one observation per optimizer step."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer
from torch.utils.weak import WeakIdKeyDictionary

from recorders.capture.batching import LOCK, Batch, Together, common
from recorders.errors import TargetError
from recorders.monitors.base import Monitor
from recorders.monitors.results import Results
from recorders.recordings.recording import Subrecording
from recorders.schedule.steps import StepHandle
from reducers import Reducer
from reducers.combinators.stacked import is_stackable

if TYPE_CHECKING:
    from typing_extensions import Self

__all__ = ["OptimizerStateMonitor", "ParameterGradientMonitor", "ParameterMonitor", "ParameterUpdateMonitor"]


class _ParameterMonitor(Monitor):
    """The parameters a module owns itself, each with a state of its own, or the ones that `attr` names.

    Args:
        attr: name of a parameter (dots for nested ones) or several; None for all that the module itself owns.
    """

    def __init__(
        self, reducer: Reducer, attr: str | Sequence[str] | None = None, module: nn.Module | None = None, **options: Any
    ) -> None:
        self._attr = attr if attr is None or isinstance(attr, str) else tuple(attr)
        super().__init__(reducer, module, **options)
        self._bare = self.filter_ is None and self.map_ is None and self.op_ is None
        self._joins = self._bare and is_stackable(self.reducer)  # whether it may be observed together with others
        self._common = common(self.reducer)
        self._lock = LOCK

    def clear(self) -> None:
        with LOCK:
            Batch.left += 1
            super().clear()

    def merge(self, other: Results | Subrecording) -> Self:
        with LOCK:
            Batch.left += 1
            return super().merge(other)

    def _bind(self, inputs: Mapping[str, tuple[Tensor, ...]]) -> None:
        with LOCK:
            Batch.left += self._joins
            super()._bind(inputs)

    def applies(self, module: nn.Module) -> bool:
        return any(True for _ in self._parameters(module))

    def _check(self, module: nn.Module) -> None:
        names = () if self._attr is None else (self._attr,) if isinstance(self._attr, str) else self._attr
        there = dict(module.named_parameters())
        for name in names:
            if name not in there:
                raise TargetError(f"{self.describe(module)}: no parameter {name!r}; it has {list(there) or 'none'}")
        if not names and not self.applies(module):
            raise TargetError(f"{self.describe(module)}: it owns no parameters itself; put the monitor on the modules inside it")

    def _parameters(self, module: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
        """Leaf path and parameter, read afresh each time, because parameters get replaced."""
        if self._attr is None:
            yield from ((name, parameter) for name, parameter in module._parameters.items() if parameter is not None)
            return
        for name in (self._attr,) if isinstance(self._attr, str) else self._attr:
            owner_path, _, leaf = name.rpartition(".")
            try:
                parameter = (module.get_submodule(owner_path) if owner_path else module)._parameters.get(leaf)
            except AttributeError:
                continue
            if parameter is not None:
                yield "" if isinstance(self._attr, str) else name, parameter

    def _among(self, module: nn.Module, mine: set[int]) -> list[tuple[str, nn.Parameter]]:
        """Those that are in `mine`."""
        there = self._parameters(module) if self._attr is not None else module._parameters.items()
        return [(path, parameter) for path, parameter in there if parameter is not None and id(parameter) in mine]

    def _attach(self, module: nn.Module) -> list[Any]:
        return [StepHandle(module, self)]

    def _before_step(self, module: nn.Module, optimizer: Optimizer, mine: set[int], together: Together) -> None:
        """The optimizer is about to change those of `mine`."""

    def _at_gradients(self, module: nn.Module, optimizer: Optimizer, mine: set[int], together: Together) -> None:
        """The gradients of `mine` are what the optimizer uses: just before its step, or after one that a closure served."""

    def _after_step(self, module: nn.Module, optimizer: Optimizer, mine: set[int], together: Together) -> None:
        """The optimizer has changed those of `mine`."""

    def _training(self, module: nn.Module | None) -> bool:
        # gradients are off while they arrive; they are training all the same
        return super()._training(module) if self.phase == "module" else True

    def rehearse(self) -> None:
        """Records the shapes of the parameters, where the module is on the meta device."""
        module = self.module
        if module is not None:
            self._observe(module, {path: (parameter, parameter) for path, parameter in self._parameters(module)})

    def _observe(
        self, module: nn.Module, found: dict[str, tuple[Any, ...]], stream: object = "", together: Together | None = None
    ) -> None:
        """All parameters of one moment: one sample. `every` counts the steps of each optimizer, the stream, apart."""
        if found and self._due(module, self._training(module), stream):
            if self._joins and together is not None:
                found = together.gather(self, module, found)
            for path, operands in found.items():
                self._record(module, *operands, path=path)


class ParameterMonitor(_ParameterMonitor):
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
        **options: Any,
    ) -> None:
        if when not in ("step", "call", "tick"):
            raise ValueError(f"ParameterMonitor(when={when!r}): choose 'step', 'call' or 'tick'")
        self.when = when
        super().__init__(reducer, attr, module, **options)

    def _attach(self, module: nn.Module) -> list[Any]:
        if self.when == "call":
            return [module.register_forward_hook(self._hook(self._after, "_trace_called"), prepend=self.prepend)]
        return super()._attach(module)

    def _trace_called(self, receiver: Tensor, module: nn.Module, *_: Any) -> None:
        if self._wanted_in_graph(module):
            for path, parameter in self._parameters(module):
                self._trace(receiver, module, parameter, path=path)

    def _after(self, module: nn.Module, *_: Any) -> None:
        if not self._passed_by():
            self._called(module)

    def _called(self, module: nn.Module) -> None:
        self._observe(module, {path: (parameter,) for path, parameter in self._parameters(module)})

    def _after_step(self, module: nn.Module, optimizer: Optimizer, mine: set[int], together: Together) -> None:
        if self.when == "step":
            found = {path: (parameter,) for path, parameter in self._among(module, mine)}
            self._observe(module, found, id(optimizer), together)

    def _training(self, module: nn.Module | None) -> bool:
        return super()._training(module) if self.when == "step" else Monitor._training(self, module)

    def tick(self) -> None:
        """Records the values as they are now, where `when="tick"`."""
        module = self.module
        if self.when == "tick" and self.registered and module is not None:
            self._called(module)


class ParameterGradientMonitor(_ParameterMonitor):
    """Records the gradients of parameters. Operands: gradient, value.

    Args:
        when: "step" takes the final gradient just as the optimizer uses it: accumulated, clipped, unscaled; where a closure makes
            the gradients, the last that it made. "accumulate" takes what has accumulated after every backward, scaled if a
            GradScaler scales. Sparse gradients are made dense.

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
        **options: Any,
    ) -> None:
        if when not in ("step", "accumulate"):
            raise ValueError(f"ParameterGradientMonitor(when={when!r}): choose 'step' or 'accumulate'")
        self.when = when
        self._hooked: Any = WeakIdKeyDictionary()
        super().__init__(reducer, attr, module, **options)

    def _attach(self, module: nn.Module) -> list[Any]:
        if self.when == "step":
            return super()._attach(module)
        self._hook_new(module)
        return [module.register_forward_pre_hook(self._hook(self._hook_new))]

    def deregister(self) -> Monitor:
        self._settle()
        for handle in self._hooked.values():
            handle.remove()
        self._hooked = WeakIdKeyDictionary()
        return super().deregister()

    def _hook_new(self, module: nn.Module, *_: Any) -> None:
        """Before every forward, because parameters get replaced, frozen and thawed."""
        for _path, parameter in self._parameters(module):
            if parameter.requires_grad and parameter not in self._hooked and not is_lazy(parameter):
                self._hooked[parameter] = parameter.register_post_accumulate_grad_hook(self._hook(self._accumulated))  # type: ignore[no-untyped-call]

    def _accumulated(self, parameter: nn.Parameter) -> None:
        module = self.module
        if module is None or parameter.grad is None:
            return
        for path, mine in self._parameters(module):
            if mine is parameter and self._due(module, self._training(module), path):
                self._record(module, _dense(parameter.grad), parameter, path=path)

    def _at_gradients(self, module: nn.Module, optimizer: Optimizer, mine: set[int], together: Together) -> None:
        if self.when != "step":
            return
        # set only on fused optimizers under a GradScaler: they unscale by themselves
        scale = getattr(optimizer, "grad_scale", None)
        found = {}
        for path, parameter in self._among(module, mine):
            gradient = parameter.grad
            if gradient is None:
                self._skip("no gradient (frozen or unused)")
                continue
            gradient = _dense(gradient)
            found[path] = gradient if scale is None else gradient / scale, parameter
        self._observe(module, found, id(optimizer), together if scale is None else None)  # else all would be there twice


class ParameterUpdateMonitor(_ParameterMonitor):
    """Records what an optimizer step changed. Operands: after, before; the default is `after - before`.

    While it is on and due it keeps memory for a copy of its parameters, which each step writes into.

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
        self, reducer: Reducer, attr: str | Sequence[str] | None = None, module: nn.Module | None = None, **options: Any
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

    def _before_step(self, module: nn.Module, optimizer: Optimizer, mine: set[int], together: Together) -> None:
        found = dict(self._among(module, mine))
        for path in found:
            self._kept.pop(path, None)  # of a step that was interrupted
        if found and not self._due(module, self._training(module), id(optimizer)):
            found = {}
            self._buffers = {}
        for path, parameter in found.items():
            if self._bare and together.takes(parameter) and parameter.dtype.is_floating_point:
                kept = self._buffers.get(path)
                if kept is None or not _alike(kept, parameter):
                    kept = self._buffers[path] = torch.empty_like(parameter.detach())
                together.keep(kept, parameter)
            else:
                kept = parameter.detach().clone()  # a callable may keep it
            self._kept[path] = kept

    def _after_step(self, module: nn.Module, optimizer: Optimizer, mine: set[int], together: Together) -> None:
        for path, parameter in self._among(module, mine):
            kept = self._kept.pop(path, None)
            if kept is None:
                continue
            if self._joins and kept is self._buffers.get(path) and together.takes(parameter) and _alike(kept, parameter):
                together.add_change(self, module, path, parameter, kept)
            else:
                self._record(module, parameter, kept, path=path)

    def _default(self, *operands: Any) -> Any:
        return operands[0].detach() - operands[1] if len(operands) > 1 else operands[0]


class OptimizerStateMonitor(_ParameterMonitor):
    """Records what the optimizer keeps for each parameter, after its step. Operands: state tensor, value.

    Args:
        key: name of the state, such as "exp_avg" or "momentum_buffer".

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
        self, reducer: Reducer, key: str, attr: str | Sequence[str] | None = None, module: nn.Module | None = None, **options: Any
    ) -> None:
        if not isinstance(key, str) or not key:
            raise TargetError(f"OptimizerStateMonitor needs the name of a state, such as 'exp_avg'; got {key!r}")
        self.key = key
        super().__init__(reducer, attr, module, **options)

    def _after_step(self, module: nn.Module, optimizer: Optimizer, mine: set[int], together: Together) -> None:
        found = {}
        for path, parameter in self._among(module, mine):
            if parameter.grad is None:
                continue
            kept = optimizer.state.get(parameter, {})
            if self.key not in kept:
                error = TargetError(
                    f"{type(optimizer).__name__} keeps no {self.key!r} for {path or self._attr!r}; it keeps {sorted(kept)}"
                )
                self._fail(error, module, ())
                continue
            value = kept[self.key]
            if value is not None:  # SGD without momentum
                found[path] = value if isinstance(value, Tensor) else torch.tensor(value), parameter
        self._observe(module, found, id(optimizer), together)


def _dense(gradient: Tensor) -> Tensor:
    return gradient if gradient.layout is torch.strided else gradient.to_dense()


def _alike(a: Tensor, b: Tensor) -> bool:
    return a.shape == b.shape and a.dtype is b.dtype and a.device == b.device
