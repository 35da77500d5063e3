"""Compiles the loop, once for each family of statistics and dtype: a second of the compiler's time, kept in the user's cache."""

from __future__ import annotations

import atexit
import ctypes
import hashlib
import os
import platform
import shutil
import stat
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from functools import cache, lru_cache
from pathlib import Path
from typing import Any

import torch

__all__ = ["ELEMENTS", "WEIGHTS", "build", "build_binned", "build_join", "build_reading", "build_rows", "build_weighted"]

ELEMENTS = {torch.float32: "Float32", torch.bfloat16: "BFloat16", torch.float16: "Float16"}
"""The dtypes that the loop takes, and what it calls them."""

WEIGHTS = {**ELEMENTS, torch.float64: "Float64", torch.bool: "Byte"}
"""The same of weights."""

FOLDER = Path(__file__).parent
TIMEOUT_S = 60.0
_SWEEP = (ctypes.c_void_p, ctypes.c_int64, ctypes.c_int64)  # tasks, how many, and threads
_FLAGS = ("-std=c++17", "-O2", "-fopenmp", "-fPIC", "-shared", "-Wno-psabi", "-Wl,--as-needed")


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


@cache
def build_reading() -> Any:
    """Return the library of the functions in `reading.cpp`; None if it cannot be compiled."""
    library = _library("reading.cpp", [], ["libtorch_cpu.so"])
    if library is None:
        return None
    address, number = ctypes.c_void_p, ctypes.c_int64
    kinds: dict[str, tuple[Any, list[Any]]] = {
        "reducers_set_pace": (None, [address]),
        "reducers_set_slow": (None, [address, address, address]),
        "reducers_raise_after": (None, [ctypes.py_object]),
        "reducers_read": (ctypes.c_int, [address, number, address, address]),
        "reducers_set_layout": (None, [address, number, address]),
        "reducers_append": (ctypes.c_int, [address, address]),
        "reducers_set_ready": (None, [address, number]),
        "reducers_filled": (ctypes.c_int, []),
        "reducers_take_calls": (number, [address]),
        "reducers_add_table": (None, [address]),
        "reducers_remove_table": (None, [address]),
    }
    for name, (result, arguments) in kinds.items():
        function = getattr(library, name)
        function.restype, function.argtypes = result, arguments
    return library


def _built(source: str, defines: list[str], name: str = "reducers_sweep", arguments: Sequence[Any] = _SWEEP) -> Any:
    library = _library(source, defines)
    if library is None:
        return None
    function = getattr(library, name)
    function.restype, function.argtypes = ctypes.c_int, list(arguments)
    return function


def _library(source: str, defines: list[str], linked: Sequence[str] = ()) -> ctypes.CDLL | None:
    compiler = _compiler()
    if compiler is None:
        return None
    try:
        return ctypes.CDLL(str(_compiled(compiler, FOLDER / source, defines, linked)))
    except (OSError, subprocess.SubprocessError):
        return None


@lru_cache(maxsize=1)
def _compiler() -> str | None:
    """The C++ compiler that CXX names, or one of the usual names; None if there is none, or the system is not Linux."""
    if sys.platform != "linux":
        return None
    return next(
        (found for name in (os.environ.get("CXX"), "c++", "g++", "clang++") if name and (found := shutil.which(name))), None
    )


def _compiled(compiler: str, source: Path, defines: list[str], linked: Sequence[str]) -> Path:
    """Return the path of the library, which is compiled if the cache does not have it.

    Args:
        linked: the libraries of PyTorch that it is linked with, besides that of OpenMP.
    """
    flags = [*_FLAGS, *defines, *(["-march=native"] if platform.machine() == "x86_64" else [])]
    # The same OpenMP as PyTorch's, whose threads would otherwise be in the way of another's.
    pytorch = Path(torch.__file__).parent / "lib"
    libraries = sorted(str(path) for name in ("libgomp*.so*", *linked) for path in pytorch.glob(name))
    text = b"".join(path.read_bytes() for path in (source, *sorted(source.parent.glob("*.h"))))
    told = (compiler, str(os.stat(compiler).st_mtime_ns), *flags, *libraries, _processor())
    key = hashlib.sha256(b"\0".join((text, *(part.encode() for part in told)))).hexdigest()[:32]
    folder = _cache()
    path = folder / f"{key}.so"
    if not path.exists():
        handle, name = tempfile.mkstemp(suffix=".so", dir=folder)
        os.close(handle)
        try:
            command = [compiler, *flags, str(source), *libraries, "-o", name]
            subprocess.run(command, check=True, capture_output=True, timeout=TIMEOUT_S, stdin=subprocess.DEVNULL)
            os.replace(name, path)  # several processes may compile it at once
        finally:
            Path(name).unlink(missing_ok=True)
    return path


@lru_cache(maxsize=1)
def _cache() -> Path:
    """The folder for libraries: in the user's cache, or one of this process if others may write there, or nobody can."""
    folder = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "torch_recorders"
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        found = folder.stat()
        if found.st_uid == os.getuid() and not found.st_mode & (stat.S_IWGRP | stat.S_IWOTH) and os.access(folder, os.W_OK):
            return folder
    except (OSError, RuntimeError):  # RuntimeError: there is no home
        pass
    own = tempfile.mkdtemp(prefix="torch_recorders_")
    atexit.register(shutil.rmtree, own, ignore_errors=True)  # a library that is loaded stays when its file is gone
    return Path(own)


def _processor() -> str:
    """What the processor can do: a cache may be shared by machines."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next((line for line in lines if line.lower().startswith(("flags", "features"))), platform.processor())
