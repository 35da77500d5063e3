"""Lenses: presets that say what to record in a network, and which charts to draw of it."""

from recorders.watch.charts import Across, Chart
from recorders.watch.lenses.activation import OutputActivation, ParameterGradientActivation
from recorders.watch.lenses.attention import AttentionEntropy
from recorders.watch.lenses.distribution import Outliers, Quantiles
from recorders.watch.lenses.geometry import OutputGradientGeometry, ParameterGradientGeometry, ParameterUpdateGeometry
from recorders.watch.lenses.health import DeadUnits, NonFinite, UpdateRatio
from recorders.watch.lenses.lens import Lens, any_module, collected, not_activation, running, statistics
from recorders.watch.lenses.losses import LossMetrics
from recorders.watch.lenses.noise import GradientNoise
from recorders.watch.lenses.norms import OutputNorm, ParameterCond, ParameterNorm
from recorders.watch.lenses.saturation import Saturation
from recorders.watch.lenses.spectrum import EffectiveRank

__all__ = [
    "Across",
    "AttentionEntropy",
    "Chart",
    "DeadUnits",
    "EffectiveRank",
    "GradientNoise",
    "Lens",
    "LossMetrics",
    "NonFinite",
    "Outliers",
    "OutputActivation",
    "OutputGradientGeometry",
    "OutputNorm",
    "ParameterCond",
    "ParameterGradientActivation",
    "ParameterGradientGeometry",
    "ParameterNorm",
    "ParameterUpdateGeometry",
    "Quantiles",
    "Saturation",
    "UpdateRatio",
    "any_module",
    "collected",
    "not_activation",
    "running",
    "statistics",
]
