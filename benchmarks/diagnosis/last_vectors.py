"""Six trainings of six kinds, from quantiles to the ranking of documents, with mistakes that are typical of each, for `LAST`."""

from __future__ import annotations

import copy
import math
import types
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributions import Normal
from torch.optim import Optimizer

from benchmarks.diagnosis.later import LAST, last, preprocessed, relabelled
from benchmarks.diagnosis.programs.data import batches, generator, r2
from benchmarks.diagnosis.training import Training, fault

__all__: list[str] = []


# Quantiles of arrival times

LEVELS = torch.tensor([0.1, 0.5, 0.9])


def arrivals(count: int, seed: int) -> tuple[Tensor, Tensor]:
    """Returns standardised features of parcels, and the time that each takes, which is skewed and more or less certain."""
    random, world = generator(seed), generator(41)
    x = torch.randn(count, 6, generator=random)
    mix = torch.randn(6, 4, generator=world) / 6**0.5
    hidden = torch.sin(2 * x @ mix)
    centre = hidden[:, 0] + hidden[:, 1] * hidden[:, 2] + 0.5 * x[:, 0]
    spread = 0.4 * torch.sigmoid(2.5 * hidden[:, 3] + x[:, 1])
    late = -torch.log(torch.rand(count, generator=random).clamp(min=1e-6))
    return x, centre + spread * late


