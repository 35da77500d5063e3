"""The packed layout: all subrecorders of a recording in one safetensors file, which may be memory-mapped."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from recorders.errors import CorruptRecordingError, StorageError
from recorders.recordings.atomic_files import open_regular
from recorders.recordings.recording import Subrecording
from recorders.recordings.storage.codec import Recipes, rebuilt
from recorders.recordings.storage.manifest import Manifest
from recorders.recordings.storage.stored import as_memory, true_dtype
from recorders.recordings.storage.tensorfile import CHUNK, TensorPlace, fill, places, read_header

__all__ = ["PackedParts", "name_prefix"]


def name_prefix(index: int) -> str:
    """What the names of the tensors of a subrecorder begin with in the common file."""
    return f"{index}/"


class PackedParts(Mapping[str, Subrecording]):
    """The subrecordings of a packed recording; one is made when it is first asked for.

    Args:
        folder: the generation folder.
        manifest: its manifest, with `packed`.
        mmap: map the file into memory rather than read it. The checksum is still checked, once.
        lazily: keep no tensor; each is read from the file when it is asked for, and the checksum is checked once, before.

    Raises:
        CorruptRecordingError: the file is not what was saved; also later, when a subrecording is asked for, if it was forged.
    """

    def __init__(self, folder: str, manifest: Manifest, recipes: Recipes, *, mmap: bool = False, lazily: bool = False) -> None:
        assert manifest.packed is not None
        self._manifest, self._recipes = manifest, recipes
        self._index = manifest.places
        self._made: dict[str, Subrecording] = {}
        self._where = os.path.join(folder, str(manifest.packed["file"]))
        size, sha256 = manifest.packed["bytes"], manifest.packed["sha256"]
        with open_regular(self._where, size) as (file, there):
            if there != size:
                raise CorruptRecordingError(f"{self._where} is damaged: {there} bytes are there and {size} were saved")
            header = read_header(file, size, self._where, _longest_header(manifest))
            digest = hashlib.sha256(len(header).to_bytes(8, "little") + header)
            data = size - 8 - len(header)
            self._data: Tensor | None = None
            if lazily:
                piece = torch.empty(min(data, CHUNK), dtype=torch.uint8, device="cpu")
                for start in range(0, data, CHUNK):
                    fill(file, as_memory(piece[: data - start]), digest, self._where)
            elif mmap:
                storage = torch.UntypedStorage.from_file(self._where, shared=False, nbytes=size)
                self._data = torch.tensor([], dtype=torch.uint8, device="cpu").set_(storage)[size - data :]  # type: ignore[arg-type]
                digest.update(as_memory(self._data))
            else:
                self._data = torch.empty(data, dtype=torch.uint8, device="cpu")
                fill(file, as_memory(self._data), digest, self._where)
        if digest.hexdigest() != sha256:
            raise CorruptRecordingError(f"{self._where} is damaged: its checksum differs from what was saved")
        self._size, self._start = size, size - data
        self._places = places(header, data, self._where)

    def __getitem__(self, name: str) -> Subrecording:
        if name not in self._made:
            entry = self._manifest.entry(name) if name in self._index else None
            if entry is None:
                raise KeyError(name)
            prefix, dtypes = name_prefix(self._index[name]), entry.dtypes

            def tensor(short: str) -> Tensor:
                place = self._places.get(prefix + short)
                if place is None:
                    raise CorruptRecordingError(f"{self._where} (subrecorder {name!r}) holds no tensor {short!r:.200}")
                return true_dtype(self._tensor(place), dtypes.get(short), self._where)

            part = rebuilt(entry, self._recipes, tensor, self._where)
            if self._data is None:
                return part
            self._made[name] = part
        return self._made[name]

    def _tensor(self, place: TensorPlace) -> Tensor:
        if self._data is None:
            return self._read(place).view(place.dtype).view(place.shape)
        piece = self._data[place.begin : place.end]
        if place.begin % max(1, place.dtype.itemsize):
            piece = piece.clone()  # a forged file may put tensors at odd addresses
        return piece.view(place.dtype).view(place.shape)

    def _read(self, place: TensorPlace) -> Tensor:
        """The bytes of a tensor, read from the file anew."""
        piece = torch.empty(place.end - place.begin, dtype=torch.uint8, device="cpu")
        with open_regular(self._where, self._size) as (file, _):
            file.seek(self._start + place.begin)
            fill(file, as_memory(piece), hashlib.sha256(), self._where)
        return piece

    def __iter__(self) -> Iterator[str]:
        return iter(self._index)

    def __len__(self) -> int:
        return len(self._index)

    def __contains__(self, name: Any) -> bool:
        return name in self._index


def _longest_header(manifest: Manifest) -> int:
    """The most bytes that the header needs whose tensors the manifest names."""
    named = sum(map(len, manifest.lines.values()))
    if named > 2**31:
        raise StorageError(f"{manifest.where} is too long")
    return 4096 + 16 * named
