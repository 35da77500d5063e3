"""Reduction: states that merge element by element, in the few all-reduces that merge those of all ranks.

To gather, a rank receives the states of all others; of an all-reduce it sends and receives about twice its own. Minima and maxima
of any dtype travel as integers in the order of the numbers: they give the same bits on all ranks, with any backend and in any order
of comparison. NaN is beyond all others, and -0.0 below 0.0.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Literal, NamedTuple, TypeAlias

import torch
from torch import Tensor

from recorders.recordings.distributed.protocol import Manifest, Packed, Path, blank, spec_of
from recorders.recordings.recording import Recording
from recorders.recordings.storage.tensors import as_bytes
from reducers import State

Kind: TypeAlias = Literal["whole sum", "float sum", "highest"]
"""The all-reduces: sums of int64, sums of float64, maxima of int64."""

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
    """What is reduced of the recordings that some manifests announce; alike on all ranks.

    A leaf is reduced if no rank holds it as a copy or part of a tensor, or under a further name, and if those tensors of it that
    merge element by element are alike on all ranks that have them. The counts of observations are added up with them.

    Args:
        manifests: those of all ranks, each once, in their order.
        reduces: whether anything is to be reduced at all.
    """

    def __init__(self, manifests: Sequence[Manifest], reduces: bool) -> None:
        self._entries: dict[str, Manifest] = {}
        self._leaves: dict[str, dict[str, None]] = {}
        self._specs: dict[Path, str] = {}
        placed: set[str] = set()
        unlike: set[tuple[str, str]] = set()
        for manifest in manifests if reduces else ():
            for name, entry in manifest["subrecorders"].items():
                self._entries.setdefault(name, entry)
                self._leaves.setdefault(name, {}).update(dict.fromkeys(entry["states"]))
                if "placed" in entry:
                    placed.add(name)
                for leaf, state in entry["states"].items():
                    for key, text in state.items():
                        known = self._specs.setdefault((name, leaf, key), text)
                        if known != text and (spec_of(known).op or spec_of(text).op):
                            unlike.add((name, leaf))
        for manifest in manifests if reduces else ():  # what one rank has under a further name merges with that name of others
            for alias, name in manifest["aliases"].items():
                placed |= {alias, name} if alias in self._entries else set()
        batches: dict[tuple[torch.dtype, str], _Batch] = {}
        for path, text in self._specs.items():
            spec = spec_of(text)
            if spec.op and path[0] not in placed and path[:2] not in unlike:
                batches.setdefault((spec.dtype, spec.op), _Batch(spec.dtype, spec.op, [])).paths.append(path)
        self._batches = list(batches.values())
        self.paths = {path for batch in self._batches for path in batch.paths}
        self.counted = {name: None for name in self._entries if name not in placed} if self.paths else {}

    @property
    def size(self) -> int:
        """The bytes of the all-reduces, of one rank."""
        return 8 * (len(self.counted) + sum(self._length(path) for path in self.paths))

    def _length(self, path: Path) -> int:
        """The numbers of eight bytes that one tensor takes in an all-reduce."""
        spec = spec_of(self._specs[path])
        return spec.size // spec.dtype.itemsize * (2 if spec.dtype.is_complex else 1)

    def numbers(self, packed: Packed, device: torch.device) -> dict[Kind, Tensor]:
        """What one rank reduces: numbers in one tensor for each kind."""
        if not self.paths:
            return {}
        counts = [packed.numbers[name][0] if name in packed.numbers else 0 for name in self.counted]
        sent: dict[Kind, list[Tensor]] = {"whole sum": [torch.tensor(counts, dtype=torch.int64, device=device)]}
        for batch in self._batches:
            home = next((packed.tensors[path].device for path in batch.paths if path in packed.tensors), device)
            raw = [packed.tensors[path] if path in packed.tensors else self._identity(batch, path, home) for path in batch.paths]
            sent.setdefault(batch.kind, []).append(_encoded(torch.cat(raw).to(device).view(batch.dtype), batch.op))
        return {kind: torch.cat(parts) for kind, parts in sent.items()}

    def _identity(self, batch: _Batch, path: Path, device: torch.device) -> Tensor:
        """The bytes of what changes no tensor that it is merged with, from a rank that has none."""
        return as_bytes(_neutral(batch.dtype, batch.op, device).expand(spec_of(self._specs[path]).shape).contiguous())

    def read(self, recording: Recording, arrived: Mapping[Kind, Tensor]) -> Recording:
        """What all ranks recorded of what was reduced, as one recording, with the reducers and functions of this rank."""
        states: dict[str, dict[str, State]] = {name: {leaf: {} for leaf in self._leaves[name]} for name in self.counted}
        starts: dict[Kind, int] = {"whole sum": len(self.counted)}
        merged: dict[Path, Tensor] = {}
        for batch in self._batches:
            lengths = [self._length(path) for path in batch.paths]
            start = starts.get(batch.kind, 0)
            starts[batch.kind] = start + sum(lengths)
            decoded = _decoded(arrived[batch.kind][start : starts[batch.kind]], batch.dtype, batch.op)
            sizes = [length // 2 for length in lengths] if batch.dtype.is_complex else lengths
            for path, values in zip(batch.paths, torch.split(decoded, sizes), strict=True):
                merged[path] = values.view(spec_of(self._specs[path]).shape).clone()  # in memory of its own
        for name, leaf, key in (path for path in self._specs if path in merged):  # in the order of the keys
            states[name][leaf][key] = merged[name, leaf, key]
        counts = arrived["whole sum"][: len(self.counted)].tolist()
        return Recording(
            {
                name: replace(blank(recording, name, self._entries[name]), states=states[name], samples=samples)
                for name, samples in zip(self.counted, counts, strict=True)
            }
        )


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