class Quantiles(nn.Module):
    """A perceptron with the lowest quantile, and gaps above it that are never negative."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(6, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU())
        self.low, self.gaps = nn.Linear(64, 1), nn.Linear(64, 2)

    def forward(self, x: Tensor) -> Tensor:
        """Returns three quantiles a row."""
        states = self.body(x)
        low = self.low(states)
        return torch.cat((low, low + F.softplus(self.gaps(states)).cumsum(1)), 1)


def pinball(said: Tensor, y: Tensor, levels: Tensor = LEVELS) -> Tensor:
    """The mean pinball loss of quantiles."""
    short = y[:, None] - said
    return torch.maximum(levels * short, (levels - 1) * short).mean()


def pinball_loss(net: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    """The mean pinball loss of what the network says."""
    return pinball(net(x), y)


def skill(net: nn.Module, x: Tensor, y: Tensor) -> float:
    """How much of the pinball loss of quantiles that are the same for all goes away: 1 is perfect, 0 is no better."""
    same = torch.quantile(y, LEVELS)[None].expand(len(y), 3)
    return float(1 - pinball(net(x), y) / pinball(same, y))


@last(learns=0.5, chance=0.0)
def arrival_quantiles(seed: int) -> Training:
    """A regression of three quantiles of arrival times, by the pinball loss."""
    torch.manual_seed(seed)
    (x, y), (test_x, test_y) = arrivals(4000, 1), arrivals(1000, 2)
    score = partial(skill, x=test_x, y=test_y)
    return Training(Quantiles(), batches(x, y, 64, seed), pinball_loss, score, rate=5e-3, steps=250)


@fault(LAST["arrival-quantiles"].faults, "optimisation", ("wrong-loss", "ascent"))
def levels_in_percent(training: Training) -> None:
    """The levels of the quantiles are 10, 50 and 90, so that the loss has no lower bound."""
    training.loss = lambda net, x, y: pinball(net(x), y, 100 * LEVELS)


@fault(LAST["arrival-quantiles"].faults, "optimisation", ("broadcast", "wrong-loss"))
def quantile_columns_against_a_row(training: Training) -> None:
    """Each quantile is sliced as a column, and the row of times is subtracted from it."""

    def one_by_one(net: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        """The pinball loss of every parcel with every time."""
        said, total = net(x), torch.zeros(())
        for place, level in enumerate(LEVELS.tolist()):
            short = y - said[:, place : place + 1]
            total = total + torch.maximum(level * short, (level - 1) * short).mean()
        return total / len(LEVELS)

    training.loss = one_by_one


@fault(LAST["arrival-quantiles"].faults, "architecture", "wrong-axis", ("", "gaps", "low"))
def gaps_summed_over_the_batch(training: Training) -> None:
    """The gaps are summed from parcel to parcel, not from quantile to quantile."""
    net: Any = training.net

    def forward(self: Any, x: Tensor) -> Tensor:
        """Returns quantiles that depend on the rows above."""
        states = self.body(x)
        low = self.low(states)
        return torch.cat((low, low + F.softplus(self.gaps(states)).cumsum(0)), 1)

    net.forward = types.MethodType(forward, net)


@fault(LAST["arrival-quantiles"].faults, "architecture", "dropout", ("low", "low.1", "gaps", "gaps.1", ""))
def outputs_dropped(training: Training) -> None:
    """A dropout of a half stands behind the last layers, on the numbers that are the answer."""
    net: Any = training.net
    net.low, net.gaps = nn.Sequential(net.low, nn.Dropout(0.5)), nn.Sequential(net.gaps, nn.Dropout(0.5))


@fault(LAST["arrival-quantiles"].faults, "data", "inputs-not-normalised", ("", "body", "body.0"))
def time_stamp_beside_the_features(training: Training) -> None:
    """The last feature is the time of sending in seconds since 1970, beside others around one."""
    preprocessed(training, lambda x: torch.cat((x[:, :5], 1.7e9 + 2e6 * x[:, 5:]), 1))


@fault(LAST["arrival-quantiles"].faults, "state", "weights-overwritten")
def average_never_swapped_back(training: Training) -> None:
    """The moving average of the weights is loaded into the network after each step, and the weights are not put back."""
    average = copy.deepcopy(training.net.state_dict())

    def load(training: Training, optimizer: Optimizer, step: int) -> None:
        """Moves the average a thousandth, and loads it."""
        for name, value in training.net.state_dict().items():
            average[name].lerp_(value, 0.001)
        training.net.load_state_dict(average)

    training.before_step.append(load)


# A hypernetwork that writes the weights of a small network for each condition


def waves(count: int, seed: int) -> tuple[tuple[Tensor, Tensor], Tensor]:
    """Returns conditions of waves with eight places each, and the heights there."""
    random = generator(seed)
    condition = torch.rand(count, 4, generator=random) * 2 - 1
    places = torch.rand(count, 8, 1, generator=random) * 4 - 2
    height, speed, phase, slope = condition[:, :, None].unbind(1)
    y = (1 + 0.7 * height) * torch.sin((1.5 + speed) * places[:, :, 0] + 1.5 * phase) + 0.5 * slope * places[:, :, 0]
    return (condition, places), y


class WeightWriter(nn.Module):
    """A trunk that reads the condition, and a head for the weights of each layer of a small network."""

    def __init__(self) -> None:
        super().__init__()
        self.sizes = ((1, 24), (24, 1))
        self.trunk = nn.Sequential(nn.Linear(4, 64), nn.ReLU(), nn.Dropout(0.1), nn.Linear(64, 64), nn.ReLU())
        self.heads: Any = nn.ModuleList(nn.Linear(64, before * after + after) for before, after in self.sizes)

    def write(self, condition: Tensor) -> list[Tensor]:
        """Returns the weights and biases of each layer, one row for each condition."""
        states = self.trunk(condition)
        return [head(states) for head in self.heads]

    def read(self, written: list[Tensor], x: Tensor) -> Tensor:
        """Returns what the small network with these weights makes of the places."""
        for (before, after), weights in zip(self.sizes, written, strict=True):
            weight, bias = weights[:, : before * after], weights[:, before * after :]
            x = x @ weight.reshape(-1, before, after) + bias[:, None]
            if after > 1:
                x = torch.tanh(x)
        return x.squeeze(2)

    def forward(self, given: tuple[Tensor, Tensor]) -> Tensor:
        """Returns the heights."""
        condition, places = given
        return self.read(self.write(condition), places)


def heights(net: nn.Module, x: Any, y: Tensor) -> Tensor:
    """The mean squared error of the heights."""
    return F.mse_loss(net(x), y)


@last(learns=0.75, chance=0.0)
def written_weights(seed: int) -> Training:
    """A hypernetwork that writes a small network for each wave."""
    torch.manual_seed(seed)
    (x, y), (test_x, test_y) = waves(4000, 1), waves(500, 2)
    score = partial(r2, x=test_x, y=test_y)
    return Training(WeightWriter(), batches(x, y, 64, seed), heights, score, rate=5e-3, clip=1.0, steps=300)


@fault(
    LAST["written-weights"].faults, "architecture", ("detached", "not-in-optimizer"), ("", "heads", "heads.0", "heads.1", "trunk")
)
def wrapped_as_parameters(training: Training) -> None:
    """What was written is wrapped in nn.Parameter before it is used, which cuts it from what wrote it."""
    net: Any = training.net

    def write(self: Any, condition: Tensor) -> list[Tensor]:
        """Returns parameters that hold what was written."""
        states = self.trunk(condition)
        return [nn.Parameter(head(states)) for head in self.heads]

    net.write = types.MethodType(write, net)


@fault(
    LAST["written-weights"].faults,
    "architecture",
    ("initialisation", "symmetry", "vanishing-gradients"),
    ("heads", "heads.0", "heads.1", ""),
)
def every_head_starts_at_zero(training: Training) -> None:
    """All heads start at zero, so that both written layers are zero, and of what is written only the last bias has a gradient."""
    net: Any = training.net
    for head in net.heads:
        nn.init.zeros_(head.weight)
        nn.init.zeros_(head.bias)


@fault(LAST["written-weights"].faults, "architecture", ("bottleneck", "wrong-axis"), ("", "heads", "heads.0", "heads.1", "trunk"))
def written_once_for_the_batch(training: Training) -> None:
    """One set of weights is written for the whole batch, of the mean of the states over its conditions."""
    net: Any = training.net

    def write(self: Any, condition: Tensor) -> list[Tensor]:
        """Returns the same weights for each condition."""
        states = self.trunk(condition).mean(0, keepdim=True).expand(len(condition), -1)
        return [head(states) for head in self.heads]

    net.write = types.MethodType(write, net)


@fault(LAST["written-weights"].faults, "optimisation", "momentum")
def betas_swapped(training: Training) -> None:
    """The two betas of Adam are given the wrong way round, 0.999 first."""
    training.optimizer = lambda parameters, rate: torch.optim.Adam(parameters, lr=rate, betas=(0.999, 0.9))


@fault(LAST["written-weights"].faults, "data", "data-order")
def waves_on_a_sorted_grid(training: Training) -> None:
    """The waves come from nested loops over their conditions, and are not shuffled."""
    (condition, places), y = waves(19_200, 1)
    order = condition[:, 1].argsort(stable=True)

    def in_order(number: int) -> tuple[Any, Tensor]:
        """The batch in the order of the loops."""
        rows = order[torch.arange(64) + number % 300 * 64]
        return (condition[rows], places[rows]), y[rows]

    training.batch = in_order


@fault(LAST["written-weights"].faults, "state", ("frozen", "no-steps"))
def frozen_for_a_check(training: Training) -> None:
    """All parameters are frozen for a check after ten steps, and they stay frozen."""

    def check(training: Training, optimizer: Optimizer, step: int) -> None:
        """Freezes the network, as if to look at it."""
        if step == 10:
            training.net.requires_grad_(False)

    training.before_step.append(check)


# Episodes of classes never seen before, by their prototypes

WAYS = 8


def episode(seed: int) -> tuple[tuple[Tensor, Tensor], Tensor]:
    """Returns eight examples of each of eight new classes, and, class by class, five queries of each with its number."""
    random, world = generator(seed), generator(23)
    centres = torch.randn(WAYS, 1, 6, generator=random)
    hidden = centres + 0.35 * torch.randn(WAYS, 13, 6, generator=random)
    other = 3 * torch.randn(WAYS, 13, 18, generator=random)
    turn = torch.linalg.qr(torch.randn(24, 24, generator=world))[0]
    x = torch.cat((hidden, other), 2) @ turn
    x = x + 0.3 * torch.sin(2 * x)
    return (x[:, :8], x[:, 8:].flatten(0, 1)), torch.arange(WAYS).repeat_interleave(5)


class Prototypes(nn.Module):
    """An encoder, and the squared distances of the queries to the means of the classes."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder: Any = nn.Sequential(nn.Linear(24, 64), nn.BatchNorm1d(64), nn.ReLU(), nn.Linear(64, 16))

    def forward(self, given: tuple[Tensor, Tensor]) -> Tensor:
        """Returns the logits of each query."""
        support, query = given
        codes = self.encoder(torch.cat((support.flatten(0, 1), query)))
        examples, queries = codes.split((WAYS * 8, len(query)))
        prototypes = examples.unflatten(0, (WAYS, 8)).mean(1)
        logits: Tensor = -(queries[:, None] - prototypes).square().sum(2)
        return logits


