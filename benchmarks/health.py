"""What `presets.health()` costs a training: steps that record, steps between them, and a training of 1,000 steps.

Each net is trained beside a copy without a recorder, eager and compiled, on the same batches. Losses and parameters must be the
same to the bit, and a compiled net must be one graph: otherwise this raises. Inductor fuses other operations if outputs are
recorded: what it compiles is compared by the backend "aot_eager", which runs the same graphs, and its own difference is told. The
cost of a training is computed from the medians of its steps, and measured by a whole training in turn. Time is that of the
processor, so that other programs disturb less: give one thread if the machine is busy.
Run: python benchmarks/health.py [--threads 2] [--nets MLP ViT decoder]
"""

from __future__ import annotations

import argparse
import copy
import time
import warnings
from collections.abc import Callable
from typing import Any

import torch
from compiled import Block, separate
from measure import spread, write
from torch import Tensor, nn
from torch._dynamo.utils import counters

from recorders import Recorder, presets
from recorders.watch.diagnosis.steps import Early

STEPS = 1000
SHORT = 300
"""The steps of the trainings that are measured as a whole."""
TURNS = 1
"""How often each of these is measured."""
SAME = 6
"""The steps of the trainings whose losses and parameters are compared."""

Row = dict[str, Any]
Batches = list[tuple[Tensor, Tensor]]


class Vision(nn.Module):
    """A vision transformer: patches, blocks and a head."""

    def __init__(self, width: int = 128, blocks: int = 3, patches: int = 64) -> None:
        super().__init__()
        self.patch = nn.Conv2d(3, width, 4, stride=4)
        self.position = nn.Parameter(0.02 * torch.randn(patches, width))
        layer = nn.TransformerEncoderLayer(width, 4, 4 * width, dropout=0.1, activation="gelu", batch_first=True, norm_first=True)
        self.blocks = nn.TransformerEncoder(layer, blocks, enable_nested_tensor=False)
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, 10)

    def forward(self, x: Tensor) -> Tensor:
        tokens = self.patch(x).flatten(2).transpose(1, 2) + self.position
        logits: Tensor = self.head(self.norm(self.blocks(tokens)).mean(1))
        return logits


class Decoder(nn.Module):
    """A decoder: token and position embeddings, blocks with causal attention and a head."""

    def __init__(self, width: int = 128, blocks: int = 4, length: int = 64, tokens: int = 512) -> None:
        super().__init__()
        self.token, self.position = nn.Embedding(tokens, width), nn.Embedding(length, width)
        self.blocks = nn.Sequential(*(Block(width, 4) for _ in range(blocks)))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, tokens, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.head(self.norm(self.blocks(self.token(x) + self.position(torch.arange(x.shape[1])))))
        return logits.flatten(0, 1)


def mlp() -> tuple[nn.Module, Batches]:
    net = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU(), nn.Dropout(0.1), nn.Linear(256, 10))
    return net, [(torch.randn(64, 64), torch.randint(10, (64,))) for _ in range(8)]


def vit() -> tuple[nn.Module, Batches]:
    return Vision(), [(torch.randn(4, 3, 32, 32), torch.randint(10, (4,))) for _ in range(8)]


def decoder() -> tuple[nn.Module, Batches]:
    batches = [torch.randint(512, (8, 65)) for _ in range(8)]
    return Decoder(), [(batch[:, :-1], batch[:, 1:].flatten()) for batch in batches]


NETS = {"MLP": mlp, "ViT": vit, "decoder": decoder}


class Training:
    """A training of one net, with or without a recorder, that can be put to any step."""

    def __init__(self, net: nn.Module, batches: Batches, backend: str, recorded: bool) -> None:
        self.net, self.batches, self.steps = copy.deepcopy(net), batches, 0
        self.optimizer = torch.optim.AdamW(self.net.parameters(), lr=1e-3)
        self.recorder: Recorder | None = presets.health().modules(self.net).register() if recorded else None
        call = separate(self.net)
        self.call: Callable[[Tensor], Tensor] = torch.compile(call, fullgraph=True, backend=backend) if backend else call

    def step(self) -> Tensor:
        inputs, target = self.batches[self.steps % len(self.batches)]
        self.steps += 1
        self.optimizer.zero_grad()
        loss = nn.functional.cross_entropy(self.call(inputs), target)
        torch.autograd.backward(loss)
        self.optimizer.step()
        if self.recorder is not None:
            self.recorder.push("loss", loss)
            self.recorder.push("target", target)
        return loss

    def run(self, steps: int) -> list[Tensor]:
        return [self.step().detach() for _ in range(steps)]

    def at(self, step: int) -> Callable[[], object]:
        """A step that the recorder takes for this one."""

        def run() -> None:
            if self.recorder is not None:
                self.recorder.clock.step = step
            self.step()

        return run


def share_recorded(steps: int) -> float:
    """Of the steps of a training those that record."""
    return sum(map(Early(), range(steps))) / steps


