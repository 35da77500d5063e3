"""Parts at the end of a terminal are redrawn in place, and what the program prints stays whole."""

from __future__ import annotations

import io
import logging
import os

import pytest
from terminal import Terminal, in_terminal

from recorders.watch.visualizers.screen import TerminalScreen, screen_of


def started(monkeypatch: pytest.MonkeyPatch) -> tuple[Terminal, TerminalScreen]:
    terminal = in_terminal(monkeypatch, 40, 12)
    found = screen_of(terminal)
    assert isinstance(found, TerminalScreen)
    return terminal, found


def test_parts_are_replaced_and_stand_below_each_other(monkeypatch: pytest.MonkeyPatch) -> None:
    table, bar = object(), object()
    terminal, both = started(monkeypatch)
    assert screen_of(terminal) is both
    both.put(bar, ["bar 0"])
    both.put(table, ["a 1", "b 1"])
    both.put(bar, ["bar 1"])
    both.put(table, ["a 2"])
    assert terminal.lines == ["bar 1", "a 2", ""]
    both.leave(bar)
    both.put(table, ["a 3", "b 3"])
    assert terminal.lines == ["bar 1", "a 3", "b 3", ""]
    both.leave(table)
    both.leave(table)
    print("the end")
    assert terminal.lines == ["bar 1", "a 3", "b 3", "the end", ""]


def test_what_is_printed_is_whole_and_above_the_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal, shown = started(monkeypatch)
    logged = logging.StreamHandler(terminal)
    print("before")
    for tick in range(30):
        shown.put(1, [f"tick {tick}", "table"])
        print("line", tick)
        logged.emit(logging.LogRecord("n", 20, "p", 1, f"logged {tick}", None, None))
        print("no end", end="")
        if tick % 2:
            print(" yet" * 20)  # wider than the terminal
    shown.leave(1)
    text = "\n".join(f"line {tick}\nlogged {tick}\nno end" + " yet" * 20 * (tick % 2) for tick in range(30))
    text = text.replace("no end\n", "no end")  # without its end, a line goes on
    expected = [line[at : at + 40].rstrip() for line in text.split("\n") for at in range(0, len(line), 40)]
    assert terminal.lines == ["before", *expected, "tick 29", "table", ""]


def test_more_lines_than_the_terminal_has_do_not_leave_copies(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal, shown = started(monkeypatch)
    shown.put(1, ["a", "b", "c"])
    for number in range(50):
        print(number)
    print("\n".join(map(str, range(50, 100))))
    shown.put(1, ["d"])
    assert terminal.lines == [*map(str, range(100)), "d", ""]


def test_a_progress_bar_of_the_program_keeps_its_line(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal, shown = started(monkeypatch)
    for tick in range(3):
        shown.put(1, [f"table {tick}"])
        for batch in range(100):
            terminal.write(f"\rbatch {batch}")
            assert terminal.lines[-2:] == [f"table {tick}", f"batch {batch}"]
        if tick == 1:
            shown.put(1, ["table again"])
            assert terminal.lines[-2:] == ["table again", "batch 99"]
        terminal.write("\n")
    shown.leave(1)
    assert terminal.lines == ["batch 99", "batch 99", "batch 99", "table 2", ""]


def test_nested_progress_bars_stay_two_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal, shown = started(monkeypatch)
    shown.put(1, ["table 0"])
    for batch in range(20):
        terminal.write("\router")
        terminal.write(f"\n\rinner {batch}\x1b[A")
    assert terminal.lines == ["table 0", "outer", "inner 19"]
    shown.put(1, ["table 1"])
    assert terminal.lines == ["outer", "inner 19", "table 1", ""]


@pytest.mark.parametrize("text", ["\x1b[2J", "\x1b[5;5H", "\x1b7", "\x1b[9A", "x\r" * 40_000])
def test_parts_are_drawn_anew_if_the_cursor_may_be_anywhere(monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    in_terminal(monkeypatch)
    quiet = io.StringIO()
    quiet.isatty = lambda: True  # type: ignore[method-assign]
    shown = screen_of(quiet)
    assert shown is not None
    shown.put(1, ["first"])
    quiet.write(text)
    shown.put(1, ["second"])
    assert quiet.getvalue().rstrip("\n").split("\n")[-1] == "second"
    assert quiet.getvalue().startswith(f"first\n{text}")


def test_streams_are_watched_only_as_long_as_there_are_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal, shown = started(monkeypatch)
    assert "write" not in vars(terminal)
    shown.put(1, ["a"])
    assert "write" in vars(terminal)
    shown.leave(1)
    assert "write" not in vars(terminal)


def test_somebody_who_watches_later_is_not_cut_off(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal, shown = started(monkeypatch)
    seen = []
    shown.put(1, ["a"])
    below = terminal.write

    def watch(text: str) -> int:
        seen.append(text)
        return below(text)

    terminal.write = watch  # type: ignore[method-assign]
    shown.leave(1)
    assert terminal.write is watch
    shown.put(1, ["b"])
    print("text")
    shown.put(1, ["c"])
    assert terminal.lines == ["a", "text", "c", ""]
    assert "text" in seen


def test_files_and_terminals_that_cannot_move_are_no_screens(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal, _ = started(monkeypatch)
    assert screen_of(io.StringIO()) is None
    closed = io.StringIO()
    closed.close()
    assert screen_of(closed) is None
    assert screen_of(io.StringIO(), force=True) is not None
    monkeypatch.setenv("TERM", "dumb")
    assert screen_of(terminal) is None


def test_a_forked_process_writes_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal, shown = started(monkeypatch)
    shown.put(1, ["a"])
    monkeypatch.setattr(os, "getpid", lambda: -1)
    print("from a worker")
    assert terminal.lines == ["a", "from a worker", ""]
