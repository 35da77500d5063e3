"""A recorder in a loop of Hugging Face's accelerate."""

from __future__ import annotations

from typing import Any

from torch.optim import Optimizer

from recorders.errors import require
from recorders.integrations.training import Training
from recorders.recorder.recorder import Recorder
from recorders.watch.diagnosis.checkup import OnFinding
from recorders.watch.diagnosis.learned import Against

__all__ = ["attach"]


def attach(
    accelerator: Any, recorder: Recorder, optimizer: Optimizer, on_finding: OnFinding | None = None, against: Against = None
) -> Recorder:
    """Attaches a recorder to an accelerator and an optimizer, prepared or not; returns the recorder.

    The clock advances with the steps that change the parameters, also under `accelerator.accumulate`, and counts the forwards of
    each step as micro-batches. `accelerator.save_state(folder)` saves what each rank recorded, in `folder/recorder/rank-0` for rank
    0. `accelerator.load_state(folder)` goes on with it, bit for bit. A failure of either is a warning. `modules(net)` names modules
    as in the user's net, before and after `accelerator.prepare(net)`.

    Args:
        accelerator: an `Accelerator`.
        recorder: its modules are selected.
        optimizer: the optimizer of the training.
        on_finding: "warn", "stop" or "raise" looks for faults after steps of the optimizer; see `Checkup`. What that needs is
            recorded by `presets.health()`. "stop" calls `accelerator.set_trigger()`, so that
            `if accelerator.check_trigger(): break` in your loop ends it on all ranks.
        against: what good runs were like, see `learn`: its file, or the recording of one; see `Checkup`.

    Raises:
        MissingExtraError: accelerate is not installed.
        TypeError: `accelerator` is no `Accelerator`, `recorder` no recorder, or `optimizer` no optimizer.
        ValueError: `on_finding` is none of these, or `against` is given without it.
        StorageError: what is at the path `against` cannot be read.
        TrainingFaultError: by `optimizer.step()`, if `on_finding` is "raise".

    >>> import torch
    >>> from accelerate import Accelerator
    >>> from recorders import ForwardMonitor
    >>> from reducers import Mean
    >>> net = torch.nn.Linear(2, 1)
    >>> accelerator, optimizer = Accelerator(cpu=True), torch.optim.SGD(net.parameters())
    >>> attach(accelerator, Recorder(ForwardMonitor(Mean())).modules(net), optimizer).clock.step
    0
    """
    for name, given, kind in (
        ("accelerator", accelerator, require("accelerate", "accelerate").Accelerator),
        ("recorder", recorder, Recorder),
    ):
        if not isinstance(given, kind):
            raise TypeError(f"attach: {name} is a {type(given).__name__}; it must be a {kind.__name__}")
    training = Training(recorder, on_finding, against)
    recorder.attach(optimizer)
    if on_finding is not None:

        def check(*_: object) -> None:
            if training.check():
                accelerator.set_trigger()

        getattr(optimizer, "optimizer", optimizer).register_step_post_hook(check)  # on that which accelerate has wrapped
    accelerator.register_save_state_pre_hook(lambda models, weights, folder: training.save(folder))
    accelerator.register_load_state_pre_hook(lambda models, folder: training.resume(folder))
    return recorder
