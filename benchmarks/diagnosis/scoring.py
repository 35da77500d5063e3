"""Scores: in how many faulty trainings a fault is found, in the right place, with the right cause; and false alarms in healthy ones."""

from __future__ import annotations

import json
import time
import warnings
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, field

import torch

from benchmarks.diagnosis.cases import Case, case
from benchmarks.diagnosis.training import run
from benchmarks.diagnosis.watch import Health

__all__ = ["Row", "diagnose", "rows"]

ASKED = (5, 10, 20, 30, 50, 100)
"""The steps after which findings are asked for."""
WHOLE = frozenset({"loss", "optimizer", "inputs", "target", "net", "(net)"})
"""What a finding names if it is of the training as a whole."""


@dataclass
class Row:
    """What was found in one training.

    Attributes:
        program, fault, seed: the case; the fault is "" if the training is healthy.
        category, causes, places: of the fault.
        held_out: whether no threshold was chosen by it.
        score: of the net at the end.
        seconds: the training took, watched.
        told: by number of steps what was found: kind, place, causes, severity and text of each finding.
    """

    program: str
    fault: str
    seed: int
    category: str
    causes: tuple[str, ...]
    places: tuple[str, ...]
    held_out: bool
    score: float
    seconds: float
    told: dict[int, list[tuple[str, str, tuple[str, ...], str, str]]] = field(default_factory=dict)
    error: str = ""

    @property
    def found(self) -> list[tuple[str, str, tuple[str, ...], str, str]]:
        """What was found at the end, but for notices."""
        return self.told[max(self.told)] if self.told else []

    @property
    def located(self) -> bool:
        """Whether one of the first three findings names a right place; of a fault of the whole training, no single layer or a right cause."""
        if not self.places:
            return any(place.partition(":")[0] in WHOLE or self._right(causes) for _, place, causes, _, _ in self.found[:3])
        places = {place or "(net)" for place in self.places}
        return any(place.partition(":")[0] in places for _, place, _, _, _ in self.found[:3])

    @property
    def right(self) -> bool:
        """Whether the most likely cause that one of the first three findings names is right."""
        return any(self._right(causes) for _, _, causes, _, _ in self.found[:3])

    def _right(self, causes: Sequence[str]) -> bool:
        return bool(causes) and causes[0] in self.causes

    @property
    def steps(self) -> int:
        """The number of steps after which a fault was found first."""
        return next((steps for steps, found in sorted(self.told.items()) if found), 0)


def diagnose(one: Case, compiled: str | None = None) -> Row:
    """Runs one training and asks what is wrong with it."""
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    torch._dynamo.reset()
    training, places = one.training()
    fault = one.fault
    row = Row(
        one.program.name,
        fault.name if fault else "",
        one.seed,
        fault.category if fault else "",
        fault.causes if fault else (),
        tuple(places),
        one.program.held_out,
        0.0,
        0.0,
    )
    watch, began = Health(ASKED), time.perf_counter()
    try:
        row.score = run(training, watch, compiled=compiled)
    except Exception as error:  # some faults end the training
        row.error = f"{type(error).__name__}: {error}"
    row.seconds = time.perf_counter() - began
    watch.end()
    for steps, found in watch.found.items():
        row.told[steps] = [(one.kind, one.layer, one.causes, one.severity, one.what) for one in found]
    return row


def rows(chosen: Sequence[Case], compiled: str | None = None, processes: int = 2) -> list[Row]:
    """Diagnoses several cases, each in one thread."""
    with ProcessPoolExecutor(processes) as pool:
        return list(pool.map(_by_name, [*map(_names, chosen)], [compiled] * len(chosen), chunksize=1))


def _names(one: Case) -> tuple[str, str | None, int]:
    return one.program.name, one.fault.name if one.fault else None, one.seed


def _by_name(names: tuple[str, str | None, int], compiled: str | None) -> Row:
    return diagnose(case(*names), compiled)  # a fault holds functions, which do not pickle


def as_json(found: Sequence[Row]) -> str:
    """All rows, to look at them later."""
    return json.dumps([asdict(row) for row in found], indent=1)
