"""Healthy trainings beside the programs, as they are found in practice: `MORE`, by name. No fault is planted in them."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrizations

from benchmarks.diagnosis.programs.data import accuracy, batches, digits, generator, r2, split, table
from benchmarks.diagnosis.programs.generative import crescent, energy_distance
from benchmarks.diagnosis.programs.sequences import label_loss, markov
from benchmarks.diagnosis.programs.vectors import cross_entropy, friedman, momentum, warmup_cosine
from benchmarks.diagnosis.training import Program, Training, adam

__all__ = ["MORE"]

MORE: dict[str, Program] = {}


def more(learns: float, chance: float) -> Callable[[Callable[[int], Training]], Program]:
    """Registers a function of a seed that makes a healthy training, under its own name with `-` for `_`."""

    def register(make: Callable[[int], Training]) -> Program:
        name = make.__name__.replace("_", "-")
        MORE[name] = Program(name, make, learns, chance)
        return MORE[name]

    return register


def adamw(parameters: Any, rate: float) -> torch.optim.Optimizer:
    """AdamW with the defaults of PyTorch."""
    return torch.optim.AdamW([parameter for parameter in parameters if parameter.requires_grad], lr=rate)


# Transformers of Hugging Face, tiny and with random weights

SIZES = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
LANGUAGE = {**SIZES, "vocab_size": 64}


def counting(count: int, seed: int, length: int = 16) -> Tensor:
    """Returns texts of tokens 2 to 61 that count on, by a step of 1 to 3."""
    random = generator(seed)
    start, step = torch.randint(60, (count, 1), generator=random), torch.randint(1, 4, (count, 1), generator=random)
    return (start + step * torch.arange(length)) % 60 + 2


def with_labels(net: nn.Module, inputs: dict[str, Tensor], target: Tensor) -> Tensor:
    """The loss that a net of Hugging Face computes."""
    loss: Tensor = net(**inputs, labels=target).loss
    return loss


def right(net: nn.Module, inputs: dict[str, Tensor], target: Tensor, shift: int = 0) -> float:
    """The share of right labels, of those that count; with a shift of 1 those of the token that follows."""
    logits = net(**inputs, labels=target).logits
    said, meant = logits[:, :-shift].argmax(-1) if shift else logits.argmax(-1), target[:, shift:] if shift else target
    return float((said == meant)[meant >= 0].float().mean())


def of_hugging_face(net: nn.Module, inputs: dict[str, Tensor], target: Tensor, shift: int = 0, **others: Any) -> Training:
    """Returns a training whose last 256 samples are not trained on."""
    kept, test = {name: x[:-256] for name, x in inputs.items()}, {name: x[-256:] for name, x in inputs.items()}
    score = partial(right, inputs=test, target=target[-256:], shift=shift)
    settings: dict[str, Any] = {"rate": 3e-3, "optimizer": adamw, "steps": 100, **others}
    return Training(net, batches(kept, target[:-256], 32, 0), with_labels, score, **settings)


def language_model(net: nn.Module, seed: int, **others: Any) -> Training:
    """Returns the training of a causal language model."""
    ids = counting(2304, seed)
    return of_hugging_face(net, {"input_ids": ids}, ids, shift=1, **others)


@more(learns=0.3, chance=0.02)
def gpt2(seed: int) -> Training:
    """GPT-2, with its dropout."""
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(seed)
    return language_model(
        GPT2LMHeadModel(GPT2Config(vocab_size=64, n_positions=32, n_embd=32, n_layer=2, n_head=2, bos_token_id=1, eos_token_id=1)),
        seed,
    )


@more(learns=0.3, chance=0.02)
def llama(seed: int) -> Training:
    """Llama, with warm-up and cosine."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(seed)
    return language_model(LlamaForCausalLM(LlamaConfig(**LANGUAGE)), seed, rate=6e-3, schedule=warmup_cosine, clip=1.0)


@more(learns=0.3, chance=0.02)
def mixtral(seed: int) -> Training:
    """Mixtral, with four experts of which two answer."""
    from transformers import MixtralConfig, MixtralForCausalLM

    torch.manual_seed(seed)
    config = MixtralConfig(**LANGUAGE, num_key_value_heads=2, num_local_experts=4, num_experts_per_tok=2)
    return language_model(MixtralForCausalLM(config), seed)


@more(learns=0.3, chance=0.02)
def bert(seed: int) -> Training:
    """BERT, which fills in what is masked in texts of two words that take turns."""
    from transformers import BertConfig, BertForMaskedLM

    torch.manual_seed(seed)
    ids = torch.randint(2, 62, (2304, 2), generator=generator(seed)).repeat(1, 8)
    hidden = torch.rand(ids.shape, generator=generator(seed)) < 0.25
    inputs = {"input_ids": ids.masked_fill(hidden, 1), "attention_mask": torch.ones_like(ids)}
    return of_hugging_face(BertForMaskedLM(BertConfig(**LANGUAGE)), inputs, ids.masked_fill(~hidden, -100), steps=200)


@more(learns=0.8, chance=0.5)
def bert_classifier(seed: int) -> Training:
    """BERT with a head of two classes."""
    from transformers import BertConfig, BertForSequenceClassification

    torch.manual_seed(seed)
    ids = torch.randint(2, 64, (2304, 12), generator=generator(seed))
    labels = ((ids > 32).sum(1) > 6).long()
    return of_hugging_face(BertForSequenceClassification(BertConfig(**LANGUAGE)), {"input_ids": ids}, labels, rate=1e-3)


@more(learns=0.3, chance=0.02)
def t5(seed: int) -> Training:
    """T5, which continues a text."""
    from transformers import T5Config, T5ForConditionalGeneration

    torch.manual_seed(seed)
    config = T5Config(vocab_size=64, d_model=32, d_ff=64, d_kv=16, num_layers=2, num_heads=2, decoder_start_token_id=0)
    ids = counting(2304, seed)
    return of_hugging_face(T5ForConditionalGeneration(config), {"input_ids": ids[:, :8]}, ids[:, 8:].contiguous(), rate=1e-2)


