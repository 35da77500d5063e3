"""One small planted case for each kind of finding: `CASES`, by kind. Each changes one thing of a healthy training, `Setup`.

The tests of the kinds, the pictures in `docs/findings` and the code on those pages run them.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.diagnosis.planted_relations import LIKE, RELATIONS
from recorders import Recorder, Recording, RecordingWarning, findings, presets
from recorders.recordings.distributed.merge import Merged
from recorders.recordings.distributed.placement import Placement
from recorders.watch.diagnosis.finding import Findings

__all__ = ["CASES", "CLASSES", "COUNTERPARTS", "Setup", "planted", "without_fault"]

CLASSES, FEATURES, BATCH = 4, 12, 32


class Setup:
    """A training of a small net on clusters, of which a case changes one thing."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.net: nn.Module = nn.Sequential(
            nn.Linear(FEATURES, 24), nn.ReLU(), nn.Dropout(0.1), nn.Linear(24, 24), nn.ReLU(), nn.Linear(24, CLASSES)
        )
        self.centres = torch.randn(CLASSES, FEATURES)
        self.rate, self.steps, self.clears, self.trains, self.sign = 3e-3, 60, True, True, 1.0
        self.optimizer: Callable[..., Any] = torch.optim.Adam
        self.options: dict[str, Any] = {}
        self.loss: Callable[[Tensor, Tensor], Tensor] = nn.functional.cross_entropy
        self.before: Callable[[int, Any], Any] = lambda step, optimizer: None
        self.parameters: Callable[[], Any] = lambda: self.net.parameters()
        self.evaluates: bool | None = None  # the mode of evaluations, if there are any
        self.shows_example = False  # whether findings are told what the net is called with
        self.others: list[Callable[[], Setup]] = []  # what the other ranks train
        self.done = 0  # steps

    def batch(self, step: int) -> tuple[Tensor, Tensor]:
        generator = torch.Generator().manual_seed(step)
        labels = torch.randint(CLASSES, (BATCH,), generator=generator)
        return self.centres[labels] + torch.randn(BATCH, FEATURES, generator=generator), labels

    def run(self) -> Findings:
        recorder = self.train()
        example, target = self.batch(self.done) if self.shows_example else (None, None)
        return findings(recorder, example=example, target=target)

    def train(self) -> Recorder | Recording:
        """Train all steps, and return what was recorded of it. `recorder` has it afterwards, `made` the optimizer."""
        self.recorder: Any = presets.health().modules(self.net)
        self.made = self.optimizer(self.parameters(), lr=self.rate, **self.options)
        with self.recorder:
            self.go_on(self.steps)
        if self.others:
            self.recorder = of_ranks([self.recorder.snapshot(), *(make().train().snapshot() for make in self.others)])
        return self.recorder  # type: ignore[no-any-return]

    def go_on(self, steps: int) -> list[float]:
        """Make more steps of the training; return their losses."""
        losses = []
        for step in range(self.done, self.done + steps):
            self.made = self.before(step, self.made) or self.made
            self.net.train(self.trains)
            x, y = self.batch(step)
            if self.clears:
                self.made.zero_grad()
            loss = self.loss(self.net(x), y)
            if loss.requires_grad:
                (self.sign * loss).backward()
            self.made.step()
            self.recorder.push("loss", loss)
            self.recorder.push("target", y)
            losses.append(loss.item())
            if self.evaluates is not None and step % 10 == 9:
                self.net.train(self.evaluates)
                with torch.no_grad():
                    self.net(x)
        self.done += steps
        return losses


def of_ranks(recordings: list[Recording]) -> Recording:
    """What `sync` returns if each of these was recorded on a rank of its own."""
    placed = {}
    for rank, recording in enumerate(recordings):
        copy = Placement(rank, shared=True)
        parts = {
            name: replace(part, placement=dict.fromkeys(part.states, copy))
            if part.monitor.startswith(("Parameter", "PreStep", "Step"))
            else part
            for name, part in recording.items()
        }
        placed[f"rank {rank}"] = Recording(parts, recording.aliases)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RecordingWarning)  # of copies that differ
        return Recording(Merged(placed).all())


CASES: dict[str, Callable[[Setup], Any]] = {**RELATIONS}


def case(kind: str) -> Callable[[Callable[[Setup], Any]], Callable[[Setup], Any]]:
    def register(plant: Callable[[Setup], Any]) -> Callable[[Setup], Any]:
        CASES[kind] = plant
        return plant

    return register


