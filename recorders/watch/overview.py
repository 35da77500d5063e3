"""Overview: one row per layer, gathered from all subrecorders of a recording."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

import torch
from torch import Tensor

from recorders.recorder.recorder import Recorder
from recorders.recordings.recording import Recording, Subrecording
from recorders.recordings.shown import shown_name
from reducers import FirstNonfinite, Norm, Product, Quantile, Reducer

__all__ = ["Layer", "Spread", "overview", "pushed"]

_MOMENTS = frozenset({"count", "mean", "var"})
_SUMMARY = _MOMENTS | {"min", "max", "nan", "inf"}
_ACTIVITY = frozenset({"rate", "dead"})
_QUARTERS = (0.0, 0.25, 0.75, 1.0)
_Kind = TypeVar("_Kind", bound=Reducer)
_ROLES = {
    "ForwardMonitor": "output",
    "BackwardMonitor": "gradient",
    "ParameterGradientMonitor": "weight_gradient",
    "ParameterUpdateMonitor": "update",
}


@dataclass(frozen=True)
class Spread:
    """The result of a `Summary`, `Moments`, `Norm` or `Quantile`, with all units pooled; NaN if that does not tell.

    Attributes:
        count: the number of finite values.
        mean, std, low, high: statistics of the finite values.
        nonfinite: the number of values that were NaN or infinite.
        observations: the number of tensors observed.
        size: the L2 norm of all values.
        quartile: the larger magnitude of the two quartiles, of the typical unit: half of the values, or more, are no larger.
    """

    count: int
    mean: float
    std: float
    low: float
    high: float
    nonfinite: float
    observations: int
    size: float = math.nan
    quartile: float = math.nan

    @classmethod
    def of(cls, summary: Mapping[str, Tensor], observations: int) -> Spread:
        """Pools the units of a `Summary` or of `Moments`: adds the variance between their means to the variance within them.

        >>> import torch
        >>> from reducers import Summary
        >>> channels = Summary("b c -> c")
        >>> spread = Spread.of(channels.compute(channels.update({}, torch.tensor([[0.0, 4.0], [2.0, 6.0]]))), observations=1)
        >>> spread.mean, round(spread.std, 3), spread.low, spread.high
        (3.0, 2.582, 0.0, 6.0)
        """
        number = {key: values.double().ravel() for key, values in summary.items() if key in _SUMMARY}
        seen, whole = number["count"] > 0, number.keys() >= _SUMMARY
        count, nonfinite = int(number["count"].sum()), int((number["nan"] + number["inf"]).sum()) if whole else math.nan
        if not count:
            return cls(0, math.nan, math.nan, math.nan, math.nan, nonfinite, observations)
        n, means = number["count"][seen], number["mean"][seen]
        mean = (n * means).sum() / count
        within = (number["var"][seen].nan_to_num() * (n - 1)).sum()
        std = ((within + (n * (means - mean).square()).sum()) / max(count - 1, 1)).sqrt()
        low, high = (number["min"][seen].min().item(), number["max"][seen].max().item()) if whole else (math.nan, math.nan)
        size = (n * means.square()).sum() + within
        return cls(count, mean.item(), std.item(), low, high, nonfinite, observations, size.sqrt().item())

    @property
    def rms(self) -> float:
        """Root mean square of the finite values."""
        return self.size / math.sqrt(self.count) if self.count else math.nan

    @property
    def norm(self) -> float:
        """Root mean square of the norms of the observations."""
        return self.size / math.sqrt(self.observations) if self.observations else math.nan


@dataclass(frozen=True)
class Layer:
    """One layer of a recording; fields that were not recorded are None.

    Attributes:
        name: the name of the module; "(net)" for the net itself.
        kind: the class of the module; "" if unknown.
        output: what the module returned.
        units: the same for each unit, as computed by `Summary` or `Moments`.
        rate: the active share of each unit, from `Activity`.
        dead: whether each unit was never active, from `Activity`.
        gradient: the gradient of the loss with respect to the output.
        weight_gradient: the gradient of the loss with respect to the parameters, without biases.
        update: norm of the change over norm of the weights for each step, without biases.
        since: for each role that has a `FirstNonfinite`, the first observation with NaN or infinity; only if there was one.
        silent: the likely reason for each role of which nothing was recorded.
        trained: whether any of its weights requires a gradient; None if unknown, as in a recording.
    """

    name: str
    kind: str = ""
    output: Spread | None = None
    units: Mapping[str, Tensor] | None = None
    rate: Tensor | None = None
    dead: Tensor | None = None
    gradient: Spread | None = None
    weight_gradient: Spread | None = None
    update: Tensor | None = None
    since: Mapping[str, int] = field(default_factory=dict)
    silent: Mapping[str, str] = field(default_factory=dict)
    trained: bool | None = None

    @property
    def ratio(self) -> float:
        """The median size of an update relative to the weights; NaN if there is none."""
        return self.ratio_at(0.5)

    def ratio_at(self, share: float) -> float:
        """The quantile `share` of the sizes of updates relative to the weights; NaN if there is none."""
        finite = torch.zeros(0) if self.update is None else self.update[self.update.isfinite()]
        return finite.double().quantile(share).item() if finite.numel() else math.nan


def overview(recorded: Recorder | Recording) -> list[Layer]:
    """One row per layer, in the order of selection, from these monitors, under any names:

    - `ForwardMonitor` with a `Summary`, an `Activity` or both in a `Product`: `output`, `units`, `rate`, `dead`; here and for
      gradients, a `FirstNonfinite` in the `Product` tells since when there is NaN or infinity: `since`
    - `BackwardMonitor` with a `Summary`: `gradient`
    - `ParameterGradientMonitor` with a `Summary`: `weight_gradient`
    - in place of a `Summary` also `Moments`, `Norm` or `Quantile(q=(0, 0.25, 0.75, 1))`, as far as they tell
    - `ParameterUpdateMonitor` with `Product(ratio=Collect())`, or `Product(ratio=Summary())`, whose
      `op_=lambda after, before: (after - before).norm() / before.norm()`: `update`

    A module with several outputs gets a row for each. If a module was recorded twice in one role, for example in training and in
    evaluation, it gets a second row with the full name of the subrecorder.

    Args:
        recorded: a recorder or a recording. Only a recorder knows why something was not recorded.

    >>> import torch
    >>> from recorders import ForwardMonitor
    >>> from reducers import Activity
    >>> net = torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.ReLU())
    >>> with Recorder(ForwardMonitor(Activity())).modules(net, leaves=True) as recorder:
    ...     _ = net(torch.zeros(1, 2))
    >>> [(layer.name, layer.kind, len(layer.rate)) for layer in overview(recorder)]
    [('0', 'Linear', 3), ('1', 'ReLU', 3)]
    """
    reasons, trained = _reasons(recorded), _trained(recorded)
    rows: dict[str, Layer] = {}
    for name, part in _parts(recorded).items():
        role = _ROLES.get(part.monitor)
        if role is None:
            continue
        for path, results in _rows(role, part.leaves()).items():
            facts = _facts(role, part.reducer, results, part.samples)
            if not facts and part.samples:
                continue
            title = _layer(name) + (f":{path}" if path else "")
            taken = rows.get(title, Layer(title))
            if role in taken.silent or any(getattr(taken, key) is not None for key in facts):
                title = name + (f":{path}" if path else "")
                taken = rows.get(title, Layer(title))
            silent = taken.silent if part.samples else {**taken.silent, role: reasons.get(name, "")}
            since = {**taken.since, **({role: first} if (first := _first_nonfinite(part.reducer, results)) is not None else {})}
            facts["trained"] = trained.get(name, taken.trained)
            rows[title] = replace(taken, kind=part.module, silent=silent, since=since, **facts)
    return list(rows.values())


def pushed(recorded: Recorder | Recording) -> dict[str, Spread]:
    """What was pushed into each `CallMonitor` with a `Summary` or the like, by name."""
    parts = {name: part for name, part in _parts(recorded).items() if part.monitor == "CallMonitor"}
    found = {name: _spread(part.reducer, list(part.leaves().values()), part.samples) for name, part in parts.items()}
    return {name: spread for name, spread in found.items() if spread is not None}


def _parts(recorded: Recorder | Recording) -> Mapping[str, Subrecording]:
    return recorded.snapshot() if isinstance(recorded, Recorder) else recorded


def _reasons(recorded: Recorder | Recording) -> dict[str, str]:
    """The reason why nothing was recorded, by name of the subrecorder."""
    return {row.name: row.reason for row in recorded.report().silent} if isinstance(recorded, Recorder) else {}


def _trained(recorded: Recorder | Recording) -> dict[str, bool]:
    """Whether any weight requires a gradient, by name of the subrecorder; only of modules that are still there."""
    monitors = recorded if isinstance(recorded, Recorder) else {}
    modules = {name: monitor.module for name, monitor in monitors.items() if monitor.module is not None}
    own = {name: [p for key, p in module.named_parameters() if _is_weight(key)] for name, module in modules.items()}
    return {name: any(weight.requires_grad for weight in weights) for name, weights in own.items() if weights}


def _layer(name: str) -> str:
    """The module in a name `group/module`, or `module` if there is one group; the net itself has an empty name."""
    return name.partition("/")[2] or shown_name(name)


def _rows(role: str, leaves: Mapping[str, Any]) -> dict[str, list[Any]]:
    """Results by suffix of the layer's name: one row for each output, or one for all parameters."""
    if role in ("weight_gradient", "update"):
        # Biases start at zero, so their relative change means nothing; their gradients differ in size from those of weights.
        return {"": [result for path, result in leaves.items() if _is_weight(path)]}
    return {path: [result] for path, result in leaves.items()} or {"": []}


