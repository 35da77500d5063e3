"""Planted cases of faults that runs of the net show: `RELATIONS`, by kind, and the healthy trainings like them."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

__all__ = ["LIKE", "RELATIONS", "Reader"]

TOKENS, LENGTH, WIDTH, BATCH = 8, 10, 16, 32


class Reader(nn.Module):
    """Reads tokens by attention and classifies the text, or each position of it; attributes plant faults in it."""

    def __init__(self, outputs: int = TOKENS, *, pooled: bool = False, causal: bool = False) -> None:
        super().__init__()
        self.embedding = nn.Embedding(TOKENS, WIDTH)
        self.positions = nn.Parameter(torch.randn(LENGTH, WIDTH))
        self.query, self.key, self.value = (nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.head = nn.Linear(WIDTH, outputs)
        self.pooled, self.causal, self.inverted = pooled, causal, False
        self.scale: float | None = WIDTH**-0.5
        self.place_scale = 1.0

    def forward(self, tokens: Tensor, padding: Tensor | None = None) -> Tensor:
        x = self.embedding(tokens) + self.place_scale * self.positions
        scores = self.query(x) @ self.key(x).transpose(1, 2)
        if self.scale is not None:
            scores = scores * self.scale
        if self.causal:
            scores = scores.masked_fill(torch.ones(LENGTH, LENGTH, dtype=torch.bool).triu(1), -torch.inf)
        kept = torch.ones_like(tokens, dtype=torch.bool) if padding is None else padding if self.inverted else ~padding
        x = x + scores.masked_fill(~kept[:, None], -torch.inf).softmax(2) @ self.value(x)
        if self.pooled:
            x = (x * kept[:, :, None]).sum(1) / kept.sum(1, keepdim=True)
        logits: Tensor = self.head(x)
        return logits


class Padded(nn.Module):
    """Gives a reader the tokens of texts of which zeros are the padding."""

    def __init__(self) -> None:
        super().__init__()
        self.reader = Reader(4, pooled=True)

    def forward(self, batch: dict[str, Tensor]) -> Tensor:
        logits: Tensor = self.reader(batch["tokens"], batch["padding"])
        return logits


class WithConfig(nn.Module):
    """A causal reader of which a configuration says that it has one weight for the tokens it reads and those it predicts."""

    def __init__(self, *, tied: bool) -> None:
        super().__init__()
        self.reader, self.config = Reader(causal=True), SimpleNamespace(tie_word_embeddings=True)
        nn.init.normal_(self.reader.embedding.weight, std=0.25)
        if tied:
            self.reader.head.weight = self.reader.embedding.weight

    def get_input_embeddings(self) -> nn.Module:
        return self.reader.embedding

    def get_output_embeddings(self) -> nn.Module:
        return self.reader.head

    def forward(self, tokens: Tensor) -> Tensor:
        logits: Tensor = self.reader(tokens)
        return logits


def texts(step: int) -> Tensor:
    """Texts that count on, by one in half of them and by two in the others."""
    random = torch.Generator().manual_seed(step)
    start, by = torch.randint(TOKENS, (BATCH, 1), generator=random), torch.randint(1, 3, (BATCH, 1), generator=random)
    return (start + by * torch.arange(LENGTH + 1)) % TOKENS


def language(setup: Any) -> None:
    """A causal net that predicts the next token."""
    setup.net, setup.rate = Reader(causal=True), 1e-2
    setup.batch = lambda step: (texts(step)[:, :-1], texts(step)[:, 1:])
    setup.loss = lambda output, target: F.cross_entropy(output.flatten(0, 1), target.flatten())
    setup.shows_example = True


def classes(setup: Any) -> None:
    """A net that tells by which step texts count."""
    setup.net, setup.rate = Reader(4, pooled=True), 1e-2
    setup.batch = lambda step: (texts(step)[:, :-1], (texts(step)[:, 1] - texts(step)[:, 0]) % TOKENS)
    setup.shows_example = True


def begun(setup: Any) -> None:
    """A net that has only begun to tell by which step texts count."""
    classes(setup)
    setup.rate = 1e-3


def by_position(setup: Any) -> None:
    """A net that tells at each position by which step texts count."""
    setup.net, setup.rate = Reader(4), 1e-2
    setup.batch = lambda step: (texts(step)[:, :-1], (texts(step).diff() % TOKENS))
    setup.loss = lambda output, target: F.cross_entropy(output.transpose(1, 2), target)
    setup.shows_example = True


def log_shares(setup: Any, axis: int = 2) -> None:
    """The same, by a net that returns logarithms of probabilities."""
    by_position(setup)
    setup.net = nn.Sequential(setup.net, nn.LogSoftmax(axis))
    setup.loss = lambda output, target: F.nll_loss(output.transpose(1, 2), target)


def gaps(setup: Any) -> None:
    """A net that fills in tokens that were taken out of texts."""

    def batch(step: int) -> tuple[Tensor, Tensor]:
        tokens = texts(step)[:, :-1]
        out = torch.rand(tokens.shape, generator=torch.Generator().manual_seed(step)) < 0.2
        return tokens.masked_fill(out, TOKENS), tokens.masked_fill(~out, -100)

    setup.net, setup.batch, setup.rate, setup.shows_example = Reader(), batch, 1e-2, True
    setup.net.embedding = nn.Embedding(TOKENS + 1, WIDTH)
    setup.loss = lambda output, target: F.cross_entropy(output.flatten(0, 1), target.flatten())


def padded(setup: Any) -> None:
    """A net that tells by which step texts of several lengths count."""

    def batch(step: int) -> tuple[dict[str, Tensor], Tensor]:
        tokens = texts(step)
        lengths = torch.randint(5, LENGTH, (BATCH, 1), generator=torch.Generator().manual_seed(step))
        padding = torch.arange(LENGTH) >= lengths
        return {"tokens": tokens[:, :-1], "padding": padding}, (tokens[:, 1] - tokens[:, 0]) % TOKENS

    setup.net, setup.batch, setup.rate, setup.shows_example = Padded(), batch, 1e-2, True


def vectors(setup: Any) -> None:
    """The healthy training, with an example."""
    setup.shows_example = True


class InEvaluationToo(nn.Module):
    """A dropout that does not ask for the mode."""

    def forward(self, x: Tensor) -> Tensor:
        return F.dropout(x, 0.1)


class Keeping(nn.Module):
    """Adds some of what came in the call before."""

    def __init__(self) -> None:
        super().__init__()
        self.state: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        found = x if self.state is None else x + 0.5 * self.state
        self.state = found.detach()
        return found


class FirstThree(nn.Module):
    """Reads three of the features."""

    def __init__(self) -> None:
        super().__init__()
        self.read = nn.Linear(3, 24)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.read(x[:, :3])
        return found


class LowRank(nn.Linear):
    """A linear layer of 24 units that reads 24 others by a few numbers."""

    def __init__(self, rank: int) -> None:
        super().__init__(rank, 24)
        self.read = nn.Parameter(torch.randn(rank, 24) / 24**0.5)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x @ self.read.T)


class HalfDetached(nn.Module):
    """Hands on what it reads, half of it without a graph."""

    def forward(self, x: Tensor) -> Tensor:
        first, second = x.chunk(2, 1)
        return torch.cat((first.detach(), second), 1)


def hidden() -> nn.Module:
    return nn.Sequential(nn.Linear(24, 24), nn.ReLU())


def deeper(setup: Any) -> None:
    """The healthy training, of a net with more hidden layers."""
    layer(setup, 3, lambda: nn.Sequential(*(hidden() for _ in range(3))))
    del setup.net[4]


def one_layer_thrice(setup: Any) -> None:
    deeper(setup)
    setup.net[3] = nn.Sequential(*[hidden()] * 3)


def layer(setup: Any, place: int, make: Callable[[], nn.Module]) -> None:
    vectors(setup)
    setup.net[place] = make()


def attribute(setup: Any, task: Callable[[Any], None], name: str, value: Any) -> None:
    task(setup)
    setattr(setup.net.reader if task is padded else setup.net, name, value)


def target_not_ahead(setup: Any) -> None:
    language(setup)
    setup.batch = lambda step: (texts(step)[:, :-1],) * 2


def dropout_last(setup: Any) -> None:
    vectors(setup)
    setup.net.append(nn.Dropout(0.5))


def reshaped(setup: Any) -> None:
    by_position(setup)
    setup.loss = lambda output, target: F.cross_entropy(output.reshape(BATCH, -1, LENGTH), target)


def shifted_twice(setup: Any) -> None:
    language(setup)
    setup.loss = lambda output, target: F.cross_entropy(output[:, :-1].flatten(0, 1), target[:, 1:].flatten())


def tied(setup: Any) -> None:
    """A causal net with one weight for the tokens it reads and those it predicts."""
    language(setup)
    setup.net = WithConfig(tied=True)


def untied(setup: Any) -> None:
    tied(setup)
    setup.net = WithConfig(tied=False)


RELATIONS: dict[str, Callable[[Any], Any]] = {
    "samples-mix": partial(layer, place=1, make=lambda: nn.Softmax(0)),
    "random-in-evaluation": partial(layer, place=2, make=InEvaluationToo),
    "carries-state": partial(layer, place=2, make=Keeping),
    "ignores-inputs": partial(layer, place=0, make=FirstThree),
    "gradient-cut": partial(layer, place=2, make=HalfDetached),
    "sees-the-future": partial(attribute, task=language, name="causal", value=False),
    "targets-are-inputs": target_not_ahead,
    "mask-inverted": partial(attribute, task=padded, name="inverted", value=True),
    "order-has-no-effect": partial(attribute, task=classes, name="place_scale", value=0.0),
    "attention-saturated": partial(attribute, task=classes, name="scale", value=1000.0),
    "attention-uniform": partial(attribute, task=classes, name="scale", value=1e-9),
    "attention-unscaled": partial(attribute, task=begun, name="scale", value=None),
    "repeated-layer": one_layer_thrice,
    "one-direction": partial(layer, place=3, make=lambda: LowRank(1)),
    "dropout-on-outputs": dropout_last,
    "softmax-axis": partial(log_shares, axis=1),
    "outputs-reshaped": reshaped,
    "targets-displaced": shifted_twice,
    "sees-only-the-past": partial(attribute, task=gaps, name="causal", value=True),
    "untied-weights": untied,
}
"""By kind, what plants it in a `Setup`."""

LIKE: dict[str, Callable[[Any], Any]] = {
    "samples-mix": vectors,
    "random-in-evaluation": vectors,
    "carries-state": vectors,
    "ignores-inputs": vectors,
    "gradient-cut": vectors,
    "sees-the-future": language,
    "targets-are-inputs": language,
    "mask-inverted": padded,
    "order-has-no-effect": classes,
    "attention-saturated": classes,
    "attention-uniform": classes,
    "attention-unscaled": begun,
    "repeated-layer": deeper,
    "one-direction": vectors,
    "dropout-on-outputs": vectors,
    "softmax-axis": log_shares,
    "outputs-reshaped": by_position,
    "targets-displaced": language,
    "sees-only-the-past": gaps,
    "untied-weights": tied,
}
"""By kind, what makes a `Setup` the healthy training that is most like it."""
