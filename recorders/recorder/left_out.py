"""What results leave out because it is not finite, and one warning a recorder of it."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from recorders.errors import RecordingWarning
from recorders.recordings.nonfinite import LeftOut, left_out
from recorders.recordings.recording import Recording, Subrecording
from recorders.recordings.shown import shown_name
from reducers.errors import warn_user

__all__ = ["unexpected", "warned_of_left_out"]


def unexpected(
    parts: Mapping[str, Subrecording], look: Callable[[Subrecording], dict[str, LeftOut]] = Subrecording.left_out
) -> dict[str, dict[str, LeftOut]]:
    """What was left out, by subrecorder and leaf; not of updates, whose ratios to weights of 0 are not finite in healthy nets."""
    looked = {name: part for name, part in parts.items() if part.monitor != "ParameterUpdateMonitor"}
    return {name: holes for name, part in looked.items() if (holes := look(part))}


def warned_of_left_out(recording: Recording, waits: bool = False) -> bool:
    """Whether elements were left out, of which this warns. Looks at states on other devices too if it may wait for them."""
    hit = unexpected(recording, Subrecording.left_out if waits else _on_cpu)
    for name, holes in hit.items():
        part, (leaf, share) = recording[name], next(iter(holes.items()))
        where = f"{part.monitor}{f' on {part.module}' * bool(part.module)} ({shown_name(name)}{f', {leaf}' * bool(leaf)})"
        more = f", and {len(hit) - 1} more subrecorders left some out" if len(hit) > 1 else ""
        warn_user(
            f"{where}: {share}{more}: results are of the others; recorder.report() lists them, and findings(recorder) says where "
            "to look; if that is as it should be, leave them out yourself, such as by reducer.prefilter(torch.isfinite)",
            RecordingWarning,
        )
        break
    return bool(hit)


def _on_cpu(part: Subrecording) -> dict[str, LeftOut]:
    states = {leaf: state for leaf, state in part.states.items() if all(value.device.type == "cpu" for value in state.values())}
    return left_out(part.reducer, states)
