"""What a monitor has recorded, taken out of it, and put into another one that goes on bit for bit."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import replace
from typing import Any

import torch.distributed as dist

from recorders.capture.context import as_monitor
from recorders.errors import MergeError
from recorders.monitors.buffer import Buffer
from recorders.monitors.record import Observer, report_failures
from recorders.recordings.distributed.placement import Placement
from recorders.recordings.recording import Progress, Subrecording
from recorders.ring.rows import LOCK
from recorders.ring.state import MonitorState
from reducers import State


def snapshot(monitor: Observer, functions: tuple[Callable[[Any, int], Any], ...], *, save: bool = False) -> Subrecording:
    """What was recorded so far, with what is needed to go on. Observations that wait stay as they are: looking changes no result.

    Args:
        functions: those given to `apply`.
        save: whether they are joined into the states, and none wait any more. So who goes on with what was saved, and who goes on
            without a break, are in the same state: all runs that save at the same steps end with the same bits.
    """
    buffer = monitor.buffer
    with buffer.lock:
        stored = buffer.collect(seal=True) if save else buffer.read()
        states, samples = dict(stored.states), stored.samples
        told: Progress = as_monitor(_progress, monitor, stored)
    report_failures(monitor)
    attr = monitor.attr if monitor.attr is None or isinstance(monitor.attr, str) else ", ".join(monitor.attr)
    kind, module = type(monitor).__name__, monitor.hooks.module_class
    placement = _placement(buffer, states)
    return Subrecording(monitor.reducer, states, samples, None, kind, attr, module, functions, None, told, placement)


def copied(monitor: Any, functions: tuple[Callable[[Any, int], Any], ...]) -> tuple[Any, ...]:
    """What `rebuild` makes a monitor of, as it is pickled or copied."""
    part, clock = snapshot(monitor, functions), monitor._clock if monitor.gate.chooses_steps else None
    eligible = {} if part.progress is None else part.progress.eligible
    recorded = dict(part.states), part.samples, functions, part.placement
    return monitor.constructor, monitor.attr, monitor.name, *recorded, eligible, clock


def merged(monitor: Any, states: Mapping[str, State], other: Subrecording) -> Subrecording:
    """These states of a monitor, merged with those of `other`; if they are none, `other` as this monitor resumes it.

    Raises:
        MergeError: the reducers or the states do not fit.
    """
    theirs = replace(other, reducer=monitor.reducer) if other.reducer is None else other
    mine = Subrecording(monitor.reducer, dict(states), placement=_placement(monitor.buffer, states))
    try:
        return mine.merge(theirs)
    except Exception as error:
        raise MergeError(f"{monitor.describe()}: {error}") from error


def _placement(buffer: Buffer, states: Collection[str]) -> dict[str, Placement]:
    """Which part of a tensor each state is of, if ranks share the tensor."""
    if not buffer.shared or not (dist.is_available() and dist.is_initialized()) or dist.get_world_size() == 1:
        return {**{path: place for path, place in buffer.copies.items() if path in states}, **buffer.places}
    copy = Placement(dist.get_rank(), shared=True)
    return {**dict.fromkeys(states, copy), **buffer.places}


def _progress(monitor: Observer, stored: MonitorState) -> Progress:
    monitor.gate.forget_freed()
    counted = monitor.gate.eligible
    # Optimizers have no names; what goes on knows them by the order in which they step.
    optimizers = any(not isinstance(stream, str) for stream in counted)
    eligible = {f"optimizer {i}" if optimizers else str(stream): counted[stream] for i, stream in enumerate(counted)}
    return Progress(dict(stored.counts), stored.merged, eligible)


def resume(monitors: Iterable[tuple[Observer, Subrecording]]) -> None:
    """Puts what was saved in place of what monitors hold. That their reducers and states fit must be known."""
    found = [(monitor, part.progress or Progress(merged=part.samples), part) for monitor, part in monitors]
    stored = [_stored(told, part) for _, told, part in found]
    with LOCK:
        for (monitor, told, part), state in zip(found, stored, strict=True):
            with monitor.buffer.lock:
                monitor.buffer.restore(state, part.placement)
                monitor.gate.eligible = dict[object, int](told.eligible.items())


def _stored(told: Progress, part: Subrecording) -> MonitorState:
    return MonitorState({path: state for path, state in part.states.items() if state}, dict(told.counts), {}, {}, told.merged)
