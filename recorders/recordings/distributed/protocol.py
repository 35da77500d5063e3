"""Protocol: what a rank announces and sends in `sync`, whether that of all ranks fits together, and what is read of it.

The manifest is JSON: names, monitors, reducers, and of each tensor its dtype and shape, and how it merges if that is element by
element. Ranks that record alike have equal manifests: what differs from rank to rank is sent as numbers, which are the counts of
observations and what placements say of one rank. Ranks trust each other; what is found is what happens by mistake: that they record
other names, have other reducers, or run another version.
"""

from __future__ import annotations

import json
import math
from collections.abc import Container, Iterator, Mapping, Sequence
from dataclasses import fields, is_dataclass, replace
from functools import cache, lru_cache
from itertools import islice
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor, nn

from recorders.errors import SyncError
from recorders.recordings.display import listed
from recorders.recordings.distributed.placement import Placement
from recorders.recordings.recording import Missing, Recording, Subrecording
from recorders.recordings.storage.save import versions
from recorders.recordings.storage.tensors import as_bytes, why_no_memory
from reducers import RecipeError, Reducer, State, from_recipe, to_recipe

Manifest: TypeAlias = Mapping[str, Any]
Path: TypeAlias = tuple[str, str, str]
"""A tensor of a state: the name of the subrecorder, the leaf and the key."""

SHOWN = 20
"""The largest number of names, or of differences, that an error lists."""
MAX_MANIFEST = 32 * 2**20
"""The longest manifest that is sent: Python's objects take up to 30 times the bytes of their JSON."""

_WHOLE = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)
_ORDERED = (*_WHOLE, torch.bool, torch.float64, torch.float32, torch.float16, torch.bfloat16)
_REDUCED: Mapping[str, tuple[torch.dtype, ...]] = {
    "sum": (*_WHOLE, torch.float64, torch.complex128),  # narrower floats are added in the order of the ranks
    "min": _ORDERED,
    "max": _ORDERED,
}
"""The dtypes that travel in an all-reduce, by how their tensors merge."""


class Packed(NamedTuple):
    """What one rank is to send.

    Attributes:
        manifest: its JSON.
        numbers: by name, the count of observations, then what is of this rank in placements.
        tensors: the bytes of each tensor of a state, all on one device.
    """

    manifest: bytes
    numbers: Mapping[str, Sequence[int]]
    tensors: Mapping[Path, Tensor]


def pack(recording: Recording, device: torch.device, missing: Missing, call: str) -> Packed:
    """What this rank is to send. `call` says how `sync` was called, which must be alike on all ranks.

    Raises:
        SyncError: a reducer is unknown, a state is no dense tensor with data, or the manifest is too long.
    """
    entries: dict[str, Any] = {}
    numbers: dict[str, list[int]] = {}
    tensors: dict[Path, Tensor] = {}
    texts: dict[int, str] = {}
    for name, part in recording.items():
        if part.reducer is None:
            raise SyncError(f"subrecorder {name!r} has no reducer, as it held a function: pass it, recording.with_reducers(...)")
        if id(part.reducer) not in texts:  # thousands of subrecorders may share a few reducers
            texts[id(part.reducer)] = _text(part.reducer)
        states: dict[str, dict[str, str]] = {}
        for leaf, state in part.states.items():
            states[leaf], reduced = {}, {} if part.placement else _reductions(part.reducer, state)
            for key, value in state.items():
                what = f"state {key!r} of subrecorder {name!r}{f', leaf {leaf!r}' if leaf else ''}"
                tensors[name, leaf, key] = _sendable(value, what)
                states[leaf][key] = _spec(value.dtype, value.shape, reduced.get(key))
        entries[name] = {
            "is": f"{part.monitor or 'Monitor'}({texts[id(part.reducer)]}{f', {part.attr!r}' if part.attr else ''})"
            + "".join(f".apply({_text(function)})" for function in part.functions),
            "states": states,
        }
        numbers[name] = [part.samples]
        if part.placement:
            entries[name]["placed"] = {
                leaf: [place.shared, place.axes, [[axis, count] for axis, _, count in place.parts]]
                for leaf, place in part.placement.items()
            }
            for place in part.placement.values():
                numbers[name] += [place.rank, -1 if place.home is None else place.home, *(index for _, index, _ in place.parts)]
        if missing == "keep":
            entries[name]["part"] = [_recipe(part.reducer), part.monitor, part.attr, part.module]
    manifest = json.dumps({"version": _version(), "call": call, "subrecorders": entries, "aliases": dict(recording.aliases)})
    if len(manifest) > MAX_MANIFEST:
        raise SyncError(f"the names and states take {len(manifest)} bytes, and at most {MAX_MANIFEST} are sent: sync fewer at once")
    devices = {tensor.device for tensor in tensors.values()}
    if len(devices) > 1:  # of one device, tensors are sent in one transfer
        tensors = {path: tensor.to(device) for path, tensor in tensors.items()}
    return Packed(manifest.encode(), numbers, tensors)


