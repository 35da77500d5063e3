"""False alarms: healthy trainings in many variants, and what `findings` says of them. Run: python -m benchmarks.diagnosis.variants

Each variant changes one thing of a program in a way in which people do. A run counts as healthy by its outcome: the score loses no
more than a tenth of what the program learned as it is; a fault that loses no more is none in the benchmark either. Programs that
are held out are not run; see `benchmarks/diagnosis/more.py` for trainings beside the programs.

Options:
    --all               every variant of every program that it fits, not only those dealt.
    --only PROGRAM      only this program, or several: each variant of it that fits.
    --variant VARIANT   only this variant, or several.

Writes `results/diagnosis_variants.json`, unless a part is chosen, and prints how many healthy runs each kind of finding alarms in.
"""

from __future__ import annotations

import argparse
import copy
import functools
import math
import time
import warnings
import zlib
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, field
from multiprocessing import get_context
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils import _pytree as pytree

import benchmarks.diagnosis.programs  # noqa: F401  registers the programs
from benchmarks.diagnosis.cases import matters
from benchmarks.diagnosis.more import MORE
from benchmarks.diagnosis.programs import sequences, vectors
from benchmarks.diagnosis.training import PROGRAMS, Program, Training, run
from benchmarks.diagnosis.watch import Health
from benchmarks.measure import write

__all__ = ["VARIANTS", "Run", "Variant", "dealt", "runs", "summary"]

SEED = 2
"""Of all runs: the benchmark's own are of the seeds 0 and 1."""
TIMES = 3
"""In how many programs each variant is run."""
BESIDE = ("as-it-is", "evaluated")
"""The variants of trainings beside the programs."""
MOST = {"resnet": 4}
"""At most how many variants of a program are dealt, of one that takes long."""
ASKED = (10, 20, 50, 100, 200)
"""The steps after which findings are asked for, beside the end."""


@dataclass(frozen=True)
class Variant:
    """One way to write a training differently.

    Attributes:
        name: of the variant.
        change: changes the training.
        fits: whether it can be done to a training, and changes it.
        watch: what records it.
        compiled: the backend of `torch.compile`; None for eager mode.
    """

    name: str
    change: Callable[[Training], None]
    fits: Callable[[Training], bool]
    watch: Callable[[], Health]
    compiled: str | None


VARIANTS: dict[str, Variant] = {}


def anything(training: Training) -> bool:
    """Fits every training."""
    return True


def plain(training: Training) -> bool:
    """Fits a training in a plain loop."""
    return training.loop is None


def variant(
    fits: Callable[[Training], bool] = plain, watch: Callable[[], Health] = lambda: Health(ASKED), compiled: str | None = None
) -> Callable[[Callable[[Training], None]], Callable[[Training], None]]:
    """Registers a function that changes a training, under its own name with `-` for `_`."""

    def register(change: Callable[[Training], None]) -> Callable[[Training], None]:
        name = change.__name__.replace("_", "-")
        VARIANTS[name] = Variant(name, change, fits, watch, compiled)
        return change

    return register


@variant(anything)
def as_it_is(training: Training) -> None:
    """Nothing is changed. What the others score is compared with this."""


# The learning rate and its schedule


@variant(anything)
def rate_tripled(training: Training) -> None:
    """The learning rate is three times as high."""
    training.rate *= 3


@variant(anything)
def rate_third(training: Training) -> None:
    """The learning rate is a third."""
    training.rate /= 3


@variant(anything)
def more_steps(training: Training) -> None:
    """The training is two and a half times as long."""
    training.steps = int(2.5 * training.steps)


def unscheduled(training: Training) -> bool:
    """Fits a training without a schedule."""
    return plain(training) and training.schedule(0, 100) == training.schedule(50, 100) == training.schedule(99, 100)


def scheduled(training: Training) -> bool:
    """Fits a training with a schedule."""
    return plain(training) and not unscheduled(training)


@variant(scheduled)
def constant_rate(training: Training) -> None:
    """The learning rate does not change."""
    training.schedule = lambda step, steps: 1.0


@variant()
def warmup_cosine(training: Training) -> None:
    """The rate rises for a tenth of the steps, and falls along a cosine to zero."""
    training.rate *= 1.5
    training.schedule = vectors.warmup_cosine


