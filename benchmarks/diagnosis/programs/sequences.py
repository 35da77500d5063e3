"""Programs on sequences: recurrent nets, transformers, a mixture of experts and a bag of words; each with faults of its own."""

from __future__ import annotations

import copy
import functools
import math
from collections.abc import Iterable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import Optimizer

from benchmarks.diagnosis.programs.data import accuracy, batches, digits, generator, r2
from benchmarks.diagnosis.training import Training, fault, program, run

__all__ = [
    "adding_gru",
    "bag_classifier",
    "both_ways_tagger",
    "encoder_classifier",
    "experts",
    "low_rank_adapters",
    "put",
    "replace",
    "row_lstm",
    "small_gpt",
    "tied_decoder",
    "vision_transformer",
]


def put(net: nn.Module, **values: object) -> None:
    """Sets attributes of every module that has them."""
    for module in net.modules():
        for name, value in values.items():
            if hasattr(module, name):
                setattr(module, name, value)


def replace(net: nn.Module, name: str, module: nn.Module) -> None:
    """Puts a module where another one was, or where none was yet."""
    parent, _, last = name.rpartition(".")
    net.get_submodule(parent).register_module(last, module)


def warm_cosine(step: int, steps: int) -> float:
    """The schedule that rises for a tenth of the steps and falls as a half cosine to a tenth."""
    warm = steps // 10
    return (step + 1) / warm if step < warm else 0.55 + 0.45 * math.cos(math.pi * (step - warm) / (steps - warm))


def adamw(parameters: Iterable[nn.Parameter], rate: float) -> Optimizer:
    """AdamW as transformers are trained."""
    return torch.optim.AdamW((p for p in parameters if p.requires_grad), lr=rate, betas=(0.9, 0.98), weight_decay=0.01)


def label_loss(net: nn.Module, x: Any, y: Tensor) -> Tensor:
    """Cross entropy, of logits with the classes last."""
    return F.cross_entropy(net(x).flatten(0, -2), y.flatten())


# A recurrent classifier


class RowLSTM(nn.Module):
    """Reads an image row by row and classifies it by the last state."""

    def __init__(self, width: int = 48) -> None:
        super().__init__()
        self.lstm = nn.LSTM(8, width, batch_first=True)
        self.head = nn.Linear(width, 10)
        self.row = -1

    def forward(self, images: Tensor) -> Tensor:
        states, _ = self.lstm(images.squeeze(1))
        logits: Tensor = self.head(states[:, self.row])
        return logits


@program(learns=0.88, chance=0.1)
def row_lstm(seed: int) -> Training:
    """An LSTM that reads digits row by row, with RMSprop."""
    torch.manual_seed(seed)
    x, y, test_x, test_y = digits()
    return Training(
        RowLSTM(),
        batches(x, y, 64, seed),
        label_loss,
        lambda net: accuracy(net, test_x, test_y),
        rate=5e-3,
        optimizer=lambda parameters, rate: torch.optim.RMSprop(parameters, lr=rate),
        clip=1.0,
    )


@fault(row_lstm.faults, "architecture", "wrong-axis", ("lstm", "head"))
def batch_read_as_time(training: Training) -> None:
    """`batch_first` was forgotten, so that the state runs from image to image."""
    put(training.net, batch_first=False)


@fault(row_lstm.faults, "architecture", ("bottleneck", "wrong-axis", "detached"), ("lstm", "head"))
def first_state_read(training: Training) -> None:
    """The head reads the state after the first row."""
    put(training.net, row=0)


@fault(row_lstm.faults, "architecture", ("saturation", "initialisation", "vanishing-gradients"), "lstm")
def gates_saturated(training: Training) -> None:
    """The weights of the inputs are drawn with a spread of 200, so that all gates are open or shut."""
    nn.init.normal_(training.net.get_parameter("lstm.weight_ih_l0"), std=200)


# A recurrent regression


