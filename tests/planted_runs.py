"""Trainings of which one has a planted fault, each with the phases and the places that may be named."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase

import planted_divergences as twins
import torch
import torch.nn.functional as F
from planted_divergences import LENGTH, WORDS, Language, Part, Planted, Vision
from torch import Tensor, nn
from torch.optim import SGD, Adam, AdamW, Optimizer

from recorders import Recording, RunDivergence
from recorders.watch.presets import fingerprints

Loss = Callable[[Tensor, Tensor], Tensor]


def texts(number: int, seed: int = 1) -> list[Tensor]:
    """Batches of texts."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(WORDS, (6, LENGTH), generator=generator) for _ in range(number)]


def next_word(output: Tensor, words: Tensor) -> Tensor:
    """The loss of the decoder."""
    return F.cross_entropy(output[:, :-1].flatten(0, 1), words[:, 1:].flatten())


def _shifted(output: Tensor, words: Tensor) -> Tensor:
    return F.cross_entropy(output.flatten(0, 1), words.flatten())


def _smoothed(output: Tensor, words: Tensor) -> Tensor:
    return F.cross_entropy(output[:, :-1].flatten(0, 1), words[:, 1:].flatten(), label_smoothing=0.1)


def _summed(output: Tensor, words: Tensor) -> Tensor:
    return F.cross_entropy(output[:, :-1].flatten(0, 1), words[:, 1:].flatten(), reduction="sum")


def decoder() -> nn.Module:
    """The net of most of these."""
    net = Language().train()
    with torch.no_grad():
        for parameter in net.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.1)
    return net


def momentum(net: nn.Module) -> Optimizer:
    """SGD with momentum."""
    return SGD(net.parameters(), lr=0.05, momentum=0.9)


def adamw(net: nn.Module) -> Optimizer:
    """AdamW."""
    return AdamW(net.parameters(), lr=1e-3, weight_decay=0.01)


@dataclass(frozen=True)
class Training:
    """A small training. A fault changes one of these.

    Attributes:
        net, optimizer, loss: what is trained, how, and for what.
        batches: of each step; several are accumulated.
        prepare: called with the net before there is an optimizer.
        resume: called with the net and the optimizer after `warm` steps that are not recorded.
        before_step: called with the net, the optimizer and the number of the step, after the backwards.
        seed: of the random numbers in the training.
        clears: whether gradients are cleared after a step.
    """

    net: Callable[[], nn.Module] = decoder
    optimizer: Callable[[nn.Module], Optimizer] = adamw
    loss: Loss = next_word
    batches: tuple[tuple[Tensor, ...], ...] = tuple((words,) for words in texts(4))
    prepare: Callable[[nn.Module], object] = bool
    resume: Callable[[nn.Module, Optimizer], object] = lambda net, optimizer: None
    before_step: Callable[[nn.Module, Optimizer, int], object] = lambda net, optimizer, step: None
    seed: int = 0
    warm: int = 0
    clears: bool = True

    def recorded(self) -> Recording:
        """Trains, and returns the recording."""
        torch.manual_seed(0)
        net = self.net()
        self.prepare(net)
        optimizer = self.optimizer(net)
        torch.manual_seed(self.seed)
        for step in range(self.warm):
            self._step(net, optimizer, step)
        self.resume(net, optimizer)
        with fingerprints().modules(net) as recorder:
            for step in range(self.warm, len(self.batches)):
                self._step(net, optimizer, step)
        return recorder.snapshot()

    def _step(self, net: nn.Module, optimizer: Optimizer, step: int) -> None:
        for words in self.batches[step]:
            (self.loss(net(words), words) / len(self.batches[step])).backward()
        self.before_step(net, optimizer, step)
        optimizer.step()
        if self.clears:
            optimizer.zero_grad()


