"""Listeners: the monitors that are told of optimizer steps."""

from __future__ import annotations

import weakref
from collections import OrderedDict
from typing import Any, TypeAlias

from torch import nn

from recorders.capture.switching import SWITCHING

__all__ = ["Listener", "Listeners"]

Listener: TypeAlias = "tuple[weakref.ref[nn.Module], weakref.ref[Any]]"


class Listeners(OrderedDict[int, Listener]):
    """Module and monitor by the id of their handle. Like hooks, they are taken out in steps in which the monitor is not due.

    `SWITCHING` is held while it changes. A step walks a copy, because clocks and users in other threads change it meanwhile.
    """

    ordered = False  # see recorders.capture.switching
    _copy: dict[int, Listener] | None = None

    def __setitem__(self, key: int, value: Listener) -> None:
        super().__setitem__(key, value)
        self._copy = None

    def __delitem__(self, key: int) -> None:
        super().__delitem__(key)
        self._copy = None

    def now(self) -> dict[int, Listener]:
        """Returns a copy, the same one until something changes."""
        found = self._copy
        if found is None:
            with SWITCHING:
                found = self._copy = dict(self.items())
        return found

    def drop(self, key: int) -> None:
        """Removes an entry, if it is there."""
        with SWITCHING:
            if key in self:
                del self[key]
