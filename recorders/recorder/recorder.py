"""Recorder: an ordered mapping from name to Monitor, made by selecting modules or parameters of a net."""

from __future__ import annotations

import copy
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from torch import nn
from torch.optim import Optimizer

from recorders.capture import layouts
from recorders.capture.contents import all_modules
from recorders.capture.entering import timed
from recorders.capture.given import BatchContext
from recorders.capture.renewal import together
from recorders.capture.switching import hook_of
from recorders.errors import SelectionError
from recorders.monitors.attachment import leave_clock
from recorders.monitors.base import Monitor
from recorders.monitors.options import MonitorOptions
from recorders.monitors.pairs import PairMonitor
from recorders.recorder.attached import warn_of_equals
from recorders.recorder.overhead import Overhead, check_budget, overhead, shown_cadence
from recorders.recorder.placing import Prototype, ToPlace, as_prototype, chosen, recipes, to_place
from recorders.recorder.plan import Plan, plan
from recorders.recorder.report import Report, report
from recorders.recorder.results import Results
from recorders.recorder.selection import (
    Criteria,
    Excluded,
    Match,
    Names,
    Place,
    select_modules,
    select_pairs,
    select_parameters,
    unwrapped,
)
from recorders.recordings.display import cut
from recorders.recordings.recording import lookup, stands_for_one
from recorders.recordings.storage.codec import no_collection
from recorders.schedule.clock import Clock
from recorders.schedule.meter import Meter
from recorders.schedule.notices import forget, warn_of_several, warn_of_step
from reducers import Reducer
from reducers.kernels.cpp import library
from reducers.kernels.dispatch import troubles
from reducers.kernels.locks import new_lock

if TYPE_CHECKING:
    from torch.utils.hooks import RemovableHandle
    from typing_extensions import Self, Unpack

STOPPED = "recording has stopped: no cadence keeps the budget"


