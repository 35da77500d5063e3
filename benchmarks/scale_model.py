"""What a `sync` costs by number of ranks and monitors, as formulas; `scale.py` measures where they can be checked.

Bytes and messages are those that gloo sends over TCP: its all-gather is a ring, its gather goes straight to one rank, and each
message has a header. Time is a latency a step, bytes over a bandwidth, and a time to merge one monitor of one rank.
"""

from __future__ import annotations

from typing import NamedTuple

__all__ = ["BANDWIDTH", "LATENCY", "Sent", "memory", "seconds", "sent"]

LATENCY = 50e-6
"""Seconds for a step between two ranks, which is assumed: a network between machines."""
BANDWIDTH = 1.25e9
"""Bytes a second between two ranks, which is assumed: 10 Gbit/s."""

_HEADER = 48
"""Bytes of gloo before each message."""
_LENGTHS = 465
"""Bytes that each rank sends before its states: how it went, lengths, a checksum."""


class Sent(NamedTuple):
    """What one rank sends."""

    bytes: int = 0
    messages: int = 0


def sent(ranks: int, states: int, to: int | None = None, rank: int = 0) -> Sent:
    """What one rank sends.

    Args:
        ranks: their number.
        states: the bytes of the states of one rank.
        to: the only rank that gets what was merged; None for all.
        rank: the rank that sends.
    """
    if ranks == 1:
        return Sent()
    lengths = _all_gather(ranks, _LENGTHS)
    there = _all_gather(ranks, states) if to is None else _gather(ranks, states, rank == to)
    return Sent(lengths.bytes + there.bytes, lengths.messages + there.messages)


def _all_gather(ranks: int, width: int) -> Sent:
    return Sent((ranks - 1) * (width + 6 * _HEADER), 6 * (ranks - 1))


def _gather(ranks: int, width: int, receives: bool) -> Sent:
    return Sent((ranks - 1) * _HEADER, ranks - 1) if receives else Sent(width + 2 * _HEADER, 2)


def memory(ranks: int, states: int) -> int:
    """Bytes that a rank needs at once that gets what was merged: the states that arrive; packed, read and merged ones."""
    return (ranks + 3) * states


def seconds(ranks: int, states: int, monitors: int, merge: float) -> float:
    """How long a sync takes, until those have the result that get it.

    Args:
        ranks: their number.
        states: the bytes of the states of one rank.
        monitors: of each rank.
        merge: seconds to read and merge one monitor of one rank.
    """
    return 2 * (ranks - 1) * LATENCY + ranks * states / BANDWIDTH + ranks * monitors * merge
