"""The pictures in docs/images: two trainings on handwritten digits, one of them sick, shown by each visualizer; what the demo
draws; and the figures that were measured, from benchmarks/results.

Run: python benchmarks/pictures.py [name ...]; names are those of `PICTURES`. Needs Chromium, chromedriver and selenium, and for
some of them the extras plot, tensorboard and demo. Beside the pictures it writes what they show, without the digits, which differ
from machine to machine, into benchmarks/results/pictures.json.

Check: python benchmarks/pictures.py --check. It draws without a browser, and ends with status 1 if a picture would show other
things now than when it was made, or is not the one that was made. CI does this. Needs the extra plot.
"""

from __future__ import annotations

import contextlib
import difflib
import hashlib
import io
import json
import os
import re
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from functools import cache, partial
from pathlib import Path
from typing import Any

import preset_pictures
import report
import scale
import table
import torch
from torch import nn

from recorders import Inspector, Timeline, divergence, lenses, load, overview, presets, replay, visualizers
from recorders.watch.charts import charts_of
from recorders.watch.visualizers import html as html_pages

sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))
from browser import browser, opened

IMAGES = Path(__file__).parent.parent / "docs" / "images"
WATCHED = (
    lenses.OutputGradientGeometry(log_scale=True),
    lenses.OutputNorm(),
    lenses.UpdateRatio(),
    lenses.DeadUnits(),
)
EPOCHS = 24
CLEARED = "\x1b[J"
MADE = Path(__file__).parent / "results" / "pictures.json"


class Tty(io.StringIO):
    """A terminal that keeps what it got."""

    def isatty(self) -> bool:
        return True


def network(depth: int = 3) -> nn.Sequential:
    """From images (n, 64) to logits (n, 10)."""
    net = nn.Sequential()
    for number, width in enumerate((64, *[48] * (depth - 1)), 1):
        net.add_module(f"fc{number}", nn.Linear(width, 48))
        net.add_module(f"relu{number}", nn.ReLU())
    net.add_module("out", nn.Linear(48, 10))
    return net


def trained(visualizer: visualizers.Visualizer | None, rate: float, depth: int = 3, progress: bool = False) -> Timeline:
    """A training on scikit-learn's digits with Adam; at a rate of 0.04 units die."""
    from sklearn.datasets import load_digits

    torch.manual_seed(0)
    torch.set_num_threads(1)
    digits = load_digits()
    images, labels = torch.as_tensor(digits.data, dtype=torch.float32) / 16, torch.as_tensor(digits.target)
    net = network(depth)
    optimizer = torch.optim.Adam(net.parameters(), rate)
    inspector = Inspector(net, WATCHED, show=visualizer, optimizer=optimizer)
    for _ in inspector.range(EPOCHS, progress=progress):
        for batch in torch.randperm(1500).split(100):
            loss = nn.functional.cross_entropy(net(images[batch]), labels[batch])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            inspector.push_loss(loss)
        with torch.no_grad():
            net.eval()
            inspector.push_metric("accuracy", (net(images[1500:]).argmax(1) == labels[1500:]).float())
            net.train()
    inspector.detach()
    return inspector.timeline


@cache
def run(rate: float, depth: int = 3) -> Timeline:
    return trained(None, rate, depth)


def terminal(path: Path, text: str, width: int) -> None:
    """A picture of text with the colours of a terminal."""
    from rich.console import Console
    from rich.terminal_theme import MONOKAI
    from rich.text import Text

    console = Console(record=True, file=io.StringIO(), width=width)
    console.print(Text.from_ansi(text))
    style = "margin:0;padding:14px;display:inline-block;font:15px/1.3 'DejaVu Sans Mono',monospace"
    page = f"<body style='margin:0;background:{{background}};color:{{foreground}}'><pre id=text style=\"{style}\">{{code}}</pre>"
    with tempfile.TemporaryDirectory() as folder:
        html = Path(folder) / "text.html"
        html.write_text(
            "<meta charset=utf-8>" + console.export_html(theme=MONOKAI, inline_styles=True, code_format=page), encoding="utf-8"
        )
        with browser(Path(folder) / "profile", 1100, 1400) as driver:
            driver.get(html.as_uri())
            driver.find_element("id", "text").screenshot(str(path))


def live(path: Path) -> None:
    terminal(path, live_text(), 100)


@cache
def live_text() -> str:
    """The last drawing of the table in a terminal, with the progress bar."""
    os.environ.update(COLUMNS="100", LINES="48", TERM="xterm-256color", COLORTERM="truecolor")
    stream, given = Tty(), sys.stdout
    sys.stdout = stream
    try:
        trained(visualizers.TextVisualizer(), 0.04, progress=True)
    finally:
        sys.stdout = given
    bar = next(line for line in reversed(stream.getvalue().splitlines()) if "100%|" in line)
    return f"{bar}\n{stream.getvalue().rpartition(CLEARED)[2]}".rstrip()


