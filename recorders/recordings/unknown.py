"""Why a subrecording that was loaded has no reducer, and what to do."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from reducers import from_recipe

__all__ = ["why_unknown"]


def why_unknown(recipe: Mapping[str, Any] | str | None) -> str:
    """Why there is no reducer for what a file says of it.

    >>> why_unknown({"type": "my.reducers:Above", "threshold": 1.0})
    "reducer 'Above' is not defined here: import the module 'my.reducers', which defines it, before loading"
    """
    if not isinstance(recipe, Mapping):
        return "the reducer holds a function, which is not saved: pass it, load(path, reducers={name: reducer})"
    try:
        from_recipe(recipe)
    # A registered class is constructed from untrusted values, and may raise anything.
    except Exception as error:
        return str(error)
    return "the reducer was not known here when this was loaded, or its states have another version: load it again"
