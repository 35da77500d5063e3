"""Rows of a stream as a `datasets.IterableDataset` of Hugging Face: which columns there are, and their Arrow tables."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias

import torch
from torch import Tensor

from recorders.errors import require
from recorders.recordings.storage.tensors import PAIRS
from recorders.streams.index import Kind

if TYPE_CHECKING:
    from datasets import Features, IterableDataset

Gather: TypeAlias = "Callable[[Tensor, bool], tuple[dict[str, Tensor], Tensor]]"

TABLE, TABLE_BYTES = 1024, 1 << 26
"""How many rows a table has, and how many bytes, at most; it has one row at least."""

MAX_AXES = 5
"""Hugging Face has no `Array6D`."""

_UNKNOWN_TO_ARROW = ("bfloat16", "float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz", "float8_e8m0fnu")
_REALS = {"complex32": "float16", "complex64": "float32", "complex128": "float64"}


def iterable_dataset(gather: Gather, kinds: dict[str, Kind], spans: list[tuple[int, int]]) -> IterableDataset:
    """A dataset of the rows at the positions from the first to before the second number of each span; each span is a shard.

    Args:
        gather: returns the rows at positions by place, and their ids; it is pickled for workers.

    Raises:
        MissingExtraError: datasets is not installed.
        ValueError: rows have more than 5 axes, or a place has the name of a column of ids.
    """
    datasets = require("datasets", "datasets")
    # The classes that `datasets.Dataset.to_iterable_dataset` uses: `from_generator` takes rows one by one, and converts each.
    tables = require("datasets.iterable_dataset", "datasets").ArrowExamplesIterable
    names = id_columns(next(iter(kinds.values())).columns)
    if taken := [place for place in kinds if place in names]:
        raise ValueError(f"the place {taken[0]!r} has the name of a column of ids, which are {names}: write it under another one")
    features = datasets.Features({place: _feature(datasets, place, kind) for place, kind in kinds.items()})
    features.update({name: datasets.Value("int64") for name in names})
    source = tables(TableReader(gather, kinds, names, features), {"spans": spans})
    return datasets.IterableDataset(source, info=datasets.DatasetInfo(features=features))


def id_columns(columns: int) -> list[str]:
    """The names of the columns of ids.

    >>> id_columns(1), id_columns(3)
    (['sample'], ['sample', 'token', 'id2'])
    """
    return ["sample", "token", *(f"id{number}" for number in range(2, columns))][:columns]


@dataclass(frozen=True)
class TableReader:
    """Called with spans, yields their rows as Arrow tables."""

    gather: Gather
    kinds: dict[str, Kind]
    names: list[str]
    features: Features

    def __call__(self, spans: list[tuple[int, int]]) -> Iterator[tuple[tuple[int, int], Any]]:
        arrow, schema = require("pyarrow", "datasets"), self.features.arrow_schema
        rows = max(1, min(TABLE, TABLE_BYTES // max(1, *(kind.row_bytes for kind in self.kinds.values()))))
        for first, last in spans:
            for start in range(first, last, rows):
                found, ids = self.gather(torch.arange(start, min(start + rows, last), device="cpu"), True)
                columns = [_column(arrow, found[place], schema.field(place).type) for place in self.kinds]
                columns += [arrow.array(column.contiguous().numpy()) for column in ids.unbind(1)]
                yield (first, start), arrow.Table.from_arrays(columns, schema=schema)


def _feature(datasets: Any, place: str, kind: Kind) -> Any:
    """What datasets calls the type of a row."""
    dtype = "float32" if kind.dtype in _UNKNOWN_TO_ARROW else _REALS.get(kind.dtype, kind.dtype)
    shape = (*kind.shape, *[2] * (kind.dtype in PAIRS))
    if len(shape) > MAX_AXES:
        raise ValueError(f"{place!r} has rows of shape {shape}, and datasets has arrays of at most {MAX_AXES} axes")
    if len(shape) < 2:
        return datasets.List(datasets.Value(dtype), length=shape[0]) if shape else datasets.Value(dtype)
    return getattr(datasets, f"Array{len(shape)}D")(shape=shape, dtype=dtype)


def _column(arrow: Any, rows: Tensor, type_: Any) -> Any:
    """The rows as an Arrow array of this type, in the same memory if Arrow has their dtype."""
    if str(rows.dtype).removeprefix("torch.") in _UNKNOWN_TO_ARROW:
        rows = rows.float()
    elif rows.is_complex():
        rows = torch.view_as_real(rows)
    storage = getattr(type_, "storage_type", type_)
    array = arrow.array(rows.flatten().numpy())
    for axis in reversed(range(1, rows.ndim)):
        size = rows.shape[axis]
        if axis == 1 and arrow.types.is_fixed_size_list(storage):
            array = arrow.FixedSizeListArray.from_arrays(array, size)
        else:
            offsets = torch.arange(0, rows.shape[:axis].numel() * size + 1, size, dtype=torch.int32, device="cpu")
            array = arrow.ListArray.from_arrays(arrow.array(offsets.numpy()), array)
    return arrow.ExtensionArray.from_storage(type_, array) if storage is not type_ else array
