"""learn(): what good runs were like, for `findings(..., against=)`: ranges of statistics, kept in a small file."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
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
from recorders.watch.diagnosis.traits import Key, length, traits

_SCHEMA = 1
_FORMAT = "torch-recorders learned"
_MAX_BYTES, _MAX_NAME = 2**24, 1000
_PACE = 0.5
"""How much of the way that a good run went since its first steps another one may be ahead or behind."""


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
