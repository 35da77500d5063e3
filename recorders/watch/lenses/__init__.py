"""Named presets: what to watch in a network, and how to show it."""

from recorders.watch.lenses.geometry import OutputGradientGeometry
from recorders.watch.lenses.lens import Lens, any_module, not_activation
from recorders.watch.lenses.losses import LossMetrics
from recorders.watch.lenses.spread import collected, running, statistics

__all__ = ["Lens", "LossMetrics", "OutputGradientGeometry", "any_module", "collected", "not_activation", "running", "statistics"]
