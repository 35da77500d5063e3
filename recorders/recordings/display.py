"""Results as short text, and tables of them in terminals and notebooks."""

from __future__ import annotations

import html
import math
from collections.abc import Iterable, Iterator, KeysView, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Any, TypeAlias

import torch
from torch import Tensor

if TYPE_CHECKING:
    from rich.console import Console, ConsoleOptions
    from rich.table import Table as RichTable
    from rich.text import Text

LOST = "\u00d7"
"""Stands for a value that is not finite."""
_BARS = "\u2581\u2582\u2583\u2584\u2585\u2586\u2587\u2588"

NET = "(net)"

Rows: TypeAlias = "tuple[Sequence[str], Iterable[Sequence[Sequence[str]]], int]"
"""Headings; the rows of each item, made when they are looked at, of as many cells; and the number of items."""

_SHOWN = 4  # statistics of one result, or elements of one tensor
_LINES = 20  # rows as text
_ROWS = 100  # rows in terminals and notebooks
_NARROW, _UNBOUNDED = 60, 1 << 20  # characters: below the first, columns are folded beyond recognition
_CELL, _LINE = 52, 110  # characters; the first is that of the longest remark of a plan


class ShownAsTable:
    """An object that is shown as one table of rows: as text, by `rich`, and in notebooks. Only rows that are shown are computed."""

    def title_shown(self) -> str:
        """One line above the table."""
        raise NotImplementedError

    def rows_shown(self) -> Rows:
        """Headings and rows."""
        raise NotImplementedError

    def __repr__(self) -> str:
        headings, rows, more = self._shown(_LINES)
        cells = [[cut(" ".join(cell.split()), _CELL) for cell in row] for row in (headings, *rows)] if rows else []
        widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
        lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in cells]
        title = cut(printable(self.title_shown()), 2 * _LINE)
        return "\n".join([title, *(cut(line, _LINE) for line in lines), *([more] if more else [])])

    def __rich__(self) -> FittingTable:
        headings, rows, more = self._shown(_ROWS)
        return FittingTable(headings, rows, title=printable(self.title_shown()), caption=more)

    def _repr_html_(self) -> str:
        headings, rows, more = self._shown(_ROWS)
        lines = [_row("th", headings), *(_row("td", row) for row in rows)] if rows else []
        title = f'<caption style="text-align: left">{html.escape(printable(self.title_shown()))}</caption>'
        return "\n".join(["<table>", title, *lines, "</table>", *([f"<p>{more}</p>"] if more else [])])

    def _shown(self, most: int) -> tuple[Sequence[str], list[Sequence[str]], str]:
        """Headings and at most so many rows, without columns that are empty in all of them; and how many more there are."""
        headings, items, left = self.rows_shown()
        rows: list[Sequence[str]] = []
        rest = iter(items)
        while len(rows) < most and (item := next(rest, None)) is not None:
            rows += item
            left -= 1
        left += max(len(rows) - most, 0)
        rows = rows[:most]
        filled = [place for place in range(len(headings)) if any(row[place] for row in rows)]
        shown = [[printable(row[place]) for place in filled] for row in rows]  # a name may be from anywhere
        return [headings[place] for place in filled], list(shown), f"... and {left:,} more" if left else ""


class Recorded(ShownAsTable):
    """An object that is shown as what it recorded so far."""

    def snapshot(self) -> Any:
        """What was recorded so far."""
        raise NotImplementedError

    def title_shown(self) -> str:
        return str(self.snapshot().title_shown())

    def rows_shown(self) -> Rows:
        rows: Rows = self.snapshot().rows_shown()
        return rows


class Names(KeysView[str]):
    """The names of a mapping, which print as a list."""

    def __repr__(self) -> str:
        return listed(self)