def _is_weight(path: str) -> bool:
    return not path.rpartition(".")[2].startswith("bias")


def _facts(role: str, reducer: Reducer | None, results: list[Any], samples: int) -> dict[str, Any]:
    """The fields of `Layer` that the results of one monitor give."""
    if role == "update":
        ratios = [_steps(result["ratio"]) for result in results if isinstance(result, Mapping) and "ratio" in result]
        return {"update": torch.cat(ratios)} if ratios else {}
    facts: dict[str, Any] = {}
    spread = _spread(reducer, results, samples)
    if spread is not None:
        facts[role] = spread
    if role == "output":
        for units in filter(None, (_find(result, _MOMENTS) for result in results)):
            facts["units"] = units
        for activity in filter(None, (_find(result, _ACTIVITY) for result in results)):
            facts.update(rate=activity["rate"], dead=activity["dead"])
    return facts


def _spread(reducer: Reducer | None, results: list[Any], samples: int) -> Spread | None:
    """The results of one monitor as one; None if they tell nothing of the size of values."""
    moments = [one for result in results if (one := _find(result, _SUMMARY) or _find(result, _MOMENTS)) is not None]
    norms = [norm for part, norm in _of_kind(reducer, results, Norm) if part.p == 2 and not part.normalize]
    found: Spread | None = None
    if moments:
        keys = set(_SUMMARY).intersection(*moments)
        found = Spread.of({key: torch.cat([one[key].ravel() for one in moments]) for key in keys}, samples)
    elif norms:
        found = replace(_nothing(samples), size=torch.cat([norm.double().ravel() for norm in norms]).norm().item())
    for part, values in _of_kind(reducer, results, Quantile):
        shares = part.q if isinstance(part.q, tuple) else ()
        if set(_QUARTERS) <= set(shares):
            low, first, third, high = (values[shares.index(share)] for share in _QUARTERS)
            quartile = torch.maximum(first.abs(), third.abs()).nanmedian().item()
            found = replace(found or _nothing(samples), low=low.min().item(), high=high.max().item(), quartile=quartile)
    return found