def text(path: Path) -> None:
    terminal(path, tables_text(), 100)


def tables_text() -> str:
    """The tables that a file gets."""
    timeline, file = run(0.04), io.StringIO()
    visualizers.TextVisualizer(file, width=100).show(timeline.ticks()[-1], charts_of(timeline)[:4])
    return file.getvalue().rstrip()


def figure(title: str, rate: float = 0.04, depth: int = 3) -> Any:
    shown = visualizers.MatplotlibVisualizer()
    replay(run(rate, depth), shown)
    return shown.figures[title]


def page(theme: str, heading: str) -> Callable[[Path], None]:
    def draw(path: Path) -> None:
        with tempfile.TemporaryDirectory() as folder, browser(Path(folder) / "profile", 1200, 1300) as driver:
            html = visualizers.write_report(Path(folder) / "report.html", run(0.04), title="Learning rate 0.04")
            opened(driver, html)
            driver.execute_script(f"theme('{theme}')")
            find = "[...document.querySelectorAll('h2')].find(each => each.textContent == arguments[0])"
            driver.execute_script(f"scrollTo(0, {find}.getBoundingClientRect().top - 70)", heading)
            time.sleep(1.0)
            driver.save_screenshot(str(path))

    return draw


def board(path: Path) -> None:
    """TensorBoard itself, started for this, on the tab "Custom Scalars"."""
    with tempfile.TemporaryDirectory() as folder, socket.socket() as free:
        shown = visualizers.TensorBoardVisualizer(Path(folder) / "runs" / "digits")
        replay(run(0.04), shown)
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
        free.close()
        command = [sys.executable, "-m", "tensorboard.main", "--logdir", str(Path(folder) / "runs"), "--port", str(port)]
        server = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        try:
            with browser(Path(folder) / "profile", 1400, 900) as driver:
                for _ in range(120):
                    with contextlib.suppress(Exception):
                        driver.get(f"http://127.0.0.1:{port}/#custom_scalars")
                        break
                    time.sleep(0.5)
                time.sleep(15)
                driver.save_screenshot(str(path))
        finally:
            server.terminate()
            server.wait()


@cache
def demo_run() -> tuple[bytes, Any]:
    """What `recorders demo` writes, and its figure once more, drawn from its recording."""
    from rich.console import Console

    from recorders.cli import tutorial

    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        assert tutorial.demo(folder, console=Console(file=io.StringIO()))
        recording = load(Path(folder) / "recording")
        return (Path(folder) / "overview.png").read_bytes(), tutorial.figure(overview(recording), recording)


def demo(path: Path) -> None:
    path.write_bytes(demo_run()[0])


def words(figure: Any) -> str:
    """The texts in a figure, and its size."""
    from matplotlib.text import Text

    figure.canvas.draw()
    found = dict.fromkeys(re.sub(r"[\d.,]+", "#", one.get_text()) for one in figure.findobj(Text) if one.get_visible())
    return "\n".join([f"{figure.get_size_inches().tolist()} inches", *(text for text in found if text)])


def of_results(name: str, draw: Callable[[], Any]) -> str:
    """The texts in a figure, and a checksum of the results that it shows."""
    return f"{words(draw())}\n{hashlib.sha256((MADE.parent / f'{name}.json').read_bytes()).hexdigest()}"


def of_page(*runs: Any) -> str:
    """What a page says of runs, and a checksum of what draws it."""
    from pages import held

    report = held(html_pages.html_report(*runs))
    folder = Path(html_pages.__file__).parent
    drawing = hashlib.sha256(b"".join(path.read_bytes() for path in sorted(folder.glob("page.*")) + sorted(folder.glob("*.js"))))
    charts = [f"{chart['title']}, {chart['unit']}: {len(chart['layers'])} layers" for chart in report["charts"]]
    told = [f"{run['axis']}s; {len(run['findings'] or [])} findings; {run['verdict']}" for run in report["runs"]]
    layers = [f"{layer} {kind}" for layer, kind in zip(report["layers"], report["kinds"], strict=True)]
    return "\n".join([*charts, *layers, *told, drawing.hexdigest()])


def without_digits(text: str) -> str:
    """The words of a terminal's text: no colours, numbers or curves."""
    plain = re.sub("\x1b\\[[0-9;?]*[A-Za-z]", "", text)
    plain = re.sub(r"\d[\d.,:]*(e[+-]?\d+)?", "#", plain)
    return "\n".join(" ".join(re.findall(r"[A-Za-z(][A-Za-z0-9()_]*", line)) for line in plain.splitlines())


