"""Where an inspector is in a training, and on which of its ranks: by epochs or steps, and how it goes on after a timeline."""

from __future__ import annotations

import torch
import torch.distributed as dist

from recorders.errors import RecordingWarning, SyncError, TickError
from recorders.recordings.distributed.sync import sync
from recorders.recordings.recording import Recording, Subrecording
from recorders.schedule.clock import Clock
from recorders.watch.charts import axis_of, notes_of_axis
from recorders.watch.timeline import Timeline
from reducers import Max
from reducers.errors import warn_user


class Position:
    """Where an inspector is in a training.

    Args:
        timeline: what was recorded so far; on other ranks than the one that writes the file, an empty one.
        clock: counts steps.
        ranks: in `go_back`, all learn the position from the one that writes the file.

    Attributes:
        axis: what the ticks of the timeline are, "epoch" or "step"; "" if there are none yet.
        epoch: the number of the present epoch; in a timeline of steps, the step of the last tick.
    """

    def __init__(self, timeline: Timeline, clock: Clock, ranks: Ranks) -> None:
        self._timeline, self._clock, self._ranks = timeline, clock, ranks
        self.axis, self.epoch = "", 0

    def go_on(self, ranks: bool = False) -> None:
        """Goes on after the last tick of the timeline; with `ranks`, a collective, after that of the one that writes the file."""
        ticks = self._timeline.ticks()
        last = max(ticks, default=-1)
        found = [last, self._timeline.steps().get(last, 0), bool(ticks) and axis_of(self._timeline) == "step"]
        last, step, by_step = self._ranks.highest(*found) if ranks else found
        self.axis = "" if last < 0 else "step" if by_step else "epoch"
        self.epoch = last + (self.axis != "step")
        self._clock.step = step

    def go_back(self, start: int) -> None:
        """Deletes the ticks after the beginning of an epoch, or after that many steps, and goes on there; a collective."""
        by_step = bool(self._ranks.highest("step" in (self.axis, axis_of(self._timeline)))[0])
        self._timeline.forget(start + (by_step and start > 0))
        self.go_on(ranks=True)
        self.epoch = start
        if by_step:
            self._clock.step = start

    def check(self, axis: str, number: int | None) -> int:
        """The number of a new tick; if it cannot be, raises `TickError`."""
        if self.axis not in ("", axis):
            usual = {"epoch": "tick_epoch", "step": "tick"}[self.axis]
            raise TickError(f"the ticks of {self._timeline.path} are {self.axis}s, and cannot be {axis}s too: call {usual}() only")
        if number is None and axis == self.axis == "step" and self._clock.step == self.epoch:
            raise TickError(f"no step has ended since the last tick, {self.epoch}: give the optimizer, call step(), or tick(n)")
        return number if number is not None else self.epoch if axis == "epoch" else self._clock.step

    def check_new(self, epochs: range) -> None:
        """Raises `TickError` if one of these epochs could not be ticked; asked before the training that would be lost."""
        self.check("epoch", 0)
        ticks = self._timeline.ticks()
        if taken := [epoch for epoch in ticks if epoch in epochs]:
            raise TickError(
                f"{self._timeline.path} has epoch {taken[0]} already: call resume({taken[0]}) to go on from there, which deletes "
                f"it and later ones; or begin after the last one, range({max(ticks) + 1}, ...); or give another timeline"
            )

    def notes(self, axis: str) -> dict[str, str]:
        """The note that the first tick writes; none for later ones."""
        return {} if axis == self.axis else notes_of_axis(axis)

    def ended(self, axis: str, tick: int) -> None:
        """Goes on after a tick."""
        self.axis, self.epoch = axis, tick + (axis == "epoch")


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
