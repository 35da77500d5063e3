"""The layers of charts: which modules they are, and their results."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from torch import nn

from recorders.recordings.recording import Subrecording
from recorders.watch.lenses.lens import Lens

__all__ = ["is_watched", "natural_key", "results_by_group", "value_at"]


def is_watched(name: str, module: nn.Module, depth: int | None, inner: bool) -> bool:
    """Whether an inspector watches a module: a leaf or, if a depth is given, a module at that level or a leaf above it.

    With `inner` also the modules that contain these.
    """
    leaf = inner or next(module.children(), None) is None
    if depth is None:
        return leaf
    level = name.count(".") + 1 if name else 0
    return level == depth or (leaf and level < depth)


def results_by_group(lens: Lens, parts: Mapping[str, Subrecording]) -> dict[str, dict[str, dict[str, Any]]]:
    """Results by group of monitors, by layer in network order, and by leaf of the output; empty if the layer did not run."""
    found: dict[str, dict[str, dict[str, Any]]] = {group: {} for group in lens.monitors}
    for name, part in parts.items():
        group, _, layer = name.partition("/")
        found[group][layer or f"({part.module or 'net'})"] = part.leaves()  # the network itself has no name
    return found


def value_at(result: Any, path: tuple[str, ...]) -> Any:
    """The value at a path of a nested result; None if there is none (a single pass has no correlation)."""
    for part in path:
        result = result.get(part) if isinstance(result, Mapping) else None
    return result


def natural_key(name: str) -> list[str | int]:
    """A key that sorts numbers in names as numbers: out[2] before out[10]."""
    return [int(part) if index % 2 else part for index, part in enumerate(re.split(r"(\d+)", name))]
