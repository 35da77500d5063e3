"""Six trainings on signals, sequences and grids, from a temporal convolutional net to a VQ code, with mistakes typical of each."""

from __future__ import annotations

import copy
import math
import types
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import Optimizer

from benchmarks.diagnosis.later import LAST, last
from benchmarks.diagnosis.programs.data import accuracy, batches, generator, r2
from benchmarks.diagnosis.training import Training, fault

__all__: list[str] = []


def inputs_changed(training: Training, change: Callable[[int, Any], Any]) -> None:
    """Changes the inputs of the training, by the number of the batch and the inputs, and not those of the test."""
    batch = training.batch

    def changed(number: int) -> tuple[Any, Any]:
        """The batch with other inputs."""
        x, y = batch(number)
        return change(number, x), y

    training.batch = changed


def targets_changed(training: Training, change: Callable[[Any], Any]) -> None:
    """Changes the targets of the training, and not those of the test."""
    batch = training.batch

    def changed(number: int) -> tuple[Any, Any]:
        """The batch with other targets."""
        x, y = batch(number)
        return x, change(y)

    training.batch = changed


def cross_entropy(net: nn.Module, x: Any, y: Tensor) -> Tensor:
    """The cross entropy of logits."""
    return F.cross_entropy(net(x), y)


def one_cycle(step: int, steps: int) -> float:
    """A linear warm-up of a tenth of the steps, and a cosine to nothing."""
    first = steps // 10
    return (step + 1) / first if step < first else 0.5 + 0.5 * math.cos(math.pi * (step - first) / (steps - first))


# A temporal convolutional net that marks events in signals


def recordings(count: int, seed: int) -> tuple[Tensor, Tensor]:
    """Returns signals (count, 96, 3), and 1 where a bump of the second follows a rising chirp of the first, else 0."""
    random = generator(seed)
    x = 0.4 * torch.randn(count, 96, 3, generator=random)
    x[:, :, 2] += torch.sin(torch.arange(96) * 0.7 + 6.3 * torch.rand(count, 1, generator=random))
    y = torch.zeros(count, 96)
    times = torch.arange(12.0)
    chirp, bump = 1.6 * torch.sin(0.4 * times + 0.08 * times.square()), 1.6 * torch.exp(-(times - 4).square() / 6)
    kinds = torch.randint(4, (count, 2), generator=random).tolist()
    starts = torch.randint(0, 8, (count, 2), generator=random).tolist()
    gaps = torch.randint(18, 26, (count, 2), generator=random).tolist()
    for row in range(count):
        for slot in range(2):
            kind, start = kinds[row][slot], 48 * slot + starts[row][slot]
            end = start + gaps[row][slot]
            if kind != 1:
                x[row, start : start + 12, 0] += chirp if kind else chirp.flip(0)
            if kind != 2:
                x[row, end : end + 12, 1] += bump
            y[row, end + 4 : end + 14] = float(kind == 3)
    return x, y


class TemporalBlock(nn.Module):
    """Two causal dilated convolutions, and what goes past them."""

    def __init__(self, width: int, dilation: int) -> None:
        super().__init__()
        self.pad = nn.ConstantPad1d((2 * dilation, 0), 0.0)
        self.conv1 = nn.Conv1d(width, width, 3, dilation=dilation)
        self.conv2 = nn.Conv1d(width, width, 3, dilation=dilation)
        self.dropout = nn.Dropout(0.1)

    def forward(self, x: Tensor) -> Tensor:
        """Returns the signals after the block."""
        inner = self.dropout(torch.relu(self.conv1(self.pad(x))))
        changed: Tensor = torch.relu(x + self.dropout(torch.relu(self.conv2(self.pad(inner)))))
        return changed


class TemporalNet(nn.Module):
    """A mixing of channels, four blocks with dilations of 1 to 8, and a logit for each time."""

    def __init__(self) -> None:
        super().__init__()
        self.mix = nn.Conv1d(3, 24, 1)
        self.blocks: Any = nn.Sequential(*(TemporalBlock(24, 2**level) for level in range(4)))
        self.head = nn.Conv1d(24, 1, 1)

    def forward(self, x: Tensor) -> Tensor:
        """Returns the logits, (batch, 1, times)."""
        x = self.mix(x.transpose(1, 2))
        for block in self.blocks:
            x = block(x)
        logits: Tensor = self.head(x)
        return logits


def event_loss(net: nn.Module, x: Any, y: Tensor) -> Tensor:
    """Binary cross entropy, with more weight on the rare times of events."""
    return F.binary_cross_entropy_with_logits(net(x).squeeze(1), y, pos_weight=torch.tensor(3.0))


def times_caught(net: nn.Module, x: Any, y: Tensor) -> float:
    """The harmonic mean of precision and recall of the times within events."""
    logits = net(x).squeeze(1)
    if not bool(logits.isfinite().all()):
        return math.nan
    said = logits > 0
    return float(2 * (said & (y == 1)).sum() / (said.sum() + y.sum()))


@last(learns=0.7, chance=0.1)
def event_tcn(seed: int) -> Training:
    """A temporal convolutional net that says at each time whether an event is on."""
    torch.manual_seed(seed)
    (x, y), (test_x, test_y) = recordings(1500, 1), recordings(300, 2)
    score = partial(times_caught, x=test_x, y=test_y)
    return Training(TemporalNet(), batches(x, y, 32, seed), event_loss, score, rate=3e-3, steps=160)