@more(learns=0.7, chance=0.1)
def vit(seed: int) -> Training:
    """ViT on digits."""
    from transformers import ViTConfig, ViTForImageClassification

    torch.manual_seed(seed)
    x, y, test_x, test_y = digits()
    net = ViTForImageClassification(ViTConfig(**SIZES, image_size=8, patch_size=2, num_channels=1, num_labels=10))
    return of_hugging_face(net, {"pixel_values": torch.cat((x, test_x))}, torch.cat((y, test_y)), steps=250)


@more(learns=0.3, chance=0.02)
def whisper(seed: int) -> Training:
    """Whisper, which writes down what rows of a spectrum sound."""
    from transformers import WhisperConfig, WhisperForConditionalGeneration

    torch.manual_seed(seed)
    config = WhisperConfig(
        vocab_size=64,
        num_mel_bins=16,
        d_model=32,
        encoder_layers=2,
        decoder_layers=2,
        encoder_attention_heads=2,
        decoder_attention_heads=2,
        encoder_ffn_dim=64,
        decoder_ffn_dim=64,
        max_source_positions=20,
        max_target_positions=16,
        decoder_start_token_id=1,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=1,
    )
    random = generator(seed)
    words = torch.randint(2, 16, (2304, 5), generator=random)
    sound = F.one_hot(words, 16).float().repeat_interleave(8, 1).transpose(1, 2)
    inputs = {"input_features": sound + 0.2 * torch.randn(sound.shape, generator=random)}
    return of_hugging_face(WhisperForConditionalGeneration(config), inputs, words, steps=200)


# Sequences


class LanguageModel(nn.Module):
    """Two layers of LSTM with dropout."""

    def __init__(self, tokens: int, width: int) -> None:
        super().__init__()
        self.embed, self.drop = nn.Embedding(tokens, width), nn.Dropout(0.2)
        self.lstm = nn.LSTM(width, width, 2, dropout=0.2, batch_first=True)
        self.head = nn.Linear(width, tokens)
        self.state: Any = None
        self.carries = False

    def forward(self, tokens: Tensor) -> Tensor:
        state = self.state if self.carries and self.training else None
        states, last = self.lstm(self.drop(self.embed(tokens)), state)
        if self.training:
            self.state = tuple(part.detach() for part in last)
        logits: Tensor = self.head(self.drop(states))
        return logits


def foretelling(net: nn.Module, texts: Tensor) -> float:
    """Minus the cross entropy of each next token."""
    return -float(label_loss(net, texts[:, :-1], texts[:, 1:]))


def sgd(parameters: Any, rate: float) -> torch.optim.Optimizer:
    """SGD without momentum."""
    return torch.optim.SGD(parameters, lr=rate)


@more(learns=-1.95, chance=-2.08)
def lstm_language_model(seed: int) -> Training:
    """A language model of two layers of LSTM, by SGD at a high rate with gradients clipped to 0.25."""
    torch.manual_seed(seed)
    texts, test = markov(2048, 25, 8, 1), markov(256, 25, 8, 10_000)
    score = partial(foretelling, texts=test)
    net = LanguageModel(8, 48)
    return Training(
        net, batches(texts[:, :-1], texts[:, 1:], 32, seed), label_loss, score, rate=15.0, optimizer=sgd, clip=0.25, steps=300
    )


@more(learns=-1.6, chance=-2.08)
def carried_state(seed: int) -> Training:
    """A language model that reads long texts piece by piece, and carries its state on."""
    torch.manual_seed(seed)
    texts, test = markov(32, 20 * 200 + 1, 8, 1), markov(256, 25, 8, 10_000)
    net = LanguageModel(8, 48)
    net.carries = True

    def batch(number: int) -> tuple[Tensor, Tensor]:
        at = number % 200 * 20
        return texts[:, at : at + 20], texts[:, at + 1 : at + 21]

    return Training(net, batch, label_loss, partial(foretelling, texts=test), rate=1e-2, clip=1.0, steps=250)


class Translator(nn.Module):
    """`nn.Transformer`."""

    def __init__(self, tokens: int = 12, width: int = 32, length: int = 8) -> None:
        super().__init__()
        self.embed, self.places = nn.Embedding(tokens, width), nn.Embedding(length, width)
        self.transformer = nn.Transformer(width, 4, 2, 2, 64, dropout=0.1, batch_first=True)
        self.head = nn.Linear(width, tokens)

    def forward(self, texts: tuple[Tensor, Tensor]) -> Tensor:
        source, given = (self.embed(text) + self.places(torch.arange(text.shape[1])) for text in texts)
        mask = nn.Transformer.generate_square_subsequent_mask(given.shape[1])
        logits: Tensor = self.head(self.transformer(source, given, tgt_mask=mask, tgt_is_causal=True))
        return logits


@more(learns=0.5, chance=0.1)
def reversing(seed: int) -> Training:
    """`nn.Transformer` that writes a text backwards."""
    torch.manual_seed(seed)
    source = torch.randint(2, 12, (4352, 6), generator=generator(seed))
    meant = source.flip(1)
    given = F.pad(meant, (1, 0), value=1)[:, :-1]
    test = (source[4096:], given[4096:])
    return Training(
        Translator(),
        batches((source[:4096], given[:4096]), meant[:4096], 64, seed),
        label_loss,
        lambda net: accuracy(net, test, meant[4096:]),
        optimizer=adamw,
        steps=250,
        clip=1.0,
    )


