"""Gate: decides whether a monitor records an observation."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from recorders.ring.changes import Changes
from recorders.schedule.chosen_steps import Chosen, as_steps
from recorders.schedule.clock import Phase
from recorders.schedule.table import NOT_DUE

NOT_IN_STEPS = "not in its steps"
WRONG_MODE = {
    ("module", True): "not recorded in train mode",
    ("module", False): "not recorded in eval mode",
    ("grad", True): "not recorded with gradients on",
    ("grad", False): "not recorded with gradients off",
}


class Gate:
    """Decides whether a monitor records. See the tables in `docs/concepts.md` and `docs/capture.md`.

    Args:
        options: those of the monitor; see `MonitorOptions`.

    Attributes:
        on: whether the hooks of the monitor are on.
        active: whether the present step is one of those that the monitor chooses; the clock sets it.
        came: whether one of these steps has come since the clock sets it.
        open: whether every call passes now, in either mode, without a further question.
        chooses_steps: whether the clock switches the monitor on and off.
        eligible: how many calls passed all gates but `every`, less one, by stream: the path of an operand, or a weak reference
            of an optimizer.
        changes: is told when `on` or `active` is set.
        shown: is called with whether the monitor records when that changes: graphs on a GPU are told on the device.
    """

    def __init__(self, options: Mapping[str, Any]) -> None:
        self.train_update: bool = options["train_update"]
        self.eval_update: bool = options["eval_update"]
        self.phase: Phase = options["phase"]
        self.condition: Callable[[], bool] | None = options["condition"]
        self.steps: Chosen = as_steps(options["steps"])
        self.every_step: int = options["every_step"]
        self.every: int = options["every"]
        self.on = self.active = True
        self.came = False
        self.open = self.only_steps
        self.shown: Callable[[bool], None] | None = None
        self.changes = Changes()
        self.chooses_steps = self.has_steps
        self.eligible: dict[object, int] = {}

    @property
    def has_steps(self) -> bool:
        """Whether its options choose steps; a budget chooses, too."""
        return self.steps is not None or self.every_step != 1

    def turn(self, *, on: bool | None = None, active: bool | None = None) -> None:
        """Sets `on` or `active`."""
        self.on = self.on if on is None else on
        self.active = self.active if active is None else active
        self.came = self.came or bool(active)
        self.open = self.on and self.active and self.only_steps
        self.changes.note()
        if self.shown is not None:
            self.shown(self.on and self.active)

    @property
    def only_steps(self) -> bool:
        """Whether nothing has to be asked but `on` and `active`."""
        return self.train_update and self.eval_update and self.only_steps_and_mode

    @property
    def only_steps_and_every(self) -> bool:
        """Whether nothing has to be asked but these and how many calls came before."""
        return self.train_update and self.eval_update and self.condition is None

    @property
    def only_steps_and_mode(self) -> bool:
        """Whether nothing has to be asked but these and the mode."""
        return self.condition is None and self.every == 1

    def training(self, module: nn.Module | None) -> bool:
        """Whether a call of `module` now counts as training."""
        return module.training if self.phase == "module" and module is not None else torch.is_grad_enabled()

    def records_in(self, training: bool) -> bool:
        """Whether the monitor records in this mode."""
        return self.train_update if training else self.eval_update

    def foresees(self, training: bool) -> bool:
        """Whether the next observation, if of this mode, may be recorded. Counts nothing, and does not call `condition`."""
        due = self.every == 1 or (self.eligible.get("", -1) + 1) % self.every == 0
        return self.on and self.active and self.records_in(training) and due

    def refusal(self, training: bool | None, stream: object = "") -> str:
        """Returns why an observation is not recorded; "" if it is.

        Args:
            training: whether it counts as training; None if a compiled graph asked that when it was traced.
            stream: observations of each stream are counted by themselves for `every`.

        Raises:
            Exception: whatever `condition` raises.
        """
        if training is not None and not (self.train_update if training else self.eval_update):
            return WRONG_MODE[self.phase, training]
        if not self.active:
            return NOT_IN_STEPS
        if self.condition is not None and not self.condition():
            return "condition was false"
        if self.every == 1:
            return ""
        if stream not in self.eligible and not isinstance(stream, str):
            self.forget_freed()
            # An optimizer of a run that was resumed, which was saved by the order in which they step.
            saved = next((name for name in self.eligible if isinstance(name, str)), None)
            self.eligible[stream] = self.eligible.pop(saved, -1)
        eligible = self.eligible[stream] = self.eligible.get(stream, -1) + 1
        return NOT_DUE if eligible % self.every else ""

    def forget_freed(self) -> None:
        """Forgets the calls of optimizers that were freed."""
        freed = [stream for stream in self.eligible if isinstance(stream, weakref.ref) and stream() is None]
        for stream in freed:
            del self.eligible[stream]

    def clear(self) -> None:
        """Counts anew for `every`."""
        self.eligible = {}
