"""Message: what a rank sends in `sync`, packed, and read again as something that may be malformed.

The manifest is JSON: names, monitors, reducers, and the dtype and shape of each tensor, and how it merges if that is element by
element. The payload is numbers as int64, which are the sample counts and what differs from rank to rank in placements, and the
bytes of all tensors, in the order of the manifest.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields, is_dataclass, replace
from functools import lru_cache
from itertools import islice
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from recorders.errors import SyncError
from recorders.recordings.distributed.exchange import MAX_MANIFEST
from recorders.recordings.distributed.placement import Placement, from_plain, is_plain_placement
from recorders.recordings.recording import Missing, Recording, Subrecording
from recorders.recordings.storage.entry import is_text, is_text_or_none, mapping
from recorders.recordings.storage.stored import as_bytes, why_no_memory
from reducers import RecipeError, Reducer, State, from_recipe, to_recipe

__all__ = ["emptied", "layout", "misfits", "pack", "pack_error", "parse", "payload_size", "placed_numbers", "unpack"]

_SPEC = re.compile(r"[a-z0-9_]{1,30}( [0-9]{1,19}){0,64}( (sum|min|max))?")
_WHOLE = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)
_ORDERED = (*_WHOLE, torch.bool, torch.float64, torch.float32, torch.float16, torch.bfloat16)
_REDUCED: Mapping[str, tuple[torch.dtype, ...]] = {
    "sum": (*_WHOLE, torch.float64, torch.complex128),  # narrower floats are added in the order of the ranks
    "min": _ORDERED,
    "max": _ORDERED,
}
"""The dtypes that travel in an all-reduce, by how their tensors merge."""
_MOST = 2**62
"""More bytes than any machine has, and few enough to count in an int64."""


def pack(recording: Recording, device: torch.device, missing: Missing, call: str) -> tuple[bytes, Tensor]:
    """The manifest and the payload. `call` says how `sync` was called, which must be alike on all ranks.

    Raises:
        SyncError: a reducer is unknown, a state is no dense tensor with data, or the manifest is too long.
    """
    tensors: list[Tensor] = []
    entries: dict[str, Any] = {}
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
                tensors.append(_sendable(value, f"state {key!r} of subrecorder {name!r}{f', leaf {leaf!r}' if leaf else ''}"))
                states[leaf][key] = _spec(value.dtype, value.shape, reduced.get(key))
        entries[name] = {
            "is": f"{part.monitor or 'Monitor'}({texts[id(part.reducer)]}{f', {part.attr!r}' if part.attr else ''})"
            + "".join(f".apply({_text(function)})" for function in part.functions),
            "states": states,
        }
        if part.placement:  # without what differs from rank to rank, so that manifests stay equal, and are not exchanged
            entries[name]["placed"] = {
                leaf: [0, place.shared, None, place.axes, [[axis, 0, count] for axis, _, count in place.parts]]
                for leaf, place in part.placement.items()
            }
        if missing == "keep":
            entries[name]["part"] = [_recipe(part.reducer), part.monitor, part.attr, part.module]
    manifest = json.dumps({"call": call, "subrecorders": entries, "aliases": dict(recording.aliases)}).encode()
    if len(manifest) > MAX_MANIFEST:
        raise SyncError(f"the names and states take {len(manifest)} bytes, and at most {MAX_MANIFEST} are sent: sync fewer at once")
    devices = {tensor.device for tensor in tensors}
    home = devices.pop() if len(devices) == 1 else device  # then there is one transfer, not one for each tensor
    numbers = [part.samples for part in recording.values()]
    for place in (place for part in recording.values() for place in part.placement.values()):
        numbers += [place.rank, -1 if place.home is None else place.home, *(index for _, index, _ in place.parts)]
    first = as_bytes(torch.tensor(numbers, dtype=torch.int64, device=home))
    return manifest, torch.cat([first, *(tensor.to(home) for tensor in tensors)]).to(device)


def pack_error(error: Exception, device: torch.device) -> tuple[bytes, Tensor]:
    """What a rank sends that cannot send its recording: the others wait."""
    return json.dumps({"error": f"{type(error).__name__}: {error}"[:1000]}).encode(), torch.empty(
        0, dtype=torch.uint8, device=device
    )


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


def _spec(dtype: torch.dtype, shape: Sequence[int], op: str | None) -> str:
    """Dtype, shape and reduction, such as `float32 64 3` or `int64 3 sum`; thousands of lists would start the garbage collector."""
    return " ".join([str(dtype).removeprefix("torch."), *map(str, shape), *([op] if op else [])])


class _Contents(NamedTuple):
    dtype: torch.dtype
    shape: tuple[int, ...]
    size: int
    """In bytes."""
    op: str | None
    """How it merges, if that is element by element: "sum", "min" or "max"."""


@lru_cache(maxsize=1024)
def layout(spec: str) -> _Contents:
    """What the text of `_spec` says; raises `ValueError` if there is no such tensor."""
    if not _SPEC.fullmatch(spec):
        raise ValueError(f"{spec!r:.100} is no dtype with a shape of at most 64 sizes")
    name, *sizes = spec.split(" ")
    op = sizes.pop() if sizes and sizes[-1] in _REDUCED else None
    dtype, shape = getattr(torch, name, None), tuple(map(int, sizes))
    if not isinstance(dtype, torch.dtype) or name.startswith("q"):  # quantized tensors are refused by all who send
        raise ValueError(f"there is no dtype {name!r}")
    if dtype.itemsize * math.prod(size or 1 for size in shape) > _MOST:
        raise ValueError(f"no tensor is as big as {spec!r:.100}")
    if op and dtype not in _REDUCED[op]:
        raise ValueError(f"tensors of {dtype} are not reduced by {op!r}")
    return _Contents(dtype, shape, dtype.itemsize * math.prod(shape), op)


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


def parse(raw: bytes) -> dict[str, Any]:
    """The manifest that a rank sent, of the right types throughout; raises `ValueError` if it is malformed."""
    try:
        data = json.loads(raw.decode())
    except RecursionError as error:
        raise ValueError("it is nested too deeply") from error
    if not isinstance(data, dict):
        raise ValueError(f"it is a {type(data).__name__}")
    if data.keys() == {"error"} and is_text(data["error"]):
        return data
    if (
        data.keys() != {"call", "subrecorders", "aliases"}
        or not is_text(data["call"])
        or not isinstance(data["subrecorders"], dict)
    ):
        raise ValueError(f"its fields are {list(data)!r:.200}")
    entries, aliases, keep = data["subrecorders"], data["aliases"], data["call"].endswith("missing='keep')")
    if not mapping(is_text)(aliases) or not entries.keys() >= set(aliases.values()):
        raise ValueError("its aliases are not names of subrecorders")
    for name, entry in entries.items():
        try:
            _check_entry(entry, keep)
        except ValueError as error:
            raise ValueError(f"subrecorder {name!r:.200}: {error}") from error
    return data


def _check_entry(entry: Any, keep: bool) -> None:
    """Raises `ValueError` if what a manifest says of one subrecorder is malformed."""
    if (
        not isinstance(entry, dict)
        or not {"is", "states"} <= entry.keys() <= {"is", "states", "part", "placed"}
        or not is_text(entry["is"])
    ):
        raise ValueError(f"it is {entry!r:.200}")
    if not isinstance(entry["states"], dict) or not all(mapping(is_text)(state) for state in entry["states"].values()):
        raise ValueError(f"its states are {entry['states']!r:.200}")
    for state in entry["states"].values():
        for spec in state.values():
            layout(spec)
    if not mapping(is_plain_placement)(entry.get("placed", {})):
        raise ValueError(f"its placement is {entry['placed']!r:.200}")
    match entry.get("part"):
        case None if "part" not in entry and not keep:
            return
        case [None | dict(), monitor, attr, module] if keep and is_text(monitor) and is_text_or_none(attr) and is_text(module):
            return
        case part:
            raise ValueError(f"its parts are {part!r:.200}")


def payload_size(manifest: Mapping[str, Any]) -> int:
    """The bytes of the payload that belongs to a manifest."""
    entries = manifest["subrecorders"].values()
    specs = (spec for entry in entries for state in entry["states"].values() for spec in state.values())
    return 8 * (len(_counted(manifest)) + placed_numbers(manifest)) + sum(layout(spec).size for spec in specs)


def _counted(manifest: Mapping[str, Any]) -> list[str]:
    """The names whose counts of observations are in the payload."""
    return [name for name, entry in manifest["subrecorders"].items() if entry.get("counted", True)]


def placed_numbers(manifest: Mapping[str, Any]) -> int:
    """How many numbers of the payload are placements."""
    entries = manifest["subrecorders"].values()
    return sum(2 + len(place[-1]) for entry in entries for place in entry.get("placed", {}).values())


def misfits(recording: Recording, manifest: Mapping[str, Any]) -> Iterator[str]:
    """Why the reducers of this rank, or those of the manifest if it has none, cannot have made the states of a manifest."""
    checked = set()
    for name, entry in manifest["subrecorders"].items():
        try:
            reducer = _part(recording, name, entry).reducer
            for state in entry["states"].values():
                if (seen := ("placed" in entry, entry["is"], *state.items())) not in checked:
                    checked.add(seen)
                    layouts = {key: layout(spec) for key, spec in state.items()}
                    made = {key: torch.empty(each.shape, dtype=each.dtype, device="meta") for key, each in layouts.items()}
                    reducer.check(made)  # type: ignore[union-attr]
                    wanted = {} if "placed" in entry else _reductions(reducer, made)  # type: ignore[arg-type]
                    if {key: each.op for key, each in layouts.items() if each.op} != wanted:
                        raise ValueError(f"its tensors merge as {state!r:.200} says, and here by {dict(wanted)}")
        except Exception as error:
            yield f"subrecorder {name!r:.200}: {error!s:.500}"


def unpack(recording: Recording, manifest: Mapping[str, Any], payload: Tensor) -> Recording:
    """The recording that one rank sent, with the reducers and functions of this rank.

    Raises:
        ValueError: a number of observations is negative, or a placement impossible.
    """
    entries = manifest["subrecorders"]
    leaves = [(name, leaf, state) for name, entry in entries.items() for leaf, state in entry["states"].items()]
    specs = [layout(spec) for _, _, state in leaves for spec in state.values()]
    counted = _counted(manifest)
    numbers, *pieces = torch.split(payload, [8 * (len(counted) + placed_numbers(manifest)), *(each.size for each in specs)])
    # Pieces are copied before they are viewed, because they may not be aligned, and would keep all bytes alive.
    tensors = (piece.clone().view(dtype).view(shape) for piece, (dtype, shape, *_) in zip(pieces, specs, strict=True))
    states: dict[str, dict[str, dict[str, Tensor]]] = {name: {} for name in entries}
    for name, leaf, state in leaves:
        states[name][leaf] = {key: next(tensors) for key in state}
    told = iter(numbers.clone().view(torch.int64).tolist())
    samples = dict(zip(counted, islice(told, len(counted)), strict=True))
    if min(samples.values(), default=0) < 0:
        raise ValueError(f"it says that {min(samples.values())} observations were made")
    parts = {
        name: replace(
            _part(recording, name, entry),
            states=states[name],
            samples=samples.get(name, 0),
            saved_results=None,
            placement={leaf: _placement(place, told) for leaf, place in entry.get("placed", {}).items()},
        )
        for name, entry in entries.items()
    }
    return Recording(parts, manifest["aliases"])


def emptied(recording: Recording, manifest: Mapping[str, Any], name: str) -> Subrecording:
    """What a rank sent under a name, without states and observations."""
    part = _part(recording, name, manifest["subrecorders"][name])
    return replace(part, states={}, samples=0, saved_results=None, progress=None, placement={})


def _placement(place: Sequence[Any], told: Iterator[int]) -> Placement:
    _, shared, _, axes, parts = place
    rank, home = next(told), next(told)
    whole = [rank, shared, None if home == -1 else home, axes, [[axis, next(told), count] for axis, _, count in parts]]
    if not is_plain_placement(whole):
        raise ValueError(f"it says that a tensor is placed at {whole!r:.200}")
    return from_plain(whole)


def _part(recording: Recording, name: str, entry: Mapping[str, Any]) -> Subrecording:
    """What this rank has under a name, or if it has nothing the same made from the manifest."""
    if name in recording:
        return recording[name]
    recipe, monitor, attr, module = entry["part"]
    return Subrecording(from_recipe(recipe), monitor=monitor, attr=attr, module=module)