@variant()
def linear_to_zero(training: Training) -> None:
    """The rate falls linearly to zero."""
    training.schedule = lambda step, steps: 1 - step / steps


@variant()
def rate_in_stages(training: Training) -> None:
    """The rate is a tenth from half of the steps on, and a hundredth from three quarters on."""
    training.schedule = lambda step, steps: 1.0 if step < steps / 2 else 0.1 if step < 0.75 * steps else 0.01


@variant()
def one_cycle(training: Training) -> None:
    """The rate rises to three times the usual one for 30 % of the steps, and falls to nearly zero."""
    training.schedule = lambda step, steps: (
        3 * (0.04 + 0.96 * step / (0.3 * steps))
        if step < 0.3 * steps
        else 1.5 * (1 + math.cos(math.pi * (step / steps - 0.3) / 0.7))
    )


@variant()
def warm_restarts(training: Training) -> None:
    """The rate falls along a cosine to zero, and starts again, three times."""
    training.schedule = lambda step, steps: 0.5 * (1 + math.cos(math.pi * (3 * step / steps % 1)))


@variant()
def decays_by_step(training: Training) -> None:
    """The rate falls exponentially, to a twentieth."""
    training.schedule = lambda step, steps: 0.05 ** (step / steps)


# The optimizer


def _made(training: Training) -> Optimizer:
    return training.optimizer([nn.Parameter(torch.zeros(1))], training.rate)


def _sparse(training: Training) -> bool:
    return any(getattr(module, "sparse", False) for module in training.net.modules())


def adaptive(training: Training) -> bool:
    """Fits a training by Adam or the like."""
    return plain(training) and not isinstance(_made(training), (torch.optim.SGD, torch.optim.LBFGS))


def by_sgd(training: Training) -> bool:
    """Fits a training by SGD, of dense gradients."""
    return plain(training) and isinstance(_made(training), torch.optim.SGD) and not _sparse(training)


def dense(training: Training) -> bool:
    """Fits a training of dense gradients."""
    return plain(training) and not _sparse(training) and not isinstance(_made(training), torch.optim.LBFGS)


def _to_adaptive(training: Training) -> None:
    if by_sgd(training):
        training.rate /= 20


@variant(adaptive)
def sgd_with_momentum(training: Training) -> None:
    """SGD with a momentum of 0.9."""
    training.rate *= 15
    training.optimizer = lambda parameters, rate: torch.optim.SGD(parameters, lr=rate, momentum=0.9)


@variant(adaptive)
def sgd_nesterov_decayed(training: Training) -> None:
    """SGD with Nesterov's momentum and a weight decay of 5e-4."""
    training.rate *= 15
    training.optimizer = lambda parameters, rate: torch.optim.SGD(parameters, rate, 0.9, weight_decay=5e-4, nesterov=True)


@variant(adaptive)
def sgd_alone(training: Training) -> None:
    """SGD without momentum."""
    training.rate *= 100
    training.optimizer = lambda parameters, rate: torch.optim.SGD(parameters, lr=rate)


@variant(by_sgd)
def adam(training: Training) -> None:
    """Adam in place of SGD."""
    _to_adaptive(training)
    training.optimizer = lambda parameters, rate: torch.optim.Adam(parameters, lr=rate)


@variant(dense)
def adamw_decay_1e_2(training: Training) -> None:
    """AdamW with a weight decay of 0.01."""
    _to_adaptive(training)
    training.optimizer = lambda parameters, rate: torch.optim.AdamW(parameters, lr=rate, weight_decay=0.01)


@variant(dense)
def adamw_decay_1e_1(training: Training) -> None:
    """AdamW with a weight decay of 0.1 and betas of 0.9 and 0.95."""
    _to_adaptive(training)
    training.optimizer = lambda parameters, rate: torch.optim.AdamW(parameters, lr=rate, weight_decay=0.1, betas=(0.9, 0.95))


@variant(dense)
def rms_prop(training: Training) -> None:
    """RMSprop."""
    _to_adaptive(training)
    training.rate /= 2
    training.optimizer = lambda parameters, rate: torch.optim.RMSprop(parameters, lr=rate)


@variant(dense)
def adagrad(training: Training) -> None:
    """Adagrad, whose steps get smaller on their own."""
    _to_adaptive(training)
    training.rate *= 5
    training.optimizer = lambda parameters, rate: torch.optim.Adagrad(parameters, lr=rate)


