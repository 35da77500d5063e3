"""Layouts: what part of a tensor a rank holds. A DTensor tells it; of a plain tensor the user does."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from typing import TYPE_CHECKING, Any, NamedTuple
from weakref import WeakKeyDictionary, WeakSet

import torch.distributed as dist
from torch import Tensor, nn

from recorders._torch import is_distributed, without_modes
from recorders.capture.operands import is_spread
from recorders.errors import OperandError, TargetError
from recorders.recordings.placement import Placement, from_plain, to_plain
from recorders.ring.changes import Changes
from reducers.errors import did_you_mean

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor.placement_types import Placement as Kind

__all__ = [
    "CHANGES",
    "Layout",
    "PlacementInfo",
    "as_text",
    "as_text_of_all",
    "from_text",
    "guess",
    "in_use",
    "is_placed",
    "know",
    "layout_of",
    "of_all",
    "of_one",
    "register_layouts",
    "unclear",
]


class Layout(NamedTuple):
    """How a tensor is spread over ranks: the device mesh, and a placement of PyTorch for each dimension of it."""

    mesh: Any
    kinds: tuple[Any, ...]

    def place(self, axes: int, shared: bool) -> Placement:
        """What this rank holds of a tensor with so many axes.

        Args:
            shared: whether the tensor is one of the net, of which ranks outside the mesh have copies.

        Raises:
            OperandError: this rank holds a summand, which is no part of the values; or it is not in the mesh.
        """
        where = self.mesh.get_coordinate()
        if where is None:
            raise OperandError("this rank is not in the device mesh of the tensor: record it on the ranks that hold it")
        parts = []
        for kind, index, count in zip(self.kinds, where, self.mesh.shape, strict=True):
            if count > 1 and kind.is_partial():
                raise OperandError(
                    f"each rank holds a summand, not the values, because the tensor is {kind} and not reduced yet: record it where "
                    "it is reduced, such as the input of the module that takes it (ForwardInputMonitor)"
                )
            if count > 1 and not kind.is_replicate():
                parts.append((kind.dim % axes, index, count))
        return Placement(dist.get_rank(), shared, without_modes(_lowest, self.mesh), axes, tuple(parts))


def _lowest(mesh: Any) -> int:
    return int(mesh.mesh.min())


def _placement(tensor: Any) -> Placement | None:
    """Returns which part of a DTensor this rank holds; of other tensors None. See `Layout.place`."""
    return Layout(tensor.device_mesh, tuple(tensor.placements)).place(tensor.ndim, shared=False) if is_spread(tensor) else None


class PlacementInfo(NamedTuple):
    """What is known of a tensor, or of the operands of a callable, before it is known whose they are; graphs tell it.

    Attributes:
        axes: the number of axes of the tensor, or of the first of the operands; None if that is a DTensor.
        place: the placement of a DTensor, or of the operands of which some are DTensors.
        fault: why there is none.
    """

    axes: int | None
    place: Placement | None = None
    fault: str = ""

    def placement(self, layout: Layout | None, shared: bool) -> Placement | None:
        """The placement of the tensor; None if it is whole, or data of this rank.

        Args:
            layout: that of a plain tensor, if it is known.
            shared: see `Layout.place`.

        Raises:
            OperandError: this rank holds no part of the values.
        """
        if self.fault:
            raise OperandError(self.fault)
        if self.place is not None:
            return replace(self.place, shared=shared)
        return None if layout is None or self.axes is None else layout.place(self.axes, shared)

    def made_of(self, layout: Layout | None, shared: bool) -> Placement | None:
        """The placement of what a callable makes of the operands: a norm of parts is no part of a norm."""
        first = None if self.axes is None else PlacementInfo(self.axes).placement(layout, shared)
        found = [place for place in (first, self.placement(None, shared)) if place is not None]
        cut = next((place for place in found if place.parts), found[0] if found else None)
        return None if cut is None else replace(cut, axes=None)


def of_all(tensors: Sequence[Tensor]) -> PlacementInfo:
    """What is known of the operands of a callable.

    Raises:
        OperandError: this rank holds no part of the values of one of them.
    """
    found = [place for tensor in tensors if (place := _placement(tensor)) is not None]
    cut = next((place for place in found if place.parts), found[0] if found else None)
    return PlacementInfo(tensors[0].ndim if tensors and not is_spread(tensors[0]) else None, cut)


def of_one(tensor: Tensor) -> PlacementInfo:
    """What is known of a tensor.

    Raises:
        OperandError: this rank holds no part of its values.
    """
    place = _placement(tensor)
    return PlacementInfo(tensor.ndim if place is None else None, place)


def as_text(tensors: Mapping[str, Tensor]) -> str:
    """What a graph tells of its tensors, by path."""
    return json.dumps({path: _to_plain(of_one, tensor) for path, tensor in tensors.items()})


def as_text_of_all(tensors: Sequence[Tensor]) -> str:
    """What a graph tells of the operands of a callable."""
    return json.dumps({"": _to_plain(of_all, tensors)})


def _to_plain(tell: Callable[[Any], PlacementInfo], what: Any) -> list[Any]:
    try:
        axes, place, fault = tell(what)
    except OperandError as error:
        axes, place, fault = None, None, str(error)
    return [axes, None if place is None else to_plain(place), fault]


@lru_cache(maxsize=4096)
def from_text(text: str) -> Mapping[str, PlacementInfo]:
    """What `as_text` or `as_text_of_all` told, by path; nothing if the text is empty."""
    info = json.loads(text) if text else {}
    return {
        path: PlacementInfo(axes, None if place is None else from_plain(place), fault)
        for path, (axes, place, fault) in info.items()
    }


CHANGES = Changes()
"""Is told when layouts are registered, nets become known, or a graph is traced: then modules may be spread that were not."""

_declared: WeakKeyDictionary[nn.Module, dict[str, Layout | None]] = WeakKeyDictionary()
_nets: WeakSet[nn.Module] = WeakSet()
_looked: WeakSet[nn.Module] = WeakSet()  # those of which the next is known
_unclear: WeakSet[nn.Module] = WeakSet()  # modules of nets that are tensor parallel


def register_layouts(
    net: nn.Module,
    mesh: DeviceMesh,
    *,
    outputs: Mapping[str, Kind | Sequence[Kind] | None] | None = None,
    inputs: Mapping[str, Kind | Sequence[Kind] | None] | None = None,
) -> None:
    """Says how plain tensors between tensor-parallel layers are spread over ranks, so that recordings of ranks merge to the whole.

    A tensor-parallel layer whose style says so returns the local part of a DTensor as a plain tensor (`use_local_output=True`, the
    default of PyTorch). Nobody can tell from outside what part that is, or what other modules make of it. Nothing is communicated
    or converted; the training does not change. If a layout is missing, the first `sync` warns, with the line to write.

    Args:
        net: the net, before or after it is spread over ranks.
        mesh: the device mesh over which the tensors are spread.
        outputs: by the name of a module in `net`, the placement of the tensors that it returns, and of their gradients, such as
            `Shard(-1)` or `Replicate()`; a sequence of placements if the mesh has several dimensions; None if each rank has
            data of its own.
        inputs: the same for what the module is given.

    Raises:
        TargetError: there is no module of that name.
        ValueError: there is not one placement for each dimension of the mesh.
    """
    for side, given in (("outputs", outputs or {}), ("inputs", inputs or {})):
        for name, kinds in given.items():
            _register(net, name, side, None if kinds is None else Layout(mesh, _kinds(kinds)), mesh)


def _kinds(kinds: Any) -> tuple[Any, ...]:
    return tuple(kinds) if isinstance(kinds, Sequence) else (kinds,)


def _register(net: nn.Module, name: str, side: str, layout: Layout | None, mesh: Any) -> None:
    here = f"register_layouts({side}={{{name!r}: ...}})"
    try:
        module = net.get_submodule(name)
    except AttributeError:
        there = [known for known, _ in net.named_modules() if known]
        found = f"{did_you_mean(name, there)}it has {there[:20]}"
        raise TargetError(f"{here}: {type(net).__name__} has no module of that name; {found}") from None
    if layout is not None and (len(layout.kinds) != mesh.ndim or not all(hasattr(kind, "is_partial") for kind in layout.kinds)):
        raise ValueError(
            f"{here}: give a placement, such as Shard(-1) or Replicate(), for each dimension of the mesh, which has {mesh.ndim}; "
            f"got {layout.kinds}"
        )
    _declared.setdefault(module, {})[side] = layout
    CHANGES.note()


def in_use() -> bool:
    """Whether plain tensors may be parts or copies: this process is one of several that train, or called `register_layouts`."""
    # The compiler and FSDP2 import the module, too, so that it is imported does not suffice.
    return bool(_declared) or ("torch.distributed.tensor.parallel" in sys.modules and dist.is_available() and dist.is_initialized())


def layout_of(module: nn.Module | None, side: str) -> Layout | None:
    """How plain tensors that a module returns (`side="outputs"`) or is given ("inputs") are spread; None if that is not known."""
    if module is None or not side or not in_use():
        return None
    return _declared.get(module, {}).get(side)


def know(net: nn.Module) -> None:
    """Remembers a net from which modules are selected, for `unclear`."""
    _nets.add(net)
    _looked.discard(net)
    CHANGES.note()


def unclear(module: nn.Module | None, side: str) -> bool:
    """Whether nobody can tell what plain tensors of this module are, because its net is tensor parallel."""
    if module is None or not side or not in_use():
        return False
    for net in [net for net in _nets if net not in _looked]:
        _looked.add(net)
        inside = list(net.modules())
        if any(map(is_distributed, inside)):
            _unclear.update(inside)
    return module in _unclear and side not in _declared.get(module, {})


def is_placed(module: nn.Module | None, side: str) -> bool:
    """Whether plain tensors of this module may be parts or copies, of which each observation is to be checked."""
    return in_use() and (layout_of(module, side) is not None or unclear(module, side))


def guess(module: nn.Module, side: str) -> tuple[str, str] | None:
    """The name of a module in its net, and, as code, the likely placements of its plain tensors; None if its net is not known.

    They are those of what the last tensor-parallel layer before it returns, or for its outputs those of what it returns itself;
    before the first one all ranks have copies. How the weight of a layer is cut tells what it returns.
    """
    for net in _nets:
        before = "Replicate()"
        for name, other in net.named_modules():
            if other is module and side == "inputs":
                return name, before
            before = _likely(other) or before
            if other is module:
                return name, before
    return None


def _likely(layer: nn.Module) -> str:
    """What a tensor-parallel layer is likely to return, as code; "" of other layers."""
    weight: Any = getattr(layer, "weight", None)
    if not is_distributed(layer) or weight is None or not is_spread(weight):
        return ""
    features = 1 if isinstance(layer, nn.Embedding) else 0  # the axis of the weight that is that of what the layer returns
    kinds = ["Shard(-1)" if kind.is_shard(features) else "Replicate()" for kind in weight.placements]
    return kinds[0] if len(kinds) == 1 else f"[{', '.join(kinds)}]"
