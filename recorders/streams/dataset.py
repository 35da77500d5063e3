"""StreamDataset: the rows of a stream, read lazily through memory maps."""

from __future__ import annotations

import copy
import os
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.utils.data import Dataset

from recorders.errors import SelectionError
from recorders.streams.files import StreamFiles
from recorders.streams.index import Kind, Shard
from recorders.streams.indexing import Index, positions
from recorders.streams.order import Shuffle

if TYPE_CHECKING:
    from typing_extensions import Self

__all__ = ["StreamDataset"]


class StreamDataset(Dataset[Any]):
    """The committed rows of one place of a stream, or of several, as a map-style dataset of `torch.utils.data`.

    `data[3]` is a row; `data[3:9]`, `data[::-1]`, `data[[3, 5]]` and `data[mask]` are rows stacked, in memory of their own: indices
    are those of NumPy's first axis, of Python, PyTorch or NumPy. Nothing is read before; what is read is compared with its checksum
    once. A stream may be read while it is written: `refresh` takes in what was committed since. A `DataLoader` with any number of
    workers reads each row once, because its sampler deals out the positions; `batches` is faster than stacking rows one by one.

    Args:
        path: the folder of the stream, or its URL, as for `load`: a file is fetched when a row of it is read first.
        places: a name; or several names, then an item is a dict by name of rows with equal ids. None if the stream has one place.
        shuffle: the seed of a shuffled order; None for the order in which rows were written.
        window: how many rows are shuffled together; see `shuffled`.
        ids: an item is a pair of the row and its id, which is int64 of shape (columns,).

    Attributes:
        path: the folder, or the URL.
        places: the names.

    Raises:
        SelectionError: the stream has no such place; the message lists those that it has.
        RecordingNotFoundError, NotARecordingError: there is no stream.
        CorruptRecordingError, SchemaError: its index cannot be read. Damaged rows raise when they are read.

    >>> import tempfile
    >>> from recorders import Stream
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     with Stream(folder) as stream:
    ...         _ = stream.put("x", torch.arange(6.0))
    ...     data = StreamDataset(folder, "x", shuffle=0)
    ...     len(data), data[:3].shape, data[:].sort().values
    (6, torch.Size([3]), tensor([0., 1., 2., 3., 4., 5.]))
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        places: str | Sequence[str] | None = None,
        *,
        shuffle: int | None = None,
        window: int | None = 1 << 16,
        ids: bool = False,
    ) -> None:
        self._files, self._with_ids = StreamFiles(path), ids
        self.path, known = self._files.path, [*self._files]
        if places is None:
            if len(known) != 1:
                raise SelectionError(f"{self.path} has {len(known)} places, so name one or several: {known[:20]}")
            places = known[0]
        self._single = isinstance(places, str)
        self.places = (places,) if isinstance(places, str) else tuple(places)
        if not self.places or (unknown := [place for place in self.places if place not in known]):
            raise SelectionError(f"{self.path} has no place {unknown if self.places else ()}; it has {known[:20]}")
        self._order(shuffle, window)
        self._joined: dict[int, dict[str, Tensor]] = {}
        self._starts = torch.zeros(1, dtype=torch.int64, device="cpu")
        self._extend(self._files.shards)

    def shuffled(self, seed: int | None, window: int | None = 1 << 16) -> Self:
        """A dataset of these rows in another order: one seed for each epoch. None gives the order in which they were written.

        Args:
            window: how many rows are shuffled together: runs of 256 neighbours from all over the stream fill a window, so memory
                maps are read in long pieces. None shuffles all rows uniformly, with 8 bytes of memory a row.
        """
        other = copy.copy(self)
        other._order(seed, window)
        return other

    def batches(self, size: int, *, drop_last: bool = False) -> Batches:
        """A dataset of batches of `size` rows, for `DataLoader(..., batch_size=None)` or to iterate over."""
        if type(size) is not int or size < 1:
            raise ValueError(f"batches({size!r}): give the number of rows of a batch")
        return Batches(self, size, drop_last)

    def refresh(self) -> int:
        """Takes in the shards that were committed since; returns how many rows there are now. A shuffled order is then another."""
        self._files.refresh()  # which shuffled datasets share
        self._extend(self._files.shards[len(self._starts) - 1 :])
        return len(self)

    @property
    def kinds(self) -> dict[str, Kind]:
        """The dtype and the shape of the rows of each place."""
        return {place: self._files.kind(place) for place in self.places}

    def __len__(self) -> int:
        return int(self._starts[-1])

    def __getitem__(self, index: Index) -> Any:
        chosen = positions(index, len(self))
        found = self._read(chosen.flatten())
        return found if chosen.ndim == 1 else _map(found, lambda rows: rows.reshape(chosen.shape + rows.shape[1:]))

    def __getitems__(self, indices: list[int]) -> list[Any]:
        """What a `DataLoader` calls for the rows of a batch."""
        return list(_unstack(self[indices]))

    def __iter__(self) -> Iterator[Any]:
        for batch in self.batches(1024):
            yield from _unstack(batch)

    def __repr__(self) -> str:
        first = next(iter(self.kinds.values()))
        return (
            f"StreamDataset({str(self.path)!r}, {', '.join(map(repr, self.places))}): "
            f"{len(self)} rows of shape {first.shape} in {first.dtype}"
        )

    def _order(self, seed: int | None, window: int | None) -> None:
        if seed is not None and (isinstance(seed, bool) or not isinstance(seed, int)):
            raise TypeError(f"shuffle={seed!r}: give a whole number, the seed, or None")
        if window is not None and (type(window) is not int or window < 1):
            raise ValueError(f"window={window!r}: give a number of rows, or None for all")
        self._shuffle = None if seed is None else Shuffle(seed, window)

    def _extend(self, shards: Iterable[Shard]) -> None:
        counts = torch.tensor([self._rows_of(shard) for shard in shards], dtype=torch.int64, device="cpu")
        self._starts = torch.cat([self._starts, self._starts[-1] + counts.cumsum(0)])

    def _rows_of(self, shard: Shard) -> int:
        """How many rows all places have in the shard, by their ids."""
        parts = [shard.parts.get(place) for place in self.places]
        present = [part for part in parts if part is not None]
        if len(present) < len(parts):
            return 0
        if len({(part.rows, part.ids_crc) for part in present}) > 1:
            ids = {
                name: self._files.reader(shard.number, name).ids(torch.arange(shard.parts[name].rows, device="cpu"))
                for name in self.places
            }
            self._joined[shard.number] = join(ids)
            return len(self._joined[shard.number][self.places[0]])
        return present[0].rows

    def _read(self, chosen: Tensor) -> Any:
        rows = chosen if self._shuffle is None else self._shuffle(chosen, len(self))
        shards, order = (torch.searchsorted(self._starts, rows, right=True) - 1).sort(stable=True)
        counts = torch.bincount(shards, minlength=len(self._files.shards))
        inside = torch.split_with_sizes(rows[order] - self._starts[shards], counts.tolist())
        back = None if counts.max() == len(rows) else order.argsort()  # rows of one shard are in order already
        found: dict[str, Tensor] = {}
        for place, kind in self.kinds.items():
            raw = torch.empty((len(rows), kind.row_bytes), dtype=torch.uint8, device="cpu")
            ids = torch.empty((len(rows), kind.columns), dtype=torch.int64, device="cpu")
            begin = 0
            for shard in counts.nonzero().flatten().tolist():
                chosen = self._joined[shard][place][inside[shard]] if shard in self._joined else inside[shard]
                reader, end = self._files.reader(shard, place), begin + len(chosen)
                reader.rows(chosen, out=raw[begin:end])
                if self._with_ids:
                    ids[begin:end] = reader.ids(chosen)
                begin = end
            if back is not None:
                raw, ids = raw.index_select(0, back), ids.index_select(0, back)
            found[place] = raw.view(getattr(torch, kind.dtype)).view(len(rows), *kind.shape)
        item: Any = found[self.places[0]] if self._single else found
        return (item, ids) if self._with_ids else item


class Batches(Dataset[Any]):
    """The rows of a dataset, in its order, as batches."""

    def __init__(self, data: StreamDataset, size: int, drop_last: bool) -> None:
        self._data, self._size, self._drop_last = data, size, drop_last

    def __len__(self) -> int:
        return len(self._data) // self._size if self._drop_last else -(-len(self._data) // self._size)

    def __getitem__(self, index: int) -> Any:
        if not -len(self) <= index < len(self):
            raise IndexError(f"batch {index} of {len(self)}")
        start = index % len(self) * self._size
        return self._data[start : start + self._size]

    def __iter__(self) -> Iterator[Any]:
        return (self[index] for index in range(len(self)))


def join(ids: dict[str, Tensor]) -> dict[str, Tensor]:
    """By place, the rows whose ids all places have, in the order of the first; the n-th of equal ids goes with the n-th.

    >>> join({"a": torch.tensor([[1], [2], [3]]), "b": torch.tensor([[3], [1]])})
    {'a': tensor([0, 2]), 'b': tensor([1, 0])}
    """
    tables: dict[str, dict[tuple[int, ...], int]] = {}
    for place, rows in ids.items():
        times: dict[tuple[int, ...], int] = {}
        table = tables[place] = {}
        for row, found in enumerate(map(tuple, rows.tolist())):
            times[found] = times.get(found, -1) + 1
            table[found + (times[found],)] = row  # noqa: RUF005
    first, *others = tables.values()
    shared = [key for key in first if all(key in other for other in others)]
    return {place: torch.tensor([table[key] for key in shared], dtype=torch.int64, device="cpu") for place, table in tables.items()}


def _map(item: Any, function: Any) -> Any:
    if isinstance(item, Tensor):
        return function(item)
    if isinstance(item, dict):
        return {name: _map(value, function) for name, value in item.items()}
    return tuple(_map(value, function) for value in item)


def _unstack(item: Any) -> Iterator[Any]:
    """The rows of what `_read` returns, one by one."""
    if isinstance(item, Tensor):
        yield from item.unbind()
    elif isinstance(item, dict):
        yield from (dict(zip(item, rows, strict=True)) for rows in zip(*(_unstack(v) for v in item.values()), strict=True))
    else:
        yield from zip(*(_unstack(value) for value in item), strict=True)
