"""Faults that can be planted into any program: `GENERAL`, by name. A program that has nothing to plant one in is `Unfit`."""

from __future__ import annotations

import copy
import itertools
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from types import MethodType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.dropout import _DropoutNd
from torch.optim import Optimizer
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from benchmarks.diagnosis.training import Fault, Training, fault

__all__ = ["GENERAL", "Unfit"]

GENERAL: dict[str, Fault] = {}
"""The general faults, by name. Where the places of one depend on the program, `Fault.change` returns them, see there. A fault in
one layer takes a hidden one, mostly that in the middle; its neighbours in the order of the forward are right, too. What is not the
fault of layers has no places."""

ACTIVATIONS = (nn.ReLU, nn.ReLU6, nn.LeakyReLU, nn.ELU, nn.SELU, nn.GELU, nn.SiLU, nn.Mish, nn.Tanh, nn.Softplus)
RECTIFIERS = (nn.ReLU, nn.ReLU6, nn.GELU, nn.SiLU, nn.Mish)
LAYERS = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.ConvTranspose1d, nn.ConvTranspose2d)
WEIGHTED = (*LAYERS, nn.RNNBase, nn.modules.rnn.RNNCellBase, nn.MultiheadAttention)
POOL = 30


class Unfit(Exception):
    """A program has nothing that the fault could be planted in."""


@dataclass
class Trace:
    """What a forward did.

    Attributes:
        loss: of it.
        output: of the network; None if it was not called as a whole.
        calls: names of modules without children, and of the functions that were called between them, in order.
    """

    loss: Tensor
    output: Any
    calls: list[str]


class _Functions(TorchFunctionMode):
    """Notes the functions of torch that are called outside of modules without children."""

    def __init__(self, calls: list[str]) -> None:
        super().__init__()
        self.calls, self.depth = calls, 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if self.depth == 0:
            self.calls.append(f"{getattr(func, '__name__', '')}()")
        return func(*args, **(kwargs or {}))


def _traced(training: Training) -> Trace:
    """Runs a forward on a copy of the network. Raises `Unfit` if it fails, as it does if a fault does not go with the program."""
    net = copy.deepcopy(training.net).train(training.trains)
    calls: list[str] = []
    outputs: list[Any] = []
    functions = _Functions(calls)

    def enter(name: str) -> Callable[..., None]:
        def hook(*_: Any) -> None:
            functions.depth += 1
            calls.append(name)

        return hook

    def leave(*_: Any) -> None:
        functions.depth -= 1

    for name, module in net.named_modules():
        if not any(module.children()):
            module.register_forward_pre_hook(enter(name))
            module.register_forward_hook(leave)
    net.register_forward_hook(lambda module, inputs, output: outputs.append(output))
    try:
        with warnings.catch_warnings(), torch.random.fork_rng(devices=[]), functions:
            warnings.simplefilter("ignore")
            loss = training.loss(net, *training.batch(0))
    except (RuntimeError, ValueError, IndexError, TypeError) as error:
        raise Unfit(f"does not go with the program: {error}") from error
    return Trace(loss.detach(), outputs[-1] if outputs else None, calls)


def _plain(training: Training) -> None:
    if training.loop is not None:
        raise Unfit("has its own loop")


def _fit(found: Any, what: str) -> None:
    if not found:
        raise Unfit(f"has no {what}")


def _layers(training: Training) -> list[str]:
    """Names of the layers with weights, in the order of the forward."""
    return list(dict.fromkeys(name for name in _traced(training).calls if _is_layer(training.net, name)))


def _is_layer(net: nn.Module, name: str) -> bool:
    return not name.endswith("()") and isinstance(net.get_submodule(name), LAYERS)


def _rectified(net: nn.Module, name: str, after: str) -> bool:
    """Whether a call is that of a layer with a bias, and the next call that of a rectifier."""
    if not _is_layer(net, name) or net.get_submodule(name).bias is None:
        return False
    return after in ("relu()", "relu_()") if after.endswith("()") else isinstance(net.get_submodule(after), RECTIFIERS)


def _blocked(training: Training) -> bool:
    """Whether the outputs are the same for all examples."""
    outputs = [leaf.float() for leaf in pytree.tree_leaves(_traced(training).output) if _floating(leaf) and leaf.dim()]
    return bool(outputs) and all(output.std(0).max() < 1e-3 for output in outputs)


