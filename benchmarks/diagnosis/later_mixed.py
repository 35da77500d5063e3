"""Ten trainings of ten kinds, from a spam filter to a BiLSTM on packed sentences, with mistakes that are typical of each."""

from __future__ import annotations

import copy
import functools
import math
import types
from collections.abc import Iterable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence
from torch.optim import Optimizer

from benchmarks.diagnosis.later import LATER, later, preprocessed, relabelled
from benchmarks.diagnosis.programs.data import accuracy, batches, digits, generator, r2
from benchmarks.diagnosis.training import Training, fault

__all__: list[str] = []


def momentum_sgd(parameters: Iterable[nn.Parameter], rate: float, decay: float = 5e-4, momentum: float = 0.9) -> Optimizer:
    """SGD with momentum and weight decay, as residual networks are trained."""
    return torch.optim.SGD(parameters, lr=rate, momentum=momentum, weight_decay=decay)


def adamw(parameters: Iterable[nn.Parameter], rate: float, eps: float = 1e-8) -> Optimizer:
    """AdamW with little weight decay."""
    return torch.optim.AdamW(parameters, lr=rate, weight_decay=0.01, eps=eps)


def classes(net: nn.Module, x: Any, y: Tensor) -> Tensor:
    """Cross entropy of logits with the classes last."""
    logits = net(x)
    return F.cross_entropy(logits.reshape(-1, logits.shape[-1]), y.reshape(-1))


def warm_up(step: int, steps: int) -> float:
    """A linear warm-up of a tenth of the steps, and a cosine to nothing."""
    first = steps // 10
    return (step + 1) / first if step < first else 0.5 + 0.5 * math.cos(math.pi * (step - first) / (steps - first))


# A spam filter on bags of words


def mails(count: int, seed: int) -> tuple[Tensor, Tensor]:
    """Returns word counts of mails, and 1 for those that are spam, three in ten."""
    random = generator(seed)
    usual = -torch.log(torch.arange(1, 301).float())
    tilt = 0.55 * torch.randn(300, generator=generator(77))
    spam = (torch.rand(count, generator=random) < 0.3).float()
    frequencies = torch.softmax(usual + spam[:, None] * tilt, 1)
    words = torch.multinomial(frequencies, 60, replacement=True, generator=random)
    return torch.zeros(count, 300).scatter_add_(1, words, torch.ones(count, 60)), spam


def spam_loss(net: nn.Module, x: Any, y: Tensor) -> Tensor:
    """Binary cross entropy of the logits."""
    return F.binary_cross_entropy_with_logits(net(x).squeeze(1), y)


def caught(net: nn.Module, x: Any, y: Tensor) -> float:
    """The mean of the shares of spam caught and of other mails let through."""
    said = net(x).squeeze(1) > 0
    return float((said[y == 1].float().mean() + (~said[y == 0]).float().mean()) / 2)


@later(learns=0.8, chance=0.5)
def spam_filter(seed: int) -> Training:
    """A spam filter on the logarithms of word counts, with dropout and binary cross entropy."""
    torch.manual_seed(seed)
    (x, y), (test_x, test_y) = mails(3000, 1), mails(1000, 2)
    net = nn.Sequential(nn.Linear(300, 64), nn.ReLU(), nn.Dropout(0.3), nn.Linear(64, 16), nn.ReLU(), nn.Linear(16, 1))
    score = partial(caught, x=test_x.log1p(), y=test_y)
    return Training(net, batches(x.log1p(), y, 64, seed), spam_loss, score, rate=2e-3, steps=200)


@fault(LATER["spam-filter"].faults, "architecture", ("output-activation", "wrong-loss"), ("", "6"))
def sigmoid_before_bce_with_logits(training: Training) -> None:
    """The network ends in a sigmoid, and the loss applies another."""
    net: Any = training.net
    net.append(nn.Sigmoid())


