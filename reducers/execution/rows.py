"""RowSweep: tensors of any shapes joined to rows of states, in two launches for each statistic, on devices with a kernel for it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from reducers.combinators.mapped import Postmap
from reducers.combinators.product import Product
from reducers.core.reducer import Reducer
from reducers.core.statistic import Statistic
from reducers.execution.stacked import lift_stacked
from reducers.kernels.dispatch import device_sweep_rows, row_dtypes
from reducers.state import State
from reducers.statistics.norm import Norm


def swept_dtypes(reducer: Reducer, x: Tensor) -> dict[str, torch.dtype] | None:
    """Return the dtypes of the rows that `RowSweep.update` returns for tensors like `x`, by key; None if it does not take them.

    Args:
        reducer: one that `is_stackable`.
    """
    found: dict[str, torch.dtype] = {}
    for prefix, statistic in statistics_of(reducer) or ():
        dtypes = row_dtypes(x, statistic.columns)
        if dtypes is None:
            return None
        found |= {prefix + key: dtype for key, dtype in dtypes.items()}
    return found


class RowSweep:
    """Joins tensors to rows of states. It remembers what the device knows of the tensors, which hardly changes between steps."""

    def __init__(self) -> None:
        self._tables: Any = None
        self._families: list[
            tuple[str, Any, float]
        ] = []  # what stands before the keys of each statistic, its columns and threshold
        self._reducer: Reducer | None = None

    def update(self, reducer: Reducer, rows: State, xs: Sequence[Tensor | None]) -> State | None:
        """Return the rows, each joined with the observation of its tensor, in new tensors.

        Args:
            reducer: one for which `swept_dtypes` returns the dtypes of the rows.
            rows: states, stacked along a first axis; {} if there are none yet.
            xs: for each row a tensor, or None if there is no observation; of one dtype, on one device, at least one of them.

        Returns:
            None if no kernel could be launched; there was a warning then.
        """
        if self._reducer is not reducer:
            statistics = statistics_of(reducer) or []
            self._families, self._reducer = [(prefix, one.columns, one.threshold) for prefix, one in statistics], reducer
        families = [
            (columns, threshold, {key: rows[prefix + key] for key in columns} if rows else {})
            for prefix, columns, threshold in self._families
        ]
        swept = device_sweep_rows(xs, families, self._tables)
        if swept is None:
            return None
        found, self._tables = swept
        states = zip(self._families, found, strict=True)
        return {prefix + key: value for (prefix, _, _), state in states for key, value in state.items()}


def norms(xs: Sequence[Tensor]) -> Tensor:
    """Return the L2 norms of many tensors of one dtype on one device: float64 [number of tensors]; NaN if an element is not finite.

    >>> norms([torch.tensor([3.0, 4.0]), torch.ones(1, 4)])
    tensor([5., 2.], dtype=torch.float64)
    """
    norm = Norm()
    lifted = RowSweep().update(norm, {}, xs) if swept_dtypes(norm, xs[0]) is not None else None
    lifted = lift_stacked(norm, xs) if lifted is None else lifted
    return torch.where(lifted["nonfinite"] > 0, torch.nan, lifted["power"].sqrt())


def reducers_in(reducer: Reducer, prefix: str = "") -> list[tuple[str, Reducer]]:
    """Return the reducers whose states make up that of a reducer, itself or its parts, with what stands before their keys in it."""
    if isinstance(reducer, Postmap) and reducer.looks_inside:
        return reducers_in(reducer.reducer, prefix)
    if not (isinstance(reducer, Product) and reducer.looks_inside):
        return [(prefix, reducer)]
    return [found for name, part in reducer.parts for found in reducers_in(part, f"{prefix}{name}/")]


def statistics_of(reducer: Reducer) -> list[tuple[str, Statistic]] | None:
    """Return what `reducers_in` does, if all of them are statistics; else None."""
    found = reducers_in(reducer)
    statistics = [(prefix, one) for prefix, one in found if isinstance(one, Statistic)]
    return statistics if len(statistics) == len(found) else None
