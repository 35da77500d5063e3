"""Pace: how often something is drawn, so that a training does not wait for it."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

__all__ = ["Pace"]


class Pace:
    """Says when work is due again: after a pause, and so seldom that it takes at most a share of the time.

    >>> pace = Pace(pause=60.0, share=0.02)
    >>> with pace.measured():
    ...     pass
    >>> pace.due
    False
    """

    def __init__(self, pause: float, share: float) -> None:
        self._pause, self._share, self._next = pause, share, 0.0

    @property
    def due(self) -> bool:
        return time.monotonic() >= self._next

    @contextmanager
    def measured(self) -> Iterator[None]:
        """Measures the work of the block, also if it fails."""
        started = time.monotonic()
        try:
            yield
        finally:
            ended = time.monotonic()
            self._next = ended + max(self._pause, (ended - started) / self._share)
