"""Programs on series, characters and tokens by which no threshold was chosen."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import Optimizer

from benchmarks.diagnosis.programs.data import accuracy, batches, generator
from benchmarks.diagnosis.programs.held_out_vectors import cosine, decay_matrices, mean_loss, warmup_then_cosine
from benchmarks.diagnosis.training import Training, fault, program

# Kinds of waves by dilated convolutions: batch normalisation, two batches per step.

LENGTH = 64


def waves(seed: int, rows: int) -> tuple[Tensor, Tensor]:
    """Returns series (rows, 1, 64) and their kinds: a sine, a square wave, a saw, one whose frequency rises."""
    random = generator(seed)
    kind = torch.randint(4, (rows,), generator=random)
    time = torch.linspace(0, 1, LENGTH)
    turns = (2 + 3 * torch.rand(rows, 1, generator=random)) * time + torch.rand(rows, 1, generator=random)
    sine = torch.sin(2 * math.pi * turns)
    every = torch.stack([sine, 0.7 * sine.sign(), 2.4 * (turns % 1 - 0.5), torch.sin(2 * math.pi * turns * (0.4 + 1.2 * time))])
    series = every[kind, torch.arange(rows)] + 0.25 * torch.randn(rows, LENGTH, generator=random)
    return series[:, None] / 0.75, kind


class Dilated(nn.Module):
    """Adds a dilated convolution to what it is given."""

    def __init__(self, width: int, dilation: int) -> None:
        super().__init__()
        self.conv = nn.Conv1d(width, width, 3, padding=dilation, dilation=dilation, bias=False)
        self.norm = nn.BatchNorm1d(width)
        self.mix = nn.Conv1d(width, width, 1)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.mix(F.relu(self.norm(self.conv(x))))


class WaveNet(nn.Module):
    """Dilated convolutions and the mean over time."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.enter = nn.Conv1d(1, width, 5, padding=2)
        self.layers = nn.Sequential(*(Dilated(width, 2**i) for i in range(4)))
        self.norm = nn.BatchNorm1d(width)
        self.head = nn.Linear(width, 4)

    def forward(self, series: Tensor) -> Tensor:
        return self.head(F.relu(self.norm(self.layers(self.enter(series)))).mean(-1))


@program(learns=0.93, chance=0.25, held_out=True)
def waves_dilated(seed: int) -> Training:
    """Kinds of waves by dilated convolutions: SGD with Nesterov momentum, cosine, two batches per step."""
    torch.manual_seed(seed)
    test_x, test_y = waves(seed + 100, 800)
    return Training(
        WaveNet(),
        batches(*waves(seed, 3000), 12, seed),
        mean_loss,
        lambda net: accuracy(net, test_x, test_y),
        rate=0.05,
        optimizer=lambda parameters, rate: torch.optim.SGD(parameters, lr=rate, momentum=0.9, nesterov=True, weight_decay=1e-4),
        schedule=cosine,
        micro_batches=2,
    )


NORMS = ("norm", *(f"layers.{i}.norm" for i in range(4)))


@fault(waves_dilated.faults, "state", ("statistics-frozen", "normalisation"), NORMS)
def statistics_never_move(training: Training) -> None:
    """The share of a new batch in the running statistics is given as 0: they stay at 0 and 1."""
    for norm in training.net.modules():
        if isinstance(norm, nn.BatchNorm1d):
            norm.momentum = 0.0


@fault(waves_dilated.faults, "data", "outliers", ("enter", "layers", "layers.0", "layers.0.conv"))
def spikes_of_the_sensor(training: Training) -> None:
    """One value in some series of the training is 10,000, which the sensor gives for "none"."""
    batch = training.batch

    def changed(number: int) -> tuple[Tensor, Tensor]:
        series, kind = batch(number)
        series[number % len(series), 0, number % LENGTH] = 1e4
        return series, kind

    training.batch = changed


@fault(waves_dilated.faults, "architecture", ("dead-units", "vanishing-gradients"), ("norm", "head", "layers", "layers.3"))
def last_norm_starts_at_zero(training: Training) -> None:
    """The last norm starts with weights of zero, as is right only at the end of a residual branch: the ReLU gives no gradient."""
    net: Any = training.net
    nn.init.zeros_(net.norm.weight)


# Characters of a small language by a GRU.

