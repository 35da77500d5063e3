"""The commands: each is a function in the file named for it. To add one, write the function and add it to `COMMANDS`."""

from __future__ import annotations

import contextlib
import functools
import importlib.metadata
import io
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, Any

import torch
import typer

from recorders.cli.demo import demo
from recorders.cli.diff import diff
from recorders.cli.export import export
from recorders.cli.merge import merge
from recorders.cli.plot import plot
from recorders.cli.repair import repair
from recorders.cli.replay import replay
from recorders.cli.report import report
from recorders.cli.show import show
from recorders.cli.verify import verify
from recorders.cli.watch import watch
from recorders.errors import MissingExtraError, RecorderError
from recorders.recordings.atomic_files import as_path
from reducers import ReducerError
from reducers.kernels.cpp import library

__all__ = ["COMMANDS", "run"]

COMMANDS: tuple[Callable[..., None], ...] = (demo, show, watch, diff, report, plot, replay, export, merge, verify, repair)

_PIPE_CLOSED = 141
"""The status of a program that SIGPIPE ends, as shells tell it."""

app = typer.Typer(no_args_is_help=True, pretty_exceptions_enable=False, context_settings={"help_option_names": ["-h", "--help"]})


def _guarded(command: Callable[..., None]) -> Callable[..., None]:
    """The command; what it raises ends it with one line and an exit status."""

    @functools.wraps(command)
    def guarded(*args: Any, **kwargs: Any) -> None:
        try:
            command(*args, **{name: _at_home(value) for name, value in kwargs.items()})
            sys.stdout.flush()
        except BrokenPipeError:
            # Whoever read the output has enough of it. What is still to be written goes nowhere, so that nobody complains at exit.
            with contextlib.suppress(OSError, ValueError):
                os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            raise typer.Exit(_PIPE_CLOSED) from None
        except (RecorderError, ReducerError, OSError) as error:
            print(f"recorders: {error}", file=sys.stderr)
            raise typer.Exit(2 if isinstance(error, MissingExtraError) else 1) from None
        except KeyboardInterrupt:
            print("recorders: interrupted", file=sys.stderr)
            raise typer.Exit(130) from None

    return guarded


def _at_home(value: Any) -> Any:
    """A path with its leading "~" expanded, which no shell does in `--out=~/x`; other values as they are."""
    if isinstance(value, list):
        return [_at_home(item) for item in value]
    return Path(as_path(value)) if isinstance(value, Path) else value


for each in COMMANDS:
    app.command()(_guarded(each))


def _print_version(wanted: bool) -> None:
    if wanted:
        try:
            version = importlib.metadata.version("torch-recorders")
        except importlib.metadata.PackageNotFoundError:
            version = "from a source tree, not installed"
        print(f"torch-recorders {version} (torch {torch.__version__})")
        print(library.state())
        raise typer.Exit


@app.callback()
def recorders(
    version: Annotated[bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the versions.")] = False,
) -> None:
    """Record what happens inside PyTorch networks, and look at what was recorded.

    PATH is the folder of a recording, or the file of a timeline.
    """


def run(arguments: Sequence[str] | None = None) -> int:
    """Runs one command; returns its exit status."""
    for stream in (sys.stdout, sys.stderr) if arguments is None else ():
        if isinstance(stream, io.TextIOWrapper):  # a name may hold what cannot be encoded
            stream.reconfigure(errors="backslashreplace")
    try:
        app(args=None if arguments is None else list(arguments), prog_name="recorders")
    except SystemExit as stopped:
        return stopped.code if isinstance(stopped.code, int) else 0
    return 0
