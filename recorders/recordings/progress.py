"""Progress: what a monitor needs, beside its states, to go on bit for bit as if it had not been saved and loaded."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

__all__ = ["Progress"]


@dataclass(frozen=True)
class Progress:
    """What was recorded so far, as a monitor keeps it.

    Attributes:
        counts: the number of observations in the states, by leaf.
        merged: the number of observations that other monitors or recordings have brought in.
        eligible: how many calls `every` has counted, by stream, less one.
    """

    counts: Mapping[str, int] = field(default_factory=dict)
    merged: int = 0
    eligible: Mapping[str, int] = field(default_factory=dict)

    def as_data(self) -> dict[str, Any]:
        """Returns it as data, of which `Progress(**data)` makes it again."""
        return {"counts": dict(self.counts), "merged": self.merged, "eligible": dict(self.eligible)}
