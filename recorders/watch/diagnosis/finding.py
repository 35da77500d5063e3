"""Findings: what is likely wrong with a training, as data and as text."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias

from recorders.recordings.display import Rows, ShownAsTable
from recorders.watch.diagnosis.causes import CAUSES, KINDS

Severity: TypeAlias = Literal["error", "warning", "notice"]

PAGES = "docs/findings"
"""The folder of the repository that has a page for each kind."""


@dataclass(frozen=True)
class Finding:
    """One likely fault.

    Attributes:
        layer: the layer, or the name of a pushed value such as "loss", or what it is of: "inputs", "target", "optimizer", "(net)".
        what: what was seen, with numbers.
        why: why it matters.
        remedy: what to try first.
        since: the tick of a timeline, or the step of a recording, from which on it held to the end; None if that is not known.
        kind: the kind of fault, such as "dead-units"; see `page`.
        causes: the likely causes, most likely first, such as "rate-too-high".
        severity: "error" and "warning" are faults; a "notice" is what healthy trainings may have, too.
    """

    layer: str
    what: str
    why: str
    remedy: str
    since: int | None = None
    kind: str = ""
    causes: tuple[str, ...] = ()
    severity: Severity = "error"

    @property
    def cause(self) -> str:
        """The most likely cause."""
        return self.causes[0] if self.causes else ""

    @property
    def page(self) -> str:
        """The page about the kind, in the repository: a planted case, how to confirm it, and when it is no fault; "" of no kind."""
        return f"{PAGES}/{self.kind}.md" if self.kind else ""

    @property
    def likely(self) -> str:
        """The likely causes in words, most likely first; "" if none is known."""
        return " or ".join(CAUSES[cause].text for cause in self.causes)

    def __str__(self) -> str:
        since = "" if self.since is None else f", since tick {self.since}"
        likely = f" Likely: {self.likely}." if self.causes else ""
        return f"{self.layer}: {self.what}{since}. {self.why}{likely} Try: {self.remedy}"


class Findings(ShownAsTable, list[Finding]):
    """A list of likely faults, with what was examined and what could not be.

    Attributes:
        examined: each kind of fault that was looked for, with how many layers tell of it.
        unexamined: each kind of fault that was not looked for, with what to record for it.
        notices: what healthy nets have too, but fewer of: dead units that are not most of their layer.

    >>> Findings([], ["NaN and infinity: record a Summary of the loss"], examined=["dead units: 2 of 7"])
    no fault was found; examined: dead units; not examined: NaN and infinity
    >>> Findings([], ["dead units: record Activity"])
    nothing was examined, so no fault could be found; not examined: dead units
    """

    def __init__(
        self,
        found: Iterable[Finding],
        unexamined: Iterable[str],
        examined: Iterable[str] = (),
        notices: Iterable[Finding] = (),
    ) -> None:
        super().__init__(found)
        self.examined, self.unexamined, self.notices = tuple(examined), tuple(unexamined), tuple(notices)

    @property
    def verdict_if_empty(self) -> str:
        """What it means that no fault is in the list."""
        return "no fault was found" if self.examined else "nothing was examined, so no fault could be found"

    def __str__(self) -> str:
        lines = [str(finding) for finding in self] or [self.verdict_if_empty]
        lines += [f"notice: {notice.layer}: {notice.what}" for notice in self.notices]
        lines += [f"examined: {', '.join(self.examined)}"] * bool(self.examined)
        lines += [f"not examined: {missing}" for missing in self.unexamined]
        names = dict.fromkeys(finding.page.rpartition("/")[2] for finding in self if finding.kind)  # once each
        return "\n".join([*lines, *[f"pages: {PAGES}/{', '.join(names)}"] * bool(names)])

    def title_shown(self) -> str:
        """How many faults there are, what was examined and what was not."""
        parts = [f"{len(self):,} likely faults" if self else self.verdict_if_empty]
        for label, kinds in (("examined", self.examined), ("not examined", self.unexamined)):
            parts += [f"{label}: {', '.join(kind.partition(':')[0] for kind in kinds)}"] * bool(kinds)
        return "; ".join(parts)

    def rows_shown(self) -> Rows:
        """One row for each finding and each notice."""
        told = [*((one, one.what) for one in self), *((one, f"notice: {one.what}") for one in self.notices)]
        rows = ([(one.layer, "" if one.since is None else f"{one.since}", what, one.remedy)] for one, what in told)
        return ("layer", "since tick", "what", "try"), rows, len(told)


def because(reason: str) -> str:
    """A reason to be put behind what was seen, if there is one."""
    return f": {reason}" if reason else ""


def fault(
    kind: str, layer: str, what: str, since: int | None = None, *, causes: Sequence[str] = (), severity: Severity | None = None
) -> Finding:
    """A finding of a kind that is known.

    Args:
        causes: the likely causes, if more is known than the kind tells.
        severity: if it is another than that of the kind.
    """
    known = KINDS[kind]
    likely = tuple(causes) or known.causes
    # A remedy of the kind fits all its causes; one of a cause says more, if that one was made out.
    remedy = CAUSES[likely[0]].remedy if causes or not known.remedy else known.remedy
    return Finding(layer, what, known.why, remedy, since, kind, likely, severity or known.severity)
