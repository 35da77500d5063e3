"""Trainings as they are found in practice: those that are healthy have no findings, and a net that dies is found."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from recorders import ForwardMonitor, Inspector, Recorder, findings, lenses, load, presets
from recorders.watch.diagnosis.finding import Findings
from reducers import Activity, Idle, Product

CENTRES = torch.randn(4, 16, generator=torch.Generator().manual_seed(5)) * 2


def batches(steps: int, size: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Four clouds of points, which are easy to tell apart."""
    for _ in range(steps):
        labels = torch.randint(0, 4, (size,))
        yield CENTRES[labels] + torch.randn(size, 16) / 2, labels


class Watched:
    """A net with the recorder of `presets.health` and an inspector on it."""

    def __init__(self, net: nn.Module, *optimizers: torch.optim.Optimizer) -> None:
        self.recorder = presets.health(first=100).modules(net)  # every step, as many tests count them
        chosen = [lenses.NonFinite(), lenses.Outliers(), lenses.UpdateRatio(), lenses.OutputGradientGeometry(skip_activation=False)]
        chosen += [lenses.ParameterGradientGeometry()]
        chosen += [lenses.DeadUnits()] if any(isinstance(module, nn.ReLU) for module in net.modules()) else []
        self.inspector = Inspector(net, chosen)
        for optimizer in optimizers:
            self.inspector.clock.attach(optimizer)

    def __enter__(self) -> Watched:
        self.recorder.__enter__()
        return self

    def __exit__(self, *of: Any) -> None:
        self.recorder.__exit__(*of)
        self.inspector.detach()

    def findings(self, folder: Path) -> dict[str, Findings]:
        """By source: the recorder, what was saved of it, and the timeline."""
        saved = load(self.recorder.save(folder / "run"))
        sources = {"recorder": self.recorder, "recording": saved, "timeline": self.inspector.timeline}
        return {name: findings(source) for name, source in sources.items()}


