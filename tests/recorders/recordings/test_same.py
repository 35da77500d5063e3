"""Recordings equal themselves only, `in` reads no file, and what is remembered of a save keeps no tensor alive."""

from __future__ import annotations

import gc
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch

from recorders import CorruptRecordingError, Recording, Subrecording, load, merge, save
from recorders.recordings import unchanged
from reducers import Mean


def recording(value: float = 1.0) -> Recording:
    state = Mean().update({}, torch.tensor([value, 2.0]))
    return Recording({"": Subrecording(Mean(), {"": state}, 1), "loss": Subrecording(Mean(), {"": state}, 1)}, {"also": "loss"})


def test_recordings_and_their_parts_equal_themselves_only(tmp_path: Path) -> None:
    first, second = recording(), recording()
    assert first == first
    assert first != second
    assert (first == {}, first == 3, first["loss"] == second["loss"]) == (False, False, False)
    assert len({first, second, first["loss"], second["loss"]}) == 4
    loaded = load(save(first, tmp_path / "run"))
    assert loaded != first
    assert loaded.to_json() == first.to_json()  # a way to compare


def test_in_reads_no_file(tmp_path: Path) -> None:
    paths = [save(recording(), tmp_path / name) for name in "ab"]
    merged = merge(paths)
    for path in tmp_path.rglob("*.safetensors"):
        path.write_bytes(b"damaged")
    for name in ("", "loss", "also", "(net)", 0, -1):
        assert name in merged
    for name in ("other", 2, -3, None, 1.5):
        assert name not in merged
    with pytest.raises(CorruptRecordingError):
        merged["loss"]


class Big:
    """What a function holds."""


def test_what_is_remembered_of_a_save_keeps_nothing_alive(tmp_path: Path) -> None:
    big = Big()

    def function(result: Any, samples: int, big: Big = big) -> Any:
        return result

    values = {"": {"mean": torch.tensor(3.0)}}
    state = Mean().update({}, torch.tensor(1.0))
    parts = {
        "with": Subrecording(Mean(), {"": state}, 1, functions=(function,)),
        "loaded": Subrecording(None, {"": dict(state)}, 1, values=values),
    }
    save(Recording(parts), tmp_path / "run")
    files = {path.name: path.stat().st_ino for path in tmp_path.rglob("*.safetensors")}
    save(Recording(parts, step=1), tmp_path / "run")
    assert {path.name: path.stat().st_ino for path in tmp_path.rglob("*.safetensors")} == files  # both were taken over
    held = [weakref.ref(values[""]["mean"]), weakref.ref(big), *map(weakref.ref, state.values())]
    assert len(unchanged._saves[str(tmp_path / "run")].parts) == 2
    del parts, values, state, function, big
    gc.collect()
    assert [ref() for ref in held] == [None] * len(held)


def test_a_loaded_result_that_was_replaced_is_saved_anew(tmp_path: Path) -> None:
    def made(values: Any) -> Recording:
        return Recording({"x": Subrecording(None, {}, 1, values=values)})

    first, second = {"": torch.tensor(1.0)}, {"": torch.tensor(2.0)}
    for values in (first, second, {"": {"mean": second[""]}}, {}):
        save(made(values), tmp_path / "run")
        assert load(tmp_path / "run")["x"].values == values
