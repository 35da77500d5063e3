"""Findings of healthy trainings of several kinds on real data: none; and of the same with one fault planted: that one alone."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor, nn

pytest.importorskip("sklearn")

from sklearn.datasets import load_digits

from recorders import (
    BackwardMonitor,
    CallMonitor,
    ForwardMonitor,
    Inspector,
    ParameterGradientMonitor,
    ParameterUpdateMonitor,
    Recorder,
    lenses,
    presets,
)
from recorders.watch.diagnosis.asked import if_too_large
from recorders.watch.diagnosis.evidence import Course, Evidence
from recorders.watch.diagnosis.finding import Findings
from recorders.watch.diagnosis.findings import findings
from recorders.watch.lenses.health import update_ratio
from reducers import Activity, Collect, FirstNonfinite, Idle, Product, Summary

EPOCHS, BATCH, RATE = 3, 100, 3e-3


@cache
def digits() -> tuple[Tensor, Tensor]:
    bunch = load_digits()
    images, labels = torch.as_tensor(bunch.images, dtype=torch.float32) / 16, torch.as_tensor(bunch.target)
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))[:1400]
    return images[order], labels[order]


def mlp(activation: type[nn.Module] = nn.ReLU) -> nn.Sequential:
    """Linear layers are 1, 3, 5 and 7."""
    hidden = [layer for _ in range(3) for layer in (nn.Linear(64, 64), activation())]
    return nn.Sequential(nn.Flatten(), *hidden, nn.Linear(64, 10))


def convolutions() -> nn.Sequential:
    def block(channels: int, features: int) -> list[nn.Module]:
        return [nn.Conv2d(channels, features, 3, padding=1, bias=False), nn.BatchNorm2d(features), nn.ReLU(), nn.MaxPool2d(2)]

    return nn.Sequential(nn.Unflatten(1, (1, 8)), *block(1, 16), *block(16, 32), nn.Flatten(), nn.Linear(128, 10))


class Transformer(nn.Module):
    """Rows of pixels are tokens; attention with dropout, layer norms before."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Linear(8, 32)
        layer = nn.TransformerEncoderLayer(32, 4, 64, dropout=0.1, batch_first=True, norm_first=True, activation=nn.GELU())
        self.encoder = nn.TransformerEncoder(layer, 1, enable_nested_tensor=False)
        self.norm, self.head = nn.LayerNorm(32), nn.Linear(32, 10)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(self.norm(self.encoder(self.embedding(x))).mean(1))
        return out


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.cells, self.head = nn.LSTM(8, 48, batch_first=True), nn.Linear(48, 10)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(self.cells(x)[0][:, -1])
        return out


def sigmoid_output() -> nn.Sequential:
    return nn.Sequential(*mlp(), nn.Sigmoid())


def fine_tuned() -> nn.Sequential:
    """Its first two layers are frozen on purpose, and no longer as PyTorch draws them."""
    net = mlp()
    for layer in (net[1], net[3]):
        layer.requires_grad_(False).weight.mul_(1.3)
    return net


HEALTHY: dict[str, Callable[[], nn.Module]] = {
    "mlp": mlp,
    "tanh": lambda: mlp(nn.Tanh),
    "convolutions with batch norm": convolutions,
    "transformer with layer norm and dropout": Transformer,
    "lstm": Recurrent,
    "sigmoid at the end": sigmoid_output,
    "fine-tuning": fine_tuned,
}


def train(
    net: nn.Module, rate: float = RATE, epochs: int = EPOCHS, one: tuple[str, float] = ("no layer", 0)
) -> tuple[Findings, Findings, float]:
    """Trains for real; returns what is found in a recording and in a timeline of it, and the loss at the end.

    `one` is a layer with a rate of its own, and much weight decay; at 0 the optimizer does not have it.
    """
    kinds = {type(module) for module in net.modules()}
    last = "b ... c -> c" if kinds & {Transformer, Recurrent} else "b c ... -> c"
    recorder = Recorder(
        output=ForwardMonitor(Product(stats=Summary(last), activity=Activity(last), idle=Idle(last), first=FirstNonfinite())),
        gradient=BackwardMonitor(Summary()),
        weights=ParameterGradientMonitor(Summary(), when="accumulate"),
        update=ParameterUpdateMonitor(Product(ratio=Collect()), op_=update_ratio),
        loss=CallMonitor(Summary()),
    ).modules(net, leaves=True)
    chosen = [lenses.NonFinite(), lenses.Outliers(), lenses.UpdateRatio()]
    chosen += [lenses.OutputGradientGeometry(skip_activation=False), lenses.ParameterGradientGeometry(when="accumulate")]
    chosen += [lenses.Saturation()] if kinds & {nn.Tanh, nn.Sigmoid} else []
    chosen += [lenses.DeadUnits()] if kinds & {nn.ReLU, nn.GELU} else []
    layer, its_rate = one
    mine = [parameter for name, parameter in net.named_parameters() if name.startswith(layer)]
    others = [parameter for name, parameter in net.named_parameters() if not name.startswith(layer)]
    alone = [{"params": mine, "lr": its_rate, "weight_decay": 1.0}] if its_rate else []
    optimizer = torch.optim.AdamW([{"params": others}, *alone], lr=rate)
    images, labels = digits()
    with recorder, Inspector(net, chosen, optimizer=optimizer) as inspector:
        for _ in inspector.range(epochs):
            for batch in torch.randperm(len(labels)).split(BATCH):
                output, wanted = net(images[batch]), labels[batch]
                if isinstance(net, nn.Sequential) and isinstance(net[-1], nn.Sigmoid):
                    loss = nn.functional.binary_cross_entropy(output, nn.functional.one_hot(wanted, 10).float())
                else:
                    loss = nn.functional.cross_entropy(output, wanted)
                net.zero_grad()
                loss.backward()
                optimizer.step()
                recorder.push("loss", loss)
                inspector.push_loss(loss)
    return findings(recorder), findings(inspector.timeline), loss.item()


