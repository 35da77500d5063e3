"""Programs on tables, images, points and ratings by which no threshold was chosen."""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Iterable
from typing import Any, cast

import torch
import torch.nn.functional as F
from sklearn.datasets import load_breast_cancer
from torch import Tensor, nn
from torch.func import functional_call
from torch.optim import Optimizer

from benchmarks.diagnosis.programs.data import accuracy, batches, digits, generator, r2, table
from benchmarks.diagnosis.training import Training, fault, program

__all__ = ["change_inputs", "change_targets", "decay_matrices", "only", "warmup_then_cosine"]


def warmup_then_cosine(step: int, steps: int) -> float:
    """The schedule that rises for a tenth of the steps and then falls along a cosine."""
    rise = max(1, steps // 10)
    if step < rise:
        return (step + 1) / rise
    return 0.5 * (1 + math.cos(math.pi * (step - rise) / (steps - rise)))


def cosine(step: int, steps: int) -> float:
    """The schedule that falls along half a cosine."""
    return 0.5 * (1 + math.cos(math.pi * step / steps))


def decay_matrices(parameters: Iterable[nn.Parameter], rate: float, decay: float = 0.01) -> Optimizer:
    """AdamW in two groups: only the parameters of two dimensions or more decay."""
    every = list(parameters)
    return torch.optim.AdamW(
        [
            {"params": [p for p in every if p.dim() > 1], "weight_decay": decay},
            {"params": [p for p in every if p.dim() <= 1], "weight_decay": 0.0},
        ],
        lr=rate,
        betas=(0.9, 0.98),
    )


def change_inputs(training: Training, change: Callable[[Any], Any], *, scored: bool = True) -> None:
    """Changes the inputs of all batches.

    Args:
        scored: whether the inputs that the network is scored on are changed too.
    """
    batch, score = training.batch, training.score

    def changed(number: int) -> tuple[Any, Any]:
        inputs, target = batch(number)
        return change(inputs), target

    training.batch = changed
    if scored:
        training.score = lambda net: score(cast(Any, lambda inputs: net(change(inputs))))


def change_targets(training: Training, change: Callable[[Any, int], Any]) -> None:
    """Changes the targets of all batches, by target and number; the score is against the right ones."""
    batch = training.batch

    def changed(number: int) -> tuple[Any, Any]:
        inputs, target = batch(number)
        return inputs, change(target, number)

    training.batch = changed


def only(parameters: Iterable[nn.Parameter], without: Iterable[nn.Parameter]) -> list[nn.Parameter]:
    """Returns the parameters that are not among the others."""
    left_out = {id(parameter) for parameter in without}
    return [parameter for parameter in parameters if id(parameter) not in left_out]


# Quantiles of a target whose spread depends on the inputs: SELU, an average of the weights is scored.

QUANTILES = (0.1, 0.5, 0.9)


def pinball(predicted: Tensor, target: Tensor) -> Tensor:
    """Returns the mean loss of quantiles (n, 3) of targets (n,)."""
    errors = target[:, None] - predicted
    quantiles = torch.tensor(QUANTILES)
    return torch.maximum(quantiles * errors, (quantiles - 1) * errors).mean()


def uneven_data(seed: int, rows: int) -> tuple[Tensor, Tensor]:
    """Returns inputs (rows, 6) and targets (rows,), of mean 0 and variance 1 about."""
    random = generator(seed)
    x = torch.randn(rows, 6, generator=random)
    middle = torch.sin(1.5 * x[:, 0]) + 0.6 * x[:, 1] * torch.tanh(x[:, 2])
    return x, middle + (0.05 + 0.3 * torch.sigmoid(3 * x[:, 3])) * torch.randn(rows, generator=random)


class WeightAverage:
    """An exponential average of the weights of a network."""

    def __init__(self, decay: float) -> None:
        self.decay = decay
        self.weights: dict[str, Tensor] = {}

    def __call__(self, training: Training, optimizer: Optimizer, step: int) -> None:
        with torch.no_grad():
            for name, parameter in training.net.named_parameters():
                held = self.weights.setdefault(name, parameter.detach().clone())
                held.lerp_(parameter.detach(), 1 - self.decay)


def lecun_(layer: nn.Module) -> None:
    """Fills the weights of a linear layer as SELU wants it."""
    if isinstance(layer, nn.Linear):
        nn.init.kaiming_normal_(layer.weight, nonlinearity="linear")
        nn.init.zeros_(layer.bias)


@program(learns=0.58, chance=0.0, held_out=True)
def quantiles_selu(seed: int) -> Training:
    """Three quantiles of a target by a SELU network; the average of its weights is scored."""
    torch.manual_seed(seed)
    widths = (6, 64, 64, 64)
    hidden = [layer for a, b in itertools.pairwise(widths) for layer in (nn.Linear(a, b), nn.SELU())]
    net = nn.Sequential(*hidden, nn.Linear(64, len(QUANTILES))).apply(lecun_)
    test_x, test_y = uneven_data(seed + 100, 1000)
    uninformed = pinball(torch.quantile(test_y, torch.tensor(QUANTILES)).expand(len(test_y), -1), test_y)
    average = WeightAverage(0.95)

    def score(net: nn.Module) -> float:
        return float(1 - pinball(functional_call(net, average.weights, (test_x,)), test_y) / uninformed)

    return Training(
        net,
        batches(*uneven_data(seed, 4000), 64, seed),
        lambda net, x, y: pinball(net(x), y),
        score,
        rate=1.5e-2,
        schedule=cosine,
        clip=5.0,
        before_step=[average],
    )


@fault(quantiles_selu.faults, "architecture", "broadcast", ("6",))
def columns_against_rows(training: Training) -> None:
    """Each quantile is kept as a column (n, 1), which the targets (n,) are compared with all to all."""

    def loss(net: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        predicted, total = net(x), torch.zeros(())
        for i, quantile in enumerate(QUANTILES):
            errors = y - predicted[:, i : i + 1]
            total = total + torch.maximum(quantile * errors, (quantile - 1) * errors).mean()
        return total / len(QUANTILES)

    training.loss = loss


@fault(quantiles_selu.faults, "architecture", ("initialisation", "exploding-gradients"), ("0", "1", "2", "3", "4", "5", "6"))
def unit_normal_weights(training: Training) -> None:
    """All weights are drawn with spread 1, whatever the width."""
    for layer in training.net.modules():
        if isinstance(layer, nn.Linear):
            nn.init.normal_(layer.weight)


@fault(quantiles_selu.faults, "state", "weights-overwritten")
def average_written_back(training: Training) -> None:
    """The average is copied into the network for an evaluation after each step, and the weights are not put back."""
    average = WeightAverage(0.995)

    def evaluate(training: Training, optimizer: Optimizer, step: int) -> None:
        average(training, optimizer, step)
        with torch.no_grad():
            for name, parameter in training.net.named_parameters():
                parameter.copy_(average.weights[name])

    training.before_step.insert(0, evaluate)


@fault(quantiles_selu.faults, "architecture", "no-nonlinearity", ("0", "1", "2", "3", "4", "5", "6"))
def activations_forgotten(training: Training) -> None:
    """The linear layers follow each other."""
    net: Any = training.net
    for i in (1, 3, 5):
        net[i] = nn.Identity()


# Digits by a mixer of tokens and channels, in bfloat16 autocast.


class MixerBlock(nn.Module):
    """Mixes the tokens of each channel, then the channels of each token."""

    def __init__(self, tokens: int, width: int) -> None:
        super().__init__()
        self.norm_tokens, self.norm_channels = nn.LayerNorm(width), nn.LayerNorm(width)
        self.tokens = nn.Sequential(nn.Linear(tokens, 2 * tokens), nn.GELU(), nn.Linear(2 * tokens, tokens))
        self.channels = nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.tokens(self.norm_tokens(x).mT).mT
        return x + self.channels(self.norm_channels(x))


class Mixer(nn.Module):
    """An MLP-mixer of images (n, 1, 8, 8)."""

    def __init__(self, width: int = 32, depth: int = 2, patch: int = 2) -> None:
        super().__init__()
        self.patches = nn.Conv2d(1, width, patch, stride=patch)
        self.blocks = nn.Sequential(*(MixerBlock((8 // patch) ** 2, width) for _ in range(depth)))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, 10)

    def forward(self, images: Tensor) -> Tensor:
        x = self.blocks(self.patches(images).flatten(2).mT)
        return self.head(self.norm(x).mean(1))


def mean_loss(net: nn.Module, x: Any, y: Tensor) -> Tensor:
    """The cross-entropy of the outputs, classes last."""
    logits = net(x)
    return F.cross_entropy(logits.flatten(0, -2), y.flatten())


@program(learns=0.9, chance=0.1, held_out=True)
def digits_mixer(seed: int) -> Training:
    """Digits by an MLP-mixer: AdamW in two groups, warmup and cosine, bfloat16 autocast."""
    torch.manual_seed(seed)
    x, y, test_x, test_y = digits()
    return Training(
        Mixer(),
        batches(x, y, 64, seed),
        mean_loss,
        lambda net: accuracy(net, test_x, test_y),
        rate=5e-3,
        optimizer=decay_matrices,
        schedule=warmup_then_cosine,
        clip=1.0,
        autocast=True,
    )


@fault(digits_mixer.faults, "data", "data-order")
def sorted_by_label(training: Training) -> None:
    """The rows are read in the order of their labels."""
    x, y, _, _ = digits()
    order = y.argsort(stable=True)

    def batch(number: int) -> tuple[Tensor, Tensor]:
        rows = order[(torch.arange(64) + number * 64) % len(order)]
        return x[rows], y[rows]

    training.batch = batch


@fault(digits_mixer.faults, "architecture", "frozen", ("patches", "blocks", "blocks.0", "blocks.1"))
def frozen_as_if_trained_before(training: Training) -> None:
    """All but the head is frozen, as in fine-tuning, but no weights were loaded."""
    net: Any = training.net
    net.patches.requires_grad_(False)
    net.blocks.requires_grad_(False)


@fault(digits_mixer.faults, "data", "labels-do-not-fit")
def rows_permuted_apart(training: Training) -> None:
    """Images and labels of the training set are permuted by two different permutations."""
    x, y, _, _ = digits()
    seed = int(torch.randint(10_000, ()))
    training.batch = batches(x, y[torch.randperm(len(y), generator=generator(seed))], 64, seed)


class PooledOverChannels(Mixer):
    """Takes the mean over the width where it should take that over the tokens."""

    def forward(self, images: Tensor) -> Tensor:
        x = self.blocks(self.patches(images).flatten(2).mT)
        x = self.norm(x)
        return self.head(x.mean(2, keepdim=True).expand_as(x).mean(1))


@fault(digits_mixer.faults, "architecture", ("wrong-axis", "bottleneck"), ("", "norm", "head", "blocks"))
def pooled_over_channels(training: Training) -> None:
    """The mean is taken over the channels too; one number per image is left."""
    training.net.__class__ = PooledOverChannels


# Digits by depthwise-separable convolutions with group normalisation.


class Separable(nn.Sequential):
    """A convolution of each channel, then one over the channels at each place."""

    def __init__(self, inputs: int, outputs: int, stride: int = 1) -> None:
        super().__init__(
            nn.Conv2d(inputs, inputs, 3, stride, 1, groups=inputs, bias=False),
            nn.Conv2d(inputs, outputs, 1),
            nn.GroupNorm(4, outputs),
            nn.ReLU(),
        )


class SeparableNet(nn.Module):
    """A small MobileNet."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(1, 16, 3, padding=1)
        self.features = nn.Sequential(Separable(16, 32), Separable(32, 48, stride=2), Separable(48, 64, stride=2))
        self.pooled_norm = nn.GroupNorm(1, 64)
        self.dropout = nn.Dropout(0.1)
        self.head = nn.Linear(64, 10)

    def forward(self, images: Tensor) -> Tensor:
        features = self.features(F.relu(self.stem(images)))
        pooled = self.pooled_norm(F.adaptive_avg_pool2d(features, 1)).flatten(1)
        return self.head(self.dropout(pooled))


@program(learns=0.9, chance=0.1, held_out=True)
def digits_separable(seed: int) -> Training:
    """Digits by depthwise-separable convolutions: NAdam, smoothed labels."""
    torch.manual_seed(seed)
    x, y, test_x, test_y = digits()
    return Training(
        SeparableNet(),
        batches(x, y, 48, seed),
        lambda net, x, y: F.cross_entropy(net(x), y, label_smoothing=0.05),
        lambda net: accuracy(net, test_x, test_y),
        rate=8e-3,
        optimizer=lambda parameters, rate: torch.optim.NAdam(parameters, lr=rate),
        schedule=cosine,
    )


@fault(
    digits_separable.faults,
    "state",
    ("stale-optimizer", "not-in-optimizer"),
    ("stem", "features", *(f"features.{i}.{j}" for i in range(3) for j in range(2)), "head"),
)
def initialised_after_the_optimizer(training: Training) -> None:
    """The weights are replaced by newly drawn ones when the optimizer is made already."""
    held = list(training.net.parameters())
    for layer in training.net.modules():
        if isinstance(layer, (nn.Conv2d, nn.Linear)):
            layer.weight = nn.Parameter(nn.init.kaiming_normal_(torch.empty_like(layer.weight)))
    training.parameters = lambda net: held


@fault(digits_separable.faults, "architecture", "dropout", ("dropout", "head"))
def share_that_is_kept(training: Training) -> None:
    """The share of units to keep is given where that to drop is meant."""
    training.net.dropout = nn.Dropout(0.97)


@fault(digits_separable.faults, "architecture", "normalisation", ("pooled_norm", "dropout", "head"))
def each_number_normalised_alone(training: Training) -> None:
    """The norm of the pooled features has one group per channel: each number is normalised by itself, and is zero."""
    training.net.pooled_norm = nn.GroupNorm(64, 64)


@fault(
    digits_separable.faults,
    "architecture",
    "dead-units",
    ("features.1", "features.1.2", "features.1.3", "features.2", "features.2.0"),
)
def biases_far_below_zero(training: Training) -> None:
    """The biases before the second ReLU are so low that almost nothing passes."""
    net: Any = training.net
    nn.init.constant_(net.features[1][2].bias, -6.0)


# Noise taken from images of digits by a U-Net.


class Denoiser(nn.Module):
    """A U-Net of two levels."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.enter = nn.Sequential(nn.Conv2d(1, width, 3, padding=1), nn.ELU())
        self.down = nn.Sequential(nn.Conv2d(width, 2 * width, 3, stride=2, padding=1), nn.ELU())
        self.middle = nn.Sequential(nn.Conv2d(2 * width, 2 * width, 3, padding=1), nn.ELU())
        self.up = nn.ConvTranspose2d(2 * width, width, 2, stride=2)
        self.join = nn.Sequential(nn.ELU(), nn.Conv2d(2 * width, width, 3, padding=1), nn.ELU())
        self.leave = nn.Conv2d(width, 1, 1)

    def forward(self, images: Tensor) -> Tensor:
        fine = self.enter(images)
        coarse = self.middle(self.down(fine))
        return self.leave(self.join(torch.cat([self.up(coarse), fine], 1)))


@program(learns=0.5, chance=0.0, held_out=True)
def denoiser_unet(seed: int) -> Training:
    """Clean images from noisy ones: RMSprop, mean squared error."""
    torch.manual_seed(seed)
    x, _, test_x, _ = digits()
    clean = batches(x, x, 32, seed)
    noisy_test = test_x + 0.7 * torch.randn(test_x.shape, generator=generator(0))

    def batch(number: int) -> tuple[Tensor, Tensor]:
        images, target = clean(number)
        return images + 0.7 * torch.randn(images.shape, generator=generator(seed * 7919 + number)), target

    return Training(
        Denoiser(),
        batch,
        lambda net, noisy, images: F.mse_loss(net(noisy), images),
        lambda net: r2(net, noisy_test, test_x),
        rate=1.5e-3,
        optimizer=lambda parameters, rate: torch.optim.RMSprop(parameters, lr=rate),
        schedule=cosine,
    )


@fault(denoiser_unet.faults, "architecture", ("output-activation", "dead-units"), ("leave", "leave.0", "leave.1"))
def brightness_above_zero(training: Training) -> None:
    """The last layer has a ReLU, as for images in [0, 1]; these are in [-1, 1]."""
    net: Any = training.net
    net.leave = nn.Sequential(net.leave, nn.ReLU())


@fault(denoiser_unet.faults, "data", ("labels-do-not-fit", "wrong-loss"))
def noisy_target(training: Training) -> None:
    """The loss compares with the noisy images."""
    training.loss = lambda net, noisy, images: F.mse_loss(net(noisy), noisy)


class FeaturesWithoutGradients(Denoiser):
    """Makes the features as for a fixed encoder; nobody has trained it."""

    def forward(self, images: Tensor) -> Tensor:
        with torch.no_grad():
            fine = self.enter(images)
            coarse = self.middle(self.down(fine))
            raised = self.up(coarse)
        return self.leave(self.join(torch.cat([raised, fine], 1)))


@fault(denoiser_unet.faults, "data", ("nonfinite-inputs", "nonfinite"))
def missing_pixels(training: Training) -> None:
    """Few images have a pixel that is missing."""
    batch = training.batch

    def changed(number: int) -> tuple[Tensor, Tensor]:
        noisy, images = batch(number)
        if number % 40 == 37:
            noisy[5, 0, 3, 4] = math.nan
        return noisy, images

    training.batch = changed


@fault(denoiser_unet.faults, "architecture", "detached", ("enter", "enter.0", "down", "down.0", "middle", "middle.0", "up"))
def encoder_without_gradients(training: Training) -> None:
    """The encoder runs under `no_grad`."""
    training.net.__class__ = FeaturesWithoutGradients


# Shapes of sets of points by a net that does not see their order: gated units, Adagrad.

SHAPES, POINTS = 4, 24


def shapes_data(seed: int, rows: int) -> tuple[tuple[Tensor, Tensor], Tensor]:
    """Returns sets of points (rows, 24, 2), which points there are (rows, 24), and shapes: a blob, a ring, a bar, a pair."""
    random = generator(seed)
    shape = torch.randint(SHAPES, (rows,), generator=random)
    noise = torch.randn(rows, POINTS, 2, generator=random)
    along = 2 * torch.rand(rows, POINTS, generator=random) - 1
    ring = torch.stack([torch.cos(math.pi * along), torch.sin(math.pi * along)], -1)
    bar = torch.stack([1.7 * along, torch.zeros_like(along)], -1)
    pair = torch.stack([torch.sign(along), torch.zeros_like(along)], -1)
    every = torch.stack([0.7 * noise, ring + 0.12 * noise, bar + 0.12 * noise, pair + 0.25 * noise])
    points = every[shape, torch.arange(rows)]
    angle = 2 * math.pi * torch.rand(rows, generator=random)
    turn = torch.stack([torch.cos(angle), -torch.sin(angle), torch.sin(angle), torch.cos(angle)], -1).reshape(rows, 2, 2)
    present = torch.arange(POINTS) < torch.randint(10, POINTS, (rows, 1), generator=random)
    return (points @ turn * present[..., None], present), shape


class Gated(nn.Module):
    """A layer half of whose outputs gate the other half."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.linear = nn.Linear(inputs, 2 * outputs)

    def forward(self, x: Tensor) -> Tensor:
        return F.glu(self.linear(x), -1)


class SetNet(nn.Module):
    """Encodes each point, takes the mean of those that are there, and decides."""

    def __init__(self, width: int = 48) -> None:
        super().__init__()
        self.points = nn.Sequential(Gated(2, width), Gated(width, width), nn.Linear(width, width))
        self.decide = nn.Sequential(Gated(width, width), nn.Linear(width, SHAPES))
        for layer in self.modules():
            if isinstance(layer, nn.Linear):
                nn.init.kaiming_normal_(layer.weight)

    def forward(self, inputs: tuple[Tensor, Tensor]) -> Tensor:
        points, present = inputs
        weights = present[..., None].to(points)
        pooled = (self.points(points) * weights).sum(1) / weights.sum(1)
        return self.decide(pooled)


@program(learns=0.88, chance=0.25, held_out=True)
def sets_gated(seed: int) -> Training:
    """Shapes of sets of points: gated linear units, Adagrad."""
    torch.manual_seed(seed)
    test_x, test_y = shapes_data(seed + 100, 800)
    return Training(
        SetNet(),
        batches(*shapes_data(seed, 4000), 64, seed),
        mean_loss,
        lambda net: accuracy(net, test_x, test_y),
        rate=0.05,
        optimizer=lambda parameters, rate: torch.optim.Adagrad(parameters, lr=rate),
    )


EVERY_LINEAR = ("points.0", "points.0.linear", "points.1", "points.1.linear", "points.2", "decide.0", "decide.0.linear", "decide.1")


@fault(sets_gated.faults, "architecture", ("symmetry", "initialisation"), EVERY_LINEAR)
def one_value_everywhere(training: Training) -> None:
    """All weights start at the same value."""
    for layer in training.net.modules():
        if isinstance(layer, nn.Linear):
            nn.init.constant_(layer.weight, 0.05)
            nn.init.zeros_(layer.bias)


@fault(sets_gated.faults, "architecture", ("mask", "inputs-constant"), ("", "points", "points.0", "points.0.linear"))
def padding_is_pooled(training: Training) -> None:
    """The mask is that of the padding: what is pooled is what is not there."""
    change_inputs(training, lambda inputs: (inputs[0], ~inputs[1]))


class PooledOverSets(SetNet):
    """Takes the mean over the sets of the batch, not over the points of a set."""

    def forward(self, inputs: tuple[Tensor, Tensor]) -> Tensor:
        points, present = inputs
        weights = present[..., None].to(points)
        pooled = (self.points(points) * weights).sum(0) / weights.sum(0).clamp(min=1)
        pooled = pooled.mean(0, keepdim=True)
        return self.decide(pooled.expand(len(points), -1))


@fault(sets_gated.faults, "architecture", "wrong-axis", ("", "points", "points.2", "decide", "decide.0", "decide.0.linear"))
def pooled_over_sets(training: Training) -> None:
    """The mean goes over the batch; all sets look alike."""
    training.net.__class__ = PooledOverSets


@fault(sets_gated.faults, "architecture", ("saturation", "vanishing-gradients"), ("decide.0", "decide.0.linear", "decide"))
def gates_shut(training: Training) -> None:
    """The biases of the gates of a layer start far below zero."""
    net: Any = training.net
    gated = net.decide[0].linear
    nn.init.constant_(gated.bias[len(gated.bias) // 2 :], -12.0)


# Ratings by factors of users and items.

USERS, ITEMS = 150, 80


@functools.cache
def ratings() -> tuple[dict[str, Tensor], Tensor, Tensor]:
    """Returns users and items, ratings about 1 to 5, and which rows are for training."""
    random = generator(11)
    user, item = torch.cartesian_prod(torch.arange(USERS), torch.arange(ITEMS)).T
    taste, kind = torch.randn(USERS, 3, generator=random), torch.randn(ITEMS, 3, generator=random)
    own = 0.4 * torch.randn(USERS, generator=random)[user] + 0.4 * torch.randn(ITEMS, generator=random)[item]
    rating = 3.3 + own + 0.45 * (taste[user] * kind[item]).sum(-1) + 0.2 * torch.randn(len(user), generator=random)
    return {"user": user, "item": item}, rating, torch.rand(len(user), generator=random) < 0.8


class Factors(nn.Module):
    """The mean rating, a bias of the user and of the item, and the product of their factors."""

    def __init__(self, mean: float, factors: int = 8) -> None:
        super().__init__()
        self.user, self.item = nn.Embedding(USERS, factors), nn.Embedding(ITEMS, factors)
        self.user_bias, self.item_bias = nn.Embedding(USERS, 1), nn.Embedding(ITEMS, 1)
        self.mean: Tensor
        self.register_buffer("mean", torch.tensor(mean))
        for embedding in (self.user, self.item):
            nn.init.normal_(embedding.weight, std=0.1)
        for embedding in (self.user_bias, self.item_bias):
            nn.init.zeros_(embedding.weight)

    def forward(self, pairs: dict[str, Tensor]) -> Tensor:
        user, item = pairs["user"], pairs["item"]
        biases = self.user_bias(user) + self.item_bias(item)
        return self.mean + biases.squeeze(-1) + (self.user(user) * self.item(item)).sum(-1)


def slower_biases(parameters: Iterable[nn.Parameter], rate: float) -> Optimizer:
    """Adam, with a lower rate for parameters of one column."""
    every = list(parameters)
    biases = [p for p in every if p.shape[-1] == 1]
    slow = {"params": biases, "lr": rate / 2, "initial_lr": rate / 2}
    groups: list[dict[str, Any]] = [{"params": only(every, biases)}, slow]
    return torch.optim.Adam(groups, lr=rate)


@program(learns=0.85, chance=0.0, held_out=True)
def ratings_factors(seed: int) -> Training:
    """Ratings by factors: a dict of inputs, Adam with two rates, Huber loss."""
    torch.manual_seed(seed)
    pairs, rating, train = ratings()
    x, y = {key: values[train] for key, values in pairs.items()}, rating[train]
    test_x, test_y = {key: values[~train] for key, values in pairs.items()}, rating[~train]
    return Training(
        Factors(float(y.mean())),
        batches(x, y, 256, seed),
        lambda net, pairs, rating: F.huber_loss(net(pairs), rating),
        lambda net: r2(net, test_x, test_y),
        rate=0.04,
        optimizer=slower_biases,
        schedule=cosine,
        steps=200,
    )


@fault(
    ratings_factors.faults, "architecture", ("initialisation", "vanishing-gradients", "dead-units", "symmetry"), ("user", "item")
)
def factors_start_at_zero(training: Training) -> None:
    """Both tables of factors start at zero, where neither has a gradient."""
    net: Any = training.net
    nn.init.zeros_(net.user.weight)
    nn.init.zeros_(net.item.weight)


@fault(ratings_factors.faults, "architecture", "initialisation", ("user", "item"))
def factors_start_wide(training: Training) -> None:
    """The tables start as `nn.Embedding` fills them: products of factors are far larger than ratings differ."""
    net: Any = training.net
    for embedding in (net.user, net.item):
        nn.init.normal_(embedding.weight)


@fault(ratings_factors.faults, "optimisation", "not-in-optimizer", ("user", "item"))
def only_biases_in_the_optimizer(training: Training) -> None:
    """A filter by name lets only the biases through."""
    training.parameters = lambda net: [p for name, p in net.named_parameters() if "bias" in name]


@fault(ratings_factors.faults, "data", ("target-scale", "rate-too-low"))
def ratings_of_a_thousand(training: Training) -> None:
    """The ratings of the training are in other units, 0 to 1000; so is what the score takes back."""
    change_targets(training, lambda rating, _: rating * 200)
    net: Any = training.net
    net.mean.mul_(200)
    score = training.score
    training.score = lambda net: score(cast(Any, lambda pairs: net(pairs) / 200))


@fault(ratings_factors.faults, "data", "labels-do-not-fit")
def ratings_of_the_row_before(training: Training) -> None:
    """Ratings of the training are of the row before."""
    change_targets(training, lambda rating, _: rating.roll(1))


# A tumour's kind by logistic regression.


@program(learns=0.82, chance=0.0, held_out=True)
def tumours_logistic(seed: int) -> Training:
    """Logistic regression with signs as labels: SGD with momentum. The score is the share of the entropy that is explained."""
    torch.manual_seed(seed)
    x, y, test_x, test_y = table("breast-cancer")
    signs = 2 * test_y - 1
    share = float(test_y.float().mean())
    entropy = -share * math.log(share) - (1 - share) * math.log(1 - share)
    net = nn.Linear(30, 1)
    nn.init.zeros_(net.weight)
    return Training(
        nn.Sequential(net),
        batches(x, 2 * y - 1, 32, seed),
        sign_loss,
        lambda net: 1 - float(sign_loss(net, test_x, signs)) / entropy,
        rate=0.03,
        optimizer=lambda parameters, rate: torch.optim.SGD(parameters, lr=rate, momentum=0.9, weight_decay=1e-3),
        schedule=cosine,
    )


def sign_loss(net: nn.Module, x: Tensor, signs: Tensor) -> Tensor:
    """The logistic loss of labels -1 and 1."""
    return F.softplus(-signs * net(x).squeeze(1)).mean()


@fault(tumours_logistic.faults, "architecture", "broadcast", ("", "0"))
def logits_in_a_column(training: Training) -> None:
    """The logits stay (n, 1) and meet the labels (n,)."""
    training.loss = lambda net, x, signs: F.softplus(-signs * net(x)).mean()


@fault(tumours_logistic.faults, "architecture", "output-activation", ("", "0", "1"))
def probability_for_logit(training: Training) -> None:
    """A sigmoid stands before a loss that expects logits."""
    net: Any = training.net
    net.append(nn.Sigmoid())


@fault(tumours_logistic.faults, "data", ("noise", "labels-do-not-fit"))
def third_of_the_labels_wrong(training: Training) -> None:
    """A third of the labels of the training are wrong."""
    change_targets(
        training, lambda signs, number: signs * (1 - 2 * (torch.rand(len(signs), generator=generator(number)) < 0.33).long())
    )


@fault(tumours_logistic.faults, "data", "inputs-not-normalised", ("", "0"))
def columns_as_measured(training: Training) -> None:
    """The columns come in their own units."""
    raw = torch.from_numpy(load_breast_cancer().data).float()
    mean, spread = raw.mean(0), raw.std(0)
    change_inputs(training, lambda x: x * spread + mean)


# Digits that a student learns from a teacher, without labels.


@functools.cache
def taught(seed: int) -> nn.Sequential:
    """Returns a teacher that has been trained."""
    torch.manual_seed(seed + 50)
    x, y, _, _ = digits()
    batch = batches(x, y, 64, seed + 50)
    teacher = new_teacher()
    optimizer = torch.optim.Adam(teacher.parameters(), lr=2e-3)
    for number in range(150):
        images, labels = batch(number)
        optimizer.zero_grad()
        F.cross_entropy(teacher(images), labels).backward()
        optimizer.step()
    return teacher


def new_teacher() -> nn.Sequential:
    """Returns a teacher that has not been trained."""
    return nn.Sequential(
        nn.Flatten(),
        nn.Linear(64, 128),
        nn.ReLU(),
        nn.Dropout(0.5),
        nn.Linear(128, 128),
        nn.ReLU(),
        nn.Dropout(0.5),
        nn.Linear(128, 10),
    )


class Distillation(nn.Module):
    """A student, and a teacher that stays as it is; both look at the same images."""

    def __init__(self, teacher: nn.Module) -> None:
        super().__init__()
        self.student = nn.Sequential(
            nn.Conv2d(1, 8, 3, stride=2, padding=1, bias=False),
            nn.BatchNorm2d(8),
            nn.LeakyReLU(0.1),
            nn.Flatten(),
            nn.Linear(128, 32),
            nn.LeakyReLU(0.1),
            nn.Linear(32, 10),
        )
        self.teacher = teacher.requires_grad_(False)

    def train(self, mode: bool = True) -> Distillation:
        super().train(mode)
        self.teacher.eval()
        return self

    def forward(self, images: Tensor) -> tuple[Tensor, Tensor]:
        with torch.no_grad():
            wanted = self.teacher(images)
        return self.student(images), wanted


def distil(net: nn.Module, images: Tensor, target: Any, temperature: float = 2.0) -> Tensor:
    """The divergence of the student from the teacher, both softened."""
    logits, wanted = (each / temperature for each in net(images))
    return temperature**2 * F.kl_div(logits.log_softmax(1), wanted.softmax(1), reduction="batchmean")


@program(learns=0.93, chance=0.0, held_out=True)
def digits_distilled(seed: int) -> Training:
    """A student that learns from a teacher's probabilities: AdamW. The score is the divergence that is gone."""
    teacher = new_teacher()
    teacher.load_state_dict(taught(seed).state_dict())
    torch.manual_seed(seed)
    x, y, test_x, _ = digits()

    def score(net: Any) -> float:
        right = taught(seed).eval()(test_x).softmax(1)
        divergence = F.kl_div(net.student(test_x).log_softmax(1), right, reduction="batchmean")
        uniform = F.kl_div(torch.full_like(right, -math.log(10)), right, reduction="batchmean")
        return 1 - float(divergence / uniform)

    return Training(
        Distillation(teacher),
        batches(x, y, 64, seed),
        distil,
        score,
        rate=1e-2,
        optimizer=lambda parameters, rate: torch.optim.AdamW(parameters, lr=rate, weight_decay=1e-3),
        parameters=lambda net: [p for p in net.parameters() if p.requires_grad],
        schedule=warmup_then_cosine,
    )


@fault(digits_distilled.faults, "optimisation", ("wrong-loss", "output-activation"), ("", "teacher", "teacher.7"))
def teacher_softened_twice(training: Training) -> None:
    """What the teacher gives is taken for logits when it is probabilities already."""

    def loss(net: nn.Module, images: Tensor, target: Any) -> Tensor:
        logits, wanted = net(images)
        return F.kl_div(logits.log_softmax(1), wanted.softmax(1).softmax(1), reduction="batchmean")

    training.loss = loss


@fault(digits_distilled.faults, "architecture", ("wrong-axis", "wrong-loss"), ("", "student", "student.6", "teacher", "teacher.7"))
def softmax_over_the_batch(training: Training) -> None:
    """Both softmaxes go over the images."""

    def loss(net: nn.Module, images: Tensor, target: Any) -> Tensor:
        logits, wanted = (each / 2.0 for each in net(images))
        return 4.0 * F.kl_div(logits.log_softmax(0), wanted.softmax(0), reduction="batchmean")

    training.loss = loss


@fault(digits_distilled.faults, "data", "labels-do-not-fit", ("teacher", "teacher.1", "teacher.4", "teacher.7"))
def teacher_not_loaded(training: Training) -> None:
    """The teacher's weights were not loaded."""
    training.net.teacher = new_teacher().requires_grad_(False)


@fault(digits_distilled.faults, "optimisation", ("wrong-loss", "output-activation"), ("", "student", "student.6"))
def logarithm_forgotten(training: Training) -> None:
    """The divergence is given probabilities where it wants their logarithms."""

    def loss(net: nn.Module, images: Tensor, target: Any) -> Tensor:
        logits, wanted = (each / 2.0 for each in net(images))
        return 4.0 * F.kl_div(logits.softmax(1), wanted.softmax(1), reduction="batchmean")

    training.loss = loss
