"""The pictures in docs/findings/pictures: of each kind of finding its planted case beside the healthy training most like it.

Run: python benchmarks/findings_pictures.py [kind ...]. Beside the pictures it writes what they show and how `findings` tells of the
planted case, without numbers, into benchmarks/results/findings_pictures.json. `findings_pages.py` then writes the pages anew.

Check: python benchmarks/findings_pictures.py --check. It ends with status 1 if a picture would show other things now than when it
was made, is not the one that was made, or is too large, or if `findings` says other things. CI does this. Needs the extra plot.
"""

from __future__ import annotations

import difflib
import hashlib
import itertools
import json
import math
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import cache, cached_property, partial
from pathlib import Path
from typing import Any

import torch
from pictures import words
from torch import Tensor, nn

from recorders import findings, learn
from recorders.watch.diagnosis.evidence import Evidence, evidence
from recorders.watch.diagnosis.finding import Finding
from recorders.watch.diagnosis.layer_rules import largest_and_typical
from recorders.watch.diagnosis.limits import (
    COARSE,
    INITIAL,
    LARGE_INPUT,
    LARGE_TARGET,
    LOSS,
    MASSIVE,
    PROBE,
    SHRUNK,
    SIGNAL,
    UNIT_SHARE,
    UPDATE_LIMITS,
    UPDATE_RANGE,
)
from recorders.watch.diagnosis.steps import Early

sys.path.insert(0, str(Path(__file__).parent.parent))
from benchmarks.diagnosis.planted import CASES, CLASSES, COUNTERPARTS, Setup, planted, without_fault

ROOT = Path(__file__).parent.parent
IMAGES = ROOT / "docs" / "findings" / "pictures"
MADE = ROOT / "benchmarks" / "results" / "findings_pictures.json"
LARGEST = 25_000  # bytes
HEALTHY, PLANTED, LIMIT = "#0072B2", "#D55E00", "#444444"


class Run:
    """A training that has ended.

    Attributes:
        setup: what was trained.
        label, color: of its lines.
    """

    def __init__(self, setup: Setup, label: str, color: str) -> None:
        torch.set_num_threads(1)
        setup.train()
        self.setup, self.label, self.color = setup, label, color

    @cached_property
    def known(self) -> Evidence:
        return evidence(self.setup.recorder)

    def outputs_of(self, name: str) -> Tensor:
        """What a layer returns for a batch that was not trained on, samples down and units across."""
        seen: list[Tensor] = []
        hook = self.setup.net.get_submodule(name).register_forward_hook(lambda module, args, out: seen.append(out.detach()))
        self.setup.net.eval()(self.setup.batch(1000)[0])
        hook.remove()
        return seen[0].float()


@cache
def healthy_run(counterpart: Callable[[Setup], Any] | None, kind: str) -> Run:
    return Run(without_fault(kind if counterpart else ""), "healthy", HEALTHY)


@cache
def runs(kind: str) -> tuple[Run, Run]:
    """The healthy training and the planted one."""
    healthy = healthy_run(COUNTERPARTS.get(kind), kind)
    if kind in CASES:
        return healthy, Run(planted(kind), "planted", PLANTED)
    slow = Setup()  # of "left-range", which is no fault by itself
    slow.rate /= 10
    return healthy, Run(slow, "another run", PLANTED)


def found(kind: str) -> Finding:
    """How `findings` tells of the planted case."""
    good, faulty = runs(kind)
    against = None if kind in CASES else learn(good.setup.recorder)
    example, target = faulty.setup.batch(faulty.setup.done) if faulty.setup.shows_example else (None, None)
    told = findings(faulty.setup.recorder, against=against, example=example, target=target)
    matching = [one for one in (*told, *told.notices) if one.kind == kind]
    if not matching:
        raise LookupError(f"{kind} is not found in its planted case")
    return matching[0]


def said(one: Finding) -> str:
    """The first part of the finding as it is printed."""
    return f"{one.layer}: {one.what}" + ("" if one.since is None else f", since tick {one.since}")


# What is drawn: each function draws one kind of chart, of a quantity that it is given


def over_steps(
    axes: Any,
    both: Sequence[Run],
    of: Callable[[Run], Sequence[float]],
    label: str,
    *,
    log: bool = False,
    limits: Mapping[str, float] | None = None,
    band: tuple[float, float, str] | None = None,
    mark: tuple[float, str] | None = None,
    across: str = "step",
) -> None:
    """A line for each run over the steps of the planted one, thresholds across, and a moment down."""
    most = len(of(both[-1]))
    for run in both:
        values = of(run)[:most]
        places = _recorded(len(values)) if across == "step" and len(values) < run.setup.steps else range(len(values))
        axes.plot(places, values, color=run.color, label=run.label, linewidth=1.6)
    _thresholds(axes.axhline, limits)
    if band is not None:
        axes.axhspan(*band[:2], color="tab:green", alpha=0.12, linewidth=0, label=band[2])
    if mark is not None:
        axes.axvline(mark[0], color=LIMIT, linestyle=":", linewidth=1.2, label=mark[1])
    axes.set(xlabel=across, ylabel=label, yscale="log" if log else "linear")


