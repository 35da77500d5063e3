"""The HTML page of 500 layers and 1,000 ticks: its size, how soon a browser has drawn it, and what it costs a training.

Run: python benchmarks/report.py; with --picture PATH only a picture of a smaller page is made. Needs Chromium, chromedriver and
selenium.
"""

from __future__ import annotations

import argparse
import math
import statistics
import sys
import tempfile
import time
from pathlib import Path

import torch
from measure import versions, write
from torch import Tensor

from recorders.watch.charts import Chart, ChartView, keep_charts
from recorders.watch.diagnosis.finding import Finding, fault
from recorders.watch.lenses import LossMetrics, OutputActivation, OutputGradientGeometry, ParameterNorm
from recorders.watch.timeline import Timeline
from recorders.watch.visualizers.html import HtmlVisualizer, Run, write_report

sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))
from browser import browser, opened

LENSES = (OutputGradientGeometry(log_scale=True), OutputActivation(), ParameterNorm(parameters="weight"), LossMetrics())
LAYERS, TICKS, OPENINGS = 500, 1_000, 7


def names_of(layers: int) -> tuple[str, ...]:
    parts = ("attention.qkv", "attention.proj", "mlp.fc1", "mlp.act", "mlp.fc2")
    return tuple(f"model.blocks.{i // len(parts)}.{parts[i % len(parts)]}" for i in range(layers))


def views_of(layers: int) -> list[tuple[Chart, tuple[str, ...]]]:
    names = names_of(layers)
    pushed = {"Loss": ("train", "eval"), "Metrics": ("accuracy",)}
    return [(chart, pushed.get(chart.title, names)) for lens in LENSES for chart in lens.charts]


def made(layers: int, ticks: int, explode: bool) -> Timeline:
    """A made-up training with noise in every value; some activations die, and if it explodes a few layers end in NaN."""
    timeline, depth = Timeline(), torch.linspace(0, 1, layers, dtype=torch.float64)
    generator = torch.Generator().manual_seed(int(explode))
    views = views_of(layers)
    for tick in range(ticks):
        x = tick / max(ticks - 1, 1)
        noise = torch.randn(layers, dtype=torch.float64, generator=generator)
        boom = (explode and x > 0.6) * torch.exp(-(((depth - 0.4) * 14) ** 2)) * (x - 0.6)
        death = explode * ((depth - 0.75).abs() < 0.06) * max(0.0, x - 0.25)
        middles = {
            "Output Gradient Norm": 10 ** (-2.5 + 1.5 * depth - x + 0.1 * noise + 16 * boom),
            "Output Gradient Correlation": (0.6 * torch.sin(4 * x + 5 * depth) * (1 - x) + 0.05 * noise).clamp(-1, 1),
            "Output Activation": (0.55 + 0.1 * torch.sin(20 * depth) + 0.01 * noise - death).clamp(0, 1),
            "Output Death": (death * 1.2 + 0.002 * noise.abs()).clamp(0, 1),
            "Weight Norm": 4 + 3 * depth.cos() + 2 * x * depth + 0.01 * noise,
        }
        loss = 2.3 * math.exp(-4 * x) + 0.15 + 0.02 * noise[0].item() + float(boom.max()) * 3
        rows = {f"{title}/{name}": row for title, values in middles.items() for name, row in rows_of(values, noise, boom, layers)}
        rows["Loss/train"] = {"mean": loss, "std": 0.08}
        rows["Loss/eval"] = {"mean": loss * 1.05 + 0.1 * x, "std": 0.06}
        rows["Metrics/accuracy"] = {"mean": 1 - 0.9 * math.exp(-5 * x) - min(0.6, float(boom.max()))}
        timeline.append(tick, rows)
    keep_charts(timeline, [ChartView(chart, timeline, names) for chart, names in views])
    return timeline


def rows_of(middle: Tensor, noise: Tensor, boom: Tensor, layers: int) -> list[tuple[str, dict[str, float]]]:
    wide = middle.abs() * (0.3 + 0.1 * noise.abs())
    lost = torch.where(boom > 0.3, 12.0, 0.0)
    middle = torch.where(boom > 0.3, torch.nan, middle)
    columns = zip(names_of(layers), middle.tolist(), (wide / 2).tolist(), wide.tolist(), lost.tolist(), strict=True)
    return [
        (name, {"mean": m, "std": s, "min": m - w, "max": m + w, "count": 64.0, "nonfinite": n}) for name, m, s, w, n in columns
    ]


def sick() -> list[Finding]:
    """Findings as `recorders.findings` writes them."""
    dead = "90% of the units are dead: they were never active"
    large = "updates are too large: a typical step changes the weights by 4.1e-02 of their norm; 1e-04 to 1e-02 is usual"
    return [
        fault("dead-units", "model.blocks.6.mlp.act", dead, 106, severity="warning"),
        fault("updates-too-large", "model.blocks.3.mlp.fc1", large),
    ]


def two_runs() -> tuple[Run, Run]:
    return Run(made(45, 160, explode=True), "rate 3e-3", sick()), Run(made(45, 160, explode=False), "rate 1e-3", ())


def picture(path: Path) -> None:
    with tempfile.TemporaryDirectory() as folder, browser(Path(folder) / "profile", 1400, 1560) as driver:
        runs = two_runs()
        opened(driver, write_report(Path(folder) / "report.html", *runs, title="Two learning rates"))
        driver.execute_script("theme('light')")
        time.sleep(1.0)
        path.parent.mkdir(parents=True, exist_ok=True)
        driver.save_screenshot(str(path))
    print(f"wrote {path}")


def measured() -> None:
    torch.set_num_threads(1)
    timeline = made(LAYERS, TICKS, explode=True)
    charts = [ChartView(chart, timeline, names) for chart, names in views_of(LAYERS)]
    with tempfile.TemporaryDirectory() as folder:
        started = time.perf_counter()
        page = write_report(Path(folder) / "report.html", timeline)
        written = time.perf_counter() - started
        ready, shown = [], []
        for at in range(OPENINGS):  # each in a new browser, with nothing cached
            with browser(Path(folder) / f"profile-{at}") as driver:
                opened(driver, page)
                ready.append(driver.execute_script("return performance.getEntriesByName('ready')[0].startTime"))
                shown.append(driver.execute_script("return performance.getEntriesByName('first-contentful-paint')[0]?.startTime"))
        visualizer, ticks = HtmlVisualizer(Path(folder) / "live.html"), []
        visualizer.show(TICKS - 200, charts)
        for tick in range(TICKS - 199, TICKS):
            started = time.perf_counter()
            visualizer.show(tick, charts)
            ticks.append((time.perf_counter() - started) * 1e3)
        started = time.perf_counter()
        visualizer.flush()
        last = time.perf_counter() - started
        path = write(
            "report",
            layers=LAYERS,
            ticks=TICKS,
            charts=len(charts),
            versions=versions("selenium"),
            **{
                "MB": page.stat().st_size / 1e6,
                "s to write it": written,
                "s until all is drawn": {"median": statistics.median(ready) / 1e3, "highest": max(ready) / 1e3},
                "s until something is drawn": statistics.median(each for each in shown if each) / 1e3,
                "ms a tick while training": {"median": statistics.median(ticks), "highest": max(ticks)},
                "s to write it at the end": last,
            },
            what="lenses on gradients, activations and weights: 11 statistics a layer; a new headless Chromium at each opening",
        )
    print(path.read_text())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--picture", type=Path, help="only make a picture of a page")
    given = parser.parse_args()
    if given.picture:
        picture(given.picture)
    else:
        measured()


if __name__ == "__main__":
    main()
