"""Attacks on recordings in files, which count how often and note what broke: `benchmarks/reliability.py` runs all of them."""

from __future__ import annotations

import errno
import itertools
import os
import random
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch

from recorders import Recording, Subrecording
from recorders.errors import NotARecordingError, StorageError
from recorders.recordings.storage.load import load
from recorders.recordings.storage.save import save
from reducers import Sum

SYSCALLS = ("open", "write", "fsync", "replace", "mkdir", "unlink", "rmdir", "listdir", "close")
CODES = (errno.ENOSPC, errno.EIO, errno.EINTR, errno.EDQUOT, errno.EROFS, errno.ESTALE, errno.ENOMEM)

Layout = Literal["folder", "packed"]


@dataclass
class Tally:
    """What an attack found: how often it was tried, with which outcomes, and what broke."""

    attack: str
    tries: int = 0
    outcomes: dict[str, int] = field(default_factory=dict)
    broke: list[str] = field(default_factory=list)

    def add(self, outcome: str, sound: bool = True, told: str = "") -> None:
        self.tries += 1
        self.outcomes[outcome] = self.outcomes.get(outcome, 0) + 1
        if not sound:
            self.broke.append(f"{outcome}: {told}")


def part(step: int) -> Subrecording:
    counts = {"count": torch.ones(50, dtype=torch.int64), "nonfinite": torch.zeros(50, dtype=torch.int64)}
    state = {**counts, "sum": torch.full((50,), float(step), dtype=torch.float64)}
    return Subrecording(Sum("b c -> c"), {"": state}, samples=step)


def recording(step: int, parts: int = 3) -> Recording:
    """A recording in which everything says `step`."""
    one = part(step)
    return Recording({f"layer.{i}": one for i in range(parts)})


def step_of(found: Recording, parts: int = 3) -> int:
    """The step that everything in the recording says."""
    assert len(found) == parts
    (step,) = set(steps_of(found).values())
    return step


def steps_of(found: Recording) -> dict[str, int]:
    """What each subrecorder says, in its count, its state and its value alike."""
    steps = {}
    for name, one in found.items():
        assert one.saved_results is not None
        says = {one.samples, *(int(x) for tensor in (one.states[""]["sum"], one.saved_results[""]) for x in tensor.unique())}
        (steps[name],) = says
    return steps


def left(root: Path) -> list[str]:
    """The kinds of things in the folder."""
    return sorted(path.name.partition("-")[0] for path in root.iterdir())


class Scene(NamedTuple):
    """A save that is attacked: what is in the folder before, and what comes."""

    old: Recording | None
    new: Recording
    before: Layout = "folder"
    layout: Layout = "folder"

    def prepare(self, root: Path) -> None:
        if self.old is not None:
            save(self.old, root, layout=self.before)

    def save(self, root: Path) -> None:
        save(self.new, root, layout=self.layout)

    def found(self, root: Path) -> str:
        """ "old", "new", or what else is there."""
        try:
            steps = steps_of(load(root))
        except (NotARecordingError, FileNotFoundError):
            steps = None
        except Exception as error:
            return f"{type(error).__name__}: {error}"
        old = None if self.old is None else {name: one.samples for name, one in self.old.items()}
        new = {name: one.samples for name, one in self.new.items()}
        return "new" if steps == new else "old" if steps == old else f"something else: {steps}"


def scenes() -> dict[str, Scene]:
    return {
        "a first save": Scene(None, recording(2)),
        "a save over another": Scene(recording(1), recording(2)),
        "a first packed save": Scene(None, recording(2), layout="packed"),
        "packed over packed": Scene(recording(1), recording(2), "packed", "packed"),
        "packed over a folder": Scene(recording(1), recording(2), "folder", "packed"),
        "a folder over packed": Scene(recording(1), recording(2), "packed", "folder"),
    }


@contextmanager
def at_call(number: int, strike: Callable[[], None]) -> Iterator[Callable[[], int]]:
    """Does `strike` instead of the call of that number, counted from 0, into the operating system."""
    counter, real = itertools.count(), {name: getattr(os, name) for name in SYSCALLS}
    made = 0

    def wrap(name: str) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            nonlocal made
            made = next(counter)
            if made == number:
                if name == "close":
                    real["close"](*args)
                strike()
            return real[name](*args, **kwargs)

        return call

    for name in SYSCALLS:
        setattr(os, name, wrap(name))
    try:
        yield lambda: made + 1
    finally:
        for name in SYSCALLS:
            setattr(os, name, real[name])


def goes_on(root: Path) -> str:
    """Why the next save into the folder does not work, or leaves something behind; "" if all is well."""
    try:
        save(recording(3), root)
        sound = step_of(load(root)) == 3 and left(root) == [".lock", "generation", "manifest.json"]
    except Exception as error:
        return f"the next save: {type(error).__name__}: {error}"
    return "" if sound else f"after the next save there are {left(root)}"


