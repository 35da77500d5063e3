"""Past: results of a `History` at earlier times."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Protocol

from torch import Tensor

from recorders.recordings.values import LeafResults, bare
from reducers import History, NoHistoryError, Result, State, from_recipe
from reducers.temporal.history import history_of
from reducers.temporal.interpolation import Extrapolation, Interpolation


class _Recorded(Protocol):
    @property
    def reducer(self) -> Any: ...

    @property
    def states(self) -> Mapping[str, State]: ...


class Past(LeafResults):
    """The results of the present, and `latest`, `view` and `dump` for what has a reducer that is a `History`.

    The results have the form of `peek`, but functions given to `apply` are not called.
    """

    def latest(self: _Recorded) -> Any:
        """The newest result.

        Raises:
            NoHistoryError: the reducer is not a `History`.
        """
        return _read(self, History.latest)

    def view(
        self: _Recorded,
        time: float | Tensor,
        interpolation: Interpolation | None = None,
        *,
        tolerance: float = 1e-7,
        time_constant: float | Tensor | None = None,
        extrapolation: Extrapolation | None = None,
    ) -> Any:
        """The result at a time before the newest; see `reducers.History.view`.

        Raises:
            NoHistoryError: the reducer is not a `History`.
            ArgumentError: as `reducers.History.view`.
        """
        options: Any = {"tolerance": tolerance, "time_constant": time_constant, "extrapolation": extrapolation}
        return _read(self, lambda history, state: history.view(state, time, interpolation, **options))

    def dump(self: _Recorded) -> Any:
        """All results in the history, newest first along a new first axis; see `reducers.History.dump`.

        Raises:
            NoHistoryError: the reducer is not a `History`.
        """
        return _read(self, History.dump)


def _read(recorded: _Recorded, read: Callable[[History, State], Result]) -> Any:
    if recorded.reducer is None:
        raise NoHistoryError(why_unknown(getattr(recorded, "recipe", None)))
    history = history_of(recorded.reducer)
    return bare({path: read(history, state) for path, state in recorded.states.items() if state})


def why_unknown(recipe: Mapping[str, Any] | str | None) -> str:
    """Why there is no reducer for what a file says of it.

    >>> why_unknown({"type": "my.reducers:Above", "threshold": 1.0})
    "reducer 'Above' is not defined here: import the module 'my.reducers', which defines it, before loading"
    """
    if not isinstance(recipe, Mapping):
        return "the reducer holds a function, which is not saved: pass it, load(path, reducers={name: reducer})"
    try:
        from_recipe(recipe)
    # A registered class is constructed from untrusted values, and may raise anything.
    except Exception as error:
        return str(error)
    return "the reducer was not known here when this was loaded, or its states have another version: load it again"
