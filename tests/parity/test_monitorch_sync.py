"""Three processes with gloo: what the master rank of monitorch shows is what our inspector has on every rank."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from parity_monitorch import Kept, network, run_epoch
from torch import nn
from world import SIZE, Place, World, alike

from recorders import Inspector, lenses


def watch(place: Place, seed: int) -> tuple[Kept, dict[str, dict[str, float]], str]:
    """One rank, with data of its own; returns what theirs showed, our rows, and what theirs cannot merge."""
    from monitorch import lens as theirs
    from monitorch.inspector import PyTorchInspector

    rank, _ = place
    torch.manual_seed(seed)
    net, kept = network(), Kept()
    there = PyTorchInspector(
        [theirs.LossMetrics(), theirs.OutputNorm(), theirs.ParameterGradientGeometry()], visualizer=kept, module=net
    )
    here = Inspector(net, [lenses.OutputNorm(), lenses.ParameterGradientGeometry(when="accumulate", inplace=False)])
    torch.manual_seed(10 * seed + rank)
    batches = [torch.randn(4, 1, 4, 4, dtype=torch.float64) for _ in range(3 + rank)]
    run_epoch(net, torch.optim.SGD(net.parameters(), lr=0.1), batches)
    for value in torch.rand(2 + rank):
        there.push_loss(value, train=True)
        here.push_loss(value)
    there.tick_epoch()
    here.tick_epoch()
    rows = {name: dict(row) for name, row in here.timeline.at(0).items()}
    small = nn.Sequential(nn.ReLU())
    there = PyTorchInspector([theirs.OutputNorm(inplace=False)], visualizer=Kept(), module=small)
    small(torch.ones(2, 3))
    try:
        there.tick_epoch()
    except AttributeError as error:
        return kept, rows, str(error)
    return kept, rows, ""


@pytest.mark.slow
@pytest.mark.row("master_rank, start_sync, finish_sync")
@pytest.mark.parametrize("seed", range(3))
def test_ranks_are_merged(world: World, seed: int) -> None:
    pytest.importorskip("monitorch")
    answers: list[Any] = world.run(watch, seed)
    (kept, rows, refused), *others = answers
    assert all(other.lines == {} for other, _, _ in others)  # only the master shows
    alike([mine for _, mine, _ in answers])
    assert "Cannot sync <class 'list'>" in refused  # what is kept whole is merged here: the quartiles below
    assert rows["Loss/train"]["mean"] == pytest.approx(kept.lines[1]["Loss"]["Loss"]["train_loss mean"], abs=1e-9)
    for tag in ("Output Norm", "Weight Gradient Norm", "Bias Gradient Norm"):
        for layer, values in kept.lines[1][tag].items():
            row, band = rows[f"{tag}/{layer}"], kept.bands[1][tag][layer]
            assert row["mean"] == pytest.approx(values["mean"], abs=1e-9)
            assert (row["min"], row["max"]) == pytest.approx(band["min", "max"], abs=1e-9)
            assert row["count"] == sum(3 + rank for rank in range(SIZE))
    assert "median" in rows["Weight Gradient Norm/0"]
