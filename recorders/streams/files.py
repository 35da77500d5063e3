"""StreamFiles: what the files of a stream hold: the committed shards, their places, and whether they are whole."""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
import weakref
from collections.abc import Iterable, Iterator, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

from recorders.errors import CorruptRecordingError, NotARecordingError, RecordingNotFoundError
from recorders.recordings.atomic_files import as_path, is_url
from recorders.recordings.display import Rows, ShownAsTable, shown_name
from recorders.recordings.storage.remote import fetch_file
from recorders.streams.index import INDEX, Kind, Shard, read_index
from recorders.streams.parts import OpenFile, PartReader

OPEN = 16
"""How many files are kept open, which systems limit; to open one again takes microseconds."""


class StreamFiles(ShownAsTable):
    """The committed shards of a stream. Of one at a URL, a file is fetched into a temporary folder when it is read first.

    Attributes:
        path: the folder, or the URL.
        shards: those that were committed when it was made, or refreshed.

    Raises:
        RecordingNotFoundError, NotARecordingError: there is no stream.
        CorruptRecordingError, SchemaError: its index cannot be read.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = os.fspath(path) if is_url(path) else Path(as_path(path)).absolute()
        self.shards: list[Shard] = []
        self._end, self._folder = 0, self._local_folder()
        self._readers: dict[tuple[int, str], PartReader] = {}
        self._opened = lru_cache(OPEN)(OpenFile)
        self.refresh()

    def refresh(self) -> None:
        """Takes in the shards that were committed since."""
        if isinstance(self.path, str):
            try:
                self._fetch(INDEX)
            except RecordingNotFoundError as error:
                raise NotARecordingError(f"{self.path} holds no stream: there is no {INDEX} in it") from error
        found, self._end = read_index(self._folder, self._end, len(self.shards), str(self.path))
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

    @property
    def dropped(self) -> int:
        """How many rows had been dropped when the last shard was committed."""
        return self.shards[-1].dropped if self.shards else 0

    def reader(self, shard: int, place: str) -> PartReader:
        """The rows of a place in a shard; its file is mapped once."""
        found = self._readers.get((shard, place))
        if found is None:
            part = self.shards[shard].parts[place]
            if isinstance(self.path, str) and not (self._folder / part.file).exists():
                with contextlib.suppress(RecordingNotFoundError):  # the reader tells which rows are missing
                    self._fetch(part.file)
            found = PartReader(self._folder / part.file, f"{self.path}/{part.file}", place, part, self._opened)
            self._readers[shard, place] = found
        return found

    def expect(self, shard: int, place: str, spans: Sequence[tuple[int, int]]) -> None:
        """Lets the system read rows soon; of a stream at a URL only those in files that are here."""
        if isinstance(self.path, Path) or (shard, place) in self._readers:
            self.reader(shard, place).expect(spans)

    def verify(self) -> dict[str, str]:
        """Reads all of it; returns why a part is damaged, by shard and place. If it is whole, that is empty."""
        damaged = {}
        for shard in self.shards:
            for place in shard.parts:
                try:
                    self.reader(shard.number, place).check()
                except CorruptRecordingError as error:
                    damaged[f"{place!r} in shard {shard.number}"] = str(error)
        return damaged

    def title_shown(self) -> str:
        return f"stream {str(self.path)!r}: {self.summary()}"

    def summary(self) -> str:
        """How much it holds."""
        rows = sum(map(self.rows, self))
        dropped = f", {self.dropped:,} rows dropped" if self.dropped else ""
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
        counts = {"shards": len(self.shards), "batches": self.batches, "dropped": self.dropped}
        return {"kind": "stream", **counts, "places": places}

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_readers": {}, "_opened": None, "_folder": None}  # each process fetches and maps the files itself

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self._folder, self._opened = self._local_folder(), lru_cache(OPEN)(OpenFile)

    def _local_folder(self) -> Path:
        """Where the files are, or will be fetched to."""
        if isinstance(self.path, Path):
            return self.path
        folder = tempfile.mkdtemp()
        weakref.finalize(self, _remove, folder, os.getpid())
        return Path(folder)

    def _fetch(self, file: str) -> None:
        """Copies a file from the URL, whole or not at all: others may read it, or fetch it, too."""
        handle, draft = tempfile.mkstemp(dir=self._folder)
        os.close(handle)
        fetch_file(f"{str(self.path).rstrip('/')}/{file}", draft)
        os.replace(draft, self._folder / file)


def _remove(folder: str, process: int) -> None:
    """Removes what was fetched, but not in a forked process, which shares it."""
    if os.getpid() == process:
        shutil.rmtree(folder, ignore_errors=True)