def _statistics(training: Training) -> tuple[str, ...]:
    """Names of the batch normalisations whose statistics follow the training."""
    modules = training.net.train().named_modules()
    names = tuple(name for name, module in modules if isinstance(module, _BatchNorm) and module.training)
    _fit(names, "batch normalisation in training")
    return names


def _neighbours(training: Training, *names: str) -> tuple[str, ...]:
    """The modules and those that are called directly before and after them."""
    calls = [call for call in _traced(training).calls if not call.endswith("()")]
    near = (calls[max(at - 1, 0) : at + 2] for at, call in enumerate(calls) if call in names)
    return tuple(dict.fromkeys((*names, *itertools.chain.from_iterable(near))))


def _hidden(training: Training, share: float = 0.5) -> tuple[Any, tuple[str, ...]]:
    """A layer of those that are not the last, by its place among them from 0 to 1, and its places."""
    hidden = _layers(training)[:-1]
    _fit(hidden, "hidden layer")
    name = hidden[int(share * (len(hidden) - 1))]
    return training.net.get_submodule(name), _neighbours(training, name)


def _replaced(training: Training, kinds: tuple[type, ...], make: Callable[[], nn.Module], what: str) -> tuple[str, ...]:
    """Replaces all modules of these kinds; returns their names and those of their neighbours."""
    net = training.net
    found = [name for name, module in net.named_modules(remove_duplicate=False) if name and isinstance(module, kinds)]
    _fit(found, what)
    for name in found:
        above, _, own = name.rpartition(".")
        setattr(net.get_submodule(above), own, make())
    return _neighbours(training, *found)


def _random(number: int) -> torch.Generator:
    return torch.Generator().manual_seed(number + 1_000_003)


def _floating(value: Any) -> bool:
    return isinstance(value, Tensor) and value.is_floating_point()


def _set_batch(training: Training, batch: Callable[[int], tuple[Any, Any]]) -> None:
    """Replaces the data, if the network can be trained on them."""
    training.batch = batch
    _traced(training)


def _change_inputs(training: Training, change: Callable[[Tensor, torch.Generator], Tensor], *, scored: bool = False) -> None:
    """Changes the inputs; with `scored`, as an error of the preparation does, those of the score, too."""
    batch, score = training.batch, training.score
    _fit(all(map(_floating, pytree.tree_leaves(batch(0)[0]))), "inputs that are all in floating point")

    def changed(inputs: Any, number: int) -> Any:
        return pytree.tree_map(lambda leaf: change(leaf, _random(number)), inputs)

    def scored_so(net: nn.Module) -> float:
        with net.register_forward_pre_hook(lambda module, inputs: changed(inputs, 0)):
            return score(net)

    def batch_so(number: int) -> tuple[Any, Any]:
        inputs, target = batch(number)
        return changed(inputs, number), target

    _set_batch(training, batch_so)
    if scored:
        training.score = scored_so


def _change_target(training: Training, change: Callable[[Tensor, torch.Generator], Tensor]) -> None:
    _plain(training)
    batch = training.batch
    leaves = [leaf for leaf in pytree.tree_leaves(batch(0)[1]) if isinstance(leaf, Tensor)]
    _fit(any(leaf.dim() and leaf.unique().numel() > 1 for leaf in leaves), "target")

    def changed(number: int) -> tuple[Any, Any]:
        inputs, target = batch(number)
        return inputs, pytree.tree_map_only(Tensor, lambda leaf: change(leaf, _random(number)), target)

    _set_batch(training, changed)


def _change_values(training: Training, change: Callable[[Tensor], Tensor], back: Callable[[Tensor], Tensor]) -> None:
    """Changes the target of a regression; in the score, outputs are changed back."""
    target, score = training.batch(0)[1], training.score
    _fit(_floating(target) and target.min() < 0, "values for a target")
    _fit(_floating(_traced(training).output), "output that is a tensor")

    def scored(net: nn.Module) -> float:
        with net.register_forward_hook(lambda module, inputs, output: back(output)):
            return score(net)

    _change_target(training, lambda leaf, random: change(leaf))
    training.score = scored


