"""StreamDataset: the rows of a stream, or of several one after the other, read lazily through memory maps."""

from __future__ import annotations

import copy
import os
from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.utils.data import Dataset

from recorders.errors import MergeError, SelectionError
from recorders.streams.buffers import Buffers
from recorders.streams.files import StreamFiles
from recorders.streams.huggingface import iterable_dataset
from recorders.streams.index import Shard
from recorders.streams.indexing import Index, positions
from recorders.streams.order import Shuffle
from recorders.streams.parts import spans_of

if TYPE_CHECKING:
    from datasets import IterableDataset
    from typing_extensions import Self

BATCH = 32
"""Who reads so many rows in the order of a shuffle is likely to read the rest of the window."""

KEPT = 1 << 28
"""How many bytes of memory for batches are kept, to be used again."""


class StreamDataset(Dataset[Any]):
    """The committed rows of one place of a stream, or of several, as a map-style dataset of `torch.utils.data`.

    `data[3]` is a row; `data[3:9]`, `data[::-1]`, `data[[3, 5]]` and `data[mask]` are rows stacked, in memory of their own: indices
    are those of NumPy's first axis, of Python, PyTorch or NumPy. Nothing is read before; what is read is compared with its checksum
    once. A stream may be read while it is written: `refresh` takes in what was committed since. A `DataLoader` with any number of
    workers reads each row once, because its sampler deals out the positions; `batches` is faster than stacking rows one by one.

    Args:
        path: the folder of the stream, or its URL, as for `load`: a file is fetched when a row of it is read first. Or several of
            them, such as one for each rank: then the rows of the first come before those of the second, and so on.
        places: a name; or several names, then an item is a dict by name of rows with equal ids. None if the stream has one place.
        shuffle: the seed of a shuffled order; None for the order in which rows were written.
        window: how many rows are shuffled together; see `shuffled`.
        ids: an item is a pair of the row and its id, which is int64 of shape (columns,).

    Attributes:
        path: the folder, or the URL; of several streams a tuple of them.
        places: the names.
        kinds: by place the dtype and the shape of its rows.

    Raises:
        SelectionError: a stream has no such place; the message lists those that it has.
        MergeError: several streams have other rows of a place: another shape, dtype, or number of id columns.
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
        path: str | os.PathLike[str] | Sequence[str | os.PathLike[str]],
        places: str | Sequence[str] | None = None,
        *,
        shuffle: int | None = None,
        window: int | None = 1 << 16,
        ids: bool = False,
    ) -> None:
        self._files, self._with_ids = tuple(map(StreamFiles, _as_paths(path))), ids
        found = tuple(files.path for files in self._files)
        self.path = found[0] if isinstance(path, (str, os.PathLike)) else found
        known = [*dict.fromkeys(place for files in self._files for place in files)]
        if places is None:
            if len(known) != 1:
                raise SelectionError(f"{self._shown} has {len(known)} places, so name one or several: {known[:20]}")
            places = known[0]
        self._single = isinstance(places, str)
        self.places = (places,) if isinstance(places, str) else tuple(places)
        if not self.places:
            raise SelectionError(f"{self._shown} has no place (); it has {known[:20]}")
        self._order(shuffle, window)
        self._joined: dict[tuple[int, int], dict[str, Tensor]] = {}
        self._buffers = Buffers(KEPT)
        self._take_in()

    def shuffled(self, seed: int | None, window: int | None = 1 << 16) -> Self:
        """A dataset of these rows in another order: one seed for each epoch. None gives the order in which they were written.

        Args:
            window: how many rows are shuffled together: runs of 256 neighbours from all over the stream fill a window, so memory
                maps are read in long pieces. None shuffles all rows uniformly, with 8 bytes of memory a row.
        """
        other = copy.copy(self)
        other._order(seed, window)
        return other

    def endless(self, size: int, *, seed: int = 0, start: int = 0) -> Iterator[Any]:
        """Batches of `size` rows without end, for trainers that ask for the next one until they have had enough.

        The n-th epoch is all rows in the order of `shuffled(seed + n)`, with the window of this dataset, less those at its end that
        fill no batch. `start` batches are skipped, without reading them: a training that goes on after 500 steps gives 500.

        Raises:
            ValueError: there are less than `size` rows, or `start` is negative.
            TypeError: the seed is no whole number.

        >>> import tempfile
        >>> from recorders import Stream
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     with Stream(folder) as stream:
        ...         _ = stream.put("x", torch.arange(6.0))
        ...     batches = StreamDataset(folder).endless(4)
        ...     [len(next(batches)) for step in range(3)]
        [4, 4, 4]
        """
        batches = self.batches(size, drop_last=True)
        if not len(batches):
            raise ValueError(f"endless({size}): {self._shown} has {len(self)} rows, which fill no batch")
        if type(start) is not int or start < 0:
            raise ValueError(f"endless(start={start!r}): give the number of batches to skip")
        _check_seed(seed, f"endless(seed={seed!r})")
        return self._endless(len(batches), size, seed, start)

    def _endless(self, count: int, size: int, seed: int, start: int) -> Iterator[Any]:
        epoch, first = divmod(start, count)
        while True:
            batches = self.shuffled(seed + epoch, self._window).batches(size, drop_last=True)
            yield from map(batches.__getitem__, range(first, count))
            epoch, first = epoch + 1, 0

    def to_iterable_dataset(self, num_shards: int | None = None) -> IterableDataset:
        """These rows, in this order, as a `datasets.IterableDataset` of Hugging Face: columns of places and of ids.

        Columns of ids are called "sample", "token", "id2", "id3" and so on; they are there with `ids=False`, too. Rows are lists of
        fixed length, or of 2 to 5 axes `Array2D` to `Array5D`. Arrow has no bfloat16, float8 and complex numbers: the first two are
        float32, and complex ones pairs of reals along a last axis. Nothing is read before it is iterated over.

        Args:
            num_shards: how many shards `shuffle`, the workers of a `DataLoader` and `split_dataset_by_node` deal out, each of
                neighbouring rows in the order of this dataset. None: as many as there are shards on disk.

        Raises:
            MissingExtraError: datasets is not installed.
            ValueError: there are not so many rows; or a place has rows of more than 5 axes, or the name of a column of ids.

        For example::

            rows = StreamDataset("acts", ["1", "3"]).to_iterable_dataset(num_shards=64)
            for batch in rows.shuffle(seed=0, buffer_size=10_000).with_format("torch").iter(batch_size=256):
                batch["1"], batch["sample"]
        """
        if num_shards is not None and (type(num_shards) is not int or not 1 <= num_shards <= max(len(self), 1)):
            raise ValueError(f"to_iterable_dataset(num_shards={num_shards!r}): give a number from 1 to {len(self)}, the rows")
        edges = sorted({*self._starts.tolist()})  # of the shards on disk that have rows
        if num_shards is not None or self._shuffle is not None:
            shards = num_shards or max(len(edges) - 1, 1)
            edges = [len(self) * number // shards for number in range(shards + 1)]
        spans = [*pairwise(edges)] or [(0, 0)]
        return iterable_dataset(copy.copy(self)._gather, self.kinds, spans)

    def batches(self, size: int, *, drop_last: bool = False) -> Batches:
        """A dataset of batches of `size` rows, for `DataLoader(..., batch_size=None)` or to iterate over."""
        if type(size) is not int or size < 1:
            raise ValueError(f"batches({size!r}): give the number of rows of a batch")
        return Batches(self, size, drop_last)

    def refresh(self) -> int:
        """Takes in the shards that were committed since; returns how many rows there are now.

        A shuffled order is then another, and the rows of all streams but the first are at other positions.
        """
        for files in self._files:  # which shuffled datasets share
            files.refresh()
        self._take_in()
        return len(self)

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
            f"StreamDataset({self._shown!r}, {', '.join(map(repr, self.places))}): "
            f"{len(self)} rows of shape {first.shape} in {first.dtype}"
        )

    def _order(self, seed: int | None, window: int | None) -> None:
        if seed is not None:
            _check_seed(seed, f"shuffle={seed!r}", ", or None")
        if window is not None and (type(window) is not int or window < 1):
            raise ValueError(f"window={window!r}: give a number of rows, or None for all")
        self._shuffle, self._window = None if seed is None else Shuffle(seed, window), window
        self._expected: set[int] = set()  # the windows that the system was told to read last

    @property
    def _shown(self) -> str:
        """What messages call the streams."""
        return ", ".join(str(files.path) for files in self._files[:8]) + ", ..." * (len(self._files) > 8)

    def _take_in(self) -> None:
        """Finds where the rows of each shard begin, after the places of each stream were checked."""
        for files in self._files:
            known = [*files]
            if known and (unknown := [place for place in self.places if place not in known]):
                raise SelectionError(f"{files.path} has no place {unknown}; it has {known[:20]}")
        if unknown := [place for place in self.places if all(place not in files for files in self._files)]:
            raise SelectionError(f"{self._shown} has no place {unknown}; it has []")
        self.kinds = {place: next(files.kind(place) for files in self._files if place in files) for place in self.places}
        for place, kind in self.kinds.items():
            for files in self._files:
                if place in files and files.kind(place) != kind:
                    raise MergeError(
                        f"{place!r} has {files.kind(place)} in {files.path}, and {kind} before: read them as datasets of their own"
                    )
        shards = [(number, shard) for number, files in enumerate(self._files) for shard in files.shards]
        counts = torch.tensor([self._rows_of(*shard) for shard in shards], dtype=torch.int64, device="cpu")
        self._shards = shards
        self._starts = torch.cat([torch.zeros(1, dtype=torch.int64, device="cpu"), counts.cumsum(0)])

    def _rows_of(self, stream: int, shard: Shard) -> int:
        """How many rows all places have in the shard, by their ids."""
        parts = [shard.parts.get(place) for place in self.places]
        present = [part for part in parts if part is not None]
        if len(present) < len(parts):
            return 0
        if len({(part.rows, part.ids_crc) for part in present}) > 1:
            if (stream, shard.number) not in self._joined:
                files = self._files[stream]
                ids = {
                    name: files.reader(shard.number, name).ids(torch.arange(shard.parts[name].rows, device="cpu"))
                    for name in self.places
                }
                self._joined[stream, shard.number] = join(ids)
            return len(self._joined[stream, shard.number][self.places[0]])
        return present[0].rows

    def _read(self, chosen: Tensor) -> Any:
        found, ids = self._gather(chosen, self._with_ids)
        item: Any = found[self.places[0]] if self._single else found
        return (item, ids) if self._with_ids else item

    def _expect(self, shuffle: Shuffle, chosen: Tensor) -> None:
        """Lets the system read the windows of these positions: each batch of a window takes rows from all over it."""
        if shuffle.window is None:
            return
        windows = {*(chosen // shuffle.window).tolist()}
        for window in sorted(windows - self._expected):
            rows = shuffle.in_window(window, len(self))
            shards = torch.searchsorted(self._starts, rows, right=True) - 1
            for number in sorted({*shards.tolist()}):
                stream, shard = self._shards[number]
                if (stream, shard.number) not in self._joined:  # whose rows are at other places of the files
                    spans = spans_of(rows[shards == number] - self._starts[number]).tolist()
                    for place in self.places:
                        self._files[stream].expect(shard.number, place, spans)
        self._expected = windows

    def _gather(self, chosen: Tensor, with_ids: bool) -> tuple[dict[str, Tensor], Tensor]:
        """By place the rows at these positions, and their ids, if they are asked for."""
        rows = chosen if self._shuffle is None else self._shuffle(chosen, len(self))
        if self._shuffle is not None and len(chosen) >= BATCH and int(chosen[-1] - chosen[0]) == len(chosen) - 1:
            self._expect(self._shuffle, chosen)
        shards = torch.searchsorted(self._starts, rows, right=True) - 1
        order = None if bool((shards.diff() >= 0).all()) else shards.argsort(stable=True)
        numbers, counts = torch.unique_consecutive(shards if order is None else shards[order], return_counts=True)
        offsets = rows - self._starts[shards]
        inside = torch.split_with_sizes(offsets if order is None else offsets[order], counts.tolist())
        back = None if order is None else order.argsort()
        found: dict[str, Tensor] = {}
        for place, kind in self.kinds.items():
            raw = self._buffers.take(len(rows) * kind.row_bytes).view(len(rows), kind.row_bytes)
            ids = torch.empty((len(rows), kind.columns), dtype=torch.int64, device="cpu")
            begin = 0
            for number, offset in zip(numbers.tolist(), inside, strict=True):
                stream, shard = self._shards[number]
                joined = self._joined.get((stream, shard.number))
                chosen = offset if joined is None else joined[place][offset]
                reader, end = self._files[stream].reader(shard.number, place), begin + len(chosen)
                reader.rows(chosen, out=raw[begin:end])
                if with_ids:
                    ids[begin:end] = reader.ids(chosen)
                begin = end
            if back is not None:
                raw = torch.index_select(raw, 0, back, out=self._buffers.take(raw.nbytes).view(raw.shape))
                ids = ids.index_select(0, back)
            found[place] = raw.view(-1).view(getattr(torch, kind.dtype)).view(len(rows), *kind.shape)
        return found, ids


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


def _check_seed(seed: object, what: str, more: str = "") -> None:
    if isinstance(seed, bool) or not isinstance(seed, int):
        raise TypeError(f"{what}: give a whole number, the seed{more}")


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


def _as_paths(path: str | os.PathLike[str] | Sequence[str | os.PathLike[str]]) -> Sequence[str | os.PathLike[str]]:
    if isinstance(path, (str, os.PathLike)):
        return [path]
    if not path:
        raise SelectionError("StreamDataset([]): give the folder of a stream, or of several")
    return path
