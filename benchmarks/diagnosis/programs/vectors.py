"""Programs on vectors: classifiers, regressions, several labels and several tasks."""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import SGD, AdamW, Optimizer, RMSprop

from benchmarks.diagnosis.programs.data import accuracy, batches, digits, generator, r2, split, table
from benchmarks.diagnosis.training import Training, fault, program


def cross_entropy(net: nn.Module, x: Any, y: Tensor) -> Tensor:
    """Returns the cross entropy of a network's logits."""
    return F.cross_entropy(net(x), y)


def squared_error(net: nn.Module, x: Any, y: Tensor) -> Tensor:
    """Returns the mean squared error of a network's outputs."""
    return F.mse_loss(net(x), y)


def warmup_cosine(step: int, steps: int) -> float:
    """The factor of the rate: it rises for a tenth of the steps, then falls along a cosine."""
    return min(1.0, (step + 1) / (0.1 * steps)) * 0.5 * (1 + math.cos(math.pi * step / steps))


@program(learns=0.93, chance=0.1)
def mlp(seed: int) -> Training:
    """An MLP on digits, written as an `nn.Sequential`."""
    torch.manual_seed(seed)
    train_x, train_y, test_x, test_y = digits()
    net = nn.Sequential(nn.Flatten(), nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 64), nn.ReLU(), nn.Linear(64, 10))
    return Training(net, batches(train_x, train_y, 64, seed), cross_entropy, partial(accuracy, x=test_x, y=test_y), rate=4e-3)


@fault(mlp.faults, "architecture", ("dead-units", "initialisation"), ("1", "2"))
def most_units_dead(training: Training) -> None:
    """Most units of the first layer start with a bias so negative that they never fire."""
    with torch.no_grad():
        training.net[1].bias[3:] = -12.0


@fault(mlp.faults, "architecture", ("symmetry", "initialisation"), ("3", "4"))
def equal_units(training: Training) -> None:
    """All units of the second layer start equal, and so do the weights by which they are read, so they stay equal."""
    nn.init.constant_(training.net[3].weight, 0.02)
    nn.init.zeros_(training.net[3].bias)
    with torch.no_grad():
        training.net[5].weight[:] = training.net[5].weight[:, :1]


@fault(mlp.faults, "architecture", "bottleneck", ("3", "4", "5"))
def one_wide_layer(training: Training) -> None:
    """The second layer has one unit."""
    training.net[3], training.net[5] = nn.Linear(128, 1), nn.Linear(1, 10)
    nn.init.constant_(training.net[3].bias, 1.0)


@fault(mlp.faults, "architecture", ("output-activation", "dead-units"), ("5", "5.0", "5.1"))
def logits_rectified(training: Training) -> None:
    """The rhythm of linear layer and ReLU does not stop at the logits, which start negative for half of the classes."""
    nn.init.constant_(training.net[5].bias, -1.0)
    training.net[5] = nn.Sequential(training.net[5], nn.ReLU())


def shells(seed: int) -> tuple[Tensor, Tensor]:
    """Returns points in four dimensions, and in which of four shells around the origin each lies, with as many in each."""
    x = torch.randn(4000, 4, generator=generator(seed))
    radius = x.norm(dim=1)
    return x, torch.bucketize(radius, radius.quantile(torch.tensor([0.25, 0.5, 0.75])))


