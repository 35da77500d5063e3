"""PairMonitor: the outputs of two modules, for statistics of how they are related."""

from __future__ import annotations

import asyncio
import threading
import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

from torch import Tensor, nn

from recorders.capture.layouts import PlacementInfo
from recorders.capture.operands import leaves, mapped, plain_or_spread, why_no_numbers
from recorders.errors import OperandError, RecordingWarning, TargetError
from recorders.monitors.base import Monitor
from recorders.monitors.constructor import MonitorConstructor
from recorders.monitors.options import MonitorOptions
from recorders.monitors.record import check_numbers
from recorders.monitors.sites import copied
from reducers import Reducer
from reducers.errors import warn_user

if TYPE_CHECKING:
    from typing_extensions import Self, Unpack


class PairOptions(MonitorOptions, total=False):
    """The options of `PairMonitor`."""

    other: nn.Module | None


class PairMonitor(Monitor):
    """Records what two modules return for the same input. Operands: output, output of the other module.

    The reducer gets both, as `CKA`, `CrossCovariance` and others that take two tensors need them. The output that comes first is
    cloned and kept until the other one comes, unless it is known by then that the pair will not be recorded. Run both modules on a
    batch before the next: if one is called again before the other was, its older output is left out, with a warning. So is,
    without one, what waits when the monitor is reset, taken off, or not due. Each thread, and each task of asyncio, has its own
    pairs.

    Args:
        other: the other module, of the same network or of another. It is referenced weakly.

    >>> import torch
    >>> from reducers import CKA
    >>> wide, narrow = torch.nn.Linear(4, 8), torch.nn.Linear(4, 3)
    >>> monitor = PairMonitor(CKA(), narrow, wide)
    >>> for batch in torch.randn(5, 16, 4).unbind():
    ...     _ = wide(batch), narrow(batch)
    >>> monitor.samples, 0 < monitor.peek()["cka"] < 1
    (5, tensor(True))
    """

    sites = ("forwards_of_two",)

    def __init__(
        self, reducer: Reducer, other: nn.Module | None = None, module: nn.Module | None = None, **options: Unpack[MonitorOptions]
    ) -> None:
        if other is not None and not isinstance(other, nn.Module):
            raise TargetError(
                f"PairMonitor needs a torch.nn.Module as the other module; got {type(other).__name__}: {other!r:.100}"
            )
        self._other = None if other is None else weakref.ref(other)
        self._waiting = WeakKeyDictionary[object, tuple[str, Any]]()  # by the thread or task that called
        super().__init__(reducer, module, **options)

    @property
    def other(self) -> nn.Module | None:
        """The other module; None if there was none, or it no longer exists."""
        return None if self._other is None else self._other()

    if TYPE_CHECKING:  # the same function, with types for the options of this kind

        @classmethod
        def partialconstructor(cls, reducer: Reducer, **options: Unpack[PairOptions]) -> MonitorConstructor[Self]: ...

    def other_module(self, module: nn.Module) -> nn.Module:
        """The other module; raises `TargetError` if there is none."""
        self._waiting.clear()
        if (other := self.other) is None:
            raise TargetError(f"{self.describe(module)}: there is no other module, or it is gone; give PairMonitor(reducer, other)")
        return other

    def _receive_call(self, operands: Callable[[], Any], stream: str, info: PlacementInfo | None = None) -> None:
        self.compiled = True
        if info is not None and (info.place is not None or info.fault):
            self._fail(OperandError("in a compiled graph only plain tensors are paired, and this is a DTensor"), self.module)
            return
        self._come(stream, lambda: operands()[0], lambda: operands()[0])

    def _arrive(self, side: str, *args: Any) -> None:
        self._come(side, lambda: args[-1], lambda: mapped(args[-1], copied))

    def _come(self, side: str, output: Callable[[], Any], copied: Callable[[], Any]) -> None:
        module = self.module
        if module is None:  # it no longer exists, and the other one does
            self.deregister()
            return
        if not self.gate.on or not self._passes(module, ask=False):
            return
        caller = _caller()
        waiting = self._waiting.pop(caller, None)
        if waiting is None or waiting[0] == side:
            if waiting is not None:
                self._warn_of_order(module)
            kept = copied() if self.gate.foresees(self._training(module)) else _NOT_KEPT
            without_numbers = not self.dry_run and why_no_numbers([tensor for _, tensor in leaves(kept)])
            self._waiting[caller] = side, _NOT_KEPT if without_numbers else kept
        elif self._due(module, self._training(module)):
            if waiting[1] is _NOT_KEPT:
                self._skip("not recorded when its partner was called")
            else:
                self._record(module, *((output(), waiting[1]) if side == "mine" else (waiting[1], output())))

    def _warn_of_order(self, module: nn.Module) -> None:
        """Counts an output without partner; warns of the first: later ones may get partners that do not belong to them."""
        if _AGAIN not in self.counts:
            warn_user(
                f"{self.describe(module)}: one of its two modules was called again before the other was; the older output is left "
                "out, and which outputs belong together is not known: run both modules on one batch before the next",
                RecordingWarning,
            )
        self._skip(_AGAIN)

    def deregister(self) -> Monitor:
        self._waiting.clear()
        return super().deregister()

    def reset(self, keepshape: bool = False) -> None:
        self._waiting.clear()
        super().reset(keepshape)

    clear = reset

    def switch(self, active: bool, error: Exception | None) -> None:
        self._waiting.clear()  # what waits in steps that are not due would get a partner of another step
        super().switch(active, error)

    def _inputs(self, operands: tuple[Any, ...]) -> dict[str, tuple[Tensor, ...]]:
        if self.map_ is not None or self.op_ is not None:
            return super()._inputs(operands)
        if not all(isinstance(operand, Tensor) for operand in operands):
            kinds = [type(operand).__name__ for operand in operands]
            raise OperandError(f"the two modules returned {kinds}; pick a tensor of each with map_=lambda mine, other: (..., ...)")
        if not self.dry_run:
            check_numbers(operands)
        return {"": tuple(plain_or_spread(operand) for operand in operands)}

    def __reduce__(self) -> tuple[Any, ...]:
        rebuild, (constructor, *rest) = super().__reduce__()
        options = tuple(
            (name, value) for name, value in constructor.options if name != "other"
        )  # otherwise copies would contain the module
        return rebuild, (type(constructor)(constructor.kind, constructor.reducer, options), *rest)


def _caller() -> object:
    """The task of asyncio that runs now; if there is none, the thread."""
    try:
        return asyncio.current_task() or threading.current_thread()
    except RuntimeError:  # no loop runs in this thread
        return threading.current_thread()


_AGAIN = "called again before its partner was"
_NOT_KEPT = object()  # waits in place of an output
