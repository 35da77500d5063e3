"""Recordings that this version wrote load, say what they said then, and go on, in every later version that reads schema 1.

`fixtures/recording` and `fixtures/recording-packed`, in both layouts, were saved in the middle of a run (`every=2`), with states of
reducers. `fixtures/recording-ranks` has what those hold, by ranks 0 (a few names, in files of their own) and 3 (packed).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from forged import facts
from torch import Tensor

from recorders import CallMonitor, Recorder, Recording, load, verify
from reducers import from_recipe, to_recipe

FIXTURES = Path(__file__).parent / "fixtures"
NAMES = ("recording", "recording-packed")
RANKS = "recording-ranks"
PARTS = [*((name, None) for name in NAMES), (RANKS, 0), (RANKS, 3)]


@pytest.fixture(scope="module", params=PARTS, ids=str)
def golden(request: pytest.FixtureRequest) -> Recording:
    name, rank = request.param
    assert verify(FIXTURES / name) == {}
    return load(FIXTURES / name, ranks=rank)


def test_what_ranks_saved_is_merged() -> None:
    """Rank 0 is in files of its own; and what both saved is the same, so it counts twice."""
    merged, first, last = load(FIXTURES / RANKS), load(FIXTURES / RANKS, ranks=0), load(FIXTURES / RANKS, ranks=3)
    assert list(merged) == list(dict.fromkeys([*first, *last]))
    assert len(first) == 8
    assert len(last) == len(merged) - 1
    for name, part in merged.items():
        assert part.samples == (first[name].samples if name in first else 0) + (last[name].samples if name in last else 0)
    name = list(first)[1]
    assert facts(Recording({name: merged[name]})) == facts(Recording({name: first[name].merge(last[name])}))


def test_every_subrecording_has_its_reducer_and_merges(golden: Recording) -> None:
    assert len(golden) >= 8
    for name, part in golden.items():
        assert part.reducer is not None, name
        assert from_recipe(to_recipe(part.reducer)) == part.reducer
        assert part.merge(part).samples == 2 * part.samples > 0


def flat(result: Any, name: str = "value") -> Iterator[tuple[str, Tensor]]:
    if isinstance(result, Mapping):
        for key, item in result.items():
            yield from flat(item, f"{name}/{key}")
    else:
        yield name, result


def test_every_state_computes_what_it_computed_then(golden: Recording) -> None:
    for name, part in golden.items():
        assert part.saved_results, name
        written, computed = dict(flat(part.saved_results)), dict(flat(part.leaves()))
        assert computed.keys() == written.keys()
        for key, tensor in written.items():
            torch.testing.assert_close(computed[key], tensor, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize(("name", "rank"), [part for part in PARTS if part[1] != 0])
def test_a_saved_run_is_resumed(name: str, rank: int | None) -> None:
    saved = load(FIXTURES / name, ranks=rank)
    recorder = Recorder(**{key: CallMonitor(part.reducer, every=2) for key, part in saved.items() if key.startswith("case")})
    recorder.resume(Recording({key: saved[key] for key in recorder}, step=saved.step))
    assert recorder.clock.step == 5
    assert set(recorder.samples.values()) == {3}
    # Five calls were made, so the next one is not due.
    for key in recorder:
        recorder.push(key, torch.ones(6, 3))
    assert set(recorder.samples.values()) == {3}
