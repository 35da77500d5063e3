"""Damage to the bytes of a timeline: what is read is what was written, or a typed error; never another number, name or note."""

from __future__ import annotations

import math
import os
import random
import sqlite3
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from recorders.errors import CorruptRecordingError, RecordingWarning, SelectionError, StorageError
from recorders.watch.timeline import Timeline, schema

TICKS, NAMES, PAGE = 40, 6, 512


def values(tick: int) -> dict[str, dict[str, float]]:
    rows = {f"layer{i}": {"mean": tick + i / 7, "max": -math.inf if i == 3 else 2.0**tick} for i in range(NAMES)}
    return {**rows, **({"seldom": {"loss": math.nan}} if tick % 5 == 0 else {})}


def tensor(tick: int) -> torch.Tensor:
    return torch.arange(6, dtype=torch.int16).reshape(2, 3) * tick


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """A timeline of many small pages; its free pages hold ticks that were forgotten and written again with other numbers."""
    path = tmp_path / "run.db"
    with Timeline(path) as timeline:
        timeline.append(0, values(0), 0)
        timeline.note("axis", "epoch")
        timeline.note("charts", "x" * 900)
    db = sqlite3.connect(path)
    db.execute(f"PRAGMA page_size = {PAGE}")
    db.execute("VACUUM")
    db.close()
    with Timeline(path) as timeline:
        for sign in (-1, 1):
            for tick in range(1, TICKS):
                rows = {name: {key: sign * value for key, value in row.items()} for name, row in values(tick).items()}
                timeline.append(tick, rows, 10 * tick, tensors={"histogram": sign * tensor(tick)} if tick % 4 == 0 else None)
            if sign < 0:
                timeline.forget(1)
    return path


def same(value: float, other: float) -> bool:
    return value == other or (math.isnan(value) and math.isnan(other))


def right_rows(rows: dict[str, dict[str, float]], tick: int, all_of_it: bool) -> bool:
    truth = values(tick)
    found = all(same(value, truth[name][key]) for name, row in rows.items() for key, value in row.items())
    return found and (not all_of_it or {n: set(r) for n, r in rows.items()} == {n: set(r) for n, r in truth.items()})


def readings(timeline: Timeline, whole: bool) -> Iterator[Callable[[], bool]]:
    """Everything that can be read; each tells whether it is right. With `whole`, nothing may be left out."""

    def fits(found: Any, truth: Any) -> bool:
        return found == truth if whole else set(found) <= set(truth)

    yield lambda: fits(timeline.ticks(), list(range(TICKS)))
    yield lambda: fits(timeline.steps().items(), {tick: 10 * tick for tick in range(TICKS)}.items())
    yield lambda: fits([*timeline], list(values(0)))
    yield lambda: fits(timeline.notes().items(), {"axis": "epoch", "charts": "x" * 900}.items())
    yield lambda: fits(timeline.tensors().get("histogram", []), list(range(4, TICKS, 4)))
    for name, key, ticks in (
        ("layer3", "max", range(TICKS)),
        ("layer5", "mean", range(TICKS)),
        ("seldom", "loss", range(0, TICKS, 5)),
    ):

        def course(name: str = name, key: str = key, ticks: range = ticks) -> bool:
            at, found = timeline.series(name, key)
            right = all(same(value, values(tick)[name][key]) for tick, value in zip(at, found, strict=True))
            return right and fits(at, list(ticks))

        yield course
    for tick in (0, 1, 17, TICKS - 1):
        yield lambda tick=tick: right_rows(timeline.at(tick), tick, whole)
    yield lambda: timeline.tensor("histogram", 16).equal(tensor(16))


def attack(path: Path, skip: bool) -> tuple[int, int]:
    """Opens and reads a damaged file; returns how much was right and how much was refused."""
    right = refused = 0
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RecordingWarning)
        try:
            with Timeline(path, read_only=True, damaged="skip" if skip else "error") as timeline:
                for reading in readings(timeline, whole=not skip):
                    try:
                        assert reading()
                        right += 1
                    except StorageError:
                        refused += 1
                    except SelectionError:  # what is left out is not there
                        if not skip:
                            raise
                        refused += 1
        except StorageError:
            refused += 1
    return right, refused