class AddingGRU(nn.Module):
    """Sums what is marked in a sequence, with a cell that is called step by step."""

    def __init__(self, width: int = 40) -> None:
        super().__init__()
        self.cell = nn.GRUCell(2, width)
        self.readout = nn.Linear(width, 1)
        self.width = width
        self.carries = False
        self.state: Tensor | None = None

    def forward(self, sequence: Tensor) -> Tensor:
        hidden = sequence.new_zeros(len(sequence), self.width)
        if self.carries and self.training and self.state is not None:
            hidden = self.state
        for now in sequence.unbind(1):
            hidden = self.cell(now, hidden)
        if self.carries:
            self.state = hidden.detach()
        total: Tensor = self.readout(hidden)
        return total.squeeze(1)


def additions(count: int, length: int, seed: int) -> tuple[Tensor, Tensor]:
    """Returns sequences of values and marks, and the standardised sums of the two marked values of each."""
    random = generator(seed)
    values = torch.rand(count, length, generator=random) * 2 - 1
    marks = torch.zeros(count, length)
    marks.scatter_(1, torch.rand(count, length, generator=random).argsort(1)[:, :2], 1.0)
    return torch.stack((values, marks), 2), (values * marks).sum(1) / math.sqrt(2 / 3)


@program(learns=0.9, chance=0.0)
def adding_gru(seed: int) -> Training:
    """A GRU cell on the adding problem: the sum of the two values that are marked among ten."""
    torch.manual_seed(seed)
    test = additions(512, 10, 10_000)
    return Training(
        AddingGRU(),
        batches(*additions(4096, 10, 1), 128, seed),
        lambda net, x, y: F.mse_loss(net(x), y),
        lambda net: r2(net, *test),
        rate=1e-2,
        clip=1.0,
    )


@fault(adding_gru.faults, "state", "carried-state", ("", "cell"))
def state_carried_over(training: Training) -> None:
    """Every batch starts from the last state of the batch before."""
    put(training.net, carries=True)


@fault(adding_gru.faults, "architecture", ("initialisation", "saturation", "exploding-gradients"), "cell")
def recurrent_weights_large(training: Training) -> None:
    """The recurrent weights are drawn with a spread of 5."""
    nn.init.normal_(training.net.get_parameter("cell.weight_hh"), std=5)


@fault(adding_gru.faults, "architecture", ("saturation", "initialisation", "vanishing-gradients"), ("cell", "readout"))
def update_gate_shut(training: Training) -> None:
    """The bias of the update gate is so high that the state keeps its start."""
    with torch.no_grad():
        training.net.get_parameter("cell.bias_hh")[40:80] = 30


# A tagger


class Tagger(nn.Module):
    """Tags every word by what stands before and behind it."""

    def __init__(self, words: int = 12, tags: int = 9, width: int = 24) -> None:
        super().__init__()
        self.embedding = nn.Embedding(words, 16)
        self.dropout = nn.Dropout(0.05)
        self.lstm = nn.LSTM(16, width, batch_first=True, bidirectional=True)
        self.head = nn.Linear(2 * width, tags)
        self.one_way = False

    def forward(self, words: Tensor) -> Tensor:
        states, _ = self.lstm(self.dropout(self.embedding(words)))
        if self.one_way:
            forward, _ = states.chunk(2, -1)
            states = torch.cat((forward, forward), -1)
        logits: Tensor = self.head(states)
        return logits


def tagged(count: int, length: int, seed: int) -> tuple[Tensor, Tensor]:
    """Returns sentences of 12 words in 3 classes, and tags: 3 * class of the word before + class of the word behind."""
    words = torch.randint(12, (count, length + 2), generator=generator(seed))
    return words[:, 1:-1].contiguous(), _tags(words[:, 1:-1] % 3)


def _tags(classes: Tensor) -> Tensor:
    return 3 * F.pad(classes, (1, 0))[:, :-1] + F.pad(classes, (0, 1))[:, 1:]


