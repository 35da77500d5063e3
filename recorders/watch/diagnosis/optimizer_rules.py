"""Rules on the optimizer and its steps, on modes and on the sizes of weights."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from itertools import chain, pairwise
from statistics import fmean, median

from torch import nn

from recorders.watch.diagnosis.asked import LEAST, Moved, if_too_large, moved_between, share_of
from recorders.watch.diagnosis.evidence import Course, Evidence
from recorders.watch.diagnosis.finding import Finding, fault
from recorders.watch.diagnosis.limits import (
    COARSE,
    DECAYS,
    DISCARDED,
    FIRST_STEPS,
    LOSS,
    NORM_BEGUN,
    OSCILLATES,
    RATE_ENDS,
    SHRUNK,
    shown_range,
    shown_times,
)
from recorders.watch.diagnosis.steps import BATCH_NORMS, Early

STEPS_BETWEEN = 5
"""The fewest steps between two times at which a loss is thrown back."""


def not_cleared(known: Evidence) -> Iterator[Finding]:
    """Gradients of the step before are still there when new ones are added."""
    kept = known.fact("kept")
    if len(kept) >= 2 and share_of(kept) > 0.5:
        yield fault(
            "not-cleared", "optimizer", f"in {sum(kept):.0f} of {len(kept)} steps gradients were added to those of the step before"
        )


def foreign(known: Evidence) -> Iterator[Finding]:
    """An optimizer that holds parameters the net does not have, and lacks some of the net, perhaps from some step on."""
    number, step, held, trainable, strange = map(known.fact, ("optimizer", "step", "held", "trainable", "foreign"))
    if max(strange, default=0.0) and max(held) < max(trainable):
        mine = f"{max(held):.0f} of the {max(trainable):.0f} of the net"
        what = f"it holds {max(strange):.0f} parameters that the net does not have, and {mine}"
        yield fault("foreign-parameters", "optimizer", what)
        return
    first = dict[float, tuple[float, float]]()
    for one, at, now, all_of_net, others in zip(number, step, held, trainable, strange, strict=False):  # a file may lack some
        had, without = first.setdefault(one, (now, others))
        if now < had and others > without and now < all_of_net:
            what = f"it holds {now:.0f} of the {all_of_net:.0f} parameters of the net, and held {had:.0f} before"
            yield fault("foreign-parameters", "optimizer", what, int(at))
            return


def all_frozen(known: Evidence) -> Iterator[Finding]:
    """No parameter of the net requires a gradient any more."""
    step, trainable = known.fact("step"), known.fact("trainable")
    off = next((at for at in range(len(step)) if not any(trainable[at:])), len(step))
    if 0 < off <= len(step) - 2:
        what = "no parameter of the net requires a gradient any more"
        yield fault("frozen", "optimizer", what, int(step[off]), causes=("frozen", "no-steps"))


def discarded(known: Evidence) -> Iterator[Finding]:
    """Gradients are cleared again and again before a step. Once is usual: the loss of a generator reaches both nets."""
    cleared = known.fact("discarded")
    if cleared and median(cleared) >= DISCARDED:
        what = f"in a typical step gradients were cleared {median(cleared):.0f} times before the optimizer stepped"
        yield fault("gradients-discarded", "optimizer", what)


def rates(known: Evidence) -> Iterator[Finding]:
    """The learning rate is 0, or ends early."""
    rate = known.fact("rate")
    if not rate:
        return
    highest = max(rate)
    if highest == 0:
        yield fault("rate-is-zero", "optimizer", f"the learning rate is 0 in all {len(rate)} steps recorded")
    elif len(rate) >= LEAST and rate[-1] < RATE_ENDS * highest:
        step = known.fact("step")
        over = next(at for at in range(len(rate) - 1, -1, -1) if rate[at] >= RATE_ENDS * highest) + 1
        if step[over] < 0.5 * step[-1]:
            what = f"from step {step[over]:.0f} of {step[-1]:.0f} on the learning rate is {rate[-1]:.1e}, after {highest:.1e}"
            yield fault("rate-ends-early", "optimizer", what, int(step[over]))


def optimizer_state(known: Evidence) -> Iterator[Finding]:
    """The optimizer is made anew, climbs, holds foreign parameters, or has odd options."""
    numbers = known.fact("optimizer")
    if len(numbers) >= LEAST and len({*numbers}) > 0.5 * len(numbers):
        yield fault("optimizer-made-anew", "optimizer", f"{len({*numbers})} optimizers made {len(numbers)} steps")
    age = known.fact("age")
    if len(age) >= LEAST and max(age) <= 1:
        yield fault("optimizer-made-anew", "optimizer", f"its state has seen one step at most, in each of {len(age)} steps")
    if any(known.fact("ascends")):
        yield fault("ascends", "optimizer", "maximize=True: each step makes the loss larger", severity="notice")
    epsilon = max(known.fact("epsilon"), default=0.0)
    if epsilon > 1e-3:
        yield fault("large-epsilon", "optimizer", f"its epsilon is {epsilon:g}; the default is 1e-8")
    momentum, second = max(known.fact("momentum"), default=0.0), min(known.fact("second momentum"), default=math.nan)
    if momentum > 0.98:
        yield fault("odd-momentum", "optimizer", f"its momentum is {momentum:g}; 0.9 is usual")
    elif second < 0.5:
        yield fault("odd-momentum", "optimizer", f"its second beta is {second:g}; 0.999 is usual")
    coarse, ratio = max(known.fact("coarse"), default=0.0), known.ratio
    if coarse > 0.5 and ratio < COARSE and any(any(course.values) for course in _all(known.gradients)):
        what = f"{coarse:.0%} of the weights have 16 bits, and a typical step changes them by {ratio:.1e} of their norm"
        yield fault("coarse-weights", "optimizer", what)


def between_steps(known: Evidence) -> Iterator[Finding]:
    """Something else than the optimizer writes to the weights."""
    if known.steps is None:
        return
    found, each = [], [*zip(known.steps["optimizer"].values, known.steps["written"].values, strict=True)]
    moved = moved_between(known)
    where, which = _moved_layer(known, moved)
    several = [[value for number, value in each if number == optimizer] for optimizer in sorted({number for number, _ in each})]
    for values in [moved.at, *several]:
        written = [value for value in values if math.isfinite(value)]
        if sum(written) < 2:
            continue
        what = f"in {sum(written):.0f} of {len(written)} steps {which} were written to since the step before"
        # In each step it is meant, as the clipping of weights is. Averages that are put in their place to evaluate do no harm.
        seldom, early = share_of(written) < 0.8, sum(written[: Early().first]) >= 2
        harm = early or (known.loss is not None and times_thrown_back(known.loss) >= 2)
        found.append(fault("written-between-steps", where, what, severity="warning" if seldom and harm else "notice"))
    yield from sorted(found, key=lambda one: one.severity == "notice")[:1]


def _moved_layer(known: Evidence, moved: Moved) -> tuple[str, str]:
    """The first layer whose weights are not what the step before left, if those of most are; else "(net)"; and which, in words."""
    if not moved.layers or 2 * len(moved.layers) > len(known.before):
        return "(net)", "the weights"
    more = f" and {len(moved.layers) - 1} more layers" if len(moved.layers) > 1 else ""
    return moved.layers[0], f"the weights of {moved.layers[0]}{more}"


def times_thrown_back(course: Course) -> int:
    """How many times a loss was higher after a step than before it, by far more than its noise."""
    found, least, times, last = course.finite, 6 * course.noise(), 0, -STEPS_BETWEEN
    for at in range(3, len(found) - 2):
        if at - last >= STEPS_BETWEEN and median(found[at : at + 3]) - median(found[at - 3 : at]) > least:
            times, last = times + 1, at
    return times


def modes(known: Evidence) -> Iterator[Finding]:
    """Training in evaluation mode, evaluation in training mode, batch norms that stand still, much dropout."""
    evaluating = known.fact("evaluating")
    if evaluating and share_of([share == 1 for share in evaluating]) > 0.5:
        yield fault("evaluation-mode", "(net)", "dropout and batch norms are in evaluation mode while the optimizer steps")
    if known.inference > 0.5:
        yield fault("training-mode", "(net)", "dropout and batch norms are in training mode while gradients are off")
    if still := max(known.fact("still"), default=0.0):
        where = _first(known, lambda module: isinstance(module, BATCH_NORMS) and module.momentum == 0)
        yield fault("statistics-stand-still", where, f"the momentum of {still:.0f} batch norms is 0")
    elif slow := {name: share for name, module in known.modules.items() if (share := _share_begun(module)) > NORM_BEGUN}:
        where, share = next(iter(slow.items()))
        momentum, batches = known.modules[where].momentum, known.modules[where].num_batches_tracked
        what = f"its momentum is {momentum:g}, so after {batches} batches {share:.0%} of what its statistics began with is left"
        yield fault("statistics-stand-still", where, what)
    dropout = max(known.fact("dropout"), default=0.0)
    if dropout >= 0.8:
        where = _first(known, lambda module: getattr(module, "p", 0) == dropout)
        yield fault("much-dropout", where, f"a dropout leaves out {dropout:.0%} of its inputs")


def _share_begun(module: nn.Module) -> float:
    """How much of the running statistics of a batch norm is still what they began with; 0 of other modules, and of few batches."""
    if not isinstance(module, BATCH_NORMS) or module.num_batches_tracked is None or not module.momentum:
        return 0.0
    batches = int(module.num_batches_tracked)
    return float((1 - module.momentum) ** batches) if batches >= LOSS.long else 0.0


def _first(known: Evidence, holds: Callable[[nn.Module], bool]) -> str:
    """The first module of which it holds; "(net)" if the modules are not known."""
    return next((name for name, module in known.modules.items() if holds(module)), "(net)")


def gradient_sizes(known: Evidence) -> Iterator[Finding]:
    """The norm of all gradients: constant and tiny if they are clipped, tiny from the start if the loss is scaled down."""
    courses = {tuple(course.values) for course in _all(known.gradients)}  # weights that layers share have one gradient
    totals = [math.sqrt(math.fsum(value * value for value in at)) for at in zip(*courses, strict=False)] if courses else []
    totals = [total for total in totals if total > 0 and math.isfinite(total)]
    if len(totals) < LEAST:
        return
    ordered = sorted(totals)
    middle = ordered[len(ordered) // 2]
    if middle < 1e-2 and ordered[-1] - ordered[0] < 1e-2 * middle:
        yield fault("clipped", "optimizer", f"the norm of all gradients is {middle:.1e} in every step")
    elif middle < 1e-6:
        yield fault("tiny-gradients", "loss", f"the norm of all gradients is {middle:.1e} in a typical step")


def first_steps(known: Evidence) -> Iterator[Finding]:
    """The first steps change the weights by about their own size."""
    finite = known.loss.finite if known.loss is not None else []
    thrown = len(finite) > LEAST and fmean(finite[1:LEAST]) > LOSS.thrown * finite[0] > 0
    soon = known.ratio > 0.1 * FIRST_STEPS  # a small head grows, and is then changed less
    if known.early_ratio > (FIRST_STEPS if soon else 3 * FIRST_STEPS) or (known.early_ratio > LOSS.early and thrown):
        what = f"each of the first steps changes the weights by {shown_range(known.early_ratio)}"
        causes = ("rate-too-high", "loss-scale")
        yield fault("updates-too-large", "optimizer", what, 0, causes=causes, severity=if_too_large(known))


def oscillating(known: Evidence) -> Iterator[Finding]:
    """The norms of most weights go up and down in turn: steps follow each other in opposite directions."""
    courses = [
        course.values[: OSCILLATES.most] for layer in known.weights.values() for path, course in layer.items() if "bias" not in path
    ]
    known_courses = [values for values in courses if len(values) > OSCILLATES.least and all(map(math.isfinite, values))]
    hit = []
    for values in known_courses:
        changes = [after - before for before, after in pairwise(values)]
        turns = share_of([one * other < 0 for one, other in pairwise(changes)])
        if turns > OSCILLATES.turns and median(map(abs, changes)) > OSCILLATES.size * median(values):
            hit.append(turns)
    if hit and len(hit) > 0.5 * len(known_courses):
        what = f"the norms of {len(hit)} of {len(known_courses)} weights go up and down in turn, in {median(hit):.0%} of the steps"
        yield fault("oscillating-weights", "optimizer", what)


def weight_decay(known: Evidence) -> Iterator[Finding]:
    """A weight decay that takes off much of the weights in each step, or is most of what Adam sees."""
    decay = max(known.fact("decay"), default=0.0)
    if not decay:
        return
    if any(known.fact("coupled")):
        first, late = _decay_of_gradients(known, decay, slice(LEAST)), _decay_of_gradients(known, decay, slice(-LEAST, None))
        if first > DECAYS.of_gradient or (decay >= DECAYS.much and late > 1):
            what = (
                f"the weight decay of {decay:g} adds {shown_times(max(first, late))} as much to a typical gradient as the loss does"
            )
            yield fault("strong-weight-decay", "optimizer", what)
    else:
        rate = max(known.fact("rate"), default=0.0)
        if rate * decay > DECAYS.of_weights:
            what = f"each step takes {rate * decay:.2%} off the weights: a weight decay of {decay:g} at a learning rate of {rate:g}"
            yield fault("strong-weight-decay", "optimizer", what)


def _decay_of_gradients(known: Evidence, decay: float, steps: slice) -> float:
    """How many times as much as the loss a decay adds to a typical gradient in some of the steps recorded; 0 if not known."""
    pairs = [
        (weight, gradient)
        for layer, courses in known.weights.items()
        for path, course in courses.items()
        if "bias" not in path and (of_loss := known.gradients.get(layer, {}).get(path)) is not None and len(of_loss) == len(course)
        for weight, gradient in zip(course.values[steps], of_loss.values[steps], strict=True)
    ]
    shares = [decay * weight / max(gradient, 1e-30) for weight, gradient in pairs if math.isfinite(weight + gradient)]
    return median(shares) if shares else 0.0


def weight_sizes(known: Evidence) -> Iterator[Finding]:
    """Weights that shrink towards zero."""
    courses = [course for layer in known.weights.values() for path, course in layer.items() if "bias" not in path]
    ends = [(course.values[0], course.values[-1]) for course in courses if len(course) >= LEAST and course.values[0] > 0]
    shrunk = [after / before for before, after in ends if math.isfinite(after)]
    if shrunk and sorted(shrunk)[len(shrunk) // 2] < SHRUNK:
        what = f"the norm of a typical weight fell to {sorted(shrunk)[len(shrunk) // 2]:.1%} of what it was"
        decay = max(known.fact("decay"), default=0.0)
        yield fault("shrinking-weights", "optimizer", what + (f", at a weight decay of {decay:g}" if decay else ""))


def _all(courses: object) -> list[Course]:
    return [*chain.from_iterable(layer.values() for layer in courses.values())]  # type: ignore[attr-defined]


RULES = (
    not_cleared,
    discarded,
    foreign,
    all_frozen,
    rates,
    optimizer_state,
    between_steps,
    modes,
    gradient_sizes,
    first_steps,
    oscillating,
    weight_decay,
    weight_sizes,
)
"""Each looks at what is known of a training, and yields what it finds."""
