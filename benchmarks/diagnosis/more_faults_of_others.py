"""Faults of the second half of the healthy trainings in `more.py`, each of one training only: mistakes made in writing it.

Importing this module registers them in `MORE[...].faults`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributions import Categorical
from torch.optim import SGD, Adam, Optimizer

from benchmarks.diagnosis.more import (
    MORE,
    Flow,
    Ratings,
    Scaled,
    Segmenter,
    TwoViews,
    WordVectors,
    critic_first,
    rewarded,
)
from benchmarks.diagnosis.programs.data import generator
from benchmarks.diagnosis.programs.sequences import replace
from benchmarks.diagnosis.training import Training, fault

__all__: list[str] = []


class Fed(nn.Module):
    """A net whose inputs are changed first."""

    def __init__(self, net: nn.Module, change: Callable[[Any], Any]) -> None:
        super().__init__()
        self.net, self.change = net, change

    def forward(self, x: Any) -> Any:
        return self.net(self.change(x))


def each_batch(training: Training, change: Callable[[int, Any, Any], tuple[Any, Any]]) -> None:
    """Changes the inputs and the target of each training batch, by its number."""
    batch = training.batch
    training.batch = lambda number: change(number, *batch(number))


def feed(training: Training, change: Callable[[Any], Any]) -> None:
    """Changes the inputs, in training and in evaluation."""
    score = training.score
    each_batch(training, lambda number, x, y: (change(x), y))
    training.score = lambda net: score(Fed(net, change))


def follow_with(training: Training, name: str, module: nn.Module) -> None:
    """Puts a module behind a layer, which keeps its parameters; the two are named `name`.0 and `name`.1."""
    replace(training.net, name, nn.Sequential(training.net.get_submodule(name), module))


# Denoiser


@fault(MORE["denoiser"].faults, "architecture", ("output-activation", "wrong-loss"), ("", "decoder", "decoder.4"))
def brightness_twice(training: Training) -> None:
    """The loss was changed to the one that takes logits, and the sigmoid at the end of the decoder stayed."""
    training.loss = lambda net, x, y: F.binary_cross_entropy_with_logits(net(x), y)


@fault(
    MORE["denoiser"].faults,
    "architecture",
    ("output-activation", "dead-units"),
    ("decoder", "decoder.3", "decoder.3.0", "decoder.3.1", "decoder.4"),
)
def rectified_before_sigmoid(training: Training) -> None:
    """The rhythm of convolution and ReLU does not stop before the sigmoid, so no pixel can be darker than one half."""
    follow_with(training, "decoder.3", nn.ReLU())


@fault(MORE["denoiser"].faults, "architecture", "bottleneck", ("encoder", "encoder.5", "encoder.5.0", "encoder.5.1", "decoder.0"))
def code_pooled(training: Training) -> None:
    """The code is averaged over all places, as it would be for a classifier, and spread out again."""
    follow_with(training, "encoder.5", nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Upsample(scale_factor=2)))


@fault(MORE["denoiser"].faults, "data", ("noise", "inputs-not-normalised"))
def noise_for_bytes(training: Training) -> None:
    """The noise has a spread that suits pixels of 0 to 255, while pixels are between 0 and 1."""
    score = training.score
    each_batch(training, lambda number, x, y: (x + 20 * torch.randn(x.shape, generator=generator(number)), y))
    training.score = lambda net: score(Fed(net, lambda x: x + 20 * torch.randn(x.shape, generator=generator(0))))


# Segmentation


class RowsSoftened(Segmenter):
    """A U-Net with a softmax over the last axis."""

    def forward(self, images: Tensor) -> Tensor:
        return super().forward(images).softmax(-1)


@fault(MORE["segmentation"].faults, "architecture", ("output-activation", "wrong-axis"), ("", "up", "up.2"))
def softmax_over_rows(training: Training) -> None:
    """A softmax, which the loss has no need for, runs over the pixels of a row instead of the classes."""
    training.net.__class__ = RowsSoftened


class WholeView(nn.Module):
    """Reads channels off as places by a view."""

    def forward(self, x: Tensor) -> Tensor:
        return x.permute(0, 2, 3, 1).reshape(len(x), 3, 16, 16)


@fault(MORE["segmentation"].faults, "architecture", "wrong-axis", ("", "up", "up.2", "up.2.0", "up.2.1"))
def logits_viewed(training: Training) -> None:
    """Channels were moved last for a layer, and are moved back by a reshape in place of a permute."""
    follow_with(training, "up.2", WholeView())


@fault(MORE["segmentation"].faults, "data", "labels-do-not-fit")
def masks_transposed(training: Training) -> None:
    """The masks were saved with the column first, and the images with the row first."""
    each_batch(training, lambda number, x, y: (x, y.transpose(1, 2)))


@fault(MORE["segmentation"].faults, "optimisation", "wrong-loss")
def background_ignored(training: Training) -> None:
    """The loss leaves out the background, label 0, as if it were padding."""
    training.loss = lambda net, x, y: F.cross_entropy(net(x), y, ignore_index=0)


# SimCLR


def contrastive(net: nn.Module, x: Tensor, scale: float) -> Tensor:
    """The contrastive loss of two noisy views of each image; cosines are multiplied with a scale."""
    views = torch.cat([x.roll((i, j), (2, 3)) + 0.2 * torch.randn_like(x) for i, j in torch.randint(-1, 2, (2, 2)).tolist()])
    z = net(views)
    alike = (z @ z.t() * scale).fill_diagonal_(-1e9)
    return F.cross_entropy(alike, torch.arange(len(z)).roll(len(x)))


class OverBatch(TwoViews):
    """An encoder whose embeddings are normalised along the batch."""

    def forward(self, images: Tensor) -> Tensor:
        return F.normalize(self.projection(self.encoder(images)), dim=0)


@fault(MORE["simclr"].faults, "architecture", ("wrong-axis", "normalisation"), ("", "projection", "projection.1"))
def normalised_over_batch(training: Training) -> None:
    """Each feature is normalised along the batch, where each embedding ought to be along its features."""
    training.net.__class__ = OverBatch


class AnyLength(TwoViews):
    """An encoder whose embeddings have any length."""

    def forward(self, images: Tensor) -> Tensor:
        embedding: Tensor = self.projection(self.encoder(images))
        return embedding


@fault(MORE["simclr"].faults, "architecture", "normalisation", ("", "projection", "projection.1"))
def embeddings_not_normalised(training: Training) -> None:
    """The embeddings are not normalised, so that their products are no cosines."""
    training.net.__class__ = AnyLength


@fault(MORE["simclr"].faults, "architecture", "bottleneck", ("projection", "projection.1", ""))
def projected_to_two(training: Training) -> None:
    """The projection has two features, one for each view, as was misread."""
    replace(training.net, "projection.1", nn.Linear(48, 2))


@fault(MORE["simclr"].faults, "optimisation", ("loss-scale", "wrong-loss", "attention-scale"))
def temperature_multiplied(training: Training) -> None:
    """Cosines are multiplied with a temperature of 0.05, not divided by it."""
    training.loss = lambda net, x, y: contrastive(net, x, scale=0.05)


@fault(MORE["simclr"].faults, "optimisation", ("wrong-loss", "ascent"))
def distances_for_similarities(training: Training) -> None:
    """The similarities have the sign of distances, so that views of one image are pushed apart."""
    training.loss = lambda net, x, y: contrastive(net, x, scale=-5.0)


# CLIP


@fault(MORE["clip"].faults, "architecture", ("initialisation", "loss-scale", "attention-scale"), ("",))
def scale_inverted(training: Training) -> None:
    """The logarithm of the temperature is taken for that of its inverse, so that logits start within 0.07."""
    nn.init.constant_(training.net.get_parameter("scale"), math.log(0.07))


@fault(
    MORE["clip"].faults,
    "architecture",
    "bottleneck",
    ("text", "text.0", "text.0.0", "text.0.1", "text.1"),
)
def text_pooled(training: Training) -> None:
    """The second tower averages over all places before its first layer, so that one number is left of each half."""
    replace(training.net, "text.0", nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten()))
    replace(training.net, "text.1", nn.Linear(1, 64))


@fault(MORE["clip"].faults, "architecture", "frozen", ("image", "image.1", "image.3"))
def image_tower_locked(training: Training) -> None:
    """The first tower is locked, as one that was trained before would be, but has random weights."""
    training.net.get_submodule("image").requires_grad_(False)


@fault(MORE["clip"].faults, "data", "labels-do-not-fit")
def halves_mismatched(training: Training) -> None:
    """The lower halves are in an order of their own, so that the labels pair those that do not belong together."""
    each_batch(training, lambda number, x, y: ((x[0], x[1][torch.randperm(len(x[1]), generator=generator(number))]), y))


# Triplets


class AlwaysDropped(TwoViews):
    """An encoder with dropout in evaluation, too."""

    def forward(self, images: Tensor) -> Tensor:
        return F.normalize(self.projection(F.dropout(self.encoder(images), 0.8)), dim=-1)


@fault(MORE["triplets"].faults, "architecture", "dropout", ("", "encoder", "encoder.4", "projection", "projection.0"))
def dropped_in_evaluation(training: Training) -> None:
    """A strong dropout before the projection is a function that was not told whether it is in training."""
    training.net.__class__ = AlwaysDropped


@fault(MORE["triplets"].faults, "architecture", ("bottleneck", "normalisation"), ("", "projection", "projection.1"))
def embedding_of_one(training: Training) -> None:
    """The embedding has one dimension, as a similarity would, so that normalising leaves no more than its sign."""
    replace(training.net, "projection.1", nn.Linear(48, 1))


@fault(MORE["triplets"].faults, "data", ("labels-do-not-fit", "wrong-loss"))
def positives_for_negatives(training: Training) -> None:
    """The data set returns anchor, negative and positive, and the loss takes them for anchor, positive and negative."""
    each_batch(training, lambda number, x, y: ((x[0], x[2], x[1]), y))


@fault(MORE["triplets"].faults, "optimisation", "wrong-loss")
def negatives_forgotten(training: Training) -> None:
    """The loss brings anchor and positive together, and pushes nothing apart."""
    training.loss = lambda net, x, y: F.pairwise_distance(net(x[0]), net(x[1])).mean()


# Distillation


@fault(MORE["distillation"].faults, "architecture", "bottleneck", ("student", "student.1", "student.2", "student.3"))
def student_too_small(training: Training) -> None:
    """The student was shrunk by a factor that leaves two hidden units."""
    replace(training.net, "student.1", nn.Linear(64, 2))
    replace(training.net, "student.3", nn.Linear(2, 10))


@fault(
    MORE["distillation"].faults, "architecture", ("wrong-axis", "wrong-loss"), ("", "teacher", "teacher.5", "student", "student.3")
)
def teacher_over_batch(training: Training) -> None:
    """The softmax of teacher and student runs over the batch, and the labels are not used besides."""

    def loss(net: Any, x: Tensor, y: Tensor) -> Tensor:
        with torch.no_grad():
            meant = (net.teacher(x) / 2).softmax(0)
        return 4 * F.kl_div((net(x) / 2).log_softmax(0), meant, reduction="batchmean")

    training.loss = loss


@fault(MORE["distillation"].faults, "data", "labels-do-not-fit")
def classes_by_name(training: Training) -> None:
    """The teacher was trained on folders in the order of their names: eight, five, four, and so on."""
    order = torch.tensor([8, 5, 4, 9, 1, 7, 6, 3, 2, 0])
    head: Any = training.net.get_submodule("teacher.5")
    with torch.no_grad():
        head.weight.copy_(head.weight[order])
        head.bias.copy_(head.bias[order])


@fault(MORE["distillation"].faults, "optimisation", ("not-in-optimizer", "frozen"), ("student", "student.1", "student.3"))
def teacher_in_the_optimizer(training: Training) -> None:
    """The optimizer got the parameters of the teacher, which are frozen, not those of the student."""
    training.parameters = lambda net: net.get_submodule("teacher").parameters()


# Mean teacher


@fault(MORE["mean-teacher"].faults, "architecture", "frozen", ("", "net", "net.1", "net.2", "net.5"))
def copy_forgotten(training: Training) -> None:
    """The average is no copy but the net itself, which is frozen along with it."""
    net: Any = training.net
    net.average = net.net.requires_grad_(False)


@fault(MORE["mean-teacher"].faults, "architecture", "dropout", ("net", "net.2", "net.3", "net.4", "net.5"))
def dropout_share(training: Training) -> None:
    """The share of units that is kept was given as the share that is dropped."""
    net: Any = training.net
    net.net[4].p = net.average[4].p = 0.98


@fault(MORE["mean-teacher"].faults, "optimisation", ("loss-scale", "wrong-loss"))
def consistency_heavy(training: Training) -> None:
    """Consistency has the weight that it is to reach in the end from the first step on, without a ramp-up."""

    def loss(net: Any, x: Tensor, y: Tensor) -> Tensor:
        with torch.no_grad():
            meant = net.average(x).softmax(-1)
        said = net(x + 0.1 * torch.randn_like(x))
        consistency: Tensor = (said.softmax(-1) - meant).square().sum(-1).mean()
        return F.cross_entropy(said, y) + 300 * consistency

    training.loss = loss


@fault(MORE["mean-teacher"].faults, "state", "weights-overwritten", ("net", "net.1", "net.2", "net.5"))
def net_follows_average(training: Training) -> None:
    """The average is not brought up to date by the net, but the net is brought back to the average, which stays as it was."""

    def follow(training: Training, optimizer: Optimizer, step: int) -> None:
        net: Any = training.net
        with torch.no_grad():
            for slow, fast in zip(net.average.parameters(), net.net.parameters(), strict=True):
                fast.lerp_(slow, 0.95)

    training.before_step = [follow]


# Skip-gram


@fault(MORE["skip-gram"].faults, "architecture", ("initialisation", "symmetry"), ("", "inner", "outer"))
def both_tables_zero(training: Training) -> None:
    """Both tables start at zero, where only one may, so that no gradient ever reaches either."""
    for table in ("inner", "outer"):
        nn.init.zeros_(training.net.get_parameter(f"{table}.weight"))


class OverPairs(WordVectors):
    """Word vectors which are compared in a softmax over the batch."""

    def forward(self, pair: tuple[Tensor, Tensor]) -> Tensor:
        chances: Tensor = super().forward(pair).softmax(0)
        return chances


@fault(MORE["skip-gram"].faults, "architecture", ("output-activation", "wrong-axis"), ("", "inner", "outer"))
def softmax_over_words(training: Training) -> None:
    """A softmax over the batch stands before the loss, which takes logits."""
    training.net.__class__ = OverPairs


@fault(MORE["skip-gram"].faults, "architecture", "bottleneck", ("", "inner", "outer"))
def vectors_of_one(training: Training) -> None:
    """The width of the vectors is that of what they return, which is one number."""
    training.net = WordVectors(200, 1)


@fault(MORE["skip-gram"].faults, "data", ("labels-do-not-fit", "labels-constant"))
def labels_filled_by_row(training: Training) -> None:
    """The labels are filled along the wrong axis: all words of the first sample are true neighbours, and all others none."""
    each_batch(training, lambda number, x, y: (x, torch.zeros_like(y).index_fill_(0, torch.tensor([0]), 1.0)))


@fault(MORE["skip-gram"].faults, "data", ("labels-do-not-fit", "noise"))
def negatives_are_neighbours(training: Training) -> None:
    """The false neighbours are drawn from the same text as the word, so that they are as likely as the true one."""

    def drawn(number: int, pair: tuple[Tensor, Tensor], labels: Tensor) -> tuple[Any, Any]:
        word, others = pair
        near = word.unsqueeze(1) // 20 * 20 + torch.randint(20, others.shape, generator=generator(number))
        return (word, torch.cat((others[:, :1], near[:, 1:]), 1)), labels

    each_batch(training, drawn)


# Recommender


class BiasesOnly(Ratings):
    """Ratings without the product of the vectors."""

    def forward(self, pair: Tensor) -> Tensor:
        user, film = pair.unbind(1)
        stars: Tensor = (self.user_bias(user) + self.film_bias(film)).squeeze(1) + self.mean
        return stars


@fault(MORE["recommender"].faults, "architecture", "never-ran", ("", "user", "film"))
def vectors_left_out(training: Training) -> None:
    """The biases were added in place of the product of the vectors, not to it."""
    training.net.__class__ = BiasesOnly


class Likes(Ratings):
    """Ratings of which a sigmoid is taken."""

    def forward(self, pair: Tensor) -> Tensor:
        return super().forward(pair).sigmoid()


@fault(MORE["recommender"].faults, "architecture", ("output-activation", "target-scale", "saturation"), ("",))
def stars_by_sigmoid(training: Training) -> None:
    """The output goes through a sigmoid, as for likes, though stars are 1 to 5."""
    training.net.__class__ = Likes


class MeansMultiplied(Ratings):
    """Ratings by the product of the means of two vectors."""

    def forward(self, pair: Tensor) -> Tensor:
        user, film = pair.unbind(1)
        biases = self.user_bias(user) + self.film_bias(film)
        stars: Tensor = self.user(user).mean(1) * self.film(film).mean(1) + biases.squeeze(1) + self.mean
        return stars


@fault(MORE["recommender"].faults, "architecture", ("bottleneck", "wrong-axis"), ("", "user", "film"))
def averaged_before_the_product(training: Training) -> None:
    """The vectors are reduced before they are multiplied, not after, so that one number of each is left."""
    training.net.__class__ = MeansMultiplied


@fault(MORE["recommender"].faults, "architecture", "initialisation", ("", "user", "film"))
def vectors_start_large(training: Training) -> None:
    """The vectors start with a spread of 3, as if each were a number of stars, so that their products are far beyond any."""
    for name in ("user", "film"):
        nn.init.normal_(training.net.get_parameter(f"{name}.weight"), std=3.0)


@fault(MORE["recommender"].faults, "data", ("bottleneck", "noise"))
def ids_share_buckets(training: Training) -> None:
    """Users and films are hashed into eight buckets each, so that all in a bucket are taken for one."""
    feed(training, lambda pair: pair % 8)


# Prices


class Unscaled(Scaled):
    """The net without the constants behind it."""

    def forward(self, x: Tensor) -> Tensor:
        said: Tensor = self.net(x)
        return said


@fault(MORE["prices"].faults, "architecture", "target-scale", ("", "net", "net.2"))
def constants_left_out(training: Training) -> None:
    """The outputs are not brought to the units of the prices."""
    training.net.__class__ = Unscaled


@fault(MORE["prices"].faults, "architecture", ("output-activation", "dead-units"), ("net", "net.2", "net.2.0", "net.2.1"))
def prices_rectified(training: Training) -> None:
    """As prices are never negative, a ReLU follows the last layer, but before the mean price is added."""
    follow_with(training, "net.2", nn.ReLU())


@fault(MORE["prices"].faults, "data", "inputs-not-normalised", ("", "net", "net.0"))
def one_column_in_other_units(training: Training) -> None:
    """One column, which was added later, is in units in which it is large and far from zero."""
    feed(training, lambda x: torch.cat((2000 + 500 * x[:, :1], x[:, 1:]), 1))


@fault(MORE["prices"].faults, "optimisation", ("rate-too-high", "loss-scale", "exploding-gradients"))
def squared_prices_by_sgd(training: Training) -> None:
    """Adam was replaced by SGD of a usual rate, for which the squared error of prices is far too steep."""
    training.optimizer = lambda parameters, rate: SGD(parameters, lr=1e-2)


# Noisy regression


@fault(MORE["noisy-regression"].faults, "architecture", ("broadcast", "wrong-loss"), ("", "2"))
def squeeze_forgotten(training: Training) -> None:
    """The output (n, 1) is compared with the target (n,), so that each output is compared with all targets."""
    training.loss = lambda net, x, y: (net(x) - y).square().mean()


@fault(MORE["noisy-regression"].faults, "architecture", ("normalisation", "wrong-axis"), ("2", "2.0", "2.1"))
def output_normalised_over_batch(training: Training) -> None:
    """A batch normalisation follows the output, as the target is standardised, but its scale is not learned."""
    follow_with(training, "2", nn.BatchNorm1d(1, affine=False))


@fault(MORE["noisy-regression"].faults, "data", "labels-do-not-fit")
def off_by_one_row(training: Training) -> None:
    """The target is read from a file with a header, and so is one row behind the inputs."""
    each_batch(training, lambda number, x, y: (x, y.roll(1, 0)))


@fault(MORE["noisy-regression"].faults, "optimisation", "weight-decay")
def regularised_to_nothing(training: Training) -> None:
    """Against overfitting to the noise, Adam has a weight decay that outweighs the data."""
    training.optimizer = lambda parameters, rate: Adam(parameters, lr=rate, weight_decay=3.0)


# Rare positives


@fault(MORE["rare-positives"].faults, "architecture", ("output-activation", "wrong-axis"), ("2", "2.0", "2.1"))
def softmax_of_one(training: Training) -> None:
    """A softmax over the classes follows the only output, which it makes 1 for all."""
    follow_with(training, "2", nn.Softmax(1))


@fault(MORE["rare-positives"].faults, "architecture", ("output-activation", "dead-units"), ("2", "2.0", "2.1"))
def logit_rectified(training: Training) -> None:
    """A ReLU follows the logit, which has to be negative for most samples."""
    follow_with(training, "2", nn.ReLU())


@fault(MORE["rare-positives"].faults, "optimisation", ("wrong-loss", "loss-scale"))
def weight_of_positives_inverted(training: Training) -> None:
    """The weight of the positives is their share among the negatives, not the inverse of it."""
    training.loss = lambda net, x, y: F.binary_cross_entropy_with_logits(net(x).squeeze(1), y, pos_weight=torch.tensor(0.03))


@fault(MORE["rare-positives"].faults, "data", "labels-constant")
def labels_compared_wrongly(training: Training) -> None:
    """The positive class is taken to be the one above 1, so that there is none."""
    each_batch(training, lambda number, x, y: (x, (y > 1).float()))


# Full batch


@fault(MORE["full-batch"].faults, "architecture", ("initialisation", "symmetry"), ("", "0", "1", "2"))
def weights_of_ones(training: Training) -> None:
    """All weights start at one, so that all hidden units are equal and stay so."""
    for name in ("0", "2"):
        nn.init.ones_(training.net.get_parameter(f"{name}.weight"))
        nn.init.zeros_(training.net.get_parameter(f"{name}.bias"))


@fault(MORE["full-batch"].faults, "architecture", ("normalisation", "wrong-axis"), ("0", "0.0", "0.1", "1"))
def softmax_over_samples(training: Training) -> None:
    """The hidden units go through a softmax over the samples of the table, which makes them all tiny."""
    follow_with(training, "0", nn.Softmax(0))


@fault(MORE["full-batch"].faults, "data", "inputs-not-normalised", ("", "0"))
def wine_as_measured(training: Training) -> None:
    """The columns are as they were measured, some around 1 and one up to 1700."""
    mean = torch.tensor([13.0, 2.3, 2.4, 19.5, 99.7, 2.3, 2.0, 0.36, 1.6, 5.1, 0.96, 2.6, 747.0])
    spread = torch.tensor([0.81, 1.1, 0.27, 3.3, 14.3, 0.63, 1.0, 0.12, 0.57, 2.3, 0.23, 0.71, 315.0])
    feed(training, lambda x: mean + spread * x)


@fault(MORE["full-batch"].faults, "data", "labels-do-not-fit")
def labels_as_booleans(training: Training) -> None:
    """The labels went through a column of booleans, so that the third kind of wine is called the second."""
    each_batch(training, lambda number, x, y: (x, y.bool().long()))


# L-BFGS


@fault(MORE["lbfgs"].faults, "architecture", ("output-activation", "saturation"), ("2", "2.0", "2.1"))
def tanh_at_the_end(training: Training) -> None:
    """A tanh follows the output, too, though targets are beyond -1 and 1."""
    follow_with(training, "2", nn.Tanh())


@fault(MORE["lbfgs"].faults, "architecture", ("saturation", "initialisation"), ("0", "1"))
def first_layer_saturated(training: Training) -> None:
    """The first layer starts with weights so large that its units are at -1 or 1."""
    nn.init.normal_(training.net.get_parameter("0.weight"), std=50.0)


@fault(MORE["lbfgs"].faults, "optimisation", "gradients-not-cleared")
def closure_does_not_clear(training: Training) -> None:
    """The closure does not clear the gradients, which add up over all of its calls."""

    def loop(training: Training, model: nn.Module) -> Iterator[tuple[int, Tensor, Any, Any]]:
        (optimizer,) = training.optimizers
        for step in range(training.steps):
            training.net.train(training.trains)
            for change in training.before_step:
                change(training, optimizer, step)
            inputs, target = training.batch(step)

            def closure(inputs: Any = inputs, target: Any = target) -> Tensor:
                loss = training.loss(model, inputs, target)
                loss.backward()  # type: ignore[no-untyped-call]
                return loss

            yield step, optimizer.step(closure).detach(), inputs, target  # type: ignore[arg-type, attr-defined]

    training.loop = loop


@fault(MORE["lbfgs"].faults, "state", ("stale-optimizer", "not-in-optimizer"), ("", "0", "2"))
def layers_made_anew(training: Training) -> None:
    """The layers were initialised by making them anew, after the optimizer had got the old ones."""
    replace(training.net, "0", nn.Linear(10, 32))
    replace(training.net, "2", nn.Linear(32, 1))


# Two optimizers


class Cut(nn.Module):
    """Cuts the graph."""

    def forward(self, x: Tensor) -> Tensor:
        return x.detach()


@fault(MORE["two-optimizers"].faults, "architecture", "detached", ("1", "2", "2.0", "2.1"))
def body_detached(training: Training) -> None:
    """As the body has an optimizer of its own, its features are detached for the head."""
    follow_with(training, "2", Cut())


@fault(MORE["two-optimizers"].faults, "architecture", ("initialisation", "symmetry", "dead-units"), ("1", "2"))
def body_starts_at_zero(training: Training) -> None:
    """The body starts at zero, where that was meant for the head, so that its ReLUs let no gradient through."""
    for name in ("1.weight", "1.bias"):
        nn.init.zeros_(training.net.get_parameter(name))


@fault(MORE["two-optimizers"].faults, "optimisation", "no-steps")
def cleared_before_the_steps(training: Training) -> None:
    """Each optimizer clears its gradients right before it steps, after backward."""

    def loop(training: Training, model: nn.Module) -> Iterator[tuple[int, Tensor, Any, Any]]:
        for step in range(training.steps):
            training.net.train(training.trains)
            inputs, target = training.batch(step)
            loss = training.loss(model, inputs, target)
            loss.backward()  # type: ignore[no-untyped-call]
            for optimizer in training.optimizers:
                for change in training.before_step:
                    change(training, optimizer, step)
                optimizer.zero_grad()
                optimizer.step()
            yield step, loss, inputs, target

    training.loop = loop


@fault(MORE["two-optimizers"].faults, "optimisation", "weight-decay", ("1",))
def body_decays(training: Training) -> None:
    """The weight decay, which was chosen for a small rate of AdamW, is given to the SGD of the body."""
    training.optimizers[0].param_groups[0]["weight_decay"] = 1.0


@fault(MORE["two-optimizers"].faults, "data", "inputs-not-normalised", ("", "0", "1"))
def divided_twice(training: Training) -> None:
    """The images are divided by 255 though they are of -1 to 1 already, and so are nearly zero."""
    feed(training, lambda x: x / 255)


# Graph


@fault(MORE["graph"].faults, "architecture", ("normalisation", "wrong-axis"), ("", "first", "second"))
def normalised_by_all_edges(training: Training) -> None:
    """The edges are divided by the number of all edges, as the sum was not told its axis, not by those of each node."""
    edges = (training.net.get_buffer("edges") > 0).float()
    training.net.register_buffer("edges", edges / edges.sum())


@fault(MORE["graph"].faults, "architecture", "bottleneck", ("", "first", "drop", "second"))
def smoothed_too_much(training: Training) -> None:
    """Each layer passes messages sixteen times, so that all nodes end up alike."""
    training.net.register_buffer("edges", torch.linalg.matrix_power(training.net.get_buffer("edges"), 16))


@fault(MORE["graph"].faults, "architecture", ("mask", "bottleneck"), ("", "first", "second"))
def only_loops(training: Training) -> None:
    """The threshold for edges is so high that only the loops stay, and nodes see no more than themselves."""
    training.net.register_buffer("edges", torch.eye(400))


@fault(MORE["graph"].faults, "data", ("labels-do-not-fit", "labels-constant"))
def unknown_is_class_zero(training: Training) -> None:
    """Nodes without a label have 0 in the table, and the loss takes that for the first class."""
    each_batch(training, lambda number, x, y: (x, y.clamp(min=0)))


@fault(MORE["graph"].faults, "data", ("labels-do-not-fit", "noise"), ("", "first", "second"))
def edges_in_another_order(training: Training) -> None:
    """The edges number the nodes in another order than the table of their features and labels."""
    order = torch.randperm(400, generator=generator(1))
    training.net.register_buffer("edges", training.net.get_buffer("edges")[order][:, order])


# Equation


@fault(
    MORE["equation"].faults,
    "architecture",
    ("vanishing-gradients", "no-nonlinearity", "detached"),
    ("", "net", "net.1", "net.3"),
)
def rectified_field(training: Training) -> None:
    """The activations are ReLUs, whose second derivative is zero, so that y'' is zero everywhere."""
    for name in ("net.1", "net.3"):
        replace(training.net, name, nn.ReLU())


def of_equation(net: nn.Module, x: Tensor, sign: float = 1.0, learns: bool = True) -> Tensor:
    """The error of y'' = -y with a sign before y, whose second derivative may be a constant to the optimizer."""
    x = x.detach().requires_grad_(True)
    field = net(x)
    (slope,) = torch.autograd.grad(field.sum(), x, create_graph=True)
    (bend,) = torch.autograd.grad(slope.sum(), x, create_graph=learns, retain_graph=True)
    loss: Tensor = (bend + sign * field).square().mean() + 10 * (field[0] ** 2 + (slope[0] - 1) ** 2).sum()
    return loss


@fault(MORE["equation"].faults, "architecture", "detached")
def bend_detached(training: Training) -> None:
    """The second derivative is taken without create_graph=True, so that no gradient runs through it."""
    training.loss = lambda net, x, y: of_equation(net, x, learns=False)


@fault(MORE["equation"].faults, "optimisation", "wrong-loss")
def sign_of_the_equation(training: Training) -> None:
    """A wrong sign makes the equation y'' = y."""
    training.loss = lambda net, x, y: of_equation(net, x, sign=-1.0)


@fault(MORE["equation"].faults, "data", ("labels-do-not-fit", "wrong-loss"))
def points_shuffled(training: Training) -> None:
    """The points are shuffled anew in each step, so that the first one, for which the start is asked, is any."""
    each_batch(training, lambda number, x, y: (x[torch.randperm(len(x), generator=generator(number))], y))


# Diffusion


def noised(x: Tensor, time: Tensor, noise: Tensor) -> Tensor:
    """The points at a time between 0 and 1."""
    return (math.pi / 2 * time).cos() * x + (math.pi / 2 * time).sin() * noise


@fault(MORE["diffusion"].faults, "architecture", ("output-activation", "dead-units"), ("net", "net.4", "net.4.0", "net.4.1"))
def activated_noise(training: Training) -> None:
    """The rhythm of linear layer and SiLU does not stop at the output, so that noise is hardly ever negative."""
    follow_with(training, "net.4", nn.SiLU())


@fault(MORE["diffusion"].faults, "architecture", ("normalisation", "wrong-axis"), ("net", "net.4", "net.4.0", "net.4.1"))
def two_outputs_normalised(training: Training) -> None:
    """A layer normalisation follows the output of two numbers, and leaves no more than which is larger."""
    follow_with(training, "net.4", nn.LayerNorm(2, elementwise_affine=False))


@fault(MORE["diffusion"].faults, "data", ("labels-do-not-fit", "noise"))
def noise_drawn_twice(training: Training) -> None:
    """The noise of the target is drawn anew, and is not the one that was added."""

    def loss(net: nn.Module, x: Tensor, y: tuple[()]) -> Tensor:
        time = torch.rand(len(x), 1)
        return F.mse_loss(net(noised(x, time, torch.randn_like(x)), time), torch.randn_like(x))

    training.loss = loss


@fault(MORE["diffusion"].faults, "optimisation", "wrong-loss")
def points_foretold(training: Training) -> None:
    """The target of the net is the clean point, while what makes points from its output expects the noise."""

    def loss(net: nn.Module, x: Tensor, y: tuple[()]) -> Tensor:
        time = torch.rand(len(x), 1)
        return F.mse_loss(net(noised(x, time, torch.randn_like(x)), time), x)

    training.loss = loss


# Flow


@fault(
    MORE["flow"].faults,
    "architecture",
    "no-nonlinearity",
    [f"steps.{index}{part}" for index in range(4) for part in ("", ".0", ".1", ".2")],
)
def couplings_linear(training: Training) -> None:
    """The small nets of the couplings have no activation."""
    for index in range(4):
        replace(training.net, f"steps.{index}.1", nn.Identity())


class NotSwapped(Flow):
    """Couplings that all change the same half."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        volume = x.new_zeros(len(x))
        a, b = x.chunk(2, 1)
        for step in self.steps:
            scale, shift = step(b).chunk(2, 1)
            a = a * scale.tanh().exp() + shift
            volume = volume + scale.tanh().squeeze(1)
        return torch.cat((a, b), 1), volume


