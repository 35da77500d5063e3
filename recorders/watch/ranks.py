"""Ranks: what all ranks of a distributed training recorded, merged, and the one rank that shows it."""

from __future__ import annotations

import torch
import torch.distributed as dist

from recorders.errors import RecordingWarning, SyncError
from recorders.recordings.distributed.sync import sync
from recorders.recordings.recording import Recording, Subrecording
from reducers import Max
from reducers.errors import warn_user

__all__ = ["Ranks"]

_EPOCH = "epoch"


class Ranks:
    """All ranks of a distributed training, or the only one.

    Args:
        master: the rank that shows what all ranks recorded; None if each rank is by itself.
    """

    def __init__(self, master: int | None) -> None:
        self._master, self._warned = master, False

    @property
    def apart(self) -> bool:
        """Whether there is only this rank, or each rank is by itself."""
        return self._master is None or not (dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1)

    @property
    def shows(self) -> bool:
        """Whether this rank shows what was recorded."""
        return self.apart or dist.get_rank() == self._master

    def highest(self, *numbers: int) -> list[int]:
        """The highest of each number over all ranks, in one exchange."""
        if self.apart:
            return [*numbers]
        highest = Max("n -> n")
        part = Subrecording(highest, {"": highest.update({}, torch.tensor(numbers, device="cpu"))}, 1)
        found: list[int] = sync(Recording({_EPOCH: part}))[_EPOCH].peek().tolist()
        return found

    def merge(self, recording: Recording, epoch: int) -> tuple[Recording, int]:
        """What all ranks recorded, in one exchange, and the highest of their epochs; if ranks do not fit, warns once."""
        if self.apart:
            return recording, epoch
        highest = Max()
        part = Subrecording(highest, {"": highest.update({}, torch.tensor(epoch, device="cpu"))}, 1)
        try:
            merged = sync(Recording({**recording, _EPOCH: part}), missing="keep")
        except SyncError as error:
            if not self._warned:
                self._warned = True
                message = f"rank {dist.get_rank()} shows its own numbers only, in this epoch and if it happens again: {error}"
                warn_user(message, RecordingWarning)
            return recording, epoch
        return Recording({name: one for name, one in merged.items() if name != _EPOCH}), int(merged[_EPOCH].peek())
