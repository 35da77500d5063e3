"""Overview: one row per layer, gathered from all subrecorders of a recording."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from recorders.recorder.recorder import Recorder
from recorders.recordings.display import shown_name
from recorders.recordings.recording import Recording, Subrecording, check_recorded
from recorders.ring.state import path_of
from recorders.watch.diagnosis.limits import is_idle, usual_growth
from recorders.watch.spread import ACTIVITY, IDLE, MOMENTS, Spread, find, first_nonfinite, spread_of, steps, zero_units

_RECTIFIERS = frozenset({"ReLU", "ReLU6", "Threshold", "Hardshrink", "Softshrink"})
"""Activation functions of which a unit that does not respond is exactly zero."""
_ROLES = {
    "ForwardMonitor": "output",
    "BackwardMonitor": "gradient",
    "ParameterGradientMonitor": "weight_gradient",
    "ParameterUpdateMonitor": "update",
}
_OF_WEIGHTS = ("weight_gradient", "update")


@dataclass(frozen=True)
class Layer:
    """One layer of a recording; fields that were not recorded are None.

    Attributes:
        name: the name of the module; "(net)" for the net itself.
        kind: the class of the module; "" if unknown.
        output: what the module returned.
        units: the same for each unit, as computed by `Summary` or `Moments`.
        rate: the active share of each unit, from `Activity`.
        dead: whether each unit was never active, from `Activity`; of a ReLU and the like also from other statistics by unit, by
            which it was always zero.
        idle: for how many observations, up to the last, each unit was not active, from `Idle`.
        idle_of: the number of observations and of elements of each unit that `idle` is of.
        gradient: the gradient of the loss with respect to the output.
        weight_gradient: the gradient of the loss with respect to the parameters, without biases.
        update: norm of the change over norm of the weights for each step, without biases.
        growth: the sum of the sizes of updates but for the largest, relative to `usual_growth` of as many steps, or to twice that
            if the weights were zero at first; of several weights the largest. Infinite if it is not known.
        since: for each role that has a `FirstNonfinite`, the first observation with NaN or infinity; -1 if there was none.
        silent: the likely reason for each role of which nothing was recorded.
        trained: whether any of its own weights requires a gradient, or of those inside if it has none; None if unknown.
        failed: for each role, why no observation could be reduced; only a recorder knows.
        whole: whether it contains other layers of the overview, as the net itself does.
        first: whether it is the first output of its module, or the only one.
        shared: whether all its weights are also those of other modules, such as an embedding that is tied; False if unknown.
        has_weights: whether the module owns weights itself; None if unknown.
        empty: whether it was called, and all that it returned was empty, such as an expert that no token is sent to.
    """

    name: str
    kind: str = ""
    output: Spread | None = None
    units: Mapping[str, Tensor] | None = None
    rate: Tensor | None = None
    dead: Tensor | None = None
    idle: Tensor | None = None
    idle_of: tuple[int, int] = (0, 0)
    gradient: Spread | None = None
    weight_gradient: Spread | None = None
    update: Tensor | None = None
    growth: float = math.inf
    since: Mapping[str, int] = field(default_factory=dict)
    silent: Mapping[str, str] = field(default_factory=dict)
    trained: bool | None = None
    failed: Mapping[str, str] = field(default_factory=dict)
    whole: bool = False
    first: bool = True
    has_weights: bool | None = None
    shared: bool = False
    empty: bool = False

    @property
    def gone(self) -> Tensor | None:
        """Which units are dead: those that were never active, and those that are active no more; None if unknown."""
        if self.idle is None:
            return self.dead
        died = is_idle(self.idle, *self.idle_of)
        if self.dead is None:
            return died | (self.idle == self.idle_of[0])
        return self.dead | died if self.dead.shape == died.shape else self.dead

    @property
    def has_gradients(self) -> bool:
        """Whether gradients of its weights came, and were not all zero."""
        return self.weight_gradient is not None and self.weight_gradient.norm > 0

    @property
    def has_zero_gradients(self) -> bool:
        """Whether gradients of its weights came, and were all zero."""
        return self.weight_gradient is not None and bool(self.weight_gradient.count) and not self.has_gradients

    @property
    def still(self) -> bool:
        """Whether the weights never changed."""
        return "update" in self.silent or (self.update is not None and not bool(self.update.any()))

    @property
    def ratio(self) -> float:
        """The median size of an update relative to the weights; NaN if there is none."""
        return self.ratio_at(0.5)

    def ratio_at(self, share: float) -> float:
        """The quantile `share` of the sizes of updates relative to the weights; NaN if there is none."""
        finite = torch.zeros(0, device="cpu") if self.update is None else self.update[self.update.isfinite()]
        return finite.double().quantile(share).item() if finite.numel() else math.nan


def overview(recorded: Recorder | Recording) -> list[Layer]:
    """One row per layer, in the order of selection, from these monitors, under any names:

    - `ForwardMonitor` with a `Summary`, an `Activity` or both in a `Product`: `output`, `units`, `rate`, `dead`; with an `Idle` in
      the `Product` also `idle`; here and for gradients, a `FirstNonfinite` there tells since when there is NaN or infinity: `since`
    - `BackwardMonitor` with a `Summary`: `gradient`
    - `ParameterGradientMonitor` with a `Summary`: `weight_gradient`
    - in place of a `Summary` also `Moments`, `Norm`, `Extremes` or `Quantile(q=(0, 0.25, 0.75, 1))`, as far as they tell: with an
      axis kept, as in `"b c -> c"`, each tells which units of a ReLU are dead
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
    check_recorded(recorded, "overview")
    reasons, failed, trained, parts = *_reasons(recorded), _trained(recorded), _parts(recorded)
    groups, owners, shared = _groups(parts), _owners(recorded, parts), _shared(recorded)
    rows: dict[str, Layer] = {}
    modules: dict[str, str] = {}  # of each row
    first_row: dict[str, str] = {}  # of each module
    empty: set[str] = set()  # modules
    for name, part in parts.items():
        role = _ROLES.get(part.monitor)
        if role is None:
            continue
        for path, results in _rows(role, part.leaves()).items():
            facts = _facts(role, part, results)
            first = first_nonfinite(part.reducer, results)
            known = set(facts)
            if not facts and first is None and part.samples:
                empty.update([_module(name, groups)] if role == "output" and not part.leaves() else [])
                continue
            title = _layer(name, groups) + (f":{path}" if path else "")
            taken = rows.get(title, Layer(title))
            if role in taken.silent or any(getattr(taken, key) is not None for key in known - {"idle_of", "growth"}):
                title = name + (f":{path}" if path else "")
                taken = rows.get(title, Layer(title))
            modules[title] = module = _module(name, groups)
            home = title.removesuffix(path) + path_of(path)  # a module may have a row for each number of channels
            facts["first"] = home == first_row.setdefault(module, home) or not path_of(path)
            facts["has_weights"] = None if owners is None else module in owners
            silent = taken.silent if part.samples else {**taken.silent, role: reasons.get(name, "")}
            if name in failed:
                facts["failed"] = {**taken.failed, role: failed[name]}
            since = taken.since if first is None else {**taken.since, role: first}
            facts["trained"] = trained.get(name, taken.trained)
            facts["shared"] = name in shared or taken.shared
            rows[title] = replace(taken, kind=part.module, silent=silent, since=since, **facts)
    inside = {name[:at] for name in modules.values() for at, sign in enumerate(name) if sign == "."}
    inside |= {""} if len({*modules.values()}) > 1 else set()
    return [
        replace(row, whole=modules[title] in inside, empty=modules[title] in empty and row.output is None)
        for title, row in rows.items()
    ]


