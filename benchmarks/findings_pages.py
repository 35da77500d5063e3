"""Writes the generated parts of the pages about findings: how one reads, its causes, all kinds, how often each is right.

What a page says besides is written by hand. Run: python benchmarks/findings_pages.py, after `findings_pictures.py` or
`python -m benchmarks.diagnosis` has made new results.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator
from itertools import zip_longest
from pathlib import Path
from typing import Any

from recorders.watch.diagnosis.causes import CAUSES, KINDS

ROOT = Path(__file__).parent.parent
PAGES = ROOT / "docs" / "findings"
SCORES = ROOT / "docs" / "findings-scores.md"
GOOD_RUNS = ROOT / "docs" / "good-runs.md"
RESULTS = ROOT / "benchmarks" / "results"
FURTHER = {
    "nonfinite": ("nonfinite-inputs", "exploding-gradients", "initialisation"),
    "dead-units": ("rate-too-high",),
    "frozen": ("no-steps", "stale-optimizer", "lost-updates", "dead-units", "loss-scale", "rate-too-low"),
    "updates-too-large": ("loss-scale",),
    "updates-too-small": ("vanishing-gradients", "initialisation"),
    "no-gradient": ("initialisation",),
    "loss-does-not-fall": ("vanishing-gradients", "exploding-gradients", "frozen", "weights-overwritten"),
    "loss-falls-slowly": ("frozen",),
    "loss-rises": ("schedule",),
    "loss-jumps": ("weights-overwritten",),
    "sees-the-future": ("wrong-axis",),
    "shrinking-signal": ("normalisation",),
    "zero-weights": ("frozen",),
    "equal-outputs": ("bottleneck", "wrong-axis", "saturation", "normalisation", "inputs-not-normalised"),
    "order-has-no-effect": ("inputs-constant",),
    "unreachable-target": ("wrong-loss",),
}
"""Causes that a finding names instead, if what was recorded tells of them."""

FAMILIES = {
    "Outputs and units": """
        nonfinite never-ran dead-units saturated-units outliers equal-units equal-outputs one-direction growing-signal
        shrinking-signal
        """,
    "Gradients": """
        vanishing-gradients exploding-gradients no-gradient gradient-cut tiny-gradients clipped not-cleared gradients-discarded
        """,
    "Weights and updates": """
        frozen frozen-from-start updates-too-large updates-too-small zero-weights shrinking-weights strong-weight-decay
        large-initial-weights large-initial-bias oscillating-weights coarse-weights written-between-steps untied-weights
        replicas-differ
        """,
    "The optimizer": """
        rate-is-zero rate-ends-early ascends odd-momentum large-epsilon optimizer-made-anew foreign-parameters
        """,
    "The loss": """
        loss-does-not-fall loss-rises loss-climbs loss-is-constant loss-falls-slowly loss-jumps high-initial-loss
        probabilities-as-logits rectified-outputs normalised-outputs dropout-on-outputs softmax-axis outputs-reshaped
        shapes-broadcast exclusive-labels wrong-probabilities
        """,
    "The data": """
        nonfinite-inputs batches-of-one constant-inputs large-inputs weak-inputs repeated-batches constant-target sorted-target
        large-target unreachable-target targets-are-inputs targets-displaced class-ignored unused-classes
        """,
    "Layers": """
        evaluation-mode training-mode statistics-stand-still wrong-normalisation much-dropout bottleneck linear-net
        activations-in-a-row repeated-layer
        """,
    "What outputs depend on": """
        samples-mix ignores-inputs order-has-no-effect sees-the-future sees-only-the-past mask-inverted attention-saturated
        attention-uniform attention-unscaled random-in-evaluation carries-state
        """,
    "A run beside good ones": "left-range",
}
"""The kinds by what is wrong."""


def seen(kind: str) -> str:
    """How the finding of the planted case reads, why it matters, and the picture."""
    known, one = KINDS[kind], _made().get(kind, {})
    picture = f"![{one.get('alt', '')}](pictures/{kind}.png)"
    return (
        f"> `{one.get('says', '')}`\n\nKind `{kind}`, severity {known.severity}.\n\n## Why it matters\n\n{known.why}\n\n{picture}"
    )


def causes(kind: str) -> str:
    """The causes, most likely first, each with what to try."""
    known = KINDS[kind]
    lines = [f"{number}. {_cause(name)}" for number, name in enumerate(known.causes, 1)]
    if known.remedy and len(known.causes) != 1:
        lines[:0] = [f"Try first: {known.remedy}.", ""][: 2 if lines else 1]
    further = [name for name in FURTHER.get(kind, ()) if name not in known.causes]
    if further:
        lines += [
            "",
            "If the recording tells of it, the finding names another cause:",
            "",
            *(f"- {_cause(name)}" for name in further),
        ]
    return "\n".join(lines)


def families() -> str:
    """All kinds, by family; warnings are in italics."""
    named = [kind for kinds in FAMILIES.values() for kind in kinds.split()]
    if sorted(named) != sorted(KINDS):
        raise ValueError(f"each kind has one family, but not {sorted({*named} ^ {*KINDS}) or 'those that are named twice'}")
    parts = []
    for family, kinds in FAMILIES.items():
        names = {kind: kind if KINDS[kind].severity == "error" else f"*{kind}*" for kind in kinds.split()}
        rows = [(f"[{name}]({kind}.md)", summary(kind)) for kind, name in names.items()]
        parts.append(f"## {family}\n\n{_table(('kind', 'what was seen'), rows)}")
    return "\n\n".join(parts)


def right() -> str:
    """What the benchmark says of each kind that it has."""
    counted = _counted()
    rows = [
        (f"[{kind}](findings/{kind}.md)", f"{right} of {told}" if told else "", f"{healthy}")
        for kind, (told, right, healthy) in ((kind, counted[kind]) for kind in KINDS if kind in counted)
    ]
    middle = -(-len(rows) // 2)  # two kinds a row, for a page half as long
    head = ("kind", "right", "in healthy trainings")
    return _table(head * 2, [one + other for one, other in zip_longest(rows[:middle], rows[middle:], fillvalue=("",) * 3)])


def _table(head: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> str:
    return "\n".join(f"| {' | '.join(row)} |" for row in (head, ("---",) * len(head), *rows))


def scores() -> str:
    """How often the diagnosis was right: on the benchmark, beside rules of others, on variants, and on DEForm."""
    head = ("trainings", "programs", "faults", "found", "right place", "right cause", "false alarms in healthy trainings")
    rows: list[tuple[str, ...]] = []
    for file, how in (
        ("diagnosis", ""),
        ("diagnosis_at_first", ", by the rules before"),
        ("diagnosis_compiled", ", compiled"),
        ("diagnosis_peers", ""),
    ):
        for part, one in _result(file).get("scores", {}).items():
            alarms, of = one["false alarms"], one["healthy"]
            rows.append(_scored(f"{part}{how}", f"{one['programs']}", one["all"], f"{alarms} of {of}"))
            if file == "diagnosis" and part == "held out":
                rows += [_scored(f"{part}, {name}", "", one[key], "") for key, name in KINDS_OF_FAULTS.items()]
    for name, one in _result("diagnosis_variants").get("summary", {}).items():
        rows.append((name, "", "", "", "", "", f"{one['false alarms']} of {one['healthy']}"))
    lines = [_table(head, rows), "", *_by_severity()]
    deform = _result("diagnosis_deform")
    for arch in ("encoder", "decoder"):
        found = deform.get(arch, {}).get("scores", {})
        if "ours" in found:
            told = ", ".join(f"{who} {found[key]['f1']:.2f}" for key, who in DEFORM.items() if key in found)
            ours = found["ours"]
            lines += [
                "",
                f"F1 of detection on the {arch} operators of DEForm that change the outcome ({ours['faulty']:.0f} faulty and",
            ]
            lines[-1] += f" {ours['healthy']:.0f} healthy trainings): {told}."
    return "\n".join(lines)


def good_runs() -> str:
    """What good runs at hand add, beside the rules alone."""
    head = ("trainings", "faults", "by", "found", "right place", "right cause", "false alarms in healthy trainings")
    alone, rows = _result("diagnosis").get("scores", {}), []
    for part, ways in _result("diagnosis_good_runs").get("scores", {}).items():
        for way, one in {"the rules alone": alone[part], **ways}.items():
            if not way.startswith("the "):
                continue
            name, _, shares, *found, alarms = _scored(part, "", one["all"], f"{one['false alarms']} of {one['healthy']}")
            rows.append((name, shares, way, *found, alarms))
            if part == "held out":
                _, _, shares, *found, _ = _scored(part, "", one["own"], "")
                rows.append((f"{part}, {KINDS_OF_FAULTS['own']}", shares, way, *found, ""))
    return _table(head, rows)


def _by_severity() -> Iterator[str]:
    """How many healthy trainings of the benchmark had an error, and how many a warning, at their end."""
    healthy = [row for row in _trainings() if not row["fault"]]
    ends = [{one[3] for one in row["told"][max(row["told"], key=int)]} for row in healthy if row["told"]]
    counts = {severity: sum(severity in end for end in ends) for severity in ("error", "warning")}
    told = f"{counts['error']} had an error at their end, and {counts['warning']} a warning"
    yield f"By severity: of the {len(healthy)} healthy trainings of the programs and beside them {told}."


KINDS_OF_FAULTS = {
    "general": "faults of any training",
    "own": "faults of one program",
    **{name: f"faults of {name}" for name in ("optimisation", "architecture", "data", "state")},
}
"""By key of the results of `python -m benchmarks.diagnosis`, what the faults are."""
DEFORM = {
    "ours": "ours",
    "ours, told a good run": "ours with a good run at hand",
    "published": "DEFault++",
    "centred": "DEFault++ told what is healthy here",
    "always": "who always says faulty",
}
"""By key of the results of `deform.py`, who speaks."""


def _scored(name: str, programs: str, shares: dict[str, Any], alarms: str) -> tuple[str, ...]:
    found = (f"{shares[key]:.2f}" for key in ("found", "located", "right cause"))
    return name, programs, f"{shares['trainings']}", *found, alarms


def _result(name: str) -> dict[str, Any]:
    path = RESULTS / f"{name}.json"
    result: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {}
    return result


def summary(kind: str) -> str:
    """The line below the title of a page."""
    return (PAGES / f"{kind}.md").read_text().split("\n")[2].rstrip(".")


def written() -> Iterator[tuple[Path, str]]:
    """Every page with its generated parts as they are now."""
    for kind in KINDS:
        page = PAGES / f"{kind}.md"
        yield (
            page,
            _filled(_filled(page.read_text(), "seen", lambda kind=kind: seen(kind)), "causes", lambda kind=kind: causes(kind)),
        )
    index = PAGES / "index.md"
    yield index, _filled(index.read_text(), "kinds", families)
    yield GOOD_RUNS, _filled(GOOD_RUNS.read_text(), "good runs", good_runs)
    yield SCORES, _filled(_filled(SCORES.read_text(), "right", right), "scores", scores)


def _filled(text: str, name: str, make: Callable[[], str]) -> str:
    start, end = f"<!-- {name} -->\n", f"<!-- /{name} -->"
    before, opened, rest = text.partition(start)
    _, closed, after = rest.partition(end)
    if not (opened and closed):
        raise ValueError(f"there is no place for {name}: {text.partition(chr(10))[0]}")
    return f"{before}{start}\n{make()}\n\n{end}{after}"


def _cause(name: str) -> str:
    cause = CAUSES[name]
    return f"**{cause.text[0].upper()}{cause.text[1:]}** (`{name}`): {cause.remedy}."


def _made() -> dict[str, dict[str, Any]]:
    return _result("findings_pictures")


def _trainings() -> Iterable[dict[str, Any]]:
    """Of the benchmark, each training once: two parts have the same healthy ones."""
    several = [row for rows in _result("diagnosis").get("told", {}).values() for row in rows]
    return {(row["program"], row["fault"], row["seed"]): row for row in several}.values()


def _counted() -> dict[str, tuple[int, int, int]]:
    """Of the benchmark, by kind: faulty trainings that had it, those whose cause it named, and healthy ones that had it."""
    counts: dict[str, list[int]] = {}
    for row in _trainings():
        last = row["told"][max(row["told"], key=int)] if row["told"] else []
        for kind, causes in {kind: causes for kind, _, causes, *_ in reversed(last)}.items():
            told = counts.setdefault(kind, [0, 0, 0])
            told[0] += bool(row["fault"])
            told[1] += bool(row["fault"] and causes and causes[0] in row["causes"])
            told[2] += not row["fault"]
    return {kind: (told, right, healthy) for kind, (told, right, healthy) in counts.items()}


if __name__ == "__main__":
    for page, text in written():
        page.write_text(text)
