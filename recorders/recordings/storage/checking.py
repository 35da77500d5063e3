"""Checks of states that were loaded: whether they can come from their reducers."""

from __future__ import annotations

import torch

from recorders.errors import CorruptRecordingError
from recorders.recordings.recording import Subrecording
from reducers import Reducer, ReducerError

__all__ = ["Checked"]


class Checked:
    """What was checked so far: thousands of subrecorders share a few reducers and layouts, and each pair is checked once."""

    def __init__(self) -> None:
        self._sound: set[tuple[int, tuple[tuple[str, torch.Size, torch.dtype], ...]]] = set()
        self._reducers: list[Reducer] = []  # keeps them alive, and so their ids unique

    def require(self, where: str, part: Subrecording) -> None:
        """Raises `CorruptRecordingError` if a state cannot be one of the reducer; `where` says what was loaded."""
        if part.reducer is None:
            return
        for leaf, state in part.states.items():
            layout = id(part.reducer), tuple((key, tensor.shape, tensor.dtype) for key, tensor in state.items())
            if layout not in self._sound:
                try:
                    part.reducer.check(state)
                except ReducerError as error:
                    raise CorruptRecordingError(f"{where} is malformed: the state of leaf {leaf!r:.100}: {error}") from error
                self._sound.add(layout)
                self._reducers.append(part.reducer)
