"""Explaining: which findings tell of one cause, so that it is told once, and which are only notices."""

from __future__ import annotations

from collections.abc import Sequence

from recorders.watch.diagnosis.evidence import Evidence
from recorders.watch.diagnosis.finding import Finding

__all__ = ["explained"]


def explained(found: Sequence[Finding], known: Evidence) -> tuple[list[Finding], list[Finding]]:
    """The faults, worst first, and the notices."""
    return [one for one in found if one.severity != "notice"], [one for one in found if one.severity == "notice"]
