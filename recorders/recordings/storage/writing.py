"""What is written of a recording: the files of its subrecorders, and what a manifest says of them."""

from __future__ import annotations

import functools
import importlib.metadata
import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Literal, TypeAlias

import torch

from recorders.errors import RecordingWarning, StorageError
from recorders.recordings.recording import Recording, Subrecording
from recorders.recordings.storage.codec import Contents, Recipes
from recorders.recordings.storage.commit import Generation
from recorders.recordings.storage.entry import Entry
from recorders.recordings.storage.manifest import Head, encode
from recorders.recordings.storage.packed import name_prefix
from recorders.recordings.storage.ranks_manifest import RankFile, rank_file
from recorders.recordings.storage.tensorfile import chunks, describe
from reducers.errors import warn_user

__all__ = ["Layout", "versions", "warn_left_out", "write_files", "write_rank"]

Layout: TypeAlias = Literal["folder", "packed"]
"""Whether every subrecorder has a file of its own, or all share one."""

_PACKED_FILE = "0-packed.safetensors"


def write_files(
    recording: Recording, files: Generation, layout: Layout, left_out: list[str], prefix: str = ""
) -> tuple[Head, list[Entry]]:
    """Writes the subrecorders of a recording into a generation; returns what a manifest says of all, and of each.

    Args:
        left_out: gets what cannot be stored, and why.
        prefix: what the names of the files begin with, if several processes write into the generation.
    """
    if layout == "packed":
        entries = _write_packed(recording, files, left_out, prefix)
    else:
        entries = _write_folder(recording, files, left_out, prefix)
    names = {entry.name for entry in entries}
    aliases = {alias: name for alias, name in recording.aliases.items() if name in names}
    head = Head(files.generation, aliases, versions(), recording.step)
    if layout == "packed" and entries:
        head = replace(head, packed={key: getattr(entries[0], key) for key in ("file", "bytes", "sha256")})
    return head, entries


def write_rank(recording: Recording, files: Generation, rank: int, layout: Layout, left_out: list[str]) -> RankFile:
    """Writes the files of one rank of many, with its manifest; returns what that of all ranks says of it."""
    file = rank_file(rank)
    head, entries = write_files(recording, files, layout, left_out, f"{Path(file).stem}-")
    return RankFile(rank, file, *files.write(file, [encode(head, entries)]))


def warn_left_out(root: object, left_out: list[str]) -> None:
    """Warns of what could not be stored, if anything."""
    if left_out:
        shown = "; ".join(left_out[:5]) + (f"; and {len(left_out) - 5} more" if len(left_out) > 5 else "")
        warn_user(f"saved {root}, but not everything of it: {shown}", RecordingWarning)


def _write_folder(recording: Recording, files: Generation, left_out: list[str], prefix: str) -> list[Entry]:
    width = max(5, len(str(len(recording))))
    recipes, entries = Recipes(), []
    for index, (name, part) in enumerate(recording.subrecordings.items()):
        slug = re.sub(r"[^a-z0-9]+", "-", str(name)[:200].lower())[:40].strip("-")
        file = f"{prefix}{index:0{width}}{'-' * bool(slug)}{slug}.safetensors"
        try:
            contents = Contents(part)
            header, tensors, dtypes = describe(contents.tensors)
        except StorageError as error:
            left_out.append(f"subrecorder {name!r}: {error}")
            continue
        try:
            length, sha256 = files.write(file, chunks(header, tensors))
        except StorageError as error:  # a tensor of a device that fails, or whose memory is freed meanwhile
            files.discard(file)
            left_out.append(f"subrecorder {name!r}: {error}")
            continue
        if contents.left_out:
            left_out.append(f"the result of subrecorder {name!r}: {contents.left_out}")
        entries.append(_entry(name, part, contents, recipes, (file, length, sha256), dtypes))
    return entries


def _write_packed(recording: Recording, files: Generation, left_out: list[str], prefix: str) -> list[Entry]:
    recipes = Recipes()
    kept: list[tuple[str, Subrecording, Contents]] = []
    together = {}
    for name, part in recording.subrecordings.items():
        try:
            contents = Contents(part)
        except StorageError as error:
            left_out.append(f"subrecorder {name!r}: {error}")
            continue
        if contents.left_out:
            left_out.append(f"the result of subrecorder {name!r}: {contents.left_out}")
        within = name_prefix(len(kept))
        together.update({within + short: tensor for short, tensor in contents.tensors.items()})
        kept.append((name, part, contents))
    header, tensors, dtypes = describe(together)
    file = prefix + _PACKED_FILE
    written = (file, *files.write(file, chunks(header, tensors)))
    entries = []
    for index, (name, part, contents) in enumerate(kept):
        within = name_prefix(index)
        own = {short: dtypes[within + short] for short in contents.tensors if within + short in dtypes} if dtypes else {}
        entries.append(_entry(name, part, contents, recipes, written, own))
    return entries


def _entry(
    name: str, part: Subrecording, contents: Contents, recipes: Recipes, written: tuple[str, int, str], dtypes: Mapping[str, str]
) -> Entry:
    recipe, versions = recipes.of(part)
    described = (name, part.monitor, part.attr, part.module, part.samples, recipe, *written)
    return Entry(*described, contents.states, contents.values, dtypes, versions, contents.progress, contents.placement)


@functools.cache
def versions() -> dict[str, str | None]:
    """Those of the libraries that write."""
    found: dict[str, str | None] = {"torch": str(torch.__version__)}
    for package in ("torch-recorders", "safetensors"):
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            found[package] = None
    return found
