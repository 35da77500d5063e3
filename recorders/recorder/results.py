"""Results: what a recorder has recorded, as results, files and states."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, overload

from recorders._torch import plainly
from recorders.capture.layouts import warn_before_merge
from recorders.errors import MergeError, NotARecordingError, RecordingNotFoundError, SelectionError
from recorders.monitors.base import Monitor
from recorders.monitors.snapshots import merged, resume
from recorders.recorder.report import warned_of_left_out
from recorders.recordings.display import Names, Rows, ShownAsTable
from recorders.recordings.distributed.collectives import Group
from recorders.recordings.distributed.sharded import load_own, save_sharded
from recorders.recordings.distributed.sync import SyncHandle, sync
from recorders.recordings.recording import Missing, Recording, Subrecording, check_same_names, part_rows
from recorders.recordings.storage.commit import never_committed
from recorders.recordings.storage.save import Layout, Turn, save_in_background, save_in_turn
from recorders.recordings.storage.tools import from_state_dict, to_state_dict
from recorders.recordings.values import NamedResults
from recorders.schedule.clock import Clock
from reducers import Result

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup
    from typing_extensions import Self


class Results(ShownAsTable, NamedResults, Mapping[str, Monitor]):
    """The part of a `Recorder` that deals with what was recorded."""

    _warned: bool = False  # that results leave out what is not finite

    @abstractmethod
    def __getitem__(self, name: str | int) -> Monitor: ...

    _aliases: dict[str, str]
    _clock: Clock

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any:
            if hasattr(type(self), name):  # a property raised it, within: Python would hide that
                return object.__getattribute__(self, name)
            known = (*vars(self).get("_monitors", ()), *vars(self).get("_aliases", ()))
            found = next((key for key in known if key == name or key.startswith((f"{name}/", f"{name}."))), None)
            hint = "" if found is None else f": write recorder[{found!r}]"
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}{hint}", name=name, obj=self)

    def keys(self) -> Names:
        return Names(self)

    def rows_shown(self) -> Rows:
        """One row for each leaf of each subrecorder."""
        return part_rows(self, lambda name: self[name].snapshot())

    def _selected(self) -> Self:
        """The recorder, if it has subrecorders; otherwise raises `SelectionError`."""
        if not len(self):
            raise SelectionError("this recorder has no subrecorders: select modules first, as in recorder.modules(net)")
        return self

    def apply(self, function: Callable[[Any], Any]) -> Self:
        """From now on shows every result as `function(result)`, also among the tensors of saved files; returns the recorder.

        States stay as they are, and mergeable. The function is not saved: what is loaded shows results without it.

        Raises:
            TypeError: it is no function.
        """
        return self.apply_sample((lambda result, samples: function(result)) if callable(function) else function)  # which is refused

    def apply_sample(self, function: Callable[[Any, int], Any]) -> Self:
        """Like `apply`, with the number of observations as the second argument of `function`."""
        for monitor in self._selected().values():
            monitor.apply(function)
        return self

    @plainly
    def compute(self) -> dict[str, Result]:
        """Results by name, each as deep as `peek` says; subrecorders that recorded nothing are left out (`report()` says why).

        Raises:
            SelectionError: the recorder has no subrecorders: nothing was selected yet. So do all methods that need some.
        """
        return self._warned_of(self._selected().snapshot()).compute()

    @plainly
    def reset(self) -> Self:
        """Deletes what was recorded; hooks, and functions given to `apply`, stay. Returns the recorder."""
        for monitor in self.values():
            monitor.reset()
        return self

    clear = reset

    @plainly
    def snapshot(self) -> Recording:
        """A copy of what was recorded so far, without hooks. Looking changes no later result, not even in its last bits."""
        return self._recording(Monitor.snapshot)

    @plainly
    def _saved(self) -> Recording:
        """What is to be saved. A save joins all observations that wait, so that a run which goes on ends as one that is resumed."""
        return self._recording(Monitor.saved)

    def _recording(self, part: Callable[[Monitor], Subrecording]) -> Recording:
        parts = {name: part(monitor) for name, monitor in self.items()}
        return Recording(parts, dict(self._aliases), self._clock.step)

    def _warned_of(self, recording: Recording, waits: bool = False) -> Recording:
        """The recording; warns once if results leave out what is not finite, for states on devices only if `waits`."""
        self._warned = self._warned or warned_of_left_out(recording, waits)
        return recording

    @plainly
    def merge(self, other: Mapping[str, Monitor] | Mapping[str, Subrecording]) -> Self:
        """Adds what another recorder or a recording holds; returns the recorder. To go on with a saved one, see `resume`.

        Raises:
            MergeError: the names differ (both sides are listed), or two states do not fit together; or `other` is this recorder.
                Nothing is changed then.
        """
        if other is self:
            raise MergeError("a recorder is merged with itself, so all would count twice: give another recorder or recording")
        check_same_names(self, other, "this recorder", "the other")
        theirs = {name: part.snapshot() if isinstance(part, Monitor) else part for name, part in other.items()}
        for name, monitor in self.items():
            merged(monitor, monitor.states, theirs[name])  # which raises if it does not fit
        for name, monitor in self.items():
            monitor.merge(theirs[name])
        return self

    @overload
    def sync(
        self, group: Group = ..., *, to: Literal["all"] = ..., missing: Missing = ..., async_op: Literal[False] = ...
    ) -> Recording: ...
    @overload
    def sync(self, group: Group = ..., *, to: int, missing: Missing = ..., async_op: Literal[False] = ...) -> Recording | None: ...
    @overload
    def sync(
        self, group: Group = ..., *, to: Literal["all"] = ..., missing: Missing = ..., async_op: Literal[True]
    ) -> SyncHandle[Recording]: ...
    @overload
    def sync(
        self, group: Group = ..., *, to: int, missing: Missing = ..., async_op: Literal[True]
    ) -> SyncHandle[Recording | None]: ...
    def sync(
        self, group: Group = None, *, to: int | Literal["all"] = "all", missing: Missing = "error", async_op: bool = False
    ) -> Any:
        """The recordings of all ranks merged in rank order, on all ranks or on rank `to`; this recorder is not changed.

        With `async_op=True` it returns a `SyncHandle` while the states are on their way; `wait()` returns what was merged of what
        was recorded up to this call. See `recorders.recordings.distributed.sync.sync`.
        """
        warn_before_merge(self.values(), self._clock)
        return sync(self.snapshot(), group, to=to, missing=missing, async_op=async_op)  # type: ignore[call-overload]

    def save(self, path: str | Path, *, layout: Layout = "folder", overwrite: bool = False) -> Path | str:
        """Saves all results and states into the folder `path`; returns the folder. See `recorders.save`, also for errors.

        A save joins the observations that wait into the states. So runs that save at the same steps end with the same bits, whether
        they were resumed in between or not; one that saves at other steps differs from them in rounding, in the last digits.
        """
        with Turn(path) as turn:  # taken before the snapshot, so that an older one never replaces a newer one
            return save_in_turn(turn, self._warned_of(self._selected()._saved(), waits=True), path, layout, overwrite)

    def save_sharded(
        self, path: str | Path, group: ProcessGroup | None = None, *, layout: Layout = "folder", overwrite: bool = False
    ) -> Path:
        """Saves what all ranks of a group recorded into one folder; every rank calls it, and writes its own files.

        `load(path)` merges them as `sync` does, and `resume(path)` takes what this rank saved. See
        `recorders.recordings.distributed.sharded.save_sharded`, also for errors.
        """
        return save_sharded(self._warned_of(self._saved(), waits=True), path, group, layout=layout, overwrite=overwrite)

    def save_in_background(self, path: str | Path, *, layout: Layout = "folder", overwrite: bool = False) -> Future[Path | str]:
        """Like `save`, in a thread, while recording goes on: what is saved is what was recorded up to this call.

        Returns:
            a future; its `result()` waits for the end and raises what `save` raises. `cancel()` returns True if the save still
            waits for others to the same path, and it does not happen then.
        """
        with Turn(path) as turn:
            return save_in_background(
                self._warned_of(self._selected()._saved()), path, layout=layout, overwrite=overwrite, turn=turn
            )

    @plainly
    def resume(
        self,
        path: str | Path | Recording,
        group: ProcessGroup | None = None,
        *,
        missing: Literal["error", "start"] = "error",
    ) -> Self:
        """Goes on where a saved recording stopped, bit for bit, in place of what was recorded; returns the recorder.

        States, the counts of `every` and the step of the clock are restored. A run that was saved and goes on, and one that resumes
        what it saved, end with the same bits.

        Args:
            path: what was saved; if all ranks of a group saved it (`save_sharded`), this rank takes what it saved itself.
            group: the group that saved it; None for all ranks.
            missing: "start" changes nothing if there is nothing at `path`, or only what a first save left that was killed: for a
                script that calls this at every start.

        Raises:
            RecordingNotFoundError: there is nothing at `path`; lists the recordings that are beside it.
            MergeError: the names differ (both sides are listed), or a reducer or state does not fit; or other ranks than those of
                the group saved it. Nothing is changed then.
            StorageError: the recording cannot be read, see `load`.

        >>> import tempfile, torch
        >>> from recorders import ForwardMonitor, Recorder
        >>> from reducers import Mean
        >>> net = torch.nn.Linear(2, 1)
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     for start in range(2):
        ...         recorder = Recorder(ForwardMonitor(Mean(), every=2)).modules(net)
        ...         _ = recorder.resume(folder + "/run", missing="start")
        ...         with recorder:
        ...             for _ in range(3):
        ...                 _ = net(torch.ones(1, 2))
        ...         _ = recorder.save(folder + "/run")
        >>> recorder[0].samples
        3
        """
        if missing not in ("error", "start"):
            raise ValueError(f"resume(missing={missing!r}): give 'error' or 'start'")
        try:
            recording = path if isinstance(path, Recording) else load_own(path, group)
        except RecordingNotFoundError as error:
            if missing == "start":
                return self
            hint = "if nothing may have been saved yet, resume(path, missing='start') begins anew"
            raise RecordingNotFoundError(f"{error}; {hint}") from error
        except NotARecordingError:
            if missing == "start" and not isinstance(path, Recording) and never_committed(path):
                return self
            raise
        check_same_names(self, recording, "this recorder", "the recording")
        for name, monitor in self.items():
            merged(monitor, {}, recording[name])  # likewise
        resume((monitor, recording[name]) for name, monitor in self.items())
        if recording.step is not None:
            self._clock.step = recording.step
        return self

    @plainly
    def state_dict(self) -> dict[str, Any]:
        """What was recorded, for `torch.save` and `torch.distributed.checkpoint`: one entry of bytes.

        In a distributed checkpoint, equal keys of several ranks are one: put the rank into the key, or `sync` first.
        """
        return to_state_dict(self._saved())

    @plainly
    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Goes on where `state_dict` was taken, bit for bit, in place of what was recorded.

        Raises:
            MergeError: the names differ (both sides are listed), or a reducer or state does not fit. Nothing is changed then.
        """
        self.resume(from_state_dict(state_dict))
