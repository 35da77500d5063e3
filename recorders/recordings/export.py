"""What was recorded as data of other libraries: one number in each row, arrays by name, labelled arrays, JSON."""

from __future__ import annotations

import importlib.util
import json
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import lru_cache
from typing import Any, Literal, TypeAlias

import torch
from torch import Tensor

from recorders.errors import RecordingWarning, require
from recorders.recordings.display import flat_leaves, shown_name
from reducers.errors import warn_user

Backend: TypeAlias = Literal["pandas", "polars"]
Row: TypeAlias = "tuple[str, str, str, str, float]"
_Block: TypeAlias = "tuple[str, str, str, list[tuple[int, ...]], list[float]]"

COLUMNS = {"name": "string", "leaf": "string", "statistic": "string", "index": "Int64", "value": "float64"}
"""The columns of the table of a recording, with their kinds, by the names that pandas has for them."""

_BLOCK = 100_000  # numbers converted at once
_EXACT = 2**53  # from here on, float64 does not hold every integer


class ExportedLeaves:
    """The part of monitors, subrecordings and cells that hands over what was recorded."""

    def to_frame(self, backend: Backend | None = None) -> Any:
        """A data frame with one number in each row, in the columns leaf, statistic, index and value; see `Recorder.to_frame`.

        Results with several axes have the columns index_1, index_2 and so on beside index, with the places along these.

        >>> from recorders import CallMonitor
        >>> from reducers import Extremes
        >>> loss = CallMonitor(Extremes())
        >>> loss.push(0.5)
        >>> print(loss.to_frame("pandas")[["statistic", "value"]].to_string(index=False))
        statistic  value
              min    0.5
              max    0.5
        """
        return _frame(_blocks({"": self}), {name: kind for name, kind in COLUMNS.items() if name != "name"}, backend)

    def to_numpy(self) -> dict[str, dict[str, Any]]:
        """NumPy arrays by leaf and statistic, in their shapes and dtypes; see `Recorder.to_numpy`."""
        return _arrays({"": self})[""]

    def to_xarray(self) -> Any:
        """An `xarray.Dataset` whose variables are the statistics; see `Recorder.to_xarray`."""
        return _datasets({"": self})[""]

    def to_json(self) -> str:
        """What it is and its results by leaf and statistic, as JSON; see `Recorder.to_json`.

        >>> from recorders import Cell
        >>> from reducers import Mean
        >>> cell = Cell(Mean())
        >>> cell.push(torch.tensor(0.5))
        >>> json.loads(cell.to_json())["results"]
        {'': {'': 0.5}}
        """
        return json.dumps({"kind": "subrecording", **_parts_as_data({"": self}, None)[""]}, allow_nan=False)


class ExportedNames(Mapping[str, Any]):
    """The part of recordings and recorders that hands over what was recorded."""

    def to_frame(self, backend: Backend | None = None) -> Any:
        """A data frame with one number in each row, in the columns name, leaf, statistic, index and value.

        `leaf` is the path of the tensor in a nested operand, else ""; `statistic` is the path in the result, such as "mean", or ""
        if it is one tensor. `index` is the place in it along its first axis, a whole number from 0, missing of a single number. If
        a result has more axes, there are the columns index_1, index_2 and so on after it, with the places along the second axis,
        the third and so on, missing of results without that axis. Values are float64: booleans are 0 and 1, complex numbers have
        the statistics "x.real" and "x.imag". Arrow, Parquet and CSV are written by the frame itself.

        Args:
            backend: "pandas" or "polars"; None for pandas if it is installed, else Polars.

        Raises:
            MissingExtraError: the library is not installed.
            ValueError: `backend` is something else.

        >>> from recorders import CallMonitor, Recorder
        >>> from reducers import Extremes
        >>> recorder = Recorder(loss=CallMonitor(Extremes())).push("loss", 0.5).push("loss", 0.25)
        >>> print(recorder.to_frame("pandas")[["name", "statistic", "value"]].to_string(index=False))
        name statistic  value
        loss       min   0.25
        loss       max   0.50
        """
        return _frame(_blocks(self), COLUMNS, backend)

    def to_numpy(self) -> dict[str, dict[str, dict[str, Any]]]:
        """NumPy arrays by name, leaf and statistic, as in `to_frame`, in their shapes and dtypes (bfloat16 and float8 as float32).

        Raises:
            MissingExtraError: NumPy is not installed.

        >>> from recorders import CallMonitor, Recorder
        >>> from reducers import Mean
        >>> Recorder(loss=CallMonitor(Mean())).push("loss", 0.5).to_numpy()
        {'loss': {'': {'': array(0.5)}}}
        """
        return _arrays(self)

    def to_xarray(self) -> Any:
        """An `xarray.DataTree` with a node for each name ("out/0" is the node "0" in "out"), whose variables are the statistics.

        A result that is one tensor is the variable "value"; if operands were nested, "leaf:statistic". An axis is named by its
        position and size, such as "axis0_64", so results of one shape can be computed with each other. The attributes of a node
        are the monitor, the module, the attribute, the reducer and the number of observations.

        Raises:
            MissingExtraError: xarray is not installed.
            ValueError: a name is no path, such as "../loss"; or it is that of a statistic of what is above it, such as "out/max" if
                "out" has a statistic "max".

        >>> from recorders import CallMonitor, Recorder
        >>> from reducers import Extremes
        >>> tree = Recorder(loss=CallMonitor(Extremes())).push("loss", 0.5).to_xarray()
        >>> float(tree["loss"]["max"]), tree["loss"].attrs["observations"]
        (0.5, 1)
        """
        nodes = _datasets(self)
        for name in nodes:
            below = name.split("/") if name else []
            for depth in range(len(below)):
                above = "/".join(below[:depth])
                if above in nodes and below[depth] in nodes[above]:
                    raise ValueError(
                        f"{below[depth]!r} is a statistic of {shown_name(above)!r} and the name of a subrecorder, {name!r}, and "
                        "a tree of xarray cannot hold both: take to_numpy(), or to_xarray() of one subrecorder"
                    )
        return require("xarray", "xarray").DataTree.from_dict({f"/{name}": node for name, node in nodes.items()})

    def to_json(self) -> str:
        """Everything as JSON: step, further names, and for each subrecorder what it is and its results by leaf and statistic.

        Integers are exact. NaN and infinities, which JSON does not have, are the texts "nan", "inf" and "-inf"; complex numbers are
        `{"real": ..., "imag": ...}`.

        >>> import json
        >>> from recorders import CallMonitor, Recorder
        >>> from reducers import Extremes
        >>> text = Recorder(loss=CallMonitor(Extremes())).push("loss", 0.5).to_json()
        >>> json.loads(text)["subrecorders"]["loss"]["results"]
        {'': {'min': 0.5, 'max': 0.5}}
        """
        return json.dumps(as_data(self), allow_nan=False)


