"""A recorder as a callback of `Model.fit` of Keras, with PyTorch as its backend."""

from __future__ import annotations

import os
from typing import Any

import torch
from torch import nn

from recorders.capture.contents import all_modules
from recorders.errors import RecorderError, require
from recorders.integrations.training import InTraining, Recorded
from recorders.watch.diagnosis.checkup import OnFinding
from recorders.watch.diagnosis.learned import Against

__all__ = ["RecorderCallback"]

os.environ.setdefault("KERAS_BACKEND", "torch")  # read when keras is imported first, which else would look for TensorFlow


class _StepsOfKeras(torch.optim.Optimizer):
    """The steps of an optimizer of Keras, as those of one of PyTorch, to which monitors of parameters listen."""

    def __init__(self, optimizer: Any, weights: list[nn.Parameter], compiled: bool) -> None:
        super().__init__(weights, {})
        self._optimizer, self._apply = optimizer, optimizer.apply
        self._arguments: tuple[Any, dict[str, Any]] = ((), {})
        optimizer.apply = torch.compiler.disable(self._record) if compiled else self._record  # type: ignore[no-untyped-call]

    def _record(self, *args: Any, **kwargs: Any) -> Any:
        self._arguments = args, kwargs
        return self.step()

    def step(self, closure: Any = None) -> Any:
        args, kwargs = self._arguments
        self._arguments = ((), {})
        return self._apply(*args, **kwargs)

    def end(self) -> None:
        """Gives Keras its own optimizer back."""
        del self._optimizer.apply


class RecorderCallback(InTraining, require("keras", "keras").callbacks.Callback):  # type: ignore[misc]
    """Records while `Model.fit` runs, training and validation. Keras has to run on PyTorch: set `KERAS_BACKEND=torch`, or import
    this module before keras.

    Layers of Keras are selected, named and recorded as modules of PyTorch. Each batch is a step of the clock. A failure of the
    recorder is a warning, and the training goes on. For `evaluate` and `predict`, use `with callback.recorder:`.

    The loss of each batch is pushed into the `CallMonitor` named "loss", if there is one: the mean of the epoch so far, which is
    what Keras tells a callback.

    Args:
        recorder: a recorder whose modules are selected; or a function that makes one from the model, called when a training begins.
            A recorder that was made before also sees the forward by which Keras may build the model.
        on_finding: "warn", "stop" or "raise" looks for faults while the training goes on; see `Checkup`. `presets.health()` records
            what that needs. "stop" sets `model.stop_training`. `callback.checkup.found` lists what was found.
        against: what good runs were like, see `learn`: its file, or the recording of one; see `Checkup`.

    Raises:
        MissingExtraError: keras is not installed.
        TypeError: `recorder` is neither a recorder nor a function.
        ValueError: `on_finding` is none of these, or `against` is given without it.
        StorageError: what is at the path `against` cannot be read.
        RecorderError: in the training, if another backend than PyTorch runs it.
        TrainingFaultError: in the training, if `on_finding` is "raise".
    """

    def __init__(self, recorder: Recorded, on_finding: OnFinding | None = None, against: Against = None) -> None:
        super().__init__(recorder, on_finding, against)
        self._steps: _StepsOfKeras | None = None
        self._modes: list[tuple[nn.Module, bool]] = []  # before the validation that goes on

    def on_train_begin(self, logs: Any = None) -> None:
        model: Any = self.model
        if not isinstance(model, nn.Module):
            raise RecorderError("the model of Keras is no module of PyTorch: set KERAS_BACKEND=torch before keras is imported")
        self._end_steps()  # of a fit that raised
        variables: Any = model.trainable_variables
        weights = [variable.value for variable in variables]
        if weights and getattr(model, "optimizer", None) is not None:
            self._steps = _StepsOfKeras(model.optimizer, weights, compiled=bool(model.jit_compile))
        self._training.begin(model, [] if self._steps is None else [self._steps])

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        self._training.expect_loss()

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self._training.push_loss((logs or {}).get("loss"))
        if self._training.check_alone():
            self.model.stop_training = True

    def on_test_begin(self, logs: Any = None) -> None:
        # Keras tells layers of the mode when it calls them, and PyTorch's `eval()` does not reach those that it does not know.
        self._modes = [(module, module.training) for module in all_modules(self.model)]
        for module, _ in self._modes:
            module.training = False

    def on_test_end(self, logs: Any = None) -> None:
        for module, training in self._modes:
            module.training = training
        self._modes = []

    def on_train_end(self, logs: Any = None) -> None:
        self._training.end()
        self._end_steps()

    def _end_steps(self) -> None:
        if self._steps is not None:
            self._steps.end()
        self._steps = None
