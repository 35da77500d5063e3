"""Recordings in object stores and on servers, by fsspec: they are sent from a temporary folder, and fetched into one.

An object cannot be renamed, and nobody can lock it. So the files of a new generation are sent first, and the manifest last, which
the store replaces at once. Then the generation goes that the manifest before it named. So the URL always has one complete
recording, and a save that was killed leaves files that no manifest names.
"""

from __future__ import annotations

import contextlib
import os
import re
import tempfile
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from recorders.errors import MissingExtraError, NotARecordingError, RecordingNotFoundError, StorageError, require
from recorders.recordings.atomic_files import is_url
from recorders.recordings.storage.commit import check_same_net, names_in
from recorders.recordings.storage.schema import (
    GENERATION,
    MANIFEST,
    MAX_BYTES,
    Manifest,
    check_replaceable,
    decode,
    read_rank,
)

ATTEMPTS = 10
"""How often a recording is fetched again if a save replaced it meanwhile."""

_OURS = re.compile(rf"({re.escape(MANIFEST)}\.)?{GENERATION.pattern}")
"""Names of generations, and of drafts of manifests that a killed save left."""


def send(folder: Path, url: str, names: Collection[str] | None) -> None:
    """Copies the recording in a folder to a URL; the manifest goes last.

    Args:
        names: those of the recording, which must be of the same net as one that is there; None to replace any.

    Raises:
        NotARecordingError: there is something else.
        RecordingExistsError: there is the recording of another net.
        SchemaError: there is a recording of a newer version.
        StorageError: the store refuses.
    """
    generation = next(path for path in folder.iterdir() if GENERATION.fullmatch(path.name))
    files = list(generation.iterdir())
    with _store_errors(f"cannot save to {url}"):
        store, root = _opened(url)
        _check_place(store, root, url)
        if names is not None:
            check_same_net(names, _names(store, root, url), url)
        has_folders = _put(store, files, f"{root}/{generation.name}")
        replaced = _generation(store, root)
        _replace(store, f"{root}/{MANIFEST}", (folder / MANIFEST).read_bytes(), generation.name if has_folders else "")
        if replaced and replaced != generation.name:
            # It holds the save before this one. If it cannot be removed, the new recording is there all the same.
            with contextlib.suppress(Exception):
                store.rm(f"{root}/{replaced}", recursive=True)


def _put(store: Any, files: Sequence[Path], folder: str) -> bool:
    """Copies files into a new folder; returns whether that had to be made: object stores have none."""
    here, there = [os.fspath(path) for path in files], [f"{folder}/{path.name}" for path in files]
    try:
        store.put(here, there)
    except FileNotFoundError:
        store.makedirs(folder, exist_ok=True)
        store.put(here, there)
        return True
    return False


def _replace(store: Any, path: str, content: bytes, draft: str) -> None:
    """Writes a file in place of the one that is there; if `draft` is a name, by that of a file beside it, and a rename.

    A store of objects replaces one at once. Where there are real folders, a file that is written in place is there in half
    meanwhile.
    """
    if draft:
        beside = f"{path}.{draft}"
        try:
            store.pipe_file(beside, content)
            store.mv(beside, path)
            return
        except Exception:  # a store that cannot rename, or not to a name that is taken
            with contextlib.suppress(Exception):
                store.rm_file(beside)
    store.pipe_file(path, content)


def fetch(url: str, folder: str) -> None:
    """Copies the recording at a URL into an empty folder; what is damaged there is damaged here.

    Raises:
        RecordingNotFoundError: there is nothing.
        NotARecordingError: there is something else.
        StorageError: the store refuses, or other saves replaced the recording again and again.
    """
    with _store_errors(f"cannot load {url}"):
        store, root = _opened(url)
        for _ in range(ATTEMPTS):
            raw = _manifest(store, root, url)
            Path(folder, MANIFEST).write_bytes(raw)
            manifest = decode(raw, url, skip=True)
            if _fetch_files(store, root, manifest, Path(folder)) or _generation(store, root) == manifest.generation:
                return
    raise StorageError(f"cannot load {url}: it was saved again {ATTEMPTS} times during the attempt; try again")


def fetch_file(url: str, path: str | os.PathLike[str]) -> None:
    """Copies the file at a URL.

    Raises:
        RecordingNotFoundError: there is nothing.
        StorageError: the store refuses.
    """
    with _store_errors(f"cannot read {url}"):
        store, root = _opened(url)
        try:
            store.get_file(root, os.fspath(path))
        except FileNotFoundError as error:
            raise RecordingNotFoundError(f"there is nothing at {url}") from error


