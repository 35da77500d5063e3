"""Recorder: an ordered mapping from name to Monitor, made by selecting modules or parameters of a net."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch.optim import Optimizer

from recorders.errors import MergeError, SelectionError
from recorders.monitors.base import Monitor
from recorders.monitors.forward import CallMonitor
from recorders.monitors.parameters import ParameterMonitor
from recorders.recorder.overhead import Overhead, shown_cadence
from recorders.recorder.placed import Placed
from recorders.recorder.report import Plan, Report, plan, report
from recorders.recordings.recording import Recording, Subrecording
from recorders.schedule.clock import Clock
from reducers import Result

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

__all__ = ["Recorder"]


class Recorder(Placed):
    """Monitors (its subrecorders) by name, in the order in which they were selected.

    Args:
        monitor: the one kind of monitor to put on every module selected; subrecorders are named as the modules are.
        fuse: reduce big observations, from 8,192 elements on, through `torch.compile`, in one pass. It pays off for reducers made
            of several and tensors of some MB; the first observation of a kind takes seconds. Where nothing can be compiled
            there is one warning, and all is as without it. Inside compiled nets lifts are part of the graph anyway.
        budget: the share of the steps' time that recording may take, such as 0.03. Where it takes more, one step in 2, 3, 4, ... of
            those that a monitor chooses is recorded: forwards, gradients, updates and pushes alike, so that counts are of
            recorded steps. The cost is measured again all the time, and the cadence follows; `overhead().every_step` is
            the one in force. In the other steps hooks are out of the modules. Needs a clock that advances: `attach` or `step`. A
            compiled net gets one graph more, and keeps its hooks.
        **monitors: several kinds, by group; subrecorders are named `group/module`. A `CallMonitor` needs no module and is
            there at once, named as its group.

    Monitors given serve as prototypes: each place gets a monitor, and so a state, of its own. Hooks are on from the moment of
    selection; used as a context manager the recorder takes them off at the end. A monitor equal to one already on the same
    module shares its capture, under both names.

    Raises:
        TypeError: something other than a monitor, or the recipe of one, was given.
        ValueError: `budget` is no share.

    >>> import torch
    >>> from recorders import ForwardMonitor
    >>> from reducers import Max
    >>> net = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.ReLU())
    >>> with Recorder(ForwardMonitor(Max())).modules(net, types=torch.nn.ReLU) as recorder:
    ...     _ = net(torch.zeros(1, 2))
    >>> list(recorder), recorder["1"].samples
    (['1'], 1)
    """

    def __enter__(self) -> Recorder:
        return self.register()

    def __exit__(self, *_: object) -> None:
        self.deregister()

    def __repr__(self) -> str:
        kinds = ", ".join(f"{group}={prototype!r}" if group else repr(prototype) for group, prototype in self._prototypes.items())
        budget = self._meter.budget
        cadence = f", {shown_cadence(self._clock.cadence, budget)}" if budget is not None else ""
        return f"Recorder({kinds}): {len(self)} subrecorders{cadence}"

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_nets": [], "_on": {}, "_clock_handle": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update({**state, "_on": weakref.WeakKeyDictionary()})
        self._clock.measure(self._meter)
        for name, monitor in self.items():
            self._enlist(name, monitor)
            self._meter.add(name, monitor)

    def _watch(self) -> None:
        """Phase and, once an optimizer is attached, micro-batches are those of the first net."""
        net = self._nets[0]() if self._nets else None
        if net is None:
            return
        self._clock.watch(net)
        if (self._clock.attached or self._meter.budget is not None) and self._clock_handle is None:
            self._clock_handle = self._meter.counting = self._clock.count(net)

    @property
    def clock(self) -> Clock:
        """Step, micro-batch and phase: what `steps` and `every_step` of the monitors mean. To resume, set `clock.step`."""
        return self._clock

    def attach(self, optimizer: Optimizer) -> Recorder:
        """Advances the clock after every step of `optimizer`, and counts the micro-batches of each; returns the recorder itself.

        Attach one of them where several step in turn, none where they step inside backward: call `step()` then.

        Raises:
            TypeError: `optimizer` is none.

        >>> import torch
        >>> from recorders import ForwardMonitor
        >>> from reducers import Count
        >>> net = torch.nn.Linear(2, 1)
        >>> optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        >>> recorder = Recorder(ForwardMonitor(Count(), every_step=100)).modules(net).attach(optimizer)
        >>> for _ in range(201):
        ...     net(torch.ones(1, 2)).sum().backward()
        ...     optimizer.step()
        >>> recorder[0].samples, recorder.clock.step
        (3, 201)
        """
        self._clock.attach(optimizer)
        self._watch()
        return self

    def step(self) -> Recorder:
        """Advances the clock by one step, where no optimizer that it is attached to does; returns the recorder itself."""
        self._clock.advance()
        return self

    def register(self) -> Recorder:
        """Puts all hooks on; returns the recorder itself."""
        for monitor in self.values():
            if monitor.module is not None:
                monitor.register()
        self._meter.switch(True)
        self._watch()
        return self

    def deregister(self) -> Recorder:
        """Takes all hooks off; what was recorded stays, and steps go on being counted. Returns the recorder itself."""
        self._meter.switch(False)
        for monitor in self.values():
            monitor.deregister()
        if self._clock_handle is not None:
            self._clock.uncount()
            self._clock_handle = self._meter.counting = None
        return self

    def samples(self, name: str | int) -> int:
        """How many observations one subrecorder recorded."""
        return self[name].samples

    def iter_samples(self) -> Iterator[int]:
        """How many observations each subrecorder recorded, in order."""
        return (monitor.samples for monitor in self.values())

    def apply(self, function: Callable[[Any], Any]) -> Recorder:
        """From now on every result is shown and saved as `function(result)`; states stay mergeable. Returns the recorder itself."""
        return self.apply_sample(lambda result, samples: function(result))

    def apply_sample(self, function: Callable[[Any, int], Any]) -> Recorder:
        """Like `apply`, with the number of observations as the second argument."""
        for monitor in self.values():
            monitor.apply(function)
        return self

    def push(self, name: str, *values: Any) -> Recorder:
        """Hands one observation to the `CallMonitor` of that name; returns the recorder itself.

        Raises:
            SelectionError: there is none of that name, or it is another kind of monitor.

        >>> from recorders import CallMonitor
        >>> from reducers import Mean
        >>> Recorder(loss=CallMonitor(Mean())).push("loss", 2.0)["loss"].samples
        1
        """
        monitor = self[name]
        if not isinstance(monitor, CallMonitor):
            raise SelectionError(f"{name!r} is a {type(monitor).__name__}, which captures by itself: push into a CallMonitor")
        monitor.push(*values)
        return self

    def tick(self) -> Recorder:
        """Records the parameters of every `ParameterMonitor(when="tick")` as they are now; returns the recorder itself."""
        for monitor in self.values():
            if isinstance(monitor, ParameterMonitor):
                monitor.tick()
        return self

    def compute(self) -> dict[str, Result]:
        """Result by name; subrecorders that recorded nothing are absent (`report()` says why)."""
        return self.snapshot().compute()

    def reset(self) -> Recorder:
        """Forgets what was recorded; hooks stay as they are. Returns the recorder itself."""
        for monitor in self.values():
            monitor.clear()
        return self

    def snapshot(self) -> Recording:
        """What was recorded so far, without hooks."""
        return Recording({name: monitor.snapshot() for name, monitor in self.items()}, self.aliases)

    def merge(self, other: Mapping[str, Monitor] | Mapping[str, Subrecording]) -> Recorder:
        """Adds another recorder's or recording's states to these; a fresh recorder resumes a saved one so.

        Raises:
            MergeError: the names differ (both sides are listed) or a pair does not fit; nothing has changed then.
        """
        if set(self) != set(other):
            only = sorted(set(self) - set(other)), sorted(set(other) - set(self))
            raise MergeError(f"the two hold different names: only this recorder has {only[0]}, only the other {only[1]}")
        theirs = {name: part.snapshot() if isinstance(part, Monitor) else part for name, part in other.items()}
        for name, monitor in self.items():
            monitor.check_merge(theirs[name])
        for name, monitor in self.items():
            monitor.merge(theirs[name])
        return self

    def sync(self, group: ProcessGroup | None = None) -> Recording:
        """The recordings of all ranks merged in rank order, the same on every rank; this recorder is left as it is.

        Raises:
            SyncError: the ranks do not record the same things; raised on every rank, with both sides listed.
        """
        from recorders.recordings.sync import sync

        return sync(self.snapshot(), group)

    def save(self, path: str | Path) -> Path:
        """Saves everything as one commit: one safetensors file per subrecorder, and a manifest. Returns the folder.

        Raises:
            NotARecordingError: `path` exists and is not a recording.
            StorageError: writing failed; what was saved there before is still whole.
        """
        from recorders.recordings.storage import save

        return save(self.snapshot(), path)

    def plan(self, *args: Any, **kwargs: Any) -> Plan:
        """A dry run: what will be recorded and how big the states get, from example inputs, without computing anything."""
        return plan(self, self._living_nets(), args, kwargs)

    def report(self) -> Report:
        """What fired how often, what never did and the likely reason; modules that left their net since are told."""
        nets = self._living_nets()
        return report(self, nets if len(nets) == len(self._nets) else ())

    def overhead(self) -> Overhead:
        """What recording costs in this run, measured: the share of a step, and by subrecorder.

        One step in 31 of the clock is measured, and at first every one but the very first; the others are not slowed down.
        Without a clock that advances nothing is measured, and the note says so. Nothing is waited for: with a CUDA device the time
        of the host is measured, and by events that of the device's current stream. What waits to be reduced together with
        later observations counts in the step that reduces it; reading results does not count, nor does what a compiled graph
        computes in its own kernels. What PyTorch does to call the hooks counts, and what the clock does. If no step goes without
        recording, what recording slows down elsewhere cannot be known, and the note says so.

        >>> import torch
        >>> from recorders import ForwardMonitor
        >>> from reducers import Mean
        >>> net = torch.nn.Linear(2, 1)
        >>> recorder = Recorder(ForwardMonitor(Mean())).modules(net)
        >>> for _ in range(10):
        ...     _ = net(torch.ones(1, 2))
        ...     _ = recorder.step()
        >>> cost = recorder.overhead()
        >>> 0 < cost.share < 1, cost.steps, cost.where
        (True, 9, 'host')
        """
        return self._meter.overhead()
