"""Lens: a description of what to record in a network and which charts to draw."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from torch import nn

from recorders.errors import LensError
from recorders.monitors.base import Monitor
from recorders.schedule.clock import Phase
from recorders.watch.charts import LINES, RANGES, Aggregation, Chart, named
from recorders.watch.lenses.kinds import any_module
from recorders.watch.lenses.spread import QUARTILES

__all__ = ["PUSHED", "Lens", "checked", "checked_line"]

PUSHED = ("loss", "metric", "pushed")
"""Groups of pushed values that every lens may draw; "pushed" is losses and metrics together."""


@dataclass(frozen=True)
class Lens:
    """What to record and which charts to draw; an `Inspector` puts it on a network.

    Args:
        name: for messages.
        charts: what to draw. `chart.of` is a group of `monitors` and a path in its result; "loss" and "metric" are pushed values,
            and "pushed" is both.
        monitors: by group, a prototype that is copied to every selected module.
        where: called with the name and each leaf module (or module at the inspector's depth); returns whether to select it.
        inner: also ask `where` about the modules that contain these, for parameters that such modules own themselves.
        loss_fn: a loss module whose outputs are recorded as losses.
        loss_phase: "grad" counts them as training losses if gradients are on, "module" if the loss module is in training mode.
        loss_running: keep running statistics of them only; False keeps every value.

    Raises:
        LensError: there are no charts, the group of a chart has no monitor, or a chart compares one that the lens does not have.

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
    inner: bool = False
    loss_fn: nn.Module | None = None
    loss_phase: Phase = "grad"
    loss_running: bool = True

    def __post_init__(self) -> None:
        known, titles = [*self.monitors, *PUSHED], [chart.title for chart in self.charts if not chart.across]
        if not titles:
            raise LensError(f"lens {self.name!r} has no charts: nothing would be recorded")
        for chart in self.charts:
            if not chart.across and (not chart.of or chart.of[0] not in known):
                raise LensError(f"lens {self.name!r}: chart {chart.title!r} is of {chart.of!r}; begin with one of {known}")
            if missing := [across.title for across in chart.across if across.title not in titles]:
                raise LensError(f"lens {self.name!r}: chart {chart.title!r} compares {missing[0]!r}; the lens has {titles}")


def checked(inplace: bool, lines: Aggregation, ranges: Aggregation) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Lines and ranges as tuples; if one is unknown, or needs every value and `inplace` is True, raises a `LensError`."""
    wanted = named(lines, LINES, "line aggregation"), named(ranges, RANGES, "range aggregation")
    for names, choices, what in zip(wanted, (LINES, RANGES), ("line", "range"), strict=True):
        if inplace and (missing := [name for name in names if name in QUARTILES]):
            rest = ", ".join(repr(name) for name in choices if name not in QUARTILES)
            raise LensError(f"{what} aggregation {missing[0]!r} needs every value: give inplace=False, or choose from {rest}")
    return wanted


def checked_line(inplace: bool, line: str, option: str) -> str:
    """The one aggregation that `option` takes; errors as in `checked`, and if several are given."""
    if not isinstance(line, str):
        raise LensError(f"{option} is one aggregation, such as 'mean'; got {line!r}")
    (name,), _ = checked(inplace, line, None)
    return name
