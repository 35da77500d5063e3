"""Ranges for quantisation, from one recording of `presets.calibration`, and files of them for other libraries."""

from recorders.watch.calibration.distribution import Distribution
from recorders.watch.calibration.formats import to_compressed_tensors, to_imatrix, to_modelopt, to_torchao
from recorders.watch.calibration.methods import ClippingRange, entropy, minmax, mse, percentile
from recorders.watch.calibration.ranges import Importance, Scheme, importance, ranges, weight_ranges

__all__ = [
    "ClippingRange",
    "Distribution",
    "Importance",
    "Scheme",
    "entropy",
    "importance",
    "minmax",
    "mse",
    "percentile",
    "ranges",
    "to_compressed_tensors",
    "to_imatrix",
    "to_modelopt",
    "to_torchao",
    "weight_ranges",
]
