"""The verbs: each is a module with `add_arguments(parser)` and `run(...)`. To add one, write the module and add it to `VERBS`."""

from __future__ import annotations

import contextlib
import importlib.metadata
import io
import os
import sys
import warnings
from argparse import ArgumentParser, RawDescriptionHelpFormatter
from collections.abc import Callable, Sequence
from enum import IntEnum
from typing import Any, NoReturn

import torch

from recorders.cli import check, completion, demo, diff, export, merge, report, show
from recorders.cli.output import UsageError, complain
from recorders.errors import MissingExtraError, RecorderError
from recorders.recordings.plugins import import_reducers
from reducers import ReducerError
from reducers.errors import did_you_mean
from reducers.kernels.cpp import library

VERBS = {"show": show, "diff": diff, "report": report, "check": check, "merge": merge, "export": export, "demo": demo}

GONE = {
    "watch": "show PATH --follow",
    "replay": "show PATH --at TICK, or recorders report PATH --to text",
    "plot": "report PATH --to png",
    "verify": "check PATH",
    "repair": "check PATH --repair TO",
}
"""Verbs of earlier versions, and what does their work."""

_ABOUT = """Record what happens inside PyTorch networks, and look at what was recorded.

PATH is the folder of a recording or of a stream, the file of a timeline, or the URL of any of them."""


class Status(IntEnum):
    """What the command ends with."""

    DONE = 0
    FAILED = 1
    """It failed, or found what it was asked to look for."""
    WRONG_ARGUMENTS = 2
    """The arguments are wrong, or an extra is missing."""
    INTERRUPTED = 130
    PIPE_CLOSED = 141
    """Whoever read the output stopped reading: what shells say of a program that SIGPIPE ends."""


class Parser(ArgumentParser):
    """A parser that raises what is wrong, and knows its own words, which shells complete."""

    def __init__(self, **options: Any) -> None:
        self.words: dict[str, str] = {}
        super().__init__(**options, allow_abbrev=False)

    def add_argument(self, *names: str, **options: Any) -> Any:
        """Adds an argument: its options and its choices are words."""
        words = [name for name in names if name.startswith("-")] or [*map(str, options.get("choices", ()))]
        self.words |= dict.fromkeys(words, options.get("help", ""))
        return super().add_argument(*names, **options)

    def error(self, message: str) -> NoReturn:
        raise UsageError(f"{message}\n{self.format_usage().rstrip()}")


def parsers() -> tuple[Parser, dict[str, Parser]]:
    """The parser of the command, and those of its verbs."""
    command = Parser(prog="recorders", description=_ABOUT, formatter_class=RawDescriptionHelpFormatter)
    command.add_argument("--version", action="store_true", help="print the versions")
    verbs = command.add_subparsers(metavar="VERB", title="verbs")
    found: dict[str, Parser] = {}
    for name, module in {**VERBS, "completion": completion}.items():
        about = " ".join((module.run.__doc__ or "").split("\n\n")[0].split())
        one = found[name] = verbs.add_parser(name, help=about, description=about)
        module.add_arguments(one)
        one.add_argument("--json", action="store_true", dest="as_json", help="print JSON; errors as JSON on the standard error")
        one.set_defaults(run=module.run)
        command.words[name] = about
    return command, found


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one verb.

    Args:
        arguments: the arguments without the name of the program; None for those of this process.

    Returns:
        the exit status, one of `Status`.

    >>> main(["--version"])  # doctest: +ELLIPSIS
    torch-recorders ... (torch ...)
    ...
    0
    """
    if arguments is None:
        arguments = sys.argv[1:]
        _prepare_streams()
    as_json = "--json" in arguments
    with warnings.catch_warnings():
        warnings.showwarning = lambda message, *_, **__: complain(message, as_json, "warning")
        status = _guarded(lambda: _run(arguments), as_json)
        return int(_guarded(_flush, as_json) or status)


def _run(arguments: Sequence[str]) -> int:
    command, verbs = parsers()
    verb = arguments[0] if arguments else "-"
    if verb in GONE:
        raise UsageError(f"there is no verb {verb!r} any more: recorders {GONE[verb]}")
    if not verb.startswith("-") and verb not in verbs:
        command.error(f"there is no verb {verb!r}: {did_you_mean(verb, verbs)}there are {[*verbs]}")
    options = vars(command.parse_args(arguments))
    if options.pop("version"):
        print(_versions())
        return Status.DONE
    run = options.pop("run", None)
    if run is None:
        print(command.format_help(), file=sys.stderr)
        return Status.WRONG_ARGUMENTS
    if run is completion.run:
        options["words"] = {"": command.words, **{name: parser.words for name, parser in verbs.items()}}
    if options.pop("plugins", False):
        import_reducers()
    return run(**options) or Status.DONE


def _guarded(work: Callable[[], int], as_json: bool) -> int:
    """Does the work; what it raises is one message, and an exit status."""
    try:
        return work()
    except BrokenPipeError:
        return Status.PIPE_CLOSED
    except KeyboardInterrupt as error:
        complain(error, as_json, what="interrupted")
        return Status.INTERRUPTED
    except SystemExit as stopped:  # help was printed, or rich met a pipe that is closed
        if isinstance(stopped.__context__, BrokenPipeError):
            return Status.PIPE_CLOSED
        return Status.DONE if stopped.code is None else int(stopped.code)
    except (UsageError, MissingExtraError) as error:
        complain(error, as_json)
        return Status.WRONG_ARGUMENTS
    except (RecorderError, ReducerError, OSError) as error:
        complain(error, as_json)
        return Status.FAILED


def _flush() -> int:
    """Writes what was printed. What nobody can take goes nowhere, so that nobody complains at exit."""
    try:
        sys.stdout.flush()
    except (OSError, ValueError):
        with contextlib.suppress(OSError, ValueError):
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise
    return Status.DONE


def _prepare_streams() -> None:
    """Makes the streams of this process take everything: names that cannot be encoded; and there may be no streams."""
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is None:
            setattr(sys, name, open(os.devnull, "w"))  # noqa: SIM115  # until the end of the process
        elif isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")


def _versions() -> str:
    try:
        version = importlib.metadata.version("torch-recorders")
    except importlib.metadata.PackageNotFoundError:
        version = "from a source tree, not installed"
    return f"torch-recorders {version} (torch {torch.__version__})\n{library.state()}"
