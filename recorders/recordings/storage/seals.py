"""The checksums of a manifest: of the whole, of its first line, and of each further line; and lines as data.

A manifest that was damaged by chance does not fit the first. Then the others tell what of it may be believed.
"""

from __future__ import annotations

import hashlib
import json
import re
import zlib
from typing import Any

from recorders.errors import CorruptRecordingError, NotARecordingError, SchemaError, StorageError

__all__ = [
    "MAX_BYTES",
    "MAX_LINE",
    "SCHEMA",
    "facts_of",
    "head_is_sealed",
    "is_manifest",
    "parse",
    "schema_of",
    "sealed",
    "sealed_line",
    "unsealed",
    "why_head_is_damaged",
]

SCHEMA = 1
"""Of all manifests, of one process and of many ranks. Another number is that of a newer version."""
MAX_BYTES = 128 * 2**20
"""Limits the memory that an untrusted manifest may take; enough for about 100,000 subrecorders."""
MAX_LINE = 16 * 2**20
"""The longest line that is parsed: Python's objects take up to 30 times the bytes of their JSON."""

_PREFIX = '{"format": "torch-recorders", "schema": '
_CHECKSUM = '"checksum": "%s"'
_HEAD = re.compile(rb'\{"format": "torch-recorders", "schema": (-?[0-9]{1,18}), "checksum": "([0-9a-f]{64})"')
_HEAD_CRC = re.compile(_HEAD.pattern + rb', "crc32": "([0-9a-f]{8})", ')
_CRC = re.compile(rb'\{"crc32": "([0-9a-f]{8})", ')


def sealed(rest: str) -> bytes:
    """The bytes of a manifest, of which `rest` is what follows the checksums; raises `StorageError` if they are too many."""
    head = rest.removeprefix(", ").partition("\n")[0]
    rest = f', "crc32": "{zlib.crc32(head.encode()):08x}"{rest}'
    checksum = hashlib.sha256(f"{_PREFIX}{SCHEMA}, {_CHECKSUM % ''}{rest}".encode()).hexdigest()
    raw = f"{_PREFIX}{SCHEMA}, {_CHECKSUM % checksum}{rest}".encode()
    if len(raw) > MAX_BYTES:
        raise StorageError(f"the manifest would have {len(raw)} bytes, and {MAX_BYTES} can be read back: save in several folders")
    return raw


def sealed_line(line: str) -> str:
    """A line with its checksum; `line` is an object in JSON without its brace."""
    return f'{{"crc32": "{zlib.crc32(line.encode()):08x}", {line}'


def is_manifest(raw: bytes) -> bool:
    """Whether these are the first bytes of a manifest, damaged or not."""
    return raw.startswith(_PREFIX.encode())


def schema_of(raw: bytes) -> int | None:
    """The schema that the first bytes of a manifest name; None if they name none."""
    found = _HEAD.match(raw)
    return None if found is None else int(found[1])


def unsealed(raw: bytes, where: str) -> bool:
    """Whether the checksum of a manifest fits its content; `where` is the name of the file, for errors.

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
    if schema > SCHEMA:
        raise SchemaError(
            f"{where} was written by a newer version, in schema {schema}; this one reads schema {SCHEMA}: upgrade torch-recorders"
        )
    if schema < SCHEMA:
        raise CorruptRecordingError(f"{where} is damaged: there is no schema {schema}")
    start, stop = found.span(2)
    digest = hashlib.sha256(raw[:start])
    digest.update(memoryview(raw)[stop:])
    return digest.hexdigest().encode() == found[2]


def parse(line: bytes) -> Any:
    """The JSON in a line of a manifest; raises `ValueError` if there is none, or it is too long."""
    if len(line) > MAX_LINE:
        raise ValueError(f"a line has {len(line)} bytes, and at most {MAX_LINE} are read")
    return _decoder.decode(line.decode())


def head_is_sealed(first: bytes) -> bool:
    """Whether the checksum of the first line fits it."""
    found = _HEAD_CRC.match(first)
    return found is not None and int(found[3], 16) == zlib.crc32(memoryview(first)[found.end() :])


def why_head_is_damaged(first: bytes) -> str:
    """Why the first line of a manifest cannot be believed whose checksum does not fit its content."""
    if head_is_sealed(first):
        return "the checksum of the whole does not fit, though those of its lines do"
    return "its checksum does not fit its content"


def facts_of(line: bytes) -> dict[str, Any]:
    """The fields of one line, without its checksum; raises `ValueError` if that does not fit."""
    found = _CRC.match(line)
    if found is None or int(found[1], 16) != zlib.crc32(memoryview(line)[found.end() :]):
        raise ValueError("the checksum of the line does not fit its content")
    facts: dict[str, Any] = parse(line)
    del facts["crc32"]
    return facts


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    data = dict(pairs)
    if len(data) != len(pairs):
        raise ValueError("an object names a key twice")
    return data


def _constant(text: str) -> Any:
    raise ValueError(f"{text} is not JSON")


_decoder = json.JSONDecoder(object_pairs_hook=_object, parse_constant=_constant)
