"""kill -9 of a training, in the middle of an epoch and between a tick and its checkpoint: resumed, its timeline is the same."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from paths import ROOT

from recorders import Timeline, replay

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")

STEPS, LONG = 42, {"epoch": 7, "step": 5}
TRAINING = f"""
import os, signal, sys
import torch
from torch import nn
from recorders import ForwardMonitor, Inspector, lenses
from recorders.watch.lenses import Chart, Lens
from reducers import Mean

torch.set_num_threads(1)

def train(axis, folder, kills):
    long, checkpoint = {LONG}[axis], os.path.join(folder, "checkpoint.pt")
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Dropout(0.3), nn.Linear(8, 1))
    optimizer = torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9)
    chosen = Lens("Chosen", (Chart("Chosen", ("out",)),), {{"out": ForwardMonitor(Mean(), steps=range(3, 30, 4))}})
    watching = [lenses.OutputGradientGeometry(), lenses.UpdateRatio(), lenses.ParameterUpdateGeometry(inplace=False),
                lenses.OutputActivation(record_eval=True), lenses.DeadUnits(), lenses.GradientNoise(), chosen]
    inspector = Inspector(net, watching, show=f"html:{{folder}}/report.html", optimizer=optimizer, every_step=3, active=2,
                          timeline=os.path.join(folder, "run.db"))
    start = 0
    if os.path.exists(checkpoint):
        found = torch.load(checkpoint)
        net.load_state_dict(found["net"])
        optimizer.load_state_dict(found["optimizer"])
        start = found["step"]
    inspector.resume(start // long if axis == "epoch" else start)
    for step in range(start, {STEPS}):
        if ("in", step) in kills:
            os.kill(os.getpid(), signal.SIGKILL)
        torch.manual_seed(step)
        net.train()
        loss = net(torch.randn(16, 4)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        inspector.push_loss(loss, running=False)
        if (step + 1) % long == 0:
            if step % 2 == 0:
                net.eval()
                with torch.no_grad():
                    inspector.push_loss(net(torch.randn(16, 4)).square().mean(), train=False)
            inspector.tick_epoch() if axis == "epoch" else inspector.tick()
            if ("ticked", step) in kills:
                os.kill(os.getpid(), signal.SIGKILL)
            torch.save({{"net": net.state_dict(), "optimizer": optimizer.state_dict(), "step": step + 1}}, checkpoint + ".new")
            os.replace(checkpoint + ".new", checkpoint)
    inspector.detach()

def start(axis, folder, kills):
    child = os.fork()
    if child == 0:
        train(axis, folder, kills)
        sys.stdout.flush()
        os._exit(0)
    print(os.waitpid(child, 0)[1], flush=True)

axis, whole, broken = sys.argv[1:]
start(axis, whole, ())
for kill in (("in", 2), ("in", 17), ("ticked", 20 if axis == "epoch" else 19), ("in", 21), ("ticked", 34), None):
    start(axis, broken, (kill,))
"""


def kept(folder: Path) -> dict[str, Any]:
    """Everything in a timeline; numbers as text, because NaN equals nothing."""
    with Timeline(folder / "run.db") as timeline:
        rows = [(row.tick, row.name, row.statistic, repr(row.value)) for row in sorted(timeline.select())]
        return {"rows": rows, "steps": timeline.steps(), "notes": timeline.notes(), "names": [*timeline]}


@pytest.mark.slow
@pytest.mark.parametrize("axis", ["epoch", "step"])
def test_a_killed_and_resumed_training_has_the_timeline_of_a_whole_one(axis: str, tmp_path: Path) -> None:
    folders = tmp_path / "whole", tmp_path / "broken"
    for folder in folders:
        folder.mkdir()
    command = [sys.executable, "-W", "ignore", "-c", TRAINING, axis, *map(str, folders)]
    done = subprocess.run(command, check=True, timeout=300, capture_output=True, text=True, cwd=ROOT)
    assert done.stdout.split() == ["0", *["9"] * 5, "0"], done.stderr
    whole, broken = map(kept, folders)
    for part, found in broken.items():
        assert found == whole[part], part
    ticks = [*range(6)] if axis == "epoch" else [*range(5, STEPS, 5)]
    assert list(whole["steps"]) == ticks
    assert list(whole["steps"].values()) == ([*range(7, STEPS + 1, 7)] if axis == "epoch" else ticks)
    assert len({tick for tick, *_ in whole["rows"]}) == len(ticks)
    assert {"Loss/eval", "Chosen/1", "Output Activation in Evaluation/1", "Weight Update Ratio/3"} <= set(whole["names"])
    pages = [(folder / "report.html").read_text() for folder in folders]
    assert len(pages[0]) == len(pages[1]) > 10_000


@pytest.mark.slow
def test_a_replay_fills_a_board_that_a_kill_left_behind(tmp_path: Path) -> None:
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    script = f"""
import os, signal
from recorders import Inspector
inspector = Inspector(lenses=[], show="tensorboard:{tmp_path / "board"}", timeline="{tmp_path / "run.db"}")
for epoch in inspector.range(4):
    inspector.push_loss(float(epoch))
    if epoch == 3:
        os.kill(os.getpid(), signal.SIGKILL)
"""
    subprocess.run([sys.executable, "-W", "ignore", "-c", script], check=False, timeout=300, cwd=ROOT)
    for _ in range(2):
        replay(tmp_path / "run.db", f"tensorboard:{tmp_path / 'board'}")
    found = accumulator.EventAccumulator(str(tmp_path / "board"), {"scalars": 0}).Reload().Scalars("Loss/train/mean")
    assert [(event.step, event.value) for event in found] == [(0, 0.0), (1, 1.0), (2, 2.0)]