def classify(net: nn.Module, rate: float = 1e-2, steps: int = 60, size: int = 32, accumulate: int = 1) -> tuple[Watched, bool]:
    """Trains; returns what was watched, and whether the net has learnt."""
    optimizer = torch.optim.Adam([parameter for parameter in net.parameters() if parameter.requires_grad], lr=rate)
    losses = []
    with Watched(net, optimizer) as watched:
        for _ in watched.inspector.range(2):
            for step, (x, labels) in enumerate(batches(steps // 2, size), start=1):
                loss = functional.cross_entropy(net(x), labels)
                (loss / accumulate).backward()
                losses.append(loss.item())
                if step % accumulate == 0:
                    optimizer.step()
                    optimizer.zero_grad()
    return watched, losses[-1] < 0.9 * losses[0]


def mlp() -> nn.Sequential:
    hidden = [layer for width in (16, 64, 64) for layer in (nn.Linear(width, 64), nn.ReLU())]
    return nn.Sequential(*hidden, nn.Linear(64, 4))


def with_head(std: float) -> nn.Sequential:
    """A head that begins small, as those of fine-tuning do."""
    net = nn.Sequential(nn.Linear(16, 64), nn.Tanh(), nn.Linear(64, 4))
    nn.init.normal_(net[2].weight, std=std)
    nn.init.zeros_(net[2].bias)
    return net


class FrozenBase(nn.Module):
    """A head on features that are computed without gradients, with the base in evaluation mode or not."""

    def __init__(self, evaluate: bool) -> None:
        super().__init__()
        self.base, self.head, self.evaluate = mlp()[:-1].requires_grad_(False), nn.Linear(64, 4), evaluate
        self.train()

    def train(self, mode: bool = True) -> FrozenBase:
        super().train(mode)
        self.base.train(mode and not self.evaluate)
        return self

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            features = self.base(x)
        out: Tensor = self.head(features)
        return out


class Adapter(nn.Module):
    """It begins as the identity, because its second layer is zero."""

    def __init__(self) -> None:
        super().__init__()
        self.down, self.up, self.others = nn.Linear(64, 8, bias=False), nn.Linear(8, 64, bias=False), nn.ParameterDict()
        nn.init.zeros_(self.up.weight)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = x + self.up(functional.gelu(self.down(x)))
        return out


class Adapted(nn.Module):
    """A frozen base whose layers are called one by one, with an adapter behind each of two."""

    def __init__(self) -> None:
        super().__init__()
        self.base, self.adapters = mlp().requires_grad_(False), nn.ModuleList([Adapter(), Adapter()])

    def forward(self, x: Tensor) -> Tensor:
        for at, layer in enumerate(self.base):
            x = layer(x)
            if at in (1, 3):
                x = self.adapters[at // 2](x)
        return x


class Fused(nn.Module):
    """Attention that gives the rate of a dropout module to a fused function, and never calls the module."""

    def __init__(self) -> None:
        super().__init__()
        self.queries, self.dropout, self.head = nn.Linear(4, 12), nn.Dropout(0.1), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.queries(x.unflatten(1, (4, 4))).chunk(3, dim=-1)
        mixed = functional.scaled_dot_product_attention(q, k, v, dropout_p=self.dropout.p if self.training else 0.0)
        out: Tensor = self.head(mixed.mean(1))
        return out


class PlusOneNorm(nn.Module):
    """A normalisation whose weight begins at 0, as 1 is added to it."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(16))

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.rms_norm(x, (16,)) * (1 + self.weight)


class Residual(nn.Module):
    """Blocks that begin as the identity, because their last normalisation does."""

    def __init__(self, last: nn.Module) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 16), nn.LayerNorm(16, eps=1e-3)) for _ in range(2)
        )
        for block in self.blocks:
            nn.init.zeros_(block[-1].weight)  # type: ignore[index]
        self.last, self.head = last, nn.Linear(16, 4)

    def forward(self, x: Tensor) -> Any:
        for block in self.blocks:
            x = x + block(x)
        return self.head(self.last(x))


def of_plus_one() -> nn.Sequential:
    return nn.Sequential(PlusOneNorm(), nn.Linear(16, 16), nn.ReLU(), PlusOneNorm(), nn.Linear(16, 4))


def trained_middle(bias: bool) -> tuple[Watched, bool]:
    """A layer that was trained before, and is frozen under a new head. The net says how its weights were drawn."""
    layers = [nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 64, bias=bias), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 4)]
    net = nn.Sequential(*layers)
    net.config = SimpleNamespace(initializer_range=0.05)  # type: ignore[assignment]
    for layer in layers:
        if isinstance(layer, nn.Linear):
            nn.init.normal_(layer.weight, std=0.05)
            nn.init.zeros_(layer.bias) if layer.bias is not None else None
    classify(net, 1e-2, steps=100)
    net[2].requires_grad_(False)
    net[-1].reset_parameters()  # type: ignore[operator]
    return classify(net, 1e-2, steps=100)


def gan() -> tuple[Watched, bool]:
    """Only the parts of the net are called, never the net itself."""

    class Both(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.generator = nn.Sequential(nn.Linear(4, 32), nn.ReLU(), nn.Linear(32, 2))
            self.discriminator = nn.Sequential(nn.Linear(2, 32), nn.LeakyReLU(0.2), nn.Linear(32, 1))

    net = Both()
    optimizers = [torch.optim.Adam(part.parameters(), lr=3e-3) for part in (net.discriminator, net.generator)]
    distances = []
    with Watched(net, *optimizers) as watched:
        for _ in watched.inspector.range(2):
            for _ in range(30):
                real, fake = torch.randn(64, 2) / 4 + 2, net.generator(torch.randn(64, 4))
                told = functional.softplus(-net.discriminator(real)) + functional.softplus(net.discriminator(fake.detach()))
                for optimizer, loss in zip(optimizers, (told, None), strict=True):
                    optimizer.zero_grad()
                    (functional.softplus(-net.discriminator(fake)) if loss is None else loss).mean().backward()
                    optimizer.step()
                distances.append((fake - 2).norm().item())
    return watched, distances[-1] < 0.9 * distances[0]


HEALTHY: dict[str, Callable[[], tuple[Watched, bool]]] = {
    "mlp": lambda: classify(mlp(), 1e-3),
    "small head": lambda: classify(with_head(1e-3)),
    "small head, gradients accumulated": lambda: classify(with_head(1e-3), size=8, steps=64, accumulate=8),
    "head of usual size, gradients accumulated": lambda: classify(with_head(2e-2), size=8, steps=64, accumulate=8),
    "head of zeros": lambda: classify(with_head(0.0), size=8, steps=64, accumulate=8),
    "frozen base in evaluation": lambda: classify(FrozenBase(evaluate=True)),
    "frozen base in training": lambda: classify(FrozenBase(evaluate=False)),
    "adapters": lambda: classify(Adapted()),
    "fused attention": lambda: classify(Fused()),
    "gan": gan,
    "residual branches that begin at 0": lambda: classify(Residual(nn.LayerNorm(16))),
    "normalisations to whose weight 1 is added": lambda: classify(of_plus_one()),
    "a trained layer that is frozen": lambda: trained_middle(bias=True),
    "one without a bias": lambda: trained_middle(bias=False),
}


@pytest.mark.parametrize("name", HEALTHY)
def test_a_healthy_training_has_no_findings(name: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    watched, learns = HEALTHY[name]()
    assert learns
    assert {source: list(found) for source, found in watched.findings(tmp_path).items()} == {
        "recorder": [],
        "recording": [],
        "timeline": [],
    }


def test_units_that_died_on_the_way_are_found_although_they_fired_once(tmp_path: Path) -> None:
    torch.manual_seed(0)
    net = mlp()
    watched, _ = classify(net, rate=0.5, steps=100)
    with torch.no_grad():  # by hand: how many are dead at the end
        x = torch.cat([x for x, _ in batches(20, 32)])
        dead = int((net[:4](x) == 0).all(dim=0).sum())
    assert dead > 32
    assert not watched.recorder["output/3"].value(stat="activity.dead").all()  # all but some fired at first
    for source, found in watched.findings(tmp_path).items():
        told = [finding for finding in found if "dead" in finding.what]
        assert "3" in [finding.layer for finding in told], source
    (what,) = [finding.what for finding in findings(watched.recorder) if finding.layer == "3" and "dead" in finding.what]
    assert " units are dead: they were not active in the last " in what
    assert what.endswith(" of 100 observations, or longer")
    idle = watched.recorder["output/3"].value(stat="idle.idle")
    assert 32 < int(what.split()[0]) == int((idle >= 50).sum()) <= dead  # idle in half of the recording


def test_activity_alone_does_not_tell_of_units_that_died_and_findings_say_so() -> None:
    told = {}
    for name, reducer in (("activity", Activity()), ("idle", Idle()), ("both", Product(activity=Activity(), idle=Idle()))):
        net = nn.Sequential(nn.Linear(4, 20), nn.ReLU())
        nn.init.constant_(net[0].bias, 5.0)
        with Recorder(ForwardMonitor(reducer)).modules(net, types=nn.ReLU) as recorder:
            for step in range(40):
                if step == 10:
                    nn.init.constant_(net[0].bias, -100.0)
                net(torch.randn(64, 4))
        told[name] = findings(recorder)
    what = "20 of 20 units are dead: they were not active in the last 30 of 40 observations, or longer"
    assert [[finding.what for finding in found] for found in told.values()] == [[], [what], [what]]
    assert ["died on the way" in " ".join(found.unexamined) for found in told.values()] == [True, False, False]


def test_units_that_are_rarely_active_are_not_dead() -> None:
    net = nn.Sequential(nn.ReLU())
    with Recorder(ForwardMonitor(Idle())).modules(net, types=nn.ReLU) as recorder:
        for step in range(60):
            x = -torch.ones(8, 4)
            x[0, step % 4] = 1.0  # each unit in one of 32 elements
            net(x)
    assert list(findings(recorder)) == []


def test_outputs_without_channels_do_not_take_those_with_channels_along() -> None:
    class Both(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.head = nn.Linear(16, 4)

        def forward(self, x: Tensor, labels: Tensor) -> dict[str, Tensor]:
            logits = self.head(x)
            return {"loss": functional.cross_entropy(logits, labels), "logits": logits}

    net = Both()
    with presets.health().modules(net) as recorder:
        for x, labels in batches(3, 8):
            net(x, labels)["loss"].backward()
    assert recorder["output"].value(leaf="logits", stat="stats.count").tolist() == [24] * 4
    row = next(row for row in recorder.report().rows if row.name == "output")
    assert row.samples == 3
    assert "leaf 'loss': it is a number, and the pattern keeps an axis" in str(row)
    assert not [finding for finding in findings(recorder) if "gradients" in finding.what or "output" in finding.what]


def dying(compiled: bool, folder: Path | None = None) -> Recorder:
    """A net whose second layer dies in step 10 of 40; with a folder the recorder is saved and made anew in step 20."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 4))
    run = torch.compile(net, fullgraph=True, backend="aot_eager") if compiled else net
    recorder = presets.health().modules(net)
    for step in range(40):
        if step == 10:
            nn.init.constant_(net[2].bias, -100.0)
        if step == 20 and folder is not None:
            recorder.save(folder)
            recorder.deregister()
            recorder = presets.health().modules(net)
            recorder.resume(folder)
        run(torch.randn(32, 16, generator=torch.Generator().manual_seed(step))).square().mean().backward()
    recorder.deregister()
    return recorder


@pytest.mark.slow
@pytest.mark.parametrize("compiled", [False, True])
def test_units_that_died_are_known_in_compiled_nets_and_after_a_resume(compiled: bool, tmp_path: Path) -> None:
    once, again = dying(compiled), dying(False, tmp_path / "run")
    for recorder in (once, again):
        assert recorder["output/3"].value(stat="idle.idle").tolist() == [30] * 64
        assert [finding.layer for finding in findings(recorder) if "in the last 30 of 40" in finding.what] == ["3"]
