"""Compiles the loop, once for each family of statistics and dtype: a second of the compiler's time, kept in the user's cache."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from functools import cache
from typing import Any

import torch

from reducers.kernels.loop.libraries import library as library_of

__all__ = ["ELEMENTS", "WEIGHTS", "build", "build_binned", "build_join", "build_rows", "build_weighted"]

ELEMENTS = {torch.float32: "Float32", torch.bfloat16: "BFloat16", torch.float16: "Float16"}
"""The dtypes that the loop takes, and what it calls them."""

WEIGHTS = {**ELEMENTS, torch.float64: "Float64", torch.bool: "Byte"}
"""The dtypes of weights that the loop takes, and what it calls them."""

_SWEEP = (ctypes.c_void_p, ctypes.c_int64, ctypes.c_int64)  # tasks, how many, and threads


@cache
def build(statistics: int, elements: str) -> Any:
    """Return the function `reducers_sweep` for these statistics and elements; None if it cannot be compiled, which is no error.

    Args:
        statistics: the sum of bits of `enum What` in `sums.h`.
        elements: one of the values of `ELEMENTS`.
    """
    return _built("sweep.cpp", [f"-DSTATISTICS={statistics}", f"-DELEMENTS={elements}"])


@cache
def build_join(statistics: int, elements: str) -> Any:
    """Return the function `reducers_join` for these statistics and elements; None if it cannot be compiled."""
    arguments = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int64, ctypes.c_void_p, ctypes.c_int64, ctypes.c_int64]
    return _built("sweep.cpp", [f"-DSTATISTICS={statistics}", f"-DELEMENTS={elements}"], "reducers_join", arguments)


@cache
def build_rows(statistics: int, elements: str) -> Any:
    """Return the function `reducers_rows` for these statistics and elements; None if it cannot be compiled."""
    return _built("sweep.cpp", [f"-DSTATISTICS={statistics}", f"-DELEMENTS={elements}"], "reducers_rows")


@cache
def build_weighted(elements: str, weights: str) -> Any:
    """Return the same function for weighted statistics.

    Args:
        weights: one of the values of `WEIGHTS`.
    """
    return _built("weighted.cpp", [f"-DELEMENTS={elements}", f"-DWEIGHTS={weights}"])


@cache
def build_binned(way: str, elements: str) -> Any:
    """Return the same function for counts in bins.

    Args:
        way: the name of one of the structs in the source that find bins.
    """
    return _built("binned.cpp", [f"-DBINS={way}", f"-DELEMENTS={elements}"])


def _built(source: str, defines: list[str], name: str = "reducers_sweep", arguments: Sequence[Any] = _SWEEP) -> Any:
    library = library_of(source, defines)
    if library is None:
        return None
    function = getattr(library, name)
    function.restype, function.argtypes = ctypes.c_int, list(arguments)
    return function