def _few(training: Training, count: int) -> None:
    """Cuts the batches to some examples each."""
    batch = training.batch
    leaves = [leaf for leaf in pytree.tree_leaves(batch(0)) if isinstance(leaf, Tensor)]
    _fit(leaves and all(leaf.dim() and len(leaf) == len(leaves[0]) > count for leaf in leaves), "examples in all tensors")
    _set_batch(training, lambda number: pytree.tree_map_only(Tensor, lambda leaf: leaf[:count], batch(number)))


def _change_loss(training: Training, change: Callable[[Tensor], Tensor]) -> None:
    _plain(training)
    loss = training.loss
    training.loss = lambda net, inputs, target: change(loss(net, inputs, target))


def _change_optimizer(training: Training, change: Callable[[Optimizer], None]) -> None:
    _plain(training)
    make = training.optimizer

    def changed(parameters: Any, rate: float) -> Optimizer:
        optimizer = make(parameters, rate)
        change(optimizer)
        return optimizer

    training.optimizer = changed


def _made(training: Training) -> Optimizer:
    _plain(training)
    return training.optimizer(training.parameters(training.net), training.rate)


def _options(training: Training) -> dict[str, Any]:
    return _made(training).param_groups[0]


def _set_options(training: Training, **options: Any) -> None:
    """Sets options of the optimizer; `Unfit` if its type does not have them."""
    _fit(options.keys() <= _options(training).keys(), f"{', '.join(options)} in its optimizer")

    def set_all(optimizer: Optimizer) -> None:
        for group in optimizer.param_groups:
            group.update(options)

    _change_optimizer(training, set_all)


def _adaptive(training: Training) -> bool:
    """Whether the optimizer divides gradients by their scale."""
    return "eps" in _options(training)


def _keep_parameters(training: Training, keep: Callable[[str, int, int], bool]) -> tuple[str, ...]:
    """Leaves parameters out of the optimizer: those that are not kept, by name, index and count. Returns the layers of those."""
    _plain(training)
    parameters, net = training.parameters, training.net
    given = list(parameters(net))
    _fit(all(isinstance(one, Tensor) for one in given), "plain list of parameters")
    names = {id(value): name for name, value in net.named_parameters()}
    trained = [names[id(one)] for one in given if one.requires_grad and id(one) in names]
    kept = {name for index, name in enumerate(trained) if keep(name, index, len(trained))}
    _fit(kept and len(kept) < len(trained), "parameters to leave out")
    training.parameters = lambda net: [value for value in parameters(net) if names.get(id(value)) in kept]
    return tuple(dict.fromkeys(name.rpartition(".")[0] for name in trained if name not in kept))


def _scale_rate(training: Training, factor: float) -> None:
    training.rate *= factor


def _set_schedule(training: Training, factor: Callable[[float], float]) -> None:
    """Multiplies the schedule by a function of the share of the steps that are done."""
    schedule = training.schedule
    training.schedule = lambda step, steps: schedule(step, steps) * factor(step / steps)


def _at(training: Training, share: float, change: Callable[[], None]) -> None:
    """Changes something before one step."""
    when = int(share * training.steps)

    def before(training: Training, optimizer: Optimizer, step: int) -> None:
        if step == when and optimizer is training.optimizers[0]:
            with torch.no_grad():
                change()

    training.before_step.append(before)


@torch.no_grad()
def _initialise(training: Training, weight: Callable[[Tensor], Any], bias: Callable[[Tensor], Any] | None = None) -> None:
    """Changes the weights of all layers, and perhaps the biases."""
    layers = [module for module in training.net.modules() if isinstance(module, WEIGHTED)]
    own = {id(value): (name, value) for layer in layers for name, value in layer.named_parameters(recurse=False)}
    trained = [(name, value) for name, value in own.values() if value.requires_grad]
    _fit(trained, "layer with weights")
    for name, value in trained:
        if value.dim() > 1:
            weight(value)
        elif bias is not None and "bias" in name:
            bias(value)


# Optimisation


@fault(GENERAL, "optimisation", "gradients-not-cleared")
def gradients_not_cleared(training: Training) -> None:
    """`zero_grad` is missing."""
    training.clears = False


@fault(GENERAL, "optimisation", "rate-too-high")
def rate_times_100(training: Training) -> None:
    """The learning rate is 100 times too high."""
    _scale_rate(training, 100)