def of_board() -> str:
    return "\n".join(f"{view.title}: {', '.join(view.layers)}" for view in charts_of(run(0.04)))


def parted() -> Any:
    """Two trainings of a transformer, of which the second has another eps in one of its norms, and where they part."""
    runs = []
    for eps in (1e-5, 1e-3):
        torch.manual_seed(0)
        layer = nn.TransformerEncoderLayer(32, 4, 64, dropout=0.0, batch_first=True)
        net = nn.Sequential(nn.Linear(8, 32), nn.TransformerEncoder(layer, 4, enable_nested_tensor=False), nn.Linear(32, 1))
        net[1].layers[2].norm1.eps = eps  # type: ignore[union-attr,index]
        optimizer = torch.optim.AdamW(net.parameters(), lr=3e-3)
        with presets.fingerprints().modules(net) as recorder:
            for _ in range(40):
                x = torch.randn(16, 10, 8)
                nn.functional.mse_loss(net(x)[..., 0], x.prod(-1)).backward()
                optimizer.step()
                optimizer.zero_grad()
        runs.append(recorder)
    return divergence(*runs).figure()


FIGURES: dict[str, Callable[[], Any]] = {
    "bands.png": lambda: figure("Output Gradient Norm"),
    "heat.png": lambda: figure("Output Gradient Norm", 0.001, depth=40),
    "comparison.png": lambda: figure("Mean Output Norm Comparison"),
    "divergence.png": parted,
    **{name: partial(preset_pictures.drawn, heading) for name, heading in preset_pictures.PICTURES.items()},
}
MEASURED: dict[str, tuple[str, Callable[[], Any]]] = {"costs.png": ("peers", table.figure), "scale.png": ("scale", scale.figure)}
"""The results that a picture shows, and its figure."""
SHOWN: dict[str, Callable[[], str]] = {
    "live.png": lambda: without_digits(live_text().replace("s/tick", "ticks/s")),  # a slow machine says it so
    "text.png": lambda: without_digits(tables_text()),
    "page-light.png": lambda: of_page(run(0.04)),
    "page-dark.png": lambda: of_page(run(0.04)),
    "report.png": lambda: of_page(*report.two_runs()),
    "tensorboard.png": of_board,
    "demo.png": lambda: words(demo_run()[1]),
    **{name: lambda draw=draw: words(draw()) for name, draw in FIGURES.items()},
    **{name: partial(of_results, *of) for name, of in MEASURED.items()},
}
"""What each picture shows, in words; without a browser."""


def saved(draw: Callable[[], Any], dpi: int = 90) -> Callable[[Path], None]:
    return lambda path: draw().savefig(path, dpi=dpi)


PICTURES: dict[str, Callable[[Path], None]] = {
    "live.png": live,
    "text.png": text,
    "page-light.png": page("light", "Findings"),
    "page-dark.png": page("dark", "Layers over time"),
    "report.png": report.picture,
    "tensorboard.png": board,
    "demo.png": demo,
    **{name: saved(draw) for name, draw in FIGURES.items()},
    **{name: saved(draw, 150) for name, (_, draw) in MEASURED.items()},
}


def checksum(name: str) -> str:
    return hashlib.sha256((IMAGES / name).read_bytes()).hexdigest()


def stale(name: str, made: Mapping[str, Any]) -> str:
    """Why a picture is not what would be made now; "" if it is."""
    if name not in made:
        return "nothing is known of it"
    if made[name]["sha256"] != checksum(name):
        return "it is not the file that was made"
    before, now = made[name]["shows"].splitlines(), SHOWN[name]().splitlines()
    return "\n".join(difflib.unified_diff(before, now, "the picture", "now", lineterm="", n=0))


def main() -> None:
    made = json.loads(MADE.read_text()) if MADE.exists() else {}
    if sys.argv[1:2] == ["--check"]:
        found = {name: why for name in sys.argv[2:] or PICTURES if (why := stale(name, made))}
        for name, why in found.items():
            print(f"{name} is stale: {why}\nmake it by: python benchmarks/pictures.py {name}")
        raise SystemExit(bool(found))
    for name in sys.argv[1:] or PICTURES:
        path = IMAGES / name
        PICTURES[name](path)
        made[name] = {"sha256": checksum(name), "shows": SHOWN[name]()}
        MADE.write_text(json.dumps({name: made[name] for name in sorted(made)}, indent=1) + "\n")
        print(f"{name}: {path.stat().st_size / 1e3:.0f} kB", flush=True)


if __name__ == "__main__":
    main()
