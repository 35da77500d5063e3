"""The line of the user's program that called an operator, and the module in whose forward it stands."""

from __future__ import annotations

import linecache
import os
import sys
import sysconfig
from functools import cache
from pathlib import Path
from types import FrameType
from typing import NamedTuple

import torch
from torch import nn

_OTHERS = tuple(f"{folder}{os.sep}" for folder in (Path(torch.__file__).parent, Path(__file__).parents[2]))
_STANDARD = f"{sysconfig.get_paths()['stdlib']}{os.sep}"
_ENGINE = str(Path(torch.__file__).parent / "autograd" / "graph.py")


class SourceLine(NamedTuple):
    """A line of a program.

    Attributes:
        file: its path.
        number: of the line, from 1.
        text: of the line; "" if the file cannot be read.
    """

    file: str
    number: int
    text: str

    def __str__(self) -> str:
        return f"{Path(self.file).name}:{self.number}" + (f": {self.text}" if self.text else "")


def caller() -> SourceLine | None:
    """The innermost line outside of torch, this package and the standard library that led here; None if there is none.

    In a backward only what a user's own backward calls has such a line: the line that began the backward tells nothing.
    """
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        file = frame.f_code.co_filename
        if file == _ENGINE:
            return None
        if _is_users(file):
            return SourceLine(file, frame.f_lineno, linecache.getline(file, frame.f_lineno).strip())
        frame = frame.f_back
    return None


def module_of_frame() -> tuple[nn.Module, nn.Module] | None:
    """The innermost module whose `forward` is running, and the outermost; None if none is."""
    frame: FrameType | None = sys._getframe(1)
    found: list[nn.Module] = []
    while frame is not None:
        if frame.f_code.co_name == "forward":
            module = frame.f_locals.get("self")
            if isinstance(module, nn.Module):
                found.append(module)
        frame = frame.f_back
    return (found[0], found[-1]) if found else None


@cache
def _is_users(file: str) -> bool:
    if file.startswith(_OTHERS) or file.startswith("<frozen"):
        return False
    return not file.startswith(_STANDARD) or "site-packages" in file
