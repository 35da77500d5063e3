"""Divergence: where two nets or two runs part, in words for somebody in a hurry."""

from __future__ import annotations

import math
from dataclasses import dataclass

from recorders.recordings.display import shown_name
from recorders.watch.divergence.sources import SourceLine

_BEGINS = {
    "forward": "The forwards part",
    "parameters": "The forwards part because parameters or buffers differ",
    "backward": "The forwards agree, the backwards part",
    "compiled": "The eager forwards agree; compiled they part",
    "forward of a run": "Not deterministic: the forwards of run 1 and run {run} part",
    "backward of a run": "Not deterministic: the backwards of run 1 and run {run} part",
}


@dataclass(frozen=True)
class Divergence:
    """The first place at which two nets, or two runs of one step, part. False if they do not.

    Attributes:
        phase: "forward", "parameters", "backward" or "compiled"; "" if there is no difference beyond noise.
        module: the name of the innermost module of the first net that gets equal inputs and returns something else; "" is the net.
        module_b: its name in the second net.
        operator: the first operator in it that returns something else, such as "aten.mul.Tensor"; "" if none was found.
        operator_b: the operator at this place in the second net; "" if it calls none.
        index: which operator of the module it is, from 0; of `repeat`, of the step. -1 if none was found.
        form: shapes and dtypes of what it returns.
        source, source_b: the lines of the user's program that call these operators; None if there are none.
        equal: what came in, and is equal.
        differs: what differs.
        distance: the largest difference, relative to the largest magnitude; if nothing differs, the largest one that was seen. NaN
            if only digests are known.
        notes: what else was noticed, such as attributes that differ.
        run: of `repeat`, the run that differs from the first.
    """

    phase: str = ""
    module: str = ""
    module_b: str = ""
    operator: str = ""
    operator_b: str = ""
    index: int = -1
    form: str = ""
    source: SourceLine | None = None
    source_b: SourceLine | None = None
    equal: str = ""
    differs: str = ""
    distance: float = 0.0
    notes: tuple[str, ...] = ()
    run: int = 0

    def __bool__(self) -> bool:
        return bool(self.phase)

    def __str__(self) -> str:
        if not self:
            seen = "" if math.isnan(self.distance) else f" (largest distance seen: {self.distance:.2g})"
            return "\n".join([f"No difference beyond noise{seen}.", *(f"- {note}" for note in self.notes)])
        begin = _BEGINS[f"{self.phase} of a run" if self.run else self.phase].format(run=self.run)
        where = shown_name(self.module)
        if self.module_b != self.module:
            where += f" (in the second net {shown_name(self.module_b)})"
        lines = [f"{begin} in {where}."]
        if self.operator or self.operator_b:
            at = f" (number {self.index}, {self.form})" if self.index >= 0 else ""
            lines.append(f"- operator: {_both(self.operator, self.operator_b)}{at}")
        lines += [f"- {which}: {line}" for which, line in self._sources()]
        if self.differs:
            far = "" if math.isnan(self.distance) else f" (distance {self.distance:.2g})"
            lines.append(f"- {self.differs}{far}")
        lines += [f"- equal before it: {self.equal}"] if self.equal else []
        return "\n".join([*lines, *(f"- {note}" for note in self.notes)])

    def _sources(self) -> list[tuple[str, SourceLine]]:
        if self.source == self.source_b and self.source is not None:
            return [("line", self.source)]
        which = ("line", "line") if self.run else ("line of the first net", "line of the second net")
        return [(name, line) for name, line in zip(which, (self.source, self.source_b), strict=True) if line is not None]


def _both(a: str, b: str) -> str:
    if a == b:
        return a
    if not b:
        return f"{a}, which the second does not call"
    return f"{a} in the first, {b} in the second" if a else f"{b}, which the first does not call"
