"""MonitorConstructor: the recipe of a monitor."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Generic, TypeVar

from torch import nn

from recorders.errors import TargetError
from recorders.recordings.distributed.placement import Placement
from recorders.ring.state import MonitorState
from reducers import Reducer, State
from reducers.core.reducer import check_reducer

M = TypeVar("M")


@dataclass(frozen=True)
class MonitorConstructor(Generic[M]):
    """A frozen, picklable recipe: `constructor(attr, module)` makes a Monitor. Returned by `partialconstructor`."""

    kind: type[M]
    reducer: Reducer
    options: tuple[tuple[str, Any], ...] = ()

    def __call__(self, attr: Any = None, module: nn.Module | None = None) -> M:
        """Makes a monitor. If its kind watches no attribute, `attr` is the name of a module in `module`, which it is put on."""
        make: Callable[..., M] = self.kind
        target = {} if attr is None else {"attr": attr}
        if isinstance(attr, str) and module is not None and "attr" not in inspect.signature(make).parameters:
            target, module = {}, _submodule(module, attr, self.kind.__name__)
        return make(self.reducer, module=module, **target, **dict(self.options))

    def as_code(self, attr: Any) -> str:
        """The monitor's arguments as code."""
        parts = [repr(self.reducer), *([repr(attr)] if attr is not None else [])]
        return f"{self.kind.__name__}({', '.join([*parts, *(f'{name}={value!r}' for name, value in self.options)])})"


def _submodule(module: nn.Module, name: str, kind: str) -> nn.Module:
    try:
        return module.get_submodule(name)
    except AttributeError:
        names = [known for known, _ in module.named_modules() if known][:20]
        raise TargetError(f"{kind}: {type(module).__name__} has no module {name!r}; it has {names}") from None


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
    constructor: MonitorConstructor[Any],
    attr: Any,
    name: str,
    states: dict[str, State],
    samples: int,
    functions: tuple[Any, ...],
    places: Mapping[str, Placement],
    eligible: Mapping[str, int] = MappingProxyType({}),
    clock: Any = None,
) -> Any:
    """A monitor as it was pickled or copied: what it recorded, and its place in `every` and in the steps, without a module."""
    monitor = constructor(attr)
    monitor.name, monitor._functions = name, functions
    monitor.buffer.stored = MonitorState(states, {}, {}, merged=samples)
    monitor.buffer.keep_places(places)
    monitor.gate.eligible = dict(eligible)
    if clock is not None:
        monitor.clock = clock
    return monitor
