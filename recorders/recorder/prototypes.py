"""Prototypes: the monitors of which a recorder puts copies on modules."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import TypeAlias

from torch import nn

from recorders.capture.channels import channel_axes, channel_pattern
from recorders.errors import SelectionError
from recorders.monitors.attributes import beside
from recorders.monitors.base import Monitor
from recorders.monitors.constructor import MonitorConstructor
from reducers.core.channels import has_channels, with_channels
from reducers.errors import did_you_mean

__all__ = ["Prototype", "as_prototype", "check_names", "join", "recipes"]

ALIKE = 0.8  # how alike a name must be for a group that fits no module to be a mistake: other nets have other modules
Prototype: TypeAlias = "Monitor | MonitorConstructor[Monitor]"


def as_prototype(item: object, where: str) -> Monitor:
    """The monitor that `item` is or describes; raises `TypeError`, which names `where`, if it is neither."""
    if isinstance(item, type) and issubclass(item, Monitor):
        raise TypeError(f"{where} needs a monitor and got the class: write {item.__name__}(Mean()), not {item.__name__}")
    monitor = item() if isinstance(item, MonitorConstructor) else item
    if not isinstance(monitor, Monitor):
        raise TypeError(f"{where} needs a monitor, such as ForwardMonitor(Mean()); got {item!r}")
    if monitor.registered:
        raise TypeError(f"{where} needs a monitor without a module, as a prototype; {monitor!r} already sits on one")
    return monitor


def join(group: str, name: str) -> str:
    """The name of a subrecorder."""
    return f"{group}/{name}" if group and name else group or name


def check_names(prototype: Monitor, modules: list[nn.Module]) -> None:
    """Raises `SelectionError` if what the prototype names is in none of the modules, and others or similar names are."""
    if prototype.attr is None or not modules:
        return
    names = [prototype.attr] if isinstance(prototype.attr, str) else [*prototype.attr]
    if not any(map(prototype.applies, modules)):
        known = {name for module in modules for wanted in names for name in beside(module, wanted)}
        question = "".join(did_you_mean(name, known, ALIKE) for name in names if name not in known)
        if question:
            raise SelectionError(
                f"none of the {len(modules)} modules selected has anything to watch for {prototype!r}; {question.strip()}"
            )
    else:
        missing = sorted(set.intersection(*[set(prototype.missing(module)) for module in modules]))
        if missing:
            known = {name for module in modules for name in beside(module, missing[0])}
            raise SelectionError(
                f"none of the {len(modules)} modules selected has a parameter {missing}, which {prototype!r} names; "
                f"{did_you_mean(missing[0], known)}".rstrip("; ")
            )


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
