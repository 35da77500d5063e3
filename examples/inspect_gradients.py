"""Watch the gradients of a small network while it learns to read digits, then look at them.

    python examples/inspect_gradients.py [folder]

Needs `pip install torch-recorders[demo]`. Two figures of the gradients, one of the loss and one of the accuracy are saved into the
folder (a temporary one where none is given), beside the timeline, from which they could be drawn again:

    recorders.replay("folder/run.db", "matplotlib:figures")
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

import torch
from sklearn.datasets import load_digits
from torch import nn

from recorders.watch.inspector import Inspector
from recorders.watch.lenses import LossMetrics, OutputGradientGeometry
from recorders.watch.visualizers import MatplotlibVisualizer, TextVisualizer


def main(folder: Path, epochs: int = 15) -> list[Path]:
    """Trains, and returns the paths of the figures."""
    torch.manual_seed(0)
    digits = load_digits()
    images = torch.tensor(digits.images, dtype=torch.float32).flatten(1) / 16
    labels = torch.tensor(digits.target)
    order = torch.randperm(len(labels))
    train, test = order[:1400], order[1400:]

    net = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10))
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)

    lenses = [
        OutputGradientGeometry(normalize_by_size=True, log_scale=True),
        LossMetrics(loss_range="min-max"),
    ]
    figures = MatplotlibVisualizer()
    folder.mkdir(parents=True, exist_ok=True)
    with Inspector(net, lenses, show=figures, timeline=folder / "run.db") as inspector:
        for _ in inspector.iter(range(epochs)):
            net.train()
            for batch in train[torch.randperm(len(train))].split(64):
                loss = nn.functional.cross_entropy(net(images[batch]), labels[batch])
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                inspector.push_loss(loss)
            net.eval()
            with torch.no_grad():
                output = net(images[test])
                inspector.push_loss(nn.functional.cross_entropy(output, labels[test]), train=False)
                inspector.push_metric("accuracy", (output.argmax(1) == labels[test]).float().mean())
    TextVisualizer().show(inspector.epoch - 1, inspector.charts)
    return figures.save(folder)


if __name__ == "__main__":
    target = Path(sys.argv[1]) if len(sys.argv) > 1 else Path(tempfile.mkdtemp(prefix="inspect_gradients_"))
    for path in main(target):
        print(path)
