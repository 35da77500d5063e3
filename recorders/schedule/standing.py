"""A clock that stands still although the net trains, while monitors wait for its steps: the second step of an optimizer says so."""

from __future__ import annotations

import weakref
from typing import Any

from torch import nn
from torch.optim import Optimizer

from recorders.errors import RecordingWarning
from reducers.errors import warn_user

__all__ = ["add", "clocks", "tell"]

clocks: list[_Standing] = []
"""The clocks that nobody has advanced yet, as far as is known."""
_told: weakref.WeakSet[Any] = weakref.WeakSet()


class _Standing:
    """A clock and its net, both held weakly, the step at which the clock stood, and the optimizer that stepped since."""

    def __init__(self, clock: Any, net: nn.Module) -> None:
        self.clock, self.net, self.step = weakref.ref(clock), weakref.ref(net), clock.step
        self.stepped: weakref.ref[Optimizer] | None = None


def add(clock: Any, net: nn.Module) -> None:
    """Looks, from now on, whether `clock` advances while `net` trains; tells of it once."""
    if clock not in _told and all(one.clock() is not clock for one in clocks):
        clocks.append(_Standing(clock, net))


def tell(optimizer: Optimizer) -> None:
    """Warns of clocks that stood still between two steps of this optimizer, which trains their net; called after each step."""
    for one in clocks[:]:
        clock, net = one.clock(), one.net()
        if clock is None or net is None or clock.step != one.step or not clock.expected:
            clocks.remove(one)
        elif one.stepped is None:
            weights = set(map(id, net.parameters()))
            if any(id(weight) in weights for group in optimizer.param_groups for weight in group["params"]):
                one.stepped = weakref.ref(optimizer)
        elif one.stepped() is optimizer:
            clocks.remove(one)
            _told.add(clock)
            warn_user(
                f"an optimizer has stepped twice, and the clock stands at step {clock.step} still. Monitors with steps, every_step "
                "or a budget need it to advance: call recorder.attach(optimizer), or recorder.step() after every step (without a "
                "recorder: monitor.clock.attach(optimizer), or monitor.clock.advance())",
                RecordingWarning,
            )
