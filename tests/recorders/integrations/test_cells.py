"""Cells: reducers by name, used like a collection of metrics."""

from __future__ import annotations

from typing import Any

import torch

from recorders.integrations.cells import Cells
from reducers import Max, Mean, Product, Summary

A, B = torch.tensor([1.0, 2.0]), torch.tensor([6.0])


def new(*batches: torch.Tensor) -> Cells:
    cells = Cells({"mean": Mean(), "both": Product(top=Max(), all=Summary())})
    for batch in batches:
        cells.update(batch)
    return cells


def mean_and_top(results: dict[str, Any]) -> tuple[float, float]:
    return float(results["mean"]), float(results["both"]["top"])


def test_a_call_gives_the_results_of_its_batch_and_compute_those_of_all() -> None:
    cells = new()
    assert mean_and_top(cells(A)) == (1.5, 2.0)
    assert mean_and_top(cells(B)) == (6.0, 6.0)
    assert mean_and_top(cells.compute()) == mean_and_top(new(A, B).compute()) == (3.0, 6.0)
    cells.reset()
    assert cells.compute() == {}


def test_the_state_dict_goes_on() -> None:
    other = new()
    other.load_state_dict(new(A).state_dict())
    other.update(B)
    assert mean_and_top(other.compute()) == (3.0, 6.0)


def test_sync_of_one_process_gives_its_own_results() -> None:
    """`tests/recorders/recordings/test_distributed.py` has more."""
    assert mean_and_top(new(A).sync()) == (1.5, 2.0)
    assert new().sync() == {}
