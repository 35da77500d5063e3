"""Rules on weights: what their gradients and updates tell."""

from __future__ import annotations

from collections.abc import Iterator, Set

from torch import nn

from recorders.watch.diagnosis.asked import held_by, is_readable
from recorders.watch.diagnosis.evidence import Evidence
from recorders.watch.diagnosis.finding import Finding, because, fault
from recorders.watch.diagnosis.layer_rules import dead, gradients_by_depth, modules_above, silent_blocks
from recorders.watch.diagnosis.limits import LOSS, NORMS, TINY_GRADIENT, UPDATE_LIMITS, shown_range
from recorders.watch.overview import Layer


def updates(known: Evidence) -> Iterator[Finding]:
    """Weights that change too much, too little or not at all."""
    low, high = UPDATE_LIMITS
    layers = [layer for layer in known.layers if "output" not in layer.silent and not layer.empty]
    trains = known.steps is not None or known.loss is not None
    if not (trains or any(layer.has_gradients or layer.update is not None for layer in layers)):
        return  # an evaluation: nothing says that anybody trains
    why_zero = _why_zero(known) if any(layer.has_zero_gradients for layer in layers) else ()
    for layer in layers:
        if layer.still:
            # A part that no gradient comes to, such as the teacher of a distillation, is not meant to be trained.
            aside = "gradient" in layer.silent or _is_unused(known, layer.name)
            aside = aside and "weight_gradient" in layer.silent and any(other.has_gradients for other in layers)
            if (layer.trained and not aside) or (layer.trained is None and layer.has_gradients):
                reason = "their gradients were all zero" if layer.has_zero_gradients else layer.silent.get("update", "")
                what = "the weights never changed" + because(reason)
                by_others = known.steps is None and known.learns  # something that is no optimizer of PyTorch changes them
                causes = _why_frozen(known, layer, why_zero)
                yield fault("frozen", layer.name, what, causes=causes, severity="notice" if by_others else None)
        elif layer.update is None and layer.trained and _is_weight_left_out(known, layer):
            what = "no optimizer holds its weights, only its bias"
            yield fault("frozen", layer.name, what, causes=("not-in-optimizer", "frozen"))
        elif layer.ratio > high and layer.growth > 1:
            what = f"updates are too large: a typical step changes the weights by {shown_range(layer.ratio)}"
            yield fault("updates-too-large", layer.name, what, severity="warning" if _is_sure(known, layer) else "notice")
        elif layer.has_zero_gradients and any(other.has_gradients for other in layers):
            continue  # which `no_gradient` tells: by weight decay alone it changes little
        elif layer.ratio_at(1.0) < low:  # the largest step, because steps may get small as a training converges
            what = f"updates are too small: the largest step changes the weights by {shown_range(layer.ratio_at(1.0))}"
            vanish = known.loss is not None and any(gradients_by_depth(known.gradient_norms, decay=LOSS.decay))
            likely = ("vanishing-gradients", "initialisation", "rate-too-low") if vanish else ()
            yield fault("updates-too-small", layer.name, what, causes=likely)


def _is_weight_left_out(known: Evidence, layer: Layer) -> bool:
    """Whether the optimizer changes its bias, and not its weight, which is a parameter: one that is computed is not."""
    updates, module = known.updates.get(layer.name, {}), known.modules.get(layer.name)
    own = [] if module is None else [path for path, weight in module.named_parameters(recurse=False) if weight.requires_grad]
    return bool(updates) and any("bias" not in path and path not in updates for path in own)


def _is_sure(known: Evidence, layer: Layer) -> bool:
    """Whether updates of a single layer are too large by enough, for long enough, and the loss has not come down all the same."""
    if known.learns:
        return False
    steps = max(map(len, known.updates.get(layer.name, {}).values()), default=LOSS.least)
    return layer.ratio > LOSS.early and steps >= LOSS.least


def _why_frozen(known: Evidence, layer: Layer, why_zero: tuple[str, ...]) -> tuple[str, ...]:
    """The likely causes, if anything tells of them; `why_zero` are those of gradients that come, and are all zero."""
    coarse = max(known.fact("coarse"), default=0.0) > 0.5
    if coarse and "update" not in layer.silent and not layer.has_zero_gradients:
        return ("lost-updates", "rate-too-low")
    if not known.weights or known.loss is None:
        return ()
    if known.steps is None:
        return ("stale-optimizer", "not-in-optimizer") if known.elsewhere else ("no-steps", "stale-optimizer")
    if any(known.fact("foreign")):
        return ("stale-optimizer", "not-in-optimizer")
    if layer.weight_gradient is not None and 0 < layer.weight_gradient.norm < TINY_GRADIENT:
        return ("loss-scale", "vanishing-gradients")
    if not any(known.fact("rate")):
        return ("no-steps", "schedule")
    if "update" in layer.silent:
        return ("not-in-optimizer", "frozen")
    held, without = known.fact("held"), known.fact("without gradient")
    if held == without and any(norm > 0 for norm in known.gradient_norms.values()):
        return ("no-steps", "detached")  # as what came was cleared before the step
    if "weight_gradient" in layer.silent:
        return ("detached", "frozen")
    return ("rate-too-low", "no-steps") if layer.has_gradients else why_zero


