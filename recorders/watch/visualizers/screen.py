"""Screens: the end of a terminal, or the outputs of a notebook, with parts that are redrawn in place."""

from __future__ import annotations

import importlib
import os
import re
import shutil
import sys
import threading
import unicodedata
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import IO, Any, Protocol

_KEPT = 1 << 16
"""How many characters of the program's output between two drawings are kept, to be written above the next one."""


class Screen(Protocol):
    """What a table or a progress bar is drawn on."""

    def put(self, part: object, lines: Sequence[str]) -> None:
        """Draws a part, or replaces what was drawn of it."""

    def leave(self, part: object) -> None:
        """Ends a part: what was drawn last stays, and scrolls away."""

    @property
    def size(self) -> tuple[int, int]:
        """Columns and lines."""


def screen_of(stream: IO[str], force: bool = False) -> Screen | None:
    """The screen that a stream writes to: the same for all who ask; None if it is a file, a pipe or a terminal that cannot move."""
    if stream is sys.stdout and kernel() is not None:
        return NotebookScreen()
    if not force and not _is_terminal(stream):
        return None
    return _terminals.get(id(stream)) or TerminalScreen(stream)


class NotebookScreen:
    """Each part is an output of its own below the cell that runs. Notebooks show the colours that terminals show."""

    size = (100, 48)

    def __init__(self) -> None:
        self._displays = Displays()

    def put(self, part: object, lines: Sequence[str]) -> None:
        self._displays.show(part, {"text/plain": "\n".join(lines)})

    def leave(self, part: object) -> None:
        self._displays.forget(part)


class TerminalScreen:
    """Parts below each other at the end of a terminal.

    What the program prints appears below them at once, and above them when they are drawn next. So text that rewrites its own line,
    such as a progress bar of the program, works as ever. For this, `write` of standard output and standard error are watched as
    long as there are parts. Nothing that the program prints is changed or lost: if it moves the cursor in a way that is not
    understood, the parts stay where they are, and are drawn anew below.
    """

    def __init__(self, stream: IO[str]) -> None:
        self._stream, self._lock, self._process = stream, threading.RLock(), os.getpid()
        self._writes: dict[int, tuple[Any, Callable[[str], Any], Callable[[str], Any]]] = {}
        self._parts: dict[object, Sequence[str]] = {}
        self._shown = 0  # lines of the parts that stand in the terminal, and can be replaced
        self._since, self._cursor = "", Cursor()  # what the program wrote since, below the parts
        _terminals[id(stream)] = self

    @property
    def size(self) -> tuple[int, int]:
        return tuple(shutil.get_terminal_size())  # type: ignore[return-value]

    def put(self, part: object, lines: Sequence[str]) -> None:
        with self._lock:
            self._parts[part] = lines
            self._watch()
            self._draw()

    def leave(self, part: object) -> None:
        with self._lock:
            if part in self._parts:
                self._draw(self._parts.pop(part))
            if not self._parts:
                self._unwatch()
                self._shown, self._since, self._cursor = 0, "", Cursor()

    def _draw(self, left: Sequence[str] = ()) -> None:
        """Replaces the parts: above them what the program wrote, and a part that is left; below them its unfinished line."""
        columns, rows = self.size
        lines = [line for part in self._parts.values() for line in part][: max(rows - 2, 1)]
        above, newline, rest = self._since.rpartition("\n")
        above += newline
        end = Cursor().after(self._since, columns) or self._cursor
        if end.rose:  # lines that are still rewritten cannot be told apart
            above, rest = self._since + "\n" * (end.lowest - end.row + 1), ""
        if self._shown:
            above = f"\r\x1b[{self._shown + self._cursor.row}A\x1b[J{above}"
        elif self._cursor.column:
            above += "\n"
        for stream, _, _ in self._writes.values():
            stream.flush()
        _, write, _ = self._writes[id(self._stream)]
        write("".join((above, *(f"{line}\n" for line in (*left, *lines)), rest)))
        self._stream.flush()
        self._shown, self._since = len(lines), rest
        self._cursor = Cursor().after(rest, columns) or Cursor()

    def _written(self, write: Callable[[str], Any], text: str) -> Any:
        """What the program writes while there are parts."""
        if not text or not self._parts or os.getpid() != self._process:
            return write(text)
        with self._lock:
            columns, rows = self.size
            after = self._cursor.after(text, columns)
            if not self._shown or after is None or len(self._since) + len(text) > _KEPT:
                self._shown, self._since, self._cursor = 0, "", Cursor(column=int(not text.endswith("\n")))
                return write(text)
            if self._shown + after.lowest < rows - 1:
                self._since, self._cursor = self._since + text, after
                if "\r" in text and not after.rose:
                    self._since = _last_version(self._since)
                return write(text)
            self._since += text  # no room below: the parts would scroll out of reach
            self._draw()
            return len(text)

    def _watch(self) -> None:
        others = [one for one in (sys.stdout, sys.stderr) if _is_terminal(one)] if _is_terminal(self._stream) else []
        for stream in (self._stream, *others):
            if id(stream) not in self._writes:
                write = stream.write
                watching = partial(self._written, write)
                stream.write = watching  # type: ignore[method-assign]
                self._writes[id(stream)] = stream, write, watching

    def _unwatch(self) -> None:
        for key, (stream, write, watching) in list(self._writes.items()):
            if vars(stream).get("write") is watching:  # otherwise somebody else watches too, and still calls this
                del stream.write
                if stream.write != write:
                    stream.write = write
                del self._writes[key]


def _last_version(text: str) -> str:
    """A text whose last line, if it was rewritten, has its last version only."""
    above, newline, line = text.rpartition("\n")
    end = "\r" if line.endswith("\r") else ""
    return above + newline + line.rstrip("\r").rpartition("\r")[2] + end


def _is_terminal(stream: Any) -> bool:
    """Whether a stream is a terminal that understands how to move the cursor."""
    moves = os.environ.get("TERM", "") not in ("dumb", "unknown") and (os.name != "nt" or "WT_SESSION" in os.environ)
    try:
        return moves and bool(stream.isatty())
    except (AttributeError, ValueError):  # no stream, or a closed one
        return False


_terminals: weakref.WeakValueDictionary[int, TerminalScreen] = weakref.WeakValueDictionary()


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


def kernel() -> Any:
    """The running shell of IPython if it is in a kernel, such as that of a notebook; None in a terminal."""
    ipython = sys.modules.get("IPython")
    shell = None if ipython is None else ipython.get_ipython()
    return shell if getattr(shell, "kernel", None) is not None else None


class Displays:
    """Outputs by key: the first `show` in a cell makes an output below it, further ones replace its content."""

    def __init__(self) -> None:
        self._handles: dict[object, tuple[object, Any]] = {}

    def show(self, key: object, data: dict[str, str]) -> None:
        """Shows data by MIME type, such as `{"text/plain": "..."}` or `{"image/png": base64}`."""
        cell = getattr(kernel(), "execution_count", None)
        made_in, handle = self._handles.get(key, (None, None))
        if handle is None or made_in != cell:
            display = importlib.import_module("IPython.display")
            self._handles[key] = cell, display.display(data, raw=True, display_id=True)
        else:
            handle.update(data, raw=True)

    def forget(self, key: object) -> None:
        """What is shown stays; the next `show` makes a new output."""
        self._handles.pop(key, None)
