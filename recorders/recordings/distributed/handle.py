"""SyncHandle: a merge of the recordings of all ranks that is under way; returned by `sync(async_op=True)`."""

from __future__ import annotations

import atexit
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Generic, TypeVar

import torch

from reducers.kernels.locks import new_lock

if TYPE_CHECKING:
    from torch.distributed import Work

__all__ = ["SyncHandle"]

T = TypeVar("T")

LONGEST_AT_EXIT_S = 5.0

_under_way: set[Work] = set()
"""Collectives that nobody has waited for, up to the next sync after they ended. Copied to go through it: threads may sync."""


class SyncHandle(Generic[T]):
    """The recordings of all ranks on their way: what `recorder.sync(async_op=True)` returns, as a collective returns a `Work`.

    All collectives were issued, in the thread that called `sync`, so collectives that are called later stay in the order in which
    they are called. What is merged was fixed then, too. A handle that is never waited for costs its memory only.

    Args:
        works: the collectives under way.
        finish: waits for them, and returns what was merged.

    >>> from recorders import Recording
    >>> from recorders.recordings.distributed.sync import sync
    >>> handle = sync(Recording({}), async_op=True)
    >>> handle.is_completed(), len(handle.wait())
    (True, 0)
    """

    def __init__(self, works: Sequence[Work], finish: Callable[[], T]) -> None:
        self._works = works
        self._finish: Callable[[], T] | None = finish
        self._result: T
        self._error: Exception | None = None
        self._lock = new_lock()
        _under_way.difference_update([work for work in tuple(_under_way) if work.is_completed()])
        _under_way.update(works)

    def __repr__(self) -> str:
        return f"<{type(self).__name__}, {'completed' if self.is_completed() else 'under way'}>"

    def is_completed(self) -> bool:
        """Whether no other rank is waited for any more: all has arrived, or has failed. It never waits."""
        return all(work.is_completed() for work in self._works)

    def wait(self) -> T:
        """Waits until the recordings of all ranks have arrived, merges them here, and returns what `sync` returns.

        The first call merges; later ones return the same object, or raise the same error.

        Raises:
            SyncError: a rank died meanwhile, or the states do not merge; see `sync`. What this rank recorded is as it was.
        """
        with self._lock:
            if self._finish is not None:
                try:
                    with torch.inference_mode(False):  # inference tensors could not be updated later
                        self._result = self._finish()
                except Exception as error:
                    self._error = error
                _under_way.difference_update(self._works)
                self._finish, self._works = None, ()
        if self._error is not None:
            raise self._error
        return self._result


@atexit.register
def wait_at_exit() -> None:
    """Waits for collectives under way, but not for long: one that ends while Python is taken down ends the process abnormally."""
    limit = time.monotonic() + LONGEST_AT_EXIT_S
    while time.monotonic() < limit and not all(work.is_completed() for work in tuple(_under_way)):
        time.sleep(0.01)
