"""`recorders merge`: several recordings as one."""

from __future__ import annotations

from argparse import ArgumentParser
from collections.abc import Sequence
from pathlib import Path

from recorders.cli.output import UsageError, print_written, working
from recorders.cli.sources import add_source, place
from recorders.errors import StorageError
from recorders.recordings.atomic_files import as_path, is_url
from recorders.recordings.storage import tools


def add_arguments(parser: ArgumentParser) -> None:
    """Adds what `run` takes."""
    add_source(parser, "paths", of="recordings, earliest first", nargs="+")
    parser.add_argument("-o", "--to", type=place, required=True, metavar="TO", help="the folder or URL of the merged recording")
    parser.add_argument("--keep", action="store_true", help="keep names that only some of them hold")


def run(paths: Sequence[str], to: str, keep: bool = False, as_json: bool = False) -> None:
    """Merge recordings, as if one process had recorded all of it."""
    if len(paths) < 2:
        raise UsageError("give two recordings or more")
    target = Path() if is_url(to) else Path(as_path(to))
    if not is_url(to) and target.exists() and any(target.iterdir() if target.is_dir() else [target]):
        raise StorageError(f"{to} exists already: choose another folder, or remove it")
    merged = tools.merge(paths, missing="keep" if keep else "error")
    with working(f"merging {len(paths)} recordings of {len(merged)} subrecorders"):
        print_written([merged.save(to)], as_json, subrecorders=len(merged))
