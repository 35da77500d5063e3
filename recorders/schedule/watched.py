"""Watched: all parameters that the monitors of optimizer steps watch, and in which modules they are."""

from __future__ import annotations

import weakref
from collections.abc import Collection, Mapping, Sequence
from itertools import chain
from operator import attrgetter, methodcaller
from typing import Any, TypeAlias

from torch import nn

from recorders._torch import graph_task
from recorders.capture.entering import failure_of

__all__ = ["Entry", "Registered", "Watched", "contents", "target"]

Registered: TypeAlias = "Mapping[int, tuple[weakref.ref[nn.Module], weakref.ref[Any]]]"
Entry: TypeAlias = tuple[int, int, str, int, int]
"""A parameter of a monitor: the number of the monitor, its place among those, the path, and the ids of its module and of itself."""


class Watched:
    """All parameters that monitors of steps watch, and where they are.

    Attributes:
        modules: those whose parameters they are, by their ids.
        moments: when anything is read of them.
    """

    def __init__(self, registered: Registered) -> None:
        self._entries: dict[int, list[Entry]] = {}  # by the id of the parameter
        self._nested: list[tuple[Any, Any, list[Any]]] = []  # monitors of parameters of modules inside theirs
        self._backward, self.moments = -1, set[str]()
        owners: dict[int, nn.Module] = {}
        for number, (module_ref, ref) in registered.items():
            module, monitor = module_ref(), ref()
            if module is None or monitor is None or monitor.reading is None:
                continue
            there: list[Any] = []
            failure_of(monitor._fail, _look, there, monitor, module)
            owners[id(module)] = module
            self.moments.add(monitor.reading.when)
            for place, (owner, path, parameter) in enumerate(there):
                owners[id(owner)] = owner
                self._entries.setdefault(id(parameter), []).append((number, place, path, id(owner), id(parameter)))
            if any(owner is not module for owner, _, _ in there):
                self._nested.append((module_ref, ref, [*map(_ids, there)]))
        self.modules = {key: weakref.ref(owner) for key, owner in owners.items()}
        *self._contents, _ = contents([*owners.values()])

    def holds(self, by_table: bool = False) -> bool:
        """Whether all parameters are where they were. In one backward, in which many optimizers may step, it is compared once.

        Args:
            by_table: whether the table of an optimizer has all of them, and compares them itself.
        """
        if by_table:
            return True
        backward = graph_task()
        if backward > 0 and backward == self._backward:  # 0: the first, or one of which PyTorch does not tell
            return True
        modules = [*map(target, self.modules.values())]
        if None in modules:
            return False
        owned = [*map(_owned, modules)]
        names, ids = self._contents
        if [*map(id, chain.from_iterable(map(_values, owned)))] != ids or [*chain.from_iterable(owned)] != names:
            return False
        for module_ref, ref, ids in self._nested:
            module, monitor = module_ref(), ref()
            if module is not None and monitor is not None and [*map(_ids, monitor.parameters_of(module))] != ids:
                return False
        self._backward = backward
        return True

    def among(self, mine: Collection[int]) -> list[Entry]:
        """Where these parameters are, in the order of the monitors."""
        return sorted([entry for key in mine if key in self._entries for entry in self._entries[key]])

    def is_in(self, modules: int) -> bool:
        """Whether a table of so many modules has all that is watched."""
        return modules == len(self.modules) and not self._nested


def _look(there: list[Any], monitor: Any, module: nn.Module) -> None:
    there += monitor.parameters_of(module)


def _ids(place: tuple[nn.Module, str, nn.Parameter]) -> tuple[int, str, int]:
    return id(place[0]), place[1], id(place[2])


def contents(modules: Sequence[nn.Module]) -> tuple[list[str], list[int], list[Any]]:
    """Returns the names, the ids and the values of the parameters that modules own."""
    owned = [*map(_owned, modules)]
    parameters = [*chain.from_iterable(map(_values, owned))]
    return [*chain.from_iterable(owned)], [*map(id, parameters)], parameters


target: Any = weakref.ref.__call__
"""Returns what a weak reference refers to."""
_owned, _values = attrgetter("_parameters"), methodcaller("values")
