"""Trainings on vectors, tables, images, sets and graphs with the mistakes that people make in them, for `LATER`."""

from __future__ import annotations

import copy
import functools
import math
import types
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import Optimizer

from benchmarks.diagnosis.later import LATER, later
from benchmarks.diagnosis.programs.data import accuracy, batches, digits, generator, r2
from benchmarks.diagnosis.training import Training, fault


def adamw(parameters: Iterable[nn.Parameter], rate: float, decay: float = 1e-2) -> Optimizer:
    """AdamW on the parameters that need gradients."""
    return torch.optim.AdamW([one for one in parameters if one.requires_grad], lr=rate, weight_decay=decay)


def momentum_sgd(parameters: Iterable[nn.Parameter], rate: float, decay: float = 0.0) -> Optimizer:
    """SGD with momentum."""
    return torch.optim.SGD(parameters, lr=rate, momentum=0.9, weight_decay=decay)


def cosine(step: int, steps: int) -> float:
    """Falls to zero along half a cosine."""
    return 0.5 * (1 + math.cos(math.pi * step / steps))


def warm_cosine(step: int, steps: int, warm: int = 20) -> float:
    """Rises over the first steps, then falls along a cosine."""
    return (step + 1) / warm if step < warm else cosine(step - warm, max(steps - warm, 1))


def squared(net: nn.Module, inputs: Any, target: Tensor) -> Tensor:
    """The mean squared error."""
    return F.mse_loss(net(inputs), target)


def entropy(net: nn.Module, inputs: Any, target: Tensor) -> Tensor:
    """The cross entropy of logits."""
    return F.cross_entropy(net(inputs), target)


def set_forward(module: nn.Module, forward: Callable[..., Any]) -> None:
    """Gives one module another forward."""
    module.forward = types.MethodType(forward, module)


def with_inputs(training: Training, change: Callable[[Any], Any]) -> None:
    """Changes the inputs of the training batches."""
    batch = training.batch

    def changed(number: int) -> tuple[Any, Any]:
        inputs, target = batch(number)
        return change(inputs), target

    training.batch = changed


def with_targets(training: Training, change: Callable[[Any], Any]) -> None:
    """Changes the targets of the training batches."""
    batch = training.batch

    def changed(number: int) -> tuple[Any, Any]:
        inputs, target = batch(number)
        return inputs, change(target)

    training.batch = changed


def score_with(training: Training, **changed: Any) -> None:
    """Changes what the score is computed on."""
    score: Any = training.score
    training.score = partial(score.func, **{**score.keywords, **changed})


def scored_on(training: Training, name: str) -> Any:
    """Returns what the score is computed on."""
    score: Any = training.score
    return score.keywords[name]


# A deep residual network on a table


def friedman_table(count: int, seed: int) -> tuple[Tensor, Tensor]:
    """Returns ten columns, of which five count, and a standardised value."""
    random = generator(seed)
    x = torch.rand(count, 10, generator=random)
    y = 10 * (math.pi * x[:, 0] * x[:, 1]).sin() + 20 * (x[:, 2] - 0.5).square() + 10 * x[:, 3] + 5 * x[:, 4]
    return x * 3.46 - 1.73, (y + 0.5 * torch.randn(count, generator=random) - 14.4) / 4.9


class ResidualBlock(nn.Module):
    """Two layers whose output is added to their input."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.inner, self.outer, self.drop = nn.Linear(width, width), nn.Linear(width, width), nn.Dropout(0.1)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = x + self.outer(self.drop(F.relu(self.inner(x))))
        return out


class ResidualRegressor(nn.Module):
    """A stem, residual blocks and a head of one value."""

    def __init__(self, columns: int, width: int, depth: int) -> None:
        super().__init__()
        self.stem = nn.Linear(columns, width)
        self.blocks = nn.Sequential(*(ResidualBlock(width) for _ in range(depth)))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, 1)

    def forward(self, x: Tensor) -> Tensor:
        value: Tensor = self.head(self.norm(self.blocks(self.stem(x))))
        return value.squeeze(-1)


@later(learns=0.8, chance=0.0)
def deep_residual_table(seed: int) -> Training:
    """A residual network of 17 layers that foretells a value from a table, by AdamW with warm-up and cosine."""
    torch.manual_seed(seed)
    (x, y), (test_x, test_y) = friedman_table(2048, 11), friedman_table(512, 12)
    return Training(
        ResidualRegressor(10, 48, 8),
        batches(x, y, 64, seed),
        squared,
        partial(r2, x=test_x, y=test_y),
        rate=2e-3,
        optimizer=adamw,
        steps=200,
        schedule=warm_cosine,
        clip=1.0,
    )


@fault(LATER["deep-residual-table"].faults, "architecture", "vanishing-gradients", ("blocks", *(f"blocks.{n}" for n in range(8))))
def addition_left_out(training: Training) -> None:
    """The forward of the block returns the branch and forgets to add the input."""
    net: Any = training.net
    for block in net.blocks:
        set_forward(block, lambda self, x: self.outer(self.drop(F.relu(self.inner(x)))))


@fault(LATER["deep-residual-table"].faults, "architecture", "dropout", tuple(f"blocks.{n}.drop" for n in range(8)))
def keep_share_as_dropout(training: Training) -> None:
    """The share to keep, 0.9 in the old code, is handed to nn.Dropout, which takes the share to drop."""
    net: Any = training.net
    for block in net.blocks:
        block.drop.p = 0.9


@fault(LATER["deep-residual-table"].faults, "optimisation", "broadcast")
def column_against_row(training: Training) -> None:
    """The squeeze is forgotten, so that the loss compares (n, 1) with (n,)."""

    def forward(self: Any, x: Tensor) -> Tensor:
        value: Tensor = self.head(self.norm(self.blocks(self.stem(x))))
        return value

    def loss(net: nn.Module, inputs: Tensor, target: Tensor) -> Tensor:
        error: Tensor = net(inputs) - target
        return error.square().mean()

    set_forward(training.net, forward)
    training.loss = loss


@fault(LATER["deep-residual-table"].faults, "optimisation", ("schedule", "rate-too-low"))
def warm_up_of_a_large_model(training: Training) -> None:
    """The warm-up of 10,000 steps comes from the settings of a far longer training."""
    training.schedule = partial(warm_cosine, warm=10_000)


@fault(LATER["deep-residual-table"].faults, "data", "target-scale")
def value_in_dollars(training: Training) -> None:
    """The value to foretell is left in dollars."""
    with_targets(training, lambda y: y * 40_000 + 180_000)
    score_with(training, y=scored_on(training, "y") * 40_000 + 180_000)


@fault(LATER["deep-residual-table"].faults, "data", "labels-do-not-fit")
def values_shifted_by_a_row(training: Training) -> None:
    """The file of the values has a header row and that of the columns has none, so that the rows are off by one."""
    x, y = friedman_table(2048, 11)
    training.batch = batches(x[:-1], y[1:], 64, 0)


# A convolutional network with batch normalisation, mixup and label smoothing


class NormCNN(nn.Module):
    """Three convolutions with batch normalisation, and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.norm1 = nn.Conv2d(1, 16, 3, padding=1, bias=False), nn.BatchNorm2d(16)
        self.conv2, self.norm2 = nn.Conv2d(16, 16, 3, padding=1, stride=2, bias=False), nn.BatchNorm2d(16)
        self.conv3, self.norm3 = nn.Conv2d(16, 32, 3, padding=1, bias=False), nn.BatchNorm2d(32)
        self.head = nn.Linear(32 * 4, 10)

    def features(self, x: Tensor) -> Tensor:
        """Returns the map of 32 channels."""
        x = F.relu(self.norm1(self.conv1(x)))
        x = F.relu(self.norm2(self.conv2(x)))
        return F.relu(self.norm3(self.conv3(x)))

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.head(F.avg_pool2d(self.features(x), 2).flatten(1))
        return logits


def mixup(batch: Callable[[int], tuple[Any, Any]]) -> Callable[[int], tuple[Any, Any]]:
    """Returns batches of images that are mixed with others, and probabilities of the labels that are mixed likewise."""

    def mixed(number: int) -> tuple[Tensor, Tensor]:
        x, y = batch(number)
        random = generator(number + 77)
        order, share = torch.randperm(len(x), generator=random), torch.rand(len(x), generator=random)
        hot = F.one_hot(y, 10).float()
        kept = share[:, None, None, None]
        return kept * x + (1 - kept) * x[order], share[:, None] * hot + (1 - share[:, None]) * hot[order]

    return mixed


def smoothed(net: nn.Module, inputs: Tensor, target: Tensor) -> Tensor:
    """The cross entropy with label smoothing."""
    return F.cross_entropy(net(inputs), target, label_smoothing=0.1)


@later(learns=0.85, chance=0.1)
def mixup_digits(seed: int) -> Training:
    """A convolutional network with batch normalisation on digits, with mixup and label smoothing, by SGD with momentum."""
    torch.manual_seed(seed)
    x, y, test_x, test_y = digits()
    score = partial(accuracy, x=test_x, y=test_y)
    batch = mixup(batches(x, y, 64, seed))
    return Training(NormCNN(), batch, smoothed, score, rate=0.1, optimizer=momentum_sgd, steps=200, schedule=cosine)


