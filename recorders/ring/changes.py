"""Changes of what a monitor records: whoever relies on it to go on as before is told."""

from __future__ import annotations

from typing import Any
from weakref import WeakSet


class Changes:
    """Tells those who rely on a monitor when it is turned on or off, reset, or about to reduce what waits.

    Whoever does is `ready` as long as the monitor goes on as before.
    """

    __slots__ = ("_any", "_relying")

    def __init__(self) -> None:
        self._relying: WeakSet[Any] = WeakSet()
        self._any = False  # asked at each observation, in a fraction of the time that the set takes

    def tell(self, relying: Any) -> None:
        """Makes `relying` no longer `ready` at the next change."""
        self._relying.add(relying)
        self._any = True

    def note(self) -> None:
        """Notes a change. Several threads may do so at once."""
        if self._any:
            self._any = False
            told, self._relying = self._relying, WeakSet()
            for each in told:
                each.ready = False
