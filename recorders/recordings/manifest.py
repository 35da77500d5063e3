"""The manifest of a recording: the content of `manifest.json`, and safe reading of it from untrusted bytes.

It is JSON. The first line identifies the format, each further line is one subrecorder, with a checksum of its own. So a manifest is
read line by line, and a damaged line does not take the others with it. Names of tensors are never parsed: `states` and `values` say
what each tensor is. `docs/format.md` describes the format byte by byte.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import zlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from recorders.errors import CorruptRecordingError, NotARecordingError, SchemaError, StorageError
from recorders.recordings.entry import Entry, check_entry, is_count, is_text, is_text_or_none, mapping, matches

__all__ = [
    "MANIFEST",
    "MAX_BYTES",
    "NEWEST",
    "Head",
    "Manifest",
    "decode",
    "encode",
    "facts_of",
    "is_generation",
    "is_manifest",
    "parse",
    "recording_of",
    "schema_of",
    "sealed",
    "unsealed",
]

MANIFEST = "manifest.json"
SCHEMA = 2
"""Of the manifest of one process. What it names is as before, so earlier versions read it."""
NEWEST = 3
"""Of the manifest of many ranks, see `recorders.recordings.ranks_manifest`."""
MAX_BYTES = 128 * 2**20
"""Limits the memory that an untrusted manifest may take; enough for about 100,000 subrecorders."""
MAX_LINE = 16 * 2**20
"""The longest line that is parsed: Python's objects take up to 30 times the bytes of their JSON."""

_PREFIX = '{"format": "torch-recorders", "schema": '
_CHECKSUM = '"checksum": "%s"'
_HEAD = re.compile(rb'\{"format": "torch-recorders", "schema": (-?[0-9]{1,18}), "checksum": "([0-9a-f]{64})"')
_CRC = re.compile(rb'\{"crc32": "([0-9a-f]{8})", ')
_NAME_AT = {1: len('{"name": '), 2: len('{"crc32": "01234567", "name": ')}
"""Where the name of a subrecorder begins in its line, by schema."""
_LONGEST_NAME = 2**20
_scan_text = json.JSONDecoder().raw_decode
is_generation = matches(re.compile(r"generation-[0-9a-f]{32}"))
"""Whether a value is the name of a generation folder."""


@dataclass(frozen=True)
class Head:
    """What a manifest says of all subrecorders.

    Attributes:
        generation: the folder of the files.
        aliases: further names of subrecorders.
        versions: those of the libraries that wrote it.
        step: the step of the clock; None if there was no clock.
        packed: the file that all subrecorders share, with its `bytes` and `sha256`; None if every one has its own.
    """

    generation: str
    aliases: Mapping[str, str]
    versions: Mapping[str, str | None]
    step: int | None = None
    packed: Mapping[str, Any] | None = None


@dataclass(frozen=True)
class Manifest(Head):
    """A manifest that was read; what it says of a subrecorder is parsed and checked when it is asked for.

    Attributes:
        where: the name of the file, for errors.
        schema: the schema that it was written in.
        reducers: the recipes that subrecorders name by number.
        lines: the line of each subrecorder, by its name, in order.
        damaged: why a line cannot be believed, by its number, if such lines were to be left out.
    """

    where: str = ""
    schema: int = SCHEMA
    reducers: Sequence[Any] = ()
    lines: Mapping[str, bytes] = field(default_factory=dict)
    damaged: Mapping[int, str] = field(default_factory=dict)

    def entry(self, name: str) -> Entry:
        """What it says of one subrecorder; raises `CorruptRecordingError` if that is malformed."""
        try:
            facts = {**_facts(self.lines[name], self.schema), **(self.packed or {})}
            if self.schema > 1:
                facts["reducer"] = self.reducers[_index(facts["reducer"], len(self.reducers))]
            entry = Entry(**facts)
        except (KeyError, TypeError, ValueError, RecursionError) as error:
            what = f"subrecorder {name!r:.200}: {type(error).__name__}: {error}"
            raise CorruptRecordingError(f"{self.where} is malformed: {what}") from error
        check_entry(entry, CorruptRecordingError, self.where)
        return entry