@program(learns=0.9, chance=0.12)
def both_ways_tagger(seed: int) -> Training:
    """A bidirectional LSTM that tags words, in batches accumulated by two."""
    torch.manual_seed(seed)
    test = tagged(256, 10, 10_000)
    return Training(
        Tagger(),
        batches(*tagged(2048, 10, 1), 32, seed),
        lambda net, x, y: F.cross_entropy(net(x).transpose(1, 2), y),
        lambda net: accuracy(net, *test),
        rate=5e-3,
        micro_batches=2,
    )


@fault(both_ways_tagger.faults, "architecture", ("bottleneck", "detached"), ("lstm", "head"))
def one_way_only(training: Training) -> None:
    """The head reads the forward states twice, and the backward ones never."""
    put(training.net, one_way=True)


@fault(both_ways_tagger.faults, "architecture", "dropout", ("dropout", "lstm"))
def words_dropped(training: Training) -> None:
    """The dropout of the embeddings is 0.95."""
    put(training.net.get_submodule("dropout"), p=0.95)


@fault(both_ways_tagger.faults, "architecture", ("frozen", "initialisation", "inputs-constant"), ("embedding", "dropout"))
def embedding_zero(training: Training) -> None:
    """The embedding holds zeros and is frozen, as if its pretrained vectors had not been read."""
    nn.init.zeros_(training.net.get_parameter("embedding.weight").requires_grad_(False))


@fault(both_ways_tagger.faults, "architecture", ("wrong-axis", "labels-do-not-fit", "wrong-loss"))
def logits_reshaped(training: Training) -> None:
    """The loss reshapes the logits where their axes ought to be swapped."""
    training.loss = lambda net, x, y: F.cross_entropy((logits := net(x)).reshape(len(y), logits.shape[-1], -1), y)


# A transformer encoder


class Voter(nn.Module):
    """Classifies a padded sequence with `nn.TransformerEncoder` and the mean of what is not padding."""

    def __init__(self, tokens: int = 8, classes: int = 4, width: int = 32, length: int = 12) -> None:
        super().__init__()
        self.embedding = nn.Embedding(tokens, width)
        self.positions = nn.Parameter(torch.randn(length, width))
        layer = nn.TransformerEncoderLayer(width, 4, 64, dropout=0.0, batch_first=True, norm_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2, norm=nn.LayerNorm(width), enable_nested_tensor=False)
        self.head = nn.Linear(width, classes)
        self.position_scale = 1.0
        self.inverted = False

    def forward(self, batch: dict[str, Tensor]) -> Tensor:
        padding = ~batch["padding"] if self.inverted else batch["padding"]
        x = self.embedding(batch["tokens"]) + self.position_scale * self.positions
        x = self.encoder(x, src_key_padding_mask=padding)
        kept = (~padding).unsqueeze(2)
        logits: Tensor = self.head((x * kept).sum(1) / kept.sum(1).clamp(min=1))
        return logits