def episode_loss(net: nn.Module, x: Any, y: Tensor) -> Tensor:
    """Cross entropy of the queries."""
    return F.cross_entropy(net(x), y)


def named(net: nn.Module, first: int, count: int) -> float:
    """The share of queries of new episodes that are given their class."""
    right = []
    for number in range(first, first + count):
        x, y = episode(number)
        right.append((net(x).argmax(1) == y).float().mean())
    return float(torch.stack(right).mean())


@last(learns=0.6, chance=0.125)
def prototype_episodes(seed: int) -> Training:
    """A prototypical network on episodes of eight classes, scored on classes that it never saw."""
    torch.manual_seed(seed)

    def batch(number: int) -> tuple[Any, Tensor]:
        """The episode of this number."""
        return episode(100_000 * (seed + 1) + number)

    return Training(Prototypes(), batch, episode_loss, partial(named, first=10, count=60), rate=5e-3, steps=250)


@fault(LAST["prototype-episodes"].faults, "architecture", "wrong-axis", ("", "encoder"))
def means_over_the_ways(training: Training) -> None:
    """The codes are viewed as examples by classes and averaged over the first axis, but they are classes by examples."""
    net: Any = training.net

    def forward(self: Any, given: tuple[Tensor, Tensor]) -> Tensor:
        """Returns the distances to means of one example of each class."""
        support, query = given
        codes = self.encoder(torch.cat((support.flatten(0, 1), query)))
        examples, queries = codes.split((WAYS * 8, len(query)))
        prototypes = examples.unflatten(0, (8, WAYS)).mean(0)
        logits: Tensor = -(queries[:, None] - prototypes).square().sum(2)
        return logits

    net.forward = types.MethodType(forward, net)


