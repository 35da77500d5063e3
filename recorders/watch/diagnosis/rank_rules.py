"""Rules on ranks: what they should hold alike, and do not. Only of what was recorded on many ranks and merged."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from recorders.recordings.distributed.differing import Differing
from recorders.watch.diagnosis.evidence import Evidence
from recorders.watch.diagnosis.finding import Finding, fault

_BEFORE = "value before the step"
_ROLES = {
    "PreStepParameterMonitor": _BEFORE,
    "ParameterGradientMonitor": "gradient",
    "ParameterUpdateMonitor": "update",
    "OptimizerStateMonitor": "optimizer state",
    "ParameterMonitor": "value",
}
"""By class of the monitor, what it records of a parameter, in the order in which a step computes them."""
_ORDER = [*_ROLES.values()]
_BOTH = ("gradient", "value")
"""The leaves of a parameter of which a monitor records both, as `presets.fingerprints()` does."""


def replicas_differ(known: Evidence) -> Iterator[Finding]:
    """One finding, of what differs first: it spreads to other tensors, and to later steps."""
    found = [(layer, one) for layer, differing in known.differing.items() for one in differing]
    if not found:
        return
    layer, first = min(found, key=lambda pair: _place(pair[1]))
    together = [(where, one) for where, one in found if one.observation == first.observation]
    step = _step(known, first.observation)
    since = "" if first.observation is None or step is not None else f", from observation {first.observation} on"
    what = f"{_shown(first)} differs on {first.on}{since}"
    tensors = {(where, _role(one)[1]) for where, one in found}
    if len(tensors) > 1:
        layers = len({where for where, _ in found})
        what += f", and {len(tensors) - 1} more parameters{f' in {layers} layers' if layers > 1 else ''}"
    yield fault("replicas-differ", layer, what, step, causes=_causes(known, first.observation, together))


def _role(one: Differing) -> tuple[str, str]:
    """What was recorded, and of which parameter; "" if it was not of a parameter."""
    parameter, _, last = one.leaf.rpartition(".")
    if one.monitor == "ParameterGradientMonitor" and parameter and last in _BOTH:
        return last, parameter
    return _ROLES.get(one.monitor, ""), one.leaf


def _place(one: Differing) -> tuple[float, int]:
    role, _ = _role(one)
    order = _ORDER.index(role) if role else len(_ORDER)
    return math.inf if one.observation is None else one.observation, order


def _shown(one: Differing) -> str:
    role, of = _role(one)
    if not role:
        return f"what {one.monitor} recorded{f' of {of}' if of else ''}"
    return of if role == "value" else f"{of} before the step" if role == _BEFORE else f"the {role} of {of}"


def _step(known: Evidence, observation: int | None) -> int | None:
    """The step of the clock at which an observation of parameters was made; None if it is not known."""
    if observation is None or known.steps is None:
        return None
    steps = known.steps["step"].values  # those of the first rank come first
    return int(steps[observation]) if observation < len(steps) and math.isfinite(steps[observation]) else None


def _causes(known: Evidence, observation: int | None, together: Sequence[tuple[str, Differing]]) -> tuple[str, ...]:
    """The likely causes, by what differs at the first observation that differs; () if they are those of the kind."""
    if observation is None:
        return ()
    roles = {_role(one)[0] for _, one in together}
    if _BEFORE in roles:  # gradients differ because of it, if no step was left out
        last, now = (None if at < 0 else _step(known, at) for at in (observation - 1, observation))
        if observation == 0 or (last is not None and now == last + 1):
            together, roles = [pair for pair in together if _role(pair[1])[0] == _BEFORE], {_BEFORE}
    tensors = {(layer, _role(one)[1]) for layer, one in together}
    if observation > 0 and len(tensors) == 1 and max(known.compared.values(), default=1) > 1:
        return "silent-corruption", "changed-on-one-rank", "not-reduced"
    if "gradient" in roles:
        return ("not-reduced", "ranks-start-apart") if observation == 0 else ("not-reduced", "silent-corruption")
    if observation == 0:
        return "ranks-start-apart", "not-reduced"
    if roles == {_BEFORE} or "ParameterGradientMonitor" in known.compared:  # gradients are equal, so the ranks do reduce them
        return "changed-on-one-rank", "silent-corruption"
    return ()


RULES = (replicas_differ,)
"""Each looks at what is known of a training, and yields what it finds."""
