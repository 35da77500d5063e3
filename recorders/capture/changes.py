"""A number that is another one after each change of what any monitor records: many are known to be unchanged by one look at it."""

from __future__ import annotations

import itertools

__all__ = ["latest_change", "note_change"]

_numbers = itertools.count()
_latest = next(_numbers)


def latest_change() -> int:
    """The number of the latest change."""
    return _latest


def note_change() -> None:
    """Notes that a monitor was turned on or off, reset, timed, or has reduced what waited. Several threads may do so at once."""
    global _latest
    _latest = next(_numbers)