@fault(LAST["prototype-episodes"].faults, "architecture", "normalisation", ("encoder", "encoder.1", ""))
def each_class_encoded_alone(training: Training) -> None:
    """Each class is encoded in a call of its own, in which batch normalisation takes away what the class has in common."""
    net: Any = training.net

    def forward(self: Any, given: tuple[Tensor, Tensor]) -> Tensor:
        """Returns the distances to means of codes that were normalised by class."""
        support, query = given
        prototypes = torch.stack([self.encoder(examples).mean(0) for examples in support])
        queries = self.encoder(query)
        logits: Tensor = -(queries[:, None] - prototypes).square().sum(2)
        return logits

    net.forward = types.MethodType(forward, net)


@fault(LAST["prototype-episodes"].faults, "data", "labels-do-not-fit")
def labels_repeated_in_turn(training: Training) -> None:
    """The numbers of the classes are repeated in turn, but the queries come class by class."""
    relabelled(training, lambda x, y: torch.arange(WAYS).repeat(5))


@fault(LAST["prototype-episodes"].faults, "data", "repeated-batches")
def sampler_seeded_in_each_episode(training: Training) -> None:
    """The sampler of episodes sets its seed whenever it is called, so that all episodes are one."""
    batch = training.batch
    training.batch = lambda number: batch(0)


@fault(LAST["prototype-episodes"].faults, "optimisation", ("ascent", "wrong-loss"))
def distances_as_logits(training: Training) -> None:
    """The distances themselves are the logits in the loss, so that queries are driven away from their class."""
    training.loss = lambda net, x, y: F.cross_entropy(-net(x), y)


@fault(LAST["prototype-episodes"].faults, "state", "carried-state", ("", "encoder"))
def prototypes_carried_on(training: Training) -> None:
    """The prototypes are a moving average over the episodes, but each episode has other classes."""
    net: Any = training.net
    net.kept = None

    def forward(self: Any, given: tuple[Tensor, Tensor]) -> Tensor:
        """Returns the distances to means over this and earlier episodes."""
        support, query = given
        codes = self.encoder(torch.cat((support.flatten(0, 1), query)))
        examples, queries = codes.split((WAYS * 8, len(query)))
        prototypes = examples.unflatten(0, (WAYS, 8)).mean(1)
        if self.kept is not None:
            prototypes = 0.9 * self.kept + 0.1 * prototypes
        self.kept = prototypes.detach()
        logits: Tensor = -(queries[:, None] - prototypes).square().sum(2)
        return logits

    net.forward = types.MethodType(forward, net)


# A radiance field of a flat scene

DEPTHS = 1 + 2 * (torch.arange(24) + 0.5) / 24
DISCS = torch.tensor([[-0.4, -0.3, 0.3], [0.45, 0.1, 0.25], [-0.1, 0.55, 0.2], [0.3, -0.6, 0.15]])
COLOURS = torch.tensor([[0.9, 0.2, 0.1], [0.1, 0.8, 0.3], [0.2, 0.3, 0.9], [0.9, 0.9, 0.2]])