def _why_zero(known: Evidence) -> tuple[str, ...]:
    """The likely causes of gradients that come, and are all zero."""
    if any(one.severity != "notice" for one in (*dead(known), *silent_blocks(known))):
        return ("dead-units", "initialisation", "detached")
    coarse = max(known.fact("coarse"), default=0.0) > 0.5
    return ("loss-scale", "detached") if coarse else ("detached", "dead-units", "initialisation")


def no_gradient(known: Evidence) -> Iterator[Finding]:
    """Layers that were called and are trained, and whose weights get no gradient while those of others do: told once."""
    trained = [layer for layer in known.layers if _is_trained(layer)]
    with_gradient = {layer.name for layer in trained if layer.has_gradients}
    if not with_gradient:
        return
    without = [
        layer
        for layer in trained
        if layer.name not in with_gradient and "weight_gradient" in layer.silent and "update" not in layer.silent
        if not _is_unused(known, layer.name)
    ]
    if without and known.steps is not None:
        more = f" and {len(without) - 1} more layers" if len(without) > 1 else ""
        what = f"no gradient comes back to {without[-1].name}{more}, although their weights require one"
        ends = len(without) == 1 and _ends_a_chain(without[0].name, with_gradient)
        ends = ends or all(_is_in_pooler(known, layer.name) for layer in without)
        yield fault("no-gradient", without[-1].name, what, severity="notice" if ends else None)
    zero = [layer for layer in trained if layer.has_zero_gradients]
    if zero:
        more = f", and of {len(zero) - 1} more layers" if len(zero) > 1 else ""
        yield fault("no-gradient", zero[-1].name, f"the gradients of its weights were all zero{more}", causes=_why_zero(known))


def _is_unused(known: Evidence, name: str) -> bool:
    """Whether all that a module has is zeros that no layer made, such as a token that stands for what a mask hides."""
    courses = known.weights.get(name, {})
    return bool(courses) and not any(path.startswith("weight") or any(course.values) for path, course in courses.items())


def _ends_a_chain(name: str, others: Set[str]) -> bool:
    """Whether it is the last of several alike, and what others hand on nobody reads of the last, as in WaveNet."""
    parts = name.split(".")
    for at, part in enumerate(parts):
        if part.isdecimal() and int(part) > 1:
            alike = [".".join((*parts[:at], str(number), *parts[at + 1 :])) for number in range(int(part) + 2)]
            if {*alike[: int(part)]} <= others and alike[-1] not in others:
                return True
    return False


def _is_in_pooler(known: Evidence, name: str) -> bool:
    """Whether it is in a pooler of Hugging Face: whoever reads the hidden states of a BERT leaves that unused."""
    return any(type(known.modules.get(one)).__name__.endswith("Pooler") for one in (*modules_above(name), name))


def _is_trained(layer: Layer) -> bool:
    called = "output" not in layer.silent and not layer.empty
    return bool(layer.trained) and called and not layer.shared and (layer.has_weights is not False)


def zero_weights(known: Evidence) -> Iterator[Finding]:
    """Layers whose weights were zero all the time."""
    kinds = {layer.name: layer.kind for layer in known.layers}
    zero = [
        name
        for name, courses in known.weights.items()
        if any(
            _is_matrix(known.modules.get(name), path)
            and (path.startswith("weight") or path in known.gradients.get(name, {}))  # else no call uses it, as a mask token
            and len(course) > (LOSS.least if kinds.get(name) in NORMS else 1)
            and not any(course.values)
            for path, course in courses.items()
        )
    ]
    frozen = not zero
    if frozen and known.steps is not None:
        zero = [
            name
            for name, module in known.modules.items()
            if any("bias" not in path and _is_frozen_zero(one) for path, one in module.named_parameters(recurse=False))
        ]
    if zero:
        more = f", and those of {len(zero) - 1} more layers" if len(zero) > 1 else ""
        frozen |= any(layer.name == zero[0] and layer.trained is False for layer in known.layers)
        causes = ("frozen", "initialisation") if frozen else ()
        yield fault("zero-weights", zero[0], f"its weights were zero in all steps{more}", causes=causes)


def _is_matrix(module: nn.Module | None, path: str) -> bool:
    """Whether a parameter holds weights of features, by its name or, of a module that is known, by its axes."""
    parameter = held_by(module, path)
    return path.startswith("weight") or (parameter is not None and parameter.ndim > 1)


def _is_frozen_zero(parameter: nn.Parameter) -> bool:
    return parameter.ndim > 1 and not parameter.requires_grad and is_readable(parameter) and not bool(parameter.any())


RULES = (no_gradient, zero_weights, updates)
"""Each looks at what is known of a training, and yields what it finds."""
