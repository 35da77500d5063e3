"""A recorder as a callback of the `Trainer` of Hugging Face's transformers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from recorders.errors import require
from recorders.integrations.training import InTraining

__all__ = ["RecorderCallback"]


class RecorderCallback(InTraining, require("transformers", "transformers").TrainerCallback):  # type: ignore[misc]
    """Records while `Trainer.train` runs, training and evaluation.

    The clock advances with the optimizer, and counts the forwards of each step as micro-batches. Each rank saves what it recorded
    in each checkpoint, such as `checkpoint-500/recorder/rank-0`. `train(resume_from_checkpoint=...)` goes on with it, bit for bit.
    A callback does not learn that path: it looks into `args.resume_from_checkpoint`, else into the checkpoint of the step in
    `args.output_dir`. A failure of the recorder is a warning, and the training goes on. For `Trainer.evaluate` after the training,
    use `with callback.recorder:`.

    The only loss that the trainer hands over is the one that it logs: the mean since the last log, so that of each step with
    `TrainingArguments(logging_steps=1)`. It is pushed into the `CallMonitor` named "loss", if there is one and you push nothing
    into it, as a `compute_loss` of yours may do.

    Args:
        recorder: a recorder whose modules are selected; or a function that makes one from the model, called when a training begins.
        on_finding: "warn", "stop" or "raise" looks for faults while the training goes on; see `Checkup`. `presets.health()` records
            what that needs. "stop" sets `control.should_training_stop`, unless there are several ranks.
            `callback.checkup.found` lists what was found.
        against: what good runs were like, see `learn`: its file, or the recording of one; see `Checkup`.

    Raises:
        MissingExtraError: transformers is not installed.
        TypeError: `recorder` is neither a recorder nor a function.
        ValueError: `on_finding` is none of these, or `against` is given without it.
        StorageError: what is at the path `against` cannot be read.
        TrainingFaultError: in the training, if `on_finding` is "raise".

    >>> import torch
    >>> from recorders import ForwardMonitor, Recorder
    >>> from reducers import Mean
    >>> callback = RecorderCallback(Recorder(ForwardMonitor(Mean())).modules(torch.nn.Linear(2, 1)))
    >>> callback.recorder.clock.step
    0
    """

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        optimizer = kwargs.get("optimizer")
        self._training.begin(kwargs["model"], [] if optimizer is None else [optimizer])
        if state.global_step:
            given = args.resume_from_checkpoint
            self._training.resume(given if isinstance(given, str) else _checkpoint(args, state))

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._training.expect_loss()

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if self._training.check_alone():
            control.should_training_stop = True

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        self._training.push_loss((logs or {}).get("loss"))

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._training.save(_checkpoint(args, state))

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._training.end()


def _checkpoint(args: Any, state: Any) -> Path:
    return Path(args.output_dir, f"checkpoint-{state.global_step}")
