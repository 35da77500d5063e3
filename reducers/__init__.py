"""The algebra: pure online statistics over tensors."""

from reducers.basic import Count, Max, Mean, Min, Norm, Sum
from reducers.combine import Postmap, Premap, Product
from reducers.core import Reducer, Result, State, Statistic
from reducers.errors import (
    ArgumentError,
    DTypeError,
    EmptyStateError,
    PatternError,
    RecipeError,
    ReducerError,
    ReducerTypeError,
    StateMismatchError,
)
from reducers.exemplars import Collect, First, Fold, Last
from reducers.moments import Moments, Summary
from reducers.recipe import from_recipe, to_recipe

__all__ = [
    "ArgumentError",
    "Collect",
    "Count",
    "DTypeError",
    "EmptyStateError",
    "First",
    "Fold",
    "Last",
    "Max",
    "Mean",
    "Min",
    "Moments",
    "Norm",
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
    "Summary",
    "from_recipe",
    "to_recipe",
]
