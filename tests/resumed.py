"""Trainings that are saved and resumed, to compare with those that were saved at the same steps and went on, bit for bit."""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
from attacks import Tally
from cases import CASES, Case
from torch import Tensor, nn

from recorders import (
    BackwardMonitor,
    ForwardMonitor,
    ParameterGradientMonitor,
    ParameterMonitor,
    ParameterUpdateMonitor,
    Recorder,
    load,
)

ROWS = 6


class Scaled(nn.Module):
    """Its output, its parameter and their gradients have the shape that a reducer of `cases.py` takes."""

    def __init__(self, trailing: tuple[int, ...]) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(ROWS, *trailing))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.weight


class Run:
    """A deterministic training with a recorder."""

    def __init__(self, make: Callable[[], Recorder], trailing: tuple[int, ...] | None = None) -> None:
        torch.manual_seed(0)
        linear = (nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3))
        self.net = nn.Sequential(*linear if trailing is None else [Scaled(trailing)])
        self.shape = (4, 5) if trailing is None else (ROWS, *trailing)
        self.optimizer = torch.optim.SGD(self.net.parameters(), lr=0.1)
        self.recorder = make().modules(self.net, types=(nn.Linear, Scaled)).attach(self.optimizer)

    def train(self, begin: int, end: int, saves: Iterable[int] = ()) -> Run:
        """Trains; a save before any of the steps `saves` joins what waits, as all saves do."""
        for step in range(begin, end):
            if step in saves:
                self.recorder.state_dict()
            batch = torch.randn(self.shape, generator=torch.Generator().manual_seed(step)) * 100 + 1e3
            self.optimizer.zero_grad()
            self.net(batch).square().mean().mul(1e-8).backward()
            self.optimizer.step()
        return self


def bits(value: Any) -> Any:
    if isinstance(value, Tensor):
        return (
            value.dtype,
            tuple(value.shape),
            value.contiguous().view(-1).view(torch.uint8).tolist() if value.dim() else value.item(),
        )
    return {key: bits(item) for key, item in value.items()} if isinstance(value, dict) else value


def facts(recorder: Recorder) -> Any:
    snapshot = recorder.snapshot()
    return [
        (name, part.samples, bits({path: dict(state) for path, state in part.states.items()})) for name, part in snapshot.items()
    ]


KINDS: dict[str, Callable[[Any], Recorder]] = {
    "forward": lambda reducer: Recorder(ForwardMonitor(reducer)),
    "every third": lambda reducer: Recorder(ForwardMonitor(reducer, every=3)),
    "every fourth step": lambda reducer: Recorder(ForwardMonitor(reducer, every_step=4)),
    "gradients": lambda reducer: Recorder(BackwardMonitor(reducer)),
    "parameters": lambda reducer: Recorder(ParameterMonitor(reducer)),
    "parameter gradients": lambda reducer: Recorder(ParameterGradientMonitor(reducer)),
    "updates, every third": lambda reducer: Recorder(ParameterUpdateMonitor(reducer, every=3)),
}


POINTS = (1, 2, 5, 8, 11)
"""After how many of `END` steps a run is interrupted."""
END = 13


def resumptions(folder: Path, share: int = 1) -> Tally:
    """Every reducer in every kind of monitor, saved at several points, in both layouts, and resumed in a new one each time."""
    tally = Tally("runs resumed in a new recorder: every reducer, every kind of monitor, several points")
    combinations = itertools.product([case for case in CASES if case.merges and case.takes_floats], KINDS)
    for number, (case, kind) in enumerate(itertools.islice(combinations, 0, None, share)):
        resumption(case, kind, folder / str(number), tally)
    return tally


def resumption(case: Case, kind: str, folder: Path, tally: Tally) -> None:
    def new() -> Run:
        return Run(lambda: KINDS[kind](case.reducer), case.trailing)

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of results that a file cannot hold
        whole, first, done = new().train(0, END, saves=POINTS), new(), 0
        expected = facts(whole.recorder)
        for point, layout in zip(POINTS, itertools.cycle(("folder", "packed"))):
            first.train(done, point)
            done = point
            first.recorder.save(folder, layout=layout)
            second = new()
            second.recorder.resume(load(folder, reducers=case.reducer))
            second.net.load_state_dict(first.net.state_dict())
            second.train(point, END, saves=[later for later in POINTS if later > point])
            same = facts(second.recorder) == expected and second.recorder.clock.step == END
            tally.add("bit for bit the same" if same else "another state", same, f"{case}, {kind}, after {point} steps")
        first.train(done, END)
        same = facts(first.recorder) == expected
        tally.add("bit for bit the same" if same else "another state", same, f"{case}, {kind}, saved {len(POINTS)} times")