LEXICON = ("cat", "horse", "tiger", "dog", "mouse", "zebra", "ox")
BRACKETS = ("()", "[]", "{}", "<>")
CHARACTERS = sorted({*"".join(LEXICON), *"".join(BRACKETS)})


def texts(seed: int, rows: int, length: int) -> tuple[Tensor, Tensor]:
    """Returns characters (rows, length) and which of them close brackets whose opening is seen.

    A text is made of words of the lexicon, each in one of four kinds of brackets.
    """
    random = generator(seed)
    openings, closings = ([CHARACTERS.index(bracket[i]) for bracket in BRACKETS] for i in range(2))
    text: list[int] = []
    while len(text) < rows * length:
        bracket, word = (int(torch.randint(len(of), (), generator=random)) for of in (BRACKETS, LEXICON))
        text += [openings[bracket], *(CHARACTERS.index(character) for character in LEXICON[word]), closings[bracket]]
    characters = torch.tensor(text[: rows * length]).reshape(rows, length)
    seen = torch.isin(characters, torch.tensor(openings)).cumsum(1) > 0
    return characters, torch.isin(characters, torch.tensor(closings)) & seen


class Characters(nn.Module):
    """A language model of one GRU."""

    def __init__(self, width: int = 64) -> None:
        super().__init__()
        self.embed = nn.Embedding(len(CHARACTERS), 24)
        self.gru = nn.GRU(24, width, batch_first=True)
        self.head = nn.Linear(width, len(CHARACTERS))

    def forward(self, text: Tensor) -> Tensor:
        hidden, _ = self.gru(self.embed(text))
        return self.head(hidden)


@program(learns=0.95, chance=0.25, held_out=True)
def characters_gru(seed: int) -> Training:
    """The next character by a GRU: Adam with clipped gradients. The score is of brackets that close."""
    torch.manual_seed(seed)
    text, _ = texts(seed, 800, 33)
    test, closes = texts(seed + 100, 200, 33)

    def score(net: nn.Module) -> float:
        right = net(test[:, :-1]).argmax(-1) == test[:, 1:]
        return float(right[closes[:, 1:]].float().mean())

    return Training(
        Characters(),
        batches(text[:, :-1], text[:, 1:], 32, seed),
        mean_loss,
        score,
        rate=1e-2,
        schedule=cosine,
        clip=1.0,
    )


@fault(characters_gru.faults, "architecture", ("wrong-axis", "carried-state"), ("gru", "head", ""))
def batch_for_time(training: Training) -> None:
    """The GRU takes the first axis for time: it goes over the texts of the batch."""
    net: Any = training.net
    net.gru.batch_first = False


@fault(characters_gru.faults, "data", ("labels-do-not-fit", "wrong-loss"))
def target_not_shifted(training: Training) -> None:
    """The target is the character that the network was given, not the next."""
    batch = training.batch

    def changed(number: int) -> tuple[Tensor, Tensor]:
        text, _ = batch(number)
        return text, text.clone()

    training.batch = changed


class ForgettingCharacters(Characters):
    """Cuts the graph and the state after each character."""

    def forward(self, text: Tensor) -> Tensor:
        hidden = None
        outputs = []
        for place in range(text.shape[1]):
            output, hidden = self.gru(self.embed(text[:, place : place + 1]), hidden)
            hidden = hidden.detach()
            outputs.append(output)
        return self.head(torch.cat(outputs, 1))


@fault(characters_gru.faults, "architecture", "detached", ("gru", "embed", ""))
def state_detached(training: Training) -> None:
    """The state is detached after each character, not after each text."""
    training.net.__class__ = ForgettingCharacters


@fault(characters_gru.faults, "architecture", ("initialisation", "saturation", "exploding-gradients"), ("gru", "embed", "head"))
def recurrence_starts_wide(training: Training) -> None:
    """The recurrent weights are drawn with spread 1."""
    net: Any = training.net
    nn.init.normal_(net.gru.weight_hh_l0, std=2.0)


# Sequences of digits read backwards by an encoder and a decoder.

SYMBOLS, START, PLACES = 10, 10, 6


