"""fingerprints(): a recorder of what `divergence` compares."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from recorders.monitors.forward import ForwardInputMonitor, ForwardMonitor
from recorders.monitors.gradients import BackwardInputMonitor, BackwardMonitor
from recorders.monitors.optimizers import OptimizerMonitor
from recorders.monitors.parameters import ParameterGradientMonitor, ParameterMonitor
from recorders.recorder.recorder import Recorder
from recorders.watch.diagnosis.steps import StepMonitor
from reducers import Collect, Fingerprints


@dataclass(frozen=True)
class _First:
    """Chooses the first step that is recorded."""

    def __call__(self, step: int) -> bool:
        return step == 0

    def pause_after(self, step: int) -> int:
        return 2**31


def fingerprints(every: int = 1, k: int = 64) -> Recorder:
    """A recorder of a digest and a sketch of everything that a training computes, for `divergence` and `recorders diff`.

    Of each module these are its inputs, its outputs and their gradients; of each parameter its value and its gradient before a
    step, and after the first one what the optimizer keeps for it; of each buffer its value after a step, but for whole numbers that
    stand alone, which count. Forwards count in training mode and with gradients on. The steps are those of the first optimizer
    that steps::

        with presets.fingerprints().modules(net) as recorder:
            train(net)
        recorder.save("run-a")

    Args:
        every: record one step of so many. What an update does is then seen in each of them, by the values after it.
        k: projections of a sketch, see `reducers.Fingerprints`: an observation takes 8 * k + 64 bytes.

    Returns:
        A recorder.
        Results are those of `reducers.Fingerprints`, with a row for each observation: of `input/layer`, `output/layer`,
        `gradient/layer` and `input_gradient/layer`; for each parameter of `weights/layer`, its `gradient` and `value`; of
        `before/layer` and `after/layer`, the parameters before and after the steps; of `states`, what the optimizer keeps, and of
        `buffers`, by the names of parameters and buffers in the net.
        `steps`, [steps, 21], has facts of each optimizer step.

    Raises:
        ValueError: `every` is not a positive number.
        ArgumentError: `k` is not a multiple of 64.

    >>> from torch import nn
    >>> sorted(fingerprints().modules(nn.Linear(2, 1), groups=["input", "output"]))
    ['input', 'output']
    """
    listed = Fingerprints(k)
    forward: dict[str, Any] = {"eval_update": False, "phase": "grad", "every_step": every}
    apart: dict[str, Any] = {"every_step": every} if every > 1 else {"steps": _First()}
    return Recorder(
        input=ForwardInputMonitor(listed, **forward),
        output=ForwardMonitor(listed, **forward),
        gradient=BackwardMonitor(listed, every_step=every),
        input_gradient=BackwardInputMonitor(listed, every_step=every),
        weights=ParameterGradientMonitor(listed, op_=_both, every_step=every),
        before=ParameterMonitor(listed, when="call", steps=_First(), eval_update=False, phase="grad"),
        after=ParameterMonitor(listed, **apart),
        steps=StepMonitor(Collect(), every_step=every),
        states=OptimizerMonitor(listed, op_=_states, **apart),
        buffers=OptimizerMonitor(listed, op_=_buffers, every_step=every),
    )


def _both(gradient: Any, value: Any) -> dict[str, Any]:
    return {"gradient": gradient, "value": value}


def _states(optimizer: Optimizer, net: nn.Module) -> dict[str, dict[str, Tensor]] | None:
    """What the optimizer keeps for each parameter of the net, by its name; None if it keeps nothing."""
    found: dict[str, dict[str, Tensor]] = {}
    for name, parameter in net.named_parameters():
        kept = optimizer.state.get(parameter)
        if isinstance(kept, dict):
            found[name] = {key: value for key, value in kept.items() if isinstance(value, Tensor) and isinstance(key, str)}
    return found if any(found.values()) else None


def _buffers(optimizer: Optimizer, net: nn.Module) -> dict[str, Tensor] | None:
    """The buffers of the net by name, but for counts, such as that of batches; None if there are none."""
    return {name: buffer for name, buffer in net.named_buffers() if buffer.ndim or buffer.is_floating_point()} or None
