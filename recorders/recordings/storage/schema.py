"""The manifest of a recording: the content of `manifest.json`, and safe reading of it from untrusted bytes.

It is JSON. The first line identifies the format, each further line is one subrecorder, or the manifest of one of many ranks. Each
line has a checksum of its own, so a manifest is read line by line, and a damaged line does not take the others with it. Names of
tensors are never parsed: `states` and `values` say what each tensor is. `docs/format.md` describes the format byte by byte.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import zlib
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias, Union

from recorders.errors import CorruptRecordingError, NotARecordingError, SchemaError, SelectionError, StorageError
from recorders.recordings.atomic_files import read_regular
from recorders.recordings.distributed.placement import is_plain_placement

MANIFEST = "manifest.json"
SCHEMA = 1
"""Of all manifests, of one process and of many ranks. Another number is that of a newer version."""
MAX_BYTES = 128 * 2**20
"""Limits the memory that an untrusted manifest may take; enough for about 100,000 subrecorders."""
MAX_LINE = 16 * 2**20
"""The longest line that is parsed: Python's objects take up to 30 times the bytes of their JSON."""
MAX_DEPTH = 32
"""How deep results may be nested."""
GENERATION = re.compile(r"generation-[0-9a-f]{32}")

_PREFIX = '{"format": "torch-recorders", "schema": '
_HEAD = re.compile(rb'\{"format": "torch-recorders", "schema": (-?[0-9]{1,18}), ')
_NAME_AT = len('"name": ')  # where the name of a subrecorder begins in its line
_LONGEST_NAME = 2**20
_SPLIT = re.compile("[\ud800-\udbff][\udc00-\udfff]")
_dump = json.JSONEncoder(allow_nan=False).encode
_scan_text = json.JSONDecoder().raw_decode

Tree: TypeAlias = Union[str, Mapping[str, "Tree"]]
"""The name of a tensor, or trees by key."""


# Lines


def sealed_line(text: str) -> str:
    """An object in JSON with its checksum; `text` is the object without its first brace.

    >>> sealed_line('"name": "loss"}')
    '{"crc32": "67416c23", "name": "loss"}'
    """
    return f'{{"crc32": "{zlib.crc32(text.encode()):08x}", {text}'


_SEAL = re.compile(rb'\{"crc32": "([0-9a-f]{8})", ')


def _unsealed(line: bytes, end: bytes = b"") -> bytes:
    """What follows the checksum in a line, without its `end`; raises `ValueError` if the checksum does not fit."""
    found = _SEAL.match(line)
    rest = b"" if found is None else line[found.end() : len(line) - len(end)]
    if found is None or int(found[1], 16) != zlib.crc32(rest) or not line.endswith(end):
        raise ValueError("its checksum does not fit its content")
    return rest


def facts_of_line(line: bytes) -> dict[str, Any]:
    """The fields of a line that `sealed_line` made, without the checksum; raises `ValueError` if it is damaged."""
    return _object_of(_unsealed(line))


def _object_of(rest: bytes) -> dict[str, Any]:
    """The object in JSON of which this is what follows the first brace."""
    if len(rest) > MAX_LINE:
        raise ValueError(f"a line has {len(rest)} bytes, and at most {MAX_LINE} are read")
    facts: dict[str, Any] = _decoder.decode("{" + rest.decode())
    return facts


