"""A recorder as a handler of an engine of PyTorch Ignite."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch.optim import Optimizer

from recorders.errors import require
from recorders.integrations.training import InTraining
from recorders.recorder.recorder import Recorder
from recorders.watch.diagnosis.checkup import OnFinding
from recorders.watch.diagnosis.learned import Against

__all__ = ["RecorderHandler"]


class RecorderHandler(InTraining):
    """Records while the engine of a training runs, and what evaluators run within it.

    The clock advances with the optimizer, and counts the forwards of each step as micro-batches. The handler is an object for
    `Checkpoint(to_save={"recorder": handler, ...})`, and after `Checkpoint.load_objects` it goes on, bit for bit. Ignite writes one
    checkpoint for all ranks, which holds what rank 0 recorded: if several ranks go on from it, they warn. A failure of the recorder
    is a warning, and the training goes on.

    What the function of the engine returns, if it is one number, is pushed into the `CallMonitor` named "loss", if there is one and
    you push nothing into it.

    Args:
        recorder: its modules are selected.
        optimizer: the optimizer of the training.
        on_finding: "warn", "stop" or "raise" looks for faults while the training goes on; see `Checkup`. `presets.health()` records
            what that needs. "stop" calls `engine.terminate()`, unless there are several ranks.
            `handler.checkup.found` lists what was found.
        against: what good runs were like, see `learn`: its file, or the recording of one; see `Checkup`.

    Raises:
        TypeError: `recorder` is not a recorder.
        ValueError: `on_finding` is none of these, or `against` is given without it.
        StorageError: what is at the path `against` cannot be read.
        TrainingFaultError: in the training, if `on_finding` is "raise".

    >>> import torch
    >>> from ignite.engine import Engine
    >>> from recorders import ForwardMonitor
    >>> from reducers import Mean
    >>> net = torch.nn.Linear(2, 1)
    >>> optimizer = torch.optim.SGD(net.parameters())
    >>> engine = Engine(lambda engine, batch: (net(batch), optimizer.step()))
    >>> recorder = Recorder(ForwardMonitor(Mean())).modules(net)
    >>> RecorderHandler(recorder, optimizer).attach(engine)
    >>> _ = engine.run(torch.ones(3, 1, 2))
    >>> recorder.clock.step, recorder[0].samples
    (3, 3)
    """

    def __init__(
        self, recorder: Recorder, optimizer: Optimizer, on_finding: OnFinding | None = None, against: Against = None
    ) -> None:
        if not isinstance(recorder, Recorder):
            raise TypeError(f"RecorderHandler takes a Recorder whose modules are selected; got {type(recorder).__name__}")
        super().__init__(recorder, on_finding, against)
        self._optimizer = optimizer

    def attach(self, engine: Any) -> None:
        """Records while `engine` runs. Hooks stay on if it raises, because ignite hides errors that have a handler.

        Raises:
            MissingExtraError: ignite is not installed.
        """
        events = require("ignite.engine", "ignite").Events
        engine.add_event_handler(events.STARTED, self._begin)
        engine.add_event_handler(events.ITERATION_STARTED, self._training.expect_loss)
        engine.add_event_handler(events.ITERATION_COMPLETED, self._end_iteration)
        engine.add_event_handler(events.COMPLETED | events.TERMINATE, self._training.end)

    def _begin(self) -> None:
        self._training.begin(None, [self._optimizer])

    def _end_iteration(self, engine: Any) -> None:
        self._training.push_loss(engine.state.output)
        if self._training.check_alone():
            engine.terminate()

    def state_dict(self) -> dict[str, Any]:
        """What this rank recorded."""
        return self._training.state_dict()

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Goes on where `state_dict` was taken; if it does not fit, warns."""
        self._training.load_state_dict(state_dict)
