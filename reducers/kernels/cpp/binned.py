"""Counts of a CPU tensor's elements in bins in one read, by the loop in C++."""

from __future__ import annotations

import ctypes
import math
from functools import lru_cache

import torch
from torch import Tensor, nn

from reducers.kernels.columns import BINNED
from reducers.kernels.cpp.library import ELEMENTS, loop_for
from reducers.kernels.cpp.task import Task, task_of
from reducers.kernels.cpp.threads import in_threads
from reducers.state import State

_PLAIN = {Tensor, nn.Parameter}
_MOST_BINS = 2**31 - 64  # they are numbered in 32 bits, and so is what follows them in a table
_MANTISSA, _BIAS = 23, 127  # of float32, which all elements become


class _Bins(ctypes.Structure):
    _fields_ = (
        ("number", ctypes.c_int64),
        ("shift", ctypes.c_int64),
        ("zero", ctypes.c_int64),
        ("middle", ctypes.c_int64),
        ("edges", ctypes.c_void_p),
        ("last", ctypes.c_int64),
        ("half", ctypes.c_int64),
        ("low", ctypes.c_double),
        ("scale", ctypes.c_double),
    )


class _Binning(ctypes.Structure):
    """The struct `Binning` in the source."""

    _fields_ = (("task", Task), ("bins", _Bins))


def looped_bits(x: Tensor, axes: tuple[int, ...], bits: int, exponents: tuple[int, int], state: State) -> State | None:
    """Return the `counts` of the finite elements of `x` by sign, exponent and leading bits of the mantissa.

    Args:
        exponents: magnitudes from 2**first to below 2**second have bins of their own.
        state: what was observed before, to which this is added, in the same shapes and dtypes; or nothing.

    Returns:
        `counts` int64 [*kept axes, bins], as `reducers.kernels.triton.bins.binned_by_bits` returns them; `min` and `max` in the
        dtype of `x`; `nonfinite` int64, how many are left out. None if there are no loops, the first exponent is below -126, or
        the dtype or the strides of `x` are not supported.
    """
    first, end = exponents
    middle = (end - first << bits) + 1
    bins = _Bins(number=2 * middle + 1, shift=_MANTISSA - bits, zero=_BIAS + first << bits, middle=middle)
    return None if first <= -_BIAS else _counted(x, axes, "Bits", bins, state, work=1)


def looped_edges(x: Tensor, axes: tuple[int, ...], bounds: Tensor, even: tuple[float, float] | None, state: State) -> State | None:
    """Return the `counts` of the elements of `x` between bounds; the state is that of `looped_bits`, without extremes.

    Args:
        bounds: float32, ascending, on the CPU.
        even: the first bound, and bounds a unit, if a bin that these give is off by one at most; else None.

    Returns:
        `counts` int64 [*kept axes, bounds + 2]: below the first bound, between each two, from the last, and NaN.
    """
    if bounds.dtype is not torch.float32 or type(bounds) not in _PLAIN:
        return None
    number = len(bounds)
    half = 1 << number.bit_length() - 1
    edges = bounds if even else torch.cat((bounds, bounds.new_full((2 * half - 1 - number,), math.inf)))
    bins = _Bins(number=number + 2, last=number - 1, half=half, edges=edges.data_ptr())
    if even is None:
        return _counted(x, axes, "Edges", bins, state, work=number.bit_length())
    bins.low, bins.scale = even
    return _counted(x, axes, "Even", bins, state, work=2)


def _counted(x: Tensor, axes: tuple[int, ...], way: str, bins: _Bins, state: State, work: int) -> State | None:
    """Count in one of the ways that the source has. `work`: how many times as long as a read of an element it takes, at most."""
    x = x.resolve_neg()
    elements = ELEMENTS.get(x.dtype)
    if elements is None or x.device.type != "cpu" or type(x) not in _PLAIN or bins.number > _MOST_BINS:
        return None
    task = _task(tuple(x.shape), x.stride(), axes)
    function = None if task is None else loop_for("binned", elements, way)
    if task is None or function is None:
        return None
    kept = [size for axis, size in enumerate(x.shape) if axis not in axes]
    found = _begun(kept, bins.number, state, extremes=way == "Bits")
    if not {*map(type, found.values())} <= _PLAIN:
        return None
    binning = _Binning(task, bins)
    try:
        binning.task.x = x.data_ptr()
        for key, value in found.items():
            binning.task.results[BINNED.index(key)] = value.data_ptr()
    except RuntimeError:  # such as inside vmap
        return None
    size = work * x.nbytes + found["counts"].nbytes
    if not binning.task.x or in_threads(function, ctypes.byref(binning), 1, torch.get_num_threads(), size):
        return None
    return {key: value.to(x.dtype) if key in ("min", "max") else value for key, value in found.items()}


def _begun(kept: list[int], number: int, state: State, extremes: bool) -> State:
    """Return memory for results that holds what was observed before."""
    if state:
        floats = ("min", "max")
        return {key: value.to(torch.float32, copy=True) if key in floats else value.clone() for key, value in state.items()}
    counts = {"counts": torch.zeros((*kept, number), dtype=torch.int64, device="cpu")}
    if not extremes:
        return counts
    ends = (("min", math.inf), ("max", -math.inf))
    none = torch.zeros(kept, dtype=torch.int64, device="cpu")
    return {**counts, **{key: torch.full(kept, end, dtype=torch.float32, device="cpu") for key, end in ends}, "nonfinite": none}


@lru_cache(maxsize=1024)
def _task(shape: tuple[int, ...], strides: tuple[int, ...], axes: tuple[int, ...]) -> Task | None:
    return task_of(shape, strides, axes, None)
