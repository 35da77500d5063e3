"""Fused: compiles updates by `torch.compile`, so that a reducer of several parts reads an observation once."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from reducers._torch import compiled_apart, failed_to_compile, has_no_compiler
from reducers.combinators.wrapper import Wrapper
from reducers.core.reducer import Reducer
from reducers.core.states import to_device
from reducers.errors import warn_user
from reducers.kernels.chunks import BIG
from reducers.state import State

__all__ = ["Fused"]

_RECOMPILES = 64  # one graph handles all shapes, but only one number of axes, dtype and memory layout
_compiler_errors: list[Exception] = []


@dataclass(frozen=True)
class Fused(Wrapper):
    """A reducer that lifts big observations by a compiled function; states and results are the same as without.

    The first observation of each rank and dtype is compiled, which takes seconds. If no compiler is available, such as a C++
    compiler, there is one warning, and all reducers stay eager; if one reducer cannot be compiled, only that one stays eager.

    >>> import torch
    >>> from reducers import Mean
    >>> fused = Fused(Mean())
    >>> fused.compute(fused.update({}, torch.tensor([1.0, 3.0])))
    tensor(2., dtype=torch.float64)
    """

    def update(self, state: State, *xs: Tensor) -> State:
        return self._compiled("update", state, xs) or self.reducer.update(state, *xs)

    def update_all(self, state: State, xs: Tensor) -> State:
        return self._compiled("update_all", state, (xs,)) or self.reducer.update_all(state, xs)

    def update_masked(self, state: State, x: Tensor, mask: Tensor) -> State:
        return self.reducer.update_masked(state, x, mask)

    def _compiled(self, method: str, state: State, xs: tuple[Tensor, ...]) -> State | None:
        """Return the new state; None if the observation is not suitable for the compiled function."""
        x = xs[0]
        if len(xs) != 1 or x.numel() < BIG or x.layout is not torch.strided or torch.compiler.is_compiling() or not self.liftable:
            return None
        lifted = _lift(self.reducer, method)(x.detach())
        return lifted and self.reducer.merge(to_device(state, x.device), lifted)


@lru_cache(maxsize=1024)
def _lift(reducer: Reducer, method: str) -> Callable[[Tensor], State | None]:
    def lift(x: Tensor) -> State:
        state: State = getattr(reducer, method)({}, x)
        return state

    compiled = compiled_apart(lift, _RECOMPILES)
    errors: list[Exception] = []

    def guarded(x: Tensor) -> State | None:
        if _compiler_errors or errors:
            return None
        try:
            state: State = compiled(x)
        except Exception as error:  # the eager update raises the reducer's own error, if any
            if not failed_to_compile(error):
                raise
            nowhere = has_no_compiler(error)
            (_compiler_errors if nowhere else errors).append(error)
            _warn("updates are not fused" if nowhere else f"{reducer!r} is not fused", error)
            return None
        return state

    return guarded


def _warn(what: str, error: Exception) -> None:
    warn_user(f"{what}: {type(error).__name__}: {str(error).splitlines()[0]}", RuntimeWarning)
