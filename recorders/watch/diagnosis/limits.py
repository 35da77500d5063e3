"""Limits: how bad a thing must be to be named as a fault, each with its source."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor, nn

UPDATE_RANGE = (1e-4, 1e-2)
"""The usual size of an update relative to the weights: within a factor of ten of 1e-3.

Rule of thumb by A. Karpathy, course CS231n, "Neural Networks Part 3", section "Ratio of weights:updates".
"""

UPDATE_LIMITS = (1e-5, 1e-1)
"""Beyond these an update is a fault: within a factor of a hundred of Karpathy's 1e-3.

The second factor of ten is ours: small nets that train well, as those in `tests/recorders/watch/test_no_false_alarm.py`, have
typical updates of up to 4e-2.
"""

GRADIENT_DECAY = 1e-4
"""The smallest accepted ratio between the gradient norms of the first quarter of the layers and the last, each by its median.

It is ours; we know of no published one. An optimizer such as SGD moves layers in proportion to their gradients, so no learning rate
keeps all layers in `UPDATE_RANGE` if they differ by more than its width, a factor of 100. This is its square, because layers also
differ in size and in the size of their weights. No net in `tests/recorders/watch/test_no_false_alarm.py` comes near it.
"""

UNIT_SHARE = 0.5
"""The largest accepted share of dead units in a layer, and of saturated ones.

Source: the default of `threshold_layer`, 50 %, of the rules DeadRelu and SaturatedActivation of Amazon SageMaker Debugger. A few
are dead from the start in healthy nets with ReLU and the initialisation of He et al. (arXiv:1502.01852), and more in deep nets.
"""

DEAD_SHARE = 0.95
"""The share of dead units in a layer from which on they explain that nothing is learned. It is ours."""

RECENT = (8, 2048, 0.5)
"""For how long a unit that was active before must be idle to be dead: observations, elements, share of the recording.

The share is enough in place of the elements, so that a short recording tells, too; so many observations there must be in any case.
They are ours: a healthy unit that is active in one of 500 elements is idle for 2048 with a probability of 1.7 %, and a fault needs
more than `UNIT_SHARE` of such units.
"""

SIGMOIDS = 0.3
"""The ratio of the gradients of the first layer and of the last below which sigmoids between them are named.

The slope of a sigmoid is 1/4 at most, and each of them takes as much of the gradient. The limit is ours.
"""

SATURATED_SLOPE = 1 - 0.97**2
"""A unit is saturated if its mean slope is below this share of the steepest slope: that of a tanh whose output is 0.97.

Source of the 0.97: A. Karpathy, "Building makemore Part 3: Activations & Gradients, BatchNorm", who counts outputs beyond it.
"""

MASSIVE = (100.0, 1000.0)
"""An outlier is larger in magnitude than the first, and at least as many times the typical magnitude of its layer as the second.

