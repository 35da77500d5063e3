"""Scores what good runs at hand add to `findings`. Run from the root: python -m benchmarks.diagnosis.good_runs FOLDER [PART ...]

Each training of the benchmark is recorded, and so are healthy ones with the seeds 1, 2 and 3, which are the good runs. What
`findings(..., against=)` says is scored beside the rules alone, whose answers are read from `results/diagnosis.json`: run
`python -m benchmarks.diagnosis` before, if a rule changed.

Args:
    FOLDER: the recordings are kept there, 1 to 2 GB, and used again; remove it if programs, faults or `presets.health()` changed.
    PART: as in the results, such as "held out"; all of them if none is given.

Writes `results/diagnosis_good_runs.json`, and prints tables. What is named replaces its part.
"""

from __future__ import annotations

import argparse
import json
import math
import time
import warnings
from collections.abc import Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from itertools import groupby
from multiprocessing import get_context
from pathlib import Path
from typing import Any, TypeAlias

import torch

from benchmarks.diagnosis.__main__ import PARTS, lines, summary
from benchmarks.diagnosis.cases import Case, case
from benchmarks.diagnosis.scoring import Row
from benchmarks.diagnosis.training import run
from benchmarks.diagnosis.watch import Health
from benchmarks.measure import RESULTS, write
from recorders import Learned, learn, load
from recorders.watch.diagnosis.evidence import evidence
from recorders.watch.diagnosis.explaining import rank_of
from recorders.watch.diagnosis.finding import Finding, fault
from recorders.watch.diagnosis.learned import first_steps
from recorders.watch.diagnosis.left_ranges import left_ranges
from recorders.watch.diagnosis.traits import FIRST

Names: TypeAlias = tuple[str, str | None, int]
"""Of the program and the fault, and the seed."""
GOOD = {"one good run": (1,), "three good runs": (1, 2, 3)}
"""The seeds of the good runs."""


def record(names: Names, folder: Path) -> None:
    """Runs a training and keeps what was recorded, unless it is there."""
    place = at(names, folder)
    if place.with_suffix(".json").exists():
        return
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    training, places = case(*names).training()
    watch, score, error, began = Health(), math.nan, "", time.perf_counter()
    try:
        score = run(training, watch)
    except Exception as raised:  # some faults end the training
        error = f"{type(raised).__name__}: {raised}"
    seconds = time.perf_counter() - began
    place.parent.mkdir(parents=True, exist_ok=True)
    watch.recorder.deregister()
    watch.recorder.save(place.with_suffix(".rec"))
    place.with_suffix(".json").write_text(json.dumps({"score": score, "seconds": seconds, "error": error, "places": places}))


def at(names: Names, folder: Path) -> Path:
    """Where a training is kept, but for the suffix."""
    program, name, seed = names
    return folder / program / f"{name or 'healthy'}-{seed}"


def told(program: str, several: Sequence[Names], alone: Sequence[dict[str, Any]], folder: Path) -> list[tuple[str, Row]]:
    """What is said of trainings of one program, by which way: compared with good runs only, and by the rules, too.

    Args:
        alone: what the rules alone say of each, by the number of steps: kind, place, causes, severity and text of each finding.
    """
    torch.set_num_threads(1)
    learned: dict[str, Learned] = {
        way: learn(*(at((program, None, seed), folder).with_suffix(".rec") for seed in seeds)) for way, seeds in GOOD.items()
    }
    found = []
    for names, rules in zip(several, alone, strict=True):
        known = evidence(load(at(names, folder).with_suffix(".rec")))
        row, steps = _row(names, folder), max(map(int, rules), default=0)
        said = rules.get(str(steps), ())
        by_rules = [fault(kind, layer, what, causes=causes, severity=severity) for kind, layer, causes, severity, what in said]
        for way, good in learned.items():
            left, _ = left_ranges(known, good)
            found.append((way, _with(row, steps, left)))
            found.append((f"the rules and {way}", _with(row, steps, sorted([*by_rules, *left], key=rank_of))))
        begun, _ = left_ranges(known, first_steps(learned["one good run"]))
        found.append(("the first steps of one good run", _with(row, FIRST, begun)))
    return found


def _row(names: Names, folder: Path) -> Row:
    kept, one = json.loads(at(names, folder).with_suffix(".json").read_text()), case(*names)
    name, causes, category = (one.fault.name, one.fault.causes, one.fault.category) if one.fault else ("", (), "")
    places, held_out = tuple(kept["places"]), one.program.held_out
    return Row(names[0], name, one.seed, category, causes, places, held_out, kept["score"], kept["seconds"], error=kept["error"])


def _with(row: Row, steps: int, found: Iterable[Finding]) -> Row:
    return replace(row, told={steps: [(one.kind, one.layer, one.causes, one.severity, one.what) for one in found]})


def scored(part: str, folder: Path, processes: int = 2) -> dict[str, list[Row]]:
    """What is said of all trainings of a part, by which way; healthy ones are those of seed 0."""
    cases = [one for one in PARTS[part]() if one.seed == 0]
    before = json.loads((RESULTS / "diagnosis.json").read_text())["told"][part]
    rules = {(row["program"], row["fault"], row["seed"]): row["told"] for row in before}
    with ProcessPoolExecutor(processes, mp_context=get_context("spawn")) as pool:
        needed = {_names(one) for one in cases}
        needed |= {(one.program.name, None, seed) for one in cases for seeds in GOOD.values() for seed in seeds}
        list(pool.map(record, *zip(*((names, folder) for names in sorted(needed, key=str)), strict=True), chunksize=1))
        jobs = []
        for program, several in groupby(cases, key=lambda one: one.program.name):
            names = [*map(_names, several)]
            alone = [rules[program, name or "", seed] for _, name, seed in names]
            jobs.append(pool.submit(told, program, names, alone, folder))
        found: dict[str, list[Row]] = {}
        for job in jobs:
            for way, row in job.result():
                found.setdefault(way, []).append(row)
    return found


def _names(one: Case) -> Names:
    return one.program.name, one.fault.name if one.fault else None, one.seed


def _score(row: Row) -> str:
    """What of a fault was right, or whether a healthy training raised an alarm."""
    if not row.fault:
        return "alarm" if row.found else ""
    return " ".join(name for name, holds in (("found", row.found), ("place", row.located), ("cause", row.right)) if holds)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("parts", nargs="*", metavar="PART")
    given = parser.parse_args()
    if unknown := {*given.parts} - {*PARTS}:
        parser.error(f"no part is called {min(unknown)!r}; there are {', '.join(PARTS)}")
    path = RESULTS / "diagnosis_good_runs.json"
    before = json.loads(path.read_text()) if path.exists() and given.parts else {}
    scores, rows = before.get("scores", {}), before.get("rows", {})
    for part in given.parts or PARTS:
        found = scored(part, given.folder)
        scores[part] = {way: summary(several) for way, several in found.items()}
        rows[part] = {way: {f"{row.program} {row.fault}": _score(row) for row in several} for way, several in found.items()}
        for way, one in scores[part].items():
            print("\n".join(lines(f"{part}, {way}", one)), flush=True)
    write("diagnosis_good_runs", scores=scores, rows=rows)


if __name__ == "__main__":
    main()
