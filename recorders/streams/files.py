"""StreamFiles: what the files of a stream hold: the committed shards, their places, and whether they are whole."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from recorders.errors import CorruptRecordingError
from recorders.recordings.atomic_files import as_path
from recorders.recordings.display import Rows, ShownAsTable, shown_name
from recorders.streams.index import Kind, read_index
from recorders.streams.parts import PartReader

__all__ = ["StreamFiles"]


class StreamFiles(ShownAsTable):
    """The committed shards of the stream in a folder.

    Attributes:
        path: the folder.
        shards: those that were committed when it was made, or refreshed.

    Raises:
        RecordingNotFoundError, NotARecordingError: there is no stream.
        CorruptRecordingError, SchemaError: its index cannot be read.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(as_path(path)).absolute()
        self.shards, self._end = read_index(self.path)
        self._readers: dict[tuple[int, str], PartReader] = {}

    def refresh(self) -> None:
        """Takes in the shards that were committed since."""
        found, self._end = read_index(self.path, self._end, len(self.shards))
        self.shards = [*self.shards, *found]

    def __iter__(self) -> Iterator[str]:
        """The names of all places, in the order in which they came."""
        return iter(dict.fromkeys(place for shard in self.shards for place in shard.parts))

    def kind(self, place: str) -> Kind:
        """What stays the same for all rows of a place."""
        return next(shard.parts[place].kind for shard in self.shards if place in shard.parts)

    def rows(self, place: str) -> int:
        """How many rows a place has."""
        return sum(shard.parts[place].rows for shard in self.shards if place in shard.parts)

    @property
    def batches(self) -> int:
        """How many batches are committed."""
        return self.shards[-1].batches if self.shards else 0

    def reader(self, shard: int, place: str) -> PartReader:
        """The rows of a place in a shard; its file is mapped once."""
        found = self._readers.get((shard, place))
        if found is None:
            found = self._readers[shard, place] = PartReader(self.path, place, self.shards[shard].parts[place])
        return found

    def verify(self) -> dict[str, str]:
        """Reads all of it; returns why a part is damaged, by shard and place. If it is whole, that is empty."""
        damaged = {}
        for shard in self.shards:
            for place in shard.parts:
                try:
                    PartReader(self.path, place, shard.parts[place]).check()
                except CorruptRecordingError as error:
                    damaged[f"{place!r} in shard {shard.number}"] = str(error)
        return damaged

    def title_shown(self) -> str:
        return f"stream {str(self.path)!r}: {self.summary()}"

    def summary(self) -> str:
        """How much it holds."""
        rows = sum(map(self.rows, self))
        dropped = f", {self.shards[-1].dropped:,} rows dropped" if self.shards and self.shards[-1].dropped else ""
        return f"{rows:,} rows of {len([*self])} places in {len(self.shards)} shards, {self.batches:,} batches{dropped}"

    def rows_shown(self, names: Sequence[str] | None = None) -> Rows:
        """One row for each place, or for some."""
        chosen = [*self] if names is None else names
        headings = ("place", "dtype", "shape of a row", "id columns", "rows")
        return headings, map(self._row, chosen), len(chosen)

    def _row(self, place: str) -> list[Sequence[str]]:
        kind = self.kind(place)
        return [(shown_name(place), kind.dtype, str(list(kind.shape)), str(kind.columns), f"{self.rows(place):,}")]

    def as_data(self, names: Iterable[str]) -> dict[str, Any]:
        """What `rows_shown` says, for JSON."""
        places = {}
        for place in names:
            kind = self.kind(place)
            places[place] = {"rows": self.rows(place), "dtype": kind.dtype, "shape": kind.shape, "id_columns": kind.columns}
        dropped = self.shards[-1].dropped if self.shards else 0
        return {"kind": "stream", "shards": len(self.shards), "batches": self.batches, "dropped": dropped, "places": places}

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_readers": {}}  # each process maps the files itself
