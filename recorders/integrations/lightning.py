"""A recorder as a callback of Lightning, whether it is imported as `lightning` or as `pytorch_lightning`."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Mapping
from typing import Any

from torch import Tensor

from recorders.errors import require
from recorders.integrations.training import InTraining

__all__ = ["RecorderCallback"]


def _libraries() -> list[str]:
    """Those that are imported; else one that is installed."""
    both = ["lightning.pytorch", "pytorch_lightning"]
    installed = [name for name in both if importlib.util.find_spec(name.partition(".")[0])]
    return [name for name in both if name in sys.modules] or installed[:1] or both[:1]


class RecorderCallback(InTraining, *[require(name, "lightning").Callback for name in _libraries()]):  # type: ignore[misc]
    """Records while `Trainer.fit` runs, training and validation; the validation that checks sanity is not recorded.

    The clock advances with the first optimizer. It counts the batches of each step as micro-batches, whichever method of the module
    Lightning calls. What was recorded is part of Lightning's checkpoints, and `fit(ckpt_path=...)` goes on with it, bit for bit.
    Lightning writes one checkpoint for all ranks, which holds what rank 0 recorded: if several ranks go on from it, they warn. A
    failure of the recorder is a warning, and the training goes on. For `Trainer.test` and `predict`, use `with callback.recorder:`.

    The loss that `training_step` returns is pushed into the `CallMonitor` named "loss", if there is one and you push nothing into
    it.

    Args:
        recorder: a recorder whose modules are selected; or a function that makes one from the `LightningModule`, called when the
            training begins, such as `lambda module: Recorder(ForwardMonitor(Mean())).modules(module.net)`.
        on_finding: "warn", "stop" or "raise" looks for faults while the training goes on; see `Checkup`. `presets.health()` records
            what that needs. "stop" sets `trainer.should_stop`, unless there are several ranks.
            `callback.checkup.found` lists what was found.
        against: what good runs were like, see `learn`: its file, or the recording of one; see `Checkup`.

    Raises:
        MissingExtraError: neither `lightning` nor `pytorch_lightning` is installed.
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

    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
        self._training.begin(pl_module, trainer.optimizers)

    def on_sanity_check_start(self, trainer: Any, pl_module: Any) -> None:
        self._training.begin_rehearsal()

    def on_sanity_check_end(self, trainer: Any, pl_module: Any) -> None:
        self._training.end_rehearsal()

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        self._training.begin_batch()
        self._training.expect_loss()

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        loss = outputs.get("loss") if isinstance(outputs, Mapping) else outputs
        if isinstance(loss, Tensor) and pl_module.automatic_optimization:
            loss = loss * trainer.accumulate_grad_batches  # by which Lightning has divided it
        self._training.push_loss(loss)
        if self._training.check_alone():
            trainer.should_stop = True

    def on_fit_end(self, trainer: Any, pl_module: Any) -> None:
        self._training.end()

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        self._training.end()

    def state_dict(self) -> dict[str, Any]:
        return self._training.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._training.load_state_dict(state_dict)
