"""`recorders check`: whether files are whole, and what is whole of damaged ones."""

from __future__ import annotations

import sys
from argparse import ArgumentParser
from collections.abc import Mapping, Sequence
from typing import Any

from recorders.cli.output import UsageError, print_json, working
from recorders.cli.sources import Source, add_source, open_source, place
from recorders.errors import CorruptRecordingError, NotARecordingError, RecorderError
from recorders.recordings.display import printable
from recorders.recordings.recording import Recording
from recorders.recordings.storage import tools
from recorders.streams.files import StreamFiles
from recorders.watch.timeline import Timeline


def add_arguments(parser: ArgumentParser) -> None:
    """Adds what `run` takes."""
    add_source(parser, "paths", of="a recording, a timeline or a stream", nargs="+")
    parser.add_argument("--repair", type=place, metavar="TO", help="write what is whole of one recording into the folder TO")


def run(paths: Sequence[str], repair: str | None = None, as_json: bool = False) -> int:
    """Check that recordings, timelines and streams are whole: every file, every checksum. The status is 1 if one is not."""
    if repair is not None:
        if len(paths) > 1:
            raise UsageError("--repair takes one recording")
        return _repair(paths[0], repair, as_json)
    found = {path: _checked(path) for path in paths}
    if as_json:
        print_json(found)
    else:
        for path, entry in found.items():
            print(printable(f"{path}: {entry['says']}"), file=sys.stdout if entry["whole"] else sys.stderr)
    return int(not all(entry["whole"] for entry in found.values()))


def _checked(path: str) -> dict[str, Any]:
    try:
        with working(f"checking {path}"):
            source, damaged = _read(path)
    except (RecorderError, OSError) as error:
        return {"whole": False, "says": f"FAILED: {error}", "damaged": {}}
    if source is not None and not damaged:
        return {"whole": True, "says": f"whole: {_holds(source)}", "damaged": {}}
    some = "; ".join(f"{'tick ' * isinstance(part, int)}{part}: {reason}" for part, reason in list(damaged.items())[:20])
    remedy = "" if source else f"; recorders check {path} --repair NEW keeps the others"
    says = f"FAILED: {len(damaged)} parts are damaged, the others are whole: {some}{remedy}"
    return {"whole": False, "says": says, "damaged": damaged}


def _read(path: str) -> tuple[Source | None, Mapping[Any, str]]:
    """What is there, and what of it is damaged. A recording that can be loaded is whole; of a damaged one there is None."""
    try:
        source = open_source(path)
        if isinstance(source, Recording):
            list(source.values())  # those of the layout "packed" are checked one by one, when they are looked at
    except CorruptRecordingError:
        try:
            return None, tools.verify(path)
        except NotARecordingError:
            pass
        raise
    return source, {} if isinstance(source, Recording) else source.verify()


def _holds(source: Source) -> str:
    if isinstance(source, Timeline):
        return f"{len(source.ticks())} ticks of {len(source)} names"
    if isinstance(source, StreamFiles):
        return source.summary()
    return f"{len(source)} subrecorders, {sum(part.samples for part in source.values()):,} observations"


def _repair(path: str, to: str, as_json: bool) -> int:
    left_out = tools.repair(path, to)
    if as_json:
        print_json({"written": [to], "left_out": left_out})
        return 0
    for name, reason in left_out.items():
        print(printable(f"left out {name!r}: {reason}"))
    print(printable(f"{to}: {len(left_out)} parts are left out" if left_out else f"{to}: nothing was damaged"))
    return 0
