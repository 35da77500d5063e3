"""Reducers as plain data and back, through the registry of classes: nothing is imported, evaluated or unpickled."""

from __future__ import annotations

from dataclasses import fields, is_dataclass
from typing import Any

from reducers.core import Reducer, _registry
from reducers.errors import RecipeError, ReducerError

__all__ = ["from_recipe", "to_recipe"]

_PLAIN = (str, int, float, bool, type(None))


def to_recipe(reducer: Reducer) -> dict[str, Any]:
    """The reducer as JSON-ready data.

    Raises:
        RecipeError: a field holds what data cannot express, such as a function.

    >>> from reducers import Mean
    >>> to_recipe(Mean("b c -> c"))
    {'type': 'Mean', 'pattern': 'b c -> c'}
    """
    cls = type(reducer)
    names = [name for name, known in _registry.items() if known is cls]
    if not names or not is_dataclass(reducer):
        raise RecipeError(f"{reducer!r} cannot be written as data: make {cls.__name__} a frozen dataclass")
    return {"type": names[0], **{field.name: _encode(getattr(reducer, field.name), reducer) for field in fields(reducer)}}


def _encode(value: Any, owner: Reducer) -> Any:
    if isinstance(value, Reducer):
        return to_recipe(value)
    if isinstance(value, _PLAIN):
        return value if value == value and value not in (float("inf"), float("-inf")) else {"float": str(value)}
    if isinstance(value, tuple):
        return [_encode(item, owner) for item in value]
    raise RecipeError(
        f"{type(owner).__name__} holds {value!r}, which cannot be written as data; "
        "its results are saved all the same, and merge when you pass the reducer to load"
    )


def from_recipe(recipe: object) -> Reducer:
    """The reducer that `to_recipe` described.

    Raises:
        RecipeError: the data is malformed, or names a reducer that no imported module defines.
    """
    if not isinstance(recipe, dict) or not isinstance(recipe.get("type"), str):
        raise RecipeError(f"no reducer recipe: {recipe!r:.200}")
    cls = _registry.get(recipe["type"])
    if cls is None or not is_dataclass(cls):
        raise RecipeError(f"reducer {recipe['type']!r} is not defined here: import the module that defines it before loading")
    known = {field.name for field in fields(cls)}
    unknown = set(recipe) - known - {"type"}
    if unknown:
        raise RecipeError(f"recipe of {recipe['type']!r} has fields {sorted(map(str, unknown))} that the class does not know")
    try:
        return cls.from_fields(**{name: _decode(value) for name, value in recipe.items() if name != "type"})
    except RecursionError:
        raise RecipeError(f"recipe of {recipe['type']!r} is nested too deeply") from None
    except (ReducerError, KeyError, TypeError, ValueError) as error:
        raise RecipeError(f"recipe of {recipe['type']!r} does not fit: {error}") from None


def _decode(value: Any) -> Any:
    if isinstance(value, dict):
        return float(value["float"]) if set(value) == {"float"} else from_recipe(value)
    if isinstance(value, list):
        return tuple(_decode(item) for item in value)
    return value
