"""What belongs to one call is kept in the frame of that call: it is gone with the call, however that ends.

Hooks that come in pairs, one before and one after, leave something over where the call in between is interrupted: PyTorch calls no
hook then. A frame dies all the same, and cannot be taken for that of another call, of this thread or another one. That names may be
added to a frame is said by PEP 667; older versions of Python do so too.
"""

from __future__ import annotations

import sys
from types import FrameType
from typing import Any

from torch import nn

from recorders.capture.hooks import Hook

__all__ = ["forward_frame", "keep", "kept"]

_CALL = nn.Module._call_impl.__code__
_HOOK = Hook.__call__.__code__


def keep(frame: FrameType, name: str, value: Any) -> None:
    """Keeps `value` as long as the call of `frame` goes on, or until it is kept anew under this name.

    >>> import sys
    >>> def call():
    ...     keep(sys._getframe(), "of this call", 1)
    ...     return kept(sys._getframe(), "of this call")
    >>> call()
    1
    """
    frame.f_locals[name] = value


def kept(frame: FrameType, name: str) -> Any:
    """What is kept under this name, None where nothing is."""
    return frame.f_locals.get(name)


def forward_frame() -> FrameType:
    """For what a `Hook` calls: the frame of the module's call, the same before the forward, after it, and after an exception."""
    frame = sys._getframe(1)
    while frame.f_back is not None and frame.f_code is not _HOOK:  # what times hooks may be in between
        frame = frame.f_back
    frame = frame.f_back or frame
    outer = frame.f_back  # hooks are called from a function within the call, but those that come after an exception
    return outer if outer is not None and outer.f_code is _CALL and frame.f_code in _CALL.co_consts else frame
