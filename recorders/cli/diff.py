"""`recorders diff`: where two runs part, and what changed between them."""

from __future__ import annotations

import importlib
import importlib.util
import math
from argparse import ArgumentParser, ArgumentTypeError
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path

from recorders.cli.output import UsageError, console, filled, print_json
from recorders.cli.sources import add_source, at_least, kind_of, open_source
from recorders.errors import NotARecordingError
from recorders.recordings.display import number, printable, shown_name
from recorders.recordings.recording import Recording
from recorders.streams.files import StreamFiles
from recorders.watch.compare import Change, Comparison, compare
from recorders.watch.divergence.runs.answer import RunDivergence
from recorders.watch.divergence.runs.run import tells_steps
from recorders.watch.divergence.runs.search import divergence
from recorders.watch.divergence.runs.steps import Replay, bisect_steps
from recorders.watch.timeline import Timeline

_FAIL_OVER = "end with status 1 if any change is larger, or a layer, statistic or shape is not the same in both, or the runs part"
_MAP = "a module of the second run, if it has another name and is not found by what it computes; again for several"
_REPEAT = "the first run once more, which shows what noise is"
_BISECT = (
    "if steps between were not recorded: a function that replays them, as recorders.bisect_steps calls it, "
    "such as train.py:replay; it is imported and called"
)


def add_arguments(parser: ArgumentParser) -> None:
    """Adds what `run` takes."""
    add_source(parser, "first", "second")
    parser.add_argument("--tick", type=int, help="the tick of two timelines; the last in common if none is given")
    parser.add_argument("--top", type=at_least(1), default=20, metavar="N", help="the number of changes to show")
    parser.add_argument("--fail-over", type=at_least(0, float), default=math.inf, metavar="SIZE", help=_FAIL_OVER)
    parser.add_argument("--map", dest="names", action="append", type=_pair, metavar="NAME=NAME", help=_MAP)
    parser.add_argument("--repeat", metavar="PATH", help=_REPEAT)
    parser.add_argument("--picture", metavar="FILE", help="draw how far the runs are apart, over steps and over layers")
    parser.add_argument("--bisect-steps", dest="replay", metavar="FILE:FUNCTION", help=_BISECT)


def run(
    first: str,
    second: str,
    tick: int | None = None,
    top: int = 20,
    fail_over: float = math.inf,
    names: Sequence[tuple[str, str]] | None = None,
    repeat: str | None = None,
    picture: str | None = None,
    replay: str | None = None,
    as_json: bool = False,
) -> int:
    """Show where two runs part, and what changed between two recordings or timelines, largest change first.

    Of runs that were recorded step by step, as by `presets.fingerprints`, it is the first step, phase and layer at which they part
    by more than noise. Changes of means and quartiles are given in standard deviations, others as the logarithm of the ratio. What
    only one has is listed, and shapes that differ.
    """
    one, other = open_source(first), open_source(second)
    if isinstance(one, StreamFiles) or isinstance(other, StreamFiles) or kind_of(one) != kind_of(other):
        kinds = f"{first} is {kind_of(one)} and {second} is {kind_of(other)}"
        raise NotARecordingError(f"{kinds}: give two of one kind")
    parted = None if tick is not None else _parted(one, other, dict(names or ()), repeat)
    if parted is None and (names or repeat or picture or replay):
        raise UsageError(f"{first} and {second} tell nothing step by step: record them with presets.fingerprints()")
    if parted and replay:
        parted = _replayed(parted, _function(replay), dict(names or ()))
    if parted is not None and picture:
        parted.figure().savefig(picture, dpi=120)
    found = compare(_without_steps(one), _without_steps(other), tick=tick)
    changes = [change for change in found.changes if change.score][:top]
    if as_json:
        lists = {
            "parted": None if parted is None else parted.as_data(),
            "changes": [asdict(change) for change in changes],
            "only_first": found.only_first,
            "only_second": found.only_second,
            "reshaped": [asdict(one) for one in found.reshaped],
        }
        print_json(lists)
    else:
        if parted is not None:
            for line in str(parted).splitlines():
                print(printable(line))
        if parted is None or changes or not found.is_comparable:
            _print(found, changes)
    return int(fail_over < math.inf and (found.exceeds(fail_over) or bool(parted)))


def _pair(text: str) -> tuple[str, str]:
    """The type of an argument that maps a name to another."""
    first, equals, second = text.partition("=")
    if not equals:
        raise ArgumentTypeError(f"{text} is not of the form NAME=NAME")
    return first, second


def _parted(
    one: Recording | Timeline, other: Recording | Timeline, names: Mapping[str, str], repeat: str | None
) -> RunDivergence | None:
    """Where two runs part; None if they tell nothing step by step."""
    again = None if repeat is None else open_source(repeat)
    if not (tells_steps(one) and tells_steps(other)):
        return None
    if isinstance(again, StreamFiles):
        raise NotARecordingError(f"{repeat} is {kind_of(again)}: give a run like the first")
    return divergence(one, other, names=names or None, repeat=again)


def _without_steps(source: Recording | Timeline) -> Recording | Timeline:
    """A recording without what it lists step by step, of which the differences of every number say nothing more."""
    if not isinstance(source, Recording) or not tells_steps(source):
        return source
    kept = {name: part for name, part in source.items() if part.monitor != "StepMonitor" and part.samples}
    return Recording({name: part for name, part in kept.items() if not tells_steps(Recording({name: part}))})


def _function(text: str) -> Replay:
    """The function of a file or a module, such as `train.py:replay`."""
    where, colon, name = text.rpartition(":")
    if not colon or not name.isidentifier():
        raise UsageError(f"--bisect-steps {text}: give a file and a function, such as train.py:replay")
    try:
        if where.endswith(".py"):
            spec = importlib.util.spec_from_file_location(Path(where).stem, where)
            module = importlib.util.module_from_spec(spec)  # type: ignore[arg-type]
            spec.loader.exec_module(module)  # type: ignore[union-attr]
        else:
            module = importlib.import_module(where)
        found: Replay = getattr(module, name)
    except (ImportError, OSError, AttributeError) as error:
        raise UsageError(f"--bisect-steps {text}: {error}") from error
    return found


def _replayed(parted: RunDivergence, replay: Replay, names: Mapping[str, str]) -> RunDivergence:
    """Where the runs part, if steps before that were not recorded."""
    before = [row.step for row in parted.growth if row.step < parted.step]
    equal = before[-1] if before else 0
    if parted.unit != "step" or parted.step - equal < 2:
        return parted
    return bisect_steps(replay, equal, parted.step, names=names or None)


def _print(found: Comparison, changes: list[Change]) -> None:
    screen = console()
    headings = ("name", "statistic", "at", "first", "second", "change")
    rows = [[_cells(change) for change in changes]]
    others = "" if found.is_comparable else " that both have in one shape"
    nothing = f"no difference in {len(found.changes)} statistics{others}"
    screen.print(filled((headings, rows, len(changes)), numbers=3) if changes else nothing)
    for line in found.rest():
        screen.print(printable(line))


def _cells(change: Change) -> list[str]:
    at = ", ".join(map(str, change.index))
    return [shown_name(change.name), change.statistic, at, number(change.first), number(change.second), f"{change.score:.2g}"]