BIG = ("convolutions with batch norm", "transformer with layer norm and dropout")


@pytest.mark.parametrize("name", [pytest.param(name, marks=[pytest.mark.slow] * (name in BIG)) for name in HEALTHY])
def test_a_healthy_training_has_no_findings(name: str) -> None:
    torch.manual_seed(0)
    once, over_time, loss = train(HEALTHY[name]())
    assert (list(once), list(over_time)) == ([], [])
    assert loss < 2.2  # it learns; a guess has 2.3
    assert once.unexamined == ()
    lens = {"lstm": {"DeadUnits", "Saturation"}, "tanh": {"DeadUnits"}, "sigmoid at the end": set()}.get(name, {"Saturation"})
    frozen = {"weights that never changed, perhaps frozen on purpose: 1, 3"} if name == "fine-tuning" else set()
    assert {*over_time.unexamined} == {f"what the lens {each} shows" for each in lens} | frozen


def bias_of_most(net: nn.Sequential) -> None:
    nn.init.constant_(net[3].bias[:40], -100.0)


def large_biases(net: nn.Sequential) -> None:
    nn.init.constant_(net[3].bias, 3.5)


def tiny_weights(net: nn.Sequential) -> None:
    for layer in (3, 5, 7):
        net[layer].weight.mul_(0.01)


def huge_weights(net: nn.Sequential) -> None:
    for layer in (3, 5, 7):
        net[layer].weight.mul_(100)


def one_huge_feature(net: nn.Sequential) -> None:
    nn.init.constant_(net[3].bias[7:8], 1000.0)
    net[5].weight[:, 7] = 0


def division_by_zero(net: nn.Sequential) -> None:
    calls = []

    def divide(module: nn.Module, args: object, output: Tensor) -> Tensor:
        calls.append(None)
        return output / 0 if len(calls) == 20 else output

    net[3].register_forward_hook(divide)


def unused_layer(net: nn.Sequential) -> None:
    net[0].unused = nn.Linear(2, 2)


def nothing(net: nn.Sequential) -> None:
    pass


SICK: dict[str, tuple[type[nn.Module], Callable[[nn.Sequential], None], dict[str, Any], dict[str, str]]] = {
    "dead": (nn.ReLU, bias_of_most, {}, {"4": "dead"}),
    "saturated": (nn.Tanh, large_biases, {}, {"4": "saturated"}),
    "vanishing": (nn.Tanh, tiny_weights, {"rate": 1e-4}, {"1": "vanish"}),
    "exploding": (nn.ReLU, huge_weights, {"rate": 1e-4}, {"2": "explode"}),
    "outliers": (nn.ReLU, one_huge_feature, {"rate": 1e-5}, {"3": "outlier features"}),
    "nonfinite": (nn.ReLU, division_by_zero, {}, {"3": "NaN or infinite"}),
    "never ran": (nn.ReLU, unused_layer, {}, {"0.unused": "no output was recorded"}),
    "forgotten": (nn.ReLU, nothing, {"one": ("3", 0)}, {"3": "never changed"}),
    "too large": (nn.GELU, nothing, {"one": ("7", 0.3)}, {"7": "too large"}),
    "too small": (nn.ReLU, nothing, {"rate": 1e-8}, {"optimizer": "too small"}),
}
OF_RECORDING: dict[str, dict[str, str]] = {"too large": {}}
"""What a recording tells otherwise than a timeline does: as a notice."""


