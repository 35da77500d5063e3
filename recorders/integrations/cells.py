"""Cells: reducers by name, as a module that is used like `torchmetrics.MetricCollection`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import cast

from torch import Tensor, nn

from recorders.recordings.cell import Cell
from recorders.recordings.distributed.collectives import Group
from recorders.recordings.distributed.sync import sync
from recorders.recordings.recording import Recording
from reducers import Reducer, Result

__all__ = ["Cells"]


class Cells(nn.ModuleDict):
    """Reducers with their states, by name. Each call reduces the same inputs with all of them.

    `cells(x)` returns the results of this batch alone and reduces it; `update(x)` only reduces it, at half the cost. Unlike in
    torchmetrics, `compute` communicates with no other rank: `sync` does. `.to()`, `state_dict()` and `load_state_dict()` are those
    of modules. A single result is that of `cells[name]`.

    Args:
        reducers: by name.

    Raises:
        ReducerTypeError: one of them is not a reducer.
        KeyError: a name holds a dot, is empty, or is that of a method of `nn.ModuleDict`.

    >>> import torch
    >>> from reducers import Max, Mean
    >>> cells = Cells({"mean": Mean(), "top": Max()})
    >>> cells(torch.tensor([1.0, 2.0]))["mean"], cells(torch.tensor([6.0]))["mean"]
    (tensor(1.5000, dtype=torch.float64), tensor(6., dtype=torch.float64))
    >>> cells.compute()
    {'mean': tensor(3., dtype=torch.float64), 'top': tensor(6.)}
    """

    def __init__(self, reducers: Mapping[str, Reducer]) -> None:
        super().__init__()
        for name, reducer in reducers.items():
            self[name] = Cell(reducer)

    def forward(self, *xs: Tensor) -> dict[str, Result]:
        """Reduces a batch; returns its own results by name."""
        return {name: cell(*xs) for name, cell in self._cells().items()}

    def update(self, *xs: Tensor) -> None:  # type: ignore[override]  # of mappings; here as in torchmetrics
        """Reduces a batch."""
        for cell in self._cells().values():
            cell.push(*xs)

    def compute(self) -> dict[str, Result]:
        """Results of all batches, by name; cells without batches are left out."""
        return self.snapshot().compute()

    def reset(self) -> None:
        """Resets all states."""
        for cell in self._cells().values():
            cell.reset()

    def snapshot(self) -> Recording:
        """What was pushed so far, without modules."""
        return Recording({name: cell.snapshot() for name, cell in self._cells().items()})

    def sync(self, group: Group = None) -> dict[str, Result]:
        """Results of the batches of all ranks, by name, on every rank; those without batches are left out. States stay as they are.

        Raises:
            SyncError: see `recorders.recordings.distributed.sync.sync`.
        """
        return sync(self.snapshot(), group).compute()

    def _cells(self) -> dict[str, Cell]:
        return cast("dict[str, Cell]", self._modules)