def _without_twins(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    data = dict(pairs)
    if len(data) != len(pairs):
        raise ValueError("an object names a key twice")
    return data


def _refuse(text: str) -> Any:
    raise ValueError(f"{text} is not JSON")


_decoder = json.JSONDecoder(object_pairs_hook=_without_twins, parse_constant=_refuse)


# What a value may be


def matches(pattern: re.Pattern[str]) -> Callable[[Any], bool]:
    """A check: whether a value is a text that the pattern matches from end to end."""
    return lambda value: isinstance(value, str) and pattern.fullmatch(value) is not None


def is_text(value: Any) -> bool:
    """Whether a value is a text."""
    return isinstance(value, str)


def is_text_or_none(value: Any) -> bool:
    """Whether a value is a text or None."""
    return value is None or isinstance(value, str)


def is_count(value: Any) -> bool:
    """Whether a value is an integer from 0 on; True and False are none."""
    return type(value) is int and value >= 0


def mapping(item: Callable[[Any], bool]) -> Callable[[Any], bool]:
    """A check: whether a value is a dict with texts as keys, of which each value passes the check `item`."""

    def fits(value: Any) -> bool:
        if not isinstance(value, dict):
            return False
        for key, part in value.items():  # noqa: SIM110 - a generator takes twice the time
            if not isinstance(key, str) or not item(part):
                return False
        return True

    return fits


def _is_text_by_text(value: Any) -> bool:
    # Without a call for each text: this is half of a small save.
    return isinstance(value, dict) and ({*map(type, value), *map(type, value.values())} <= {str} or mapping(is_text)(value))


def _is_tree(value: Any, depth: int = 0) -> bool:
    if isinstance(value, dict) and depth < MAX_DEPTH:
        return _is_text_by_text(value) or all(isinstance(key, str) and _is_tree(node, depth + 1) for key, node in value.items())
    return isinstance(value, str)


def _is_progress(value: Any) -> bool:
    counts = mapping(is_count)
    fields = {"counts": counts, "merged": is_count, "eligible": counts}
    return isinstance(value, dict) and value.keys() == fields.keys() and all(fits(value[key]) for key, fits in fields.items())


is_generation = matches(GENERATION)
"""Whether a value is the name of a generation folder."""
_is_sha256 = matches(re.compile(r"[0-9a-f]{64}"))
_is_tensor_file = matches(re.compile(r"[0-9]{1,20}(-[0-9a-z-]{1,60})?\.safetensors"))
_is_rank_file = matches(re.compile(r"[0-9]{1,20}\.json"))


def _is_packed(value: Any) -> bool:
    if not isinstance(value, dict) or value.keys() != {"file", "bytes", "sha256"}:
        return False
    return _is_tensor_file(value["file"]) and is_count(value["bytes"]) and _is_sha256(value["sha256"])


# One subrecorder


@dataclass(frozen=True)
class Entry:
    """One subrecorder in a manifest.

    Attributes:
        name: any string.
        file: its file in the generation folder, `bytes` long, with checksum `sha256`; several may share one.
        reducer: the recipe; the repr if the reducer holds a function; None if unknown.
        states: names of tensors by leaf and key.
        values: trees of names of tensors by leaf.
        dtypes: the true dtypes of tensors that are stored as another dtype, by name.
        versions: the versions of the states of reducers, by type of the recipe; those of version 1 are left out.
        progress: what a monitor needs to go on bit for bit, see `recorders.recordings.recording.Progress`; None if nothing.
        placement: by leaf, which part of a tensor that ranks share it is, see `recorders.recordings.distributed.placement`.
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
    versions: Mapping[str, int] = field(default_factory=dict)
    progress: Mapping[str, Any] | None = None
    placement: Mapping[str, Any] = field(default_factory=dict)

    def tensors(self) -> list[str]:
        """The names of all tensors in the file that are its own."""
        return [name for state in self.states.values() for name in state.values()] + list(_leaves(self.values))


def _leaves(tree: Tree) -> Iterator[str]:
    if isinstance(tree, str):
        yield tree
    else:
        for node in tree.values():
            yield from _leaves(node)


_CHECKS: dict[str, tuple[Callable[[Any], bool], str]] = {
    "name": (is_text, "a text"),
    "monitor": (is_text, "a text"),
    "attr": (is_text_or_none, "a text or null"),
    "module": (is_text, "a text"),
    "samples": (is_count, "a count"),
    "reducer": (lambda value: value is None or isinstance(value, (str, dict)), "a recipe, a text or null"),
    "file": (_is_tensor_file, "the name of a file in the generation folder"),
    "bytes": (is_count, "a count"),
    "sha256": (_is_sha256, "a checksum"),
    "states": (mapping(_is_text_by_text), "tensor names by leaf and key, all texts"),
    "values": (mapping(_is_tree), f"trees of tensor names by leaf, with texts as keys, nested at most {MAX_DEPTH} deep"),
    "dtypes": (_is_text_by_text, "dtypes by tensor name"),
    "versions": (mapping(is_count), "versions by type of reducer"),
    "progress": (lambda value: value is None or _is_progress(value), "counts and texts"),
    "placement": (mapping(is_plain_placement), "rank, sharing, mesh, axes and parts by leaf"),
}


def _check_entry(entry: Entry, error: type[StorageError], where: str) -> None:
    """Raises `error` if anything in the entry is invalid."""
    for key, (fits, meaning) in _CHECKS.items():
        if not fits(getattr(entry, key)):
            problem = f"{key!r} must be {meaning} and is {getattr(entry, key)!r:.200}"
            raise error(f"{where} is malformed: subrecorder {entry.name!r:.200}: {problem}")
    tensors = entry.tensors()
    if len(set(tensors)) != len(tensors) or not entry.dtypes.keys() <= set(tensors):
        raise error(f"{where} is malformed: subrecorder {entry.name!r:.200} names a tensor twice, or an unknown one")


# The whole


@dataclass(frozen=True)
class RankFile:
    """The manifest of one of many ranks: its file in the generation folder, `bytes` long, with checksum `sha256`."""

    rank: int
    file: str
    bytes: int
    sha256: str

    def check(self) -> None:
        """Raises `ValueError` if anything in it is invalid."""
        if not (is_count(self.rank) and _is_rank_file(self.file) and is_count(self.bytes) and _is_sha256(self.sha256)):
            raise ValueError(f"no manifest of a rank is {self!r:.300}")


@dataclass(frozen=True)
class Manifest:
    """What a manifest says. Of a subrecorder, that is parsed and checked when it is asked for.

    Attributes:
        generation: the folder of all files.
        versions: those of the libraries that wrote it.
        aliases: further names of subrecorders.
        step: the step of the clock; None if there was no clock.
        packed: the file that all subrecorders share, with its `bytes` and `sha256`; None if every one has its own.
        where: the name of the file, for errors.
        reducers: the recipes that subrecorders name by number; None if they cannot be believed, and nobody knows them.
        lines: the line of each subrecorder, by its name, in order.
        ranks: if many ranks saved it, the manifest of each, by its global rank, in the order of the group; it has no lines then.
        damaged: why a line cannot be believed, by which it is, if such lines were to be left out.
    """

    generation: str
    versions: Mapping[str, str | None]
    aliases: Mapping[str, str] = field(default_factory=dict)
    step: int | None = None
    packed: Mapping[str, Any] | None = None
    where: str = ""
    reducers: Sequence[Any] | None = ()
    lines: Mapping[str, bytes] = field(default_factory=dict)
    ranks: Mapping[int, RankFile] | None = None
    damaged: Mapping[str, str] = field(default_factory=dict)

    def entry(self, name: str) -> Entry:
        """What it says of one subrecorder; raises `CorruptRecordingError` if that is malformed."""
        try:
            facts = {**_object_of(self.lines[name]), **(self.packed or {})}
            number, known = facts["reducer"], self.reducers
            if known is not None and (type(number) is not int or not 0 <= number < len(known)):
                raise ValueError(f"there is no reducer {number!r:.100}")
            facts["reducer"] = None if known is None else known[number]
            entry = Entry(**facts)
        except (KeyError, TypeError, ValueError, RecursionError) as error:
            what = f"subrecorder {name!r:.200}: {type(error).__name__}: {error}"
            raise CorruptRecordingError(f"{self.where} is malformed: {what}") from error
        _check_entry(entry, CorruptRecordingError, self.where)
        return entry

    def of(self, rank: int) -> RankFile:
        """The manifest of a rank; raises `SelectionError` if it saved nothing here."""
        ranks = self.ranks or {}
        if rank not in ranks:
            raise SelectionError(f"{self.where} names no rank {rank!r}: it was saved by ranks {shown_ranks(ranks)}")
        return ranks[rank]


def shown_ranks(ranks: Iterable[int]) -> str:
    """Ranks as text, cut after twenty."""
    known = list(ranks)
    return f"{known[:20]}{f' and {len(known) - 20} more' if len(known) > 20 else ''}"


def rank_file(rank: int) -> str:
    """The file of the manifest of a rank; names of its other files begin with the same digits."""
    return f"{rank:05}.json"


def _check(manifest: Manifest, names: Iterable[str] | None, error: type[StorageError], where: str) -> None:
    """Raises `error` if anything that is not of one subrecorder is invalid; `names` are those of all, if they are known."""
    if not is_generation(manifest.generation):
        raise error(f"{where} is malformed: no generation folder is called {manifest.generation!r:.200}")
    if not mapping(is_text_or_none)(manifest.versions):
        raise error(f"{where} is malformed: its versions are not texts")
    packed = manifest.packed
    if packed is not None and not _is_packed(packed):
        raise error(f"{where} is malformed: the packed file is {packed!r:.200}")
    if manifest.step is not None and not is_count(manifest.step):
        raise error(f"{where} is malformed: the step of the clock is {manifest.step!r:.200}")
    if not mapping(is_text)(manifest.aliases):
        raise error(f"{where} is malformed: its aliases are not texts")
    if names is not None and not set(manifest.aliases.values()) <= set(names):
        raise error(f"{where} is malformed: an alias names no subrecorder")


def encode(manifest: Manifest, entries: Iterable[Entry]) -> bytes:
    """The bytes of a manifest of one process.

    Raises:
        StorageError: a part has the wrong type, or is too deep or too long to be read.
    """
    entries = tuple(entries)
    recipes: dict[int, int] = {}
    table: dict[str, int] = {}
    lines: dict[str, str] = {}
    packed = manifest.packed or {}
    try:
        for entry in entries:
            _check_entry(entry, StorageError, "this recording")
            if id(entry.reducer) not in recipes:
                recipes[id(entry.reducer)] = table.setdefault(_dump(entry.reducer), len(table))
            facts = {key: value for key, value in vars(entry).items() if value or key not in ("versions", "progress", "placement")}
            facts = {key: value for key, value in facts.items() if key not in packed}
            line = _dump({**facts, "reducer": recipes[id(entry.reducer)]})[1:]
            if len(line) > MAX_LINE - 30:
                raise StorageError(f"subrecorder {entry.name!r:.200} has too many tensors: they take {len(line)} bytes to name")
            if len(entry.name) > _LONGEST_NAME // 12 and len(_dump(entry.name)) > _LONGEST_NAME:
                raise StorageError(f"the name {entry.name[:100]!r}... is too long: it takes more than {_LONGEST_NAME} bytes")
            if "\\ud" in line and _SPLIT.search(json.dumps(facts, ensure_ascii=False)):
                raise StorageError(f"subrecorder {entry.name!r:.200} has a character in two halves, which come back as one")
            if entry.name in lines:
                raise StorageError(f"this recording names {entry.name!r:.200} twice")
            lines[entry.name] = line
        _check(manifest, lines, StorageError, "this recording")
        described = {key: getattr(manifest, key) for key in ("generation", "packed", "step", "versions", "aliases")}
        about = f'{_dump(described)[1:-1]}, "reducers": [{", ".join(table)}]'
    except (TypeError, ValueError, RecursionError) as error:
        raise StorageError(f"this recording cannot be described as data: {error}") from error
    if len(about) > MAX_LINE - 300:
        raise StorageError(f"the reducers and further names take {len(about)} bytes, and {MAX_LINE} can be read back")
    if "\\ud" in about and _SPLIT.search(json.dumps([dict(manifest.aliases)], ensure_ascii=False)):
        raise StorageError("a further name has a character in two halves, which come back as one")
    return _encoded(about, "subrecorders", lines.values())


def encode_ranks(generation: str, versions: Mapping[str, str | None], files: Iterable[RankFile]) -> bytes:
    """The bytes of a manifest of many ranks; raises `StorageError` if they are too many."""
    about = f'"generation": "{generation}", "versions": {_dump(versions)}'
    return _encoded(about, "ranks", [_dump(vars(file))[1:] for file in files])


def _encoded(about: str, kind: str, lines: Collection[str]) -> bytes:
    head = sealed_line(f'{about}, "count": {len(lines)}, "{kind}": [')[1:]
    raw = f"{_PREFIX}{SCHEMA}, {head}\n{f',{chr(10)}'.join(map(sealed_line, lines))}\n]}}\n".encode()
    if len(raw) > MAX_BYTES:
        raise StorageError(f"the manifest would have {len(raw)} bytes, and {MAX_BYTES} can be read back: save in several folders")
    return raw


def decode(raw: bytes, where: str, *, skip: bool = False) -> Manifest:
    """The manifest in these untrusted bytes, of one process or of many ranks.

    Args:
        where: the name of the file, for errors.
        skip: leave out lines that are damaged, and name them in `damaged`. Of a first line that is damaged, nothing is believed but
            what other checksums prove: results come back, without reducers, further names and the step.

    Raises:
        NotARecordingError: the bytes are something else.
        SchemaError: a newer version wrote them.
        CorruptRecordingError: they are not what was saved.
    """
    damaged: dict[str, str] = {}
    try:
        first, *lines = raw.split(b"\n")
        head = b"{" + first[_schema_end(first, where) :]
        if lines[-2:] != [b"]}", b""]:
            raise ValueError("it has no end")
        believed = True
        try:
            _unsealed(head)
        except ValueError as error:
            believed = False
            damaged["line 1 of the manifest"] = str(error)
            if not skip:  # nothing is parsed of a file that was damaged by chance
                raise CorruptRecordingError(f"{where} is damaged: line 1: {error}") from error
        about = _object_of(head[1:] + b"]}")
        kind = "ranks" if "ranks" in about else "subrecorders"
        found: dict[Any, Any] = {}
        lines = [] if lines[:-2] == [b""] else lines[:-2]
        for number, line in enumerate(lines, 2):
            try:
                rest = _unsealed(line, b"," if number <= len(lines) else b"")
            except ValueError as error:
                damaged[f"line {number} of the manifest"] = str(error)
                continue
            name, value = (_rank if kind == "ranks" else _named)(rest)
            if name in found:
                raise ValueError(f"line {number} names {name!r:.200}, which was named before")
            found[name] = value
        if believed and len(lines) != about["count"]:
            damaged[f"line {len(lines) + 2} of the manifest"] = f"{len(lines)} lines are there, and {about['count']} were written"
        if damaged and not skip:
            what, reason = next(iter(damaged.items()))
            raise CorruptRecordingError(f"{where} is damaged: {what.removesuffix(' of the manifest')}: {reason}")
        if kind == "ranks" and len({file.file for file in found.values()}) < len(found):
            raise ValueError("two ranks have one file")
        if not believed and about.get("packed") is not None:
            raise ValueError("its first line is damaged, which says in which file all subrecorders are")
        facts = {key: about[key] for key in ("generation", "versions")}
        if not believed:
            facts |= {"versions": {}, "reducers": None}
        elif kind == "subrecorders":
            facts |= {key: about[key] for key in ("aliases", "step", "packed", "reducers")}
        facts["ranks" if kind == "ranks" else "lines"] = found
        manifest = Manifest(**facts, where=where, damaged=damaged)
    except (KeyError, TypeError, ValueError, RecursionError) as error:
        raise CorruptRecordingError(f"{where} is malformed: {type(error).__name__}: {error}") from error
    _check(manifest, None if damaged else found, CorruptRecordingError, where)
    return manifest


def _rank(rest: bytes) -> tuple[int, RankFile]:
    file = RankFile(**_object_of(rest))
    file.check()
    return file.rank, file


def _named(rest: bytes) -> tuple[str, bytes]:
    name = _scan_text(rest[_NAME_AT : _NAME_AT + _LONGEST_NAME].decode(), 0)[0]
    if not isinstance(name, str):
        raise ValueError(f"it names {name!r:.200}, which is no text")
    return name, rest


def _schema_end(first: bytes, where: str) -> int:
    """Where the format and the schema end in the first bytes of a manifest that this version reads."""
    if not first.startswith(_PREFIX.encode()):
        raise NotARecordingError(f"{where} is not a manifest of torch-recorders")
    found = _HEAD.match(first)
    if found is None:
        raise CorruptRecordingError(f"{where} is damaged: it names no schema and no checksum")
    schema = int(found[1])
    if schema > SCHEMA:
        raise SchemaError(
            f"{where} was written by a newer version, in schema {schema}; this one reads schema {SCHEMA}: upgrade torch-recorders"
        )
    if schema < SCHEMA:
        raise CorruptRecordingError(f"{where} is damaged: there is no schema {schema}")
    return found.end()


def check_replaceable(start: bytes | None, others: Collection[str], where: str, elsewhere: str, *, damaged: bool = False) -> None:
    """Raises if a save would replace something that is no recording, or one of a newer version.

    Args:
        start: the first bytes of the manifest there; None if there is none.
        others: what is there beside it, and beside what saves leave.
        elsewhere: what to save to, for errors.
        damaged: whether a manifest that cannot be read is a damaged one: there are files of a recording, too.
    """
    found = _HEAD.match(start or b"")
    if found is not None and int(found[1]) > SCHEMA:
        newer = f"schema {int(found[1])}; this version writes schema {SCHEMA}, and would replace what it cannot read"
        raise SchemaError(f"{where} holds a recording of {newer}: upgrade torch-recorders, or save {elsewhere}")
    if start is not None and (damaged or start.startswith(_PREFIX.encode())):
        return
    if start is not None:
        raise NotARecordingError(f"{where} holds a {MANIFEST} of something else: save {elsewhere}, or over a recording")
    if others:
        raise NotARecordingError(f"{where} holds {sorted(others)[:5]} and no recording: save {elsewhere}, or over a recording")


# In folders


def recording_of(path: str) -> str | None:
    """The recording of which a generation folder, a file in one, or a manifest is a part; None if `path` is none of these."""
    for inner in (os.path.abspath(path), os.path.dirname(os.path.abspath(path))):
        root, name = os.path.split(inner)
        if (name == MANIFEST or is_generation(name)) and os.path.isfile(os.path.join(root, MANIFEST)):
            return root
    return None


def generation_folder(root: str, generation: str) -> str:
    """The folder of a generation; raises `CorruptRecordingError` if it is a link."""
    folder = os.path.join(root, generation)
    if os.path.islink(folder):
        raise CorruptRecordingError(f"{folder} is a symbolic link, which recordings do not hold")
    return folder


def read_manifest(root: str, *, skip: bool = False) -> Manifest:
    """The manifest of the recording in folder `root`; raises a `StorageError` if it cannot be read, see `decode`."""
    where = os.path.join(root, MANIFEST)
    return decode(read_regular(where, MAX_BYTES), where, skip=skip)


def read_rank(root: str, manifest: Manifest, rank: int) -> Manifest:
    """The manifest of one rank; raises `CorruptRecordingError` if it is damaged, `OSError` if it is not there, else as `of`."""
    file = manifest.of(rank)
    where = os.path.join(generation_folder(root, manifest.generation), file.file)
    raw = read_regular(where, min(file.bytes, MAX_BYTES))
    if len(raw) != file.bytes or hashlib.sha256(raw).hexdigest() != file.sha256:
        raise CorruptRecordingError(f"{where}, the manifest of rank {rank}, is damaged: it is not what was saved")
    found = decode(raw, where)
    if found.generation != manifest.generation or found.ranks is not None:
        raise CorruptRecordingError(f"{where}, the manifest of rank {rank}, is of another save: it names {found.generation}")
    return found