@fault(MORE["flow"].faults, "architecture", "bottleneck", ("", *(f"steps.{index}" for index in range(4))))
def halves_not_swapped(training: Training) -> None:
    """The halves do not take turns, so that all couplings change the same one."""
    training.net.__class__ = NotSwapped


@fault(
    MORE["flow"].faults,
    "architecture",
    ("initialisation", "saturation"),
    [f"steps.{index}{part}" for index in range(4) for part in ("", ".0", ".2")],
)
def couplings_start_large(training: Training) -> None:
    """All layers of the couplings start with a spread of 3, while their last ones ought to start at zero."""
    for index in range(4):
        for part in (0, 2):
            nn.init.normal_(training.net.get_parameter(f"steps.{index}.{part}.weight"), std=3.0)


@fault(MORE["flow"].faults, "optimisation", "wrong-loss")
def volume_left_out(training: Training) -> None:
    """The logarithm of the volume is left out of the likelihood, so that all points are drawn to one."""
    training.loss = lambda net, x, y: (net(x)[0].square().sum(1) / 2 + math.log(2 * math.pi)).mean()


# Wasserstein


@fault(
    MORE["wasserstein"].faults,
    "architecture",
    ("output-activation", "saturation"),
    ("generator", "generator.4", "generator.4.0", "generator.4.1"),
)
def points_by_tanh(training: Training) -> None:
    """The generator ends in a tanh, as one of images does, while points are beyond -1 and 1."""
    follow_with(training, "generator.4", nn.Tanh())


