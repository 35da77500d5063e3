"""Graphs that were compiled before a hook was on: they are dropped, so that the compiler finds the hook.

The compiler writes no guard for an absent hook. So it would run a graph that was made without the hook for ever, for this module or
for another one of its class.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from weakref import WeakKeyDictionary, WeakSet

import torch
from torch import nn

from recorders._torch import hooks_on_forwards
from recorders._torch.compiler import drop_graphs, guard_absent_hooks
from recorders.errors import RecordingWarning
from reducers.errors import warn_user

OLD_GRAPH = (
    "torch.compile made a graph before its hook was on, and set_stance('fail_on_recompile') forbids another one: put the recorder "
    "on before the first compiled call, or call torch._dynamo.reset() after it"
)

_hooked: WeakKeyDictionary[type, set[str]] = WeakKeyDictionary()  # kinds of hooks that modules of a class have, or had
_old: WeakSet[nn.Module] = WeakSet()  # modules whose graphs could not be dropped


class _Waiting(threading.local):
    """The modules that got hooks within `together`; None outside of it."""

    modules: list[nn.Module] | None = None


_waiting = _Waiting()


def hooks_are_on(module: nn.Module) -> None:
    """Called when hooks that the compiler should trace were put on a module: drops the graphs that were made without them."""
    if torch.compiler.is_compiling():
        return
    if _waiting.modules is not None:
        _waiting.modules.append(module)
    else:
        _renew([module], None)


@contextmanager
def together(nets: Iterable[nn.Module]) -> Iterator[None]:
    """A block in which many modules of some nets get hooks: what is compiled is looked at once, when it ends."""
    before, _waiting.modules = _waiting.modules, []
    try:
        yield
    finally:
        modules, _waiting.modules = _waiting.modules, before
        if modules:
            _renew(modules, list(nets))


@contextmanager
def in_eager_mode() -> Iterator[None]:
    """A block in which modules get hooks that no graph needs, as they are run in eager mode only: what is compiled stays."""
    before, _waiting.modules = _waiting.modules, []
    try:
        yield
    finally:
        _waiting.modules = before


def has_old_graph(module: nn.Module | None) -> bool:
    """Whether a graph that was made without the hooks of a module could not be dropped."""
    return module is not None and module in _old


def _renew(modules: list[nn.Module], nets: list[nn.Module] | None) -> None:
    """Drops the graphs with modules like these: of their classes, in modules of the classes that they are in, if it is known."""
    if not _hooked:
        guard_absent_hooks(lambda module, kind: kind in _hooked.get(type(module), ()))
    for module in modules:
        present = {kind for kind, hooks in hooks_on_forwards(module).items() if hooks}
        _hooked.setdefault(type(module), set()).update(present)
    kinds = {type(module) for module in modules}
    ours, around = set(map(id, modules)), set[tuple[type, type]]()
    for net in nets or ():
        for parent in net.modules():
            around |= {(type(child), type(parent)) for child in parent.children() if id(child) in ours}
    known = nets is not None and {kind for kind, _ in around} | {type(net) for net in nets} >= kinds
    dropped = drop_graphs(lambda kind, parent: kind in kinds and (not known or parent is None or (kind, parent) in around))
    if dropped is False:
        _old.update(modules)
        warn_user(f"what {len(modules)} hooks watch may not be recorded: {OLD_GRAPH}", RecordingWarning)
    else:
        _old.difference_update(modules)
