"""Which faults change the outcome of their training. Run: python -m benchmarks.diagnosis.outcomes [chosen | held-out]

Every case runs once, unwatched. Writes `results/diagnosis_outcomes.json`; what is named on the command line replaces its part.
"""

from __future__ import annotations

import argparse
import json
import warnings
from collections.abc import Iterable
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from typing import Any

import torch

from benchmarks.diagnosis.cases import case, cases, matters
from benchmarks.diagnosis.training import Program, run
from benchmarks.measure import RESULTS, write

PARTS = {"chosen": False, "held-out": True}


def _score(program: str, fault: str | None, seed: int) -> float | str:
    """Runs a case; by names, as faults cannot be sent to another process. Returns the score, or the error that the case raised."""
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    try:
        return run(case(program, fault, seed).training()[0])
    except Exception as error:  # one broken case must not take the others with it
        return f"{type(error).__name__}: {error}"


def outcomes(held_out: bool) -> dict[str, Any]:
    """Returns by program the scores of the healthy by seed, and by fault the score and whether the fault matters."""
    several = cases(held_out)
    with ProcessPoolExecutor(2, mp_context=get_context("spawn")) as pool:
        named = [(one.program.name, one.fault and one.fault.name, one.seed) for one in several]
        scores = list(pool.map(_score, *zip(*named, strict=True)))
    found: dict[str, Any] = {}
    for one, score in zip(several, scores, strict=True):
        of_program = found.setdefault(one.program.name, _blank(one.program))
        if one.fault is None:
            of_program["healthy"].append(score)
        else:
            of_program["faults"][one.fault.name] = {
                "own": one.fault.name in one.program.faults,
                "score": score if score == score else None,  # JSON has no NaN
                "matters": isinstance(score, float) and matters(of_program["healthy"][one.seed], score, one.program),
            }
    return found


def _blank(program: Program) -> dict[str, Any]:
    return {"chance": program.chance, "learns": program.learns, "healthy": [], "faults": {}}


def table(found: dict[str, Any]) -> Iterable[str]:
    """Yields the lines of a table: what the program learns, how many of its faults matter, and those that do not."""
    yield f"{'program':24}{'chance':>8}{'learns':>8}  {'healthy':16}{'matter':>8}  do not matter"
    for name, program in found.items():
        faults = program["faults"]
        idle = [fault for fault, outcome in faults.items() if not outcome["matters"]]
        healthy = " ".join(f"{score:.3f}" for score in program["healthy"])
        errors = "".join(f"\n  {fault}: {one['score']}" for fault, one in faults.items() if isinstance(one["score"], str))
        ill = "" if min(program["healthy"]) >= program["learns"] else "  UNHEALTHY"
        share = f"{len(faults) - len(idle)}/{len(faults)}"
        yield f"{name:24}{program['chance']:8.2f}{program['learns']:8.2f}  {healthy:16}{share:>8}  {', '.join(idle)}{ill}{errors}"


def main() -> None:
    """Runs the parts that are named, or both."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", metavar="PART")
    given = parser.parse_args()
    if unknown := {*given.parts} - {*PARTS}:
        parser.error(f"no part is called {min(unknown)!r}; there are {', '.join(PARTS)}")
    torch.set_num_threads(1)
    path = RESULTS / "diagnosis_outcomes.json"
    before = json.loads(path.read_text()) if path.exists() else {}
    results = {part: before[part] for part in PARTS if part in before}
    for part in given.parts or PARTS:
        results[part] = outcomes(PARTS[part])
        print("\n".join(table(results[part])))
        write("diagnosis_outcomes", **results)


if __name__ == "__main__":
    main()
