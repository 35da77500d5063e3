"""`recorders demo`."""

from __future__ import annotations

import logging
from typing import Annotated

import torch
import typer

from recorders.watch.visualizers.visualizer import require

__all__ = ["demo"]

MOST = 2**63 - 1


def demo(
    epochs: Annotated[int, typer.Option(min=1, max=MOST, help="How often to go through the training images.")] = 10,
    out: Annotated[str, typer.Option(help="The folder for recording and figure.")] = "recorders-demo",
    seed: Annotated[int, typer.Option(min=0, max=MOST, help="The seed of all random numbers.")] = 0,
) -> None:
    """Train a small network on handwritten digits, record it, show what was recorded, and find what is wrong with a sick one."""
    # If matplotlib cannot write its configuration it logs a warning, which does not matter here.
    logging.getLogger("matplotlib").setLevel(logging.ERROR)
    for library in ("rich", "matplotlib", "sklearn"):
        require(library, "demo")
    from recorders import demo as tutorial

    # For tensors this small more threads are no faster, and much slower if other programs use the cores.
    torch.set_num_threads(1)
    if not tutorial.demo(out, epochs, seed):
        raise typer.Exit(130)
