"""What happens to recorders, ranks, timelines and streams is drawn by chance, beside plain Python that keeps the same."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from lives import Life, some
from lives_ranks import live_on
from lives_stream import StreamLife
from lives_timeline import TimelineLife
from world import Place, Raised, World, alike

from recorders.monitors.buffer import Buffer
from recorders.monitors.gate import Gate
from recorders.ring.ring import Copies
from recorders.streams.files import StreamFiles
from recorders.streams.order import Shuffle
from recorders.watch.timeline.store import Store


@pytest.mark.parametrize("seed", some(24, 120))
def test_lives(seed: int) -> None:
    Life(seed).live()


@pytest.mark.parametrize("seed", some(2, 12))
def test_compiled_lives(seed: int) -> None:
    Life(seed, compiled=True).live()


@pytest.mark.parametrize("seed", some(8, 60))
def test_lives_of_timelines(seed: int, tmp_path: Path) -> None:
    TimelineLife(tmp_path, seed).live()


@pytest.mark.parametrize("seed", some(5, 30))
def test_lives_of_streams(seed: int, tmp_path: Path) -> None:
    StreamLife(tmp_path, seed).live()


@pytest.mark.skipif(not dist.is_available(), reason="torch.distributed is not built")
@pytest.mark.parametrize("seed", some(4, 40))
def test_lives_on_ranks(seed: int, four: World) -> None:
    """From four ranks on states are added up by the collective; of fewer they are gathered."""
    alike(four.run(live_on, seed, ranks=(0, 1, 2, 3) if seed % 2 else (0, 1)))


def _live_without_forgetting(place: Place, seed: int) -> list[str]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Buffer, "clear", _forgets_nothing(Buffer.clear))
        return live_on(place, seed)


@pytest.mark.skipif(not dist.is_available(), reason="torch.distributed is not built")
def test_planted_mistakes_on_ranks_are_found(four: World) -> None:
    found = [answer for seed in range(4) for answer in four.run(_live_without_forgetting, seed)]
    assert any(isinstance(answer, Raised) and "in the life of" in answer.text for answer in found)


@pytest.mark.long
@pytest.mark.parametrize("of", [StreamLife, TimelineLife])
def test_many_lives_of_files(of: Any, tmp_path: Path) -> None:
    for seed in range(1000, 1400):
        of(tmp_path, seed).live()


@pytest.mark.long
@pytest.mark.parametrize("compiled", [False, True])
def test_many_lives(compiled: bool) -> None:
    for seed in range(1000, 1300 if compiled else 3000):
        Life(seed, compiled).live()


def _loses_a_row(join: Callable[..., Any]) -> Callable[..., Any]:
    return lambda self, memory, reducer, states, start, stop: join(self, memory, reducer, states, start + (stop > start + 1), stop)


def _mixes_streams(refusal: Callable[..., Any]) -> Callable[..., Any]:
    return lambda self, training, stream="": refusal(self, training, "")


def _forgets_nothing(clear: Callable[..., Any]) -> Callable[..., Any]:
    return lambda self, keepshape=False: None


PLANTED = [(Copies, "join", _loses_a_row), (Gate, "refusal", _mixes_streams), (Buffer, "clear", _forgets_nothing)]


@pytest.mark.parametrize(("of", "name", "wrong"), PLANTED, ids=lambda value: getattr(value, "__name__", value))
def test_planted_mistakes_are_found(of: Any, name: str, wrong: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(of, name, wrong(getattr(of, name)))
    with pytest.raises(AssertionError, match="in the life of"):
        for seed in range(120):
            Life(seed).live()


def _keeps_the_last(remove: Callable[..., Any]) -> Callable[..., Any]:
    return lambda self, db, ticks: remove(self, db, set(sorted(ticks)[:-1]))


def _sees_nothing_new(refresh: Callable[..., Any]) -> Callable[..., Any]:
    return lambda self: None


def _draws_the_last_row_never(draw: Callable[..., Any]) -> Callable[..., Any]:
    return lambda self, positions, number: draw(self, positions, number).clamp(max=max(number - 2, 0))


FILES = [
    (Store, "remove_ticks", _keeps_the_last, TimelineLife),
    (StreamFiles, "refresh", _sees_nothing_new, StreamLife),
    (Shuffle, "__call__", _draws_the_last_row_never, StreamLife),
]


@pytest.mark.parametrize(("of", "name", "wrong", "lives"), FILES, ids=lambda value: getattr(value, "__name__", value))
def test_planted_mistakes_in_files_are_found(
    of: Any, name: str, wrong: Callable[..., Any], lives: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(of, name, wrong(getattr(of, name)))
    with pytest.raises(AssertionError, match="in the life of"):
        for seed in range(60):
            lives(tmp_path, seed).live()
