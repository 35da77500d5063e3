"""Which program gets which fault, and whether a fault changed the outcome."""

from __future__ import annotations

import functools
import itertools
import math
import random
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import benchmarks.diagnosis.last_sequences
import benchmarks.diagnosis.last_vectors
import benchmarks.diagnosis.later_mixed
import benchmarks.diagnosis.later_sequences
import benchmarks.diagnosis.later_vectors
import benchmarks.diagnosis.more_faults_of_others
import benchmarks.diagnosis.more_faults_of_sequences
import benchmarks.diagnosis.programs  # noqa: F401  registers the programs
from benchmarks.diagnosis.faults import GENERAL, Unfit
from benchmarks.diagnosis.later import LAST, LATER
from benchmarks.diagnosis.more import MORE
from benchmarks.diagnosis.training import PROGRAMS, Fault, Program, Training

__all__ = ["Case", "case", "cases", "general_cases", "matters", "own_cases", "program_of"]

CHOSEN, HELD_OUT = 3, 1
"""In how many programs each general fault is planted at least, of those by which thresholds are chosen and of those held out."""
LEAST = 4
"""How many general faults each program gets at least."""
OTHERS = {**LAST, **LATER, **MORE}
"""The trainings that are no programs."""
LOSES = 0.1


class Case(NamedTuple):
    """A training to diagnose.

    Attributes:
        program: what is trained.
        fault: what is planted in it; None in a healthy one.
        seed: of the program.
    """

    program: Program
    fault: Fault | None
    seed: int

    def training(self) -> tuple[Training, tuple[str, ...]]:
        """Returns the training and the layers that its fault may rightly be located in."""
        training = self.program.make(self.seed)
        if self.fault is None:
            return training, ()
        return training, self.fault.change(training) or self.fault.places


def program_of(name: str) -> Program:
    """Returns a program, or a training beside them, by its name."""
    return {**OTHERS, **PROGRAMS}[name]


def case(program: str, fault: str | None, seed: int) -> Case:
    """Returns a case by names, as another process gets it. A program's own fault goes before a general one of the same name."""
    one = program_of(program)
    return Case(one, None if fault is None else one.faults.get(fault) or GENERAL[fault], seed)


def cases(held_out: bool | None = None) -> list[Case]:
    """Returns what is to be diagnosed: every program healthy with two seeds, with each of its own faults, and with general ones.

    Args:
        held_out: True for the programs that are held out, False for the others, None for all.
    """
    if held_out is None:
        return cases(False) + cases(True)
    programs = [program for _, program in sorted(PROGRAMS.items()) if program.held_out == held_out]
    general = _dealt(tuple(program.name for program in programs), HELD_OUT if held_out else CHOSEN)
    found = []
    for program in programs:
        found += [Case(program, None, seed) for seed in (0, 1)]
        found += [Case(program, fault, 0) for fault in program.faults.values()]
        found += [Case(program, GENERAL[name], 0) for name in general[program.name]]
    return found


def own_cases(programs: Mapping[str, Program]) -> list[Case]:
    """Returns each program healthy with two seeds, and with each of its own faults."""
    found = []
    for _, program in sorted(programs.items()):
        found += [Case(program, None, seed) for seed in (0, 1)]
        found += [Case(program, fault, 0) for fault in program.faults.values()]
    return found


def general_cases(held_out: bool) -> list[Case]:
    """Returns every second of the other trainings healthy, and with general faults: those that fit and were planted least so far.

    Args:
        held_out: which half.
    """
    planted = Counter[str]()
    found = []
    for at, (name, program) in enumerate(sorted(OTHERS.items())):
        order = random.Random(name).sample(sorted(GENERAL), len(GENERAL))
        fitting = (fault for fault in sorted(order, key=planted.__getitem__) if _fits(fault, name))
        general = [*itertools.islice(fitting, LEAST)]
        planted.update(general)
        if at % 2 == held_out:
            found += [Case(program, None, 0), *(Case(program, GENERAL[fault], 0) for fault in general)]
    return found


@functools.cache
def _dealt(names: Sequence[str], times: int) -> dict[str, list[str]]:
    """Deals the general faults: each goes to the programs that it fits and which have the fewest so far."""
    dealt: dict[str, list[str]] = {name: [] for name in names}
    for fault in sorted(GENERAL):
        found = 0
        for name in sorted(names, key=lambda name: (len(dealt[name]), name)):
            if found < times and _fits(fault, name):
                dealt[name].append(fault)
                found += 1
    for name, faults in dealt.items():
        start = names.index(name) * LEAST
        for fault in [*sorted(GENERAL)[start:], *sorted(GENERAL)[:start]]:
            if len(faults) < LEAST and fault not in faults and _fits(fault, name):
                faults.append(fault)
    return dealt


@functools.cache
def _fits(fault: str, name: str) -> bool:
    program = program_of(name)
    if fault in program.without or fault in program.faults:
        return False
    try:
        GENERAL[fault].change(program.make(0))
    except Unfit:
        return False
    return True


def matters(healthy_score: float, faulty_score: float, program: Program) -> bool:
    """Returns whether a fault changed the outcome: the score is NaN, or lost a tenth of what the healthy network learned."""
    lost = healthy_score - faulty_score
    return not math.isfinite(faulty_score) or lost > LOSES * (healthy_score - program.chance)