@fault(LAST["event-tcn"].faults, "architecture", "bottleneck", ("blocks", ""))
def dilations_forgotten(training: Training) -> tuple[str, ...]:
    """The dilation is not handed on to the convolutions, so that the net sees 17 times and the events take 40."""
    net: Any = training.net
    for block in net.blocks:
        block.pad.padding = (2, 0)
        block.conv1.dilation = block.conv2.dilation = (1,)
    inner = [f"blocks.{number}" for number in range(4)]
    return ("blocks", "", "head", *inner, *(f"{name}.{conv}" for name in inner for conv in ("conv1", "conv2")))


@fault(LAST["event-tcn"].faults, "architecture", ("initialisation", "exploding-gradients", "outliers"))
def weights_of_spread_one(training: Training) -> tuple[str, ...]:
    """The convolutions start from normal_(0, 1) instead of normal_(0, 0.01)."""
    names = [name for name, module in training.net.named_modules() if isinstance(module, nn.Conv1d) and "blocks" in name]
    for name in names:
        conv: Any = training.net.get_submodule(name)
        nn.init.normal_(conv.weight, 0.0, 1.0)
    return ("", "blocks", *(f"blocks.{number}" for number in range(4)), *names)


@fault(LAST["event-tcn"].faults, "optimisation", ("wrong-loss", "ascent"))
def focal_factor_the_wrong_way(training: Training) -> None:
    """The factor of a focal loss is a power of the probability of the right answer, not of the wrong one."""

    def focal(net: nn.Module, x: Any, y: Tensor) -> Tensor:
        """A focal loss in which hard times count least."""
        logits = net(x).squeeze(1)
        right = torch.where(y == 1, logits.sigmoid(), (-logits).sigmoid())
        return (right.square() * F.binary_cross_entropy_with_logits(logits, y, reduction="none")).mean()

    training.loss = focal


@fault(LAST["event-tcn"].faults, "optimisation", "broadcast")
def channel_not_squeezed(training: Training) -> None:
    """The loss written by hand takes logits with a channel and targets without, so that all signals meet all targets."""

    def crossed(net: nn.Module, x: Any, y: Tensor) -> Tensor:
        """Binary cross entropy of each signal with the targets of all."""
        logits = net(x)
        return -(3 * y * F.logsigmoid(logits) + (1 - y) * F.logsigmoid(-logits)).mean()

    training.loss = crossed


@fault(LAST["event-tcn"].faults, "data", "labels-do-not-fit")
def onsets_in_ticks_of_another_rate(training: Training) -> None:
    """The signals were resampled and the marks were not, which stand at two thirds of the right time."""
    rows = (torch.arange(96) * 3) // 2

    def stretched(y: Tensor) -> Tensor:
        """The marks at the times of the old rate."""
        return torch.cat((y, torch.zeros_like(y)), 1)[:, rows]

    targets_changed(training, stretched)


@fault(LAST["event-tcn"].faults, "state", "weights-overwritten", ("", "blocks", "mix", "head"))
def max_norm_of_all_weights(training: Training) -> tuple[str, ...]:
    """The norm of whole weights is cut to a quarter in each step, a constraint that was meant for the filters of one layer."""

    def constrain(training: Training, optimizer: Optimizer, step: int) -> None:
        """Scales each weight down to a norm of a quarter."""
        for parameter in training.net.parameters():
            norm = parameter.detach().norm()
            if norm > 0.25:
                parameter.data.mul_(0.25 / norm)

    training.before_step.append(constrain)
    return tuple(name for name, _ in training.net.named_modules())


# A masked autoencoder on patches of signals


def waves(count: int, seed: int) -> Tensor:
    """Returns signals of two sines that start late and end early, as 16 patches of 8 values."""
    random = generator(seed)
    a, b, c, d, start, end = torch.rand(6, count, 1, generator=random).unbind(0)
    times = torch.arange(128) / 128
    x = torch.sin(6.3 * ((1 + 2 * a) * times + b)) + 0.7 * torch.sin(6.3 * ((3 + 2 * a) * times + c)) + d - 0.5
    x = x + 0.05 * torch.randn(count, 128, generator=random)
    silent = (times < 0.25 * start) | (times >= 1 - 0.25 * end)
    return x.masked_fill(silent, 0.0).reshape(count, 16, 8)


def stack(width: int, layers: int, batch_first: bool = True) -> nn.TransformerEncoder:
    """Returns layers of a transformer with the normalisation before each part."""
    layer = nn.TransformerEncoderLayer(width, 4, 2 * width, 0.0, batch_first=batch_first, norm_first=True)
    return nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)


