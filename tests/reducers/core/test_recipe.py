"""Recipes: reducers as data and back, and data that is none."""

from __future__ import annotations

import json
import reprlib
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from names import name_of

from reducers import Geometry, Max, Mean, NearestTrace, Norm, Product, RecipeError, Reducer, Sum, from_recipe, to_recipe


@dataclass(frozen=True)
class Doubled(Sum):
    """A reducer defined by a user."""

    factors: tuple[float, ...] = (2.0,)


@pytest.mark.parametrize(
    "reducer",
    [
        Mean("b c -> c"),
        Norm(p=float("inf")),
        Product(mean=Mean(), deep=Product(top=Max("b c -> c"))),
        Geometry(Product(m=Mean()), normalize=True, eps=1e-3),
        Doubled(factors=(1.5, float("-inf"))),
        NearestTrace(time_constant=torch.tensor([[1.0, 2.0]]), amplitude=1 - 2j),
    ],
    ids=name_of,
)
def test_round_trip(reducer: Reducer) -> None:
    written = json.dumps(to_recipe(reducer), allow_nan=False)
    assert from_recipe(json.loads(written)) == reducer


def test_users_reducers_carry_their_module() -> None:
    assert to_recipe(Doubled())["type"] == f"{__name__}:Doubled"


@pytest.mark.parametrize(
    "reducer", [Mean().premap(torch.abs), Mean().postmap(abs), Product(a=Max().premap(torch.abs))], ids=name_of
)
def test_functions_are_no_data(reducer: Reducer) -> None:
    with pytest.raises(RecipeError, match="cannot be written as data"):
        to_recipe(reducer)


def nested(depth: int) -> dict[str, Any]:
    recipe: dict[str, Any] = {"type": "Mean"}
    for _ in range(depth):
        recipe = {"type": "Geometry", "reducer": recipe}
    return recipe


DEEP_LIST: list[Any] = []
for _ in range(1000):
    DEEP_LIST = [DEEP_LIST]


@pytest.mark.parametrize(
    ("recipe", "told"),
    [
        (None, "not a reducer recipe"),
        ([], "not a reducer recipe"),
        ({"pattern": "b -> b"}, "not a reducer recipe"),
        ({"type": 3}, "not a reducer recipe"),
        ({"type": "os.system"}, "not defined here: this version of the library has none"),
        ({"type": "os:system"}, "reducer .system. is not defined here: import the module .os., which defines it"),
        ({"type": "__main__:Mine"}, "not defined here: the script that recorded defined it"),
        ({"type": "Statistic"}, "does not fit"),
        ({"type": "Reducer"}, "not defined here"),
        ({"type": "Mean", "patern": "b -> b"}, "does not know"),
        ({"type": "Mean", "pattern": "b"}, "does not fit"),
        ({"type": "Mean", "pattern": 3}, "does not fit"),
        ({"type": "Norm", "p": {"float": "many"}}, "does not fit"),
        ({"type": "Norm", "p": {"float": []}}, "does not fit"),
        ({"type": "NearestTrace", "time_constant": 1.0, "amplitude": {"complex": 1}}, "does not fit"),
        ({"type": "NearestTrace", "time_constant": 1.0, "amplitude": {"complex": [1, "i"]}}, "does not fit"),
        ({"type": "Norm", "p": "2"}, "does not fit"),
        ({"type": "Moments", "correction": None}, "does not fit"),
        ({"type": "Geometry", "reducer": "Mean"}, "does not fit"),
        ({"type": "Geometry", "reducer": {"type": "None"}}, "not defined here"),
        ({"type": "Product"}, "does not fit"),
        ({"type": "Product", "parts": []}, "does not fit"),
        ({"type": "Product", "parts": 3}, "does not fit"),
        ({"type": "Product", "parts": [["a"]]}, "does not fit"),
        ({"type": "Product", "parts": [["a/b", {"type": "Mean"}]]}, "does not fit"),
        ({"type": "Fold"}, "does not fit"),
        (nested(1000), "nested more than"),
        ({"type": "Product", "parts": DEEP_LIST}, "nested more than"),
        (DEEP_LIST, "not a reducer recipe"),
    ],
    ids=reprlib.repr,
)
def test_data_from_anywhere_fails_with_one_typed_error(recipe: object, told: str) -> None:
    with pytest.raises(RecipeError, match=told):
        from_recipe(recipe)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.sampled_from(("type", "pattern", "p", "float", "parts")), inner, max_size=4)
    ),
    max_leaves=8,
)


@settings(max_examples=200)
@given(
    fields=st.dictionaries(
        st.sampled_from(("pattern", "p", "normalize", "reducer", "eps", "parts", "correction")), JSON, max_size=3
    )
)
@pytest.mark.parametrize("name", ["Mean", "Norm", "Product", "Geometry", "Moments"])
def test_random_fields_give_a_reducer_or_a_recipe_error(name: str, fields: dict[str, Any]) -> None:
    try:
        made = from_recipe({"type": name, **fields})
    except RecipeError:
        return
    assert isinstance(made, Reducer)
