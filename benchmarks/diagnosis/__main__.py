"""Scores what `findings` says of trainings with and without planted faults. Run from the root: python -m benchmarks.diagnosis

Options:
    --compiled      the nets are compiled, by `torch.compile(backend="aot_eager")`.
    --chosen        only the programs by which thresholds were chosen.
    --held-out      only the programs that were held out of that.
    --beside        only the trainings beside the programs, with faults of their own.
    --later         only those that were written after the rules.
    --last          only those of them that were written last.
    --general       only the first half of these trainings, with the faults that are planted into programs of any kind.
    --general-held-out  only the second half of that, which no rule is mended by.
    --peers         rules rebuilt from AutoTrainer and DeepDiagnosis instead of ours.
    --at-first      the rules are those from before a part was written, in a checkout of that time with these programs.

Writes `results/diagnosis.json`, or one that ends in `_compiled`, `_peers` or `_at_first`, and prints a table. What is named
replaces its part. A fault counts if it changes the outcome: the score of the net on data that it was not trained on is NaN, or
loses a tenth of what was learned.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from functools import partial
from statistics import median
from typing import Any

from benchmarks.diagnosis.cases import Case, cases, general_cases, matters, own_cases, program_of
from benchmarks.diagnosis.later import LAST, LATER
from benchmarks.diagnosis.more import MORE
from benchmarks.diagnosis.scoring import WATCHES, Row, rows
from benchmarks.measure import RESULTS, write

PARTS: dict[str, Callable[[], list[Case]]] = {
    "chosen": partial(cases, False),
    "held out": partial(cases, True),
    "beside": partial(own_cases, MORE),
    "later": partial(own_cases, LATER),
    "last": partial(own_cases, LAST),
    "general": partial(general_cases, False),
    "general held out": partial(general_cases, True),
}
"""The trainings of each part."""
CATEGORIES = ("optimisation", "architecture", "data", "state")
KINDS = ("own", "general")
"""Faults of one program, and those that are planted into any."""


def that_count(found: Sequence[Row]) -> list[Row]:
    """The faulty trainings whose outcome differs from that of the healthy one with the same seed."""
    healthy = {(row.program, row.seed): row.score for row in found if not row.fault}
    return [
        row
        for row in found
        if row.fault and (row.error or matters(healthy[row.program, row.seed], row.score, program_of(row.program)))
    ]


def summary(found: Sequence[Row]) -> dict[str, Any]:
    """The shares of faults that were found, in the right place, with the right cause; and false alarms."""
    faulty, healthy = that_count(found), [row for row in found if not row.fault]

    def share(several: Sequence[Row], holds: Callable[[Row], object]) -> float:
        return round(sum(map(bool, map(holds, several))) / len(several), 3) if several else float("nan")

    def shares(several: Sequence[Row]) -> dict[str, Any]:
        return {
            "trainings": len(several),
            "found": share(several, lambda row: row.found),
            "located": share(several, lambda row: row.located),
            "right cause": share(several, lambda row: row.right),
            "right cause among three": share(several, lambda row: row.right_among_three),
        }

    steps = [row.steps for row in faulty if row.found]
    return {
        "all": shares(faulty),
        **{category: shares([row for row in faulty if row.category == category]) for category in CATEGORIES},
        **{kind: shares(several) for kind in KINDS if (several := [row for row in faulty if _kind_of(row) == kind])},
        "healthy": len(healthy),
        "false alarms": sum(bool(row.found) for row in healthy),
        "false alarms at any step": sum(any(row.told.values()) for row in healthy),
        "steps until found, median": median(steps) if steps else None,
        "programs": len({row.program for row in found}),
    }


def _kind_of(row: Row) -> str:
    return "own" if row.fault in program_of(row.program).faults else "general"


def lines(name: str, scores: dict[str, Any]) -> Iterator[str]:
    """The lines of a table."""
    alarms = f"false alarms in {scores['false alarms']} of {scores['healthy']} healthy trainings"
    yield f"{name}: {scores['programs']} programs; {alarms}"
    yield f"  {'category':14}{'faults':>8}{'found':>8}{'place':>8}{'cause':>8}{'of 3':>8}"
    for category in ("all", *CATEGORIES):
        one = scores[category]
        yield f"  {category:14}{one['trainings']:8}" + "".join(
            f"{one[key]:8.2f}" for key in ("found", "located", "right cause", "right cause among three")
        )
    yield f"  found after {scores['steps until found, median']} steps, by the median"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for option in (*PARTS, "compiled", "peers", "at first"):
        parser.add_argument(f"--{option.replace(' ', '-')}", dest=option, action="store_true")
    given = vars(parser.parse_args())
    parts = [part for part in PARTS if given[part]] or [*PARTS]
    watches = [name for name in WATCHES if name != "ours"] if given["peers"] else ["ours"]
    suffix = "_compiled" * given["compiled"] + "_peers" * given["peers"] + "_at_first" * given["at first"]
    path = RESULTS / f"diagnosis{suffix}.json"
    before = json.loads(path.read_text()) if path.exists() and len(parts) < len(PARTS) else {}
    scores: dict[str, Any] = before.get("scores", {})
    told: dict[str, Any] = before.get("told", {})
    for part in parts:
        for watch in watches:
            found = rows(PARTS[part](), "aot_eager" if given["compiled"] else None, watch)
            name = part if watch == "ours" else f"{part}, {watch}"
            scores[name], told[name] = summary(found), [*map(asdict, found)]
            print("\n".join(lines(name, scores[name])), flush=True)
    write(f"diagnosis{suffix}", scores=scores, told=told)


if __name__ == "__main__":
    main()
