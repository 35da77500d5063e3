"""Recordings equal themselves only, `in` reads no file, and a save holds the results that are there now."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from recorders import CorruptRecordingError, Recording, Subrecording, load, merge, save
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


def test_a_loaded_result_that_was_replaced_is_saved_anew(tmp_path: Path) -> None:
    def made(values: Any) -> Recording:
        return Recording({"x": Subrecording(None, {}, 1, saved_results=values)})

    first, second = {"": torch.tensor(1.0)}, {"": torch.tensor(2.0)}
    for values in (first, second, {"": {"mean": second[""]}}, {}):
        save(made(values), tmp_path / "run")
        assert load(tmp_path / "run")["x"].saved_results == values
