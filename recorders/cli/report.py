"""`recorders report`: a run, or two side by side, as a page; a timeline as figures, or in any visualizer."""

from __future__ import annotations

import sys
from argparse import ArgumentParser
from collections.abc import Sequence
from pathlib import Path

from recorders.cli.output import UsageError, print_written, working
from recorders.cli.sources import Source, add_source, at_least, file_to_write, kind_of, open_source
from recorders.errors import NotARecordingError
from recorders.watch.charts import drawable
from recorders.watch.replay import replay
from recorders.watch.timeline import Timeline
from recorders.watch.visualizers.choice import as_visualizers
from recorders.watch.visualizers.html import Run, html_report
from recorders.watch.visualizers.html.page import write_whole
from recorders.watch.visualizers.matplotlib import MatplotlibVisualizer

_TO = (
    "html[:PAGE], png[:FOLDER], text, tensorboard[:FOLDER], wandb[:PROJECT], or a visualizer of another package; "
    "again for several. PAGE.html is html:PAGE.html, and - is html:-, the page on the standard output"
)
_DEFAULTS = {"html": "report.html", "png": "recorders-plots"}


def add_arguments(parser: ArgumentParser) -> None:
    """Adds what `run` takes."""
    add_source(parser, "paths", of="a recording or a timeline; two are compared side by side", nargs="+")
    parser.add_argument("-o", "--to", action="append", metavar="KIND[:TARGET]", help=_TO)
    parser.add_argument("--title", default="Training report", help="of the page")
    parser.add_argument("--dpi", type=at_least(10, float, 1000), default=120, help="dots per inch of png")


def run(
    paths: Sequence[str],
    to: Sequence[str] | None = None,
    title: str = "Training report",
    dpi: float = 120,
    as_json: bool = False,
) -> None:
    """Report a run, or two side by side: by default one page that opens in a browser without a network.

    A timeline is also drawn as figures, one PNG for each chart, or shown again, tick after tick, by any visualizer.
    """
    if len(paths) > 2:
        raise UsageError("give one run, or two to compare")
    targets = [_target(text) for text in to or ["html"]]
    printed = ("html", "-") in targets
    if printed and as_json:
        raise UsageError("a page on the standard output is no JSON: give a file, as in --to html:report.html, or leave out --json")
    sources = [open_source(path) for path in paths]
    written: list[str | Path] = []
    for kind, target in targets:
        if kind == "html":
            written += _page(target, sources, paths, title)
        else:
            written += _replayed(kind, target, sources, paths[0], dpi)
    if not printed:
        print_written(written, as_json)


def _target(text: str) -> tuple[str, str]:
    """A kind and where it goes; "" for the place that a visualizer chooses."""
    if text == "-" or (text.endswith(".html") and ":" not in text):
        return "html", text
    kind, _, target = text.partition(":")
    if kind not in _DEFAULTS and not kind.isidentifier():
        raise UsageError(f"--to {text}: give a kind, as in html:{text}")
    if target == "-" and kind != "html":
        raise UsageError(f"--to {text}: only a page can go to the standard output")
    return kind, target or _DEFAULTS.get(kind, "")


def _page(target: str, sources: Sequence[Source], paths: Sequence[str], title: str) -> list[Path]:
    runs = [Run.of(source, path) for source, path in zip(sources, paths, strict=True)]
    with working("writing"):
        page = html_report(*runs, title=title)
    if target == "-":
        sys.stdout.write(page)
        return []
    return [write_whole(file_to_write(target, paths), page)]


def _replayed(kind: str, target: str, sources: Sequence[Source], path: str, dpi: float) -> list[str | Path]:
    """Shows a timeline by a visualizer; returns where that wrote, as far as it is known."""
    (source,), more = sources[:1], sources[1:]
    if more:
        raise UsageError(f"--to {kind} takes one run: only a page shows two")
    if not isinstance(source, Timeline):
        raise NotARecordingError(f"{path} is {kind_of(source)}, which has no ticks: only --to html shows it")
    if kind == "png":
        figures = MatplotlibVisualizer()
        with working("drawing"):
            replay(drawable(source), figures)
            return [*figures.save(target, dpi)]
    replay(drawable(source), as_visualizers(f"{kind}:{target}" if target else kind))
    return [target] if target else []