def counted(training: Training, steps: int) -> tuple[int, int]:
    """The graphs, and the breaks, that the compiler counts in some steps."""
    counters.clear()
    training.run(steps)
    return counters["stats"]["unique_graphs"], sum(counters["graph_break"].values())


def difference(net: nn.Module, batches: Batches, backend: str, exact: bool) -> float:
    """The largest difference of a loss between a training with a recorder and one without.

    Args:
        exact: raise an error if losses or parameters differ in any bit.
    """
    torch.compiler.reset()
    bare, recorded = (Training(net, batches, backend, recorded) for recorded in (False, True))
    losses = []
    for training in (bare, recorded):
        torch.manual_seed(1)  # dropout
        losses.append(training.run(SAME))
    same = [torch.equal(*pair) for pair in zip(*losses, strict=True)]
    same += [torch.equal(*pair) for pair in zip(bare.net.parameters(), recorded.net.parameters(), strict=True)]
    if exact and not all(same):
        raise RuntimeError("recording has changed the training")
    return float((torch.stack(losses[0]) - torch.stack(losses[1])).abs().max())


def in_turn(steps: dict[str, Callable[[], object]], rounds: int) -> dict[str, dict[str, float]]:
    """The milliseconds of the processor that steps take in turn."""
    spent: dict[str, list[float]] = {name: [] for name in steps}
    for _ in range(rounds):
        for name, step in steps.items():
            started = time.process_time()
            step()
            spent[name].append(1e3 * (time.process_time() - started))
    return {name: spread(times) for name, times in spent.items()}


def trainings(net: nn.Module, batches: Batches, backend: str, steps: int) -> list[float]:
    """How much longer trainings with a recorder take than those without, each pair in turn."""
    found = []
    for _ in range(TURNS):
        pair = [Training(net, batches, backend, recorded) for recorded in (False, True)]
        seconds = [0.0, 0.0]
        for training in pair:
            training.run(2)  # what is compiled, is now
            if training.recorder is not None:
                training.recorder.reset()
                training.recorder.clock.step = 0
        for _ in range(0, steps, 10):  # by ten steps in turn: a drifting machine slows both alike
            for which, training in enumerate(pair):
                started = time.process_time()
                training.run(10)
                seconds[which] += time.process_time() - started
        found.append(seconds[1] / seconds[0] - 1)
    return found


def row(name: str, backend: str) -> Row:
    torch.manual_seed(0)
    net, batches = NETS[name]()
    difference(net, batches, "aot_eager" if backend else "", exact=True)
    off = difference(net, batches, backend, exact=not backend)
    torch.compiler.reset()
    bare, recorded = (Training(net, batches, backend, recorded) for recorded in (False, True))
    recorder = recorded.recorder
    assert recorder is not None
    bare.run(1)
    graphs, breaks = counted(recorded, 3)
    if breaks or (backend and graphs != 1):
        raise RuntimeError(f"{name}: {graphs} graphs, {breaks} breaks")
    recorded.run(Early().first)  # later steps find hooks that may be taken out
    recorder.clock.step = 66
    idle = in_turn({"bare": bare.step, "idle": recorded.step}, 40)  # fewer than are idle in a row
    times = in_turn({"bare": bare.step, "recorded": recorded.at(5)}, 60)
    extra = times["recorded"]["median"] / times["bare"]["median"] - 1
    rest = idle["idle"]["median"] / idle["bare"]["median"] - 1
    share = share_recorded(STEPS)
    whole = trainings(net, batches, backend, SHORT) if not backend else []
    short = share_recorded(SHORT)
    found: Row = {
        "net": name,
        "execution": "compiled" if backend else "eager",
        "ms": times,
        "ms between": idle,
        "recorded / bare": 1 + extra,
        "idle / bare": 1 + rest,
        "training, computed": share * extra + (1 - share) * rest,
        "short training, computed": short * extra + (1 - short) * rest,
        "short trainings, measured": whole,
        "graph breaks": breaks,
        "largest difference of a loss": off,
    }
    print(
        f"{name:8} {found['execution']:9} bare {times['bare']['median']:7.2f} ms, "
        f"recorded x {1 + extra:.2f}, idle x {1 + rest:.3f}; "
        f"{STEPS} steps {found['training, computed']:+.1%}; {SHORT} steps {found['short training, computed']:+.1%} computed, "
        f"{', '.join(f'{one:+.1%}' for one in whole) or 'not'} measured",
        flush=True,
    )
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--nets", nargs="*", default=list(NETS))
    chosen = parser.parse_args()
    warnings.filterwarnings("ignore", module="torch")  # the compiler's own, about the machine
    torch.set_num_threads(chosen.threads)
    rows = [row(name, backend) for name in chosen.nets for backend in ("", "inductor")]
    if chosen.nets == list(NETS):
        write("health", rows=rows, steps=STEPS, short=SHORT, recorded=share_recorded(STEPS))


if __name__ == "__main__":
    main()
