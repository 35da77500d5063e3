"""Whatever a writer accepts is read back equal: names, texts and numbers of manifests, timelines and streams."""

from __future__ import annotations

import contextlib
import enum
import math
import tempfile
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from recorders import (
    OperandError,
    RecorderError,
    Recording,
    StorageError,
    Stream,
    StreamDataset,
    Subrecording,
    TickError,
    Timeline,
    load,
)
from recorders.recordings.storage.schema import Entry, Manifest, decode, encode
from reducers import Mean

PART = Subrecording(Mean(), {"": Mean().update({}, torch.tensor(1.0))}, samples=1)


class Text(str):
    pass


class Named(str, enum.Enum):
    LOSS = "loss"


halves = st.sampled_from(["\ud800", "\udc00", "a\ud83d", "\ud83d\ude00", "\ud83d" + "\ude00", "\U0001f600", "\udfffx"])
texts = st.one_of(st.text(max_size=8), halves, st.sampled_from(["", "\0", "a\0b", "__metadata__", "\n", '"', "é", "é"]))
no_texts = st.one_of(st.binary(max_size=4), st.integers(), st.none(), st.booleans(), st.floats())
odd = st.one_of(texts, texts.map(Text), st.just(Named.LOSS), no_texts)
ticks = st.one_of(st.integers(), st.booleans(), st.floats(), st.none(), st.integers(-(2**70), 2**70), texts)
steps = st.one_of(st.none(), st.integers(-3, 2**65), st.booleans(), st.floats(), texts, st.integers(0, 9).map(numpy.int32))
numbers = st.one_of(
    st.floats(), st.integers(), st.booleans(), st.just(10**400), st.just("1"), st.floats().map(torch.tensor), st.none(), st.just(1j)
)
REFUSED = (RecorderError, TypeError, ValueError)


def same(a: Any, b: Any) -> bool:
    return a == b or (isinstance(a, float) and math.isnan(a) and math.isnan(b))


@settings(max_examples=150)
@given(notes=st.lists(st.tuples(odd, odd), max_size=3), rows=st.lists(st.tuples(ticks, odd, odd, numbers, steps, odd), max_size=3))
def test_a_timeline_reads_back_what_it_accepted(notes: Any, rows: Any) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path, noted, said = Path(folder, "run.db"), {}, {}
        with Timeline(path) as timeline:
            for key, text in notes:
                with contextlib.suppress(*REFUSED):
                    timeline.note(key, text)
                    noted[key] = text
            for tick, name, statistic, value, step, tensor in rows:
                with contextlib.suppress(*REFUSED):
                    timeline.append(tick, {name: {statistic: value}}, step, tensors={tensor: torch.tensor([1, 2])})
                    said[tick] = (name, statistic, float(value), step, tensor)
        with Timeline(path, read_only=True) as timeline:
            assert timeline.verify() == {}
            assert timeline.notes() == noted
            assert timeline.ticks() == sorted(said)
            assert timeline.steps() == {tick: row[3] for tick, row in said.items() if row[3] is not None}
            for tick, (name, statistic, value, _, tensor) in said.items():
                assert same(timeline.at(tick)[name][statistic], value)
                assert timeline.tensor(tensor, tick).tolist() == [1, 2]


@pytest.mark.parametrize(
    ("key", "text"), [(1, "x"), ("a", 1), (b"a", "x"), ("a", b"x"), (None, "x"), ("a", None), (True, "x"), ("a", 1.5)], ids=repr
)
def test_a_note_is_a_text(key: Any, text: Any, tmp_path: Path) -> None:
    with Timeline(tmp_path / "run.db") as timeline:
        timeline.note("a", "before")
        with pytest.raises(TypeError, match="are strings"):
            timeline.note(key, text)
        with pytest.raises(StorageError, match="surrogate"):
            timeline.note("half", "\ud800")
        assert timeline.notes() == {"a": "before"}
        assert timeline.verify() == {}


@pytest.mark.parametrize("step", [True, 1.0, "1", -1, 2**63, math.nan], ids=repr)
def test_a_step_is_a_count(step: Any, tmp_path: Path) -> None:
    with Timeline(tmp_path / "run.db") as timeline:
        with pytest.raises(TickError, match="a step is the number of optimizer steps"):
            timeline.append(0, {"loss": {"mean": 1.0}}, step)
        timeline.append(0, {"loss": {"mean": 1.0}}, numpy.int64(3))
        assert timeline.steps() == {0: 3}
        assert timeline.verify() == {}


@settings(max_examples=100)
@given(
    names=st.lists(odd, min_size=1, max_size=3), leaf=odd, alias=odd, step=st.one_of(st.none(), st.integers(), st.booleans(), texts)
)
def test_a_recording_reads_back_what_it_accepted(names: Any, leaf: Any, alias: Any, step: Any) -> None:
    part = Subrecording(Mean(), {leaf: PART.states[""]}, samples=1)
    recording = Recording(dict.fromkeys(names, part), {alias: names[0]}, step)
    with tempfile.TemporaryDirectory() as folder:
        try:
            recording.save(Path(folder, "run"))
        except REFUSED:
            return
        found = load(Path(folder, "run"))
        assert [*found] == list(dict.fromkeys(names))
        assert (dict(found.aliases), found.step) == ({alias: names[0]}, step)
        assert [*found[0].states] == [leaf]


def test_what_no_reader_would_take_is_no_manifest() -> None:
    head = Manifest("generation-" + "0" * 32, {})
    entry = {"monitor": "", "attr": None, "module": "", "samples": 0, "file": "0.safetensors", "bytes": 0, "sha256": "0" * 64}
    rest: Any = {**entry, "states": {}, "values": {}, "dtypes": {}}
    with pytest.raises(StorageError, match="too long"):
        encode(head, [Entry(name="x" * 2**20, reducer=None, **rest)])
    with pytest.raises(StorageError, match="reducers and further names"):
        encode(head, [Entry(name=str(n), reducer="r" * 2**20 + str(n), **rest) for n in range(17)])
    most = encode(head, [Entry(name="x" * (2**20 - 2), reducer=None, **rest)])
    assert list(decode(most, "here").lines) == ["x" * (2**20 - 2)]


@settings(max_examples=60)
@given(places=st.lists(odd, min_size=1, max_size=3))
def test_a_stream_reads_back_what_it_accepted(places: Any) -> None:
    with tempfile.TemporaryDirectory() as folder:
        accepted: dict[str, int] = {}
        with Stream(folder) as stream:
            for place in places:
                with contextlib.suppress(OperandError):
                    stream.put(place, torch.arange(3))
                    accepted[place] = accepted.get(place, 0) + 3
        assert not stream.failure
        for place, rows in accepted.items():
            assert len(StreamDataset(folder, place)) == rows
        with Stream(folder) as again:
            assert dict(again.rows) == accepted


def test_rows_of_more_axes_than_are_read_are_refused(tmp_path: Path) -> None:
    with Stream(tmp_path) as stream:
        with pytest.raises(OperandError, match="rows of 65 axes"):
            stream.put("x", torch.ones([2] + [1] * 65))
        stream.put("x", torch.ones([2] + [1] * 64))
    assert len(StreamDataset(tmp_path)) == 2