class Pooled(nn.Module):
    """`nn.MultiheadAttention` with a query that is learned."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.embed = nn.Linear(4, width)
        self.query = nn.Parameter(torch.randn(1, 1, width) * 0.1)
        self.attention = nn.MultiheadAttention(width, 4, batch_first=True)
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, 3)

    def forward(self, points: Tensor) -> Tensor:
        x = F.relu(self.embed(points))
        pooled, _ = self.attention(self.query.expand(len(x), -1, -1), x, x)
        logits: Tensor = self.head(self.norm(pooled.squeeze(1)))
        return logits


@more(learns=0.7, chance=0.33)
def set_attention(seed: int) -> Training:
    """Attention over a set of points: which of three columns has the largest value."""
    torch.manual_seed(seed)
    x = torch.randn(4000, 6, 4, generator=generator(seed))
    train_x, train_y, test_x, test_y = split(x, x[:, :, :3].amax(1).argmax(1))
    return Training(
        Pooled(), batches(train_x, train_y, 64, seed), cross_entropy, partial(accuracy, x=test_x, y=test_y), rate=5e-3, steps=200
    )


class Listener(nn.Module):
    """A convolution and a GRU; returns logarithms of probabilities, with time first."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv1d(8, 32, 3, padding=1), nn.BatchNorm1d(32)
        self.gru, self.head = nn.GRU(32, 24, bidirectional=True), nn.Linear(48, 7)

    def forward(self, sound: Tensor) -> Tensor:
        x = F.relu(self.norm(self.conv(sound))).permute(2, 0, 1)
        return self.head(self.gru(x)[0]).log_softmax(-1)


def transcribed(net: nn.Module, sound: Tensor, words: Tensor) -> float:
    """The share of texts that are all right."""
    hits = 0
    for path, meant in zip(net(sound).argmax(-1).t(), words, strict=True):
        said = [int(a) for a, b in zip(path, [-1, *path.tolist()], strict=False) if a != b and a > 0]
        hits += said == meant.tolist()
    return hits / len(words)


@more(learns=0.5, chance=0.0)
def speech(seed: int) -> Training:
    """Texts of sounds, by CTC."""
    torch.manual_seed(seed)
    random = generator(seed)
    words = torch.randint(1, 7, (2304, 4), generator=random)
    sound = F.one_hot(words, 8).float().repeat_interleave(4, 1).transpose(1, 2)
    sound = sound + 0.3 * torch.randn(sound.shape, generator=random)

    def loss(net: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        said = net(x)
        return F.ctc_loss(said, y, torch.full((len(x),), len(said)), torch.full((len(x),), 4))

    score = partial(transcribed, sound=sound[2048:], words=words[2048:])
    return Training(Listener(), batches(sound[:2048], words[:2048], 32, seed), loss, score, rate=5e-3, steps=200)


@more(learns=0.6, chance=0.0)
def forecast(seed: int) -> Training:
    """Forecasts of a series, in windows that come in the order of time."""
    torch.manual_seed(seed)
    time = torch.arange(9000.0)
    series = torch.sin(time / 7) + 0.5 * torch.sin(time / 400) + 0.1 * torch.randn(9000, generator=generator(seed))
    windows = series.unfold(0, 25, 1)
    x, y = windows[:, :24], windows[:, 24:]
    net = nn.Sequential(nn.Linear(24, 48), nn.ReLU(), nn.Linear(48, 1))

    def batch(number: int) -> tuple[Tensor, Tensor]:
        at = number % 200 * 40
        return x[at : at + 40], y[at : at + 40]

    return Training(net, batch, lambda net, x, y: F.mse_loss(net(x), y), partial(r2, x=x[8000:], y=y[8000:]), rate=2e-3)


# Images


def on_digits(net: nn.Module, seed: int, loss: Any = cross_entropy, **others: Any) -> Training:
    """Returns the training of a classifier of digits."""
    x, y, test_x, test_y = digits()
    return Training(net, batches(x, y, 64, seed), loss, partial(accuracy, x=test_x, y=test_y), **others)


def small_mlp(*after: nn.Module) -> nn.Sequential:
    """Returns an MLP for digits."""
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10), *after)


@more(learns=0.9, chance=0.1)
def probabilities_out(seed: int) -> Training:
    """A net that returns probabilities, and a loss that takes their logarithm."""
    torch.manual_seed(seed)
    return on_digits(small_mlp(nn.Softmax(-1)), seed, lambda net, x, y: F.nll_loss((net(x) + 1e-9).log(), y))


@more(learns=0.9, chance=0.1)
def log_probabilities_out(seed: int) -> Training:
    """A net that returns logarithms of probabilities, and `nll_loss`."""
    torch.manual_seed(seed)
    return on_digits(small_mlp(nn.LogSoftmax(-1)), seed, lambda net, x, y: F.nll_loss(net(x), y))


@more(learns=0.9, chance=0.1)
def hinge(seed: int) -> Training:
    """A classifier by the hinge loss of several classes."""
    torch.manual_seed(seed)
    return on_digits(small_mlp(), seed, lambda net, x, y: F.multi_margin_loss(net(x), y))


@more(learns=0.85, chance=0.1)
def logistic(seed: int) -> Training:
    """One linear layer, by SGD."""
    torch.manual_seed(seed)
    return on_digits(nn.Sequential(nn.Flatten(), nn.Linear(64, 10)), seed, optimizer=sgd, rate=0.1)


class Divides(nn.Module):
    """A net that divides its inputs by 255 itself."""

    def __init__(self) -> None:
        super().__init__()
        self.net = small_mlp()

    def forward(self, images: Tensor) -> Tensor:
        return self.net(images.float() / 255)


def bytes_of_digits(seed: int, net: nn.Module, **others: Any) -> Training:
    """Returns the training of a classifier of digits in [0, 255]."""
    x, y, test_x, test_y = digits()
    x, test_x = 127.5 * (x + 1), 127.5 * (test_x + 1)
    return Training(net, batches(x, y, 64, seed), cross_entropy, partial(accuracy, x=test_x, y=test_y), **others)


@more(learns=0.9, chance=0.1)
def divides_by_255(seed: int) -> Training:
    """The net divides pixels by 255 itself."""
    torch.manual_seed(seed)
    return bytes_of_digits(seed, Divides(), rate=5e-3)


@more(learns=0.9, chance=0.1)
def norm_first(seed: int) -> Training:
    """A batch normalisation of pixels in [0, 255] comes first."""
    torch.manual_seed(seed)
    net = nn.Sequential(nn.BatchNorm2d(1), nn.Conv2d(1, 16, 3, 2, 1), nn.ReLU(), nn.Flatten(), nn.Linear(256, 10))
    return bytes_of_digits(seed, net)


