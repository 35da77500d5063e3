"""Training: a recorder in a training that another library runs."""

from __future__ import annotations

import functools
import shutil
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, TypeAlias, TypeVar

import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from recorders.errors import RecorderError, RecordingNotFoundError, RecordingWarning
from recorders.monitors.forward import CallMonitor
from recorders.recorder.recorder import Recorder
from recorders.recorder.selection import unwrapped
from recorders.recordings.recording import Recording
from recorders.recordings.storage.load import load
from recorders.recordings.storage.tools import from_state_dict
from recorders.watch.diagnosis.checkup import Checkup, OnFinding
from recorders.watch.diagnosis.learned import Against, learned_at
from reducers.errors import warn_user

__all__ = ["InTraining", "Recorded", "Training"]

Recorded: TypeAlias = Recorder | Callable[[nn.Module], Recorder]
"""A recorder whose modules are selected, or a function that makes it from the net when the training begins."""

T = TypeVar("T")


def _guarded(method: Callable[..., T]) -> Callable[..., T | None]:
    """If the method fails, it warns, and the training goes on."""

    @functools.wraps(method)
    def call(self: Training, *args: Any) -> T | None:
        try:
            return method(self, *args)
        except Exception as error:
            message = (
                f"`{method.__name__.strip('_')}` of the recorder failed, and the training goes on: {type(error).__name__}: {error}"
            )
            warn_user(message, RecordingWarning)
            return None

    return call


def _once_begun(method: Callable[..., T]) -> Callable[..., T | None]:
    """Guarded too; does nothing if there is no recorder: no training has begun, or `begin` has warned."""
    guarded = _guarded(method)

    @functools.wraps(method)
    def call(self: Training, *args: Any) -> T | None:
        return guarded(self, *args) if isinstance(self._recorded, Recorder) else None

    return call