@fault(LATER["mixup-digits"].faults, "architecture", ("initialisation", "dead-units"), ("norm2", "norm3"))
def scales_start_at_zero(training: Training) -> None:
    """The last scale starts at zero, as it does in residual blocks, but here no input is added to it."""
    net: Any = training.net
    nn.init.zeros_(net.norm3.weight)


@fault(LATER["mixup-digits"].faults, "optimisation", "rate-too-high")
def rate_of_eight_thousand_images(training: Training) -> None:
    """The rate is scaled for batches of 8192, but the batches have 64."""
    training.rate *= 128


@fault(LATER["mixup-digits"].faults, "architecture", ("wrong-axis", "output-activation"), "head")
def softmax_over_the_batch(training: Training) -> None:
    """A softmax along the batch is left on the outputs, after which comes the cross entropy that takes logits."""
    net: Any = training.net
    net.head = nn.Sequential(net.head, nn.Softmax(dim=0))


@fault(LATER["mixup-digits"].faults, "optimisation", "weight-decay")
def decay_without_its_exponent(training: Training) -> None:
    """The weight decay is typed as 0.5 where 5e-4 was meant."""
    training.optimizer = partial(momentum_sgd, decay=0.5)


@fault(LATER["mixup-digits"].faults, "data", "data-order")
def sorted_by_label(training: Training) -> None:
    """The images lie in a folder for each digit and are read in that order, without a shuffle."""
    x, y, _, _ = digits()
    order = y.argsort(stable=True)
    x, y = x[order], y[order]

    def batch(number: int) -> tuple[Tensor, Tensor]:
        start = number % 21 * 64
        return x[start : start + 64], y[start : start + 64]

    training.batch = mixup(batch)


@fault(LATER["mixup-digits"].faults, "state", ("weights-overwritten", "lost-updates"))
def best_weights_loaded_each_epoch(training: Training) -> None:
    """At the start of each epoch the checkpoint is loaded, which was written once, before the training."""
    checkpoint = copy.deepcopy(training.net.state_dict())

    def load(training: Training, optimizer: Optimizer, step: int) -> None:
        if step % 21 == 0:
            training.net.load_state_dict(checkpoint)

    training.before_step.append(load)


# A convolutional network without normalisation


@later(learns=0.85, chance=0.1)
def plain_cnn_digits(seed: int) -> Training:
    """A convolutional network without normalisation on digits, by SGD with momentum, cosine and two batches a step."""
    torch.manual_seed(seed)
    x, y, test_x, test_y = digits()
    net = nn.Sequential()
    net.add_module("conv1", nn.Conv2d(1, 12, 3, padding=1))
    net.add_module("relu1", nn.ReLU())
    net.add_module("pool1", nn.MaxPool2d(2))
    net.add_module("conv2", nn.Conv2d(12, 24, 3, padding=1))
    net.add_module("relu2", nn.ReLU())
    net.add_module("pool2", nn.MaxPool2d(2))
    net.add_module("flatten", nn.Flatten())
    net.add_module("hidden", nn.Linear(96, 48))
    net.add_module("relu3", nn.ReLU())
    net.add_module("logits", nn.Linear(48, 10))
    score = partial(accuracy, x=test_x, y=test_y)
    return Training(
        net, batches(x, y, 32, seed), entropy, score, rate=0.05, optimizer=momentum_sgd, steps=200, schedule=cosine, micro_batches=2
    )


@fault(LATER["plain-cnn-digits"].faults, "architecture", ("output-activation", "dead-units"), ("logits", "relu4"))
def rectified_logits(training: Training) -> None:
    """A ReLU follows the last layer as it follows all others."""
    net: Any = training.net
    net.add_module("relu4", nn.ReLU())


@fault(LATER["plain-cnn-digits"].faults, "data", "inputs-not-normalised")
def pixels_as_bytes(training: Training) -> None:
    """The pixels are left as bytes from 0 to 255."""
    with_inputs(training, lambda x: (x + 1) * 127.5)
    score_with(training, x=(scored_on(training, "x") + 1) * 127.5)


@fault(LATER["plain-cnn-digits"].faults, "optimisation", ("loss-scale", "rate-too-high"))
def summed_over_the_batch(training: Training) -> None:
    """The loss is summed over the batch, at the rate of a mean."""
    training.loss = lambda net, inputs, target: F.cross_entropy(net(inputs), target, reduction="sum")


@fault(
    LATER["plain-cnn-digits"].faults,
    "architecture",
    ("initialisation", "exploding-gradients"),
    ("conv1", "conv2", "hidden", "logits"),
)
def weights_of_spread_one(training: Training) -> None:
    """All weights are drawn by nn.init.normal_ with its default spread of one."""
    for module in training.net.modules():
        if isinstance(module, (nn.Conv2d, nn.Linear)):
            nn.init.normal_(module.weight)


@fault(LATER["plain-cnn-digits"].faults, "optimisation", ("schedule", "rate-too-low"))
def decay_of_epochs_by_steps(training: Training) -> None:
    """The rate is multiplied by 0.8 after each step, which was meant after each epoch."""
    training.schedule = lambda step, steps: 0.8**step


@fault(LATER["plain-cnn-digits"].faults, "optimisation", "gradients-not-cleared")
def accumulates_for_ever(training: Training) -> None:
    """With the accumulation of gradients came the loss of the line that clears them."""
    training.clears = False


# A U-Net that takes away noise


