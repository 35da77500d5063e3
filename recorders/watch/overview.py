"""What a recording says of each layer, gathered from all its subrecorders into one row a layer."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from recorders.recorder.recorder import Recorder
from recorders.recordings.recording import Recording, Subrecording

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
    """How values are spread: the result of a `Summary`, its units pooled into one.

    Attributes:
        count: how many values were finite.
        mean, std, low, high: of the finite values, in their own unit; NaN where there were none.
        nonfinite: how many were NaN or infinite.
        observations: how many tensors the values came in.
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
        """The units of a `Summary` pooled: the variance between their means counts as well as that within them.

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
        """Root mean square, over observations, of the norm of one observation: comparable between layers of different sizes."""
        return self.rms * math.sqrt(self.count / self.observations) if self.count and self.observations else math.nan


@dataclass(frozen=True)
class Layer:
    """One layer of a recording; None stands for what was not recorded.

    Attributes:
        name: of the module, "(net)" for the net itself.
        kind: the class of the module; "" where it is not known.
        output: what the module returned.
        units: the same, unit by unit, as `Summary` gave it.
        rate: active share of each unit, from `Activity`.
        dead: which units never were active, from `Activity`.
        gradient: of the loss with respect to the output.
        weight_gradient: of the loss with respect to the parameters, biases left out.
        update: norm of the change over norm of the weights, one number a step, biases left out.
        silent: monitors that recorded nothing, by role, with the likely reason.
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
    silent: Mapping[str, str] = field(default_factory=dict)

    @property
    def ratio(self) -> float:
        """Typical size of an update, relative to the weights: the median, which the first steps of a training do not dominate."""
        return self.ratio_at(0.5)

    def ratio_at(self, share: float) -> float:
        """The size of an update, relative to the weights, that this share of the steps stayed below; NaN where there is none."""
        finite = torch.zeros(0) if self.update is None else self.update[self.update.isfinite()]
        return finite.double().quantile(share).item() if finite.numel() else math.nan


def overview(recorded: Recorder | Recording) -> list[Layer]:
    """One row a layer, in the order of selection, from whatever of this was recorded, under any names:

    - `ForwardMonitor` with a `Summary`, an `Activity` or both in a `Product`: `output`, `units`, `rate`, `dead`
    - `BackwardMonitor` with a `Summary`: `gradient`
    - `ParameterGradientMonitor` with a `Summary`: `weight_gradient`
    - `ParameterUpdateMonitor` with `Product(ratio=Collect())`, or `Product(ratio=Summary())`, whose
      `op_=lambda after, before: (after - before).norm() / before.norm()`: `update`

    Modules with several outputs get a row for each. A module recorded twice in one role, such as in training and in evaluation,
    gets a second row under the subrecorder's full name.

    Args:
        recorded: a recorder knows why something was not recorded; a recording does not.

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
            rows[title] = replace(taken, kind=part.module, silent=silent, **facts)
    return list(rows.values())


def pushed(recorded: Recorder | Recording) -> dict[str, Spread]:
    """What was pushed into each `CallMonitor` that has a `Summary`, by name."""
    parts = {name: part for name, part in _parts(recorded).items() if part.monitor == "CallMonitor"}
    found = {name: (_find(part.peek(), _SUMMARY), part.samples) for name, part in parts.items()}
    return {name: Spread.of(summary, samples) for name, (summary, samples) in found.items() if summary is not None}


def _parts(recorded: Recorder | Recording) -> Mapping[str, Subrecording]:
    return recorded.snapshot() if isinstance(recorded, Recorder) else recorded


def _reasons(recorded: Recorder | Recording) -> dict[str, str]:
    """Why nothing was recorded, by name of the subrecorder."""
    return {row.name: row.reason for row in recorded.report().silent} if isinstance(recorded, Recorder) else {}


def _layer(name: str) -> str:
    """Subrecorders are named `group/module`, or `module` where there is one group; the net itself has an empty name."""
    return name.partition("/")[2] or name or "(net)"


def _rows(role: str, leaves: Mapping[str, Any]) -> dict[str, list[Any]]:
    """Results by what goes behind the layer's name: each output has a row of its own, and all parameters share one."""
    if role in ("weight_gradient", "update"):
        # A bias begins at zero, so its relative change says nothing, and its gradient is of another size than the weights'.
        return {"": [result for path, result in leaves.items() if not path.rpartition(".")[2].startswith("bias")]}
    return {path: [result] for path, result in leaves.items()} or {"": []}


def _facts(role: str, results: list[Any], samples: int) -> dict[str, Any]:
    """What the results of one monitor say, by field of `Layer`."""
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


def _steps(ratio: Any) -> Tensor:
    """The ratios of all steps, or their mean where only that was kept."""
    if isinstance(ratio, Tensor):
        return ratio.ravel()
    mean: Tensor = ratio["mean"]
    return mean.ravel()


def _find(result: Any, keys: frozenset[str]) -> Mapping[str, Tensor] | None:
    """The first mapping inside a result that has all the keys."""
    return next((found for found in _mappings(result) if keys <= found.keys()), None)


def _mappings(result: Any) -> Iterator[Mapping[str, Any]]:
    if isinstance(result, Mapping):
        yield result
        for inner in result.values():
            yield from _mappings(inner)
