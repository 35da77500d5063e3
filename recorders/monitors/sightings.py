"""Sightings: tensors with a hook for their gradient, and the calls of modules that used them."""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Iterable, Sequence
from typing import Any, Generic, TypeVar

from torch import Tensor

from recorders._torch import graph_task
from recorders.capture.entering import Fail, guarded
from recorders.capture.given import Block

__all__ = ["Living", "Sighting", "Use", "tell_of_gradients"]

_T = TypeVar("_T")

_numbers = itertools.count()


class Use:
    """A call of a module that used a tensor.

    Attributes:
        training: whether it counts as training.
        block: what was given then.
        tensor: a clone of the tensor, if anybody needs it.
        backward: the number of the last backward in which a gradient came to what the call returned.
        number: of later calls it is higher.
    """

    __slots__ = ("__weakref__", "backward", "block", "number", "tensor", "training")

    def __init__(self, training: bool, block: Block | None, tensor: Tensor | None) -> None:
        self.training, self.block, self.tensor = training, block, tensor
        self.backward: int | None = None
        self.number = next(_numbers)

    def after(self, earlier: Use) -> Use:
        """Returns this call, which is given what both were given if that is the same."""
        if self.block and earlier.block:
            self.block = earlier.block.followed_by(self.block)
        return self


class Living(Generic[_T]):
    """Weakly references objects. Unlike a `WeakSet` it may be read while other threads add some."""

    def __init__(self) -> None:
        self._known: set[weakref.ref[_T]] = set()

    def add(self, found: _T) -> None:
        """Adds an object."""
        self._known.add(weakref.ref(found, self._known.discard))

    def all(self) -> list[_T]:
        """Returns those that were not freed."""
        return [found for known in self._known.copy() if (found := known()) is not None]


class Sighting:
    """A tensor with a hook for its gradient.

    A leaf of autograd outlives the graph of a call, and keeps its hook. A gradient that comes to it later, from another graph, is
    no observation of the module. So the graph tells, and holds, the calls of a leaf: see `tell_of_gradients`.

    Attributes:
        version: that of the tensor.
        handle: that of the hook.
        last: the last call that used the tensor, with what the earlier ones were given; of a leaf only until the next gradient, and
            only if the graph cannot tell the call.
        calls: the calls of a leaf that graphs tell.
    """

    def __init__(self, version: int) -> None:
        self.version = version
        self.handle: Any = None
        self.last: Use | None = None
        self.calls: Living[Use] = Living()

    def use(self, call: Use) -> None:
        """Notes a call of which no graph tells."""
        self.last = call if self.last is None else call.after(self.last)

    def take_leaf(self) -> Use | None:
        """Returns the last of the calls from which a gradient comes to a leaf now; None if it comes from elsewhere."""
        found = [call for call in self.calls.all() if call.backward == graph_task()]
        found += [self.last] if self.last is not None else []
        self.last, last = None, None
        for call in sorted(found, key=lambda call: call.number):
            last = call if last is None else call.after(last)
        return last

    def forget(self) -> None:
        """Drops the clones that calls of a leaf hold."""
        self.last = None
        for call in self.calls.all():
            call.tensor = None


def tell_of_gradients(outputs: Iterable[Tensor], calls: Sequence[tuple[Sighting, Use]], fail: Fail) -> None:
    """Lets the graph of what a module returned tell its calls of leaves when a gradient comes to it, and hold them.

    If it returned nothing with a gradient, nobody tells: then the next gradient of the leaf counts as one of the call.
    """

    def come() -> None:
        for _, call in calls:
            call.backward = graph_task()

    told = [x for x in outputs if x.requires_grad and not x.is_leaf]
    for output in told:
        output.register_hook(lambda _: guarded(fail, come))  # type: ignore[no-untyped-call]
    for sighting, call in calls:
        if told:
            sighting.calls.add(call)
        else:
            sighting.use(call)
