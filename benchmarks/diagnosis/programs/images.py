"""Programs on images: convolutions, a deep residual network, pairs, a frozen base, and low precision."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import SGD, Optimizer

from benchmarks.diagnosis.programs.data import accuracy, batches, digits, generator
from benchmarks.diagnosis.programs.vectors import adamw, cross_entropy, momentum, warmup_cosine
from benchmarks.diagnosis.training import Training, fault, program


def on_digits(net: nn.Module, seed: int, size: int = 64, **others: Any) -> Training:
    """Returns the training of a classifier of digits."""
    train_x, train_y, test_x, test_y = digits()
    return Training(net, batches(train_x, train_y, size, seed), cross_entropy, partial(accuracy, x=test_x, y=test_y), **others)


class Cnn(nn.Module):
    """Three convolutions with batch normalisation, a mean over places and a linear layer."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = self.stage(1, 16)
        self.down = self.stage(16, 32, stride=2)
        self.last = self.stage(32, 32)
        self.classify = nn.Linear(32, 10)

    @staticmethod
    def stage(inputs: int, outputs: int, stride: int = 1) -> nn.Sequential:
        return nn.Sequential(
            nn.Conv2d(inputs, outputs, 3, stride, padding=1, bias=False), nn.BatchNorm2d(outputs), nn.ReLU(inplace=True)
        )

    def forward(self, images: Tensor) -> Tensor:
        x = self.last(self.down(self.stem(images)))
        return self.classify(x.mean((2, 3)))


@program(learns=0.93, chance=0.1)
def cnn(seed: int) -> Training:
    """A CNN with batch normalisation, by SGD with momentum."""
    torch.manual_seed(seed)
    return on_digits(Cnn(), seed, rate=0.2, optimizer=momentum, schedule=warmup_cosine, steps=120)


@fault(cnn.faults, "architecture", ("dead-units", "initialisation"), ("down", "down.1", "down.2"))
def channels_dead(training: Training) -> None:
    """The shift of a normalisation is so negative that only one channel fires."""
    nn.init.constant_(training.net.down[1].bias, -8.0)
    with torch.no_grad():
        training.net.down[1].bias[0] = 0.0


@fault(cnn.faults, "state", ("statistics-frozen", "normalisation"), ("stem", "stem.1", "down", "down.1", "last", "last.1"))
def running_statistics_stay(training: Training) -> None:
    """The running statistics are updated with a momentum of zero, so evaluation uses those of the start."""
    for module in training.net.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.momentum = 0.0


class Mixing(Cnn):
    """A CNN which reshapes where it should transpose."""

    def forward(self, images: Tensor) -> Tensor:
        x = self.last(self.down(self.stem(images)))
        return self.classify(x.reshape(32, len(images), -1).mean(-1).t())


@fault(cnn.faults, "architecture", "wrong-axis", ("", "last", "last.2", "classify"))
def images_mixed(training: Training) -> None:
    """Channels and images are told apart by a reshape, which mixes the images of a batch."""
    training.net.__class__ = Mixing


@fault(cnn.faults, "architecture", "normalisation", ("last", "last.1", "last.2", "classify"))
def large_epsilon(training: Training) -> None:
    """The epsilon of the last normalisation is so large that its outputs are nearly zero."""
    training.net.last[1].eps = 1e6