class MaskedPatches(nn.Module):
    """An encoder of the half of the patches that is shown, and a decoder that fills the rest in."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.places = nn.Linear(8, 48), nn.Embedding(16, 48)
        self.encoder = stack(48, 2)
        self.to_decoder, self.decoder_places = nn.Linear(48, 32), nn.Embedding(16, 32)
        self.blank = nn.Parameter(torch.zeros(32))
        self.decoder = stack(32, 1)
        self.head = nn.Linear(32, 8)

    def filled(self, shown: Tensor, order: Tensor) -> Tensor:
        """Returns the encoded patches at their places, with the blank at all others."""
        blanks = self.blank.expand(len(order), 16 - shown.shape[1], -1)
        back = order.argsort(1)[:, :, None].expand(-1, -1, 32)
        return torch.cat((self.to_decoder(shown), blanks), 1).gather(1, back)

    def forward(self, given: tuple[Tensor, Tensor]) -> Tensor:
        """Returns all patches, of patches and an order of which the first half are shown."""
        patches, order = given
        places = order[:, :8]
        shown = torch.take_along_dim(patches, places[:, :, None], 1)
        states = self.encoder(self.embed(shown) + self.places(places))
        states = self.filled(states, order)
        states = states + self.decoder_places(torch.arange(16))
        made: Tensor = self.head(self.decoder(states))
        return made


def hidden(patches: Tensor, order: Tensor) -> Tensor:
    """The patches that are not shown."""
    return torch.take_along_dim(patches, order[:, 8:, None], 1)


def hidden_loss(net: nn.Module, x: Any, y: Tensor) -> Tensor:
    """The mean squared error of the patches that are not shown."""
    return F.mse_loss(hidden(net(x), x[1]), hidden(y, x[1]))


def hidden_r2(net: nn.Module, x: Any, y: Tensor) -> float:
    """The share of the variance of hidden patches that is explained."""
    errors, values = hidden(net(x) - y, x[1]), hidden(y, x[1])
    return float(1 - errors.square().mean() / (values - values.mean()).square().mean())


@last(learns=0.6, chance=0.0)
def masked_patches(seed: int) -> Training:
    """A masked autoencoder that fills in the half of the patches of a signal, with warm-up and cosine."""
    torch.manual_seed(seed)
    x, test = waves(3000, 1), waves(400, 2)
    plain = batches(x, x, 64, seed)

    def masked(number: int) -> tuple[Any, Tensor]:
        """The batch with an order of the patches of each signal."""
        patches, y = plain(number)
        return (patches, torch.rand(len(y), 16, generator=generator(seed * 1009 + number)).argsort(1)), y

    order = torch.rand(400, 16, generator=generator(3)).argsort(1)
    score = partial(hidden_r2, x=(test, order), y=test)
    return Training(MaskedPatches(), masked, hidden_loss, score, rate=4e-3, schedule=one_cycle, clip=1.0, steps=300)


@fault(
    LAST["masked-patches"].faults,
    "architecture",
    ("never-ran", "inputs-constant", "symmetry"),
    ("decoder_places", "decoder", "decoder.layers.0", "head", ""),
)
def decoder_without_places(training: Training) -> None:
    """The decoder does not add its embedding of places, so that all blanks of a signal are the same to it."""
    net: Any = training.net

    def forward(self: Any, given: tuple[Tensor, Tensor]) -> Tensor:
        """Returns all patches, from blanks that do not know where they stand."""
        patches, order = given
        places = order[:, :8]
        shown = torch.take_along_dim(patches, places[:, :, None], 1)
        states = self.encoder(self.embed(shown) + self.places(places))
        made: Tensor = self.head(self.decoder(self.filled(states, order)))
        return made

    net.forward = types.MethodType(forward, net)


@fault(
    LAST["masked-patches"].faults,
    "architecture",
    "wrong-axis",
    ("encoder", "encoder.layers.0", "encoder.layers.1", "decoder", "decoder.layers.0", ""),
)
def attends_to_other_signals(training: Training) -> tuple[str, ...]:
    """The transformer layers were made without batch_first, so that patches attend to those of other signals."""
    net: Any = training.net
    net.encoder, net.decoder = stack(48, 2, batch_first=False), stack(32, 1, batch_first=False)
    inner = [f"encoder.layers.{number}" for number in range(2)] + ["decoder.layers.0"]
    return ("", "encoder", "decoder", *inner, *(f"{name}.self_attn" for name in inner))


@fault(LAST["masked-patches"].faults, "optimisation", ("wrong-loss", "mask"))
def loss_of_the_shown(training: Training) -> None:
    """The mask is 1 for patches that are shown, and the loss is multiplied with it as if it were 1 for hidden ones."""

    def shown(net: nn.Module, x: Any, y: Tensor) -> Tensor:
        """The mean squared error of the patches that are shown."""
        order = x[1].flip(1)
        return F.mse_loss(hidden(net(x), order), hidden(y, order))

    training.loss = shown


@fault(LAST["masked-patches"].faults, "optimisation", ("schedule", "rate-too-low"))
def cosine_of_epochs_stepped_per_batch(training: Training) -> None:
    """The cosine was laid out for ten epochs of steps, and is stepped in each batch as if they were batches."""
    training.schedule = lambda step, steps: 0.5 + 0.5 * math.cos(math.pi * min(step / 10, 1.0))


@fault(LAST["masked-patches"].faults, "data", ("nonfinite", "nonfinite-inputs"))
def patches_divided_by_their_spread(training: Training) -> None:
    """The target of a patch is normalised by its own spread, without a small number added, and silent patches have none."""
    targets_changed(training, lambda y: (y - y.mean(2, keepdim=True)) / y.std(2, keepdim=True))


@fault(
    LAST["masked-patches"].faults,
    "state",
    ("silent-corruption", "outliers", "weights-overwritten"),
    ("encoder.layers.1.linear2", "encoder.layers.1", "encoder", "to_decoder"),
)
def bit_of_an_exponent(training: Training) -> None:
    """At step 230 the highest bit of the exponent of one weight of the encoder is flipped."""

    def flip(training: Training, optimizer: Optimizer, step: int) -> None:
        """Flips one bit."""
        if step == 230:
            net: Any = training.net
            weight = net.encoder.layers[1].linear2.weight.data
            weight[5, 7:8].view(torch.int32).bitwise_xor_(torch.tensor(1 << 30, dtype=torch.int32))

    training.before_step.append(flip)


# A transformer that reads a table by a query

KEYS, VALUES, ROWS = 12, 8, 7


def tables(count: int, seed: int) -> tuple[tuple[Tensor, Tensor, Tensor], Tensor]:
    """Returns cells (key, column, value), which of them there are, queries (key, column), and the values asked for."""
    random = generator(seed)
    keys = torch.rand(count, KEYS, generator=random).argsort(1)[:, :ROWS]
    values = torch.randint(VALUES, (count, ROWS, 2), generator=random)
    rows = torch.randint(3, ROWS + 1, (count,), generator=random)
    row = (torch.rand(count, generator=random) * rows).long()
    column = torch.randint(2, (count,), generator=random)
    every = torch.arange(count)
    cells = torch.stack((keys[:, :, None].expand(-1, -1, 2), torch.arange(2).expand(count, ROWS, 2), values), 3).flatten(1, 2)
    real = (torch.arange(ROWS) < rows[:, None]).repeat_interleave(2, 1)
    query = torch.stack((keys[every, row], column), 1)
    return (cells * real[:, :, None], real, query), values[every, row, column]


class CrossAttention(nn.Module):
    """Attention of several heads of a query to the cells that there are."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads, self.axis = heads, 3
        self.q, self.kv, self.out = nn.Linear(width, width), nn.Linear(width, 2 * width), nn.Linear(width, width)

    def forward(self, query: Tensor, cells: Tensor, real: Tensor) -> Tensor:
        """Returns what the query gathers."""
        q, k, v = (part.unflatten(2, (self.heads, -1)).transpose(1, 2) for part in (self.q(query), *self.kv(cells).chunk(2, 2)))
        scores = (q @ k.transpose(2, 3)) * q.shape[3] ** -0.5
        weights = scores.masked_fill(~real[:, None, None], -1e9).softmax(self.axis)
        gathered: Tensor = self.out((weights @ v).transpose(1, 2).flatten(2))
        return gathered


