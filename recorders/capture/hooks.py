"""How monitors are made and hung into modules: recipes, spelled-out signatures, and hooks that copies of a model do not keep."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn
from torch._C._dynamo.eval_frame import _FrameAction, _FrameExecStrategy, set_code_exec_strategy
from torch.compiler import assume_constant_result, is_compiling

from recorders.capture.context import outside_modes
from recorders.errors import MonitorError
from reducers import Reducer

if TYPE_CHECKING:
    from recorders.monitors.base import Monitor

__all__ = ["Hook", "MonitorConstructor", "spelled_out"]


@dataclass(frozen=True)
class MonitorConstructor:
    """A frozen, picklable recipe: `constructor(attr, module)` makes a Monitor. Returned by `partialconstructor`."""

    kind: type[Monitor]
    reducer: Reducer
    options: tuple[tuple[str, Any], ...] = ()

    def __call__(self, attr: Any = None, module: nn.Module | None = None) -> Monitor:
        target = {} if attr is None else {"attr": attr}
        return self.kind(self.reducer, module=module, **target, **dict(self.options))


class Hook:
    """What is put into a module. A copied or unpickled model carries a no-op in its place, made of the standard library alone.

    It runs outside of the user's modes, and nothing that goes wrong in it reaches the user, but a `MonitorError`: that one is asked
    for by `on_error="raise"`.

    Args:
        run: what is called outside of graphs.
        trace: what is called while a graph is traced, with `receiver` before the other arguments; nothing if None.
        receiver: see `recorders.compiled`.
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
                self._mark_traced()
                self.trace(self.receiver, *args)
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


# A hook that is reached outside a compiled graph (after a graph break, or on the outermost module) runs as it is; compiled by
# itself, it would be compiled anew for every monitor, up to the limit. Inside a graph it is traced all the same.
set_code_exec_strategy(Hook.__call__.__code__, _FrameExecStrategy(_FrameAction.SKIP, _FrameAction.SKIP))


def spelled_out(cls: type, root: type) -> inspect.Signature:
    """The signature of `cls` with the arguments that `**options` passes up to `root`, so that help shows them."""
    found: dict[str, inspect.Parameter] = {}
    for owner in cls.__mro__:
        if "__init__" in owner.__dict__ and issubclass(owner, root):
            for name, parameter in inspect.signature(owner.__dict__["__init__"]).parameters.items():
                if name != "self" and parameter.kind is not inspect.Parameter.VAR_KEYWORD:
                    found.setdefault(name, parameter)
    return inspect.Signature(sorted(found.values(), key=lambda parameter: parameter.kind))