class Recorder(Results):
    """Monitors (its subrecorders) by name, in the order in which they were selected.

    The monitors given are prototypes: each selected module gets a copy with a state of its own. Hooks are on as soon as modules are
    selected; at the end of a `with` block they are taken off. If an equal monitor is already on a module, no second one is added:
    the new name becomes an alias.

    Args:
        monitor: the one kind of monitor to put on every selected module; subrecorders have the names of the modules.
        budget: the share of the steps' time that recording may take, such as 0.03; docs/speed.md shows that it takes more of steps
            of a millisecond or less. If it takes more, only one in 3, 4, 5, ... of the steps that a monitor chooses is recorded; if
            steps that record nothing exceed it too, recording stops with a warning. Needs a clock that advances (`attach` or
            `step`). A compiled net gets one more graph and keeps its hooks.
        **monitors: several kinds, by group; subrecorders are named `group/module`. A `CallMonitor` needs no module: it exists at
            once, under the name of its group.

    Raises:
        TypeError: an argument is neither a monitor nor the recipe of one.
        ValueError: `budget` is not between 0 and 1.

    >>> import torch
    >>> from recorders import ForwardMonitor
    >>> from reducers import Max
    >>> net = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.ReLU())
    >>> with Recorder(ForwardMonitor(Max())).modules(net, types=torch.nn.ReLU) as recorder:
    ...     _ = net(torch.zeros(1, 2))
    >>> list(recorder), recorder["1"].samples
    (['1'], 1)
    """

    def __init__(
        self,
        monitor: Prototype | None = None,
        /,
        *unnamed: Prototype,
        budget: float | None = None,
        **monitors: Prototype,
    ) -> None:
        library.library()  # if there are no loops, that is said now, not in the middle of a training
        clock, meter = Clock(), Meter(check_budget(budget))
        if unnamed and not isinstance(monitor, nn.Module):
            raise TypeError(f"{1 + len(unnamed)} monitors without a name: write Recorder(out=..., grad=...), with a name for each")
        if (monitor is None) == (not monitors):
            raise TypeError("give one monitor, Recorder(ForwardMonitor(Mean())), or several by name, Recorder(out=..., grad=...)")
        self._prototypes = {
            group: as_prototype(item, f"Recorder({group}=...)" if group else "Recorder(...)")
            for group, item in (monitors if monitor is None else {"": monitor}).items()
        }
        self._monitors: dict[str, Monitor] = {}  # the finalizer holds it: it is changed in place
        self._aliases: dict[str, str] = {}
        self._alone: set[str] = set()  # the names of those that were not selected from a net
        self._clock, self._meter, self._stopped = clock, meter, False
        self._begin()
        for group, prototype in self._prototypes.items():
            if prototype.subject == "values":
                self._take_in(group, prototype.constructor())

    def _begin(self) -> None:
        """Sets what a copy does not take over: nets, the hook on them, `with` blocks and given values."""
        self._nets: list[weakref.ref[nn.Module]] = []
        self._places: dict[int, list[str]] = {}  # by the `id` of a module, the names of what was put there
        self._counting: RemovableHandle | None = None
        self._blocks, self._lock = 0, new_lock()
        self._context = BatchContext(weakref.ref(self))
        self._meter.give_up = weakref.WeakMethod(self._give_up)
        if self._meter.budget is not None:
            self._meter.ask()
        self._clock.measure(self._meter)
        weakref.finalize(self, forget, self._monitors).atexit = False  # warns if hooks are on then

    def __getstate__(self) -> dict[str, Any]:
        return {
            key: value
            for key, value in vars(self).items()
            if key not in ("_nets", "_places", "_counting", "_blocks", "_lock", "_context")
        }

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self._begin()
        for name, monitor in self.items():
            self._take_in(name, monitor)

    def __copy__(self) -> Self:
        """A copy with monitors of its own, as by `deepcopy`: monitors belong to one recorder."""
        return copy.deepcopy(self)

    def modules(
        self,
        net: nn.Module,
        types: type | Iterable[type] | None = None,
        indices: int | Iterable[int] | None = None,
        *,
        names: Names | None = None,
        exclude: Excluded | None = None,
        depth: int | None = None,
        leaves: bool = False,
        where: Callable[[str, nn.Module], bool] | None = None,
        groups: str | Iterable[str] | None = None,
        prefix: str = "",
    ) -> Self:
        """Puts monitors on those modules of `net` (itself and all below) that satisfy every criterion; returns the recorder.

        Args:
            net: the network; wrappers of `torch.compile`, data parallelism and checkpointing are looked through.
            types: module classes.
            indices: positions in `net.modules()`.
            names: names, globs (`"encoder.*"`) or compiled regular expressions; each must match at least one module.
            exclude: names, globs, regular expressions or classes to leave out.
            depth: the number of levels below `net` to go down to; `net` itself is level 0.
            leaves: only modules that contain no modules.
            where: called with name and module; returns whether to select it.
            groups: the groups of monitors to put there; None for all.
            prefix: the name of the net, to tell two networks apart. With `prefix="teacher"`, its module "0" is "teacher.0", for
                `names`, `exclude` and `where`, too.

        Raises:
            SelectionError: nothing matches (the message lists what exists), or a name is taken. Nothing is added then.
        """
        criteria = Criteria(types, names, indices, exclude, depth, leaves, where)
        return self._place(net, groups, select_modules(net, criteria, recursive=True, prefix=prefix), prefix)

    def children(
        self,
        net: nn.Module,
        types: type | Iterable[type] | None = None,
        indices: int | Iterable[int] | None = None,
        *,
        names: Names | None = None,
        exclude: Excluded | None = None,
        where: Callable[[str, nn.Module], bool] | None = None,
        groups: str | Iterable[str] | None = None,
        prefix: str = "",
    ) -> Self:
        """Like `modules`, for the direct children of `net` only; `indices` are positions in `net.children()`."""
        criteria = Criteria(types, names, indices, exclude, where=where)
        return self._place(net, groups, select_modules(net, criteria, recursive=False, prefix=prefix), prefix)

    def parameters(
        self,
        net: nn.Module,
        types: type | Iterable[type] | None = None,
        indices: int | Iterable[int] | None = None,
        *,
        names: Names | None = None,
        exclude: Excluded | None = None,
        where: Callable[[str, nn.Module], bool] | None = None,
        groups: str | Iterable[str] | None = None,
        prefix: str = "",
    ) -> Self:
        """Like `modules`, for single parameters: `names` are theirs, `types` and `where` test the modules that own them."""
        criteria = Criteria(types, names, indices, exclude, where=where)
        return self._place(net, groups, select_parameters(net, criteria, prefix=prefix), prefix)

    @classmethod
    def pairs(
        cls,
        net_a: nn.Module,
        net_b: nn.Module,
        reducer: Reducer,
        types: type | Iterable[type] | None = None,
        *,
        match: Match = "name",
        names: Names | None = None,
        exclude: Excluded | None = None,
        depth: int | None = None,
        leaves: bool = False,
        where: Callable[[str, nn.Module], bool] | None = None,
        **options: Unpack[MonitorOptions],
    ) -> Self:
        """A recorder with a `PairMonitor` for each pair: how modules of two nets, given the same inputs, are related.

        Args:
            net_a, net_b: the nets; they may be one.
            reducer: takes two tensors, such as `CKA()`.
            match: "name" pairs the modules that have one name in both nets, and leaves out the others; "all" pairs each module with
                each, under the name `"a~b"`: every pair keeps a copy of one output until the other comes.
            types, names, exclude, depth, leaves, where: which modules, of both nets, as in `modules`.
            **options: see `MonitorOptions`.

        Raises:
            SelectionError: the criteria match nothing in one of the nets, or no name is in both.
            ValueError: `match` is neither "name" nor "all".

        >>> import torch
        >>> from reducers import CKA
        >>> small, large = (torch.nn.Sequential(torch.nn.Linear(3, width), torch.nn.Tanh()) for width in (4, 8))
        >>> with Recorder.pairs(small, large, CKA(), torch.nn.Tanh, match="all") as recorder:
        ...     for batch in torch.randn(5, 16, 3).unbind():
        ...         _ = small(batch), large(batch)
        >>> list(recorder), 0 < recorder["1~1"].peek()["cka"] <= 1
        (['1~1'], tensor(True))
        """
        found = select_pairs(net_a, net_b, match, Criteria(types, names, None, exclude, depth, leaves, where))
        recorder = cls(PairMonitor(reducer, **options))
        recorder._know(net_a)
        with together([net_a, net_b]):
            made = ((name, module, PairMonitor(reducer, other, **options)) for name, module, other in found)
            wanted = (ToPlace([name], a, pair.attr, *recipes(pair, [net_a])(a)) for name, a, pair in made)
            recorder._put(wanted, alone=True)
        return recorder

    def _place(self, net: nn.Module, groups: str | Iterable[str] | None, places: list[Place], prefix: str) -> Self:
        """Puts a copy of each prototype in `groups` on each of `places`, which were selected from `net`."""
        with together([net]), no_collection():
            added = self._put(to_place(chosen(self._prototypes, groups), unwrapped(net), places, prefix))
        self._know(net)
        warn_of_equals(added)
        return self

    def _put(self, wanted: Iterable[ToPlace], *, alone: bool = False) -> list[Monitor]:
        """Puts monitors on their modules and returns them; if one cannot be put, none is. An equal one gets a further name."""
        on: dict[int, list[Monitor]] = {}
        added: dict[str, Monitor] = {}
        aliases: dict[str, str] = {}
        try:
            for names, module, attr, recipe, unknown in wanted:
                name, beside = names[0], on.get(id(module)) or on.setdefault(id(module), self._found_on(module))
                found = next((one for one in beside if one.attr == attr and one.constructor == recipe), None)
                for other in names:
                    holder = aliases.get(other, self._aliases.get(other, other))
                    if (holder in self._monitors or holder in added) and (found is None or holder != found.name):
                        raise SelectionError(f"{other!r} is taken by another module: keep the two apart with prefix='...'")
                if found is None:
                    found = recipe(attr)
                    self._configure(name, found)
                    added[name] = found.register(module)
                    found.checks_channels = found.checks_channels or unknown
                    beside.append(found)
                aliases.update({other: found.name for other in names if other != found.name})
        except Exception:
            for monitor in added.values():
                monitor.deregister()
            raise
        for name, monitor in added.items():
            self._keep(name, monitor)
        self._aliases.update(aliases)
        self._alone.update(added if alone else ())
        return list(added.values())

    def _configure(self, name: str, monitor: Monitor) -> None:
        """Sets the name and the clock of a monitor; with a budget its clock always switches it."""
        monitor.name = name
        monitor.gate.chooses_steps = monitor.gate.chooses_steps or self._meter.budget is not None
        monitor.clock, monitor.context = self._clock, self._context

    def _take_in(self, name: str, monitor: Monitor) -> None:
        """Makes a monitor a subrecorder."""
        self._configure(name, monitor)
        self._keep(name, monitor)

    def _keep(self, name: str, monitor: Monitor) -> None:
        self._monitors[name] = monitor
        self._places.setdefault(id(monitor.module), []).append(name)
        self._meter.add(name, monitor)

    def _found_on(self, module: nn.Module) -> list[Monitor]:
        """The monitors that were put on a module, and still are."""
        found = [self._monitors.get(name) for name in self._places.get(id(module), ())]
        return [monitor for monitor in found if monitor is not None and monitor.module is module]

    def _live_nets(self) -> list[nn.Module]:
        """The nets that modules were selected from and that still exist."""
        return [net for ref in self._nets if (net := ref()) is not None]

    def _know(self, net: nn.Module) -> None:
        """Remembers a net that modules were selected from."""
        layouts.know(inner := unwrapped(net))
        if all(ref() is not inner for ref in self._nets):
            self._nets.append(weakref.ref(inner))
        self._follow_net()

    def _follow_net(self) -> None:
        """Lets the clock take the phase from the first net and, with an optimizer or a budget, count its micro-batches."""
        if not (nets := self._live_nets()):
            return
        net = nets[0]
        self._clock.watch(net)
        if (self._clock.attached or self._meter.budget is not None) and hook_of(self._counting) is None:
            self._counting = self._clock.count(net)

    def add(self, name: str, monitor: Prototype, module: nn.Module | None = None) -> Self:
        """Puts a copy of a monitor on one module, under a name; returns the recorder. A `CallMonitor` needs no module.

        `recorder[name] = monitor` takes in a monitor that sits on its module already, with what it recorded; a monitor that had
        this name is removed. `del recorder[name]` removes one.

        Raises:
            SelectionError: the name is taken, or there is no module.
            TypeError: an argument is neither a monitor nor the recipe of one.
        """
        here = f"recorder.add({name!r}, ...)"
        prototype = as_prototype(monitor, here)
        if name in self:
            raise SelectionError(f"{here}: the name is taken; recorder[{name!r}] = monitor replaces what has it")
        if module is not None:
            target = unwrapped(module)
            recipe, unknown = recipes(prototype, [target, *self._live_nets()])(target)
            if self._put([ToPlace([name], target, prototype.attr, recipe, unknown)], alone=True):
                self._know_alone(target)
        elif prototype.subject == "values":
            self._take_in(name, prototype.constructor())
        else:
            raise SelectionError(f"{here} needs the module to put {prototype!r} on; only a CallMonitor needs none")
        return self

    def _know_alone(self, module: nn.Module) -> None:
        """Takes a module that was not selected from a net as the net, if there is none yet."""
        if not self._nets:
            self._nets.append(weakref.ref(module))
        self._follow_net()

    def find(self, module: nn.Module) -> dict[str, Monitor]:
        """The subrecorders on a module, by name; none if there are none."""
        return {name: monitor for name, monitor in self.items() if monitor.module is unwrapped(module)}

    def remove(self, name: str | int) -> Monitor:
        """Removes one subrecorder and takes its hooks off; returns it, with what it recorded."""
        true = lookup(name, self._monitors, self._aliases)
        self._take_off(true)
        return self._monitors.pop(true)

    def _take_off(self, name: str) -> None:
        for alias in [alias for alias, target in self._aliases.items() if target == name]:
            del self._aliases[alias]
        self._alone.discard(name)
        self._meter.remove(name)
        leave_clock(self._monitors[name].deregister())

    def __getitem__(self, name: str | int) -> Monitor:
        return self._monitors[lookup(name, self._monitors, self._aliases)]

    def __setitem__(self, name: str, monitor: Monitor) -> None:
        here = f"recorder[{name!r}] = ..."
        if not isinstance(name, str) or not isinstance(monitor, Monitor):
            raise TypeError(f"{here} needs a text and a monitor, such as CallMonitor(Mean()); got {monitor!r}")
        if name in self._aliases:
            raise SelectionError(f"{here}: this is another name of {self._aliases[name]!r}; choose a free one")
        if known := [known for known, other in self.items() if other is monitor]:
            raise SelectionError(f"{here}: the monitor is in this recorder already, as {known[0]!r}")
        if name in self:
            self._take_off(name := lookup(name, self._monitors, self._aliases))
        self._take_in(name, monitor)
        if (module := monitor.module) is not None:
            self._alone.add(name)
            self._know_alone(module)

    def __delitem__(self, name: str | int) -> None:
        self.remove(name)

    def __contains__(self, name: object) -> bool:
        return stands_for_one(name, self._monitors, self._aliases)

    def __iter__(self) -> Iterator[str]:
        return iter(self._monitors)

    def __len__(self) -> int:
        return len(self._monitors)

    def __enter__(self) -> Self:
        """Puts all hooks on; the end of the outermost block takes them off, in whichever thread that is."""
        with self._lock:
            self.register()
            self._blocks += 1
        return self

    def __exit__(self, *_: object) -> None:
        with self._lock:
            self._blocks = max(0, self._blocks - 1)
            if not self._blocks:
                self.deregister()

    def title_shown(self) -> str:
        """The prototypes, how many subrecorders there are, and how often they record."""
        cadence = shown_cadence(self._clock.cadence, self._meter.budget)
        what = ", ".join(f"{group}={one!r}" if group else repr(one) for group, one in self._prototypes.items())
        return f"Recorder({cut(what, 100)}): {len(self):,} subrecorders{cadence}"

    @property
    def aliases(self) -> dict[str, str]:
        """The name of a subrecorder by each further name of its module, parameter or capture."""
        return dict(self._aliases)

    @property
    def clock(self) -> Clock:
        """Step, micro-batch and phase: the clock of the monitors' `steps` and `every_step`. `resume` sets its step."""
        return self._clock

    def attach(self, optimizer: Optimizer) -> Self:
        """Advances the clock after every step of `optimizer`, and counts the micro-batches of each step; returns the recorder.

        If several optimizers step in turn, attach one of them; of a second one it warns. If they step inside backward, attach none
        and call `step()`.

        Raises:
            TypeError: `optimizer` is not an optimizer.

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
        if self._clock.attach(optimizer).several:
            warn_of_several()
        self._follow_net()
        return self

    def step(self) -> Self:
        """Advances the clock by one step, for training loops without an attached optimizer; returns the recorder."""
        warn_of_step(self._clock)
        self._clock.advance()
        return self

    def given(self, **values: Any) -> AbstractContextManager[None]:
        """A block in which the monitors that name these values in `given=` take them: ids, labels, a token mask, weights.

        The values are tensors, arrays or lists of numbers, of the present batch. A block within a block adds to it, or overrides.
        Each thread and each task of asyncio has blocks of its own. A gradient gets what was given at its forward.
        If a value is missing or does not fit, the observation is left out, and `on_error` says what happens. Of a value that no
        monitor takes it warns once.

        Raises:
            TypeError: a value is no tensor, array, number or list of numbers.

        >>> import torch
        >>> from recorders import ForwardMonitor
        >>> from reducers import TopK
        >>> layer = torch.nn.Identity()
        >>> recorder = Recorder(ForwardMonitor(TopK(k=1), given="ids")).modules(layer)
        >>> with recorder.given(ids=[70, 71]):
        ...     _ = layer(torch.tensor([[1.0], [5.0]]))
        >>> recorder[0].peek()["id"]
        tensor([71])
        """
        self._context.warn_of_untaken(values, (*self._prototypes.values(), *self._monitors.values()))
        return self._context.give(values)

    def register(self) -> Self:
        """Puts all hooks on; returns the recorder.

        Raises:
            SelectionError: it has no subrecorders, because nothing was selected yet.
        """
        with together(self._live_nets()):
            stopped, self._stopped = self._stopped, False  # for the budget: it is given another chance
            for monitor in self._selected().values():
                if stopped:
                    self._clock.add(monitor)
                if monitor.module is not None:
                    monitor.register()
        self._meter.switch(True)
        self._follow_net()
        return self

    def deregister(self) -> Self:
        """Takes all hooks off; results stay, and the clock still counts steps. Returns the recorder."""
        self._meter.switch(False)
        for monitor in self.values():
            monitor.deregister()
        if self._counting is not None:
            self._clock.uncount()
            self._counting = None
        return self

    def _give_up(self) -> None:
        """Takes everything off, because no cadence keeps the budget."""
        self.deregister()
        for monitor in self.values():  # pushes, too
            self._clock.release(monitor)
            monitor.switch(False, None)
            monitor.counts[STOPPED] = 1
        self._stopped = True
        self._clock.detach()

    def push(self, name: str, *values: Any) -> Self:
        """Hands one observation to the `CallMonitor` of that name; returns the recorder.

        Raises:
            SelectionError: there is no subrecorder of that name, or it is another kind of monitor.
        """
        monitor = self[name]
        if monitor.subject != "values":
            raise SelectionError(f"{name!r} is a {type(monitor).__name__}, which captures by itself: push into a CallMonitor")
        monitor.push(*values)
        return self

    def tick(self) -> Self:
        """Records what every `ParameterMonitor(when="tick")` and `ModuleMonitor` sees now; returns the recorder."""
        for monitor in self.values():
            timed(monitor, monitor.tick)
        return self

    def plan(self, *args: Any, **kwargs: Any) -> Plan:
        """What will be recorded and how big the states get, from a dry run of the net on example inputs, on the meta device."""
        return plan(self._selected(), self._live_nets(), args, kwargs)

    def report(self) -> Report:
        """What each subrecorder recorded, and the likely reason if it recorded nothing or its module has left the net."""
        return report(self._selected(), self._gone())

    def _gone(self) -> set[str]:
        """The names of those whose module has left the net that it was selected from; none if such a net no longer exists."""
        present = {id(module) for net in self._live_nets() for module in all_modules(net)}
        if not present or len(self._live_nets()) < len(self._nets):
            return set()
        placed = {name: one for name, one in self.items() if one.subject != "values" and name not in self._alone}
        return {name for name, monitor in placed.items() if id(monitor.module) not in present}

    def overhead(self) -> Overhead:
        """What recording costs a step, in total and by subrecorder; measured only if it is asked for. See `Overhead`.

        With a `budget` it is measured from the beginning. Without one, the first call tells nothing yet, and measures the next 64
        steps that record (up to 256 if steps are compared and differ much); a later call tells what was found, and if those steps
        are over, measures the next ones. All other steps read no clock. No observation is left out for it: if each step records,
        there is nothing to compare with, and the figure is the least that recording costs.
        """
        self._clock.measure(self._meter)  # counts the steps up to now
        found = overhead(self._meter, started=self._clock.step > 0 or self._clock.attached)
        if self._meter.ask():
            self._clock.measure(self._meter)
        return replace(found, loops=library.state(), troubles=troubles())
