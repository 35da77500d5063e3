"""`recorders demo`: trains a small network on handwritten digits, and records it.

A tutorial, to be read from top to bottom: data, net, recorder, training, a sick net, results.
Needs `pip install torch-recorders[demo]`.
"""

# mypy: allow-untyped-calls
# torch leaves `backward` and `split` without annotations.

from __future__ import annotations

import itertools
import os
import shlex
from collections import OrderedDict
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import torch
from rich.console import Console
from rich.padding import Padding
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.text import Text
from sklearn.datasets import load_digits
from torch import Tensor, nn

from recorders import (
    BackwardMonitor,
    CallMonitor,
    ForwardMonitor,
    NotARecordingError,
    ParameterGradientMonitor,
    ParameterUpdateMonitor,
    Recorder,
    Recording,
    StorageError,
    findings,
    load,
    overview,
)
from recorders.watch.diagnosis.finding import Finding
from recorders.watch.overview import Layer
from recorders.watch.visualizers.overview import overview_figure, overview_table
from reducers import Activity, Collect, Product, Summary

if TYPE_CHECKING:
    from matplotlib.figure import Figure

TRAINED = 1400
"""Of the images, how many are for training; the rest is for testing."""
BATCH = 50
RATE = 6e-4


class Digits(NamedTuple):
    """Images (n, 1, 8, 8) with values from 0 to 1, and labels (n,)."""

    images: Tensor
    labels: Tensor
    test_images: Tensor
    test_labels: Tensor


# 1. The data comes with scikit-learn: 1797 images of 8 x 8 pixels.


def digits() -> Digits:
    """The digits, shuffled with torch's random state and split."""
    bunch = load_digits()
    images = torch.as_tensor(bunch.images, dtype=torch.float32).unsqueeze(1) / 16
    labels = torch.as_tensor(bunch.target)
    order = torch.randperm(len(labels))
    train, test = order[:TRAINED], order[TRAINED:]
    return Digits(images[train], labels[train], images[test], labels[test])


# 2. The net: three convolutions, each with batch normalisation and ReLU, and a linear layer; 26 thousand parameters.


def network() -> nn.Sequential:
    """An untrained net, from images (n, 1, 8, 8) to logits (n, 10)."""

    def block(number: int, channels: int, features: int) -> list[tuple[str, nn.Module]]:
        return [
            (f"conv{number}", nn.Conv2d(channels, features, 3, padding=1, bias=False)),
            (f"norm{number}", nn.BatchNorm2d(features)),
            (f"relu{number}", nn.ReLU()),
        ]

    head = [("flatten", nn.Flatten()), ("head", nn.Linear(256, 10))]
    layers = [*block(1, 1, 16), *block(2, 16, 32), ("pool2", nn.MaxPool2d(2)), *block(3, 32, 64), ("pool3", nn.MaxPool2d(2)), *head]
    return nn.Sequential(OrderedDict(layers))


# 3. The recorder: each line says what to capture, and which statistics of it to compute.


def relative_change(after: Tensor, before: Tensor) -> Tensor:
    """Norm of an update divided by the norm of the weights."""
    change: Tensor = (after - before).norm() / before.norm()
    return change


def watch(net: nn.Module) -> Recorder:
    """A recorder on the layers of `net`."""
    channels = "b c ... -> c"  # einops: keep the channels, reduce all other axes
    return Recorder(
        output=ForwardMonitor(Product(stats=Summary(channels), activity=Activity(channels)), eval_update=False),
        gradient=BackwardMonitor(Summary()),
        weights=ParameterGradientMonitor(Summary(), "weight"),
        update=ParameterUpdateMonitor(Product(ratio=Collect()), "weight", op_=relative_change),
        loss=CallMonitor(Product(stats=Summary(), curve=Collect())),
        accuracy=CallMonitor(Collect()),
    ).modules(net, types=(nn.Conv2d, nn.BatchNorm2d, nn.ReLU, nn.Tanh, nn.Linear))


# 4. The training: as without a recorder, except that loss and accuracy, which no hook can capture, are pushed.


