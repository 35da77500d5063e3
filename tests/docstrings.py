"""Parts of docstrings."""

from __future__ import annotations

import inspect
import re
from typing import Any

__all__ = ["said"]


def said(thing: Any, part: str) -> str:
    """What a docstring says below the line of this part, such as "Returns"."""
    found = re.search(rf"^{part}:\n(.*?)(?=^\S|\Z)", inspect.getdoc(thing) or "", flags=re.MULTILINE | re.DOTALL)
    return found[1] if found else ""
