"""The command `recorders`. To add a verb, write a function that adds its parser, and add it to `VERBS`."""

from __future__ import annotations

import argparse
import importlib.metadata
import logging
import sys
from collections.abc import Callable, Sequence

import torch

from recorders.errors import MissingExtraError, RecorderError
from recorders.watch.visualizers.visualizer import require

__all__ = ["main"]


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one command; returns 0, or 1 if it failed, 2 if an extra is missing, 130 if it was interrupted.

    Args:
        arguments: the arguments without the name of the program; None for those of this process.

    >>> import contextlib
    >>> with contextlib.suppress(SystemExit):
    ...     main(["--version"])  # doctest: +ELLIPSIS
    torch-recorders ... (torch ...)
    """
    parser = argparse.ArgumentParser("recorders", description="Record what happens inside PyTorch networks.")
    parser.add_argument("--version", action="version", version=f"torch-recorders {_version()} (torch {torch.__version__})")
    verbs = parser.add_subparsers(title="commands", metavar="command", required=True)
    for add in VERBS:
        add(verbs)
    given = parser.parse_args(arguments)
    try:
        status: int = given.run(given)
    except (RecorderError, OSError) as error:
        print(f"recorders: {error}", file=sys.stderr)
        return 2 if isinstance(error, MissingExtraError) else 1
    except KeyboardInterrupt:
        print("recorders: interrupted", file=sys.stderr)
        return 130
    return status


def _add_demo(verbs: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    text = "train a small network on handwritten digits, record it, and show what was recorded"
    verb = verbs.add_parser("demo", help=text, description=text[0].upper() + text[1:] + ".")
    verb.add_argument(
        "--epochs", type=_whole(1), default=10, help="how often to go through the training images (default: %(default)s)"
    )
    verb.add_argument("--out", default="recorders-demo", help="folder for recording and figure (default: %(default)s)")
    verb.add_argument("--seed", type=_whole(0), default=0, help="seed of all random numbers (default: %(default)s)")
    verb.set_defaults(run=_demo)


def _demo(given: argparse.Namespace) -> int:
    # If matplotlib cannot write its configuration it logs a warning, which does not matter here.
    logging.getLogger("matplotlib").setLevel(logging.ERROR)
    for library in ("rich", "matplotlib", "sklearn"):
        require(library, "demo")
    from recorders.demo import demo

    # For tensors this small more threads are no faster, and much slower if other programs use the cores.
    torch.set_num_threads(1)
    return 0 if demo(given.out, given.epochs, given.seed) else 130


def _whole(least: int) -> Callable[[str], int]:
    def whole(text: str) -> int:
        number = int(text)
        if not least <= number < 2**63:
            raise argparse.ArgumentTypeError(f"{text} is not a whole number from {least} up")
        return number

    whole.__name__ = "whole number"
    return whole


def _version() -> str:
    try:
        return importlib.metadata.version("torch-recorders")
    except importlib.metadata.PackageNotFoundError:
        return "from a source tree, not installed"


VERBS = (_add_demo,)

if __name__ == "__main__":
    sys.exit(main())
