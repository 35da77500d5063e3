"""`recorders show`: what a recording, a timeline or a stream holds; of one that grows, as it grows."""

from __future__ import annotations

import itertools
import sys
import time
from argparse import ArgumentParser
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any

from recorders.cli.output import UsageError, console, filled, print_json
from recorders.cli.sources import Source, add_names, add_source, at_least, chosen_names, kind_of, open_source
from recorders.errors import NotARecordingError
from recorders.recordings.atomic_files import is_url
from recorders.recordings.display import Rows, printable
from recorders.recordings.export import as_data
from recorders.recordings.recording import Recording
from recorders.streams.files import StreamFiles
from recorders.watch.charts import ChartView, axis_of, charts_of
from recorders.watch.diagnosis.finding import Findings
from recorders.watch.diagnosis.findings import findings as found_in
from recorders.watch.diagnosis.learned import Learned, learn, learned_at
from recorders.watch.replay import as_of
from recorders.watch.timeline import Timeline
from recorders.watch.visualizers.live import LiveTable, rendered
from recorders.watch.visualizers.screen import screen_of
from recorders.watch.visualizers.text import TextVisualizer
from recorders.watch.visualizers.visualizer import finish

_LISTED = 64  # elements of one tensor in JSON


def add_arguments(parser: ArgumentParser) -> None:
    """Adds what `run` takes."""
    add_source(parser, "path", of="a recording, a timeline or a stream")
    add_names(parser)
    parser.add_argument("--findings", action="store_true", help="only what is likely wrong; the status is 1 if anything is")
    good = "what good runs were like: the recording of one, and once more for each further one; or one file of recorders.learn"
    parser.add_argument("--against", action="append", metavar="GOOD", help=good)
    parser.add_argument("--at", type=int, metavar="TICK", help="a timeline as it was after this tick")
    parser.add_argument("--follow", action="store_true", help="a timeline or a stream as it grows, until Ctrl+C")
    parser.add_argument("--every", type=at_least(0.1, float), default=1.0, help="seconds between two looks")
    until = "with --follow: stop when this tick of a timeline or a later one, or so many batches of a stream, are there"
    parser.add_argument("--until", type=at_least(0), metavar="N", help=until)


def run(
    path: str,
    names: str | None = None,
    findings: bool = False,
    against: Sequence[str] | None = None,
    at: int | None = None,
    follow: bool = False,
    every: float = 1.0,
    until: int | None = None,
    as_json: bool = False,
) -> int:
    """Show what a recording, a timeline or a stream holds; `--follow` one that grows; `--findings` only what is likely wrong."""
    if findings and (follow or names is not None):
        raise UsageError("--findings tells of all that was recorded by now: leave --follow and --names out")
    source = open_source(path)
    if against and not isinstance(source, Recording):
        raise NotARecordingError(f"{path} is {kind_of(source)}: only a recording is compared with good runs; leave out --against")
    good = None if not against else learned_at(against[0]) if len(against) == 1 else learn(*against)
    if at is not None:
        if not isinstance(source, Timeline):
            raise NotARecordingError(f"{path} is {kind_of(source)}, which has no ticks: show it without --at")
        source = as_of(source, at)
    if findings:
        return _show_findings(source, path, as_json, good)
    if not follow:
        _show(source, names, as_json, good)
    elif isinstance(source, Recording) or at is not None or (isinstance(source, Timeline) and is_url(path)):
        what = "is a recording, which" if isinstance(source, Recording) else "with --at, or at a URL,"
        raise NotARecordingError(f"{path} {what} does not grow: show it without --follow")
    elif as_json:
        _follow_as_lines(source, names, every, until)
    else:
        _follow(source, names, every, until)
    return 0


def _show(source: Source, names: str | None, as_json: bool, good: Learned | None) -> None:
    faults = None if isinstance(source, StreamFiles) else found_in(source, against=good)
    if as_json:
        print_json(_data(source, names) | (_judged(faults) if faults is not None else {}))
        return
    console().print(filled(*_rows(source, names)))
    if faults is not None:
        console().print(f"\n{printable(faults)}")


def _show_findings(source: Source, path: str, as_json: bool, good: Learned | None) -> int:
    """Prints what is likely wrong; returns 1 if anything is."""
    if isinstance(source, StreamFiles):
        raise NotARecordingError(f"{path} is a stream, in which nobody looks for faults: show a recording or a timeline")
    faults = found_in(source, against=good)
    if as_json:
        print_json(_judged(faults))
        return int(bool(faults))
    axis = axis_of(source) if isinstance(source, Timeline) else "step"
    for one in (*faults, *faults.notices):
        print(printable(f"{one.severity}: {one.layer}: {one.what}" + ("" if one.since is None else f", since {axis} {one.since}")))
        if one.causes:
            print(printable(f"  likely: {one.likely}"))
        print(printable(f"  try: {one.remedy}"))
    print(printable(faults.title_shown()))
    return int(bool(faults))


