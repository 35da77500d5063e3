"""`recorders export`: everything as one table, for other programs."""

from __future__ import annotations

import csv
import itertools
import sys
from argparse import ArgumentParser
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import IO, Any

from recorders.cli.output import UsageError, print_json, print_written, working
from recorders.cli.sources import Source, add_names, add_source, chosen_names, file_to_write, open_source
from recorders.errors import NotARecordingError, require
from recorders.recordings.atomic_files import written_whole
from recorders.recordings.display import printable
from recorders.recordings.export import COLUMNS, rows
from recorders.streams.files import StreamFiles
from recorders.watch.timeline import Timeline

_BLOCK = 100_000  # rows written at once

Row = tuple[Any, ...]


def add_arguments(parser: ArgumentParser) -> None:
    """Adds what `run` takes."""
    add_source(parser, "path")
    add_names(parser)
    kinds = "FILE.csv, FILE.parquet, csv:FILE or parquet:FILE; again for several. The default is -, CSV on the standard output"
    parser.add_argument("-o", "--to", action="append", metavar="FILE", help=kinds)


def run(path: str, names: str | None = None, to: Sequence[str] | None = None, as_json: bool = False) -> None:
    """Write a recording or a timeline as one table, with one number in each row.

    Columns of a recording: name, leaf, statistic, index, value; along several axes the index is a text such as "0,2". Columns of a
    timeline: tick, name, statistic, value. With `--json` the standard output has them as `columns` and `rows`.
    """
    targets = [_target(text) for text in to or ["-"]]
    source = open_source(path)
    drafts = [None if file == "-" else file_to_write(file, [path]) for _, file in targets]
    for (kind, _), file in zip(targets, drafts, strict=True):
        columns, lines = _table(source, names, path)
        if file is None:
            _print(columns, lines, as_json)
            continue
        with working("writing"), written_whole(file) as draft:
            if kind == "parquet":
                _write_parquet(draft, columns, lines)
            else:
                with draft.open("w", newline="", encoding="utf-8", errors="backslashreplace") as opened:
                    _write_csv(opened, columns, lines)
    if None not in drafts:
        print_written([file for _, file in targets], as_json)


def _target(text: str) -> tuple[str, str]:
    """The kind of a table, and its file; "-" for the standard output."""
    kind, _, file = text.partition(":")
    if text == "-" or kind == "csv":
        return "csv", file or "-"
    if kind != "parquet":
        kind, file = Path(text).suffix[1:], text
    if kind not in ("csv", "parquet") or not file or file == "-":
        raise UsageError(f"--to {text}: give FILE.csv, FILE.parquet, csv:FILE or parquet:FILE, or - for CSV on the standard output")
    return kind, file


def _table(source: Source, names: str | None, path: str) -> tuple[dict[str, str], Iterator[Row]]:
    """The columns with their types, and the rows."""
    if isinstance(source, StreamFiles):
        raise NotARecordingError(f"{path} is a stream, whose rows are safetensors already: read them with StreamDataset({path!r})")
    if isinstance(source, Timeline):
        columns = {"tick": "int64", "name": "string", "statistic": "string", "value": "float64"}
        return columns, _timeline_rows(source, chosen_names(source, names))
    return COLUMNS | {"index": "string"}, rows(source, chosen_names(source, names))


def _timeline_rows(timeline: Timeline, names: list[str]) -> Iterator[Row]:
    for name in names:
        for statistic in timeline.statistics(name):
            yield from ((tick, name, statistic, value) for tick, value in zip(*timeline.series(name, statistic), strict=True))


def _print(columns: Iterable[str], lines: Iterator[Row], as_json: bool) -> None:
    if as_json:
        print_json({"columns": [*columns], "rows": [*map(list, lines)]})
        return
    if sys.stdout.isatty():  # which would obey what a name may hold
        lines = (tuple(printable(cell) if isinstance(cell, str) else cell for cell in line) for line in lines)
    _write_csv(sys.stdout, columns, lines)


def _write_csv(file: IO[str], columns: Iterable[str], lines: Iterator[Row]) -> None:
    writer = csv.writer(file, lineterminator="\r\n")
    writer.writerow(columns)
    writer.writerows(lines)


def _write_parquet(path: Path, columns: dict[str, str], lines: Iterator[Row]) -> None:
    arrow, parquet = require("pyarrow", "parquet"), require("pyarrow.parquet", "parquet")
    schema = arrow.schema([(name, arrow.type_for_alias(kind)) for name, kind in columns.items()])
    with parquet.ParquetWriter(path, schema) as writer:
        while block := list(itertools.islice(lines, _BLOCK)):
            writer.write_table(arrow.table([list(column) for column in zip(*block, strict=True)], schema=schema))
