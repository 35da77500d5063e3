"""Lenses: presets that say what to record in a network, and which charts to draw of it."""

from recorders.watch.charts import Chart
from recorders.watch.lenses.geometry import OutputGradientGeometry
from recorders.watch.lenses.lens import Lens, any_module, not_activation
from recorders.watch.lenses.losses import LossMetrics
from recorders.watch.lenses.spread import collected, running, statistics

__all__ = [
    "Chart",
    "Lens",
    "LossMetrics",
    "OutputGradientGeometry",
    "any_module",
    "collected",
    "not_activation",
    "running",
    "statistics",
]
