"""Programs that make something: autoencoders, a pair of adversaries and a policy; each with faults of its own."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.diagnosis.programs.data import batches, digits, generator, r2
from benchmarks.diagnosis.programs.sequences import put, replace
from benchmarks.diagnosis.training import Training, fault, program

__all__ = ["adversaries", "autoencoder", "policy", "variational"]


# An autoencoder


class Autoencoder(nn.Module):
    """Packs an image into a code by convolutions, and unpacks it."""

    def __init__(self, code: int = 16) -> None:
        super().__init__()
        self.encoder = nn.Sequential(
            nn.Conv2d(1, 16, 3, 2, 1), nn.ReLU(), nn.Conv2d(16, 32, 3, 2, 1), nn.ReLU(), nn.Flatten(), nn.Linear(128, code)
        )
        self.decoder = nn.Sequential(
            nn.Linear(code, 128),
            nn.ReLU(),
            nn.Unflatten(1, (32, 2, 2)),
            nn.ConvTranspose2d(32, 16, 4, 2, 1),
            nn.ReLU(),
            nn.ConvTranspose2d(16, 1, 4, 2, 1),
        )

    def forward(self, images: Tensor) -> Tensor:
        again: Tensor = self.decoder(self.encoder(images))
        return again


@program(learns=0.65, chance=0.0)
def autoencoder(seed: int) -> Training:
    """A convolutional autoencoder of digits, scored by the share of the pixels' variance that it keeps."""
    torch.manual_seed(seed)
    x, _, test, _ = digits()
    return Training(
        Autoencoder(),
        batches(x, x, 64, seed),
        lambda net, x, y: (net(x) - y).square().mean(),
        lambda net: r2(net, test, test),
        rate=1e-2,
    )


@fault(autoencoder.faults, "architecture", "output-activation", ("decoder", "decoder.5", "decoder.5.1"))
def sigmoid_at_the_end(training: Training) -> None:
    """The decoder ends in a sigmoid, while half of the pixels are below zero."""
    replace(training.net, "decoder.5", nn.Sequential(training.net.get_submodule("decoder.5"), nn.Sigmoid()))


@fault(autoencoder.faults, "architecture", "bottleneck", ("encoder.5", "decoder.0"))
def code_of_one(training: Training) -> None:
    """The code is one number."""
    replace(training.net, "encoder.5", nn.Linear(128, 1))
    replace(training.net, "decoder.0", nn.Linear(1, 128))


@fault(autoencoder.faults, "architecture", "dead-units", ("encoder.2", "encoder.3"))
def second_convolution_dead(training: Training) -> None:
    """The bias of the second convolution is so low that the ReLU behind it never opens."""
    nn.init.constant_(training.net.get_parameter("encoder.2.bias"), -20)


@fault(autoencoder.faults, "architecture", ("broadcast", "wrong-loss"), ("", "decoder"))
def images_of_all(training: Training) -> None:
    """The target has no channel axis, so that every image is compared with all of the batch."""
    batch = training.batch
    training.batch = lambda number: (batch(number)[0], batch(number)[1].squeeze(1))


# A variational autoencoder


