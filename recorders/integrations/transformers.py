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

    Args:
        recorder: a recorder whose modules are selected; or a function that makes one from the model, called when a training begins.

    Raises:
        MissingExtraError: transformers is not installed.
        TypeError: `recorder` is neither a recorder nor a function.

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

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._training.save(_checkpoint(args, state))

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._training.end()


def _checkpoint(args: Any, state: Any) -> Path:
    return Path(args.output_dir, f"checkpoint-{state.global_step}")
