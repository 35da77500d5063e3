"""What happens to recorders is drawn by chance: in every life they record what plain PyTorch shows."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from lives import Life

from recorders.monitors.buffer import Buffer
from recorders.monitors.gate import Gate
from recorders.ring.ring import Copies


@pytest.mark.parametrize("seed", [*range(24), *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(24, 120))])
def test_lives(seed: int) -> None:
    Life(seed).live()


@pytest.mark.parametrize("seed", [0, 1, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(2, 12))])
def test_compiled_lives(seed: int) -> None:
    Life(seed, compiled=True).live()


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
