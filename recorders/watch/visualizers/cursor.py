"""Cursor: where a text leaves the cursor of a terminal."""

from __future__ import annotations

import re
import unicodedata
from dataclasses import dataclass, replace

__all__ = ["Cursor"]

_TOKEN = re.compile(r"\n|\r|\x1b\[([\d;?]*)([A-Za-z])|[^\n\r\x1b]+|\x1b")


@dataclass(frozen=True)
class Cursor:
    """A place in a terminal, counted from where a text began.

    Attributes:
        row: lines below that place.
        column: from the left edge.
        lowest: the lowest row so far.
        rose: whether the text moved the cursor up, as nested progress bars do.

    >>> Cursor().after("epoch 1\\nloss", width=80)
    Cursor(row=1, column=4, lowest=1, rose=False)
    """

    row: int = 0
    column: int = 0
    lowest: int = 0
    rose: bool = False

    def after(self, text: str, width: int) -> Cursor | None:
        """The cursor after a text; None if that is not known, or if it would be above the beginning."""
        row, column, lowest, rose = self.row, self.column, self.lowest, self.rose
        for token in _TOKEN.finditer(text):
            kind = token[2]
            if token[0] == "\n":
                row, column = row + 1, 0
            elif token[0] == "\r":
                column = 0
            elif kind in ("A", "B"):
                rows = int(token[1] or 1) if (token[1] or "1").isdigit() else 0
                row, rose = row + (rows if kind == "B" else -rows), rose or kind == "A"
            elif token[0] == "\x1b" or (kind and kind not in "mKhl"):  # colours, erasing in a line and modes move nothing
                return None
            elif not kind:
                column += sum(1 + (unicodedata.east_asian_width(character) in "WF") for character in token[0])
                wrapped = max(column - 1, 0) // width
                row, column = row + wrapped, column - wrapped * width
            if row < 0:
                return None
            lowest = max(lowest, row)
        return replace(self, row=row, column=column, lowest=lowest, rose=rose)