def _nothing(samples: int) -> Spread:
    return Spread(0, math.nan, math.nan, math.nan, math.nan, math.nan, samples)


def _of_kind(reducer: Reducer | None, results: list[Any], kind: type[_Kind]) -> Iterator[tuple[_Kind, Any]]:
    """Each reducer of exactly this kind, which may be part of a `Product`, with each of its results."""
    parts = reducer.parts if isinstance(reducer, Product) else [("", reducer)]
    for name, part in parts:
        if type(part) is kind:
            yield from ((part, result[name] if name else result) for result in results if not name or name in result)


def _first_nonfinite(reducer: Reducer | None, results: list[Any]) -> int | None:
    """The least result of a `FirstNonfinite`, which may be part of a `Product`; None if all was finite, or there is none."""
    firsts = [place for _, first in _of_kind(reducer, results, FirstNonfinite) for place in first.reshape(-1).tolist()]
    return min((int(place) for place in firsts if place >= 0), default=None)


def _steps(ratio: Any) -> Tensor:
    """The ratios of all steps, or their mean if only that was kept."""
    if isinstance(ratio, Tensor):
        return ratio.ravel()
    mean: Tensor = ratio["mean"]
    return mean.ravel()


def _find(result: Any, keys: frozenset[str]) -> Mapping[str, Tensor] | None:
    """The first mapping in a nested result that has all the keys."""
    return next((found for found in _mappings(result) if keys <= found.keys()), None)


def _mappings(result: Any) -> Iterator[Mapping[str, Any]]:
    if isinstance(result, Mapping):
        yield result
        for inner in result.values():
            yield from _mappings(inner)