@fault(
    MORE["wasserstein"].faults,
    "architecture",
    ("normalisation", "wrong-axis"),
    ("critic", "critic.4", "critic.4.0", "critic.4.1"),
)
def critic_normalised(training: Training) -> None:
    """A batch normalisation follows the critic's output, and so takes away the mean that tells true from false."""
    follow_with(training, "critic.4", nn.BatchNorm1d(1, affine=False))


@fault(
    MORE["wasserstein"].faults,
    "architecture",
    ("output-activation", "dead-units"),
    ("critic", "critic.4", "critic.4.0", "critic.4.1"),
)
def critic_rectified(training: Training) -> None:
    """The critic's values go through a ReLU, so that it cannot say less than nothing of a fake."""
    follow_with(training, "critic.4", nn.ReLU())


@fault(MORE["wasserstein"].faults, "optimisation", ("ascent", "wrong-loss"), ("critic",))
def critic_of_wrong_sign(training: Training) -> None:
    """The critic is trained to value fakes more than true points."""
    training.loop = partial(critic_first, sign=-1.0)


@fault(MORE["wasserstein"].faults, "data", "inputs-constant", ("generator", "generator.0"))
def one_noise_for_all(training: Training) -> None:
    """One noise is drawn for the batch and expanded to its size, so that all fakes of a batch are equal."""
    each_batch(training, lambda number, x, y: (x[:1].expand(128, -1), y))