@dataclass(frozen=True)
class PlantedRun:
    """A fault of a training.

    Attributes:
        name: of the fault.
        places: the phase and the name that may be named, the name as a pattern; several, if they tell the same.
        healthy, faulty: both trainings.
        step: the last step of which it may be said.
    """

    name: str
    places: tuple[tuple[str, str], ...]
    healthy: Training
    faulty: Training
    step: int = 0

    def is_right(self, found: RunDivergence, rewritten: bool = False) -> bool:
        """Whether it is named."""
        first = any(phase == found.phase and fnmatchcase(found.name, name) for phase, name in self.places)
        return first and found.step <= self.step and (not rewritten or found.name_b == twins.renamed(found.name))


def twin_run(planted: Planted, rewritten: bool = False) -> PlantedRun:
    """The fault of a twin, which is trained."""
    places = tuple(_TOLD.get(planted.name, ((planted.phase, planted.module + ".*" * (planted.phase == "parameters")),)))
    if planted.net is Vision:
        generator = torch.Generator().manual_seed(1)
        batches = tuple((torch.randn(8, 3, 9, 9, generator=generator),) for _ in range(4))
        base = Training(batches=batches, loss=lambda output, x: F.cross_entropy(output, torch.arange(len(output)) % 5))
    else:
        base = Training()
    nets = [lambda which=which: _in_training(twins.twins(planted, rewritten)[which], planted) for which in (0, 1)]
    return PlantedRun(planted.name, places, replace(base, net=nets[0]), replace(base, net=nets[1]))


_TOLD: dict[str, Sequence[tuple[str, str]]] = {
    # buffers are not recorded: what the layer makes of them is
    "stale buffer": (("forward", "batchnorm"),),
    # a parameter that one run lacks; or the gradients of both uses
    "head not tied": (("parameters", "head.weight"), ("backward", "head"), ("backward", "embed")),
}
"""Twins of which a run tells something else than the code does."""


def _in_training(net: Part, planted: Planted) -> Part:
    net.train()
    if planted.name == "stale buffer":
        net.part("batchnorm").eval()  # frozen, as in fine-tuning: otherwise nothing reads the buffer
    return net


def _all_reduced(net: nn.Module, optimizer: Optimizer, step: int, left_out: Callable[[str], bool]) -> None:
    """Gradients averaged with those of another rank, which got another batch."""
    words = texts(1, seed=100 + step)[0]
    with torch.random.fork_rng():
        other = Language().train()
        other.load_state_dict(net.state_dict())
        next_word(other(words), words).backward()
    for (name, parameter), its in zip(net.named_parameters(), other.parameters(), strict=True):
        if parameter.grad is not None and its.grad is not None and not left_out(name):
            parameter.grad.add_(its.grad).div_(2)


def _clipped(net: nn.Module, optimizer: Optimizer, step: int) -> None:
    nn.utils.clip_grad_norm_(net.parameters(), 0.1)


def _scaled(net: nn.Module, optimizer: Optimizer, step: int) -> None:
    for parameter in net.parameters():
        if parameter.grad is not None:
            parameter.grad.mul_(1024)


def _warmed_up(first: int) -> Callable[[nn.Module, Optimizer, int], None]:
    def before_step(net: nn.Module, optimizer: Optimizer, step: int) -> None:
        for group in optimizer.param_groups:
            group["lr"] = 1e-3 * min(1.0, (step + first) / 100)

    return before_step


def _forget(net: nn.Module, optimizer: Optimizer) -> None:
    optimizer.state.clear()


def _freeze(net: nn.Module) -> None:
    net.get_submodule("blocks.1.mlp.up").requires_grad_(False)


def _round(net: nn.Module) -> None:
    for parameter in net.parameters():
        parameter.data = parameter.data.bfloat16().float()


def _without(net: nn.Module) -> Optimizer:
    left = [parameter for name, parameter in net.named_parameters() if name != "blocks.1.mlp.up.weight"]
    return AdamW(left, lr=1e-3, weight_decay=0.01)


