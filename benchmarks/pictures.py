"""The pictures of visualizers in docs/images: two trainings on handwritten digits, one of them sick, shown by each visualizer.

Run: python benchmarks/pictures.py [name ...]; names are those of `PICTURES`. Needs Chromium, chromedriver and selenium, and for
some of them the extras plot, tensorboard and demo.
"""

from __future__ import annotations

import contextlib
import io
import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from functools import cache
from pathlib import Path

import preset_pictures
import report
import torch
from torch import nn

from recorders import Inspector, Timeline, lenses, replay, visualizers
from recorders.watch.charts import charts_of

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
    inspector = Inspector(WATCHED, visualizer, net=net, optimizer=optimizer)
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
    """The last drawing of the table in a terminal, with the progress bar."""
    os.environ.update(COLUMNS="100", LINES="48", TERM="xterm-256color", COLORTERM="truecolor")
    stream, given = Tty(), sys.stdout
    sys.stdout = stream
    try:
        trained(visualizers.TextVisualizer(), 0.04, progress=True)
    finally:
        sys.stdout = given
    bar = next(line for line in reversed(stream.getvalue().splitlines()) if "100%|" in line)
    terminal(path, f"{bar}\n{stream.getvalue().rpartition(CLEARED)[2]}".rstrip(), 100)


def text(path: Path) -> None:
    """The tables that a file gets."""
    timeline, file = run(0.04), io.StringIO()
    visualizers.TextVisualizer(file, width=100).show(timeline.ticks()[-1], charts_of(timeline)[:4])
    terminal(path, file.getvalue().rstrip(), 100)


def figure(title: str, rate: float = 0.04, depth: int = 3) -> Callable[[Path], None]:
    def draw(path: Path) -> None:
        shown = visualizers.MatplotlibVisualizer()
        replay(run(rate, depth), shown)
        shown.figures[title].savefig(path, dpi=90)

    return draw


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


PICTURES: dict[str, Callable[[Path], None]] = {
    "live.png": live,
    "text.png": text,
    "bands.png": figure("Output Gradient Norm"),
    "heat.png": figure("Output Gradient Norm", 0.001, depth=40),
    "comparison.png": figure("Mean Output Norm Comparison"),
    "page-light.png": page("light", "Findings"),
    "page-dark.png": page("dark", "Layers over time"),
    "report.png": report.picture,
    "tensorboard.png": board,
    **preset_pictures.PICTURES,
}


def main() -> None:
    for name in sys.argv[1:] or PICTURES:
        path = IMAGES / name
        PICTURES[name](path)
        print(f"{name}: {path.stat().st_size / 1e3:.0f} kB")


if __name__ == "__main__":
    main()
