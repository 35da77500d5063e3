"""Engines of PyTorch Ignite."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from trainings import EPOCHS, MICRO_BATCHES, ROWS, alike, new_net, new_optimizer, new_recorder, plain

from recorders import Recorder, presets
from recorders.errors import RecordingWarning, TrainingFaultError
from recorders.integrations.ignite import RecorderHandler

engines: Any = pytest.importorskip("ignite.engine")
handlers: Any = pytest.importorskip("ignite.handlers")


def train(folder: Path, *, epochs: int = EPOCHS, checkpoint: Path | None = None) -> Recorder:
    net = new_net()
    optimizer = new_optimizer(net)

    def update(engine: Any, batch: Tensor) -> None:
        (net(batch)["loss"] / MICRO_BATCHES).backward()
        if engine.state.iteration % MICRO_BATCHES == 0:
            optimizer.step()
            optimizer.zero_grad()

    def evaluate(engine: Any) -> None:
        net.eval()
        engines.Engine(lambda engine, batch: net(batch)).run(ROWS[:6].split(2))
        net.train()

    trainer = engines.Engine(update)
    recorder = new_recorder(net)
    handler = RecorderHandler(recorder, optimizer)
    handler.attach(trainer)
    parts = {"net": net, "trainer": trainer, "recorder": handler}
    trainer.add_event_handler(engines.Events.EPOCH_COMPLETED, torch.no_grad()(evaluate))
    trainer.add_event_handler(engines.Events.EPOCH_COMPLETED, handlers.Checkpoint(parts, str(folder), n_saved=None))
    if checkpoint is not None:
        handlers.Checkpoint.load_objects(parts, torch.load(checkpoint, weights_only=True))
    trainer.run(ROWS.split(2), max_epochs=epochs)
    return recorder


def test_an_engine_and_a_resumed_one_record_what_a_plain_loop_does(tmp_path: Path) -> None:
    recorder = train(tmp_path)
    assert alike(recorder, plain())
    assert not recorder[0].gate.on
    assert alike(train(tmp_path / "second", checkpoint=tmp_path / "checkpoint_12.pt"), recorder)


def test_a_checkpoint_of_another_recorder_never_stops_an_engine(tmp_path: Path) -> None:
    train(tmp_path, epochs=1)
    whole = torch.load(tmp_path / "checkpoint_12.pt", weights_only=True)
    torch.save({**whole, "recorder": {"rank": 0, "ranks": 1, "recording": b"damaged"}}, tmp_path / "damaged.pt")
    with pytest.warns(RecordingWarning, match="`load_state_dict` of the recorder failed.*no state dict of a recorder"):
        assert train(tmp_path / "second", checkpoint=tmp_path / "damaged.pt").clock.step == 3


def test_it_takes_a_recorder() -> None:
    with pytest.raises(TypeError, match="RecorderHandler takes a Recorder whose modules are selected; got Net"):
        RecorderHandler(new_net(), new_optimizer(new_net()))  # type: ignore[arg-type]


def still(on_finding: Any) -> tuple[Any, RecorderHandler]:
    """An engine that trains at a rate of zero."""
    net = new_net()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.0)

    def update(engine: Any, batch: Tensor) -> Any:
        optimizer.zero_grad()
        loss = net(batch)["loss"]
        loss.backward()
        optimizer.step()
        return loss.item()

    engine = engines.Engine(update)
    handler = RecorderHandler(presets.health().modules(net.body), optimizer, on_finding)
    handler.attach(engine)
    return engine, handler


@pytest.mark.filterwarnings("ignore::recorders.errors.RecordingWarning")
def test_an_engine_at_a_rate_of_zero_is_terminated_and_losses_are_pushed() -> None:
    engine, handler = still("stop")
    engine.run(ROWS.split(2), max_epochs=2)
    assert engine.state.iteration == handler.recorder.clock.step == 10
    assert handler.checkup is not None
    assert "rate-is-zero" in [finding.kind for finding in handler.checkup.found]
    losses = [new_net()(batch)["loss"].item() for batch in ROWS.split(2)[:10]]
    assert handler.recorder["loss"].peek()["course"].tolist() == pytest.approx(losses)


def test_an_engine_at_a_rate_of_zero_raises_if_it_may() -> None:
    engine, _ = still("raise")
    with pytest.raises(TrainingFaultError, match="after 10 steps: optimizer: the learning rate is 0"):
        engine.run(ROWS.split(2), max_epochs=2)