class TableReader(nn.Module):
    """Embeddings of cells and of the query, two rounds of cross-attention and perceptron, and the logits of values."""

    def __init__(self, width: int = 48) -> None:
        super().__init__()
        self.key, self.column, self.value = nn.Embedding(KEYS, width), nn.Embedding(2, width), nn.Embedding(VALUES, width)
        self.asked_key, self.asked_column = nn.Embedding(KEYS, width), nn.Embedding(2, width)
        self.attend = nn.ModuleList(CrossAttention(width, 4) for _ in range(2))
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(4))
        self.cell_norm = nn.LayerNorm(width)
        self.mlps = nn.ModuleList(nn.Sequential(nn.Linear(width, 96), nn.GELU(), nn.Linear(96, width)) for _ in range(2))
        self.head = nn.Linear(width, VALUES)

    def forward(self, given: tuple[Tensor, Tensor, Tensor]) -> Tensor:
        """Returns the logits of the value asked for."""
        cells, real, query = given
        states = self.cell_norm(self.key(cells[:, :, 0]) + self.column(cells[:, :, 1]) + self.value(cells[:, :, 2]))
        x = (self.asked_key(query[:, 0]) + self.asked_column(query[:, 1]))[:, None]
        for number in range(2):
            x = x + self.attend[number](self.norms[2 * number](x), states, real)
            x = x + self.mlps[number](self.norms[2 * number + 1](x))
        logits: Tensor = self.head(x.squeeze(1))
        return logits


@last(learns=0.75, chance=0.125)
def table_reader(seed: int) -> Training:
    """A transformer that looks the value of a key and a column up in a table, by cross-attention."""
    torch.manual_seed(seed)
    (x, y), (test_x, test_y) = tables(20000, 1), tables(1000, 2)
    score = partial(accuracy, x=test_x, y=test_y)
    return Training(TableReader(), batches(x, y, 128, seed), cross_entropy, score, rate=3e-3, steps=300)


@fault(LAST["table-reader"].faults, "architecture", "mask", ("", "attend", "attend.0", "attend.1"))
def mask_of_another_meaning(training: Training) -> None:
    """The mask is true for cells that there are, and is filled in as if it were true for the padding."""
    net: Any = training.net
    before = net.forward

    def forward(self: nn.Module, given: tuple[Tensor, Tensor, Tensor]) -> Tensor:
        """Returns the logits of attention to the padding."""
        cells, real, query = given
        logits: Tensor = before((cells, ~real, query))
        return logits

    net.forward = types.MethodType(forward, net)


@fault(LAST["table-reader"].faults, "architecture", "wrong-axis", ("attend", "attend.0", "attend.1", ""))
def softmax_over_the_queries(training: Training) -> None:
    """The softmax of the scores is along the queries, of which there is one, and not along the cells."""
    net: Any = training.net
    for attention in net.attend:
        attention.axis = 2


