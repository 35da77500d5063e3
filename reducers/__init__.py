"""The algebra: pure online statistics over tensors."""

from reducers.basic import Count, Max, Mean, Min, Norm, Sum
from reducers.cell import Cell
from reducers.combine import Postmap, Premap, Product
from reducers.core import Reducer, Result, State, Statistic
from reducers.counts import Activity, Sparsity
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
from reducers.temporal import Geometry

__all__ = [
    "Activity",
    "ArgumentError",
    "Cell",
    "Collect",
    "Count",
    "DTypeError",
    "EmptyStateError",
    "First",
    "Fold",
    "Geometry",
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
    "Sparsity",
    "State",
    "StateMismatchError",
    "Statistic",
    "Sum",
    "Summary",
    "from_recipe",
    "to_recipe",
]
