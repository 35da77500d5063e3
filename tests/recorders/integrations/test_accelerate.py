"""A loop of accelerate."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader
from trainings import EPOCHS, MICRO_BATCHES, ROWS, alike, new_net, new_optimizer, new_recorder, plain

from recorders import Recorder, presets
from recorders.errors import RecordingWarning, TrainingFaultError
from recorders.integrations.accelerate import attach

accelerate = pytest.importorskip("accelerate")


def train(folder: Path, *, epochs: int = EPOCHS, resume: bool = False) -> Recorder:
    accelerator = accelerate.Accelerator(cpu=True, gradient_accumulation_steps=MICRO_BATCHES)
    net = new_net()
    net, optimizer, rows = accelerator.prepare(net, new_optimizer(net), DataLoader(ROWS, batch_size=2))
    recorder = attach(accelerator, new_recorder(net), optimizer)
    if resume:
        accelerator.load_state(str(folder))
    for _ in range(epochs):
        for batch in rows:
            with accelerator.accumulate(net):
                accelerator.backward(net(batch)["loss"])
                optimizer.step()
                optimizer.zero_grad()
        net.eval()
        with torch.no_grad():
            for batch in ROWS[:6].split(2):
                net(batch)
        net.train()
    accelerator.save_state(str(folder))
    return recorder


def test_a_loop_of_accelerate_and_a_resumed_one_record_what_a_plain_loop_does(tmp_path: Path) -> None:
    train(tmp_path, epochs=1)
    assert (tmp_path / "recorder" / "rank-0").is_dir()
    assert alike(train(tmp_path, epochs=1, resume=True), plain())
    assert alike(train(tmp_path / "whole"), plain(saves=[EPOCHS]))


def test_a_recording_that_cannot_be_saved_or_loaded_never_stops_a_loop(tmp_path: Path) -> None:
    (tmp_path / "recorder").write_text("in the way")
    with pytest.warns(RecordingWarning, match="`save` of the recorder failed"):
        train(tmp_path, epochs=1)
    with pytest.warns(RecordingWarning, match="the recorder failed, and the training goes on"):
        assert train(tmp_path, epochs=1, resume=True).clock.step == 3


def test_wrong_arguments_are_named() -> None:
    net = new_net()
    with pytest.raises(TypeError, match="accelerator is a Net; it must be a Accelerator"):
        attach(net, new_recorder(net), new_optimizer(net))
    with pytest.raises(TypeError, match="recorder is a Net"):
        attach(accelerate.Accelerator(cpu=True), net, new_optimizer(net))  # type: ignore[arg-type]


def still(on_finding: Any) -> int:
    """A loop at a rate of zero, until it is stopped: the number of steps."""
    accelerator = accelerate.Accelerator(cpu=True)
    net = new_net()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.0)
    recorder = presets.health().modules(net.body)
    net, optimizer = accelerator.prepare(net, optimizer)
    attach(accelerator, recorder, optimizer, on_finding)
    with recorder:
        for _ in range(12):
            optimizer.zero_grad()
            accelerator.backward(net(ROWS[:2])["loss"])
            optimizer.step()
            if accelerator.check_trigger():
                break
    return recorder.clock.step


@pytest.mark.filterwarnings("ignore::recorders.errors.RecordingWarning")
def test_a_loop_at_a_rate_of_zero_is_told_to_stop_or_raises() -> None:
    assert still(None) == still("warn") == 12
    assert still("stop") == 11  # the clock advances after it was asked, so the tenth step is seen a step later
    with pytest.raises(TrainingFaultError, match="after 10 steps: optimizer: the learning rate is 0"):
        still("raise")
