"""MonitorConstructor: the recipe of a monitor."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from torch import nn

from recorders.capture.buffers import MonitorState
from reducers import Reducer, State
from reducers.core.reducer import check_reducer

__all__ = ["MonitorConstructor", "checked_recipe", "rebuild", "recipe"]

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

    def as_code(self, attr: Any) -> str:
        """The monitor's arguments as code."""
        parts = [repr(self.reducer), *([repr(attr)] if attr is not None else [])]
        return f"{self.kind.__name__}({', '.join([*parts, *(f'{name}={value!r}' for name, value in self.options)])})"


def checked_recipe(kind: type[M], reducer: Reducer, options: Mapping[str, Any], known: Mapping[str, Any]) -> MonitorConstructor[M]:
    """The recipe with these options.

    Raises:
        ReducerTypeError: `reducer` is no reducer instance.
        TypeError: an option is not known.
    """
    check_reducer(reducer, f"{kind.__name__}.partialconstructor")
    if unknown := sorted(set(options) - set(known)):
        raise TypeError(f"{kind.__name__}.partialconstructor got {unknown}; it takes {list(known)}")
    return MonitorConstructor(kind, reducer, tuple(sorted(options.items())))


def recipe(kind: type[M], reducer: Reducer, options: Mapping[str, Any], defaults: Mapping[str, Any]) -> MonitorConstructor[M]:
    """The recipe with those options that differ from their defaults."""
    changed = {name: value for name, value in options.items() if value is not defaults[name] and value != defaults[name]}
    return MonitorConstructor(kind, reducer, tuple(sorted(changed.items())))


def rebuild(
    constructor: MonitorConstructor[Any], attr: Any, name: str, states: dict[str, State], samples: int, functions: tuple[Any, ...]
) -> Any:
    """A monitor as it was pickled or copied: what it recorded, without a module."""
    monitor = constructor(attr)
    monitor.name, monitor._functions = name, functions
    monitor.buffer.stored = MonitorState(states, {}, {}, merged=samples)
    return monitor