@more(learns=0.9, chance=0.1)
def spectral(seed: int) -> Training:
    """Layers whose weights are divided by their largest singular value, and by their norm."""
    torch.manual_seed(seed)
    net = nn.Sequential(
        nn.Flatten(),
        parametrizations.spectral_norm(nn.Linear(64, 64)),
        nn.LeakyReLU(0.1),
        parametrizations.weight_norm(nn.Linear(64, 64)),
        nn.LeakyReLU(0.1),
        nn.Linear(64, 10),
    )
    return on_digits(net, seed)


@more(learns=0.9, chance=0.1)
def deep_with_norms(seed: int) -> Training:
    """An MLP of twelve layers with batch normalisation and dropout."""
    torch.manual_seed(seed)
    hidden = [
        part
        for index in range(12)
        for part in (nn.Linear(64, 64, bias=False), nn.BatchNorm1d(64), nn.ReLU(), nn.Dropout(0.05 if index % 3 else 0.2))
    ]
    return on_digits(nn.Sequential(nn.Flatten(), *hidden, nn.Linear(64, 10)), seed, rate=2e-3, steps=250)


class Denoiser(nn.Module):
    """A convolutional autoencoder with batch normalisation, which returns brightness by a sigmoid."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Sequential(
            nn.Conv2d(1, 16, 3, 2, 1), nn.BatchNorm2d(16), nn.ReLU(), nn.Conv2d(16, 32, 3, 2, 1), nn.BatchNorm2d(32), nn.ReLU()
        )
        self.decoder = nn.Sequential(
            nn.ConvTranspose2d(32, 16, 4, 2, 1), nn.BatchNorm2d(16), nn.ReLU(), nn.ConvTranspose2d(16, 1, 4, 2, 1), nn.Sigmoid()
        )

    def forward(self, images: Tensor) -> Tensor:
        again: Tensor = self.decoder(self.encoder(images))
        return again


@more(learns=0.5, chance=0.0)
def denoiser(seed: int) -> Training:
    """A convolutional autoencoder of noisy digits, by the cross entropy of brightness."""
    torch.manual_seed(seed)
    x, _, test, _ = digits()
    x, test, random = (x + 1) / 2, (test + 1) / 2, generator(seed)
    noisy, noisy_test = (images + 0.2 * torch.randn(images.shape, generator=random) for images in (x, test))
    loss = lambda net, x, y: F.binary_cross_entropy(net(x), y)  # noqa: E731
    return Training(Denoiser(), batches(noisy, x, 64, seed), loss, partial(r2, x=noisy_test, y=test), rate=5e-3)


class Segmenter(nn.Module):
    """A U-Net of two scales."""

    def __init__(self) -> None:
        super().__init__()
        self.down = nn.Sequential(nn.Conv2d(1, 16, 3, 1, 1), nn.ReLU(), nn.Conv2d(16, 16, 3, 1, 1), nn.ReLU())
        self.pool = nn.MaxPool2d(2)
        self.deep = nn.Sequential(nn.Conv2d(16, 32, 3, 1, 1), nn.ReLU(), nn.ConvTranspose2d(32, 16, 2, 2))
        self.up = nn.Sequential(nn.Conv2d(32, 16, 3, 1, 1), nn.ReLU(), nn.Conv2d(16, 3, 1))

    def forward(self, images: Tensor) -> Tensor:
        x = self.down(images)
        logits: Tensor = self.up(torch.cat((x, self.deep(self.pool(x))), 1))
        return logits


def scenes(count: int, seed: int) -> tuple[Tensor, Tensor]:
    """Returns noisy images (n, 1, 16, 16) with a disc and a bar, and the class of each pixel: most are background."""
    random, place = generator(seed), torch.arange(16.0)
    x, y, size, bar = torch.rand(4, count, 1, 1, generator=random) * 12 + 2
    disc = (place[:, None] - x) ** 2 + (place[None, :] - y) ** 2 < (size / 4 + 1) ** 2
    labels = torch.where(disc, 1, torch.where((place[:, None] - bar).abs().expand(count, 16, 16) < 1, 2, 0))
    images = torch.tensor([0.0, 1.0, 0.5])[labels] + 0.3 * torch.randn(labels.shape, generator=random)
    return images.unsqueeze(1), labels


@more(learns=0.6, chance=0.33)
def segmentation(seed: int) -> Training:
    """A U-Net on images of which most is background; scored by the mean accuracy of the classes."""
    torch.manual_seed(seed)
    test_x, test_y = scenes(128, 10_000)

    def score(net: nn.Module) -> float:
        said = net(test_x).argmax(1)
        return sum(float((said == test_y)[test_y == label].float().mean()) for label in range(3)) / 3

    return Training(Segmenter(), batches(*scenes(1024, seed), 16, seed), cross_entropy, score)


# Representations


class TwoViews(nn.Module):
    """An encoder and a projection."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Sequential(nn.Flatten(), nn.Linear(64, 96), nn.BatchNorm1d(96), nn.ReLU(), nn.Linear(96, 48))
        self.projection = nn.Sequential(nn.ReLU(), nn.Linear(48, 24))

    def forward(self, images: Tensor) -> Tensor:
        return F.normalize(self.projection(self.encoder(images)), dim=-1)


def neighbours(net: nn.Module) -> float:
    """The share of digits whose nearest neighbour, by the cosine of the embedding, has their label."""
    x, y, test_x, test_y = digits()
    near = (net(test_x) @ net(x).t()).argmax(1)
    return float((y[near] == test_y).float().mean())


@more(learns=0.75, chance=0.1)
def simclr(seed: int) -> Training:
    """Two noisy views of each digit, and a contrastive loss; there is no target."""
    torch.manual_seed(seed)
    x, _, _, _ = digits()

    def loss(net: nn.Module, x: Tensor, y: tuple[()]) -> Tensor:
        views = torch.cat([x.roll((i, j), (2, 3)) + 0.2 * torch.randn_like(x) for i, j in torch.randint(-1, 2, (2, 2)).tolist()])
        z = net(views)
        alike = (z @ z.t() / 0.2).fill_diagonal_(-1e9)
        return F.cross_entropy(alike, torch.arange(len(z)).roll(len(x)))

    return Training(TwoViews(), batches(x, (), 64, seed), loss, neighbours, rate=3e-3)


