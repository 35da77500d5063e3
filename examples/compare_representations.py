"""Which layers of two networks see the digits alike: centred kernel alignment of all pairs of layers, streamed over a data set.

Two convolutional networks of different width are trained on scikit-learn's digits; then both read the test images once, and every
layer of one is compared with every layer of the other. Writes `cka.png` into the folder given (the current one by default).

Run: python examples/compare_representations.py [folder]
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from matplotlib.figure import Figure
from sklearn.datasets import load_digits
from torch import Tensor, nn

from recorders import PairMonitor, Recorder
from reducers import MinibatchCKA


def network(width: int) -> nn.Sequential:
    """From images (n, 1, 8, 8) to logits (n, 10)."""
    stages = nn.Sequential()
    for number, (ins, outs) in enumerate([(1, width), (width, 2 * width), (2 * width, 4 * width)], 1):
        stages.add_module(f"conv{number}", nn.Conv2d(ins, outs, 3, padding=1))
        stages.add_module(f"relu{number}", nn.ReLU())
        stages.add_module(f"pool{number}", nn.MaxPool2d(2))
    stages.add_module("flatten", nn.Flatten())
    stages.add_module("head", nn.Linear(4 * width, 10))
    return stages


def train(net: nn.Module, images: Tensor, labels: Tensor, epochs: int = 15) -> None:
    optimizer = torch.optim.AdamW(net.parameters(), lr=5e-3)
    for _ in range(epochs):
        for batch in torch.randperm(len(labels)).split(100):
            optimizer.zero_grad()
            nn.functional.cross_entropy(net(images[batch]), labels[batch]).backward()
            optimizer.step()


def main(folder: str = ".") -> None:
    torch.manual_seed(0)
    torch.set_num_threads(1)
    bunch = load_digits()
    images, labels = torch.as_tensor(bunch.images, dtype=torch.float32).unsqueeze(1) / 16, torch.as_tensor(bunch.target)
    nets = {"narrow": network(8), "wide": network(32)}
    for name, net in nets.items():
        train(net, images[:1400], labels[:1400])
        net.eval()
        print(f"{name}: {(net(images[1400:]).argmax(1) == labels[1400:]).double().mean():.1%} of the test digits read right")

    # One group for each layer of the wide network, and in it a monitor on each layer of the narrow one.
    watched = (nn.Conv2d, nn.ReLU, nn.Linear)
    others = {name: layer for name, layer in nets["wide"].named_children() if isinstance(layer, watched)}
    pairs = Recorder(**{name: PairMonitor(MinibatchCKA(), layer) for name, layer in others.items()})
    with torch.no_grad(), pairs.children(nets["narrow"], types=watched):
        for batch in images[1400:].split(50):
            for net in nets.values():
                net(batch)

    names = [name for name, layer in nets["narrow"].named_children() if isinstance(layer, watched)]
    alignment = torch.tensor([[pairs[f"{other}/{name}"].peek()["cka"] for other in others] for name in names])
    for name, row in zip(names, alignment, strict=True):
        print(f"{name} of the narrow network is most like {list(others)[row.argmax()]} of the wide one: {row.max():.2f}")

    figure = Figure(figsize=(6.5, 5.2), layout="constrained")
    axes = figure.subplots()
    picture = axes.imshow(alignment.numpy(), origin="lower", cmap="cividis", vmin=0, vmax=1)
    axes.set_xticks(range(len(others)), list(others), rotation=45, ha="right")
    axes.set_yticks(range(len(names)), names)
    axes.set_xlabel("layer of the wide network")
    axes.set_ylabel("layer of the narrow network")
    for y, row in enumerate(alignment):
        for x, value in enumerate(row):
            axes.text(x, y, f"{value:.2f}", ha="center", va="center", color="black" if value > 0.5 else "white", fontsize=8)
    figure.colorbar(picture, label="centred kernel alignment")
    figure.savefig(Path(folder) / "cka.png", dpi=120)
    print(f"figure: {Path(folder) / 'cka.png'}")


if __name__ == "__main__":
    main(*sys.argv[1:])