@fault(GENERAL, "optimisation", "rate-too-high")
def rate_times_1000(training: Training) -> None:
    """The learning rate is 1000 times too high."""
    _scale_rate(training, 1000)


@fault(GENERAL, "optimisation", "rate-too-low")
def rate_by_50(training: Training) -> None:
    """The learning rate is 50 times too low."""
    _scale_rate(training, 1 / 50)


@fault(GENERAL, "optimisation", "rate-too-low")
def rate_by_1000(training: Training) -> None:
    """The learning rate is 1000 times too low."""
    _scale_rate(training, 1e-3)


@fault(GENERAL, "optimisation", ("rate-too-low", "no-steps", "schedule"))
def rate_zero(training: Training) -> None:
    """The learning rate is 0."""
    _scale_rate(training, 0.0)


@fault(GENERAL, "optimisation", "weight-decay")
def weight_decay_heavy(training: Training) -> None:
    """The weight decay takes off 5 % of the weights in each step, or is 1 where gradients are divided by their scale."""
    _fit(not any(getattr(module, "sparse", False) for module in training.net.modules()), "dense gradients throughout")
    options = _options(training)
    scaled = "eps" in options and not (isinstance(_made(training), torch.optim.AdamW) or options.get("decoupled_weight_decay"))
    _set_options(training, weight_decay=1.0 if scaled else 0.05 / training.rate)


@fault(GENERAL, "optimisation", ("schedule", "rate-too-low"))
def schedule_ends_early(training: Training) -> None:
    """The schedule counts epochs for steps: the rate is 0 after 4 % of them."""
    _set_schedule(training, lambda done: float(done < 0.04))


@fault(GENERAL, "optimisation", ("schedule", "rate-too-low"))
def warm_up_never_ends(training: Training) -> None:
    """The warm-up is for a training that is 1000 times as long."""
    _set_schedule(training, lambda done: 1e-3 * done)


@fault(GENERAL, "optimisation", ("schedule", "rate-too-high"))
def schedule_rises(training: Training) -> None:
    """The rate, which was to be divided by ten several times, is multiplied by it."""
    _set_schedule(training, lambda done: 10 ** int(4 * done))


@fault(GENERAL, "optimisation", ("clipping", "rate-too-low"))
def clipped_to_nothing(training: Training) -> None:
    """Gradients are clipped to a norm that is nothing to the optimizer."""
    _plain(training)
    training.clip = 1e-11 if _adaptive(training) else 1e-6


@fault(GENERAL, "optimisation", "ascent")
def ascent(training: Training) -> None:
    """The loss has the wrong sign before backward."""
    training.sign = -1.0


@fault(GENERAL, "optimisation", ("not-in-optimizer", "frozen"))
def only_last_in_optimizer(training: Training) -> tuple[str, ...]:
    """The optimizer gets the parameters of the last layer."""
    return _keep_parameters(training, lambda name, index, count: index >= count - 2)


@fault(GENERAL, "optimisation", ("not-in-optimizer", "frozen"))
def only_biases_in_optimizer(training: Training) -> tuple[str, ...]:
    """The optimizer gets the biases."""
    return _keep_parameters(training, lambda name, index, count: "bias" in name.rpartition(".")[2])


@fault(GENERAL, "optimisation", ("epsilon", "rate-too-low"))
def epsilon_1(training: Training) -> None:
    """The epsilon of the optimizer is 1."""
    _set_options(training, eps=1.0)


@fault(GENERAL, "optimisation", ("momentum", "rate-too-high"))
def momentum_above_1(training: Training) -> None:
    """The momentum is 1.1, so that it grows by itself."""
    _set_options(training, momentum=1.1)


@fault(GENERAL, "optimisation", ("loss-scale", "rate-too-low"))
def loss_scaled_down(training: Training) -> None:
    """The loss is divided by a scale that gradients are never multiplied with."""
    scale = 1e-12 if _adaptive(training) else 1e-8
    _change_loss(training, lambda loss: loss * scale)


@fault(GENERAL, "optimisation", ("loss-scale", "rate-too-high"))
def loss_scaled_up(training: Training) -> None:
    """The loss is scaled by 65536, as for half precision, and gradients are not scaled back."""
    _fit(not _adaptive(training) and training.clip is None, "optimizer that depends on the scale of gradients")
    _change_loss(training, lambda loss: loss * 65536)