def composed(density: Tensor, colour: Tensor, step: float) -> Tensor:
    """Returns the colours of rays, of densities (rays, depths) and colours (rays, depths, 3)."""
    clear = torch.exp(-density * step)
    through = torch.cat((torch.ones_like(clear[:, :1]), clear[:, :-1]), 1).cumprod(1)
    return ((through * (1 - clear))[:, :, None] * colour).sum(1)


def views(cameras: int, turned: float) -> tuple[Tensor, Tensor]:
    """Returns rays, as origins beside directions, of cameras on a circle around four discs, and the colours that they see."""
    angle = (torch.arange(cameras) + turned)[:, None] * 2 * math.pi / cameras
    aside = torch.linspace(-0.5, 0.5, 64)
    origin = 2 * torch.stack((angle.cos(), angle.sin()), 2).expand(cameras, 64, 2)
    heading = angle + math.pi + aside
    rays = torch.cat((origin, torch.stack((heading.cos(), heading.sin()), 2)), 2).flatten(0, 1)
    depths = 1 + 2 * (torch.arange(240) + 0.5) / 240
    points = rays[:, None, :2] + depths[:, None] * rays[:, None, 2:]
    inside = ((points[:, :, None] - DISCS[:, :2]).norm(dim=3) < DISCS[:, 2]).float()
    return rays, composed(12 * inside.sum(2), inside @ COLOURS, 2 / 240)