class Residual(nn.Module):
    """A residual block: group normalisation, ReLU and convolution, twice, the second from zero."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.GroupNorm(4, channels), nn.GroupNorm(4, channels)
        self.conv1 = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.conv2 = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        for conv in (self.conv1, self.conv2):
            nn.init.kaiming_normal_(conv.weight)

    def forward(self, x: Tensor) -> Tensor:
        y = self.conv1(F.relu(self.norm1(x)))
        return x + 0.2 * self.conv2(F.relu(self.norm2(y)))


class ResNet(nn.Module):
    """A stem, 25 residual blocks of two convolutions at a quarter of the places, and a linear layer."""

    def __init__(self, channels: int = 16, blocks: int = 25) -> None:
        super().__init__()
        self.stem = nn.Conv2d(1, channels, 4, stride=2, padding=1)
        self.blocks = nn.Sequential(*(Residual(channels) for _ in range(blocks)))
        self.norm = nn.GroupNorm(4, channels)
        self.classify = nn.Linear(channels * 16, 10)

    def forward(self, images: Tensor) -> Tensor:
        x = self.blocks(self.stem(images))
        return self.classify(F.relu(self.norm(x)).flatten(1))


@program(learns=0.9, chance=0.1)
def resnet(seed: int) -> Training:
    """A residual network of 50 convolutions with group normalisation."""
    torch.manual_seed(seed)
    return on_digits(ResNet(), seed, size=32, rate=2e-3, optimizer=adamw, schedule=warmup_cosine, steps=100, clip=5.0)


class Plain(Residual):
    """A block without a skip."""

    def forward(self, x: Tensor) -> Tensor:
        return self.conv2(F.relu(self.norm2(self.conv1(F.relu(self.norm1(x))))))


@fault(resnet.faults, "architecture", ("vanishing-gradients", "exploding-gradients"))
def no_skips(training: Training) -> None:
    """The blocks lack their skips."""
    for block in training.net.blocks:
        block.__class__ = Plain


class DeadTrunk(Residual):
    """A block whose ReLU is applied after the sum, with a shift that nothing survives."""

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(super().forward(x) - 20)


@fault(resnet.faults, "architecture", "dead-units", ("blocks.10", "blocks.10.conv2", "blocks.11", "blocks.11.norm1"))
def trunk_rectified(training: Training) -> None:
    """A block shifts and rectifies the trunk itself, so nothing passes."""
    training.net.blocks[10].__class__ = DeadTrunk


class Averaging(Residual):
    """A block which passes on the mean over channels and rows."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).mean((1, 2), keepdim=True).expand_as(x)


@fault(resnet.faults, "architecture", ("wrong-axis", "bottleneck"), ("blocks.24", "blocks.24.conv2", "norm"))
def block_averages(training: Training) -> None:
    """The last block takes a mean over channels and rows, and leaves four numbers of an image."""
    training.net.blocks[24].__class__ = Averaging


class Encoder(nn.Module):
    """An embedding of images of unit length."""

    def __init__(self) -> None:
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv2d(1, 16, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(16, 32, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)
        )
        self.project = nn.Sequential(nn.Flatten(), nn.Linear(128, 64), nn.ReLU(), nn.Linear(64, 16))

    def forward(self, images: Tensor) -> Tensor:
        return F.normalize(self.project(self.features(images)), dim=-1)


class Siamese(nn.Module):
    """The distances of pairs of images, both by the same encoder."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = Encoder()

    def forward(self, pair: tuple[Tensor, Tensor]) -> Tensor:
        first, second = self.encoder(pair[0]), self.encoder(pair[1])
        return ((first - second).square().sum(-1) + 1e-8).sqrt()


def contrastive(net: nn.Module, pair: tuple[Tensor, Tensor], same: Tensor) -> Tensor:
    """Returns Hadsell's contrastive loss with a margin of 1."""
    distance = net(pair)
    return torch.where(same, distance.square(), (1 - distance).clamp(min=0).square()).mean()


def pairs(x: Tensor, y: Tensor, number: int, seed: int) -> tuple[tuple[Tensor, Tensor], Tensor]:
    """Returns pairs of images, and which are of the same digit: half of them."""
    random = generator(seed)
    first = torch.randint(len(x), (number,), generator=random)
    wish = torch.arange(number) % 2 == 0
    fits = (y[first][:, None] == y[None, :]) == wish[:, None]
    second = torch.multinomial(fits.float(), 1, generator=random).squeeze(1)
    return (x[first], x[second]), wish


def verification(net: nn.Module, pair: tuple[Tensor, Tensor], same: Tensor) -> float:
    """Returns the share of pairs which a distance of half the margin tells right."""
    return float(((net(pair) < 0.5) == same).float().mean())


@program(learns=0.85, chance=0.5)
def siamese(seed: int) -> Training:
    """A Siamese network: pairs of digits, contrastive loss."""
    torch.manual_seed(seed)
    train_x, train_y, test_x, test_y = digits()
    held_pair, held_same = pairs(test_x, test_y, 600, 1)
    pair, same = pairs(train_x, train_y, 6000, 2 + seed)
    return Training(
        Siamese(),
        batches(pair, same, 64, seed),
        contrastive,
        partial(verification, pair=held_pair, same=held_same),
        steps=150,
    )


