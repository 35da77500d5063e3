"""The context of a batch: what the user gives to monitors beside what they capture, such as ids, labels or a token mask.

It is a context variable, so each thread and each task of asyncio has its own. A gradient comes later, and often in another thread.
So what it needs is kept at the forward, in the hook for the gradient; compiled graphs keep a number by which it is found.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from typing import Any, NamedTuple
from weakref import WeakValueDictionary

import torch
from torch import Tensor

from recorders._torch import graph_task
from recorders.capture.operands import as_operand, change_count, plain
from recorders.errors import RecordingWarning
from reducers.errors import warn_user


class Given(NamedTuple):
    """A value; if it is kept for a gradient, with its version at the forward."""

    value: Tensor
    version: int | None = None

    @property
    def changed(self) -> bool:
        """Whether it was changed in place since it was kept."""
        return self.version is not None and self.version != change_count(self.value)


class BatchContext:
    """The context of one recorder, which its monitors share.

    Args:
        monitors: a weak reference to all of them, by name.

    Attributes:
        told: by mistake, a weak reference to the monitor that warned of it.
        asked: the names of values of which it was asked whether a monitor takes them.
    """

    def __init__(self, monitors: Callable[[], Mapping[str, Any] | None] = lambda: None) -> None:
        self.monitors = monitors
        self.told: dict[object, Callable[[], Any]] = {}
        self.asked: set[str] = set()

    def __reduce__(self) -> tuple[Any, ...]:
        return BatchContext, ()

    def warn_of_untaken(self, names: Collection[str], monitors: Sequence[Any]) -> None:
        """Warns once of each name that none of `monitors` takes. If one of them misses a name, that is told instead."""
        if new := set(names) - self.asked:
            self.asked.update(new)
            taken = {name for monitor in monitors for name in monitor.given}
            for name in sorted(new - taken) if taken <= set(names) else ():
                warn_user(
                    f"recorder.given({name}=...): no monitor of this recorder takes {name!r}, so it has no effect; name it in the "
                    f"monitor, as in ForwardMonitor(reducer, given={name!r})",
                    RecordingWarning,
                )

    @contextmanager
    def give(self, values: Mapping[str, Any]) -> Iterator[None]:
        """Gives `values` to the monitors of this context until the block ends, besides those of the blocks around it.

        Raises:
            TypeError: a value is no tensor, array, number or list of numbers.
        """
        new = {name: Given(_as_tensor(name, value)) for name, value in values.items()}
        outer = _current.get().given
        token = _current.set(Block({**outer, self: {**outer.get(self, {}), **new}}))
        try:
            yield
        finally:
            with suppress(ValueError):  # the block ends in another context than it began, as in an asynchronous generator
                _current.reset(token)


class Block:
    """What is given at a time, by context and name.

    Attributes:
        given: the values.
        fault: why they cannot be told; "" if they can.
        used: whether a gradient has come since they were kept.
    """

    __slots__ = ("__weakref__", "_source", "fault", "given", "used")

    def __init__(self, given: Mapping[BatchContext, Mapping[str, Given]], fault: str = "", source: Block | None = None) -> None:
        self.given, self.fault, self.used, self._source = given, fault, False, source

    def followed_by(self, later: Block) -> Block:
        """Returns the block to keep for the gradient of a tensor that was used in this one, and now in a later one."""
        if later.fault:  # a recomputation, whose tensors get no gradient
            return self
        return later if self.used or self._source is later._source else Block({}, _SEVERAL)


_NOTHING = Block({})
_RECOMPUTED = Block(
    {},
    "its forward ran again in a backward, as under checkpoint(..., use_reentrant=True), and what was given at the first time was "
    "not kept: use checkpoint(..., use_reentrant=False)",
)
_SEVERAL = "its tensor was used under several given(...) blocks before its gradient came, which is of all of them"
_LOST = Block({}, "the compiled graph did not keep it until the backward")
_current: ContextVar[Block] = ContextVar("given", default=_NOTHING)
_numbers = itertools.count()
_numbered: WeakValueDictionary[int, Block] = WeakValueDictionary()


def current() -> Block:
    """Returns what is given in this thread and task now."""
    return _current.get()


def keep(monitor: Any) -> Block:
    """Returns what is given to the monitor at this forward, for its gradient."""
    block = _at_forward()
    found = block.given.get(monitor.context, {})
    mine = {name: Given(found[name].value, change_count(found[name].value)) for name in monitor.given if name in found}
    return Block({monitor.context: mine}, block.fault, block)


def under(block: Block, function: Callable[..., None], *args: Any, **kwargs: Any) -> None:
    """Calls `function` with `block` as what is given."""
    token = _current.set(block)
    try:
        function(*args, **kwargs)
    finally:
        _current.reset(token)


def _at_forward() -> Block:
    """Returns what is given at this forward; of one that runs in a backward, as checkpoints do, nobody can tell it."""
    return _current.get() if graph_task() == -1 else _RECOMPUTED


def number_of(block: Block) -> Tensor:
    """Returns a number by which a graph finds `block` in its backward. It exists as long as the tensor, which the graph saves."""
    number = next(_numbers)
    _numbered[number] = block
    tensor = torch.tensor(number, device="cpu")
    tensor.block = block  # type: ignore[attr-defined]  # PyTorch keeps attributes as long as the tensor, also within autograd
    return tensor


def block_of(number: Tensor) -> Block:
    """Returns the block of a number."""
    return _numbered.get(int(number), _LOST)


def _as_tensor(name: str, value: Any) -> Tensor:
    try:
        found = as_operand(value)
        return plain(found if isinstance(found, Tensor) else torch.as_tensor(found, device="cpu"))
    except Exception as error:
        raise TypeError(f"given({name}=...) takes a tensor, an array or numbers; got {type(value).__name__}: {error}") from error
