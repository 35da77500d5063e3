"""The command `recorders`: looks into what was recorded, compares, merges, checks and exports it."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from recorders.errors import MissingExtraError
from recorders.watch.visualizers.visualizer import require

__all__ = ["main"]


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one command.

    Args:
        arguments: the arguments without the name of the program; None for those of this process.

    Returns:
        0; 1 if it failed, or found what it was asked to look for; 2 if the arguments are wrong or an extra is missing; 130 if it
        was interrupted.

    >>> main(["--version"])  # doctest: +ELLIPSIS
    torch-recorders ... (torch ...)
    ...
    0
    """
    try:
        for library in ("rich", "typer"):
            require(library, "cli")
    except MissingExtraError as error:
        print(f"recorders: {error}", file=sys.stderr)
        return 2
    from recorders.cli.app import run

    return run(arguments)
