"""SwitchedHooks: takes hooks that are not due out of PyTorch's dictionaries; puts them back under the same ids, at the same place.

A hook that does nothing still costs a call, and PyTorch calls a module without hooks on a shorter path. In short steps these costs
exceed any budget. While a hook is out, an attribute of its dictionary holds it. So the hook lives as long as it would in the
dictionary, even if the Recorder is freed, and a copy of the model has a no-op in that attribute too.

`torch.compile` must find every hook: it writes no guard for an absent hook, so a graph without the hook would be used for ever. So
before anything is compiled, all hooks that are out are put back. The hooks that the compiler traced are never taken out again.
"""

from __future__ import annotations

import sys
from collections import OrderedDict, deque
from collections.abc import Iterable
from typing import Any, TypeAlias
from weakref import WeakSet

from torch import nn

from recorders._torch import hooks_on_forwards, hooks_ref
from recorders._torch.compiler import before_compiling
from recorders.capture.context import capturing
from recorders.capture.entering import guarded
from recorders.capture.hooks import Hook
from reducers.kernels.locks import new_lock

Hooks: TypeAlias = "OrderedDict[int, Any]"

SWITCHING = new_lock()
"""Is held while hooks are taken out, put back or removed: clocks of several threads do so, and users. Whoever holds it waits for no
other lock."""

_OUT = "hooks taken out"  # the attribute of a dictionary that holds the hooks taken out of it
PATIENCE = 8  # how often hooks are put back because something is compiled; after that they stay in


def hook_of(handle: Any) -> Any:
    """Returns the hook of this handle, whether it is out or not; None if it was removed, or there is no handle."""
    hooks = None if handle is None else hooks_ref(handle)()
    if hooks is None:
        return None
    with SWITCHING:
        return hooks[handle.id] if handle.id in hooks else vars(hooks).get(_OUT, {}).get(handle.id, (None,))[0]


def remove(handle: Any) -> None:
    """Removes the hook of this handle, whether it is out or not."""
    with SWITCHING:
        hooks = hooks_ref(handle)()
        getattr(hooks, "__dict__", {}).get(_OUT, {}).pop(handle.id, None)
        handle.remove()


def hooks_in(module: nn.Module) -> list[Hook]:
    """The hooks of this package on the forwards of one module, whether they are out or not."""
    found = []
    for hooks in hooks_on_forwards(module).values():
        out = [hook for hook, _ in getattr(hooks, "__dict__", {}).get(_OUT, {}).values()]
        found += [hook for hook in [*hooks.values(), *out] if isinstance(hook, Hook)]
    return found


def take_out(handles: Iterable[Any]) -> None:
    """Takes the hooks of these handles out, but for those that a graph contains, which must stay in.

    Flags of a hook, which PyTorch keeps by id in other dictionaries, stay there.
    """
    for handle in handles:
        hooks = hooks_ref(handle)()
        if isinstance(hooks, OrderedDict):
            with SWITCHING:
                if handle.id in hooks and not getattr(hooks[handle.id], "traced", False):
                    order = list(hooks) if _ordered(hooks) else []
                    vars(hooks).setdefault(_OUT, {})[handle.id] = hooks[handle.id], order
                    del hooks[handle.id]


def put_back(handles: Iterable[Any]) -> None:
    """Puts back those of the hooks that are out. If a call is interrupted, the next call puts back the rest."""
    for handle in handles:
        hooks = hooks_ref(handle)()
        if out := getattr(hooks, "__dict__", {}).get(_OUT):
            with SWITCHING:
                if handle.id in out:
                    hook, order = out[handle.id]
                    hooks[handle.id] = hook
                    if order and len(hooks) > 1:
                        _restore_order(hooks, handle.id, order)
                    del out[handle.id]


def forget(hooks: Hooks, key: int) -> None:
    """Drops a hook of a dictionary, whether it is in or out. `SWITCHING` must be held."""
    hooks.pop(key, None)
    vars(hooks).get(_OUT, {}).pop(key, None)


def _ordered(hooks: Hooks) -> bool:
    """Whether the order of the hooks matters. It does not if all of them belong to this package."""
    return getattr(hooks, "ordered", True)


def _restore_order(hooks: Hooks, key: int, order: list[int]) -> None:
    """Moves `key` to its place. `order` are the ids in the dictionary when `key` was taken out.

    `key` comes after the hooks that preceded it then. If there are none, it comes before the others of `order`, but after hooks
    that were registered since and come first.
    """
    others = [other for other in hooks if other != key]
    before = set(order[: order.index(key)])
    behind = [index + 1 for index, other in enumerate(others) if other in before]
    known = [index for index, other in enumerate(others) if other in order]
    later = others[behind[-1] if behind else known[0] if known else 0 :]
    deque(map(hooks.move_to_end, later), maxlen=0)  # one call of C, which no signal interrupts


class SwitchedHooks:
    """The hooks of some monitors, which are taken out and put back together.

    Attributes:
        again: the next step at which the monitors are asked which hooks may be taken out.
    """

    def __init__(self) -> None:
        self._handles: list[Any] = []
        self._out: list[Any] = []
        self._restored = 0  # how often hooks were put back for the compiler
        self.change()
        with SWITCHING:
            _all.add(self)

    def change(self) -> None:
        """Notes that the monitors or their hooks have changed."""
        self.again, self._wait = 0, 1  # _wait: steps until the monitors are asked again

    def off(self, monitors: Iterable[Any], step: int) -> None:
        """Takes the hooks out that `switchable()` of each monitor returns, all but those of monitors that were never called.

        Such monitors are asked again at a later step. The number of steps until then doubles each time.
        """
        if step >= self.again:
            found = [monitor.switchable() for monitor in monitors]
            self._wait *= 2
            self.again = sys.maxsize if all(final for _, final in found) else step + self._wait
            self._handles = [handle for handles, _ in found for handle in handles] if self._restored < PATIENCE else []
        if self._handles and before_compiling(_put_all_back):
            self._out = self._handles
            take_out(self._out)

    def on(self) -> None:
        """Puts the hooks back."""
        put_back(self._out)
        self._out = []

    def restore_for_compiler(self) -> None:
        """Puts the hooks back before something is compiled. After `PATIENCE` times they stay in."""
        if self._out:
            self.on()
            self.change()
            self._restored += 1
            self._handles = []


_all: WeakSet[SwitchedHooks] = WeakSet()


def _put_all_back() -> None:
    """Puts all hooks back before Dynamo looks at a program. A function that a monitor compiles for itself contains no modules."""
    if not capturing():
        with SWITCHING:
            every = list(_all)
        for switched in every:
            guarded("the callback of the compiler", switched.restore_for_compiler)
