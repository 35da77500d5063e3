"""The published design of torchtitan's tensor logging (pull request 4202), rebuilt to be measured beside ours and for nothing else.

One launch an observation writes five statistics about zero into slots that were allocated before, by float32 atomics; a flag on the
device turns steps off without a new graph. So sums depend on the order of the atomics and lose digits if the mean is far from zero,
NaN and infinities go into all of them, and memory must be contiguous.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor, nn

__all__ = ["STATISTICS", "Slots"]

STATISTICS = ("min", "max", "sum", "squares", "count")
_BLOCK = 4096
_PROGRAMS = 1024  # several for each processor of any GPU


@triton.jit
def _observe(x, slot, due, size, blocks, BLOCK: tl.constexpr):
    """Add the elements of `x` to the five numbers of a slot, unless `due` is 0."""
    if tl.load(due) == 0:
        return
    place = tl.arange(0, BLOCK)
    low = tl.full([BLOCK], float("inf"), tl.float32)
    high = tl.full([BLOCK], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK], tl.float32)
    squares = tl.zeros([BLOCK], tl.float32)
    start = tl.program_id(0).to(tl.int64) * blocks * BLOCK
    for block in range(blocks):
        at = start + block * BLOCK + place
        there = at < size
        value = tl.load(x + at, mask=there, other=0).to(tl.float32)
        low = tl.minimum(low, tl.where(there, value, float("inf")))
        high = tl.maximum(high, tl.where(there, value, float("-inf")))
        total += value
        squares += value * value
    count = tl.minimum(tl.maximum(size - start, 0), blocks * BLOCK)
    tl.atomic_min(slot, tl.min(low, 0), sem="relaxed")
    tl.atomic_max(slot + 1, tl.max(high, 0), sem="relaxed")
    tl.atomic_add(slot + 2, tl.sum(total, 0), sem="relaxed")
    tl.atomic_add(slot + 3, tl.sum(squares, 0), sem="relaxed")
    tl.atomic_add(slot + 4, count.to(tl.float32), sem="relaxed")


class Slots:
    """Slots for the statistics of so many places of a network.

    Attributes:
        due: an int32 on the device; if it is 0, an observation is neither read nor written.
    """

    def __init__(self, places: int, device: torch.device) -> None:
        self.due = torch.ones((), dtype=torch.int32, device=device)
        self._slots = torch.tensor([torch.inf, -torch.inf, 0.0, 0.0, 0.0], device=device).repeat(places, 1)

    def observe(self, x: Tensor, place: int) -> None:
        """Add a tensor, which must be contiguous, to the slot of a place."""
        size = x.numel()
        blocks = -(-size // _BLOCK)
        programs = min(blocks, _PROGRAMS)
        _observe[(programs,)](x.detach(), self._slots[place], self.due, size, -(-blocks // programs), BLOCK=_BLOCK, num_warps=8)

    def watch(self, module: nn.Module, place: int) -> None:
        """Observe every output of a module."""

        def hook(module: nn.Module, inputs: object, output: Tensor) -> None:
            self.observe(output, place)

        module.register_forward_hook(hook)

    def read(self, place: int) -> dict[str, Tensor]:
        """The statistics of a place by their names."""
        return dict(zip(STATISTICS, self._slots[place].unbind(), strict=True))
