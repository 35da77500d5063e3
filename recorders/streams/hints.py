"""Hints for the operating system: which bytes will be read soon, and that what was written may go to the disk now.

Otherwise a disk waits while checksums are computed, and reads in small pieces. Nothing depends on them; some systems have none.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import sys
from collections.abc import Iterable
from functools import cache
from pathlib import Path
from typing import Any

__all__ = ["read_soon", "write_soon"]

_SYNC_FILE_RANGE_WRITE = 2


def read_soon(path: Path, spans: Iterable[tuple[int, int]]) -> None:
    """Lets the system read these bytes of a file, from the first to before the second, without waiting for them."""
    if not hasattr(os, "posix_fadvise"):
        return
    with contextlib.suppress(OSError):
        handle = os.open(path, os.O_RDONLY)
        try:
            for start, end in spans:
                os.posix_fadvise(handle, start, end - start, os.POSIX_FADV_WILLNEED)
        finally:
            os.close(handle)


def write_soon(handle: int) -> None:
    """Lets the system begin to write to the disk what was written to a file; only `os.fsync` says when that is done."""
    if (sync_file_range := _sync_file_range()) is not None:
        sync_file_range(handle, 0, 0, _SYNC_FILE_RANGE_WRITE)


@cache
def _sync_file_range() -> Any:
    """The function of Linux; None elsewhere. Python has none for it."""
    found = getattr(ctypes.CDLL(None), "sync_file_range", None) if sys.platform == "linux" else None
    if found is not None:
        found.argtypes = [ctypes.c_int, ctypes.c_int64, ctypes.c_int64, ctypes.c_uint]
    return found