@fault(LAST["table-reader"].faults, "optimisation", ("epsilon", "rate-too-low"))
def epsilon_of_inception(training: Training) -> None:
    """The optimizer has the epsilon of 1, which documentation recommends for another network."""
    training.optimizer = lambda parameters, rate: torch.optim.Adam(parameters, lr=rate, eps=1.0)


@fault(LAST["table-reader"].faults, "data", ("noise", "labels-do-not-fit"))
def vocabulary_of_a_set(training: Training) -> None:
    """The numbers of the words of queries come from a set, which has another order in each worker that loads a batch."""

    def renumbered(number: int, x: Any) -> Any:
        """The batch with the keys of queries numbered anew."""
        cells, real, query = x
        order = torch.randperm(KEYS, generator=generator(number))
        return cells, real, torch.stack((order[query[:, 0]], query[:, 1]), 1)

    inputs_changed(training, renumbered)


@fault(LAST["table-reader"].faults, "data", "repeated-batches")
def loader_made_anew_each_step(training: Training) -> None:
    """Each step takes next(iter(loader)) after setting the seed, which is the first batch each time."""
    batch = training.batch
    training.batch = lambda number: batch(0)


@fault(LAST["table-reader"].faults, "state", ("stale-optimizer", "not-in-optimizer", "no-steps"))
def optimizer_of_a_copy(training: Training) -> None:
    """The optimizer was made of the parameters before the net was copied, and the copy is trained."""
    training.parameters = lambda net: copy.deepcopy(net).parameters()


# A keyword spotter on spectrograms

WORDS = torch.tensor([[3, 12], [12, 3], [3, 8], [8, 3], [8, 12], [12, 8], [4, 4], [11, 11]]).float()


def spectrograms(count: int, seed: int) -> tuple[Tensor, Tensor]:
    """Returns powers (count, 1, 16, 32) by pitch and time, nought outside of the words, and which of eight words it is."""
    random = generator(seed)
    word = torch.randint(8, (count,), generator=random)
    start = torch.randint(0, 10, (count, 1), generator=random).float()
    length = torch.randint(14, 22, (count, 1), generator=random).float()
    shift = torch.rand(count, 1, generator=random) * 2 - 1
    loud = torch.exp(torch.randn(count, 1, 1, generator=random))
    place = (torch.arange(32) - start) / length
    on = ((place >= 0) & (place < 1)).float()
    low, high = WORDS[word].unsqueeze(2).unbind(1)
    pitch = low + (high - low) * place + shift
    second = 15 - 0.7 * pitch
    bands = torch.arange(16.0)[:, None]
    power = torch.exp(-(bands - pitch[:, None]).square() / 2) + 0.5 * torch.exp(-(bands - second[:, None]).square() / 2)
    power = loud * power + 0.15 * torch.rand(count, 16, 32, generator=random)
    return (power * on[:, None])[:, None], word


def decibels(power: Tensor, floor: float = 1e-2) -> Tensor:
    """The logarithm of powers above a floor, scaled to about one."""
    return (power + floor).log() / 2 + 1


class KeywordNet(nn.Module):
    """Two convolutions, a GRU along time, and a linear layer on its last state."""

    def __init__(self) -> None:
        super().__init__()
        self.convs = nn.Sequential(
            nn.Conv2d(1, 12, 3, 1, 1),
            nn.BatchNorm2d(12),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Conv2d(12, 16, 3, 1, 1),
            nn.BatchNorm2d(16),
            nn.ReLU(),
            nn.MaxPool2d((2, 1)),
        )
        self.dropout = nn.Dropout(0.1)
        self.gru = nn.GRU(64, 32, batch_first=True)
        self.head = nn.Linear(32, 8)

    def along_time(self, maps: Tensor) -> Tensor:
        """Returns the maps as (batch, times, channels by pitches)."""
        return maps.permute(0, 3, 1, 2).flatten(2)

    def forward(self, x: Tensor) -> Tensor:
        """Returns the logits."""
        states, _ = self.gru(self.dropout(self.along_time(self.convs(x))))
        logits: Tensor = self.head(states[:, -1])
        return logits


def sgd(parameters: Iterable[nn.Parameter], rate: float, momentum: float = 0.9) -> Optimizer:
    """SGD with momentum."""
    return torch.optim.SGD(parameters, lr=rate, momentum=momentum)


@last(learns=0.8, chance=0.125)
def keyword_spotter(seed: int) -> Training:
    """A spotter of keywords by convolutions and a GRU, trained by SGD with momentum."""
    torch.manual_seed(seed)
    (x, y), (test_x, test_y) = spectrograms(2000, 1), spectrograms(500, 2)
    score = partial(accuracy, x=decibels(test_x), y=test_y)
    batch = batches(decibels(x), y, 32, seed)
    return Training(KeywordNet(), batch, cross_entropy, score, rate=0.1, optimizer=sgd, clip=5.0, steps=250)


@fault(LAST["keyword-spotter"].faults, "architecture", "bottleneck", ("", "gru", "head"))
def state_of_the_first_time(training: Training) -> None:
    """The head reads the state of the GRU at the first time, as one reads the first token of a BERT."""
    net: Any = training.net

    def forward(self: Any, x: Tensor) -> Tensor:
        """Returns the logits of a state that has seen the start only."""
        states, _ = self.gru(self.dropout(self.along_time(self.convs(x))))
        logits: Tensor = self.head(states[:, 0])
        return logits

    net.forward = types.MethodType(forward, net)


