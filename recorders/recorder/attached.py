"""What sits on a net now: monitors found through their hooks, whoever put them there."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from torch import nn

from recorders.capture.contents import all_modules
from recorders.capture.switching import hooks_in
from recorders.errors import RecordingWarning
from recorders.monitors.base import Monitor
from recorders.recorder.selection import Criteria, select_modules
from recorders.recordings.display import shown_name
from recorders.schedule.clock import Clock
from recorders.schedule.steps import monitors_of_steps
from reducers.errors import warn_user


@dataclass(frozen=True)
class Attached:
    """A monitor whose hooks are on.

    Attributes:
        place: the name of its module in the net.
        monitor: the monitor; `monitor.peek()` shows what it recorded.
    """

    place: str
    monitor: Monitor

    def __repr__(self) -> str:
        return f"{shown_name(self.place)}: {self.monitor.describe()}, {self.monitor.samples} recorded"


def attached(net: nn.Module) -> list[Attached]:
    """The monitors whose hooks are on `net` and the modules in it, module by module, also those of recorders that are forgotten.

    Monitors that the steps of their clock have switched off for now are among them. A monitor stays on its module until somebody
    takes it off: a notebook cell that selects modules, run ten times, leaves ten.

    Raises:
        TargetError: `net` is no module.

    >>> import torch
    >>> from recorders import ForwardMonitor, Recorder
    >>> from reducers import Mean
    >>> net = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.ReLU())
    >>> recorder = Recorder(out=ForwardMonitor(Mean())).modules(net, types=torch.nn.ReLU)
    >>> attached(net)
    [1: ForwardMonitor 'out/1' on ReLU, 0 recorded]
    >>> detach_all(net), attached(net)
    (1, [])
    """
    names = {id(place.module): place.name for place in select_modules(net, Criteria(), recursive=True)}
    found: dict[int, Attached] = {}
    wrapped = {id(module): name for name, module in net.named_modules()}  # with those that wrap others, as those of torch.compile
    for module in all_modules(net):
        for monitor in _monitors_on(module):
            found.setdefault(id(monitor), Attached(names.get(id(module), wrapped.get(id(module), "")), monitor))
    return list(found.values())


def detach_all(net: nn.Module) -> int:
    """Takes all monitors off `net` and the modules in it, and returns how many; what they recorded stays.

    Clocks stop counting the micro-batches of the net, and go on counting steps. `recorder.register()` puts monitors on again.

    Raises:
        TargetError: `net` is no module.
    """
    found = attached(net)
    for one in found:
        one.monitor.deregister()
    for module in all_modules(net):
        for owner in _owners(module):
            if isinstance(owner, Clock):
                owner.uncount()
    return len(found)


def warn_of_equals(monitors: Iterable[Monitor]) -> None:
    """Warns if each of these monitors, which were put on just now, has an equal one of another recorder on its module."""
    mine = {id(monitor): monitor for monitor in monitors}
    if mine and all(_has_equal(monitor, mine) for monitor in mine.values()):
        first = next(iter(mine.values()))
        warn_user(
            f"an equal recorder is on these {len(mine)} places already, such as {first.describe()}, and both record from now on. "
            "If a notebook cell was run again, call recorders.detach_all(net) first; recorders.attached(net) lists what is on it",
            RecordingWarning,
        )


def _has_equal(monitor: Monitor, mine: dict[int, Monitor]) -> bool:
    module, recipe = monitor.module, monitor.constructor
    others = () if module is None else _monitors_on(module)
    return any(
        id(other) not in mine and other.module is module and other.attr == monitor.attr and other.constructor == recipe
        for other in others
    )


def _monitors_on(module: nn.Module) -> Iterator[Monitor]:
    """The monitors that have hooks on one module, or are told of optimizer steps for it."""
    yield from (owner for owner in _owners(module) if isinstance(owner, Monitor) and owner.registered)
    yield from monitors_of_steps(module)


def _owners(module: nn.Module) -> list[Any]:
    return [hook.owner for hook in hooks_in(module)]
