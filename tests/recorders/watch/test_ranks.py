"""An Inspector in distributed training: what all ranks recorded, shown by one."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from world import SIZE, Place, World, alike

from recorders import ForwardMonitor, Inspector, RecordingWarning, Timeline, lenses
from recorders.watch.charts import Chart, ChartView
from reducers import Collect, Mean, Reducer


class Shown:
    """A visualizer that keeps the numbers it is shown."""

    def __init__(self) -> None:
        self.ticks: list[int] = []

    def show(self, tick: int, charts: list[ChartView]) -> None:
        self.ticks.append(tick)


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2)).double()


def batch(epoch: int, rank: int) -> Tensor:
    return torch.randn(5, 3, generator=torch.Generator().manual_seed(10 * epoch + rank), dtype=torch.float64)


def look(inspector: Inspector) -> dict[int, dict[str, dict[str, float]]]:
    return {
        tick: {name: dict(values) for name, values in inspector.timeline.at(tick).items()} for tick in inspector.timeline.ticks()
    }


def watched(place: Place, folder: Path) -> tuple[Any, list[int], str]:
    rank, _ = place
    shown, model = Shown(), net()
    wrapped = DistributedDataParallel(model)
    chosen = [lenses.OutputGradientGeometry(), lenses.OutputActivation()]
    with Inspector(wrapped, chosen, show=shown, timeline=folder / "run.db") as inspector:
        for epoch in inspector.range(2):
            loss = wrapped(batch(epoch, rank)).square().mean()
            loss.backward()
            inspector.push_loss(loss)
            if rank == 1:
                inspector.push_metric("accuracy", 0.25)
    return look(inspector), shown.ticks, inspector.timeline.path


@pytest.mark.slow
def test_all_ranks_have_the_numbers_of_all_and_one_shows_them(world: World, tmp_path: Path) -> None:
    answers = world.run(watched, tmp_path)
    found = alike([numbers for numbers, _, _ in answers])
    assert [ticks for _, ticks, _ in answers] == [[0, 1], [], []]
    assert [path for _, _, path in answers] == [str(tmp_path / "run.db"), ":memory:", ":memory:"]
    model = net()
    with Inspector(model, [lenses.OutputGradientGeometry(), lenses.OutputActivation()]) as alone:
        for epoch in alone.range(2):
            for rank in range(SIZE):
                loss = model(batch(epoch, rank)).square().mean()
                loss.backward()
                alone.push_loss(loss)
            alone.push_metric("accuracy", 0.25)
    expected = look(alone)
    for epoch in range(2):
        assert found[epoch].keys() == expected[epoch].keys()
        for name, values in expected[epoch].items():
            if "Correlation" not in name:  # of gradients that follow each other on one rank
                assert found[epoch][name] == pytest.approx(values, rel=1e-12)
    with Timeline(tmp_path / "run.db") as kept:
        assert kept.ticks() == [0, 1]


def counted(place: Place, layers: int) -> int:
    calls = []
    usual = dist.all_gather
    dist.all_gather = lambda *args, **kwargs: (calls.append(1), usual(*args, **kwargs))[1]  # type: ignore[assignment]
    try:
        model = nn.Sequential(*(nn.Linear(2, 2) for _ in range(layers)))
        with Inspector(model, lenses.OutputGradientGeometry()) as inspector:
            model(torch.ones(1, 2)).sum().backward()
            assert not calls, "nothing is communicated before the tick"
            inspector.tick_epoch()
    finally:
        dist.all_gather = usual
    return len(calls)


@pytest.mark.slow
def test_a_tick_takes_two_collectives_whatever_the_number_of_layers(world: World) -> None:
    assert alike(world.run(counted, 2)) == alike(world.run(counted, 40)) == 2


def resumed(place: Place, folder: Path) -> tuple[list[int], int]:
    inspector = Inspector(net(), lenses.OutputNorm(), timeline=folder / "run.db")
    inspector.push_loss(1.0)
    inspector.tick_epoch()
    return inspector.timeline.ticks(), inspector.epoch


@pytest.mark.slow
def test_a_resumed_run_goes_on_with_the_same_epoch_on_all_ranks(world: World, tmp_path: Path) -> None:
    with Timeline(tmp_path / "run.db") as before:
        for tick in range(5):
            before.append(tick, {})
    assert world.run(resumed, tmp_path) == [([0, 1, 2, 3, 4, 5], 6), ([5], 6), ([5], 6)]


def lens_of(reducer: Reducer) -> lenses.Lens:
    return lenses.Lens("Own", (Chart("Own", ("out",)),), {"out": ForwardMonitor(reducer)})


def unlike(place: Place) -> tuple[int, list[str]]:
    rank, _ = place
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", RecordingWarning)
        with Inspector(net(), lens_of(Mean() if rank else Collect())) as inspector:
            for _ in range(2):
                inspector.push_loss(float(rank))
                inspector.tick_epoch()
    return inspector.timeline.ticks()[-1], [str(warning.message) for warning in caught]


def test_ranks_that_do_not_fit_have_their_own_numbers_and_go_on(world: World) -> None:
    for rank, (last, messages) in enumerate(world.run(unlike)):
        assert last == 1
        assert len(messages) == 1
        assert messages[0].startswith(f"rank {rank} shows its own numbers only")
        assert "Mean(pattern='... ->')" in messages[0]


def by_itself(place: Place) -> tuple[list[int], float]:
    rank, _ = place
    shown = Shown()
    inspector = Inspector(net(), lenses.OutputNorm(), show=shown, master_rank=None)
    inspector.push_loss(float(rank))
    inspector.tick_epoch()
    return shown.ticks, inspector.timeline.at(0)["Loss/train"]["mean"]


@pytest.mark.slow
def test_ranks_may_stay_by_themselves(world: World) -> None:
    assert world.run(by_itself) == [([0], 0.0), ([0], 1.0), ([0], 2.0)]
