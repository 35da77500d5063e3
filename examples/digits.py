"""Record a small convolutional network while it learns to read digits; ask what is wrong with it; save, load and merge.

    python examples/digits.py [folder] [epochs]

Needs scikit-learn, for the images. This is `recorders demo` without progress bar, table and figure.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

import torch
from sklearn.datasets import load_digits
from torch import nn

from recorders import BackwardMonitor, CallMonitor, ForwardMonitor, ParameterUpdateMonitor, Recorder, load
from recorders.watch.diagnosis.findings import findings
from reducers import Activity, Collect, Mean, Product, Summary


def relative_change(after: torch.Tensor, before: torch.Tensor) -> torch.Tensor:
    """Norm of an update over norm of the weights."""
    return (after - before).norm() / before.norm()


def main(folder: Path, epochs: int) -> None:
    torch.manual_seed(0)
    digits = load_digits()
    images = torch.as_tensor(digits.images, dtype=torch.float32).unsqueeze(1) / 16
    labels = torch.as_tensor(digits.target)
    net = nn.Sequential(
        nn.Conv2d(1, 16, 3), nn.BatchNorm2d(16), nn.ReLU(),
        nn.Conv2d(16, 32, 3), nn.BatchNorm2d(32), nn.ReLU(),
        nn.Flatten(), nn.Linear(512, 10),
    )  # fmt: skip
    optimizer = torch.optim.AdamW(net.parameters(), lr=6e-4)

    # Places to listen at, each with the statistics to keep there; "b c ... -> c" keeps one number a channel.
    recorder = Recorder(
        output=ForwardMonitor(Product(stats=Summary("b c ... -> c"), activity=Activity("b c ... -> c"))),
        gradient=BackwardMonitor(Summary()),
        update=ParameterUpdateMonitor(Product(ratio=Collect()), "weight", op_=relative_change),
        loss=CallMonitor(Mean()),
    ).modules(net, leaves=True, exclude=nn.Flatten)

    with recorder:  # at the end the hooks are off again
        for _ in range(epochs):
            for batch in torch.randperm(len(labels)).split(50):
                loss = nn.functional.cross_entropy(net(images[batch]), labels[batch])
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                recorder.push("loss", loss)

    for finding in findings(recorder):
        print(finding)

    # One number a channel: how often it was active, and what it gave on average.
    relu = recorder["output/5"].peek()
    print("active:", ", ".join(f"{rate:.0%}" for rate in relu["activity"]["rate"][:8]), "...")
    print("mean:  ", ", ".join(f"{mean:.2f}" for mean in relu["stats"]["mean"][:8]), "...")

    # What was saved is the state of each statistic, so recordings merge: of processes, of machines, of days.
    recorder.save(folder)
    recording = load(folder)
    both = recording.merge(recorder.snapshot())
    print(
        f"mean loss {recording['loss'].peek():.3f} of {recording.samples['loss']} steps; merged with itself {both.samples['loss']}"
    )
    print(f"saved: {folder}")


if __name__ == "__main__":
    where = Path(sys.argv[1]) if len(sys.argv) > 1 else Path(tempfile.mkdtemp(prefix="digits_"))
    main(where, int(sys.argv[2]) if len(sys.argv) > 2 else 5)