class Denoiser(nn.Module):
    """A U-Net of two levels."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.enter = self.convolution(1, width)
        self.down = self.convolution(width, 2 * width)
        self.middle = self.convolution(2 * width, 2 * width)
        self.up1 = self.convolution(4 * width, width)
        self.up2 = self.convolution(2 * width, width)
        self.out = nn.Conv2d(width, 1, 1)

    @staticmethod
    def convolution(before: int, after: int) -> nn.Sequential:
        """Returns a convolution with normalisation and ReLU."""
        return nn.Sequential(nn.Conv2d(before, after, 3, padding=1), nn.BatchNorm2d(after), nn.ReLU())

    def forward(self, x: Tensor) -> Tensor:
        high = self.enter(x)
        low = self.down(F.max_pool2d(high, 2))
        deep = self.middle(F.max_pool2d(low, 2))
        x = self.up1(torch.cat((F.interpolate(deep, scale_factor=2.0), low), 1))
        x = self.up2(torch.cat((F.interpolate(x, scale_factor=2.0), high), 1))
        clean: Tensor = self.out(x)
        return clean


def add_noise(batch: Callable[[int], tuple[Any, Any]]) -> Callable[[int], tuple[Any, Any]]:
    """Returns batches of images with noise, and the images."""

    def noisy(number: int) -> tuple[Tensor, Tensor]:
        x, _ = batch(number)
        return x + 0.5 * torch.randn(x.shape, generator=generator(number)), x

    return noisy


@later(learns=0.7, chance=0.0)
def unet_denoiser(seed: int) -> Training:
    """A U-Net that takes noise from images of digits."""
    torch.manual_seed(seed)
    x, y, test_x, _ = digits()
    noisy = test_x + 0.5 * torch.randn(test_x.shape, generator=generator(1234))
    return Training(Denoiser(12), add_noise(batches(x, y, 32, seed)), squared, partial(r2, x=noisy, y=test_x), steps=200)


@fault(LATER["unet-denoiser"].faults, "data", ("noise", "labels-do-not-fit"))
def noise_added_in_place(training: Training) -> None:
    """The noise is added in place, so that the image to be restored has it too."""
    batch = training.batch

    def changed(number: int) -> tuple[Tensor, Tensor]:
        noisy, _ = batch(number)
        return noisy, noisy

    training.batch = changed


@fault(
    LATER["unet-denoiser"].faults,
    "architecture",
    ("normalisation", "statistics-frozen"),
    ("enter.1", "down.1", "middle.1", "up1.1", "up2.1"),
)
def averages_of_a_long_training(training: Training) -> None:
    """The momentum of batch normalisation is 0.001, as in a training of a million steps, and the averages stay behind."""
    for module in training.net.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.momentum = 1e-3


@fault(LATER["unet-denoiser"].faults, "architecture", "output-activation", "out")
def sigmoid_for_signed_pixels(training: Training) -> None:
    """The output is squeezed into 0 to 1, but the pixels are from -1 to 1."""
    net: Any = training.net
    net.out = nn.Sequential(net.out, nn.Sigmoid())


@fault(LATER["unet-denoiser"].faults, "architecture", ("bottleneck", "never-ran", "detached"), ("", "up1", "up2"))
def joined_with_itself(training: Training) -> None:
    """What comes from below is joined with itself and not with the map of the same level."""

    def forward(self: Any, x: Tensor) -> Tensor:
        high = self.enter(x)
        low = self.down(F.max_pool2d(high, 2))
        deep = F.interpolate(self.middle(F.max_pool2d(low, 2)), scale_factor=2.0)
        x = F.interpolate(self.up1(torch.cat((deep, deep), 1)), scale_factor=2.0)
        clean: Tensor = self.out(self.up2(torch.cat((x, x), 1)))
        return clean

    set_forward(training.net, forward)


@fault(LATER["unet-denoiser"].faults, "optimisation", ("broadcast", "labels-constant"))
def compared_with_the_first(training: Training) -> None:
    """The image to compare with is indexed once too often, so that all are compared with the first of the batch."""

    def loss(net: nn.Module, inputs: Tensor, target: Tensor) -> Tensor:
        error: Tensor = net(inputs) - target[0]
        return error.square().mean()

    training.loss = loss


# A variational autoencoder


class DigitVAE(nn.Module):
    """An encoder of means and log-variances, and a decoder of logits of pixels."""

    def __init__(self, latents: int) -> None:
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(64, 64), nn.ReLU())
        self.mean, self.log_variance = nn.Linear(64, latents), nn.Linear(64, latents)
        self.decoder = nn.Sequential(nn.Linear(latents, 64), nn.ReLU(), nn.Linear(64, 64))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        hidden = self.encoder(x)
        mean, log_variance = self.mean(hidden), self.log_variance(hidden)
        drawn = mean + (0.5 * log_variance).exp() * torch.randn_like(mean) if self.training else mean
        return self.decoder(drawn), mean, log_variance


def divergence(mean: Tensor, log_variance: Tensor) -> Tensor:
    """The divergence from the standard normal distribution, of each sample."""
    return 0.5 * (mean.square() + log_variance.exp() - 1 - log_variance).sum(1)


def bound(net: nn.Module, inputs: Tensor, target: Tensor, weight: float = 1.0) -> Tensor:
    """The mean over images of the loss of reconstruction and the divergence."""
    logits, mean, log_variance = net(inputs)
    return (
        F.binary_cross_entropy_with_logits(logits, target, reduction="none").sum(1) + weight * divergence(mean, log_variance)
    ).mean()


def minus_bound(net: nn.Module, x: Tensor) -> float:
    """Minus the bound of images."""
    return -float(bound(net, x, x))


@later(learns=-25.6, chance=-27.8)
def digit_vae(seed: int) -> Training:
    """A variational autoencoder of digits."""
    torch.manual_seed(seed)
    x, _, test_x, _ = digits()
    x, test_x = (x.flatten(1) + 1) / 2, (test_x.flatten(1) + 1) / 2
    return Training(DigitVAE(6), batches(x, x, 64, seed), bound, partial(minus_bound, x=test_x), rate=3e-3, steps=300)


@fault(LATER["digit-vae"].faults, "optimisation", "loss-scale")
def pixels_averaged_latents_summed(training: Training) -> None:
    """The reconstruction is averaged over the pixels and the divergence summed, so that the latter wins."""

    def loss(net: nn.Module, inputs: Tensor, target: Tensor) -> Tensor:
        logits, mean, log_variance = net(inputs)
        return F.binary_cross_entropy_with_logits(logits, target) + divergence(mean, log_variance).mean()

    training.loss = loss


@fault(LATER["digit-vae"].faults, "optimisation", ("wrong-loss", "ascent", "exploding-gradients"))
def divergence_with_its_old_sign(training: Training) -> None:
    """The divergence is written with the sign that it has in the bound, and added to the loss."""
    training.loss = partial(bound, weight=-1.0)


@fault(LATER["digit-vae"].faults, "architecture", "detached", ("", "encoder", "encoder.0", "mean", "log_variance"))
def drawn_from_detached_numbers(training: Training) -> None:
    """The draw is made of numbers cut from the graph, as by torch.normal(mean, spread)."""

    def forward(self: Any, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        hidden = self.encoder(x)
        mean, log_variance = self.mean(hidden), self.log_variance(hidden)
        with torch.no_grad():
            drawn = torch.normal(mean, (0.5 * log_variance).exp())
        return self.decoder(drawn), mean, log_variance

    set_forward(training.net, forward)


@fault(LATER["digit-vae"].faults, "architecture", "output-activation", ("decoder", "decoder.2", "decoder.3"))
def decoder_ends_with_relu(training: Training) -> None:
    """The decoder ends with a ReLU, so that no pixel can be darker than one half."""
    net: Any = training.net
    net.decoder.append(nn.ReLU())


@fault(LATER["digit-vae"].faults, "data", ("target-scale", "wrong-loss"))
def signed_pixels_for_probabilities(training: Training) -> None:
    """The training images are normalised to -1 to 1, and are what the binary cross entropy shall restore."""
    batch = training.batch

    def changed(number: int) -> tuple[Tensor, Tensor]:
        x, _ = batch(number)
        return 2 * x - 1, 2 * x - 1

    training.batch = changed


@fault(LATER["digit-vae"].faults, "state", "weights-overwritten")
def initialised_in_the_loop(training: Training) -> None:
    """The function that initialises the weights is applied in the loop over the epochs, not before it."""

    def initialise(module: nn.Module) -> None:
        if isinstance(module, nn.Linear):
            nn.init.xavier_uniform_(module.weight)
            nn.init.zeros_(module.bias)

    def again(training: Training, optimizer: Optimizer, step: int) -> None:
        if step % 21 == 0:
            training.net.apply(initialise)

    training.before_step.append(again)


# A diffusion model of points, with an average of the weights

LEVELS = torch.cumprod(1 - torch.linspace(1e-3, 0.03, 100), 0)


def corners(count: int, seed: int) -> Tensor:
    """Returns points close to the corners of a square, or to its middle."""
    random = generator(seed)
    places = torch.tensor([[-1.0, -1.0], [-1.0, 1.0], [1.0, -1.0], [1.0, 1.0], [0.0, 0.0]])
    return places[torch.randint(5, (count,), generator=random)] + 0.02 * torch.randn(count, 2, generator=random)


def diffused(points: Tensor, seed: int, levels: Tensor = LEVELS) -> tuple[tuple[Tensor, Tensor], Tensor]:
    """Returns noisy points with their times, and the noise."""
    random = generator(seed)
    time, noise = torch.randint(100, (len(points),), generator=random), torch.randn(points.shape, generator=random)
    level = levels[time][:, None]
    return (level.sqrt() * points + (1 - level).sqrt() * noise, time), noise


class PointDenoiser(nn.Module):
    """A network that says what noise was added to a point at a time."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.point, self.time = nn.Linear(2, width), nn.Linear(16, width)
        self.layers = nn.Sequential(nn.SiLU(), nn.Linear(width, width), nn.SiLU(), nn.Linear(width, width), nn.SiLU())
        self.out = nn.Linear(width, 2)

    def waves(self, time: Tensor) -> Tensor:
        """Returns sines and cosines of the time."""
        angle = time[:, None] / 100 * math.pi * 2.0 ** torch.arange(-1, 7)
        return torch.cat((angle.sin(), angle.cos()), 1)

    def forward(self, inputs: tuple[Tensor, Tensor]) -> Tensor:
        point, time = inputs
        noise: Tensor = self.out(self.layers(self.point(point) + self.time(self.waves(time))))
        return noise


class Averaged:
    """An average of the weights, which is what is scored."""

    def __init__(self, decay: float) -> None:
        self.decay, self.weights = decay, dict[str, Tensor]()

    def update(self, training: Training, optimizer: Optimizer, step: int) -> None:
        """Moves the average to the weights."""
        for name, value in training.net.state_dict().items():
            held = self.weights.setdefault(name, value.clone())
            held.lerp_(value, 1 - self.decay)

    def score(self, net: nn.Module, x: Any, y: Tensor) -> float:
        """The share of the noise that the averaged weights explain."""
        said = torch.func.functional_call(net, self.weights, (x,))
        return float(1 - (said - y).square().mean() / y.square().mean())


@later(learns=0.45, chance=0.0)
def corner_diffusion(seed: int) -> Training:
    """A diffusion model of points at five places, scored with an exponential average of its weights."""
    torch.manual_seed(seed)
    points, (test, noise), averaged = corners(4096, 5), diffused(corners(1024, 6), 1_000_000), Averaged(0.95)

    def batch(number: int) -> tuple[Any, Tensor]:
        return diffused(points[torch.randint(4096, (256,), generator=generator(500_000 + seed * 7919 + number))], number)

    return Training(
        PointDenoiser(64),
        batch,
        squared,
        partial(averaged.score, x=test, y=noise),
        rate=1e-2,
        schedule=cosine,
        steps=300,
        before_step=[averaged.update],
    )


@fault(LATER["corner-diffusion"].faults, "architecture", ("inputs-not-normalised", "saturation"), ("", "time"))
def time_as_it_counts(training: Training) -> None:
    """The time goes in as the number that it is, not as sines and cosines."""
    net: Any = training.net
    net.waves = lambda time: (time[:, None] * 10.0).expand(-1, 16)


@fault(LATER["corner-diffusion"].faults, "data", "noise")
def levels_not_multiplied(training: Training) -> None:
    """The levels of noise are those of a single time, as the cumulative product is forgotten."""
    points = corners(4096, 5)

    def batch(number: int) -> tuple[Any, Tensor]:
        chosen = points[torch.randint(4096, (256,), generator=generator(500_000 + number))]
        return diffused(chosen, number, 1 - torch.linspace(1e-3, 0.03, 100))

    training.batch = batch


@fault(LATER["corner-diffusion"].faults, "state", ("weights-overwritten", "lost-updates"))
def average_stays_in_the_net(training: Training) -> None:
    """After each look at the averaged weights the net keeps them, for the training weights are not put back."""
    average: Any = Averaged(0.999)

    def keep(training: Training, optimizer: Optimizer, step: int) -> None:
        average.update(training, optimizer, step)
        training.net.load_state_dict(average.weights)

    training.before_step.append(keep)


