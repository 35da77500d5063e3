"""Page: one HTML file that holds runs, and everything that draws them; it opens without a network and loads nothing."""

from __future__ import annotations

import base64
import datetime
import hashlib
import html
import json
import math
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from importlib.resources import files
from pathlib import Path
from typing import Any

from recorders.errors import LensError
from recorders.recorder.recorder import Recorder
from recorders.recordings.atomic_files import as_path, written_whole
from recorders.recordings.recording import Recording
from recorders.watch.charts import ChartView, axis_of, base_of, in_order, layers_of, network_order
from recorders.watch.diagnosis.causes import KINDS
from recorders.watch.diagnosis.finding import Finding, Findings
from recorders.watch.timeline import Timeline
from recorders.watch.visualizers.html.columns import EXACT, VALUES, Columns, packed, statistics_of
from recorders.watch.visualizers.html.runs import Run


def html_report(*runs: Run | Timeline | Recorder | Recording | str | os.PathLike[str], title: str = "Training report") -> str:
    """One self-contained page of one run, or of two side by side.

    Args:
        runs: timelines, recorders, recordings, paths of timelines or of recordings, or `Run` objects, which may have findings. A
            recording is shown as one point in time, with its findings.
        title: the title of the page.

    Returns:
        the text of the page. Values have 24 binary digits if there are at most 250,000, else 12. If there are more than 6 million,
        neighbouring ticks are joined, and the page says how many.

    Raises:
        LensError: no run or more than two, or a timeline without charts.
        RecordingNotFoundError: there is nothing at a path.
        StorageError: what is there cannot be read.

    >>> from recorders.watch.charts import Chart, keep_charts
    >>> timeline = Timeline()
    >>> timeline.append(0, {"Loss/train": {"mean": 2.0}})
    >>> keep_charts(timeline, [ChartView(Chart("Loss", ("loss",), ranges=None), timeline, ("train",))])
    >>> html_report(timeline, title="A <b>run</b>")[:15], "<b>run" in html_report(timeline, title="A <b>run</b>")
    ('<!doctype html>', False)
    """
    if not 1 <= len(runs) <= 2:
        raise LensError(f"a page shows one run, or two side by side; got {len(runs)}")
    names = ("",) if len(runs) == 1 else ("first run", "second run")
    found = [Run.of(run, "" if isinstance(run, (str, os.PathLike)) else name) for run, name in zip(runs, names, strict=True)]
    columns = []
    for run in found:
        if not run.views():
            raise LensError(
                f"{run.timeline.path} holds no charts: give Run(timeline, charts=[ChartView(Chart(...), timeline, layers)])"
            )
        columns.append(Columns(run.timeline, keys_of(run.views())))
        for tick in run.timeline.ticks():
            columns[-1].add(tick)
    return page(found, columns, title)


def write_report(
    path: str | os.PathLike[str],
    *runs: Run | Timeline | Recorder | Recording | str | os.PathLike[str],
    title: str = "Training report",
) -> Path:
    """Writes `html_report` to a file, whole or not at all; returns its path."""
    return write_whole(Path(as_path(path)), html_report(*runs, title=title))


def write_whole(path: Path, text: str) -> Path:
    """Writes beside the file and renames, so that a browser never reads half a page."""
    with written_whole(path) as draft:
        draft.write_text(text, encoding="utf-8", errors="replace", newline="\n")
    return path


def keys_of(views: Sequence[ChartView]) -> list[tuple[str, str]]:
    """The names and statistics in the timeline that charts need."""
    layered = [view for view in views if not view.chart.across]
    return [(view.chart.row(layer), name) for view in layered for layer in view.layers for name in statistics_of(view)]


def page(runs: Sequence[Run], columns: Sequence[Columns], title: str, live: bool = False) -> str:
    """The page of runs whose numbers were collected; `live` if more will come."""
    charts = _merged(runs)
    layers = network_order(view.layers for view in charts if not _overall(view))
    known: dict[str, str] = {}
    for run in runs:
        known = {**known, **{layer: kind for layer, kind in layers_of(run.timeline).items() if kind or layer not in known}}
    order = network_order([list(layers_of(run.timeline)) for run in runs])
    layers = list(dict.fromkeys([*in_order(layers, order), *(layer for view in charts for layer in view.layers)]))
    place = {layer: index for index, layer in enumerate(layers)}
    drawn = sum(name != "nonfinite" for _, name in keys_of(charts))
    series = sum(drawn * len(one) for one in columns)
    every, exact = math.ceil(series / VALUES) or 1, series <= EXACT
    report = {
        "title": title,
        "exact": exact,
        "made": datetime.datetime.now().astimezone().isoformat(timespec="seconds"),
        "live": live,
        "layers": layers,
        "kinds": [known.get(base_of(layer), "") for layer in layers],
        "charts": [_described(view, place) for view in charts],
        "runs": [
            {
                "name": run.name,
                "axis": axis_of(run.timeline),
                "ticks": one.ticks[::every],
                "last": one.ticks[-1] if one.ticks else None,
                "count": len(one.ticks),
                "every": every,
                **_judged(run.findings, axis_of(run.timeline), one.ticks),
                "charts": list(packed(one, charts, every, exact)),
            }
            for run, one in zip(runs, columns, strict=True)
        ],
    }
    return _assembled(title, report)