class FittingTable:
    """A table for `rich` without lines; a block for each row where the terminal is too narrow to read its columns.

    Args:
        headings: of the columns.
        rows: cells, of one line each.
        numbers: how many of the last columns are to the right.
        title: above the table.
        caption: below it.
    """

    def __init__(
        self, headings: Sequence[str], rows: Sequence[Sequence[str]], numbers: int = 0, *, title: str = "", caption: str = ""
    ) -> None:
        self.headings, self.rows, self.numbers, self.title, self.caption = headings, rows, numbers, title, caption

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[RichTable | Text]:
        from rich.table import Table as RichTable  # here, as it takes long to import and most programs print none
        from rich.text import Text

        style: Any = {"box": None, "pad_edge": False, "header_style": "bold", "padding": (0, 2, 0, 0)}
        texts = [[*map(Text, row)] for row in self.rows]
        table = RichTable(**style)
        for place, heading in enumerate(self.headings):
            right = place >= len(self.headings) - self.numbers
            table.add_column(heading, justify="right" if right else "left", no_wrap=right, overflow="fold")
        for row in texts:
            table.add_row(*row)
        fits = console.measure(table, options=options.update(width=_UNBOUNDED)).maximum <= options.max_width
        if fits or options.max_width >= _NARROW:
            table.title, table.title_justify = Text(self.title) if self.title else None, "left"
            table.caption, table.caption_justify = self.caption or None, "left"
            yield table
            return
        if self.title:
            yield Text(self.title, style="italic")
        for first, *others in texts:
            first.stylize("bold")
            yield first
            block = RichTable(show_header=False, **style)
            for heading, cell in zip(self.headings[1:], others, strict=True):
                if cell:
                    block.add_row(f"  {heading}", cell)
            yield block
        if self.caption:
            yield Text(self.caption)


def shown_name(name: str) -> str:
    """A name as it is shown: the net itself has the name "", which is shown, and found, as "(net)"."""
    return name or NET


def printable(text: object) -> str:
    r"""A text of one line or of several, in which what a terminal would obey, or cannot show, is escaped.

    >>> printable("layer\x1b[2J \ud800")
    'layer\\x1b[2J \\ud800'
    """
    return "\n".join(
        line if line.isprintable() else "".join(c if c.isprintable() else ascii(c)[1:-1] for c in line)
        for line in str(text).split("\n")
    )


def is_named(name: str, pattern: str) -> bool:
    """Whether a name is `pattern`, or matches it as a glob; "(net)" is the net itself."""
    return pattern in (name, shown_name(name)) or fnmatchcase(name, pattern)


def listed(names: Iterable[object]) -> str:
    """The first of them as a list, for messages.

    >>> listed(["out", "grad"]), listed(range(23))[-14:]
    ("['out', 'grad']", '19] and 3 more')
    """
    every = list(names)
    return f"{every[:_LINES]}" + (f" and {len(every) - _LINES:,} more" if len(every) > _LINES else "")


def cut(text: str, most: int) -> str:
    """A text with at most so many characters.

    >>> cut("ForwardMonitor", 10)
    'Forward...'
    """
    return text if len(text) <= most else f"{text[: most - 3]}..."


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


def flat_numbers(result: Any) -> dict[str, Tensor]:
    """The numbers in a nested result as float64 tensors on the CPU, by path; empty tensors are left out.

    Of complex numbers they are the real and the imaginary parts.
    """
    found: dict[str, Tensor] = {}
    for path, x in flat_leaves(result):
        if isinstance(x, Tensor) and x.numel():
            x = x.detach().cpu()
            parts = {"real": x.real, "imag": x.imag} if x.is_complex() else {"": x}
            found.update({f"{path}.{part}".strip("."): one.double() for part, one in parts.items()})
    return found


def flat_leaves(result: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """What a nested result holds, numbers as tensors, by path: names joined by dots."""
    if isinstance(result, Mapping):
        for name, part in result.items():
            yield from flat_leaves(part, f"{path}.{name}" if path else str(name))
        return
    if isinstance(result, (float, complex)):
        result = torch.tensor(result, dtype=torch.complex128 if isinstance(result, complex) else torch.float64, device="cpu")
    elif isinstance(result, int) and -(2**63) <= result < 2**63:
        result = torch.tensor(result, device="cpu")
    yield path, result


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


def sparkline(values: Sequence[float | None], log_scale: bool = False) -> str:
    """One mark for each value, from the lowest to the highest; a cross if it is not finite, a space if it is None.

    >>> sparkline([0.0, 1.0, None, math.nan, 4.0, 8.0])
    '\u2581\u2582 \u00d7\u2585\u2588'
    """
    finite = [value for value in values if value is not None and math.isfinite(value)]
    scaled = math.log if log_scale and all(value > 0 for value in finite) else float
    low, high = (scaled(min(finite)), scaled(max(finite))) if finite else (0.0, 0.0)
    steps = len(_BARS) - 1

    def mark(value: float | None) -> str:
        if value is None or not math.isfinite(value):
            return " " if value is None else LOST
        return _BARS[round((scaled(value) - low) / (high - low) * steps) if high > low else steps // 2]

    return "".join(map(mark, values))


def number(value: float) -> str:
    """A number with four digits; integers below a million as they are."""
    return str(int(value)) if math.isfinite(value) and value == int(value) and abs(value) < 1e6 else f"{value:.4g}"
