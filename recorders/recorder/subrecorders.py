"""Subrecorders: monitors by name, placed on the modules or parameters of nets."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from torch import nn

from recorders.capture import layouts
from recorders.capture.entering import timed
from recorders.capture.given import BatchContext
from recorders.capture.switching import hook_of
from recorders.errors import SelectionError
from recorders.monitors.base import Monitor
from recorders.monitors.constructor import MonitorConstructor
from recorders.monitors.snapshots import resume
from recorders.monitors.trace_specs import leave_clock
from recorders.recorder.attached import warn_of_equals
from recorders.recorder.blocks import Blocks
from recorders.recorder.prototypes import Prototype, as_prototype, check_names, join, recipes
from recorders.recorder.selection import Place, unwrapped
from recorders.recordings.recording import Subrecording, check_same_names, lookup
from recorders.schedule.clock import Clock
from recorders.schedule.meter import Meter
from reducers.errors import did_you_mean

if TYPE_CHECKING:
    from torch.utils.hooks import RemovableHandle

__all__ = ["Subrecorders"]

STOPPED = "recording has stopped: no cadence keeps the budget"


class Subrecorders(Mapping[str, Monitor]):
    """An ordered mapping from name to monitor: makes the monitors from prototypes, and puts their hooks on and off.

    Args:
        monitors: one prototype, or one recipe of a monitor, for each group.
        clock: the clock that all monitors share.
        meter: measures what the monitors cost; with a budget it also decides in which steps they record.
        fuse: reduce big observations through `torch.compile`.

    Attributes:
        prototypes: the monitors that are copied, by group.
        aliases: the name of a monitor by each further name of its module, parameter or capture.
        context: what `Recorder.given` gives to all of them.
    """

    def __init__(self, monitors: Mapping[str, Prototype], clock: Clock, meter: Meter, fuse: bool) -> None:
        self.prototypes = {
            group: as_prototype(item, f"Recorder({group}=...)" if group else "Recorder(...)") for group, item in monitors.items()
        }
        self.aliases: dict[str, str] = {}
        self.context, self.blocks = BatchContext(weakref.ref(self)), Blocks()
        self._clock, self._meter, self._fuse = clock, meter, fuse
        self._monitors: dict[str, Monitor] = {}
        self._nets: list[weakref.ref[nn.Module]] = []
        self._by_module: weakref.WeakKeyDictionary[nn.Module, list[Monitor]] = weakref.WeakKeyDictionary()
        self._counting: RemovableHandle | None = None
        self._alone, self._stopped = set[str](), False  # the names of those that were not selected from a net
        self._limit()
        for group, prototype in self.prototypes.items():
            if prototype.subject == "values":
                self._monitors[group] = prototype.constructor()
                self._configure(group, self._monitors[group])
                meter.add(group, self._monitors[group])

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_nets": [], "_by_module": {}, "_counting": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update({**state, "_by_module": weakref.WeakKeyDictionary(), "context": BatchContext(weakref.ref(self))})
        self._limit()
        for name, monitor in self.items():
            self._configure(name, monitor)
            self._meter.add(name, monitor)

    def __getitem__(self, name: str | int) -> Monitor:
        return self._monitors[lookup(name, self._monitors, self.aliases)]

    def __iter__(self) -> Iterator[str]:
        return iter(self._monitors)

    def __len__(self) -> int:
        return len(self._monitors)

    def __repr__(self) -> str:
        return ", ".join(f"{group}={prototype!r}" if group else repr(prototype) for group, prototype in self.prototypes.items())

    @property
    def nets(self) -> list[nn.Module]:
        """The nets that modules were selected from and that still exist."""
        return [net for ref in self._nets if (net := ref()) is not None]

    @property
    def gone(self) -> set[str]:
        """The names of those whose module has left the net that it was selected from; none if such a net no longer exists."""
        if len(self.nets) < len(self._nets):
            return set()
        present = {id(module) for net in self.nets for module in net.modules()}
        placed = ((name, m) for name, m in self.items() if m.subject != "values" and name not in self._alone)
        return {name for name, monitor in placed if present and id(monitor.module) not in present}

    def place(self, net: nn.Module, groups: str | Iterable[str] | None, places: list[Place]) -> None:
        """Puts a copy of each prototype in `groups` (None: of all) on each of `places`, which were selected from `net`.

        If no prototype fits any place, or a name is taken, raises `SelectionError` and adds nothing.
        """
        chosen = self._chosen(groups)
        of_parameters = places[0].attr is not None
        unfit = [prototype for prototype in chosen.values() if prototype.subject in ("calls", "module")]
        if wrong := [type(prototype).__name__ for prototype in unfit if of_parameters]:
            raise SelectionError(f"{wrong} watch modules, not parameters: use modules() or children(), or omit them with groups=")
        added: dict[str, Monitor] = {}
        aliases: dict[str, str] = {}
        matched, collects = False, gc.isenabled()
        try:
            gc.disable()  # none of the objects made here is garbage; for 10,000 monitors, collecting takes as long as making them
            for group, prototype in chosen.items():
                if prototype.subject == "values":
                    continue
                recipe = recipes(prototype, [net])
                for place in places:
                    if place.attr is None and not prototype.applies(place.module):
                        continue
                    make, unknown = recipe(place.module)
                    matched = True
                    attr = prototype.attr if place.attr is None else place.attr
                    name, *others = [join(group, name) for name in place.names]
                    present = self._find_equal(make, attr, place.module)
                    if present is None:
                        if name in self._monitors or name in added or name in self.aliases:
                            raise SelectionError(f"{name!r} is taken by another module: keep the two apart with prefix='...'")
                        monitor = make(attr)
                        self._configure(name, monitor)
                        present = name
                        added[name] = monitor.register(place.module)
                        monitor.checks_channels = monitor.checks_channels or unknown
                        self._by_module.setdefault(place.module, []).append(monitor)
                    aliases.update({other: present for other in (name, *others) if other != present})
                check_names(prototype, [place.module for place in places if place.attr is None])
            if not matched:
                given = ", ".join(map(repr, chosen.values()))
                raise SelectionError(f"none of the {len(places)} modules selected has anything to watch for {given}")
            for name, monitor in added.items():
                self._meter.add(name, monitor)
        except Exception:
            for monitor in added.values():
                self._forget(monitor.deregister())
            raise
        finally:
            if collects:
                gc.enable()
        self._monitors.update(added)
        self.aliases.update(aliases)
        self.know(net)
        warn_of_equals(added.values())

    def know(self, net: nn.Module) -> None:
        """Remembers a net that modules were selected from."""
        layouts.know(inner := unwrapped(net))
        if all(ref() is not inner for ref in self._nets):
            self._nets.append(weakref.ref(inner))
        self.follow_net()

    def add(self, name: str, item: Prototype, module: nn.Module | None) -> None:
        """Puts a copy of a prototype on `module`, under a name that is free."""
        here = f"recorder.add({name!r}, ...)"
        prototype = as_prototype(item, here)
        if name in self:
            raise SelectionError(f"{here}: the name is taken; recorder[{name!r}] = monitor replaces what has it")
        if module is None and prototype.subject != "values":
            raise SelectionError(f"{here} needs the module to put {prototype!r} on; only a CallMonitor needs none")
        target = module if module is None else unwrapped(module)
        make, unknown = recipes(prototype, self.nets if target is None else [target, *self.nets])(target)
        present = None if target is None else self._find_equal(make, prototype.attr, target)
        if present is None:
            made = make(prototype.attr)
            self[name] = made if target is None else made.register(target)
            made.checks_channels = made.checks_channels or unknown
        else:
            self.aliases[name] = present

    def __setitem__(self, name: str, monitor: Monitor) -> None:
        """Takes a monitor in as it is, with what it recorded; the one that had this name goes."""
        here = f"recorder[{name!r}] = ..."
        if not isinstance(name, str) or not isinstance(monitor, Monitor):
            raise TypeError(f"{here} needs a text and a monitor, such as CallMonitor(Mean()); got {monitor!r}")
        if name in self.aliases:
            raise SelectionError(f"{here}: this is another name of {self.aliases[name]!r}; choose a free one")
        if known := [known for known, other in self.items() if other is monitor]:
            raise SelectionError(f"{here}: the monitor is in this recorder already, as {known[0]!r}")
        if name in self:
            self._take_off(name := lookup(name, self._monitors, self.aliases))
        self._configure(name, monitor)
        self._monitors[name] = monitor
        self._meter.add(name, monitor)
        if (module := monitor.module) is not None:
            self._by_module.setdefault(module, []).append(monitor)
            self._alone.add(name)
            if not self._nets:
                self._nets.append(weakref.ref(module))
            self.follow_net()

    def remove(self, name: str | int) -> Monitor:
        """Removes one monitor and its aliases, and takes its hooks off; returns the monitor."""
        true = lookup(name, self._monitors, self.aliases)
        self._take_off(true)
        return self._monitors.pop(true)

    def _take_off(self, name: str) -> None:
        self.aliases = {alias: target for alias, target in self.aliases.items() if target != name}
        monitor = self._monitors[name]
        self._forget(monitor)
        self._alone.discard(name)
        self._meter.remove(name)
        leave_clock(monitor.deregister())

    def push(self, name: str, *values: Any) -> None:
        """Hands one observation to a `CallMonitor`."""
        monitor = self[name]
        if monitor.subject != "values":
            raise SelectionError(f"{name!r} is a {type(monitor).__name__}, which captures by itself: push into a CallMonitor")
        monitor.push(*values)

    def tick(self) -> None:
        """Calls `tick` of the monitors that record at ticks."""
        for monitor in self.values():
            timed(monitor, monitor.tick)

    def merge(self, other: Mapping[str, Monitor] | Mapping[str, Subrecording]) -> None:
        """Adds what monitors or subrecordings of the same names hold; if one does not fit, raises and changes none."""
        check_same_names(self, other, "this recorder", "the other")
        theirs = {name: part.snapshot() if isinstance(part, Monitor) else part for name, part in other.items()}
        for name, monitor in self.items():
            monitor.check_merge(theirs[name])
        for name, monitor in self.items():
            monitor.merge(theirs[name])

    def resume(self, other: Mapping[str, Subrecording]) -> None:
        """Goes on where subrecordings of the same names stopped; if one does not fit, raises and changes none."""
        check_same_names(self, other, "this recorder", "the recording")
        for name, monitor in self.items():
            monitor.check_merge(other[name])
        resume((monitor, other[name]) for name, monitor in self.items())

    def register(self) -> None:
        """Puts all hooks on, also if recording has stopped for the budget: it is given another chance."""
        if self._stopped:
            self._stopped = False
            for monitor in self.values():
                self._clock.add(monitor)
        for monitor in self.values():
            if monitor.module is not None:
                monitor.register()
        self._meter.switch(True)
        self.follow_net()

    def deregister(self) -> None:
        """Takes all hooks off, also the one that counts micro-batches."""
        self._meter.switch(False)
        for monitor in self.values():
            monitor.deregister()
        if self._counting is not None:
            self._clock.uncount()
            self._counting = None

    def _limit(self) -> None:
        """Measures what the monitors cost, if there is a budget."""
        self._meter.give_up = weakref.WeakMethod(self._give_up)
        if self._meter.budget is not None:
            self._meter.ask()
        self._clock.measure(self._meter)

    def _give_up(self) -> None:
        """Takes everything off, because no cadence keeps the budget."""
        self.deregister()
        for monitor in self.values():  # pushes, too
            self._clock.release(monitor)
            monitor.switch(False, None)
            monitor.counts[STOPPED] = 1
        self._stopped = True
        self._clock.detach()

    def follow_net(self) -> None:
        """Lets the clock take the phase from the first net and, with an optimizer or a budget, count its micro-batches."""
        net = self._nets[0]() if self._nets else None
        if net is None:
            return
        self._clock.watch(net)
        if (self._clock.attached or self._meter.budget is not None) and hook_of(self._counting) is None:
            self._counting = self._clock.count(net)

    def _chosen(self, groups: str | Iterable[str] | None) -> dict[str, Monitor]:
        """The prototypes of these groups."""
        known = list(self.prototypes)
        if not (groups is None or isinstance(groups, Iterable)):
            raise TypeError(f"groups={groups!r}: give the name of a group or several, of {known}")
        chosen = known if groups is None else [groups] if isinstance(groups, str) else list(groups)
        if unknown := [group for group in chosen if group not in known]:
            raise SelectionError(f"no group {unknown}; {did_you_mean(unknown[0], known)}there are {known}")
        return {group: self.prototypes[group] for group in chosen}

    def _configure(self, name: str, monitor: Monitor) -> None:
        """Sets the name, the clock and the compilation of a monitor; with a budget its clock always switches it."""
        monitor.name = name
        monitor.gate.chooses_steps = monitor.gate.chooses_steps or self._meter.budget is not None
        monitor.clock, monitor.context = self._clock, self.context
        if self._fuse:
            monitor.buffer.fuse()

    def _find_equal(self, recipe: MonitorConstructor[Monitor], attr: Any, module: nn.Module) -> str | None:
        """The name of a monitor on `module` that captures and reduces the same, if there is one."""
        return next((m.name for m in self._by_module.get(module, ()) if m.attr == attr and m.constructor == recipe), None)

    def _forget(self, monitor: Monitor) -> None:
        module = monitor.module
        if module is not None and monitor in self._by_module.get(module, ()):
            self._by_module[module].remove(monitor)
