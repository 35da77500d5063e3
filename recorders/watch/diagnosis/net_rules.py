"""Rules on the net itself: what its modules tell, and how large its weights were in the beginning.

Only a recorder knows the net; of a recording none of these is examined.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor, nn

from recorders.capture.copying import OF_MODULES
from recorders.watch.diagnosis.asked import LEAST, classes_of, held_by, is_readable
from recorders.watch.diagnosis.evidence import Evidence
from recorders.watch.diagnosis.finding import Finding, fault
from recorders.watch.diagnosis.limits import INITIAL, NORM_EPSILON, NORM_SPREAD, SMALL_EPSILON, shown_times
from recorders.watch.diagnosis.steps import DROPOUTS

RECURRENT = (nn.RNNBase, nn.RNNCellBase)
ACTIVATION = re.compile("(?i)(act|relu|gelu|silu|tanh|nonlinear)")
"""How the names of activation functions begin."""
FEATURED = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d)
NORMALISED = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm, nn.LayerNorm, nn.GroupNorm, nn.RMSNorm)
"""Normalisations of PyTorch, whose weight is what they multiply by. In some of others 1 is added to it."""
READ = 1 << 16
"""How many weights of a layer are looked at, about."""
MOST = 1000
"""The most items of a list in which weights are looked for."""


def frozen_from_start(known: Evidence) -> Iterator[Finding]:
    """Frozen layers whose weights are still those that PyTorch draws: nobody has trained them."""
    fresh = [name for name, module in known.modules.items() if _is_fresh(module)]
    fresh = fresh or _untouched_body(known) or _untouched_part(known)
    if fresh:
        more = f", and those of {len(fresh) - 1} more layers" if len(fresh) > 1 else ""
        what = f"its weights are frozen, and still as PyTorch draws them{more}"
        yield fault("frozen-from-start", fresh[0], what)


def _untouched_body(known: Evidence) -> list[str]:
    """The frozen layers of a net of which the last layers alone are trained, if all scales of norms are 1 and all biases 0.

    No training leaves them so. Adapters stand within what is frozen, and are for any base.
    """
    own = [(name, module) for name, module in known.modules.items() if next(module.parameters(recurse=False), None) is not None]
    trained = [next(module.parameters(recurse=False)).requires_grad for _, module in own]
    if True not in trained or not all(trained[trained.index(True) :]):
        return []
    frozen = own[: trained.index(True)]
    tensors = [
        (module, path, one) for _, module in frozen for path, one in module.named_parameters(recurse=False) if not one.is_meta
    ]
    scales = [one for module, path, one in tensors if "Norm" in type(module).__name__ and path == "weight"]
    biases = [one for _, path, one in tensors if path == "bias"]
    if len(scales) < 2 or len(biases) <= len(scales) or any(map(torch.any, biases)):
        return []
    if not all(bool((scale == 1).all()) for scale in scales):
        return []
    return [name for name, module in frozen if isinstance(module, FEATURED)]


def _untouched_part(known: Evidence) -> list[str]:
    """The frozen layers of a net of which most is trained, if their weights are normal numbers and all their biases 0.

    So the nets of Hugging Face begin, and no training leaves biases at 0. Without biases the weights must be as the configuration
    of such a net says. With adapters most of a net is frozen.
    """
    layers = {name: module for name, module in known.modules.items() if isinstance(module, FEATURED)}
    own = {id(one): one for module in known.modules.values() for one in module.parameters(recurse=False)}
    frozen = {name: module for name, module in layers.items() if not any(one.requires_grad for one in module.parameters())}
    held = sum(one.numel() for one in own.values() if not one.requires_grad)
    if not frozen or 2 * held > sum(one.numel() for one in own.values()):
        return []
    biases = [bias for module in frozen.values() if (bias := held_by(module, "bias")) is not None]
    if not all(is_readable(bias) and not bias.any() for bias in biases):
        return []
    drawn = {getattr(getattr(module, "config", None), "initializer_range", None) for module in known.modules.values()}
    scales = () if biases else tuple(scale for scale in drawn if isinstance(scale, float))
    weights = [held_by(module, "weight") for module in frozen.values()]
    return [*frozen] if (biases or scales) and all(_is_normal(weight, scales) for weight in weights) else []


def _is_normal(weight: Tensor | None, scales: Sequence[float]) -> bool:
    """Whether weights may be independent normal numbers of one variance, as rows and columns that were trained are not.

    If there are `scales`, it must be that of one of them.
    """
    if weight is None or not is_readable(weight) or weight.numel() < INITIAL.normal:
        return False
    rows = weight.detach()[: max(2, READ // _fan_in(weight))].double().flatten(1)
    scale = rows.square().mean().sqrt().item()
    if scale == 0 or (scales and all(abs(scale / one - 1) > INITIAL.deviations / math.sqrt(2 * rows.numel()) for one in scales)):
        return False
    rows = rows / scale
    fourth = rows.pow(4).mean().item()
    sizes = [(rows.square().mean(along), rows.shape[along]) for along in (0, 1)]
    spreads = [(square.var().item() * many / 2 - 1) / math.sqrt(2 / (len(square) - 1)) for square, many in sizes if len(square) > 1]
    within = INITIAL.deviations
    return abs(fourth - 3) < within * math.sqrt(24 / rows.numel()) and all(abs(spread) < within for spread in spreads)


def _is_fresh(layer: nn.Module) -> bool:
    """Whether the weights of a layer are frozen, and as `reset_parameters` draws them.

    Those of linear and convolutional layers are uniform within 1 / sqrt(fan-in), those of recurrent ones within 1 / sqrt(features).
    Of embeddings one cannot tell: they are normal, and training leaves them nearly so.
    """
    if not isinstance(layer, (*FEATURED, nn.RNNBase)):
        return False
    weight = held_by(layer, "weight_hh_l0" if isinstance(layer, nn.RNNBase) else "weight")
    if weight is None or weight.requires_grad or weight.numel() < INITIAL.least or not is_readable(weight):
        return False
    scaled = weight.detach()[: max(2, READ // _fan_in(weight))].abs().double()
    scaled *= math.sqrt(layer.hidden_size if isinstance(layer, nn.RNNBase) else _fan_in(weight))
    largest, square = scaled.max().item(), scaled.square().mean().item()
    return 0.9 < largest < 1.001 and abs(square * 3 - 1) < 6 / math.sqrt(scaled.numel())


def idle_activations(known: Evidence) -> Iterator[Finding]:
    """Activation functions that let everything through: a slope of 1, or `nn.Identity` in the place of all of them."""
    idle = [name for name, module in known.modules.items() if isinstance(module, nn.LeakyReLU) and module.negative_slope == 1]
    named = {name: module for name, module in known.modules.items() if ACTIVATION.match(name.rpartition(".")[2])}
    if len(named) > 1 and all(type(module) is nn.Identity for module in named.values()):
        idle += named
    if idle:
        more = f", and {len(idle) - 1} more" if len(idle) > 1 else ""
        yield fault("linear-net", idle[0], f"this activation function does nothing{more}", severity="error")


def wrong_normalisation(known: Evidence) -> Iterator[Finding]:
    """A normalisation whose epsilon is far above the variance of what it normalises, or that normalises single elements."""
    for name, module in known.modules.items():
        epsilon = getattr(module, "eps", None)
        if "Norm" in type(module).__name__ and isinstance(epsilon, float) and epsilon > NORM_EPSILON:
            yield fault("wrong-normalisation", name, f"the epsilon of the normalisation is {epsilon:g}; 1e-5 is usual")
            return
        if isinstance(module, nn.LayerNorm) and math.prod(module.normalized_shape) == 1:
            yield fault("wrong-normalisation", name, "it normalises single elements, of which each is its own mean")
            return
    for layer in known.layers:
        name = layer.name.partition(":")[0]
        norm = known.modules.get(name)
        if not isinstance(norm, NORMALISED) or norm.eps is None or norm.eps <= SMALL_EPSILON or layer.output is None:
            continue
        weight = held_by(norm, "weight")
        if weight is not None and is_readable(weight):
            scale = min(_first_size(known, name, "weight"), weight.detach().square().mean().sqrt().item())
            if layer.output.std < NORM_SPREAD * scale:
                spread = f"the spread of its outputs is {layer.output.std:.2g}, its scale {scale:.2g}"
                what = f"{spread}: the epsilon, {norm.eps:g}, is above the variance of what it normalises"
                yield fault("wrong-normalisation", name, what, severity="warning")
                return


def bottleneck(known: Evidence) -> Iterator[Finding]:
    """A layer of one unit between wider ones."""
    before: tuple[str, int, int] = ("", 0, 0)
    for name, module in known.modules.items():
        if isinstance(module, nn.Linear):
            wide, narrow = module.in_features, module.out_features
        elif isinstance(module, (nn.Conv1d, nn.Conv2d, nn.Conv3d)) and module.groups == 1:
            wide, narrow = module.in_channels, module.out_channels
        else:
            continue
        if before[2] == 1 and before[1] >= INITIAL.wide and wide == 1 and narrow > 1:
            what = f"it has one unit, and is between {before[1]} inputs and {narrow} units of {name}"
            yield fault("bottleneck", before[0], what)
            return
        before = (name, wide, narrow)


def narrow(known: Evidence) -> Iterator[Finding]:
    """Many classes, or items, that a layer can tell apart by one or two numbers only."""
    classes, layers = classes_of(known), list(known.modules.items())
    linear = [(name, module) for name, module in layers if isinstance(module, nn.Linear)]
    labelled = any(not batches.floating for batches in known.target.values())
    if len(linear) > 1 and labelled and classes >= INITIAL.many and linear[-1][1].out_features == classes:
        (name, before), (_, last) = linear[-2:]
        if before.out_features == last.in_features == 2 and before.in_features > INITIAL.wide:
            yield fault("bottleneck", name, f"{classes} classes are told apart by its 2 units", severity="warning")
            return
    for name, module in layers:
        if not isinstance(module, nn.Embedding) or module.embedding_dim > 1 or module.num_embeddings < INITIAL.many:
            continue
        if not _is_bias(name, module, layers):
            yield fault("bottleneck", name, f"it has one number for each of {module.num_embeddings} items")
            return


def _is_bias(name: str, module: nn.Embedding, layers: Sequence[tuple[str, nn.Module]]) -> bool:
    """Whether another embedding has more numbers for the same items, so that this one is their bias."""
    same = [one for _, one in layers if isinstance(one, nn.Embedding) and one.num_embeddings == module.num_embeddings]
    return "bias" in name.lower() or any(one.embedding_dim > 1 for one in same)


def hidden_weights(known: Evidence) -> Iterator[Finding]:
    """Weights that get gradients and that no optimizer changes, because a list or a plain tensor hides them from `parameters()`."""
    if len(known.fact("step")) < LEAST or any(known.fact("foreign")):
        return
    shown = {id(parameter) for module in known.modules.values() for parameter in module.parameters()}
    for name, module in known.modules.items():
        for key, value in vars(module).items():
            tensors = [] if key in OF_MODULES else [tensor for tensor in _tensors_in(value) if id(tensor) not in shown]
            if any(tensor.is_leaf and tensor.grad is not None and tensor._version < LEAST for tensor in tensors):
                what = f"the weights in its attribute {key!r} get gradients and never change: parameters() does not list them"
                what += ", as it would those of an nn.ModuleList, or an nn.Parameter"
                yield fault("frozen", name, what, causes=("not-in-optimizer",))
                return


def _tensors_in(value: object) -> Iterator[Tensor]:
    """The tensors that are trained in an attribute: its own, or those of modules, in lists or not."""
    if isinstance(value, Tensor):
        if value.requires_grad:
            yield value
    elif isinstance(value, nn.Module):
        yield from (parameter for parameter in value.parameters() if parameter.requires_grad)
    elif isinstance(value, (list, tuple, dict)) and len(value) <= MOST:
        for one in value.values() if isinstance(value, dict) else value:
            if isinstance(one, (Tensor, nn.Module)):
                yield from _tensors_in(one)


def dropouts_in_a_row(known: Evidence) -> Iterator[Finding]:
    """Many dropouts in one `nn.Sequential` that together let little through."""
    for name, module in known.modules.items():
        if not isinstance(module, nn.Sequential):
            continue
        drops = {place: one.p for place, one in module._modules.items() if isinstance(one, DROPOUTS) and 0 < one.p < 1}
        passing = math.prod(1 - share for share in drops.values())
        if passing < INITIAL.passing:
            what = f"{len(drops)} dropouts follow each other, so that {passing:.1e} of all paths through them are left in a step"
            first = next(iter(drops))
            yield fault("much-dropout", first if name == "(net)" else f"{name}.{first}", what)
            return


def initial_sizes(known: Evidence) -> Iterator[Finding]:
    """Weights and biases that begin far too large: the first layer of each kind."""
    modules = known.modules
    order = [name for name, module in modules.items() if isinstance(module, (*FEATURED, *RECURRENT))]
    embedded = {id(held_by(module, "weight")) for module in modules.values() if isinstance(module, nn.Embedding)}
    for name in order:
        module, hidden = modules[name], name != order[-1]
        for path, parameter in module.named_parameters(recurse=False):
            if id(parameter) in embedded or not parameter.requires_grad:
                continue
            size = _first_size(known, name, path)
            if parameter.ndim > 1:
                gain = size * math.sqrt(_fan_in(parameter))
                if gain > (INITIAL.gain if hidden else INITIAL.last):
                    what = (
                        f"its {path} began with a typical size of {size:.3g}, {shown_times(gain)} that of one that keeps the scale"
                    )
                    yield fault("large-initial-weights", name, what)
                    return
            elif hidden and size > INITIAL.bias and not (_ends_a_branch(name, modules) and _is_negative(parameter)):
                yield fault("large-initial-bias", name, f"its {path} began with a typical size of {size:.3g}")
                return


def _is_negative(bias: Tensor) -> bool:
    """Whether a bias is below zero, on average."""
    return is_readable(bias) and bool(bias.detach().mean() < 0)


def _ends_a_branch(name: str, modules: Mapping[str, nn.Module]) -> bool:
    """Whether a layer is the last of an `nn.Sequential`: that of a detector may begin at the logit of how rare its classes are."""
    parent, last = modules.get(name.rpartition(".")[0]), modules[name]
    return isinstance(parent, nn.Sequential) and parent[-1] is last


def _first_size(known: Evidence, name: str, path: str) -> float:
    """The root mean square of a parameter before the first step that was recorded; NaN if it is not known."""
    course, parameter = known.before.get(name, {}).get(path), held_by(known.modules.get(name), path)
    if course is None or not len(course) or not math.isfinite(course.values[0]) or parameter is None:
        return math.nan
    return course.values[0] / math.sqrt(max(parameter.numel(), 1))


def _fan_in(weight: Tensor) -> int:
    return max(math.prod(weight.shape[1:]), 1)


def initial_norms(known: Evidence) -> Iterator[Finding]:
    """Normalisations that all begin with a scale of 0, so that nothing passes; or one that begins with a shift."""
    first = {name: _first_size(known, name, "weight") for name, module in known.modules.items() if "Norm" in type(module).__name__}
    first = {name: size for name, size in first.items() if not math.isnan(size)}
    plain = [name for name in first if isinstance(known.modules[name], NORMALISED)]
    if len(first) > 1 and len(plain) == len(first) and not any(first.values()):
        what = f"the scale of this normalisation began at 0, and those of all {len(first)}, so that nothing passed them at first"
        yield fault("wrong-normalisation", plain[0], what, causes=("initialisation",))
        return
    for name in plain:
        shift = _first_size(known, name, "bias")
        if abs(first[name] - 1) < 1e-6 and shift > INITIAL.shift:
            what = f"its bias began with a typical size of {shift:.3g}, while its scale was 1, as it is if nobody has trained it"
            yield fault("wrong-normalisation", name, what, causes=("initialisation",), severity="warning")
            return


def initial_tables(known: Evidence) -> Iterator[Finding]:
    """An embedding that began far too large, or so much larger than one of as many items beside it that it drowns that."""
    sizes: dict[str, float] = {}
    tables = {name: module for name, module in known.modules.items() if isinstance(module, nn.Embedding)}
    for name, module in tables.items():
        if (weight := held_by(module, "weight")) is not None and weight.requires_grad:
            sizes[name] = _first_size(known, name, "weight")
    for name, size in sizes.items():
        if size > INITIAL.table:
            what = f"its weights began with a typical size of {size:.3g}; PyTorch draws them with 1"
            yield fault("large-initial-weights", name, what)
            return
        drowned = [
            other
            for other, little in sizes.items()
            if 0 < INITIAL.drowns * little < size
            and name.rpartition(".")[0] == other.rpartition(".")[0]
            and tables[other].embedding_dim == tables[name].embedding_dim
            and tables[other].num_embeddings >= tables[name].num_embeddings
        ]
        if drowned:
            times = size / sizes[drowned[0]]
            what = f"its weights began {shown_times(times)} as large as those of {drowned[0]}, which has as many items or more"
            yield fault("large-initial-weights", name, what)
            return


def overwritten(known: Evidence) -> Iterator[Finding]:
    """The layer whose weights are now far larger than at the last step that was recorded, while those of others are not."""
    grown: dict[str, float] = {}
    for name, module in known.modules.items():
        for path, parameter in module.named_parameters(recurse=False):
            course = known.weights.get(name, {}).get(path)
            if course is not None and len(course) > 1 and "bias" not in path and course.values[-1] > 0 and is_readable(parameter):
                grown[name] = max(grown.get(name, 0.0), float(parameter.detach().norm()) / course.values[-1])
    large = [name for name, times in grown.items() if times > INITIAL.overwritten]
    if large and len(large) <= len(grown) / 3:
        what = f"its weights are {shown_times(grown[large[0]])} as large as at the last step recorded, unlike those of most layers"
        yield fault("written-between-steps", large[0], what)


def untied(known: Evidence) -> Iterator[Finding]:
    """Embeddings that the configuration of a net of Hugging Face ties, and that are two parameters."""
    for name, module in known.modules.items():
        if not getattr(getattr(module, "config", None), "tie_word_embeddings", False):
            continue
        first, last = (_asked_for(module, method) for method in ("get_input_embeddings", "get_output_embeddings"))
        one, other = (held_by(side, "weight") for side in (first, last))
        if one is not None and other is not None and one is not other and one.shape == other.shape:
            where = next((place for place, inner in known.modules.items() if inner is last), name)
            yield fault(
                "untied-weights", where, "its weight is not that of the input embeddings, though tie_word_embeddings is set"
            )
            return


def _asked_for(module: nn.Module, method: str) -> object:
    """What a method returns; None if there is none, or it raises, as of the decoder of a BART."""
    try:
        return getattr(module, method)()
    except Exception:
        return None


RULES = (
    overwritten,
    untied,
    frozen_from_start,
    idle_activations,
    wrong_normalisation,
    bottleneck,
    initial_sizes,
    initial_norms,
    initial_tables,
    narrow,
    hidden_weights,
    dropouts_in_a_row,
)
"""Each looks at what is known of a training, and yields what it finds."""
