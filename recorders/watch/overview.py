"""Overview: one row per layer, gathered from all subrecorders of a recording."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from recorders.recorder.recorder import Recorder
from recorders.recordings.recording import Recording, Subrecording
from reducers import FirstNonfinite, Product, Reducer

__all__ = ["Layer", "Spread", "overview", "pushed"]

_SUMMARY = frozenset({"count", "mean", "var", "min", "max", "nan", "inf"})
_ACTIVITY = frozenset({"rate", "dead"})
_ROLES = {
    "ForwardMonitor": "output",
    "BackwardMonitor": "gradient",
    "ParameterGradientMonitor": "weight_gradient",
    "ParameterUpdateMonitor": "update",
}


@dataclass(frozen=True)
class Spread:
    """The result of a `Summary`, with all units pooled.

    Attributes:
        count: the number of finite values.
        mean, std, low, high: statistics of the finite values; NaN if there were none.
        nonfinite: the number of values that were NaN or infinite.
        observations: the number of tensors observed.
    """

    count: int
    mean: float
    std: float
    low: float
    high: float
    nonfinite: int
    observations: int

    @classmethod
    def of(cls, summary: Mapping[str, Tensor], observations: int) -> Spread:
        """Pools the units of a `Summary`: adds the variance between their means to the variance within them.

        >>> import torch
        >>> from reducers import Summary
        >>> channels = Summary("b c -> c")
        >>> spread = Spread.of(channels.compute(channels.update({}, torch.tensor([[0.0, 4.0], [2.0, 6.0]]))), observations=1)
        >>> spread.mean, round(spread.std, 3), spread.low, spread.high
        (3.0, 2.582, 0.0, 6.0)
        """
        number = {key: summary[key].double().ravel() for key in _SUMMARY}
        seen = number["count"] > 0
        count, nonfinite = int(number["count"].sum()), int((number["nan"] + number["inf"]).sum())
        if not count:
            return cls(0, math.nan, math.nan, math.nan, math.nan, nonfinite, observations)
        n, means = number["count"][seen], number["mean"][seen]
        mean = (n * means).sum() / count
        within = (number["var"][seen].nan_to_num() * (n - 1)).sum()
        std = ((within + (n * (means - mean).square()).sum()) / max(count - 1, 1)).sqrt()
        low, high = number["min"][seen].min(), number["max"][seen].max()
        return cls(count, mean.item(), std.item(), low.item(), high.item(), nonfinite, observations)

    @property
    def rms(self) -> float:
        """Root mean square of the finite values."""
        return math.sqrt(self.mean**2 + self.std**2 * (self.count - 1) / self.count) if self.count else math.nan

    @property
    def norm(self) -> float:
        """Root mean square of the norms of the observations."""
        return self.rms * math.sqrt(self.count / self.observations) if self.count and self.observations else math.nan


@dataclass(frozen=True)
class Layer:
    """One layer of a recording; fields that were not recorded are None.

    Attributes:
        name: the name of the module; "(net)" for the net itself.
        kind: the class of the module; "" if unknown.
        output: what the module returned.
        units: the same for each unit, as computed by `Summary`.
        rate: the active share of each unit, from `Activity`.
        dead: whether each unit was never active, from `Activity`.
        gradient: the gradient of the loss with respect to the output.
        weight_gradient: the gradient of the loss with respect to the parameters, without biases.
        update: norm of the change over norm of the weights for each step, without biases.
        since: for each role that has a `FirstNonfinite`, the first observation with NaN or infinity; only if there was one.
        silent: the likely reason for each role of which nothing was recorded.
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
    reasons = _reasons(recorded)
    rows: dict[str, Layer] = {}
    for name, part in _parts(recorded).items():
        role = _ROLES.get(part.monitor)
        if role is None:
            continue
        for path, results in _rows(role, part.leaves()).items():
            facts = _facts(role, results, part.samples)
            if not facts and part.samples:
                continue
            title = _layer(name) + (f":{path}" if path else "")
            taken = rows.get(title, Layer(title))
            if role in taken.silent or any(getattr(taken, key) is not None for key in facts):
                title = name + (f":{path}" if path else "")
                taken = rows.get(title, Layer(title))
            silent = taken.silent if part.samples else {**taken.silent, role: reasons.get(name, "")}
            since = {**taken.since, **({role: first} if (first := _first_nonfinite(part.reducer, results)) is not None else {})}
            rows[title] = replace(taken, kind=part.module, silent=silent, since=since, **facts)
    return list(rows.values())


def pushed(recorded: Recorder | Recording) -> dict[str, Spread]:
    """What was pushed into each `CallMonitor` with a `Summary`, by name."""
    parts = {name: part for name, part in _parts(recorded).items() if part.monitor == "CallMonitor"}
    found = {name: (_find(part.peek(), _SUMMARY), part.samples) for name, part in parts.items()}
    return {name: Spread.of(summary, samples) for name, (summary, samples) in found.items() if summary is not None}


def _parts(recorded: Recorder | Recording) -> Mapping[str, Subrecording]:
    return recorded.snapshot() if isinstance(recorded, Recorder) else recorded


def _reasons(recorded: Recorder | Recording) -> dict[str, str]:
    """The reason why nothing was recorded, by name of the subrecorder."""
    return {row.name: row.reason for row in recorded.report().silent} if isinstance(recorded, Recorder) else {}


def _layer(name: str) -> str:
    """The module in a name `group/module`, or `module` if there is one group; the net itself has an empty name."""
    return name.partition("/")[2] or name or "(net)"


def _rows(role: str, leaves: Mapping[str, Any]) -> dict[str, list[Any]]:
    """Results by suffix of the layer's name: one row for each output, or one for all parameters."""
    if role in ("weight_gradient", "update"):
        # Biases start at zero, so their relative change means nothing; their gradients differ in size from those of weights.
        return {"": [result for path, result in leaves.items() if not path.rpartition(".")[2].startswith("bias")]}
    return {path: [result] for path, result in leaves.items()} or {"": []}


def _facts(role: str, results: list[Any], samples: int) -> dict[str, Any]:
    """The fields of `Layer` that the results of one monitor give."""
    if role == "update":
        ratios = [_steps(result["ratio"]) for result in results if isinstance(result, Mapping) and "ratio" in result]
        return {"update": torch.cat(ratios)} if ratios else {}
    facts: dict[str, Any] = {}
    summaries = [found for result in results if (found := _find(result, _SUMMARY)) is not None]
    if summaries:
        facts[role] = Spread.of({key: torch.cat([one[key].ravel() for one in summaries]) for key in _SUMMARY}, samples)
    if role == "output":
        if summaries:
            facts["units"] = summaries[0]
        for activity in filter(None, (_find(result, _ACTIVITY) for result in results)):
            facts.update(rate=activity["rate"], dead=activity["dead"])
    return facts


def _first_nonfinite(reducer: Reducer | None, results: list[Any]) -> int | None:
    """The least result of a `FirstNonfinite`, which may be part of a `Product`; None if all was finite, or there is none."""
    parts: Sequence[tuple[str, Reducer | None]] = reducer.parts if isinstance(reducer, Product) else [("", reducer)]
    names = [name for name, part in parts if isinstance(part, FirstNonfinite)]
    firsts = [result[name] if name else result for result in results for name in names if not name or name in result]
    return min((int(place) for first in firsts for place in first.reshape(-1).tolist() if place >= 0), default=None)


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
