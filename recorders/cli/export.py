"""`recorders export`: everything as one table, for other programs."""

from __future__ import annotations

import csv
import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import typer

from recorders.cli.sources import Names, Source, open_source, selected, working
from recorders.recordings.atomic_files import written_whole
from recorders.recordings.export import COLUMNS, rows
from recorders.recordings.recording import Recording
from recorders.watch.timeline import Timeline
from recorders.watch.visualizers.visualizer import require

__all__ = ["export"]

_BLOCK = 100_000  # rows written at once

Row = tuple[Any, ...]
Output = Annotated[Path | None, typer.Option(help="Write a file of this kind.", show_default=False)]


def export(path: Source, csv: Output = None, parquet: Output = None, names: Names = None) -> None:
    """Write a recording or a timeline as one table, with one number in each row.

    Columns of a recording: name, leaf, statistic, index, value. Columns of a timeline: tick, name, statistic, value.
    """
    if csv is None and parquet is None:
        raise typer.BadParameter("give --csv FILE or --parquet FILE")
    source = open_source(path)
    with working("writing"):
        for target, write in ((csv, _write_csv), (parquet, _write_parquet)):
            if target is not None:
                with written_whole(target) as draft:
                    write(draft, *_table(source, names))
                print(target)


def _table(source: Recording | Timeline, names: str | None) -> tuple[dict[str, str], Iterator[Row]]:
    """The columns with their types, and the rows."""
    if isinstance(source, Timeline):
        columns = {"tick": "int64", "name": "string", "statistic": "string", "value": "float64"}
        return columns, _timeline_rows(source, selected(source.names(), names))
    return COLUMNS, rows(source, selected(list(source), names))


def _timeline_rows(timeline: Timeline, names: list[str]) -> Iterator[Row]:
    for name in names:
        for statistic in timeline.statistics(name):
            yield from ((tick, name, statistic, value) for tick, value in zip(*timeline.series(name, statistic), strict=True))


def _write_csv(path: Path, columns: dict[str, str], lines: Iterator[Row]) -> None:
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        writer.writerow(columns)
        writer.writerows(lines)


def _write_parquet(path: Path, columns: dict[str, str], lines: Iterator[Row]) -> None:
    arrow, parquet = require("pyarrow", "parquet"), require("pyarrow.parquet", "parquet")
    schema = arrow.schema([(name, arrow.type_for_alias(kind)) for name, kind in columns.items()])
    with parquet.ParquetWriter(path, schema) as writer:
        while block := list(itertools.islice(lines, _BLOCK)):
            writer.write_table(arrow.table([list(column) for column in zip(*block, strict=True)], schema=schema))
