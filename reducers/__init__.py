"""The algebra: pure online statistics over tensors."""

from reducers.basic import Count, Extremes, Max, Mean, Min, Norm, Sum
from reducers.cell import Cell
from reducers.combine import Postmap, Premap, Product
from reducers.core import Reducer, Result, State, Statistic
from reducers.counting import CountByValue, DistinctCount, HeavyHitters
from reducers.counts import Activity, Sparsity
from reducers.covariance import Covariance, CrossCovariance
from reducers.errors import (
    ArgumentError,
    DTypeError,
    EmptyStateError,
    NoHistoryError,
    PatternError,
    RecipeError,
    ReducerError,
    ReducerTypeError,
    StateMismatchError,
)
from reducers.exemplars import Collect, First, Fold, Last
from reducers.gates import Masked, Prefilter
from reducers.geometry import Geometry
from reducers.groups import GroupBy
from reducers.histogram import Histogram
from reducers.history import History
from reducers.matrices import condition_number, singular_values, spectral_norm, stable_rank
from reducers.moments import Moments, Summary
from reducers.quantile import Quantile
from reducers.recipe import from_recipe, to_recipe
from reducers.reservoir import Reservoir
from reducers.similarity import CKA, MinibatchCKA
from reducers.spectrum import (
    correlation,
    effective_rank,
    eigenvalues,
    explained_variance_ratio,
    intrinsic_dimension,
    participation_ratio,
)
from reducers.temporal import EMA, Difference, FirstNonfinite, TimeSince
from reducers.topk import BottomK, TopK
from reducers.traces import (
    ConditionalCumulativeTrace,
    ConditionalNearestTrace,
    CumulativeTrace,
    NearestTrace,
    ScaledCumulativeTrace,
    ScaledNearestTrace,
)
from reducers.weighted import WeightedMean, WeightedMoments
from reducers.window import EveryNth, Window

__all__ = [
    "CKA",
    "EMA",
    "Activity",
    "ArgumentError",
    "BottomK",
    "Cell",
    "Collect",
    "ConditionalCumulativeTrace",
    "ConditionalNearestTrace",
    "Count",
    "CountByValue",
    "Covariance",
    "CrossCovariance",
    "CumulativeTrace",
    "DTypeError",
    "Difference",
    "DistinctCount",
    "EmptyStateError",
    "EveryNth",
    "Extremes",
    "First",
    "FirstNonfinite",
    "Fold",
    "Geometry",
    "GroupBy",
    "HeavyHitters",
    "Histogram",
    "History",
    "Last",
    "Masked",
    "Max",
    "Mean",
    "Min",
    "MinibatchCKA",
    "Moments",
    "NearestTrace",
    "NoHistoryError",
    "Norm",
    "PatternError",
    "Postmap",
    "Prefilter",
    "Premap",
    "Product",
    "Quantile",
    "RecipeError",
    "Reducer",
    "ReducerError",
    "ReducerTypeError",
    "Reservoir",
    "Result",
    "ScaledCumulativeTrace",
    "ScaledNearestTrace",
    "Sparsity",
    "State",
    "StateMismatchError",
    "Statistic",
    "Sum",
    "Summary",
    "TimeSince",
    "TopK",
    "WeightedMean",
    "WeightedMoments",
    "Window",
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