@pytest.mark.slow
@pytest.mark.parametrize("fault", SICK)
def test_a_planted_fault_is_found_where_it_is_and_nothing_else(fault: str) -> None:
    torch.manual_seed(0)
    activation, plant, options, wanted = SICK[fault]
    net = mlp(activation)
    with torch.no_grad():
        plant(net)
    once, over_time, _ = train(net, epochs=2, **options)
    for found, expected in ((once, OF_RECORDING.get(fault, wanted)), (over_time, wanted)):
        told = {finding.layer: finding.what for finding in found}
        assert len(found) == len(told)
        assert told.keys() == expected.keys(), str(found)
        assert all(expected[layer] in what for layer, what in told.items())
    if fault == "too large":  # of one layer, in a training that learns
        assert {"7": "updates are too large"}.items() <= {one.layer: one.what.partition(":")[0] for one in once.notices}.items()
    since = {"nonfinite": 1, "never ran": None}.get(fault, 0)
    assert [finding.since for finding in over_time] == [since] * len(wanted)


def test_an_evaluation_in_which_nobody_trains_has_no_weights_that_never_changed() -> None:
    net = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 3)).eval()
    for gradients in (False, True):
        with torch.set_grad_enabled(gradients), presets.health().modules(net) as recorder:
            for _ in range(5):
                net(torch.randn(16, 8))
        assert not findings(recorder)


# Trainings of users that are odd in one way, and healthy


def watched(
    net: nn.Module,
    batch: Callable[[], tuple[Tensor, Any]],
    loss: Callable[[Tensor, Any], Tensor] = nn.functional.cross_entropy,
    rate: float = 3e-3,
    steps: int = 100,
    evaluating: bool = False,
    made: type[torch.optim.Optimizer] = torch.optim.Adam,
) -> Findings:
    """What is found in a training that learns, with all that a user may tell."""
    recorder = presets.health().modules(net)
    optimizer = made([one for one in net.parameters() if one.requires_grad], lr=rate)  # type: ignore[call-arg]
    net.train(not evaluating)
    losses = []
    with recorder:
        for _ in range(steps):
            x, y = batch()
            value = loss(net(x), y)
            optimizer.zero_grad()
            value.backward()
            optimizer.step()
            recorder.push("loss", value)
            if y is not None:
                recorder.push("target", y)
            losses.append(value.item())
    assert sum(losses[-20:]) / 20 < 0.9 * losses[0]
    return findings(recorder, example=x, target=y)


def kinds(found: Findings) -> set[str]:
    return {one.kind for one in [*found, *found.notices]}


def small(inputs: int, outputs: int) -> nn.Sequential:
    return nn.Sequential(nn.Linear(inputs, 32), nn.ReLU(), nn.Linear(32, outputs))


@pytest.mark.parametrize("samples", [1, 32])
def test_batches_of_one_norm_are_not_the_same_batch(samples: int) -> None:
    """One-hot inputs, or those of 1 and -1, have one norm whatever they say."""
    torch.manual_seed(0)

    def one_hot() -> tuple[Tensor, Tensor]:
        which = torch.randint(0, 8, (samples,))
        return nn.functional.one_hot(which, 8).float(), which % 4

    def signs() -> tuple[Tensor, Tensor]:
        x = 2.0 * torch.randint(0, 2, (samples, 12)) - 1
        return x, x[:, :1]

    assert "repeated-batches" not in kinds(watched(small(8, 4), one_hot, rate=1e-2))
    assert "repeated-batches" not in kinds(watched(small(12, 1), signs, nn.functional.mse_loss))


@pytest.mark.parametrize("spread", [1.0, 0.05])
def test_a_target_that_drifts_as_the_net_learns_is_not_sorted(spread: float) -> None:
    """In temporal-difference learning the target is made of what the net says of the next state."""
    torch.manual_seed(0)
    net, reward = small(8, 1), torch.randn(8, 1) * spread

    def batch() -> tuple[Tensor, Tensor]:
        x = torch.randn(32, 8)
        with torch.no_grad():
            return x, 1 + (x @ reward).tanh() + 0.9 * net(0.8 * x + 0.2 * torch.randn(32, 8))

    found = kinds(watched(net, batch, nn.functional.mse_loss, steps=300))
    assert not {"sorted-target", "loss-does-not-fall", "loss-falls-slowly"} & found


