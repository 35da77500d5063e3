"""Ranges of the inputs, outputs and weights of layers, from what `presets.calibration` recorded."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import reduce
from typing import Literal, NamedTuple, TypeAlias

import torch
from torch import Tensor, nn

from recorders.errors import SelectionError
from recorders.recordings.recording import Subrecording, check_mapping
from recorders.ring.state import path_of
from recorders.watch.calibration.distribution import Distribution, pooled
from recorders.watch.calibration.methods import ClippingRange, Method, entropy, minmax, mse
from reducers import Product, Quantile, Reducer, State, affine_qparams
from reducers.core.reducer import check_size
from reducers.errors import ArgumentError

Side: TypeAlias = Literal["input", "output"]


@dataclass(frozen=True)
class Scheme:
    """How numbers become integers, or float8.

    Attributes:
        bits: of the integers, from 2 to 16.
        symmetric: whether zero is in their middle, so that the zero point is 0.
        per: what has a scale of its own: the "tensor", each "channel", or each group of so many neighbouring channels. Channels of
            inputs and outputs are those of the layer, of weights its rows; groups of weights lie within a row.
        method: which chooses the range: `minmax`, `percentile(99.99)`, `mse`, `entropy`, or a function like these.
        importance: whether each weight counts by the mean square of its input, which the recording holds. It is for weights only.
        float8: whether numbers become float8 (e4m3, up to 448) in place of integers. `mse` and `entropy` search among integers, so
            they are not for it.

    Raises:
        ArgumentError: there are no such integers or groups, the method is no function, or float8 is to have other bits, a zero
            point or such a search.
    """

    bits: int = 8
    symmetric: bool = True
    per: Literal["tensor", "channel"] | int = "tensor"
    method: Method = minmax
    importance: bool = False
    float8: bool = False

    def __post_init__(self) -> None:
        check_size(self, "bits", 2, 16)
        if self.per not in ("tensor", "channel") and not (type(self.per) is int and self.per > 0):
            raise ArgumentError(f"Scheme takes 'tensor', 'channel' or a positive number of channels as per and got {self.per!r}")
        if not callable(self.method):
            raise ArgumentError(f"Scheme takes a function as method, such as minmax or percentile(99.9), and got {self.method!r}")
        if self.float8 and (self.bits != 8 or not self.symmetric or self.method in (mse, entropy)):
            raise ArgumentError(
                "float8 has 8 bits and no zero point, and mse and entropy search among integers: use minmax or percentile"
            )


PLAIN = Scheme()
"""Integers of 8 bits with zero in the middle, and one scale for a tensor from its least and greatest number."""


class Importance(NamedTuple):
    """How much the channels of an input matter, as llama.cpp writes it into an importance matrix.

    Attributes:
        squares: the sum of the squares of each channel, float64.
        positions: over how many positions, such as tokens.
    """

    squares: Tensor
    positions: int


def ranges(recording: Mapping[str, Subrecording], side: Side = "input", scheme: Scheme = PLAIN) -> dict[str, ClippingRange]:
    """The range of each layer's input or output.

    Args:
        recording: what a recorder of `presets.calibration` recorded: its snapshot, a loaded or a merged recording.
        side: "input" or "output".
        scheme: the integers that the range is for, and the method.

    Returns:
        by name of the layer, the range: single numbers for a tensor, of shape (channels,) or (groups,) else.

    Raises:
        SelectionError: nothing of that side was recorded, or a layer has several inputs or outputs.
        ArgumentError: there is no such side; what was recorded does not tell channels or groups apart, or had no finite numbers.

    >>> import torch
    >>> from recorders import presets
    >>> net = torch.nn.Sequential(torch.nn.Linear(2, 1))
    >>> with presets.calibration().modules(net, types=torch.nn.Linear) as recorder:
    ...     _ = net(torch.tensor([[1.0, -3.0]]))
    >>> {layer: [end.item() for end in found] for layer, found in ranges(recorder.snapshot()).items()}
    {'0': [-3.0, 1.0]}
    """
    if side not in ("input", "output"):
        raise ArgumentError(f"ranges(side={side!r}): choose 'input' or 'output'")
    found = {}
    for layer, part in _layers(recording, side):
        quantile, states = _parts(part, "values", f"{side}/{layer}")
        assert isinstance(quantile, Quantile)
        if scheme.per == "tensor":
            shared: State | None = reduce(replace(quantile, pattern="... ->").merge, map(pooled, states))
        else:
            state = _only(states, part, f"{side}/{layer}")
            channels = importance({f"input/{layer}": part})[layer].squares.numel() if side == "input" else state["min"].numel()
            shared = _shared(state, scheme.per, channels)
        if shared is None:
            told = f"{side}/{layer} has {states[0]['min'].numel()} distributions of {channels} channels, which tell no ranges per "
            if isinstance(scheme.per, int) and channels % scheme.per:
                raise ArgumentError(f"{told}{scheme.per}: {channels} channels are no whole number of groups of {scheme.per}")
            raise ArgumentError(f"{told}{scheme.per}: record presets.calibration(per_channel=True), or with group_size")
        if not shared["counts"].any(dim=-1).all():
            raise ArgumentError(f"{side}/{layer}: a {scheme.per if isinstance(scheme.per, str) else 'group'} has no finite numbers")
        found[layer] = scheme.method(Distribution.of_quantile(quantile, shared), scheme.bits, scheme.symmetric)
    return found


def weight_ranges(net: nn.Module, layers: Mapping[str, Subrecording], scheme: Scheme) -> dict[str, ClippingRange]:
    """The range of the weight of each layer whose input was recorded, from the weight itself.

    Args:
        net: the network that was recorded.
        layers: what was recorded: it names the layers, and has the importance of their inputs.
        scheme: the integers that the range is for, and the method.

    Returns:
        by name of the layer, the range: single numbers for a tensor, of shape (rows,) for channels and (rows, groups) for groups.

    Raises:
        SelectionError: no inputs were recorded.
        ArgumentError: the columns of a weight are no multiple of the size of a group.

    >>> import torch
    >>> from recorders import presets
    >>> net = torch.nn.Sequential(torch.nn.Linear(4, 3))
    >>> with presets.calibration().modules(net, types=torch.nn.Linear) as recorder:
    ...     _ = net(torch.randn(5, 4))
    >>> weight_ranges(net, recorder.snapshot(), Scheme(bits=4, per=2))["0"].low.shape
    torch.Size([3, 2])
    """
    found = {}
    for layer, part in _layers(layers, "input"):
        weight = weight_of(net, layer).flatten(1)
        mass = None
        if scheme.importance:
            squares, positions = importance({f"input/{layer}": part})[layer]
            if weight.shape[1] % squares.numel():
                raise ArgumentError(f"{layer}: its weight has {weight.shape[1]} columns and its input {squares.numel()} channels")
            mass = (squares / max(positions, 1)).repeat_interleave(weight.shape[1] // squares.numel()).expand_as(weight)
        shape: tuple[int, ...] = (-1,) if scheme.per == "tensor" else tuple(weight.shape)
        if isinstance(scheme.per, int):
            if weight.shape[1] % scheme.per:
                raise ArgumentError(f"{layer}: its weight has {weight.shape[1]} columns, no multiple of groups of {scheme.per}")
            shape = (weight.shape[0], -1, scheme.per)
        distribution = Distribution.of_tensor(weight.reshape(shape), None if mass is None else mass.reshape(shape))
        found[layer] = scheme.method(distribution, scheme.bits, scheme.symmetric)
    return found


def importance(recording: Mapping[str, Subrecording]) -> dict[str, Importance]:
    """How much the channels of the input of each layer matter.

    Elements that are not finite are left out: a channel with such ones counts by the mean of its others.

    Args:
        recording: what a recorder of `presets.calibration` recorded.

    Raises:
        SelectionError: no inputs were recorded.

    >>> import torch
    >>> from recorders import presets
    >>> net = torch.nn.Sequential(torch.nn.Linear(2, 1))
    >>> with presets.calibration().modules(net, types=torch.nn.Linear) as recorder:
    ...     _ = net(torch.tensor([[1.0, -3.0], [2.0, 0.0]]))
    >>> importance(recorder.snapshot())
    {'0': Importance(squares=tensor([5., 9.], dtype=torch.float64), positions=2)}
    """
    found = {}
    for layer, part in _layers(recording, "input"):
        state = _only(_parts(part, "squares", f"input/{layer}")[1], part, f"input/{layer}")
        counts, missing = state["count"].cpu(), state["nonfinite"].cpu()
        rows = counts + missing
        squares = state["power"].cpu().double() * torch.where(missing > 0, rows / counts.clamp(min=1), 1.0)
        found[layer] = Importance(squares, int(rows.max()))
    return found


def asked_ranges(
    recording: Mapping[str, Subrecording], net: nn.Module | None, writer: str, schemes: Mapping[str, Scheme | None]
) -> dict[str, dict[str, ClippingRange]]:
    """The ranges of each side of which a scheme is given: "input", "output" or "weight", which needs the net.

    Raises:
        ArgumentError: no scheme is given, or the net is missing; `writer` is what the message names.
    """
    found: dict[str, dict[str, ClippingRange]] = {}
    for side, scheme in schemes.items():
        if scheme is None:
            continue
        if side != "weight":
            found[side] = ranges(recording, "input" if side == "input" else "output", scheme)
        elif net is None:
            raise ArgumentError(f"{writer} needs net to find the range of its weights")
        else:
            found[side] = weight_ranges(net, recording, scheme)
    if not found:
        raise ArgumentError(f"{writer} has nothing to write: give a Scheme as inputs, outputs or weights")
    return found


def weight_of(net: nn.Module, layer: str) -> Tensor:
    """The weight of a layer; raises `SelectionError` if it has none."""
    weight = getattr(net.get_submodule(layer), "weight", None)
    if not isinstance(weight, Tensor) or weight.ndim < 2:
        raise SelectionError(f"{layer} has no weight with rows; leave it out of the recording, by types=")
    return weight.detach()


def only(side: str, scheme: Scheme, allowed: tuple[str, ...], what: str) -> None:
    """Raises `ArgumentError` if a format has no scales of this granularity."""
    kind = scheme.per if isinstance(scheme.per, str) else "group"
    if kind not in allowed:
        raise ArgumentError(f"{what} has scales of {side} per {' or '.join(allowed)}, and none per {scheme.per}")


def qparams(found: ClippingRange, scheme: Scheme) -> dict[str, Tensor]:
    """The `scale` of a range, float32, and for integers the `zero_point`: int8, or int16 for more than 8 bits."""
    if scheme.float8:
        most = torch.finfo(torch.float8_e4m3fn).max
        largest = torch.maximum(-found.low, found.high).float()
        return {"scale": (largest / most).clamp(min=torch.finfo(torch.float32).eps)}
    scale, zero_point = affine_qparams(found.low, found.high, scheme.bits, symmetric=scheme.symmetric)
    return {"scale": scale, "zero_point": zero_point.to(torch.int8 if scheme.bits <= 8 else torch.int16)}


def _layers(recording: Mapping[str, Subrecording], side: str) -> Iterator[tuple[str, Subrecording]]:
    """What was recorded of one side of each layer, by the name of the layer."""
    check_mapping(recording, "calibration")
    names = [name for name in recording if name.startswith(f"{side}/")]
    if not names:
        raise SelectionError(
            f"no {side}s of layers inside a net were recorded: use presets.calibration() on a net that contains them; there are "
            f"{list(recording)[:5]}"
        )
    for name in names:
        part = recording[name]  # which is read, and merged, whenever it is looked at
        if part.samples:
            yield name.removeprefix(f"{side}/"), part


def _shared(state: State, per: str | int, channels: int) -> State | None:
    """The state of channels or groups that share a scale; None if it does not follow from the one recorded."""
    kept, by_channel = state["min"].numel(), state["min"].ndim == 1
    if isinstance(per, int):
        return pooled(state, per * kept // channels) if by_channel and per * kept % channels == 0 and channels % per == 0 else None
    return state if by_channel and kept == channels else None


def _parts(part: Subrecording, name: str, where: str) -> tuple[Reducer, list[State]]:
    """A reducer of a product, and its state of each number of channels, of which most layers have one."""
    reducer = dict(part.reducer.parts).get(name) if isinstance(part.reducer, Product) else None
    if reducer is None:
        raise SelectionError(f"{where} holds {part.reducer}, which has no {name!r}: record it by presets.calibration()")
    states = {path: state for path, state in part.states.items() if state}
    if not states:
        raise SelectionError(f"{where} has recorded no numbers: its inputs were empty; leave the layer out of what is calibrated")
    if len({*map(path_of, states)}) != 1:
        raise _several(part, where)
    return reducer, [{key.partition("/")[2]: x for key, x in one.items() if key.startswith(f"{name}/")} for one in states.values()]


def _only(states: list[State], part: Subrecording, where: str) -> State:
    if len(states) != 1:
        raise _several(part, where)
    return states[0]


def _several(part: Subrecording, where: str) -> SelectionError:
    return SelectionError(f"{where} has {len(part.states)} tensors, {list(part.states)}: calibration is of layers with one")