class Towers(nn.Module):
    """Two encoders, and a temperature that is learned."""

    def __init__(self) -> None:
        super().__init__()
        self.image = nn.Sequential(nn.Flatten(), nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 24))
        self.text = nn.Sequential(nn.Flatten(), nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 24))
        self.scale = nn.Parameter(torch.tensor(math.log(1 / 0.07)))

    def forward(self, halves: tuple[Tensor, Tensor]) -> Tensor:
        a, b = F.normalize(self.image(halves[0]), dim=-1), F.normalize(self.text(halves[1]), dim=-1)
        return self.scale.exp() * a @ b.t()


@more(learns=0.15, chance=0.01)
def clip(seed: int) -> Training:
    """Two towers tell which upper half of a digit belongs to which lower one; the labels are 0, 1, 2 and so on in every batch."""
    torch.manual_seed(seed)
    x, _, test, _ = digits()
    labels = torch.arange(64)
    batch = batches((x[:, :, :4], x[:, :, 4:]), x, 64, seed)
    loss = lambda net, x, y: (F.cross_entropy(logits := net(x), y) + F.cross_entropy(logits.t(), y)) / 2  # noqa: E731
    held = (test[:128, :, :4], test[:128, :, 4:])
    return Training(
        Towers(),
        lambda number: (batch(number)[0], labels[: len(batch(number)[1])]),
        loss,
        lambda net: accuracy(net, held, torch.arange(128)),
        rate=2e-3,
        optimizer=adamw,
        steps=250,
    )


@more(learns=0.9, chance=0.1)
def triplets(seed: int) -> Training:
    """Metric learning by triplets, whose loss is zero for many."""
    torch.manual_seed(seed)
    x, y, _, _ = digits()
    random = generator(seed)
    positive = torch.multinomial((y[:, None] == y[None, :]).float(), 1, generator=random).squeeze(1)
    negative = torch.multinomial((y[:, None] != y[None, :]).float(), 1, generator=random).squeeze(1)
    loss = lambda net, x, y: F.triplet_margin_loss(*(net(part) for part in x), margin=0.3)  # noqa: E731
    return Training(TwoViews(), batches((x, x[positive], x[negative]), y, 64, seed), loss, neighbours, rate=2e-3)


class Student(nn.Module):
    """A student, and a teacher that is run in evaluation mode and without gradients."""

    def __init__(self, teacher: nn.Module) -> None:
        super().__init__()
        self.student, self.teacher = small_mlp(), teacher.requires_grad_(False)

    def train(self, mode: bool = True) -> Student:
        super().train(mode)
        self.teacher.eval()
        return self

    def forward(self, images: Tensor) -> Tensor:
        logits: Tensor = self.student(images)
        return logits


def large_net() -> nn.Sequential:
    """Returns a net with batch normalisation and dropout for digits."""
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 128), nn.BatchNorm1d(128), nn.ReLU(), nn.Dropout(0.2), nn.Linear(128, 10))


@more(learns=0.9, chance=0.1)
def distillation(seed: int) -> Training:
    """A student learns what a teacher says, which is part of the same module."""
    torch.manual_seed(seed)
    x, y, _, _ = digits()
    teacher, batch = large_net(), batches(x, y, 64, seed + 1)
    optimizer = adam(teacher.parameters(), 3e-3)
    for number in range(80):
        optimizer.zero_grad()
        cross_entropy(teacher, *batch(number)).backward()
        optimizer.step()

    def loss(net: Any, x: Tensor, y: Tensor) -> Tensor:
        with torch.no_grad():
            meant = (net.teacher(x) / 2).softmax(-1)
        said = net(x)
        return 4 * F.kl_div((said / 2).log_softmax(-1), meant, reduction="batchmean") + 0.5 * F.cross_entropy(said, y)

    return on_digits(Student(teacher), seed, loss)


class MeanTeacher(nn.Module):
    """A net, and a moving average of it, which is part of the same module."""

    def __init__(self) -> None:
        super().__init__()
        self.net = large_net()
        self.average = copy.deepcopy(self.net).requires_grad_(False)

    def forward(self, images: Tensor) -> Tensor:
        logits: Tensor = self.net(images)
        return logits


@more(learns=0.9, chance=0.1)
def mean_teacher(seed: int) -> Training:
    """The net also learns what a moving average of it says."""
    torch.manual_seed(seed)

    def loss(net: Any, x: Tensor, y: Tensor) -> Tensor:
        with torch.no_grad():
            meant = net.average(x).softmax(-1)
        said = net(x + 0.1 * torch.randn_like(x))
        return F.cross_entropy(said, y) + (said.softmax(-1) - meant).square().sum(-1).mean()

    def follow(training: Training, optimizer: torch.optim.Optimizer, step: int) -> None:
        with torch.no_grad():
            for slow, fast in zip(training.net.average.parameters(), training.net.net.parameters(), strict=True):
                slow.lerp_(fast, 0.05)

    return on_digits(MeanTeacher(), seed, loss, before_step=[follow])


class WordVectors(nn.Module):
    """Two tables of vectors with sparse gradients; returns how well words and their neighbours go together."""

    def __init__(self, words: int = 200, width: int = 16) -> None:
        super().__init__()
        self.inner, self.outer = nn.Embedding(words, width, sparse=True), nn.Embedding(words, width, sparse=True)
        nn.init.uniform_(self.inner.weight, -0.5 / width, 0.5 / width)
        nn.init.uniform_(self.outer.weight, -0.5 / width, 0.5 / width)

    def forward(self, pair: tuple[Tensor, Tensor]) -> Tensor:
        return (self.inner(pair[0]).unsqueeze(1) * self.outer(pair[1])).sum(-1)


