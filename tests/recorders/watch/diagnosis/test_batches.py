"""The rows in which batches of inputs and targets are kept."""

from __future__ import annotations

import torch
from torch import Tensor

from recorders.watch.diagnosis.batches import BATCH, LABELS, rows_of


def named(row: Tensor) -> dict[str, float]:
    return dict(zip(BATCH, row[0].tolist(), strict=False))


def test_labels_that_losses_ignore_are_left_out_of_all_but_the_count() -> None:
    labels = torch.tensor([[3, -100, 5], [-100, 5, -100]])
    row = rows_of(labels)
    found, kept = named(row), named(rows_of(torch.tensor([3, 5, 5])))
    assert (found["count"], found["samples"], found["axes"]) == (6, 2, 2)
    assert {name: found[name] for name in ("mean", "std", "min", "max")} == {
        name: kept[name] for name in ("mean", "std", "min", "max")
    }
    counts = row[0, len(BATCH) :]
    assert counts.nonzero().flatten().tolist() == [3, 5]
    assert counts.sum() == 3
    assert len(counts) == LABELS


def test_a_batch_of_ignored_labels_alone_is_taken_as_it_is() -> None:
    found = named(rows_of(torch.full((4,), -100)))
    assert found["min"] == found["max"] == -100


def test_numbers_of_minus_100_are_numbers() -> None:
    assert named(rows_of(torch.tensor([-100.0, 100.0])))["mean"] == 0