def flipped(path: Path, bits: list[int], skip: bool) -> tuple[int, int]:
    right = refused = 0
    with open(path, "r+b", buffering=0) as file:
        for bit in bits:
            whole = os.pread(file.fileno(), 1, bit // 8)
            os.pwrite(file.fileno(), bytes([whole[0] ^ (1 << bit % 8)]), bit // 8)
            try:
                found = attack(path, skip)
            except Exception as error:
                raise AssertionError(f"bit {bit % 8} of byte {bit // 8}: {error!r}") from error
            right, refused = right + found[0], refused + found[1]
            os.pwrite(file.fileno(), whole, bit // 8)
    return right, refused


@pytest.mark.slow
def test_every_flipped_bit_is_harmless_or_refused(path: Path) -> None:
    assert attack(path, skip=False)[1] == attack(path, skip=True)[1] == 0
    bits = list(range(0, 8 * path.stat().st_size, 83))
    assert len(bits) > 2000
    for skip, some in ((False, bits[::2]), (True, bits[1::2])):
        right, refused = flipped(path, some, skip)
        assert right
        assert refused
    assert attack(path, skip=False)[1] == 0


@pytest.mark.long
def test_all_bits_are_harmless_or_refused(path: Path) -> None:
    for skip in (False, True):
        flipped(path, list(range(0, 8 * path.stat().st_size, 3)), skip)


@pytest.mark.slow
def test_pages_cut_off_zeroed_swapped_or_overwritten(path: Path) -> None:
    whole = path.read_bytes()
    pages = [whole[start : start + PAGE] for start in range(0, len(whole), PAGE)]
    rng = random.Random(3)
    damaged = [whole[: PAGE * count] for count in range(len(pages))]
    for page in range(len(pages)):
        others = bytes(PAGE), rng.randbytes(PAGE)
        damaged += [b"".join([*pages[:page], other, *pages[page + 1 :]]) for other in others]
    for _ in range(300):
        one, other = rng.sample(range(len(pages)), 2)
        swapped = list(pages)
        swapped[one], swapped[other] = swapped[other], swapped[one]
        damaged.append(b"".join(swapped))
        swapped[one] = pages[one]  # and one page twice
        damaged.append(b"".join(swapped))
    refused = 0
    for number, data in enumerate(damaged):
        path.write_bytes(data)
        refused += bool(attack(path, skip=bool(number % 2))[1])
    assert refused > 100


def test_a_file_cut_to_nothing_is_an_error_that_says_what_to_do(path: Path) -> None:
    path.write_bytes(b"")
    for read_only in (False, True):
        with pytest.raises(CorruptRecordingError, match=r"run\.db is empty.*remove the file"):
            Timeline(path, read_only=read_only)
    assert path.read_bytes() == b""


def forge(path: Path, numbers: str | bytes, tensors: str | None = None) -> None:
    """A timeline of one tick, whose checksums are right."""
    with Timeline(path) as timeline:
        timeline.append(0, {"a": {"x": 1.0}})
    text = numbers.encode() if isinstance(numbers, str) else numbers
    tick = schema.Tick(None, tensors, schema.hashed(text))
    proof = schema.checksum("ticks", 0, *tick)
    db = sqlite3.connect(path)
    db.execute("UPDATE ticks SET tensors = ?, digest = ?, checksum = ?, numbers = ?", (tensors, tick.digest, proof, numbers))
    (series,) = db.execute("SELECT series FROM totals").fetchone()
    schema.Totals(schema.total([proof]), series).store(db)
    db.commit()
    db.close()


FORGED_NUMBERS = [
    "[1]",
    "null",
    '{"1":"x"}',
    '{"1":[1]}',
    '{"x":1.0}',
    "[" * 100_000,
    '{"1":' + "9" * 5000 + "}",
    b"\xff\xfe",
    b"",
    '{"1":1',
]
FORGED_TENSORS = ["[1]", "{", '{"a":1}', '{"a":[1]}', '{"a":["x",null]}', '{"a":[1,5]}', "[" * 100_000]


@pytest.mark.parametrize("numbers", FORGED_NUMBERS, ids=lambda text: repr(text)[:12])
def test_forged_numbers_are_typed_errors_or_left_out(tmp_path: Path, numbers: str | bytes) -> None:
    forge(tmp_path / "run.db", numbers)
    with Timeline(tmp_path / "run.db", read_only=True) as timeline:
        for read in (lambda: timeline.at(0), lambda: timeline.series("a", "x"), timeline.select, lambda: timeline.numbers(0)):
            with pytest.raises(CorruptRecordingError, match=r"run\.db is damaged at tick 0"):
                read()
        assert list(timeline.verify()) == [0]
    with Timeline(tmp_path / "run.db", read_only=True, damaged="skip") as timeline, pytest.warns(RecordingWarning, match="tick 0"):
        assert (timeline.at(0), timeline.series("a", "x")) == ({}, ([], []))


@pytest.mark.parametrize("tensors", FORGED_TENSORS, ids=lambda text: repr(text)[:12])
def test_forged_lists_of_tensors_are_typed_errors(tmp_path: Path, tensors: str) -> None:
    forge(tmp_path / "run.db", '{"1":1.0}', tensors)
    with Timeline(tmp_path / "run.db", read_only=True) as timeline:
        with pytest.raises(CorruptRecordingError):
            timeline.tensors(), timeline.tensor("a", 0)
        assert timeline.verify()
        assert timeline.at(0) == {"a": {"x": 1.0}}