class Reverser(nn.Module):
    """A transformer from sequences to sequences."""

    def __init__(self, width: int = 48, heads: int = 4) -> None:
        super().__init__()
        self.embed = nn.Embedding(SYMBOLS + 1, width)
        self.places = nn.Parameter(0.5 * torch.randn(PLACES, width))
        layer = nn.TransformerEncoderLayer(width, heads, 2 * width, 0.0, batch_first=True, norm_first=True)
        encoder = nn.TransformerEncoder(layer, 1, nn.LayerNorm(width), enable_nested_tensor=False)
        self.transformer = nn.Transformer(
            width, heads, 1, 1, 2 * width, 0.0, custom_encoder=encoder, batch_first=True, norm_first=True
        )
        self.head = nn.Linear(width, SYMBOLS)
        nn.init.normal_(self.embed.weight, std=0.5)

    def embedded(self, tokens: Tensor) -> Tensor:
        return self.embed(tokens) + self.places[: tokens.shape[1]]

    def forward(self, inputs: dict[str, Tensor]) -> Tensor:
        source, before = inputs["source"], inputs["before"]
        causal = nn.Transformer.generate_square_subsequent_mask(before.shape[1])
        return self.head(self.transformer(self.embedded(source), self.embedded(before), tgt_mask=causal, tgt_is_causal=True))


def after_start(target: Tensor) -> Tensor:
    """Returns what the decoder is given: the start, and the target but for its last."""
    return F.pad(target[:, :-1], (1, 0), value=START)


@program(learns=0.9, chance=0.0, held_out=True)
def reversal_transformer(seed: int) -> Training:
    """Sequences read backwards by an encoder and a decoder: warmup, cosine. The score is of sequences that it makes by itself."""
    torch.manual_seed(seed)
    source = torch.randint(SYMBOLS, (5000, PLACES), generator=generator(seed))
    test = torch.randint(SYMBOLS, (200, PLACES), generator=generator(seed + 100))

    def score(net: nn.Module) -> float:
        made = torch.full((len(test), 1), START)
        for _ in range(PLACES):
            made = torch.cat([made, net({"source": test, "before": made})[:, -1:].argmax(-1)], 1)
        return float((made[:, 1:] == test.flip(1)).all(1).float().mean())

    target = source.flip(1)
    return Training(
        Reverser(),
        batches({"source": source, "before": after_start(target)}, target, 32, seed),
        mean_loss,
        score,
        rate=3e-3,
        schedule=warmup_then_cosine,
        clip=1.0,
    )


class SeesWhatFollows(Reverser):
    """Decodes without a causal mask."""

    def forward(self, inputs: dict[str, Tensor]) -> Tensor:
        return self.head(self.transformer(self.embedded(inputs["source"]), self.embedded(inputs["before"])))


@fault(
    reversal_transformer.faults,
    "architecture",
    "mask",
    ("", "transformer", "transformer.decoder", "transformer.decoder.layers.0", "transformer.decoder.layers.0.self_attn"),
)
def decoder_sees_what_follows(training: Training) -> None:
    """The decoder attends to what follows, which it has to say."""
    training.net.__class__ = SeesWhatFollows


class DecodesItself(Reverser):
    """Gives the decoder what came before where the encoder's memory is meant."""

    def forward(self, inputs: dict[str, Tensor]) -> Tensor:
        before = self.embedded(inputs["before"])
        causal = nn.Transformer.generate_square_subsequent_mask(before.shape[1])
        return self.head(self.transformer.decoder(before, before, causal, causal))


ENCODER, DECODER = "transformer.encoder", "transformer.decoder"
ATTENTIONS = (
    "transformer",
    *(name for part in (ENCODER, DECODER) for name in (part, f"{part}.layers.0", f"{part}.layers.0.self_attn")),
    f"{DECODER}.layers.0.multihead_attn",
)


@fault(
    reversal_transformer.faults,
    "architecture",
    "never-ran",
    (ENCODER, f"{ENCODER}.layers.0", f"{ENCODER}.layers.0.self_attn", f"{ENCODER}.layers.0.linear1", f"{ENCODER}.layers.0.linear2"),
)
def encoder_never_called(training: Training) -> None:
    """The decoder is given its own input as memory; the source is read by nobody."""
    training.net.__class__ = DecodesItself


@fault(reversal_transformer.faults, "data", "labels-do-not-fit")
def given_and_wanted_alike(training: Training) -> None:
    """The decoder is given the target as it is, without the start: it has only to repeat."""
    batch = training.batch

    def changed(number: int) -> tuple[dict[str, Tensor], Tensor]:
        inputs, target = batch(number)
        return {**inputs, "before": target}, target

    training.batch = changed


