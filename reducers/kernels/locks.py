"""Locks that are free in a process that was forked while another thread held them."""

from __future__ import annotations

import os
import threading
from typing import Any
from weakref import WeakSet

_locks: WeakSet[Any] = WeakSet()


def new_lock() -> Any:
    """Return a `threading.RLock`. In the child of a fork no thread holds it but the one that forked.

    The other threads do not exist there, and would never let go of it: workers of a data loader that look at what is recorded would
    hang. What such a lock protects is bound by one assignment, so it is whole at any moment of a fork.
    """
    lock = threading.RLock()
    _locks.add(lock)
    return lock


def _after_fork() -> None:
    for lock in list(_locks):
        if not lock._is_owned():
            lock._at_fork_reinit()  # as `threading` and `logging` do with theirs


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)
