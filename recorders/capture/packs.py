"""Packs: the tensors of states, those of one dtype and shape in one tensor, and the layout by which they are found there."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
from typing import Any

from torch import Tensor

from reducers import State

__all__ = ["leaf_paths", "leaves_of", "packed", "packed_together", "unpacked"]

NEXT = "\x1f"  # separates the fields of a layout


def packed(states: Mapping[str, Mapping[str, Any]]) -> tuple[str, list[list[Any]]]:
    """Returns the tensors of states, those of one dtype and shape together, and the layout by which they are found.

    The compiler writes each directly into its stack, so there are fewer tensors to copy.
    """
    packs: list[list[Any]] = []
    layout = ""
    for path, state in states.items():
        for key, value in state.items():
            index = _fitting(packs, value)
            layout += f"{path}{NEXT}{key}{NEXT}{index}{NEXT}{len(packs[index])}{NEXT}"
            packs[index].append(value)
    return layout, packs


def packed_together(states: Iterable[Mapping[str, Mapping[str, Any]]]) -> tuple[list[str], list[str], list[list[Any]]]:
    """Returns of each observation its layout, and which part of which packs is its own; and the packs."""
    layouts, spans, packs = list[str](), list[str](), list[list[Any]]()
    for one in states:
        layout, own = packed(one)
        layouts.append(layout)
        spans.append(" ".join(_extend(packs, pack) for pack in own))
    return layouts, spans, packs


def _fitting(packs: list[list[Any]], value: Any) -> int:
    """Returns the index of the pack for tensors like `value`, which may be a new one."""
    for index, pack in enumerate(packs):
        # As texts: to compare the symbol of a graph with a number would be a guard.
        if pack[0].dtype == value.dtype and str(tuple(pack[0].shape)) == str(tuple(value.shape)):
            return index
    packs.append([])
    return len(packs) - 1


def _extend(packs: list[list[Any]], pack: Sequence[Any]) -> str:
    """Adds tensors to the pack for those like them; returns the index of the pack, their place in it, and how many they are."""
    index = _fitting(packs, pack[0])
    packs[index].extend(pack)
    return f"{index} {len(packs[index]) - len(pack)} {len(pack)}"


@lru_cache(maxsize=4096)
def columns(layout: str) -> tuple[tuple[str, str, int, int], ...]:
    """Returns for each tensor that a graph passes on: its leaf path, key, pack and index in the pack."""
    parts = layout.split(NEXT)
    return tuple(
        (path, key, int(pack), int(index)) for path, key, pack, index in zip(*(parts[i::4] for i in range(4)), strict=False)
    )


def leaf_paths(layout: str) -> tuple[str, ...]:
    """Returns the paths of the leaves."""
    return tuple(dict.fromkeys(path for path, *_ in columns(layout)))


def leaves_of(layout: str, packs: Sequence[Tensor], dim: int = 0) -> dict[str, Tensor]:
    """Returns the leaves that packs hold as they are, by path; with `dim=1`, of several stacked observations."""
    return {path: packs[pack].select(dim, index) for path, _, pack, index in columns(layout)}


def unpacked(layout: str, packs: Sequence[Tensor], dim: int = 0) -> dict[str, State]:
    """Returns the State of an observation by leaf path, as views of the packs; with `dim=1`, of several stacked observations."""
    lifted: dict[str, State] = {}
    for path, key, pack, index in columns(layout):
        state = lifted.setdefault(path, {})
        if key:
            state[key] = packs[pack].select(dim, index)
    return lifted
