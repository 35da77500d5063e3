"""Exceptions of `reducers`. Every message says what was wrong, where, and what to do."""

from __future__ import annotations

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
]


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
