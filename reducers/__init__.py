"""The algebra: pure online statistics over tensors."""

from reducers.basic import Count, Mean, Sum
from reducers.combine import Postmap, Premap, Product
from reducers.core import Reducer, Result, State, Statistic
from reducers.errors import (
    DTypeError,
    EmptyStateError,
    PatternError,
    RecipeError,
    ReducerError,
    ReducerTypeError,
    StateMismatchError,
)
from reducers.recipe import from_recipe, to_recipe

__all__ = [
    "Count",
    "DTypeError",
    "EmptyStateError",
    "Mean",
    "PatternError",
    "Postmap",
    "Premap",
    "Product",
    "RecipeError",
    "Reducer",
    "ReducerError",
    "ReducerTypeError",
    "Result",
    "State",
    "StateMismatchError",
    "Statistic",
    "Sum",
    "from_recipe",
    "to_recipe",
]
