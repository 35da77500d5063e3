"""Statistics of a CPU tensor in one read, by the loop in C++; and the same as an operator inside graphs."""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Mapping
from functools import lru_cache
from typing import List, Optional, Sequence  # noqa: UP035  # what torch 2.8 can read in the signature of an operator

import torch
from torch import Tensor, nn

from reducers.kernels.loop.building import ELEMENTS, build
from reducers.kernels.loop.layout import MOST_AXES, Task, task_of
from reducers.state import State

__all__ = ["looped"]

_SUM, _SQUARES, _EXTREMES, _ZEROS, _MAGNITUDES, _ACTIVE = 1, 2, 4, 8, 16, 32  # enum What
_RESULTS = ("count", "nan", "inf", "zeros", "mean", "m2", "sum", "squares", "min", "max", "peak", "total")  # enum Result
_COLUMNS = {
    "count": (0, "count"),
    "nan": (0, "nan"),
    "inf": (0, "inf"),
    "zeros": (_ZEROS, "zeros"),
    "sum": (_SUM, "sum"),
    "exact": (_SUM, "sum"),
    "mean": (_SUM, "mean"),
    "m2": (_SUM | _SQUARES, "m2"),
    "squares": (_SUM | _SQUARES, "squares"),
    "min": (_EXTREMES, "min"),
    "max": (_EXTREMES, "max"),
    "peak": (_EXTREMES, "peak"),
    "magnitudes": (_MAGNITUDES, "total"),
    "active": (_ACTIVE, "total"),
}
"""For each column what the loop has to add up, and which of its results it is."""

_PLAIN = {Tensor, nn.Parameter, type(None)}
_COUNTS = frozenset(("count", "nan", "inf", "zeros", "active"))


def looped(
    x: Tensor, axes: tuple[int, ...], columns: Mapping[str, str], threshold: float = 0.0, mask: Tensor | None = None
) -> State | None:
    """Return the statistics of `x` over `axes`, in float64 throughout.

    Args:
        columns: the keys of the state, and which of `reducers.kernels.triton.arguments.COLUMNS` each of them is.
        threshold: the magnitude above which an element is active, at least 0.
        mask: bool, in the shape of `x`, of any strides: the elements that are observed.

    Returns:
        counts int64; `min` and `max` in the dtype of `x`; all else float64, in the shape of the kept axes. None if there is no
        compiler, the loop lacks a statistic, or the dtype or the strides of `x` are not supported.
    """
    names = tuple(columns.values())
    task = _prepared(x, axes, names, mask)
    if task is None:
        return None
    if torch.compiler.is_compiling():
        if x.ndim > MOST_AXES:  # strides may differ when the graph runs
            return None
        return dict(zip(columns, loop(x, axes, ",".join(names), threshold, mask), strict=True))
    values = _run(x, axes, names, threshold, mask, task)
    return None if values is None else dict(zip(columns, values, strict=True))


def _prepared(x: Tensor, axes: tuple[int, ...], names: tuple[str, ...], mask: Tensor | None, **least: int) -> Task | None:
    """Return the sizes and strides of the task; None if the loop does not take the tensor, the mask, or the columns."""
    elements, needed = ELEMENTS.get(x.dtype), _needed(names)
    if elements is None or needed is None or x.device.type != "cpu" or (mask is not None and mask.device != x.device):
        return None
    task = task_of(tuple(x.shape), x.stride(), axes, None if mask is None else mask.stride(), **least)
    return None if task is None or build(needed, elements) is None else task


@lru_cache(maxsize=256)
def _needed(names: tuple[str, ...]) -> int | None:
    """Return what the loop must add up for these columns; None if it cannot."""
    needed = 0
    for name in names:
        if name not in _COLUMNS:
            return None
        needed |= _COLUMNS[name][0]
    both = (_SUM | _MAGNITUDES, _ACTIVE | _MAGNITUDES)
    return None if not names or any(needed & pair == pair for pair in both) else needed


def _run(
    x: Tensor, axes: tuple[int, ...], names: tuple[str, ...], threshold: float, mask: Tensor | None, template: Task
) -> list[Tensor] | None:
    """Return the statistics in order of their names; None if these are no tensors with memory of their own."""
    shape = [size for axis, size in enumerate(x.shape) if axis not in axes]
    results = torch.empty((len(_RESULTS), *shape), dtype=torch.float64, device="cpu")
    if not {type(x), type(results), type(mask)} <= _PLAIN:
        return None
    task = Task.from_buffer_copy(template)
    try:
        x = x.resolve_neg()
        task.x, task.mask, task.results = x.data_ptr(), 0 if mask is None else mask.data_ptr(), results.data_ptr()
    except RuntimeError:  # such as inside vmap
        return None
    if not task.x or not task.results or (mask is not None and not task.mask):
        return None
    task.about_zero = "mean" not in names and "m2" not in names
    task.threshold, task.threads = _rounded_down(threshold), torch.get_num_threads()
    needed = _needed(names)
    assert needed is not None
    if build(needed, ELEMENTS[x.dtype])(ctypes.byref(task)) != 0:
        return None  # there is no memory for the table of parts
    return [_column(results[_RESULTS.index(_COLUMNS[name][1])], name, x.dtype) for name in names]


def _column(value: Tensor, name: str, dtype: torch.dtype) -> Tensor:
    """Return a statistic in its dtype and in memory of its own."""
    if name in _COUNTS:
        return value.to(torch.int64)
    return value.to(dtype) if name in ("min", "max") else value.clone()


def _rounded_down(threshold: float) -> float:
    """Return the largest float32 that is not above the threshold: it gives the comparisons of float64."""
    (nearest,) = struct.unpack("f", struct.pack("f", min(threshold, torch.finfo(torch.float32).max)))
    return nearest if nearest <= threshold else max(0.0, _before(nearest))


def _before(value: float) -> float:
    (bits,) = struct.unpack("i", struct.pack("f", value))
    (before,) = struct.unpack("f", struct.pack("i", bits - 1))
    return float(before)


@torch.library.custom_op("reducers::loop", mutates_args=())
def loop(
    x: Tensor,
    axes: Sequence[int],
    columns: str,
    threshold: float,
    mask: Optional[Tensor],  # noqa: UP045
) -> List[Tensor]:  # noqa: UP006
    """Return what `looped` does, in the order of `columns`, as one node of a graph."""
    along, names = tuple(axes), tuple(columns.split(","))
    task = _prepared(x, along, names, mask)
    if task is None:  # the compiler chose other strides than those that were traced
        x, mask = x.contiguous(), None if mask is None else mask.contiguous()
        task = _prepared(x, along, names, mask, least=1)
    values = None if task is None else _run(x, along, names, threshold, mask, task)
    if values is None:
        raise MemoryError(f"there is no memory for statistics of a tensor of shape {tuple(x.shape)}")
    return values


@loop.register_fake
def _(x: Tensor, axes: Sequence[int], columns: str, threshold: float, mask: Tensor | None) -> list[Tensor]:
    shape = [size for axis, size in enumerate(x.shape) if axis not in axes]
    dtypes = {**dict.fromkeys(_COUNTS, torch.int64), "min": x.dtype, "max": x.dtype}
    return [x.new_empty(shape, dtype=dtypes.get(name, torch.float64)) for name in columns.split(",")]