@pytest.mark.parametrize(("passes", "noise"), [(1, 0.0), (4, 1.0)])
def test_a_sorted_target_is_told_whether_it_comes_again_or_not(passes: int, noise: float) -> None:
    torch.manual_seed(0)
    x = torch.randn(100 // passes * 32, 8)
    y = x.sum(1, keepdim=True) + torch.randn(len(x), 1) / 4
    order = (y + noise * torch.randn_like(y))[:, 0].argsort()
    number = iter(range(100))

    def batch() -> tuple[Tensor, Tensor]:
        which = order.roll(-32 * next(number))[:32]
        return x[which], y[which]

    assert "sorted-target" in kinds(watched(small(8, 1), batch, nn.functional.mse_loss))


@pytest.mark.parametrize("evaluating", [False, True])
def test_a_dropout_that_does_not_act_on_outputs_is_none_on_them(evaluating: bool) -> None:
    """Neither if its share is 0, nor if the net is trained in evaluation mode, nor if a ReLU makes the zeros."""
    torch.manual_seed(0)

    def numbers() -> tuple[Tensor, Tensor]:
        x = torch.randn(32, 8)
        return x, x[:, :4].relu()

    for share in (0.0, 0.3):
        net = nn.Sequential(*small(8, 4)[:2], nn.Dropout(share), nn.Linear(32, 4), nn.BatchNorm1d(4), nn.ReLU())
        assert "dropout-on-outputs" not in kinds(watched(net, numbers, nn.functional.mse_loss, 3e-2, evaluating=evaluating))
    net = nn.Sequential(*small(8, 4), nn.Dropout(0.3))
    found = kinds(watched(net, lambda: (x := torch.randn(32, 8), x[:, :4].argmax(1)), rate=1e-2, evaluating=evaluating))
    assert ("dropout-on-outputs" in found) != evaluating


@pytest.mark.parametrize(("first", "severity"), [(0.0, "error"), (-1.0, "error"), (0.5, "warning"), (2.0, "notice")])
def test_how_bad_large_steps_are_depends_on_the_first_loss(first: float, severity: str) -> None:
    """One that is 0 or below is no measure: of one sample that is classified well the loss may be 0."""
    known = Evidence([], loss=Course([first, *[1.0] * 20, *[0.3] * 20]), updates={"0": {"weight": Course([0.5] * 41)}})
    assert if_too_large(known) == severity


CLOUDS = torch.randn(10, 32, generator=torch.Generator().manual_seed(5))


LARGE_STEPS: dict[str, tuple[type[nn.Module], int, int, type[torch.optim.Optimizer], float]] = {
    "the first": (nn.SELU, 6, 256, torch.optim.Adam, 3e-2),
    "all, in all layers": (nn.Tanh, 1, 32, torch.optim.SGD, 2.0),
}
"""Activation function, hidden layers, samples of a batch, optimizer and learning rate."""


@pytest.mark.parametrize("which", LARGE_STEPS)
def test_large_steps_of_a_training_that_learns_are_no_error(which: str) -> None:
    torch.manual_seed(0)
    activation, hidden, size, made, rate = LARGE_STEPS[which]
    width = 128 if hidden > 1 else 64
    layers = [layer for at in range(hidden) for layer in (nn.Linear(width if at else 32, width), activation())]

    def batch() -> tuple[Tensor, Tensor]:
        labels = torch.randint(0, 10, (size,))
        return CLOUDS[labels] + 1.5 * torch.randn(size, 32), labels

    found = watched(nn.Sequential(*layers, nn.Linear(width, 10)), batch, rate=rate, steps=150, made=made)
    large = [one for one in [*found, *found.notices] if one.kind == "updates-too-large"]
    assert {(one.layer, one.severity) for one in large} == {("optimizer", "notice")}


class Views(nn.Module):
    """Gives two views of each sample to an encoder that ends with a linear layer, and a projector that begins with one."""

    def __init__(self, projector: nn.Module) -> None:
        super().__init__()
        self.encoder, self.projector = small(16, 32), projector

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.normalize(self.projector(self.encoder(x)), dim=1)


PROJECTORS: dict[str, Callable[[], nn.Module]] = {
    "linear": lambda: nn.Linear(32, 16),
    "of two layers": lambda: nn.Sequential(nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 16)),
    "with a normalisation": lambda: nn.Sequential(nn.ReLU(), nn.Linear(32, 32), nn.BatchNorm1d(32), nn.Linear(32, 16)),
}


def two_views() -> tuple[Tensor, None]:
    x = CLOUDS[torch.randint(0, 10, (32,)), :16]
    return torch.cat([x + torch.randn_like(x) / 3 for _ in range(2)]), None


def contrastive(out: Tensor, _: object) -> Tensor:
    """Of all others each view is to be most like the other one of its sample."""
    half = torch.arange(len(out) // 2)
    scores = (out @ out.T / 0.5).masked_fill(torch.eye(len(out), dtype=torch.bool), -1e9)
    return nn.functional.cross_entropy(scores, torch.cat([half + len(half), half]))


@pytest.mark.parametrize("projector", PROJECTORS)
def test_a_projector_on_an_encoder_is_a_part_of_its_own(projector: str) -> None:
    torch.manual_seed(0)
    found = watched(Views(PROJECTORS[projector]()), two_views, contrastive)
    assert [one.severity for one in [*found, *found.notices] if one.kind == "linear-net"] == ["notice"]
