"""Exceptions and warnings of `reducers`. Every message says what was wrong, where, and what to do."""

from __future__ import annotations

import difflib
import sys
import warnings
from collections.abc import Iterable

__all__ = [
    "ArgumentError",
    "DTypeError",
    "EmptyStateError",
    "NoHistoryError",
    "NotMergeableError",
    "PatternError",
    "RecipeError",
    "ReducerError",
    "ReducerTypeError",
    "StateError",
    "StateMismatchError",
    "did_you_mean",
    "warn_user",
]

_LIBRARIES = {"recorders", "reducers", "torch", "contextlib"}  # a warning does not point at their lines


class ReducerError(Exception):
    """Base class of all exceptions raised by `reducers`."""


class ReducerTypeError(ReducerError, TypeError):
    """An argument has the wrong type, for example not a reducer instance."""


class ArgumentError(ReducerError, ValueError):
    """An argument is outside its valid range."""


class PatternError(ReducerError, ValueError):
    """An einops pattern is malformed, or does not match the shape of the tensor."""


class DTypeError(ReducerError, TypeError):
    """The statistic is not defined for tensors of this dtype."""


class EmptyStateError(ReducerError, ValueError):
    """A result was requested from an empty state."""


class NoHistoryError(ReducerError, TypeError):
    """A past result was requested from a reducer without a history."""


class StateError(ReducerError, ValueError):
    """A state, such as one from a file, cannot come from this reducer; the message names the key, and what it must have."""


class StateMismatchError(ReducerError, ValueError):
    """Two states cannot be merged, because their keys or shapes differ."""


class NotMergeableError(ReducerError, TypeError):
    """Two states of a reducer that cannot merge were merged."""


class RecipeError(ReducerError, ValueError):
    """A reducer cannot be written as a recipe, or a recipe does not describe a known reducer."""


def warn_user(message: str, category: type[Warning]) -> None:
    """Warns at the line of the user's code, however deep within this library and PyTorch the warning is given.

    In a thread without any code of the user's, the warning points at the first line of the thread. Code that PyTorch generates has
    no module name.
    """
    frame = sys._getframe(1)
    while frame.f_back is not None and frame.f_globals.get("__name__", "torch").partition(".")[0] in _LIBRARIES:
        frame = frame.f_back
    known = frame.f_globals.setdefault("__warningregistry__", {})  # what Python has shown once already
    warnings.warn_explicit(message, category, frame.f_code.co_filename, frame.f_lineno, frame.f_globals.get("__name__"), known)


def did_you_mean(name: object, known: Iterable[str], alike: float = 0.6) -> str:
    """A question for a message, if some of the known names look like `name`; "" if none does. `alike` is the least similarity.

    >>> did_you_mean("running_meen", ["running_mean", "weight"])
    "did you mean 'running_mean'? "
    """
    close = difflib.get_close_matches(name, known, n=3, cutoff=alike) if isinstance(name, str) else []
    return f"did you mean {' or '.join(map(repr, close))}? " if close else ""