@cache
def _version() -> str:
    return str(versions()["torch-recorders"])


def _reductions(reducer: Reducer, state: State) -> Mapping[str, str]:
    """How tensors of the state merge, by key, if that is element by element; nothing if one of them is of another dtype."""
    reductions = reducer.reductions_of(state)
    return reductions if all(state[key].dtype in _REDUCED[op] for key, op in reductions.items()) else {}


def _recipe(reducer: Reducer) -> dict[str, Any] | None:
    try:
        return to_recipe(reducer)
    except RecipeError:  # it holds a function, which only ranks that have it can call
        return None


def _sendable(tensor: Tensor, what: str) -> Tensor:
    """The bytes of a tensor, as uint8."""
    if type(tensor) not in (Tensor, nn.Parameter):
        raise SyncError(f"{what} is a {type(tensor).__name__}; only plain tensors can be sent")
    if tensor.layout is not torch.strided or tensor.is_nested or tensor.is_quantized or tensor.is_meta:
        kind = "meta" if tensor.is_meta else f"{tensor.layout} {tensor.dtype}"
        raise SyncError(f"{what} is a {kind} tensor; only dense tensors with data can be sent: convert it where it is recorded")
    if reason := why_no_memory(tensor):
        raise SyncError(f"{what} is a tensor {reason}: keep a plain copy, such as tensor.clone(), where it is made")
    return as_bytes(tensor.detach().resolve_conj().resolve_neg().contiguous())


class Spec(NamedTuple):
    """What a manifest says of a tensor.

    Attributes:
        size: in bytes.
        op: how it merges, if that is element by element: "sum", "min" or "max".
    """

    dtype: torch.dtype
    shape: tuple[int, ...]
    size: int
    op: str | None


def _spec(dtype: torch.dtype, shape: Sequence[int], op: str | None) -> str:
    """Dtype, shape and reduction, such as `float32 64 3` or `int64 3 sum`; thousands of lists would start the garbage collector."""
    return " ".join([str(dtype).removeprefix("torch."), *map(str, shape), *([op] if op else [])])


@lru_cache(maxsize=1024)
def spec_of(text: str) -> Spec:
    """What the text of `_spec` says."""
    name, *sizes = text.split(" ")
    op = sizes.pop() if sizes and sizes[-1] in _REDUCED else None
    dtype, shape = getattr(torch, name), tuple(map(int, sizes))
    return Spec(dtype, shape, dtype.itemsize * math.prod(shape), op)


def _text(value: Any) -> str:
    """Like repr, but equal in all processes: functions and other objects whose repr has an address are given by name."""
    if is_dataclass(value) and not isinstance(value, type):
        inside = ", ".join(f"{field.name}={_text(getattr(value, field.name))}" for field in fields(value))
        return f"{type(value).__qualname__}({inside})"
    if isinstance(value, (tuple, list)):
        return f"({', '.join(map(_text, value))})"
    if value is None or isinstance(value, (str, int, float, complex, torch.dtype)):
        return repr(value)
    return str(getattr(value, "__qualname__", type(value).__qualname__))


def differences(manifests: Sequence[Manifest], ranks: Sequence[int], missing: Missing) -> Iterator[str]:
    """The differences between each rank and the first that has the same names, with both sides listed."""
    for what, shown in (("version", "runs version"), ("call", "calls")):
        said = {str(manifest[what]): rank for rank, manifest in zip(ranks, manifests, strict=True)}
        if len(said) > 1:
            yield "; ".join(f"rank {rank} {shown} {text:.200}" for text, rank in islice(said.items(), SHOWN))
            return
    known: dict[str, tuple[int, Manifest]] = {}
    compared: set[int] = set()
    first = manifests[0]["subrecorders"]
    for rank, manifest in zip(ranks, manifests, strict=True):
        other = manifest["subrecorders"]
        if missing == "error" and other.keys() != first.keys():
            mine, theirs = ([name for name in a if name not in b] for a, b in ((first, other), (other, first)))
            here, there = (listed(names) if names else "nothing" for names in (mine, theirs))
            yield f"beside what both record, rank {ranks[0]} records {here} and rank {rank} records {there}"
        if id(manifest) in compared:
            continue
        compared.add(id(manifest))
        for name, entry in other.items():
            before, expected = known.setdefault(name, (rank, entry))
            if entry["is"] != expected["is"]:
                yield f"{name!r} is {expected['is']} on rank {before} and {entry['is']} on rank {rank}"
            elif unlike := _unlike(expected["states"], entry["states"]):
                yield f"{name!r} merges as {unlike[0]} on rank {before} and as {unlike[1]} on rank {rank}: is that another version?"
    for name, (rank, entry) in known.items() if missing == "keep" else ():
        without = [other for other, manifest in zip(ranks, manifests, strict=True) if name not in manifest["subrecorders"]]
        if without and entry["part"][0] is None:
            yield f"{name!r} is {entry['is']} on rank {rank}, and ranks {without}, which do not record it, do not have its function"