@fault(
    siamese.faults, "architecture", ("dead-units", "initialisation"), ("encoder.project", "encoder.project.1", "encoder.project.2")
)
def projection_dead(training: Training) -> None:
    """The hidden units of the projection never fire, so all embeddings are the same."""
    nn.init.constant_(training.net.encoder.project[1].bias, -20.0)


@fault(siamese.faults, "data", ("labels-constant", "labels-do-not-fit"))
def only_equal_pairs(training: Training) -> None:
    """All pairs are labelled as of the same digit, so it is best to map all images to one point."""
    batch = training.batch

    def equal(number: int) -> tuple[Any, Any]:
        pair, same = batch(number)
        return pair, torch.ones_like(same)

    training.batch = equal


class WrongAxis(Encoder):
    """An encoder which normalises over the batch."""

    def forward(self, images: Tensor) -> Tensor:
        return F.normalize(self.project(self.features(images)), dim=0)


@fault(siamese.faults, "architecture", ("wrong-axis", "normalisation"), ("encoder", "encoder.project", "encoder.project.3"))
def normalised_over_batch(training: Training) -> None:
    """The embeddings are normalised over the batch, where each was to have unit length."""
    training.net.encoder.__class__ = WrongAxis


@fault(siamese.faults, "optimisation", "wrong-loss")
def terms_exchanged(training: Training) -> None:
    """The two terms of the loss are exchanged, so pairs of the same digit are moved apart."""
    training.loss = lambda net, pair, same: contrastive(net, pair, ~same)


class WithoutEpsilon(Siamese):
    """Distances whose root has no epsilon."""

    def forward(self, pair: tuple[Tensor, Tensor]) -> Tensor:
        return (self.encoder(pair[0]) - self.encoder(pair[1])).square().sum(-1).sqrt()


@fault(siamese.faults, "architecture", "nonfinite", ("", "encoder", "encoder.project", "encoder.project.3"))
def root_of_zero(training: Training) -> None:
    """The root of a distance has no epsilon, and a pair of an image and itself, which is drawn now and then, has no gradient."""
    training.net.__class__ = WithoutEpsilon


class FineTuned(nn.Module):
    """A base that is run without gradients and in evaluation mode, and a head."""

    def __init__(self, base: nn.Module, features: int) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        self.head = nn.Sequential(nn.Linear(features, 32), nn.ReLU(), nn.Linear(32, 5))
        self.train()

    def train(self, mode: bool = True) -> FineTuned:
        super().train(mode)
        self.base.eval()
        return self

    def forward(self, images: Tensor) -> Tensor:
        with torch.no_grad():
            features = self.base(images)
        return self.head(features)


def base() -> nn.Sequential:
    """Returns the convolutions that are trained in advance."""
    return nn.Sequential(
        *Cnn.stage(1, 16), *Cnn.stage(16, 32, stride=2), nn.Flatten(), nn.Linear(512, 48), nn.BatchNorm1d(48), nn.ReLU()
    )


def trainable(net: nn.Module) -> list[nn.Parameter]:
    """The parameters that are not frozen."""
    return [parameter for parameter in net.parameters() if parameter.requires_grad]


@program(learns=0.85, chance=0.2)
def fine_tuning(seed: int) -> Training:
    """A new head on a frozen base: the base learned the digits 0 to 4, the head learns 5 to 9."""
    torch.manual_seed(seed)
    train_x, train_y, test_x, test_y = digits()
    old, new, held = train_y < 5, train_y >= 5, test_y >= 5
    trained = base()
    classifier = nn.Sequential(trained, nn.Linear(48, 5))
    optimizer = SGD(classifier.parameters(), lr=0.05, momentum=0.9)
    batch = batches(train_x[old], train_y[old], 64, seed)
    for number in range(40):
        optimizer.zero_grad()
        cross_entropy(classifier, *batch(number)).backward()
        optimizer.step()
    return Training(
        FineTuned(trained, 48),
        batches(train_x[new], train_y[new] - 5, 64, seed),
        cross_entropy,
        partial(accuracy, x=test_x[held], y=test_y[held] - 5),
        parameters=trainable,
        rate=1e-2,
    )


