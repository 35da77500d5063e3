"""What a class overrides switches off whatever would bypass it: once, when the class is made.

A fast path computes what methods of a reducer define, without calling them. So it is right only for the methods of the class that
declared it. A subclass with another `lift`, say, must not inherit the kernel that does the work of the old one.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterable
from typing import Any, NamedTuple

__all__ = ["Shortcut", "switch_off"]


class Shortcut(NamedTuple):
    """An attribute of a class that lets other methods be bypassed.

    Attributes:
        name: the attribute.
        off: its value in a class that overrides one of the methods.
        bypasses: the methods.
        vouchers: other attributes. A class that declares the shortcut, or one of these, vouches for the methods that it has.
        completed: whether the class that completes a reducer, because nothing is abstract any more, vouches for what it inherits.
    """

    name: str
    off: Any
    bypasses: frozenset[str]
    vouchers: frozenset[str] = frozenset()
    completed: bool = False


def switch_off(cls: type, shortcuts: Iterable[Shortcut]) -> None:
    """Switch off the shortcuts that would bypass what `cls` or a base overrides; `cls` is being made."""
    found = {}
    for shortcut in shortcuts:
        overridden = _place(cls, shortcut.bypasses)
        vouched = _place(cls, {shortcut.name, *shortcut.vouchers})
        if shortcut.completed:
            vouched = min(vouched, _completed(cls))
        if overridden < vouched and inspect.getattr_static(cls, shortcut.name) is not shortcut.off:
            found[shortcut.name] = shortcut.off
    for name, off in found.items():  # only now, because what is set here vouches for nothing
        setattr(cls, name, off)


def _place(cls: type, names: Iterable[str]) -> int:
    """Return the place, among `cls` and its bases, of the nearest class that defines one of the names."""
    wanted = frozenset(names)
    return next((place for place, base in enumerate(cls.__mro__) if not wanted.isdisjoint(vars(base))), len(cls.__mro__))


def _completed(cls: type) -> int:
    """Return the place of the furthest base without abstract methods; 0 if there is none, because then `cls` completes them."""
    reducers = [place for place, base in enumerate(cls.__mro__) if place and hasattr(base, "shortcuts")]
    return max((place for place in reducers if not inspect.isabstract(cls.__mro__[place])), default=0)