# Actor and critic


def of_decisions(net: nn.Module, x: Tensor, sign: float = 1.0, late: int = 0, anew: bool = False) -> Tensor:
    """The loss of a policy and a value; rewards may come late, or be of an action that is sampled anew."""
    logits, value = net(x)
    policy = Categorical(logits=logits)
    action = policy.sample()  # type: ignore[no-untyped-call]
    gain = rewarded(x.roll(late, 0), action) - value
    if anew:
        action = policy.sample()  # type: ignore[no-untyped-call]
    chosen = policy.log_prob(action)  # type: ignore[no-untyped-call]
    spread = policy.entropy()  # type: ignore[no-untyped-call]
    loss: Tensor = -sign * (chosen * gain.detach()).mean() + 0.5 * gain.square().mean() - 0.01 * spread.mean()
    return loss


@fault(MORE["actor-critic"].faults, "architecture", "bottleneck", ("body", "body.2", "body.3", "actor", "value"))
def body_too_narrow(training: Training) -> None:
    """The body ends in one unit, as if it were the value."""
    replace(training.net, "body.2", nn.Linear(32, 1))
    replace(training.net, "actor", nn.Linear(1, 3))
    replace(training.net, "value", nn.Linear(1, 1))


@fault(MORE["actor-critic"].faults, "optimisation", ("wrong-loss", "labels-do-not-fit"))
def actions_sampled_twice(training: Training) -> None:
    """The action that is rewarded is sampled anew, and is not the one whose chance is raised."""
    training.loss = lambda net, x, y: of_decisions(net, x, anew=True)