def rows(recorded: Mapping[str, Any], names: Iterable[str] | None = None) -> Iterator[Row]:
    """The rows of `to_frame`, of all names or of some: one subrecorder after the other, as a recording may be large."""
    for name, leaf, label, places, values in _blocks(recorded, names):
        for place, value in zip(places, values, strict=True):
            yield name, leaf, label, ",".join(map(str, place)), value


def _blocks(recorded: Mapping[str, Any], names: Iterable[str] | None = None) -> Iterator[_Block]:
    """The rows in blocks of one statistic, with the places and values of as many of its numbers as are converted at once."""
    for name, _, results in _parts(recorded, names):
        for leaf, statistics in results.items():
            for statistic, x in statistics.items():
                parts = {"real": x.real, "imag": x.imag} if x.is_complex() else {"": x}
                for part, numbers in parts.items():
                    _warn_of_rounding(name, statistic, numbers)
                    label = ".".join(filter(None, (statistic, part)))
                    flat = numbers.reshape(-1)
                    for start in range(0, len(flat), _BLOCK):
                        values: list[float] = flat[start : start + _BLOCK].double().tolist()
                        yield name, leaf, label, _places(tuple(numbers.shape), start, len(values)), values


def _frame(blocks: Iterable[_Block], kinds: Mapping[str, str], backend: Backend | None) -> Any:
    columns: dict[str, list[Any]] = {name: [] for name in COLUMNS}
    axes: list[list[int | None]] = [columns["index"]]
    for *labels, places, values in blocks:  # whole lists at once, because a call for each number takes most of the time
        for column, label in zip(columns.values(), labels, strict=False):
            column += [label] * len(values)
        along = [*zip(*places, strict=True)]  # places along each axis
        axes += [[None] * len(columns["value"]) for _ in range(len(axes), len(along))]
        for axis, column in enumerate(axes):
            column += along[axis] if axis < len(along) else [None] * len(values)
        columns["value"] += values
    values = columns.pop("value")
    columns |= {f"index_{number}": column for number, column in enumerate(axes[1:], 1)} | {"value": values}
    kinds = {name: kinds.get(name, "Int64") for name in columns if name in kinds or name not in COLUMNS}
    return as_frame({name: columns[name] for name in kinds}, kinds, backend)


def _arrays(recorded: Mapping[str, Any]) -> dict[str, dict[str, dict[str, Any]]]:
    require("numpy", "numpy")
    return {name: _mapped(results, _array) for name, _, results in _parts(recorded)}


def _datasets(recorded: Mapping[str, Any]) -> dict[str, Any]:
    """An `xarray.Dataset` of each subrecorder."""
    xarray = require("xarray", "xarray")
    found = {}
    for name, part, results in _parts(recorded):
        variables = {
            f"{leaf}:{statistic or 'value'}" if leaf else statistic or "value": x
            for leaf, statistics in results.items()
            for statistic, x in statistics.items()
        }
        attributes = {key: "" if value is None else value for key, value in _about(part).items()}
        data = {key.replace("/", "|"): (_axes(x), _array(x)) for key, x in variables.items()}  # "/" is no part of a variable's name
        found[name] = xarray.Dataset(data, attrs=attributes)
    return found