def votes(count: int, length: int, seed: int) -> tuple[dict[str, Tensor], Tensor]:
    """Returns sequences of 8 tokens in 4 classes with the padding behind them, and the class with most votes.

    A token's vote weighs less the later it comes. Padding holds tokens too, as what is left over in a buffer.
    """
    random = generator(seed)
    tokens = torch.randint(8, (count, length), generator=random)
    lengths = torch.randint(length // 2, length, (count, 1), generator=random)
    padding = torch.arange(length) >= lengths
    weights = 0.6 ** torch.arange(length) * ~padding
    totals = torch.zeros(count, 4).scatter_add_(1, tokens % 4, weights)
    return {"tokens": tokens, "padding": padding}, totals.argmax(1)


@program(learns=0.85, chance=0.25)
def encoder_classifier(seed: int) -> Training:
    """A transformer encoder on padded sequences given as a dict; AdamW, warm-up and cosine."""
    torch.manual_seed(seed)
    test = votes(512, 12, 10_000)
    return Training(
        Voter(),
        batches(*votes(4096, 12, 1), 64, seed),
        label_loss,
        lambda net: accuracy(net, *test),
        rate=3e-3,
        optimizer=adamw,
        schedule=warm_cosine,
        clip=1.0,
    )


@fault(encoder_classifier.faults, "architecture", "mask", ("encoder", "head"))
def padding_mask_inverted(training: Training) -> None:
    """The padding is attended to, and nothing else."""
    put(training.net, inverted=True)


@fault(encoder_classifier.faults, "architecture", ("bottleneck", "never-ran", "detached"), ("", "encoder"))
def positions_left_out(training: Training) -> None:
    """The positions are not added."""
    put(training.net, position_scale=0.0)


@fault(
    encoder_classifier.faults, "architecture", ("normalisation", "initialisation", "vanishing-gradients"), ("encoder.norm", "head")
)
def last_norm_zero(training: Training) -> None:
    """The scale of the last normalisation is zero and frozen."""
    nn.init.zeros_(training.net.get_parameter("encoder.norm.weight").requires_grad_(False))


@fault(encoder_classifier.faults, "architecture", ("outliers", "initialisation", "saturation"), ("embedding", "encoder.layers.0"))
def positions_drowned(training: Training) -> None:
    """The embedding is drawn with a spread of 100, beside which the positions are nothing."""
    nn.init.normal_(training.net.get_parameter("embedding.weight"), std=100)


# Transformers by hand


class Attention(nn.Module):
    """Attention of many heads."""

    def __init__(self, width: int, heads: int, causal: bool) -> None:
        super().__init__()
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.heads, self.causal = heads, causal
        self.scale: float | None = None

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).unflatten(2, (3, self.heads, -1)).permute(2, 0, 3, 1, 4).unbind()
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=self.causal, scale=self.scale)
        out: Tensor = self.out(mixed.transpose(1, 2).flatten(2))
        return out


