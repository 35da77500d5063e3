"""Handles: how compiled graphs on a GPU add observations to accumulators, within CUDA graphs.

A CUDA graph replays kernels and runs no Python. So an observation is an operator that launches two of them: one reads the tensor
once, the other joins what was found to accumulators, in place. The graph gets a handle, a tensor on the device with addresses, and
only reads it. So autograd finds nothing changed if two forwards come before their backwards; blocks that share a graph pass handles
of their own; and a CUDA graph, which copies its inputs before a replay, copies addresses. The first number of a handle says whether
the monitor records in this step, so that one graph serves all steps.

A forward that a checkpoint around the graph runs again must not count twice. Only Python can tell, so graphs that are traced within
such a checkpoint call it, and end CUDA graphs there.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any
from weakref import WeakKeyDictionary, WeakSet

import torch
from torch import Tensor

from recorders._torch import may_run_again
from recorders._torch.compiler import make_effectful
from recorders.capture.accumulators import Observed, owner_of
from recorders.capture.entering import guarded, timed
from reducers import Reducer, Statistic
from reducers.core.inputs import observation
from reducers.core.patterns import arrange
from reducers.errors import warn_user
from reducers.kernels.dispatch import device_accumulation

__all__ = ["add_holder", "can_accumulate", "emit_accumulations", "hand_out", "handle_name"]

_holders: WeakSet[Any] = WeakSet()
_waiting: dict[torch.device, bool] = {}  # whether there are holders that were not asked for this device
_slots: WeakKeyDictionary[Any, dict[Any, int]] = WeakKeyDictionary()  # of the handles of a twin, by leaf, shape and dtype


def add_holder(receiver: Any) -> None:
    """Adds a receiver to which `hand_out` gives handles, by `receiver.hold(device)`; that does nothing if none is needed."""
    _holders.add(receiver)
    _waiting.clear()


def can_accumulate(monitor: Any, device: str) -> bool:
    """Whether kernels on this type of device do all that the monitor asks for, so that no Python is needed when a graph runs."""
    gate, reducer = monitor.gate, monitor.reducer
    bare = monitor.bare and not monitor.given and not monitor.buffer.shared
    if not bare or gate.condition is not None or gate.every != 1:
        return False
    return isinstance(reducer, Statistic) and bool(reducer.columns) and device_accumulation(device) is not None


def handle_name(kind: str, index: int | None) -> str:
    """The attribute of a receiver's tensor that is its handle for a device; Dynamo makes it an input of the graph."""
    return f"handle_{kind}_{index}"


def hand_out(twin: Any, kind: str, index: int | None) -> bool:
    """Called while a graph is traced: whether it gets handles. If so, all receivers get theirs now.

    Blocks share a graph only if all of them have handles when the compiler checks its guards.
    """
    if not can_accumulate(twin, kind) or (may_run_again() and not twin.records_recomputed):
        return False
    device = torch.device(kind) if index is None else torch.device(kind, index)
    if _waiting.get(device, True):
        _waiting[device] = False
        for holder in list(_holders):
            holder.hold(device)
    return True


def emit_accumulations(handle: Tensor | None, twin: Any, reducer: Reducer | None, leaves: Mapping[str, Tensor], told: str) -> bool:
    """Called while AOT traces: adds an operator for each leaf; returns whether kernels take all of them, or nothing was added."""
    found = [_observed(twin, reducer, path, leaf, told) for path, leaf in leaves.items()]
    if not all(found):
        return False
    for observed, x in filter(None, found):
        torch.ops.torch_recorders.accumulate(handle, *observed, x)
    return True


def _observed(twin: Any, reducer: Reducer | None, path: str, leaf: Tensor, told: str) -> tuple[Observed, Tensor] | None:
    if not isinstance(reducer, Statistic):
        return None
    kernels = device_accumulation(leaf.device.type)
    try:
        x, axes = arrange(observation(reducer, (leaf,)), reducer.pattern)
        kept = tuple(size for axis, size in enumerate(x.shape) if axis not in axes)
        # Sizes that are variables of the graph are not compared: that would be a guard.
        if kernels is None or not kernels.takes(x, axes, reducer.columns):
            return None
        if not all(type(size) is int for size in kept) or 0 in kept:
            return None
    except Exception:  # such as a pattern that does not fit: reported when the graph runs
        return None
    columns = ",".join(reducer.columns.values())
    slots = _slots.setdefault(twin, {})
    slot = slots.setdefault((path, columns, kept, x.dtype), len(slots))
    return (Observed(slot, path, columns, axes, reducer.threshold, told), x) if slot < kernels.SLOTS else None


def _accumulate(
    handle: Tensor, slot: int, path: str, columns: str, axes: list[int], threshold: float, told: str, x: Tensor
) -> None:
    guarded("the operator in a compiled graph", _add, handle, Observed(slot, path, columns, tuple(axes), threshold, told), x)


def _add(handle: Tensor, observed: Observed, x: Tensor) -> None:
    kernels = device_accumulation(x.device.type)
    if kernels is None or not kernels.is_captured():
        owner = owner_of(handle)
        if owner is not None:
            timed(owner, owner.accumulate, observed, x)
        return
    # The handle may be a copy that belongs to the CUDA graph. The kernels find out whether there are accumulators of this size.
    try:
        if x.numel():
            kernels.accumulate(x, observed.axes, observed.columns, observed.threshold, handle, observed.slot)
    except Exception as error:
        warn_user(f"an observation was left out of a CUDA graph: {type(error).__name__}: {error}", RuntimeWarning)


# Not tagged `cudagraph_unsafe`: CUDA graphs contain it. Its effect keeps it from being removed, or run again in a backward.
_library: Any = torch.library.Library("torch_recorders", "FRAGMENT")  # type: ignore[no-untyped-call]
_library.define("accumulate(Tensor handle, int slot, str path, str columns, int[] axes, float threshold, str told, Tensor x) -> ()")
_library.impl("accumulate", _accumulate, "CompositeExplicitAutograd")
torch.library.register_fake("torch_recorders::accumulate", lambda *_: None, lib=_library)
make_effectful(torch.ops.torch_recorders.accumulate.default)
