"""What recording costs a training step of a transformer on a GPU: recorded and bare in turn, eager and inside `torch.compile`."""

from __future__ import annotations

import copy
import gc
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from compiled import Block, separate
from gpu_timing import QUICK, Effort, Findings, in_turn, peak_of, ratios, summary
from torch import Tensor, nn
from torch.optim import AdamW, Optimizer

from recorders import BackwardMonitor, ForwardMonitor, ParameterGradientMonitor, Recorder
from recorders._torch import CAPTURES_IN_GRAPHS
from reducers import Collect, Digest, Fingerprints, Mean, Norm, PerObservation, Summary

__all__ = ["BAR", "BIG", "EVERY", "SIZES", "SMALL", "TINY", "VARIANTS", "Rig", "Size", "network", "training"]

Put = Callable[[nn.Module, Optimizer], Any]
"""Puts something on a network in training, and returns what must be kept alive."""

SMALL, BIG, BARRED = "124 M", "1 B", "Summary of outputs"
BAR = 1.03
"""What a step that records `Summary` of all leaves of the big network may take, of the bare step."""

EVERY = 10
"""Steps between those that `every 10th step` records."""

EFFORT = Effort(calls=4 * EVERY, seconds=2.0, least=3)
"""A turn has more steps than observations wait for each other, so that what joins them is in it."""

BIG_EFFORT = Effort(calls=4 * EVERY, seconds=2.0, least=2)


@dataclass(frozen=True)
class Size:
    """A network, and its batch.

    Attributes:
        tied: whether the head has the weights of the embedding.
        autocast: whether parameters are float32 under bf16 autocast; else they are bf16.
    """

    layers: int
    width: int
    heads: int
    vocabulary: int
    length: int
    batch: int
    tied: bool = True
    autocast: bool = True


SIZES = {
    SMALL: Size(12, 768, 12, 50304, 1024, 8),
    BIG: Size(16, 2048, 32, 50304, 2048, 4, tied=False, autocast=False),
}
TINY = Size(1, 32, 2, 97, 8, 2)


