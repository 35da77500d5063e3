"""One warning a recorder that results leave out what is not finite."""

from __future__ import annotations

from recorders.errors import RecordingWarning
from recorders.recordings.nonfinite import left_out
from recorders.recordings.recording import Recording, Subrecording
from recorders.recordings.shown import shown_name
from reducers.errors import warn_user

__all__ = ["warned_of_left_out"]


def warned_of_left_out(recording: Recording) -> bool:
    """Whether elements were left out, of which this warns. Only states on the CPU are looked at, so that no device is waited for.

    Of updates there is no warning: their ratios to weights that are 0 are not finite in healthy nets.
    """
    hit = {name: part for name, part in recording.items() if part.monitor != "ParameterUpdateMonitor" and _holed(part)}
    for name, part in hit.items():
        leaf, share = next(iter(_holed(part).items()))
        where = f"{part.monitor}{f' on {part.module}' * bool(part.module)} ({shown_name(name)}{f', {leaf}' * bool(leaf)})"
        more = f", and {len(hit) - 1} more subrecorders left some out" if len(hit) > 1 else ""
        warn_user(
            f"{where}: {share}{more}: results are of the others; recorder.report() lists them, and findings(recorder) says where "
            "to look; if that is as it should be, leave them out yourself, such as by reducer.prefilter(torch.isfinite)",
            RecordingWarning,
        )
        return True
    return False


def _holed(part: Subrecording) -> dict[str, object]:
    on_cpu = {leaf: state for leaf, state in part.states.items() if all(value.device.type == "cpu" for value in state.values())}
    return dict(left_out(part.reducer, on_cpu))
