"""Scores: in how many faulty trainings a fault is found, in the right place, with the right cause; and false alarms."""

from __future__ import annotations

import math
import time
import warnings
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from multiprocessing import get_context
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.optim import Optimizer

from benchmarks.diagnosis.cases import Case, case
from benchmarks.diagnosis.peers import AutoTrainerRules, DeepDiagnosisRules
from benchmarks.diagnosis.training import Training, run
from benchmarks.diagnosis.watch import Health

__all__ = ["WATCHES", "Row", "diagnose", "rows"]

Told: TypeAlias = tuple[str, str, tuple[str, ...], str, str]
"""Kind, place, causes, severity and text of a finding."""
ASKED = (5, 10, 20, 30, 50, 100)
"""The steps after which findings are asked for."""
WHOLE = frozenset({"loss", "optimizer", "inputs", "target", "(net)"})
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
    told: dict[int, list[Told]] = field(default_factory=dict)
    error: str = ""

    @property
    def found(self) -> list[Told]:
        """What was found at the end, but for notices."""
        return self.told[max(self.told)] if self.told else []

    @property
    def located(self) -> bool:
        """Whether one of the first three findings names a right place, or a part of it; of a fault of the training, no layer."""
        if not self.places:
            return any(place.partition(":")[0] in WHOLE or self._right(causes) for _, place, causes, _, _ in self.found[:3])
        places = {place or "(net)" for place in self.places}
        told = [place.partition(":")[0] for _, place, _, _, _ in self.found[:3]]
        return any(place in places or any(place.startswith(f"{one}.") for one in places) for place in told)

    @property
    def right(self) -> bool:
        """Whether the most likely cause of one of the first three findings is right."""
        return any(self._right(causes) for _, _, causes, _, _ in self.found[:3])

    @property
    def right_among_three(self) -> bool:
        """Whether one of the first three findings names a right cause among its three most likely."""
        return any(cause in self.causes for _, _, causes, _, _ in self.found[:3] for cause in causes[:3])

    def _right(self, causes: Sequence[str]) -> bool:
        return bool(causes) and causes[0] in self.causes

    @property
    def steps(self) -> int:
        """The number of steps after which a fault was found first."""
        return next((steps for steps, found in sorted(self.told.items()) if found), 0)


class _Rules:
    """A watch that tells its findings at the end."""

    def __init__(self, rules: Any) -> None:
        self.rules, self.found, self.last = rules, dict[int, list[Told]](), 0

    def begin(self, training: Training, optimizers: Sequence[Optimizer]) -> None:
        self.rules.begin(training, optimizers)

    def after(self, step: int, loss: Tensor, inputs: Any, target: Any) -> bool | None:
        self.last = step + 1
        ended: bool | None = self.rules.after(step, loss, inputs, target)
        return ended

    def end(self) -> None:
        self.found[self.last] = [("", place, (cause,), "error", cause) for cause, place in self.rules.found()]


WATCHES: dict[str, Callable[[], Any]] = {
    "ours": lambda: Health(ASKED),
    "AutoTrainer's rules": lambda: _Rules(AutoTrainerRules()),
    "DeepDiagnosis' rules": lambda: _Rules(DeepDiagnosisRules()),
}
"""Who looks at a training, by name. The rules of others are rebuilt from what they published; see `peers.py`."""


def diagnose(one: Case, compiled: str | None = None, watch: str = "ours") -> Row:
    """Runs one training and asks what is wrong with it."""
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    torch.compiler.reset()
    training, places = one.training()
    name, causes, category = (one.fault.name, one.fault.causes, one.fault.category) if one.fault else ("", (), "")
    row = Row(one.program.name, name, one.seed, category, causes, tuple(places), one.program.held_out, math.nan, 0.0)
    watching, began = WATCHES[watch](), time.perf_counter()
    try:
        row.score = run(training, watching, compiled=compiled)
    except Exception as error:  # some faults end the training
        row.error = f"{type(error).__name__}: {error}"
    row.seconds = time.perf_counter() - began
    watching.end()
    for steps, found in watching.found.items():
        row.told[steps] = [
            one if isinstance(one, tuple) else (one.kind, one.layer, one.causes, one.severity, one.what) for one in found
        ]
    return row


def rows(chosen: Sequence[Case], compiled: str | None = None, watch: str = "ours", processes: int = 2) -> list[Row]:
    """Diagnoses several cases, each in one thread."""
    with ProcessPoolExecutor(processes, mp_context=get_context("spawn")) as pool:
        several = [[*map(_names, chosen)], [compiled] * len(chosen), [watch] * len(chosen)]
        return list(pool.map(_by_name, *several, chunksize=1))


def _names(one: Case) -> tuple[str, str | None, int]:
    return one.program.name, one.fault.name if one.fault else None, one.seed


def _by_name(names: tuple[str, str | None, int], compiled: str | None, watch: str) -> Row:
    return diagnose(case(*names), compiled, watch)  # a fault holds functions, which do not pickle
