"""Ticks of epochs and of steps, and going on after a timeline."""

from __future__ import annotations

import contextlib
import sqlite3
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from world import Place, World, alike

from recorders import Inspector, TickError, lenses
from recorders.watch.charts import axis_of, charts_of
from recorders.watch.visualizers import MatplotlibVisualizer


@contextlib.contextmanager
def traced(statements: list[str]) -> Iterator[None]:
    """Lists the statements of all connections to SQLite that are opened in the block."""
    connect = sqlite3.connect

    def listening(*args: Any, **options: Any) -> sqlite3.Connection:
        db = connect(*args, **options)
        db.set_trace_callback(statements.append)
        return db

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sqlite3, "connect", listening)
        yield


def test_ticks_within_an_epoch_are_numbers_of_steps() -> None:
    net, figures = nn.Sequential(nn.Linear(2, 3), nn.ReLU()), MatplotlibVisualizer()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    active = []
    watching = Inspector(
        net, lenses.OutputNorm(), show=figures, optimizer=optimizer, active=lambda step: not active.append(step) and step != 4
    )
    with watching as inspector:
        for step in range(12):
            inspector.push_loss(float(step))
            net(torch.ones(1, 2)).sum().backward()
            optimizer.step()
            if inspector.clock.step % 4 == 0:
                inspector.tick()
    timeline = inspector.timeline
    assert timeline.series("Loss/train", "mean") == ([4, 8, 12], [1.5, 5.5, 9.5])
    assert timeline.series("Output Norm/1", "count") == ([4, 12], [4, 4])
    assert set(active) == {0, 4, 8, 12}
    assert timeline.steps() == {4: 4, 8: 8, 12: 12}
    assert [figures.figures[title].get_supxlabel() for title in ("Loss", "Output Norm")] == ["step"] * 2


def test_a_timeline_has_ticks_of_one_kind(tmp_path: Path) -> None:
    by_epoch, by_step = (Inspector(lenses=[], timeline=tmp_path / name) for name in ("epochs.db", "steps.db"))
    by_epoch.tick_epoch()
    by_step.step().tick()
    for inspector in (by_epoch, Inspector(lenses=[], timeline=tmp_path / "epochs.db")):
        with pytest.raises(TickError, match=r"are epochs, and cannot be steps too: call tick_epoch\(\) only"):
            inspector.tick()
    for inspector in (by_step, Inspector(lenses=[], timeline=tmp_path / "steps.db")):
        with pytest.raises(TickError, match=r"are steps, and cannot be epochs too: call tick\(\) only"):
            inspector.tick_epoch()
    with pytest.raises(TickError, match="no step has ended since the last tick, 1: give the optimizer"):
        by_step.tick()
    by_step.tick(7)
    assert (by_step.timeline.ticks(), by_step.timeline.steps()) == ([1, 7], {1: 1, 7: 1})


@pytest.mark.parametrize("tick", [Inspector.tick_epoch, Inspector.tick])
def test_a_tick_is_one_transaction_with_all_notes(tick: Callable[[Inspector], None], tmp_path: Path) -> None:
    """Also the first: a process that is killed after it leaves a timeline that says what its ticks are, and how to draw them."""
    net = nn.Sequential(nn.Linear(2, 2), nn.Tanh())
    said: list[str] = []
    with traced(said):
        inspector = Inspector(net, lenses.OutputNorm(), timeline=tmp_path / "run.db")
        kept = []
        for epoch in range(3):
            net(torch.ones(1, 2))
            inspector.push_loss(1.0)
            if epoch == 2:
                inspector.push_metric("late", 1.0)  # a chart more
            inspector.step()
            said.clear()
            tick(inspector)
            assert [what for what in said if what.startswith("BEGIN IMMEDIATE")] == ["BEGIN IMMEDIATE"]
            kept.append((sum("INTO notes" in what for what in said), [chart.title for chart in charts_of(inspector.timeline)]))
    first = ["Output Norm", "Mean Output Norm Comparison", "Loss"]
    assert kept == [(4, first), (0, first), (1, [*first, "Metrics"])]
    assert axis_of(inspector.timeline) == ("epoch" if tick is Inspector.tick_epoch else "step")


def test_a_first_tick_that_fails_leaves_no_note_and_does_not_say_what_ticks_are() -> None:
    inspector = Inspector(lenses=[])
    inspector.push_loss(1.0)
    with pytest.raises(TickError, match="whole number"):
        inspector.tick_epoch(0.5)  # type: ignore[arg-type]
    assert inspector.timeline.notes() == {}
    inspector.step().tick()
    assert (axis_of(inspector.timeline), inspector.timeline.series("Loss/train", "mean")) == ("step", ([1], [1.0]))


def test_going_back_deletes_what_came_after_and_sets_the_clock_back(tmp_path: Path) -> None:
    inspector = Inspector(lenses=[], timeline=tmp_path / "run.db")
    for _ in inspector.range(4):
        inspector.push_loss(1.0)
        inspector.step().step().step()
    inspector.push_loss(9.0)
    assert inspector.resume(2) is inspector
    assert (inspector.epoch, inspector.clock.step, inspector.timeline.ticks()) == (2, 6, [0, 1])
    inspector.push_loss(3.0)
    inspector.tick_epoch()
    assert inspector.timeline.series("Loss/train", "mean") == ([0, 1, 2], [1.0, 1.0, 3.0])
    inspector.resume(0).step().tick()  # begins anew, so ticks may be of another kind
    assert (inspector.epoch, inspector.clock.step, inspector.timeline.ticks()) == (1, 1, [1])
    inspector.step().tick()
    inspector.step().tick()
    inspector.resume(2)
    assert (inspector.epoch, inspector.clock.step, inspector.timeline.ticks()) == (2, 2, [1, 2])


def test_a_new_inspector_goes_on_with_the_steps_and_the_charts_of_the_timeline(tmp_path: Path) -> None:
    for start in (0, 4):
        inspector = Inspector(lenses=[], timeline=tmp_path / "run.db")
        assert (inspector.epoch, inspector.clock.step) == (start, 3 * start)
        for epoch in inspector.range(start, start + 4):
            inspector.push_loss(1.0)
            if epoch == 3:
                inspector.push_loss(2.0, train=False)
            inspector.step().step().step()
        assert [chart.layers for chart in inspector.charts] == [("train", "eval")]
        inspector.timeline.close()


def gone_on(place: Place, folder: Path) -> list[tuple[str, int, int]]:
    found = []
    for name, start in (("epochs.db", 3), ("steps.db", 20), ("steps.db", 0)):
        inspector = Inspector(lenses=[], timeline=folder / name).resume(start)
        found.append((inspector._position.axis, inspector.epoch, inspector.clock.step))
    return found


@pytest.mark.slow
def test_all_ranks_go_on_from_the_same_epoch_and_step(world: World, tmp_path: Path) -> None:
    by_epoch, by_step = (Inspector(lenses=[], timeline=tmp_path / name) for name in ("epochs.db", "steps.db"))
    for _ in range(5):
        for _ in range(10):
            by_epoch.step()
            by_step.step()
        by_epoch.tick_epoch()
        by_step.tick()
    assert alike(world.run(gone_on, tmp_path)) == [("epoch", 3, 30), ("step", 20, 20), ("", 0, 0)]