@fault(LATER["spam-filter"].faults, "optimisation", ("wrong-loss", "loss-scale"))
def positive_weight_inverted(training: Training) -> None:
    """The weight of 20 for spam was meant to be multiplied with and is divided by, so that spam hardly counts."""

    def weighted(net: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        """Binary cross entropy with the wrong weight of the positive class."""
        return F.binary_cross_entropy_with_logits(net(x).squeeze(1), y, pos_weight=torch.tensor(1 / 20))

    training.loss = weighted


@fault(LATER["spam-filter"].faults, "optimisation", ("broadcast", "wrong-loss"))
def column_against_row(training: Training) -> None:
    """A cross entropy written by hand takes a column of probabilities and a row of labels."""

    def by_hand(net: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        """Binary cross entropy of every mail with every label."""
        p = torch.sigmoid(net(x))
        return -(y * torch.log(p + 1e-7) + (1 - y) * torch.log(1 - p + 1e-7)).mean()

    training.loss = by_hand


@fault(LATER["spam-filter"].faults, "optimisation", "weight-decay")
def decay_as_large_as_for_ridge(training: Training) -> None:
    """The L2 penalty of 0.3 was taken over from a linear model and given to Adam as weight decay."""
    training.optimizer = lambda parameters, rate: torch.optim.Adam(parameters, lr=rate, weight_decay=0.3)


@fault(LATER["spam-filter"].faults, "data", "data-order")
def spam_folder_first(training: Training) -> None:
    """The mails are read folder by folder, first the spam and then the others, and not shuffled."""
    x, y = mails(3000, 1)
    order = torch.argsort(y, descending=True, stable=True)
    x, y = x[order].log1p(), y[order]

    def in_order(number: int) -> tuple[Tensor, Tensor]:
        """The batch in the order of the folders."""
        rows = torch.arange(64) + number % (len(x) // 64) * 64
        return x[rows], y[rows]

    training.batch = in_order


@fault(LATER["spam-filter"].faults, "data", "inputs-constant", ("", "0"))
def vocabulary_of_capitals(training: Training) -> None:
    """The vocabulary was built of words before lower-casing, so that nearly every word counts as unknown, at the first place."""

    def unknown(x: Tensor) -> Tensor:
        """The counts with all words but the last ten gathered in one."""
        counts = torch.zeros_like(x)
        counts[:, -10:] = x[:, -10:].expm1()
        counts[:, 0] = x.expm1()[:, :-10].sum(1)
        return counts.log1p()

    preprocessed(training, unknown)


# House prices with embedded categories


def houses(count: int, seed: int) -> tuple[tuple[Tensor, Tensor], Tensor]:
    """Returns district and style of houses, their area, age and rooms, and their standardised prices."""
    random, world = generator(seed), generator(5)
    district, style = torch.randint(30, (count,), generator=random), torch.randint(6, (count,), generator=random)
    wealth, per_area = torch.randn(30, generator=world), torch.randn(6, generator=world)
    numbers = torch.randn(count, 3, generator=random)
    area, age, rooms = numbers.unbind(1)
    price = wealth[district] + area * (1 + 0.6 * per_area[style]) - 0.4 * age.abs() + 0.2 * rooms * wealth[district]
    price = price + 0.2 * torch.randn(count, generator=random)
    return (torch.stack((district, style), 1), numbers), (price + 0.3) / 1.6


class HousePrices(nn.Module):
    """Embeddings of the categories beside the numbers, and a perceptron on both."""

    def __init__(self) -> None:
        super().__init__()
        self.district, self.style = nn.Embedding(30, 6), nn.Embedding(6, 3)
        self.norm = nn.BatchNorm1d(3)
        self.body = nn.Sequential(nn.Linear(12, 64), nn.ReLU(), nn.Linear(64, 32), nn.ReLU())
        self.head = nn.Linear(32, 1)

    def forward(self, x: tuple[Tensor, Tensor]) -> Tensor:
        """Returns a column of prices."""
        codes, numbers = x
        parts = (self.district(codes[:, 0]), self.style(codes[:, 1]), self.norm(numbers))
        price: Tensor = self.head(self.body(torch.cat(parts, 1)))
        return price


def squares(net: nn.Module, x: Any, y: Tensor) -> Tensor:
    """The mean squared error of a column of values."""
    return F.mse_loss(net(x).squeeze(1), y)


@later(learns=0.8, chance=0.0)
def embedded_house_prices(seed: int) -> Training:
    """A regression of house prices on categories and numbers."""
    torch.manual_seed(seed)
    (x, y), (test_x, test_y) = houses(3000, 1), houses(800, 2)
    return Training(HousePrices(), batches(x, y, 64, seed), squares, partial(r2, x=test_x, y=test_y), steps=250)


@fault(LATER["embedded-house-prices"].faults, "data", "target-scale")
def prices_in_thousands(training: Training) -> None:
    """The prices are left in thousands, far from zero, and the rate is the usual one."""
    score = training.score
    assert isinstance(score, partial)
    relabelled(training, lambda x, y: 350 + 80 * y)
    training.score = partial(r2, x=score.keywords["x"], y=350 + 80 * score.keywords["y"])


@fault(LATER["embedded-house-prices"].faults, "data", "inputs-constant", "district")
def unseen_district_for_all(training: Training) -> None:
    """The encoder of districts compares text with numbers, so that all are the code of an unseen one."""
    preprocessed(training, lambda x: (x[0] * torch.tensor([0, 1]), x[1]))


@fault(LATER["embedded-house-prices"].faults, "architecture", ("output-activation", "dead-units"), ("head", "head.1", ""))
def prices_are_positive(training: Training) -> None:
    """A ReLU ends the network since prices are positive, but they are standardised."""
    net: Any = training.net
    net.head = nn.Sequential(net.head, nn.ReLU())


@fault(LATER["embedded-house-prices"].faults, "data", "outliers")
def prices_in_cents(training: Training) -> None:
    """A few prices of one source are in cents."""

    def some_in_cents(x: Any, y: Tensor) -> Tensor:
        """The targets with every row whose first number ends a certain way a hundred times as large."""
        odd = ((x[1][:, 0] * 1000).long() % 40) == 0
        return torch.where(odd, 100 * (y + 1.5), y)

    relabelled(training, some_in_cents)


@fault(LATER["embedded-house-prices"].faults, "state", "weights-overwritten")
def best_weights_loaded_each_epoch(training: Training) -> None:
    """The weights of the best epoch are loaded after each, but the best loss is never updated, so they are the first."""
    first = copy.deepcopy(training.net.state_dict())

    def restore(training: Training, optimizer: Optimizer, step: int) -> None:
        """Loads the first weights at the end of each epoch."""
        if step and step % 46 == 0:
            training.net.load_state_dict(first)

    training.before_step.append(restore)


@fault(LATER["embedded-house-prices"].faults, "architecture", ("wrong-axis", "normalisation"), ("norm", ""))
def numbers_normalised_by_row(training: Training) -> None:
    """The three numbers of a house are normalised among themselves instead of each column among the houses."""
    net: Any = training.net
    net.norm = nn.LayerNorm(3)


# A residual network with batch normalisation, warm-up and shifted images


class ResidualBlock(nn.Module):
    """Two convolutions with batch normalisation, and what goes past them."""

    def __init__(self, before: int, after: int, stride: int) -> None:
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(before, after, 3, stride, 1, bias=False), nn.BatchNorm2d(after)
        self.conv2, self.bn2 = nn.Conv2d(after, after, 3, 1, 1, bias=False), nn.BatchNorm2d(after)
        self.past = nn.Conv2d(before, after, 1, stride, bias=False) if before != after else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        """Returns the images of the next size."""
        inner = self.bn2(self.conv2(F.relu(self.bn1(self.conv1(x)))))
        return F.relu(self.past(x) + inner)


class SmallResNet(nn.Module):
    """A stem, three residual blocks, and a linear layer on the means."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(1, 16, 3, 1, 1, bias=False), nn.BatchNorm2d(16), nn.ReLU())
        self.blocks = nn.Sequential(ResidualBlock(16, 16, 1), ResidualBlock(16, 32, 2), ResidualBlock(32, 32, 1))
        self.head = nn.Linear(32, 10)

    def forward(self, x: Tensor) -> Tensor:
        """Returns the logits."""
        logits: Tensor = self.head(self.blocks(self.stem(x)).mean((2, 3)))
        return logits


@later(learns=0.85, chance=0.1)
def warmed_up_resnet(seed: int) -> Training:
    """A residual network on shifted digits, by SGD with momentum, warm-up and cosine."""
    torch.manual_seed(seed)
    x, y, test_x, test_y = digits()
    plain = batches(x, y, 32, seed)

    def shifted(number: int) -> tuple[Tensor, Tensor]:
        """The batch moved by at most one pixel."""
        images, labels = plain(number)
        down, right = torch.randint(-1, 2, (2,), generator=generator(number)).tolist()
        return torch.roll(images, (down, right), (2, 3)), labels

    score = partial(accuracy, x=test_x, y=test_y)
    return Training(SmallResNet(), shifted, classes, score, rate=0.1, optimizer=momentum_sgd, schedule=warm_up, steps=150)


@fault(LATER["warmed-up-resnet"].faults, "optimisation", ("schedule", "rate-too-low"))
def warm_up_of_imagenet(training: Training) -> None:
    """The warm-up takes the 10,000 steps of a long training, of which this has few."""
    training.schedule = lambda step, steps: min(1.0, (step / 10_000) ** 2)


PLACES = ("stem.1", "blocks.0.bn1", "blocks.0.bn2")


@fault(LATER["warmed-up-resnet"].faults, "state", ("statistics-frozen", "normalisation"), PLACES)
def momentum_as_in_keras(training: Training) -> tuple[str, ...]:
    """The momentum of 0.999 of another framework was turned rightly into 0.001, which is too little for so short a training."""
    names = [name for name, module in training.net.named_modules() if isinstance(module, nn.BatchNorm2d)]
    for name in names:
        norm: Any = training.net.get_submodule(name)
        norm.momentum = 0.001
    return tuple(names)


@fault(LATER["warmed-up-resnet"].faults, "optimisation", "weight-decay")
def decay_of_a_tenth_and_more(training: Training) -> None:
    """The weight decay lost its exponent: 0.5 instead of 5e-4."""
    training.optimizer = partial(momentum_sgd, decay=0.5)


@fault(LATER["warmed-up-resnet"].faults, "architecture", ("initialisation", "dead-units", "vanishing-gradients"))
def every_gamma_starts_at_zero(training: Training) -> tuple[str, ...]:
    """The gain of every batch normalisation starts at zero, not only that of the last in each block."""
    names = [name for name, module in training.net.named_modules() if isinstance(module, nn.BatchNorm2d)]
    for name in names:
        norm: Any = training.net.get_submodule(name)
        nn.init.zeros_(norm.weight)
    return (*names, "stem", "stem.2")


@fault(LATER["warmed-up-resnet"].faults, "data", "labels-do-not-fit")
def augmentation_shuffles_images(training: Training) -> None:
    """The augmentation shuffles the images of most batches once more, but not the labels."""
    batch = training.batch

    def shuffled(number: int) -> tuple[Tensor, Tensor]:
        """The batch with images in another order."""
        x, y = batch(number)
        return (x if number % 8 == 0 else x[torch.randperm(len(x), generator=generator(number))]), y

    training.batch = shuffled


@fault(LATER["warmed-up-resnet"].faults, "optimisation", "gradients-not-cleared")
def gradients_cleared_per_epoch(training: Training) -> None:
    """The gradients are cleared at the start of an epoch instead of before each step."""
    training.clears = False

    def clear(training: Training, optimizer: Optimizer, step: int) -> None:
        """Clears at the first step of an epoch."""
        if step % 42 == 0:
            optimizer.zero_grad()

    training.before_step.append(clear)


# An image autoencoder


class ConvolutionalAutoencoder(nn.Module):
    """Convolutions to a code of 16 numbers, and back."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Sequential(
            nn.Conv2d(1, 16, 3, 2, 1), nn.ReLU(), nn.Conv2d(16, 32, 3, 2, 1), nn.ReLU(), nn.Flatten(), nn.Linear(128, 16)
        )
        self.decoder = nn.Sequential(
            nn.Linear(16, 128),
            nn.ReLU(),
            nn.Unflatten(1, (32, 2, 2)),
            nn.ConvTranspose2d(32, 16, 4, 2, 1),
            nn.ReLU(),
            nn.ConvTranspose2d(16, 1, 4, 2, 1),
            nn.Tanh(),
        )

    def forward(self, x: Tensor) -> Tensor:
        """Returns the images as they come back."""
        images: Tensor = self.decoder(self.encoder(x))
        return images


def pixels(net: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    """The mean squared error of the pixels."""
    return F.mse_loss(net(x), y)


@later(learns=0.5, chance=0.0)
def image_autoencoder(seed: int) -> Training:
    """A convolutional autoencoder of digits that ends in a tanh."""
    torch.manual_seed(seed)
    x, _, test_x, _ = digits()
    net = ConvolutionalAutoencoder()
    return Training(net, batches(x, x, 64, seed), pixels, partial(r2, x=test_x, y=test_x), rate=3e-3, steps=250)


@fault(LATER["image-autoencoder"].faults, "architecture", "output-activation", ("decoder.6", "decoder"))
def sigmoid_for_signed_pixels(training: Training) -> None:
    """The decoder ends in a sigmoid, but the pixels were normalised to between -1 and 1."""
    net: Any = training.net
    net.decoder[6] = nn.Sigmoid()


@fault(LATER["image-autoencoder"].faults, "architecture", "wrong-axis", ("encoder.4", "encoder", "encoder.5"))
def flattened_across_the_batch(training: Training) -> None:
    """The maps are flattened by a view after a permute, which mixes the images of a batch."""
    net: Any = training.net

    def flattened(self: nn.Module, x: Tensor) -> Tensor:
        """Returns rows that hold pieces of many images."""
        return x.permute(1, 2, 3, 0).reshape(len(x), -1)

    net.encoder[4].forward = types.MethodType(flattened, net.encoder[4])


@fault(LATER["image-autoencoder"].faults, "architecture", ("bottleneck",), ("encoder.5", "encoder", "decoder.0"))
def code_of_two(training: Training) -> None:
    """The code was made two numbers wide for a picture of it, and stayed so."""
    net: Any = training.net
    net.encoder[5], net.decoder[0] = nn.Linear(128, 2), nn.Linear(2, 128)


@fault(LATER["image-autoencoder"].faults, "architecture", "detached", ("encoder", "encoder.5", "decoder", ""))
def codes_kept_for_a_plot(training: Training) -> None:
    """The codes are kept as data for a plot, and the decoder gets what was kept."""
    net: Any = training.net

    def forward(self: Any, x: Tensor) -> Tensor:
        """Returns the images made of codes without a history."""
        self.codes = self.encoder(x).detach()
        images: Tensor = self.decoder(self.codes)
        return images

    net.forward = types.MethodType(forward, net)


@fault(LATER["image-autoencoder"].faults, "optimisation", ("wrong-loss", "output-activation"))
def bce_of_signed_pixels(training: Training) -> None:
    """Binary cross entropy with logits is taken of pixels between -1 and 1 and of what a tanh returns."""
    training.loss = lambda net, x, y: F.binary_cross_entropy_with_logits(net(x), y)


@fault(LATER["image-autoencoder"].faults, "architecture", ("initialisation", "symmetry"), ("encoder", "decoder"))
def constant_initial_weights(training: Training) -> tuple[str, ...]:
    """The weights of all layers start at the same small constant."""
    layers = {name: module for name, module in training.net.named_modules() if hasattr(module, "weight")}
    for layer in layers.values():
        weight: Any = layer.weight
        nn.init.constant_(weight, 0.01)
    return ("encoder", "decoder", *layers)


@fault(LATER["image-autoencoder"].faults, "data", "noise")
def noise_of_the_wrong_unit(training: Training) -> None:
    """The noise of a denoising autoencoder has the spread of pixels from 0 to 16, though they are between -1 and 1."""
    batch = training.batch

    def noisy(number: int) -> tuple[Tensor, Tensor]:
        """The batch under a noise of spread 4."""
        x, y = batch(number)
        return x + 4 * torch.randn(x.shape, generator=generator(number)), y

    training.batch = noisy


# Fine-tuning with a rate of its own for the pretrained part


class Pretrained(nn.Module):
    """A body with batch normalisation, and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(1, 16, 3, 1, 1),
            nn.BatchNorm2d(16),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Conv2d(16, 32, 3, 1, 1),
            nn.BatchNorm2d(32),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Flatten(),
        )
        self.head = nn.Linear(128, 10)

    def forward(self, x: Tensor) -> Tensor:
        """Returns the logits."""
        logits: Tensor = self.head(self.body(x))
        return logits


@functools.cache
def pretrained(seed: int) -> dict[str, Tensor]:
    """Returns the weights of a network that learned the first half of the digits."""
    torch.manual_seed(seed)
    x, y, _, _ = digits()
    net, batch = Pretrained(), batches(x[:900], y[:900], 32, seed)
    optimizer = torch.optim.Adam(net.parameters(), lr=3e-3)
    for number in range(80):
        optimizer.zero_grad()
        classes(net, *batch(number)).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
    return net.state_dict()


def discriminative(parameters: Iterable[nn.Parameter], rate: float, body: nn.Module, share: float = 0.03) -> Optimizer:
    """Adam with a small share of the rate for the body."""
    given = list(parameters)
    slow = {id(parameter) for parameter in body.parameters()}
    groups = [
        {"params": [one for one in given if id(one) in slow], "lr": share * rate, "initial_lr": share * rate},
        {"params": [one for one in given if id(one) not in slow], "lr": rate, "initial_lr": rate},
    ]
    return torch.optim.Adam([group for group in groups if group["params"]], lr=rate)


def faded(x: Tensor) -> Tensor:
    """The photographs that are fine-tuned on: paler, brighter and turned."""
    return 0.6 * x.transpose(2, 3) + 0.4


@later(learns=0.85, chance=0.1)
def fine_tuned_digits(seed: int) -> Training:
    """A new head and, at a thirtieth of the rate, a pretrained body, on few images of another kind."""
    x, y, test_x, test_y = digits()
    weights = pretrained(seed)
    torch.manual_seed(seed)
    net = Pretrained()
    net.load_state_dict(weights)
    net.head = nn.Linear(128, 10)
    score = partial(accuracy, x=faded(test_x), y=test_y)
    batch = batches(faded(x[900:1200]), y[900:1200], 32, seed)
    return Training(net, batch, classes, score, rate=3e-3, optimizer=partial(discriminative, body=net.body), steps=100)


@fault(LATER["fine-tuned-digits"].faults, "optimisation", "rate-too-low", ("", "head"))
def layer_wise_decay_twice(training: Training) -> None:
    """The decay of the rate by layer is applied to the new head too, and once more to the body."""
    training.rate *= 0.01


@fault(LATER["fine-tuned-digits"].faults, "optimisation", ("stale-optimizer", "not-in-optimizer"), "head")
def head_replaced_after_the_optimizer(training: Training) -> None:
    """The optimizer was made before the head was replaced by a new one."""
    net: Any = training.net
    make = training.optimizer

    def too_early(parameters: Iterable[nn.Parameter], rate: float) -> Optimizer:
        """An optimizer of the old head."""
        optimizer = make(parameters, rate)
        net.head = nn.Linear(128, 10)
        return optimizer

    training.optimizer = too_early


@fault(LATER["fine-tuned-digits"].faults, "architecture", "frozen", ("", "head", "body"))
def frozen_after_the_new_head(training: Training) -> None:
    """All parameters were frozen after the head was replaced, so that the new head is frozen too."""
    for parameter in training.net.parameters():
        parameter.requires_grad_(False)
    training.parameters = lambda net: net.parameters()


@fault(LATER["fine-tuned-digits"].faults, "state", ("statistics-frozen", "normalisation"), ("body.1", "body.5", "body"))
def old_statistics_kept(training: Training) -> None:
    """The momentum of batch normalisation is zero, to keep the pretrained statistics, but it trains by those of the batch."""
    net: Any = training.net
    net.body[1].momentum = net.body[5].momentum = 0.0


@fault(LATER["fine-tuned-digits"].faults, "data", "labels-constant")
def labels_of_one_folder(training: Training) -> None:
    """The labels are read from the name of the folder above, which is the same for all images."""
    relabelled(training, lambda x, y: torch.full_like(y, 3))


@fault(LATER["fine-tuned-digits"].faults, "state", ("batch-of-one", "normalisation"), ("", "body.1", "body.5", "body"))
def one_image_fits_the_memory(training: Training) -> None:
    """Batches of one image are trained on, for want of memory, through batch normalisation."""
    batch = training.batch

    def single(number: int) -> tuple[Tensor, Tensor]:
        """The first image of the batch."""
        x, y = batch(number)
        return x[:1], y[:1]

    training.batch = single


# A character-level GRU that names the language of a name

SOUNDS = (
    ("ka ki ko mi na ri to ya shi mo", "ta ka ra mi ko"),
    ("an el ia ro ni lo ma co ri ti", "ni no li ri ti"),
    ("iv ev ol ga ni ko va sha mi ro", "ov in ev sky ko"),
    ("mac don al is wen ri ly con or ke", "ley an ell ton son"),
    ("sch be ke mu ll fr ie ha rt wo", "er mann el berg rt"),
)


def names(count: int, seed: int) -> tuple[Tensor, Tensor]:
    """Returns names of letters 1 to 26, padded at the end with 0, and which of five languages they are of."""
    random = generator(seed)
    language = torch.randint(5, (count,), generator=random)
    letters = torch.zeros(count, 18, dtype=torch.long)
    for row, which in enumerate(language.tolist()):
        several = int(torch.randint(1, 4, (), generator=random))
        picks = torch.randint(10, (several + 1,), generator=random).tolist()
        inner, ends = (text.split() for text in SOUNDS[which])
        other = SOUNDS[int(torch.randint(5, (), generator=random))][0].split()
        name = "".join([other[picks[0]], *(inner[pick] for pick in picks[1:-1]), ends[picks[-1] % 5]])
        letters[row, : len(name)] = torch.tensor([ord(letter) - 96 for letter in name])
    return letters, language


class NameReader(nn.Module):
    """A GRU over letters, and a linear layer on its state at the last letter."""

    def __init__(self) -> None:
        super().__init__()
        self.letters = nn.Embedding(27, 16)
        self.gru = nn.GRU(16, 48, batch_first=True)
        self.head = nn.Linear(48, 5)

    def forward(self, letters: Tensor) -> Tensor:
        """Returns the logits."""
        states, _ = self.gru(self.letters(letters))
        last = (letters > 0).sum(1) - 1
        logits: Tensor = self.head(states[torch.arange(len(letters)), last])
        return logits


@later(learns=0.7, chance=0.2)
def language_of_names(seed: int) -> Training:
    """A GRU on the letters of names."""
    torch.manual_seed(seed)
    (x, y), (test_x, test_y) = names(3000, 1), names(800, 2)
    return Training(NameReader(), batches(x, y, 64, seed), classes, partial(accuracy, x=test_x, y=test_y), rate=5e-3, clip=5.0)


@fault(LATER["language-of-names"].faults, "architecture", "wrong-axis", ("gru", ""))
def gru_over_the_batch(training: Training) -> None:
    """The GRU was made without batch_first, so that it reads from name to name."""
    net: Any = training.net
    net.gru.batch_first = False


@fault(LATER["language-of-names"].faults, "optimisation", ("wrong-loss", "output-activation"))
def likelihood_of_raw_outputs(training: Training) -> None:
    """The negative log likelihood is taken of the outputs, of which no logarithm of a softmax was taken."""
    training.loss = lambda net, x, y: F.nll_loss(net(x), y)


@fault(LATER["language-of-names"].faults, "optimisation", "rate-too-low")
def rate_of_the_tutorial(training: Training) -> None:
    """The rate of 0.005 of plain SGD was for single names, of which each made a step, and a hundred thousand of them."""
    training.optimizer = lambda parameters, rate: torch.optim.SGD(parameters, lr=rate)


@fault(LATER["language-of-names"].faults, "data", ("inputs-constant",), ("letters", ""))
def letters_looked_up_as_capitals(training: Training) -> None:
    """The alphabet holds capitals only, so that all letters but the first are the same unknown one."""

    def unknown(letters: Tensor) -> Tensor:
        """The names with one letter for all that follow the first."""
        others = torch.where(letters > 0, 26, 0)
        others[:, 0] = letters[:, 0]
        return others

    preprocessed(training, unknown)


@fault(LATER["language-of-names"].faults, "architecture", ("mask", "wrong-axis"), ("", "gru", "head"))
def state_after_the_first_letter(training: Training) -> None:
    """The letters are counted over the names of the batch and not along each, and the place is cut to what there is."""
    net: Any = training.net

    def forward(self: Any, letters: Tensor) -> Tensor:
        """Returns the logits of the state at a place that depends on the row."""
        states, _ = self.gru(self.letters(letters))
        counts = (letters > 0).sum(0) - 1
        place = counts[torch.arange(len(letters)).clamp(max=17)].clamp(0, 17)
        logits: Tensor = self.head(states[torch.arange(len(letters)), place])
        return logits

    net.forward = types.MethodType(forward, net)


# A small GPT with tied weights and accumulated gradients


def counted(count: int, seed: int) -> Tensor:
    """Returns sequences of 16 tokens of 24 that go on by 1, 2, 3 or 5."""
    random = generator(seed)
    start = torch.randint(24, (count, 1), generator=random)
    step = torch.tensor([1, 2, 3, 5])[torch.randint(4, (count, 1), generator=random)]
    return (start + step * torch.arange(16)) % 24


class CausalAttention(nn.Module):
    """Attention of several heads to what came before."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.causal = True
        self.scale = (width // heads) ** -0.5

    def forward(self, x: Tensor) -> Tensor:
        """Returns what each place gathers."""
        q, k, v = (part.unflatten(2, (self.heads, -1)).transpose(1, 2) for part in self.qkv(x).chunk(3, 2))
        scores = q @ k.transpose(2, 3) * self.scale
        if self.causal:
            scores = scores.masked_fill(torch.ones_like(scores).triu(1).bool(), -math.inf)
        gathered: Tensor = self.out((scores.softmax(3) @ v).transpose(1, 2).flatten(2))
        return gathered


class DecoderBlock(nn.Module):
    """Attention and a perceptron, each behind a layer normalisation."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention = CausalAttention(width, heads)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        """Returns the states after the block."""
        x = x + self.attention(self.norm1(x))
        changed: Tensor = x + self.mlp(self.norm2(x))
        return changed


class SmallGPT(nn.Module):
    """Two blocks between an embedding and a head of the same weights."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(24, 48), nn.Embedding(16, 48)
        self.blocks = nn.Sequential(DecoderBlock(48, 4), DecoderBlock(48, 4))
        self.norm, self.head = nn.LayerNorm(48), nn.Linear(48, 24, bias=False)
        nn.init.normal_(self.tokens.weight, std=0.02)
        nn.init.normal_(self.positions.weight, std=0.02)
        self.head.weight = self.tokens.weight

    def forward(self, tokens: Tensor) -> Tensor:
        """Returns the logits of each next token."""
        x = self.tokens(tokens) + self.positions(torch.arange(tokens.shape[1]))
        logits: Tensor = self.head(self.norm(self.blocks(x)))
        return logits


def continued(net: nn.Module, x: Tensor, y: Tensor) -> float:
    """The share of tokens that are right when the rest of y is written after x."""
    start = x.shape[1]
    while x.shape[1] < y.shape[1]:
        x = torch.cat((x, net(x)[:, -1:].argmax(2)), 1)
    return float((x[:, start:] == y[:, start:]).float().mean())


@later(learns=0.6, chance=0.05)
def tied_gpt(seed: int) -> Training:
    """A small GPT whose head is its embedding, by AdamW with two batches a step; it is scored by what it writes."""
    torch.manual_seed(seed)
    texts, test = counted(4000, 1), counted(200, 2)
    score = partial(continued, x=test[:, :4], y=test[:, :12])
    batch = batches(texts[:, :-1], texts[:, 1:], 24, seed)
    return Training(
        SmallGPT(), batch, classes, score, optimizer=adamw, rate=6e-3, schedule=warm_up, clip=1.0, micro_batches=2, steps=200
    )


@fault(LATER["tied-gpt"].faults, "data", ("labels-do-not-fit",))
def labels_are_the_inputs(training: Training) -> None:
    """The labels are the inputs, as for models that shift them, but this one does not."""
    relabelled(training, lambda x, y: x)


@fault(LATER["tied-gpt"].faults, "architecture", ("attention-scale", "saturation"), ("blocks.0.attention", "blocks.1.attention"))
def scores_multiplied_by_the_width(training: Training) -> None:
    """The scores of attention are multiplied by the width of a head where they should be divided by its root."""
    net: Any = training.net
    for block in net.blocks:
        block.attention.scale = 48.0


@fault(LATER["tied-gpt"].faults, "architecture", ("wrong-axis", "normalisation"), ("norm", "blocks.0.norm1", "blocks.1.norm1"))
def normalised_over_time(training: Training) -> tuple[str, ...]:
    """A normalisation written by hand takes mean and spread along the text, so that it tells of what comes."""
    net: Any = training.net

    def over_time(self: Any, x: Tensor) -> Tensor:
        """Returns the states normalised over their places."""
        mean, spread = x.mean(1, keepdim=True), x.std(1, keepdim=True, unbiased=False)
        made: Tensor = self.weight * (x - mean) / (spread + 1e-5) + self.bias
        return made

    places = [name for name, module in net.named_modules() if isinstance(module, nn.LayerNorm)]
    for place in places:
        norm = net.get_submodule(place)
        norm.forward = types.MethodType(over_time, norm)
    return tuple(places)


@fault(LATER["tied-gpt"].faults, "optimisation", ("no-steps", "lost-updates"))
def accumulation_never_full(training: Training) -> None:
    """A step is made when the count of batches leaves the rest 2 by 2, which it never does, but for a remainder at the end."""
    make = training.optimizer

    def hardly_ever(parameters: Iterable[nn.Parameter], rate: float) -> Optimizer:
        """An optimizer whose step is made once in a hundred."""
        optimizer: Any = make(parameters, rate)
        step, calls = optimizer.step, iter(range(10**9))
        optimizer.step = lambda *given: step(*given) if next(calls) % 100 == 99 else None
        made: Optimizer = optimizer
        return made

    training.optimizer = hardly_ever


@fault(LATER["tied-gpt"].faults, "architecture", "mask", ("blocks.0.attention", "blocks.1.attention", ""))
def mask_of_what_is_kept(training: Training) -> None:
    """The lower triangle, which should be kept, is what is filled, with a number so large that nothing becomes NaN."""
    net: Any = training.net

    def forward(self: Any, x: Tensor) -> Tensor:
        """Returns what each place gathers of what follows."""
        q, k, v = (part.unflatten(2, (self.heads, -1)).transpose(1, 2) for part in self.qkv(x).chunk(3, 2))
        scores = q @ k.transpose(2, 3) * self.scale
        scores = scores.masked_fill(torch.ones_like(scores).tril().bool(), -1e9)
        gathered: Tensor = self.out((scores.softmax(3) @ v).transpose(1, 2).flatten(2))
        return gathered

    for block in net.blocks:
        block.attention.forward = types.MethodType(forward, block.attention)


# A transformer encoder that classifies time series, in bfloat16


def signals(count: int, seed: int) -> tuple[tuple[Tensor, Tensor], Tensor]:
    """Returns series of two sensors with where they are padded, and which of four shapes they have."""
    random = generator(seed)
    shape = torch.randint(4, (count,), generator=random)
    length = torch.randint(13, 20, (count, 1), generator=random)
    time = torch.arange(20) / length
    speed, phase = 1.5 + 0.5 * torch.rand(count, 1, generator=random), 6.28 * torch.rand(count, 1, generator=random)
    up = torch.sin(phase + 6.28 * speed * time.square() * 1.5)
    down = torch.sin(phase + 6.28 * speed * (1 - time).square() * 1.5)
    steady = torch.sin(phase + 6.28 * speed * time * 1.5)
    fading = steady * torch.exp(-3 * time)
    first = torch.stack((up, down, steady, fading), 1)[torch.arange(count), shape]
    x = torch.stack((first, first.roll(1, 1)), 2) + 0.15 * torch.randn(count, 20, 2, generator=random)
    padded = torch.arange(20) >= length
    return (x.masked_fill(padded[:, :, None], 0.0), padded), shape


class SignalEncoder(nn.Module):
    """A projection, learned positions, a transformer encoder, and the mean over what is no padding."""

    def __init__(self) -> None:
        super().__init__()
        self.project = nn.Linear(2, 32)
        self.positions = nn.Embedding(20, 32)
        layer = nn.TransformerEncoderLayer(32, 4, 64, dropout=0.0, batch_first=True, norm_first=True)
        self.encoder = nn.TransformerEncoder(layer, 1, enable_nested_tensor=False)
        self.head = nn.Linear(32, 4)

    def forward(self, given: tuple[Tensor, Tensor]) -> Tensor:
        """Returns the logits."""
        x, padded = given
        states = self.encoder(self.project(x) + self.positions.weight, src_key_padding_mask=padded)
        kept = (~padded)[:, :, None].float()
        logits: Tensor = self.head((states * kept).sum(1) / kept.sum(1))
        return logits


@later(learns=0.75, chance=0.25)
def autocast_signals(seed: int) -> Training:
    """A transformer encoder on series of two sensors, in bfloat16 autocast, with warm-up and clipping."""
    torch.manual_seed(seed)
    (x, y), (test_x, test_y) = signals(3000, 1), signals(600, 2)
    score = partial(accuracy, x=test_x, y=test_y)
    return Training(
        SignalEncoder(),
        batches(x, y, 32, seed),
        classes,
        score,
        rate=5e-3,
        optimizer=adamw,
        schedule=warm_up,
        clip=1.0,
        autocast=True,
        steps=200,
    )


@fault(LATER["autocast-signals"].faults, "architecture", ("mask",), ("encoder", "", "encoder.layers.0.self_attn"))
def padding_is_what_is_kept(training: Training) -> None:
    """The mask says True where there is a signal, so that only the padding is attended to and averaged."""
    preprocessed(training, lambda x: (x[0], ~x[1]))


@fault(LATER["autocast-signals"].faults, "data", ("inputs-not-normalised",), ("project", ""))
def pressure_in_pascal(training: Training) -> None:
    """The sensors tell a pressure in pascal, a small wave on a hundred thousand, which bfloat16 rounds away."""
    preprocessed(training, lambda x: (x[0] * 10 + 101_325.0, x[1]))


@fault(LATER["autocast-signals"].faults, "optimisation", "epsilon")
def epsilon_for_half_precision(training: Training) -> None:
    """The epsilon of AdamW was raised to 0.1 for fear of the low precision."""
    training.optimizer = partial(adamw, eps=0.1)


@fault(LATER["autocast-signals"].faults, "optimisation", ("clipping", "loss-scale"))
def clipped_before_unscaling(training: Training) -> None:
    """Plain SGD's gradients are clipped to 1 while they are still scaled by 65,536, and unscaled after."""
    training.clip = 1 / 65_536
    training.optimizer = partial(momentum_sgd, decay=0.0)
    training.rate = 0.1


@fault(LATER["autocast-signals"].faults, "optimisation", ("rate-too-high",))
def rate_of_plain_descent(training: Training) -> None:
    """The rate of 0.3 was kept from SGD when the optimizer became AdamW."""
    training.rate = 0.3


@fault(LATER["autocast-signals"].faults, "architecture", "dropout", ("encoder", "encoder.layers.0"))
def width_given_as_dropout(training: Training) -> tuple[str, ...]:
    """The share to keep, of 0.95, was given to every dropout of the encoder as the share to drop."""
    names = [name for name, module in training.net.named_modules() if isinstance(module, nn.Dropout)]
    for name in names:
        drop: Any = training.net.get_submodule(name)
        drop.p = 0.95
    return ("encoder", "encoder.layers.0", *names)


# A translator by nn.Transformer


def sentences(count: int, seed: int) -> tuple[Tensor, Tensor]:
    """Returns pairs of adjective and noun in one language, and noun and adjective in the other, from 1 to the end 2."""
    random = generator(seed)
    adjectives = torch.randint(3, 11, (count, 3), generator=random)
    nouns = torch.randint(11, 19, (count, 3), generator=random)
    dictionary = torch.cat((torch.arange(3), 3 + torch.randperm(16, generator=generator(9))))
    source = torch.stack((adjectives, nouns), 2).flatten(1)
    target = dictionary[torch.stack((nouns, adjectives), 2).flatten(1)]
    ends = torch.ones(count, 1, dtype=torch.long)
    return source, torch.cat((ends, target, 2 * ends), 1)


class WordTranslator(nn.Module):
    """Embeddings of both languages, nn.Transformer, and a linear layer."""

    def __init__(self) -> None:
        super().__init__()
        self.source, self.target = nn.Embedding(19, 32), nn.Embedding(19, 32)
        self.places = nn.Embedding(8, 32)
        self.transformer = nn.Transformer(32, 4, 1, 1, 64, dropout=0.0, batch_first=True)
        self.generate = nn.Linear(32, 19)
        self.causal = True

    def forward(self, given: tuple[Tensor, Tensor]) -> Tensor:
        """Returns the logits of each next word."""
        source, target = given
        length = target.shape[1]
        mask = torch.ones(length, length).triu(1).bool() if self.causal else None
        read = self.source(source) + self.places.weight[: source.shape[1]]
        written = self.target(target) + self.places.weight[:length]
        logits: Tensor = self.generate(self.transformer(read, written, tgt_mask=mask))
        return logits


def translated(net: nn.Module, x: Tensor, y: Tensor) -> float:
    """The share of right words of translations that are written word by word."""
    said = y[:, :1]
    while said.shape[1] < y.shape[1]:
        said = torch.cat((said, net((x, said))[:, -1:].argmax(2)), 1)
    return float((said[:, 1:-1] == y[:, 1:-1]).float().mean())


@later(learns=0.6, chance=0.06)
def phrase_translator(seed: int) -> Training:
    """A translator of phrases by nn.Transformer, with the words before given, scored by greedy translations."""
    torch.manual_seed(seed)
    (x, y), (test_x, test_y) = sentences(4000, 1), sentences(300, 2)
    batch = batches((x, y[:, :-1]), y[:, 1:], 64, seed)
    return Training(
        WordTranslator(), batch, classes, partial(translated, x=test_x, y=test_y), rate=5e-3, schedule=warm_up, steps=250
    )


@fault(LATER["phrase-translator"].faults, "architecture", ("mask",), ("transformer", "transformer.decoder", ""))
def decoder_without_its_mask(training: Training) -> None:
    """No mask was given for the target, so that the decoder sees the word that it should say."""
    net: Any = training.net
    net.causal = False


@fault(LATER["phrase-translator"].faults, "architecture", "wrong-axis", ("", "source", "transformer.encoder"))
def viewed_instead_of_transposed(training: Training) -> None:
    """The source was brought to the shape of places by sentences with a view, which mixes the words of sentences."""
    net: Any = training.net
    before = net.forward

    def forward(self: nn.Module, given: tuple[Tensor, Tensor]) -> Tensor:
        """Returns the logits of scrambled sources."""
        source, target = given
        logits: Tensor = before((source.reshape(source.shape[1], -1).t(), target))
        return logits

    net.forward = types.MethodType(forward, net)


@fault(LATER["phrase-translator"].faults, "optimisation", ("schedule", "rate-too-low"))
def rate_of_noam(training: Training) -> None:
    """The schedule of the paper, with its 4,000 steps of warm-up, on a training of 250."""
    training.rate = 1.0
    training.schedule = lambda step, steps: 512**-0.5 * min((step + 1) ** -0.5, (step + 1) * 4000**-1.5)


@fault(LATER["phrase-translator"].faults, "architecture", ("wrong-axis", "output-activation"), ("generate", "generate.1", ""))
def log_softmax_over_places(training: Training) -> None:
    """The generator ends in a log_softmax over the places of the sentence, and the likelihood is taken of it."""
    net: Any = training.net
    net.generate = nn.Sequential(net.generate, nn.LogSoftmax(1))
    training.loss = lambda net, x, y: F.nll_loss(net(x).flatten(0, 1), y.flatten())


@fault(LATER["phrase-translator"].faults, "architecture", "never-ran", ("source", "transformer.encoder", ""))
def memory_of_the_target(training: Training) -> None:
    """The target was given to the transformer as source too, a slip of two names that are alike."""
    net: Any = training.net

    def forward(self: Any, given: tuple[Tensor, Tensor]) -> Tensor:
        """Returns logits that do not depend on the source."""
        _, target = given
        length = target.shape[1]
        mask = torch.ones(length, length).triu(1).bool()
        written = self.target(target) + self.places.weight[:length]
        states = self.transformer(written, written, src_mask=mask, tgt_mask=mask, memory_mask=mask)
        logits: Tensor = self.generate(states)
        return logits

    net.forward = types.MethodType(forward, net)


@fault(LATER["phrase-translator"].faults, "data", ("labels-do-not-fit",))
def one_empty_line_dropped(training: Training) -> None:
    """An empty line was dropped from the file of one language only, so that each sentence has the translation of the next."""
    batch = training.batch

    def misaligned(number: int) -> tuple[Any, Tensor]:
        """The batch with the sources moved by one."""
        (source, target), y = batch(number)
        return (source.roll(1, 0), target), y

    training.batch = misaligned


# A BiLSTM of sentiment on packed sentences


def reviews(count: int, seed: int) -> tuple[tuple[Tensor, Tensor], Tensor]:
    """Returns sentences padded with 0 and their lengths, and whether more of their words praise, with `not` before some."""
    random = generator(seed)
    words = torch.randint(2, 60, (count, 16), generator=random)
    negation = (torch.rand(count, 16, generator=random) < 0.15) & (torch.arange(16) < 15)
    words = torch.where(negation, 1, words)
    length = torch.randint(5, 17, (count,), generator=random)
    words = words.masked_fill(torch.arange(16) >= length[:, None], 0)
    tone = ((words >= 2) & (words < 17)).float() - ((words >= 17) & (words < 32)).float()
    tone[:, 1:] = torch.where(words[:, :-1] == 1, -tone[:, 1:], tone[:, 1:])
    return (words, length), (tone.sum(1) + 0.5 * tone[:, 0] > 0).float()


class Sentiment(nn.Module):
    """An embedding, a bidirectional LSTM on packed sentences, and a linear layer on both last states."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(60, 24, padding_idx=0)
        self.lstm = nn.LSTM(24, 32, batch_first=True, bidirectional=True)
        self.head = nn.Linear(64, 1)

    def forward(self, given: tuple[Tensor, Tensor]) -> Tensor:
        """Returns a column of logits."""
        words, length = given
        packed = pack_padded_sequence(self.embed(words), length, batch_first=True, enforce_sorted=False)
        _, (state, _) = self.lstm(packed)
        logits: Tensor = self.head(torch.cat((state[0], state[1]), 1))
        return logits


@later(learns=0.75, chance=0.5)
def packed_sentiment(seed: int) -> Training:
    """A bidirectional LSTM on packed sentences, with binary cross entropy."""
    torch.manual_seed(seed)
    (x, y), (test_x, test_y) = reviews(4000, 1), reviews(800, 2)
    score = partial(caught, x=test_x, y=test_y)
    return Training(Sentiment(), batches(x, y, 64, seed), spam_loss, score, rate=1e-2, clip=1.0, steps=200)


@fault(LATER["packed-sentiment"].faults, "data", "labels-do-not-fit")
def sorted_by_length_without_labels(training: Training) -> None:
    """The sentences are sorted by length to be packed, and the labels are not."""
    batch = training.batch

    def by_length(number: int) -> tuple[Any, Tensor]:
        """The batch with its sentences in another order."""
        (words, length), y = batch(number)
        order = length.argsort(descending=True, stable=True)
        return (words[order], length[order]), y

    training.batch = by_length


@fault(LATER["packed-sentiment"].faults, "architecture", ("wrong-axis",), ("", "lstm", "head"))
def directions_joined_by_a_view(training: Training) -> None:
    """The states of both directions are joined by a view to the size of the batch, which mixes sentences."""
    net: Any = training.net

    def forward(self: Any, given: tuple[Tensor, Tensor]) -> Tensor:
        """Returns the logits of states of two sentences each."""
        words, length = given
        packed = pack_padded_sequence(self.embed(words), length, batch_first=True, enforce_sorted=False)
        _, (state, _) = self.lstm(packed)
        logits: Tensor = self.head(state.contiguous().view(len(words), -1))
        return logits

    net.forward = types.MethodType(forward, net)


@fault(LATER["packed-sentiment"].faults, "architecture", ("mask", "inputs-constant"), ("", "lstm", "head"))
def last_column_of_the_padded(training: Training) -> None:
    """The output at the last place is read after unpacking, which is nought for all but the longest sentences."""
    net: Any = training.net

    def forward(self: Any, given: tuple[Tensor, Tensor]) -> Tensor:
        """Returns the logits of the output at the end of the padding."""
        words, length = given
        packed = pack_padded_sequence(self.embed(words), length, batch_first=True, enforce_sorted=False)
        states, _ = pad_packed_sequence(self.lstm(packed)[0], batch_first=True)
        logits: Tensor = self.head(states[:, -1])
        return logits

    net.forward = types.MethodType(forward, net)


@fault(LATER["packed-sentiment"].faults, "optimisation", ("detached", "wrong-loss"))
def rounded_before_the_loss(training: Training) -> None:
    """The probabilities are rounded to labels before the loss, which leaves no gradient."""

    def rounded(net: nn.Module, x: Any, y: Tensor) -> Tensor:
        """The squared error of labels."""
        return F.mse_loss(torch.round(torch.sigmoid(net(x).squeeze(1))), y)

    training.loss = rounded


@fault(LATER["packed-sentiment"].faults, "architecture", "bottleneck", ("embed", "lstm", ""))
def sizes_of_a_quick_test(training: Training) -> None:
    """The embedding of one number a word and the LSTM of two of state, meant for a quick test of the shapes, were left so."""
    net: Any = training.net
    net.embed, net.lstm, net.head = (
        nn.Embedding(60, 1, padding_idx=0),
        nn.LSTM(1, 2, batch_first=True, bidirectional=True),
        nn.Linear(4, 1),
    )


@fault(LATER["packed-sentiment"].faults, "optimisation", ("ascent", "wrong-loss"))
def accuracy_descended(training: Training) -> None:
    """What is minimised is the mean probability of the right label, not its negative."""

    def agreement(net: nn.Module, x: Any, y: Tensor) -> Tensor:
        """The mean probability of the right labels."""
        p = torch.sigmoid(net(x).squeeze(1))
        return (y * p + (1 - y) * (1 - p)).mean()

    training.loss = agreement