@fault(LATER["corner-diffusion"].faults, "optimisation", ("epsilon", "rate-too-low"))
def epsilon_of_one(training: Training) -> None:
    """Adam gets an epsilon of one, as the documentation of another framework advises for one data set."""
    training.optimizer = lambda parameters, rate: torch.optim.Adam(parameters, lr=rate, eps=1.0)


@fault(LATER["corner-diffusion"].faults, "architecture", "no-nonlinearity", ("", "layers"))
def activations_lost(training: Training) -> None:
    """The activations between the layers were lost when the layers were put into a loop."""
    net: Any = training.net
    net.layers = nn.Sequential(*(layer for layer in net.layers if isinstance(layer, nn.Linear)))


# Contrastive learning


def views(images: Tensor, seed: int) -> Tensor:
    """Returns two views of each image, the first of all and then the second of all, each dimmed, hidden in part and noisy."""
    both, random = images.flatten(1).repeat(2, 1), generator(seed)
    hidden = torch.rand(both.shape, generator=random) < 0.15
    return both.masked_fill(hidden, 0.0) + 0.3 * torch.randn(both.shape, generator=random)


class Projector(nn.Module):
    """An encoder and a projection onto the unit sphere."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(64, 96), nn.ReLU(), nn.Linear(96, 64), nn.ReLU())
        self.projection = nn.Linear(64, 32)

    def forward(self, x: Tensor) -> Tensor:
        return F.normalize(self.projection(self.encoder(x)), dim=1)


def pairs_found(points: Tensor, target: Tensor, heat: float = 0.2, hides: bool = True) -> Tensor:
    """The cross entropy of finding the other view of the same image among all."""
    likeness = points @ points.T / heat
    if hides:
        likeness = likeness.masked_fill(torch.eye(len(points), dtype=torch.bool), -math.inf)
    return F.cross_entropy(likeness, target)


def contrastive(net: nn.Module, inputs: Tensor, target: Tensor) -> Tensor:
    """The loss of pairs at a temperature of 0.2."""
    return pairs_found(net(inputs), target)


def retrieved(net: nn.Module, x: Tensor) -> float:
    """The share of images whose second view is the nearest of all second views."""
    first, second = F.normalize(net(x), dim=1).chunk(2)
    return float(((first @ second.T).argmax(1) == torch.arange(len(first))).float().mean())


@later(learns=0.5, chance=0.2)
def two_views(seed: int) -> Training:
    """Contrastive learning by two noisy views of each digit."""
    torch.manual_seed(seed)
    images, labels, test, _ = digits()
    of, target = batches(images, labels, 64, seed), torch.arange(128).roll(64)
    score = partial(retrieved, x=views(test[:128], 99))
    return Training(Projector(), lambda number: (views(of(number)[0], number), target), contrastive, score, rate=2e-3, steps=250)


@fault(LATER["two-views"].faults, "optimisation", ("loss-scale", "attention-scale"))
def multiplied_by_the_temperature(training: Training) -> None:
    """The likenesses are multiplied by the temperature and not divided by it."""
    training.loss = lambda net, inputs, target: pairs_found(net(inputs), target, heat=1 / 0.05)


@fault(LATER["two-views"].faults, "architecture", ("wrong-axis", "normalisation"), "")
def sphere_over_the_batch(training: Training) -> None:
    """The outputs are normalised along the batch, the default axis being taken for the last."""
    set_forward(training.net, lambda self, x: F.normalize(self.projection(self.encoder(x)), dim=0))


@fault(LATER["two-views"].faults, "optimisation", ("labels-do-not-fit", "nonfinite", "mask"))
def finds_itself(training: Training) -> None:
    """Each view shall find the view of its own number, which is itself and hidden."""
    with_targets(training, lambda target: torch.arange(len(target)))


@fault(LATER["two-views"].faults, "data", "repeated-batches")
def seeded_in_each_call(training: Training) -> None:
    """The loader is made anew with the same seed for each step, so that the first batch comes again and again."""
    batch = training.batch
    training.batch = lambda number: batch(0)


@fault(LATER["two-views"].faults, "architecture", "detached", ("", "encoder", "encoder.0", "encoder.2"))
def encoder_of_a_linear_probe(training: Training) -> None:
    """The encoder still runs without gradients, as it did for a linear probe."""

    def forward(self: Any, x: Tensor) -> Tensor:
        with torch.no_grad():
            hidden = self.encoder(x)
        return F.normalize(self.projection(hidden), dim=1)

    set_forward(training.net, forward)


# Two heads on one trunk


def crops(count: int, seed: int) -> tuple[Tensor, tuple[Tensor, Tensor]]:
    """Returns twelve columns, and a kind of three and a standardised yield."""
    random = generator(seed)
    x = torch.randn(count, 12, generator=random)
    scores = torch.stack((x[:, 0] * x[:, 1] + x[:, 2], x[:, 3].abs() * 1.5 - 1, x[:, 4] - x[:, 5]), 1)
    value = x[:, 0].square() / 1.5 + x[:, 6] * x[:, 7].tanh() + x[:, 8]
    return x, (scores.argmax(1), (value + 0.1 * torch.randn(count, generator=random) - 0.67) / 1.5)


class TwoHeads(nn.Module):
    """A trunk with a head of kinds and a head of one value."""

    def __init__(self, columns: int, width: int) -> None:
        super().__init__()
        self.trunk = nn.Sequential(nn.Linear(columns, width), nn.GELU(), nn.Linear(width, width), nn.GELU())
        self.kind = nn.Sequential(nn.Linear(width, width), nn.GELU(), nn.Linear(width, 3))
        self.value = nn.Sequential(nn.Linear(width, width), nn.GELU(), nn.Linear(width, 1))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        hidden = self.trunk(x)
        return self.kind(hidden), self.value(hidden).squeeze(1)


def both_losses(net: nn.Module, inputs: Tensor, target: tuple[Tensor, Tensor]) -> Tensor:
    """The cross entropy of the kind and the squared error of the value."""
    logits, value = net(inputs)
    return F.cross_entropy(logits, target[0]) + F.mse_loss(value, target[1])


def both_scores(net: nn.Module, x: Tensor, y: tuple[Tensor, Tensor], unit: float = 1.0) -> float:
    """The mean of the share of right kinds and the share of the variance of the value that is explained."""
    logits, value = net(x)
    error = (value / unit - y[1]).square().mean() / y[1].var()
    return float(((logits.argmax(1) == y[0]).float().mean() + 1 - error) / 2)


@later(learns=0.75, chance=0.2)
def two_task_heads(seed: int) -> Training:
    """A trunk with two heads: one of three kinds, one of a value."""
    torch.manual_seed(seed)
    (x, y), (test_x, test_y) = crops(2048, 21), crops(512, 22)
    return Training(
        TwoHeads(12, 48), batches(x, y, 64, seed), both_losses, partial(both_scores, x=test_x, y=test_y), optimizer=adamw, steps=250
    )


@fault(LATER["two-task-heads"].faults, "optimisation", ("wrong-loss", "detached"), ("kind", "kind.0", "kind.2"))
def loss_assigned_anew(training: Training) -> None:
    """In the loop over the tasks the loss is assigned, not added, so that only the last counts."""
    training.loss = lambda net, inputs, target: F.mse_loss(net(inputs)[1], target[1])


@fault(LATER["two-task-heads"].faults, "architecture", "detached", ("", "trunk", "trunk.0", "trunk.2"))
def heads_on_a_detached_trunk(training: Training) -> None:
    """The features are detached before the heads, which was meant for a probe."""

    def forward(self: Any, x: Tensor) -> tuple[Tensor, Tensor]:
        hidden = self.trunk(x).detach()
        return self.kind(hidden), self.value(hidden).squeeze(1)

    set_forward(training.net, forward)


@fault(LATER["two-task-heads"].faults, "data", ("target-scale", "loss-scale"))
def yield_in_kilograms(training: Training) -> None:
    """The yield is in kilograms, so that its squared error is thousands of times the cross entropy."""
    with_targets(training, lambda y: (y[0], y[1] * 500.0))
    score_with(training, unit=500.0)


@fault(LATER["two-task-heads"].faults, "architecture", "not-in-optimizer", "")
def trunk_in_a_list(training: Training) -> None:
    """The layers of the trunk are kept in a plain list, so that their parameters are not those of the net."""
    net: Any = training.net
    layers = list(net.trunk)
    del net.trunk
    net.layers = layers

    def forward(self: Any, x: Tensor) -> tuple[Tensor, Tensor]:
        for layer in self.layers:
            x = layer(x)
        return self.kind(x), self.value(x).squeeze(1)

    set_forward(net, forward)


@fault(LATER["two-task-heads"].faults, "architecture", "bottleneck", ("trunk", "trunk.2", "kind.0", "value.0"))
def two_features_for_a_plot(training: Training) -> None:
    """The trunk ends with two features, from when they were plotted."""
    net: Any = training.net
    net.trunk[2] = nn.Linear(48, 2)
    net.kind[0], net.value[0] = nn.Linear(2, 48), nn.Linear(2, 48)


# Survival by partial likelihood


def patients(count: int, seed: int) -> tuple[Tensor, Tensor]:
    """Returns eight columns, and the time of each patient with whether it is that of the event."""
    random = generator(seed)
    x = torch.randn(count, 8, generator=random)
    risk = 1.5 * x[:, 0] - x[:, 1] + x[:, 2] * x[:, 3] + 0.8 * x[:, 4]
    time = -torch.rand(count, generator=random).clamp_min(1e-6).log() * (-risk).exp()
    end = -torch.rand(count, generator=random).clamp_min(1e-6).log() * 3
    return x, torch.stack((torch.minimum(time, end), (time <= end).float()), 1)


def partial_likelihood(net: nn.Module, inputs: Tensor, target: Tensor) -> Tensor:
    """Minus the logarithm of Cox's partial likelihood."""
    order = target[:, 0].argsort(descending=True)
    risk: Tensor = net(inputs).squeeze(1)[order]
    event = target[order, 1]
    return -((risk - risk.logcumsumexp(0)) * event).sum() / event.sum().clamp_min(1)


