"""Which modules a lens selects: activation functions, dropout, others by class, or by the parameters that they own."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TypeAlias

from torch import nn
from torch.nn.parameter import is_lazy

__all__ = ["Classes", "HasMatrix", "OfKind", "any_module", "classes", "not_activation"]

Classes: TypeAlias = "type[nn.Module] | Iterable[type[nn.Module]]"


def any_module(name: str, module: nn.Module) -> bool:
    """Selects every module."""
    return True


def not_activation(name: str, module: nn.Module) -> bool:
    """Selects every module except the activation functions of `torch.nn`; attention is not one of them.

    >>> not_activation("act", nn.ReLU()), not_activation("attention", nn.MultiheadAttention(4, 2))
    (False, True)
    """
    return type(module).__module__ != "torch.nn.modules.activation" or isinstance(module, nn.MultiheadAttention)


def classes(given: Classes) -> tuple[type[nn.Module], ...]:
    """One class or several, as a tuple."""
    return (given,) if isinstance(given, type) else tuple(given)


@dataclass(frozen=True)
class OfKind:
    """Selects modules of these kinds.

    Args:
        activation: whether to select the activation functions of `torch.nn`.
        dropout: whether to select its dropout layers.
        include: further classes; their subclasses count.
        exclude: classes that are never selected; their subclasses count.

    >>> kind = OfKind(include=(nn.Linear,), exclude=(nn.GELU,))
    >>> [kind("", module) for module in (nn.ReLU(), nn.Linear(1, 1), nn.GELU(), nn.Dropout())]
    [True, True, False, False]
    """

    activation: bool = True
    dropout: bool = False
    include: tuple[type[nn.Module], ...] = ()
    exclude: tuple[type[nn.Module], ...] = ()

    def __call__(self, name: str, module: nn.Module) -> bool:
        return not isinstance(module, self.exclude) and (
            isinstance(module, self.include)
            or (self.activation and not not_activation(name, module))
            or (self.dropout and type(module).__module__ == "torch.nn.modules.dropout")
        )


@dataclass(frozen=True)
class HasMatrix:
    """Selects modules of which one of these parameters has two axes or more; parameters without a shape as yet count too."""

    parameters: tuple[str, ...]

    def __call__(self, name: str, module: nn.Module) -> bool:
        found = [module._parameters.get(parameter) for parameter in self.parameters]
        return any(parameter is not None and (is_lazy(parameter) or parameter.ndim > 1) for parameter in found)