class RadianceField(nn.Module):
    """Sines of the places along rays, a perceptron, and what a ray sees of its densities and colours."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(18, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU())
        self.density: Any = nn.Sequential(nn.Linear(64, 1), nn.Softplus())
        self.colour = nn.Sequential(nn.Linear(64, 3), nn.Sigmoid())

    def field(self, rays: Tensor) -> tuple[Tensor, Tensor]:
        """Returns the densities and colours along rays."""
        points = rays[:, None, :2] + DEPTHS[:, None] * rays[:, None, 2:]
        waves = torch.cat([points * math.pi * 2.0**power for power in range(-1, 3)], 2)
        states = self.body(torch.cat((points, waves.sin(), waves.cos()), 2))
        return 5 * self.density(states).squeeze(2), self.colour(states)

    def forward(self, rays: Tensor) -> Tensor:
        """Returns the colours of rays."""
        return composed(*self.field(rays), 2 / 24)


def colours(net: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    """The mean squared error of the colours."""
    return F.mse_loss(net(x), y)


@last(learns=0.7, chance=0.0)
def radiance_field(seed: int) -> Training:
    """A radiance field of a flat scene, trained on the views of 30 cameras and scored on those between."""
    torch.manual_seed(seed)
    (x, y), (test_x, test_y) = views(30, 0.0), views(15, 0.25)
    batch, score = batches(x, y, 96, seed), partial(r2, x=test_x, y=test_y)
    return Training(RadianceField(), batch, colours, score, rate=5e-3, schedule=tenth_at_the_end, steps=250)


def tenth_at_the_end(step: int, steps: int) -> float:
    """A factor that falls from one to a tenth."""
    return float(0.1 ** (step / steps))


@fault(LAST["radiance-field"].faults, "architecture", "wrong-axis", ("", "density"))
def light_lost_from_ray_to_ray(training: Training) -> None:
    """The cumulative product of what shines through runs over the rays, not along each."""
    net: Any = training.net

    def forward(self: Any, rays: Tensor) -> Tensor:
        """Returns the colours of rays that darken one another."""
        density, colour = self.field(rays)
        clear = torch.exp(-density * 2 / 24)
        through = torch.cat((torch.ones_like(clear[:1]), clear[:-1])).cumprod(0)
        seen: Tensor = ((through * (1 - clear))[:, :, None] * colour).sum(1)
        return seen

    net.forward = types.MethodType(forward, net)


@fault(LAST["radiance-field"].faults, "architecture", "detached", ("density", "density.0", "density.1", ""))
def weights_of_samples_detached(training: Training) -> None:
    """The weights along a ray are detached, as those for finer samples are, but the colours are made of them, too."""
    net: Any = training.net

    def forward(self: Any, rays: Tensor) -> Tensor:
        """Returns the colours by weights without a history."""
        density, colour = self.field(rays)
        return composed(density.detach(), colour, 2 / 24)

    net.forward = types.MethodType(forward, net)


@fault(LAST["radiance-field"].faults, "architecture", ("dead-units", "initialisation"), ("density", "density.0", "density.1", ""))
def empty_space_behind_a_relu(training: Training) -> None:
    """The density ends in a ReLU and its bias starts at -2, so that there is nothing, and no gradient, anywhere."""
    net: Any = training.net
    nn.init.constant_(net.density[0].bias, -2.0)
    net.density[1] = nn.ReLU()


@fault(
    LAST["radiance-field"].faults,
    "data",
    ("target-scale", "saturation", "output-activation"),
    ("colour", "colour.1", "density", ""),
)
def colours_to_255(training: Training) -> None:
    """The colours of the views are bytes from 0 to 255, and those of the network lie between 0 and 1."""
    score = training.score
    assert isinstance(score, partial)
    relabelled(training, lambda x, y: 255 * y)
    training.score = partial(r2, x=score.keywords["x"], y=255 * score.keywords["y"])


@fault(LAST["radiance-field"].faults, "optimisation", ("schedule", "rate-too-low"))
def decay_in_each_step(training: Training) -> None:
    """The rate is multiplied in each step by the factor that was meant for a thousand."""
    training.schedule = lambda step, steps: 0.8**step


@fault(LAST["radiance-field"].faults, "state", "weights-overwritten")
def clipped_like_a_critic(training: Training) -> None:
    """All weights are clipped to a hundredth after each step, which was left over from a training of another kind."""

    def clip(training: Training, optimizer: Optimizer, step: int) -> None:
        """Clips all weights."""
        with torch.no_grad():
            for parameter in training.net.parameters():
                parameter.clamp_(-0.01, 0.01)

    training.before_step.append(clip)


# A cloned driver


def observed(state: Tensor) -> Tensor:
    """Returns place, and cosine and sine of the heading, of states x, y and heading."""
    return torch.cat((state[:, :2], state[:, 2:].cos(), state[:, 2:].sin()), 1)


def expert(state: Tensor) -> Tensor:
    """Returns the turn and the speed with which the expert drives to the origin."""
    x, y, heading = state.unbind(1)
    error = torch.remainder(torch.atan2(-y, -x) - heading + math.pi, 2 * math.pi) - math.pi
    speed = 2 * torch.sqrt(x.square() + y.square()) * error.cos().clamp(min=0.1)
    return torch.stack((3 * error, speed), 1).clamp(-3, 3)


def driven(state: Tensor, action: Tensor) -> Tensor:
    """Returns the states a tenth of a second later."""
    turn, speed = action.clamp(-3, 3).unbind(1)
    x, y, heading = state.unbind(1)
    return torch.stack((x + 0.1 * speed * heading.cos(), y + 0.1 * speed * heading.sin(), heading + 0.1 * turn), 1)


def starts(count: int, seed: int) -> Tensor:
    """Returns random places and headings."""
    return (torch.rand(count, 3, generator=generator(seed)) * 2 - 1) * torch.tensor([4.0, 4.0, math.pi])


def demonstrations(count: int, seed: int) -> tuple[Tensor, Tensor]:
    """Returns observations and the expert's actions of drives of 30 steps, one after another, with pushes on the way."""
    state, random = starts(count, seed), generator(seed + 1)
    seen, done = [], []
    for _ in range(30):
        seen.append(observed(state))
        done.append(expert(state))
        state = driven(state, done[-1]) + 0.15 * torch.randn(state.shape, generator=random)
    return torch.stack(seen, 1).flatten(0, 1), torch.stack(done, 1).flatten(0, 1)


class Driver(nn.Module):
    """A policy of standardised observations: the means of a normal distribution, and its spreads."""

    def __init__(self, mean: Tensor, spread: Tensor) -> None:
        super().__init__()
        self.mean: Tensor
        self.spread: Tensor
        self.register_buffer("mean", mean)
        self.register_buffer("spread", spread)
        self.body = nn.Sequential(nn.Linear(4, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 2))
        self.log_spread = nn.Parameter(torch.zeros(2))

    def forward(self, seen: Tensor) -> tuple[Tensor, Tensor]:
        """Returns the means and the spreads of the actions."""
        means = self.body((seen - self.mean) / self.spread)
        return means, self.log_spread.exp().expand_as(means)


