"""Lens: a description of what to record in a network and which charts to draw."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from torch import nn

from recorders.errors import LensError
from recorders.monitors.base import Monitor
from recorders.watch.charts import LINES, RANGES, Aggregation, Chart, named
from recorders.watch.lenses.spread import QUARTILES

__all__ = ["Lens", "any_module", "checked", "not_activation"]


def any_module(name: str, module: nn.Module) -> bool:
    """Selects every module."""
    return True


def not_activation(name: str, module: nn.Module) -> bool:
    """Selects every module except the activation functions of `torch.nn`; attention is not one of them.

    >>> not_activation("act", nn.ReLU()), not_activation("attention", nn.MultiheadAttention(4, 2))
    (False, True)
    """
    return type(module).__module__ != "torch.nn.modules.activation" or isinstance(module, nn.MultiheadAttention)


@dataclass(frozen=True)
class Lens:
    """What to record and which charts to draw; an `Inspector` puts it on a network.

    Args:
        name: for messages.
        charts: what to draw. `chart.of` is a group of `monitors` and a path in its result; "loss" and "metric" are pushed values.
        monitors: by group, a prototype that is copied to every selected module.
        where: called with the name and each leaf module (or module at the inspector's depth); returns whether to select it.
        loss_fn: a loss module whose outputs are recorded as losses: as training losses if gradients are enabled.

    Raises:
        LensError: there are no charts, or the group of a chart has no monitor.

    >>> from recorders.monitors.forward import ForwardMonitor
    >>> from recorders.watch.lenses import running
    >>> scale = Chart("Output RMS", of=("out", "rms"), log_scale=True)
    >>> Lens("OutputScale", (scale,), {"out": ForwardMonitor(running())}).charts[0].title
    'Output RMS'
    """

    name: str
    charts: tuple[Chart, ...]
    monitors: Mapping[str, Monitor] = field(default_factory=dict)
    where: Callable[[str, nn.Module], bool] = any_module
    loss_fn: nn.Module | None = None

    def __post_init__(self) -> None:
        known = [*self.monitors, "loss", "metric"]
        if not self.charts:
            raise LensError(f"lens {self.name!r} has no charts: nothing would be recorded")
        for chart in self.charts:
            if not chart.of or chart.of[0] not in known:
                raise LensError(f"lens {self.name!r}: chart {chart.title!r} is of {chart.of!r}; begin with one of {known}")


def checked(inplace: bool, lines: Aggregation, ranges: Aggregation) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Lines and ranges as tuples; if one is unknown, or needs every value and `inplace` is True, raises a `LensError`."""
    wanted = named(lines, LINES, "line aggregation"), named(ranges, RANGES, "range aggregation")
    for names, choices, what in zip(wanted, (LINES, RANGES), ("line", "range"), strict=True):
        if inplace and (missing := [name for name in names if name in QUARTILES]):
            rest = ", ".join(repr(name) for name in choices if name not in QUARTILES)
            raise LensError(f"{what} aggregation {missing[0]!r} needs every value: give inplace=False, or choose from {rest}")
    return wanted
