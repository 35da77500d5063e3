"""Observations in graphs that are read in C++: by the loops, or copied and reduced later."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import NamedTuple

from torch import Tensor

from reducers.combinators.rows import statistics_of
from reducers.core.inputs import observation
from reducers.core.patterns import arrange
from reducers.core.reducer import Reducer
from reducers.kernels.dispatch import BIG_IN_GRAPH
from reducers.kernels.loop.layout import MOST_AXES
from reducers.kernels.loop.reading import Pack, kinds_of, reading_library
from reducers.kernels.loop.sweeping import are_numbers

__all__ = ["GraphObservation", "copied_observation", "graph_observations", "is_faster_outside"]


class GraphObservation(NamedTuple):
    """An observation as a statistic arranges it, for a `Reader`.

    Attributes:
        x: the tensor.
        axes: those that are reduced.
        columns: the keys of the state, and which statistic each of them is; none if the tensor is kept as it is.
        threshold: see `Statistic.threshold`.
        kinds: the shape and the dtype of what the state will hold, by key; by "" those of the tensor that is kept.
    """

    x: Tensor
    axes: tuple[int, ...]
    columns: Mapping[str, str]
    threshold: float
    kinds: Mapping[str, Pack]


def graph_observations(reducer: Reducer, x: Tensor) -> list[GraphObservation] | None:
    """Return the observation as each of the statistics that `reducer` is made of arranges it, with the keys of the reducer's state.

    Returns:
        None if the loop does not compute all of them, or there is no compiler for it.

    Raises:
        PatternError: a pattern does not match the shape of `x`.
    """
    found = []
    for prefix, statistic in statistics_of(reducer) or ():
        if not statistic.columns:
            return None
        arranged, axes = arrange(observation(statistic, (x,)), statistic.pattern)
        columns = {prefix + key: column for key, column in statistic.columns.items()}
        kinds = kinds_of(arranged, axes, columns)
        if kinds is None:
            return None
        found.append(GraphObservation(arranged.resolve_neg(), axes, columns, statistic.threshold, kinds))
    return found or None


def copied_observation(reducer: Reducer, x: Tensor) -> list[GraphObservation] | None:
    """Return the observation as it is, in the form of the same, if it is small and `reducer` takes many at once; otherwise None."""
    small = are_numbers(x.shape) and 0 < x.numel() < BIG_IN_GRAPH and x.ndim <= MOST_AXES
    if not small or x.device.type != "cpu" or not reducer.batchable or reading_library() is None:
        return None
    return [GraphObservation(x.resolve_neg().resolve_conj(), (), {}, 0.0, {"": Pack(1, tuple(x.shape), x.dtype)})]


def is_faster_outside(xs: Iterable[Tensor]) -> bool:
    """Return whether an update outside of the graph takes less than what the compiler makes of it: if tensors on a CPU are big.

    Sorting and counting bins take several times as long in a graph, and minutes to compile in a net of many layers.
    """
    found = list(xs)
    on_cpu = all(x.device.type == "cpu" for x in found)
    return on_cpu and (not are_numbers([size for x in found for size in x.shape]) or sum(x.numel() for x in found) >= BIG_IN_GRAPH)
