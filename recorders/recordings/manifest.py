"""The manifest of a recording: the content of `manifest.json`, and safe reading of it from untrusted bytes.

The first line identifies the format, each further line is one subrecorder. Names of tensors are never parsed: `states` and `values`
say what each tensor is.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import stat
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias, Union

from recorders.errors import CorruptRecordingError, NotARecordingError, SchemaError, StorageError

__all__ = ["MANIFEST", "Entry", "Manifest", "Tree", "decode", "encode", "is_manifest", "read_manifest", "read_regular"]

MANIFEST = "manifest.json"
SCHEMA = 1
MAX_BYTES = 128 * 2**20
"""Limits the memory that an untrusted manifest may take; enough for about 100,000 subrecorders."""
MAX_DEPTH = 32
"""How deep results may be nested."""

_PREFIX = '{"format": "torch-recorders", "schema": '
_CHECKSUM = '"checksum": "%s"'
_GENERATION = re.compile(r"generation-[0-9a-f]{32}")
_FILE = re.compile(r"[0-9]{1,20}(-[0-9a-z-]{1,60})?\.safetensors")
_SHA256 = re.compile(r"[0-9a-f]{64}")

Tree: TypeAlias = Union[str, Mapping[str, "Tree"]]
"""The name of a tensor, or trees by key."""


@dataclass(frozen=True)
class Entry:
    """One subrecorder.

    Attributes:
        name: any string.
        file: its file in the generation folder, `bytes` long, with checksum `sha256`.
        reducer: the recipe; the repr if the reducer holds a function; None if unknown.
        states: names of tensors by leaf and key.
        values: trees of names of tensors by leaf.
        dtypes: the true dtypes of tensors that are stored as another dtype, by name.
    """

    name: str
    monitor: str
    attr: str | None
    module: str
    samples: int
    reducer: Mapping[str, Any] | str | None
    file: str
    bytes: int
    sha256: str
    states: Mapping[str, Mapping[str, str]]
    values: Mapping[str, Tree]
    dtypes: Mapping[str, str]

    def tensors(self) -> list[str]:
        """The names of all tensors in the file."""
        return [name for state in self.states.values() for name in state.values()] + list(_leaves(self.values))


@dataclass(frozen=True)
class Manifest:
    """One generation: its folder, its subrecorders in order, their aliases, and the versions of the libraries that wrote it."""

    generation: str
    entries: tuple[Entry, ...]
    aliases: Mapping[str, str]
    versions: Mapping[str, str | None]


def encode(manifest: Manifest) -> bytes:
    """The bytes of the manifest; raises `StorageError` if a part has the wrong type, or is too deep or too long to be read."""
    _check(manifest, StorageError, "this recording")
    try:
        head = ", ".join(f'"{key}": {_dump(getattr(manifest, key))}' for key in ("generation", "versions", "aliases"))
        lines = ",\n".join(_dump(vars(entry)) for entry in manifest.entries)
    except (TypeError, ValueError, RecursionError) as error:
        raise StorageError(f"this recording cannot be described as data: {error}") from error
    rest = f', {head}, "subrecorders": [\n{lines}\n]}}\n'
    checksum = hashlib.sha256(f"{_PREFIX}{SCHEMA}, {_CHECKSUM % ''}{rest}".encode()).hexdigest()
    raw = f"{_PREFIX}{SCHEMA}, {_CHECKSUM % checksum}{rest}".encode()
    if len(raw) > MAX_BYTES:
        raise StorageError(f"the manifest would have {len(raw)} bytes, and {MAX_BYTES} can be read back: save in several folders")
    return raw


def _dump(value: Any) -> str:
    return json.dumps(value, allow_nan=False)


def is_manifest(raw: bytes) -> bool:
    """Whether these are the first bytes of a manifest, damaged or not."""
    return raw.startswith(_PREFIX.encode())


def decode(raw: bytes, where: str) -> Manifest:
    """The manifest in these untrusted bytes.

    Args:
        where: the name of the file, for errors.

    Raises:
        NotARecordingError: the bytes are something else.
        SchemaError: a newer version wrote them.
        CorruptRecordingError: they are not what was saved.
    """
    if not is_manifest(raw):
        raise NotARecordingError(f"{where} is not a manifest of torch-recorders")
    try:
        data = json.loads(raw.decode(), object_pairs_hook=_object, parse_constant=_constant)
        schema, checksum = data.get("schema"), data.get("checksum")
    except (ValueError, RecursionError) as error:
        raise CorruptRecordingError(f"{where} is damaged: {type(error).__name__}: {error}") from error
    if type(schema) is int and schema > SCHEMA:
        raise SchemaError(
            f"{where} was written by a newer version, in schema {schema}; this one reads schema {SCHEMA}: upgrade torch-recorders"
        )
    if schema != SCHEMA or type(schema) is not int:
        raise CorruptRecordingError(f"{where} is damaged: there is no schema {schema!r:.100}")
    if not _matches(_SHA256)(checksum):
        raise CorruptRecordingError(f"{where} is damaged: no checksum")
    blank = raw.replace((_CHECKSUM % checksum).encode(), (_CHECKSUM % "").encode(), 1)
    if hashlib.sha256(blank).hexdigest() != checksum:
        raise CorruptRecordingError(f"{where} is damaged: its checksum does not fit its content")
    try:
        entries = tuple(Entry(**entry) for entry in data["subrecorders"])
        manifest = Manifest(data["generation"], entries, data["aliases"], data["versions"])
        _check(manifest, CorruptRecordingError, where)
    except (KeyError, TypeError, RecursionError) as error:
        raise CorruptRecordingError(f"{where} is malformed: {type(error).__name__}: {error}") from error
    return manifest


def read_manifest(root: str) -> Manifest:
    """The manifest of the recording in folder `root`; raises a `StorageError` if it cannot be read, see `decode`."""
    where = os.path.join(root, MANIFEST)
    return decode(read_regular(where, MAX_BYTES), where)


def read_regular(path: str, limit: int) -> bytes:
    """The bytes of a regular file; follows no link and does not wait on a pipe.

    Raises `CorruptRecordingError` if it is not a regular file or is longer than `limit`, and `OSError` if it cannot be read.
    """
    if os.path.islink(path):
        raise CorruptRecordingError(f"{path} is a symbolic link, which recordings do not hold")
    # Some systems lack these flags. O_NOFOLLOW protects against a link created since the check.
    flags = os.O_RDONLY | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0)
    with os.fdopen(os.open(path, flags), "rb") as file:
        status = os.fstat(file.fileno())
        if not stat.S_ISREG(status.st_mode):
            raise CorruptRecordingError(f"{path} is not a regular file")
        if status.st_size > limit:
            raise CorruptRecordingError(f"{path} is {status.st_size} bytes long; at most {limit} are allowed")
        try:
            return file.read(status.st_size)
        except MemoryError as error:
            raise StorageError(f"{path}: its {status.st_size} bytes do not fit into memory") from error


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    data = dict(pairs)
    if len(data) != len(pairs):
        raise ValueError("an object names a key twice")
    return data


def _constant(text: str) -> Any:
    raise ValueError(f"{text} is not JSON")


def _leaves(tree: Tree) -> Iterator[str]:
    if isinstance(tree, str):
        yield tree
    else:
        for node in tree.values():
            yield from _leaves(node)


def _matches(pattern: re.Pattern[str]) -> Callable[[Any], bool]:
    return lambda value: isinstance(value, str) and pattern.fullmatch(value) is not None


def _is_text(value: Any) -> bool:
    return isinstance(value, str)


def _is_text_or_none(value: Any) -> bool:
    return value is None or isinstance(value, str)


def _is_count(value: Any) -> bool:
    return type(value) is int and value >= 0


def _mapping(item: Callable[[Any], bool]) -> Callable[[Any], bool]:
    return lambda value: isinstance(value, dict) and all(isinstance(key, str) and item(part) for key, part in value.items())


def _is_tree(value: Any, depth: int = 0) -> bool:
    if isinstance(value, dict) and depth < MAX_DEPTH:
        return all(isinstance(key, str) and _is_tree(node, depth + 1) for key, node in value.items())
    return isinstance(value, str)


_CHECKS: dict[str, tuple[Callable[[Any], bool], str]] = {
    "name": (_is_text, "a text"),
    "monitor": (_is_text, "a text"),
    "attr": (_is_text_or_none, "a text or null"),
    "module": (_is_text, "a text"),
    "samples": (_is_count, "a count"),
    "reducer": (lambda value: value is None or isinstance(value, (str, dict)), "a recipe, a text or null"),
    "file": (_matches(_FILE), "the name of a file in the generation folder"),
    "bytes": (_is_count, "a count"),
    "sha256": (_matches(_SHA256), "a checksum"),
    "states": (_mapping(_mapping(_is_text)), "tensor names by leaf and key, all texts"),
    "values": (_mapping(_is_tree), f"trees of tensor names by leaf, with texts as keys, nested at most {MAX_DEPTH} deep"),
    "dtypes": (_mapping(_is_text), "dtypes by tensor name"),
}


def _check(manifest: Manifest, error: type[StorageError], where: str) -> None:
    """Raises `error` if anything in the manifest is invalid."""
    if not _matches(_GENERATION)(manifest.generation):
        raise error(f"{where} is malformed: no generation folder is called {manifest.generation!r:.200}")
    for number, entry in enumerate(manifest.entries):
        for field, (fits, meaning) in _CHECKS.items():
            if not fits(getattr(entry, field)):
                problem = f"{field!r} must be {meaning} and is {getattr(entry, field)!r:.200}"
                raise error(f"{where} is malformed: subrecorder {number} ({entry.name!r:.200}): {problem}")
        tensors = entry.tensors()
        if len(set(tensors)) != len(tensors) or not entry.dtypes.keys() <= set(tensors):
            raise error(f"{where} is malformed: subrecorder {number} ({entry.name!r:.200}) names a tensor twice, or an unknown one")
    names = {entry.name for entry in manifest.entries}
    if len(names) != len(manifest.entries) or len({entry.file for entry in manifest.entries}) != len(manifest.entries):
        raise error(f"{where} is malformed: two subrecorders have one name or one file")
    if not _mapping(_is_text)(manifest.aliases) or not set(manifest.aliases.values()) <= names:
        raise error(f"{where} is malformed: an alias names no subrecorder")
    if not _mapping(_is_text_or_none)(manifest.versions):
        raise error(f"{where} is malformed: its versions are not texts")
