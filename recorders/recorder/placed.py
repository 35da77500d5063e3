"""Placing monitors: prototypes, the modules and parameters they go on, and the names they get."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from torch import nn

from recorders.errors import SelectionError
from recorders.monitors.base import Monitor
from recorders.monitors.constructor import MonitorConstructor
from recorders.monitors.forward import CallMonitor
from recorders.monitors.parameters import _ParameterMonitor
from recorders.recorder.meter import Meter
from recorders.recorder.overhead import check_budget
from recorders.recorder.selection import Criteria, Names, Place, select_modules, select_parameters, unwrapped
from recorders.recordings.recording import lookup
from recorders.schedule.clock import Clock

if TYPE_CHECKING:
    from typing_extensions import Self

__all__ = ["Placed"]


class Placed(Mapping[str, Monitor]):
    """The part of a Recorder that selects: an ordered mapping from name to Monitor, to which selections add."""

    def __init__(
        self,
        monitor: Monitor | MonitorConstructor[Monitor] | None = None,
        /,
        *,
        fuse: bool = False,
        budget: float | None = None,
        **monitors: Monitor | MonitorConstructor[Monitor],
    ) -> None:
        self._fuse = fuse
        self._meter = Meter(check_budget(budget))
        if (monitor is None) == (not monitors):
            raise TypeError("give one monitor, Recorder(ForwardMonitor(Mean())), or several by name, Recorder(out=..., grad=...)")
        given = monitors if monitor is None else {"": monitor}
        self._prototypes = {group: _prototype(item, group) for group, item in given.items()}
        self._monitors: dict[str, Monitor] = {}
        self._aliases: dict[str, str] = {}
        self._nets: list[weakref.ref[nn.Module]] = []
        self._on: weakref.WeakKeyDictionary[nn.Module, list[Monitor]] = weakref.WeakKeyDictionary()
        self._clock = Clock()
        self._clock.measure(self._meter)
        self._clock_handle: Any = None
        for group, prototype in self._prototypes.items():
            if isinstance(prototype, CallMonitor):
                self._monitors[group] = prototype.constructor()
                self._enlist(group, self._monitors[group])
                self._meter.add(group, self._monitors[group])

    def modules(
        self,
        net: nn.Module,
        types: type | Iterable[type] | None = None,
        indices: int | Iterable[int] | None = None,
        *,
        names: Names | None = None,
        exclude: Names | type | Iterable[type] | None = None,
        depth: int | None = None,
        leaves: bool = False,
        where: Callable[[str, nn.Module], bool] | None = None,
        groups: str | Iterable[str] | None = None,
        prefix: str = "",
    ) -> Self:
        """Puts a monitor of each kind on the modules of `net`, itself and all below, that satisfy every criterion given.

        Args:
            net: the network; wrappers of `torch.compile`, data parallelism and checkpointing are looked through.
            types: module classes.
            indices: positions in `net.modules()`.
            names: names, globs (`"encoder.*"`) or compiled regular expressions; each must match something.
            exclude: names, globs, regular expressions or classes to leave out.
            depth: at most so many levels below `net`, which is level 0.
            leaves: only modules without modules inside.
            where: called with name and module.
            groups: which of the kinds of monitors to put there, by group; all of them where None.
            prefix: goes before all names, to keep two networks apart.

        Returns:
            the recorder itself.

        Raises:
            SelectionError: nothing matches, or a name is taken by another module; lists what there is. Nothing is added then.
        """
        criteria = Criteria(types, names, indices, exclude, depth, leaves, where)
        return self._place(net, groups, select_modules(net, criteria, recursive=True, prefix=prefix))

    def children(
        self,
        net: nn.Module,
        types: type | Iterable[type] | None = None,
        indices: int | Iterable[int] | None = None,
        *,
        names: Names | None = None,
        exclude: Names | type | Iterable[type] | None = None,
        where: Callable[[str, nn.Module], bool] | None = None,
        groups: str | Iterable[str] | None = None,
        prefix: str = "",
    ) -> Self:
        """Like `modules`, over the direct children of `net` only; `indices` are positions in `net.children()`."""
        criteria = Criteria(types, names, indices, exclude, where=where)
        return self._place(net, groups, select_modules(net, criteria, recursive=False, prefix=prefix))

    def parameters(
        self,
        net: nn.Module,
        types: type | Iterable[type] | None = None,
        indices: int | Iterable[int] | None = None,
        *,
        names: Names | None = None,
        exclude: Names | type | Iterable[type] | None = None,
        where: Callable[[str, nn.Module], bool] | None = None,
        groups: str | Iterable[str] | None = None,
        prefix: str = "",
    ) -> Self:
        """Puts parameter monitors on single parameters; `names` are theirs, `types` and `where` look at their owners.

        A parameter tied to several modules is recorded once, under its first name; the others are aliases.
        """
        wanted = self._chosen(groups).values()
        if wrong := [type(p).__name__ for p in wanted if not isinstance(p, (_ParameterMonitor, CallMonitor))]:
            raise SelectionError(
                f"{wrong} watch modules, not parameters: select with modules() or children(), or leave out by groups="
            )
        criteria = Criteria(types, names, indices, exclude, where=where)
        return self._place(net, groups, select_parameters(net, criteria, prefix=prefix))

    def _chosen(self, groups: str | Iterable[str] | None) -> dict[str, Monitor]:
        """The prototypes of these groups."""
        chosen = list(self._prototypes) if groups is None else [groups] if isinstance(groups, str) else list(groups)
        if unknown := [group for group in chosen if group not in self._prototypes]:
            raise SelectionError(f"no group {unknown}; there are {list(self._prototypes)}")
        return {group: self._prototypes[group] for group in chosen}

    def _place(self, net: nn.Module, groups: str | Iterable[str] | None, places: list[Place]) -> Self:
        added: dict[str, Monitor] = {}
        aliases: dict[str, str] = {}
        matched, chosen = False, self._chosen(groups)
        try:
            for group, prototype in chosen.items():
                if isinstance(prototype, CallMonitor):
                    continue
                for place in places:
                    if place.attr is None and not prototype.applies(place.module):
                        continue
                    matched = True
                    attr = prototype.attr if place.attr is None else place.attr
                    name, *others = [_join(group, name) for name in place.names]
                    same = self._same(prototype, attr, place.module)
                    if same is None:
                        if name in self._monitors or name in added or name in self._aliases:
                            raise SelectionError(f"{name!r} is taken by another module: keep the two apart with prefix='...'")
                        monitor = prototype.constructor(attr)
                        self._enlist(name, monitor)
                        same = name
                        added[name] = monitor.register(place.module)
                        self._on.setdefault(place.module, []).append(monitor)
                    aliases.update({other: same for other in (name, *others) if other != same})
            if not matched:
                given = ", ".join(map(repr, chosen.values()))
                raise SelectionError(f"none of the {len(places)} modules selected has anything to watch for {given}")
        except Exception:
            for monitor in added.values():
                self._forget(monitor.deregister())
            raise
        self._monitors.update(added)
        for name, monitor in added.items():
            self._meter.add(name, monitor)
        self._aliases.update(aliases)
        inner = unwrapped(net)
        if all(ref() is not inner for ref in self._nets):
            self._nets.append(weakref.ref(inner))
        self._watch()
        return self

    def _enlist(self, name: str, monitor: Monitor) -> None:
        """Gives a monitor its name, the clock, which switches all of them where there is a budget, and the compiler."""
        monitor.name, monitor.gated = name, monitor.gated or self._meter.budget is not None
        monitor.clock = self._clock
        if self._fuse:
            monitor.fuse()

    def _watch(self) -> None:
        """A net was selected from."""

    def _same(self, prototype: Monitor, attr: Any, module: nn.Module) -> str | None:
        """The name of a monitor that already captures just this."""
        recipe = prototype.constructor
        return next((m.name for m in self._on.get(module, ()) if m.attr == attr and m.constructor == recipe), None)

    def _forget(self, monitor: Monitor) -> None:
        module = monitor.module
        if module is not None and monitor in self._on.get(module, ()):
            self._on[module].remove(monitor)

    def __getitem__(self, name: str | int) -> Monitor:
        return self._monitors[lookup(name, self._monitors, self._aliases)]

    def __iter__(self) -> Iterator[str]:
        return iter(self._monitors)

    def __len__(self) -> int:
        return len(self._monitors)

    @property
    def aliases(self) -> dict[str, str]:
        """Other names of the same modules, parameters or captures."""
        return dict(self._aliases)

    def remove(self, name: str | int) -> Monitor:
        """Takes one subrecorder off and out, and returns it with what it recorded; the others keep theirs."""
        true = lookup(name, self._monitors, self._aliases)
        self._aliases = {alias: target for alias, target in self._aliases.items() if target != true}
        self._forget(self._monitors[true])
        self._meter.remove(true)
        return self._monitors.pop(true).deregister()

    def _living_nets(self) -> list[nn.Module]:
        return [net for ref in self._nets if (net := ref()) is not None]


def _prototype(item: Any, group: str) -> Monitor:
    where = f"Recorder({group}=...)" if group else "Recorder(...)"
    if isinstance(item, type) and issubclass(item, Monitor):
        raise TypeError(f"{where} needs a monitor and got the class: write {item.__name__}(Mean()), not {item.__name__}")
    prototype = item() if isinstance(item, MonitorConstructor) else item
    if not isinstance(prototype, Monitor):
        raise TypeError(f"{where} needs a monitor, such as ForwardMonitor(Mean()); got {item!r}")
    if prototype.registered:
        raise TypeError(f"{where} needs a monitor without a module, as a prototype; {prototype!r} already sits on one")
    return prototype


def _join(group: str, name: str) -> str:
    return f"{group}/{name}" if group and name else group or name
