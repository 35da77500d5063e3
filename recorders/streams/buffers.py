"""Buffers: memory for rows on their way from or to the disk, which is used again once nobody holds them."""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch import Tensor

from reducers.kernels.locks import new_lock

LEAST = 1 << 20
"""Smaller tensors are made by PyTorch, whose memory is used again soon enough."""


class Buffers:
    """Gives tensors of bytes. Fresh memory costs a page fault for each 4 KiB, longer than copying rows takes.

    A tensor made by `torch.frombuffer` refers to its buffer until the last view of it is gone. So a buffer to which only this
    object refers is free.

    Args:
        most: the bytes of the buffers that are kept, at most; a tensor that does not fit has memory of its own.

    >>> buffers = Buffers(most=1 << 28)
    >>> buffers.take(3).shape
    torch.Size([3])
    """

    def __init__(self, most: int) -> None:
        self.most, self._lock = most, new_lock()
        self._kept: list[bytearray] = []

    def take(self, size: int) -> Tensor:
        """So many bytes, with anything in them, in memory that nobody else has."""
        if not LEAST <= size <= self.most:
            return torch.empty(size, dtype=torch.uint8, device="cpu")
        with self._lock:
            counts = _references(self._kept)
            for buffer, count in zip(self._kept, counts, strict=True):
                if count == _FREE and size <= len(buffer) < 2 * size:
                    return torch.frombuffer(buffer, dtype=torch.uint8, count=size)
            if sum(map(len, self._kept)) + size > self.most:
                self._kept = [buffer for buffer, count in zip(self._kept, counts, strict=True) if count > _FREE]
            new = bytearray(size)
            if sum(map(len, self._kept)) + size <= self.most:
                self._kept.append(new)
            return torch.frombuffer(new, dtype=torch.uint8)

    def __reduce__(self) -> tuple[Any, ...]:
        return Buffers, (self.most,)


def _references(buffers: list[bytearray]) -> list[int]:
    return [sys.getrefcount(buffer) for buffer in buffers]


_FREE = _references([bytearray()])[0]
"""What `_references` counts of a buffer to which only the list refers; it differs between versions of Python."""