@fault(GENERAL, "optimisation", "no-steps")
def steps_seldom(training: Training) -> None:
    """The optimizer steps in each thirtieth step, and what was summed in between is lost."""

    def seldom(optimizer: Optimizer) -> None:
        step, calls = optimizer.step, [0]

        def counted(self: Optimizer, *arguments: Any, **options: Any) -> None:
            calls[0] += 1
            if calls[0] % 30 == 0:
                step(*arguments, **options)

        optimizer.step = MethodType(counted, optimizer)  # type: ignore[method-assign]

    _change_optimizer(training, seldom)


@fault(GENERAL, "optimisation", "no-steps")
def never_steps(training: Training) -> None:
    """`optimizer.step` is missing."""

    def never(optimizer: Optimizer) -> None:
        optimizer.step = MethodType(lambda self, *arguments: None, optimizer)  # type: ignore[method-assign]

    _change_optimizer(training, never)


@fault(GENERAL, "optimisation", ("lost-updates", "rate-too-low"))
def bfloat16_weights(training: Training) -> None:
    """The weights are in bfloat16, and the rate so low that most updates are rounded away."""
    _scale_rate(training, 1 / 20)

    def cast(values: Any, dtype: torch.dtype) -> Any:
        return pytree.tree_map(lambda leaf: leaf.to(dtype) if _floating(leaf) else leaf, values)

    net = training.net.bfloat16()
    net.register_forward_pre_hook(lambda module, inputs: cast(inputs, torch.bfloat16))
    net.register_forward_hook(lambda module, inputs, output: cast(output, torch.float32))
    _traced(training)


# Data


@fault(GENERAL, "data", "labels-do-not-fit")
def labels_shuffled(training: Training) -> None:
    """The targets are shuffled, and the inputs are not."""
    _change_target(training, lambda leaf, random: leaf[torch.randperm(len(leaf), generator=random)])


@fault(GENERAL, "data", "labels-do-not-fit")
def labels_misaligned(training: Training) -> None:
    """The targets are those of the example before."""
    _change_target(training, lambda leaf, random: leaf.roll(1, 0))


@fault(GENERAL, "data", "labels-constant")
def labels_constant(training: Training) -> None:
    """All examples have the same target."""
    first = [leaf[:1].clone() for leaf in pytree.tree_leaves(training.batch(0)[1]) if isinstance(leaf, Tensor) and leaf.dim()]
    _fit(len(first) == 1, "single target")
    _change_target(training, lambda leaf, random: first[0].expand_as(leaf).clone())


@fault(GENERAL, "data", "data-order")
def data_sorted(training: Training) -> None:
    """The data are sorted by their target, and not shuffled."""
    batch = training.batch
    target = batch(0)[1]
    _fit(isinstance(target, Tensor) and target.dim() and target.numel() == len(target), "one target of each example")
    leaves, spec = zip(*(pytree.tree_flatten(batch(number)) for number in range(POOL)), strict=True)
    _fit(all(isinstance(leaf, Tensor) and len(leaf) == len(target) for leaf in leaves[0]), "examples in all tensors")
    pool = [torch.cat(values) for values in zip(*leaves, strict=True)]
    order = pool[-1].flatten().argsort(stable=True).split(len(target))
    _set_batch(training, lambda number: pytree.tree_unflatten([leaf[order[number % POOL]] for leaf in pool], spec[0]))


@fault(GENERAL, "data", "repeated-batches")
def same_batch(training: Training) -> None:
    """Each batch is the first one."""
    batch = training.batch
    one, other = (pytree.tree_leaves(batch(number)) for number in range(2))
    _fit(not all(torch.equal(a, b) for a, b in zip(one, other, strict=True) if isinstance(a, Tensor)), "batches that differ")
    _set_batch(training, lambda number: batch(0))


@fault(GENERAL, "data", ("repeated-batches", "labels-constant"))
def eight_examples(training: Training) -> None:
    """There are eight examples in all."""
    batch = training.batch
    training.batch = lambda number: batch(0)
    _few(training, 8)


@fault(GENERAL, "data", "inputs-constant")
def inputs_zero(training: Training) -> None:
    """All inputs are 0."""
    _change_inputs(training, lambda leaf, random: torch.zeros_like(leaf))


