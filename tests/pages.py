"""Timelines with charts, made for tests of pages, and what a page holds."""

from __future__ import annotations

import base64
import json
import re
import struct
import zlib
from collections.abc import Mapping, Sequence
from typing import Any

from recorders.watch.charts import Chart, ChartView, keep_charts
from recorders.watch.timeline import Timeline

__all__ = ["charted", "filled", "held", "unpacked"]


def charted(charts: Sequence[Chart], values: Mapping[str, Mapping[int, Mapping[str, float]]], path: str = ":memory:") -> Timeline:
    """A timeline with `values` by row, tick and statistic, and charts of the layers that have rows."""
    timeline = Timeline(path)
    for tick in sorted({tick for row in values.values() for tick in row}):
        timeline.append(tick, {name: row[tick] for name, row in values.items() if tick in row})
    views = []
    for chart in charts:
        titles = [across.title for across in chart.across] or [chart.title]
        layers = [name.removeprefix(f"{title}/") for title in titles for name in values if name.startswith(f"{title}/")]
        views.append(ChartView(chart, timeline, tuple(dict.fromkeys(layers))))
    keep_charts(timeline, views)
    return timeline


def filled(layers: Sequence[str] = ("net.a", "net.b", "net.c", "other"), ticks: int = 5, times: float = 1.0) -> Timeline:
    """The norm of layer i at tick t is times * (i + 1) * (t + 1); a loss falls."""
    values = {
        f"Norm/{layer}": {
            tick: {"mean": (mean := times * (i + 1) * (tick + 1)), "std": mean / 4, "min": mean / 2, "max": mean * 2}
            for tick in range(ticks)
        }
        for i, layer in enumerate(layers)
    }
    values["Loss/train"] = {tick: {"mean": 1 / (tick + 1)} for tick in range(ticks)}
    return charted([Chart("Loss", ("loss",), ranges=None), Chart("Norm", ("output",), "L2 norm")], values)


def held(text: str) -> Any:
    """What a page holds."""
    (found,) = re.findall(r'<script type="application/json" id="report">(.*?)</script>', text, re.DOTALL)
    return json.loads(found)


def unpacked(report: Any, run: int = 0) -> dict[tuple[str, str, str], list[float]]:
    """The values in a page by title, statistic and layer; as the page itself decodes them."""
    found = {}
    for chart, part in zip(report["charts"], report["runs"][run]["charts"], strict=True):
        data, kept = zlib.decompress(base64.b64decode(part["values"])), 4 if report["exact"] else 3
        n = len(data) // kept
        planes = [bytes(n)] * (4 - kept) + [data[i * n : (i + 1) * n] for i in range(kept)]
        values = [struct.unpack("<f", bytes(word))[0] for word in zip(*planes, strict=True)]
        ticks = len(report["runs"][run]["ticks"])
        keys = [(statistic, report["layers"][layer]) for statistic in part["statistics"] for layer in chart["layers"]]
        assert len(values) == len(keys) * ticks
        for at, (statistic, layer) in enumerate(keys):
            found[chart["title"], statistic, layer] = values[at * ticks : (at + 1) * ticks]
    return found