def pushed(recorded: Recorder | Recording) -> dict[str, Spread]:
    """What was pushed into each `CallMonitor` with a `Summary` or the like, by name."""
    parts = {name: part for name, part in _parts(recorded).items() if part.monitor == "CallMonitor"}
    found = {name: spread_of(part.reducer, list(part.leaves().values()), part.samples) for name, part in parts.items()}
    return {name: spread for name, spread in found.items() if spread is not None}


def layer_names(parts: Mapping[str, Subrecording]) -> dict[str, str]:
    """By name of the subrecorder, the name of its layer in `overview`.

    >>> from recorders import presets
    >>> recorder = presets.outliers().modules(torch.nn.Sequential(torch.nn.Linear(2, 2)))
    >>> layer_names(recorder.snapshot())
    {'': '(net)', '0': '0'}
    """
    groups = _groups(parts)
    return {name: _layer(name, groups) for name in parts}


def _parts(recorded: Recorder | Recording) -> Mapping[str, Subrecording]:
    return recorded.snapshot()


def _reasons(recorded: Recorder | Recording) -> tuple[dict[str, str], dict[str, str]]:
    """By name of the subrecorder the reason why nothing was recorded; and the error, if the monitor was called and failed."""
    silent = recorded.report().silent if isinstance(recorded, Recorder) else ()
    return {row.name: row.reason for row in silent}, {row.name: row.error for row in silent if row.error is not None}


def _trained(recorded: Recorder | Recording) -> dict[str, bool]:
    """Whether any weight requires a gradient, by name of the subrecorder; only of modules that are still there."""
    monitors = recorded if isinstance(recorded, Recorder) else {}
    modules = {name: monitor.module for name, monitor in monitors.items() if monitor.module is not None}
    own = {
        name: _weights(module, recurse=False) or [*module.parameters(recurse=False)] or _weights(module, recurse=True)
        for name, module in modules.items()
    }
    return {name: any(weight.requires_grad for weight in weights) for name, weights in own.items() if weights}


def _weights(module: nn.Module, recurse: bool) -> list[nn.Parameter]:
    return [parameter for name, parameter in module.named_parameters(recurse=recurse) if _is_weight(name)]


