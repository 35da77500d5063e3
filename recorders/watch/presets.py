"""Presets: recorders for what everybody records, ready for `.modules(net)`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import nn

from recorders.monitors.forward import ForwardMonitor
from recorders.monitors.parameters import ParameterUpdateMonitor
from recorders.recorder.recorder import Recorder
from recorders.watch.diagnosis.health import health
from recorders.watch.divergence.runs.fingerprints import fingerprints
from recorders.watch.lenses.attention import entropies, probabilities
from recorders.watch.lenses.distribution import Outliers
from recorders.watch.lenses.health import update_ratio as ratio_of
from recorders.watch.lenses.lens import Lens, running
from recorders.watch.lenses.noise import GradientNoise
from reducers import (
    Collect,
    Extremes,
    Masked,
    Norm,
    PerObservation,
    Product,
    Result,
    State,
    affine_qparams,
)
from reducers.core.reducer import check_size

__all__ = [
    "attention_entropy",
    "calibration",
    "fingerprints",
    "gradient_noise",
    "health",
    "mup_coordinates",
    "outliers",
    "update_ratio",
]


def calibration(bits: int = 8, per_channel: bool = False) -> Recorder:
    """The range of each output, and with which scale and zero point it fits signed integers of so many bits.

    Of each layer there are `min`, `max`, `scale` and `zero_point`, in the form that `affine_qparams` defines.

    Args:
        bits: of the integers, from 2 to 16.
        per_channel: a range for each channel, in place of one for the whole output.

    Raises:
        ArgumentError: there are no such integers.
    """
    return Recorder(ForwardMonitor(IntegerRange("channels" if per_channel else "... ->", bits)))


def outliers() -> Recorder:
    """Features that stick out, which make numbers of few bits coarse: what the lens `Outliers` shows, of every layer."""
    return _of(Outliers(record_eval=True))


def update_ratio() -> Recorder:
    """How much a step changes weights, relative to their norm: what the lens `UpdateRatio` shows, of every weight."""
    return Recorder(ParameterUpdateMonitor(Product(ratio=Collect()), "weight", op_=ratio_of))


def gradient_noise(batch_size: int) -> Recorder:
    """Up to which batch size more samples make a step better: what the lens `GradientNoise` shows, of every parameter.

    Args:
        batch_size: the number of samples that a step uses, over all micro-batches and ranks.

    Raises:
        LensError: `batch_size` is not a positive number.
    """
    return _of(GradientNoise(batch_size=batch_size))


def attention_entropy(mask: str | None = None) -> Recorder:
    """How widely attention is spread over its keys: what the lens `AttentionEntropy` shows.

    It watches `nn.MultiheadAttention` and classes whose names end with Attention, if they return their probabilities.

    Args:
        mask: the name of a mask of queries, of shape (batch, time), that `recorder.given` gives: those that are False, such as
            padding, are left out. None if all count.
    """
    if mask is None:
        return Recorder(_AttentionMonitor(running().premap(entropies), op_=probabilities))
    return Recorder(_AttentionMonitor(Masked(running()), op_=_entropies_by_query, given=mask))


def mup_coordinates() -> Recorder:
    """The mean magnitude of each output in each training forward: if it grows or shrinks with the width, so should the rates not.

    That is the coordinate check of G. Yang et al., "Tensor Programs V" (arXiv:2203.03466), appendix D.1: record some steps of nets
    of several widths, and compare the same step and layer.
    """
    return Recorder(ForwardMonitor(PerObservation(Norm(p=1, normalize=True), Collect()), eval_update=False))


@dataclass(frozen=True)
class IntegerRange(Extremes):
    """Smallest and largest finite element, with the scale and the zero point for signed integers of so many bits."""

    bits: int = 8

    def __post_init__(self) -> None:
        super().__post_init__()
        check_size(self, "bits", 2, 16)

    def read(self, state: State) -> Result:
        scale, zero_point = affine_qparams(state["min"], state["max"], self.bits)
        return {"min": state["min"], "max": state["max"], "scale": scale, "zero_point": zero_point}


class _AttentionMonitor(ForwardMonitor):
    """A monitor that a recorder puts on attention only."""

    def applies(self, module: nn.Module) -> bool:
        return any(kind.__name__.endswith("Attention") for kind in type(module).__mro__)


def _entropies_by_query(output: Any) -> Any:
    """The entropies of attention, (batch, time) or (batch, time, heads); None if there are no probabilities."""
    found = probabilities(output)
    if found is None:
        return None
    found = entropies(found)
    return found.movedim(1, -1) if found.ndim == 3 else found  # heads come before queries


def _of(lens: Lens) -> Recorder:
    """A recorder with the monitors of a lens; of one monitor the subrecorders have the names of the modules."""
    monitors = tuple(lens.monitors.values())
    return Recorder(monitors[0]) if len(monitors) == 1 else Recorder(None, budget=None, **lens.monitors)
