"""The algebra: pure online statistics over tensors."""

from reducers.basic import Count, Max, Mean, Min, Norm, Sum
from reducers.cell import Cell
from reducers.combine import Postmap, Premap, Product
from reducers.core import Reducer, Result, State, Statistic
from reducers.counts import Activity, Sparsity
from reducers.covariance import Covariance, CrossCovariance
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
from reducers.geometry import Geometry
from reducers.matrices import condition_number, singular_values, spectral_norm, stable_rank
from reducers.moments import Moments, Summary
from reducers.recipe import from_recipe, to_recipe
from reducers.similarity import CKA, MinibatchCKA
from reducers.spectrum import (
    correlation,
    effective_rank,
    eigenvalues,
    explained_variance_ratio,
    intrinsic_dimension,
    participation_ratio,
)

__all__ = [
    "CKA",
    "Activity",
    "ArgumentError",
    "Cell",
    "Collect",
    "Count",
    "Covariance",
    "CrossCovariance",
    "DTypeError",
    "EmptyStateError",
    "First",
    "Fold",
    "Geometry",
    "Last",
    "Max",
    "Mean",
    "Min",
    "MinibatchCKA",
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
    "condition_number",
    "correlation",
    "effective_rank",
    "eigenvalues",
    "explained_variance_ratio",
    "from_recipe",
    "intrinsic_dimension",
    "participation_ratio",
    "singular_values",
    "spectral_norm",
    "stable_rank",
    "to_recipe",
]
