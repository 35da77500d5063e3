"""Everything that a run of a step may change, copied before and put back after: of modules, of optimizers, and random numbers."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from recorders.capture.copying import CONTAINERS
from recorders.capture.operands import leaves, mapped
from recorders.monitors.sites import copied
from recorders.watch.diagnosis.probe.copied import RandomState

_KEPT = ("_parameters", "_buffers", "_modules")
"""Attributes of each module that are put back; those with hooks are not, since recorders may move their hooks meanwhile."""


class Restored:
    """Copies of all tensors, gradients, attributes and modes that modules and optimizers have, and of the random numbers to come.

    Tensors are put back in place, and only those that changed: a graph of the user that has saved them stays valid.

    Args:
        objects: modules and optimizers.
    """

    def __init__(self, objects: Iterable[nn.Module | torch.optim.Optimizer]) -> None:
        objects = list(objects)
        modules = {id(module): module for net in objects if isinstance(net, nn.Module) for module in net.modules()}
        self._modules = list(modules.values())
        self._tensors: dict[int, tuple[Tensor, Tensor]] = {}
        self._undo: list[Callable[[], None]] = []
        for module in self._modules:
            self._keep_attributes(module)
        for optimizer in objects:
            if isinstance(optimizer, torch.optim.Optimizer):
                self._keep_optimizer(optimizer)
        self._random = random_state(self._modules, [tensor for tensor, _ in self._tensors.values()])

    def restore(self) -> None:
        """Put everything back."""
        with torch.no_grad():
            for undo in self._undo:
                undo()
            for tensor, kept in self._tensors.values():
                if not _equal(tensor, kept):  # batch norm writes to its buffers without a new version
                    _write(tensor, kept)
        self._random.restore([generator for module in self._modules for generator in inner_generators_of(module)])

    def _keep_attributes(self, module: nn.Module) -> None:
        plain = nn.Module().__dict__
        values = {key: value for key, value in vars(module).items() if key in _KEPT or key == "training" or key not in plain}
        insides = [(one, copy.copy(one)) for one in _containers([*values.values()])]

        def undo() -> None:
            now = vars(module)
            for key in [key for key in now if key not in values and key not in plain]:
                del now[key]
            for key, value in values.items():
                if key not in now or now[key] is not value:
                    now[key] = value
            for one, then in insides:
                _refill(one, then)

        self._undo.append(undo)
        for value in values.values():
            self._keep_tensors(value)

    def _keep_tensors(self, value: Any) -> None:
        for _, tensor in leaves(value):
            if id(tensor) not in self._tensors:
                self._tensors[id(tensor)] = tensor, tensor.detach().clone()
                if tensor.is_leaf:
                    self._keep_gradient(tensor)

    def _keep_gradient(self, tensor: Tensor) -> None:
        gradient, required = tensor.grad, tensor.requires_grad
        if gradient is not None:
            self._tensors[id(gradient)] = gradient, gradient.detach().clone()

        def undo() -> None:
            # A step may freeze parameters, or begin a loss with a buffer of zero that requires gradients.
            if tensor.is_leaf and tensor.requires_grad != required:
                tensor.requires_grad_(required)
            if tensor.is_leaf and tensor.grad is not gradient:
                tensor.grad = gradient

        self._undo.append(undo)

    def _keep_optimizer(self, optimizer: torch.optim.Optimizer) -> None:
        for group in optimizer.param_groups:
            self._keep_tensors(group["params"])
        groups = [dict(group) for group in optimizer.param_groups]
        states = {parameter: mapped(dict(state), copied) for parameter, state in optimizer.state.items()}

        def undo() -> None:
            for group, kept in zip(optimizer.param_groups, groups, strict=False):
                _refill(group, kept)
            optimizer.state.clear()
            for parameter, state in states.items():
                optimizer.state[parameter] = mapped(state, copied)

        self._undo.append(undo)


def _containers(values: Iterable[Any]) -> Iterator[Any]:
    """The containers among values, and those in them."""
    seen = set[int]()
    waiting = [*values]
    while waiting:
        value = waiting.pop()
        if type(value) in CONTAINERS and id(value) not in seen:
            seen.add(id(value))
            yield value
            waiting += value.values() if isinstance(value, dict) else value


def inner_generators_of(module: nn.Module) -> list[torch.Generator]:
    """The generators that one module keeps as attributes."""
    return [value for value in vars(module).values() if isinstance(value, torch.Generator)]


def random_state(modules: list[nn.Module], tensors: Iterable[Tensor]) -> RandomState:
    """The random numbers to come: of PyTorch on all devices in use, of Python, of NumPy, and of generators in these modules."""
    devices = {tensor.device for tensor in tensors if tensor.device.type not in ("cpu", "meta")}
    if torch.cuda.is_available() and torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        devices |= {torch.device("cuda", torch.cuda.current_device())}
    generators = [generator for module in modules for generator in inner_generators_of(module)]
    return RandomState(sorted(devices, key=str), generators)


def _equal(tensor: Tensor, kept: Tensor) -> bool:
    if tensor.is_meta or tensor.shape != kept.shape:
        return tensor.shape == kept.shape
    return tensor.layout is torch.strided and bool(((tensor == kept) | ((tensor != tensor) & (kept != kept))).all())  # NaN too


def _write(tensor: Tensor, kept: Tensor) -> None:
    with torch.inference_mode(tensor.is_inference()):
        if tensor.shape == kept.shape:
            tensor.data.copy_(kept)  # of which graphs that saved it take no note: it is what it was
        else:
            tensor.data = kept.clone()


def _refill(value: Any, kept: Any) -> None:
    """Give a container the items it had, unless it has just these."""
    if isinstance(value, dict):
        if [*map(id, value.values()), *value] != [*map(id, kept.values()), *kept]:
            value.clear()
            value.update(kept)
    elif isinstance(value, set):
        value.clear()
        value.update(kept)
    elif [*map(id, value)] != [*map(id, kept)]:
        value.clear()
        value.extend(kept)
