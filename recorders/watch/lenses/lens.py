"""What a lens is: which modules it selects, how it reduces, and what it draws."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from recorders.capture.channels import channel_pattern
from recorders.capture.contents import own_parameters
from recorders.errors import LensError
from recorders.monitors.base import Monitor
from recorders.schedule.clock import Phase
from recorders.watch.charts import LINES, PUSHED, RANGES, Aggregation, Chart, named
from reducers import Collect, Reducer, Summary

Classes: TypeAlias = "type[nn.Module] | Iterable[type[nn.Module]]"


def any_module(name: str, module: nn.Module) -> bool:
    """Selects every module."""
    return True


def not_activation(name: str, module: nn.Module) -> bool:
    """Selects every module except the activation functions of `torch.nn`; attention is not one of them.

    >>> not_activation("act", nn.ReLU()), not_activation("attention", nn.MultiheadAttention(4, 2))
    (False, True)
    """
    return type(module).__module__ != "torch.nn.modules.activation" or isinstance(module, nn.MultiheadAttention)


def classes(given: Classes) -> tuple[type[nn.Module], ...]:
    """One class or several, as a tuple."""
    return (given,) if isinstance(given, type) else tuple(given)


@dataclass(frozen=True)
class OfKind:
    """Selects modules of these kinds.

    Args:
        activation: whether to select the activation functions of `torch.nn`.
        dropout: whether to select its dropout layers.
        include: further classes; their subclasses count.
        exclude: classes that are never selected; their subclasses count.

    >>> kind = OfKind(include=(nn.Linear,), exclude=(nn.GELU,))
    >>> [kind("", module) for module in (nn.ReLU(), nn.Linear(1, 1), nn.GELU(), nn.Dropout())]
    [True, True, False, False]
    """

    activation: bool = True
    dropout: bool = False
    include: tuple[type[nn.Module], ...] = ()
    exclude: tuple[type[nn.Module], ...] = ()

    def __call__(self, name: str, module: nn.Module) -> bool:
        return not isinstance(module, self.exclude) and (
            isinstance(module, self.include)
            or (self.activation and not not_activation(name, module))
            or (self.dropout and type(module).__module__ == "torch.nn.modules.dropout")
        )


@dataclass(frozen=True)
class HasMatrix:
    """Selects modules of which one of these parameters has two axes or more; parameters without a shape as yet count too."""

    parameters: tuple[str, ...]

    def __call__(self, name: str, module: nn.Module) -> bool:
        own = own_parameters(module)[1]
        found = [own.get(parameter) for parameter in self.parameters]
        return any(parameter is not None and (is_lazy(parameter) or parameter.ndim > 1) for parameter in found)


Names: TypeAlias = "str | Iterable[str]"
Moment: TypeAlias = Literal["step", "accumulate"]

QUARTILES = ("median", "Q1", "Q3", "Q1-Q3")
"""Aggregations that need every value."""


def running() -> Reducer:
    """A reducer that keeps mean, deviation, minimum and maximum: a state of constant size."""
    return Summary()


def collected() -> Reducer:
    """A reducer that keeps every value, so that median and quartiles are known too."""
    return Collect()


def spread(inplace: bool) -> Reducer:
    """`running()` if `inplace`, else `collected()`."""
    return running() if inplace else collected()


def names_of(parameters: Names) -> tuple[str, ...]:
    """One name of a parameter or several, as a tuple without duplicates."""
    return (parameters,) if isinstance(parameters, str) else tuple(dict.fromkeys(parameters))


def pattern_of(channel_last: bool | None) -> str:
    """The pattern that keeps the channels: those of the layer if it is None."""
    return "channels" if channel_last is None else channel_pattern(-1 if channel_last else 1)


def phase_of(evaluation_from_grad: bool) -> Phase:
    """What tells training from evaluation: whether gradients are on, or the mode of the module."""
    return "grad" if evaluation_from_grad else "module"


def size_of(normalize: bool) -> tuple[str, str]:
    """The name of a size in titles, and its unit."""
    return ("RMS", "root mean square") if normalize else ("Norm", "L2 norm")


def statistics(result: Mapping[str, Any] | Tensor) -> dict[str, Tensor]:
    """The statistics that charts are drawn from, computed from the result of a reducer.

    From `running()` and `collected()`: `mean`, `std`, `min`, `max` and `count` of the finite values, and `nonfinite`, the number of
    others. The deviation is that of the population (divided by n): 0 for a single value. From `collected()` also `median`, `Q1` and
    `Q3`, with linear interpolation as in `numpy.quantile`. From any other reducer: its results that are tensors of one element.

    >>> reducer = collected()
    >>> state = reducer.update({}, torch.tensor([4.0, 1.0, 2.0, 3.0, float("nan")]))
    >>> {name: value.item() for name, value in statistics(reducer.compute(state)).items() if name != "std"}
    {'mean': 2.5, 'min': 1.0, 'max': 4.0, 'count': 4, 'nonfinite': 1, 'median': 2.5, 'Q1': 1.75, 'Q3': 3.25}
    """
    if isinstance(result, Tensor):
        values = result.detach().cpu().ravel().double()
        summary = running()
        ordered = values[torch.isfinite(values)].sort().values
        quartiles = {name: _quantile(ordered, share) for name, share in (("median", 0.5), ("Q1", 0.25), ("Q3", 0.75))}
        return {**statistics(summary.compute(summary.update({}, values))), **quartiles}
    if not {"count", "mean", "var", "min", "max", "nan", "inf"} <= set(result):
        return {name: value for name, value in result.items() if isinstance(value, Tensor) and value.numel() == 1}
    count, var = result["count"], result["var"]
    # In the dtype of the variance: PyTorch divides int64 by int64 in float32.
    share = (count - 1).to(var.dtype) / count.clamp(min=1).to(var.dtype)
    alone = torch.where(count == 1, torch.zeros_like(var), torch.nan)
    return {
        "mean": result["mean"],
        "std": torch.where(count > 1, var * share, alone).sqrt(),
        "min": result["min"],
        "max": result["max"],
        "count": count,
        "nonfinite": result["nan"] + result["inf"],
    }


def _quantile(ordered: Tensor, share: float) -> Tensor:
    """A quantile of sorted values; `torch.quantile` refuses more than 2**24 values."""
    if not len(ordered):
        return ordered.new_tensor(torch.nan)
    place = share * (len(ordered) - 1)
    below = int(place)
    above = min(below + 1, len(ordered) - 1)
    return torch.lerp(ordered[below], ordered[above], place - below)


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
