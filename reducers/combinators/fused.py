"""Updates through `torch.compile`: one pass over an observation, whatever the reducer is made of."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
import torch._inductor.exc  # torch 2.8 does not import it by itself
from torch import Tensor

from reducers.combinators.wrapper import Wrapper
from reducers.core.reducer import Reducer
from reducers.core.states import to_device
from reducers.kernels.chunks import BIG
from reducers.state import State

__all__ = ["Fused"]

_RECOMPILES = 64  # shapes vary in one graph; numbers of axes, dtypes and memory layouts do not
_NO_COMPILER = (torch._dynamo.exc.BackendCompilerFailed, torch._inductor.exc.InductorError)
_broken: list[Exception] = []


@dataclass(frozen=True)
class Fused(Wrapper):
    """A reducer whose big observations are lifted by a compiled function; its states and results are the reducer's own.

    The first observation of a number of axes and dtype compiles, which takes seconds. Where there is nothing to compile with, such
    as a C++ compiler, there is one warning, and all updates go on without; where a reducer cannot be compiled, its own do.

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

    def _compiled(self, method: str, state: State, xs: tuple[Tensor, ...]) -> State | None:
        """The state after the observation; None where it is not for a compiler."""
        x = xs[0]
        if len(xs) != 1 or x.numel() < BIG or x.layout is not torch.strided or torch.compiler.is_compiling():
            return None
        lifted = _lift(self.reducer, method)(x.detach())
        return lifted and self.reducer.merge(to_device(state, x.device), lifted)


@lru_cache(maxsize=1024)
def _lift(reducer: Reducer, method: str) -> Callable[[Tensor], State | None]:
    def lift(x: Tensor) -> State:
        found: State = getattr(reducer, method)({}, x)
        return found

    lift.__code__ = lift.__code__.replace()  # a compiler keeps its graphs by code object, and only so many for each
    compiled: Any = torch.compile(lift, dynamic=True)

    unfit: list[Exception] = []

    def guarded(x: Tensor) -> State | None:
        if _broken or unfit:
            return None
        try:
            with torch._dynamo.config.patch(recompile_limit=_RECOMPILES):
                state: State = compiled(x)
        except _NO_COMPILER as error:
            _broken.append(error)
            _tell("updates are not fused", error)
            return None
        except torch._dynamo.exc.TorchDynamoException as error:  # of this reducer: without the compiler it says what is wrong
            unfit.append(error)
            _tell(f"{reducer!r} is not fused", error)
            return None
        return state

    return guarded


def _tell(what: str, error: Exception) -> None:
    warnings.warn(f"{what}: {type(error).__name__}: {str(error).splitlines()[0]}", RuntimeWarning, stacklevel=3)
