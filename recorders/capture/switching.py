"""Hooks that are not due are taken out of PyTorch's dictionaries, and put back under the same ids at the same place.

A hook that does nothing costs a call all the same, and a module without hooks takes a shorter way: in small steps that is more than
any budget. While a hook is out, the dictionary that it belongs to keeps it as an attribute. So it lives as long as it would in the
dictionary, without the Recorder too, and a copy of the model has a no-op there, as it has for hooks that are on.

`torch.compile` must find every hook: it writes no guard for one that is not there, and would run such a graph for ever. So whenever
it begins to compile, all hooks that are out are put back first, and those that it found stay where they are from then on.
"""

from __future__ import annotations

import sys
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable
from typing import Any, Protocol, TypeAlias
from weakref import WeakSet

from recorders._torch import compilation
from recorders.capture.context import capturing

__all__ = ["Switchable", "SwitchedHooks", "grouped", "hook_of", "put_back", "take_out"]

Hooks: TypeAlias = "OrderedDict[int, Any]"
Group: TypeAlias = "tuple[Callable[[], Hooks | None], tuple[int, ...]]"  # a weak reference to the dictionary, ids in it


class Switchable(Protocol):
    """What has hooks that may be taken out."""

    def switchable(self) -> tuple[list[Any], bool]:
        """The handles of its hooks that may be taken out now, and whether these will stay the same."""


_OUT = "hooks taken out"
PATIENCE = 8  # times that hooks are put back because something is compiled; after that they stay


def grouped(handles: Iterable[Any]) -> list[Group]:
    """By dictionary the ids behind handles that PyTorch gave for hooks; hooks that graphs know are left out."""
    found: dict[int, tuple[Any, list[int]]] = {}
    for handle in handles:
        hooks = handle.hooks_dict_ref()
        if isinstance(hooks, OrderedDict) and not getattr(hook_of(handle), "traced", False):
            found.setdefault(id(hooks), (handle.hooks_dict_ref, []))[1].append(handle.id)
    return [(hooks, tuple(ids)) for hooks, ids in found.values()]


def hook_of(handle: Any) -> Any:
    """What the handle stands for, whether it is out or not; None if it was removed."""
    hooks = handle.hooks_dict_ref()
    if hooks is None:
        return None
    return hooks[handle.id] if handle.id in hooks else vars(hooks).get(_OUT, {}).get(handle.id, (None,))[0]


def take_out(groups: Iterable[Group]) -> None:
    """Takes hooks out of their dictionaries. Flags of a hook that PyTorch keeps in other dictionaries, by its id, stay."""
    for dictionary, ids in groups:
        hooks = dictionary()
        if hooks is None:
            continue
        out = vars(hooks).setdefault(_OUT, {})
        there = list(hooks) if _ordered(hooks) else []
        for key in ids:
            if key in hooks:
                out[key] = hooks[key], there
                del hooks[key]


def put_back(groups: Iterable[Group]) -> None:
    """Puts hooks back that are out. What was interrupted is completed by the next call."""
    for dictionary, ids in groups:
        hooks = dictionary()
        out = None if hooks is None else vars(hooks).get(_OUT)
        if hooks is None or not out:
            continue
        among = bool(hooks) and _ordered(hooks)
        for key in ids:
            if key in out:
                hook, there = out[key]
                hooks[key] = hook
                if among:
                    _order(hooks, key, there)
                del out[key]


def _ordered(hooks: Hooks) -> bool:
    """Whether it matters in which order hooks are called: not where all are ours."""
    return getattr(hooks, "ordered", True)


def _order(hooks: Hooks, key: int, there: list[int]) -> None:
    """Moves `key` behind what stood before it when it was taken out, and before all others but those that were put first since."""
    others = [other for other in hooks if other != key]
    before = set(there[: there.index(key)])
    behind = [index + 1 for index, other in enumerate(others) if other in before]
    known = [index for index, other in enumerate(others) if other in there]
    later = others[behind[-1] if behind else known[0] if known else 0 :]
    deque(map(hooks.move_to_end, later), maxlen=0)  # in one call of C, which no signal interrupts halfway


class SwitchedHooks:
    """The hooks of some monitors, which are taken out and put back together.

    Attributes:
        again: the step from which on it is worth to ask the monitors again which of their hooks to take out.
    """

    def __init__(self) -> None:
        self._groups: list[Group] = []
        self._out: list[Group] = []
        self.again, self._wait, self._returns = 0, 1, 0
        _all.add(self)

    def change(self) -> None:
        """The monitors, or their hooks, are others from now on."""
        self.again, self._wait = 0, 1

    def off(self, monitors: Iterable[Switchable], step: int) -> None:
        """Takes the hooks out. Monitors that were never called are asked again at steps twice as far apart each time."""
        if step >= self.again:
            found = [monitor.switchable() for monitor in monitors]
            self._wait *= 2
            self.again = sys.maxsize if all(final for _, final in found) else step + self._wait
            self._groups = grouped(handle for handles, _ in found for handle in handles) if self._returns < PATIENCE else []
        if self._groups:
            _listen()
            self._out = self._groups
            take_out(self._out)

    def on(self) -> None:
        """Puts the hooks back."""
        put_back(self._out)
        self._out = []

    def restore_for_compiler(self) -> None:
        """Something is about to be compiled. Where that happens again and again the hooks stay from now on."""
        if self._out:
            self.on()
            self.change()
            self._returns += 1
            self._groups = []


_all: WeakSet[SwitchedHooks] = WeakSet()


class _Lasting(list[Any]):
    """Callbacks, one of which `torch._dynamo.reset()`, which clears the list, does not remove."""

    def clear(self) -> None:
        super().clear()
        self.append(_compiling)


def _listen() -> None:
    handler = compilation.callback_handler
    if _compiling not in handler.start_callbacks:
        handler.start_callbacks = _Lasting([*handler.start_callbacks, _compiling])


def _compiling(found: Any) -> None:
    """Called by the compiler before it looks at a program; what a monitor compiles for itself holds no modules."""
    if found.callback_trigger is compilation.CallbackTrigger.DYNAMO and not capturing():
        for switched in list(_all):
            switched.restore_for_compiler()