@fault(MORE["actor-critic"].faults, "data", "labels-do-not-fit")
def rewards_one_late(training: Training) -> None:
    """The rewards in the memory are those of the state before."""
    training.loss = lambda net, x, y: of_decisions(net, x, late=1)


@fault(MORE["actor-critic"].faults, "optimisation", ("ascent", "wrong-loss"))
def policy_of_wrong_sign(training: Training) -> None:
    """The minus before the policy's part is missing, so that actions of little reward are made likely."""
    training.loss = lambda net, x, y: of_decisions(net, x, sign=-1.0)


# Q-learning


def of_values(net: Any, seen: tuple[Tensor, Tensor], *, stays: bool = False, over_all: bool = False, ends: bool = True) -> Tensor:
    """The loss of Q-learning: the place may be taken to stay, the maximum over all, and the end for a place like others."""
    state, action = seen
    after = (state + 2 * action - 1).clamp(0, 5)
    reward = (after == 5).float()
    with torch.no_grad():
        values = net.target(F.one_hot(state if stays else after, 6).float())
        best = values.amax() if over_all else values.amax(1)
        meant = reward + 0.9 * (1 - reward if ends else 1) * best
    return F.smooth_l1_loss(net(state).gather(1, action.unsqueeze(1)).squeeze(1), meant)


