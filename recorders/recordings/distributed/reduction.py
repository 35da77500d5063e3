"""Reduction: states that merge element by element, in the few all-reduces that merge those of all ranks.

To gather, a rank receives the states of all others; of an all-reduce it sends and receives about twice its own. Minima and maxima
of any dtype travel as integers in the order of the numbers: they give the same bits on all ranks, with any backend and in any order
of comparison. NaN is beyond all others, and -0.0 below 0.0.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal, NamedTuple, TypeAlias

import torch
from torch import Tensor

from recorders.errors import SyncError
from recorders.recordings.distributed.message import emptied, layout, payload_size, placed_numbers
from recorders.recordings.recording import Recording, Subrecording
from recorders.recordings.storage.stored import as_bytes
from reducers import State

__all__ = ["Kind", "Reduction"]

Kind: TypeAlias = Literal["whole sum", "float sum", "highest"]
"""The all-reduces: sums of int64, sums of float64, maxima of int64."""

Path: TypeAlias = tuple[str, str, str]
"""A tensor of a state: the name of the subrecorder, the leaf and the key."""

_INTEGERS = {8: torch.int64, 4: torch.int32, 2: torch.int16}


class _Batch(NamedTuple):
    """Tensors of one dtype that merge alike, which are encoded together."""

    dtype: torch.dtype
    op: str
    paths: list[Path]

    @property
    def kind(self) -> Kind:
        if self.op != "sum":
            return "highest"
        return "float sum" if self.dtype.is_floating_point or self.dtype.is_complex else "whole sum"


class Reduction:
    """What is reduced of the recordings that some manifests announce, and what is left to be gathered; alike on all ranks.

    A leaf is reduced if no rank holds it as a copy or part of a tensor, and if those tensors of it that merge element by element
    are alike on all ranks that have them. The counts of observations are added up with them.

    Args:
        manifests: of all ranks, in their order; equal ones are one object.
        reduces: whether anything is to be reduced at all.

    Attributes:
        rests: of all ranks, the manifest of what is gathered.
        sizes: of all ranks, the bytes of what is gathered.
    """

    def __init__(self, manifests: Sequence[Mapping[str, Any]], reduces: bool) -> None:
        self._distinct = list({id(manifest): manifest for manifest in manifests}.values())
        self._specs: dict[Path, str] = {}
        placed: set[str] = set()
        unlike: set[tuple[str, str]] = set()
        for manifest in self._distinct if reduces else ():
            for name, entry in manifest["subrecorders"].items():
                if "placed" in entry:
                    placed.add(name)
                for leaf, state in entry["states"].items():
                    for key, spec in state.items():
                        known = self._specs.setdefault((name, leaf, key), spec)
                        if known != spec and (layout(known).op or layout(spec).op):
                            unlike.add((name, leaf))
        batches: dict[tuple[torch.dtype, str], _Batch] = {}
        for path, spec in self._specs.items():
            dtype, _, _, op = layout(spec)
            if op and path[0] not in placed and path[:2] not in unlike:
                batches.setdefault((dtype, op), _Batch(dtype, op, [])).paths.append(path)
        self._batches = list(batches.values())
        self._reduced = {path for batch in self._batches for path in batch.paths}
        names = dict.fromkeys(name for manifest in self._distinct for name in manifest["subrecorders"])
        self._counted = {name: None for name in names if name not in placed} if self._reduced else {}
        left = placed | {path[0] for path in self._specs if path not in self._reduced}
        rests = {id(manifest): self._rest(manifest, left) for manifest in self._distinct}
        sizes = {number: payload_size(rest) for number, rest in rests.items()}
        self.rests: list[Mapping[str, Any]] = [rests[id(manifest)] for manifest in manifests]
        self.sizes: list[int] = [sizes[id(manifest)] for manifest in manifests]

    def _rest(self, manifest: Mapping[str, Any], left: set[str]) -> Mapping[str, Any]:
        """The manifest of what is gathered: without what is reduced, and only of the subrecorders of which something is left."""
        if not self._reduced:
            return manifest
        entries = {name: entry for name, entry in manifest["subrecorders"].items() if name in left}
        for name, entry in entries.items():
            states = {
                leaf: {key: spec for key, spec in state.items() if (name, leaf, key) not in self._reduced}
                for leaf, state in entry["states"].items()
            }
            entries[name] = {**entry, "states": states, "counted": name not in self._counted}
        return {**manifest, "subrecorders": entries, "aliases": {}}

    @property
    def size(self) -> int:
        """The bytes of the all-reduces, of one rank."""
        return 8 * (len(self._counted) + sum(self._length(path) for path in self._reduced))

    def _length(self, path: Path) -> int:
        """The numbers of eight bytes that one tensor takes in an all-reduce."""
        dtype, _, size, _ = layout(self._specs[path])
        return size // dtype.itemsize * (2 if dtype.is_complex else 1)

    def split(self, manifest: Mapping[str, Any], payload: Tensor) -> tuple[Tensor, dict[Kind, Tensor]]:
        """What one rank gathers of its payload, and what it reduces: numbers in one tensor for each kind."""
        if not self._reduced:
            return payload, {}
        entries, placed = manifest["subrecorders"], placed_numbers(manifest)
        paths = [
            ((name, leaf, key), layout(spec).size)
            for name, entry in entries.items()
            for leaf, state in entry["states"].items()
            for key, spec in state.items()
        ]
        counts, places, *pieces = torch.split(payload, [8 * len(entries), 8 * placed, *(size for _, size in paths)])
        mine = {path: piece for (path, _), piece in zip(paths, pieces, strict=True)}
        samples = dict(zip(entries, counts.clone().view(torch.int64).tolist(), strict=True))
        numbers = [torch.tensor([samples.get(name, 0) for name in self._counted], dtype=torch.int64, device=payload.device)]
        sent: dict[Kind, list[Tensor]] = {"whole sum": numbers}
        for batch in self._batches:
            raw = [mine[path] if path in mine else self._identity(batch, path, payload.device) for path in batch.paths]
            sent.setdefault(batch.kind, []).append(_encoded(torch.cat(raw).view(batch.dtype), batch.op))
        kept = [samples[name] for name in entries if name not in self._counted]
        first = as_bytes(torch.tensor(kept, dtype=torch.int64, device=payload.device))
        rest = torch.cat([first, places, *(piece for path, piece in mine.items() if path not in self._reduced)])
        return rest, {kind: torch.cat(parts) for kind, parts in sent.items()}

    def _identity(self, batch: _Batch, path: Path, device: torch.device) -> Tensor:
        """The bytes of what changes no tensor that it is merged with, from a rank that has none."""
        _, shape, _, _ = layout(self._specs[path])
        return as_bytes(_neutral(batch.dtype, batch.op, device).expand(shape).contiguous())

    def join(self, recording: Recording, gathered: Recording, arrived: Mapping[Kind, Tensor]) -> Recording:
        """The recordings of all ranks, merged of what was gathered and what was reduced.

        Raises:
            SyncError: a number of observations is negative, or a reducer does not merge what is left without what was reduced.
        """
        if not self._reduced:
            return gathered
        samples = dict(zip(self._counted, arrived["whole sum"][: len(self._counted)].tolist(), strict=True))
        if min(samples.values(), default=0) < 0:
            raise SyncError(f"the ranks say that {min(samples.values())} observations were made")
        states = self._read(arrived)
        parts: dict[str, Subrecording] = {}
        for manifest in self._distinct:
            for name in (name for name in manifest["subrecorders"] if name not in parts):
                part = gathered.subrecordings.get(name) or emptied(recording, manifest, name)
                if name in samples:
                    part = replace(part, states=self._whole(part, states.get(name, {}), name), samples=samples[name])
                parts[name] = part
        aliases = {alias: name for manifest in reversed(self._distinct) for alias, name in manifest["aliases"].items()}
        return Recording(parts, {alias: name for alias, name in aliases.items() if alias not in parts})

    def _whole(self, part: Subrecording, reduced: Mapping[str, State], name: str) -> dict[str, State]:
        leaves = dict.fromkeys(leaf for manifest in self._distinct for leaf in _states(manifest, name))
        try:  # merging with the empty state puts the keys into the order of the reducer
            return {leaf: part.reducer.merge({**part.states.get(leaf, {}), **reduced.get(leaf, {})}, {}) for leaf in leaves}  # type: ignore[union-attr]
        except Exception as error:
            raise SyncError(f"subrecorder {name!r} does not merge: {error}") from error

    def _read(self, arrived: Mapping[Kind, Tensor]) -> dict[str, dict[str, State]]:
        """The tensors that were reduced, by name, leaf and key."""
        starts: dict[Kind, int] = {"whole sum": len(self._counted)}
        merged: dict[Path, Tensor] = {}
        for batch in self._batches:
            lengths = [self._length(path) for path in batch.paths]
            start = starts.get(batch.kind, 0)
            starts[batch.kind] = start + sum(lengths)
            decoded = _decoded(arrived[batch.kind][start : starts[batch.kind]], batch.dtype, batch.op)
            sizes = [length // 2 for length in lengths] if batch.dtype.is_complex else lengths
            for path, values in zip(batch.paths, torch.split(decoded, sizes), strict=True):
                merged[path] = values.view(layout(self._specs[path]).shape).clone()  # in memory of its own
        states: dict[str, dict[str, State]] = {}
        for name, leaf, key in (path for path in self._specs if path in merged):
            states.setdefault(name, {}).setdefault(leaf, {})[key] = merged[name, leaf, key]
        return states


def _states(manifest: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    """The states by leaf that a manifest names of one subrecorder, if it names it."""
    states: Mapping[str, Any] = manifest["subrecorders"].get(name, {"states": {}})["states"]
    return states


def _neutral(dtype: torch.dtype, op: str, device: torch.device) -> Tensor:
    """The number that changes no other one in a sum, a minimum or a maximum."""
    if op == "sum":
        value: complex = complex(-0.0, -0.0) if dtype.is_complex else -0.0  # -0.0 + x is x, also if that is -0.0
    elif dtype.is_floating_point:
        value = torch.inf if op == "min" else -torch.inf
    elif dtype is torch.bool:
        value = op == "min"
    else:
        value = torch.iinfo(dtype).max if op == "min" else torch.iinfo(dtype).min
    return torch.tensor(value, device=device).to(dtype)


def _encoded(values: Tensor, op: str) -> Tensor:
    """Numbers, whose sums or maxima stand for those that merge `values`."""
    if op == "sum":
        if values.is_complex():
            return torch.view_as_real(values).reshape(-1)
        return values if values.is_floating_point() else values.to(torch.int64)
    numbers = values
    if values.is_floating_point():
        integer = _INTEGERS[values.itemsize]
        most = torch.iinfo(integer).max
        beyond = most if op == "max" else -most - 1
        numbers = torch.where(values.isnan(), beyond, _in_order(values.view(integer)))
    return numbers.to(torch.int64) if op == "max" else ~numbers.to(torch.int64)


def _decoded(numbers: Tensor, dtype: torch.dtype, op: str) -> Tensor:
    """What `_encoded` made numbers of, merged."""
    if op == "sum":
        return torch.view_as_complex(numbers.view(-1, 2)) if dtype.is_complex else numbers.to(dtype)
    numbers = numbers if op == "max" else ~numbers
    if not dtype.is_floating_point:
        return numbers.to(dtype)
    values = _in_order(numbers.to(_INTEGERS[dtype.itemsize])).view(dtype)
    return torch.where(values.isnan(), torch.nan, values)  # NaN with one pattern of bits


def _in_order(bits: Tensor) -> Tensor:
    """The bits of floats as integers in the order of the floats, and back: all bits but the sign of negative ones are flipped."""
    return bits ^ ((bits >> (8 * bits.itemsize - 1)) & torch.iinfo(bits.dtype).max)