@variant(dense)
def decay_of_matrices_only(training: Training) -> None:
    """AdamW in two groups: matrices decay, biases and norms do not."""
    _to_adaptive(training)

    def grouped(parameters: Any, rate: float) -> Optimizer:
        several = [one for one in parameters if one.requires_grad]
        decayed, others = [one for one in several if one.ndim > 1], [one for one in several if one.ndim < 2]
        groups = [{"params": part, "weight_decay": decay} for part, decay in ((decayed, 0.1), (others, 0.0)) if part]
        return torch.optim.AdamW(groups, lr=rate)

    training.optimizer = grouped


# Gradients


@variant(lambda training: dense(training) and training.clip is None)
def clipped(training: Training) -> None:
    """Gradients are clipped to a norm of 1."""
    training.clip = 1.0


@variant(lambda training: adaptive(training) and not _sparse(training) and training.clip != 0.1)
def clipped_to_a_tenth(training: Training) -> None:
    """Gradients are clipped to a norm of 0.1, which Adam makes up for."""
    training.clip = 0.1


@variant(lambda training: plain(training) and training.clip is not None)
def unclipped(training: Training) -> None:
    """Gradients are not clipped."""
    training.clip = None


def _cleared_by(training: Training, clear: Callable[[Training, Optimizer], None]) -> None:
    training.clears = False
    training.before_step.append(lambda training, optimizer, step: clear(training, optimizer))


@variant(anything)
def zeroed_in_place(training: Training) -> None:
    """Gradients are set to zero, not to None."""
    _cleared_by(training, lambda training, optimizer: optimizer.zero_grad(set_to_none=False))


@variant()
def zeroed_by_the_net(training: Training) -> None:
    """The net clears the gradients, not the optimizer."""
    _cleared_by(training, lambda training, optimizer: training.net.zero_grad())


@variant()
def accumulated(training: Training) -> None:
    """Gradients are accumulated over four batches, each of a quarter of the size."""
    _parted(training, 4)
    training.micro_batches *= 4


@variant()
def accumulated_whole(training: Training) -> None:
    """Gradients are accumulated over four batches of the usual size."""
    training.micro_batches *= 4


@variant(lambda training: plain(training) and not training.autocast)
def autocast(training: Training) -> None:
    """The forward runs in bfloat16 autocast."""
    training.autocast = True


@variant(lambda training: training.autocast)
def full_precision(training: Training) -> None:
    """No autocast."""
    training.autocast = False


# Batches


def _rows(batch: Any) -> int:
    return len(pytree.tree_leaves(batch)[0])


