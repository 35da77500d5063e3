"""The tables of what `gpu.py` measured, as `table.py` puts them into the page about speed."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

__all__ = ["tables"]

Row = dict[str, Any]

SHOWN = ("float32", "bfloat16")
"""The dtypes whose bandwidth the page shows; the others are in the results."""


def tables(result: dict[str, Any]) -> str:
    """Every section that was measured on each device, as a table; a sentence if nothing was."""
    if not result:
        return "Not measured yet: no GPU was at hand."
    return "\n\n".join(_tables_of(**one) for one in result["devices"].values())


def _tables_of(device: dict[str, Any], torch: str, sections: dict[str, Any]) -> str:
    lines = [f"{device['name']}, torch {torch}, triton {device.get('triton', 'missing')}."]
    for name, make in MAKERS.items():
        if rows := sections.get(name, {}).get("rows"):
            lines += ["", f"{_capital(sections[name]['what'])}:", "", *make(rows)]
    absent = {f"{row['who']} ({row['not run']})" for section in sections.values() for row in section["left_out"]}
    if absent:
        lines += ["", f"Not run: {'; '.join(sorted(absent))}."]
    return "\n".join(lines)


def _steps(rows: list[Row]) -> list[str]:
    executions = list(dict.fromkeys(row["execution"] for row in rows))
    cells = {(row["network"], row["who"], row["execution"]): _share(row) for row in rows}
    bare = {(row["network"], row["execution"]): f"{row['bare ms']['median']:.1f} ms" for row in rows}
    found = []
    for network in dict.fromkeys(row["network"] for row in rows):
        found.append([network, "nothing", *(bare.get((network, execution), "") for execution in executions)])
        names = dict.fromkeys(row["who"] for row in rows if row["network"] == network)
        found += [[network, who, *(cells.get((network, who, execution), "") for execution in executions)] for who in names]
    return _table(["network", "recorded", *executions], found)


def _share(row: Row) -> str:
    share = row["x bare"]
    memory = f", {(row['peak bytes'] - row['peak bytes, bare']) / 1e6:+.0f} MB" if "peak bytes" in row else ""
    bar = f", to be at most {row['bar']}x" if "bar" in row else ""
    return f"{share['median']:.3f}x, mean {share['mean']:.3f}x ({share['p10']:.3f} to {share['p90']:.3f}){memory}{bar}"


def _bandwidth(rows: list[Row]) -> list[str]:
    layouts = list(dict.fromkeys(row["layout"] for row in rows))
    found = []
    for dtype in SHOWN:
        same = {(row["who"], row["layout"]): row for row in rows if row["dtype"] == dtype}
        copies = [next(row["copy GB/s"] for (_, own), row in same.items() if own == layout) for layout in layouts] if same else []
        if copies:
            found.append([f"a copy, {dtype}", *(f"{speed:.0f} GB/s" for speed in copies)])
        names = sorted({who for who, _ in same})
        found += [[f"`{who}`, {dtype}", *(_speed(same.get((who, layout))) for layout in layouts)] for who in names]
    return _table(["an update of", *layouts], found)


def _speed(row: Row | None) -> str:
    return "" if row is None else f"{row['GB/s']:.0f} GB/s, {row['of x.sum()']['median']:.0%}"


def _hashes(rows: list[Row]) -> list[str]:
    names = list(dict.fromkeys(row["who"] for row in rows))
    cells = {(row["who"], row["dtype"]): f"{row['x sum']['median']:.2f}x" for row in rows}
    found = [[dtype, *(cells.get((who, dtype), "") for who in names)] for dtype in dict.fromkeys(row["dtype"] for row in rows)]
    return _table(["an update of", *(f"`{who}`" for who in names)], found)


def _calls(rows: list[Row]) -> list[str]:
    found = [
        [
            f"`{row['who']}`",
            f"`{row['pattern']}`",
            f"{row['launches']:.2f}",
            f"{row['added bytes'] / 1e6:.2f} MB",
            "yes" if row["waits"] else "no",
        ]
        for row in rows
        if "launches" in row
    ]
    return _table(["reducer", "pattern", "launches", "memory at the peak", "the host waits"], found)


def _observations(rows: list[Row]) -> list[str]:
    names = list(dict.fromkeys(row["observation"] for row in rows))
    cells = {(row["who"], row["observation"]): f"{1e3 * row['ms']['median']:.1f} us, {row['x sum']['median']:.1f}x" for row in rows}
    found = [[who, *(cells.get((who, name), "") for name in names)] for who in dict.fromkeys(row["who"] for row in rows)]
    return _table(["by", *names], found)


MAKERS: dict[str, Callable[[list[Row]], list[str]]] = {
    "training": _steps,
    "training-big": _steps,
    "training-compiled": _steps,
    "training-big-compiled": _steps,
    "steps": _steps,
    "observations": _observations,
    "bandwidth": _bandwidth,
    "hashes": _hashes,
    "calls": _calls,
}


def _capital(text: str) -> str:
    return text[:1].upper() + text[1:]


def _table(head: list[str], rows: Iterable[list[str]]) -> list[str]:
    cells = [[cell.replace("|", "\\|") for cell in row] for row in (head, ["---"] * len(head), *rows)]
    return [f"| {' | '.join(row)} |" for row in cells]