class WrittenAttention(nn.Module):
    """Causal attention of one head that is written out."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.query = nn.Linear(width, width)
        self.key = nn.Linear(width, width)
        self.value = nn.Linear(width, width)
        self.scale, self.axis, self.backward_only = width**-0.5, -1, True

    def forward(self, x: Tensor) -> Tensor:
        scores = self.query(x) @ self.key(x).transpose(1, 2) * self.scale
        ones = torch.ones(scores.shape[1:], dtype=torch.bool)
        scores = scores.masked_fill(ones.triu(1) if self.backward_only else ones.tril(-1), float("-inf"))
        mixed: Tensor = scores.softmax(self.axis) @ self.value(x)
        return mixed


class Block(nn.Module):
    """A pre-norm transformer block."""

    def __init__(self, width: int, attention: nn.Module) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(width)
        self.attention = attention
        self.norm2 = nn.LayerNorm(width)
        self.mlp = nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width))
        self.residual = 1.0

    def forward(self, x: Tensor) -> Tensor:
        x = x * self.residual + self.attention(self.norm1(x))
        out: Tensor = x * self.residual + self.mlp(self.norm2(x))
        return out


class Decoder(nn.Module):
    """A language model: token and position embeddings, blocks, a norm and a head."""

    def __init__(self, tokens: int, width: int, length: int, blocks: Iterable[nn.Module], *, tied: bool) -> None:
        super().__init__()
        self.embedding = nn.Embedding(tokens, width)
        self.positions = nn.Embedding(length, width)
        self.blocks = nn.Sequential(*blocks)
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, tokens, bias=False)
        for module in (self.embedding, self.positions):
            nn.init.normal_(module.weight, std=width**-0.5)
        if tied:
            self.head.weight = self.embedding.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens) + self.positions(torch.arange(tokens.shape[1]))
        logits: Tensor = self.head(self.norm(self.blocks(x)))
        return logits


def next_tokens(net: nn.Module, texts: Tensor, lengths: Iterable[int]) -> tuple[Tensor, Tensor]:
    """Returns logits of what follows prefixes of texts, and what does. The net is not shown what follows."""
    pairs = [(net(texts[:, :length])[:, -1], texts[:, length]) for length in lengths]
    return torch.cat([a for a, _ in pairs]), torch.cat([b for _, b in pairs])


def markov(count: int, length: int, tokens: int, seed: int) -> Tensor:
    """Returns texts in which each token depends on the two before it: 70, 20 and 10 % for three tokens."""
    follow = torch.rand(tokens, tokens, tokens, generator=generator(0)).argsort(2)[:, :, :3]
    random = generator(seed)
    text = list(torch.randint(tokens, (2, count), generator=random))
    for _ in range(length - 2):
        pick = torch.multinomial(torch.tensor([0.7, 0.2, 0.1]), count, True, generator=random)
        text.append(follow[text[-2], text[-1], pick])
    return torch.stack(text, 1)


@program(learns=-1.15, chance=-2.08)
def small_gpt(seed: int) -> Training:
    """A causal transformer on texts of a Markov chain of order 2; scored by the loss of what follows prefixes."""
    torch.manual_seed(seed)
    texts, test = markov(2048, 25, 8, 1), markov(128, 25, 8, 10_000)
    return Training(
        Decoder(8, 48, 24, (Block(48, Attention(48, 4, causal=True)) for _ in range(2)), tied=False),
        batches(texts[:, :-1], texts[:, 1:], 32, seed),
        label_loss,
        lambda net: -float(F.cross_entropy(*next_tokens(net, test, (4, 9, 14, 19, 24)))),
        rate=8e-3,
        optimizer=adamw,
        schedule=warm_cosine,
        clip=1.0,
    )


BLOCK_PARTS = ("attention", "attention.qkv", "attention.out")


def parts(*blocks: int) -> tuple[str, ...]:
    """Returns the names of the attention of blocks."""
    return tuple(f"blocks.{block}.{part}" for block in blocks for part in BLOCK_PARTS)


@fault(small_gpt.faults, "architecture", "mask", parts(0, 1))
def future_seen(training: Training) -> None:
    """The causal mask is missing, so that the net reads the next token where it ought to predict it."""
    put(training.net, causal=False)


@fault(small_gpt.faults, "architecture", ("labels-do-not-fit", "wrong-loss"))
def targets_not_shifted(training: Training) -> None:
    """The target is the token itself."""
    batch = training.batch
    training.batch = lambda number: (batch(number)[0],) * 2


@fault(small_gpt.faults, "architecture", ("attention-scale", "saturation"), parts(0, 1))
def scores_scaled_up(training: Training) -> None:
    """The scores of the attention are multiplied with 200 where they ought to be divided."""
    put(training.net, scale=200.0)


@fault(small_gpt.faults, "architecture", ("vanishing-gradients", "initialisation"), ("blocks", "blocks.0", "blocks.1"))
def stream_not_kept(training: Training) -> None:
    """The blocks add nothing to what comes in: their residual connections are missing."""
    put(training.net, residual=0.0)


def progressions(count: int, length: int, seed: int) -> Tensor:
    """Returns texts of tokens 0 to 9 that count on: by a step of 1 to 4 and modulo 10."""
    random = generator(seed)
    start, step = torch.randint(10, (count, 1), generator=random), torch.randint(1, 5, (count, 1), generator=random)
    return (start + step * torch.arange(length)) % 10


@program(learns=0.9, chance=0.1)
def tied_decoder(seed: int) -> Training:
    """A decoder whose head is its embedding, with attention written out, on numbers that count on."""
    torch.manual_seed(seed)
    texts, test = progressions(2048, 13, 1), progressions(256, 13, 10_000)

    def score(net: nn.Module) -> float:
        logits, labels = next_tokens(net, test, (3, 6, 9, 12))
        return float((logits.argmax(1) == labels).float().mean())

    return Training(
        Decoder(10, 32, 12, (Block(32, WrittenAttention(32)) for _ in range(2)), tied=True),
        batches(texts[:, :-1], texts[:, 1:], 32, seed),
        label_loss,
        score,
        rate=3e-3,
        clip=1.0,
    )


WRITTEN = tuple(f"blocks.{block}.attention{part}" for block in range(2) for part in ("", ".query", ".key", ".value"))


@fault(tied_decoder.faults, "architecture", "mask", WRITTEN)
def mask_turned_round(training: Training) -> None:
    """The mask hides the past in place of the future."""
    put(training.net, backward_only=False)


@fault(tied_decoder.faults, "architecture", ("wrong-axis", "mask"), WRITTEN)
def softmax_over_queries(training: Training) -> None:
    """The softmax runs over the queries, not over the keys."""
    put(training.net, axis=-2)


@fault(tied_decoder.faults, "architecture", ("initialisation", "saturation"), ("embedding", "head", "norm"))
def tied_weights_large(training: Training) -> None:
    """The embedding, and so the head, is drawn with a spread of 10."""
    nn.init.normal_(training.net.get_parameter("embedding.weight"), std=10)


# A vision transformer, and adapters of it


class VisionTransformer(nn.Module):
    """Classifies an image by its patches."""

    def __init__(self, width: int = 32, depth: int = 2) -> None:
        super().__init__()
        self.patches = nn.Conv2d(1, width, 2, 2)
        self.token = nn.Parameter(torch.zeros(1, 1, width))
        self.positions = nn.Parameter(torch.randn(17, width) * 0.2)
        self.blocks = nn.Sequential(*(Block(width, Attention(width, 4, causal=False)) for _ in range(depth)))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, 10)
        self.position_scale, self.cut = 1.0, False

    def forward(self, images: Tensor) -> Tensor:
        patches = self.patches(images).flatten(2).transpose(1, 2)
        x = torch.cat((self.token.expand(len(patches), -1, -1), patches), 1) + self.position_scale * self.positions
        x = self.blocks(x)
        logits: Tensor = self.head(self.norm(x.detach() if self.cut else x)[:, 0])
        return logits


@program(learns=0.85, chance=0.1)
def vision_transformer(seed: int) -> Training:
    """A vision transformer on digits in patches of 2 x 2; AdamW, warm-up and cosine, in bfloat16 autocast."""
    torch.manual_seed(seed)
    x, y, test_x, test_y = digits()
    return Training(
        VisionTransformer(),
        batches(x, y, 48, seed),
        label_loss,
        lambda net: accuracy(net, test_x, test_y),
        rate=5e-3,
        optimizer=adamw,
        schedule=warm_cosine,
        clip=1.0,
        autocast=True,
    )


@fault(vision_transformer.faults, "architecture", ("bottleneck", "never-ran", "detached"), ("", "patches", "blocks.0"))
def patches_without_place(training: Training) -> None:
    """The positions are not added, so that an image is a bag of patches."""
    put(training.net, position_scale=0.0)


@fault(vision_transformer.faults, "architecture", ("attention-scale", "saturation"), parts(0))
def first_scores_huge(training: Training) -> None:
    """The scores of the first attention are multiplied with 1000."""
    put(training.net.get_submodule("blocks.0"), scale=1000.0)


@fault(vision_transformer.faults, "architecture", "detached", ("", "patches", "blocks", "blocks.0", "blocks.1", "norm"))
def blocks_cut_off(training: Training) -> None:
    """What the blocks give is cut off the graph, so that nothing before the last norm learns."""
    put(training.net, cut=True)


class Adapted(nn.Module):
    """A frozen linear layer with a trained one of low rank beside it, which starts as zero."""

    def __init__(self, base: nn.Linear, rank: int = 4) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        self.down = nn.Linear(base.in_features, rank, bias=False)
        self.up = nn.Linear(rank, base.out_features, bias=False)
        nn.init.zeros_(self.up.weight)
        self.scale = 2.0

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.base(x) + self.scale * self.up(self.down(x))
        return out


@functools.cache
def pretrained(seed: int) -> VisionTransformer:
    """Returns a vision transformer that knows upright digits, only to be copied."""
    training = vision_transformer.make(seed)
    training.autocast = False
    run(training)
    net = training.net
    assert isinstance(net, VisionTransformer)
    return net


@program(learns=0.7, chance=0.2)
def low_rank_adapters(seed: int) -> Training:
    """Adapters of low rank in a frozen vision transformer, which learn digits that lie on their side."""
    net = copy.deepcopy(pretrained(seed)).requires_grad_(False)
    torch.manual_seed(seed)
    for name in ADAPTED:
        base = net.get_submodule(name)
        assert isinstance(base, nn.Linear)
        replace(net, name, Adapted(base))
    x, y, test_x, test_y = digits()
    return Training(
        net,
        batches(x.rot90(1, (2, 3)), y, 48, seed),
        label_loss,
        lambda net: accuracy(net, test_x.rot90(1, (2, 3)), test_y),
        rate=1e-2,
        optimizer=adamw,
        clip=1.0,
    )


ADAPTED = tuple(f"blocks.{block}.{layer}" for block in range(2) for layer in ("attention.qkv", "attention.out", "mlp.0", "mlp.2"))
ADAPTERS = tuple(f"{name}{part}" for name in ADAPTED for part in ("", ".down", ".up"))


@fault(low_rank_adapters.faults, "architecture", ("initialisation", "symmetry", "vanishing-gradients"), ADAPTERS)
def both_sides_zero(training: Training) -> None:
    """Both matrices of the adapters start as zero, so that no gradient reaches either."""
    for name in ADAPTED:
        nn.init.zeros_(training.net.get_parameter(f"{name}.down.weight"))


@fault(low_rank_adapters.faults, "architecture", ("outliers", "initialisation", "exploding-gradients", "saturation"), ADAPTERS)
def adapters_loud(training: Training) -> None:
    """The adapters' answers are multiplied with 500."""
    put(training.net, scale=500.0)


