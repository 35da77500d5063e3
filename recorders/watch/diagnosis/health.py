"""health(): a recorder of what `findings` examines."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from recorders.monitors.forward import CallMonitor, ForwardInputMonitor, ForwardMonitor
from recorders.monitors.gradients import BackwardMonitor
from recorders.monitors.module_parameters import ModuleParameterMonitor
from recorders.monitors.parameters import ParameterGradientMonitor, ParameterMonitor, ParameterUpdateMonitor, as_they_are
from recorders.recorder.recorder import Recorder
from recorders.schedule.table import GRADIENTS, Reading
from recorders.watch.diagnosis.batches import rows_of
from recorders.watch.diagnosis.steps import Early, StepMonitor, share_in_mode
from recorders.watch.lenses.health import update_ratio
from reducers import Activity, Collect, FirstNonfinite, Idle, Mean, Norm, PerObservation, Product, Summary


class NetInputMonitor(ForwardInputMonitor):
    """Records what the net is given. A recorder puts it on the net alone, under the name of its group. Operands: inputs.

    >>> from reducers import Max
    >>> net = torch.nn.Sequential(torch.nn.Linear(2, 1))
    >>> with Recorder(inputs=NetInputMonitor(Max())).modules(net, types=nn.Linear) as recorder:
    ...     _ = net(torch.tensor([[1.0, 7.0]]))
    >>> list(recorder), recorder["inputs"].peek()
    (['inputs'], tensor(7.))
    """

    of_net = True


class NetOutputMonitor(ForwardMonitor):
    """Records what the net returns. A recorder puts it on the net alone, under the name of its group. Operands: output, inputs.

    >>> from reducers import Max
    >>> net = torch.nn.Sequential(torch.nn.Identity())
    >>> with Recorder(outputs=NetOutputMonitor(Max())).modules(net, types=nn.Identity) as recorder:
    ...     _ = net(torch.tensor([[1.0, 7.0]]))
    >>> list(recorder), recorder["outputs"].peek()
    (['outputs'], tensor(7.))
    """

    of_net = True


class PreStepParameterMonitor(ModuleParameterMonitor):
    """Records the values that each optimizer step changes, right before it. Operands: value.

    A step with a closure is read after it, as its gradients are.

    >>> from reducers import Last
    >>> layer = nn.Linear(1, 1, bias=False)
    >>> monitor = PreStepParameterMonitor(Last(), "weight", layer)
    >>> optimizer = torch.optim.SGD(layer.parameters(), lr=0.5)
    >>> layer(torch.ones(1, 1)).sum().backward()
    >>> weight = layer.weight.detach().clone()
    >>> optimizer.step()
    >>> bool(monitor.peek() == weight), bool(monitor.peek() == layer.weight)
    (True, False)
    """

    operand_names = ("value",)
    reading = Reading(GRADIENTS, as_they_are)


def health(first: int = 24, every: int = 128) -> Recorder:
    """A recorder of what `findings` examines: outputs, gradients and updates of each layer, inputs, steps, and what you push.

    It records the first steps, later ones ever more seldom (see `Early`), and at last two of every so many, which takes little of a
    training. Push the loss of each step, and the target, and `findings` examines these, too::

        recorder = presets.health().modules(net)
        with recorder:
            for inputs, target in batches:
                loss = criterion(net(inputs), target)
                ...
                recorder.push("loss", loss)
                recorder.push("target", target)
        print(findings(recorder))

    The steps are those of the first optimizer that steps, unless you advance `recorder.clock` or attach it to another.

    Args:
        first: how many steps are recorded in the beginning.
        every: of so many steps two are at least, however late.

    Returns:
        A recorder.
        Results of `output/layer`, for each channel, [channels]: `stats`, those of `Summary`; `activity`, those of `Activity`;
        `idle`, those of `Idle`; `first`, int64, the first observation with a number that is not finite, or -1. Of
        `gradient/layer`, those of `Summary`, 0-d. For each parameter of `weights/layer`, which are gradients: `spread`, those of
        `Summary`, and `size`, [steps], their norms. For each of `update/layer`: `ratio`, those of `Summary` of the norm of a
        change over that of the parameter, and `course`, [steps], that ratio at each step. For each of `size/layer` and of
        `before/layer`: [steps], norms of the parameter after each step, and before it. Of the whole net:
        `inputs`, `outputs` and `target`, [batches, 76], what each batch was like; `steps`, [steps, 22], facts of each optimizer
        step; `inference`, the share of dropouts and the like that were in training mode while gradients were off; `loss`, with
        `spread`, those of `Summary`, and `course`, [steps], each value pushed.

    Raises:
        TypeError: an argument is no number of steps.

    >>> sorted(health().modules(nn.Linear(2, 1)))
    ['before', 'gradient', 'inference', 'inputs', 'loss', 'output', 'outputs', 'size', 'steps', 'target', 'update', 'weights']
    """
    for name, steps in (("first", first), ("every", every)):
        if not isinstance(steps, int):
            hint = ": the net goes to presets.health().modules(net)" if isinstance(steps, nn.Module) else ""
            raise TypeError(f"health: {name} is a number of steps; got {type(steps).__name__}{hint}")
    chosen: dict[str, Any] = {"steps": Early(first, every)}
    output = Product(
        stats=Summary("channels"), activity=Activity("channels"), idle=Idle("channels"), first=FirstNonfinite("channels")
    )
    return Recorder(
        output=ForwardMonitor(output, **chosen),
        gradient=BackwardMonitor(Summary(), **chosen),
        weights=ParameterGradientMonitor(Product(spread=Summary(), size=PerObservation(Norm(), Collect())), **chosen),
        update=ParameterUpdateMonitor(Product(ratio=Summary(), course=Collect()), op_=update_ratio, **chosen),
        size=ParameterMonitor(PerObservation(Norm(), Collect()), **chosen),
        before=PreStepParameterMonitor(PerObservation(Norm(), Collect()), **chosen),
        inputs=NetInputMonitor(Collect(), eval_update=False, phase="grad", op_=rows_of, **chosen),
        outputs=NetOutputMonitor(Collect(), eval_update=False, phase="grad", op_=rows_of, **chosen),
        inference=NetInputMonitor(Mean(), train_update=False, phase="grad", op_=_training_share, **chosen),
        steps=StepMonitor(Collect(), **chosen),
        loss=CallMonitor(Product(spread=Summary(), course=Collect())),
        target=CallMonitor(Collect(), op_=rows_of, **chosen),
    )


def _training_share(inputs: Any, *, module: nn.Module) -> Tensor | None:
    """The share of modules that depend on the mode and are in training mode, while gradients are off; None if there are none."""
    share = share_in_mode(module)
    return None if share != share else torch.tensor(share, device="cpu")
