"""Optional libraries, imported when they are needed."""

from __future__ import annotations

import importlib
from typing import Any

from recorders.errors import MissingExtraError

__all__ = ["require"]


def require(module: str, extra: str) -> Any:
    """Imports and returns an optional module; if it is not installed, raises a `MissingExtraError` that names the extra."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        library = module.partition(".")[0]
        raise MissingExtraError(f"{library} is not installed: pip install torch-recorders[{extra}]") from error