@lru_cache(maxsize=1)  # the statistics of one result have one shape
def _places(shape: tuple[int, ...], start: int, count: int) -> list[tuple[int, ...]]:
    """The places of some elements of a tensor, in the order of memory, such as (0, 2)."""
    if not shape:
        return [()]
    along = torch.unravel_index(torch.arange(start, start + count, device="cpu"), shape)
    return [*zip(*(axis.tolist() for axis in along), strict=True)]


def as_frame(columns: Mapping[str, list[Any]], kinds: Mapping[str, str], backend: Backend | None) -> Any:
    """A data frame of columns, whose kinds have the names of pandas."""
    chosen = backend or next((name for name in ("pandas", "polars") if importlib.util.find_spec(name)), "pandas")
    if chosen not in ("pandas", "polars"):
        raise ValueError(f"to_frame(backend={backend!r}): choose 'pandas' or 'polars'")
    if chosen == "pandas":
        return require("pandas", "pandas").DataFrame(dict(columns)).astype(dict(kinds))
    library = require("polars", "polars")
    types = {"string": library.String, "float64": library.Float64, "int64": library.Int64, "Int64": library.Int64}
    return library.DataFrame(dict(columns), schema={name: types[kind] for name, kind in kinds.items()})


def as_data(recorded: Any, most: int | None = None) -> dict[str, Any]:
    """What `to_json` of a recorder or recording writes; tensors of more than `most` elements as their shape and extremes."""
    step = recorded.clock.step if hasattr(recorded, "clock") else recorded.step
    return {"kind": "recording", "step": step, "subrecorders": _parts_as_data(recorded, most), "aliases": dict(recorded.aliases)}


def _parts_as_data(recorded: Mapping[str, Any], most: int | None) -> dict[str, dict[str, Any]]:
    def data(x: Tensor) -> Any:
        if x.is_complex():
            return {"real": data(x.real), "imag": data(x.imag)}
        if x.is_floating_point() and x.dtype.itemsize == 1:
            x = x.float()  # PyTorch computes nothing in float8
        if most is not None and x.numel() > most:
            least, greatest = _ends(x)
            return {"shape": list(x.shape), "min": plain(least), "max": plain(greatest)}
        return plain(x.tolist()) if x.is_floating_point() and not x.isfinite().all() else x.tolist()

    return {name: {**_about(part), "results": _mapped(results, data)} for name, part, results in _parts(recorded)}


def _ends(x: Tensor) -> tuple[Any, Any]:
    """The least and the greatest element. PyTorch has neither of wide unsigned integers."""
    if x.dtype in (torch.uint16, torch.uint32, torch.uint64):
        numbers = x.flatten().tolist()
        return min(numbers), max(numbers)
    return x.min().item(), x.max().item()


def plain(value: Any) -> Any:
    """A value for JSON, with numbers that it does not know as texts, such as "nan"."""
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(item) for item in value]
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


def _parts(
    recorded: Mapping[str, Any], names: Iterable[str] | None = None
) -> Iterator[tuple[str, Any, dict[str, dict[str, Tensor]]]]:
    """Each name with its subrecording, and with its tensors by leaf and statistic; what is no number is left out with a warning."""
    for name in recorded if names is None else names:
        part = recorded[name].snapshot()
        results: dict[str, dict[str, Tensor]] = {}
        for leaf, result in part.iter_leaves():
            found = dict(flat_leaves(result))
            results[leaf] = {path: x.detach().cpu() for path, x in found.items() if isinstance(x, Tensor)}
            for path in found.keys() - results[leaf].keys():
                kind = type(found[path]).__name__
                what = f"{name!r}: its result {path!r} is a {kind}" if path else f"{name!r}: its result is a {kind}"
                warn_user(f"{what}, and is left out: only tensors and numbers are exported", RecordingWarning)
        yield name, part, results


def _about(part: Any) -> dict[str, Any]:
    reducer = None if part.reducer is None else repr(part.reducer)
    return {"monitor": part.monitor, "attr": part.attr, "module": part.module, "reducer": reducer, "observations": part.samples}


def _mapped(results: Mapping[str, Mapping[str, Tensor]], function: Callable[[Tensor], Any]) -> dict[str, dict[str, Any]]:
    return {leaf: {path: function(x) for path, x in statistics.items()} for leaf, statistics in results.items()}


def _array(x: Tensor) -> Any:
    narrow = x.is_floating_point() and (x.dtype == torch.bfloat16 or x.dtype.itemsize == 1)
    return (x.float() if narrow else x.clone()).resolve_conj().resolve_neg().numpy()


def _axes(x: Tensor) -> list[str]:
    return [f"axis{position}_{size}" for position, size in enumerate(x.shape)]


def _warn_of_rounding(name: str, statistic: str, x: Tensor) -> None:
    if x.dtype not in (torch.int64, torch.uint64):
        return
    whole, least = (
        (x, -_EXACT) if x.dtype is torch.int64 else (x.view(torch.int64), 0)
    )  # of uint64 what is beyond int64 is negative
    if bool(((whole > _EXACT) | (whole < least)).any()):
        what = f"{name!r}: integers of {statistic or 'its result'!r} beyond 2**53 are rounded in a column of float64"
        warn_user(f"{what}; to_numpy, to_xarray and to_json keep them", RecordingWarning)