class Transformer(nn.Module):
    """Embeddings, blocks, a norm and a head: seven leaf modules a block, and four."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(size.vocabulary, size.width), nn.Embedding(size.length, size.width)
        self.blocks = nn.Sequential(*(Block(size.width, size.heads) for _ in range(size.layers)))
        self.norm, self.head = nn.LayerNorm(size.width), nn.Linear(size.width, size.vocabulary, bias=False)
        if size.tied:
            self.head.weight = self.tokens.weight
        nn.init.normal_(self.tokens.weight, std=0.02)

    def forward(self, tokens: Tensor) -> Tensor:
        places = torch.arange(tokens.shape[1], device=tokens.device)
        x: Tensor = self.head(self.norm(self.blocks(self.tokens(tokens) + self.positions(places))))
        return x


def network(size: Size, device: torch.device) -> nn.Module:
    """A network with random weights, the same in each run."""
    torch.manual_seed(0)
    with device:
        net = Transformer(size)
    return net if size.autocast else net.to(torch.bfloat16)


def outputs(reducer: Any, **options: Any) -> Put:
    return lambda net, optimizer: Recorder(ForwardMonitor(reducer, **options)).modules(net, leaves=True).attach(optimizer)


def both_ways(net: nn.Module, optimizer: Optimizer) -> Recorder:
    recorder = Recorder(out=ForwardMonitor(Summary()), grad=BackwardMonitor(Summary()))
    return recorder.modules(net, leaves=True).attach(optimizer)


def gradients(net: nn.Module, optimizer: Optimizer) -> Recorder:
    return Recorder(ParameterGradientMonitor(Norm())).modules(net, leaves=True).attach(optimizer)


VARIANTS: dict[str, Put] = {
    BARRED: outputs(Summary()),
    "Mean of outputs": outputs(Mean()),
    "Summary of outputs and gradients": both_ways,
    "norms of parameter gradients": gradients,
    f"Summary of outputs, every {EVERY}th step": outputs(Summary(), every_step=EVERY),
    "digests of outputs": outputs(PerObservation(Digest(), Collect())),
    "fingerprints of outputs": outputs(Fingerprints()),
}


class Rig:
    """A network in training, with something put on it."""

    def __init__(self, net: nn.Module, size: Size, device: torch.device, execution: str, put: Put | None = None) -> None:
        self.net = copy.deepcopy(net)
        self.optimizer = AdamW(self.net.parameters(), lr=1e-4, fused=True)
        self.held = None if put is None else put(self.net, self.optimizer)
        call = separate(self.net)
        # On a CPU only what is recorded in a graph is tried: the compiler for C++ would take most of the time.
        backend = "inductor" if device.type == "cuda" else "eager"
        self._call = call if execution == "eager" else torch.compile(call, backend=backend)
        self._autocast = torch.autocast(device.type, torch.bfloat16, enabled=size.autocast)
        generator = torch.Generator().manual_seed(1)
        self._tokens = torch.randint(size.vocabulary, (size.batch, size.length + 1), generator=generator).to(device)

    def step(self) -> None:
        """One step of training, after which nothing has to be waited for."""
        with self._autocast:
            logits = self._call(self._tokens[:, :-1])
            loss = F.cross_entropy(logits.flatten(0, 1), self._tokens[:, 1:].flatten())
        torch.autograd.backward(loss)
        self.optimizer.step()
        self.optimizer.zero_grad()

    def silent(self) -> list[str]:
        """The names of subrecorders that recorded nothing, if a recorder was put on."""
        return [row.name for row in self.held.report().silent] if isinstance(self.held, Recorder) else []


def measured(found: Findings, bare: Rig, rig: Rig, device: torch.device, effort: Effort, of: dict[str, str]) -> None:
    """One row: steps of a network with something on it, and of the bare one, in turn."""
    rig.step()
    if silent := rig.silent():
        found.leave_out(f"nothing was recorded by {silent}", **of)
        return
    times = in_turn({"bare": bare.step, "with it": rig.step}, device, effort)
    figures: dict[str, Any] = {
        "bare ms": summary(times["bare"]),
        "ms": summary(times["with it"]),
        "x bare": ratios(times["with it"], times["bare"]),
        "turns": len(times["bare"]),
    }
    share, base = figures["x bare"], figures["bare ms"]["median"]
    shown = f"{share['median']:.3f} x bare, mean {share['mean']:.3f} ({share['p10']:.3f} to {share['p90']:.3f}) of {base:.2f} ms"
    if device.type == "cuda":
        figures["peak bytes, bare"] = peak_of(bare.step)
        figures["peak bytes"] = peak_of(lambda: [rig.step() for _ in range(effort.calls)])
        shown += f", {(figures['peak bytes'] - figures['peak bytes, bare']) / 1e6:+.1f} MB"
    if of["network"] == BIG and of["who"] == BARRED:
        figures["bar"] = BAR
        shown += f", the bar of {BAR} is {'kept' if share['median'] <= BAR else 'missed'}"
    found.add({**of, **figures}, shown)


def rigs(
    found: Findings, name: str, size: Size, device: torch.device, execution: str, puts: dict[str, Put], effort: Effort
) -> None:
    """A row for each of what is put on a network of this size. Two networks are held at a time."""
    net = network(size, device)
    of = {"network": name, "execution": execution}
    bare = found.tried(lambda: _run(Rig(net, size, device, execution)), **of, who="bare")
    for who, put in puts.items() if bare is not None else ():
        row = {**of, "who": who}

        def measure(put: Put = put, row: dict[str, str] = row) -> None:
            measured(found, bare, Rig(net, size, device, execution, put), device, effort, row)

        found.tried(measure, **row)
        released()


def _run(rig: Rig) -> Rig:
    rig.step()
    return rig


def released() -> None:
    """Frees what nobody holds any more, so that the next network finds room."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def training(found: Findings, device: torch.device, quick: bool, name: str = SMALL, execution: str = "eager") -> None:
    """Every variant on one network; quick: on a tiny one, of which one variant is compiled."""
    if execution == "compiled" and not CAPTURES_IN_GRAPHS:
        found.leave_out(f"torch {torch.__version__}: monitors record in its graphs from 2.13 on", network=name, execution=execution)
        return
    if quick:
        puts = VARIANTS if execution == "eager" else {BARRED: VARIANTS[BARRED]}
        rigs(found, "tiny", TINY, device, execution, puts, QUICK)
    else:
        rigs(found, name, SIZES[name], device, execution, VARIANTS, BIG_EFFORT if name == BIG else EFFORT)
    torch.compiler.reset()
    released()