@fault(low_rank_adapters.faults, "architecture", ("vanishing-gradients", "initialisation", "rate-too-low"), ADAPTERS)
def adapters_faint(training: Training) -> None:
    """The adapters' answers are divided by the width twice over."""
    put(training.net, scale=2 / 32**2)


@fault(low_rank_adapters.faults, "state", ("stale-optimizer", "not-in-optimizer", "frozen"), ADAPTERS)
def adapters_replaced(training: Training) -> None:
    """The optimizer was made before the adapters: it holds those of another copy."""
    stale = copy.deepcopy(training.net)
    training.parameters = lambda net: stale.parameters()


# A mixture of experts


class Experts(nn.Module):
    """Linear experts of which a router takes two for each input."""

    def __init__(self, columns: int = 6, count: int = 6) -> None:
        super().__init__()
        self.router = nn.Linear(columns, count)
        self.experts = nn.ModuleList(nn.Linear(columns, 1) for _ in range(count))
        self.routed = True

    def forward(self, x: Tensor) -> Tensor:
        shares = self.router(x).softmax(1)
        if not self.routed:
            shares = shares.detach()
        top, chosen = shares.topk(2, 1)
        gates = torch.zeros_like(shares).scatter(1, chosen, top / top.sum(1, keepdim=True))
        answers = torch.cat([expert(x) for expert in self.experts], 1)
        return (gates * answers).sum(1)


