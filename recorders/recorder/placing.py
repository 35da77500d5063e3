"""Placing: what a recorder puts on which modules, found before anything is put there."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any, NamedTuple, TypeAlias

from torch import nn

from recorders.capture.channels import channel_axes, channel_pattern
from recorders.errors import SelectionError
from recorders.monitors.attributes import beside
from recorders.monitors.base import Monitor
from recorders.monitors.constructor import MonitorConstructor
from recorders.recorder.selection import Place
from reducers import Reducer
from reducers.core.channels import has_channels, with_channels
from reducers.errors import did_you_mean

ALIKE = 0.8  # how alike a name must be for a group that fits no module to be a mistake: other nets have other modules
Prototype: TypeAlias = "Monitor | MonitorConstructor[Monitor]"


class ToPlace(NamedTuple):
    """One monitor to be put on a module.

    Attributes:
        names: its name, and further ones.
        recipe: makes the monitor, of `attr`.
        unknown: whether its reducer names channels, and nobody knows which axis they are.
    """

    names: list[str]
    module: nn.Module
    attr: Any
    recipe: MonitorConstructor[Monitor]
    unknown: bool = False


def as_prototype(item: object, where: str) -> Monitor:
    """The monitor that `item` is or describes; raises `TypeError`, which names `where`, if it is neither."""
    if isinstance(item, type) and issubclass(item, Monitor):
        raise TypeError(f"{where} needs a monitor and got the class: write {item.__name__}(Mean()), not {item.__name__}")
    monitor = item() if isinstance(item, MonitorConstructor) else item
    if not isinstance(monitor, Monitor):
        raise TypeError(f"{where} needs a monitor, such as ForwardMonitor(Mean()); got {item!r:.100}{_instead(item)}")
    if monitor.registered:
        raise TypeError(f"{where} needs a monitor without a module, as a prototype; {monitor!r} already sits on one")
    return monitor


def _instead(item: object) -> str:
    """What to write instead of something that is no monitor, if that is likely."""
    if isinstance(item, nn.Module):
        return "; the net goes to Recorder(...).modules(net)"
    if isinstance(item, Reducer):
        return f"; put the reducer into a monitor, as in ForwardMonitor({type(item).__name__}(...))"
    if isinstance(item, (Mapping, list, tuple)):
        return "; give several monitors by name, as in Recorder(out=..., grad=...)"
    return ""


def chosen(prototypes: Mapping[str, Monitor], groups: str | Iterable[str] | None) -> dict[str, Monitor]:
    """The prototypes of these groups, of all if None; raises `SelectionError` if there is no such group."""
    known = list(prototypes)
    if not (groups is None or isinstance(groups, Iterable)):
        raise TypeError(f"groups={groups!r}: give the name of a group or several, of {known}")
    names = known if groups is None else [groups] if isinstance(groups, str) else list(groups)
    if unknown := [group for group in names if group not in known]:
        raise SelectionError(f"no group {unknown}; {did_you_mean(unknown[0], known)}there are {known}")
    return {group: prototypes[group] for group in names}


def to_place(prototypes: Mapping[str, Monitor], net: nn.Module, places: list[Place], prefix: str = "") -> Iterator[ToPlace]:
    """A monitor of each prototype for each of `places`, which were selected from `net`, if there is something to watch.

    One that is for the net alone has the name of its group, and `prefix` if there is one.

    Raises:
        SelectionError: no prototype fits any place; or all names that one watches are in no place, and similar ones are.
    """
    unfit = [
        type(prototype).__name__
        for prototype in prototypes.values()
        if prototype.subject in ("calls", "module") and not prototype.of_net
    ]
    if unfit and places[0].attr is not None:
        raise SelectionError(f"{unfit} watch modules, not parameters: use modules() or children(), or omit them with groups=")
    fits = False
    for group, prototype in prototypes.items():
        if prototype.subject == "values":
            continue
        recipe = recipes(prototype, [net])
        if prototype.of_net:
            fits = True
            yield ToPlace([_name(group, prefix)], net, prototype.attr, *recipe(net))
            continue
        for place in places:
            if place.attr is not None or prototype.applies(place.module):
                fits = True
                names = [_name(group, name) for name in place.names]
                attr = prototype.attr if place.attr is None else place.attr
                yield ToPlace(names, place.module, attr, *recipe(place.module))
        _check_names(prototype, [place.module for place in places if place.attr is None])
    if not fits:
        given = ", ".join(map(repr, prototypes.values()))
        raise SelectionError(
            f"none of the {len(places)} modules selected has anything to watch for {given}: choose modules that have it, by types= "
            "or names="
        )


def _name(group: str, name: str) -> str:
    return f"{group}/{name}" if group and name else group or name


def _check_names(prototype: Monitor, modules: list[nn.Module]) -> None:
    """Raises `SelectionError` if what the prototype names is in none of the modules, and others or similar names are."""
    if prototype.attr is None or not modules:
        return
    none = f"none of the {len(modules)} modules selected has"
    names = [prototype.attr] if isinstance(prototype.attr, str) else [*prototype.attr]
    if not any(map(prototype.applies, modules)):
        known = {name for module in modules for wanted in names for name in beside(module, wanted)}
        if question := "".join(did_you_mean(name, known, ALIKE) for name in names if name not in known):
            raise SelectionError(f"{none} anything to watch for {prototype!r}; {question.strip()}")
    elif missing := sorted(set.intersection(*[set(prototype.missing(module)) for module in modules])):
        known = {name for module in modules for name in beside(module, missing[0])}
        guess = did_you_mean(missing[0], known)
        raise SelectionError(f"{none} a parameter {missing}, which {prototype!r} names; {guess}".rstrip("; "))


def recipes(
    prototype: Monitor, nets: Iterable[nn.Module]
) -> Callable[[nn.Module | None], tuple[MonitorConstructor[Monitor], bool]]:
    """A function that returns the recipe of a prototype for a module, in which "channels" is the axis of that module in its net.

    It also returns whether that axis is not known; then it is 1.
    """
    recipe = prototype.constructor
    if not has_channels(recipe.reducer):
        return lambda module: (recipe, False)
    axes = {key: axis for net in nets for key, axis in channel_axes(net).items()}
    made = {axis: replace(recipe, reducer=with_channels(recipe.reducer, channel_pattern(axis))) for axis in {1, *axes.values()}}
    return lambda module: (made[axes.get(id(module), 1)], id(module) not in axes)
