"""Blocks: how many `with` blocks of a recorder are under way, in all threads together."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from reducers.kernels.locks import new_lock

__all__ = ["Blocks"]

R = TypeVar("R")


class Blocks:
    """Counts the blocks, which may be nested, or in several threads. A copy of a recorder is in no block."""

    def __init__(self) -> None:
        self._count = 0
        self._lock = new_lock()

    def enter(self, register: Callable[[], R]) -> R:
        """A block begins, if `register` does not raise."""
        with self._lock:
            found = register()
            self._count += 1
            return found

    def exit(self, deregister: Callable[[], object]) -> None:
        """A block ends; `deregister` is called if it was the last one."""
        with self._lock:
            self._count = max(0, self._count - 1)
            if not self._count:
                deregister()

    def __reduce__(self) -> tuple[Any, ...]:
        return Blocks, ()