def concordance(net: nn.Module, x: Tensor, y: Tensor) -> float:
    """The share of pairs whose order in time is foretold."""
    risk, time, event = net(x).squeeze(1), y[:, 0], y[:, 1] > 0
    counts = event[:, None] & (time[:, None] < time[None])
    if not bool(risk.isfinite().all()):
        return math.nan
    right = (risk[:, None] > risk[None]).float() + 0.5 * (risk[:, None] == risk[None]).float()
    return float(right[counts].mean())


@later(learns=0.75, chance=0.5)
def cox_survival(seed: int) -> Training:
    """A network of the risk of patients, by Cox's partial likelihood and SGD with momentum."""
    torch.manual_seed(seed)
    (x, y), (test_x, test_y) = patients(2048, 31), patients(512, 32)
    net = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 1))
    score = partial(concordance, x=test_x, y=test_y)
    return Training(net, batches(x, y, 128, seed), partial_likelihood, score, rate=0.05, optimizer=momentum_sgd, steps=250)


@fault(LATER["cox-survival"].faults, "optimisation", "ascent")
def likelihood_without_minus(training: Training) -> None:
    """The log-likelihood is given to backward without the minus."""
    training.sign = -1.0


@fault(LATER["cox-survival"].faults, "optimisation", ("labels-do-not-fit", "data-order", "wrong-loss"))
def only_the_times_sorted(training: Training) -> None:
    """The times and events are sorted, the risks are not."""

    def loss(net: nn.Module, inputs: Tensor, target: Tensor) -> Tensor:
        event = target[target[:, 0].argsort(descending=True), 1]
        risk: Tensor = net(inputs).squeeze(1)
        return -((risk - risk.logcumsumexp(0)) * event).sum() / event.sum().clamp_min(1)

    training.loss = loss


@fault(LATER["cox-survival"].faults, "data", ("batch-of-one", "no-steps", "loss-scale"))
def patients_one_by_one(training: Training) -> None:
    """The loader has its default batch size of one, and alone a patient has no one to be compared with."""
    training.batch = batches(*patients(2048, 31), 1, 0)


@fault(LATER["cox-survival"].faults, "data", ("outliers", "inputs-not-normalised"))
def missing_as_a_number(training: Training) -> None:
    """Missing values of two columns are written as -9999, in a tenth of the rows."""

    def spoil(x: Tensor, seed: int = 3) -> Tensor:
        gone = torch.rand(len(x), 2, generator=generator(seed)) < 0.1
        return torch.cat((x[:, :6], x[:, 6:].masked_fill(gone, -9999.0)), 1)

    with_inputs(training, spoil)
    score_with(training, x=spoil(scored_on(training, "x")))


@fault(LATER["cox-survival"].faults, "optimisation", ("clipping", "rate-too-low"))
def clipped_to_a_thousandth(training: Training) -> None:
    """Gradients are clipped to the norm 0.001, which was the value of something else."""
    training.clip = 1e-3


@fault(LATER["cox-survival"].faults, "architecture", ("saturation", "initialisation", "vanishing-gradients"), ("0", "1", "2", "3"))
def sigmoids_with_large_weights(training: Training) -> None:
    """The hidden layers have sigmoids, and weights that are drawn with a spread of ten."""
    net: Any = training.net
    net[1], net[3] = nn.Sigmoid(), nn.Sigmoid()
    for layer in (net[0], net[2]):
        nn.init.normal_(layer.weight, 0.0, 10.0)


# A mixture density network


def inverse_problem(count: int, seed: int) -> tuple[Tensor, Tensor]:
    """Returns x and y, where several y fit an x."""
    random = generator(seed)
    y = torch.rand(count, 1, generator=random)
    x = y + 0.3 * (2 * math.pi * y).sin() + 0.03 * torch.randn(count, 1, generator=random)
    return (x - 0.5) * 3, (y - 0.5) * 3


class MixtureNet(nn.Module):
    """Says the shares, the means and the spreads of normal distributions."""

    def __init__(self, width: int, parts: int) -> None:
        super().__init__()
        self.hidden = nn.Sequential(nn.Linear(1, width), nn.Tanh(), nn.Linear(width, width), nn.Tanh())
        self.share, self.mean, self.spread = nn.Linear(width, parts), nn.Linear(width, parts), nn.Linear(width, parts)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        hidden = self.hidden(x)
        return self.share(hidden).log_softmax(1), self.mean(hidden), self.spread(hidden).exp() + 1e-3


