"""Results as short text, and tables of them in terminals and notebooks."""

from __future__ import annotations

import html
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor

__all__ = ["Rows", "Table", "brief", "flat_numbers", "number"]

Rows: TypeAlias = "tuple[Sequence[str], Sequence[Sequence[str]]]"
"""Headings, and rows of as many cells."""

_SHOWN = 4  # statistics of one result, or elements of one tensor


class Table:
    """An object that notebooks show as a table."""

    def rows_shown(self) -> Rows:
        """Headings and cells."""
        raise NotImplementedError

    def _repr_html_(self) -> str:
        headings, rows = self.rows_shown()
        lines = [_row("th", headings), *(_row("td", row) for row in rows)]
        return f"<table>\n{chr(10).join(lines)}\n</table>"


def _row(tag: str, cells: Iterable[str]) -> str:
    return "<tr>" + "".join(f'<{tag} style="text-align: left">{html.escape(cell)}</{tag}>' for cell in cells) + "</tr>"


def brief(result: Any) -> str:
    """A result in a few words: of tensors with many elements the extremes and the shape.

    >>> brief({"mean": torch.tensor(0.5), "max": torch.arange(8.0)}), brief(torch.tensor([1.0, 2.0])), brief(None)
    ('mean 0.5, max 0 to 7 in 8', '1 2', 'nothing')
    """
    found = flat_numbers(result)
    common = _common(found)
    texts = [f"{path.removeprefix(common)} {_numbers(x)}".strip() for path, x in found.items() if not _is_count(path, found)]
    return ", ".join([*texts[:_SHOWN], *(["..."] if len(texts) > _SHOWN else [])]) or "nothing"


def flat_numbers(result: Any, path: str = "") -> dict[str, Tensor]:
    """The numbers in a nested result as float64 tensors on the CPU, by path: names joined by dots."""
    if isinstance(result, Mapping):
        nested = ((f"{path}.{name}" if path else str(name), part) for name, part in result.items())
        return {key: x for name, part in nested for key, x in flat_numbers(part, name).items()}
    if isinstance(result, (bool, int, float)):
        result = torch.tensor(result)
    if not isinstance(result, Tensor) or not result.numel() or result.is_complex():
        return {}
    return {path: result.detach().cpu().double()}


def _is_count(path: str, among: Mapping[str, Any]) -> bool:
    """Whether it tells how much was recorded, beside others that tell what."""
    return path.rpartition(".")[2] == "count" and len(among) > 1


def _common(paths: Iterable[str]) -> str:
    """What all paths begin with, up to a dot."""
    starts = {path.rpartition(".")[0] for path in paths}
    return f"{starts.pop()}." if len(starts) == 1 and "" not in starts else ""


def _numbers(x: Tensor) -> str:
    if x.numel() <= _SHOWN:
        return " ".join(number(value) for value in x.reshape(-1).tolist())
    low, high = number(x.min().item()), number(x.max().item())
    return f"{low if low == high else f'{low} to {high}'} in {'x'.join(map(str, x.shape))}"


def number(value: float) -> str:
    """A number with four digits; integers below a million as they are."""
    return str(int(value)) if math.isfinite(value) and value == int(value) and abs(value) < 1e6 else f"{value:.4g}"