@case("replicas-differ")
def _(setup: Setup) -> None:
    def one_rank() -> Setup:  # which takes the gradient of its own samples at step 20, and at others that of all ranks
        one = of_a_rank(Setup())
        whole = one.batch

        def batch(step: int) -> tuple[Tensor, Tensor]:
            x, y = whole(step)
            return (x[:10], y[:10]) if step == 20 else (x, y)

        one.batch = batch  # type: ignore[method-assign]
        return one

    of_a_rank(setup).others = [one_rank, lambda: of_a_rank(Setup())]


@case("nonfinite")
def _(setup: Setup) -> None:
    setup.net[3].register_forward_hook(lambda module, args, output: output / 0 if setup.now == 30 else output)

    def count(step: int, optimizer: Any) -> None:
        setup.now = step

    setup.before = count


@case("never-ran")
def _(setup: Setup) -> None:
    class Forgetful(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.used, self.unused = setup.net, nn.Linear(FEATURES, CLASSES)

        def forward(self, x: Tensor) -> Tensor:
            return self.used(x)

    setup.net = Forgetful()


@case("no-gradient")
def _(setup: Setup) -> None:
    setup.net[1].register_forward_hook(lambda module, args, output: output.detach())


@case("dead-units")
def _(setup: Setup) -> None:
    nn.init.constant_(setup.net[3].bias, -100.0)


@case("saturated-units")
def _(setup: Setup) -> None:
    setup.net[1] = nn.Tanh()
    with torch.no_grad():
        setup.net[0].weight.mul_(100)


@case("equal-units")
def _(setup: Setup) -> None:
    setup.net[2] = nn.Identity()
    for layer in (setup.net[0], setup.net[3], setup.net[5]):
        nn.init.constant_(layer.weight, 0.05)
        nn.init.zeros_(layer.bias)


@case("outliers")
def _(setup: Setup) -> None:
    with torch.no_grad():
        setup.net[0].weight[3] *= 1e6


def deep(scale: float) -> nn.Sequential:
    net = nn.Sequential(
        *(module for _ in range(8) for module in (nn.Linear(FEATURES, FEATURES), nn.Tanh())), nn.Linear(FEATURES, CLASSES)
    )
    for module in net:
        if isinstance(module, nn.Linear):
            nn.init.normal_(module.weight, std=scale / math.sqrt(FEATURES))
            nn.init.zeros_(module.bias)
    return net


@case("vanishing-gradients")
def _(setup: Setup) -> None:
    setup.net = deep(0.1)


@case("exploding-gradients")
def _(setup: Setup) -> None:
    setup.net = nn.Sequential(*(nn.Linear(FEATURES, FEATURES) for _ in range(10)), nn.Linear(FEATURES, CLASSES))
    for module in setup.net:
        nn.init.normal_(module.weight, std=3 / math.sqrt(FEATURES))
    setup.loss = lambda out, y: nn.functional.cross_entropy(out / 1e6, y)


@case("growing-signal")
def _(setup: Setup) -> None:
    setup.net = nn.Sequential(
        *(module for _ in range(6) for module in (nn.Linear(FEATURES, FEATURES), nn.ReLU())), nn.Linear(FEATURES, CLASSES)
    )
    for module in setup.net[::2]:
        nn.init.normal_(module.weight, std=30 / math.sqrt(FEATURES))


@case("frozen")
def _(setup: Setup) -> None:
    setup.parameters = lambda: [*setup.net[0].parameters(), *setup.net[5].parameters()]


@case("updates-too-large")
def _(setup: Setup) -> None:
    setup.rate, setup.optimizer = 3.0, torch.optim.Adam


@case("updates-too-small")
def _(setup: Setup) -> None:
    setup.rate = 1e-8


@case("tiny-gradients")
def _(setup: Setup) -> None:
    setup.sign = 1e-9


@case("clipped")
def _(setup: Setup) -> None:
    def clip(parameter: nn.Parameter) -> None:
        nn.utils.clip_grad_norm_(parameter, 1e-6)

    setup.optimizer = torch.optim.SGD
    for parameter in setup.net.parameters():
        parameter.register_post_accumulate_grad_hook(clip)


@case("not-cleared")
def _(setup: Setup) -> None:
    setup.clears = False


@case("rate-is-zero")
def _(setup: Setup) -> None:
    setup.rate = 0.0


@case("rate-ends-early")
def _(setup: Setup) -> None:
    def end(step: int, optimizer: Any) -> None:
        optimizer.param_groups[0]["lr"] = 3e-3 if step < 6 else 1e-9

    setup.before = end


@case("ascends")
def _(setup: Setup) -> None:
    setup.options = {"maximize": True}


@case("written-between-steps")
def _(setup: Setup) -> None:
    def write(step: int, optimizer: Any) -> None:
        with torch.no_grad():
            setup.net[0].weight.mul_(1.01)

    setup.before = write


@case("optimizer-made-anew")
def _(setup: Setup) -> None:
    setup.before = lambda step, optimizer: torch.optim.Adam(setup.net.parameters(), lr=3e-3)


@case("foreign-parameters")
def _(setup: Setup) -> None:
    other = nn.Linear(FEATURES, 24)
    setup.parameters = lambda: [*other.parameters(), *list(setup.net.parameters())[2:]]


@case("evaluation-mode")
def _(setup: Setup) -> None:
    setup.trains = False


@case("training-mode")
def _(setup: Setup) -> None:
    setup.evaluates = True


@case("coarse-weights")
def _(setup: Setup) -> None:
    setup.net.bfloat16()
    batch, setup.rate = setup.batch, 1e-5
    setup.batch = lambda step: (batch(step)[0].bfloat16(), batch(step)[1])


@case("statistics-stand-still")
def _(setup: Setup) -> None:
    setup.net[2] = nn.BatchNorm1d(24, momentum=0.0)


@case("large-epsilon")
def _(setup: Setup) -> None:
    setup.options = {"eps": 1.0}


@case("odd-momentum")
def _(setup: Setup) -> None:
    setup.optimizer, setup.options = torch.optim.SGD, {"momentum": 0.999}


@case("much-dropout")
def _(setup: Setup) -> None:
    setup.net[2] = nn.Dropout(0.95)


@case("nonfinite-inputs")
def _(setup: Setup) -> None:
    batch = setup.batch
    setup.batch = lambda step: (
        (batch(step)[0].index_fill(0, torch.tensor([3]), math.nan), batch(step)[1]) if step == 20 else batch(step)
    )


@case("batches-of-one")
def _(setup: Setup) -> None:
    setup.net = nn.Sequential(nn.Unflatten(1, (3, 4)), nn.BatchNorm1d(3), nn.Flatten(), nn.Linear(FEATURES, CLASSES))
    batch = setup.batch
    setup.batch = lambda step: (batch(step)[0][:1], batch(step)[1][:1])


@case("constant-inputs")
def _(setup: Setup) -> None:
    batch = setup.batch
    setup.batch = lambda step: (torch.zeros(BATCH, FEATURES), batch(step)[1])


@case("large-inputs")
def _(setup: Setup) -> None:
    batch = setup.batch
    setup.batch = lambda step: (batch(step)[0] * 100, batch(step)[1])


@case("repeated-batches")
def _(setup: Setup) -> None:
    batch = setup.batch
    setup.batch = lambda step: batch(0)


@case("constant-target")
def _(setup: Setup) -> None:
    batch = setup.batch
    setup.batch = lambda step: (batch(step)[0], torch.ones(BATCH, dtype=torch.int64))


@case("sorted-target")
def _(setup: Setup) -> None:
    batch = setup.batch

    def ordered(step: int) -> tuple[Tensor, Tensor]:
        label = step * CLASSES // setup.steps
        noise = torch.randn(BATCH, FEATURES, generator=torch.Generator().manual_seed(step))
        return setup.centres[label] + noise, torch.full((BATCH,), label)

    assert batch
    setup.batch = ordered


def regression(setup: Setup, scale: float = 1.0) -> None:
    batch = setup.batch
    setup.net[5] = nn.Linear(24, 1)
    setup.batch = lambda step: (batch(step)[0], batch(step)[0].sum(1, keepdim=True) * scale)
    setup.loss = nn.functional.mse_loss


@case("large-target")
def _(setup: Setup) -> None:
    regression(setup, 1e3)


@case("loss-does-not-fall")
def _(setup: Setup) -> None:
    batch = setup.batch
    setup.batch = lambda step: (batch(step)[0], batch(step)[1][torch.randperm(BATCH)])


@case("loss-rises")
def _(setup: Setup) -> None:
    def reverse(step: int, optimizer: Any) -> None:
        setup.sign = 1.0 if step < 15 else -1.0

    setup.before = reverse
    setup.rate = 1e-2


@case("loss-is-constant")
def _(setup: Setup) -> None:
    setup.loss, setup.options = lambda out, y: (out * 0).sum() + 1.0, {"weight_decay": 0.1}


@case("loss-falls-slowly")
def _(setup: Setup) -> None:
    setup.rate, setup.steps = 1e-4, 200


@case("high-initial-loss")
def _(setup: Setup) -> None:
    with torch.no_grad():
        setup.net[5].weight.mul_(60)


@case("probabilities-as-logits")
def _(setup: Setup) -> None:
    setup.net.append(nn.Softmax(1))
    setup.steps = 120


@case("unreachable-target")
def _(setup: Setup) -> None:
    regression(setup)
    setup.net.append(nn.ReLU())


@case("loss-jumps")
def _(setup: Setup) -> None:
    def overwrite(step: int, optimizer: Any) -> None:
        if step == 100:
            with torch.no_grad():
                setup.net[3].weight.normal_(std=3.0)

    setup.steps, setup.before = 130, overwrite


@case("zero-weights")
def _(setup: Setup) -> None:
    nn.init.zeros_(setup.net[0].weight)
    setup.net[0].weight.requires_grad_(False)
    setup.net[3].weight.requires_grad_(False)
    nn.init.zeros_(setup.net[3].weight)


@case("linear-net")
def _(setup: Setup) -> None:
    setup.net[1] = nn.Identity()


@case("weak-inputs")
def _(setup: Setup) -> None:
    batch = setup.batch
    setup.batch = lambda step: (batch(step)[0] / 100, batch(step)[1])


@case("equal-outputs")
def _(setup: Setup) -> None:
    nn.init.constant_(setup.net[3].bias, -100.0)


@case("shrinking-weights")
def _(setup: Setup) -> None:
    setup.optimizer, setup.options = torch.optim.AdamW, {"weight_decay": 30.0}


@case("frozen-from-start")
def _(setup: Setup) -> None:
    setup.net[:4].requires_grad_(False)


@case("wrong-normalisation")
def _(setup: Setup) -> None:
    setup.net[2] = nn.LayerNorm(24, eps=1e6)


@case("shrinking-signal")
def _(setup: Setup) -> None:
    setup.net[3].register_forward_hook(lambda module, args, output: output * 1e-6)


@case("bottleneck")
def _(setup: Setup) -> None:
    setup.net[3], setup.net[5] = nn.Linear(24, 1), nn.Linear(1, CLASSES)


@case("large-initial-weights")
def _(setup: Setup) -> None:
    with torch.no_grad():
        setup.net[3].weight.mul_(40)


@case("large-initial-bias")
def _(setup: Setup) -> None:
    nn.init.constant_(setup.net[0].bias, 12.0)


@case("gradients-discarded")
def _(setup: Setup) -> None:
    def seldom(step: int, optimizer: Any) -> None:
        if step == 0:
            steps = optimizer.step
            optimizer.step = lambda: steps() if setup.now % 6 == 5 else None
        setup.now = step

    setup.before = seldom


@case("strong-weight-decay")
def _(setup: Setup) -> None:
    setup.optimizer, setup.options = torch.optim.AdamW, {"weight_decay": 10.0}


@case("loss-climbs")
def _(setup: Setup) -> None:
    setup.sign = -1.0


@case("shapes-broadcast")
def _(setup: Setup) -> None:
    regression(setup)
    inner = setup.batch

    def batch(step: int) -> tuple[Tensor, Tensor]:
        x, y = inner(step)
        return x, y.flatten()

    def each_with_each(output: Tensor, target: Tensor) -> Tensor:
        return (output - target).square().mean()  # mse_loss would warn

    setup.batch, setup.loss = batch, each_with_each


@case("exclusive-labels")
def _(setup: Setup) -> None:
    several_labels(setup)
    setup.loss = nn.functional.cross_entropy


@case("class-ignored")
def _(setup: Setup) -> None:
    setup.shows_example = True
    setup.loss = lambda output, target: nn.functional.cross_entropy(output, target, ignore_index=0)


@case("unused-classes")
def _(setup: Setup) -> None:
    batch = setup.batch

    def changed(step: int) -> tuple[Tensor, Tensor]:
        x, y = batch(step)
        return x, y // 2

    setup.batch = changed  # type: ignore[method-assign]


@case("wrong-probabilities")
def _(setup: Setup) -> None:
    several_labels(setup)
    weight = torch.full((CLASSES,), 50.0)
    setup.steps = 120
    setup.loss = lambda output, target: nn.functional.binary_cross_entropy_with_logits(output, target, pos_weight=weight)


@case("rectified-outputs")
def _(setup: Setup) -> None:
    setup.net = nn.Sequential(*setup.net, nn.ReLU())


@case("activations-in-a-row")
def _(setup: Setup) -> None:
    probabilities(setup)
    setup.net = nn.Sequential(*setup.net[:-1], nn.ReLU(), nn.Sigmoid())


@case("normalised-outputs")
def _(setup: Setup) -> None:
    several_numbers(setup)
    setup.net.append(nn.LayerNorm(CLASSES))


@case("oscillating-weights")
def _(setup: Setup) -> None:
    line(setup)
    setup.rate = 0.048


def line(setup: Setup) -> None:
    """A linear net and all the data at once; rates above 0.049 diverge."""
    regression(setup)
    x = torch.cat([setup.batch(step)[0] for step in range(8)]) + 1
    batch = x, x.sum(1, keepdim=True)
    setup.net, setup.batch = nn.Sequential(nn.Linear(FEATURES, 1)), lambda step: batch
    setup.optimizer, setup.rate = torch.optim.SGD, 0.01


def several_numbers(setup: Setup) -> None:
    inner = setup.batch
    setup.batch = lambda step: (inner(step)[0], inner(step)[0][:, :CLASSES])
    setup.loss, setup.shows_example = nn.functional.mse_loss, True


def several_labels(setup: Setup) -> None:
    inner = setup.batch

    def batch(step: int) -> tuple[Tensor, Tensor]:
        x, _ = inner(step)
        return x, (x[:, :CLASSES] > 0).float()

    setup.batch, setup.loss = batch, nn.functional.binary_cross_entropy_with_logits


def probabilities(setup: Setup) -> None:
    several_labels(setup)
    setup.net.append(nn.Sigmoid())
    setup.loss, setup.shows_example = nn.functional.binary_cross_entropy, True


def planted(kind: str) -> Setup:
    """A training in which a fault of this kind was planted, before it ran; "" for the healthy one."""
    setup = Setup()
    if kind:
        CASES[kind](setup)
    return setup


def without_fault(kind: str) -> Setup:
    """The healthy training that is most like the planted one of this kind, before it ran: it has the same net and the same task."""
    setup = Setup()
    COUNTERPARTS.get(kind, lambda setup: None)(setup)
    return setup


def with_tanh(setup: Setup) -> None:
    setup.net[1] = nn.Tanh()


def without_activations(setup: Setup) -> None:
    setup.net = nn.Sequential(*(nn.Linear(FEATURES, FEATURES) for _ in range(10)), nn.Linear(FEATURES, CLASSES))
    for module in setup.net:
        nn.init.normal_(module.weight, std=1 / math.sqrt(FEATURES))


def deep_with_relu(setup: Setup) -> None:
    setup.net = nn.Sequential(
        *(module for _ in range(6) for module in (nn.Linear(FEATURES, FEATURES), nn.ReLU())), nn.Linear(FEATURES, CLASSES)
    )
    for module in setup.net[::2]:
        nn.init.kaiming_normal_(module.weight, nonlinearity="relu")


def deep_with_tanh(setup: Setup) -> None:
    setup.net = deep(1.0)


def with_batch_norm(setup: Setup) -> None:
    setup.net[2] = nn.BatchNorm1d(24)


def in_groups(setup: Setup) -> None:
    setup.net = nn.Sequential(nn.Unflatten(1, (3, 4)), nn.BatchNorm1d(3), nn.Flatten(), nn.Linear(FEATURES, CLASSES))


def evaluated(setup: Setup) -> None:
    setup.evaluates = False


def longer(setup: Setup) -> None:
    setup.steps = 200


def of_a_rank(setup: Setup) -> Setup:
    """Without random numbers. A batch is that of all ranks, so its gradient is what ranks get that reduce theirs."""
    setup.net[2] = nn.Identity()
    return setup


def on_three_ranks(setup: Setup) -> None:
    of_a_rank(setup).others = [lambda: of_a_rank(Setup())] * 2


COUNTERPARTS: dict[str, Callable[[Setup], Any]] = {
    **LIKE,
    "saturated-units": with_tanh,
    "vanishing-gradients": deep_with_tanh,
    "exploding-gradients": without_activations,
    "growing-signal": deep_with_relu,
    "statistics-stand-still": with_batch_norm,
    "batches-of-one": in_groups,
    "training-mode": evaluated,
    "large-target": regression,
    "unreachable-target": regression,
    "replicas-differ": on_three_ranks,
    "loss-falls-slowly": longer,
    "loss-jumps": longer,
    "probabilities-as-logits": longer,
    "shapes-broadcast": regression,
    "exclusive-labels": several_labels,
    "wrong-probabilities": several_labels,
    "activations-in-a-row": probabilities,
    "normalised-outputs": several_numbers,
    "oscillating-weights": line,
}
"""What a healthy training has in common with the planted one of a kind, if its net or its task differs from that of `Setup`."""
