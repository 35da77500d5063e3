"""Writes the generated parts of the documents: measured figures from `results/`, and the catalogue from the docstrings.

Run: python benchmarks/table.py
"""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import reducers

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "benchmarks" / "results"
REDUCERS = ("Mean", "Max", "Norm", "Moments", "Summary", "Quantile")


def figures() -> str:
    """What was measured of speed, for the README."""
    floor, hooks, storage, sync = map(_result, ("floor", "hooks", "storage", "sync"))
    found = [(f"`{name}`, one update on a 25 MB activation", _layouts(floor["rows"], name)) for name in REDUCERS]
    for what, label in (("monitor not due (every=1000000)", "monitor that is not due"), ("Mean", ""), ("Summary", "")):
        row = next(row for row in hooks["rows"] if row["what"] == what)
        label = label or f"`ForwardMonitor({what}())` on an 8x64 output"
        found.append((f"{label}, beyond an empty hook", f"{row['us beyond an empty hook']:.1f} us a call"))
    found.append(("10,000 monitors attached", f"{hooks['attach_10000_s']:.2f} s"))
    seconds = {row["what"]: row["s"]["median"] for row in storage["rows"]}
    found.append(("10,000 subrecorders saved and flushed to disk; loaded", f"{seconds['save']:.1f} s; {seconds['load']:.1f} s"))
    largest = sync["rows"][-1]
    found.append((f"{largest['subrecorders']:,} subrecorders synchronised, 2 processes", f"{largest['sync_ms']:.0f} ms"))
    machine = floor["machine"]
    note = "Multiples are of `x.sum()` of the same tensor in the same run."
    return "\n".join(
        [
            *_table(("what", "figure"), found),
            "",
            f"{machine['cores']} cores of {machine['processor']}, torch {machine['torch']}. {note}",
        ]
    )


def catalogue() -> str:
    """Every public reducer and function with the first line of its docstring, by the file it is in."""
    lines: list[str] = []
    found: dict[str, list[tuple[str, str]]] = {}
    for name in reducers.__all__:
        thing = getattr(reducers, name)
        reducer = inspect.isclass(thing) and issubclass(thing, (reducers.Reducer, reducers.Cell))
        if (reducer and not inspect.isabstract(thing)) or inspect.isfunction(thing):
            file = thing.__module__.removeprefix("reducers.")
            found.setdefault(file, []).append((f"`{name}`", (inspect.getdoc(thing) or "").partition("\n\n")[0].replace("\n", " ")))
    for file in sorted(found):
        lines += [f"### {file}.py", "", *_table(("name", "what it gives"), found[file]), ""]
    return "\n".join(lines).rstrip()


def accuracy() -> str:
    """How exact the reducers are: every row that the scripts `accuracy_*.py` measured."""
    lines: list[str] = []
    for path in sorted(RESULTS.glob("accuracy_*.json")):
        result = json.loads(path.read_text())
        rows = [(row["what"], row["data"], f"{row['error']:.2e}", f"{row['bound']:.2e}") for row in result["rows"]]
        lines += [f"`benchmarks/{path.stem}.py`: {result['what']}.", "", *_table(("what", "data", "error", "bound"), rows), ""]
    return "\n".join(lines).rstrip()


PAGES: dict[Path, dict[str, Callable[[], str]]] = {
    ROOT / "README.md": {"figures": figures},
    ROOT / "docs" / "reducers.md": {"catalogue": catalogue, "accuracy": accuracy},
}


def written() -> Iterator[tuple[Path, str]]:
    """Every page with its generated parts as they are now."""
    for page, parts in PAGES.items():
        text = page.read_text()
        for name, make in parts.items():
            start, end = f"<!-- {name} -->\n", f"<!-- /{name} -->"
            before, opened, rest = text.partition(start)
            _, closed, after = rest.partition(end)
            if not (opened and closed):
                raise ValueError(f"{page} has no place for {name}")
            text = f"{before}{start}{make()}\n{end}{after}"
        yield page, text


def _table(head: tuple[str, ...], rows: list[tuple[str, ...]]) -> list[str]:
    cells = [[cell.replace("|", "\\|") for cell in row] for row in (head, ("---",) * len(head), *rows)]
    return [f"| {' | '.join(row)} |" for row in cells]


def _result(name: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((RESULTS / f"{name}.json").read_text())
    return found


def _layouts(measured: list[dict[str, Any]], reducer: str) -> str:
    ratios = {row["layout"]: row["x floor"] for row in measured if row["reducer"] == reducer}
    return ", ".join(f"{ratio:.0f}x {layout}" for layout, ratio in ratios.items())


if __name__ == "__main__":
    for page, text in written():
        page.write_text(text)