def _recorded(count: int) -> Sequence[int]:
    """The first steps of those that `presets.health()` records."""
    return [*itertools.islice(filter(Early(), itertools.count()), count)]


def by_layer(
    axes: Any,
    both: Sequence[Run],
    of: Callable[[Run], Mapping[str, float]],
    label: str,
    *,
    log: bool = False,
    limits: Mapping[str, float] | None = None,
) -> None:
    """Each layer in network order: bars, or points if the axis is logarithmic, which has no place for the foot of a bar."""
    measured = {run.label: of(run) for run in both}
    names = list(max(measured.values(), key=len))
    for shift, run in zip((-0.2, 0.2), both, strict=True):
        values = {names.index(name): value for name, value in measured[run.label].items() if name in names}
        if log:
            axes.plot(list(values), list(values.values()), "o-", color=run.color, label=run.label, linewidth=1.0)
        else:
            places = [place + shift for place in values]
            axes.bar(places, list(values.values()), 0.38, color=run.color, label=run.label)
            for place, value in zip(places, values.values(), strict=True):
                if value == 0:
                    axes.annotate("0", (place, 0), (0, 2), textcoords="offset points", ha="center", color=run.color)
    _thresholds(axes.axhline, limits)
    axes.set_xticks(range(len(names)), names)
    axes.set(xlabel="layer", ylabel=label, yscale="log" if log else "linear")


def by_unit(
    axes: Any,
    both: Sequence[Run],
    of: Callable[[Run], tuple[Tensor, Tensor | None]],
    label: str,
    *,
    across: str = "unit",
    log: bool = False,
    limits: Mapping[str, float] | None = None,
) -> None:
    """A point for each unit, with a bar if its spread is given."""
    for shift, run in zip((-0.12, 0.12), both, strict=True):
        values, spread = of(run)
        places = torch.arange(len(values)) + shift
        axes.errorbar(places, values, spread, fmt="o", color=run.color, label=run.label, markersize=3.5, linewidth=1.0)
    _thresholds(axes.axhline, limits)
    axes.set(xlabel=across, ylabel=label, yscale="log" if log else "linear")


def distribution(
    axes: Any,
    both: Sequence[Run],
    of: Callable[[Run], Tensor],
    label: str,
    *,
    ends: tuple[float, float] | None = None,
    limits: Mapping[str, float] | None = None,
) -> None:
    """A histogram for each run, as a share of the values."""
    drawn = {run.label: of(run).flatten().float() for run in both}
    low, high = ends or (min(x.min().item() for x in drawn.values()), max(x.max().item() for x in drawn.values()))
    bins = torch.linspace(low, high, 41).numpy()
    for run in both:
        values = drawn[run.label]
        axes.hist(values.numpy(), bins, weights=torch.full_like(values, 1 / len(values)).numpy(), color=run.color, alpha=0.55)
        axes.plot([], [], "s", color=run.color, alpha=0.55, label=run.label)
    _thresholds(axes.axvline, limits)
    axes.set(xlabel=label, ylabel="share", yscale="log", ylim=(1e-4, 2))


def labels_by_batch(pair: Sequence[Any], both: Sequence[Run]) -> None:
    """How often each label comes in each batch, side by side."""
    for axes, run in zip(pair, both, strict=True):
        labels = [run.setup.batch(step)[1] for step in range(run.setup.steps)]
        counts = torch.stack([one.bincount(minlength=CLASSES) / len(one) for one in labels]).T
        shown = axes.imshow(counts, aspect="auto", cmap="Blues", vmin=0, vmax=1, interpolation="nearest")
        axes.set(xlabel="batch", ylabel="label", yticks=range(CLASSES), title=run.label)
    axes.figure.colorbar(shown, ax=pair, label="share of the batch")


def output_and_target(pair: Sequence[Any], both: Sequence[Run]) -> None:
    """What the net returns over what it should, side by side."""
    for axes, run in zip(pair, both, strict=True):
        x, y = run.setup.batch(1000)
        with torch.no_grad():
            axes.plot(y, run.setup.net.eval()(x), "o", color=run.color, markersize=4)
        axes.axline((0, 0), slope=1, color=LIMIT, linestyle="--", linewidth=1.0)
        axes.set(xlabel="target", ylabel="output", title=run.label)


