"""Visualizer: one method that shows charts."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from typing import Any, Protocol, runtime_checkable

from recorders.errors import MissingExtraError
from recorders.watch.charts import ChartView

__all__ = ["Visualizer", "require"]


@runtime_checkable
class Visualizer(Protocol):
    """Anything with this one method."""

    def show(self, tick: int, charts: Sequence[ChartView]) -> None:
        """Called after each tick; the numbers of this tick, and of all before, are in the views."""


def require(module: str, extra: str) -> Any:
    """The optional module.

    Raises:
        MissingExtraError: it is not installed; names the extra that brings it.
    """
    try:
        return importlib.import_module(module)
    except ImportError as error:
        library = module.partition(".")[0]
        raise MissingExtraError(f"{library} is not installed: pip install torch-recorders[{extra}]") from error
