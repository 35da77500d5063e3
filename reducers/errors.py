"""Errors of the algebra. Every one says what was wrong, where, and what to do."""

from __future__ import annotations

__all__ = [
    "ArgumentError",
    "DTypeError",
    "EmptyStateError",
    "NoHistoryError",
    "PatternError",
    "RecipeError",
    "ReducerError",
    "ReducerTypeError",
    "StateMismatchError",
]


class ReducerError(Exception):
    """Base of every error raised by `reducers`."""


class ReducerTypeError(ReducerError, TypeError):
    """Something that is no reducer instance was given where one is needed."""


class ArgumentError(ReducerError, ValueError):
    """A reducer was given an argument outside the range in which it is defined."""


class PatternError(ReducerError, ValueError):
    """An einops pattern is malformed, or does not fit the shape it met."""


class DTypeError(ReducerError, TypeError):
    """The statistic is not defined for tensors of this dtype."""


class EmptyStateError(ReducerError, ValueError):
    """A result was asked of a state into which nothing was reduced."""


class NoHistoryError(ReducerError, TypeError):
    """A time in the past was asked of a reducer that keeps no history."""


class StateMismatchError(ReducerError, ValueError):
    """Two states cannot be merged: their keys or their kept shapes differ."""


class RecipeError(ReducerError, ValueError):
    """A reducer cannot be written as data, or data names no known reducer."""