@fault(LAST["keyword-spotter"].faults, "architecture", "dropout", ("dropout", "", "gru"))
def share_kept_as_share_dropped(training: Training) -> None:
    """The share of 0.95 that is kept was taken over from another framework, where it is now the share that is dropped."""
    net: Any = training.net
    net.dropout.p = 0.95


@fault(LAST["keyword-spotter"].faults, "optimisation", "momentum")
def momentum_of_an_average(training: Training) -> None:
    """The momentum is 0.999, the decay of an average of weights that stood beside it."""
    training.optimizer = partial(sgd, momentum=0.999)


@fault(LAST["keyword-spotter"].faults, "optimisation", "clipping")
def clipped_as_values(training: Training) -> None:
    """Gradients are clipped to a norm of 0.002."""
    training.clip = 2e-3


@fault(LAST["keyword-spotter"].faults, "data", ("nonfinite-inputs", "nonfinite"), ("", "convs", "convs.0"))
def logarithm_without_a_floor(training: Training) -> None:
    """The logarithm of powers is taken without a floor, and some powers are nought."""
    score = training.score
    assert isinstance(score, partial)
    x, y = spectrograms(2000, 1)
    training.batch = batches(decibels(x, 0.0), y, 32, 0)
    training.score = partial(accuracy, x=decibels(spectrograms(500, 2)[0], 0.0), y=score.keywords["y"])


@fault(LAST["keyword-spotter"].faults, "data", ("inputs-constant", "noise"), ("", "convs", "convs.0"))
def time_mask_for_long_speech(training: Training) -> None:
    """The augmentation masks up to 400 times in a row, as for long speech, and these inputs have 32."""

    def masked(number: int, x: Tensor) -> Tensor:
        """The batch with nearly all times masked."""
        random = generator(number)
        start, length = torch.rand(len(x), generator=random) * 4, torch.rand(len(x), generator=random) * 400
        times = torch.arange(32)
        out = (times >= start[:, None]) & (times < (start + length)[:, None])
        return x.masked_fill(out[:, None, None], -1.3)

    inputs_changed(training, masked)


# A small detector of shapes

SHAPES = 3


def scenes(count: int, seed: int) -> tuple[Tensor, Tensor]:
    """Returns images (count, 1, 32, 32) of shapes, and grids (count, 4, 4, 6) of whether one, x, y, width, height and kind."""
    random = generator(seed)
    x = 0.15 * torch.randn(count, 1, 32, 32, generator=random)
    y = torch.zeros(count, 4, 4, 6)
    for row in range(count):
        cells = torch.randperm(16, generator=random)[: 1 + row % 3].tolist()
        for cell in cells:
            down, right = divmod(cell, 4)
            dx, dy, width, height, light = torch.rand(5, generator=random).tolist()
            kind = int(torch.randint(SHAPES, (), generator=random))
            centre_x, centre_y = 8 * (right + 0.2 + 0.6 * dx), 8 * (down + 0.2 + 0.6 * dy)
            half_x, half_y = 2.5 + 2.5 * width, 2.5 + 2.5 * height
            u = (torch.arange(32) + 0.5 - centre_x) / half_x
            v = (torch.arange(32)[:, None] + 0.5 - centre_y) / half_y
            inside = ((u.abs() < 1) & (v.abs() < 1)).float()
            form = (inside, (u.square() + v.square() < 1).float(), inside * ((u.abs() < 0.35) | (v.abs() < 0.35)).float())[kind]
            x[row, 0] = torch.maximum(x[row, 0], form * (0.7 + 0.6 * light))
            y[row, down, right] = torch.tensor(
                [1.0, centre_x / 8 - right, centre_y / 8 - down, half_x / 16, half_y / 16, float(kind)]
            )
    return x, y


class ShapeDetector(nn.Module):
    """Convolutions to a grid of four by four, and for each cell an object's logit, its box, and the logits of its kind."""

    def __init__(self) -> None:
        super().__init__()
        self.backbone = nn.Sequential(
            nn.Conv2d(1, 16, 3, 2, 1),
            nn.BatchNorm2d(16),
            nn.ReLU(),
            nn.Conv2d(16, 32, 3, 2, 1),
            nn.BatchNorm2d(32),
            nn.ReLU(),
            nn.Conv2d(32, 48, 3, 2, 1),
            nn.BatchNorm2d(48),
            nn.ReLU(),
            nn.Conv2d(48, 48, 3, 1, 1),
            nn.BatchNorm2d(48),
            nn.ReLU(),
        )
        self.head = nn.Conv2d(48, 5 + SHAPES, 1)

    def forward(self, x: Tensor) -> Tensor:
        """Returns (batch, 4, 4, 5 + kinds)."""
        maps: Tensor = self.head(self.backbone(x))
        return maps.permute(0, 2, 3, 1)


def boxes(said: Tensor) -> Tensor:
    """The boxes as x and y within the cell, and shares of the width and height of the image."""
    return said[..., 1:5].sigmoid()


