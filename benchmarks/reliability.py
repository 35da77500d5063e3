"""Attacks on recordings in files: kills, errors, damage, savers and readers at once, forged input, resumed runs, power losses.

Counts how often each was tried and what broke; `docs/reliability.md` shows it. Run: python benchmarks/reliability.py [quick]

`quick` runs some of each, in a minute; the whole takes ten minutes.
"""

from __future__ import annotations

import os
import random
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))

import attacks
import faults.test_kill_stream as test_kill_stream
import faults.test_kill_timeline as test_kill_timeline
import forged
import mutated
import power_loss
import resumed
import torch
from attacks import Tally
from cases import CASES
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from measure import RESULTS, write

Attack = Callable[[Path], Tally]


def fuzzed(what: str, count: int, check: Callable[[Path, st.DataObject], None]) -> Attack:
    """Gives hypothesis so many inputs to draw, each of which must be refused with a typed error, or be harmless."""

    def run(folder: Path) -> Tally:
        tally = Tally(f"fuzzed input: {what}")

        @settings(max_examples=count, deadline=None, database=None, suppress_health_check=list(HealthCheck))
        @given(st.data())
        def each(data: st.DataObject) -> None:
            try:
                check(folder, data)
                tally.add("refused or harmless")
            except AssertionError as error:
                tally.add("believed", False, str(error))
            except Exception as error:
                if not type(error).__module__.startswith("hypothesis"):
                    tally.add(type(error).__name__, False, str(error))
                raise

        each()
        return tally

    return run


def killed(what: str, rounds: int, check: Callable[[Path, int], None]) -> Attack:
    """Kills what writes so many times, and checks that all is there that was committed."""

    def run(folder: Path) -> Tally:
        tally = Tally(f"`kill -9` at random moments of {what}")
        try:
            check(folder, rounds)
        except AssertionError as error:
            tally.add("lost", False, str(error))
        for _ in range(rounds - tally.tries):
            tally.add("all that was committed")
        return tally

    return run


def mutated_state(folder: Path, data: st.DataObject) -> None:
    index = data.draw(st.integers(0, len(CASES) - 1))
    mutated.survives(index, data.draw(st.lists(mutated.mutation, min_size=1, max_size=3)))


class Counts(NamedTuple):
    """How much of each attack is run: every so many-th of what can be enumerated, or so many."""

    kills: int
    random_kills: int
    errors: int
    disks: int
    damages: int
    saves: int
    files: int
    states: int
    resumptions: int


MODES = {
    "quick": Counts(9, 2, 27, 3, 301, 5, 15, 30, 61),
    "full": Counts(1, 50, 1, 300, 1, 1_000, 4_000, 8_000, 2),
}


def plan(counts: Counts) -> list[Attack]:
    return [
        lambda folder: attacks.kills(folder, counts.kills),
        lambda folder: attacks.kills_at_random(folder, counts.random_kills),
        killed("a timeline", counts.random_kills, test_kill_timeline.kill_and_check),
        killed("a stream", counts.random_kills, test_kill_stream.kill_and_check),
        lambda folder: attacks.errors(folder, counts.errors),
        lambda folder: power_loss.power_losses(folder, counts.disks),
        lambda folder: attacks.damages(folder, counts.damages),
        lambda folder: attacks.savers_and_readers(folder, counts.saves),
        fuzzed("damaged files", counts.files, forged.damaged_bytes_are_never_believed),
        fuzzed("manifests with right checksums", counts.files, forged.forged_manifests_give_a_typed_error_or_data),
        fuzzed("files of subrecorders with right checksums", counts.files, forged.forged_files_give_a_typed_error_or_data),
        fuzzed("states, of every reducer", counts.states, mutated_state),
        lambda folder: resumed.resumptions(folder, counts.resumptions),
    ]


def main() -> None:
    mode = sys.argv[1] if len(sys.argv) > 1 else "full"
    torch.set_num_threads(1)
    random.seed(0)
    rows: list[dict[str, Any]] = []
    # Folders in memory, if the system has such: millions of flushes would only wait for the disk.
    memory = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
    for attack in plan(MODES[mode]):
        started = time.perf_counter()
        with tempfile.TemporaryDirectory(dir=memory) as folder, warnings.catch_warnings():
            warnings.simplefilter("ignore")
            tally = attack(Path(folder))
        seconds = time.perf_counter() - started
        rows.append({**vars(tally), "broke": len(tally.broke), "examples": tally.broke[:5], "seconds": round(seconds, 1)})
        print(f"{tally.attack}: {tally.tries:,} times, {len(tally.broke)} broke, {seconds:.1f} s", flush=True)
        for told in tally.broke[:5]:
            print(f"  {told}", flush=True)
        write("reliability", what="attacks on recordings in files", mode=mode, counts=MODES[mode]._asdict(), rows=rows)
    if "BENCHMARK_RESULTS" not in os.environ:
        import table

        page = table.ROOT / "docs" / "reliability.md"
        page.write_text(next(text for path, text in table.written() if path == page))
    print(f"written to {RESULTS}")


if __name__ == "__main__":
    main()
