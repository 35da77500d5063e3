"""Hook: the callable that a monitor registers. It catches exceptions, can be traced into graphs, and is not copied with a model."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.compiler import is_dynamo_compiling

from recorders._torch import CAPTURES_IN_GRAPHS, outside_modes, warn_of_missing
from recorders._torch.compiler import never_trace, why_no_graphs
from recorders.capture import entering
from recorders.capture.entering import PASSED_ON, Fail, report_failure
from recorders.errors import RecordingWarning
from reducers._torch import constant_in_graphs, tell_dynamo
from reducers.errors import warn_user


class _Specs:
    """What is called while a graph is traced, as `trace(hook, sink, *args)`: functions as attributes, by key.

    If many hooks hold one object, the compiler compares what each of them holds with the first, in Python, in every call of the
    graph. By a key all of them find it in one place, which is looked at once.
    """


SPECS = _Specs()


class Hook:
    """A hook that is registered on a module. A copied or unpickled model has a no-op of the standard library in its place.

    The hook runs outside the user's modes. The only exceptions that leave it are those that the user asks for: a `MonitorError`, by
    `on_error="raise"`, and warnings, if the user has made errors of them.

    Args:
        run: is called outside of graphs.
        trace: is called while a graph is traced, with `sink` before the other arguments: a function; or a text, the key of
            one of `SPECS` and the name of this hook there. If it is None, nothing is called.
        sink: see `recorders.graphs.sinks.new_sink`.
        fail: is called with the exception of `run`, and the module; or names the hook, in a warning.

    Attributes:
        usual: the function that was given as `run`.
        run: the function that is called outside of graphs: `usual`, unless somebody wants to know of the next call.
        traced: whether a graph contains the hook, and guards that it is registered.
    """

    # Slots: the compiler guards the dictionary of an object three times over, for each hook.
    __slots__ = ("__weakref__", "fail", "run", "sink", "trace", "traced", "usual")

    def __init__(
        self,
        run: Callable[..., None],
        trace: Callable[..., None] | str | None = None,
        sink: Tensor | None = None,
        fail: Fail = "a hook",
    ) -> None:
        self.run = self.usual = run
        self.trace, self.sink, self.fail = trace, sink, fail
        self.traced = False

    def __call__(self, *args: Any) -> None:
        if is_dynamo_compiling():
            if self.trace is not None:
                if not self._mark_traced():
                    return
                try:
                    if isinstance(self.trace, str):
                        key, _, hook = self.trace.partition(" ")
                        getattr(SPECS, key)(hook, self.sink, *args)
                    else:
                        self.trace(self.sink, *args)
                except Exception:  # for example of a property that is read; it would end the user's compilation
                    if self.sink is not None:
                        torch.ops.torch_recorders.fail(self.sink)
            return
        try:
            watch = entering.timing
            if watch is None:
                outside_modes(self.run, *args)
            else:
                outside_modes(watch, self.fail, self.run, *args)
        except PASSED_ON:  # written out: a call of `guarded` would cost each observation
            raise
        except Exception as error:
            report_failure(self.fail, error, args[0] if args else None)

    @property
    def owner(self) -> Any:
        """The object whose method the hook calls, or which a partial function has for its first argument; None if there is none."""
        function, given = getattr(self.usual, "func", self.usual), getattr(self.usual, "args", (None,))
        return getattr(function, "__self__", given[0])

    @property
    def __name__(self) -> str:
        """What `torch.jit.script` asks for first: it compiles hooks, too, and this one it cannot."""
        raise AttributeError(
            "torch.jit.script cannot compile the hooks of a recorder: script the net before it is recorded, or call "
            "recorder.deregister() first and recorder.register() afterwards"
        )

    @constant_in_graphs
    def _mark_traced(self) -> bool:
        """Called while a graph is traced: sets `traced`; returns False if this torch cannot record in graphs."""
        tell_dynamo()
        warn_of_missing()
        if not CAPTURES_IN_GRAPHS:
            _warn_of_old_torch()
        self.traced = CAPTURES_IN_GRAPHS and not why_no_graphs()
        return self.traced

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickles and copies as a no-op: the `__exit__` of a `nullcontext` takes any arguments and returns None.

        A no-op class of this package could not be imported on a machine without the package, and the model would not load there.
        `test_a_pickled_model_loads_and_runs_if_this_package_is_not_installed` fails with such a class.
        """
        return getattr, (contextlib.nullcontext(), "__exit__")


@cache
def _warn_of_old_torch() -> None:
    """Warns once in a process."""
    warn_user(
        f"recording inside torch.compile needs torch 2.13 or later, and this is torch {torch.__version__}: monitors record nothing "
        "in compiled graphs; use a later torch, or run the network without torch.compile",
        RecordingWarning,
    )


# Outside a compiled graph (after a graph break, or on the outermost module) a hook runs as plain Python. Otherwise Dynamo would
# compile it by itself, again for every monitor, up to the recompile limit. Inside a graph it is traced all the same.
never_trace(Hook.__call__)