class Block(nn.Module):
    """A linear layer of He's initialisation and a ReLU."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.linear = nn.Linear(inputs, outputs)
        self.relu = nn.ReLU()
        nn.init.kaiming_normal_(self.linear.weight, nonlinearity="relu")
        nn.init.zeros_(self.linear.bias)

    def forward(self, x: Tensor) -> Tensor:
        return self.relu(self.linear(x))


class DeepNet(nn.Module):
    """Blocks in a row and a linear output."""

    def __init__(self, inputs: int, width: int, depth: int, outputs: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(width if index else inputs, width) for index in range(depth))
        self.output = nn.Linear(width, outputs)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return self.output(x)


def momentum(parameters: Any, rate: float) -> Optimizer:
    """SGD with momentum."""
    return SGD(parameters, lr=rate, momentum=0.9)


EVERY_BLOCK = [f"blocks.{index}{part}" for index in range(8) for part in ("", ".relu", ".linear")]


@program(learns=0.8, chance=0.25)
def deep_mlp(seed: int) -> Training:
    """A deep MLP of He's initialisation in nested modules, with SGD of momentum, on shells around the origin."""
    torch.manual_seed(seed)
    train_x, train_y, test_x, test_y = split(*shells(seed))
    return Training(
        DeepNet(4, 64, 8, 4),
        batches(train_x, train_y, 100, seed),
        cross_entropy,
        partial(accuracy, x=test_x, y=test_y),
        rate=0.05,
        optimizer=momentum,
        schedule=warmup_cosine,
        steps=200,
    )


@fault(deep_mlp.faults, "architecture", "no-nonlinearity", EVERY_BLOCK)
def linear_throughout(training: Training) -> None:
    """No block has a nonlinearity."""
    for block in training.net.blocks:
        block.relu = nn.Identity()


@fault(deep_mlp.faults, "architecture", ("vanishing-gradients", "initialisation"))
def small_weights(training: Training) -> None:
    """All blocks start with weights of a third of the right scale."""
    with torch.no_grad():
        for block in training.net.blocks:
            block.linear.weight.mul_(0.35)


@fault(deep_mlp.faults, "architecture", ("dead-units", "initialisation"), ("blocks.4", "blocks.4.linear", "blocks.4.relu"))
def dead_in_the_middle(training: Training) -> None:
    """The units of a block in the middle never fire."""
    nn.init.constant_(training.net.blocks[4].linear.bias, -30.0)


@fault(deep_mlp.faults, "architecture", ("vanishing-gradients", "saturation"))
def sigmoids(training: Training) -> None:
    """All blocks have a sigmoid for a ReLU."""
    for block in training.net.blocks:
        block.relu = nn.Sigmoid()


@fault(deep_mlp.faults, "architecture", ("exploding-gradients", "initialisation"))
def standard_normal(training: Training) -> None:
    """All blocks start with weights of a standard normal distribution."""
    for block in training.net.blocks:
        nn.init.normal_(block.linear.weight)


def waves(seed: int) -> tuple[Tensor, Tensor]:
    """Returns points in five dimensions and a standardised, wavy function of them."""
    x = torch.rand(4000, 5, generator=generator(seed)) * 2 - 1
    y = torch.sin(2 * x[:, 0] + x[:, 1]) + x[:, 2] * x[:, 3] + torch.cos(3 * x[:, 4])
    return x * math.sqrt(3), ((y - y.mean()) / y.std()).unsqueeze(1)


class TanhNet(nn.Module):
    """Three tanh layers and a linear output."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.third = nn.Linear(5, 64), nn.Linear(64, 64), nn.Linear(64, 64)
        self.output = nn.Linear(64, 1)
        for layer in (self.first, self.second, self.third):
            nn.init.xavier_uniform_(layer.weight, gain=nn.init.calculate_gain("tanh"))
            nn.init.zeros_(layer.bias)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.first(x))
        x = torch.tanh(self.second(x))
        return self.output(torch.tanh(self.third(x)))


def rmsprop(parameters: Any, rate: float) -> Optimizer:
    """RMSprop."""
    return RMSprop(parameters, lr=rate, alpha=0.95)


@program(learns=0.85, chance=0.0)
def tanh_mlp(seed: int) -> Training:
    """A regression with tanh layers of Xavier's initialisation and a Huber loss, by RMSprop, on a wavy function."""
    torch.manual_seed(seed)
    train_x, train_y, test_x, test_y = split(*waves(seed))
    return Training(
        TanhNet(),
        batches(train_x, train_y, 100, seed),
        lambda net, x, y: F.smooth_l1_loss(net(x), y),
        partial(r2, x=test_x, y=test_y),
        rate=5e-3,
        optimizer=rmsprop,
        schedule=warmup_cosine,
    )


