"""The pattern "channels": found in reducers, and replaced by the pattern of a layer."""

from __future__ import annotations

from dataclasses import fields, is_dataclass
from typing import Any

from reducers.core.patterns import CHANNELS
from reducers.core.reducer import Reducer


def has_channels(reducer: Reducer) -> bool:
    """Return whether a pattern of `reducer`, or of a reducer inside it, is `"channels"`.

    >>> from reducers import Activity, Mean, Product
    >>> has_channels(Product(mean=Mean(), active=Activity("channels"))), has_channels(Mean())
    (True, False)
    """
    return with_channels(reducer, "... c -> c") is not reducer


def with_channels(reducer: Reducer, pattern: str) -> Reducer:
    """Return the reducer with `pattern` in place of `"channels"`, inside it too; the same object if there is none.

    >>> from reducers import Activity, Product
    >>> with_channels(Product(active=Activity("channels")), "b c ... -> c")
    Product(active=Activity(pattern='b c ... -> c', eps=1e-08, death=False))
    """
    if not is_dataclass(reducer):
        return reducer
    given = {field.name: getattr(reducer, field.name) for field in fields(reducer)}
    found = {name: _replaced(name, value, pattern) for name, value in given.items()}
    same = all(found[name] is value for name, value in given.items())
    return reducer if same else type(reducer).from_fields(**found)


def _replaced(name: str, value: Any, pattern: str) -> Any:
    if isinstance(value, Reducer):
        return with_channels(value, pattern)
    if isinstance(value, tuple):
        items = tuple(_replaced("", item, pattern) for item in value)
        return value if all(new is old for new, old in zip(items, value, strict=True)) else items
    return pattern if name.startswith("pattern") and isinstance(value, str) and value == CHANNELS else value