@fault(GENERAL, "data", "inputs-constant")
def inputs_vanish(training: Training) -> None:
    """The inputs are divided by 255 several times."""
    _change_inputs(training, lambda leaf, random: leaf * 255.0**-3, scored=True)


@fault(GENERAL, "data", ("inputs-not-normalised", "outliers"))
def inputs_times_1000(training: Training) -> None:
    """The inputs are in a unit that makes them 1000 times as large."""
    _change_inputs(training, lambda leaf, random: leaf * 1000, scored=True)


@fault(GENERAL, "data", ("inputs-not-normalised", "inputs-constant"))
def inputs_plus_1000(training: Training) -> None:
    """The mean of the inputs, of 1000, was not taken off."""
    _change_inputs(training, lambda leaf, random: leaf + 1000, scored=True)


@fault(GENERAL, "data", ("noise", "labels-do-not-fit"))
def inputs_noise(training: Training) -> None:
    """The inputs are noise of their mean and spread."""

    def noise(leaf: Tensor, random: torch.Generator) -> Tensor:
        return leaf.mean() + leaf.std() * torch.randn(leaf.shape, generator=random, dtype=leaf.dtype)

    _change_inputs(training, noise)


@fault(GENERAL, "data", ("nonfinite-inputs", "nonfinite"))
def nan_in_inputs(training: Training) -> None:
    """One input of 5000 is NaN."""
    _change_inputs(training, lambda leaf, random: leaf.masked_fill(torch.rand(leaf.shape, generator=random) < 2e-4, float("nan")))


@fault(GENERAL, "data", "target-scale")
def targets_times_1000(training: Training) -> None:
    """The targets are in a unit that makes them 1000 times as large."""
    _change_values(training, lambda target: target * 1000, lambda output: output / 1000)


@fault(GENERAL, "data", "target-scale")
def targets_plus_1000(training: Training) -> None:
    """The mean of the targets, of 1000, was not taken off."""
    _change_values(training, lambda target: target + 1000, lambda output: output - 1000)


# State


@fault(GENERAL, "state", ("eval-mode", "statistics-frozen"))
def eval_mode_in_training(training: Training) -> None:
    """The network is in evaluation mode while it is trained."""
    _statistics(training)
    training.trains = False


@fault(GENERAL, "state", "statistics-frozen")
def statistics_frozen(training: Training) -> tuple[str, ...]:
    """The momentum of batch normalisation is 0, so its statistics stay as they were made."""
    names = _statistics(training)
    for name in names:
        training.net.get_submodule(name).momentum = 0.0  # type: ignore[assignment]
    return names


@fault(GENERAL, "state", "batch-of-one")
def batch_of_one(training: Training) -> None:
    """Each batch has one example."""
    _few(training, 1)


@fault(GENERAL, "state", "weights-overwritten")
def checkpoint_reloaded(training: Training) -> None:
    """The first checkpoint is loaded again in each tenth step."""
    saved = copy.deepcopy(training.net.state_dict())

    def load(training: Training, optimizer: Optimizer, step: int) -> None:
        if step % 10 == 0:
            training.net.load_state_dict(saved)

    training.before_step.append(load)


@fault(GENERAL, "state", ("stale-optimizer", "not-in-optimizer"))
def stale_optimizer(training: Training) -> None:
    """The optimizer was made for a network that was replaced by a copy."""
    _plain(training)
    parameters = training.parameters
    training.parameters = lambda net: parameters(copy.deepcopy(net))


@fault(GENERAL, "state", "weights-overwritten")
def layer_overwritten(training: Training) -> tuple[str, ...]:
    """The weights of a layer are overwritten with noise late in the training."""
    layer, places = _hidden(training)
    _at(training, 0.9, lambda: layer.weight.normal_(std=float(10 * layer.weight.std()), generator=_random(0)))
    return places


# Architecture


@fault(GENERAL, "architecture", "nonfinite")
def nan_in_weights(training: Training) -> tuple[str, ...]:
    """A weight of a layer becomes NaN after 40 % of the steps."""
    layer, places = _hidden(training)
    _at(training, 0.4, lambda: layer.weight.view(-1)[0].fill_(float("nan")))
    return places


@fault(GENERAL, "architecture", "dropout")
def dropout_095(training: Training) -> tuple[str, ...]:
    """All dropouts drop 95 %."""
    found = [name for name, module in training.net.named_modules() if isinstance(module, _DropoutNd)]
    _fit(found, "dropout")
    for name in found:
        training.net.get_submodule(name).p = 0.95  # type: ignore[assignment]
    return tuple(found)


