"""What a `sync` costs by number of ranks and monitors, as formulas; `scale.py` measures where they can be checked.

Bytes and messages are those that gloo sends over TCP: its all-gather is a ring, its gather goes straight to one rank, its broadcast
is a binomial tree, and each message has a header. Time is a latency a step, bytes over a bandwidth, and a time to merge one monitor
of one rank.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

__all__ = ["BANDWIDTH", "LATENCY", "SHAPES", "Sent", "Sizes", "flat", "hierarchical", "memory", "seconds"]

LATENCY = 50e-6
"""Seconds for a step between two ranks, which is assumed: a network between machines."""
BANDWIDTH = 1.25e9
"""Bytes a second between two ranks, which is assumed: 10 Gbit/s."""

_HEADER = 48
"""Bytes of gloo before each message."""
_LENGTHS, _LENGTHS_BACK = 56, 16
"""Bytes of lengths and checksum that each rank sends before its states, and of lengths before what was merged."""


class Sent(NamedTuple):
    """What one rank sends."""

    bytes: int = 0
    messages: int = 0

    def and_(self, other: Sent) -> Sent:
        return Sent(self.bytes + other.bytes, self.messages + other.messages)


class Sizes(NamedTuple):
    """Bytes of one rank: its states; what was merged, with its manifest; and the manifest, if ranks record unlike shapes."""

    states: int
    merged: int
    manifest: int = 0


def _all_gather(ranks: int, width: int) -> Sent:
    return Sent((ranks - 1) * (width + 6 * _HEADER), 6 * (ranks - 1))


def _gather(ranks: int, width: int, position: int) -> Sent:
    return Sent(width + 2 * _HEADER, 2) if position else Sent((ranks - 1) * _HEADER, ranks - 1)


def _broadcast(ranks: int, width: int, position: int) -> Sent:
    steps = [2**step for step in range((ranks - 1).bit_length())]
    sends = sum(step > position and position + step < ranks for step in steps)
    return Sent(sends * (width + 2 * _HEADER) + bool(position) * _HEADER, 2 * sends + bool(position))


def flat(ranks: int, sizes: Sizes) -> Sent:
    """What every rank sends in `sync()`."""
    if ranks == 1:
        return Sent()
    widths = [_LENGTHS, *([sizes.manifest] if sizes.manifest else []), sizes.states]
    return _sum(_all_gather(ranks, width) for width in widths)


def hierarchical(shape: Sequence[int], sizes: Sizes, rank: int = 0) -> Sent:
    """What one rank sends in `sync(mesh)`; rank 0 sends and gets most."""
    sent, left = Sent(), rank
    for ranks in (size for size in reversed(shape) if size > 1):
        left, position = divmod(left, ranks)
        sent = sent.and_(_all_gather(ranks, _LENGTHS)).and_(_gather(ranks, sizes.states, position))
        if sizes.manifest:
            sent = sent.and_(_all_gather(ranks, sizes.manifest))
        back = _broadcast(ranks, _LENGTHS_BACK, position).and_(_broadcast(ranks, sizes.merged, position))
        sent = sent.and_(back)
        if position:
            break
    return sent


def _sum(parts: Iterable[Sent]) -> Sent:
    total = Sent()
    for part in parts:
        total = total.and_(part)
    return total


def memory(shape: Sequence[int], sizes: Sizes) -> int:
    """Bytes that a sync needs at once on the rank that needs most: the states that arrive; packed, read and merged ones."""
    return (max(shape) + 3) * sizes.states


def seconds(shape: Sequence[int], sizes: Sizes, monitors: int, merge: float) -> float:
    """How long a sync takes, until all ranks have the result.

    Args:
        shape: the dimensions; one for `sync()`.
        sizes: of one rank.
        monitors: of each rank.
        merge: seconds to read and merge one monitor of one rank.
    """
    if len(shape) == 1:
        return 2 * (shape[0] - 1) * LATENCY + shape[0] * sizes.states / BANDWIDTH + shape[0] * monitors * merge
    up = sum(size * LATENCY + size * sizes.states / BANDWIDTH + size * monitors * merge for size in shape)
    down = sum(math.ceil(math.log2(size)) * (2 * LATENCY + sizes.merged / BANDWIDTH) for size in shape)
    return up + down + monitors * merge


def _by_machine(ranks: int) -> tuple[int, ...]:
    return (-(-ranks // 8), 8)


def _by_group(ranks: int) -> tuple[int, ...]:
    machines = -(-ranks // 8)
    group = math.isqrt(machines)
    return (-(-machines // group), group, 8)


SHAPES: tuple[Callable[[int], tuple[int, ...]], ...] = (lambda ranks: (ranks,), _by_machine, _by_group)
"""The dimensions for a number of ranks: all at once; machines of 8; groups of machines of 8."""
