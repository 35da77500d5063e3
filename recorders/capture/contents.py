"""What a module holds: the modules in it and the parameters of its own, by name. Layers of Keras keep them in lists of theirs."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from typing import Any

from torch import nn


def modules_in(module: nn.Module) -> dict[str, nn.Module]:
    """The modules that are directly in a module, by name.

    Of a layer of Keras by the name of the attribute that holds it, or else by `layer.name`; without its inputs, which nobody calls.
    """
    held = {name: child for name, child in module._modules.items() if child is not None}
    if not _is_keras(module):
        return held
    names = {id(child): name for name, child in held.items()}
    layers: Any = module._layers
    found = {name: child for name, child in held.items() if not (_is_keras(child) or name == "_torch_params")}
    for layer in layers:
        if type(layer).__name__ != "InputLayer":
            name = names.get(id(layer), layer.name)
            found[name if name not in found else f"{name}_{len(found)}"] = layer
    return found


def own_parameters(module: nn.Module) -> tuple[nn.Module, Mapping[str, nn.Parameter | None]]:
    """The module that PyTorch has the parameters of a module in, and these, by name: not those of modules in it."""
    if not _is_keras(module):
        own = module._parameters
        return module, own if isinstance(own, dict) else dict(own.items())  # those of TorchScript are in a container of C++
    variables: Any = [*module._trainable_variables, *module._non_trainable_variables]  # type: ignore[misc]
    parameters = {one.name: one.value for one in variables if isinstance(one.value, nn.Parameter)}
    held = module._modules.get("_torch_params")
    return module if held is None else held, parameters


def has_own_call(module: nn.Module) -> bool:
    """Whether the class of a module has a `__call__` that is not one of PyTorch, and may run no hooks."""
    call: Any = type(module).__call__
    return call is not nn.Module.__call__ and not str(getattr(call, "__module__", "")).startswith("torch.")


def all_modules(net: nn.Module) -> Iterator[nn.Module]:
    """A net and all modules in it, each once; also those that hold parameters for Keras, or wrap others."""
    seen: set[int] = set()
    waiting = [net]
    while waiting:
        module = waiting.pop()
        if id(module) not in seen:
            seen.add(id(module))
            yield module
            held = [child for child in module._modules.values() if child is not None]
            waiting += reversed([*modules_in(module).values(), *held])


def _is_keras(module: nn.Module) -> bool:
    there = sys.modules.get("keras.src.backend.torch.layer")
    return there is not None and isinstance(module, there.TorchLayer)