@fault(GENERAL, "architecture", ("vanishing-gradients", "saturation"))
def sigmoids(training: Training) -> tuple[str, ...]:
    """All activations are sigmoids."""
    return _replaced(training, ACTIVATIONS, nn.Sigmoid, "activation")


@fault(GENERAL, "architecture", ("initialisation", "exploding-gradients", "saturation"))
def weights_times_30(training: Training) -> None:
    """All weights start 30 times as large."""
    _initialise(training, lambda weight: weight.mul_(30))


@fault(GENERAL, "architecture", ("initialisation", "symmetry", "vanishing-gradients"))
def weights_zero(training: Training) -> None:
    """All weights and biases start at 0."""
    _initialise(training, nn.init.zeros_, nn.init.zeros_)


@fault(GENERAL, "architecture", ("symmetry", "initialisation"))
def weights_equal(training: Training) -> None:
    """All weights of a layer start equal, and biases at 0."""
    _initialise(training, lambda weight: weight.fill_(weight.abs().mean()), nn.init.zeros_)


@fault(GENERAL, "architecture", "dead-units")
def dead_layer(training: Training) -> tuple[str, ...]:
    """The biases of a layer start so negative that the rectifiers after it never fire."""
    fitting = [name for name, after in itertools.pairwise(_traced(training).calls) if _rectified(training.net, name, after)]
    for name in sorted(fitting, key=lambda name: abs(fitting.index(name) - len(fitting) // 2)):
        bias: Any = training.net.get_submodule(name).bias
        before = bias.detach().clone()
        nn.init.constant_(bias, -30.0)
        if _blocked(training):
            return _neighbours(training, name)
        bias.data.copy_(before)
    raise Unfit("has no rectified layer that all must pass")


@fault(GENERAL, "architecture", ("vanishing-gradients", "bottleneck", "initialisation"))
def layer_scaled_away(training: Training) -> tuple[str, ...]:
    """The output of a layer is divided by a million."""
    layer, places = _hidden(training)
    layer.register_forward_hook(lambda module, inputs, output: output * 1e-6)
    return places


@fault(GENERAL, "architecture", "frozen")
def layers_frozen(training: Training) -> tuple[str, ...]:
    """All layers but the last have no gradients, as those of a base."""
    names = _layers(training)[:-1]
    _fit(any(value.requires_grad for name in names for value in training.net.get_submodule(name).parameters()), "hidden layer")
    for name in names:
        training.net.get_submodule(name).requires_grad_(False)
    return tuple(names)


@fault(GENERAL, "architecture", "detached")
def layer_detached(training: Training) -> tuple[str, ...]:
    """The output of the last hidden layer is cut from the graph."""
    layer, places = _hidden(training, 1.0)
    layer.register_forward_hook(lambda module, inputs, output: output.detach())
    return places


@fault(GENERAL, "architecture", "detached")
def loss_detached(training: Training) -> None:
    """The loss is cut from the graph, and made to require gradients again."""
    _change_loss(training, lambda loss: loss.detach().requires_grad_())


@fault(GENERAL, "architecture", ("output-activation", "dead-units"))
def output_rectified(training: Training) -> tuple[str, ...]:
    """A ReLU follows the output."""
    _fit(_floating(_traced(training).output), "output that is a tensor")
    training.net.register_forward_hook(lambda module, inputs, output: F.relu(output))
    return (*_layers(training)[-1:], "")


@fault(GENERAL, "architecture", "broadcast")
def shapes_broadcast(training: Training) -> tuple[str, ...]:
    """The target is (n, 1) where the output is (n,), or the other way round, and the loss compares each with each."""
    before, (_, target) = _traced(training), training.batch(0)
    _fit(_floating(target) and target.numel() == len(target) > 1, "single value for a target")
    _fit(_floating(before.output) and before.output.shape == target.shape, "output of the same shape")
    _change_target(training, lambda leaf, random: leaf.flatten() if leaf.dim() > 1 else leaf.unsqueeze(1))
    _fit(not torch.isclose(_traced(training).loss, before.loss), "loss that broadcasts")
    return (*_layers(training)[-1:], "")