def pieces(count: int, seed: int) -> tuple[Tensor, Tensor]:
    """Returns inputs in 6 groups, and targets that are another linear function of them in each group."""
    fixed, random = generator(0), generator(seed)
    centres, slopes = torch.randn(2, 6, 6, generator=fixed)
    group = torch.randint(6, (count,), generator=random)
    x = 0.5 * torch.randn(count, 6, generator=random) + 1.5 * centres[group]
    y = ((x - 1.5 * centres[group]) * slopes[group]).sum(1)
    return x, y


@program(learns=0.65, chance=0.0)
def experts(seed: int) -> Training:
    """A mixture of six experts on data in six groups."""
    torch.manual_seed(seed)
    test = pieces(512, 10_000)
    return Training(
        Experts(),
        batches(*pieces(4096, 1), 128, seed),
        lambda net, x, y: F.mse_loss(net(x), y),
        lambda net: r2(net, *test),
        rate=5e-2,
        schedule=warm_cosine,
        steps=200,
    )


EXPERTS = tuple(f"experts.{expert}" for expert in range(6))


@fault(experts.faults, "architecture", ("saturation", "initialisation", "never-ran"), ("router", *EXPERTS))
def router_collapsed(training: Training) -> None:
    """The router's bias for one expert is 30, so that it answers always and alone."""
    with torch.no_grad():
        training.net.get_parameter("router.bias")[1] = 30