def _shared(recorded: Recorder | Recording) -> set[str]:
    """The subrecorders of modules whose weights are all weights of other modules, too."""
    monitors = recorded if isinstance(recorded, Recorder) else {}
    modules = {name: module for name, monitor in monitors.items() if (module := monitor.module) is not None}
    owners: dict[int, set[int]] = {}  # by weight
    for module in modules.values():
        for weight in module.parameters(recurse=False):
            owners.setdefault(id(weight), set()).add(id(module))
    weights = {name: list(module.parameters(recurse=False)) for name, module in modules.items()}
    return {name for name, own in weights.items() if own and all(len(owners[id(weight)]) > 1 for weight in own)}


def _groups(parts: Mapping[str, Subrecording]) -> frozenset[str]:
    """The groups that names begin with. Of the net itself, the group alone is the name."""
    named = {name.partition("/")[0] for name in parts if "/" in name}
    alone = {name: part.monitor for name, part in parts.items() if "/" not in name and part.monitor in _ROLES}
    several = len({*alone.values()}) > 1  # in one group all have one role
    return frozenset(named | (alone.keys() if several else set()))


def _module(name: str, groups: frozenset[str]) -> str:
    """The module in a name `group/module`, or `module` if there is one group; the net itself has an empty name."""
    group, _, module = name.partition("/")
    return module if group in groups else name


def _owners(recorded: Recorder | Recording, parts: Mapping[str, Subrecording]) -> set[str] | None:
    """The modules that own parameters; None if what was recorded does not tell.

    Monitors of parameters sit on these modules only. If there are none, a recorder knows the modules that are still there.
    """
    groups = _groups(parts)
    if any(_ROLES.get(part.monitor) in _OF_WEIGHTS for part in parts.values()):
        return {_module(name, groups) for name, part in parts.items() if _ROLES.get(part.monitor) in _OF_WEIGHTS}
    if isinstance(recorded, Recorder):
        own = {name: monitor.module for name, monitor in recorded.items() if monitor.module is not None}
        return {_module(name, groups) for name, module in own.items() if next(module.parameters(recurse=False), None) is not None}
    return None


def _layer(name: str, groups: frozenset[str]) -> str:
    return shown_name(_module(name, groups))


def _rows(role: str, leaves: Mapping[str, Any]) -> dict[str, list[Any]]:
    """Results by suffix of the layer's name: one row for each output, or one for all parameters."""
    if role in _OF_WEIGHTS:
        # Biases start at zero, so their relative change means nothing; their gradients differ in size from those of weights.
        return {"": [result for path, result in leaves.items() if _is_weight(path)]}
    return {path: [result] for path, result in leaves.items()} or {"": []}


def _growth(ratio: Any) -> float:
    """The sum of the ratios but for the largest, relative to that of weights that grow from zero in equal steps."""
    if isinstance(ratio, Tensor):
        found = ratio[ratio.isfinite()].double().ravel()
        count, total, largest = ratio.numel(), found.sum().item(), found.max().item() if found.numel() else 0.0
        lost = count - found.numel()
    elif ratio.keys() >= {"count", "mean", "max"}:
        lost = sum(int(ratio[key].sum()) for key in ("nan", "inf") if key in ratio)
        count, largest = int(ratio["count"].sum()) + lost, ratio["max"].max().item()
        total = (ratio["count"] * ratio["mean"]).nansum().item()
    else:
        return math.inf
    # A change relative to a weight of zero is not finite. What begins at zero, as an adapter does, is often warmed up: if steps
    # grow evenly, the sum is twice that of equal steps.
    usual = usual_growth(0, count) * (2 if lost else 1)
    return (total - largest) / usual if count > 1 else 0.0


def _is_weight(path: str) -> bool:
    return "bias" not in path.rpartition(".")[2]  # that of attention is called in_proj_bias


def _facts(role: str, part: Subrecording, results: list[Any]) -> dict[str, Any]:
    """The fields of `Layer` that the results of one monitor give."""
    if role == "update":
        ratios = [result["ratio"] for result in results if isinstance(result, Mapping) and "ratio" in result]
        return {"update": torch.cat(list(map(steps, ratios))), "growth": max(map(_growth, ratios))} if ratios else {}
    facts: dict[str, Any] = {}
    spread = spread_of(part.reducer, results, part.samples)
    if spread is not None:
        facts[role] = spread
    if role == "output":
        silent = [zero_units(part.reducer, result) for result in results] if part.module in _RECTIFIERS else []
        for dead in (dead for dead in silent if dead is not None and dead.dim()):
            facts["dead"] = dead
        for units in filter(None, (find(result, MOMENTS) for result in results)):
            facts["units"] = units
        for activity in filter(None, (find(result, ACTIVITY) for result in results)):
            facts.update(rate=activity["rate"], dead=activity["dead"])
        for idle in filter(None, (find(result, IDLE) for result in results)):
            facts.update(idle=idle["idle"], idle_of=(int(idle["observations"]), int(idle["elements"])))
    return facts