@contextlib.contextmanager
def fetched(path: str | os.PathLike[str]) -> Iterator[str | os.PathLike[str]]:
    """The path of a recording in a local folder: the path itself, or a temporary folder that has what is at the URL.

    Errors name the URL.
    """
    if not is_url(path):
        yield path
        return
    url = os.fspath(path)
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:  # Windows keeps files that are mapped
        try:
            fetch(url, folder)
            yield folder
        except StorageError as error:
            raise type(error)(str(error).replace(folder, url)) from error


def renamed(reasons: Mapping[str, str], folder: str, url: str) -> dict[str, str]:
    """Messages that name a temporary folder, with the URL in its place."""
    return {name: reason.replace(folder, url) for name, reason in reasons.items()}


def _opened(url: str) -> tuple[Any, str]:
    """The file system of a URL, and the path in it."""
    try:
        store, root = require("fsspec.core", "remote").url_to_fs(url)
    except MissingExtraError:
        raise
    except ImportError as error:  # fsspec says what to install
        raise MissingExtraError(f"{url}: {error}") from error
    store.invalidate_cache()
    return store, str(root).rstrip("/")


def _check_place(store: Any, root: str, url: str) -> None:
    """Raises if there is something that a save would replace, and that is no recording, or one of a newer version."""
    start, others = None, list[str]()
    try:
        start = bytes(store.cat_file(f"{root}/{MANIFEST}", start=0, end=200))
    except FileNotFoundError:
        with contextlib.suppress(FileNotFoundError):
            names = {str(path).rstrip("/").rpartition("/")[2] for path in store.ls(root, detail=False)}
            others = [name for name in names - {""} if not _OURS.fullmatch(name)]
    check_replaceable(start, others, url, "to another URL")


def _names(store: Any, root: str, url: str) -> Collection[str]:
    """The names in the recording at a URL; none if there is none, or its manifest cannot be read."""
    try:
        found = decode(_manifest(store, root, url), url, skip=True)
    except StorageError:
        return ()

    def of(rank: int) -> Manifest:
        file = found.of(rank)
        return decode(bytes(store.cat_file(f"{root}/{found.generation}/{file.file}", start=0, end=file.bytes)), url, skip=True)

    return names_in(found, of)


def _generation(store: Any, root: str) -> str:
    """The generation that the present manifest names; "" if there is none."""
    try:
        found = GENERATION.search(bytes(store.cat_file(f"{root}/{MANIFEST}", start=0, end=4096)).decode(errors="replace"))
    except FileNotFoundError:
        return ""
    return found[0] if found else ""


def _manifest(store: Any, root: str, url: str) -> bytes:
    try:
        return bytes(store.cat_file(f"{root}/{MANIFEST}", start=0, end=MAX_BYTES + 1))
    except (FileNotFoundError, NotADirectoryError) as error:
        if store.exists(root):
            raise NotARecordingError(f"{url} is no recording: it holds no manifest; save one with recorder.save(url)") from error
        raise RecordingNotFoundError(f"there is nothing at {url}") from error


def _fetch_files(store: Any, root: str, manifest: Manifest, folder: Path) -> bool:
    """Copies the files that a manifest names, as far as they are there and not longer than it says; returns whether all were."""
    (folder / manifest.generation).mkdir()
    try:
        there = store.ls(f"{root}/{manifest.generation}", detail=True)
    except FileNotFoundError:
        return False
    sizes = {str(found["name"]).rpartition("/")[2]: found["size"] for found in there}
    whole, manifests = True, [manifest]
    if manifest.ranks is not None:
        wanted = {file.file: file.bytes for file in manifest.ranks.values()}
        whole = _fetch_some(store, root, manifest.generation, folder, wanted, sizes)
        for rank in manifest.ranks:
            with contextlib.suppress(StorageError, OSError):
                manifests.append(read_rank(str(folder), manifest, rank))
    wanted = {}
    for one in manifests:
        for name in one.lines:
            with contextlib.suppress(StorageError):  # a malformed line; `load` says so
                entry = one.entry(name)
                wanted[entry.file] = entry.bytes
    return _fetch_some(store, root, manifest.generation, folder, wanted, sizes) and whole


def _fetch_some(store: Any, root: str, generation: str, folder: Path, wanted: Mapping[str, int], sizes: Mapping[str, int]) -> bool:
    """Copies files into the folder of a generation, of `wanted` sizes at most; returns whether all were there."""
    files = [file for file, size in wanted.items() if file in sizes and sizes[file] <= size]
    try:
        store.get([f"{root}/{generation}/{file}" for file in files], [os.fspath(folder / generation / file) for file in files])
    except FileNotFoundError:
        return False
    return len(files) == len(wanted)


@contextlib.contextmanager
def _store_errors(what: str) -> Iterator[None]:
    """Raises errors of the store, which are of any type, as `StorageError`."""
    try:
        yield
    except (StorageError, MissingExtraError):
        raise
    except Exception as error:
        raise StorageError(f"{what}: {type(error).__name__}: {error}") from error
