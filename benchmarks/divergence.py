"""What `bisect` names of faults planted in one of two twins: a table. `python benchmarks/divergence.py`, a minute."""

from __future__ import annotations

import sys
import time
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

from planted_divergences import PLANTED, batch, loss, twins  # noqa: E402

from recorders import bisect  # noqa: E402


def main() -> None:
    """Prints a row for each fault, and how many are named right."""
    for rewritten in (False, True):
        right = 0
        print(f"\n{'the twins have other names' if rewritten else 'the twins have the same names'}")
        for planted in PLANTED:
            first, second = twins(planted, rewritten)
            begin = time.perf_counter()
            found = bisect(first, second, batch(first), loss=loss)
            seconds = time.perf_counter() - begin
            operator = found.operator or found.operator_b
            is_right = (found.phase, found.module, operator) == (planted.phase, planted.module, planted.operator)
            right += is_right
            mark = "right" if is_right else "WRONG"
            print(f"{mark}  {planted.name:30} {found.phase:10} {found.module or '(net)':20} {operator:32} {seconds:5.2f} s")
        print(f"{right} of {len(PLANTED)} are named right")


if __name__ == "__main__":
    main()