def of_each_part(net: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    """Returns the logarithms of the share times the density of each part."""
    share, mean, spread = net(x)
    parts: Tensor = share - 0.5 * ((y - mean) / spread).square() - spread.log() - 0.5 * math.log(2 * math.pi)
    return parts


def mixture_loss(net: nn.Module, inputs: Tensor, target: Tensor) -> Tensor:
    """Minus the mean log-likelihood."""
    return -of_each_part(net, inputs, target).logsumexp(1).mean()


def log_likelihood(net: nn.Module, x: Tensor, y: Tensor) -> float:
    """The mean log-likelihood."""
    return float(of_each_part(net, x, y).logsumexp(1).mean())


@later(learns=0.0, chance=-1.28)
def mixture_density(seed: int) -> Training:
    """A mixture density network on an inverse problem."""
    torch.manual_seed(seed)
    (x, y), (test_x, test_y) = inverse_problem(2048, 41), inverse_problem(512, 42)
    score = partial(log_likelihood, x=test_x, y=test_y)
    return Training(MixtureNet(48, 6), batches(x, y, 128, seed), mixture_loss, score, rate=5e-3, clip=5.0, steps=300)


@fault(LATER["mixture-density"].faults, "architecture", "wrong-axis", ("", "share"))
def shares_over_the_batch(training: Training) -> None:
    """The softmax of the shares runs along the batch."""

    def forward(self: Any, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        hidden = self.hidden(x)
        return self.share(hidden).log_softmax(0), self.mean(hidden), self.spread(hidden).exp() + 1e-3

    set_forward(training.net, forward)


@fault(LATER["mixture-density"].faults, "architecture", ("output-activation", "nonfinite", "exploding-gradients"), ("", "spread"))
def spread_by_relu(training: Training) -> None:
    """The spread is made positive by a ReLU, which lets it be zero."""

    def forward(self: Any, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        hidden = self.hidden(x)
        return self.share(hidden).log_softmax(1), self.mean(hidden), F.relu(self.spread(hidden))

    set_forward(training.net, forward)


@fault(LATER["mixture-density"].faults, "architecture", ("symmetry", "initialisation"), ("share", "mean", "spread"))
def parts_start_alike(training: Training) -> None:
    """The output layers start at zero, so that all parts are the same and stay so."""
    net: Any = training.net
    for layer in (net.share, net.mean, net.spread):
        nn.init.zeros_(layer.weight)
        nn.init.zeros_(layer.bias)


@fault(LATER["mixture-density"].faults, "optimisation", "wrong-loss")
def mean_of_logarithms(training: Training) -> None:
    """The logarithms of the parts' densities are averaged with the shares, where the logarithm of the average was meant."""

    def loss(net: nn.Module, inputs: Tensor, target: Tensor) -> Tensor:
        share, mean, spread = net(inputs)
        logarithm = -0.5 * ((target - mean) / spread).square() - spread.log()
        likely: Tensor = (share.exp() * logarithm).sum(1).mean()
        return -likely

    training.loss = loss


@fault(LATER["mixture-density"].faults, "data", "inputs-constant")
def column_cast_to_integers(training: Training) -> None:
    """The column, a share between 0 and 1, is cast to integers before it is standardised."""

    def cast(x: Tensor) -> Tensor:
        return ((x / 3 + 0.5).long().float() - 0.5) * 3

    with_inputs(training, cast)
    score_with(training, x=cast(scored_on(training, "x")))


@fault(LATER["mixture-density"].faults, "optimisation", ("rate-too-high", "nonfinite", "exploding-gradients"))
def rate_of_the_old_optimizer(training: Training) -> None:
    """The rate of 0.5 was found for plain SGD and is now Adam's."""
    training.rate = 0.5


# Q-learning on a grid

SIDE, GAMMA = 5, 0.8
MOVES = torch.tensor([[0, 1], [1, 0], [0, -1], [-1, 0]])


def moved(place: Tensor, action: Tensor) -> Tensor:
    """Returns the places after moves on the grid."""
    at = torch.stack((place // SIDE, place % SIDE), -1) + MOVES[action]
    at = at.clamp(0, SIDE - 1)
    return at[..., 0] * SIDE + at[..., 1]


@functools.cache
def values_of_actions() -> Tensor:
    """Returns the right values of the actions in each place but the last, which is the aim."""
    place, action = torch.meshgrid(torch.arange(SIDE * SIDE - 1), torch.arange(4), indexing="ij")
    after, values = moved(place, action), torch.zeros(SIDE * SIDE - 1, 4)
    for _ in range(100):
        best = torch.cat((values.max(1).values, torch.zeros(1)))
        values = -1 + GAMMA * best[after]
    return values


def replayed(count: int, seed: int) -> tuple[Tensor, tuple[Tensor, Tensor, Tensor, Tensor]]:
    """Returns places; and actions, rewards, the places after them (the start, if the aim was reached) and whether it was."""
    random = generator(seed)
    place = torch.randint(SIDE * SIDE - 1, (count,), generator=random)
    action = torch.randint(4, (count,), generator=random)
    after = moved(place, action)
    done = after == SIDE * SIDE - 1
    hot = torch.eye(SIDE * SIDE)
    return hot[place], (action, torch.full((count,), -1.0), hot[after.masked_fill(done, 0)], done.float())


def temporal_difference(
    net: nn.Module, inputs: Tensor, target: tuple[Tensor, ...], delayed: nn.Module, ends: bool = True
) -> Tensor:
    """The error of the value of what was done, against the reward and the delayed network's value of what follows."""
    action, reward, after, done = target
    with torch.no_grad():
        follows = delayed(after).max(1).values * (1 - done if ends else 1)
    return F.smooth_l1_loss(net(inputs).gather(1, action[:, None]).squeeze(1), reward + GAMMA * follows)


def copied(training: Training, optimizer: Optimizer, step: int, delayed: nn.Module, each: int = 10) -> None:
    """Copies the weights to the delayed network now and then."""
    if step % each == 0:
        delayed.load_state_dict(training.net.state_dict())


def values_found(net: nn.Module, y: Tensor) -> float:
    """The share of the variance of the right values that is explained."""
    found = net(torch.eye(SIDE * SIDE))[:-1]
    return float(1 - (found - y).square().mean() / (y - y.mean()).square().mean())


@later(learns=0.8, chance=0.0)
def grid_q_learning(seed: int) -> Training:
    """Deep Q-learning of the way through a grid, from a replay buffer and with a delayed network."""
    torch.manual_seed(seed)
    net = nn.Sequential(nn.Linear(SIDE * SIDE, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 4))
    delayed = copy.deepcopy(net)
    return Training(
        net,
        batches(*replayed(4096, 51), 128, seed),
        partial(temporal_difference, delayed=delayed),
        partial(values_found, y=values_of_actions()),
        steps=300,
        before_step=[partial(copied, delayed=delayed)],
    )


def delayed_net(training: Training) -> Any:
    """Returns the delayed network of a Q-learning."""
    loss: Any = training.loss
    return loss.keywords["delayed"]


@fault(LATER["grid-q-learning"].faults, "state", "weights-overwritten")
def copied_the_wrong_way(training: Training) -> None:
    """The weights are copied from the delayed network to the one that learns."""
    delayed = delayed_net(training)

    def back(training: Training, optimizer: Optimizer, step: int) -> None:
        if step % 10 == 0:
            training.net.load_state_dict(delayed.state_dict())

    training.before_step = [back]


@fault(LATER["grid-q-learning"].faults, "data", ("mask", "labels-do-not-fit"))
def end_is_ignored(training: Training) -> None:
    """Whether the aim was reached is ignored, so that its value goes on with that of the start."""
    training.loss = partial(temporal_difference, delayed=delayed_net(training), ends=False)


@fault(LATER["grid-q-learning"].faults, "architecture", ("output-activation", "dead-units"), ("4", "5"))
def values_cannot_be_negative(training: Training) -> None:
    """A ReLU ends the network, but all rewards are negative."""
    net: Any = training.net
    net.append(nn.ReLU())
    delayed_net(training).append(nn.ReLU())


@fault(LATER["grid-q-learning"].faults, "optimisation", ("wrong-axis", "broadcast"))
def best_of_the_whole_batch(training: Training) -> None:
    """The best value of what follows is taken without an axis, thus over the whole batch."""
    delayed = delayed_net(training)

    def loss(net: nn.Module, inputs: Tensor, target: tuple[Tensor, ...]) -> Tensor:
        action, reward, after, done = target
        with torch.no_grad():
            aim = reward + GAMMA * delayed(after).max() * (1 - done)
        return F.smooth_l1_loss(net(inputs).gather(1, action[:, None]).squeeze(1), aim)

    training.loss = loss


@fault(LATER["grid-q-learning"].faults, "data", "labels-do-not-fit")
def buffer_off_by_one(training: Training) -> None:
    """The buffer's pointer moves on before the outcome is written, so that each outcome stands with the next action."""
    place, (action, reward, after, done) = replayed(4096, 51)
    training.batch = batches(place, (action, reward, after.roll(1, 0), done.roll(1, 0)), 128, 0)


@fault(LATER["grid-q-learning"].faults, "data", "target-scale")
def rewards_of_hundreds(training: Training) -> None:
    """The reward of a step is -100, far from what the network and the loss are made for."""
    with_targets(training, lambda target: (target[0], target[1] * 100, *target[2:]))
    score_with(training, y=scored_on(training, "y") * 100)


# A network on small graphs


def molecules(count: int, seed: int, sorts: bool = False) -> tuple[tuple[Tensor, Tensor], Tensor]:
    """Returns kinds of nine atoms with their bonds, and a standardised value that depends on which kinds are bound.

    Args:
        sorts: whether the atoms, but not the bonds, are sorted by kind.
    """
    random = generator(seed)
    kind = torch.randint(4, (count, 9), generator=random)
    bonds = (torch.rand(count, 9, 9, generator=random) < 0.25).float().triu(1)
    bonds = bonds + bonds.transpose(1, 2)
    hot = F.one_hot(kind, 4).float()
    strength = torch.tensor([[0.0, 2.0, -1.0, 0.0], [2.0, -2.0, 0.0, 1.0], [-1.0, 0.0, 1.0, -1.0], [0.0, 1.0, -1.0, 0.0]])
    value = torch.einsum("nia,nij,njb,ab->n", hot, bonds, hot, strength) / 2
    return (hot.sort(1).values if sorts else hot, bonds), (value - 1.1) / 3.6


class GraphLayer(nn.Module):
    """Joins what each atom has with the sum of what those bound to it have."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.own, self.others = nn.Linear(width, width), nn.Linear(width, width)

    def forward(self, atoms: Tensor, bonds: Tensor) -> Tensor:
        return F.relu(self.own(atoms) + bonds @ self.others(atoms))


class GraphNet(nn.Module):
    """An embedding of atoms, layers over bonds, and a head on the mean of the atoms."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.embed = nn.Linear(4, width)
        self.layers = nn.ModuleList(GraphLayer(width) for _ in range(2))
        self.head = nn.Sequential(nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 1))

    def forward(self, inputs: tuple[Tensor, Tensor]) -> Tensor:
        atoms, bonds = self.embed(inputs[0]), inputs[1]
        for layer in self.layers:
            atoms = layer(atoms, bonds)
        value: Tensor = self.head(atoms.mean(1))
        return value.squeeze(1)


@later(learns=0.75, chance=0.0)
def molecule_graphs(seed: int) -> Training:
    """A graph network that foretells a value from atoms and bonds."""
    torch.manual_seed(seed)
    (x, y), (test_x, test_y) = molecules(2048, 61), molecules(512, 62)
    score = partial(r2, x=test_x, y=test_y)
    return Training(GraphNet(32), batches(x, y, 64, seed), squared, score, rate=4e-3, schedule=cosine, steps=250)


@fault(LATER["molecule-graphs"].faults, "architecture", "no-nonlinearity", ("", "layers.0", "layers.1", "head"))
def layers_without_relu(training: Training) -> None:
    """The layers return the sum without a ReLU."""
    net: Any = training.net
    for layer in net.layers:
        set_forward(layer, lambda self, atoms, bonds: self.own(atoms) + bonds @ self.others(atoms))
    net.head[1] = nn.Identity()


@fault(LATER["molecule-graphs"].faults, "architecture", ("dropout", "train-mode"), ("", "layers.0", "layers.1"))
def dropout_that_never_ends(training: Training) -> None:
    """F.dropout is called without the mode of the module, and drops when the net is scored too."""
    net: Any = training.net
    for layer in net.layers:
        set_forward(layer, lambda self, atoms, bonds: F.dropout(F.relu(self.own(atoms) + bonds @ self.others(atoms)), 0.5))


@fault(LATER["molecule-graphs"].faults, "data", "labels-do-not-fit")
def atoms_sorted_bonds_not(training: Training) -> None:
    """The atoms are sorted by kind when they are read, and the table of bonds keeps the old order."""
    training.batch = batches(*molecules(2048, 61, sorts=True), 64, 0)
    score_with(training, x=molecules(512, 62, sorts=True)[0])


@fault(LATER["molecule-graphs"].faults, "optimisation", "rate-too-high")
def rate_without_two_zeros(training: Training) -> None:
    """The rate is typed as 0.4 where 0.004 was meant."""
    training.rate = 0.4


@fault(LATER["molecule-graphs"].faults, "architecture", ("normalisation", "mask"), ("", "layers.0", "layers.1"))
def softmax_of_the_bonds(training: Training) -> None:
    """Each row of bonds goes through a softmax, in which the atoms that are not bound count nearly as much."""
    net: Any = training.net
    for layer in net.layers:
        set_forward(layer, lambda self, atoms, bonds: F.relu(self.own(atoms) + bonds.softmax(2) @ self.others(atoms)))


@fault(LATER["molecule-graphs"].faults, "data", ("nonfinite-inputs", "nonfinite"))
def value_not_measured(training: Training) -> None:
    """For a few molecules the value was not measured and is NaN."""
    x, y = molecules(2048, 61)
    training.batch = batches(x, y.masked_fill(torch.arange(2048) % 200 == 17, math.nan), 64, 0)


# A network on sets of images


def image_sets(count: int, test: bool) -> tuple[tuple[Tensor, Tensor], Tensor]:
    """Returns sets of two to five digits with which places are filled, and the standardised sum of the digits."""
    train_x, train_y, test_x, test_y = digits()
    images, labels = (test_x, test_y) if test else (train_x, train_y)
    random = generator(71 + test)
    rows = torch.randint(len(images), (count, 5), generator=random)
    filled = torch.arange(5) < torch.randint(2, 6, (count, 1), generator=random)
    total = (labels[rows] * filled).sum(1)
    return (images[rows].flatten(2) * filled[..., None], filled.float()), (total - 15.8) / 7.9


class SetNet(nn.Module):
    """Features of each image, their sum, and a head."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.features = nn.Sequential(nn.Linear(64, 96), nn.ReLU(), nn.Linear(96, width), nn.ReLU())
        self.head = nn.Sequential(nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 1))

    def forward(self, inputs: tuple[Tensor, Tensor]) -> Tensor:
        images, filled = inputs
        value: Tensor = self.head((self.features(images) * filled[..., None]).sum(1))
        return value.squeeze(1)


@later(learns=0.75, chance=0.0)
def digit_sets(seed: int) -> Training:
    """A network on sets of digits that foretells their sum."""
    torch.manual_seed(seed)
    (x, y), (test_x, test_y) = image_sets(4096, False), image_sets(512, True)
    return Training(SetNet(32), batches(x, y, 64, seed), squared, partial(r2, x=test_x, y=test_y), steps=300)


@fault(LATER["digit-sets"].faults, "architecture", "wrong-axis", "")
def sum_over_the_batch(training: Training) -> None:
    """The features are summed over the sets, as the axes were counted without the batch."""

    def forward(self: Any, inputs: tuple[Tensor, Tensor]) -> Tensor:
        images, filled = inputs
        features = self.features(images) * filled[..., None]
        value: Tensor = self.head(features.sum(0, keepdim=True).expand_as(features).mean(1))
        return value.squeeze(1)

    set_forward(training.net, forward)


@fault(LATER["digit-sets"].faults, "optimisation", "momentum")
def betas_in_the_wrong_order(training: Training) -> None:
    """The two betas of Adam are swapped."""
    training.optimizer = lambda parameters, rate: torch.optim.Adam(parameters, lr=rate, betas=(0.999, 0.9))


@fault(LATER["digit-sets"].faults, "data", "data-order")
def sets_by_their_sum(training: Training) -> None:
    """The sets are written to the file by their sums, and read without a shuffle."""
    (images, filled), y = image_sets(4096, False)
    order = y.argsort()
    x, y = (images[order], filled[order]), y[order]

    def batch(number: int) -> tuple[Any, Tensor]:
        rows = slice(number % 64 * 64, number % 64 * 64 + 64)
        return (x[0][rows], x[1][rows]), y[rows]

    training.batch = batch


@fault(LATER["digit-sets"].faults, "data", ("labels-do-not-fit", "inputs-constant"))
def one_image_for_the_whole_set(training: Training) -> None:
    """The loop over the set uses the index of the outer loop, so that a set holds its first image again and again."""
    with_inputs(training, lambda x: (x[0][:, :1] * x[1][..., None], x[1]))
    images, filled = scored_on(training, "x")
    score_with(training, x=(images[:, :1] * filled[..., None], filled))


@fault(LATER["digit-sets"].faults, "architecture", "output-activation", "head")
def sum_squeezed_by_sigmoid(training: Training) -> None:
    """The head ends with a sigmoid, as the values were between 0 and 1 before they were standardised."""
    net: Any = training.net
    net.head.append(nn.Sigmoid())


@fault(LATER["digit-sets"].faults, "state", "optimizer-reset")
def optimizer_in_the_inner_loop(training: Training) -> None:
    """The optimizer is made inside the loop over the batches, so that it knows no step but the last."""

    def renew(training: Training, optimizer: Optimizer, step: int) -> None:
        optimizer.state.clear()

    training.before_step.append(renew)


# Low-rank adaptation of a trained network


class LowRank(nn.Module):
    """A linear layer that is kept, with a low-rank change that is learned."""

    def __init__(self, base: nn.Linear, rank: int, scale: float) -> None:
        super().__init__()
        self.base, self.scale = base.requires_grad_(False), scale
        self.a = nn.Parameter(torch.randn(rank, base.in_features) / math.sqrt(base.in_features))
        self.b = nn.Parameter(torch.zeros(base.out_features, rank))

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.base(x) + F.linear(F.linear(x, self.a), self.b) * self.scale
        return out


@functools.cache
def trained_on_digits() -> dict[str, Tensor]:
    """Returns the weights of a network that tells digits."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        x, y, _, _ = digits()
        net = digit_net()
        optimizer, batch = torch.optim.Adam(net.parameters(), 3e-3), batches(x.flatten(1), y, 64, 0)
        for number in range(200):
            optimizer.zero_grad()
            loss: Any = entropy(net, *batch(number))
            loss.backward()
            optimizer.step()
    return {name: value.clone() for name, value in net.state_dict().items()}


def digit_net() -> nn.Sequential:
    """Returns a network of three layers on the pixels of a digit."""
    return nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))


def turned(x: Tensor) -> Tensor:
    """Returns the pixels of images that are turned by a quarter."""
    return x.rot90(1, (2, 3)).flatten(1)


@later(learns=0.75, chance=0.2)
def low_rank_adaptation(seed: int) -> Training:
    """A network that was trained on digits is adapted to turned digits by changes of rank four, all else being frozen."""
    torch.manual_seed(seed)
    net = digit_net()
    net.load_state_dict(trained_on_digits())
    for place in (0, 2, 4):
        base: Any = net[place]
        net[place] = LowRank(base, 4, 2.0)
    x, y, test_x, test_y = digits()
    score = partial(accuracy, x=turned(test_x), y=test_y)
    return Training(net, batches(turned(x), y, 64, seed), entropy, score, rate=5e-3, optimizer=adamw, schedule=cosine, steps=250)


@fault(LATER["low-rank-adaptation"].faults, "architecture", ("initialisation", "symmetry", "vanishing-gradients"), ("0", "2", "4"))
def both_factors_zero(training: Training) -> None:
    """Both factors of the changes start at zero, so that neither gets a gradient."""
    net: Any = training.net
    for place in (0, 2, 4):
        nn.init.zeros_(net[place].a)


@fault(LATER["low-rank-adaptation"].faults, "optimisation", ("frozen", "not-in-optimizer"), ("0", "2"))
def frozen_after_the_change(training: Training) -> None:
    """The network is frozen after the layers were changed, all but the last, so that their changes are frozen too."""
    net: Any = training.net
    for place in (0, 2):
        net[place].requires_grad_(False)


@fault(LATER["low-rank-adaptation"].faults, "state", ("stale-optimizer", "not-in-optimizer"), ("0", "2", "4"))
def optimizer_before_the_change(training: Training) -> None:
    """The factors are made anew after the optimizer was made, which holds the old ones."""
    net: Any = training.net
    old = list(net.parameters())
    for place in (0, 2, 4):
        net[place].a, net[place].b = nn.Parameter(net[place].a.detach().clone()), nn.Parameter(net[place].b.detach().clone())
    training.parameters = lambda net: old


@fault(LATER["low-rank-adaptation"].faults, "state", "weights-overwritten", ("0", "2", "4"))
def merged_and_kept(training: Training) -> None:
    """At each save the changes are added to the kept weights, and stay on top of them."""

    def merge(training: Training, optimizer: Optimizer, step: int) -> None:
        net: Any = training.net
        if step % 10 == 9:
            with torch.no_grad():
                for place in (0, 2, 4):
                    net[place].base.weight += net[place].b @ net[place].a * net[place].scale

    training.before_step.append(merge)


@fault(LATER["low-rank-adaptation"].faults, "optimisation", ("rate-too-low", "schedule"))
def rate_of_full_tuning(training: Training) -> None:
    """The rate of 0.00001 is the one at which whole language models are tuned."""
    training.rate = 1e-5


@fault(LATER["low-rank-adaptation"].faults, "architecture", "detached", ("", "0", "1", "2", "3"))
def kept_layers_without_gradients(training: Training) -> None:
    """All layers before the last run under no_grad, as they are frozen, and with them their changes."""
    net: Any = training.net
    for place in (0, 2):

        def forward(self: Any, x: Tensor) -> Tensor:
            with torch.no_grad():
                out: Tensor = self.base(x) + F.linear(F.linear(x, self.a), self.b) * self.scale
            return out

        set_forward(net[place], forward)


# A normalising flow


def moons(count: int, seed: int) -> Tensor:
    """Returns points of two half circles."""
    random = generator(seed)
    angle, which = math.pi * torch.rand(count, generator=random), torch.randint(2, (count,), generator=random)
    sign = 1.0 - 2 * which
    points = torch.stack((angle.cos() * sign + which - 0.5, angle.sin() * sign + 0.5 * which - 0.25), 1)
    return 1.3 * (points + 0.07 * torch.randn(points.shape, generator=random))


class Coupling(nn.Module):
    """Scales and shifts one half by what a network says of the other."""

    def __init__(self, width: int, first: bool) -> None:
        super().__init__()
        self.first = first
        self.net = nn.Sequential(nn.Linear(1, width), nn.Tanh(), nn.Linear(width, width), nn.Tanh(), nn.Linear(width, 2))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        kept, changed = (x[:, :1], x[:, 1:]) if self.first else (x[:, 1:], x[:, :1])
        scale, shift = self.net(kept).chunk(2, 1)
        scale = 2 * (scale / 2).tanh()
        changed = changed * scale.exp() + shift
        return torch.cat((kept, changed) if self.first else (changed, kept), 1), scale.squeeze(1)


class Flow(nn.Module):
    """Couplings that take turns, down to a normal distribution."""

    def __init__(self, depth: int, width: int) -> None:
        super().__init__()
        self.couplings = nn.ModuleList(Coupling(width, number % 2 == 0) for number in range(depth))

    def forward(self, x: Tensor) -> Tensor:
        """Returns the logarithms of the densities."""
        volume = torch.zeros(len(x))
        for coupling in self.couplings:
            x, scale = coupling(x)
            volume = volume + scale
        return volume - 0.5 * x.square().sum(1) - math.log(2 * math.pi)


def unlikely(net: nn.Module, inputs: Tensor, target: Tensor) -> Tensor:
    """Minus the mean logarithm of the density."""
    loss: Tensor = -net(inputs).mean()
    return loss


def density(net: nn.Module, x: Tensor, right: Callable[..., Tensor]) -> float:
    """The mean logarithm of the density, by the right formula."""
    return float(right(net, x).mean())


@later(learns=-1.9, chance=-2.6)
def coupling_flow(seed: int) -> Training:
    """A normalising flow of six couplings on two half circles."""
    torch.manual_seed(seed)
    x, test = moons(4096, 81), moons(1024, 82)
    score = partial(density, x=test, right=Flow.forward)
    return Training(Flow(6, 32), batches(x, x, 128, seed), unlikely, score, rate=5e-3, schedule=cosine, steps=250)


@fault(
    LATER["coupling-flow"].faults, "architecture", ("mask", "wrong-axis"), ("", "couplings", *(f"couplings.{n}" for n in range(6)))
)
def same_half_each_time(training: Training) -> None:
    """The couplings do not take turns, so that one half is never changed."""
    net: Any = training.net
    for coupling in net.couplings:
        coupling.first = True


@fault(LATER["coupling-flow"].faults, "optimisation", ("schedule", "rate-too-low", "no-steps"))
def warm_up_by_integers(training: Training) -> None:
    """The warm-up divides by // in place of /, so that the rate is zero until the warm-up is over."""
    training.schedule = lambda step, steps: min(step // 200, 1)


@fault(
    LATER["coupling-flow"].faults,
    "architecture",
    ("detached", "wrong-loss"),
    ("", "couplings", *(f"couplings.{n}" for n in range(6))),
)
def volume_kept_as_numbers(training: Training) -> None:
    """The scales are stored for a plot, detached, and the stored ones are summed for the loss."""

    def forward(self: Any, x: Tensor) -> Tensor:
        scales = []
        for coupling in self.couplings:
            x, scale = coupling(x)
            scales.append(scale.detach())
        return torch.stack(scales).sum(0) - 0.5 * x.square().sum(1) - math.log(2 * math.pi)

    set_forward(training.net, forward)


@fault(LATER["coupling-flow"].faults, "data", "outliers")
def sensor_errors_in_the_points(training: Training) -> None:
    """One point in fifty has the value 500, with which the sensor reports an error."""
    x = moons(4096, 81)
    x[::50] = 500.0
    training.batch = batches(x, x, 128, 0)


@fault(
    LATER["coupling-flow"].faults, "architecture", ("initialisation", "saturation"), tuple(f"couplings.{n}.net" for n in range(6))
)
def orthogonal_with_a_gain(training: Training) -> None:
    """The layers are initialised orthogonally with a gain of 20, before tanh."""
    for module in training.net.modules():
        if isinstance(module, nn.Linear):
            nn.init.orthogonal_(module.weight, 20.0)


@fault(LATER["coupling-flow"].faults, "data", ("noise", "labels-do-not-fit"))
def dequantised_points(training: Training) -> None:
    """Uniform noise of the width of a pixel is added, as to images, but the points are no pixels."""
    batch = training.batch

    def changed(number: int) -> tuple[Tensor, Tensor]:
        x, y = batch(number)
        return x + torch.rand(x.shape, generator=generator(number)), y

    training.batch = changed


# A neural differential equation


def orbits(count: int, seed: int) -> tuple[Tensor, Tensor]:
    """Returns where points start, and where they are at each of twenty times."""
    random = generator(seed)
    point = torch.randn(count, 2, generator=random)
    start, path = point, []
    for step in range(200):
        x, v = point[:, 0], point[:, 1]
        point = point + 0.015 * torch.stack((v, (1 - x.square()).clamp_min(-3) * v - 1.5 * x), 1)
        if step % 10 == 9:
            path.append(point)
    return start, torch.stack(path, 1)


class Dynamics(nn.Module):
    """Says how fast a point moves, and moves it by steps of Euler."""

    def __init__(self, width: int, steps: int) -> None:
        super().__init__()
        self.speed = nn.Sequential(nn.Linear(2, width), nn.Tanh(), nn.Linear(width, width), nn.Tanh(), nn.Linear(width, 2))
        self.steps, self.pace = steps, 0.15

    def forward(self, point: Tensor) -> Tensor:
        path = []
        for _ in range(self.steps):
            point = point + self.pace * self.speed(point)
            path.append(point)
        return torch.stack(path, 1)


@later(learns=0.75, chance=0.0)
def euler_dynamics(seed: int) -> Training:
    """A neural differential equation, by steps of Euler, of an oscillator."""
    torch.manual_seed(seed)
    (x, y), (test_x, test_y) = orbits(1024, 91), orbits(256, 92)
    score = partial(r2, x=test_x, y=test_y)
    return Training(Dynamics(32, 20), batches(x, y, 64, seed), squared, score, rate=1e-2, clip=1.0, schedule=cosine, steps=150)


@fault(LATER["euler-dynamics"].faults, "architecture", "detached", ("", "speed"))
def detached_at_each_step(training: Training) -> None:
    """The point is detached at each step to save memory, so that no step knows of those that follow."""

    def forward(self: Any, point: Tensor) -> Tensor:
        path = []
        for _ in range(self.steps):
            point = point + self.pace * self.speed(point)
            path.append(point)
            point = point.detach()
        return torch.stack(path, 1)

    set_forward(training.net, forward)


@fault(LATER["euler-dynamics"].faults, "state", "carried-state", "")
def starts_where_it_ended(training: Training) -> None:
    """The point is kept on the module, and the next batch starts where the last one ended."""

    def forward(self: Any, point: Tensor) -> Tensor:
        path = []
        if self.last is not None and len(self.last) == len(point):
            point = self.last
        for _ in range(self.steps):
            point = point + self.pace * self.speed(point)
            path.append(point)
        self.last = point.detach()
        return torch.stack(path, 1)

    net: Any = training.net
    net.last = None
    set_forward(net, forward)


@fault(
    LATER["euler-dynamics"].faults,
    "architecture",
    ("symmetry", "initialisation", "vanishing-gradients"),
    ("speed", "speed.0", "speed.2", "speed.4"),
)
def all_weights_zero(training: Training) -> None:
    """All weights start at zero, so that the point may stand still at first."""
    for module in training.net.modules():
        if isinstance(module, nn.Linear):
            nn.init.zeros_(module.weight)
            nn.init.zeros_(module.bias)


@fault(LATER["euler-dynamics"].faults, "architecture", ("output-activation", "dead-units"), ("speed", "speed.4", "speed.5"))
def speeds_never_negative(training: Training) -> None:
    """The speed ends with a softplus, and so the points can only move one way."""
    net: Any = training.net
    net.speed.append(nn.Softplus())


@fault(LATER["euler-dynamics"].faults, "data", "labels-do-not-fit")
def path_reversed(training: Training) -> None:
    """The path is read from its end to its start."""
    with_targets(training, lambda path: path.flip(1))


@fault(LATER["euler-dynamics"].faults, "optimisation", ("wrong-loss", "loss-scale", "outliers"))
def error_in_per_cent(training: Training) -> None:
    """The error is divided by the value, which now and then is close to zero."""

    def loss(net: nn.Module, inputs: Tensor, target: Tensor) -> Tensor:
        error: Tensor = (net(inputs) - target) / target
        return error.square().mean()

    training.loss = loss
