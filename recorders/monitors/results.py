"""What a monitor recorded: looked at, merged, forgotten."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from recorders.capture.buffers import EMPTY, MonitorState
from recorders.errors import MergeError
from recorders.monitors.capture import Capture
from recorders.recordings.past import Past
from recorders.recordings.recording import Subrecording
from reducers import State

if TYPE_CHECKING:
    from typing_extensions import Self

__all__ = ["Results"]


class Results(Capture, Past):
    """The part of a Monitor that tells what it holds; whatever waits is reduced before anybody looks."""

    _merged: int
    _functions: tuple[Callable[[Any, int], Any], ...]
    _module_class: str

    @property
    @abstractmethod
    def attr(self) -> Any:
        """The attribute or parameter the monitor watches, None where it watches none."""

    def peek(self) -> Any:
        """The result so far: of the lone tensor, or by leaf path for nested operands; None where nothing was recorded."""
        return self.snapshot().peek()

    @property
    def samples(self) -> int:
        """How many observations were recorded: calls that passed the gates and the filter."""
        return self._merged + self._stored.samples

    @property
    def states(self) -> dict[str, State]:
        """One State per tensor leaf, keyed by path ("" for a lone tensor)."""
        return dict(self._flush().states)

    @property
    def state(self) -> State:
        """All states as one flat State, keys `path/key` (plain `key` for a lone tensor)."""
        return {
            f"{path}/{key}" if path else key: value
            for path, state in self._flush().states.items()
            for key, value in state.items()
        }

    def snapshot(self) -> Subrecording:
        """What was recorded so far, without hooks."""
        with self._lock:
            states, samples = self.states, self.samples
        return Subrecording(
            self.reducer,
            states,
            samples,
            monitor=type(self).__name__,
            attr=_text(self.attr),
            module=self._module_class,
            functions=self._functions,
        )

    def clear(self) -> None:
        """Forgets what was recorded; hooks stay as they are."""
        with self._lock:
            self._stored, self._merged, self._eligible = EMPTY, 0, {}
            self.counts, self.last_error = {}, None

    def check_merge(self, other: Subrecording) -> Subrecording:
        """Both together, with nothing changed.

        Raises:
            MergeError: the reducers or the states do not fit.
        """
        theirs = replace(other, reducer=self.reducer) if other.reducer is None else other
        try:
            return Subrecording(self.reducer, self.states).merge(theirs)
        except Exception as error:
            raise MergeError(f"{self.describe()}: {error}") from error

    def merge(self, other: Results | Subrecording) -> Self:
        """Adds what another monitor, or a loaded subrecording, recorded; returns the monitor itself.

        Raises:
            MergeError: the reducers or the states do not fit; nothing has changed then.
        """
        theirs = other.snapshot() if isinstance(other, Results) else other
        with self._lock:
            merged = dict(self.check_merge(theirs).states)
            self._stored, self._merged = MonitorState(merged, self._stored.counts, {}), self._merged + theirs.samples
        return self

    def apply(self, function: Callable[[Any, int], Any]) -> Self:
        """From now on `peek` and `save` show `function(result, samples)`; states stay mergeable. Returns the monitor itself."""
        self._functions = (*self._functions, function)
        return self


def _text(attr: Any) -> str | None:
    return attr if attr is None or isinstance(attr, str) else ", ".join(attr)