class Variational(nn.Module):
    """Packs an image into a distribution of codes; returns the image again, the means and the logarithms of the variances."""

    def __init__(self, code: int = 8) -> None:
        super().__init__()
        self.encoder = nn.Sequential(nn.Flatten(), nn.Linear(64, 96), nn.GELU(), nn.Linear(96, 2 * code))
        self.decoder = nn.Sequential(nn.Linear(code, 96), nn.GELU(), nn.Linear(96, 64), nn.Unflatten(1, (1, 8, 8)))
        self.sampled_only = False

    def forward(self, images: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        mean, log_variance = self.encoder(images).chunk(2, 1)
        centre = mean.detach() if self.sampled_only else mean
        code = centre + torch.randn_like(mean) * (log_variance / 2).exp() if self.training else mean
        return self.decoder(code), mean, log_variance


def evidence_loss(net: nn.Module, x: Tensor, y: Tensor, *, divergence: float = 1.0) -> Tensor:
    """The squared error of images, in units of a spread of 0.3, and the divergence of the codes from a standard normal."""
    again, mean, log_variance = net(x)
    error = (again - y).square().flatten(1).sum(1) / (2 * 0.3**2)
    distance = (mean.square() + log_variance.exp() - 1 - log_variance).sum(1) / 2
    loss: Tensor = (error + divergence * distance).mean()
    return loss


@program(learns=0.6, chance=0.0)
def variational(seed: int) -> Training:
    """A variational autoencoder of digits, scored by the share of the pixels' variance that the mean code keeps."""
    torch.manual_seed(seed)
    x, _, test, _ = digits()
    return Training(
        Variational(),
        batches(x, x, 64, seed),
        evidence_loss,
        lambda net: 1 - float((net(test)[0] - test).square().mean() / (test - test.mean(0)).square().mean()),
        rate=6e-3,
    )


@fault(variational.faults, "optimisation", ("wrong-loss", "loss-scale"), ("encoder", "encoder.3"))
def divergence_heavy(training: Training) -> None:
    """The divergence weighs 100 times what it ought to, so that the codes say nothing."""
    training.loss = functools.partial(evidence_loss, divergence=100.0)


@fault(variational.faults, "architecture", ("output-activation", "saturation"), ("decoder", "decoder.2", "decoder.2.1"))
def sigmoid_of_pixels(training: Training) -> None:
    """The decoder ends in a sigmoid, while half of the pixels are below zero."""
    replace(training.net, "decoder.2", nn.Sequential(training.net.get_submodule("decoder.2"), nn.Sigmoid()))


@fault(variational.faults, "architecture", "detached", ("encoder", "encoder.3"))
def means_detached(training: Training) -> None:
    """The error does not reach the means of the codes."""
    put(training.net, sampled_only=True)


@fault(
    variational.faults, "architecture", ("initialisation", "nonfinite", "exploding-gradients"), ("encoder", "encoder.3", "decoder")
)
def variances_huge(training: Training) -> None:
    """The bias of the logarithms of the variances starts at 20."""
    with torch.no_grad():
        training.net.get_parameter("encoder.3.bias")[8:] = 20


# Adversaries


class Adversaries(nn.Module):
    """A generator and a critic.

    Called with noise, it returns what the critic says of fakes; with true points too, what it says of them and of fakes that
    are cut off the generator.
    """

    def __init__(self) -> None:
        super().__init__()
        self.generator = nn.Sequential(nn.Linear(4, 32), nn.ReLU(), nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 2))
        self.critic = nn.Sequential(nn.Linear(2, 32), nn.LeakyReLU(0.2), nn.Linear(32, 32), nn.LeakyReLU(0.2), nn.Linear(32, 1))
        self.always_cut = False

    def forward(self, noise: Tensor, true: Tensor | None = None) -> Any:
        fake = self.generator(noise)
        if true is None:
            return self.critic(fake.detach() if self.always_cut else fake)
        return self.critic(true), self.critic(fake.detach())


def crescent(count: int, seed: int) -> Tensor:
    """Returns points of the plane in the shape of a crescent off the centre."""
    across, noise = torch.randn(2, count, generator=generator(seed))
    return torch.stack((across + 1, across.square() - 1 + 0.2 * noise), 1)


def energy_distance(a: Tensor, b: Tensor) -> float:
    """Returns the energy distance of two sets of points, which is zero if they are of one distribution."""
    return float((2 * torch.cdist(a, b).mean() - torch.cdist(a, a).mean() - torch.cdist(b, b).mean()).clamp(min=0).sqrt())


def adversarial_loop(training: Training, model: nn.Module) -> Iterator[tuple[int, Tensor, Any, Any]]:
    """Trains the critic, then the generator, at every step. The loss is the generator's."""
    of_critic, of_generator = training.optimizers

    def update(optimizer: torch.optim.Optimizer, loss: Tensor, step: int) -> None:
        for group in optimizer.param_groups:
            group["lr"] = training.rate * training.schedule(step, training.steps) * group["share"]
        if training.clears:
            training.net.zero_grad()
        if loss.requires_grad:
            (training.sign * loss).backward()
        optimizer.step()

    for step in range(training.steps):
        training.net.train(training.trains)
        for optimizer in training.optimizers:
            for change in training.before_step:
                change(training, optimizer, step)
        noise, true = training.batch(step)
        says_true, says_fake = model(noise, true)
        update(of_critic, F.softplus(-says_true).mean() + F.softplus(says_fake).mean(), step)
        loss = training.loss(model, noise, true)
        update(of_generator, loss, step)
        yield step, loss, noise, true


@program(learns=-0.4, chance=-1.2)
def adversaries(seed: int) -> Training:
    """A generator and a critic of points in a crescent, scored by the energy distance of what is made."""
    torch.manual_seed(seed)
    net = Adversaries()
    noise, test = torch.randn(1024, 4, generator=generator(2)), crescent(1024, 10_000)
    return Training(
        net,
        batches(torch.randn(8192, 4, generator=generator(1)), crescent(8192, 3), 128, seed),
        lambda net, noise, true: F.softplus(-net(noise)).mean(),
        lambda net: -energy_distance(net.get_submodule("generator")(noise), test),
        rate=4e-3,
        loop=adversarial_loop,
        optimizers=[
            torch.optim.Adam([{"params": part.parameters(), "share": 1.0}], lr=4e-3, betas=(0.0, 0.99))
            for part in (net.critic, net.generator)
        ],
        steps=200,
    )


@fault(adversaries.faults, "architecture", "detached", ("", "generator", "generator.4"))
def fakes_always_cut(training: Training) -> None:
    """The fakes are cut off the generator in its own step too."""
    put(training.net, always_cut=True)


