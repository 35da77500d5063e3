"""How monitors are made: recipes, and signatures that show every option."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from torch import nn

from reducers import Reducer

__all__ = ["MonitorConstructor", "spelled_out"]

M = TypeVar("M")


@dataclass(frozen=True)
class MonitorConstructor(Generic[M]):
    """A frozen, picklable recipe: `constructor(attr, module)` makes a Monitor. Returned by `partialconstructor`."""

    kind: type[M]
    reducer: Reducer
    options: tuple[tuple[str, Any], ...] = ()

    def __call__(self, attr: Any = None, module: nn.Module | None = None) -> M:
        target = {} if attr is None else {"attr": attr}
        make: Callable[..., M] = self.kind
        return make(self.reducer, module=module, **target, **dict(self.options))


def spelled_out(cls: type, root: type) -> inspect.Signature:
    """The signature of `cls` with the arguments that `**options` passes up to `root`, so that help shows them."""
    found: dict[str, inspect.Parameter] = {}
    for owner in cls.__mro__:
        if "__init__" in owner.__dict__ and issubclass(owner, root):
            for name, parameter in inspect.signature(owner.__dict__["__init__"]).parameters.items():
                if name != "self" and parameter.kind is not inspect.Parameter.VAR_KEYWORD:
                    found.setdefault(name, parameter)
    return inspect.Signature(sorted(found.values(), key=lambda parameter: parameter.kind))