def _parted(training: Training, parts: int) -> None:
    batch = training.batch

    def part(number: int) -> tuple[Any, Any]:
        whole, at = batch(number // parts), number % parts
        size = _rows(whole) // parts
        return pytree.tree_map(lambda values: values[at * size : (at + 1) * size], whole)

    training.batch = part


@variant(anything)
def batches_halved(training: Training) -> None:
    """Batches are half as large."""
    _parted(training, 2)


@variant(anything)
def batches_doubled(training: Training) -> None:
    """Batches are twice as large."""
    batch = training.batch
    training.batch = lambda number: pytree.tree_map(lambda *several: torch.cat(several), batch(2 * number), batch(2 * number + 1))


@variant()
def ragged_batches(training: Training) -> None:
    """Every fifth batch is smaller, as the last of an epoch is."""
    batch = training.batch

    def ragged(number: int) -> tuple[Any, Any]:
        whole = batch(number)
        return whole if number % 5 < 4 else pytree.tree_map(lambda values: values[: max(4, _rows(whole) // 6)], whole)

    training.batch = ragged


@variant()
def inputs_noisy(training: Training) -> None:
    """Inputs are augmented: noise of a tenth of their spread is added."""
    batch = training.batch

    def noisy(number: int) -> tuple[Any, Any]:
        inputs, target = batch(number)
        return pytree.tree_map(lambda x: x + 0.1 * x.std() * torch.randn_like(x) if x.is_floating_point() else x, inputs), target

    training.batch = noisy


# The loss and the target


def classifies(training: Training) -> bool:
    """Fits a training by the cross entropy of one label for each logit vector."""
    return training.loss in (vectors.cross_entropy, sequences.label_loss)


@variant(classifies)
def labels_smoothed(training: Training) -> None:
    """The labels are smoothed by 0.1."""
    training.loss = lambda net, x, y: F.cross_entropy(net(x).flatten(0, -2), y.flatten(), label_smoothing=0.1)


@variant(classifies)
def labels_one_hot(training: Training) -> None:
    """The target holds the probabilities of classes."""
    batch, count = training.batch, 0

    def one_hot(number: int) -> tuple[Any, Any]:
        inputs, labels = batch(number)
        return inputs, F.one_hot(labels, count).float()

    with torch.no_grad():
        count = copy.deepcopy(training.net)(batch(0)[0]).shape[-1]
    training.batch = one_hot
    training.loss = lambda net, x, y: F.cross_entropy(net(x).flatten(0, -2), y.flatten(0, -2))


@variant(classifies)
def focal(training: Training) -> None:
    """The focal loss, which weighs down what is already right."""

    def loss(net: nn.Module, x: Any, y: Tensor) -> Tensor:
        each = F.cross_entropy(net(x).flatten(0, -2), y.flatten(), reduction="none")
        return ((1 - (-each).exp()) ** 2 * each).mean()

    training.loss = loss


@variant(classifies)
def labels_wrong_by_a_tenth(training: Training) -> None:
    """A tenth of the labels is wrong, as in data from the field."""
    batch = training.batch

    def noisy(number: int) -> tuple[Any, Any]:
        inputs, labels = batch(number)
        return inputs, torch.where(
            torch.rand(labels.shape) < 0.1, labels.flatten()[torch.randperm(labels.numel())].view_as(labels), labels
        )

    training.batch = noisy


def regresses(training: Training) -> bool:
    """Fits a regression of one standardised value."""
    inputs, target = training.batch(0)
    both = isinstance(inputs, Tensor) and isinstance(target, Tensor)
    return plain(training) and both and target.is_floating_point() and target.numel() == len(target) and bool(target.min() < 0)


@variant(regresses)
def absolute_error(training: Training) -> None:
    """The loss is the mean absolute error."""
    training.loss = lambda net, x, y: F.l1_loss(net(x).reshape(y.shape), y)


@variant(regresses)
def target_in_units(training: Training) -> None:
    """The target is not standardised: its mean is 2 and its spread 3."""
    batch, score = training.batch, training.score
    training.batch = lambda number: (batch(number)[0], 3 * batch(number)[1] + 2)
    training.score = lambda net: score(lambda x: (net(x) - 2) / 3)  # type: ignore[arg-type, return-value]


@variant()
def loss_summed(training: Training) -> None:
    """The loss is the sum over the batch, at a rate, or a clip, that fits."""
    loss, rows = training.loss, _rows(training.batch(0))
    training.loss = lambda net, x, y: rows * loss(net, x, y)
    training.clip = None if training.clip is None else rows * training.clip
    if not adaptive(training):
        training.rate /= rows


@variant()
def loss_with_penalty(training: Training) -> None:
    """A penalty on the squares of the weights is part of the loss."""
    loss = training.loss
    training.loss = lambda net, x, y: (
        loss(net, x, y)
        + 1e-4
        * sum(  # type: ignore[return-value]
            parameter.square().sum() for parameter in net.parameters() if parameter.requires_grad
        )
    )


# The inputs


def sees_images(training: Training) -> bool:
    """Fits a training on images in [-1, 1]."""
    inputs, _ = training.batch(0)
    return plain(training) and isinstance(inputs, Tensor) and inputs.shape[1:] == (1, 8, 8) and not _has_buffers(training.net)


def _has_buffers(net: nn.Module) -> bool:
    return any(not parameter.requires_grad for parameter in net.parameters()) or any(
        name == "mean" for name, _ in net.named_buffers()
    )


def _rescaled(training: Training, scale: Callable[[Tensor], Tensor]) -> None:
    batch, score = training.batch, training.score

    def scaled(number: int) -> tuple[Any, Any]:
        inputs, target = batch(number)
        return scale(inputs), target

    training.batch = scaled
    training.score = lambda net: score(_Rescaled(net, scale))


class _Rescaled(nn.Module):
    def __init__(self, net: nn.Module, scale: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.net, self.scale = net, scale

    def forward(self, images: Tensor) -> Any:
        return self.net(self.scale(images))


@variant(sees_images)
def pixels_0_to_1(training: Training) -> None:
    """Pixels are in [0, 1]."""
    _rescaled(training, lambda images: (images + 1) / 2)


@variant(sees_images)
def pixels_0_to_16(training: Training) -> None:
    """Pixels are as in the file, 0 to 16."""
    _rescaled(training, lambda images: 8 * (images + 1))


@variant(sees_images)
def pixels_standardised(training: Training) -> None:
    """Pixels have a mean of 0 and a deviation of 1."""
    _rescaled(training, lambda images: (images + 0.39) / 0.75)


# The net


def has(*kinds: type[nn.Module]) -> Callable[[Training], bool]:
    """Fits a net with modules of these classes."""
    return lambda training: any(isinstance(module, kinds) for module in training.net.modules())


def _replaced(net: nn.Module, kinds: tuple[type[nn.Module], ...], make: Callable[[nn.Module], nn.Module]) -> None:
    for name, module in list(net.named_modules()):
        if isinstance(module, kinds):
            sequences.replace(net, name, make(module))


ACTIVATIONS = (nn.ReLU, nn.GELU, nn.SiLU, nn.LeakyReLU, nn.ELU, nn.Tanh)


@variant(has(*ACTIVATIONS))
def with_relu(training: Training) -> None:
    """The activation functions are ReLU."""
    _replaced(training.net, ACTIVATIONS, lambda module: nn.ReLU())


@variant(has(*ACTIVATIONS))
def with_gelu(training: Training) -> None:
    """The activation functions are GELU."""
    _replaced(training.net, ACTIVATIONS, lambda module: nn.GELU())


@variant(has(*ACTIVATIONS))
def with_tanh(training: Training) -> None:
    """The activation functions are tanh."""
    _replaced(training.net, ACTIVATIONS, lambda module: nn.Tanh())


@variant(has(*ACTIVATIONS))
def with_dropout(training: Training) -> None:
    """Dropout of 0.2 follows each activation function."""
    _replaced(training.net, ACTIVATIONS, lambda module: nn.Sequential(module, nn.Dropout(0.2)))


def _drawn(training: Training, draw: Callable[[Tensor], Any]) -> None:
    for module in training.net.modules():
        if isinstance(module, (nn.Linear, nn.Conv2d, nn.ConvTranspose2d)) and module.weight.requires_grad:
            draw(module.weight)
            if module.bias is not None:
                nn.init.zeros_(module.bias)


def fresh(training: Training) -> bool:
    """Fits a net none of whose weights is frozen, with linear layers."""
    return has(nn.Linear)(training) and all(parameter.requires_grad for parameter in training.net.parameters())


@variant(fresh)
def drawn_by_xavier(training: Training) -> None:
    """Weights are drawn by Xavier's rule, and biases are zero."""
    _drawn(training, nn.init.xavier_uniform_)


@variant(fresh)
def drawn_by_he(training: Training) -> None:
    """Weights are drawn by He's rule, and biases are zero."""
    _drawn(training, nn.init.kaiming_normal_)


@variant(fresh)
def drawn_orthogonal(training: Training) -> None:
    """Weights are orthogonal, and biases are zero."""
    _drawn(training, nn.init.orthogonal_)


@variant(fresh)
def drawn_small(training: Training) -> None:
    """Weights are drawn with a deviation of 0.02, as those of transformers are."""
    _drawn(training, lambda weight: nn.init.trunc_normal_(weight, std=0.02))


def _trained(training: Training, share: float) -> dict[str, Tensor]:
    """The state of a copy that was trained for a share of the steps."""
    before = copy.deepcopy(training)
    before.steps, random = int(share * training.steps), torch.get_rng_state()
    batch = training.batch
    before.batch = lambda number: batch(number + 5000)
    run(before)
    torch.set_rng_state(random)
    return {name: value.clone() for name, value in before.net.state_dict().items()}


def pretrainable(training: Training) -> bool:
    """Fits a net none of whose weights is frozen or shared, in a plain loop."""
    names = [name for name, _ in training.net.named_parameters(remove_duplicate=False)]
    return plain(training) and fresh(training) and len(names) == len([*training.net.parameters()])


@variant(pretrainable)
def first_half_frozen(training: Training) -> None:
    """The first half of the layers comes from another training, and is frozen; the others are fresh."""
    state = _trained(training, 1.0)
    modules = [(name, module) for name, module in training.net.named_modules() if name and [*module.parameters(recurse=False)]]
    for name, module in modules[: len(modules) // 2]:
        module.load_state_dict({key[len(name) + 1 :]: value for key, value in state.items() if key.startswith(f"{name}.")})
        module.requires_grad_(False)
    training.parameters = lambda net: [parameter for parameter in net.parameters() if parameter.requires_grad]


@variant(pretrainable)
def fine_tuned_whole(training: Training) -> None:
    """All weights come from another training; the learning rate is a tenth."""
    training.net.load_state_dict(_trained(training, 1.0))
    training.rate /= 10


@variant(pretrainable)
def resumed(training: Training) -> None:
    """The training goes on from a third of it, with a fresh optimizer."""
    training.net.load_state_dict(_trained(training, 0.33))


# What is done beside the training


@variant(anything)
def evaluated(training: Training) -> None:
    """Every 10 steps the net is evaluated, without gradients."""

    def evaluate(training: Training, optimizer: Optimizer, step: int) -> None:
        if step % 10 == 9:
            training.net.train(training.evaluates)
            with torch.no_grad():
                training.score(training.net)
            training.net.train(training.trains)

    training.before_step.append(evaluate)


@variant(anything)
def evaluated_with_gradients(training: Training) -> None:
    """Every 10 steps the net is evaluated, in evaluation mode, but without `no_grad`."""

    def evaluate(training: Training, optimizer: Optimizer, step: int) -> None:
        if step % 10 == 9:
            training.net.train(training.evaluates)
            training.score(training.net)
            training.net.train(training.trains)

    training.before_step.append(evaluate)


@variant(anything)
def copied(training: Training) -> None:
    """Every 20 steps a copy of the net is kept, and evaluated."""

    def keep(training: Training, optimizer: Optimizer, step: int) -> None:
        if step % 20 == 19:
            best = copy.deepcopy(training.net).train(training.evaluates)
            with torch.no_grad():
                training.score(best)

    training.before_step.append(keep)


@variant()
def averaged(training: Training) -> None:
    """A moving average of the weights is kept beside the net, and scored at the end."""
    average = torch.optim.swa_utils.AveragedModel(
        training.net, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.9), use_buffers=True
    )
    score = training.score
    training.before_step.append(lambda training, optimizer, step: average.update_parameters(training.net))
    training.score = lambda net: score(average.module.train(training.evaluates))


# What is pushed


class MeanOfLast(Health):
    """Records a training of which the mean of the last 10 losses is pushed, as a number."""

    def __init__(self) -> None:
        super().__init__(ASKED)
        self.losses: list[float] = []

    def push(self, loss: Tensor, target: Any) -> None:
        self.losses.append(float(loss))
        super().push(torch.tensor(sum(self.losses[-10:]) / len(self.losses[-10:])), target)


class EveryTenth(Health):
    """Records a training of which the loss and the target of every tenth step are pushed."""

    def __init__(self) -> None:
        super().__init__(ASKED)
        self.pushed = 0

    def push(self, loss: Tensor, target: Any) -> None:
        self.pushed += 1
        if self.pushed % 10 == 0:
            super().push(loss, target)


class LossOnly(Health):
    """Records a training of which no target is pushed."""

    def __init__(self) -> None:
        super().__init__(ASKED)

    def push(self, loss: Tensor, target: Any) -> None:
        super().push(loss, None)


class Nothing(LossOnly):
    """Records a training of which nothing is pushed."""

    def push(self, loss: Tensor, target: Any) -> None:
        pass


class Inside(Health):
    """Records a training whose loss and target are pushed where the loss is computed, before backward, of each micro-batch."""

    def __init__(self) -> None:
        super().__init__(ASKED)

    def begin(self, training: Training, optimizers: Sequence[Optimizer]) -> None:
        super().begin(training, optimizers)
        loss = training.loss

        def pushing(net: nn.Module, inputs: Any, target: Any) -> Tensor:
            value = loss(net, inputs, target)
            super(Inside, self).push(value, target)
            return value

        training.loss = pushing

    def push(self, loss: Tensor, target: Any) -> None:
        pass


class FromHalf(Health):
    """Records a training from half of its steps on."""

    def __init__(self) -> None:
        super().__init__()
        self.begun: tuple[Training, Sequence[Optimizer]] | None = None

    def begin(self, training: Training, optimizers: Sequence[Optimizer]) -> None:
        self.begun = training, optimizers

    def after(self, step: int, loss: Tensor, inputs: Any, target: Any) -> bool | None:
        if self.recorder is not None:
            return super().after(step, loss, inputs, target)
        if self.begun is not None and step >= self.begun[0].steps // 2:
            super().begin(*self.begun)
        return None


@variant(anything, watch=MeanOfLast)
def loss_as_mean(training: Training) -> None:
    """The mean of the last 10 losses is pushed."""


@variant(anything, watch=EveryTenth)
def loss_every_tenth(training: Training) -> None:
    """Every tenth loss is pushed, and the target of that step."""


@variant(anything, watch=LossOnly)
def target_not_pushed(training: Training) -> None:
    """The target is not pushed."""


@variant(anything, watch=Nothing)
def nothing_pushed(training: Training) -> None:
    """Neither loss nor target is pushed."""


@variant(watch=Inside)
def pushed_before_backward(training: Training) -> None:
    """The loss is pushed before backward, with its graph, and so is the target, for each micro-batch."""


@variant(anything, watch=FromHalf)
def watched_from_half(training: Training) -> None:
    """The recorder is put on in the middle of the training."""


@variant(anything, compiled="aot_eager")
def compiled(training: Training) -> None:
    """The net is compiled."""


# Running them


@dataclass
class Run:
    """What was found in one training.

    Attributes:
        program, variant: what was trained.
        score: of the net at the end.
        healthy: whether it learned as much as the program does as it is; None if that is not known.
        seconds: the training took, watched.
        told: by number of steps what was found: kind, place, severity and text of each finding.
        error: what ended it early, "" if nothing did.
    """

    program: str
    variant: str
    score: float = math.nan
    healthy: bool | None = None
    seconds: float = 0.0
    told: dict[int, list[tuple[str, str, str, str]]] = field(default_factory=dict)
    error: str = ""

    @property
    def found(self) -> list[tuple[str, str, str, str]]:
        """What was found at the end, but for notices."""
        return self.told[max(self.told)] if self.told else []

    @property
    def ever(self) -> dict[tuple[str, str], tuple[int, str]]:
        """By kind and place what was found at any time: after how many steps first, and the text."""
        first: dict[tuple[str, str], tuple[int, str]] = {}
        for steps, found in sorted(self.told.items()):
            for kind, place, _, what in found:
                first.setdefault((kind, place), (steps, what))
        return first


def chosen() -> dict[str, Program]:
    """The programs that may be looked at: those that are not held out, and those of `more`."""
    return {**{name: one for name, one in sorted(PROGRAMS.items()) if not one.held_out}, **MORE}


@functools.cache
def _made_once(name: str) -> Training:
    """A training of the program that is only looked at."""
    return chosen()[name].make(SEED)


def dealt() -> list[tuple[str, str]]:
    """Every program as it is, and each variant in those of the programs it fits which have the fewest so far; then those beside."""
    counts = {name: 0 for name in chosen() if name not in MORE}
    found = [(name, "as-it-is") for name in counts]
    for way in [way for way in VARIANTS if way != "as-it-is"]:
        order = sorted(counts, key=lambda name: (counts[name] // 3, zlib.crc32(f"{way} {name}".encode())))
        fit = (name for name in order if counts[name] < MOST.get(name, 99) and VARIANTS[way].fits(_made_once(name)))
        for _, name in zip(range(TIMES), fit, strict=False):
            counts[name] += 1
            found.append((name, way))
    return found + [(name, way) for name in MORE for way in BESIDE]


def everything(names: Sequence[str]) -> list[tuple[str, str]]:
    """Every variant of some programs that fits."""
    return [(name, way) for name in names for way in VARIANTS if VARIANTS[way].fits(_made_once(name))]


def one_run(program: str, way: str) -> Run:
    """Trains one variant in one thread, and asks what is wrong with it."""
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    torch.compiler.reset()
    done, chosen_variant = Run(program, way), VARIANTS[way]
    training = chosen()[program].make(SEED)
    watching = chosen_variant.watch()
    try:
        chosen_variant.change(training)
        began = time.perf_counter()
        done.score = run(training, watching, compiled=chosen_variant.compiled)
        done.seconds = round(time.perf_counter() - began, 2)
        watching.end()
    except Exception as error:  # one broken run must not take the others with it
        done.error = f"{type(error).__name__}: {error}".partition("\n")[0]
    for steps, found in watching.found.items():
        done.told[steps] = [(one.kind, one.layer, one.severity, one.what) for one in found]
    return done


def runs(several: Sequence[tuple[str, str]], processes: int = 2) -> list[Run]:
    """Runs several, those that take long first, and says which of them were healthy."""
    several = sorted({*several} | {(name, "as-it-is") for name, _ in several}, key=lambda pair: (pair[1] != "as-it-is", *pair))
    found = []
    with ProcessPoolExecutor(processes, mp_context=get_context("spawn")) as pool:
        for number, done in enumerate(pool.map(one_run, *zip(*several, strict=True)), start=1):
            found.append(done)
            if done.found or done.error:
                print(f"{number} of {len(several)}: {done.program}, {done.variant}: {done.error or done.found[0]}", flush=True)
    programs, usual = chosen(), {done.program: done.score for done in found if done.variant == "as-it-is"}
    for done in found:
        program = programs[done.program]
        learned = max(usual[done.program], program.learns)  # a program that did not learn is no measure
        done.healthy = not done.error and not matters(learned, done.score, program)
    return found


PARTS = {"variants of the programs": False, "trainings beside them": True}
"""By name, whether these are of `MORE`."""


def summary(found: Sequence[Run]) -> dict[str, dict[str, Any]]:
    """By part the number of healthy runs, in how many of them there were false alarms, and of which kind."""
    return {name: _summary([done for done in found if (done.program in MORE) == beside]) for name, beside in PARTS.items()}


def _summary(found: Sequence[Run]) -> dict[str, Any]:
    healthy = [done for done in found if done.healthy]
    alarmed = sum(bool(done.found) for done in healthy)
    kinds = Counter(kind for done in healthy for kind in {kind for kind, *_ in done.found})
    ever = Counter(kind for done in healthy for kind in {kind for kind, _ in done.ever})
    return {
        "runs": len(found),
        "healthy": len(healthy),
        "false alarms": alarmed,
        "rate": round(alarmed / len(healthy), 4) if healthy else None,
        "false alarms at any step": sum(bool(done.ever) for done in healthy),
        "kinds": dict(kinds.most_common()),
        "kinds at any step": dict(ever.most_common()),
        "not healthy, found": sum(bool(done.found) for done in found if not done.healthy),
    }


def lines(found: Sequence[Run]) -> Iterator[str]:
    """What is printed: each false alarm, and in how many healthy runs each kind alarmed."""
    for done in found:
        if done.error:
            yield f"error: {done.program}, {done.variant}: {done.error}"
        elif not done.healthy:
            yield f"not healthy: {done.program}, {done.variant} ({done.score:.3f}): {[one[:2] for one in done.found[:3]]}"
        for (kind, place), (steps, what) in done.ever.items() if done.healthy else ():
            lasts = "" if any(one[:2] == (kind, place) for one in done.found) else f", only after {steps} steps"
            yield f"{done.program}, {done.variant} ({done.score:.3f}): {kind} at {place}{lasts}: {what}"
    for name, part in summary(found).items():
        alarms, healthy = part["false alarms"], part["healthy"]
        yield f"{name}: {part['runs']} runs, {healthy} of them healthy; false alarms in {alarms} ({alarms / max(healthy, 1):.1%})"
        yield f"  false alarms at any step in {part['false alarms at any step']}"
        for kind, count in part["kinds at any step"].items():
            yield f"  {kind:24}{part['kinds'].get(kind, 0):4}{count:6} at any step"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--all", action="store_true")
    parser.add_argument("--only", nargs="+", default=[], metavar="PROGRAM")
    parser.add_argument("--variant", nargs="+", default=[])
    given = parser.parse_args()
    several = everything(given.only or [*chosen()]) if given.only or given.variant or given.all else dealt()
    found = runs([pair for pair in several if not given.variant or pair[1] in given.variant])
    print("\n".join(lines(found)), flush=True)
    if not given.only and not given.variant:
        name = "diagnosis_variants_all" if given.all else "diagnosis_variants"
        finite = [{**asdict(done), "score": done.score if math.isfinite(done.score) else None} for done in found]  # JSON has no NaN
        write(name, summary=summary(found), runs=finite)


if __name__ == "__main__":
    main()
