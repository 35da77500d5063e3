"""Converts reducers to plain data and back through a registry of classes; nothing is imported, evaluated or unpickled."""

from __future__ import annotations

import reprlib
from dataclasses import fields, is_dataclass
from typing import Any

from reducers.core.reducer import Reducer, registry
from reducers.errors import RecipeError, ReducerError

_MAX_DEPTH = 64
_MAX_BITS = 1000  # longer integers do not fit a float
_PLAIN_TYPES = (str, int, float, bool, type(None))


def to_recipe(reducer: Reducer) -> dict[str, Any]:
    """Return the reducer as JSON-serialisable data.

    Raises:
        RecipeError: a field cannot be written as data, for example a function.

    >>> from reducers import Mean
    >>> to_recipe(Mean("b c -> c"))
    {'type': 'Mean', 'pattern': 'b c -> c'}
    """
    cls = type(reducer)
    names = [name for name, known in registry.items() if known is cls]
    if not names or not is_dataclass(reducer):
        raise RecipeError(f"{reducer!r} cannot be written as data: make {cls.__name__} a frozen dataclass")
    return {"type": names[0], **{field.name: _encode(getattr(reducer, field.name), reducer) for field in fields(reducer)}}


def _encode(value: Any, owner: Reducer) -> Any:
    if isinstance(value, Reducer):
        return to_recipe(value)
    if isinstance(value, _PLAIN_TYPES):
        return value if value == value and value not in (float("inf"), float("-inf")) else {"float": str(value)}
    if isinstance(value, complex):
        return {"complex": [_encode(value.real, owner), _encode(value.imag, owner)]}
    if isinstance(value, tuple):
        return [_encode(item, owner) for item in value]
    raise RecipeError(
        f"{type(owner).__name__} holds {value!r}, which cannot be written as data; "
        "its results are saved nevertheless, and can be merged if you pass the reducer to load"
    )


def from_recipe(recipe: object) -> Reducer:
    """Return the reducer that `to_recipe` wrote.

    Raises:
        RecipeError: the data is malformed, or names a reducer that no imported module defines.
    """
    return _build(recipe, 0)


def _build(recipe: object, depth: int) -> Reducer:
    if not isinstance(recipe, dict) or not isinstance(recipe.get("type"), str):
        raise RecipeError(f"not a reducer recipe: {reprlib.repr(recipe)}")
    name = recipe["type"]
    cls = registry.get(name)
    if cls is None or not is_dataclass(cls):
        raise RecipeError(_not_defined(name))
    unknown = set(recipe) - {field.name for field in fields(cls)} - {"type"}
    if unknown:
        raise RecipeError(f"recipe of {name!r} has fields {sorted(map(str, unknown))} that the class does not know")
    try:
        return cls.from_fields(**{field: _decode(value, depth + 1) for field, value in recipe.items() if field != "type"})
    except RecipeError:
        raise
    except (ReducerError, KeyError, TypeError, ValueError) as error:
        raise RecipeError(f"recipe of {name!r} does not fit: {error}") from None


def _not_defined(name: str) -> str:
    module, _, cls = name.rpartition(":")
    what = f"reducer {cls!r:.100} is not defined here: "
    if not module:
        return what + "this version of the library has none of this name"
    if module in ("__main__", "__mp_main__"):
        return what + "the script that recorded defined it; put it into a module, and import that before loading"
    return what + f"import the module {module!r:.100}, which defines it, before loading"


def _decode(value: Any, depth: int) -> Any:
    if depth > _MAX_DEPTH:
        raise RecipeError(f"a recipe is nested more than {_MAX_DEPTH} deep")
    if isinstance(value, dict):
        if set(value) == {"complex"}:
            return complex(*_decode(value["complex"], depth + 1))
        return float(value["float"]) if set(value) == {"float"} else _build(value, depth)
    if isinstance(value, int) and value.bit_length() > _MAX_BITS:
        raise RecipeError(f"a recipe has an integer of {value.bit_length()} bits; at most {_MAX_BITS} are allowed")
    if isinstance(value, list):
        return tuple(_decode(item, depth + 1) for item in value)
    return value
