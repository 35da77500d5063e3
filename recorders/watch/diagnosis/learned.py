"""learn(): what good runs were like, for `findings(..., against=)`: ranges of statistics, kept in a small file."""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Callable, Collection, Container, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple, TypeAlias

from recorders.errors import CorruptRecordingError, NotARecordingError, RecordingNotFoundError, SchemaError, StorageError
from recorders.recorder.recorder import Recorder
from recorders.recordings.atomic_files import as_path, is_url, read_regular, written_whole
from recorders.recordings.recording import Recording
from recorders.recordings.storage.load import load
from recorders.watch.diagnosis.evidence import Evidence, evidence
from recorders.watch.diagnosis.finding import Finding, fault
from recorders.watch.diagnosis.traits import LEAST, TINY, Key, Trait, has_class, length, traits

__all__ = ["Against", "Learned", "Range", "first_steps", "learn", "learned_at", "left_ranges"]

_SCHEMA = 1
_FORMAT = "torch-recorders learned"
_MAX_BYTES, _MAX_NAME = 2**24, 1000
_LENGTH = 2.0
"""By which factor the numbers of steps may differ, so that more than the first steps is compared."""
_PACE = 0.5
"""How much of the way that a good run went since its first steps another one may be ahead or behind."""
_EVERYWHERE = 0.5
"""The share of the layers from which on it is told once that they left their ranges."""

_VANISHED = 1e-3

_CONSEQUENCES = {"weights": 1, "outputs": 1, "gradients": 1, "updates": 1, "loss": 2}
"""The order of roles; all others come first."""


class Range(NamedTuple):
    """Where a statistic was in all good runs.

    Attributes:
        low, high: the least tenth and the largest tenth of its values, in the good run in which they are least and largest; natural
            logarithms of sizes.
        margin: how far beyond them another run may be.
    """

    low: float
    high: float
    margin: float


@dataclass(frozen=True)
class Learned:
    """What good runs had in common; `learn` makes it, and `findings(..., against=)` compares with it.

    Attributes:
        runs: how many good runs there were.
        steps: the least and the largest number of their steps.
        ranges: by statistic, layer and phase, those that all of them have.
    """

    runs: int
    steps: tuple[int, int]
    ranges: Mapping[Key, Range] = field(repr=False)

    def save(self, path: str | os.PathLike[str]) -> Path:
        """Writes it into a JSON file, whole or not at all; returns the path.

        Raises:
            StorageError: it cannot be written.
        """
        rows = [[*key, *(float(f"{number:.6g}") for number in values)] for key, values in self.ranges.items()]
        head = {"format": _FORMAT, "schema": _SCHEMA, "runs": self.runs, "steps": [*self.steps]}
        lines = ",\n".join(json.dumps(row, allow_nan=False) for row in rows)
        target = as_path(path)
        try:
            with written_whole(Path(target)) as draft:
                draft.write_text(f'{json.dumps(head)[:-1]}, "ranges": [\n{lines}\n]}}\n', encoding="utf-8")
        except OSError as error:
            raise StorageError(f"cannot save what was learned at {target}: {error}") from error
        return Path(target)

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Learned:
        """Reads what `save` wrote; safe on files from anywhere.

        Raises:
            RecordingNotFoundError: there is no file; also a FileNotFoundError.
            NotARecordingError: it is another file.
            SchemaError: a newer version wrote it.
            CorruptRecordingError: it is damaged or forged; the message says what is wrong.
            StorageError: it cannot be read.
        """
        target = as_path(path)
        try:
            content = read_regular(os.path.realpath(target), _MAX_BYTES)
        except FileNotFoundError as error:
            raise RecordingNotFoundError(f"there is nothing at {target}: recorders.learn(good_run, path=...) writes it") from error
        except StorageError:
            raise
        except OSError as error:
            raise StorageError(f"cannot read {target}: {error}") from error
        return _parsed(content, target)


def learn(*good: Recorder | Recording | str | os.PathLike[str], path: str | os.PathLike[str] | None = None) -> Learned:
    """Learns what a good training is like from one run or several, so that `findings(..., against=)` names what is not like that.

    It keeps the classes of layers, and the range of each statistic that `presets.health()` records: of layers the number of
    elements and the size of outputs, their mean relative to it and the share of dead units; of weights their norms, their
    gradients, these relative to those of the next layer, and their updates; the loss; inputs and target; and what the optimizer
    was set to, and did. Phases have ranges of their own: the first 10 steps recorded, and the first and the second half of the
    rest; the loss has eight equal parts. One run is enough. Several tell how much good runs differ, if they differ by their seeds
    as the run that is compared.

    Args:
        good: recordings, recorders, or paths or URLs of recordings, of good runs of one net.
        path: a file that is written, too, for `findings(..., against=path)`.

    Raises:
        StorageError: a recording cannot be read, or the file cannot be written.

    >>> import torch
    >>> from recorders import findings, presets
    >>> def train(rate):
    ...     net = torch.nn.Sequential(torch.nn.Linear(4, 16), torch.nn.Tanh(), torch.nn.Linear(16, 1))
    ...     optimizer = torch.optim.SGD(net.parameters(), lr=rate)
    ...     with presets.health().modules(net) as recorder:
    ...         for _ in range(20):
    ...             optimizer.zero_grad()
    ...             net(torch.randn(32, 4)).square().mean().backward()
    ...             optimizer.step()
    ...     return recorder
    >>> learned = learn(train(0.01), train(0.01))
    >>> learned
    Learned(runs=2, steps=(20, 20))
    >>> found = findings(train(0.05), against=learned)
    >>> [finding.what for finding in found if finding.layer == "optimizer"]
    ['learning rate in the early phase: 0.05; good runs: 0.01, and up to 0.02 is within the margin']
    """
    if not good:
        raise TypeError("learn needs a good run at least: a recording, a recorder, or the path of a recording")
    runs = [evidence(one if isinstance(one, (Recorder, Recording)) else load(one)) for one in good]
    each = [_ranges(run) for run in runs]
    common = [key for key in each[0] if all(key in ranges for ranges in each)]
    lengths = [length(run) for run in runs]
    ranges = {key: _joined([ranges[key] for ranges in each]) for key in common}
    learned = Learned(len(good), (min(lengths), max(lengths)), ranges)
    if path is not None:
        learned.save(path)
    return learned