@fault(reversal_transformer.faults, "architecture", ("attention-scale", "initialisation", "saturation"), ATTENTIONS)
def queries_start_wide(training: Training) -> None:
    """The projections to queries, keys and values start 20 times too large."""
    net: Any = training.net
    for layer in net.modules():
        if isinstance(layer, nn.MultiheadAttention):
            layer.in_proj_weight.data.mul_(20)


# Sequences whose second half repeats the first, by a GPT.

VOCABULARY, HALF = 12, 8


class Attention(nn.Module):
    """Causal attention of several heads."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.scale = (width // heads) ** -0.5
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=self.scale)
        return self.out(attended.transpose(1, 2).flatten(2))


class Block(nn.Module):
    """A block of a transformer that normalises first."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.ln_1, self.ln_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention = Attention(width, heads)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.ln_1(x))
        return x + self.mlp(self.ln_2(x))


class SmallGPT(nn.Module):
    """A language model with learned positions."""

    def __init__(self, width: int = 48, heads: int = 4, depth: int = 2) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(VOCABULARY, width), nn.Embedding(2 * HALF, width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(depth))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, VOCABULARY, bias=False)
        for embedding in (self.tokens, self.positions):
            nn.init.normal_(embedding.weight, std=0.1)

    def forward(self, text: Tensor) -> Tensor:
        x = self.tokens(text) + self.positions(torch.arange(text.shape[1]))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def repeated(seed: int, rows: int) -> Tensor:
    """Returns sequences (rows, 16) whose second half is as the first."""
    half = torch.randint(VOCABULARY, (rows, HALF), generator=generator(seed))
    return torch.cat([half, half], 1)


@program(learns=0.95, chance=1 / VOCABULARY, held_out=True)
def repetition_gpt(seed: int) -> Training:
    """The next token of sequences that repeat: AdamW in two groups, warmup, cosine, bfloat16 autocast, clipping."""
    torch.manual_seed(seed)
    text, test = repeated(seed, 6000), repeated(seed + 100, 300)

    def score(net: nn.Module) -> float:
        return float((net(test[:, :-1])[:, HALF - 1 :].argmax(-1) == test[:, HALF:]).float().mean())

    return Training(
        SmallGPT(),
        batches(text[:, :-1], text[:, 1:], 32, seed),
        mean_loss,
        score,
        rate=4e-3,
        optimizer=lambda parameters, rate: decay_matrices(parameters, rate, 0.05),
        schedule=warmup_then_cosine,
        clip=1.0,
        autocast=True,
    )


ATTENTION = tuple(f"blocks.{i}.attention{rest}" for i in range(2) for rest in ("", ".qkv", ".out"))


class WithoutPositions(SmallGPT):
    """Has positions but does not add them."""

    def forward(self, text: Tensor) -> Tensor:
        x = self.tokens(text)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


@fault(repetition_gpt.faults, "architecture", "never-ran", ("positions", ""))
def positions_never_added(training: Training) -> None:
    """The positions are not added to the tokens."""
    training.net.__class__ = WithoutPositions


class AttentionWithDropout(Attention):
    """Drops attention by a function that does not know the mode."""

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(q, k, v, dropout_p=0.6, is_causal=True, scale=self.scale)
        return self.out(attended.transpose(1, 2).flatten(2))


@fault(repetition_gpt.faults, "state", ("train-mode", "dropout"), ATTENTION)
def attention_dropped_in_evaluation(training: Training) -> None:
    """Attention is dropped in evaluation as in training."""
    net: Any = training.net
    for block in net.blocks:
        block.attention.__class__ = AttentionWithDropout


class OverHeads(Attention):
    """Attends over the heads of a token, not over the tokens of a head."""

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 1, 3, 4)
        return self.out(F.scaled_dot_product_attention(q, k, v, scale=self.scale).flatten(2))


@fault(repetition_gpt.faults, "architecture", "wrong-axis", ATTENTION)
def heads_not_transposed(training: Training) -> None:
    """Heads and tokens are not transposed before attention: each token sees only itself."""
    net: Any = training.net
    for block in net.blocks:
        block.attention.__class__ = OverHeads


# Masked tokens of sequences with a period, by an encoder with tied weights.

MASK, PAD, IGNORED = 10, 11, -100


def periodic(seed: int, rows: int) -> Tensor:
    """Returns sequences (rows, 12) of four tokens that repeat, of length 8 to 12; the rest is padding."""
    random = generator(seed)
    tokens = torch.randint(10, (rows, 4), generator=random).repeat(1, 3)
    return tokens.masked_fill(torch.arange(12) >= torch.randint(8, 13, (rows, 1), generator=random), PAD)


