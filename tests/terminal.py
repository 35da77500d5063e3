"""A terminal that keeps what it shows: enough of one to tell whether lines are redrawn in place."""

from __future__ import annotations

import io
import re
import sys

import pytest

__all__ = ["Terminal", "in_terminal"]


class Terminal(io.StringIO):
    """A stream that says it is a terminal. `lines` is all that was ever shown and not overwritten, scrolled away or not.

    The cursor cannot move up beyond the first of the last `height` lines, as in a real one.
    """

    def __init__(self, width: int = 80, height: int = 24) -> None:
        super().__init__()
        self.width, self.height = width, height
        self.cells: list[list[str]] = [[]]
        self.row = self.column = 0
        self.written = 0

    def isatty(self) -> bool:
        return True

    def write(self, text: str) -> int:
        self.written += len(text)
        for token in re.finditer(r"\x1b\[([\d;?]*)([A-Za-z])|(.)", text, re.DOTALL):
            argument, command, character = token.groups()
            if command == "A":
                self.row = max(self.row - int(argument or 1), len(self.cells) - self.height, 0)
            elif command == "J":
                del self.cells[self.row + 1 :]
                del self.cells[self.row][self.column :]
            elif command == "K":
                del self.cells[self.row][self.column :]
            elif command:
                assert command in "mhl", f"a terminal of these tests does not know {token[0]!r}"
            elif character == "\r":
                self.column = 0
            elif character == "\n":
                self._down()
            else:
                if self.column == self.width:
                    self._down()
                line = self.cells[self.row]
                line.extend(" " * (self.column + 1 - len(line)))
                line[self.column] = character
                self.column += 1
        return len(text)

    def _down(self) -> None:
        self.row, self.column = self.row + 1, 0
        if self.row == len(self.cells):
            self.cells.append([])

    @property
    def lines(self) -> list[str]:
        return ["".join(line).rstrip() for line in self.cells]


def in_terminal(monkeypatch: pytest.MonkeyPatch, width: int = 80, height: int = 24) -> Terminal:
    """Makes a terminal standard output. To be called in the test itself: pytest sets standard output after fixtures."""
    size = {"COLUMNS": str(width), "LINES": str(height)}
    for name, value in {**size, "TERM": "xterm", "WT_SESSION": "1", "NO_COLOR": "1"}.items():
        monkeypatch.setenv(name, value)
    made = Terminal(width, height)
    monkeypatch.setattr(sys, "stdout", made)
    return made
