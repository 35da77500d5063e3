"""Power losses, simulated by what POSIX promises and no more.

A file keeps what was written before its last `fsync`, and a folder the names that it had at its own. Of everything after that, any
part may be on the disk and any other not, in any order: names one by one, a file empty, cut off or full of zeros.
"""

from __future__ import annotations

import itertools
import os
import random
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from attacks import Scene, Tally, goes_on, scenes

STRANGE = ("lost", "half", "zeros", "whole")
"""What may be left of bytes that were not flushed."""


@dataclass
class Operation:
    """One change: names in a folder, or bytes at the end of a file; or the flush of a folder or file."""

    target: int
    names: Mapping[str, int | None] | None = None
    data: bytes | None = None


@dataclass
class Disk:
    """Files by number, and folders by negative number; 0 is the folder that holds everything."""

    folders: dict[int, dict[str, int]] = field(default_factory=lambda: {0: {}})
    files: dict[int, bytes] = field(default_factory=dict)

    def copy(self) -> Disk:
        return Disk({number: dict(names) for number, names in self.folders.items()}, dict(self.files))

    def do(self, operation: Operation, state: str = "whole") -> None:
        if operation.names is not None:
            folder = self.folders.setdefault(operation.target, {})
            for name, number in operation.names.items():
                folder.pop(name, None)
                if number is not None:
                    folder[name] = number
        elif operation.data is not None:
            data = operation.data
            kept = {"lost": b"", "half": data[: len(data) // 2], "zeros": bytes(len(data)), "whole": data}[state]
            self.files[operation.target] = self.files.get(operation.target, b"") + kept

    def write(self, path: Path, number: int = 0) -> None:
        """Makes real folders and files of it."""
        path.mkdir()
        for name, inner in self.folders.get(number, {}).items():
            if inner < 0:
                self.write(path / name, inner)
            else:
                (path / name).write_bytes(self.files.get(inner, b""))


class Watched:
    """The disk below a folder, with all that changes it."""

    def __init__(self, base: Path) -> None:
        self.base = os.path.abspath(base)
        self.now = Disk()
        self.operations: list[Operation] = []
        self.handles: dict[int, tuple[str, int]] = {}
        self.numbers = itertools.count(1)
        self._seen: dict[int, int] = {}
        self._scan(self.base, 0)
        self.before = self.now.copy()

    def _scan(self, path: str, number: int) -> None:
        for entry in os.scandir(path):
            inode = entry.stat(follow_symlinks=False).st_ino
            inner = self._seen.setdefault(inode, next(self.numbers) * (-1 if entry.is_dir() else 1))  # hard links share it
            self.now.folders[number][entry.name] = inner
            if entry.is_dir():
                self.now.folders[inner] = {}
                self._scan(entry.path, inner)
            else:
                self.now.files[inner] = Path(entry.path).read_bytes()

    def path(self, path: Any, handle: int | None = None) -> str:
        return os.path.join(self.handles[handle][0], os.fspath(path)) if handle is not None else os.path.abspath(os.fspath(path))

    def number(self, path: str) -> int | None:
        found: int | None = 0
        for name in Path(path).relative_to(self.base).parts:
            found = None if found is None else self.now.folders.get(found, {}).get(name)
        return found

    def note(self, operation: Operation) -> None:
        self.now.do(operation)
        self.operations.append(operation)

    def name(self, path: str, number: int | None, **others: int | None) -> None:
        folder = self.number(os.path.dirname(path))
        assert folder is not None
        self.note(Operation(folder, names={os.path.basename(path): number, **others}))


@contextmanager
def watched(base: Path) -> Iterator[Watched]:
    """Notes every change below a folder, as the system is asked for it."""
    disk = Watched(base)
    real: dict[str, Callable[..., Any]] = {
        name: getattr(os, name) for name in ("open", "close", "write", "fsync", "mkdir", "replace", "link", "unlink", "rmdir")
    }

    def opened(path: Any, flags: int, mode: int = 0o777, *, dir_fd: int | None = None) -> int:
        where = disk.path(path, dir_fd)
        new = where.startswith(disk.base) and disk.number(where) is None
        handle: int = real["open"](path, flags, mode, dir_fd=dir_fd)
        if new:
            number = next(disk.numbers)
            disk.now.files[number] = b""
            disk.name(where, number)
        if where.startswith(disk.base):
            found = disk.number(where)
            assert found is not None
            disk.handles[handle] = where, found
        return handle

    def closed(handle: int) -> None:
        disk.handles.pop(handle, None)
        real["close"](handle)

    def written(handle: int, data: Any) -> int:
        count: int = real["write"](handle, data)
        disk.note(Operation(disk.handles[handle][1], data=bytes(data)[:count]))
        return count

    def flushed(handle: int) -> None:
        real["fsync"](handle)
        if handle in disk.handles:
            disk.note(Operation(disk.handles[handle][1]))

    def made(path: Any, mode: int = 0o777) -> None:
        real["mkdir"](path, mode)
        number = -next(disk.numbers)
        disk.now.folders[number] = {}
        disk.name(disk.path(path), number)

    def replaced(old: Any, new: Any) -> None:
        real["replace"](old, new)
        disk.name(disk.path(new), disk.number(disk.path(old)), **{os.path.basename(old): None})

    def linked(old: Any, new: Any, **kwargs: Any) -> None:
        real["link"](old, new, **kwargs)
        disk.name(disk.path(new), disk.number(disk.path(old)))

    def gone(kind: str) -> Callable[..., None]:
        def remove(path: Any, *, dir_fd: int | None = None) -> None:
            real[kind](path, dir_fd=dir_fd)
            disk.name(disk.path(path, dir_fd), None)

        return remove

    ours = (opened, closed, written, flushed, made, replaced, linked, gone("unlink"), gone("rmdir"))
    for name, call in zip(real, ours, strict=True):
        setattr(os, name, call)
    try:
        yield disk
    finally:
        for name, call in real.items():
            setattr(os, name, call)


def after_losses(disk: Watched, upto: int, most: int, rng: random.Random) -> Iterator[Disk]:
    """Disks that may be found if the power fails after so many operations: all if they are few, else `most` of them."""
    done = disk.operations[:upto]
    flushed: set[int] = set()
    open_now: list[int] = []
    for index in reversed(range(upto)):
        operation = done[index]
        if operation.names is None and operation.data is None:
            flushed.add(operation.target)
        elif operation.target not in flushed:
            open_now.append(index)
    choices = [("lost", "whole") if done[index].names is not None else STRANGE for index in open_now]
    plans: Iterator[tuple[str, ...]] = itertools.product(*choices)
    total = 1
    for choice in choices:
        total *= len(choice)
    if total > most:
        plain = [tuple(kind for _ in choices) for kind in ("lost", "whole")]
        edges = ((plain[0], "whole"), (plain[1], "lost"))
        one = [(*edge[:j], other, *edge[j + 1 :]) for edge, other in edges for j in range(len(choices))]
        plans = itertools.chain(plain, one, (tuple(map(rng.choice, choices)) for _ in range(most)))
    for plan in itertools.islice(plans, most):
        states = dict(zip(open_now, plan, strict=True))
        found = disk.before.copy()
        for index, operation in enumerate(done):
            state = states.get(index, "whole")
            if operation.data is not None or state == "whole":
                found.do(operation, state)
        yield found


def power_losses(folder: Path, most: int = 60) -> Tally:
    """The power fails after each operation of a save, in each scene, with up to `most` different disks found afterwards."""
    tally, rng = Tally("power losses in a simulation of strict POSIX"), random.Random(0)
    for label, scene in scenes().items():
        losses_of(label, scene, folder / label, most, tally, rng)
    return tally


def losses_of(label: str, scene: Scene, folder: Path, most: int, tally: Tally, rng: random.Random) -> None:
    folder.mkdir()
    base, found_at = folder / "base", folder / "found"
    base.mkdir()
    scene.prepare(base / "run")
    with watched(base) as disk:
        scene.save(base / "run")
    for upto in range(len(disk.operations) + 1):
        for number, state in enumerate(after_losses(disk, upto, most, rng)):
            state.write(found_at)
            found = scene.found(found_at / "run")
            sound = found == "new" if upto == len(disk.operations) else found in ("old", "new")
            problem = goes_on(found_at / "run") if number % 10 == 0 else ""
            tally.add(found if sound else "lost", sound and not problem, f"{label}, after {upto} operations: {found} {problem}")
            shutil.rmtree(found_at)