@fault(adversaries.faults, "optimisation", "rate-too-high", ("critic",))
def critic_races(training: Training) -> None:
    """The critic's rate is 100 times what it ought to be."""
    training.optimizers[0].param_groups[0]["share"] = 100.0


@fault(adversaries.faults, "architecture", ("no-nonlinearity", "bottleneck"), ("critic", "critic.1", "critic.3"))
def critic_linear(training: Training) -> None:
    """The critic's activations let everything through, so that it sees no more than the mean."""
    put(training.net.get_submodule("critic"), negative_slope=1.0)


@fault(adversaries.faults, "architecture", ("output-activation", "saturation"), ("generator", "generator.4", "generator.5"))
def generator_bounded(training: Training) -> None:
    """The generator ends in a sigmoid, while the points spread over more than that."""
    replace(training.net, "generator.5", nn.Sigmoid())


# A policy

MOVES = torch.tensor([[0, 0], [0, 1], [0, -1], [1, 0], [-1, 0]])
SIZE, TIME = 5, 8


def seen(place: Tensor, goal: Tensor) -> Tensor:
    """Returns what the policy sees: where it is and where it is told to go."""
    return torch.cat((place, goal), 1) / (SIZE // 2) - 1


def moved(place: Tensor, action: Tensor) -> Tensor:
    """Returns the places after a move on the board."""
    return (place + MOVES[action]).clamp(0, SIZE - 1)


def policy_loss(
    net: nn.Module, episode: dict[str, Tensor], goal: Tensor, *, axis: int = 1, bonus: float = 0.01, offset: float = 0.0
) -> Tensor:
    """The policy gradient of episodes, whose actions are drawn by the numbers in "noise"; rewards are of the true goal."""
    place, chances, rewards, entropy = episode["start"], [], [], torch.zeros(())
    for number in episode["noise"].unbind(1):
        log_shares = net(seen(place, episode["told"])).log_softmax(axis)
        shares = log_shares.detach().softmax(1)
        action = (shares.cumsum(1) < number.unsqueeze(1)).sum(1).clamp(max=len(MOVES) - 1)
        place = moved(place, action)
        chances.append(log_shares.gather(1, action.unsqueeze(1)).squeeze(1))
        rewards.append(-(place - goal).abs().sum(1).float())
        entropy = entropy - (log_shares.exp() * log_shares).sum(1).mean()
    returns = torch.stack(rewards, 1).flip(1).cumsum(1).flip(1)
    advantage = (returns - returns.mean(0)) / returns.std() + offset
    return -(torch.stack(chances, 1) * advantage).mean() - bonus * entropy / TIME


def arrivals(net: nn.Module, episode: dict[str, Tensor], goal: Tensor) -> float:
    """Returns the share of episodes that end at the goal when the likeliest move is made."""
    place = episode["start"]
    for _ in range(TIME):
        place = moved(place, net(seen(place, episode["told"])).argmax(1))
    return float((place == goal).all(1).float().mean())


def episodes(count: int, seed: int) -> tuple[dict[str, Tensor], Tensor]:
    """Returns starts, the goals that are told and the random numbers of episodes; and the goals that are rewarded."""
    random = generator(seed)
    start, goal = torch.randint(SIZE, (2, count, 2), generator=random)
    return {"start": start, "told": goal, "noise": torch.rand(count, TIME, generator=random)}, goal


@program(learns=0.85, chance=0.05)
def policy(seed: int) -> Training:
    """A policy on a board of 5 x 5 that learns to go where it is told, by REINFORCE."""
    torch.manual_seed(seed)
    test = episodes(512, 10_000)
    return Training(
        nn.Sequential(nn.Linear(4, 48), nn.Tanh(), nn.Linear(48, 48), nn.Tanh(), nn.Linear(48, len(MOVES))),
        batches(*episodes(8192, 1), 64, seed),
        policy_loss,
        lambda net: arrivals(net, *test),
        rate=1e-2,
    )


@fault(policy.faults, "architecture", ("wrong-axis", "wrong-loss"))
def shares_over_episodes(training: Training) -> None:
    """The softmax of the policy runs over the episodes."""
    training.loss = functools.partial(policy_loss, axis=0)


@fault(policy.faults, "optimisation", ("wrong-loss", "loss-scale"))
def entropy_heavy(training: Training) -> None:
    """The bonus of the entropy weighs so much that the policy stays random."""
    training.loss = functools.partial(policy_loss, bonus=10.0)


@fault(policy.faults, "data", ("target-scale", "noise"))
def no_baseline(training: Training) -> None:
    """A constant is left in the advantage, whose noise hides the rest."""
    training.loss = functools.partial(policy_loss, offset=-100.0)


@fault(policy.faults, "architecture", ("saturation", "initialisation"), ("4", "3"))
def decided_at_start(training: Training) -> None:
    """The last layer is drawn with a spread of 100, so that the policy tries nothing."""
    nn.init.normal_(training.net.get_parameter("4.weight"), std=100)
