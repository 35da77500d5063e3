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

from recorders.recordings.distributed.exchange import Exchange
from recorders.recordings.distributed.fitting import listed

__all__ = ["Level"]

_LENGTHS = struct.Struct("<qq")
"""Length of the text and of the payload of what goes back."""

_SECONDS = 5.0
"""How long a rank waits for others to say that they failed, too."""

_PAUSE = 0.25
"""Seconds between two questions to the store."""

_NUMBER = "recorders.sync/mesh/said"
"""Where the store counts what ranks say."""


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
        self._roll = _Roll(dist.group.WORLD.get_group_store())  # type: ignore[union-attr]
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

        def ask() -> None:
            with suppress(Exception):
                found.append(self._roll.silent(self.ranks, seconds))

        # In a thread, because a store whose host is gone may keep a caller waiting for minutes.
        asking = threading.Thread(target=ask, daemon=True)
        asking.start()
        asking.join(3 * seconds + 1)
        if not found:
            return "Who did not answer is unknown, because the store of the ranks does not answer: its host may be gone."
        if not found[0]:
            return "All ranks of this dimension are alive; one of another dimension may not be."
        return f"Ranks {found[0]} did not answer within {seconds:g} s: they died, never made this call, or still wait for others."


class _Roll:
    """Who said in the store of the ranks that its collective failed, since a sync began.

    What is said is numbered by the store, which is one for all ranks: their hosts have clocks that differ.

    Args:
        store: that of the ranks.
    """

    def __init__(self, store: Any) -> None:
        self._store = store
        self._before = 0
        # In a thread, because a store whose host is gone may keep a caller waiting for minutes.
        self._beginning = threading.Thread(target=self._begin, daemon=True)
        self._beginning.start()
        self._beginning.join(1.0)  # or another rank might fail before this one has asked, and not be heard

    def _begin(self) -> None:
        with suppress(Exception):
            if self._store.check([_NUMBER]):
                self._before = int(self._store.get(_NUMBER))

    def silent(self, ranks: Sequence[int], seconds: float) -> list[int]:
        """The ranks of a level that do not say that they failed; if there are none, those that another level found."""
        self._beginning.join(seconds)
        self._say(f"failed/{dist.get_rank()}", [])
        silent = list(ranks)

        def all_here() -> bool:
            silent[:] = [rank for rank in silent if self._said(f"failed/{rank}") is None]
            return not silent

        if not _until(all_here, seconds):
            self._say("silent", silent)
            return silent
        told: list[int] = []

        def others_told() -> bool:
            told[:] = self._said("silent") or []
            return bool(told)

        _until(others_told, 2 * seconds)  # they wait as long as this rank did before they tell
        return told

    def _say(self, key: str, ranks: Sequence[int]) -> None:
        number = self._store.add(_NUMBER, 1)
        self._store.set(f"recorders.sync/mesh/{key}", json.dumps([number, list(ranks)]))

    def _said(self, key: str) -> list[int] | None:
        """What a rank has said since the sync began; what it said in an earlier one does not count."""
        if not self._store.check([f"recorders.sync/mesh/{key}"]):
            return None
        number, ranks = json.loads(self._store.get(f"recorders.sync/mesh/{key}"))
        return list(ranks) if number > self._before else None


def _until(done: Callable[[], bool], seconds: float) -> bool:
    """Asks again and again whether it is done; returns whether it was in time."""
    end = time.monotonic() + seconds
    while not done():
        if time.monotonic() > end:
            return False
        time.sleep(_PAUSE)
    return True