class Training:
    """What a trainer tells its recorder. Nothing here raises into the trainer unless `on_finding` is "raise", and nothing is
    communicated between ranks. Arguments and errors are those of the callbacks of trainers, see `InTraining`.
    """

    def __init__(self, recorder: Recorded, on_finding: OnFinding | None = None, against: Against = None) -> None:
        if not callable(recorder) and not isinstance(recorder, Recorder):
            raise TypeError(f"a trainer takes a Recorder, or a function that makes one from the net; got {type(recorder).__name__}")
        if on_finding not in (None, "warn", "stop", "raise"):
            raise ValueError(f"on_finding={on_finding!r}: choose 'warn', 'stop', 'raise', or None not to look for faults")
        if against is not None and on_finding is None:
            raise ValueError(
                "against= is what runs are compared with when faults are looked for: give on_finding= too, such as 'warn'"
            )
        self._recorded, self._on_finding = recorder, on_finding
        self._against = None if against is None else learned_at(against)
        self.checkup: Checkup | None = None
        self._told = False  # that one rank does not stop alone
        self._losses = 0  # how many were there when the present batch began
        self._waiting: Mapping[str, Any] = {}  # a state that was loaded before the recorder was made
        self._before: Recording | None = None
        self._batch = (-1, 0)  # the step, and the batches of it before the present one

    @property
    def recorder(self) -> Recorder:
        """See `InTraining.recorder`."""
        if not isinstance(self._recorded, Recorder):
            raise RecorderError("there is no recorder yet: it is made from the net when the training begins")
        return self._recorded

    @_guarded
    def begin(self, net: nn.Module, optimizers: Iterable[Optimizer]) -> None:
        """Makes the recorder if need be, puts its hooks on, and attaches its clock to the first optimizer."""
        if not isinstance(self._recorded, Recorder):
            made = self._recorded(unwrapped(net))
            if not isinstance(made, Recorder):
                raise TypeError(f"the function that makes the recorder returned a {type(made).__name__}")
            self._recorded = made
        self._recorded.register()
        for optimizer in list(optimizers)[:1]:
            self._recorded.attach(optimizer)
        if self._waiting:
            self._load(self._waiting)

    @_once_begun
    def end(self) -> None:
        """Takes the hooks off; the clock stops."""
        self.recorder.deregister().clock.detach()

    @_once_begun
    def begin_rehearsal(self) -> None:
        """What is recorded from now on is dropped by `end_rehearsal`. Hooks stay on, or graphs compiled now would lack them."""
        self._before = self.recorder.snapshot()

    @_once_begun
    def end_rehearsal(self) -> None:
        """Goes back to what was recorded before the rehearsal."""
        if self._before is not None:
            self.recorder.resume(self._before)
        self._before = None

    @_once_begun
    def begin_batch(self) -> None:
        """Tells the clock of a micro-batch, for trainers that call other methods of the net than `forward`."""
        clock, (step, batches) = self.recorder.clock, self._batch
        self._batch = clock.step, batches + 1 if clock.step == step else 0
        clock.micro_batch = self._batch[1]

    @_once_begun
    def expect_loss(self) -> None:
        """Tells that a batch begins, whose loss comes by `push_loss`."""
        monitor = self._monitor_of_loss()
        self._losses = 0 if monitor is None else monitor.samples

    @_once_begun
    def push_loss(self, loss: Any) -> None:
        """Pushes what the trainer computed into the `CallMonitor` named "loss", if there is one, and the user pushed nothing.

        Args:
            loss: a number, or a tensor of one element; anything else is not pushed.
        """
        monitor = self._monitor_of_loss()
        is_loss = loss.numel() == 1 if isinstance(loss, Tensor) else isinstance(loss, (int, float)) and not isinstance(loss, bool)
        if is_loss and monitor is not None and monitor.samples == self._losses:
            monitor.push(loss)

    def _monitor_of_loss(self) -> CallMonitor | None:
        if "loss" not in self.recorder:  # asked in each batch, so not by an error that lists all names
            return None
        monitor = self.recorder["loss"]
        return monitor if isinstance(monitor, CallMonitor) else None

    def check(self) -> bool:
        """Looks for faults at the end of a step, if that was asked for. Returns whether the training should stop.

        Raises:
            TrainingFaultError: one was found, and `on_finding` is "raise".
        """
        if self._on_finding is None or not isinstance(self._recorded, Recorder):
            return False
        if self.checkup is None:
            self.checkup = Checkup(self._recorded, self._on_finding, against=self._against)
        self.checkup.step()
        return self.checkup.stop

    def check_alone(self) -> bool:
        """As `check`, for trainers in which a rank that stops leaves the others waiting: False if there are several ranks."""
        stop, (_, ranks) = self.check(), _place()
        if stop and ranks > 1 and not self._told:
            self._told = True
            message = f'the training goes on: if one of {ranks} ranks stopped, the others would wait; on_finding="raise" ends all'
            warn_user(message, RecordingWarning)
        return stop and ranks == 1

    def state_dict(self) -> dict[str, Any]:
        """What this rank recorded, for the one checkpoint that the trainer writes for all ranks."""
        return self._state_dict() or {}

    @_once_begun
    def _state_dict(self) -> dict[str, Any]:
        rank, ranks = _place()
        return {"rank": rank, "ranks": ranks, **self.recorder.state_dict()}

    @_guarded
    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Goes on where `state_dict` was taken. Another rank than its own has no state there: it begins anew at the same step."""
        if isinstance(self._recorded, Recorder):
            self._load(state_dict)
        else:
            self._waiting = state_dict

    def _load(self, state_dict: Mapping[str, Any]) -> None:
        self._waiting = {}
        if not state_dict:
            return
        rank, ranks = state_dict["rank"], state_dict["ranks"]
        if _place()[0] == rank:
            self.recorder.load_state_dict(state_dict)
        else:
            self._begin_anew(from_state_dict(state_dict))
        if ranks > 1:
            message = f"the checkpoint holds what rank {rank} of {ranks} recorded; what the others recorded before it is not there"
            warn_user(message, RecordingWarning)

    @_once_begun
    def save(self, folder: str | Path) -> None:
        """Saves what this rank recorded into a folder of its own within a checkpoint, `recorder/rank-0` for rank 0."""
        rank, ranks = _place()
        self.recorder.save(Path(folder, "recorder", f"rank-{rank}"))
        if rank == 0:  # of an earlier checkpoint of that name, by more ranks
            for other, path in _saved(folder).items():
                if other >= ranks:
                    shutil.rmtree(path)

    @_once_begun
    def resume(self, folder: str | Path) -> None:
        """Goes on from a checkpoint. If there are fewer ranks than before, each takes over several; if more, some begin anew."""
        rank, ranks = _place()
        saved = _saved(folder)
        if not saved:
            raise RecordingNotFoundError(
                f"{Path(folder, 'recorder')} holds no recording: it begins anew; else call recorder.resume"
            )
        mine = [path for other, path in saved.items() if other % ranks == rank]
        if not mine:
            self._begin_anew(load(next(iter(saved.values()))))
            return
        self.recorder.resume(mine[0])
        for path in mine[1:]:
            self.recorder.merge(load(path))

    def _begin_anew(self, other: Recording) -> None:
        self.recorder.reset().clock.step = other.step or 0


class InTraining:
    """The part of a callback or handler that holds the recorder, and looks for faults; see `Training`.

    Args:
        recorder: see `Recorded`.
        on_finding: what to do about a fault that `findings` finds; see `Checkup`. None: nobody looks.
        against: what good runs were like in their first steps, which faults are looked for by, too; see `Checkup`.
    """

    def __init__(self, recorder: Recorded, on_finding: OnFinding | None = None, against: Against = None) -> None:
        super().__init__()
        self._training = Training(recorder, on_finding, against)

    @property
    def recorder(self) -> Recorder:
        """The recorder.

        Raises:
            RecorderError: it is made when the training begins, and none has begun.
        """
        return self._training.recorder

    def save(self, folder: str | Path) -> None:
        """Saves what this rank recorded in a folder: `recorder/rank-0` for rank 0. What fails is a warning."""
        self._training.save(folder)

    @property
    def checkup(self) -> Checkup | None:
        """What looks for faults, with all that it found; None if nobody asked for it, or no step has ended."""
        return self._training.checkup


def _place() -> tuple[int, int]:
    """The rank of this process, and the number of ranks."""
    return (dist.get_rank(), dist.get_world_size()) if dist.is_available() and dist.is_initialized() else (0, 1)


def _saved(folder: str | Path) -> dict[int, Path]:
    """The recordings of a checkpoint, by rank."""
    return {
        int(path.name[5:]): path for path in sorted(Path(folder, "recorder").glob("rank-*"), key=lambda path: int(path.name[5:]))
    }
