"""Turns: saves of this process to one place happen in the order in which they were asked for."""

from __future__ import annotations

import os
import threading
import weakref
from typing import TYPE_CHECKING

from recorders.recordings.atomic_files import as_path, is_url

if TYPE_CHECKING:
    from types import TracebackType

    from typing_extensions import Self

__all__ = ["Turn"]

_PAUSE = 0.1
"""Seconds after which a save looks again whether the one before it still exists: it may have been interrupted anywhere."""

_lock = threading.Lock()
_asked: dict[str, list[weakref.ref[Turn]]] = {}
"""By place, the turns that are not over, in the order in which they were taken."""


class Turn:
    """The place of one save among those to the same path or URL, taken when the save is asked for.

    It is over at the end of a `with` block, unless it was handed to a thread (`hand_over`), which calls `end`.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self._place = os.fspath(path) if is_url(path) else os.path.realpath(as_path(path))
        self._thread: int | None = threading.get_ident()
        self._handed_over = False
        self._over = threading.Event()
        with _lock:
            turns = _asked.setdefault(self._place, [])
            self._before = [one for one in turns if one() is not None]
            turns[:] = [*self._before, weakref.ref(self)]

    def hand_over(self) -> None:
        """Leaves the turn to another thread."""
        self._handed_over, self._thread = True, None

    def wait(self) -> None:
        """Waits for the saves that were asked for before; not for one that this thread is in, as in a handler of a signal."""
        self._thread = threading.get_ident()
        for before in self._before:
            while (turn := before()) is not None and turn._thread != self._thread and not turn._over.wait(_PAUSE):
                del turn  # one that was interrupted is collected now
        self._before = []

    def end(self) -> None:
        """Lets the next one begin."""
        self._over.set()
        with _lock:
            turns = [one for one in _asked.get(self._place, ()) if one() is not None and one() is not self]
            if turns:
                _asked[self._place] = turns
            else:
                _asked.pop(self._place, None)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if not self._handed_over:
            self.end()


def _after_fork() -> None:
    """The threads that save are not here, so nobody waits for them."""
    global _lock
    _lock = threading.Lock()
    _asked.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)
