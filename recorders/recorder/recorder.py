"""Recorder: an ordered mapping from name to Monitor, made by selecting modules or parameters of a net."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from torch import nn
from torch.optim import Optimizer

from recorders.capture.renewal import together
from recorders.monitors.base import Monitor
from recorders.recorder.overhead import Overhead, check_budget, overhead, shown_cadence
from recorders.recorder.pairs import OfPairs
from recorders.recorder.plan import Plan, plan
from recorders.recorder.prototypes import Prototype
from recorders.recorder.report import Report, report
from recorders.recorder.selection import Criteria, Excluded, Names, select_modules, select_parameters, unwrapped
from recorders.recorder.subrecorders import Subrecorders
from recorders.recordings.shown import cut
from recorders.schedule.clock import Clock
from recorders.schedule.forgotten import forget
from recorders.schedule.meter import Meter
from reducers.kernels.dispatch import troubles
from reducers.kernels.loop import libraries

if TYPE_CHECKING:
    from typing_extensions import Self

__all__ = ["Recorder"]


class Recorder(OfPairs):
    """Monitors (its subrecorders) by name, in the order in which they were selected.

    The monitors given are prototypes: each selected module gets a copy with a state of its own. Hooks are on as soon as modules are
    selected; at the end of a `with` block they are taken off. If an equal monitor is already on a module, no second one is added:
    the new name becomes an alias.

    Args:
        monitor: the one kind of monitor to put on every selected module; subrecorders have the names of the modules.
        fuse: reduce observations of 8,192 elements or more through `torch.compile`, in one pass: faster for reducers made of
            several others and tensors of several MB, but the first observation of each kind takes seconds. If compilation fails,
            there is one warning. Compiled nets reduce in their own graph anyway.
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
        *,
        fuse: bool = False,
        budget: float | None = None,
        **monitors: Prototype,
    ) -> None:
        self._clock, self._meter = Clock(), Meter(check_budget(budget))
        if (monitor is None) == (not monitors):
            raise TypeError("give one monitor, Recorder(ForwardMonitor(Mean())), or several by name, Recorder(out=..., grad=...)")
        self._subrecorders = Subrecorders(monitors if monitor is None else {"": monitor}, self._clock, self._meter, fuse)
        weakref.finalize(self, forget, self._subrecorders).atexit = False  # warns if hooks are on then

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
            prefix: is put before all names, to tell two networks apart.

        Raises:
            SelectionError: nothing matches (the message lists what exists), or a name is taken. Nothing is added then.
        """
        criteria = Criteria(types, names, indices, exclude, depth, leaves, where)
        with together([net]):
            self._subrecorders.place(net, groups, select_modules(net, criteria, recursive=True, prefix=prefix))
        return self

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
        with together([net]):
            self._subrecorders.place(net, groups, select_modules(net, criteria, recursive=False, prefix=prefix))
        return self

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
        self._subrecorders.place(net, groups, select_parameters(net, criteria, prefix=prefix))
        return self

    def add(self, name: str, monitor: Prototype, module: nn.Module | None = None) -> Self:
        """Puts a copy of a monitor on one module, under a name; returns the recorder. A `CallMonitor` needs no module.

        `recorder[name] = monitor` takes in a monitor that sits on its module already, with what it recorded; a monitor that had
        this name is removed. `del recorder[name]` removes one.

        Raises:
            SelectionError: the name is taken, or there is no module.
            TypeError: an argument is neither a monitor nor the recipe of one.
        """
        self._subrecorders.add(name, monitor, module)
        return self

    def find(self, module: nn.Module) -> dict[str, Monitor]:
        """The subrecorders on a module, by name; none if there are none."""
        return {name: monitor for name, monitor in self.items() if monitor.module is unwrapped(module)}

    def remove(self, name: str | int) -> Monitor:
        """Removes one subrecorder and takes its hooks off; returns it, with what it recorded."""
        return self._subrecorders.remove(name)

    def __getitem__(self, name: str | int) -> Monitor:
        return self._subrecorders[name]

    def __setitem__(self, name: str, monitor: Monitor) -> None:
        self._subrecorders[name] = monitor

    def __delitem__(self, name: str | int) -> None:
        self._subrecorders.remove(name)

    def __iter__(self) -> Iterator[str]:
        return iter(self._subrecorders)

    def __len__(self) -> int:
        return len(self._subrecorders)

    def __enter__(self) -> Self:
        """Puts all hooks on; the end of the outermost block takes them off, in whichever thread that is."""
        return self._subrecorders.blocks.enter(self.register)

    def __exit__(self, *_: object) -> None:
        self._subrecorders.blocks.exit(self.deregister)

    def title_shown(self) -> str:
        """The prototypes, how many subrecorders there are, and how often they record."""
        cadence = shown_cadence(self._clock.cadence, self._meter.budget)
        return f"Recorder({cut(repr(self._subrecorders), 100)}): {len(self):,} subrecorders{cadence}"

    @property
    def aliases(self) -> dict[str, str]:
        """The name of a subrecorder by each further name of its module, parameter or capture."""
        return dict(self._subrecorders.aliases)

    @property
    def clock(self) -> Clock:
        """Step, micro-batch and phase: the clock of the monitors' `steps` and `every_step`. `resume` sets its step."""
        return self._clock

    def attach(self, optimizer: Optimizer) -> Self:
        """Advances the clock after every step of `optimizer`, and counts the micro-batches of each step; returns the recorder.

        If several optimizers step in turn, attach one of them. If they step inside backward, attach none and call `step()`.

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
        self._clock.attach(optimizer)
        self._subrecorders.follow_net()
        return self

    def step(self) -> Self:
        """Advances the clock by one step, for training loops without an attached optimizer; returns the recorder."""
        self._clock.advance()
        return self

    def given(self, **values: Any) -> AbstractContextManager[None]:
        """A block in which the monitors that name these values in `given=` take them: ids, labels, a token mask, weights.

        The values are tensors, arrays or lists of numbers, of the present batch. A block within a block adds to it, or overrides.
        Each thread and each task of asyncio has blocks of its own. A gradient gets what was given at its forward.
        If a value is missing or does not fit, the observation is left out, and `on_error` says what happens.

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
        return self._subrecorders.context.give(values)

    def register(self) -> Self:
        """Puts all hooks on; returns the recorder.

        Raises:
            SelectionError: it has no subrecorders, because nothing was selected yet.
        """
        with together(self._subrecorders.nets):
            self._selected()._subrecorders.register()
        return self

    def deregister(self) -> Self:
        """Takes all hooks off; results stay, and the clock still counts steps. Returns the recorder."""
        self._subrecorders.deregister()
        return self

    def push(self, name: str, *values: Any) -> Self:
        """Hands one observation to the `CallMonitor` of that name; returns the recorder.

        Raises:
            SelectionError: there is no subrecorder of that name, or it is another kind of monitor.
        """
        self._subrecorders.push(name, *values)
        return self

    def tick(self) -> Self:
        """Records what every `ParameterMonitor(when="tick")` and `ModuleMonitor` sees now; returns the recorder."""
        self._subrecorders.tick()
        return self

    def plan(self, *args: Any, **kwargs: Any) -> Plan:
        """What will be recorded and how big the states get, from a dry run of the net on example inputs, on the meta device."""
        return plan(self._selected(), self._subrecorders.nets, args, kwargs)

    def report(self) -> Report:
        """What each subrecorder recorded, and the likely reason if it recorded nothing or its module has left the net."""
        return report(self._selected(), self._subrecorders.gone)

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
        return replace(found, loops=libraries.state(), troubles=troubles())
