"""Checks of what was loaded: the axes of every tensor, and whether states can come from their reducers."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from recorders.errors import CorruptRecordingError
from recorders.recordings.recording import Subrecording
from reducers import Reducer, ReducerError
from reducers.core.checks import MAX_RANK

__all__ = ["Checked"]


class Checked:
    """What was checked so far: thousands of subrecorders share a few reducers and layouts, and each pair is checked once."""

    def __init__(self) -> None:
        self._sound: set[tuple[int, tuple[tuple[str, torch.Size, torch.dtype], ...]]] = set()
        self._reducers: list[Reducer] = []  # keeps them alive, and so their ids unique

    def require(self, where: str, part: Subrecording, tensors: Mapping[str, Tensor] | None = None) -> None:
        """Raises `CorruptRecordingError` if a tensor has more than 64 axes, or a state cannot be one of the reducer.

        Args:
            where: file and subrecorder, for errors.
            tensors: all tensors of the file, by name.
        """
        for name, tensor in (tensors or {}).items():
            if tensor.ndim > MAX_RANK:
                raise CorruptRecordingError(f"{where} is malformed: {name!r:.100} has {tensor.ndim} axes, more than {MAX_RANK}")
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
