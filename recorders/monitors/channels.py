"""What monitors make of the pattern "channels", and of a pattern that takes tokens for channels."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any
from weakref import WeakSet

from torch import Tensor, nn

from recorders.capture.channels import channel_axis, channel_pattern, own_axis
from recorders.errors import RecordingWarning, TargetError
from recorders.schedule.clock import Clock
from reducers import Product, Reducer
from reducers.combinators.mapped import Premap
from reducers.core.channels import has_channels, with_channels
from reducers.core.patterns import sides
from reducers.core.reducer import check_reducer
from reducers.errors import warn_user

_CHANNELS = frozenset(map(channel_pattern, (1, -1)))
_told: WeakSet[Clock] = WeakSet()  # one warning is enough for all monitors of a recorder, which share a clock


def check(reducer: Reducer, kind: Any) -> Reducer:
    """Returns the reducer of a monitor of this kind.

    Raises:
        ReducerTypeError: it is no reducer.
        TargetError: it keeps "channels", and the monitor watches no output or input of a layer.
    """
    if not kind.side and has_channels(check_reducer(reducer, kind.__name__)):
        raise TargetError(
            f"{kind.__name__}({reducer!r}): 'channels' is an axis of what a layer returns or is given, which a ForwardMonitor or a "
            "BackwardMonitor watches; here write the pattern, such as '... c -> c'"
        )
    return check_reducer(reducer, kind.__name__)


def resolve(monitor: Any, module: nn.Module) -> bool:
    """Puts the channel axis of `module` into the reducer of a monitor that is about to sit on it; 1 if it is not known.

    Returns:
        whether its pattern may keep what is no channels, which the first observation will show.
    """
    if has_channels(monitor.reducer):
        axis = channel_axis(module)
        monitor.reducer = with_channels(monitor.reducer, channel_pattern(1 if axis is None else axis))
        monitor.buffer = monitor.buffer_class(monitor.reducer)
        if axis is None:
            _know_patterns(monitor, module)
            return True
    _know_patterns(monitor, module)
    judged = bool(monitor.side) and not monitor.has_callables and own_axis(module) is not None
    return judged and any(map(_keeps_second, monitor.patterns))


def _know_patterns(monitor: Any, module: nn.Module) -> None:
    monitor.patterns = tuple(_patterns(monitor.reducer))
    # A layer without channels of its own, such as a ReLU, may be called in places that have different numbers of them.
    shared = bool(monitor.side) and own_axis(module) is None
    monitor.buffer.by_channels = shared and not _CHANNELS.isdisjoint(monitor.patterns)


def checked(monitor: Any, inputs: dict[str, tuple[Tensor, ...]]) -> dict[str, tuple[Tensor, ...]]:
    """Returns the first observation; warns if its channels are not on the axis that the pattern keeps."""
    monitor.checks_channels = False
    module, x = monitor.module, next(iter(inputs.values()), (None,))[0]
    if module is None or x is None:
        return inputs
    own, kind, sizes = own_axis(module), type(module).__name__, getattr(module, "kernel_size", None)
    message = ""
    if own is None and x.ndim > 2:
        message = (
            f"neither its type nor a layer before it says whether these are channels; if not, use the pattern '... c -> c', or say "
            f"recorders.register_channel_axis({kind}, -1)"
        )
    elif own == -1 and x.ndim > 2:
        message = f"a {kind} has its channels on the last axis, so this counts tokens as channels; use the pattern 'channels'"
    elif own == 1 and isinstance(sizes, tuple) and x.ndim == len(sizes) + 1:
        message = "that is without a batch, so axis 1 is none of channels; give batches, or use the pattern 'c ... -> c'"
    if message and (monitor._clock is None or monitor._clock not in _told):
        _told.update(() if monitor._clock is None else (monitor._clock,))
        text = f"{monitor.describe(module)} keeps axis 1 of shape {tuple(x.shape)}: {message}"
        warn_user(text, RecordingWarning)
    return inputs


def _patterns(reducer: Reducer) -> Iterator[str]:
    """The patterns that the observation itself is reduced by."""
    if isinstance(pattern := getattr(reducer, "pattern", None), str):
        yield pattern
    inside = [part for _, part in reducer.parts] if isinstance(reducer, Product) else [getattr(reducer, "reducer", None)]
    for part in inside if not isinstance(reducer, Premap) else ():
        if isinstance(part, Reducer):
            yield from _patterns(part)


def _keeps_second(pattern: str) -> bool:
    """Whether a pattern keeps the second axis alone and calls it c."""
    left, right = sides(pattern)
    return right == "c" and left.split()[1:2] == ["c"] and left.split()[2:] != []
