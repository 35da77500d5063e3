"""Displays of a notebook that are updated in place."""

from __future__ import annotations

import importlib
import sys
from typing import Any

__all__ = ["Displays", "kernel"]


def kernel() -> Any:
    """The running shell of IPython if it is in a kernel, such as that of a notebook; None in a terminal."""
    ipython = sys.modules.get("IPython")
    shell = None if ipython is None else ipython.get_ipython()
    return shell if getattr(shell, "kernel", None) is not None else None


class Displays:
    """Outputs by key: the first `show` in a cell makes an output below it, further ones replace its content."""

    def __init__(self) -> None:
        self._handles: dict[object, tuple[object, Any]] = {}

    def show(self, key: object, data: dict[str, str]) -> None:
        """Shows data by MIME type, such as `{"text/plain": "..."}` or `{"image/png": base64}`."""
        cell = getattr(kernel(), "execution_count", None)
        made_in, handle = self._handles.get(key, (None, None))
        if handle is None or made_in != cell:
            display = importlib.import_module("IPython.display")
            self._handles[key] = cell, display.display(data, raw=True, display_id=True)
        else:
            handle.update(data, raw=True)

    def forget(self, key: object) -> None:
        """What is shown stays; the next `show` makes a new output."""
        self._handles.pop(key, None)
