"""probed(): how the outputs of a net depend on its inputs, by runs of a copy."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from torch import nn

from recorders.capture.copying import NotApartError
from recorders.errors import in_a_line
from recorders.watch.diagnosis.finding import Finding
from recorders.watch.diagnosis.limits import PROBE
from recorders.watch.diagnosis.probe.copied import CopiedNet, ProbeError, undisturbed
from recorders.watch.diagnosis.probe.example import Example, as_call
from recorders.watch.diagnosis.probe.gradients import gradients_whole
from recorders.watch.diagnosis.probe.inputs import directions, inputs_used
from recorders.watch.diagnosis.probe.losses import classes_told, loss_of_outputs
from recorders.watch.diagnosis.probe.outputs import activations_apart, last_activation
from recorders.watch.diagnosis.probe.positions import features, future, order, others_read, past_alone
from recorders.watch.diagnosis.probe.probe import Probe, Skip, attempts
from recorders.watch.diagnosis.probe.samples import (
    attention,
    function_of_inputs,
    samples_apart,
    samples_told_apart,
    state_in_training,
)
from recorders.watch.diagnosis.probe.seen import Seen
from recorders.watch.diagnosis.probe.structure import (
    activations_between,
    dropout_last,
    first_reads,
    layers_used_once,
    passed_on,
    scores_scaled,
    widths_used,
)


class Probed(NamedTuple):
    """What runs of a copy of a net told: findings, what was not examined with the reason, and what was."""

    found: list[Finding]
    unexamined: list[str]
    examined: list[str]


def probed(net: nn.Module, example: Any, target: Any = None, loss: float | None = None) -> Probed:
    """Examines how the outputs of a net depend on its inputs, by runs of a copy; nothing of the net is changed.

    The copy runs in evaluation mode, 10 to 80 times, on at most 4 samples, but for two runs on the whole example; at last it runs
    six times or more in training mode. For this time there are two sets of buffers and one of parameters more; of nets of at most
    67 M weights two, and what a backward pass needs.

    Args:
        net: is copied.
        example: what it is called with: a tensor, a tuple of positional arguments, or a dict of keyword arguments. A tuple or dict
            that does not fit the parameters of `forward` is its only argument.
        target: the target of the example.
        loss: of the last steps.

    >>> import torch
    >>> class Mixes(nn.Module):
    ...     def forward(self, x):
    ...         return x.softmax(0)
    >>> [(finding.kind, finding.layer) for finding in probed(Mixes(), torch.randn(8, 3)).found]
    [('samples-mix', '(net)')]
    """
    try:
        result: Probed = undisturbed(net, lambda: _probed(net, example, target, loss))
    except Exception as error:  # of the user's net, or of one that cannot be copied
        return Probed([], [f"relations of the net: {_reason(error)}"], [])
    return result


def _reason(error: Exception) -> str:
    text = in_a_line(error)
    return text if isinstance(error, (ProbeError, NotApartError, Skip)) else f"{type(error).__name__}: {text}"


def _probed(net: nn.Module, example: Any, target: Any, loss: float | None) -> Probed:
    whole = _on_device(as_call(net, example), net)
    if not whole.tensors:
        raise ProbeError("the example holds no tensor")
    probe = _first_run(CopiedNet(net), whole, target)
    probe.loss = loss
    found: list[Finding] = []
    unexamined, examined = [], []
    for name, relation in RELATIONS.items():
        try:
            found += relation(probe)
        except Skip as reason:
            if str(reason):
                unexamined.append(f"{name}: {reason}")
        except Exception as error:  # a net may fail on what its example has not shown it
            unexamined.append(f"{name}: {_reason(error)}")
        else:
            examined.append(name)
    if examined:
        examined = [f"relations of the net ({', '.join(examined)}): {probe.net.runs} runs"]
    return Probed(found, unexamined, examined)


def _on_device(example: Example, net: nn.Module) -> Example:
    """The example where the parameters are, if all of them are on one device."""
    devices = {parameter.device for parameter in net.parameters()}
    return example.map(lambda path, tensor: tensor.detach().to(next(iter(devices)))) if len(devices) == 1 else example


def _first_run(net: CopiedNet, whole: Example, target: Any) -> Probe:
    """The first run: on a few samples, or on all if the net fails on few."""
    why: Exception = ProbeError("it was not run")
    for number, few in enumerate(attempts(net, whole.cut(), whole)):
        seen = Seen(PROBE.alone)
        try:
            base = net.run(few, fresh=True, seen=seen)
        except Exception as error:
            why = why if number else error
            continue
        if not base:
            raise ProbeError("it returns no floating-point tensor")
        return Probe(net, whole, few, target, base, seen)
    raise why


RELATIONS: dict[str, Callable[[Probe], Iterator[Finding]]] = {
    "outputs that are a function of the inputs": function_of_inputs,
    "samples that mix": samples_apart,
    "samples that differ": samples_told_apart,
    "attention": attention,
    "scores of attention that are scaled": scores_scaled,
    "activation functions between layers": activations_between,
    "activation functions in a row": activations_apart,
    "the last activation function": last_activation,
    "the loss of outputs": loss_of_outputs,
    "classes that are told": classes_told,
    "layers that are used once": layers_used_once,
    "the future": future,
    "the past alone": past_alone,
    "other positions": others_read,
    "inputs without effect": inputs_used,
    "directions without effect": directions,
    "order without effect": order,
    "features that are told apart": features,
    "units that differ": widths_used,
    "what is passed on": passed_on,
    "what the first layer reads": first_reads,
    "dropout on outputs": dropout_last,
    "gradients that are cut": gradients_whole,
    "state carried over in training": state_in_training,
}
"""By name, each looks at one relation between inputs and outputs. The second finds where the samples are, for the others."""