def labels_and_probabilities(pair: Sequence[Any], both: Sequence[Run]) -> None:
    """The sum of what the net says of all labels over the number of labels that are 1, side by side."""
    for axes, run in zip(pair, both, strict=True):
        x, y = run.setup.batch(1000)
        with torch.no_grad():
            out = run.setup.net.eval()(x)
        says = out.softmax(1) if run is both[-1] else out.sigmoid()  # as the loss takes them
        axes.plot(y.sum(1), says.sum(1), "o", color=run.color, markersize=4)
        axes.axline((0, 0), slope=1, color=LIMIT, linestyle="--", linewidth=1.0)
        axes.set(xlabel="labels that are 1", ylabel="sum of probabilities", title=run.label, ylim=(0, CLASSES))


def along_a_line(axes: Any, both: Sequence[Run]) -> None:
    """One output of the second linear layer while the input goes from one sample to another."""
    for run in both:
        x, _ = run.setup.batch(1000)
        with torch.no_grad():
            way = torch.linspace(-2, 2, 200)[:, None]
            out = run.setup.net[:4].eval()(x[0] + way * (x[1] - x[0]))[:, 1]
        axes.plot(way, out, color=run.color, label=run.label)
    axes.set(xlabel="from one sample (0) to another (1)", ylabel="output 1 of layer 3")


def shares(axes: Any, both: Sequence[Run], of: Callable[[Run], Mapping[str, float]], label: str) -> None:
    """A bar for each of a few numbers that have names."""
    for shift, run in zip((-0.2, 0.2), both, strict=True):
        measured = of(run)
        bars = axes.barh([place + shift for place in range(len(measured))], list(measured.values()), 0.38, color=run.color)
        axes.bar_label(bars, padding=3)
        axes.plot([], [], "s", color=run.color, label=run.label)
    axes.set_yticks(range(len(measured)), list(measured))
    axes.invert_yaxis()
    axes.margins(x=0.12)
    axes.set_xlabel(label)


def _thresholds(line: Callable[..., Any], limits: Mapping[str, float] | None) -> None:
    for label, value in (limits or {}).items():
        line(value, color=LIMIT, linestyle="--", linewidth=1.0, label=label)


# Quantities


def losses(run: Run) -> Sequence[float]:
    assert run.known.loss is not None
    return run.known.loss.values


def fact(name: str, run: Run) -> Sequence[float]:
    assert run.known.steps is not None
    return run.known.steps[name].values