@more(learns=0.8, chance=0.5)
def skip_gram(seed: int) -> Training:
    """Word vectors by negative samples, with `SparseAdam`: of each word one true neighbour and five drawn at random."""
    torch.manual_seed(seed)
    random = generator(seed)
    word = torch.randint(200, (20_000,), generator=random)
    true = (word // 20 * 20 + torch.randint(20, (20_000,), generator=random)) % 200
    others = torch.cat((true.unsqueeze(1), torch.randint(200, (20_000, 5), generator=random)), 1)
    labels = torch.zeros(20_000, 6).index_fill_(1, torch.tensor([0]), 1.0)
    held = (word[-2000:], others[-2000:])
    return Training(
        WordVectors(),
        batches((word[:-2000], others[:-2000]), labels[:-2000], 256, seed),
        lambda net, x, y: F.binary_cross_entropy_with_logits(net(x), y),
        lambda net: float((net(held)[:, :1] > net(held)[:, 1:]).float().mean()),
        rate=2e-2,
        optimizer=lambda parameters, rate: torch.optim.SparseAdam([*parameters], lr=rate),
        steps=300,
    )


class Ratings(nn.Module):
    """The product of a user's and a film's vector, and a bias of each."""

    def __init__(self, users: int = 100, films: int = 80, width: int = 8) -> None:
        super().__init__()
        self.user, self.film = nn.Embedding(users, width), nn.Embedding(films, width)
        self.user_bias, self.film_bias = nn.Embedding(users, 1), nn.Embedding(films, 1)
        for table_ in (self.user, self.film, self.user_bias, self.film_bias):
            nn.init.normal_(table_.weight, std=0.1)
        self.mean = nn.Parameter(torch.zeros(()))

    def forward(self, pair: Tensor) -> Tensor:
        user, film = pair.unbind(1)
        biases = self.user_bias(user) + self.film_bias(film)
        return (self.user(user) * self.film(film)).sum(1) + biases.squeeze(1) + self.mean


@more(learns=0.4, chance=0.0)
def recommender(seed: int) -> Training:
    """Ratings of 1 to 5 stars by the product of two tables of vectors."""
    torch.manual_seed(seed)
    random = generator(seed)
    taste, kind = torch.randn(100, 3, generator=random), torch.randn(80, 3, generator=random)
    pair = torch.stack([torch.randint(count, (12_000,), generator=random) for count in (100, 80)], 1)
    stars = (3.5 + (taste[pair[:, 0]] * kind[pair[:, 1]]).sum(1) * 0.6).round().clamp(1, 5)
    x, y, test_x, test_y = split(pair, stars)
    loss = lambda net, x, y: F.mse_loss(net(x), y)  # noqa: E731
    return Training(Ratings(), batches(x, y, 256, seed), loss, partial(r2, x=test_x, y=test_y), rate=2e-2, steps=300)


# Vectors


class Scaled(nn.Module):
    """A net whose outputs are brought to the units of the target by constants."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(10, 64), nn.ReLU(), nn.Linear(64, 1))

    def forward(self, x: Tensor) -> Tensor:
        return 200 + 70 * self.net(x)


@more(learns=0.6, chance=0.0)
def prices(seed: int) -> Training:
    """A regression of values of 0 to 500, which the net scales itself."""
    torch.manual_seed(seed)
    x, y, test_x, test_y = split(*friedman(seed))
    y, test_y = 200 + 70 * y, 200 + 70 * test_y
    return Training(
        Scaled(), batches(x, y, 64, seed), lambda net, x, y: F.mse_loss(net(x), y), partial(r2, x=test_x, y=test_y), rate=5e-3
    )


@more(learns=0.3, chance=0.0)
def noisy_regression(seed: int) -> Training:
    """A regression on the table of diabetes, of which half is noise."""
    torch.manual_seed(seed)
    x, y, test_x, test_y = table("diabetes")
    net = nn.Sequential(nn.Linear(10, 32), nn.ReLU(), nn.Linear(32, 1))
    loss = lambda net, x, y: F.mse_loss(net(x).squeeze(-1), y)  # noqa: E731
    return Training(net, batches(x, y, 32, seed), loss, partial(r2, x=test_x, y=test_y), rate=2e-3)


@more(learns=0.8, chance=0.5)
def rare_positives(seed: int) -> Training:
    """Two classes, of which one has 3 % of the samples; scored by the area under the ROC curve."""
    torch.manual_seed(seed)
    x = torch.randn(8000, 8, generator=generator(seed))
    logits = x[:, 0] * x[:, 1] + x[:, 2] + x[:, 3]
    x, y, test_x, test_y = split(x, (logits > logits.quantile(0.97)).float())

    def score(net: nn.Module) -> float:
        said = net(test_x).squeeze(1)
        return float((said[test_y > 0][:, None] > said[test_y < 1][None, :]).float().mean())

    net = nn.Sequential(nn.Linear(8, 64), nn.ReLU(), nn.Linear(64, 1))
    loss = lambda net, x, y: F.binary_cross_entropy_with_logits(net(x).squeeze(1), y)  # noqa: E731
    return Training(net, batches(x, y, 128, seed), loss, score)


@more(learns=0.9, chance=0.33)
def full_batch(seed: int) -> Training:
    """A classifier of a small table, all of which is in every batch, by SGD with momentum."""
    torch.manual_seed(seed)
    x, y, test_x, test_y = table("wine")
    net = nn.Sequential(nn.Linear(13, 24), nn.ReLU(), nn.Linear(24, 3))
    score = partial(accuracy, x=test_x, y=test_y)
    return Training(net, lambda number: (x, y), cross_entropy, score, rate=0.05, optimizer=momentum)


def in_closures(training: Training, model: nn.Module) -> Iterator[tuple[int, Tensor, Any, Any]]:
    """Trains by an optimizer that evaluates the loss several times in a step."""
    (optimizer,) = training.optimizers
    for step in range(training.steps):
        training.net.train(training.trains)
        for change in training.before_step:
            change(training, optimizer, step)
        inputs, target = training.batch(step)

        def closure(inputs: Any = inputs, target: Any = target) -> Tensor:
            optimizer.zero_grad()
            loss = training.loss(model, inputs, target)
            loss.backward()
            return loss

        yield step, optimizer.step(closure).detach(), inputs, target


@more(learns=0.8, chance=0.0)
def lbfgs(seed: int) -> Training:
    """A regression by L-BFGS, on all of the data at once."""
    torch.manual_seed(seed)
    x, y, test_x, test_y = split(*friedman(seed))
    net = nn.Sequential(nn.Linear(10, 32), nn.Tanh(), nn.Linear(32, 1))
    return Training(
        net,
        lambda number: (x, y),
        lambda net, x, y: F.mse_loss(net(x), y),
        partial(r2, x=test_x, y=test_y),
        loop=in_closures,
        optimizers=[torch.optim.LBFGS(net.parameters(), max_iter=5, line_search_fn="strong_wolfe")],
        steps=40,
    )


def by_several(training: Training, model: nn.Module) -> Iterator[tuple[int, Tensor, Any, Any]]:
    """Trains by several optimizers that all step after one backward."""
    for step in range(training.steps):
        training.net.train(training.trains)
        for optimizer in training.optimizers:
            for change in training.before_step:
                change(training, optimizer, step)
            if training.clears:
                optimizer.zero_grad()
        inputs, target = training.batch(step)
        loss = training.loss(model, inputs, target)
        loss.backward()
        for optimizer in training.optimizers:
            optimizer.step()
        yield step, loss, inputs, target


@more(learns=0.9, chance=0.1)
def two_optimizers(seed: int) -> Training:
    """The body by SGD, the head by Adam."""
    torch.manual_seed(seed)
    net = small_mlp()
    optimizers = [momentum(net[1].parameters(), 0.05), adam(net[3].parameters(), 3e-3)]
    return on_digits(net, seed, loop=by_several, optimizers=optimizers)


class Graph(nn.Module):
    """Two layers of graph convolution."""

    def __init__(self, edges: Tensor, columns: int) -> None:
        super().__init__()
        self.register_buffer("edges", edges / edges.sum(1, keepdim=True))
        self.first, self.drop, self.second = nn.Linear(columns, 32), nn.Dropout(0.5), nn.Linear(32, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.edges @ self.second(self.drop(F.relu(self.edges @ self.first(x))))


@more(learns=0.7, chance=0.25)
def graph(seed: int) -> Training:
    """A graph convolution: every step has the same graph, and the labels of a tenth of the nodes."""
    torch.manual_seed(seed)
    random = generator(seed)
    labels = torch.randint(4, (400,), generator=random)
    alike = labels[:, None] == labels[None, :]
    edges = (torch.rand(400, 400, generator=random) < torch.where(alike, 0.05, 0.01)).float()
    edges = ((edges + edges.t() + torch.eye(400)) > 0).float()
    x = F.one_hot(labels, 4).float() @ torch.randn(4, 50, generator=random) * 0.3 + torch.randn(400, 50, generator=random)
    known = labels.masked_fill(torch.rand(400, generator=random) > 0.1, -100)
    hidden = known < 0
    return Training(
        Graph(edges, 50),
        lambda number: (x, known),
        cross_entropy,
        lambda net: float((net(x).argmax(1) == labels)[hidden].float().mean()),
        rate=1e-2,
        optimizer=lambda parameters, rate: torch.optim.Adam(parameters, lr=rate, weight_decay=5e-4),
    )


class Wave(nn.Module):
    """A field of tanh layers."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(1, 32), nn.Tanh(), nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 1))

    def forward(self, x: Tensor) -> Tensor:
        field: Tensor = self.net(x)
        return field


@more(learns=0.9, chance=0.0)
def equation(seed: int) -> Training:
    """A net that solves y'' = -y from y(0) = 0, y'(0) = 1, by derivatives of its outputs; there is no target."""
    torch.manual_seed(seed)

    def loss(net: nn.Module, x: Tensor, y: tuple[()]) -> Tensor:
        x = x.detach().requires_grad_(True)
        field = net(x)
        (slope,) = torch.autograd.grad(field.sum(), x, create_graph=True)
        (bend,) = torch.autograd.grad(slope.sum(), x, create_graph=True)
        return (bend + field).square().mean() + 10 * (field[0] ** 2 + (slope[0] - 1) ** 2).sum()

    points = torch.linspace(0, 3, 64).unsqueeze(1)
    return Training(
        Wave(),
        lambda number: (points, ()),
        loss,
        lambda net: r2(net, points, points.sin()),
        rate=1e-2,
        steps=400,
    )


# What makes something


class Diffusion(nn.Module):
    """Predicts the noise of a noisy point, of which it is told the time."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(4, 64), nn.SiLU(), nn.Linear(64, 64), nn.SiLU(), nn.Linear(64, 2))

    def forward(self, x: Tensor, time: Tensor) -> Tensor:
        noise: Tensor = self.net(torch.cat((x, time, (math.pi * time).cos()), 1))
        return noise


@more(learns=0.3, chance=0.0)
def diffusion(seed: int) -> Training:
    """A denoising diffusion model of points; its loss stays near the noise that cannot be known."""
    torch.manual_seed(seed)

    def loss(net: nn.Module, x: Tensor, y: tuple[()]) -> Tensor:
        time, noise = torch.rand(len(x), 1), torch.randn_like(x)
        return F.mse_loss(net((math.pi / 2 * time).cos() * x + (math.pi / 2 * time).sin() * noise, time), noise)

    points, test = crescent(4096, 3) / 2, crescent(2048, 10_000) / 2

    def score(net: nn.Module) -> float:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            return 1 - float(loss(net, test, ()))

    return Training(Diffusion(), batches(points, (), 128, seed), loss, score, rate=3e-3, steps=250)


class Flow(nn.Module):
    """Affine couplings; returns the code and the logarithm of the volume."""

    def __init__(self, depth: int = 4) -> None:
        super().__init__()
        self.steps = nn.ModuleList(nn.Sequential(nn.Linear(1, 32), nn.ReLU(), nn.Linear(32, 2)) for _ in range(depth))
        for step in self.steps:
            nn.init.zeros_(step[2].weight)
            nn.init.zeros_(step[2].bias)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        volume = x.new_zeros(len(x))
        a, b = x.chunk(2, 1)
        for step in self.steps:
            scale, shift = step(a).chunk(2, 1)
            a, b = b * scale.tanh().exp() + shift, a
            volume = volume + scale.tanh().squeeze(1)
        return torch.cat((a, b), 1), volume


@more(learns=-2.9, chance=-4.5)
def flow(seed: int) -> Training:
    """A normalising flow of points, whose last layers start as zero, by the likelihood."""
    torch.manual_seed(seed)
    points, test = crescent(8192, 3), crescent(1024, 10_000)

    def loss(net: nn.Module, x: Tensor, y: tuple[()]) -> Tensor:
        code, volume = net(x)
        return (code.square().sum(1) / 2 + math.log(2 * math.pi) - volume).mean()

    return Training(
        Flow(), batches(points, (), 128, seed), loss, lambda net: -float(loss(net, test, ())), rate=5e-3, clip=10.0, steps=250
    )


class Critic(nn.Module):
    """A generator of points and a critic of them."""

    def __init__(self) -> None:
        super().__init__()
        self.generator = nn.Sequential(nn.Linear(4, 32), nn.ReLU(), nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 2))
        self.critic = nn.Sequential(nn.Linear(2, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 1))

    def forward(self, noise: Tensor) -> Tensor:
        said: Tensor = self.critic(self.generator(noise))
        return said


def critic_first(training: Training, model: nn.Module, sign: float = 1.0) -> Iterator[tuple[int, Tensor, Any, Any]]:
    """Trains the critic three times, then the generator; weights of the critic are clipped after each of its steps.

    Args:
        sign: of the critic's loss.
    """
    of_critic, of_generator = training.optimizers
    net: Any = training.net
    for step in range(training.steps):
        for change in training.before_step:
            for optimizer in training.optimizers:
                change(training, optimizer, step)
        for turn in range(3):
            noise, true = training.batch(3 * step + turn)
            of_critic.zero_grad()
            (sign * (net.critic(net.generator(noise).detach()).mean() - net.critic(true).mean())).backward()
            of_critic.step()
            with torch.no_grad():
                for parameter in net.critic.parameters():
                    parameter.clamp_(-0.1, 0.1)
        of_generator.zero_grad()
        loss = -model(noise).mean()
        loss.backward()
        of_generator.step()
        yield step, loss, noise, true


@more(learns=-0.5, chance=-1.2)
def wasserstein(seed: int) -> Training:
    """A Wasserstein GAN whose critic's weights are clipped."""
    torch.manual_seed(seed)
    net, noise, test = Critic(), torch.randn(1024, 4, generator=generator(2)), crescent(1024, 10_000)
    return Training(
        net,
        batches(torch.randn(8192, 4, generator=generator(1)), crescent(8192, 3), 128, seed),
        lambda net, noise, true: -net(noise).mean(),
        lambda net: -energy_distance(net.get_submodule("generator")(noise), test),
        loop=critic_first,
        optimizers=[torch.optim.RMSprop(part.parameters(), lr=2e-3) for part in (net.critic, net.generator)],
        steps=200,
    )


# Decisions


class ActorCritic(nn.Module):
    """Chances of three actions and a value."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(4, 32), nn.Tanh(), nn.Linear(32, 32), nn.Tanh())
        self.actor, self.value = nn.Linear(32, 3), nn.Linear(32, 1)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        x = self.body(x)
        return self.actor(x), self.value(x).squeeze(-1)


def rewarded(x: Tensor, action: Tensor) -> Tensor:
    """The reward of an action: 1 of the action that the state asks for, else 0."""
    return (torch.stack((x[:, 0] + x[:, 1], x[:, 2] - x[:, 0], x[:, 3] * x[:, 1]), 1).argmax(1) == action).float()


@more(learns=0.7, chance=0.33)
def actor_critic(seed: int) -> Training:
    """Policy gradients with a value for a baseline, of decisions of one step."""
    torch.manual_seed(seed)

    def loss(net: nn.Module, x: Tensor, y: tuple[()]) -> Tensor:
        logits, value = net(x)
        policy = torch.distributions.Categorical(logits=logits)
        action = policy.sample()
        gain = rewarded(x, action) - value
        return -(policy.log_prob(action) * gain.detach()).mean() + 0.5 * gain.square().mean() - 0.01 * policy.entropy().mean()

    x, test = torch.randn(20_000, 4, generator=generator(seed)), torch.randn(1000, 4, generator=generator(10_000))
    return Training(
        ActorCritic(),
        batches(x, (), 128, seed),
        loss,
        lambda net: float(rewarded(test, net(test)[0].argmax(1)).mean()),
        rate=5e-3,
        steps=300,
    )


class Values(nn.Module):
    """The values of actions, and a copy that follows now and then."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(6, 48), nn.ReLU(), nn.Linear(48, 2))
        self.target = copy.deepcopy(self.net)

    def forward(self, state: Tensor) -> Tensor:
        values: Tensor = self.net(F.one_hot(state, 6).float())
        return values


@more(learns=0.9, chance=0.2)
def q_learning(seed: int) -> Training:
    """Q-learning on a corridor of six places, by a copy of the net that is brought up to date every 20 steps."""
    torch.manual_seed(seed)

    def moved(state: Tensor, action: Tensor) -> Tensor:
        return (state + 2 * action - 1).clamp(0, 5)

    def loss(net: Any, seen: tuple[Tensor, Tensor], y: tuple[()]) -> Tensor:
        state, action = seen
        after = moved(state, action)
        reward = (after == 5).float()
        with torch.no_grad():
            meant = reward + 0.9 * (1 - reward) * net.target(F.one_hot(after, 6).float()).amax(1)
        return F.smooth_l1_loss(net(state).gather(1, action.unsqueeze(1)).squeeze(1), meant)

    def follow(training: Training, optimizer: torch.optim.Optimizer, step: int) -> None:
        if step % 20 == 0:
            training.net.target.load_state_dict(training.net.net.state_dict())

    random = generator(seed)
    seen = torch.randint(5, (8000,), generator=random), torch.randint(2, (8000,), generator=random)
    net = Values()

    def score(net: nn.Module) -> float:
        best = 0.9 ** (4 - torch.arange(5.0))
        return 1 - float((net(torch.arange(5)).amax(1) - best).abs().mean() / best.mean())

    return Training(
        net,
        batches(seen, (), 64, seed),
        loss,
        score,
        parameters=lambda net: net.get_submodule("net").parameters(),
        rate=5e-3,
        steps=300,
        before_step=[follow],
    )
