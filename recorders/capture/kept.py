"""Kept: what parameters were before the step of an optimizer that is under way."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

__all__ = ["Kept", "fits"]


class Kept:
    """What the parameters of a monitor were before a step: copies in memory that each step overwrites, or in memory of their own.

    Attributes:
        copies: those of the step under way, by path.
        memory: that of all steps, by path.
    """

    def __init__(self) -> None:
        self.copies: dict[str, Tensor] = {}
        self.memory: dict[str, Tensor] = {}

    def memory_for(self, path: str, x: Tensor) -> Tensor:
        """Returns memory for a copy of this parameter."""
        found = self.memory.get(path)
        if found is None or not fits(found, x):
            found = self.memory[path] = torch.empty_like(x.detach())
        return found

    def leave_out(self, paths: Iterable[str]) -> None:
        """Keeps nothing of these in this step, and frees all memory."""
        for path in paths:
            self.copies.pop(path, None)  # left by a step that was interrupted
        self.memory = {}


def fits(copy: Tensor, x: Tensor) -> bool:
    """Whether a copy has the shape, the dtype and the device of a parameter."""
    return copy.shape == x.shape and copy.dtype is x.dtype and copy.device == x.device
