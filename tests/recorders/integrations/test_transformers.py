"""The Trainer of transformers."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import SequentialSampler
from trainings import EPOCHS, MICRO_BATCHES, ROWS, alike, new_net, new_optimizer, new_recorder, plain

from recorders import CallMonitor, ForwardMonitor, Recorder, learn, load, presets
from recorders.errors import RecordingWarning, TrainingFaultError
from reducers import Collect, Count

pytest.importorskip("accelerate")
transformers = pytest.importorskip("transformers")
from recorders.integrations.transformers import RecorderCallback  # noqa: E402  # imports transformers

DATA = [{"x": row} for row in ROWS]


class InOrder(transformers.Trainer):  # type: ignore[misc,name-defined]
    """Without shuffling."""

    def _get_train_sampler(self, *_: Any) -> SequentialSampler:
        return SequentialSampler(DATA)


def train(callback: RecorderCallback, folder: Path, net: nn.Module, *, epochs: float = EPOCHS, resume: Any = None) -> None:
    arguments = transformers.TrainingArguments(
        folder,
        dataloader_pin_memory=False,
        disable_tqdm=True,
        eval_strategy="epoch",
        gradient_accumulation_steps=MICRO_BATCHES,
        logging_strategy="no",
        max_grad_norm=0,
        num_train_epochs=epochs,
        per_device_eval_batch_size=2,
        per_device_train_batch_size=2,
        prediction_loss_only=True,
        report_to=[],
        save_strategy="epoch",
        use_cpu=True,
    )
    optimizer = new_optimizer(net)
    trainer = InOrder(
        net,
        arguments,
        callbacks=[callback],
        eval_dataset=DATA[:6],
        optimizers=(optimizer, LambdaLR(optimizer, lambda step: 1.0)),
        train_dataset=DATA,
    )
    trainer.train(resume_from_checkpoint=resume)


@pytest.mark.slow
def test_a_trainer_and_a_resumed_one_record_what_a_plain_loop_does(tmp_path: Path) -> None:
    whole, resumed = RecorderCallback(new_recorder), RecorderCallback(new_recorder)
    train(whole, tmp_path, new_net())
    assert alike(whole.recorder, plain())
    assert not whole.recorder[0].gate.on
    assert load(tmp_path / "checkpoint-3" / "recorder" / "rank-0").step == 3
    train(resumed, tmp_path, new_net(), resume=str(tmp_path / "checkpoint-3"))
    assert alike(resumed.recorder, whole.recorder)


def test_a_model_of_transformers_is_recorded(tmp_path: Path) -> None:
    config = transformers.GPT2Config(
        vocab_size=20, n_positions=8, n_embd=8, n_layer=1, n_head=2, bos_token_id=0, eos_token_id=0, loss_type="ForCausalLM"
    )
    net = transformers.GPT2LMHeadModel(config)
    recorder = Recorder(ForwardMonitor(Count(), eval_update=False)).modules(net, names="transformer.h.0.mlp")
    words = torch.randint(20, (8, 6))
    arguments = transformers.TrainingArguments(
        tmp_path, gradient_accumulation_steps=2, per_device_train_batch_size=2, report_to=[], use_cpu=True, num_train_epochs=1,
        disable_tqdm=True, dataloader_pin_memory=False, save_strategy="no", logging_strategy="no",
    )  # fmt: skip
    data = [{"input_ids": row, "labels": row} for row in words]
    transformers.Trainer(net, arguments, train_dataset=data, callbacks=[RecorderCallback(recorder)]).train()
    assert (recorder.clock.step, recorder[0].samples) == (2, 4)


def test_a_checkpoint_elsewhere_is_found_if_the_arguments_name_it(tmp_path: Path) -> None:
    plain(epochs=1).save(tmp_path / "elsewhere" / "recorder" / "rank-0")
    net = new_net()
    for named, step in ((str(tmp_path / "elsewhere"), 3), (None, 0)):
        callback = RecorderCallback(new_recorder)
        arguments = SimpleNamespace(output_dir=str(tmp_path), resume_from_checkpoint=named)
        state = SimpleNamespace(global_step=3)
        with nullcontext() if named else pytest.warns(RecordingWarning, match="checkpoint-3.recorder holds no recording"):
            callback.on_train_begin(arguments, state, None, model=net, optimizer=new_optimizer(net))
        assert callback.recorder.clock.step == step


def test_a_recorder_that_fails_never_stops_a_trainer(tmp_path: Path) -> None:
    callback = RecorderCallback(lambda net: 3)  # type: ignore[arg-type,return-value]
    with pytest.warns(RecordingWarning, match="`begin` of the recorder failed.*returned a int"):
        train(callback, tmp_path, new_net(), epochs=1)
    assert (tmp_path / "checkpoint-3").is_dir()


def still(callback: RecorderCallback, folder: Path, net: nn.Module, *, epochs: int = 1) -> Any:
    """A training at a rate of zero, with 12 steps in an epoch; returns the state of the trainer."""
    arguments = transformers.TrainingArguments(
        folder, dataloader_pin_memory=False, disable_tqdm=True, logging_steps=1, max_grad_norm=0, num_train_epochs=epochs,
        per_device_train_batch_size=2, report_to=[], save_strategy="no", use_cpu=True,
    )  # fmt: skip
    optimizer = torch.optim.SGD(net.parameters(), lr=0.0)
    optimizers = (optimizer, LambdaLR(optimizer, lambda step: 1.0))
    trainer = InOrder(net, arguments, callbacks=[callback], optimizers=optimizers, train_dataset=DATA)
    trainer.train()
    return trainer.state


@pytest.mark.filterwarnings("ignore::recorders.errors.RecordingWarning")
def test_a_trainer_at_a_rate_of_zero_is_stopped(tmp_path: Path) -> None:
    callback = RecorderCallback(lambda net: presets.health().modules(net.get_submodule("body")), on_finding="stop")
    assert still(callback, tmp_path, new_net()).global_step == 10
    assert callback.checkup is not None
    assert "rate-is-zero" in [finding.kind for finding in callback.checkup.found]


@pytest.mark.filterwarnings("ignore::recorders.errors.RecordingWarning")
def test_a_trainer_is_compared_with_the_first_steps_of_good_runs(tmp_path: Path) -> None:
    def healthy(net: nn.Module) -> Recorder:
        return presets.health().modules(net.get_submodule("body"))

    good = RecorderCallback(healthy)
    train(good, tmp_path / "good", new_net(), epochs=4)
    learn(good.recorder, path=tmp_path / "good.json")
    callback = RecorderCallback(healthy, on_finding="warn", against=tmp_path / "good.json")
    still(callback, tmp_path, new_net())
    assert callback.checkup is not None
    assert any("learning rate in the early phase: 0; good runs: " in one.what for one in callback.checkup.found)
    with pytest.raises(ValueError, match=r"give on_finding= too"):
        RecorderCallback(healthy, against=tmp_path / "good.json")


def test_a_trainer_at_a_rate_of_zero_raises_if_it_may(tmp_path: Path) -> None:
    callback = RecorderCallback(lambda net: presets.health().modules(net.get_submodule("body")), on_finding="raise")
    with pytest.raises(TrainingFaultError, match="after 10 steps: optimizer: the learning rate is 0"):
        still(callback, tmp_path, new_net())


def test_the_losses_that_a_trainer_logs_are_pushed(tmp_path: Path) -> None:
    recorder, net = Recorder(loss=CallMonitor(Collect())), new_net()
    still(RecorderCallback(recorder), tmp_path, net)
    losses = [net(rows)["loss"].item() for rows in ROWS.split(2)]
    assert recorder["loss"].peek().tolist() == pytest.approx(losses, abs=1e-4)