_BASE = Training()
_LONG = replace(_BASE, batches=tuple((words,) for words in texts(6)))
_TWICE = replace(_BASE, batches=tuple(zip(texts(4), texts(4, seed=2), strict=True)))
_HALVES = tuple(pair[:1] for pair in _TWICE.batches)
_SKIPPED = _LONG.batches[:2] + _LONG.batches[3:] + _LONG.batches[:1]
_RANKS = replace(_BASE, before_step=lambda *where: _all_reduced(*where, lambda name: False))
_UPDATE = (("update", "*"),)
_LOSS = (("backward", ""),)
_UP = "blocks.1.mlp.up"


def _changed(name: str, places: tuple[tuple[str, str], ...], base: Training = _BASE, step: int = 0, **change: object) -> PlantedRun:
    return PlantedRun(name, places, base, replace(base, **change), step)  # type: ignore[arg-type]


PLANTED_RUNS = [
    _changed("rate 1 % higher", _UPDATE, optimizer=lambda net: AdamW(net.parameters(), lr=1.01e-3, weight_decay=0.01)),
    _changed("rate 0.1 % higher", _UPDATE, optimizer=lambda net: AdamW(net.parameters(), lr=1.001e-3, weight_decay=0.01)),
    _changed("no weight decay", _UPDATE, optimizer=lambda net: AdamW(net.parameters(), lr=1e-3, weight_decay=0)),
    _changed("decay in the gradient", _UPDATE, optimizer=lambda net: Adam(net.parameters(), lr=1e-3, weight_decay=0.01)),
    _changed("other betas", _UPDATE, step=1, optimizer=lambda net: AdamW(net.parameters(), lr=1e-3, betas=(0.9, 0.95))),
    _changed("eps of Adam", _UPDATE, optimizer=lambda net: AdamW(net.parameters(), lr=1e-3, eps=1e-5)),
    _changed("warm-up off by one", _UPDATE, replace(_BASE, before_step=_warmed_up(1)), before_step=_warmed_up(2)),
    _changed("no Nesterov momentum", _UPDATE, replace(_BASE, optimizer=lambda net: SGD(net.parameters(), 0.05, 0.9, nesterov=True)),
             optimizer=momentum),
    _changed("momentum not loaded", _UPDATE, replace(_LONG, optimizer=momentum, warm=2), resume=_forget),
    _changed("state of Adam not loaded", _UPDATE, replace(_LONG, warm=2), resume=_forget),
    _changed("no clipping", _UPDATE, replace(_BASE, before_step=_clipped), before_step=_BASE.before_step),
    _changed("gradients not unscaled", _UPDATE, before_step=_scaled),
    _changed("gradients not cleared", _UPDATE, step=1, clears=False),
    _changed("a rank skips all-reduce", _UPDATE, _RANKS, before_step=_BASE.before_step),
    _changed("a bucket is not reduced", (("update", f"{_UP}.*"), ("backward", _UP)), _RANKS,
             before_step=lambda *where: _all_reduced(*where, lambda name: name.startswith(_UP))),
    _changed("a parameter not in the optimizer", (("update", f"{_UP}.weight"), ("backward", _UP)), optimizer=_without),
    _changed("a frozen layer", (("backward", _UP),), prepare=_freeze),
    _changed("loss summed", _LOSS, loss=_summed),
    _changed("labels smoothed", _LOSS, loss=_smoothed),
    _changed("labels off by one", _LOSS, loss=_shifted),
    _changed("accumulation off by one", (("input", ""), ("backward", "")), _TWICE, batches=_HALVES),
    _changed("not divided by the accumulated", _LOSS, _TWICE, loss=lambda output, words: 2 * next_word(output, words)),
    _changed("a batch is skipped", (("input", ""),), _LONG, step=2, batches=_SKIPPED),
    _changed("other dropout", (("forward", "blocks.0.drop"),), seed=1),
    _changed("weights from bfloat16", (("parameters", "*"),), prepare=_round),
]  # fmt: skip
"""Faults of trainings rather than of nets. "One rank skips all-reduce" is told by its gradients, as a run in one process."""