def unlikely(net: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    """The negative log likelihood of the expert's actions."""
    policy: Any = Normal(*net(x))
    loss: Tensor = -policy.log_prob(y).sum(1).mean()
    return loss


def arrived(net: nn.Module, state: Tensor) -> float:
    """How much of the way to the origin the network drives in four seconds, from 0 to 1, on average."""
    before = state[:, :2].norm(dim=1)
    for _ in range(40):
        state = driven(state, net(observed(state))[0])
    return float((1 - state[:, :2].norm(dim=1) / before).clamp(min=0).mean())


@last(learns=0.7, chance=0.0)
def cloned_driver(seed: int) -> Training:
    """A driver cloned from an expert's drives, scored by how near it drives to the goal by itself."""
    torch.manual_seed(seed)
    x, y = demonstrations(200, 1)
    net = Driver(x.mean(0), x.std(0))
    return Training(net, batches(x, y, 64, seed), unlikely, partial(arrived, state=starts(200, 9)), rate=5e-3, clip=10.0, steps=250)


@fault(LAST["cloned-driver"].faults, "optimisation", "detached")
def error_of_a_sample(training: Training) -> None:
    """The loss is the error of an action that is drawn by sample(), through which no gradient goes."""

    def of_a_sample(net: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        """The mean squared error of sampled actions."""
        policy: Any = Normal(*net(x))
        return F.mse_loss(policy.sample(), y)

    training.loss = of_a_sample


@fault(LAST["cloned-driver"].faults, "architecture", ("output-activation", "saturation", "target-scale"), ("body", "body.5", ""))
def actions_squashed_to_one(training: Training) -> None:
    """The policy ends in a tanh that is not scaled to the range of actions, from -3 to 3."""
    net: Any = training.net
    net.body.append(nn.Tanh())


@fault(LAST["cloned-driver"].faults, "architecture", "no-nonlinearity", ("body", "body.1", "body.3", ""))
def activation_none(training: Training) -> None:
    """The activation of the hidden layers is an option that defaults to none."""
    net: Any = training.net
    net.body[1], net.body[3] = nn.Identity(), nn.Identity()


@fault(LAST["cloned-driver"].faults, "data", ("inputs-constant", "inputs-not-normalised", "outliers"), ("", "body", "body.0"))
def lost_readings_in_the_statistics(training: Training) -> None:
    """A few lost readings of -9999 were in the data when mean and spread were taken, and almost nothing is left of the others."""
    net: Any = training.net
    x, _ = demonstrations(200, 1)
    x[::50] = -9999.0
    net.mean, net.spread = x.mean(0), x.std(0)


@fault(LAST["cloned-driver"].faults, "optimisation", "weight-decay")
def decay_of_a_half(training: Training) -> None:
    """The weight decay of Adam is 0.5."""
    training.optimizer = lambda parameters, rate: torch.optim.Adam(parameters, lr=rate, weight_decay=0.5)


@fault(LAST["cloned-driver"].faults, "state", "stale-optimizer", ("body",))
def new_policy_in_each_round(training: Training) -> None:
    """The policy is made anew when demonstrations are added, and the optimizer still holds that of the first round."""

    def next_round(training: Training, optimizer: Optimizer, step: int) -> None:
        """Makes new layers at the start of the second round."""
        if step == 60:
            net: Any = training.net
            net.body = nn.Sequential(nn.Linear(4, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 2))

    training.before_step.append(next_round)


# The ranking of documents

SCALES = torch.tensor([300.0, 40.0, 8.0, 1.0, 1.0, 0.2, 25.0, 1.0, 0.05, 3.0])


def found(count: int, seed: int) -> tuple[tuple[Tensor, Tensor], Tensor]:
    """Returns queries and ten documents for each, with numbers of many sizes, and how relevant each is, from 0 to 4."""
    random, world = generator(seed), generator(67)
    query, documents = torch.randn(count, 6, generator=random), torch.randn(count, 10, 10, generator=random)
    match = torch.randn(6, 10, generator=world) / 60**0.5
    good = (query @ match)[:, None] @ documents.transpose(1, 2)
    liked = 2.5 * good.squeeze(1) + documents[:, :, 0] - 0.7 * documents[:, :, 1].abs()
    liked = liked + 0.3 * torch.randn(count, 10, generator=random)
    grades = torch.bucketize(liked, torch.tensor([-2.0, -0.8, 0.3, 1.6])).float()
    return (query, (documents + 2) * SCALES), grades


class Ranker(nn.Module):
    """Layers for the query and for the documents, and a score of both and of their product."""

    def __init__(self) -> None:
        super().__init__()
        self.query = nn.Linear(6, 32)
        self.norm = nn.BatchNorm1d(10)
        self.document = nn.Linear(10, 32)
        self.head: Any = nn.Sequential(nn.Linear(96, 64), nn.ReLU(), nn.Linear(64, 1))

    def forward(self, given: tuple[Tensor, Tensor]) -> Tensor:
        """Returns a score of each document."""
        query, documents = given
        asked = self.query(query)[:, None].expand(-1, documents.shape[1], -1)
        read = self.document(self.norm(documents.flatten(0, 1)).unflatten(0, documents.shape[:2]))
        scores: Tensor = self.head(torch.cat((asked, read, asked * read), 2)).squeeze(2)
        return scores


def pairs(net: nn.Module, x: Any, y: Tensor) -> Tensor:
    """The logistic loss of the differences of scores, of the pairs of which one is more relevant."""
    scores = net(x)
    better = (y[:, :, None] > y[:, None]).float()
    losses = F.softplus(scores[:, None] - scores[:, :, None])
    return (losses * better).sum() / better.sum().clamp(min=1)


def in_order(net: nn.Module, x: Any, y: Tensor) -> float:
    """The share of pairs with the better document strictly above the other; ties count half."""
    scores = net(x)
    better = y[:, :, None] > y[:, None]
    apart = (scores[:, :, None] - scores[:, None])[better]
    return float((apart > 0).float().mean() + 0.5 * (apart == 0).float().mean()) if apart.isfinite().all() else math.nan


@last(learns=0.75, chance=0.5)
def document_ranking(seed: int) -> Training:
    """A ranking of documents by the logistic loss of pairs, scored by the share of pairs in order."""
    torch.manual_seed(seed)
    (x, y), (test_x, test_y) = found(2000, 1), found(400, 2)
    score = partial(in_order, x=test_x, y=test_y)
    return Training(Ranker(), batches(x, y, 32, seed), pairs, score, rate=3e-3, steps=250)


@fault(LAST["document-ranking"].faults, "architecture", ("wrong-axis", "output-activation", "saturation"), ("head", "head.3", ""))
def softmax_of_one_score(training: Training) -> None:
    """A softmax over the last axis ends the network, which has one number, so that every score is one."""
    net: Any = training.net
    net.head.append(nn.Softmax(-1))


@fault(LAST["document-ranking"].faults, "architecture", "never-ran", ("query", ""))
def document_in_place_of_the_query(training: Training) -> None:
    """The layer of the documents is joined with itself, and that of the queries is never called."""
    net: Any = training.net

    def forward(self: Any, given: tuple[Tensor, Tensor]) -> Tensor:
        """Returns scores that do not depend on the query."""
        _, documents = given
        read = self.document(self.norm(documents.flatten(0, 1)).unflatten(0, documents.shape[:2]))
        scores: Tensor = self.head(torch.cat((read, read, read * read), 2)).squeeze(2)
        return scores

    net.forward = types.MethodType(forward, net)


@fault(LAST["document-ranking"].faults, "optimisation", ("wrong-loss", "labels-do-not-fit"))
def both_sorted_by_themselves(training: Training) -> None:
    """The scores and the relevance are each sorted before a loss of lists, so that any order of the documents has the same loss."""

    def of_lists(net: nn.Module, x: Any, y: Tensor) -> Tensor:
        """The cross entropy of sorted scores with sorted relevance."""
        return F.cross_entropy(net(x).sort(1, descending=True).values, y.sort(1, descending=True).values.softmax(1))

    training.loss = of_lists


@fault(LAST["document-ranking"].faults, "data", ("nonfinite-inputs", "nonfinite"), ("", "norm"))
def logarithm_of_no_hits(training: Training) -> None:
    """A count of hits is put through a logarithm, and in some documents it is zero."""

    def logs(x: Any) -> Any:
        """The documents with the logarithm of the third number."""
        query, documents = x
        hits = documents.clone()
        hits[:, :, 2] = torch.log(documents[:, :, 2].clamp(min=0).round())
        return query, hits

    preprocessed(training, logs)


@fault(LAST["document-ranking"].faults, "data", ("labels-constant", "wrong-loss"))
def relevance_cut_to_whole_numbers(training: Training) -> None:
    """The relevance was scaled to between 0 and 1 and then made whole, so that no document is relevant."""
    relabelled(training, lambda x, y: (y / 4.01).long())


@fault(LAST["document-ranking"].faults, "state", ("eval-mode", "statistics-frozen", "normalisation"), ("", "norm"))
def left_in_evaluation_mode(training: Training) -> None:
    """The network was put into evaluation mode by a check before the training, and stays in it."""
    training.trains = False
