"""Which part of a tensor an observation is of, if ranks share the tensor."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any
from weakref import WeakSet

from torch import Tensor

from recorders.capture.layouts import PlacementInfo, guess, layout_of, of_one, unclear
from recorders.capture.operands import is_spread
from recorders.errors import RecordingWarning
from recorders.recordings.placement import Placement
from recorders.schedule.clock import Clock
from reducers.errors import warn_user

__all__ = ["note_places", "seen", "warn_before_merge"]

_warned: WeakSet[Clock] = WeakSet()  # one warning is enough for all monitors of a recorder, which share a clock
_merged: WeakSet[Clock] = WeakSet()  # those of recorders that were synchronised


def seen(xs: tuple[Tensor, ...]) -> PlacementInfo:
    """What is to be told of the tensors of a leaf: of the first DTensor among them, if there is one."""
    spread = next((x for x in xs if type(x) is not Tensor and is_spread(x)), None)
    return of_one(xs[0] if spread is None else spread) if xs else PlacementInfo(None)


def note_places(monitor: Any, info: Mapping[str, PlacementInfo], made_of: Placement | None = None) -> None:
    """Notes in the buffer which part of a tensor the states of each leaf are of.

    Args:
        info: what is known of the tensors, by path.
        made_of: the placement of what callables got, if there are any.

    Raises:
        OperandError: a rank holds a summand; or earlier observations were of another part, or of a whole tensor.
    """
    buffer, layout = monitor.buffer, None if made_of is not None else layout_of(monitor.module, monitor.side)
    places = {path: leaf.placement(layout, buffer.shared) or made_of for path, leaf in info.items()}
    if any(places.values()) or buffer.places:
        buffer.place(places)
        monitor._may_wait = False  # later observations are compared with these
    elif unclear(monitor.module, monitor.side):
        _warn(monitor)


def _warn(monitor: Any) -> None:
    if monitor._clock is not None:
        if monitor._clock in _warned:
            return
        _warned.add(monitor._clock)
    what = "returns" if monitor.side == "outputs" else "is given"
    name, kinds = (None if monitor.module is None else guess(monitor.module, monitor.side)) or ("name", "Replicate()")
    warn_user(
        f"{monitor.describe()}: the net is tensor parallel, and what this module {what} is a plain tensor. Nobody can tell whether "
        "it is a part, a copy, or data of this rank, so it counts as data of each rank when ranks are merged. Say what it is, "
        f"after a look at this guess: register_layouts(net, mesh, {monitor.side}={{{name!r}: {kinds}}}), or give the styles of the "
        "layers use_local_output=False. Other modules like it count so without a warning until sync, which names all of them",
        RecordingWarning,
    )


def warn_before_merge(monitors: Iterable[Any], clock: Clock) -> None:
    """Warns, before ranks are merged for the first time, of what counts as data of each rank though it may be a part or a copy."""
    if clock in _merged:
        return
    _merged.add(clock)
    found: dict[str, dict[str, str]] = {}
    for monitor in monitors:
        module, side = monitor.module, monitor.side
        if module is None or not unclear(module, side) or layout_of(module, side) is not None:
            continue
        if monitor.buffer.samples and not monitor.buffer.places and (guessed := guess(module, side)) is not None:
            found.setdefault(side, {})[guessed[0]] = guessed[1]
    if found:
        given = [f"{side}={{{', '.join(f'{name!r}: {kinds}' for name, kinds in names.items())}}}" for side, names in found.items()]
        warn_user(
            f"the net is tensor parallel, and plain tensors of {sum(map(len, found.values()))} modules between its layers were "
            "recorded as data of each rank: sync counts them once for each rank, also parts and copies. Say what they are before "
            "the net runs, after a look at these guesses: "
            f"register_layouts(net, mesh, {', '.join(sorted(given, reverse=True))}). None in place of a placement says that each "
            "rank has data of its own",
            RecordingWarning,
        )