def kills(folder: Path, share: int = 1) -> Tally:
    """`kill -9` instead of each `share`-th call into the system, in each scene."""
    tally = Tally("`kill -9` at each call into the system")
    for label, scene in scenes().items():
        for number in itertools.count(0, share):
            root = folder / f"{label} {number}"
            scene.prepare(root)

            def work(scene: Scene = scene, root: Path = root, number: int = number) -> None:
                with at_call(number, lambda: os.kill(os.getpid(), signal.SIGKILL)):
                    scene.save(root)

            _, status = os.waitpid(fork(work), 0)
            if not os.WIFSIGNALED(status):
                assert scene.found(root) == "new"
                break
            found, problem = scene.found(root), goes_on(root)
            tally.add(found, found in ("old", "new") and not problem, f"{label}, call {number}: {problem}")
    return tally


def errors(folder: Path, share: int = 1, codes: Sequence[int] = CODES) -> Tally:
    """An error of the system at each `share`-th call, in each scene."""
    tally = Tally("an error of the system at each call")
    for code, (label, scene) in itertools.product(codes, scenes().items()):
        for number in itertools.count(0, share):
            root = folder / f"{label} {code} {number}"
            scene.prepare(root)

            def fail(code: int = code) -> None:
                raise OSError(code, os.strerror(code))

            said = ""
            with at_call(number, fail) as made:
                try:
                    scene.save(root)
                except StorageError as error:
                    said = str(error)
            if made() <= number:
                break
            # An error after the rename is told, but the new recording is there; one while cleaning up may be silent.
            found, problem = scene.found(root), goes_on(root)
            sound = found in ("old", "new") and not problem and (os.strerror(code) in said if said else found == "new")
            tally.add(f"told, {found}" if said else f"saved, {found}", sound, f"{label}, call {number}: {said} {problem}")
    return tally


def fork(work: Callable[[], None]) -> int:
    child = os.fork()
    if child == 0:
        code = 1
        try:
            work()
            code = 0
        finally:
            os._exit(code)
    return child


def kills_at_random(folder: Path, rounds: int) -> Tally:
    """`kill -9` of a process that saves without end, at random moments: what `save` returned from is there."""
    tally = Tally("`kill -9` at random moments of saves without end")
    rng, root, said = random.Random(0), folder / "run", folder / "said"
    save(recording(0, 30), root)
    said.write_text("0")
    for _ in range(rounds):
        begin = int(said.read_text())

        def work(begin: int = begin) -> None:
            log = os.open(said, os.O_WRONLY)
            for step in itertools.count(begin + 1):
                save(recording(step, 30), root)
                os.pwrite(log, b"%d" % step, 0)

        child = fork(work)
        # However slow the machine is, one save is complete before the kill comes: then every round proves something.
        deadline = time.monotonic() + 60
        while int(said.read_text()) == begin and time.monotonic() < deadline:
            time.sleep(0.001)
        time.sleep(rng.uniform(0.0, 0.25))
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        step, told = step_of(load(root), 30), int(said.read_text())
        # One more save may have been complete, and killed before it could say so.
        tally.add("the last save" if step == told else "one more", begin < step and step in (told, told + 1), f"{told}, {step}")
        said.write_text(str(step))
    save(recording(0, 30), root)
    assert left(root) == [".lock", "generation", "manifest.json"]
    return tally


def savers_and_readers(folder: Path, saves: int) -> Tally:
    """Two processes save into one folder, in two layouts, while this one loads."""
    tally, root = Tally("loads beside two processes that save"), folder / "run"
    layouts: dict[int, Layout] = {1_000_000: "folder", 2_000_000: "packed"}

    def work(start: int) -> None:
        for step in range(start, start + saves):
            save(recording(step), root, layout=layouts[start])

    save(recording(0), root)
    children = {fork(lambda start=start: work(start)) for start in layouts}  # type: ignore[misc]
    while children:
        step = step_of(load(root))
        tally.add("whole", step == 0 or step % 1_000_000 < saves, str(step))
        child, status = os.waitpid(-1, os.WNOHANG)
        children -= {child}
        assert status == 0
    tally.outcomes["saves"] = 2 * saves
    return tally


def damages(folder: Path, share: int = 1) -> Tally:
    """Each `share`-th bit of each file flipped, each `share`-th length cut off; a byte more, zeros, an empty file."""
    tally = Tally("damage: each bit flipped, each length cut off, in the manifest and in files of both layouts")
    for layout in ("folder", "packed"):
        whole = recording(5, 2)
        root = save(whole, folder / layout, layout=layout)
        expected = steps_of(load(root))
        for path in (root / "manifest.json", *sorted(root.glob("generation-*/*"))):
            raw = path.read_bytes()
            cuts = (raw[:length] for length in range(0, len(raw), share))
            flips = (flipped(raw, bit) for bit in range(0, 8 * len(raw), share))
            for content in itertools.chain(flips, cuts, (raw + b"\0", raw + raw, bytes(len(raw)))):
                path.write_bytes(content)
                try:
                    found = f"read as {steps_of(load(root))}"
                except StorageError:
                    found = "refused"
                except Exception as error:
                    found = f"{type(error).__name__}: {error}"
                tally.add(found, found == "refused", path.name)
            path.write_bytes(raw)
            assert steps_of(load(root)) == expected
    return tally


def flipped(raw: bytes, bit: int) -> bytes:
    other = bytearray(raw)
    other[bit // 8] ^= 1 << bit % 8
    return bytes(other)