def detection_loss(net: nn.Module, x: Any, y: Tensor, decode: Callable[[Tensor], Tensor] = boxes) -> Tensor:
    """Binary cross entropy of objects, and where there are some, errors of boxes and cross entropy of kinds."""
    said = net(x)
    there = y[..., 0] == 1
    objects = F.binary_cross_entropy_with_logits(said[..., 0], y[..., 0])
    placed = F.smooth_l1_loss(decode(said)[there], y[there][:, 1:5], beta=0.1)
    return objects + 5 * placed + 0.5 * F.cross_entropy(said[there][:, 5:], y[there][:, 5].long())


def corners(box: Tensor) -> tuple[Tensor, Tensor]:
    """The two corners of boxes of a grid, in shares of the image."""
    rows, columns = torch.meshgrid(torch.arange(4), torch.arange(4), indexing="ij")
    centre = (box[..., :2] + torch.stack((columns, rows), 2)) / 4
    return centre - box[..., 2:] / 2, centre + box[..., 2:] / 2


def detected(net: nn.Module, x: Any, y: Tensor) -> float:
    """The harmonic mean of precision and recall of objects with the right kind and boxes that overlap by six tenths."""
    said = net(x)
    if not bool(said.isfinite().all()):
        return math.nan
    (left, right), (true_left, true_right) = corners(boxes(said)), corners(y[..., 1:5])
    shared = (torch.minimum(right, true_right) - torch.maximum(left, true_left)).clamp(min=0).prod(3)
    overlap = shared / ((right - left).prod(3) + (true_right - true_left).prod(3) - shared).clamp(min=1e-6)
    found, there = said[..., 0] > 0, y[..., 0] == 1
    right_ones = found & there & (overlap > 0.6) & (said[..., 5:].argmax(3) == y[..., 5])
    return float(2 * right_ones.sum() / (found.sum() + there.sum()))


@last(learns=0.6, chance=0.0)
def shape_detector(seed: int) -> Training:
    """A detector of one shape at most in each cell of a grid."""
    torch.manual_seed(seed)
    (x, y), (test_x, test_y) = scenes(1200, 1), scenes(300, 2)
    score = partial(detected, x=test_x, y=test_y)
    return Training(ShapeDetector(), batches(x, y, 32, seed), detection_loss, score, rate=5e-3, schedule=one_cycle, steps=300)


@fault(LAST["shape-detector"].faults, "architecture", ("output-activation", "dead-units"), ("", "head", "head.1"))
def head_with_a_relu(training: Training) -> None:
    """A ReLU follows the last convolution as it follows all others, before the losses that take logits."""
    net: Any = training.net
    net.head = nn.Sequential(net.head, nn.ReLU())


@fault(LAST["shape-detector"].faults, "architecture", "frozen", ("", "backbone"))
def backbone_frozen_without_weights(training: Training) -> tuple[str, ...]:
    """The backbone is frozen as if its weights had been loaded, but they are random."""
    net: Any = training.net
    for parameter in net.backbone.parameters():
        parameter.requires_grad_(False)
    return ("", "backbone", *(f"backbone.{number}" for number in range(12)))


@fault(LAST["shape-detector"].faults, "optimisation", "detached", ("", "head"))
def boxes_decoded_without_gradients(training: Training) -> None:
    """The loss of the boxes is taken of those that a function of the evaluation decodes, which runs without gradients."""

    def decoded(said: Tensor) -> Tensor:
        """The boxes without a history."""
        with torch.no_grad():
            return boxes(said)

    training.loss = partial(detection_loss, decode=decoded)


@fault(LAST["shape-detector"].faults, "data", "labels-do-not-fit")
def grid_by_x_and_y(training: Training) -> None:
    """The targets are written to the grid at [x, y] and not at [y, x]."""
    targets_changed(training, lambda y: y.transpose(1, 2))


@fault(LAST["shape-detector"].faults, "data", ("target-scale", "wrong-loss"))
def boxes_in_pixels(training: Training) -> None:
    """The boxes of the targets are left in pixels, and those of the net are shares."""
    targets_changed(training, lambda y: y * torch.tensor([1.0, 8.0, 8.0, 32.0, 32.0, 1.0]))


@fault(LAST["shape-detector"].faults, "state", "weights-overwritten")
def average_loaded_to_validate(training: Training) -> None:
    """The moving average of the weights is loaded into the net to validate every 20 steps, and is not taken out again."""
    average = copy.deepcopy(training.net.state_dict())

    def validate(training: Training, optimizer: Optimizer, step: int) -> None:
        """Moves the average a little, and at times loads it."""
        for name, value in training.net.state_dict().items():
            if value.is_floating_point():
                average[name].lerp_(value, 0.001)
        if step % 20 == 19:
            training.net.load_state_dict(average)

    training.before_step.append(validate)


# A vector-quantised code of motions


def motions(count: int, seed: int) -> Tensor:
    """Returns sequences (count, 2, 32) of four motifs of twelve, louder or softer."""
    random, world = generator(seed), generator(9)
    times = torch.arange(8) / 8
    phase, height = 6.3 * torch.rand(12, 2, 1, generator=world), 0.5 + torch.rand(12, 2, 1, generator=world)
    motifs = height * torch.sin(6.3 * times * (1 + torch.arange(12)[:, None, None] % 2) + phase)
    picks = torch.randint(12, (count, 4), generator=random)
    loud = 0.8 + 0.4 * torch.rand(count, 4, 1, 1, generator=random)
    x = (loud * motifs[picks]).transpose(1, 2).reshape(count, 2, 32)
    return x + 0.1 * torch.randn(count, 2, 32, generator=random)


