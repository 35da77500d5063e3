"""`recorders demo`: a training that records itself."""

from __future__ import annotations

import logging
from argparse import ArgumentParser

import torch

from recorders.cli.output import print_json
from recorders.cli.sources import at_least, place
from recorders.errors import require


def add_arguments(parser: ArgumentParser) -> None:
    """Adds what `run` takes."""
    parser.add_argument("--epochs", type=at_least(1), default=10, help="how often to go through the training images")
    parser.add_argument("-o", "--to", type=place, default="recorders-demo", help="the folder for recording and figure")
    parser.add_argument("--seed", type=at_least(0), default=0, help="the seed of all random numbers")


def run(epochs: int = 10, to: str = "recorders-demo", seed: int = 0, as_json: bool = False) -> int:
    """Train a small network on handwritten digits, record it, show what was recorded, and find what is wrong with a sick one."""
    # If matplotlib cannot write its configuration it logs a warning, which does not matter here.
    logging.getLogger("matplotlib").setLevel(logging.ERROR)
    for library in ("rich", "matplotlib", "sklearn"):
        require(library, "demo")
    from rich.console import Console

    from recorders.cli import tutorial

    # For tensors this small more threads are no faster, and much slower if other programs use the cores.
    torch.set_num_threads(1)
    finished = tutorial.demo(to, epochs, seed, Console(highlight=False, stderr=as_json))
    if as_json:
        print_json({"finished": finished, "recording": f"{to}/recording", "figure": f"{to}/overview.png"})
    return 0 if finished else 130