@fault(MORE["q-learning"].faults, "architecture", "wrong-axis", ("", "target", "target.2"))
def maximum_over_all(training: Training) -> None:
    """The maximum of the target's values was not told its axis, and is that of the whole batch."""
    training.loss = lambda net, x, y: of_values(net, x, over_all=True)


@fault(MORE["q-learning"].faults, "architecture", "initialisation", ("net", "net.2"))
def values_start_high(training: Training) -> None:
    """The bias of the output starts at 10, for optimism, while values are below 1."""
    nn.init.constant_(training.net.get_parameter("net.2.bias"), 10.0)


@fault(MORE["q-learning"].faults, "data", ("labels-do-not-fit", "wrong-loss"))
def next_place_is_the_same(training: Training) -> None:
    """The memory holds the place before the action twice, and not the place after it."""
    training.loss = lambda net, x, y: of_values(net, x, stays=True)


@fault(MORE["q-learning"].faults, "optimisation", "wrong-loss")
def end_not_marked(training: Training) -> None:
    """The end of the corridor is valued like any other place, though no steps follow it."""
    training.loss = lambda net, x, y: of_values(net, x, ends=False)


@fault(MORE["q-learning"].faults, "state", ("frozen", "untied"), ("target", "target.0", "target.2"))
def copy_never_updated(training: Training) -> None:
    """The copy of the net is never brought up to date."""
    training.before_step = []


@fault(MORE["q-learning"].faults, "state", "weights-overwritten", ("net", "net.0", "net.2"))
def net_loads_the_copy(training: Training) -> None:
    """The net loads the weights of its copy every 20 steps, instead of the copy those of the net."""

    def follow(training: Training, optimizer: Optimizer, step: int) -> None:
        net: Any = training.net
        if step % 20 == 0:
            net.net.load_state_dict(net.target.state_dict())

    training.before_step = [follow]
