"""Level: one dimension of a device mesh in a `sync`: its collectives, and who did not answer if one fails."""

from __future__ import annotations

import json
import struct
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from recorders.recordings.exchange import Exchange
from recorders.recordings.fitting import listed

__all__ = ["Level"]

_LENGTHS = struct.Struct("<qq")
"""Length of the text and of the payload of what goes back."""

_SECONDS = 5.0
"""How long a rank waits for others to say that they failed, too."""

_PAUSE = 0.25
"""Seconds between two questions to the store."""


class Level(Exchange):
    """The ranks of one dimension that sync with each other, of which the first leads.

    Args:
        mesh: the mesh, of which this process is a rank.
        dimension: the dimension.

    Attributes:
        leads: whether this rank is the first.
        labels: for each rank, its number, and which ranks it speaks for if these are several.
    """

    def __init__(self, mesh: DeviceMesh, dimension: int) -> None:
        super().__init__(mesh.get_group(dimension))
        where = mesh.get_coordinate()
        assert where is not None
        block = mesh.mesh[tuple(where[:dimension])]
        self._block: list[int] = block.flatten().tolist()
        self._started = time.time()
        self.leads = where[dimension] == 0
        self.labels: Sequence[object] = self.ranks
        if block.numel() > len(self.ranks):
            spoken_for = map(listed, block.flatten(1).tolist())
            self.labels = [f"{rank} (with ranks {others})" for rank, others in zip(self.ranks, spoken_for, strict=True)]

    @property
    def leader(self) -> int:
        """The global rank of the first."""
        return self.ranks[0]

    def __contains__(self, rank: object) -> bool:
        """Whether one of the ranks of this level is the rank, or speaks for it."""
        return rank in self._block

    def send(self, text: bytes, payload: Tensor) -> None:
        """Sends what was merged to the others of this level; raises `SyncError` if a rank does not take it."""
        self._try("what was merged", lambda: self._broadcast(text, payload))

    def receive(self) -> tuple[bytes, Tensor]:
        """What the first of this level sends; raises `SyncError` if it sends nothing."""
        return self._try("what was merged", lambda: self._broadcast(b"", torch.empty(0, dtype=torch.uint8, device="cpu")))

    def _broadcast(self, text: bytes, payload: Tensor) -> tuple[bytes, Tensor]:
        lengths = torch.tensor([len(text), payload.numel()], device=self.device)
        dist.broadcast(lengths, self.leader, group=self.group)
        length, size = lengths.tolist()
        rows = torch.empty(length + size, dtype=torch.uint8, device=self.device)
        if self.leads:
            rows[:length].copy_(torch.frombuffer(bytearray(text), dtype=torch.uint8))
            rows[length:].copy_(payload)
        dist.broadcast(rows, self.leader, group=self.group)
        return bytes(rows[:length].cpu().tolist()), rows[length:].cpu()

    def _roll_call(self, timeout: float) -> str:
        """Which ranks are not here. Those of other levels may wait for this one, or find who is silent and say so."""
        seconds = min(timeout / 3, _SECONDS)
        found: list[list[int]] = []
        store = dist.group.WORLD.get_group_store()  # type: ignore[union-attr]

        def ask() -> None:
            with suppress(Exception):
                found.append(_silent(store, self.ranks, self._started, seconds))

        # In a thread, because a store whose host is gone may keep a caller waiting for minutes.
        asking = threading.Thread(target=ask, daemon=True)
        asking.start()
        asking.join(3 * seconds + 1)
        if not found:
            return "Who did not answer is unknown, because the store of the ranks does not answer: its host may be gone."
        if not found[0]:
            return "All ranks of this dimension are alive; one of another dimension may not be."
        return f"Ranks {found[0]} did not answer within {seconds:g} s: they died, never made this call, or still wait for others."


def _silent(store: Any, ranks: Sequence[int], since: float, seconds: float) -> list[int]:
    """The ranks of this level that do not say that they failed; if there are none, those that another level found."""
    mine = dist.get_rank()
    _put(store, f"failed/{mine}", [])
    silent = list(ranks)

    def all_here() -> bool:
        silent[:] = [rank for rank in silent if _get(store, f"failed/{rank}", since) is None]
        return not silent

    if not _until(all_here, seconds):
        _put(store, "silent", silent)
        return silent
    told: list[int] = []

    def others_told() -> bool:
        told[:] = _get(store, "silent", since) or []
        return bool(told)

    _until(others_told, 2 * seconds)  # they wait as long as this rank did before they tell
    return told


def _until(done: Callable[[], bool], seconds: float) -> bool:
    """Asks again and again whether it is done; returns whether it was in time."""
    end = time.monotonic() + seconds
    while not done():
        if time.monotonic() > end:
            return False
        time.sleep(_PAUSE)
    return True


def _put(store: Any, key: str, ranks: Sequence[int]) -> None:
    store.set(f"recorders.sync/mesh/{key}", json.dumps([time.time(), list(ranks)]))


def _get(store: Any, key: str, since: float) -> list[int] | None:
    """What a rank has put there since the sync began; what it put there in an earlier one does not count."""
    if not store.check([f"recorders.sync/mesh/{key}"]):
        return None
    when, ranks = json.loads(store.get(f"recorders.sync/mesh/{key}"))
    return list(ranks) if when >= since else None
