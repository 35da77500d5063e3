"""Lightning, by both names under which it is imported, and Fabric."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader
from trainings import EPOCHS, MICRO_BATCHES, ROWS, Net, alike, new_net, new_optimizer, new_recorder, plain

from recorders import CallMonitor, ForwardMonitor, Recorder, presets
from recorders.errors import RecordingWarning, TrainingFaultError
from reducers import Collect, Mean

lightning = pytest.importorskip("lightning")
from recorders.integrations.lightning import RecorderCallback  # noqa: E402  # imports lightning

NAMES = ["lightning.pytorch", "pytorch_lightning"]


def fit(
    callback: Any, folder: Path, *, epochs: int = EPOCHS, checkpoint: Path | None = None, name: str = NAMES[0], rate: float = 0.1
) -> Any:
    library: Any = pytest.importorskip(name)

    class Module(library.LightningModule):  # type: ignore[misc,name-defined]
        def __init__(self) -> None:
            super().__init__()
            self.body = new_net().body

        def training_step(self, batch: Tensor, index: int) -> Tensor:
            return self.body(batch).square().mean()

        def validation_step(self, batch: Tensor, index: int) -> None:
            self.body(batch)

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=rate)

    saving = importlib.import_module(f"{name}.callbacks").ModelCheckpoint(
        folder, filename="{epoch}", save_top_k=-1, save_on_train_epoch_end=True
    )
    trainer = library.Trainer(
        accelerator="cpu",
        accumulate_grad_batches=MICRO_BATCHES,
        callbacks=[callback, saving],
        enable_model_summary=False,
        enable_progress_bar=False,
        logger=False,
        max_epochs=epochs,
    )
    module = Module()
    loaders = DataLoader(ROWS, batch_size=2), DataLoader(ROWS[:6], batch_size=2)
    trainer.fit(module, *loaders, ckpt_path=checkpoint)
    return module


@pytest.mark.filterwarnings("ignore:Checkpoint directory .* exists and is not empty")
@pytest.mark.parametrize("name", NAMES)
def test_a_lightning_training_and_a_resumed_one_record_what_a_plain_loop_does(name: str, tmp_path: Path) -> None:
    whole = RecorderCallback(new_recorder)
    module = fit(whole, tmp_path, name=name)
    assert alike(whole.recorder, plain())
    assert not whole.recorder.find(module.body[0])["train/body.0"].gate.on
    resumed = RecorderCallback(new_recorder)
    fit(resumed, tmp_path, name=name, checkpoint=tmp_path / "epoch=0.ckpt")
    assert alike(resumed.recorder, whole.recorder)


def test_a_recorder_that_fails_never_stops_a_lightning_training(tmp_path: Path) -> None:
    callback = RecorderCallback(lambda module: Recorder(ForwardMonitor(Mean())).modules(module, names="boddy"))
    with pytest.warns(RecordingWarning, match="`begin` of the recorder failed.*no module named 'boddy'"):
        module = fit(callback, tmp_path, epochs=1)
    assert module.global_step == 3
    assert (tmp_path / "epoch=0.ckpt").is_file()


def test_names_are_those_of_the_net_under_fabric() -> None:
    fabric = lightning.Fabric(accelerator="cpu")
    net, optimizer = fabric.setup(Net(), new_optimizer(Net()))
    with new_recorder(net).attach(optimizer) as recorder:
        fabric.backward(net(ROWS)["loss"])
        optimizer.step()
    assert list(recorder)[:2] == ["train/body.0", "train/body.2"]
    assert [recorder.clock.step, *recorder.samples.values()][:3] == [1, 1, 1]
    assert isinstance(recorder[0].module, nn.Linear)


@pytest.mark.filterwarnings("ignore::recorders.errors.RecordingWarning")
def test_a_lightning_training_at_a_rate_of_zero_is_stopped(tmp_path: Path) -> None:
    callback = RecorderCallback(lambda module: presets.health().modules(module.body), on_finding="stop")
    module = fit(callback, tmp_path, epochs=5, rate=0.0)
    assert module.global_step == 10
    assert "rate-is-zero" in [finding.kind for finding in callback.checkup.found]


def test_a_lightning_training_at_a_rate_of_zero_raises_if_it_may(tmp_path: Path) -> None:
    callback = RecorderCallback(lambda module: presets.health().modules(module.body), on_finding="raise")
    with pytest.raises(TrainingFaultError, match="after 10 steps: optimizer: the learning rate is 0"):
        fit(callback, tmp_path, epochs=5, rate=0.0)
    assert not callback.recorder["steps"].gate.on


def test_the_losses_of_a_lightning_training_are_pushed(tmp_path: Path) -> None:
    callback = RecorderCallback(Recorder(loss=CallMonitor(Collect())))
    fit(callback, tmp_path, epochs=1, rate=0.0)
    body = new_net().body
    losses = [body(batch).square().mean().item() for batch in ROWS.split(2)]
    assert callback.recorder["loss"].peek().tolist() == pytest.approx(losses)