@fault(experts.faults, "optimisation", ("not-in-optimizer", "frozen"), ("experts", *EXPERTS))
def experts_in_a_list(training: Training) -> None:
    """The optimizer gets the parameters of the router only, as if the experts were in a list of Python."""
    training.parameters = lambda net: net.get_submodule("router").parameters()


@fault(experts.faults, "architecture", "detached", ("router",))
def router_cut_off(training: Training) -> None:
    """No gradient reaches the router."""
    put(training.net, routed=False)


# A bag of words


class Bag(nn.Module):
    """Classifies texts of any length by the mean of the embeddings of their words."""

    def __init__(self, words: int = 200, classes: int = 5, width: int = 16) -> None:
        super().__init__()
        self.bag = nn.EmbeddingBag(words, width, sparse=True)
        self.head = nn.Linear(width, classes)
        self.buckets = words

    def forward(self, texts: tuple[Tensor, Tensor]) -> Tensor:
        words, lengths = texts
        flat = words[torch.arange(words.shape[1]) < lengths.unsqueeze(1)]
        logits: Tensor = self.head(self.bag(flat % self.buckets, lengths.cumsum(0) - lengths))
        return logits


def topics(count: int, seed: int) -> tuple[tuple[Tensor, Tensor], Tensor]:
    """Returns texts of 10 to 30 of 200 words with their lengths, and their topics, each of which has its own common words."""
    weights = torch.rand(5, 200, generator=generator(0)) ** 4
    random = generator(seed)
    labels = torch.randint(5, (count,), generator=random)
    words = torch.multinomial(weights[labels], 30, True, generator=random)
    return (words, torch.randint(10, 31, (count,), generator=random)), labels


@program(learns=0.88, chance=0.2)
def bag_classifier(seed: int) -> Training:
    """A bag of words with sparse gradients, and SGD."""
    torch.manual_seed(seed)
    test = topics(512, 10_000)
    return Training(
        Bag(),
        batches(*topics(4096, 1), 128, seed),
        label_loss,
        lambda net: accuracy(net, *test),
        rate=2.5,
        optimizer=lambda parameters, rate: torch.optim.SGD(parameters, lr=rate),
    )


@fault(bag_classifier.faults, "data", "labels-do-not-fit")
def texts_out_of_step(training: Training) -> None:
    """The texts of a batch are 16 rows ahead of their labels."""
    batch = training.batch

    def ahead(number: int) -> tuple[Any, Any]:
        (words, lengths), labels = batch(number)
        return (words.roll(16, 0), lengths), labels

    training.batch = ahead


@fault(bag_classifier.faults, "architecture", "bottleneck", ("bag",))
def words_collide(training: Training) -> None:
    """The words are hashed to 5 rows of the embedding."""
    put(training.net, buckets=5)


@fault(bag_classifier.faults, "architecture", ("initialisation", "symmetry", "vanishing-gradients"), ("bag", "head"))
def all_zero(training: Training) -> None:
    """The embedding and the head start as zero, so that only the head's bias learns."""
    for name in ("bag.weight", "head.weight"):
        nn.init.zeros_(training.net.get_parameter(name))


@fault(bag_classifier.faults, "architecture", ("weights-overwritten", "normalisation", "vanishing-gradients"), ("bag", "head"))
def norms_capped(training: Training) -> None:
    """Every look-up shrinks the rows of the embedding to a norm of 0.02."""
    put(training.net, max_norm=0.02)