@fault(fine_tuning.faults, "architecture", "frozen", ("", "head", "head.0", "head.2"))
def head_frozen_too(training: Training) -> None:
    """The base is frozen after the head was added to it, and with it the head."""
    training.net.requires_grad_(False)
    training.parameters = lambda net: net.parameters()


@fault(fine_tuning.faults, "state", ("stale-optimizer", "not-in-optimizer", "weights-overwritten"), ("head", "head.0", "head.2"))
def head_replaced(training: Training) -> None:
    """The optimizer is made before the head is replaced, and holds the parameters of the old one."""
    old = training.net.head
    training.net.head = nn.Sequential(nn.Linear(48, 32), nn.ReLU(), nn.Linear(32, 5))
    training.parameters = lambda net: old.parameters()


@fault(fine_tuning.faults, "architecture", ("dead-units", "inputs-constant"), ("base", "base.8", "base.9", "base.7"))
def features_dead(training: Training) -> None:
    """The base was damaged when it was loaded: the shift of its last normalisation is negative, and no feature fires."""
    nn.init.constant_(training.net.base[8].bias, -30.0)


@fault(fine_tuning.faults, "optimisation", ("not-in-optimizer",), ("head", "head.0", "head.2"))
def optimizer_of_base(training: Training) -> None:
    """The optimizer gets the parameters of the base, which is frozen, and not those of the head."""
    training.parameters = lambda net: net.base.parameters()


class Statistics(nn.Module):
    """A normalisation of each row, written by hand."""

    def forward(self, x: Tensor) -> Tensor:
        centred = x.float() - x.float().mean(-1, keepdim=True)
        return centred / (centred.square().mean(-1, keepdim=True) + 1e-5).sqrt()


class Mixed(nn.Module):
    """A small CNN with a normalisation written by hand, which runs in bfloat16 autocast."""

    def __init__(self) -> None:
        super().__init__()
        self.convolve = nn.Sequential(nn.Conv2d(1, 16, 3, stride=2, padding=1), nn.GELU(), nn.Flatten())
        self.hidden = nn.Linear(256, 64)
        self.norm = Statistics()
        self.classify = nn.Linear(64, 10)

    def forward(self, images: Tensor) -> Tensor:
        return self.classify(F.gelu(self.norm(self.hidden(self.convolve(images)))))


def sgd(parameters: Any, rate: float) -> Optimizer:
    """SGD with momentum and a decay of weights."""
    return SGD(parameters, lr=rate, momentum=0.9, weight_decay=1e-4)


@program(learns=0.9, chance=0.1)
def mixed_precision(seed: int) -> Training:
    """A small CNN in bfloat16 autocast."""
    torch.manual_seed(seed)
    return on_digits(Mixed(), seed, autocast=True, optimizer=sgd, rate=0.1, schedule=warmup_cosine)


class OneSweep(Statistics):
    """A normalisation whose variance is the mean of squares less the square of the mean, in the precision of what comes in."""

    def forward(self, x: Tensor) -> Tensor:
        mean = x.mean(-1, keepdim=True)
        return (x - mean).float() / (x.square().mean(-1, keepdim=True) - mean.square()).sqrt()


@fault(mixed_precision.faults, "architecture", ("nonfinite", "normalisation"), ("norm", "hidden", "classify"))
def variance_in_one_sweep(training: Training) -> None:
    """The variance is taken as a difference in bfloat16, which is negative where the mean is large, as a bias makes it."""
    training.net.norm.__class__ = OneSweep
    nn.init.constant_(training.net.hidden.bias, 10.0)


@fault(mixed_precision.faults, "architecture", ("outliers", "normalisation"), ("hidden", "norm", "classify"))
def one_large_feature(training: Training) -> None:
    """One feature is so large that the normalisation leaves nothing of the others."""
    with torch.no_grad():
        training.net.hidden.bias[5] = 2000.0


@fault(mixed_precision.faults, "architecture", "wrong-axis", ("convolve", "convolve.1", "hidden"))
def softmax_over_batch(training: Training) -> None:
    """The activation of the convolution is a softmax, over the batch at that."""
    training.net.convolve[1] = nn.Softmax(0)
