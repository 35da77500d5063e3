"""Ours: what `presets.health()` records of a training, and what `findings` says of it, also while it runs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor
from torch.optim import Optimizer
from torch.utils import _pytree as pytree

from benchmarks.diagnosis.training import Training
from recorders import findings, presets

__all__ = ["Health"]


class Health:
    """Records a training, and asks for findings at some steps.

    Args:
        asked: the steps after which findings are asked for; they are in `found`, by the number of steps, and those of the end under
            the last one.
    """

    def __init__(self, asked: Sequence[int] = ()) -> None:
        self.asked, self.found = asked, dict[int, Any]()
        self.recorder: Any = None
        self.last, self.batch = 0, (None, None)

    def begin(self, training: Training, optimizers: Sequence[Optimizer]) -> None:
        self.recorder = presets.health().modules(training.net)

    def after(self, step: int, loss: Tensor, inputs: Any, target: Any) -> bool | None:
        self.push(loss, target)
        self.last = step + 1
        if self.last in self.asked:
            self.found[self.last] = findings(self.recorder, example=inputs, target=target)
        self.batch = inputs, target
        return None

    def push(self, loss: Tensor, target: Any) -> None:
        """Pushes what a step had."""
        self.recorder.push("loss", loss)
        if any(isinstance(leaf, Tensor) for leaf in pytree.tree_leaves(target)):
            self.recorder.push("target", target)

    def end(self) -> Any:
        """The findings at the end."""
        self.recorder.deregister()
        inputs, target = self.batch
        self.found[self.last] = findings(self.recorder, example=inputs, target=target)
        return self.found[self.last]
