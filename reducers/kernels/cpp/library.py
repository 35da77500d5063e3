"""The loops in C++, which were built with the package: the library for this processor, and the functions in it."""

from __future__ import annotations

import ctypes
import logging
import sys
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any

import torch

from reducers._torch import cpu_library
from reducers.kernels.cpp.build import LOOPS, ROOT, hash_of_sources, loops_for
from reducers.kernels.cpp.task import Task

ELEMENTS = {torch.float32: "Float32", torch.bfloat16: "BFloat16", torch.float16: "Float16"}
"""The dtypes that the loops take, and what they call them."""

WEIGHTS = {**ELEMENTS, torch.float64: "Float64", torch.bool: "Byte"}
"""The dtypes of weights that the loops take, and what they call them."""

LOGGER = logging.getLogger("reducers")

_BETTER_FIRST = {"AVX512": ("AVX512", "AVX2"), "AVX2": ("AVX2",)}
_SWEEP = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.c_int64, ctypes.c_int64)  # tasks, how many, and threads
_SLOWER = "so PyTorch's own operations reduce CPU tensors, which takes several times as long"
_WITHOUT = f"{_SLOWER}. With a C++ compiler, such as the package g++ of your system, `pip install` builds them"


@cache
def library() -> ctypes.CDLL | None:
    """Return the library of the loops; None if there is none for this processor, which is said once, as a line of the log."""
    found, why = _loaded()
    if why:
        LOGGER.warning(why)
    return found


def state() -> str:
    """Return which loops are used, or why there are none."""
    found, why = _loaded()
    return why if found is None else f"the loops in C++ are those of {Path(found._name).name}"


def in_order() -> bool:
    """Return whether there are loops for this processor."""
    return _loaded()[0] is not None


@cache
def _loaded() -> tuple[ctypes.CDLL | None, str]:
    """Return the library, or why there is none."""
    if not sys.platform.startswith("linux"):
        return None, f"the loops in C++ are for Linux, {_SLOWER}"
    capability = torch.backends.cpu.get_cpu_capability()
    paths = [ROOT / loops_for(name) for name in _BETTER_FIRST.get(capability, ("DEFAULT",))]
    path = next(filter(Path.is_file, paths), None)
    if path is None:
        return None, f"the loops in C++ are not built for this processor ({capability}), {_WITHOUT}"
    found, why = opened(path.relative_to(ROOT), LOOPS)
    if found is not None and found.reducers_task_size() != ctypes.sizeof(Task):
        found, why = None, f"{path} has other structs than its caller"
    if found is None:
        return None, f"the loops in C++ cannot be used: {why}, {_WITHOUT}"
    _share_threads(found)
    return found, ""


def opened(path: Path, *folders: Path) -> tuple[ctypes.CDLL | None, str]:
    """Return a library that was built with the package; or None, and why.

    Args:
        path: from the folder of both packages on.
        folders: those of its sources; if these are here, and are others than it was built from, it is not used.
    """
    try:
        found = ctypes.CDLL(str(ROOT / path))
        found.reducers_sources.restype = ctypes.c_char_p
        sources = found.reducers_sources().decode()
    except (OSError, AttributeError) as error:
        return None, str(error)
    if hash_of_sources(*folders) not in ("", sources):
        return None, f"{path} was built from other sources than those beside it; run `python {LOOPS / 'build.py'}`"
    return found, ""


def _share_threads(found: ctypes.CDLL) -> None:
    """Tell the library to start the threads of PyTorch's OpenMP, if PyTorch has one; without it one thread does all."""
    with suppress(OSError):
        found.reducers_set_openmp(ctypes.c_void_p(cpu_library()._handle))


@cache
def loop_for(name: str, elements: str = "", asked: int | str | None = None) -> Any:
    """Return a loop; None if there is none.

    Args:
        name: "sweep", or "rows" for many tensors, each into a row; "weighted", "binned", "sketch"; or "digest", for all dtypes.
        elements: one of the values of `ELEMENTS`; or "Float64", of "sketch".
        asked: of "sweep" and "rows" the sum of bits of `enum What` in `accumulate.h`; of "weighted" one of the values of `WEIGHTS`;
            of "binned" the name of one of the structs in the source that find bins.
    """
    found = library()
    if found is None:
        return None
    find = getattr(found, f"reducers_{name}_{elements}".rstrip("_"))
    find.restype = ctypes.c_void_p
    given = ctypes.c_int64(asked) if isinstance(asked, int) else asked and asked.encode()
    address = find() if given is None else find(given)
    return None if address is None else _SWEEP(address)


@cache
def join() -> Any:
    """Return the function that joins rows of a table; None if there is none."""
    found = library()
    if found is None:
        return None
    pointer, number = ctypes.c_void_p, ctypes.c_int64
    found.reducers_join.argtypes = [pointer, pointer, number, pointer, number, number]
    return found.reducers_join