def _judged(faults: Findings) -> dict[str, Any]:
    """Findings as data."""
    found, notices = [*map(asdict, faults)], [*map(asdict, faults.notices)]
    return {"findings": found, "notices": notices, "examined": faults.examined, "unexamined": faults.unexamined}


def _rows(source: Source, names: str | None) -> tuple[Rows, int]:
    """The rows of the table, and how many of its last columns are numbers."""
    if isinstance(source, Recording):
        return _part(source, names).rows_shown(), 1
    return source.rows_shown(chosen_names([*source], names)), 2


def _data(source: Source, names: str | None) -> dict[str, Any]:
    """What the table says, as data."""
    if isinstance(source, Recording):
        return as_data(_part(source, names), _LISTED)
    chosen = chosen_names([*source], names)
    return source.as_data(chosen)


def _part(recording: Recording, names: str | None) -> Recording:
    return replace(recording, subrecordings={name: recording[name] for name in chosen_names(recording, names)})


def _follow(source: Timeline | StreamFiles, names: str | None, every: float, until: int | None) -> None:
    """In a terminal one table, redrawn in place, which is that of an inspector if there are charts; else tables as they come."""
    screen = screen_of(sys.stdout)
    before: object = ""
    table = LiveTable(screen) if screen is not None else TextVisualizer(live=False)
    known: Mapping[int, object] = {}
    try:
        for reached in _looks(source, every, until):
            if isinstance(source, Timeline) and (views := _views(source, names)):
                for one in _unseen(reached, known)[0 if known else -1 :]:
                    table.show(one, views)
                known = reached
                if isinstance(table, LiveTable):
                    table.refresh()
            elif (now := _now(source, names)) != before:
                shown, before = filled(*now) if now else printable(f"{source.path} is empty yet"), now
                console().print(shown) if screen is None else screen.put(source, rendered([shown], screen.size[0]))
    finally:
        finish(table)
        if screen is not None:
            screen.leave(source)


def _views(source: Timeline, names: str | None) -> list[ChartView]:
    """The charts of a timeline, with the layers that were chosen."""
    views = charts_of(source)
    chosen = set(chosen_names([*source], names)) if views and names is not None else set()
    if chosen:
        views = [replace(view, layers=tuple(one for one in view.layers if view.chart.row(one) in chosen)) for view in views]
    return [view for view in views if view.layers]


def _now(source: Timeline | StreamFiles, names: str | None) -> tuple[Rows, int] | None:
    """What the table says; None if there is nothing yet."""
    if not [*source]:
        return None
    (headings, rows, count), numbers = _rows(source, names)
    return (headings, [*map(list, rows)], count), numbers


def _follow_as_lines(source: Timeline | StreamFiles, names: str | None, every: float, until: int | None) -> None:
    """One line of JSON for each tick, and for each look at which a stream has more."""
    known: Mapping[int, object] = {}
    for reached in _looks(source, every, until):
        new, known = _unseen(reached, known), reached
        if new and isinstance(source, StreamFiles):
            print_json(source.as_data(chosen_names([*source], names)), indent=None)
        elif new and isinstance(source, Timeline):
            steps, chosen = source.steps(), set(chosen_names([*source], names))
            for one in new:
                values = {name: value for name, value in source.at(one).items() if name in chosen}
                print_json({"tick": one, "step": steps.get(one), "values": values}, indent=None)


def _unseen(reached: Mapping[int, object], known: Mapping[int, object]) -> list[int]:
    """The ticks from the first on that is new, or was written anew by a training that went back."""
    return [*itertools.dropwhile(lambda one: one in known and known[one] == reached[one], reached)]


def _looks(source: Timeline | StreamFiles, every: float, until: int | None) -> Iterator[Mapping[int, object]]:
    """The ticks of a timeline, ascending, with what was stored of each, or how many batches a stream has, at each look.

    The last look is that at which `until` is there.
    """
    while True:
        if isinstance(source, StreamFiles):
            source.refresh()
            reached: Mapping[int, object] = {source.batches: None}
            done = until is not None and source.batches >= until
        else:
            reached = source.stored_ticks()
            done = until is not None and any(tick >= until for tick in reached)
        yield reached
        if done:
            return
        time.sleep(every)
