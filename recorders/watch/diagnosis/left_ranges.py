"""What of a run left the ranges of good runs: findings that say by how much, since when, and what may be the cause."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Collection, Container, Iterator, Mapping, Sequence
from statistics import median
from typing import Any, NamedTuple

from recorders.watch.diagnosis.evidence import Evidence
from recorders.watch.diagnosis.finding import Finding, fault
from recorders.watch.diagnosis.learned import Learned, Range
from recorders.watch.diagnosis.traits import LEAST, TINY, Key, Trait, has_class, length, traits

_LENGTH = 2.0
"""By which factor the numbers of steps may differ, so that more than the first steps is compared."""
_EVERYWHERE = 0.5
"""The share of the layers from which on it is told once that they left their ranges."""

_VANISHED = 1e-3
"""The share of what it was in good runs below which a size is as good as zero."""
_CONSEQUENCES = {"weights": 1, "outputs": 1, "gradients": 1, "updates": 1, "loss": 2}
"""The order of roles; all others come first."""


class _Left(NamedTuple):
    """A statistic that left its range.

    Attributes:
        key: which.
        score: how far it is beyond the range, in margins: above 1.
        up: whether it is above.
        what: with numbers.
        since: the first step at which it was beyond the margin, in a list that is empty if it is not known.
        causes: the likely ones.
        vanished: whether it is a size, and less than a thousandth of what it was.
    """

    key: Key
    score: float
    up: bool
    what: str
    since: list[int]
    causes: tuple[str, ...]
    vanished: bool = False

    @property
    def rank(self) -> tuple[bool, float]:
        """What left its range early tells more than what did so later."""
        return self.key.phase != "early", -self.score


def left_ranges(known: Evidence, learned: Learned) -> tuple[list[Finding], int]:
    """What left its range, one finding a layer and role at most; and how many statistics were compared.

    First what was given to the net and its optimizer and of which layers it is made, then what layers do, then the loss, as causes
    go before consequences; of each what left its range in the first steps, and then the worst. If layers left no range in the
    first steps, the loss goes before them. Each has its likely causes, if the statistic tells any.

    A statistic is compared by the median of its values in a phase, with the range from the least to the largest tenth of them in
    the good runs. The range is made wider on both sides

    - of outputs and updates by a factor of 3, of gradients by 5, of norms of weights, the learning rate and the like by 2
    - of shares by 0.4, of those that the optimizer's steps tell by 0.15
    - of means of inputs and target by half their deviation, of deviations by a factor of 2
    - of the loss by a quarter of how far it fell
    - by half of the way that it went since the early phase, because another run may go at another pace; of the loss, by how far
      it went from one eighth of the training to the next
    - by how much the good runs differ, if there are several
    - of layers with few units or weights by what these differ by chance.

    If a run has less than half or more than twice as many steps as the good ones, only its early phase is compared. If more than
    half of the layers left their ranges in the same way, that is told once, of the worst. Layers have the classes that they have in
    good runs, and weights that are updated there are updated.
    """
    whole = learned.steps[0] / _LENGTH <= length(known) <= learned.steps[1] * _LENGTH
    hits: dict[tuple[str, str], _Left] = {}
    since: dict[Key, list[int]] = {}  # by what left, in whatever phase
    compared: dict[str, set[str]] = {}
    here, left, count = set[Key](), set[Key](), 0
    for trait in traits(known):
        here.add(trait.key)
        usual = learned.ranges.get(trait.key)
        if usual is None or not (whole or trait.key.phase == "early"):
            continue
        count += 1
        compared.setdefault(trait.key.role, set()).add(trait.key.where)
        hit, place = _left(trait, usual), (trait.key.role, trait.key.where)
        if hit is not None:
            left.add(trait.key)
            since.setdefault(trait.key._replace(phase=""), []).extend(hit.since)
            if place not in hits or hit.rank < hits[place].rank:
                hits[place] = hit
    for hit in _absent(known, learned, here):
        hits.setdefault((hit.key.role, hit.key.where), hit)
    told = [_with_reason(hit, left, since) for hit in _once(list(hits.values()), compared)]
    told.sort(key=_order(left))
    first = [min(since.get(hit.key._replace(phase=""), ()), default=None) for hit in told]
    found = [fault("left-range", hit.key.where, hit.what, step, causes=hit.causes) for hit, step in zip(told, first, strict=True)]
    return found, count


def _absent(known: Evidence, learned: Learned, here: Container[Key]) -> Iterator[_Left]:
    """Layers of other classes than in good runs, or that are not there, and weights that get no updates."""
    good = {key.where: key.statistic for key in learned.ranges if key.role == "layers"}
    now = {layer.name: layer.kind for layer in known.layers if has_class(layer)}
    for where in dict.fromkeys([*good, *now]) if good and now else []:
        was, became = good.get(where), now.get(where)
        if was != became:
            what = f"{_of_class(became)}; good runs: {_of_class(was)}"
            yield _Left(Key("layers", where, "", "whole"), math.inf, True, what, [], _why(was or "", became or ""))
    for key, usual in learned.ranges.items():
        of = known.updates.get(key.where) if key.role == "updates" and key.phase == "early" and key not in here else None
        if of is not None and not of.get(key.statistic.rpartition(" of ")[2]) and len(known.fact("step")) >= LEAST:
            what = f"no updates; {key.statistic} of good runs: {_between(usual, ratio=True)}"
            yield _Left(key, math.inf, False, what, [], ("not-in-optimizer", "no-steps", "frozen"))


_BY_CLASS = {
    r"Norm": (("normalisation",), ("normalisation",)),
    r"Dropout": ((), ("dropout",)),
    r"Pool|Flatten": (("wrong-axis",), ("bottleneck",)),
    r"LU\d?$|Sigmoid$|swish$|Tanh$|Soft(max|plus|sign|shrink)|Threshold": (("no-nonlinearity",), ("output-activation",)),
}
"""By a pattern of the name of a class, the likely causes if good runs have such a layer, and if this one has."""


def _why(was: str, became: str) -> tuple[str, ...]:
    for pattern, (if_gone, if_new) in _BY_CLASS.items():
        if re.search(pattern, became):
            return if_new
        if re.search(pattern, was):
            return if_gone
    return ()


def _of_class(kind: str | None) -> str:
    return "no layer of this name was recorded" if kind is None else f"a layer of the class {kind}"


def _with_reason(hit: _Left, left: Collection[Key], since: Mapping[Key, Sequence[int]]) -> _Left:
    """Its causes, as what else left its range tells them."""
    key, causes = hit.key, [*hit.causes]
    if key.role == "rate" and min(since[key._replace(phase="")], default=0) > 0:
        causes.insert(0, "schedule")
    elif key.role == "outputs" and key.where.partition(":")[0] == "outputs" and key.phase != "early" and not hit.up:
        causes.insert(0, "labels-do-not-fit")
    elif hit.vanished and key.role in _IF_VANISHED:
        causes.insert(0, _IF_VANISHED[key.role])
    elif "outliers" in causes and any(one[:2] == key[:2] and not _is_end(one.statistic) for one in left):
        causes.remove("outliers")  # all of it is larger
    return hit._replace(causes=tuple(dict.fromkeys(causes)))


_IF_VANISHED = {"inputs": "inputs-constant", "target": "labels-constant", "gradients": "detached"}


def _is_end(statistic: str) -> bool:
    return statistic.startswith(("minimum", "maximum"))


def _order(left: Collection[Key]) -> Callable[[_Left], Any]:
    """What was given to the net and the optimizer, then what left its range first, and then most.

    If at first all was as in good runs, the loss tells more than what became of layers.
    """
    loss_first = all(key.phase not in ("early", "whole") for key in left if key.role in _CONSEQUENCES)
    order = {**_CONSEQUENCES, "loss": 0.5} if loss_first else _CONSEQUENCES
    return lambda hit: (order.get(hit.key.role, 0), hit.key.phase != "early", -hit.score)


def _left(trait: Trait, usual: Range) -> _Left | None:
    value, margin = median(trait.values), usual.margin + trait.chance
    low, high = usual.low - margin, usual.high + margin
    if low <= value <= high:
        return None
    up = value > high
    beyond = (value - usual.high if up else usual.low - value) / margin if margin else math.inf
    score = beyond if trait.ratio else math.log2(1 + beyond)
    outside = [step for step, one in zip(trait.steps, trait.values, strict=False) if (one > high if up else one < low)]
    most = f"{'up' if up else 'down'} to {_shown(high if up else low, trait.ratio)}"
    seen = f"{trait.key.statistic} {_in_phase(trait.key.phase)}: {_shown(value, trait.ratio)}"
    what = f"{seen}; good runs: {_between(usual, trait.ratio)}, and {most} is within the margin"
    vanished = trait.ratio and value < usual.low + math.log(_VANISHED)
    return _Left(trait.key, score, up, what, outside[:1], trait.causes[not up], vanished)


def _between(usual: Range, ratio: bool) -> str:
    return " to ".join(dict.fromkeys(_shown(number, ratio) for number in (usual.low, usual.high)))


def _in_phase(phase: str) -> str:
    if phase == "whole":
        return "in the whole run"
    return f"in {phase}" if phase.startswith("part") else f"in the {phase} phase"


def _shown(value: float, ratio: bool) -> str:
    size = math.exp(min(value, 700.0)) if ratio else value
    return "0" if ratio and size <= TINY * 1.001 else f"{size:.3g}"


def _once(hits: list[_Left], compared: Mapping[str, set[str]]) -> list[_Left]:
    """Tells once what most layers have in common."""
    found = []
    groups: dict[tuple[str, bool], list[_Left]] = {}
    for hit in hits:
        groups.setdefault((hit.key.role, hit.up), []).append(hit)
    for (role, _), alike in groups.items():
        if len(alike) > max(2, _EVERYWHERE * len(compared.get(role, ()))):
            worst = max(alike, key=lambda hit: hit.score)
            more = f"{len(alike) - 1} more layers"
            too = f"{more} differ" if role == "layers" else f"the {role} of {more} left their ranges"
            found.append(worst._replace(what=f"{worst.what}; {too}, too"))
        else:
            found += alike
    return found