def learned_at(source: Learned | str | os.PathLike[str]) -> Learned:
    """What was learned, from the file of it, or from the recording of a good run."""
    if isinstance(source, Learned):
        return source
    if is_url(source) or os.path.isdir(as_path(source)):
        return learn(source)
    return Learned.load(source)


Against: TypeAlias = Learned | str | os.PathLike[str] | None
"""What good runs were like, as it is given: what `learn` returned, its file, or the recording of one; None for none."""


def first_steps(learned: Learned) -> Learned:
    """What good runs were like in their first steps, and of which layers they are made: by that a run is judged that goes on."""
    ranges = {key: usual for key, usual in learned.ranges.items() if key.phase == "early" or key.role == "layers"}
    return replace(learned, ranges=ranges)


class _Seen(NamedTuple):
    """The range of one run, and its typical value."""

    range: Range
    middle: float


def _ranges(known: Evidence) -> dict[Key, _Seen]:
    found: dict[Key, _Seen] = {}
    for trait in traits(known):
        middle, first = median(trait.values), found.get(trait.key._replace(phase="early"))
        # What moved far in a good run may move at another pace in the next.
        moved = abs(middle - first.middle) if first is not None and trait.paced else 0.0
        ends = _quantile(trait.values, 0.1), _quantile(trait.values, 0.9)
        found[trait.key] = _Seen(Range(*ends, trait.margin + _PACE * moved), middle)
    return found


def _quantile(values: Sequence[float], share: float) -> float:
    ordered = sorted(values)
    return ordered[round(share * (len(ordered) - 1))]


def _joined(each: Sequence[_Seen]) -> Range:
    """One range of several runs, with a margin that is larger by how much they differ."""
    ranges, middles = [seen.range for seen in each], [seen.middle for seen in each]
    margin = max(one.margin for one in ranges) + max(middles) - min(middles)
    return Range(min(one.low for one in ranges), max(one.high for one in ranges), margin)


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
            more = f"the {role} of {len(alike) - 1} more layers left their ranges, too"
            found.append(
                worst._replace(what=f"{worst.what}; {f'{len(alike) - 1} more layers differ' if role == 'layers' else more}")
            )
        else:
            found += alike
    return found


def _parsed(content: bytes, path: str) -> Learned:
    """What a file holds; raises what `Learned.load` raises."""
    try:
        found = json.loads(content.decode("utf-8"), parse_constant=_refused)
    except (ValueError, RecursionError) as error:
        raise NotARecordingError(f"{path} is not what recorders.learn wrote: {error}") from error
    if not isinstance(found, dict) or found.get("format") != _FORMAT:
        raise NotARecordingError(f"{path} is not what recorders.learn wrote: it does not say that its format is {_FORMAT!r}")
    if isinstance(found.get("schema"), int) and found["schema"] > _SCHEMA:
        raise SchemaError(f"{path} has schema {found['schema']}; this version knows {_SCHEMA}: install a newer torch-recorders")
    steps, rows = found.get("steps"), found.get("ranges")
    counts: list[Any] = [found.get("runs"), *(steps if isinstance(steps, list) else [])]
    sound = len(counts) == 3 and all(type(count) is int and 0 <= count < 2**53 for count in counts)
    if not sound or type(found.get("schema")) is not int or not isinstance(rows, list):
        raise CorruptRecordingError(f"{path} is damaged in its head: learn from the good runs again")
    ranges: dict[Key, Range] = {}
    for number, row in enumerate(rows, start=1):
        if not _is_row(row):
            raise CorruptRecordingError(f"{path} is damaged in row {number} of its ranges: learn from the good runs again")
        ranges[Key(*row[:4])] = Range(*map(float, row[4:]))
    runs, least, most = counts
    return Learned(runs, (least, most), ranges)


def _is_row(row: Any) -> bool:
    """Whether it has the names of a key and the numbers of a range."""
    if not isinstance(row, list) or len(row) != 7:
        return False
    names, numbers = row[:4], row[4:]
    if not all(isinstance(name, str) and len(name) <= _MAX_NAME for name in names):
        return False
    # Logarithms, losses and inputs are far from this; the difference of two numbers must be finite, too.
    if not all(type(number) in (int, float) and abs(number) < 1e300 for number in numbers):
        return False
    return bool(numbers[0] <= numbers[1] and numbers[2] >= 0)


def _refused(constant: str) -> float:
    raise ValueError(f"it holds {constant}")