def _unlike(here: Mapping[str, Manifest], there: Mapping[str, Manifest]) -> tuple[Manifest, Manifest] | None:
    """States of one leaf, of which tensors of one dtype merge in other ways."""
    for leaf, state in here.items():
        other = there.get(leaf, {})
        for key, text in state.items() if state != other else ():
            a, b = spec_of(text), spec_of(other.get(key, text))
            if a.dtype is b.dtype and a.op != b.op:
                return state, other
    return None


class Index:
    """Where the numbers and tensors of each name are in the bytes that a rank gathers; ranks with equal manifests share it.

    Args:
        manifest: of the rank.
        reduced: the tensors that are all-reduced, and so are not gathered.
        counted: the names whose counts of observations are all-reduced.

    Attributes:
        states: by name and leaf, what is said of each tensor.
        starts: by name, which number is its first, and which byte after all numbers.
        numbers: how many there are, of eight bytes each.
        size: the number of all bytes.
    """

    def __init__(self, manifest: Manifest, reduced: Container[Path] = (), counted: Container[str] = ()) -> None:
        self.manifest, self.counted = manifest, counted
        self.states: dict[str, dict[str, dict[str, Spec]]] = {}
        self.starts: dict[str, tuple[int, int]] = {}
        numbers = size = 0
        for name, entry in manifest["subrecorders"].items():
            states = {
                leaf: {key: spec_of(text) for key, text in state.items() if (name, leaf, key) not in reduced}
                for leaf, state in entry["states"].items()
            }
            if name in counted and not any(states.values()):
                continue
            self.states[name], self.starts[name] = states, (numbers, size)
            numbers += (name not in counted) + sum(2 + len(parts) for *_, parts in entry.get("placed", {}).values())
            size += sum(spec.size for state in states.values() for spec in state.values())
        self.numbers, self.size = numbers, 8 * numbers + size

    def gathered(self, packed: Packed, device: torch.device) -> Tensor:
        """The bytes of one rank."""
        numbers = [number for name in self.states for number in packed.numbers[name][name in self.counted :]]
        tensors = [
            packed.tensors[name, leaf, key]
            for name, states in self.states.items()
            for leaf, state in states.items()
            for key in state
        ]
        home = tensors[0].device if tensors else device
        return torch.cat([as_bytes(torch.tensor(numbers, dtype=torch.int64, device=home)), *tensors]).to(device)


class Sent(Mapping[str, Subrecording]):
    """What one rank sent, read name by name as from a file, with the reducers and functions of this rank.

    Args:
        recording: what this rank recorded.
        index: of what the other one sent.
        row: what it sent; bytes after those of the index are padding.
    """

    def __init__(self, recording: Recording, index: Index, row: Tensor) -> None:
        self._recording, self._index = recording, index
        self._numbers: list[int] = row[: 8 * index.numbers].clone().view(torch.int64).tolist()
        self._bytes = row[8 * index.numbers :]

    def __getitem__(self, name: str) -> Subrecording:
        first, start = self._index.starts[name]
        entry, numbers = self._index.manifest["subrecorders"][name], iter(self._numbers[first:])
        states: dict[str, dict[str, Tensor]] = {}
        for leaf, state in self._index.states[name].items():
            states[leaf] = {}
            for key, spec in state.items():
                # Pieces are copied before they are viewed, because they may not be aligned, and would keep all bytes alive.
                states[leaf][key] = self._bytes[start : start + spec.size].clone().view(spec.dtype).view(spec.shape)
                start += spec.size
        samples = 0 if name in self._index.counted else next(numbers)
        placement = {}
        for leaf, (shared, axes, parts) in entry.get("placed", {}).items():
            rank, home = next(numbers), next(numbers)
            whole = tuple((axis, next(numbers), count) for axis, count in parts)
            placement[leaf] = Placement(rank, shared, None if home == -1 else home, axes, whole)
        return replace(blank(self._recording, name, entry), states=states, samples=samples, placement=placement)

    def __contains__(self, name: object) -> bool:  # that of Mapping reads what it looks for
        return name in self._index.states

    def __iter__(self) -> Iterator[str]:
        return iter(self._index.states)

    def __len__(self) -> int:
        return len(self._index.states)


def parse(raw: bytes) -> Manifest:
    """The manifest that a rank sent."""
    manifest: Manifest = json.loads(raw.decode())
    return manifest


def blank(recording: Recording, name: str, entry: Manifest) -> Subrecording:
    """What this rank has under a name, or if it has nothing the same made from the manifest; without states and observations."""
    if name in recording.subrecordings:
        return replace(recording.subrecordings[name], states={}, samples=0, saved_results=None, progress=None, placement={})
    recipe, monitor, attr, module = entry["part"]
    return Subrecording(from_recipe(recipe), monitor=monitor, attr=attr, module=module)
