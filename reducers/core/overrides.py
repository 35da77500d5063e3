"""What a class overrides switches off whatever would bypass it: once, when the class is made.

A fast path computes what methods of a reducer define, without calling them. So it is right only for the methods of the class that
declared it. A subclass with another `lift`, say, must not inherit the kernel that does the work of the old one.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterable
from typing import Any, NamedTuple


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
    """Switch off what would bypass methods that `cls` or a base overrides, and on again what it vouches for; it is being made."""
    off, on = {}, {}
    for shortcut in shortcuts:
        overridden = _place(cls, shortcut.bypasses)
        vouched = _place(cls, {shortcut.name, *shortcut.vouchers})
        if shortcut.completed:
            vouched = min(vouched, _completed(cls))
        if overridden < vouched:
            off[shortcut.name] = shortcut.off
        elif not shortcut.vouchers.isdisjoint(vars(cls)):
            values = (vars(base).get(shortcut.name, shortcut.off) for base in cls.__mro__)
            on[shortcut.name] = next((value for value in values if value is not shortcut.off), shortcut.off)
    for name, value in {**on, **off}.items():  # only now, because what is set here vouches for nothing
        if inspect.getattr_static(cls, name) is not value:
            setattr(cls, name, value)


def _place(cls: type, names: Iterable[str]) -> int:
    """Return the place, among `cls` and its bases, of the nearest class that defines one of the names."""
    wanted = frozenset(names)
    return next((place for place, base in enumerate(cls.__mro__) if not wanted.isdisjoint(vars(base))), len(cls.__mro__))


def _completed(cls: type) -> int:
    """Return the place of the furthest base without abstract methods; 0 if there is none, because then `cls` completes them."""
    reducers = [place for place, base in enumerate(cls.__mro__) if place and hasattr(base, "shortcuts")]
    return max((place for place in reducers if not inspect.isabstract(cls.__mro__[place])), default=0)
