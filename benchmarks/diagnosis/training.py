"""`Training`: a training as data, so that a fault changes one thing of it before it runs; `run` runs it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

__all__ = ["PROGRAMS", "Change", "Fault", "Program", "Training", "Watch", "fault", "program", "run"]

Change = Callable[["Training"], tuple[str, ...] | None]


class Watch(Protocol):
    """What looks at a training while it runs."""

    def begin(self, training: Training, optimizers: Sequence[Optimizer]) -> None:
        """Called before the first step."""

    def after(self, step: int, loss: Tensor, inputs: Any, target: Any) -> bool | None:
        """Called after each step, with the last micro-batch of it; True ends the training."""


def constant(step: int, steps: int) -> float:
    """The schedule of a learning rate that does not change."""
    return 1.0


def all_parameters(net: nn.Module) -> Iterable[nn.Parameter]:
    """What an optimizer gets if nothing is left out."""
    return net.parameters()


def adam(parameters: Iterable[nn.Parameter], rate: float) -> Optimizer:
    """The optimizer of most trainings."""
    return torch.optim.Adam(parameters, lr=rate)


@dataclass
class Training:
    """One training.

    Attributes:
        net: the network.
        batch: by number, the inputs and the target of a training batch. It is a function of the number alone.
        loss: of the network (compiled, perhaps), inputs and target, a 0-d tensor.
        score: of the network in evaluation mode, without gradients: how good it is on data that were not trained on. Higher is
            better.
        rate: the learning rate.
        optimizer: makes the optimizer of parameters and a rate.
        steps: the number of optimizer steps.
        parameters: which parameters the optimizer gets.
        schedule: the factor of the rate, of the step and the number of steps.
        clip: the norm to which gradients are clipped.
        micro_batches: how many batches are accumulated for a step.
        autocast: whether the forward runs in bfloat16 autocast.
        clears: whether gradients are cleared before each step.
        trains: the mode of the network in the training.
        evaluates: the mode of the network when it is scored.
        sign: what the loss is multiplied with before backward.
        before_step: called in turn before each step with the training, the optimizer and the step.
        loop: runs a training that is no plain loop, such as that of a GAN: yields step, loss, inputs and target after each step.
    """

    net: nn.Module
    batch: Callable[[int], tuple[Any, Any]]
    loss: Callable[[nn.Module, Any, Any], Tensor]
    score: Callable[[nn.Module], float]
    rate: float = 3e-3
    optimizer: Callable[[Iterable[nn.Parameter], float], Optimizer] = adam
    steps: int = 150
    parameters: Callable[[nn.Module], Iterable[nn.Parameter]] = all_parameters
    schedule: Callable[[int, int], float] = constant
    clip: float | None = None
    micro_batches: int = 1
    autocast: bool = False
    clears: bool = True
    trains: bool = True
    evaluates: bool = False
    sign: float = 1.0
    before_step: list[Callable[[Training, Optimizer, int], None]] = field(default_factory=list)
    loop: Callable[[Training, nn.Module], Iterator[tuple[int, Tensor, Any, Any]]] | None = None
    optimizers: list[Optimizer] = field(default_factory=list)


@dataclass(frozen=True)
class Fault:
    """One planted fault.

    Attributes:
        name: of the fault.
        category: "optimisation", "architecture", "data" or "state".
        causes: the words for its cause that are right, see the list in `docs/findings/`.
        places: the layers that it may rightly be located in; empty if it is a fault of the training as a whole.
        change: plants it; returns the places if they depend on the program.
    """

    name: str
    category: str
    causes: tuple[str, ...]
    places: tuple[str, ...]
    change: Change


@dataclass
class Program:
    """A healthy training by seed, and the faults that are of this program only.

    Attributes:
        name: of the program.
        make: of a seed, the training.
        learns: the score that it reaches when healthy, at least.
        chance: the score of a network that learned nothing.
        held_out: whether no threshold was chosen by it.
        faults: by name, those of this program only.
        without: names of general faults that are none here.
    """

    name: str
    make: Callable[[int], Training]
    learns: float
    chance: float
    held_out: bool = False
    faults: dict[str, Fault] = field(default_factory=dict)
    without: tuple[str, ...] = ()


PROGRAMS: dict[str, Program] = {}


def program(
    learns: float, chance: float, *, held_out: bool = False, without: Sequence[str] = ()
) -> Callable[[Callable[[int], Training]], Program]:
    """Registers a function of a seed that makes a healthy training, under its own name with `-` for `_`."""

    def register(make: Callable[[int], Training]) -> Program:
        name = make.__name__.replace("_", "-")
        PROGRAMS[name] = Program(name, make, learns, chance, held_out, without=tuple(without))
        return PROGRAMS[name]

    return register


def fault(
    into: dict[str, Fault], category: str, causes: str | Sequence[str], places: str | Sequence[str] = ()
) -> Callable[[Change], Change]:
    """Registers a function that plants a fault, under its own name with `-` for `_`. `into` is `program.faults`, or `GENERAL`."""

    def register(change: Change) -> Change:
        name = change.__name__.replace("_", "-")
        several = (causes,) if isinstance(causes, str) else tuple(causes)
        into[name] = Fault(name, category, several, (places,) if isinstance(places, str) else tuple(places), change)
        return change

    return register


def run(training: Training, watch: Watch | None = None, *, compiled: str | None = None) -> float:
    """Runs a training; returns the score at the end.

    Args:
        watch: what looks at it.
        compiled: the backend of `torch.compile`; None for eager mode.
    """
    net = training.net
    model: Any = net if compiled is None else torch.compile(net, backend=compiled)
    if training.loop is None:
        training.optimizers = [training.optimizer(training.parameters(net), training.rate)]
    if watch is not None:
        watch.begin(training, training.optimizers)
    for step, loss, inputs, target in (training.loop or _plain_loop)(training, model):
        if watch is not None and watch.after(step, loss.detach(), inputs, target):
            break
    net.train(training.evaluates)
    with torch.no_grad():
        return float(training.score(net))


def _plain_loop(training: Training, model: nn.Module) -> Iterator[tuple[int, Tensor, Any, Any]]:
    (optimizer,) = training.optimizers
    net, number = training.net, 0
    for step in range(training.steps):
        net.train(training.trains)
        for group in optimizer.param_groups:
            group["lr"] = group.get("initial_lr", training.rate) * training.schedule(step, training.steps)
        for change in training.before_step:
            change(training, optimizer, step)
        if training.clears:
            optimizer.zero_grad()
        for _ in range(training.micro_batches):
            inputs, target = training.batch(number)
            number += 1
            with torch.autocast("cpu", dtype=torch.bfloat16, enabled=training.autocast):
                loss = training.loss(model, inputs, target)
            if loss.requires_grad:
                (loss * (training.sign / training.micro_batches)).backward()
        if training.clip is not None:
            nn.utils.clip_grad_norm_(net.parameters(), training.clip)
        optimizer.step()
        yield step, loss, inputs, target
