"""Ranges for quantisation, from one recording of `presets.calibration`, and files of them for other libraries."""

from recorders.watch.calibration.compressed_tensors import to_compressed_tensors
from recorders.watch.calibration.distribution import Distribution
from recorders.watch.calibration.entropy import entropy
from recorders.watch.calibration.imatrix import to_imatrix
from recorders.watch.calibration.methods import ClippingRange, minmax, mse, percentile
from recorders.watch.calibration.modelopt import to_modelopt
from recorders.watch.calibration.ranges import Importance, Scheme, importance, ranges, weight_ranges
from recorders.watch.calibration.torchao import to_torchao

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
