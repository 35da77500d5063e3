"""Lineage: which layers follow each other by linear operations alone, and which scores of attention nobody scales."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from torch import Tensor, nn

from recorders.capture.operands import leaves


def _names(text: str) -> frozenset[str]:
    return frozenset(text.split())


VIEWS = _names(
    "view unsafe_view permute transpose t expand unsqueeze squeeze clone slice select split unbind detach alias squeeze_ "
    "unsqueeze_ split_with_sizes flip roll index_select gather constant_pad_nd repeat to_copy"
)
"""Operators that move elements and leave them as they are."""
LINEAR = VIEWS | _names(
    "add add_ sub sub_ rsub neg mul mul_ div div_ mean sum native_dropout cat stack native_batch_norm "
    "native_batch_norm_legit_no_training cudnn_batch_norm avg_pool1d avg_pool2d avg_pool3d adaptive_avg_pool2d "
    "adaptive_avg_pool3d upsample_nearest1d upsample_nearest2d upsample_bilinear2d"
)
"""Operators that are linear in a tensor if the others that they get are constants, such as parameters."""
MASKS = frozenset({"masked_fill", "masked_fill_", "where", "add", "add_", "sub", "clamp"})
"""Operators between the product of queries and keys and its softmax."""
SCALES = frozenset({"mul", "mul_", "div", "div_"})
"""Operators by which scores are scaled, with a constant."""
ATTENDING = frozenset({"bmm", "baddbmm"})
"""Operators that multiply queries and keys, or shares and values."""
NORMALISING = _names("native_batch_norm native_batch_norm_legit_no_training native_layer_norm native_group_norm fused_rms_norm")
"""Operators of normalisations."""
FILLING = _names("arange zeros ones full zeros_like ones_like full_like new_zeros new_ones new_full scalar_tensor")
"""Operators that fill tensors with constants."""
CURVES = _names("relu sigmoid tanh softmax log_softmax gelu silu elu leaky_relu softplus hardtanh hardsigmoid log_sigmoid_forward")
"""Operators of activation functions."""
KEEPING = VIEWS | frozenset({"native_dropout"})
"""Operators after which an activation function still is the last."""
DROPPING = _names("native_dropout fused_dropout bernoulli bernoulli_")
"""Operators of dropout that give zeros, or draw where they are."""


class Weights(NamedTuple):
    """A matrix or a kernel of a layer.

    Attributes:
        layer: its name.
        inputs, outputs: how many features it reads and gives.
        usual: whether a layer like it should have a nonlinearity before it: no attention, no group of channels.
    """

    layer: str
    inputs: int
    outputs: int
    usual: bool


def _weights_of(name: str, module: nn.Module, parameter: Tensor) -> Weights | None:
    """The matrix or kernel that a parameter is; None of others, and of tables."""
    if parameter.ndim < 2 or isinstance(module, (nn.Embedding, nn.EmbeddingBag)):
        return None
    outputs, inputs = parameter.shape[:2]
    if not isinstance(module, nn.Linear) and parameter.ndim == 2:  # of a module of the user's own, in either order
        outputs, inputs = max(outputs, inputs), min(outputs, inputs)
    single = isinstance(module, (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d)) or parameter.ndim == 2
    usual = single and getattr(module, "groups", 1) == 1 and not isinstance(module, (nn.MultiheadAttention, nn.RNNBase))
    return Weights(name, inputs, outputs, usual)


class Unscaled(NamedTuple):
    """Scores of attention that went from the product of queries and keys to the softmax as they were.

    Attributes:
        width: of the queries.
        spread: the typical standard deviation of the scores of a query.
    """

    width: int
    spread: float


class Activation(NamedTuple):
    """An activation function, or a normalisation, that ran.

    Attributes:
        name: of its operator, such as "relu".
        module: in which it ran.
        axis: along which a softmax runs, of so many axes; None of others.
        size: how many elements there are along it; 0 of others.
        after: the activation function whose outputs it read as they were; "" if that is none.
        features: how many features the layer gave whose outputs it read, by linear operations; 0 if that is none.
    """

    name: str
    module: str
    axis: int | None = None
    size: int = 0
    after: str = ""
    features: int = 0


@dataclass
class Lineage:
    """What a run shows of the ways between layers; it is called with each operator.

    Attributes:
        pairs: layers of which the second reads what the first gives, by linear operations alone, in the order in which they ran.
        elsewhere: layers whose outputs also something else reads, such as an activation function.
        attended: layers that give queries, keys or values of attention.
        unscaled: by module, scores of attention that were not scaled.
        in_a_row: activation functions that read what another one gave, as it was.
        inner_softmax: the first one along features whose shares a layer reads as they were.
        last: by path of an output of the net, the activation function that it comes from, as it was.
        dropped: the paths of outputs of the net in which a dropout set elements to zero.
    """

    pairs: dict[tuple[str, str], tuple[Weights, Weights]] = field(default_factory=dict)
    elsewhere: set[str] = field(default_factory=set)
    attended: set[str] = field(default_factory=set)
    unscaled: dict[str, Unscaled] = field(default_factory=dict)
    in_a_row: list[Activation] = field(default_factory=list)
    inner_softmax: Activation | None = None
    last: dict[str, Activation] = field(default_factory=dict)
    dropped: set[str] = field(default_factory=set)
    _held: dict[int, tuple[Tensor, Weights | None]] = field(default_factory=dict)
    _active: dict[int, tuple[Tensor, Activation]] = field(default_factory=dict)
    _origin: dict[int, tuple[Tensor, Weights]] = field(default_factory=dict)
    _scaled: dict[int, Tensor] = field(default_factory=dict)
    _scores: dict[int, tuple[Tensor, int]] = field(default_factory=dict)
    _dropped: dict[int, Tensor] = field(default_factory=dict)

    def __call__(self, name: str, args: tuple[Any, ...], output: Any, where: str) -> None:
        """Looks at a call of an operator, such as "bmm", in a module."""
        tensors = _tensors(args)
        self._drop(name, tensors, output)
        if name in FILLING or all(id(tensor) in self._held for tensor in tensors):
            self._hold(tensors, output)
            return
        for tensor in _tensors((output,)):  # an operator in place may add what is no constant to one
            self._held.pop(id(tensor), None)
        self._activate(name.removesuffix("_"), args, tensors, output, where)
        if name in ("mm", "addmm", "convolution") and self._by_weights(name, tensors, output):
            return
        if name in ATTENDING:
            self._attend(name, args, output)
        elif name in ("softmax", "safe_softmax") and (found := self._scores.get(id(args[0]))) is not None:
            self._softmax(found[0], args[1], found[1], where)
        self._mark_scores(name, tensors, args, output)
        origins = [(tensor, self._origin[id(tensor)][1]) for tensor in tensors if id(tensor) in self._origin]
        if not origins:
            return
        same = {weights.layer for _, weights in origins}
        linear = name in LINEAR and len(same) == 1 and all(self._is_constant(tensor) for tensor in tensors if not self._has(tensor))
        if linear and not (name in SCALES and len(origins) > 1):
            for tensor in _tensors((output,)):
                self._origin[id(tensor)] = (tensor, origins[0][1])
            return
        (self.attended if name in ATTENDING or name.startswith("scaled_dot_product") else self.elsewhere).update(same)
        for tensor in _tensors((output,)):  # an operator in place
            self._origin.pop(id(tensor), None)

    def begin(self, modules: Mapping[str, nn.Module]) -> None:
        """Called with the modules of the net before the run."""
        for name, module in modules.items():
            self._held.update({id(tensor): (tensor, None) for tensor in module.buffers(recurse=False)})
            owner = f".{name}".partition(".parametrizations.")[0][1:]  # of the parts that weight_norm makes of a weight
            of = modules.get(owner, module)
            self._held.update({id(one): (one, _weights_of(owner, of, one)) for one in module.parameters(recurse=False)})

    def _hold(self, tensors: list[Tensor], output: Any) -> None:
        """Notes what depends on parameters and constants alone."""
        of = self._held[id(tensors[0])][1] if tensors and id(tensors[0]) in self._held else None
        for tensor in _tensors((output,)):
            self._held[id(tensor)] = (tensor, of if of is not None and tensor.numel() == tensors[0].numel() else None)

    def end(self, outputs: Any) -> None:
        """Called with what the net returned."""
        found = list(leaves(outputs))
        self.elsewhere |= {self._origin[id(tensor)][1].layer for _, tensor in found if self._has(tensor)}
        self.last = {path: self._active[id(tensor)][1] for path, tensor in found if id(tensor) in self._active}
        self.dropped = {path for path, tensor in found if id(tensor) in self._dropped}

    def _drop(self, name: str, tensors: list[Tensor], output: Any) -> None:
        """Follows the zeros that a dropout makes: what is moved, or multiplied, keeps them."""
        zeros = name in DROPPING or ((name in VIEWS or name in SCALES) and any(id(tensor) in self._dropped for tensor in tensors))
        for tensor in _tensors((output,)):
            self._dropped.pop(id(tensor), None)
            if zeros:
                self._dropped[id(tensor)] = tensor

    def _activate(self, name: str, args: tuple[Any, ...], tensors: list[Tensor], output: Any, where: str) -> None:
        """Follows what activation functions and normalisations give, as long as it stays as it is."""
        before = next((self._active[id(tensor)][1] for tensor in tensors if id(tensor) in self._active), None)
        results = _tensors((output,))
        for tensor in results:
            self._active.pop(id(tensor), None)
        if name in CURVES or name in NORMALISING:
            after = before.name if before is not None else ""
            axis, size = None, 0
            if name.endswith("softmax"):
                given = args[0]
                axis, size = args[1] % max(given.ndim, 1), given.shape[args[1]] if given.ndim else 1
            origin = self._origin.get(id(tensors[0])) if tensors else None
            found = Activation(name, where, axis, size, after, 0 if origin is None else origin[1].outputs)
            if after in CURVES and name in CURVES:
                self.in_a_row.append(found)
        elif name in KEEPING and before is not None:
            found = before._replace(axis=before.axis if results and results[0].shape == tensors[0].shape else None)
        else:
            return
        if results:
            self._active[id(results[0])] = (results[0], found)

    def _has(self, tensor: Tensor) -> bool:
        return id(tensor) in self._origin

    def _is_constant(self, tensor: Tensor) -> bool:
        return tensor.ndim == 0 or id(tensor) in self._held

    def _by_weights(self, name: str, tensors: list[Tensor], output: Tensor) -> bool:
        given, weight = tensors[-2:] if name != "convolution" else tensors[:2]
        if name == "mm" and id(given) in self._held:
            given, weight = weight, given
        of = self._held.get(id(weight), (weight, None))[1]
        if of is None:
            return False
        _, active = self._active.get(id(given), (given, None))
        if active is not None and active.name == "softmax" and active.axis == given.ndim - 1 and active.size > 1:
            self.inner_softmax = self.inner_softmax or active
        if self._has(given):
            before = self._origin[id(given)][1]
            self.pairs.setdefault((before.layer, of.layer), (before, of))
        self._origin[id(output)] = (output, of)
        return True

    def _attend(self, name: str, args: tuple[Any, ...], output: Tensor) -> None:
        query, key = args[-2:] if name == "bmm" else args[1:3]
        if not any(id(tensor) in self._held or id(tensor) in self._scaled for tensor in (query, key)):
            self._scores[id(output)] = (output, query.shape[-1])

    def _softmax(self, scores: Tensor, dim: int, width: int, where: str) -> None:
        if dim % scores.ndim == scores.ndim - 1:
            self.note_scores(scores, width, where)

    def note_scores(self, scores: Tensor, width: int, where: str) -> None:
        """Notes scores of attention that were not scaled down, (..., queries, keys), of queries of a width."""
        scores = scores.double()
        if scores.ndim:
            kept = scores.masked_fill(scores < -1e8, math.nan)
            mean = kept.nanmean(-1, keepdim=True)
            spread = float((kept - mean).square().nanmean(-1).sqrt().nanmedian())
            self.unscaled.setdefault(where, Unscaled(width, spread))

    def _mark_scores(self, name: str, tensors: list[Tensor], args: tuple[Any, ...], output: Any) -> None:
        """Follows scores up to their softmax, and what was scaled up to the product."""
        grown = name in SCALES and len(args) > 1 and _grows(name, args[1])  # by the root of the width, not its inverse
        if name in SCALES and len(args) > 1 and not grown and not (isinstance(args[1], Tensor) and not self._is_constant(args[1])):
            marked = True
        else:
            marked = name in VIEWS and any(id(tensor) in self._scaled for tensor in tensors)
        for tensor in _tensors((output,)):
            if marked:
                self._scaled[id(tensor)] = tensor
            elif name in VIEWS or name in MASKS or grown:
                for one in tensors:
                    if id(one) in self._scores:
                        self._scores[id(tensor)] = (tensor, self._scores[id(one)][1])


def _grows(name: str, by: Any) -> bool:
    """Whether a number makes larger what is multiplied with it, or divided by it."""
    return isinstance(by, (int, float)) and (abs(by) > 1 if name.startswith("mul") else 0 < abs(by) < 1)


def _tensors(values: Any) -> list[Tensor]:
    """The tensors among the arguments of an operator, or its results: themselves or in lists."""
    found: list[Tensor] = []
    for value in values:
        if isinstance(value, Tensor):
            found.append(value)
        elif isinstance(value, (list, tuple)):
            found += [one for one in value if isinstance(one, Tensor)]
    return found
