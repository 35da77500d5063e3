"""Examines whether recording leaves a training as it is, with right numbers and without a false word.

A net is trained for three steps without and with everything recorded: outputs, inputs, gradients, updates. What is compared:

- losses, gradients and parameters with those of the training that is not recorded, bit for bit;
- the number of elements and the sum of magnitudes of each leaf's outputs and gradients with those that plain hooks take;
- the net before and after `findings(example=)` and `plan`: values, gradients, modes, hooks and random numbers.

Then it is trained for six steps with `presets.health()`. There must be no warning, and no rule of the findings that fails.
"""

from __future__ import annotations

import copy
import hashlib
import random
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import numpy
import torch
from torch import Tensor, nn

from recorders import (
    BackwardMonitor,
    ForwardInputMonitor,
    ForwardMonitor,
    ParameterGradientMonitor,
    ParameterUpdateMonitor,
    Recorder,
    RecordingWarning,
    findings,
    presets,
)
from reducers import Count, Norm, Product

Given = Any
"""What a net is called with: a tuple of positional arguments, or a dict of keyword arguments."""


def tensors(value: Any) -> Iterator[Tensor]:
    """Yields the tensors in what a model returns."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, Mapping):
        for inner in value.values():
            yield from tensors(inner)
    elif isinstance(value, (list, tuple)):
        for inner in value:
            yield from tensors(inner)


def seed(number: int) -> None:
    """Sets the random numbers of Python, NumPy and PyTorch."""
    random.seed(number)
    numpy.random.seed(number)  # which masks sounds, and draws from replay buffers
    torch.manual_seed(number)


def called(net: nn.Module, given: Given) -> Any:
    """What a net returns."""
    return net(**given) if isinstance(given, dict) else net(*given)


def loss_of(returned: Any) -> Tensor:
    """The loss of the model, or the mean square of all that it returns."""
    loss = getattr(returned, "loss", None)
    if isinstance(loss, Tensor) and loss.requires_grad:
        return loss
    found = [x.float().square().mean() for x in tensors(returned) if x.is_floating_point() and x.requires_grad]
    return torch.stack(found).sum()


def digest(values: Iterable[Tensor]) -> str:
    """Of the bits of tensors."""
    found = hashlib.sha256()
    for x in values:
        found.update(x.detach().to_dense().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    return found.hexdigest()


def trained(net: nn.Module, given: Given, recorder: Recorder | None = None, steps: int = 3) -> list[str]:
    """Trains a model; returns digests of its losses, its gradients at each step, and its values."""
    optimizer = torch.optim.AdamW(net.parameters(), 1e-4)
    seed(1)
    losses, gradients = [], []
    for _ in range(steps):
        loss = loss_of(called(net, given))
        optimizer.zero_grad()
        loss.backward()
        gradients.append(digest(parameter.grad for parameter in net.parameters() if parameter.grad is not None))
        optimizer.step()
        losses.append(loss.detach())
        if recorder is not None and "loss" in recorder:
            recorder.push("loss", loss)
    return [digest(losses), *gradients, digest([*net.parameters(), *net.buffers()])]


def by_hand(net: nn.Module) -> dict[str, list[float]]:
    """Returns what plain hooks will have seen of the leaves: how many elements, and the sum of their magnitudes."""
    found: dict[str, list[float]] = {}

    def add(key: str, x: Tensor) -> None:
        row = found.setdefault(key, [0, 0.0])
        row[0] += x.numel()
        row[1] += float(x.detach().double().abs().sum())

    def watch(name: str) -> Callable[..., None]:
        def hook(module: nn.Module, args: Any, output: Any) -> None:
            if isinstance(output, Tensor) and output.is_floating_point():
                add(f"out/{name}", output)
                if output.requires_grad:
                    output.register_hook(lambda gradient: add(f"grad/{name}", gradient))

        return hook

    for name, module in net.named_modules():
        if not [*module.children()]:
            module.register_forward_hook(watch(name))
    return found


def differing(found: Mapping[str, Any], wanted: Mapping[str, list[float]]) -> list[str]:
    """The leaves that a recorder has other numbers of."""

    def right(key: str) -> bool:
        count, total = wanted[key]
        one = found.get(key)
        if not count:  # such as tokens of sounds in a text
            return True
        return one is not None and int(one["count"]) == count and abs(float(one["sum"]) - total) <= 1e-6 * total

    return [key for key in wanted if not right(key)]


def state(net: nn.Module) -> list[Any]:
    """What looking at a model must not change."""
    hooks = [len(module._forward_hooks) + len(module._forward_pre_hooks) for module in net.modules()]
    gradients = digest(parameter.grad for parameter in net.parameters() if parameter.grad is not None)
    modes, numbers = [module.training for module in net.modules()], digest([torch.get_rng_state()])
    return [hooks, modes, numbers, gradients, digest([*net.parameters(), *net.buffers()])]


def examine(net: nn.Module, given: Given) -> list[str]:
    """What is wrong; an empty list if nothing is."""
    wrong: list[str] = []
    nets = [copy.deepcopy(net) for _ in range(5)]
    plain = trained(nets[0], given)
    if trained(nets[1], given) != plain:
        return ["two trainings without a recorder differ"]
    magnitudes = Product(count=Count(), sum=Norm(p=1))
    kinds = {"out": ForwardMonitor(magnitudes), "grad": BackwardMonitor(magnitudes), "in": ForwardInputMonitor(Norm())}
    parameters = {"gradient": ParameterGradientMonitor(Norm()), "update": ParameterUpdateMonitor(Norm())}
    with Recorder(**kinds, **parameters).modules(nets[2]) as everything:
        if trained(nets[2], given) != plain:
            wrong.append("the training that is recorded is another")
    seen = by_hand(nets[3])
    trained(nets[3], given)
    wrong += [f"numbers of {key}" for key in differing(everything.compute(), seen)]
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", RecordingWarning)
        with presets.health().modules(nets[4]) as health:
            trained(nets[4], given, health, steps=6)
        before = state(nets[4])
        found = findings(health, example=given)
        wrong += ["findings changed the model"] if state(nets[4]) != before else []
        health.plan(**given) if isinstance(given, dict) else health.plan(*given)
        wrong += ["plan changed the model"] if state(nets[4]) != before else []
    wrong += [f"warns: {one.message}" for one in caught if issubclass(one.category, RecordingWarning)]
    return wrong + [line for line in found.unexamined if "failed" in line]