class Codebook(nn.Module):
    """Puts the nearest of its vectors in the place of each vector."""

    def __init__(self, size: int, width: int) -> None:
        super().__init__()
        self.vectors = nn.Embedding(size, width)
        nn.init.normal_(self.vectors.weight, 0.0, 0.15)
        self.straight = True

    def forward(self, z: Tensor) -> tuple[Tensor, Tensor]:
        """Returns the vectors with the gradients of z, and the vectors of the book."""
        rows = z.transpose(1, 2).reshape(-1, z.shape[1])
        nearest = torch.cdist(rows.detach(), self.vectors.weight.detach()).argmin(1)
        found = self.vectors(nearest).reshape(z.shape[0], z.shape[2], -1).transpose(1, 2)
        return (z + (found - z).detach() if self.straight else found), found


class MotionCode(nn.Module):
    """Convolutions to four vectors, a codebook, and convolutions back."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Sequential(nn.Conv1d(2, 32, 4, 4), nn.ReLU(), nn.Conv1d(32, 48, 2, 2), nn.ReLU(), nn.Conv1d(48, 12, 1))
        self.codebook = Codebook(64, 12)
        self.decoder = nn.Sequential(
            nn.Conv1d(12, 48, 3, 1, 1), nn.ReLU(), nn.ConvTranspose1d(48, 32, 2, 2), nn.ReLU(), nn.ConvTranspose1d(32, 2, 4, 4)
        )

    def forward(self, x: Tensor) -> Any:
        """Returns the sequences as they come back, and in training the vectors before and after the codebook, too."""
        z = self.encoder(x)
        passed, found = self.codebook(z)
        made = self.decoder(passed)
        return (made, z, found) if self.training else made


def code_loss(net: nn.Module, x: Any, y: Tensor, commitment: float = 0.25) -> Tensor:
    """The squared errors of the sequences, of the codebook, and of the vectors that commit to it."""
    made, z, found = net(x)
    return F.mse_loss(made, y) + F.mse_loss(found, z.detach()) + commitment * F.mse_loss(z, found.detach())


@last(learns=0.6, chance=0.0)
def motion_code(seed: int) -> Training:
    """A vector-quantised autoencoder of sequences of motifs."""
    torch.manual_seed(seed)
    x, test = motions(3000, 1), motions(500, 2)
    return Training(MotionCode(), batches(x, x, 64, seed), code_loss, partial(r2, x=test, y=test), rate=3e-3, steps=300)


@fault(LAST["motion-code"].faults, "architecture", "bottleneck", ("", "codebook", "codebook.vectors", "encoder", "decoder"))
def bits_for_the_size(training: Training) -> None:
    """The codebook has as many vectors as a code has bits, which is six, and not two to the power of it."""
    net: Any = training.net
    net.codebook = Codebook(6, 12)


@fault(
    LAST["motion-code"].faults, "architecture", "detached", ("encoder", "encoder.4", "codebook", "codebook.vectors", "decoder", "")
)
def no_straight_through(training: Training) -> None:
    """The decoder gets the vectors of the codebook without the trick that passes gradients to the encoder."""
    net: Any = training.net
    net.codebook.straight = False


@fault(
    LAST["motion-code"].faults,
    "architecture",
    ("initialisation", "bottleneck", "dead-units"),
    ("codebook", "codebook.vectors", "", "decoder"),
)
def codebook_far_from_the_codes(training: Training) -> None:
    """The vectors of the codebook start from a spread of 10, and the encoder's are near nought, so that few are ever chosen."""
    net: Any = training.net
    nn.init.normal_(net.codebook.vectors.weight, 0.0, 10.0)


@fault(LAST["motion-code"].faults, "optimisation", "loss-scale")
def commitment_of_25(training: Training) -> None:
    """The commitment loss has a weight of 25 instead of 0.25."""
    training.loss = partial(code_loss, commitment=25.0)


@fault(LAST["motion-code"].faults, "data", "outliers")
def spikes_of_a_sensor(training: Training) -> None:
    """Some values are the 999 that a sensor writes when it has lost its position."""

    batch = training.batch

    def lost(number: int) -> tuple[Tensor, Tensor]:
        """The batch with two lost positions."""
        x, _ = batch(number)
        x = x.clone()
        rows = torch.randint(len(x), (2,), generator=generator(number))
        x[rows, :, number % 32] = 999.0
        return x, x

    training.batch = lost


@fault(LAST["motion-code"].faults, "state", "weights-overwritten", ("codebook", "codebook.vectors"))
def all_codes_restarted(training: Training) -> None:
    """Codes that are not used are to be drawn anew every ten steps, but the counts are never kept, so that all are drawn."""

    def restart(training: Training, optimizer: Optimizer, step: int) -> None:
        """Draws all vectors of the codebook anew."""
        if step % 10 == 9:
            net: Any = training.net
            weight = net.codebook.vectors.weight.data
            weight.copy_(0.15 * torch.randn(weight.shape, generator=generator(step)))

    training.before_step.append(restart)