def _merged(runs: Sequence[Run]) -> list[ChartView]:
    """The charts of all runs by title, each with the layers of all."""
    found: dict[str, ChartView] = {}
    for view in (view for run in runs for view in run.views()):
        known = found.setdefault(view.title, view)
        found[view.title] = replace(known, layers=tuple(network_order([known.layers, view.layers])))
    return list(found.values())


def _overall(view: ChartView) -> bool:
    """Whether it is drawn as lines in one panel."""
    return view.chart.across[0].show != "share" if view.chart.across else view.is_pushed


def _described(view: ChartView, place: Mapping[str, int]) -> dict[str, Any]:
    return {
        "title": view.title,
        "unit": view.unit,
        "lines": view.lines,
        "ranges": view.ranges,
        "log": view.log_scale,
        "shared": view.shared,
        "limits": [limit if math.isfinite(limit) else None for limit in view.limits],
        "across": [asdict(across) for across in view.chart.across],
        "overall": _overall(view),
        "layers": [place[layer] for layer in view.layers],
    }


def _judged(found: Sequence[Finding] | None, axis: str, ticks: Sequence[int]) -> dict[str, Any]:
    """What was found, what the page says if that is nothing, and what was examined."""
    if found is None:
        return {"findings": None, "examined": False, "verdict": "No findings were computed for this page.", "notes": []}
    told = [_told(finding, axis, ticks) for finding in found]
    if not isinstance(found, Findings):
        return {"findings": told, "examined": True, "verdict": "No fault was found.", "notes": []}
    notes = [_noticed(notice) for notice in found.notices]
    for label, kinds in (("Examined", [f"{kind} layers" for kind in found.examined]), ("Not examined", found.unexamined)):
        notes += [f"{label}: {'; '.join(kinds)}"] * bool(kinds)
    verdict = found.verdict_if_empty
    return {"findings": told, "examined": bool(found.examined), "verdict": f"{verdict[0].upper()}{verdict[1:]}.", "notes": notes}


def _told(finding: Finding, axis: str, ticks: Sequence[int]) -> dict[str, Any]:
    """A finding as the page has it; `since` is a tick that charts mark, None if there is none."""
    since = finding.since if finding.since in ticks else None  # a recording tells a step, and its one tick is the whole of it
    what = finding.what if finding.since is None else f"{finding.what}, since {'step' if since is None else axis} {finding.since}"
    told = {
        "severity": finding.severity,
        "kind": finding.kind,
        "likely": finding.likely,
        "why": finding.why,
        "remedy": finding.remedy,
        "page": _documented(finding),
    }
    return {"layer": finding.layer, "what": what, "since": since, **told}


def _noticed(notice: Finding) -> str:
    """A notice as a line of text."""
    page = _documented(notice)
    return f"Notice: {notice.layer}: {notice.what}{f' (see {page})' if page else ''}"


def _documented(finding: Finding) -> str:
    """The path of the documentation of the finding's kind in the repository; "" if it is a kind of the user's own."""
    return finding.page if finding.kind in KINDS else ""


def _assembled(title: str, report: Mapping[str, Any]) -> str:
    """The template with everything in place. Names are untrusted: they are data for the script, never markup."""
    folder = files(__package__)
    style, *scripts = (
        folder.joinpath(name).read_text("utf-8") for name in ("page.css", "numbers.js", "drawing.js", "charts.js", "page.js")
    )
    script = "\n".join(scripts)
    # JSON of ASCII characters, without those that could end or open an element.
    text = json.dumps(report, allow_nan=False, separators=(",", ":"))
    data = re.sub("[<>&]", lambda found: f"\\u{ord(found[0]):04x}", text)
    policy = (
        f"default-src 'none'; script-src '{_hash(script)}'; style-src '{_hash(style)}'; img-src data:; base-uri 'none'; "
        "form-action 'none'; require-trusted-types-for 'script'; trusted-types 'none'"
    )
    parts = {"policy": policy, "title": html.escape(title), "style": style, "report": data, "script": script}
    return re.sub(r"\{\{(\w+)\}\}", lambda found: parts[found[1]], folder.joinpath("page.html").read_text("utf-8"))


def _hash(text: str) -> str:
    return f"sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}"
