"""CallCost: the seconds that PyTorch takes to call a hook, which the hook itself cannot time.

It is measured on modules made for this purpose, at the end of measured steps.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Mapping
from statistics import median
from time import perf_counter
from typing import Any

from torch import nn

from recorders._torch import has_global_hooks
from recorders.capture.hooks import Hook

__all__ = ["CallCost", "CallCounts"]


class CallCounts(defaultdict[str, "tuple[int, int]"]):
    """By name: how many hooks PyTorch called that were the first of their module, and how many others."""

    def __init__(self) -> None:
        super().__init__(lambda: (0, 0))

    def add(self, other: Mapping[str, tuple[int, int]]) -> None:
        """Adds the counts of `other`."""
        for name, (first, further) in other.items():
            mine = self[name]
            self[name] = mine[0] + first, mine[1] + further


class CallCost:
    """Seconds per call of a hook. The first hook of a module costs more, because PyTorch takes a shorter way without hooks."""

    def __init__(self) -> None:
        self._times: tuple[deque[float], ...] = tuple(deque(maxlen=32) for _ in range(3))
        self._turn = 0

    def measure(self) -> CallCost:
        """Times one call of a module with no hook, with one, or with two, in turn; returns itself.

        One call at a time: a second one would find its code in the caches, and take several times less than in a training. Nothing
        is measured while the user has global hooks, because these would get to know the modules.
        """
        if not has_global_hooks():
            self._turn = (self._turn + 1) % 3
            module = _modules()[self._turn]
            started = perf_counter()
            module(None)
            self._times[self._turn].append(perf_counter() - started)
        return self

    def cost(self, first: int, further: int) -> float:
        """Seconds for this many calls; 0 until each kind of module was measured."""
        if not all(self._times):
            return 0.0
        none, one, two = map(median, self._times)
        alone = max(0.0, one - none)
        return first * alone + further * min(alone, max(0.0, two - one))


def _modules() -> list[nn.Module]:
    """Modules with no hook, one hook, and two."""
    if not _modules_made:
        for hooks in range(3):
            _modules_made.append(nn.Identity())
            for _ in range(hooks):
                _modules_made[-1].register_forward_hook(Hook(_empty_hook), with_kwargs=True)
    return _modules_made


_modules_made: list[nn.Module] = []


def _empty_hook(*_: Any) -> None:
    """Does nothing."""
