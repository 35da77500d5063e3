"""RunDivergence: where two runs part, in words and numbers, and how far they are apart from there on."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import TYPE_CHECKING, Any

from recorders.recordings.display import shown_name
from recorders.watch.divergence.runs.apart import Growth
from recorders.watch.divergence.runs.figure import figure_of

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_WHERE = {
    "input": "The runs get other inputs",
    "parameters": "The runs begin with other parameters",
    "between": "The runs part in a step that was not recorded, before they differ",
    "forward": "The runs part in the forward",
    "backward": "The forwards agree, the runs part in the backward",
    "update": "Forward and gradients agree, the runs part in the update",
    "value": "The runs part",
}


@dataclass(frozen=True)
class RunDivergence:
    """The first place at which two recorded runs part by more than rounding. False if they do not.

    Attributes:
        phase: "input", "parameters", "forward", "backward" or "update"; "between" if steps that were not recorded made the
            difference; of timelines "value"; "" if the runs do not part.
        step: the step of the clock; of timelines the tick.
        name: the module or the parameter in the first run; "" is the net.
        name_b: its name in the second.
        distance: Euclidean, relative to the larger of the two; if they do not part, the largest that was seen.
        allowed: what would have been noise.
        differs: what differs, in words.
        equal: what came in, and how equal it is.
        noise: what was taken for noise, in words.
        growth: how far the runs are apart at each step.
        by_layer: how far outputs of modules are apart at this step, in the order of the net.
        notes: what else was noticed.
        unit: what steps are: "step", "tick" or "observation".
    """

    phase: str = ""
    step: int = -1
    name: str = ""
    name_b: str = ""
    distance: float = 0.0
    allowed: float = 0.0
    differs: str = ""
    equal: tuple[str, ...] = ()
    noise: str = ""
    growth: tuple[Growth, ...] = ()
    by_layer: Mapping[str, float] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    unit: str = "step"

    def __bool__(self) -> bool:
        return bool(self.phase)

    def with_(self, **changes: Any) -> RunDivergence:
        """Returns a copy with these attributes changed."""
        return replace(self, **changes)

    def figure(self) -> Figure:
        """A picture: how far the runs are apart at each step, and the outputs of layers at the step at which they part.

        Raises:
            MissingExtraError: matplotlib is not installed.
        """
        return figure_of(self.growth, self.by_layer, self.unit, (self.step, self.phase, self.name) if self else None)

    def as_data(self) -> dict[str, Any]:
        """The answer as data for JSON."""
        return asdict(self)

    def __str__(self) -> str:
        if not self:
            lines = [f"The runs do not part beyond noise (largest distance seen: {self.distance:.2g})."]
        else:
            where = shown_name(self.name) + (f" (in the second run {shown_name(self.name_b)})" if self.name_b != self.name else "")
            place = "" if self.phase == "input" else f" {'of' if self.phase in ('forward', 'backward', 'update') else 'in'} {where}"
            lines = [f"{_WHERE[self.phase]}{place}, at {self.unit} {self.step}."]
            lines.append(f"- what differs: {self.differs} (distance {self.distance:.2g}, noise {self.allowed:.1g})")
            lines += [f"- equal: {'; '.join(self.equal)}"] if self.equal else []
        lines += [f"- {note}" for note in self.notes]
        if self and len(self.growth) > 1:
            shown = _some([row for row in self.growth if row.step >= self.step])
            lines.append("- from there: " + ", ".join(f"{row.output:.1g} at {self.unit} {row.step}" for row in shown))
        return "\n".join([*lines, f"- noise is {self.noise}"] if self.noise else lines)


def _some(rows: list[Growth]) -> list[Growth]:
    """Rows ever farther from each other."""
    found, at = [], 0
    while at < len(rows):
        found.append(rows[at])
        at = max(at + 1, 2 * at)
    return found[:6] + rows[-1:] * (len(found) > 6)