Source: M. Sun et al., "Massive Activations in Large Language Models" (arXiv:2402.17762), who compare with the median magnitude. The
criterion of T. Dettmers et al. (arXiv:2208.07339), a magnitude of 6, holds for the hidden states of large transformers only: nets
without normalisation, and logits, reach it in health.
"""


class LossLimits(NamedTuple):
    """When a loss tells of a fault. All are ours, chosen on the programs of `benchmarks/diagnosis` that are not held out.

    Attributes:
        least: the number of values from which on it is judged.
        flat: the number of values from which on it should have fallen.
        long: the number of values from which on it is judged by how far it should have come.
        falls: by which share of the start it must fall.
        unsure: up to which share of the start its noise may hide that it falls.
        rises: by which share it must rise to be called rising.
        learns: below which share of the start it has come down.
        most: below which share of the first loss it has come down by most.
        well: below which share of the start it has come far.
        trivial: it must come below this share of the loss of a net that knows nothing of its inputs.
        rare: the share of labels of one kind below which batches differ by how many of them there are.
        near: up to which multiple of that loss it is where such a net comes to.
        initial: how many times the entropy of equal probabilities the first cross entropy may be.
        slow, fast: updates relative to the weights below and above which the rate explains a loss that does not fall. The range of
            Karpathy, see `UPDATE_RANGE`, is 1e-4 to 1e-2.
        early: the same of the first steps.
        thrown: how many times as high as the first loss those after it are, if the first steps were too large.
        probability: how far the mean probability may be from how often labels of 1 come.
        endless: how many times as far below zero as its start was from it, or as 1, is a loss that falls without end.
        decay: the ratio of gradients of early and late layers below which these explain a loss that does not fall.
    """

    least: int = 20
    flat: int = 50
    long: int = 100
    falls: float = 0.02
    unsure: float = 0.05
    rises: float = 0.1
    learns: float = 0.75
    most: float = 1 / 3
    well: float = 0.1
    trivial: float = 0.95
    rare: float = 0.1
    near: float = 1.05
    initial: float = 3.0
    slow: float = 2e-3
    fast: float = 0.3
    early: float = 0.2
    thrown: float = 1.15
    probability: float = 0.2
    endless: float = 100.0
    decay: float = 1e-2


LOSS = LossLimits()


class EqualLimits(NamedTuple):
    """When units are equal: from how many on, and how little their means and variances differ, of the mean square.

    Units that begin equal and get equal gradients stay equal up to rounding. Both limits are ours.
    """

    least: int = 4
    apart: float = 1e-8


EQUAL = EqualLimits()


TINY_GRADIENT = 1e-9
"""The steps of Adam shrink with gradients whose norm is below this, as its epsilon is 1e-8. It is ours."""


class SignalLimits(NamedTuple):
    """When outputs grow with depth: from how many layers on, and by which factor; and when one layer shrinks them. They are ours.

    The residual stream of a healthy transformer grows by the square root of its depth; nets with normalisation keep their scale.
    """

    layers: int = 4
    grown: float = 200.0
    shrunk: float = 1e-4


SIGNAL = SignalLimits()

DISCARDED = 3
"""How many times gradients are cleared before a typical step, if most batches are lost. It is ours."""


class DecayLimits(NamedTuple):
    """When a weight decay is too strong: how many times the gradient of the loss, or which share of the weights in a step.

    From `much` on a decay that is divided by the scale of gradients is too strong, too, if it ends as most of what Adam sees.
    Weights that lose a share of 1e-2 in each step are halved in 70 steps, and no usual setting comes near: SGD at 0.1 with 5e-4
    loses 5e-5, AdamW at 1e-3 with 0.1 loses 1e-4. All are ours.
    """

    of_gradient: float = 3.0
    of_weights: float = 1e-2
    much: float = 0.1


DECAYS = DecayLimits()


class OscillationLimits(NamedTuple):
    """When weights oscillate. All are ours.

    Norms that change at random turn in half to two thirds of the steps.

    Attributes:
        least, most: of how many steps the norms are judged.
        turns: the share of the steps in which a norm that rose falls, or the other way round.
        size: the typical change of a norm, relative to it, below which it does not matter.
    """

    least: int = 16
    most: int = 24
    turns: float = 0.9
    size: float = 1e-3


OSCILLATES = OscillationLimits()

RATE_ENDS = 1e-2
"""A schedule has ended when the rate is below this share of the highest."""

WIDE = 8
"""From so many units on a linear layer before another one is no factorisation of it. It is ours."""

WEAK = 0.1
"""The share of variance in the mean square of outputs of a first layer below which they hardly depend on its inputs. It is ours."""

FIRST_STEPS = 1.0
"""Updates of the first steps, relative to the weights, that leave little of the initial weights. It is ours."""

LARGE_INPUT, LARGE_TARGET = 50.0, 50.0
"""Magnitudes of floating-point inputs and targets that were not normalised: pixels go to 255. They are ours."""

FAR = 5.0
"""How many standard deviations the largest value of a typical batch of a target is from its mean, if few samples are to blame.
Of 64 samples from a normal distribution it is within 3.5 nearly always. It is ours."""

LARGE_OUTPUT = 10.0
"""The root mean square of what the first layer gives, from which on large inputs reach the layers after it. It is ours."""

COARSE = 2.0**-9
"""Updates relative to the weights below which weights in bfloat16 lose most of them: half the distance of neighbours, 2**-8."""

WHOLE = 128
"""From so many samples on a batch may be all the data there is, so that it comes again in each step. It is ours."""

FLAT = 1e-3
"""Inputs whose deviation is below this, or below this share of their mean, are constant. It is ours."""

SORTED = 15.0
"""How many times as much as at random the means of batches vary if the data is sorted. It is ours."""

VARIES = 1e-6
"""Outputs are the same for all inputs if their variance over a batch is below this share of their mean square. It is ours."""


class InitialLimits(NamedTuple):
    """When the weights of a net began far from where PyTorch begins. All are ours.

    The gain of weights is their root mean square times the square root of the fan-in: PyTorch draws 0.58, and the rules of Xavier
    and He want 1 and 1.4, so that the scale of the signal is kept.

    Attributes:
        gain, last: the largest accepted gain of a hidden layer, and of the last one, of which only the loss sees how large it is.
        bias: the largest accepted root mean square of a bias of a hidden layer.
        table: the largest accepted root mean square of an embedding, which PyTorch draws with 1.
        drowns: how many times as large as another of one width, in one module, with as many items or more it may be.
        overwritten: how many times as large weights may be as at the last step recorded, which is at most 128 steps ago.
        shift: the largest accepted root mean square of the bias of a normalisation whose scale is 1.
        least: the number of weights from which on one sees that they were drawn from an interval.
        normal: the number from which on one sees that they may be normal numbers.
        deviations: how many standard errors what is told of normal numbers may be off.
        wide: from so many inputs on a layer of one unit is narrow.
        many: from so many classes, or items, on one or two numbers are too few to tell them apart.
        passing: the share of paths that dropouts in a row must leave.
    """

    gain: float = 8.0
    last: float = 40.0
    bias: float = 8.0
    table: float = 2.5
    drowns: float = 20.0
    overwritten: float = 3.0
    shift: float = 0.2
    least: int = 64
    normal: int = 1024
    deviations: float = 5.0
    wide: int = 4
    many: int = 8
    passing: float = 0.05


INITIAL = InitialLimits()

NORM_EPSILON = 0.1
"""The largest accepted epsilon of a normalisation: PyTorch has 1e-5, and variances are about 1. It is ours."""

SMALL_EPSILON = 1e-4
"""An epsilon up to which it is the inputs that are small, not the epsilon that is large. It is ours."""

NORM_SPREAD = 0.5
"""The least accepted spread of what a normalisation gives, relative to its scale: there the epsilon is three variances. Ours."""

NORM_BEGUN = 0.5
"""The largest share of the initial statistics that batch norms may still have after many batches. It is ours."""


class ProbeLimits(NamedTuple):
    """When a run of a copy of the net shows a fault. All are ours.

    Attributes:
        bytes: of the parameters and buffers of the largest net that is copied.
        differs: the share of the largest difference, or of the largest value, below which differences are rounding.
        order: the effect of other positions, relative to that of other values, below which there is none.
        ignored: the share of the inputs from which on it matters that they have no effect.
        fades: the smallest effect of an input relative to the largest, beyond which effects fade out rather than end.
        alone, most: the entropy of a query relative to that of equal shares, below which it reads one key alone, and the share of
            queries that do. A sharp head that was learned reads others, too: with a share of 1e-3 it is above.
        even: how little less than that entropy it is if all keys are read alike.
        copies: the share of positions at which the likeliest token is the one that was put in.
        unscaled: the standard deviation of the scores of a query from which on they should have been scaled.
        dropped: the share of the outputs that a dropout must set to zero in training.
        outputs: the fewest outputs that tell of that.
        samples: the fewest samples that tell in how many directions the outputs of a layer differ.
        loss_near, loss_off: how near the loss is to what it is taken for, and how far from what it should be, relative to it.
        labels, told: how many labels are of a class that the net never says, at least, and which share of the others is right, at
            least.
        single: up to how many outputs a sample may have if these are values or scores.
        weights: the most weights that are moved.
        step: by how much weights move, relative to their size, to see how outputs change.
        cut: the share of a change that is not as gradients tell, from which on a part of the way is cut.
        felt: the change of outputs, relative to what is expected and to the step, below which weights are not felt.
        rank: how large the second direction is, relative to the first, if there is only one.
    """

    bytes: int = 2**30
    differs: float = 1e-3
    order: float = 1e-3
    ignored: float = 0.5
    fades: float = 1e-3
    alone: float = 1e-3
    most: float = 0.9
    even: float = 1e-6
    copies: float = 0.9
    unscaled: float = 1.5
    dropped: float = 0.02
    outputs: int = 16
    samples: int = 16
    loss_near: float = 0.15
    loss_off: float = 0.4
    labels: int = 8
    told: float = 0.8
    single: int = 2
    weights: int = 2**26
    step: float = 1e-3
    cut: float = 0.03
    felt: float = 0.01
    rank: float = 1e-3


PROBE = ProbeLimits()

MOVED = 1e-5
"""The change of a norm, relative to it, from which on weights were written to: the same weights have the same norm. It is ours."""

SHRUNK = 0.2
"""The share of their first norm below which weights have shrunk away."""


def _kinds_in(*files: str) -> frozenset[str]:
    """The names of the classes of `torch.nn` that are defined in these files."""
    kinds = [kind for kind in vars(nn).values() if isinstance(kind, type) and issubclass(kind, nn.Module)]
    return frozenset(kind.__name__ for kind in kinds if kind.__module__.rpartition(".")[2] in files)


ACTIVATIONS = _kinds_in("activation") - {"MultiheadAttention"}
"""Classes of activation functions."""
LINEAR = _kinds_in("linear", "conv", "sparse", "normalization", "batchnorm", "instancenorm") | {"Conv1D"}
"""Classes whose outputs are zero only if their weights are, which is how some are initialised: that is no death of units."""
WEIGHTED = _kinds_in("linear", "conv") | {"Conv1D"}
"""Classes of layers with weights that act on features."""
RESHAPING = _kinds_in("flatten", "dropout") | {"Identity"}
"""Classes that hand on the units of the layer before."""
NORMS = _kinds_in("normalization", "batchnorm", "instancenorm")
"""Classes that give all units the same mean and variance."""
WITHOUT_WEIGHTS = _kinds_in("activation", "dropout", "pooling", "padding", "flatten", "loss", "distance", "upsampling") - {
    "PReLU",
    "MultiheadAttention",
} | {"Identity"}
"""Classes without weights: that one is not called, as the dropout of attention that is fused, is no fault."""


def usual_growth(start: int, end: int) -> float:
    """The sum of the updates, relative to the weights before each, of weights that grow from zero in equal steps.

    It is 1 + 1/2 + 1/3 and so on, for the steps from `start`, counted from 0, to before `end`. A fresh small head, or an adapter
    that begins at zero, has such updates in health, and they are far above `UPDATE_LIMITS` in the first steps.

    >>> usual_growth(0, 4), usual_growth(3, 4)
    (1.8333333333333333, 0.3333333333333333)
    """
    return sum(1 / step for step in range(max(start, 1), end))


def is_idle(idle: Tensor, observations: int, elements: int) -> Tensor:
    """Whether units that were idle for so many of all observations, with so many elements of each unit, have died on the way.

    >>> import torch
    >>> is_idle(torch.tensor([60, 5, 0]), observations=100, elements=6400)
    tensor([ True, False, False])
    """
    least, many, share = RECENT
    enough = min(many / max(elements / max(observations, 1), 1), share * observations)
    return (idle >= least) & (idle >= enough)


def is_massive(largest: float, typical: float) -> bool:
    """Whether a magnitude is an outlier among values of this typical magnitude.

    >>> is_massive(2000.0, 0.5), is_massive(2000.0, 50.0), is_massive(5.0, 1e-6), is_massive(2000.0, 0.0)
    (True, False, False, False)
    """
    above, times = MASSIVE
    return typical > 0 and largest > above and largest >= times * typical


def relative_slope(mean: Tensor, square: Tensor, curve: str) -> Tensor:
    """The mean slope of a "tanh" or "sigmoid", relative to its steepest, from the means of its outputs and of their squares.

    >>> import torch
    >>> half, one = torch.tensor(0.5), torch.tensor(1.0)
    >>> relative_slope(half, half.square(), "sigmoid"), relative_slope(one, one, "tanh")
    (tensor(1.), tensor(0.))
    """
    return 1 - square if curve == "tanh" else 4 * (mean - square)  # tanh' = 1 - tanh^2; sigmoid' = sigmoid - sigmoid^2, at most 1/4


def shown_outliers(largest: float, typical: float, more: int) -> str:
    """How far outliers stick out, and in how many more layers they do."""
    what = f"outlier features: the largest magnitude is {largest:.2g}, {shown_times(largest / typical)} the typical {typical:.2g}"
    return what + (f", and in {more} more layers" if more else "")


def shown_range(ratio: float) -> str:
    """The size of an update, with the usual range."""
    low, high = UPDATE_RANGE
    return f"{ratio:.1e} of their norm; {low:.0e} to {high:.0e} is usual"


def shown_times(times: float) -> str:
    """How many times as large something is, in words.

    >>> shown_times(4.25), shown_times(1234.0), shown_times(6.327e26)
    ('4.2 times', '1,234 times', '6.3e+26 times')
    """
    return f"{times:.1f} times" if times < 10 else f"{times:,.0f} times" if times < 1e7 else f"{times:.1e} times"
