"""What any reducer left out of its results because it is not finite, as a finding."""

from __future__ import annotations

from collections.abc import Mapping

from recorders._torch import outside_modes
from recorders.recorder.report import unexpected
from recorders.recordings.display import shown_name
from recorders.recordings.recording import Subrecording
from recorders.watch.fault import Finding, fault

__all__ = ["left_out_finding", "number_counting"]


def left_out_finding(parts: Mapping[str, Subrecording]) -> list[Finding]:
    """One finding, of the first subrecorder of which elements were left out; none if there is none."""
    hit = unexpected(parts)
    for name, holes in hit.items():
        leaf, share = next(iter(holes.items()))
        also = f", and in {len(hit) - 1} more subrecorders" if len(hit) > 1 else ""
        what = f"{share}{f' in {leaf}' * bool(leaf)}: they are NaN or infinite, and results leave them out{also}"
        return [fault("nonfinite", shown_name(name), what)]
    return []


def number_counting(parts: Mapping[str, Subrecording]) -> int:
    """Of how many subrecorders the reducer counts what it leaves out."""
    return sum(map(_counts, parts.values()))


def _counts(part: Subrecording) -> bool:
    reducer = part.reducer
    try:
        states = [state for state in part.states.values() if state]
        return reducer is not None and any(outside_modes(reducer.nonfinite, state) is not None for state in states)
    except Exception:  # a reducer of the user's may raise anything
        return False