def train(net: nn.Module, data: Digits, epochs: int, recorder: Recorder, progress: Progress, forgotten: str = "") -> None:
    """Trains `net`, but for the parameter that is forgotten, and tests it after each epoch."""
    optimizer = torch.optim.AdamW((weight for name, weight in net.named_parameters() if name != forgotten), lr=RATE)
    bar = progress.add_task("training", total=epochs * (len(data.labels) // BATCH))
    for epoch in range(epochs):
        net.train()
        for batch in torch.randperm(len(data.labels)).split(BATCH):
            loss = nn.functional.cross_entropy(net(data.images[batch]), data.labels[batch])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            recorder.push("loss", loss)
            progress.update(bar, advance=1)
        net.eval()
        with torch.no_grad():
            right = net(data.test_images).argmax(1) == data.test_labels
        recorder.push("accuracy", right.double().mean())
        progress.update(bar, description=f"epoch {epoch + 1} of {epochs}")


# 5. The same net with three faults, to see that they are found.

FORGOTTEN = "conv3.weight"


def sick() -> nn.Sequential:
    """An untrained net with dead units in relu1, and with a saturated tanh2 in place of relu2; train it without `FORGOTTEN`."""
    net = network()
    nn.init.constant_(net.get_parameter("norm1.bias")[:12], -100.0)
    nn.init.constant_(net.get_parameter("norm2.weight"), 40.0)
    layers = {"tanh2" if name == "relu2" else name: layer for name, layer in net.named_children()}
    return nn.Sequential(OrderedDict({**layers, "tanh2": nn.Tanh()}))


PLANTED = "The same net made sick: 12 units of relu1 get no input above zero, tanh2 gets far too much, no optimizer has conv3."


# 6. All together. The recording is saved before anything is shown.


def demo(out: str | os.PathLike[str] = "recorders-demo", epochs: int = 10, seed: int = 0, console: Console | None = None) -> bool:
    """Trains, records, saves, loads, and shows the recording and its findings; then a sick net and its findings.

    Returns whether everything was completed. If it is interrupted by Ctrl-C, it continues with what was recorded until then.

    Args:
        out: folder for the recording and the figure: new, empty, or of an earlier demo, which is replaced.
        epochs: how often to go through the training images.
        seed: seed of torch's random state.
        console: where to print; None for standard output.

    Raises:
        NotARecordingError: `out` contains something else; nothing is changed.
        StorageError: `out` cannot be written.
    """
    console = Console(highlight=False) if console is None else console
    torch.manual_seed(seed)
    data, net = digits(), network()
    recorder = watch(net)
    folder = _checked_folder(Path(out), recorder)
    size = sum(parameter.numel() for parameter in net.parameters())
    console.print(f"{size:,} parameters, {len(data.labels):,} images, {len(recorder)} subrecorders")

    finished = _trained(net, data, epochs, recorder, console)
    if not recorder.samples["loss"]:
        console.print("Interrupted before the first step: nothing was recorded, and nothing saved.", style="bold")
        return False
    recorder.save(folder)
    if not finished:
        console.print(f"Interrupted after {recorder.samples['loss']} steps: what was recorded until then is saved.", style="bold")

    recording = load(folder)
    torch.testing.assert_close(recording.compute(), recorder.compute(), rtol=0, atol=0, equal_nan=True)
    both = recording.merge(recorder.snapshot())  # in the same way, recordings of two processes are merged
    layers = overview(recorder)
    picture = Path(out) / "overview.png"
    figure(layers, recording).savefig(picture, dpi=120)
    console.print()
    console.print(overview_table(layers))
    console.print()
    _print_findings(findings(recorder), len(layers), console)
    console.print()
    if finished:
        ill = sick()
        of_ill = watch(ill)
        console.print(PLANTED)
        finished = _trained(ill, data, 1, of_ill, console, FORGOTTEN)
        if finished:
            _print_findings(findings(of_ill), len(layers), console)
        else:
            console.print("Interrupted: the sick net was not trained to the end.", style="bold")
        console.print()
    accuracy = recording["accuracy"].peek()
    console.print(f"test accuracy: {'not measured yet' if accuracy is None else f'{accuracy[-1].item():.1%}'}")
    console.print(f"loaded back and merged: {recording.samples['loss']} steps twice make {both.samples['loss']}")
    code = f"import recorders; recording = recorders.load({os.fspath(folder)!r})"
    show = f"recorders show {shlex.quote(os.fspath(folder))}"
    for label, value in {"recording": folder, "figure": picture, "load it": code, "look into it": show}.items():
        console.print(Text(f"{label}: {value}"), soft_wrap=True)  # no wrapping, so that paths and code can be copied
    return finished


def _trained(net: nn.Module, data: Digits, epochs: int, recorder: Recorder, console: Console, forgotten: str = "") -> bool:
    """Trains and records the net with a progress bar; returns whether that was completed, which Ctrl-C prevents."""
    columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TextColumn("steps"), TimeElapsedColumn()
    try:
        with recorder, Progress(*columns, console=console) as progress:
            train(net, data, epochs, recorder, progress, forgotten)
    except KeyboardInterrupt:
        return False
    return True


def figure(layers: list[Layer], recording: Recording) -> Figure:
    """What was recorded of each layer, below the course of loss and accuracy."""
    loss, accuracy = recording["loss"].peek()["curve"], recording["accuracy"].peek()
    accuracy = torch.zeros(0) if accuracy is None else accuracy
    title = f"A convolutional net learns to read digits: {len(loss)} steps, recorded"
    drawn: Figure = overview_figure(layers, loss, accuracy, TRAINED // BATCH, title)
    return drawn


def _print_findings(found: list[Finding], layers: int, console: Console) -> None:
    if not found:
        console.print(f"Nothing wrong found in {layers} layers.", style="bold green")
    for (why, remedy), alike in itertools.groupby(found, lambda finding: (finding.why, finding.remedy)):
        for finding in alike:
            console.print(Text(f"{finding.layer}: {finding.what}.", style="bold red"))
        console.print(Padding(Text(f"{why}\nTry: {remedy}."), (0, 0, 0, 4), expand=False))


def _checked_folder(out: Path, recorder: Recorder) -> Path:
    """The folder for the recording in `out`, which must be empty or contain an earlier demo."""
    folder = out / "recording"
    try:
        out.mkdir(parents=True, exist_ok=True)
        names = sorted(os.listdir(out))
    except (FileExistsError, NotADirectoryError) as error:
        raise NotARecordingError(f"{out} is, or lies in, a file: choose another folder with --to") from error
    except OSError as error:
        raise StorageError(f"cannot use {out}: {error}; choose another folder with --to") from error
    try:
        ours = not names or set(load(folder)) == set(recorder)
    except StorageError:
        ours = False
    if not ours:
        raise NotARecordingError(
            f"{out} holds {names[:5]}, and no recording of an earlier demo that could be replaced: choose another folder with --to"
        )
    return folder