@fault(tanh_mlp.faults, "architecture", ("saturation", "initialisation"), ("first",))
def saturated_inputs(training: Training) -> None:
    """The first layer starts with weights so large that its units are at -1 or 1."""
    with torch.no_grad():
        training.net.first.weight.mul_(25)


@fault(tanh_mlp.faults, "architecture", ("saturation", "initialisation"), ("third", "output"))
def saturated_by_bias(training: Training) -> None:
    """The last tanh layer starts with biases so large that its units are all at 1."""
    nn.init.constant_(training.net.third.bias, 14.0)


@fault(tanh_mlp.faults, "architecture", ("initialisation", "symmetry", "vanishing-gradients"))
def zero_weights(training: Training) -> None:
    """All layers start with weights of zero."""
    for layer in training.net.children():
        nn.init.zeros_(layer.weight)


class Cut(TanhNet):
    """A network which cuts the graph after its second layer."""

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            x = torch.tanh(self.second(torch.tanh(self.first(x))))
        return self.output(torch.tanh(self.third(x)))


@fault(tanh_mlp.faults, "architecture", "detached", ("first", "second"))
def features_cut(training: Training) -> None:
    """A no_grad meant for something else covers the first two layers."""
    training.net.__class__ = Cut


class Binary(nn.Module):
    """A classifier of two classes with sigmoid layers; its output is one logit, without a dimension of its own."""

    def __init__(self, inputs: int, width: int) -> None:
        super().__init__()
        self.hidden = nn.Sequential(nn.Linear(inputs, width), nn.Sigmoid(), nn.Linear(width, width), nn.Sigmoid())
        self.logit = nn.Linear(width, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.logit(self.hidden(x)).squeeze(-1)


def skill(net: nn.Module, x: Tensor, y: Tensor) -> float:
    """Returns the share of the labels' entropy that the network's probabilities explain: 1 is perfect, 0 is as good as the rate."""
    share = y.mean().expand_as(y)
    return float(1 - F.binary_cross_entropy_with_logits(net(x), y) / F.binary_cross_entropy(share, y))


def adamw(parameters: Any, rate: float) -> Optimizer:
    """AdamW."""
    return AdamW(parameters, lr=rate, weight_decay=1e-2)


@program(learns=0.7, chance=0.0)
def binary(seed: int) -> Training:
    """A classifier of two classes with sigmoid layers, on the table of breast cancer."""
    torch.manual_seed(seed)
    train_x, train_y, test_x, test_y = table("breast-cancer")
    criterion = nn.BCEWithLogitsLoss()
    return Training(
        Binary(30, 32),
        batches(train_x, train_y.float(), 32, seed),
        lambda net, x, y: criterion(net(x), y),
        partial(skill, x=test_x, y=test_y.float()),
        rate=5e-3,
        optimizer=adamw,
    )


class Probability(Binary):
    """A classifier which returns the probability."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.sigmoid(super().forward(x))


@fault(binary.faults, "architecture", "output-activation", ("", "logit"))
def sigmoid_twice(training: Training) -> None:
    """The network returns a probability, and the loss takes it for a logit."""
    training.net.__class__ = Probability


@fault(binary.faults, "architecture", ("saturation", "initialisation"), ("hidden", "hidden.2", "hidden.3"))
def saturated_sigmoids(training: Training) -> None:
    """The second layer starts with biases so negative that its sigmoids are at 0."""
    nn.init.constant_(training.net.hidden[2].bias, -14.0)


@fault(binary.faults, "optimisation", "wrong-loss")
def positives_weighted(training: Training) -> None:
    """The weight of the positive class is a count, which was meant to be a ratio."""
    criterion = nn.BCEWithLogitsLoss(pos_weight=torch.tensor(212.0))
    training.loss = lambda net, x, y: criterion(net(x), y)


@fault(binary.faults, "architecture", "dropout", ("hidden", "hidden.3", "hidden.3.0", "hidden.3.1", "logit"))
def dropped_out(training: Training) -> None:
    """The share of units that are to be kept is given as the share that is dropped."""
    training.net.hidden[3] = nn.Sequential(nn.Sigmoid(), nn.Dropout(0.97))


def friedman(seed: int) -> tuple[Tensor, Tensor]:
    """Returns Friedman's first problem: ten standardised columns, of which five matter, and a standardised value (n, 1)."""
    random = generator(seed)
    x = torch.rand(3000, 10, generator=random)
    y = 10 * torch.sin(math.pi * x[:, 0] * x[:, 1]) + 20 * (x[:, 2] - 0.5) ** 2 + 10 * x[:, 3] + 5 * x[:, 4]
    y = y + torch.randn(3000, generator=random)
    return (x - 0.5) * math.sqrt(12), ((y - y.mean()) / y.std()).unsqueeze(1)


@program(learns=0.8, chance=0.0)
def regression(seed: int) -> Training:
    """A regression with layer normalisation and SiLU, on Friedman's problem."""
    torch.manual_seed(seed)
    train_x, train_y, test_x, test_y = split(*friedman(seed))
    net = nn.Sequential(
        nn.Linear(10, 64), nn.LayerNorm(64), nn.SiLU(), nn.Linear(64, 64), nn.LayerNorm(64), nn.SiLU(), nn.Linear(64, 1)
    )
    return Training(
        net,
        batches(train_x, train_y, 64, seed),
        squared_error,
        partial(r2, x=test_x, y=test_y),
        rate=1e-2,
        optimizer=adamw,
        schedule=warmup_cosine,
        clip=5.0,
    )


@fault(regression.faults, "architecture", "broadcast", ("", "6", "6.0", "6.1"))
def shapes_broadcast(training: Training) -> None:
    """The network returns (n,) where the target is (n, 1), and the loss compares each output with each target."""
    training.net[6] = nn.Sequential(training.net[6], nn.Flatten(0))
    training.loss = lambda net, x, y: (net(x) - y).square().mean()


@fault(regression.faults, "architecture", ("output-activation", "dead-units"), ("6", "6.0", "6.1"))
def values_rectified(training: Training) -> None:
    """A ReLU follows the output, though half of the targets are negative."""
    training.net[6] = nn.Sequential(training.net[6], nn.ReLU())


@fault(regression.faults, "architecture", ("normalisation", "wrong-axis"), ("6", "6.0", "6.1"))
def output_normalised(training: Training) -> None:
    """The output is standardised over the axis of length one, and so is zero."""
    training.net[6] = nn.Sequential(training.net[6], nn.LayerNorm(1))


@fault(regression.faults, "optimisation", ("clipping", "epsilon", "rate-too-low"))
def clipped_to_nothing(training: Training) -> None:
    """Gradients are clipped to a norm that is small beside AdamW's epsilon."""
    training.clip = 1e-9


def teacher(seed: int) -> tuple[Tensor, Tensor]:
    """Returns points in twelve dimensions and eight labels of each, which products of columns decide."""
    random = generator(seed)
    x = torch.randn(4000, 12, generator=random)
    mix = torch.randn(12, 8, generator=random) / math.sqrt(12)
    first, second = x[:, :8], x[:, 4:12].flip(1)
    return x, ((first * second + x @ mix) > 0).float()


@program(learns=0.8, chance=0.5)
def multi_label(seed: int) -> Training:
    """A classifier of eight independent labels, with LeakyReLU and dropout."""
    torch.manual_seed(seed)
    train_x, train_y, test_x, test_y = split(*teacher(seed))
    net = nn.Sequential(
        nn.Linear(12, 128), nn.LeakyReLU(0.1), nn.Dropout(0.05), nn.Linear(128, 128), nn.LeakyReLU(0.1), nn.Linear(128, 8)
    )
    return Training(
        net,
        batches(train_x, train_y, 100, seed),
        lambda net, x, y: F.binary_cross_entropy_with_logits(net(x), y),
        partial(accuracy, x=test_x, y=test_y),
        rate=4e-3,
    )


@fault(multi_label.faults, "optimisation", "wrong-loss")
def one_label_each(training: Training) -> None:
    """The loss is that of labels of which exactly one is right."""
    training.loss = lambda net, x, y: F.cross_entropy(net(x), y)


@fault(multi_label.faults, "architecture", "output-activation", ("5", "5.0", "5.1"))
def softmax_of_labels(training: Training) -> None:
    """A softmax makes the labels exclude each other, before a loss of logits."""
    training.net[5] = nn.Sequential(training.net[5], nn.Softmax(-1))


@fault(multi_label.faults, "architecture", "dropout", ("2", "1", "3"))
def drops_nearly_all(training: Training) -> None:
    """Nearly all units are dropped."""
    training.net[2] = nn.Dropout(0.95)


@fault(multi_label.faults, "architecture", "no-nonlinearity", ("1", "4", "0", "3", "5"))
def no_slope(training: Training) -> None:
    """The slope of LeakyReLU on the negative side is 1, so that it does nothing."""
    training.net[1], training.net[4] = nn.LeakyReLU(1.0), nn.LeakyReLU(1.0)


class TwoHeads(nn.Module):
    """A trunk, a head for the label and a head for a value, of a dict with an image."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk = nn.Sequential(nn.Flatten(), nn.Linear(64, 96), nn.ELU(), nn.Linear(96, 48), nn.ELU())
        self.label = nn.Linear(48, 10)
        self.value = nn.Sequential(nn.Linear(48, 32), nn.ELU(), nn.Linear(32, 1))

    def forward(self, inputs: dict[str, Tensor]) -> dict[str, Tensor]:
        features = self.trunk(inputs["image"])
        return {"label": self.label(features), "value": self.value(features).squeeze(-1)}


def tilt(images: Tensor) -> Tensor:
    """Returns a value of each image, of a spread of about 1: how much its ink leans, which is no linear function of it."""
    ink = (images[:, 0] + 1) / 2
    place = torch.linspace(-1, 1, 8)
    mass = ink.sum((1, 2))
    return (ink * place[:, None] * place[None, :]).sum((1, 2)) / mass / 0.06


def two_losses(net: nn.Module, inputs: dict[str, Tensor], target: dict[str, Tensor]) -> Tensor:
    """Returns the sum of the losses of both heads."""
    outputs = net(inputs)
    return F.cross_entropy(outputs["label"], target["label"]) + 0.5 * F.mse_loss(outputs["value"], target["value"])


def two_scores(net: nn.Module, inputs: dict[str, Tensor], target: dict[str, Tensor]) -> float:
    """Returns the mean of the label's accuracy and the value's R2, no lower than zero."""
    outputs = net(inputs)
    error = (outputs["value"] - target["value"]).square().mean() / target["value"].var()
    right = (outputs["label"].argmax(-1) == target["label"]).float().mean()
    return float(right + (1 - error).clamp(min=0)) / 2


class InUnits(nn.Module):
    """What reads the value of a network that was trained in other units."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net

    def forward(self, inputs: dict[str, Tensor]) -> dict[str, Tensor]:
        outputs = self.net(inputs)
        return {**outputs, "value": outputs["value"] / 500}


@program(learns=0.85, chance=0.05)
def multi_task(seed: int) -> Training:
    """Two heads on a trunk, on digits: the label, and a value of the ink."""
    torch.manual_seed(seed)
    train_x, train_y, test_x, test_y = digits()
    target = {"label": test_y, "value": tilt(test_x)}
    return Training(
        TwoHeads(),
        batches({"image": train_x}, {"label": train_y, "value": tilt(train_x)}, 64, seed),
        two_losses,
        partial(two_scores, inputs={"image": test_x}, target=target),
        rate=5e-3,
    )


@fault(multi_task.faults, "data", ("target-scale", "loss-scale"), ("value", "value.2"))
def value_in_other_units(training: Training) -> None:
    """The value is not standardised, but in units in which it is large, in training and in evaluation."""
    batch, score = training.batch, training.score

    def scaled(number: int) -> tuple[Any, Any]:
        inputs, target = batch(number)
        return inputs, {**target, "value": 500 * target["value"]}

    training.batch, training.score = scaled, lambda net: score(InUnits(net))


class HeadOnDetached(TwoHeads):
    """A network whose head for the value reads features, and is cut from the graph."""

    def forward(self, inputs: dict[str, Tensor]) -> dict[str, Tensor]:
        features = self.trunk(inputs["image"])
        value = self.value(features).squeeze(-1).detach()
        return {"label": self.label(features), "value": value}


@fault(multi_task.faults, "architecture", "detached", ("value", "value.0", "value.1", "value.2"))
def value_detached(training: Training) -> None:
    """The value is cut from the graph before the loss, so its head does not learn."""
    training.net.__class__ = HeadOnDetached


@fault(multi_task.faults, "architecture", "frozen", ("label",))
def label_frozen(training: Training) -> None:
    """The head of the label starts at zero and asks for no gradients."""
    nn.init.zeros_(training.net.label.weight)
    training.net.label.requires_grad_(False)


class Scaled(nn.Module):
    """Layers of GELU on standardised pixels, of which a buffer holds mean and spread."""

    def __init__(self, images: Tensor) -> None:
        super().__init__()
        self.register_buffer("mean", images.mean(0).flatten())
        self.register_buffer("spread", images.std(0).flatten() + 0.1)
        self.embed = nn.Linear(64, 96)
        self.mix = nn.Linear(96, 96)
        self.norm = nn.LayerNorm(96)
        self.classify = nn.Linear(96, 10)

    def forward(self, images: Tensor) -> Tensor:
        x = F.gelu(self.embed((images.flatten(1) - self.mean) / self.spread))
        return self.classify(self.norm(x + F.gelu(self.mix(x))))


@program(learns=0.93, chance=0.1)
def accumulation(seed: int) -> Training:
    """A classifier of digits with gradients accumulated over four batches of 16, by SGD with momentum."""
    torch.manual_seed(seed)
    train_x, train_y, test_x, test_y = digits()
    return Training(
        Scaled(train_x),
        batches(train_x, train_y, 16, seed),
        cross_entropy,
        partial(accuracy, x=test_x, y=test_y),
        rate=0.06,
        optimizer=momentum,
        micro_batches=4,
        steps=100,
    )


@fault(accumulation.faults, "optimisation", ("loss-scale", "rate-too-high"))
def losses_summed(training: Training) -> None:
    """The loss is summed over the examples, and over the batches that are accumulated."""
    training.loss = lambda net, x, y: 4 * F.cross_entropy(net(x), y, reduction="sum")


@fault(accumulation.faults, "state", "weights-overwritten")
def best_restored(training: Training) -> None:
    """The best weights are loaded before each step, and the best are still the first, as nothing updates them."""
    saved = {name: value.clone() for name, value in training.net.state_dict().items()}

    def restore(training: Training, optimizer: Optimizer, step: int) -> None:
        training.net.load_state_dict(saved)

    training.before_step.append(restore)


@fault(accumulation.faults, "architecture", ("inputs-not-normalised", "normalisation"), ("", "embed"))
def scaled_twice(training: Training) -> None:
    """The spread is that of pixels of 0 to 255, which the images no longer are, so the inputs are nearly zero."""
    training.net.spread.mul_(1000.0)
