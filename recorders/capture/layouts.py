"""Layouts: what part of a tensor a rank holds. A DTensor tells it; of a plain tensor the user does."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from typing import TYPE_CHECKING, Any, NamedTuple
from weakref import WeakKeyDictionary, WeakSet

import torch.distributed as dist
from torch import Tensor, nn

from recorders._torch import is_distributed, without_modes
from recorders.capture.operands import is_spread
from recorders.errors import OperandError, RecordingWarning, TargetError
from recorders.recordings.distributed.placement import Placement, from_plain, to_plain
from recorders.ring.changes import Changes
from reducers import TensorPart
from reducers.errors import did_you_mean, warn_user

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor.placement_types import Placement as Kind


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


class PlacementInfo(NamedTuple):
    """What is known of the tensors of a leaf, or of a callable, before it is known whose they are; graphs pass it on.

    Attributes:
        axes: the number of axes of the first tensor; None if that is a DTensor.
        place: the placement of a DTensor among them, of one that is cut if there is any.
        fault: why there is none.
        part: which part of the first DTensor this rank holds; None if that is not known, or it holds no element.
    """

    axes: int | None
    place: Placement | None = None
    fault: str = ""
    part: TensorPart | None = None

    @classmethod
    def of(cls, tensors: Sequence[Any], *, positional: bool = False) -> PlacementInfo:
        """What is known of these tensors; `fault` tells why this rank holds no part of the values of one of them.

        Args:
            positional: whether `part` is wanted, which takes time to find.
        """
        try:
            found = [Layout(x.device_mesh, tuple(x.placements)).place(x.ndim, shared=False) for x in tensors if is_spread(x)]
        except OperandError as error:
            return cls(None, None, str(error))
        first = next(filter(is_spread, tensors), None) if positional and found else None
        part = None if first is None else without_modes(_part_of, first)
        return cls(tensors[0].ndim if tensors and not is_spread(tensors[0]) else None, _cut(found), "", part)

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
        cut = _cut([place for place in (first, self.placement(None, shared)) if place is not None])
        return None if cut is None else replace(cut, axes=None)


def _part_of(tensor: Any) -> TensorPart | None:
    """Which part of a DTensor this rank holds."""
    describe = getattr(tensor, "__create_chunk_list__", None)  # by which checkpoints of PyTorch know it
    if describe is None:
        return None
    chunk, *others = describe()
    sizes = (*tensor.shape, *chunk.offsets)
    known = not others and all(type(size) is int for size in sizes) and 0 not in chunk.sizes
    known = known and tuple(chunk.sizes) == tensor.to_local().shape
    return TensorPart(tuple(tensor.shape), tuple(chunk.offsets)) if known else None


def even_part(place: Placement, shape: Sequence[int]) -> TensorPart | None:
    """Which part a tensor of this shape is, if all parts are of one size; None if it is whole, or made by a callable."""
    if place.axes is None or not place.parts or 0 in shape:
        return None
    counts, indices = [1] * len(shape), [0] * len(shape)
    for axis, index, count in place.parts:
        counts[axis], indices[axis] = counts[axis] * count, indices[axis] * count + index
    whole = (size * count for size, count in zip(shape, counts, strict=True))
    return TensorPart(tuple(whole), tuple(size * index for size, index in zip(shape, indices, strict=True)))


def _cut(found: Sequence[Placement]) -> Placement | None:
    """The first placement that is one of a part; of copies the first."""
    return next((place for place in found if place.parts), found[0] if found else None)


def as_text(tensors: Mapping[str, Tensor | Sequence[Tensor]]) -> str:
    """What a graph tells of its tensors, by path; or of all operands of a callable, by ""."""
    found = {path: PlacementInfo.of([xs] if isinstance(xs, Tensor) else xs, positional=True) for path, xs in tensors.items()}
    return json.dumps({path: [axes, place and to_plain(place), fault, part] for path, (axes, place, fault, part) in found.items()})


@lru_cache(maxsize=4096)
def from_text(text: str) -> Mapping[str, PlacementInfo]:
    """What `as_text` was given; nothing if the text is empty."""
    found = json.loads(text) if text else {}
    return {
        path: PlacementInfo(axes, place and from_plain(place), fault, part and TensorPart(*map(tuple, part)))
        for path, (axes, place, fault, part) in found.items()
    }


CHANGES = Changes()
"""Is told when layouts are registered, or a graph is traced: then modules may be spread that were not."""

_declared: WeakKeyDictionary[nn.Module, dict[str, Layout | None]] = WeakKeyDictionary()
_nets: WeakSet[nn.Module] = WeakSet()  # from which modules were selected
_warned: WeakSet[Any] = WeakSet()  # clocks of recorders that were merged


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
            every = tuple(kinds) if isinstance(kinds, Sequence) else (kinds,)
            _register(net, name, side, None if kinds is None else Layout(mesh, every), mesh)


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
    """Remembers a net from which modules are selected, for `warn_before_merge`."""
    _nets.add(net)


def warn_before_merge(monitors: Iterable[Any], clock: Any) -> None:
    """Warns, before ranks are merged for the first time, of what counts as data of each rank though it may be a part or a copy.

    Args:
        clock: that of the recorder.
    """
    if clock in _warned:
        return
    _warned.add(clock)
    found: dict[str, dict[str, str]] = {}
    guesses = {side: _guesses(side) for side in ("outputs", "inputs")} if in_use() else {}
    for monitor in monitors:
        module, side = monitor.module, monitor.side
        guess = guesses.get(side, {}).get(module)
        if guess is not None and side not in _declared.get(module, {}) and monitor.buffer.samples and not monitor.buffer.places:
            found.setdefault(side, {})[guess[0]] = guess[1]
    if found:
        given = [f"{side}={{{', '.join(f'{name!r}: {kinds}' for name, kinds in names.items())}}}" for side, names in found.items()]
        warn_user(
            f"the net is tensor parallel, and plain tensors of {sum(map(len, found.values()))} modules between its layers were "
            "recorded as data of each rank: sync counts them once for each rank, also parts and copies. Say what they are before "
            "the net runs, after a look at these guesses: "
            f"register_layouts(net, mesh, {', '.join(sorted(given, reverse=True))}). None in place of a placement says that each "
            "rank has data of its own",
            RecordingWarning,
        )


def _guesses(side: str) -> dict[nn.Module, tuple[str, str]]:
    """By module of the nets that are tensor parallel: its name, and as code the likely placements of its plain tensors.

    They are those of what the last tensor-parallel layer before it returns, or for its outputs those of what it returns itself;
    before the first one all ranks have copies.
    """
    found: dict[nn.Module, tuple[str, str]] = {}
    for net in _nets:
        before = "Replicate()"
        for name, module in net.named_modules() if any(map(is_distributed, net.modules())) else ():
            own = _likely(module) or before
            found.setdefault(module, (name, before if side == "inputs" else own))
            before = own
    return found


def _likely(layer: nn.Module) -> str:
    """What a tensor-parallel layer is likely to return, as code, because of how its weight is cut; "" of other layers."""
    weight: Any = getattr(layer, "weight", None)
    if not is_distributed(layer) or weight is None or not is_spread(weight):
        return ""
    features = 1 if isinstance(layer, nn.Embedding) else 0  # the axis of the weight that is that of what the layer returns
    kinds = ["Shard(-1)" if kind.is_shard(features) else "Replicate()" for kind in weight.placements]
    return kinds[0] if len(kinds) == 1 else f"[{', '.join(kinds)}]"