class MaskedEncoder(nn.Module):
    """Encodes tokens; the head has the weights of the embedding."""

    def __init__(self, width: int = 48) -> None:
        super().__init__()
        self.embed = nn.Embedding(12, width)
        self.positions = nn.Embedding(12, width)
        layer = nn.TransformerEncoderLayer(width, 4, 2 * width, 0.0, "gelu", batch_first=True, norm_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2, norm=nn.LayerNorm(width), enable_nested_tensor=False)
        self.head = nn.Linear(width, 12)
        self.head.weight = self.embed.weight
        for embedding in (self.embed, self.positions):
            nn.init.normal_(embedding.weight, std=0.3)

    def padded(self, tokens: Tensor) -> Tensor:
        return tokens == PAD

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens) + self.positions.weight
        return self.head(self.encoder(x, src_key_padding_mask=self.padded(tokens)))


def hidden_tokens(tokens: Tensor, seed: int, share: float = 0.2) -> tuple[Tensor, Tensor]:
    """Returns tokens of which some are masked, and those that were; the others are -100."""
    chosen = (torch.rand(tokens.shape, generator=generator(seed)) < share) & (tokens != PAD)
    return tokens.masked_fill(chosen, MASK), tokens.masked_fill(~chosen, IGNORED)


def masked_loss(net: nn.Module, tokens: Tensor, target: Tensor) -> Tensor:
    """The cross-entropy of the tokens that were masked."""
    wanted = target != IGNORED
    losses = F.cross_entropy(net(tokens).mT, target, ignore_index=IGNORED, reduction="none")
    return (losses * wanted).sum() / wanted.sum()


@program(learns=0.85, chance=0.1, held_out=True)
def masked_encoder(seed: int) -> Training:
    """Masked tokens by an encoder: tied weights, padding, AdamW, warmup, two batches per step."""
    torch.manual_seed(seed)
    tokens = batches(periodic(seed, 4000), torch.arange(4000), 24, seed)
    test_x, test_y = hidden_tokens(periodic(seed + 100, 400), seed)

    def score(net: nn.Module) -> float:
        return float((net(test_x).argmax(-1) == test_y)[test_y != IGNORED].float().mean())

    return Training(
        MaskedEncoder(),
        lambda number: hidden_tokens(tokens(number)[0], seed * 7919 + number),
        masked_loss,
        score,
        rate=3e-3,
        optimizer=decay_matrices,
        schedule=warmup_then_cosine,
        clip=1.0,
        micro_batches=2,
    )


class PaddingAttended(MaskedEncoder):
    """Masks what is no padding."""

    def padded(self, tokens: Tensor) -> Tensor:
        return (tokens != PAD) & (torch.arange(tokens.shape[1]) > 0)


@fault(
    masked_encoder.faults,
    "architecture",
    "mask",
    ("", "encoder", *(f"encoder.layers.{i}{rest}" for i in range(2) for rest in ("", ".self_attn"))),
)
def mask_upside_down(training: Training) -> None:
    """The mask hides the tokens and shows the padding; the first token stays visible."""
    training.net.__class__ = PaddingAttended


@fault(masked_encoder.faults, "data", ("labels-do-not-fit", "wrong-loss"))
def shown_tokens_wanted(training: Training) -> None:
    """The mask of the target is upside down: wanted are the tokens that are shown."""
    batch = training.batch

    def changed(number: int) -> tuple[Tensor, Tensor]:
        tokens, target = batch(number)
        return tokens, torch.where((target == IGNORED) & (tokens != PAD), tokens, IGNORED)

    training.batch = changed


def embedding_last(parameters: Iterable[nn.Parameter], rate: float) -> Optimizer:
    """AdamW, the rate of the embedding of which is far too high."""
    first, *rest = list(parameters)
    fast = {"params": [first], "lr": 300 * rate, "initial_lr": 300 * rate}
    groups: list[dict[str, Any]] = [fast, {"params": rest}]
    return torch.optim.AdamW(groups, lr=rate)


@fault(masked_encoder.faults, "optimisation", "rate-too-high", ("embed", "head"))
def rate_of_one_group(training: Training) -> None:
    """One group of parameters, that of the embedding, has 300 times the rate."""
    training.optimizer = embedding_last
