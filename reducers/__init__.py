"""Pure online statistics over tensors."""

from reducers.combinators.groupby import GroupBy
from reducers.combinators.mapped import Postmap, Prefilter, Premap
from reducers.combinators.masked import Masked
from reducers.combinators.per_observation import PerObservation
from reducers.combinators.product import Product
from reducers.core.recipe import from_recipe, to_recipe
from reducers.core.reducer import Reducer
from reducers.core.statistic import Statistic
from reducers.distributions.categorical import CountByValue, DistinctCount, HeavyHitters
from reducers.distributions.histogram import Histogram
from reducers.distributions.quantile import Quantile
from reducers.distributions.quantisation import affine_qparams
from reducers.errors import (
    ArgumentError,
    DTypeError,
    EmptyStateError,
    NoHistoryError,
    NotMergeableError,
    PatternError,
    RecipeError,
    ReducerError,
    ReducerTypeError,
    StateError,
    StateMismatchError,
)
from reducers.kernels.parts import TensorPart
from reducers.multivariate.covariance import Covariance, CrossCovariance
from reducers.multivariate.matrices import condition_number, singular_values, spectral_norm, stable_rank
from reducers.multivariate.similarity import CKA, MinibatchCKA
from reducers.multivariate.spectrum import (
    correlation,
    effective_rank,
    eigenvalues,
    explained_variance_ratio,
    intrinsic_dimension,
    participation_ratio,
    principal_axes,
)
from reducers.samples.collect import Collect, First, Fold, Last
from reducers.samples.fingerprints import Fingerprints
from reducers.samples.reservoir import Reservoir
from reducers.samples.topk import BottomK, TopK
from reducers.samples.whole import Whole
from reducers.state import Result, State
from reducers.statistics.activity import Activity, Idle, Sparsity
from reducers.statistics.basic import Count, Extremes, Max, Mean, Min, Sum
from reducers.statistics.digest import Digest
from reducers.statistics.moments import Moments, Summary
from reducers.statistics.norm import Norm
from reducers.statistics.sketch import Sketch, sketch_distance
from reducers.statistics.weighted import WeightedMean, WeightedMoments
from reducers.temporal.ema import EMA, Difference, FirstNonfinite, TimeSince
from reducers.temporal.geometry import Geometry
from reducers.temporal.history import History
from reducers.temporal.scan import Scan
from reducers.temporal.traces import (
    ConditionalCumulativeTrace,
    ConditionalNearestTrace,
    CumulativeTrace,
    NearestTrace,
    ScaledCumulativeTrace,
    ScaledNearestTrace,
)
from reducers.temporal.window import EveryNth, Window

__version__ = "0.1.0"

__all__ = [
    "CKA",
    "EMA",
    "Activity",
    "ArgumentError",
    "BottomK",
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
    "Digest",
    "DistinctCount",
    "EmptyStateError",
    "EveryNth",
    "Extremes",
    "Fingerprints",
    "First",
    "FirstNonfinite",
    "Fold",
    "Geometry",
    "GroupBy",
    "HeavyHitters",
    "Histogram",
    "History",
    "Idle",
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
    "NotMergeableError",
    "PatternError",
    "PerObservation",
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
    "Scan",
    "Sketch",
    "Sparsity",
    "State",
    "StateError",
    "StateMismatchError",
    "Statistic",
    "Sum",
    "Summary",
    "TensorPart",
    "TimeSince",
    "TopK",
    "WeightedMean",
    "WeightedMoments",
    "Whole",
    "Window",
    "affine_qparams",
    "condition_number",
    "correlation",
    "effective_rank",
    "eigenvalues",
    "explained_variance_ratio",
    "from_recipe",
    "intrinsic_dimension",
    "participation_ratio",
    "principal_axes",
    "singular_values",
    "sketch_distance",
    "spectral_norm",
    "stable_rank",
    "to_recipe",
]