def encode(head: Head, entries: Iterable[Entry]) -> bytes:
    """The bytes of a manifest; raises `StorageError` if a part has the wrong type, or is too deep or too long to be read."""
    entries = tuple(entries)
    recipes: dict[int, int] = {}
    table: dict[str, int] = {}
    lines: dict[str, str] = {}
    try:
        _check_head(head, StorageError, "this recording")
        for entry in entries:
            check_entry(entry, StorageError, "this recording")
            if id(entry.reducer) not in recipes:
                recipes[id(entry.reducer)] = table.setdefault(_dump(entry.reducer), len(table))
            reducer = recipes[id(entry.reducer)]
            facts = {key: value for key, value in vars(entry).items() if value or key not in ("versions", "progress", "placement")}
            facts = {key: value for key, value in facts.items() if head.packed is None or key not in head.packed}
            line = _dump({**facts, "reducer": reducer})[1:]
            if len(line) > MAX_LINE - 30:
                raise StorageError(f"subrecorder {entry.name!r:.200} has too many tensors: they take {len(line)} bytes to name")
            if entry.name in lines:
                raise StorageError(f"this recording names {entry.name!r:.200} twice")
            lines[entry.name] = f'{{"crc32": "{zlib.crc32(line.encode()):08x}", {line}'
        _check_aliases(head, lines, StorageError, "this recording")
        described = {key: getattr(head, key) for key in ("generation", "packed", "step", "versions", "aliases")}
        about = ", ".join([*(f'"{key}": {_dump(value)}' for key, value in described.items()), f'"reducers": [{", ".join(table)}]'])
    except (TypeError, ValueError, RecursionError) as error:
        raise StorageError(f"this recording cannot be described as data: {error}") from error
    rest = f', {about}, "subrecorders": [\n' + ",\n".join(lines.values()) + "\n]}\n"
    return sealed(SCHEMA, rest)


def sealed(schema: int, rest: str) -> bytes:
    """The bytes of a manifest, of which `rest` is what follows the checksum; raises `StorageError` if they are too many."""
    checksum = hashlib.sha256(f"{_PREFIX}{schema}, {_CHECKSUM % ''}{rest}".encode()).hexdigest()
    raw = f"{_PREFIX}{schema}, {_CHECKSUM % checksum}{rest}".encode()
    if len(raw) > MAX_BYTES:
        raise StorageError(f"the manifest would have {len(raw)} bytes, and {MAX_BYTES} can be read back: save in several folders")
    return raw


_dump = json.JSONEncoder(allow_nan=False).encode


def is_manifest(raw: bytes) -> bool:
    """Whether these are the first bytes of a manifest, damaged or not."""
    return raw.startswith(_PREFIX.encode())


def schema_of(raw: bytes) -> int | None:
    """The schema that the first bytes of a manifest name; None if they name none."""
    found = _HEAD.match(raw)
    return None if found is None else int(found[1])


def decode(raw: bytes, where: str, *, skip: bool = False) -> Manifest:
    """The manifest in these untrusted bytes.

    Args:
        where: the name of the file, for errors.
        skip: if the bytes are damaged, leave out the lines that are, and name them in `damaged`. The first line must be sound.

    Raises:
        NotARecordingError: the bytes are something else.
        SchemaError: a newer version wrote them.
        CorruptRecordingError: they are not what was saved.
    """
    # The checksum comes first: nothing is parsed of a file that was damaged by chance.
    schema, sound = unsealed(raw, where)
    if schema > SCHEMA:
        raise CorruptRecordingError(f"{where} is malformed: it is of many ranks, where that of one is expected")
    if not sound and not (skip and schema > 1):
        raise CorruptRecordingError(f"{where} is damaged: its checksum does not fit its content")
    try:
        first, *lines = raw.split(b"\n")
        if lines[-2:] != [b"]}", b""]:
            raise ValueError("it has no end")
        about = parse(first + b"]}")
        named, damaged = _named(lines[:-2], schema, skip=not sound)
        step, packed = (about["step"], about["packed"]) if schema > 1 else (None, None)
        head = (about["generation"], about["aliases"], about["versions"], step, packed)
        manifest = Manifest(*head, where, schema, about.get("reducers", ()), named, damaged)
    except (KeyError, TypeError, ValueError, RecursionError) as error:
        raise CorruptRecordingError(f"{where} is malformed: {type(error).__name__}: {error}") from error
    _check_head(manifest, CorruptRecordingError, where)
    if not damaged:
        _check_aliases(manifest, named, CorruptRecordingError, where)
    return manifest


