"""Counts calls of functions: time would tell of the machine."""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import recorders
import reducers

OURS = tuple(str(Path(package.__file__).parent) for package in (recorders, reducers))


@contextmanager
def profiled(see: Callable[[FrameType, str, Any], object]) -> Iterator[None]:
    """Calls `see` at each call and return within the block, in this thread.

    No garbage is collected meanwhile: that calls functions, too (of weak references, and of hypothesis, which times it),
    and when it comes depends on what ran before.
    """
    before, collects = sys.getprofile(), gc.isenabled()
    gc.collect()
    gc.disable()
    sys.setprofile(see)
    try:
        yield
    finally:
        sys.setprofile(before)
        if collects:
            gc.enable()


def calls_of(run: Callable[[], object]) -> int:
    """How many functions `run` calls, those written in C included."""
    return _counted(run, lambda _, event: event in ("call", "c_call"))


def our_calls_of(run: Callable[[], object]) -> int:
    """How many functions of the library `run` calls."""
    return _counted(run, lambda frame, event: event == "call" and frame.f_code.co_filename.startswith(OURS))


def _counted(run: Callable[[], object], counts: Callable[[FrameType, str], bool]) -> int:
    found = 0

    def see(frame: FrameType, event: str, _: Any) -> None:
        nonlocal found
        found += counts(frame, event)

    with profiled(see):
        run()
    return found