def of_weights(role: str, run: Run, layer: str = "", relative: bool = False) -> list[float]:
    """At each step the median over layers of a quantity of their weights, or that of one layer."""
    courses = [
        course.values
        for name, of in getattr(run.known, role).items()
        for path, course in of.items()
        if "bias" not in path and layer in ("", name)
    ]
    middle = [sorted(at)[len(at) // 2] for at in zip(*courses, strict=False)]
    return [value / middle[0] for value in middle] if relative else middle


def all_gradients(run: Run) -> list[float]:
    """The norm of all gradients at each step."""
    courses = [course.values for of in run.known.gradients.values() for course in of.values()]
    return [math.sqrt(math.fsum(value * value for value in at)) for at in zip(*courses, strict=False)]


def in_batches(name: str, run: Run) -> Sequence[float]:
    """A column of the rows of inputs, by batch."""
    return next(iter(run.known.inputs.values())).each[name]


def typical(role: str, run: Run) -> dict[str, float]:
    """By layer the norm of gradients or weights, or the ratio of updates, at a typical step; 0 of a layer that has none."""
    held = [name for name, module in run.setup.net.named_modules() if getattr(module, "weight", None) is not None]
    known = getattr(run.known, role)
    median = {name: sorted(known[name]["weight"].values) for name in held if "weight" in known.get(name, {})}
    return {name: median[name][len(median[name]) // 2] if median.get(name) else 0.0 for name in held}


def dead(run: Run) -> dict[str, float]:
    return {one.name: float(one.gone.double().mean()) for one in run.known.layers if one.kind == "ReLU" and one.gone is not None}


def active(run: Run) -> dict[str, float]:
    return {one.name: float(one.rate.mean()) for one in run.known.layers if one.rate is not None and not one.whole}


def root_mean_squares(run: Run) -> dict[str, float]:
    return {one.name: one.output.rms for one in run.known.layers if one.output is not None and not one.whole}


def times_typical(run: Run) -> dict[str, float]:
    sizes = {one.name: largest_and_typical(one) for one in run.known.layers if one.kind == "Linear"}
    return {name: size[0] / size[1] for name, size in sizes.items() if size is not None}


def gradients_of_outputs(run: Run) -> dict[str, float]:
    return {
        name: norm for name, norm in run.known.gradient_norms.items() if isinstance(run.setup.net.get_submodule(name), nn.Linear)
    }


def calls(run: Run) -> dict[str, float]:
    """By layer with weights, how often it was called."""
    held = [one for one in run.known.layers if one.has_weights]
    return {one.name.removeprefix("used."): float(one.output.observations if one.output is not None else 0) for one in held}


def of_units(run: Run, layer: str = "0") -> tuple[Tensor, Tensor]:
    """Mean and deviation of the units of a layer."""
    units = next(one.units for one in run.known.layers if one.name == layer)
    assert units is not None
    return units["mean"], units["var"].sqrt()


def held(run: Run) -> dict[str, float]:
    own, of_net, strange = (max(fact(name, run)) for name in ("held", "trainable", "foreign"))
    return {"of the net, held": own, "of the net, not held": of_net - own, "of no net": strange}


def repeated_passes(run: Run) -> list[float]:
    """The loss of the same batch, again and again, in the mode in which the evaluations left the net."""
    x, y = run.setup.batch(1000)
    torch.manual_seed(0)
    run.setup.net.train(bool(run.setup.evaluates))
    with torch.no_grad():
        return [run.setup.loss(run.setup.net(x), y).item() for _ in range(40)]


def with_other_samples(run: Run) -> list[float]:
    """How the first logit of one sample changes with the other samples of the batch."""
    x, _ = run.setup.batch(1000)
    net = run.setup.net.eval()
    with torch.no_grad():
        logits = [net(torch.cat((x[:1], run.setup.batch(step)[0][1:])))[0, 0].item() for step in range(40)]
    return [logit - logits[0] for logit in logits]


def effects_of_inputs(run: Run, *, padding: bool = False) -> tuple[Tensor, None]:
    """How much the outputs of a sample change, at most, if one of its inputs does: by feature, or by position."""
    batch = run.setup.batch(1000)[0]
    x = batch["tokens"] if padding else batch
    net = run.setup.net.eval()
    found = []
    for place in range(x.shape[1]):
        other = x.clone()
        other[:, place] = (x[:, place] + 3) % 8 if padding else x[:, place] + 1  # another token, or another value
        with torch.no_grad():
            changed = (net({**batch, "tokens": other} if padding else other) - net(batch))[0]
        found.append(changed.abs().max())
    return torch.stack(found), None


def effects_of_later_ones(run: Run) -> tuple[Tensor, None]:
    """How much the outputs at each position change if tokens from position 5 on do."""
    x, _ = run.setup.batch(1000)
    other = x.clone()
    other[:, 5:] = (x[:, 5:] + 3) % 8
    with torch.no_grad():
        return (run.setup.net.eval()(other) - run.setup.net(x)).abs().amax((0, 2)), None


def effects_of_order(run: Run) -> tuple[Tensor, None]:
    """How much the outputs of each sample change if its positions are reversed."""
    x, _ = run.setup.batch(1000)
    with torch.no_grad():
        return (run.setup.net.eval()(x.flip(1)) - run.setup.net(x)).abs().amax(1), None


def largest_shares(run: Run) -> Tensor:
    """The share of the key that each query reads most of."""
    query, key = (run.outputs_of(name) for name in ("query", "key"))
    return (query @ key.transpose(1, 2) * run.setup.net.scale).softmax(2).amax(2)


def score_spreads(run: Run) -> Tensor:
    """The standard deviation of the scores of each query."""
    query, key = (run.outputs_of(name) for name in ("query", "key"))
    scale = run.setup.net.scale
    return (query @ key.transpose(1, 2) * (1.0 if scale is None else scale)).std(2)


def places_and_layers(run: Run) -> dict[str, float]:
    places = [one for _, one in run.setup.net.named_modules(remove_duplicate=False) if isinstance(one, nn.Linear)]
    return {"places": len(places), "layers": len({*places})}


def directions(run: Run) -> tuple[Tensor, None]:
    """How far the samples differ in the first directions of the outputs of layer 3, relative to the first."""
    rows = run.outputs_of("3")
    sizes = torch.linalg.svdvals(rows - rows.mean(0))[:8]
    return sizes / sizes[0], None


def logit_in_training(run: Run) -> list[float]:
    """A logit of one sample in training mode, again and again."""
    x, _ = run.setup.batch(1000)
    torch.manual_seed(0)
    run.setup.net.train()
    with torch.no_grad():
        return [run.setup.net(x[:1])[0, 0].item() for _ in range(40)]


def sums_over_classes(run: Run) -> tuple[Tensor, Tensor]:
    """Mean and deviation over samples of the sum of the probabilities of all classes at each position."""
    x, _ = run.setup.batch(1000)
    with torch.no_grad():
        sums = run.setup.net.eval()(x).exp().sum(2)
    return sums.mean(0), sums.std(0)


def two_losses(run: Run) -> dict[str, float]:
    x, y = run.setup.batch(1000)
    with torch.no_grad():
        output = run.setup.net.eval()(x)
    as_trained, meant = run.setup.loss(output, y), nn.functional.cross_entropy(output.transpose(1, 2), y)
    return {"loss as trained": round(as_trained.item(), 2), "cross entropy of each position": round(meant.item(), 2)}


def slopes(run: Run) -> dict[str, float]:
    """How fast the loss changes if the weights of layer 0 grow, as it is seen and as their gradients tell."""
    (x, y), net, weight = run.setup.batch(1000), run.setup.net.eval(), run.setup.net[0].weight
    (gradient,) = torch.autograd.grad(run.setup.loss(net(x), y), weight)
    found = []
    with torch.no_grad():
        for factor in (1.001, 0.999 / 1.001):
            weight *= factor
            found.append(run.setup.loss(net(x), y).double())
        weight /= 0.999
    seen, told = (found[0] - found[1]) / 0.002, (gradient.double() * weight).sum()
    return {"as it is seen": round(seen.item(), 3), "as gradients tell": round(told.item(), 3)}


def losses_ahead(run: Run) -> tuple[Tensor, None]:
    """The cross entropy of the tokens that are so many positions ahead of the inputs, from 0 on."""
    x, _ = run.setup.batch(1000)
    with torch.no_grad():
        logits = run.setup.net.eval()(x).transpose(1, 2)
    ahead = [nn.functional.cross_entropy(logits[:, :, : x.shape[1] - by], x[:, by:]) for by in range(5)]
    return torch.stack(ahead), None


def apart_by_token(run: Run) -> tuple[Tensor, None]:
    """How far the weights of each token that is read are from those of the token that is predicted."""
    net = run.setup.net
    return (net.get_input_embeddings().weight - net.get_output_embeddings().weight).detach().norm(dim=1), None


def after_other_batches(run: Run) -> list[float]:
    """The loss of one batch, each time after another batch."""
    x, y = run.setup.batch(1000)
    net, losses = run.setup.net.eval(), []
    with torch.no_grad():
        for step in range(40):
            net(run.setup.batch(step)[0])
            losses.append(run.setup.loss(net(x), y).item())
    return losses


def repeated_tokens(run: Run) -> dict[str, float]:
    x, _ = run.setup.batch(1000)
    with torch.no_grad():
        likeliest = run.setup.net.eval()(x).argmax(2)
    return {name: round(float((likeliest[:, :-1] == of).double().mean()), 2) for name, of in _tokens(x).items()}


def _tokens(x: Tensor) -> dict[str, Tensor]:
    return {"the token put in": x[:, :-1], "the next token": x[:, 1:]}


def mean_probability(run: Run) -> dict[str, float]:
    x, y = run.setup.batch(1000)
    with torch.no_grad():
        says = run.setup.net.eval()(x).sigmoid().mean()
    return {"mean probability": round(says.item(), 2), "labels that are 1": round(y.mean().item(), 2)}


def right_by_class(run: Run) -> dict[str, float]:
    x, y = run.setup.batch(1000)
    with torch.no_grad():
        right = run.setup.net.eval()(x).argmax(1) == y
    return {f"class {label}": round(right[y == label].float().mean().item(), 2) for label in range(CLASSES)}


def widths(run: Run) -> dict[str, float]:
    return {name: module.out_features for name, module in run.setup.net.named_modules() if isinstance(module, nn.Linear)}


def gains(run: Run) -> dict[str, float]:
    """By layer the gain of its weights after the first step."""
    layers = {name: module.weight for name, module in run.setup.net.named_modules() if isinstance(module, nn.Linear)}
    return {name: run.known.weights[name]["weight"].values[0] / math.sqrt(len(weight)) for name, weight in layers.items()}


def running_means(run: Run) -> tuple[Tensor, None]:
    return run.setup.net[2].running_mean, None


def from_rank_to_rank(run: Run) -> list[float]:
    """How far the norm of the weights of layer 0 on another rank is from that on the first, at each step that was recorded."""
    values = run.setup.recorder["size/0"].peek()["weight"]  # of copies that differ one after another; equal ones count once
    most = len(run.known.steps["step"]) if run.known.steps is not None else 0
    return [*(values[:most] - values[-most:]).abs().tolist()]


KNOWS_NOTHING = {"equal probabilities": math.log(CLASSES)}
CHANGE = "update / weight"
loss = partial(over_steps, of=losses, label="loss", limits=KNOWS_NOTHING)
updates = partial(over_steps, of=partial(of_weights, "updates"), label=CHANGE, log=True, band=(*UPDATE_RANGE, "usual"))
norms = partial(over_steps, of=all_gradients, label="norm of all gradients", log=True)
attention = partial(distribution, of=largest_shares, label="largest share of a query", ends=(0.0, 1.0))
gradients = partial(by_layer, of=gradients_of_outputs, label="gradient norm of outputs", log=True)

ONE: dict[str, Callable[..., None]] = {
    "replicas-differ": partial(
        over_steps,
        of=from_rank_to_rank,
        label="difference of norms",
        mark=(20, "a gradient is not reduced"),
        across="step that was recorded",
    ),
    "nonfinite": partial(loss, mark=(30, "NaN from here on")),
    "never-ran": partial(by_layer, of=calls, label="calls recorded"),
    "no-gradient": partial(by_layer, of=partial(typical, "gradients"), label="gradient norm of weights"),
    "gradient-cut": partial(shares, of=slopes, label="slope of the loss along the weights of layer 0"),
    "dead-units": partial(by_layer, of=dead, label="share of dead units", limits={"more is a fault": UNIT_SHARE}),
    "saturated-units": partial(
        distribution,
        of=lambda run: run.outputs_of("1"),
        label="output of the tanh of layer 1",
        limits={"flat beyond": 0.97, "": -0.97},
    ),
    "equal-units": partial(by_unit, of=lambda run: (of_units(run)[0], None), label="mean output of layer 0"),
    "outliers": partial(
        by_layer, of=times_typical, label="largest / typical magnitude", log=True, limits={"more is a fault": MASSIVE[1]}
    ),
    "vanishing-gradients": gradients,
    "exploding-gradients": gradients,
    "growing-signal": partial(
        by_layer, of=root_mean_squares, label="root mean square of outputs", log=True, limits={"more is a fault": SIGNAL.grown}
    ),
    "frozen": partial(by_layer, of=partial(typical, "updates"), label="update / weight"),
    "updates-too-large": partial(updates, limits={"more is a fault": UPDATE_LIMITS[1]}),
    "updates-too-small": partial(updates, limits={"less is a fault": UPDATE_LIMITS[0]}),
    "coarse-weights": partial(updates, limits={"lost in bfloat16": COARSE}),
    "large-epsilon": updates,
    "tiny-gradients": partial(norms, limits={"less is a fault": 1e-6}),
    "clipped": norms,
    "not-cleared": norms,
    "rate-is-zero": partial(over_steps, of=partial(fact, "rate"), label="learning rate"),
    "rate-ends-early": partial(
        over_steps, of=partial(fact, "rate"), label="learning rate", log=True, mark=(6, "from here on nothing is learned")
    ),
    "ascends": loss,
    "written-between-steps": partial(over_steps, of=partial(of_weights, "weights", layer="0"), label="norm of weights of layer 0"),
    "optimizer-made-anew": partial(over_steps, of=partial(fact, "optimizer"), label="number of the optimizer"),
    "foreign-parameters": partial(shares, of=held, label="parameters"),
    "evaluation-mode": partial(over_steps, of=partial(fact, "evaluating"), label="share in evaluation mode"),
    "statistics-stand-still": partial(by_unit, of=running_means, label="running mean of layer 2"),
    "odd-momentum": loss,
    "much-dropout": partial(by_layer, of=active, label="share of nonzero values"),
    "nonfinite-inputs": partial(loss, mark=(20, "NaN in the inputs")),
    "batches-of-one": partial(over_steps, of=partial(in_batches, "samples"), label="samples in the batch", log=True),
    "constant-inputs": partial(distribution, of=lambda run: run.setup.batch(0)[0], label="input"),
    "large-inputs": partial(
        distribution,
        of=lambda run: run.setup.batch(0)[0],
        label="input",
        limits={"beyond is not normalised": LARGE_INPUT, "": -LARGE_INPUT},
    ),
    "weak-inputs": partial(by_unit, of=of_units, label="output: mean, deviation"),
    "repeated-batches": partial(over_steps, of=partial(in_batches, "norm"), label="norm of the batch"),
    "large-target": partial(
        distribution,
        of=lambda run: run.setup.batch(0)[1],
        label="target",
        limits={"beyond is not normalised": LARGE_TARGET, "": -LARGE_TARGET},
    ),
    "loss-does-not-fall": loss,
    "loss-rises": loss,
    "loss-is-constant": loss,
    "loss-falls-slowly": loss,
    "loss-jumps": partial(loss, mark=(100, "weights were overwritten")),
    "high-initial-loss": partial(loss, limits={**KNOWS_NOTHING, "a higher start is told": LOSS.initial * math.log(CLASSES) + 1}),
    "probabilities-as-logits": partial(loss, limits={"least of probabilities": math.log(1 + (CLASSES - 1) / math.e)}),
    "zero-weights": partial(by_layer, of=partial(typical, "weights"), label="norm of weights"),
    "linear-net": along_a_line,
    "equal-outputs": partial(
        by_unit, of=lambda run: (run.outputs_of("5")[:, 0], None), label="logit of class 0", across="sample of a batch"
    ),
    "shrinking-weights": partial(
        over_steps,
        of=partial(of_weights, "weights", relative=True),
        label="norm of weights / first norm",
        limits={"less is a fault": SHRUNK},
    ),
    "training-mode": partial(over_steps, of=repeated_passes, label="loss of one batch", across="pass of the same batch"),
    "left-range": loss,
    "samples-mix": partial(
        over_steps, of=with_other_samples, label="change of a logit", across="pass with other samples beside it"
    ),
    "random-in-evaluation": partial(over_steps, of=repeated_passes, label="loss of one batch", across="pass of the same batch"),
    "carries-state": partial(
        over_steps, of=after_other_batches, label="loss of one batch", across="pass, each after another batch"
    ),
    "ignores-inputs": partial(by_unit, of=effects_of_inputs, label="change of outputs", across="feature that is changed"),
    "sees-the-future": partial(
        by_unit, of=effects_of_later_ones, label="change of outputs", across="position; inputs from 5 on are changed"
    ),
    "targets-are-inputs": partial(shares, of=repeated_tokens, label="share of the outputs that are it"),
    "mask-inverted": partial(
        by_unit, of=partial(effects_of_inputs, padding=True), label="change of outputs", across="position that is changed"
    ),
    "order-has-no-effect": partial(
        by_unit, of=effects_of_order, label="change of outputs", across="sample, its positions reversed"
    ),
    "attention-saturated": attention,
    "attention-uniform": attention,
    "attention-unscaled": partial(
        distribution,
        of=score_spreads,
        label="deviation of the scores of a query",
        limits={"a higher median is told": PROBE.unscaled},
    ),
    "repeated-layer": partial(shares, of=places_and_layers, label="linear layers"),
    "one-direction": partial(
        by_unit,
        of=directions,
        label="size, relative to the first",
        across="direction of the outputs of layer 3",
        log=True,
        limits={"less is none": PROBE.rank},
    ),
    "dropout-on-outputs": partial(
        over_steps, of=logit_in_training, label="logit of a sample", across="pass of the same sample in training mode"
    ),
    "softmax-axis": partial(by_unit, of=sums_over_classes, label="sum over classes", across="position"),
    "activations-in-a-row": partial(
        distribution,
        of=lambda run: run.setup.net.eval()(run.setup.batch(1000)[0]).detach(),
        label="output of the sigmoid",
        ends=(0.0, 1.0),
    ),
    "outputs-reshaped": partial(shares, of=two_losses, label="loss"),
    "targets-displaced": partial(by_unit, of=losses_ahead, label="cross entropy", across="positions ahead of the inputs"),
    "sees-only-the-past": partial(
        by_unit, of=effects_of_later_ones, label="change of outputs", across="position; inputs from 5 on are changed"
    ),
    "oscillating-weights": partial(over_steps, of=partial(of_weights, "weights"), label="norm of weights"),
    "untied-weights": partial(by_unit, of=apart_by_token, label="distance of weights", across="token"),
    "frozen-from-start": partial(by_layer, of=partial(typical, "updates"), label="update / weight"),
    "wrong-normalisation": partial(by_layer, of=root_mean_squares, label="root mean square of outputs", log=True),
    "shrinking-signal": partial(by_layer, of=root_mean_squares, label="root mean square of outputs", log=True),
    "bottleneck": partial(by_layer, of=widths, label="units"),
    "large-initial-weights": partial(by_layer, of=gains, label="gain of the weights", limits={"more is a fault": INITIAL.gain}),
    "large-initial-bias": partial(distribution, of=lambda run: run.outputs_of("0"), label="output of layer 0"),
    "gradients-discarded": partial(over_steps, of=partial(fact, "discarded"), label="times cleared before it"),
    "strong-weight-decay": partial(
        over_steps, of=partial(of_weights, "weights", relative=True), label="norm of weights / first norm"
    ),
    "loss-climbs": loss,
    "class-ignored": partial(shares, of=right_by_class, label="share of its labels that are right"),
    "wrong-probabilities": partial(shares, of=mean_probability, label="of all labels"),
    "rectified-outputs": partial(
        distribution, of=lambda run: run.setup.net.eval()(run.setup.batch(1000)[0]).detach(), label="logit"
    ),
}
"""What is drawn on one pair of axes."""
TWO: dict[str, Callable[..., None]] = {
    "constant-target": labels_by_batch,
    "sorted-target": labels_by_batch,
    "unused-classes": labels_by_batch,
    "unreachable-target": output_and_target,
    "shapes-broadcast": output_and_target,
    "normalised-outputs": output_and_target,
    "exclusive-labels": labels_and_probabilities,
}
"""What is drawn side by side."""
PICTURES = {*ONE, *TWO}


def drawn(kind: str) -> Any:
    """The figure of a kind."""
    import matplotlib.pyplot as plt

    torch.set_num_threads(1)
    both = runs(kind)
    with plt.rc_context({"font.size": 9, "axes.spines.top": False, "axes.spines.right": False, "axes.titlesize": 9}):
        figure, axes = plt.subplots(1, 2 if kind in TWO else 1, figsize=(6.4, 2.4), layout="constrained")
        if kind in TWO:
            TWO[kind](axes, both)
        else:
            ONE[kind](axes, both)
            figure.legend(loc="outside right upper", frameon=False)
    plt.close(figure)
    return figure


def saved(kind: str, path: Path) -> None:
    """Draws it in few colors, which makes a file of a third."""
    from PIL import Image

    drawn(kind).savefig(path, dpi=100, facecolor="white", metadata={"Software": None})
    with Image.open(path) as image:
        few = image.convert("RGB").quantize(64, dither=Image.Dither.NONE)
    few.save(path, optimize=True)


def shows(kind: str) -> dict[str, str]:
    """What the picture shows in words, and how the finding is told, both without numbers."""
    return {"shows": words(drawn(kind)), "says": without_numbers(said(found(kind)))}


def alternative(kind: str) -> str:
    """The text in place of the picture."""
    axes = drawn(kind).axes
    quantity = " by ".join(filter(None, (axes[0].get_ylabel(), axes[0].get_xlabel())))
    return f"{quantity}: {' and '.join(run.label for run in runs(kind))}"


def without_numbers(text: str) -> str:
    return re.sub(r"-?\d[\d.,]*(e[+-]?\d+)?", "#", text)


def checksum(kind: str) -> str:
    return hashlib.sha256((IMAGES / f"{kind}.png").read_bytes()).hexdigest()


def stale(kind: str, made: Mapping[str, Any]) -> str:
    """Why a picture is not what would be made now; "" if it is."""
    if kind not in made or not (IMAGES / f"{kind}.png").exists():
        return "it was not made"
    if made[kind]["sha256"] != checksum(kind):
        return "it is not the file that was made"
    if (IMAGES / f"{kind}.png").stat().st_size > LARGEST:
        return f"it has more than {LARGEST} bytes"
    before = {**made[kind], "says": without_numbers(made[kind]["says"])}
    parts = [
        "\n".join(difflib.unified_diff(before[name].splitlines(), text.splitlines(), f"{name} then", "now", lineterm="", n=0))
        for name, text in shows(kind).items()
    ]
    return "\n".join(filter(None, parts))


def main() -> None:
    made = json.loads(MADE.read_text()) if MADE.exists() else {}
    if sys.argv[1:2] == ["--check"]:
        wrong = {kind: why for kind in sys.argv[2:] or sorted(PICTURES) if (why := stale(kind, made))}
        for kind, why in wrong.items():
            print(f"{kind}.png is stale: {why}\nmake it by: python benchmarks/findings_pictures.py {kind}")
        raise SystemExit(bool(wrong))
    IMAGES.mkdir(exist_ok=True)
    missing = False
    for kind in sys.argv[1:] or sorted(PICTURES):
        path = IMAGES / f"{kind}.png"
        saved(kind, path)
        try:
            one = found(kind)
        except LookupError as error:
            print(error)
            missing = True
            continue
        made[kind] = {"sha256": checksum(kind), **shows(kind), "says": said(one), "alt": alternative(kind)}
        MADE.write_text(json.dumps({name: made[name] for name in sorted(made)}, indent=1) + "\n")
        print(f"{kind}: {path.stat().st_size / 1e3:.0f} kB", flush=True)
    raise SystemExit(missing)


if __name__ == "__main__":
    main()