def unsealed(raw: bytes, where: str) -> tuple[int, bool]:
    """The schema of a manifest, and whether its checksum fits its content; `where` is the name of the file, for errors.

    Raises:
        NotARecordingError: the bytes are something else.
        SchemaError: a newer version wrote them.
        CorruptRecordingError: they name no schema, or no checksum.
    """
    if not is_manifest(raw):
        raise NotARecordingError(f"{where} is not a manifest of torch-recorders")
    found = _HEAD.match(raw)
    if found is None:
        raise CorruptRecordingError(f"{where} is damaged: it names no schema and no checksum")
    schema = int(found[1])
    if schema > NEWEST:
        raise SchemaError(
            f"{where} was written by a newer version, in schema {schema}; this one reads schema {NEWEST}: upgrade torch-recorders"
        )
    if schema < 1:
        raise CorruptRecordingError(f"{where} is damaged: there is no schema {schema}")
    start, stop = found.span(2)
    digest = hashlib.sha256(raw[:start])
    digest.update(memoryview(raw)[stop:])
    return schema, digest.hexdigest().encode() == found[2]


def parse(line: bytes) -> Any:
    """The JSON in a line of a manifest; raises `ValueError` if there is none, or it is too long."""
    if len(line) > MAX_LINE:
        raise ValueError(f"a line has {len(line)} bytes, and at most {MAX_LINE} are read")
    return _decoder.decode(line.decode())


def _named(lines: list[bytes], schema: int, *, skip: bool) -> tuple[dict[str, bytes], dict[int, str]]:
    """The lines by name, and why a line is damaged by its number, if it is to be left out."""
    named: dict[str, bytes] = {}
    damaged: dict[int, str] = {}
    start = _NAME_AT[min(schema, 2)]
    for number, line in enumerate(line.removesuffix(b",") for line in lines if line):
        try:
            if skip:
                _facts(line, schema)
            name = _scan_text(line[start : start + _LONGEST_NAME].decode(), 0)[0]
            if not isinstance(name, str) or name in named:
                raise ValueError(f"line {number} names {name!r:.200}, which is no text or was named before")
            named[name] = line
        except ValueError as error:
            if not skip:
                raise
            damaged[number] = str(error)
    return named, damaged


def _facts(line: bytes, schema: int) -> dict[str, Any]:
    """The fields of one line, whose checksum is right."""
    if schema == 1:
        return {"module": "", **parse(line)}  # the first recordings did not know the class of the module
    return facts_of(line)


def facts_of(line: bytes) -> dict[str, Any]:
    """The fields of one line, without its checksum; raises `ValueError` if that does not fit."""
    found = _CRC.match(line)
    if found is None or int(found[1], 16) != zlib.crc32(memoryview(line)[found.end() :]):
        raise ValueError("the checksum of the line does not fit its content")
    facts: dict[str, Any] = parse(line)
    del facts["crc32"]
    return facts


def _index(index: Any, length: int) -> int:
    if type(index) is not int or not 0 <= index < length:
        raise ValueError(f"there is no reducer {index!r:.100}")
    return index


def recording_of(path: str) -> str | None:
    """The recording of which a generation folder, a file in one, or a manifest is a part; None if `path` is none of these."""
    for inner in (os.path.abspath(path), os.path.dirname(os.path.abspath(path))):
        root, name = os.path.split(inner)
        if (name == MANIFEST or is_generation(name)) and os.path.isfile(os.path.join(root, MANIFEST)):
            return root
    return None


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    data = dict(pairs)
    if len(data) != len(pairs):
        raise ValueError("an object names a key twice")
    return data


def _constant(text: str) -> Any:
    raise ValueError(f"{text} is not JSON")


_decoder = json.JSONDecoder(object_pairs_hook=_object, parse_constant=_constant)


def _check_aliases(head: Head, names: Iterable[str], error: type[StorageError], where: str) -> None:
    if not set(head.aliases.values()) <= set(names):
        raise error(f"{where} is malformed: an alias names no subrecorder")


def _check_head(head: Head, error: type[StorageError], where: str) -> None:
    """Raises `error` if anything that is not of one subrecorder is invalid."""
    if not is_generation(head.generation):
        raise error(f"{where} is malformed: no generation folder is called {head.generation!r:.200}")
    if head.packed is not None and (not isinstance(head.packed, dict) or head.packed.keys() != {"file", "bytes", "sha256"}):
        raise error(f"{where} is malformed: the packed file is {head.packed!r:.200}")
    if head.step is not None and not is_count(head.step):
        raise error(f"{where} is malformed: the step of the clock is {head.step!r:.200}")
    if not mapping(is_text)(head.aliases):
        raise error(f"{where} is malformed: its aliases are not texts")
    if not mapping(is_text_or_none)(head.versions):
        raise error(f"{where} is malformed: its versions are not texts")
