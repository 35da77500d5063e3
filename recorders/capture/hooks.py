"""Hooks that run for a monitor: guarded at their entry, traced into graphs, and not kept by copies of a model."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.compiler import assume_constant_result, is_compiling

from recorders._torch import CAPTURES_IN_GRAPHS, outside_modes, run_uncompiled
from recorders.errors import MonitorError, RecordingWarning

__all__ = ["Hook"]


class Hook:
    """What is put into a module. A copied or unpickled model carries a no-op in its place, made of the standard library alone.

    It runs outside of the user's modes, and nothing that goes wrong in it reaches the user, but a `MonitorError`: that one is asked
    for by `on_error="raise"`.

    Args:
        run: what is called outside of graphs.
        trace: what is called while a graph is traced, with `receiver` before the other arguments; nothing if None.
        receiver: see `recorders.capture.compiled.new_receiver`.
        fail: told of what went wrong, and the module.

    Attributes:
        usual: what is called outside of graphs.
        run: that one, or for a while a timed version of it.
        traced: whether a graph knows it, and guards that it is there.
    """

    def __init__(
        self,
        run: Callable[..., None],
        trace: Callable[..., None] | None = None,
        receiver: Tensor | None = None,
        fail: Callable[[Exception, Any], None] | None = None,
    ) -> None:
        self.run = self.usual = run
        self.trace, self.receiver, self.fail = trace, receiver, fail
        self.traced = False

    def __call__(self, *args: Any) -> None:
        if is_compiling():
            if self.trace is not None:
                if not CAPTURES_IN_GRAPHS:
                    _warn_of_old_torch()
                    return
                self._mark_traced()
                try:
                    self.trace(self.receiver, *args)
                except Exception:  # of what an attribute or a walk calls; it would end the user's compilation
                    if self.receiver is not None:
                        torch.ops.torch_recorders.fail(self.receiver)
            return
        try:
            outside_modes(self.run, *args)
        except MonitorError:
            raise
        except Exception as error:
            if self.fail is not None:
                self.fail(error, args[0] if args else None)

    @assume_constant_result  # type: ignore[untyped-decorator]
    def _mark_traced(self) -> bool:
        """While a graph is traced."""
        self.traced = True
        return True

    def __reduce__(self) -> tuple[Any, ...]:
        return getattr, (contextlib.nullcontext(), "__exit__")


@assume_constant_result  # type: ignore[untyped-decorator]
def _warn_of_old_torch() -> bool:
    """Called while a graph is traced: warn once in a process."""
    return _warned()


@cache
def _warned() -> bool:
    warnings.warn(
        f"recording inside torch.compile needs torch 2.13 or later, and this is torch {torch.__version__}: monitors record nothing "
        "in compiled graphs; use a later torch, or run the network without torch.compile",
        RecordingWarning,
        stacklevel=2,
    )
    return True


# A hook that is reached outside a compiled graph (after a graph break, or on the outermost module) runs as it is; compiled by
# itself, it would be compiled anew for every monitor, up to the limit. Inside a graph it is traced all the same.
run_uncompiled(Hook.__call__.__code__)
