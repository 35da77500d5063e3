"""Ours: what `presets.health()` records of a training, and what `findings` says of it, also while it runs."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils import _pytree as pytree

from benchmarks.diagnosis.training import Training
from recorders import findings, presets

__all__ = ["Health"]


def keeper_of_calls(kept: dict[str, Any]) -> Callable[..., None]:
    """Returns a hook that keeps how a net was called in training last, which a person knows who gives an example.

    It is a function, so that copies of the net do not copy what else is known. A graph keeps nothing.
    """

    def keep(net: nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
        if not torch.is_grad_enabled() or torch.compiler.is_compiling():
            return
        signature = inspect.signature(net.forward)
        if args and any(one.kind is one.VAR_POSITIONAL for one in signature.parameters.values()):
            return
        named = dict(signature.bind(*args, **kwargs).arguments)
        further = next((name for name, one in signature.parameters.items() if one.kind is one.VAR_KEYWORD), "")
        kept.clear()
        kept.update(named.pop(further, {}) | named)

    return keep


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
        self.call: dict[str, Any] = {}

    def begin(self, training: Training, optimizers: Sequence[Optimizer]) -> None:
        training.net.register_forward_pre_hook(keeper_of_calls(self.call), with_kwargs=True)
        self.recorder = presets.health().modules(training.net)

    def after(self, step: int, loss: Tensor, inputs: Any, target: Any) -> bool | None:
        self.push(loss, target)
        self.last = step + 1
        if self.last in self.asked:
            self.found[self.last] = findings(self.recorder, example=self.call or inputs, target=target)
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
        self.found[self.last] = findings(self.recorder, example=self.call or inputs, target=target)
        return self.found[self.last]
