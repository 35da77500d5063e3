"""Writes the table of measured figures into README.md, from the JSON files in `results/`.

Run: python benchmarks/table.py
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parent / "results"
README = Path(__file__).parent.parent / "README.md"
REDUCERS = ("Mean", "Max", "Norm", "Moments", "Summary")


def rows() -> list[tuple[str, str]]:
    """What was measured, and the figure."""
    floor, hooks, storage, sync = map(_result, ("floor", "hooks", "storage", "sync"))
    found = [(f"`{name}`, one update on a 25 MB activation, by layout", _layouts(floor["rows"], name)) for name in REDUCERS]
    for what in ("monitor not due (every=1000000)", "Mean", "Summary"):
        row = next(row for row in hooks["rows"] if row["what"] == what)
        label = "monitor that is not due" if "not due" in what else f"`ForwardMonitor({what}())` on an 8x64 output"
        found.append((f"{label}, beyond an empty hook", f"{row['us beyond an empty hook']:.1f} us a call"))
    found.append(("10,000 monitors attached", f"{hooks['attach_10000_s']:.2f} s"))
    seconds = {row["what"]: row["s"]["median"] for row in storage["rows"]}
    found.append(("`save` of 10,000 subrecorders, flushed to disk; `load`", f"{seconds['save']:.1f} s; {seconds['load']:.1f} s"))
    largest = sync["rows"][-1]
    found.append((f"`sync` of {largest['subrecorders']:,} subrecorders, 2 processes", f"{largest['sync_ms']:.0f} ms"))
    return found


def _result(name: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((RESULTS / f"{name}.json").read_text())
    return found


def _layouts(measured: list[dict[str, Any]], reducer: str) -> str:
    ratios = {row["layout"]: row["x floor"] for row in measured if row["reducer"] == reducer}
    return ", ".join(f"{ratio:.0f}x ({layout})" for layout, ratio in ratios.items())


def table() -> str:
    machine = _result("floor")["machine"]
    lines = ["| what | figure |", "|---|---|", *(f"| {what} | {figure} |" for what, figure in rows())]
    note = "Multiples are of `x.sum()` of the same tensor in the same run."
    return "\n".join([*lines, "", f"{machine['cores']} cores of {machine['processor']}, torch {machine['torch']}. {note}"])


def written(text: str) -> str:
    """README's text with the table in its place."""
    return re.sub(r"(<!-- figures -->\n).*?(<!-- /figures -->)", lambda m: f"{m[1]}{table()}\n{m[2]}", text, flags=re.DOTALL)


if __name__ == "__main__":
    README.write_text(written(README.read_text()))
