"""Trainings on sequences with the mistakes that people make in them, written by one who did not know the rules."""

from __future__ import annotations

import copy
import functools
import math
import types
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from sklearn import datasets
from torch import Tensor, nn
from torch.optim import Optimizer

from benchmarks.diagnosis.later import LATER, later
from benchmarks.diagnosis.programs.data import accuracy, batches, digits, generator, r2
from benchmarks.diagnosis.training import Training, fault


def rewire(module: Any, forward: Callable[..., Any]) -> None:
    """Gives a module another forward."""
    module.forward = types.MethodType(forward, module)


def tested_on(training: Training) -> dict[str, Any]:
    """Returns what the score was given."""
    score: Any = training.score
    return dict(score.keywords)


def token_loss(net: nn.Module, inputs: Any, target: Tensor) -> Tensor:
    """Cross entropy of logits with the classes last; labels of -100 do not count."""
    return F.cross_entropy(net(inputs).flatten(0, -2), target.flatten(), ignore_index=-100)


def class_loss(net: nn.Module, inputs: Any, target: Tensor) -> Tensor:
    """Cross entropy of one label for each sample."""
    return F.cross_entropy(net(inputs), target)


def squared_loss(net: nn.Module, inputs: Any, target: Tensor) -> Tensor:
    """The mean squared error."""
    return F.mse_loss(net(inputs), target)


def sgd_with_momentum(parameters: Iterable[nn.Parameter], rate: float) -> Optimizer:
    """SGD with a momentum of 0.9."""
    return torch.optim.SGD(parameters, lr=rate, momentum=0.9)


def decoupled(parameters: Iterable[nn.Parameter], rate: float) -> Optimizer:
    """AdamW with a little weight decay."""
    return torch.optim.AdamW(parameters, lr=rate, weight_decay=0.01)


def warm(step: int, steps: int) -> float:
    """Linear warm-up over a tenth of the steps, then a cosine to a tenth of the rate."""
    first = steps // 10
    return (step + 1) / first if step < first else 0.55 + 0.45 * math.cos(math.pi * (step - first) / (steps - first))


# A language model of characters, with a state that goes on from chunk to chunk


@functools.cache
def characters() -> tuple[Tensor, int]:
    """Returns the descriptions of the data sets of scikit-learn as numbers of characters, and how many characters there are."""
    loaders = (datasets.load_iris, datasets.load_wine, datasets.load_breast_cancer, datasets.load_diabetes, datasets.load_digits)
    text = "".join(loader().DESCR for loader in loaders).lower()
    known = sorted(set(text))
    return torch.tensor([known.index(letter) for letter in text]), len(known)


class CharacterModel(nn.Module):
    """An LSTM over characters that keeps its state between chunks of a text."""

    def __init__(self, letters: int, width: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(letters, 24)
        self.lstm = nn.LSTM(24, width, batch_first=True)
        self.head = nn.Linear(width, letters)
        self.state: tuple[Tensor, Tensor] | None = None

    def forward(self, letters: Tensor) -> Tensor:
        """Returns the logits of the letter after each."""
        states, last = self.lstm(self.embedding(letters), self.state if self.training else None)
        if self.training:
            self.state = (last[0].detach(), last[1].detach())
        logits: Tensor = self.head(states)
        return logits


def next_letters(net: nn.Module, text: Tensor) -> float:
    """Minus the cross entropy of the letters of a text that follow."""
    return -float(token_loss(net, text[:, :-1], text[:, 1:]))


@later(learns=-2.2, chance=-3.1)
def character_lstm(seed: int) -> Training:
    """An LSTM that reads sixteen streams of a text in chunks of 32 characters."""
    torch.manual_seed(seed)
    text, count = characters()
    pieces = text[: 219 * 65].reshape(219, 65)
    test, kept = pieces[::9], torch.arange(219) % 9 > 0
    streams = pieces[kept].flatten()[: 16 * 769].reshape(16, 769)

    def batch(number: int) -> tuple[Tensor, Tensor]:
        """The next chunk of each stream, and the same one letter later."""
        start = number % 24 * 32
        return streams[:, start : start + 32], streams[:, start + 1 : start + 33]

    net = CharacterModel(count, 64)
    return Training(net, batch, token_loss, partial(next_letters, text=test), rate=1e-2, clip=1.0, steps=200)


CHARACTER_LSTM = LATER["character-lstm"].faults


@fault(CHARACTER_LSTM, "data", "labels-do-not-fit")
def target_not_shifted(training: Training) -> None:
    """The target is the chunk itself, `y = x`, instead of the letters that follow."""
    given = training.batch
    training.batch = lambda number: (given(number)[0], given(number)[0])


@fault(CHARACTER_LSTM, "architecture", ("wrong-axis", "labels-do-not-fit"))
def logits_flattened_time_first(training: Training) -> None:
    """The logits are transposed to time first before they are flattened, the target is not."""

    def loss(net: nn.Module, inputs: Tensor, target: Tensor) -> Tensor:
        """Cross entropy of what does not belong together."""
        logits = net(inputs)
        return F.cross_entropy(logits.transpose(0, 1).reshape(-1, logits.shape[-1]), target.reshape(-1))

    training.loss = loss


@fault(CHARACTER_LSTM, "architecture", ("output-activation", "wrong-loss"), ("head", "head.1", ""))
def softmax_before_cross_entropy(training: Training) -> None:
    """The head ends in a softmax, and the loss takes another."""
    net: Any = training.net
    net.head = nn.Sequential(net.head, nn.Softmax(dim=-1))


@fault(CHARACTER_LSTM, "optimisation", ("schedule", "rate-too-low"))
def decays_each_batch(training: Training) -> None:
    """`scheduler.step()` of a decay by 0.8 for each epoch is called for each batch."""
    training.schedule = lambda step, steps: 0.8**step


@fault(CHARACTER_LSTM, "state", ("stale-optimizer", "not-in-optimizer"), ("head", "embedding"))
def vocabulary_grown_after_optimizer(training: Training) -> None:
    """The embedding and the head are made anew for the final vocabulary when the optimizer already has the old ones."""
    net: Any = training.net
    old = list(net.parameters())
    training.parameters = lambda net: old
    net.embedding, net.head = copy.deepcopy(net.embedding), copy.deepcopy(net.head)


@fault(CHARACTER_LSTM, "architecture", "dropout", ("embedding", "embedding.1"))
def dropout_of_keep_probability(training: Training) -> None:
    """A dropout is given 0.95, meant as the share that is kept as in old TensorFlow."""
    net: Any = training.net
    net.embedding = nn.Sequential(net.embedding, nn.Dropout(0.95))


# A hand-written transformer decoder that repeats what it was told, in a cipher


def repeated(count: int, seed: int, tokens: int = 12, length: int = 8) -> Tensor:
    """Returns rows of random tokens, then a separator, then for each the token that is next to it in the alphabet."""
    first = torch.randint(1, tokens, (count, length), generator=generator(seed))
    return torch.cat((first, torch.zeros(count, 1, dtype=torch.long), first % (tokens - 1) + 1), 1)


class CausalAttention(nn.Module):
    """Attention to oneself and to what came before."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        """Returns what each place gathers."""
        size, length, width = x.shape
        q, k, v = self.qkv(x).reshape(size, length, 3, self.heads, width // self.heads).permute(2, 0, 3, 1, 4)
        scores = q @ k.transpose(-2, -1) / math.sqrt(q.shape[-1])
        later_ones = torch.ones(length, length, dtype=torch.bool).triu(1)
        gathered = scores.masked_fill(later_ones, -math.inf).softmax(-1) @ v
        joined: Tensor = self.out(gathered.transpose(1, 2).reshape(size, length, width))
        return joined


class DecoderBlock(nn.Module):
    """A block with the norms first."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention = CausalAttention(width, heads)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        """Adds the attention, then the MLP."""
        x = x + self.attention(self.norm1(x))
        added: Tensor = x + self.mlp(self.norm2(x))
        return added


class Decoder(nn.Module):
    """A small GPT with learned positions, whose head is the embedding."""

    def __init__(self, tokens: int, width: int, length: int) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(tokens, width), nn.Embedding(length, width)
        self.blocks = nn.ModuleList(DecoderBlock(width, 4) for _ in range(2))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, tokens, bias=False)
        for embedding in (self.tokens, self.positions):
            nn.init.normal_(embedding.weight, std=0.1)
        self.head.weight = self.tokens.weight

    def forward(self, tokens: Tensor) -> Tensor:
        """Returns the logits of the token after each."""
        x = self.tokens(tokens) + self.positions(torch.arange(tokens.shape[1]))
        for block in self.blocks:
            x = block(x)
        logits: Tensor = self.head(self.norm(x))
        return logits


def says_again(net: nn.Module, texts: Tensor, prompt: int) -> float:
    """The share of right tokens when the net writes on after a prompt."""
    said = texts[:, :prompt]
    while said.shape[1] < texts.shape[1]:
        said = torch.cat((said, net(said)[:, -1:].argmax(-1)), 1)
    return float((said == texts)[:, prompt:].float().mean())


@later(learns=0.7, chance=0.09)
def repeating_decoder(seed: int) -> Training:
    """A causal transformer, trained on rows that repeat themselves in a cipher, scored by what it writes."""
    torch.manual_seed(seed)
    texts, test = repeated(4096, seed), repeated(256, 10_000)
    net = Decoder(12, 48, 16)
    score = partial(says_again, texts=test, prompt=9)
    data = batches(texts[:, :-1], texts[:, 1:], 48, seed)
    return Training(net, data, token_loss, score, rate=3e-3, optimizer=decoupled, schedule=warm, clip=1.0, steps=250)


REPEATING_DECODER = LATER["repeating-decoder"].faults
ATTENTIONS = ("blocks.0.attention", "blocks.1.attention")


def attends(masks: bool = True, joins: bool = True) -> Callable[[Any, Tensor], Tensor]:
    """Returns another forward of the attention."""

    def forward(self: Any, x: Tensor) -> Tensor:
        """The attention with one thing changed."""
        size, length, width = x.shape
        q, k, v = self.qkv(x).reshape(size, length, 3, self.heads, width // self.heads).permute(2, 0, 3, 1, 4)
        scores = q @ k.transpose(-2, -1) / math.sqrt(q.shape[-1])
        if masks:
            scores = scores.masked_fill(torch.ones(length, length, dtype=torch.bool).triu(1), -math.inf)
        gathered = scores.softmax(-1) @ v
        joined: Tensor = self.out((gathered.transpose(1, 2) if joins else gathered).reshape(size, length, width))
        return joined

    return forward


@fault(REPEATING_DECODER, "architecture", "mask", (*ATTENTIONS, "blocks.0", "blocks.1", ""))
def forgot_causal_mask(training: Training) -> None:
    """The mask is computed, but `masked_fill` without the underscore is not assigned: each place sees its answer."""
    net: Any = training.net
    for block in net.blocks:
        rewire(block.attention, attends(masks=False))


@fault(REPEATING_DECODER, "architecture", "wrong-axis", (*ATTENTIONS, "blocks.0", "blocks.1", "blocks.0.attention.out"))
def heads_joined_without_transpose(training: Training) -> None:
    """The heads are joined by `reshape` without `transpose(1, 2)`, so that places and heads are mixed up."""
    net: Any = training.net
    for block in net.blocks:
        rewire(block.attention, attends(joins=False))


@fault(REPEATING_DECODER, "architecture", "never-ran", ("positions", ""))
def positions_not_added(training: Training) -> None:
    """The embedding of positions is made, but forward does not add it."""

    def forward(self: Any, tokens: Tensor) -> Tensor:
        """The decoder without positions."""
        x = self.tokens(tokens)
        for block in self.blocks:
            x = block(x)
        logits: Tensor = self.head(self.norm(x))
        return logits

    rewire(training.net, forward)


@fault(REPEATING_DECODER, "optimisation", "weight-decay")
def decay_of_the_rate(training: Training) -> None:
    """The arguments of AdamW are mixed up by hand: a weight decay of 30 instead of 0.03."""
    training.optimizer = lambda parameters, rate: torch.optim.AdamW(parameters, lr=rate, weight_decay=30.0)


@fault(REPEATING_DECODER, "optimisation", ("rate-too-high", "schedule"))
def rate_of_sgd_without_warm_up(training: Training) -> None:
    """AdamW gets the rate of 0.1 that SGD had, without warm-up."""
    training.rate, training.schedule = 0.1, lambda step, steps: 1.0


# A classifier of texts of several lengths, from the layers of PyTorch


def majority(count: int, seed: int, length: int = 20) -> tuple[tuple[Tensor, Tensor], Tensor]:
    """Returns tokens with zeros behind the end, where they are padding, and whether there are more of 1 to 4 than of 5 to 8."""
    random = generator(seed)
    lengths = 5 + 2 * torch.randint((length - 3) // 2, (count, 1), generator=random)
    lean = torch.where(torch.rand(count, 1, generator=random) < 0.5, 0.35, 0.65)
    high = torch.rand(count, length, generator=random) < lean
    tokens = torch.randint(1, 5, (count, length), generator=random) + 4 * high
    padding = torch.arange(length) >= lengths
    label = (torch.where(high, 1, -1).masked_fill(padding, 0).sum(1) > 0).long()
    return (tokens.masked_fill(padding, 0), padding), label


class TextClassifier(nn.Module):
    """A transformer encoder, and the mean over the tokens that are no padding."""

    def __init__(self, tokens: int, width: int, length: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(tokens, width, padding_idx=0)
        self.positions = nn.Parameter(0.02 * torch.randn(length, width))
        layer = nn.TransformerEncoderLayer(width, 2, 2 * width, dropout=0.1, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(width, 2)

    def forward(self, inputs: tuple[Tensor, Tensor]) -> Tensor:
        """Returns two logits."""
        tokens, padding = inputs
        x = self.encoder(self.embedding(tokens) + self.positions, src_key_padding_mask=padding)
        kept = (~padding).unsqueeze(-1)
        logits: Tensor = self.head((x * kept).sum(1) / kept.sum(1))
        return logits


@later(learns=0.93, chance=0.5)
def padded_classifier(seed: int) -> Training:
    """`nn.TransformerEncoder` with a mask of the padding, on texts of 5 to 19 tokens."""
    torch.manual_seed(seed)
    (x, y), (test_x, test_y) = majority(2048, seed), majority(512, 10_000)
    net = TextClassifier(9, 32, 20)
    return Training(net, batches(x, y, 32, seed), class_loss, partial(accuracy, x=test_x, y=test_y), rate=1e-3, steps=200)


PADDED_CLASSIFIER = LATER["padded-classifier"].faults


@fault(PADDED_CLASSIFIER, "architecture", "mask", ("", "encoder", "encoder.layers.0", "encoder.layers.1", "head"))
def mask_the_other_way(training: Training) -> None:
    """The mask is True for tokens, as in Hugging Face, where PyTorch wants True for padding: only padding is read."""
    net: Any = training.net
    right = net.forward
    net.forward = lambda inputs: right((inputs[0], ~inputs[1]))


@fault(PADDED_CLASSIFIER, "architecture", ("nonfinite", "mask"), ("", "head"))
def mean_of_minus_infinity(training: Training) -> None:
    """The padding is filled with minus infinity for a maximum, which was then changed to a mean."""

    def forward(self: Any, inputs: tuple[Tensor, Tensor]) -> Tensor:
        """The classifier with a mean over infinities."""
        tokens, padding = inputs
        x = self.encoder(self.embedding(tokens) + self.positions, src_key_padding_mask=padding)
        logits: Tensor = self.head(x.masked_fill(padding.unsqueeze(-1), -math.inf).mean(1))
        return logits

    rewire(training.net, forward)


@fault(PADDED_CLASSIFIER, "data", "data-order")
def sorted_by_label(training: Training) -> None:
    """The texts lie in one folder for each label and are read without shuffling: all of one, then all of the other."""
    given, half = training.batch, training.steps // 2

    @functools.cache
    def ordered() -> tuple[Tensor, Tensor, Tensor]:
        """All batches as one, by label."""
        found = [given(number) for number in range(training.steps)]
        tokens, padding = (torch.cat([inputs[place] for inputs, _ in found]) for place in (0, 1))
        labels = torch.cat([target for _, target in found])
        order = labels.argsort(stable=True)
        return tokens[order], padding[order], labels[order]

    def batch(number: int) -> tuple[Any, Tensor]:
        """The rows in the order of the folders."""
        tokens, padding, labels = ordered()
        rows = slice(number % (2 * half) * 32, number % (2 * half) * 32 + 32)
        return (tokens[rows], padding[rows]), labels[rows]

    training.batch = batch


@fault(PADDED_CLASSIFIER, "optimisation", "rate-too-low")
def rate_of_fine_tuning(training: Training) -> None:
    """The rate of 2e-6 is copied from a script that fine-tunes a big model."""
    training.rate = 2e-6


@fault(PADDED_CLASSIFIER, "data", "labels-do-not-fit")
def texts_shuffled_alone(training: Training) -> None:
    """The list of texts is shuffled without that of the labels."""
    given = training.batch

    def batch(number: int) -> tuple[Any, Tensor]:
        """Texts with the labels of others."""
        (tokens, padding), labels = given(number)
        order = torch.randperm(len(labels), generator=generator(number))
        return (tokens[order], padding[order]), labels

    training.batch = batch


@fault(PADDED_CLASSIFIER, "state", "weights-overwritten")
def best_checkpoint_each_time(training: Training) -> None:
    """`load_state_dict` of the best checkpoint stands inside the loop of epochs, and the checkpoint is that of the start."""
    start = copy.deepcopy(training.net.state_dict())

    def restore(training: Training, optimizer: Optimizer, step: int) -> None:
        """Goes back to the checkpoint."""
        if step % 20 == 0 or step == training.steps - 1:
            training.net.load_state_dict(start)

    training.before_step.append(restore)


# A translator with attention that reverses


class Attention(nn.Module):
    """Additive attention."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.query, self.key, self.energy = nn.Linear(width, width), nn.Linear(width, width), nn.Linear(width, 1)

    def forward(self, state: Tensor, memory: Tensor) -> Tensor:
        """Returns what a state reads from the memory."""
        scores = self.energy(torch.tanh(self.query(state).unsqueeze(1) + self.key(memory))).squeeze(-1)
        read: Tensor = (scores.softmax(-1).unsqueeze(-1) * memory).sum(1)
        return read


class Translator(nn.Module):
    """A GRU that reads, and a GRU cell with attention that writes."""

    def __init__(self, tokens: int, width: int) -> None:
        super().__init__()
        self.source, self.target = nn.Embedding(tokens, width), nn.Embedding(tokens, width)
        self.encoder = nn.GRU(width, width, batch_first=True)
        self.attention = Attention(width)
        self.decoder = nn.GRUCell(2 * width, width)
        self.head = nn.Linear(2 * width, tokens)

    def forward(self, inputs: tuple[Tensor, Tensor]) -> Tensor:
        """Returns the logits of each token, of the text and of the tokens before."""
        text, before = inputs
        memory, last = self.encoder(self.source(text))
        state, logits = last[0], []
        for token in self.target(before).unbind(1):
            read = self.attention(state, memory)
            state = self.decoder(torch.cat((token, read), -1), state)
            logits.append(self.head(torch.cat((state, read), -1)))
        return torch.stack(logits, 1)


def translated(net: nn.Module, texts: Tensor) -> float:
    """The share of right tokens when the net writes by itself."""
    written = torch.zeros(len(texts), 1, dtype=torch.long)
    for _ in range(texts.shape[1]):
        written = torch.cat((written, net((texts, written))[:, -1:].argmax(-1)), 1)
    return float((written[:, 1:] == texts.flip(1)).float().mean())


@later(learns=0.8, chance=0.12)
def reversing_translator(seed: int) -> Training:
    """A translator with attention, taught with the right tokens before, that writes a text in reverse."""
    torch.manual_seed(seed)
    texts = torch.randint(1, 10, (4096, 6), generator=generator(seed))
    answers = texts.flip(1)
    before = F.pad(answers[:, :-1], (1, 0))
    test = torch.randint(1, 10, (256, 6), generator=generator(10_000))
    data = batches((texts, before), answers, 32, seed)
    return Training(Translator(10, 48), data, token_loss, partial(translated, texts=test), rate=5e-3, clip=1.0, steps=250)


REVERSING = LATER["reversing-translator"].faults


@fault(REVERSING, "data", ("labels-do-not-fit", "mask"))
def answer_as_decoder_input(training: Training) -> None:
    """The decoder gets the answer without the shift by one, so that it only copies in the training."""
    given = training.batch

    def batch(number: int) -> tuple[Any, Tensor]:
        """The answer as what came before."""
        (texts, _), answers = given(number)
        return (texts, answers), answers

    training.batch = batch


@fault(REVERSING, "architecture", "wrong-axis", ("attention",))
def attention_over_batch(training: Training) -> None:
    """`F.softmax(scores, dim=0)` was right for time first; here it normalises over the batch."""

    def forward(self: Any, state: Tensor, memory: Tensor) -> Tensor:
        """Attention with a softmax over the batch."""
        scores = self.energy(torch.tanh(self.query(state).unsqueeze(1) + self.key(memory))).squeeze(-1)
        read: Tensor = (scores.softmax(0).unsqueeze(-1) * memory).sum(1)
        return read

    net: Any = training.net
    rewire(net.attention, forward)


@fault(REVERSING, "architecture", ("detached", "never-ran"), ("attention", ""))
def state_twice_instead_of_context(training: Training) -> None:
    """Where the context belongs, the state is concatenated with itself, so that the attention is computed in vain."""

    def forward(self: Any, inputs: tuple[Tensor, Tensor]) -> Tensor:
        """The translator without its context."""
        text, before = inputs
        memory, last = self.encoder(self.source(text))
        state, logits = last[0], []
        for token in self.target(before).unbind(1):
            self.attention(state, memory)
            state = self.decoder(torch.cat((token, state), -1), state)
            logits.append(self.head(torch.cat((state, state), -1)))
        return torch.stack(logits, 1)

    rewire(training.net, forward)


@fault(REVERSING, "optimisation", "not-in-optimizer", ("encoder", "source", "attention"))
def only_the_decoder_optimised(training: Training) -> None:
    """Of the two optimizers of the tutorial only that of the decoder's modules is made."""

    def parameters(net: Any) -> Iterable[nn.Parameter]:
        """Those of the decoder."""
        return [*net.target.parameters(), *net.decoder.parameters(), *net.head.parameters()]

    training.parameters = parameters


@fault(REVERSING, "optimisation", "gradients-not-cleared")
def never_zeroed(training: Training) -> None:
    """`optimizer.zero_grad()` is called once before the loop, and the net is not clipped."""
    training.clears, training.clip = False, None


# A pointer network that sorts


class Pointer(nn.Module):
    """A GRU that reads numbers, and one that points at them one after the other."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.embed = nn.Sequential(nn.Linear(1, width), nn.Tanh(), nn.Linear(width, width))
        self.encoder = nn.GRU(width, width, batch_first=True, bidirectional=True)
        self.bridge = nn.Linear(2 * width, width)
        self.decoder = nn.GRUCell(width, width)
        self.query, self.key, self.energy = nn.Linear(width, width), nn.Linear(2 * width, width), nn.Linear(width, 1)

    def forward(self, inputs: tuple[Tensor, Tensor]) -> Tensor:
        """Returns the log-probabilities of the place of each, of the numbers and the right places (which teach)."""
        numbers, places = inputs
        embedded = self.embed(numbers.unsqueeze(-1))
        memory, _ = self.encoder(embedded)
        state = torch.tanh(self.bridge(memory.mean(1)))
        token, used, found = torch.zeros_like(state), torch.zeros(numbers.shape, dtype=torch.bool), []
        for step in range(numbers.shape[1]):
            state = self.decoder(token, state)
            scores = self.energy(torch.tanh(self.query(state).unsqueeze(1) + self.key(memory))).squeeze(-1)
            found.append(self.chances(scores, used))
            place = places[:, step] if self.training else found[-1].argmax(-1)
            token = embedded[torch.arange(len(numbers)), place]
            used = used | F.one_hot(place, numbers.shape[1]).bool()
        return torch.stack(found, 1)

    def chances(self, scores: Tensor, used: Tensor) -> Tensor:
        """The log-probabilities of the places that were not used."""
        return scores.masked_fill(used, -1e9).log_softmax(-1)


def pointer_loss(net: nn.Module, inputs: Any, target: Tensor) -> Tensor:
    """Minus the log-probability of the right place."""
    return F.nll_loss(net(inputs).flatten(0, 1), target.flatten())


@later(learns=0.75, chance=0.2)
def sorting_pointer(seed: int) -> Training:
    """A pointer network that sorts five numbers."""
    torch.manual_seed(seed)
    numbers, test = torch.rand(4096, 5, generator=generator(seed)), torch.rand(512, 5, generator=generator(10_000))
    order, test_order = numbers.argsort(1), test.argsort(1)
    score = partial(accuracy, x=(2 * test - 1, test_order), y=test_order)
    data = batches((2 * numbers - 1, order), order, 48, seed)
    return Training(Pointer(32), data, pointer_loss, score, rate=5e-3, clip=2.0, steps=200)


SORTING_POINTER = LATER["sorting-pointer"].faults


@fault(SORTING_POINTER, "optimisation", "ascent")
def log_probability_without_minus(training: Training) -> None:
    """The loss is the mean of the picked log-probabilities, and the minus is forgotten."""

    def loss(net: nn.Module, inputs: Any, target: Tensor) -> Tensor:
        """The mean log-probability of the right place."""
        value: Tensor = net(inputs).clamp(min=-50).gather(-1, target.unsqueeze(-1)).mean()
        return value

    training.loss = loss


@fault(SORTING_POINTER, "architecture", ("mask", "nonfinite"), ("", "energy"))
def masks_what_is_next(training: Training) -> None:
    """The place is marked as used before it is pointed at, and the mask is minus infinity."""
    net: Any = training.net
    right = net.chances

    def forward(self: Any, inputs: tuple[Tensor, Tensor]) -> Tensor:
        """The pointer with the right places masked."""
        numbers, places = inputs
        embedded = self.embed(numbers.unsqueeze(-1))
        memory, _ = self.encoder(embedded)
        state = torch.tanh(self.bridge(memory.mean(1)))
        token, used, found = torch.zeros_like(state), torch.zeros(numbers.shape, dtype=torch.bool), []
        for step in range(numbers.shape[1]):
            state = self.decoder(token, state)
            scores = self.energy(torch.tanh(self.query(state).unsqueeze(1) + self.key(memory))).squeeze(-1)
            place = places[:, step] if self.training else right(scores, used).argmax(-1)
            used = used | F.one_hot(place, numbers.shape[1]).bool()
            found.append(scores.masked_fill(used & self.training, -math.inf).log_softmax(-1))
            token = embedded[torch.arange(len(numbers)), place]
        return torch.stack(found, 1)

    rewire(net, forward)


@fault(SORTING_POINTER, "data", ("inputs-not-normalised", "saturation"), ("embed", "embed.0", "embed.1"))
def numbers_not_scaled(training: Training) -> None:
    """The numbers are prices between 50 000 and 51 000 that nobody scaled, in the training and in the test."""
    given, test = training.batch, tested_on(training)

    def batch(number: int) -> tuple[Any, Tensor]:
        """A batch of prices."""
        (numbers, places), order = given(number)
        return (50_500 + 500 * numbers, places), order

    training.batch = batch
    x, y = test["x"], test["y"]
    training.score = partial(accuracy, x=(50_500 + 500 * x[0], x[1]), y=y)


@fault(SORTING_POINTER, "optimisation", ("epsilon", "rate-too-low"))
def epsilon_for_stability(training: Training) -> None:
    """Adam gets an eps of 1.0 as in a recipe for Inception, which makes the steps tiny."""
    training.optimizer = lambda parameters, rate: torch.optim.Adam(parameters, lr=rate, eps=1.0)


@fault(
    SORTING_POINTER, "architecture", ("initialisation", "symmetry"), ("", "encoder", "embed", "decoder", "energy", "key", "query")
)
def zeros_for_all_weights(training: Training) -> None:
    """`net.apply(init)` fills all parameters with zeros, not the biases only."""
    for parameter in training.net.parameters():
        nn.init.zeros_(parameter)


# A tagger


def tagged(count: int, seed: int, length: int = 14) -> tuple[tuple[Tensor, Tensor], Tensor]:
    """Returns words with zeros behind the end and the lengths; tags that depend on the words beside, with -100 behind the end."""
    random = generator(seed)
    words = torch.randint(1, 31, (count, length), generator=random)
    lengths = torch.randint(4, length + 1, (count,), generator=random)
    padding = torch.arange(length) >= lengths.unsqueeze(1)
    words = words.masked_fill(padding, 0)
    kinds = torch.where(words == 0, 0, words % 3)
    before, after = F.pad(kinds[:, :-1], (1, 0)), F.pad(kinds[:, 1:], (0, 1))
    tags = torch.where(kinds == 0, 0, 1 + (kinds - 1) + 2 * (after == 1).long()) * (1 - (before == 2).long())
    return (words, lengths), tags.masked_fill(padding, -100)


class Tagger(nn.Module):
    """An LSTM in both directions over packed sentences."""

    def __init__(self, words: int, width: int, tags: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(words, width, padding_idx=0)
        self.dropout = nn.Dropout(0.1)
        self.lstm = nn.LSTM(width, width, batch_first=True, bidirectional=True)
        self.classifier = nn.Linear(2 * width, tags)

    def forward(self, inputs: tuple[Tensor, Tensor]) -> Tensor:
        """Returns the logits of the tags."""
        words, lengths = inputs
        packed = nn.utils.rnn.pack_padded_sequence(self.dropout(self.embedding(words)), lengths, True, enforce_sorted=False)
        states, _ = nn.utils.rnn.pad_packed_sequence(self.lstm(packed)[0], True, total_length=words.shape[1])
        logits: Tensor = self.classifier(self.dropout(states))
        return logits


def tag_score(net: nn.Module, inputs: Any, tags: Tensor) -> float:
    """The share of right tags among those that are other than 0, and those that are 0, weighted alike."""
    right, real, named = net(inputs).argmax(-1) == tags, tags == 0, tags > 0
    return float((right[real].float().mean() + right[named].float().mean()) / 2)


@later(learns=0.7, chance=0.5)
def sentence_tagger(seed: int) -> Training:
    """A tagger with an LSTM in both directions, whose loss leaves the padding out."""
    torch.manual_seed(seed)
    (x, y), (test_x, test_y) = tagged(2048, seed), tagged(256, 10_000)
    data = batches(x, y, 32, seed)
    return Training(Tagger(31, 32, 5), data, token_loss, partial(tag_score, inputs=test_x, tags=test_y), rate=5e-3, steps=150)


SENTENCE_TAGGER = LATER["sentence-tagger"].faults


@fault(SENTENCE_TAGGER, "architecture", ("mask", "wrong-loss", "labels-do-not-fit"))
def ignores_the_tag_zero(training: Training) -> None:
    """`ignore_index=0` is meant for padding, but 0 is also the tag of words without a name."""

    def loss(net: nn.Module, inputs: Any, target: Tensor) -> Tensor:
        """Cross entropy without tag 0."""
        return F.cross_entropy(net(inputs).flatten(0, 1), target.clamp(min=0).flatten(), ignore_index=0)

    training.loss = loss


@fault(SENTENCE_TAGGER, "data", ("labels-do-not-fit", "data-order"))
def words_sorted_for_packing(training: Training) -> None:
    """The sentences are sorted by length for packing, the tags are not."""
    given = training.batch

    def batch(number: int) -> tuple[Any, Tensor]:
        """A batch in which words and tags are of different sentences."""
        (words, lengths), tags = given(number)
        order = lengths.argsort(descending=True)
        return (words[order], lengths[order]), tags

    training.batch = batch


@fault(SENTENCE_TAGGER, "optimisation", ("clipping", "rate-too-low"))
def clipped_to_nothing(training: Training) -> None:
    """SGD with gradients clipped to a norm of 1e-3, where the recipe says 1."""
    training.optimizer, training.clip, training.rate = sgd_with_momentum, 1e-3, 0.1


@fault(SENTENCE_TAGGER, "architecture", ("frozen",), ("embedding", "lstm"))
def features_frozen(training: Training) -> None:
    """Everything but the classifier is frozen as for a pretrained net, but nothing was loaded."""
    for name, parameter in training.net.named_parameters():
        parameter.requires_grad_(name.startswith("classifier"))


@fault(SENTENCE_TAGGER, "state", ("optimizer-reset", "weights-overwritten"))
def model_made_in_the_loop(training: Training) -> None:
    """The weights of the LSTM are initialised again at the start of each epoch, as `init_hidden` resets too much."""

    def reset(training: Training, optimizer: Optimizer, step: int) -> None:
        """Initialises the LSTM."""
        net: Any = training.net
        if step % 5 == 4:
            net.lstm.reset_parameters()

    training.before_step.append(reset)


# A causal convolutional net for a sound of few levels


def sounds(count: int, seed: int, length: int = 48) -> Tensor:
    """Returns sounds of two sines as levels 0 to 15."""
    random = generator(seed)
    pitch = 0.3 + 0.9 * torch.rand(count, 2, 1, generator=random)
    phase = 2 * math.pi * torch.rand(count, 2, 1, generator=random)
    wave = torch.sin(pitch * torch.arange(length) + phase).mean(1)
    return levels(wave)


def levels(wave: Tensor) -> Tensor:
    """Returns the levels of a wave in [-1, 1], by the mu-law."""
    bent = wave.sign() * torch.log1p(15 * wave.abs()) / math.log(16)
    return ((bent + 1) * 7.5).round().long().clamp(0, 15)


class GatedConvolution(nn.Module):
    """A dilated causal convolution with a gate, and what it adds to the stream and to the output."""

    def __init__(self, width: int, dilation: int) -> None:
        super().__init__()
        self.padding = dilation
        self.filter, self.gate = nn.Conv1d(width, width, 2, dilation=dilation), nn.Conv1d(width, width, 2, dilation=dilation)
        self.residual, self.skip = nn.Conv1d(width, width, 1), nn.Conv1d(width, width, 1)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Returns the stream and the output."""
        padded = self.pad(x)
        gated = torch.tanh(self.filter(padded)) * torch.sigmoid(self.gate(padded))
        return x + self.residual(gated), self.skip(gated)

    def pad(self, x: Tensor) -> Tensor:
        """Zeros before the start."""
        return F.pad(x, (self.padding, 0))


class WaveNet(nn.Module):
    """Gated convolutions with growing dilation."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(16, width)
        self.layers = nn.ModuleList(GatedConvolution(width, 2**place) for place in range(4))
        self.output = nn.Sequential(nn.ReLU(), nn.Conv1d(width, width, 1), nn.ReLU(), nn.Conv1d(width, 16, 1))

    def forward(self, sound: Tensor) -> Tensor:
        """Returns the logits of the level after each."""
        x = self.embedding(sound).transpose(1, 2)
        total = torch.zeros_like(x)
        for layer in self.layers:
            x, skip = layer(x)
            total = total + skip
        logits: Tensor = self.output(total).transpose(1, 2)
        return logits


def foretold(net: nn.Module, sound: Tensor) -> float:
    """Minus the cross entropy of the last level, of those before it."""
    return -float(F.cross_entropy(net(sound[:, :-1])[:, -1], sound[:, -1]))


@later(learns=-1.9, chance=-2.6)
def small_wavenet(seed: int) -> Training:
    """A WaveNet of four layers."""
    torch.manual_seed(seed)
    sound, test = sounds(2048, seed), sounds(1024, 10_000)
    data = batches(sound[:, :-1], sound[:, 1:], 24, seed)
    return Training(WaveNet(24), data, token_loss, partial(foretold, sound=test), rate=5e-3, steps=200)


SMALL_WAVENET = LATER["small-wavenet"].faults
LAYERS = tuple(f"layers.{place}" for place in range(4))


@fault(SMALL_WAVENET, "architecture", "mask", ("", *LAYERS))
def padded_on_both_sides(training: Training) -> None:
    """`padding="same"` pads on both sides, so that each layer sees what comes."""
    net: Any = training.net

    def pad_around(self: Any, x: Tensor) -> Tensor:
        """Zeros on both sides."""
        return F.pad(x, (self.padding // 2, self.padding - self.padding // 2))

    for layer in net.layers:
        layer.pad = types.MethodType(pad_around, layer)


@fault(SMALL_WAVENET, "data", ("inputs-not-normalised", "target-scale"))
def sixteen_bits_not_divided(training: Training) -> None:
    """The wave of the training files is not divided by 32768 before the mu-law, so that nearly all is at the two ends."""
    given = training.batch

    def batch(number: int) -> tuple[Tensor, Tensor]:
        """A batch of levels that are clipped to the ends."""
        inputs, target = given(number)
        return torch.where(inputs > 7, 15, 0), torch.where(target > 7, 15, 0)

    training.batch = batch


@fault(SMALL_WAVENET, "architecture", ("initialisation", "saturation"))
def mean_for_deviation(training: Training) -> tuple[str, ...]:
    """`nn.init.normal_(weight, 0.02)` sets the mean to 0.02 and leaves a deviation of 1."""
    for name, module in training.net.named_modules():
        if isinstance(module, nn.Conv1d) and "layers" in name:
            nn.init.normal_(module.weight, 0.02)
    kinds = ("filter", "gate", "residual", "skip")
    return ("", "layers", *LAYERS, *(f"{layer}.{kind}" for layer in LAYERS for kind in kinds))


@fault(SMALL_WAVENET, "architecture", "dead-units", ("output", "output.1", "output.2"))
def outputs_die(training: Training) -> None:
    """The last hidden layer is given a bias of -5 by a line meant for the prior of the last layer."""
    net: Any = training.net
    nn.init.constant_(net.output[1].bias, -5.0)


@fault(SMALL_WAVENET, "optimisation", "momentum")
def betas_swapped(training: Training) -> None:
    """The betas of Adam are given as (0.999, 0.9): the step follows gradients of a thousand steps ago."""
    training.optimizer = lambda parameters, rate: torch.optim.Adam(parameters, lr=rate, betas=(0.999, 0.9))


# A forecaster of series of different levels


def series(count: int, seed: int, length: int = 25) -> tuple[Tensor, Tensor]:
    """Returns windows of series, some of which are flat, and the value after each."""
    random = generator(seed)
    level = 10 * torch.rand(count, 1, generator=random) - 5
    size = 0.5 + 2 * torch.rand(count, 1, generator=random)
    pace, phase = 0.4 + 0.8 * torch.rand(count, 1, generator=random), 6.3 * torch.rand(count, 1, generator=random)
    values = size * torch.sin(pace * torch.arange(length) + phase) + 0.05 * torch.randn(count, length, generator=random)
    values = level + torch.where(torch.rand(count, 1, generator=random) < 0.02, 0.0, values)
    return values[:, :-1], values[:, -1]


class WindowNorm(nn.Module):
    """Takes the mean and the spread of a window away, and tells them."""

    def __init__(self, eps: float = 1e-3) -> None:
        super().__init__()
        self.eps = eps

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Returns the window without its mean and spread, the mean, and the spread."""
        mean, spread = x.mean(1, keepdim=True), (x - x[:, :1]).var(1, keepdim=True, unbiased=False).add(self.eps**2).sqrt()
        return (x - mean) / spread, mean, spread


class Forecaster(nn.Module):
    """A GRU over a window that was normalised by itself."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = WindowNorm()
        self.gru = nn.GRU(1, width, batch_first=True)
        self.head = nn.Linear(width, 1)

    def forward(self, window: Tensor) -> Tensor:
        """Returns the next value, (n,)."""
        x, mean, spread = self.norm(window)
        states, _ = self.gru(x.unsqueeze(-1))
        value: Tensor = (self.head(self.last(states)) * spread + mean).squeeze(-1)
        return value

    def last(self, states: Tensor) -> Tensor:
        """The state after the window."""
        return states[:, -1]


def difference_loss(net: nn.Module, inputs: Tensor, target: Tensor) -> Tensor:
    """The mean squared difference."""
    value: Tensor = (net(inputs) - target).square().mean()
    return value


def skill(net: nn.Module, windows: Tensor, values: Tensor) -> float:
    """The share of the squared error of the mean of the window that the net does not make, at least -1."""
    error, plain = net(windows).reshape(-1) - values, windows.mean(1) - values
    found = float(1 - error.square().mean() / plain.square().mean())
    return found if math.isnan(found) else max(found, -1.0)


@later(learns=0.8, chance=0.0)
def window_forecaster(seed: int) -> Training:
    """A GRU that tells the next value of a series, by SGD with momentum."""
    torch.manual_seed(seed)
    (x, y), (test_x, test_y) = series(2048, seed), series(512, 10_000)
    score = partial(skill, windows=test_x, values=test_y)
    net = Forecaster(32)
    return Training(
        net, batches(x, y, 32, seed), difference_loss, score, rate=0.1, optimizer=sgd_with_momentum, clip=1.0, steps=250
    )


WINDOW_FORECASTER = LATER["window-forecaster"].faults


@fault(WINDOW_FORECASTER, "architecture", "broadcast", ("", "head"))
def squeeze_forgotten(training: Training) -> None:
    """The net returns (n, 1) and the target is (n,): the difference is a matrix of all pairs."""
    net: Any = training.net
    right = net.forward
    net.forward = lambda window: right(window).unsqueeze(-1)


@fault(WINDOW_FORECASTER, "data", "outliers")
def code_of_dead_sensors(training: Training) -> None:
    """A dead sensor writes -999, which stays among the values that are to be told."""
    given = training.batch

    def batch(number: int) -> tuple[Tensor, Tensor]:
        """A batch with codes for missing values."""
        windows, values = given(number)
        dead = torch.rand(len(values), generator=generator(number)) < 0.05
        return windows, values.masked_fill(dead, -999.0)

    training.batch = batch


@fault(WINDOW_FORECASTER, "architecture", ("nonfinite", "normalisation"), ("norm", ""))
def spread_without_epsilon(training: Training) -> None:
    """The spread of the window has no epsilon, and a few windows are flat."""
    net: Any = training.net
    net.norm.eps = 0.0


@fault(WINDOW_FORECASTER, "architecture", ("target-scale", "normalisation"), ("", "head", "norm"))
def not_scaled_back(training: Training) -> None:
    """The forecast is not scaled back: the level that was taken away cannot be told any more."""

    def forward(self: Any, window: Tensor) -> Tensor:
        """The forecast of what is normalised."""
        x, _, _ = self.norm(window)
        states, _ = self.gru(x.unsqueeze(-1))
        value: Tensor = self.head(self.last(states)).squeeze(-1)
        return value

    rewire(training.net, forward)


@fault(WINDOW_FORECASTER, "architecture", "wrong-axis", ("", "gru", "head"))
def state_of_the_first_step(training: Training) -> None:
    """The state is taken by `states[:, 0]`, which is that of the first value of the window."""
    net: Any = training.net
    net.last = lambda states: states[:, 0]


@fault(WINDOW_FORECASTER, "optimisation", ("schedule", "rate-too-low"))
def rate_times_rate(training: Training) -> None:
    """The function for `LambdaLR` returns the rate and not a factor, so that the rate is the product of both."""
    training.schedule = lambda step, steps: 0.1 * 0.01 * (1 - step / steps)


# A gated linear recurrence that adds two numbers far apart


def additions(count: int, seed: int, length: int = 40) -> tuple[Tensor, Tensor]:
    """Returns rows of numbers and marks on two of them, and the sum of these two, standardised."""
    random = generator(seed)
    numbers = 2 * torch.rand(count, length, generator=random) - 1
    places = torch.rand(count, length, generator=random).argsort(1)[:, :2]
    marks = torch.zeros(count, length).scatter_(1, places, 1.0)
    return torch.stack((numbers, marks), -1), (numbers * marks).sum(1, keepdim=True) / math.sqrt(2 / 3)


class LinearRecurrence(nn.Module):
    """A state of which each number decays by itself."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.decay = nn.Parameter(torch.linspace(2.0, 6.0, width))
        self.carried: Tensor | None = None

    def forward(self, inputs: Tensor) -> Tensor:
        """Returns the last state."""
        state, decay = self.begin(inputs), self.decays()
        for x in inputs.unbind(1):
            state = decay * state + x
        return state

    def begin(self, inputs: Tensor) -> Tensor:
        """The state before the first input."""
        return torch.zeros_like(inputs[:, 0])

    def decays(self) -> Tensor:
        """The factors, between 0 and 1."""
        return torch.sigmoid(self.decay)


class StateSpace(nn.Module):
    """An MLP for each step, a linear recurrence, and a head."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.mixer = nn.Sequential(nn.Linear(2, 2 * width), nn.ReLU(), nn.Linear(2 * width, width))
        self.recurrence = LinearRecurrence(width)
        self.norm = nn.LayerNorm(width)
        self.head = nn.Sequential(nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 1))

    def forward(self, rows: Tensor) -> Tensor:
        """Returns the sum."""
        value: Tensor = self.head(self.norm(self.recurrence(self.mixer(rows))))
        return value


@later(learns=0.8, chance=0.0)
def adding_state_space(seed: int) -> Training:
    """The addition task by a linear recurrence."""
    torch.manual_seed(seed)
    (x, y), (test_x, test_y) = additions(4096, seed), additions(512, 10_000)
    score = partial(r2, x=test_x, y=test_y)
    return Training(StateSpace(32), batches(x, y, 48, seed), squared_loss, score, rate=5e-3, clip=1.0, steps=300)


ADDING = LATER["adding-state-space"].faults


@fault(ADDING, "architecture", ("vanishing-gradients", "initialisation"), ("recurrence", ""))
def decays_at_once(training: Training) -> None:
    """The decays begin at sigmoid(-3), as the sign of the parameter is that of another paper: nothing old is remembered."""
    net: Any = training.net
    nn.init.constant_(net.recurrence.decay, -3.0)


@fault(ADDING, "architecture", ("exploding-gradients", "initialisation"), ("recurrence", ""))
def decay_without_sigmoid(training: Training) -> None:
    """The parameter is used as the factor itself, without the sigmoid, so that the state grows with each step."""
    net: Any = training.net
    net.recurrence.decays = lambda: net.recurrence.decay


@fault(ADDING, "architecture", "no-nonlinearity", ("mixer", "mixer.0", "mixer.1", "mixer.2"))
def mixer_is_linear(training: Training) -> None:
    """The activation of the mixer is left out, so that numbers and marks are never multiplied."""
    net: Any = training.net
    net.mixer[1] = nn.Identity()


@fault(ADDING, "architecture", "detached", ("recurrence", "mixer"))
def state_detached_each_step(training: Training) -> None:
    """`state = state.detach()`, meant for between the batches, stands in the loop over the steps."""

    def forward(self: Any, inputs: Tensor) -> Tensor:
        """The recurrence whose gradient ends after a step."""
        state, decay = self.begin(inputs), self.decays()
        for x in inputs.unbind(1):
            state = decay * state.detach() + x
        return torch.as_tensor(state)

    net: Any = training.net
    rewire(net.recurrence, forward)


@fault(ADDING, "state", "carried-state", ("recurrence", ""))
def state_goes_on(training: Training) -> None:
    """The state is kept in the module from batch to batch, though the rows have nothing to do with each other."""

    def begin(self: Any, inputs: Tensor) -> Tensor:
        """The state that the last batch left."""
        old = self.carried if self.training else None
        return torch.zeros_like(inputs[:, 0]) if old is None else old

    def keep(module: Any, inputs: Any, state: Tensor) -> None:
        """Keeps the last state."""
        module.carried = state.detach()

    net: Any = training.net
    net.recurrence.begin = types.MethodType(begin, net.recurrence)
    net.recurrence.register_forward_hook(keep)


@fault(ADDING, "data", "target-scale")
def sums_in_the_thousands(training: Training) -> None:
    """The sums are not standardised, but in cents."""
    given, test = training.batch, tested_on(training)

    def batch(number: int) -> tuple[Tensor, Tensor]:
        """A batch with large targets."""
        rows, sums = given(number)
        return rows, 4000 + 1000 * sums

    training.batch = batch
    x, y = test["x"], test["y"]
    training.score = partial(r2, x=x, y=4000 + 1000 * y)


# Two towers that find what is asked for


def questions(count: int, seed: int, words: int = 60) -> tuple[Tensor, Tensor]:
    """Returns questions of five words and documents of eight; the words of a question are other names of words in it."""
    random = generator(seed)
    documents = torch.rand(count, words, generator=random).argsort(1)[:, :8]
    names = torch.randperm(words, generator=generator(7))
    return names[documents[:, :5]], documents


class Towers(nn.Module):
    """A bag of words on each side, and the cosines between."""

    def __init__(self, words: int, width: int) -> None:
        super().__init__()
        self.query_bag, self.document_bag = nn.EmbeddingBag(words, width), nn.EmbeddingBag(words, width)
        self.query_head, self.document_head = nn.Linear(width, width), nn.Linear(width, width)
        self.scale = nn.Parameter(torch.tensor(math.log(10.0)))

    def forward(self, inputs: tuple[Tensor, Tensor]) -> Tensor:
        """Returns the logits of each document, for each question."""
        questions, documents = inputs
        q, d = self.query_head(self.query_bag(questions)), self.document_head(self.document_bag(documents))
        return self.scale.exp() * self.unit(q) @ self.unit(d).T

    def unit(self, x: Tensor) -> Tensor:
        """Vectors of length 1."""
        return F.normalize(x, dim=-1)


def found_first(net: nn.Module, questions: Tensor, documents: Tensor) -> float:
    """The share of questions whose document comes first among 64."""
    parts = zip(questions.reshape(-1, 64, 5), documents.reshape(-1, 64, 8), strict=True)
    right = [net(pair).argmax(-1) == torch.arange(64) for pair in parts]
    return float(torch.cat(right).float().mean())


@later(learns=0.5, chance=0.016)
def two_towers(seed: int) -> Training:
    """Two towers, with the other documents of the batch as the wrong ones."""
    torch.manual_seed(seed)
    (q, d), (test_q, test_d) = questions(4096, seed), questions(512, 10_000)
    inner = batches((q, d), torch.zeros(4096), 64, seed)

    def batch(number: int) -> tuple[Any, Tensor]:
        """Questions and documents, each at the place of its question."""
        return inner(number)[0], torch.arange(64)

    score = partial(found_first, questions=test_q, documents=test_d)
    return Training(Towers(60, 32), batch, class_loss, score, rate=1e-2, optimizer=decoupled, steps=300)


TWO_TOWERS = LATER["two-towers"].faults


@fault(TWO_TOWERS, "architecture", "frozen", ("query_bag", "document_bag"))
def bags_from_pretrained(training: Training) -> None:
    """`EmbeddingBag.from_pretrained` freezes by default, and what it is given are random vectors."""
    net: Any = training.net
    for bag in (net.query_bag, net.document_bag):
        bag.weight.requires_grad_(False)


@fault(TWO_TOWERS, "architecture", "shared-layers", ("query_bag", "query_head", ""))
def one_tower_twice(training: Training) -> None:
    """Both towers are the same object, `[Tower()] * 2`, though the words are others."""
    net: Any = training.net
    net.query_bag, net.query_head = net.document_bag, net.document_head


@fault(TWO_TOWERS, "data", "labels-constant")
def first_column_is_right(training: Training) -> None:
    """The target is zeros, from the version in which the first column held the right document."""
    given = training.batch
    training.batch = lambda number: (given(number)[0], torch.zeros(64, dtype=torch.long))


@fault(TWO_TOWERS, "data", "repeated-batches")
def iterator_made_anew(training: Training) -> None:
    """`next(iter(loader))` in the loop, of a loader that does not shuffle, gives the first batch each time."""
    given = training.batch
    training.batch = lambda number: given(0)


@fault(TWO_TOWERS, "optimisation", ("loss-scale", "weight-decay"))
def penalty_larger_than_the_loss(training: Training) -> None:
    """The penalty on the lengths of the embeddings is a sum with a weight of 1, beside a loss that is a mean."""

    def loss(net: nn.Module, inputs: Any, target: Tensor) -> Tensor:
        """The loss and the penalty on all weights."""
        penalty = torch.stack([parameter.square().sum() for parameter in net.parameters()]).sum()
        return class_loss(net, inputs, target) + penalty

    training.loss = loss


@fault(TWO_TOWERS, "optimisation", ("lost-updates", "no-steps"))
def zeroed_between_backward_and_step(training: Training) -> None:
    """`optimizer.zero_grad()` stands between `loss.backward()` and `optimizer.step()`."""

    def optimizer(parameters: Iterable[nn.Parameter], rate: float) -> Optimizer:
        """An optimizer whose gradients are gone when it steps."""
        made = decoupled(parameters, rate)
        made.register_step_pre_hook(lambda made, args, kwargs: made.zero_grad())
        return made

    training.optimizer = optimizer


# A recogniser of spoken words, by CTC


def spoken(count: int, seed: int) -> tuple[Tensor, Tensor]:
    """Returns spectra (n, 20, 10) of four sounds, each two to four frames long with a pause behind, and which sounds, 1 to 6."""
    random = generator(seed)
    voices = 3 * torch.randn(7, 10, generator=generator(3))
    voices[0] = 0
    words = torch.randint(1, 7, (count, 4), generator=random)
    long = torch.randint(2, 5, (count, 4), generator=random)
    frames = torch.zeros(count, 20, dtype=torch.long)
    starts = F.pad((long + 1).cumsum(1), (1, 0))[:, :-1]
    for place in range(4):
        inside = torch.arange(20) - starts[:, place : place + 1]
        frames = torch.where((inside >= 0) & (inside < long[:, place : place + 1]), words[:, place : place + 1], frames)
    return 4 + voices[frames] + torch.randn(count, 20, 10, generator=random), words


class Recogniser(nn.Module):
    """A convolution over the frames, a GRU in both directions, and log-probabilities."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.convolution = nn.Conv1d(10, width, 3, padding=1)
        self.norm = nn.BatchNorm1d(width)
        self.gru = nn.GRU(width, width, batch_first=True, bidirectional=True)
        self.head = nn.Linear(2 * width, 7)
        self.log_softmax: Callable[[Tensor], Tensor] = nn.LogSoftmax(dim=-1)

    def forward(self, spectrum: Tensor) -> Tensor:
        """Returns log-probabilities (n, frames, 7)."""
        x = torch.relu(self.norm(self.convolution(spectrum.transpose(1, 2)))).transpose(1, 2)
        return self.log_softmax(self.head(self.gru(x)[0]))


def ctc_loss(net: nn.Module, spectrum: Tensor, words: Tensor) -> Tensor:
    """CTC with the blank 0."""
    chances = net(spectrum).transpose(0, 1)
    lengths = torch.full((len(words),), len(chances), dtype=torch.long)
    return F.ctc_loss(chances, words, lengths, torch.full((len(words),), words.shape[1], dtype=torch.long))


def recognised(net: nn.Module, spectrum: Tensor, words: Tensor) -> float:
    """The share of sounds that the best path has at their place."""
    best, right = net(spectrum).argmax(-1), 0
    for path, meant in zip(best.tolist(), words.tolist(), strict=True):
        said = [now for before, now in zip([0, *path], path, strict=False) if now not in (0, before)]
        right += sum(a == b for a, b in zip(said, meant, strict=False))
    return right / words.numel()


@later(learns=0.7, chance=0.1)
def sound_recogniser(seed: int) -> Training:
    """A recogniser of sounds by CTC."""
    torch.manual_seed(seed)
    (x, y), (test_x, test_y) = spoken(2048, seed), spoken(256, 10_000)
    score = partial(recognised, spectrum=test_x, words=test_y)
    return Training(Recogniser(24), batches(x, y, 32, seed), ctc_loss, score, rate=5e-3, clip=5.0, steps=200)


SOUND_RECOGNISER = LATER["sound-recogniser"].faults


@fault(SOUND_RECOGNISER, "architecture", ("wrong-axis", "output-activation"), ("", "log_softmax"))
def log_softmax_over_frames(training: Training) -> None:
    """`LogSoftmax(dim=1)` is over the frames."""
    net: Any = training.net
    net.log_softmax = nn.LogSoftmax(dim=1)


@fault(SOUND_RECOGNISER, "architecture", ("bottleneck", "nonfinite"), ("convolution", "", "head"))
def stride_leaves_too_few_frames(training: Training) -> None:
    """The stride of 5 leaves four frames for four sounds, and two that are alike need a blank between: the loss is infinite."""
    net: Any = training.net
    net.convolution.stride = (5,)


@fault(SOUND_RECOGNISER, "state", ("statistics-frozen", "normalisation"), ("norm",))
def momentum_of_tensorflow(training: Training) -> None:
    """The momentum of the batch norm is 1e-4, for the 0.9999 of TensorFlow: the running statistics stay those of the start."""
    net: Any = training.net
    net.norm.momentum = 1e-4


@fault(SOUND_RECOGNISER, "data", ("labels-do-not-fit",))
def sounds_of_the_next_file(training: Training) -> None:
    """The list of words has a header line, so that each file gets the words of the one before."""
    given = training.batch

    def batch(number: int) -> tuple[Tensor, Tensor]:
        """Spectra with the words of other spectra."""
        spectrum, words = given(number)
        return spectrum, words.roll(1, 0)

    training.batch = batch


@fault(SOUND_RECOGNISER, "optimisation", "rate-too-high")
def rate_of_plain_sgd(training: Training) -> None:
    """Adam gets the rate of 0.5 that SGD had."""
    training.rate = 0.5


# A transformer on patches of digits


class EncoderBlock(nn.Module):
    """A block of `nn.MultiheadAttention` with the norms first."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention = nn.MultiheadAttention(width, 4, batch_first=True)
        self.mlp = nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Dropout(0.1), nn.Linear(2 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        """Adds the attention, then the MLP."""
        seen = self.norm1(x)
        x = x + self.attention(seen, seen, seen, need_weights=False)[0]
        added: Tensor = x + self.mlp(self.norm2(x))
        return added


class PatchTransformer(nn.Module):
    """Patches of 2 x 2, a token for the class, learned positions."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.patches = nn.Conv2d(1, width, 2, stride=2)
        self.start = nn.Parameter(torch.zeros(1, 1, width))
        self.positions = nn.Parameter(0.02 * torch.randn(1, 17, width))
        self.blocks = nn.Sequential(EncoderBlock(width), EncoderBlock(width))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, 10)

    def forward(self, images: Tensor) -> Tensor:
        """Returns the logits of the digits."""
        x = self.patches(images).flatten(2).transpose(1, 2)
        x = torch.cat((self.start.expand(len(x), -1, -1), x), 1) + self.positions
        logits: Tensor = self.head(self.norm(self.blocks(x))[:, 0])
        return logits


@later(learns=0.8, chance=0.1)
def digit_patches(seed: int) -> Training:
    """A small vision transformer, with warm-up and cosine."""
    torch.manual_seed(seed)
    x, y, test_x, test_y = digits()
    score = partial(accuracy, x=test_x, y=test_y)
    data = batches(x, y, 48, seed)
    net = PatchTransformer(32)
    return Training(net, data, class_loss, score, rate=3e-3, optimizer=decoupled, schedule=warm, clip=1.0, steps=250)


DIGIT_PATCHES = LATER["digit-patches"].faults


@fault(DIGIT_PATCHES, "architecture", "detached", ("", "blocks", "head"))
def token_read_before_the_blocks(training: Training) -> None:
    """The result of the blocks has another name than what the head reads, which is the token before the blocks."""

    def forward(self: Any, images: Tensor) -> Tensor:
        """The transformer whose blocks are of no use."""
        x = self.patches(images).flatten(2).transpose(1, 2)
        x = torch.cat((self.start.expand(len(x), -1, -1), x), 1) + self.positions
        self.blocks(x)
        logits: Tensor = self.head(self.norm(x)[:, 0])
        return logits

    rewire(training.net, forward)


@fault(DIGIT_PATCHES, "architecture", ("initialisation", "saturation", "exploding-gradients"))
def weights_of_unit_normal(training: Training) -> tuple[str, ...]:
    """`_init_weights` calls `nn.init.normal_(weight)` without the std of 0.02."""
    changed = [name for name, module in training.net.named_modules() if isinstance(module, nn.Linear | nn.Conv2d)]
    for name in changed:
        nn.init.normal_(training.net.get_parameter(f"{name}.weight"))
    kinds = ("", ".mlp", ".attention")
    return ("", "blocks", *(f"blocks.{place}{kind}" for place in (0, 1) for kind in kinds), *changed)


@fault(DIGIT_PATCHES, "data", "inputs-not-normalised", ())
def divided_by_255_twice(training: Training) -> None:
    """`ToTensor` divides by 255, and the code does so again, for images that go to 16 only."""
    given, test = training.batch, tested_on(training)

    def dim(images: Tensor) -> Tensor:
        """Images that are nearly black."""
        return 8 * (images + 1) / 255**2

    training.batch = lambda number: (dim(given(number)[0]), given(number)[1])
    training.score = partial(accuracy, x=dim(test["x"]), y=test["y"])


@fault(DIGIT_PATCHES, "data", "noise")
def noise_for_bytes(training: Training) -> None:
    """The noise of the augmentation has a spread of 8, meant for pixels of 0 to 255."""
    given = training.batch

    def batch(number: int) -> tuple[Tensor, Tensor]:
        """Noisy images."""
        images, labels = given(number)
        return images + 8 * torch.randn(images.shape, generator=generator(number)), labels

    training.batch = batch


@fault(DIGIT_PATCHES, "optimisation", ("schedule", "rate-too-low"))
def warm_up_of_the_paper(training: Training) -> None:
    """The warm-up has the 100 000 steps of the paper."""
    training.schedule = lambda step, steps: (step + 1) / 100_000


@fault(DIGIT_PATCHES, "architecture", ("normalisation", "epsilon"), ("norm",))
def epsilon_without_minus(training: Training) -> None:
    """The last norm has an eps of `1e5`, where the minus of `1e-5` is missing."""
    net: Any = training.net
    net.norm.eps = 1e5


# A decoder with rotary positions, shared keys and RMS norms


def periodic(count: int, seed: int, length: int = 16) -> Tensor:
    """Returns rows of random tokens that repeat after 3, 4 or 5 tokens."""
    random = generator(seed)
    first, period = torch.randint(12, (count, 5), generator=random), torch.randint(3, 6, (count, 1), generator=random)
    return first.gather(1, torch.arange(length) % period)


class RMSNorm(nn.Module):
    """Divides by the root of the mean square."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        """Returns x of size 1."""
        return self.weight * x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6)


def rotated(x: Tensor) -> Tensor:
    """Turns pairs of numbers by an angle that grows with the place, (n, heads, length, width)."""
    half = x.shape[-1] // 2
    angles = torch.arange(x.shape[-2]).unsqueeze(1) * 100.0 ** (-torch.arange(half) / half)
    cos, sin = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
    return torch.cat((x[..., :half] * cos - x[..., half:] * sin, x[..., half:] * cos + x[..., :half] * sin), -1)


class GroupedAttention(nn.Module):
    """Causal attention in which two heads share keys and values."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.heads, self.size = 4, width // 4
        self.q, self.kv = nn.Linear(width, width, bias=False), nn.Linear(width, width, bias=False)
        self.out = nn.Linear(width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Returns what each place gathers."""
        q = rotated(self.q(x).unflatten(-1, (self.heads, -1)).transpose(1, 2))
        k, v = self.kv(x).unflatten(-1, (2, self.heads // 2, -1)).transpose(1, 3).repeat_interleave(2, 1).unbind(2)
        scores = self.scores(q, rotated(k)).masked_fill(self.hidden(x.shape[1]), -math.inf)
        gathered: Tensor = self.out((scores.softmax(-1) @ v).transpose(1, 2).flatten(2))
        return gathered

    def scores(self, q: Tensor, k: Tensor) -> Tensor:
        """How well each key fits each query."""
        return q @ k.transpose(-2, -1) / math.sqrt(self.size)

    def hidden(self, length: int) -> Tensor:
        """Which places are not seen."""
        return torch.ones(length, length, dtype=torch.bool).triu(1)


class RotaryBlock(nn.Module):
    """A block with RMS norms and a gated MLP."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = RMSNorm(width), RMSNorm(width)
        self.attention = GroupedAttention(width)
        self.gate, self.up, self.down = nn.Linear(width, 64), nn.Linear(width, 64), nn.Linear(64, width)

    def forward(self, x: Tensor) -> Tensor:
        """Adds the attention, then the MLP."""
        x = x + self.attention(self.norm1(x))
        seen = self.norm2(x)
        added: Tensor = x + self.down(F.silu(self.gate(seen)) * self.up(seen))
        return added


class RotaryDecoder(nn.Module):
    """Two blocks between an embedding and a head."""

    def __init__(self, tokens: int, width: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(tokens, width)
        self.blocks = nn.Sequential(RotaryBlock(width), RotaryBlock(width))
        self.norm = RMSNorm(width)
        self.head = nn.Linear(width, tokens, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        """Returns the logits of the token after each."""
        logits: Tensor = self.head(self.norm(self.blocks(self.embedding(tokens))))
        return logits


def goes_on(net: nn.Module, rows: Tensor) -> float:
    """The share of right tokens of the last eight."""
    return float((net(rows[:, :-1]).argmax(-1) == rows[:, 1:])[:, -8:].float().mean())


@later(learns=0.6, chance=0.09)
def rotary_repeater(seed: int) -> Training:
    """A decoder like Llama that goes on with what repeats."""
    torch.manual_seed(seed)
    rows, test = periodic(8192, seed), periodic(256, 10_000)
    net = RotaryDecoder(12, 32)
    data = batches(rows[:, :-1], rows[:, 1:], 32, seed)
    return Training(net, data, token_loss, partial(goes_on, rows=test), rate=3e-3, optimizer=decoupled, clip=1.0, steps=250)


ROTARY_REPEATER = LATER["rotary-repeater"].faults
GROUPED = ("blocks.0.attention", "blocks.1.attention")


@fault(ROTARY_REPEATER, "architecture", ("mask", "nonfinite"), (*GROUPED, "blocks.0", "blocks.1"))
def hides_itself_too(training: Training) -> None:
    """`triu()` without the 1 hides the place itself, so that the first sees nothing and its softmax is NaN."""
    net: Any = training.net
    for block in net.blocks:
        block.attention.hidden = lambda length: torch.ones(length, length, dtype=torch.bool).triu()


@fault(ROTARY_REPEATER, "architecture", ("attention-scale", "saturation"), (*GROUPED, "blocks.0", "blocks.1"))
def scale_upside_down(training: Training) -> None:
    """The scores are multiplied with the width of the model, not divided by the root of that of a head."""
    net: Any = training.net
    for block in net.blocks:
        block.attention.scores = lambda q, k: q @ k.transpose(-2, -1) * 32


@fault(
    ROTARY_REPEATER,
    "architecture",
    ("normalisation", "exploding-gradients"),
    ("norm", "blocks.0.norm1", "blocks.1.norm1", "blocks.0.norm2", "blocks.1.norm2"),
)
def root_in_place_of_its_inverse(training: Training) -> None:
    """The norm multiplies with `sqrt` where it should with `rsqrt`."""

    def forward(self: Any, x: Tensor) -> Tensor:
        """Makes large what is large."""
        return torch.as_tensor(self.weight * x * torch.sqrt(x.square().mean(-1, keepdim=True) + 1e-6))

    for module in training.net.modules():
        if isinstance(module, RMSNorm):
            rewire(module, forward)


@fault(ROTARY_REPEATER, "state", ("stale-optimizer", "not-in-optimizer", "no-steps"))
def net_made_again_after_the_optimizer(training: Training) -> None:
    """The cell of the notebook that makes the net is run again, that of the optimizer is not."""
    old = list(training.net.parameters())
    training.parameters = lambda net: old
    training.net = RotaryDecoder(12, 32)


@fault(ROTARY_REPEATER, "data", ("labels-do-not-fit",))
def shifted_twice(training: Training) -> None:
    """The loader shifts the targets by one, and the loss shifts them again, as that of Hugging Face does."""

    def loss(net: nn.Module, inputs: Tensor, target: Tensor) -> Tensor:
        """Cross entropy of the token after the next."""
        return F.cross_entropy(net(inputs)[:, :-1].flatten(0, 1), target[:, 1:].flatten())

    training.loss = loss


@fault(ROTARY_REPEATER, "optimisation", ("rate-too-high",))
def rate_with_a_digit_lost(training: Training) -> None:
    """The rate is 0.3 and not 0.003, as a config file says `3e-1`."""
    training.rate = 0.3


# Experts for tokens


def grouped_tokens(count: int, seed: int) -> tuple[Tensor, Tensor]:
    """Returns rows of eight tokens of 16 numbers, of four kinds, and labels by a rule that each kind has for itself."""
    random, fixed = generator(seed), generator(5)
    centres, rules = 2 * torch.randn(4, 16, generator=fixed), torch.randn(4, 16, generator=fixed)
    kinds = torch.randint(4, (count, 8), generator=random)
    inside = torch.randn(count, 8, 16, generator=random)
    return centres[kinds] + inside, ((inside * rules[kinds]).sum(-1) > 0).long()


class Experts(nn.Module):
    """Sends each token to the expert that the router likes best."""

    def __init__(self, width: int, count: int) -> None:
        super().__init__()
        self.router = nn.Linear(width, count)
        made = (nn.Sequential(nn.Linear(width, 2), nn.ReLU(), nn.Linear(2, width)) for _ in range(count))
        self.experts = nn.ModuleList(made)
        self.balance = torch.zeros(())

    def forward(self, x: Tensor) -> Tensor:
        """Returns what the experts say, times how much they are liked."""
        chances = self.chances(self.router(x))
        best, chosen = chances.max(-1)
        use = F.one_hot(chosen, len(self.experts)).float().flatten(0, -2).mean(0)
        self.balance = len(self.experts) * (use * chances.flatten(0, -2).mean(0)).sum()
        said = torch.stack([expert(x) for expert in self.experts], -2)
        taken = said.gather(-2, chosen[..., None, None].expand(*chosen.shape, 1, x.shape[-1])).squeeze(-2)
        return best.unsqueeze(-1) * taken

    def chances(self, logits: Tensor) -> Tensor:
        """How much each expert is liked."""
        return logits.softmax(-1)


class ExpertNet(nn.Module):
    """A projection, experts, and a head."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.project = nn.Linear(16, width)
        self.norm = nn.LayerNorm(width)
        self.moe = Experts(width, 4)
        self.head = nn.Linear(width, 2)

    def forward(self, tokens: Tensor) -> Tensor:
        """Returns two logits for each token."""
        logits: Tensor = self.head(self.moe(self.norm(self.project(tokens))))
        return logits


def balanced_loss(net: Any, inputs: Tensor, target: Tensor, weight: float = 0.01) -> Tensor:
    """The cross entropy, and a little for experts of whom too much is asked."""
    value: Tensor = token_loss(net, inputs, target) + weight * net.moe.balance
    return value


@later(learns=0.75, chance=0.5)
def token_experts(seed: int) -> Training:
    """A classifier of tokens with four experts of whom one answers."""
    torch.manual_seed(seed)
    (x, y), (test_x, test_y) = grouped_tokens(2048, seed), grouped_tokens(256, 10_000)
    score = partial(accuracy, x=test_x, y=test_y)
    return Training(ExpertNet(24), batches(x, y, 32, seed), balanced_loss, score, rate=5e-3, steps=250)


TOKEN_EXPERTS = LATER["token-experts"].faults
EXPERTS = tuple(f"moe.experts.{place}" for place in range(4))


@fault(TOKEN_EXPERTS, "architecture", "shared-layers", ("moe", "moe.experts", "moe.experts.0"))
def one_expert_four_times(training: Training) -> None:
    """`nn.ModuleList([expert] * 4)` holds the same expert four times."""
    net: Any = training.net
    net.moe.experts = nn.ModuleList([net.moe.experts[0]] * 4)


@fault(TOKEN_EXPERTS, "optimisation", "loss-scale")
def balance_above_all(training: Training) -> None:
    """The weight of the balance is 100 and not 0.01."""
    training.loss = partial(balanced_loss, weight=100.0)


@fault(TOKEN_EXPERTS, "architecture", ("detached",), ("moe", "moe.router"))
def chosen_without_gate(training: Training) -> None:
    """What the expert says is not multiplied with how much it is liked, so that the router gets no gradient."""

    def forward(self: Any, x: Tensor) -> Tensor:
        """What the experts say."""
        chances = self.chances(self.router(x))
        chosen = chances.argmax(-1)
        self.balance = torch.zeros(())
        said = torch.stack([expert(x) for expert in self.experts], -2)
        return said.gather(-2, chosen[..., None, None].expand(*chosen.shape, 1, x.shape[-1])).squeeze(-2)

    net: Any = training.net
    rewire(net.moe, forward)


@fault(
    TOKEN_EXPERTS,
    "architecture",
    ("dead-units", "initialisation"),
    (*EXPERTS, *(f"{name}.0" for name in EXPERTS), *(f"{name}.1" for name in EXPERTS), "moe"),
)
def experts_begin_dead(training: Training) -> None:
    """The biases of the experts begin at -10 instead of at -1, so that no ReLU answers."""
    net: Any = training.net
    for expert in net.moe.experts:
        nn.init.constant_(expert[0].bias, -10.0)


@fault(TOKEN_EXPERTS, "optimisation", "not-in-optimizer")
def experts_in_a_list(training: Training) -> tuple[str, ...]:
    """The experts lie in a plain list, so that `parameters()` does not find them."""
    training.parameters = lambda net: [value for name, value in net.named_parameters() if "experts" not in name]
    return ("moe", "moe.experts", *EXPERTS, *(f"{name}.{place}" for name in EXPERTS for place in (0, 2)))


# A policy that writes tokens, by REINFORCE


class Policy(nn.Module):
    """A GRU that writes five tokens after a prompt, and keeps the log-probability of what it wrote."""

    def __init__(self, tokens: int, width: int) -> None:
        super().__init__()
        self.prompt, self.token = nn.Embedding(tokens, width), nn.Embedding(tokens, width)
        self.cell = nn.GRUCell(width, width)
        self.head = nn.Linear(width, tokens)
        self.said = torch.zeros(())
        self.entropy = torch.zeros(())

    def forward(self, prompts: Tensor) -> Tensor:
        """Returns the tokens: drawn in the training, the likeliest in the test."""
        state = torch.tanh(self.prompt(prompts))
        token, tokens, said, entropy = torch.zeros_like(state), [], [], []
        for _ in range(5):
            state = self.cell(token, state)
            choice: Any = torch.distributions.Categorical(logits=self.head(state))
            drawn = choice.sample() if self.training else choice.probs.argmax(-1)
            tokens.append(drawn)
            said.append(self.noted(choice, drawn))
            entropy.append(choice.entropy())
            token = self.token(drawn)
        self.said, self.entropy = torch.stack(said, 1), torch.stack(entropy, 1)
        return torch.stack(tokens, 1)

    def noted(self, choice: Any, drawn: Tensor) -> Tensor:
        """The log-probability of what was drawn."""
        said: Tensor = choice.log_prob(drawn)
        return said


def rewards(tokens: Tensor, wanted: Tensor) -> Tensor:
    """The share of tokens that are as wanted."""
    return (tokens == wanted).float().mean(1)


def policy_loss(net: Any, prompts: Tensor, wanted: Tensor, bonus: float = 0.01) -> Tensor:
    """REINFORCE, with the mean reward of the batch as the baseline, and a bonus for entropy."""
    reward = rewards(net(prompts), wanted)
    advantage = (reward - reward.mean()) / (reward.std() + 1e-6)
    value: Tensor = -(advantage * net.said.sum(1)).mean() - bonus * net.entropy.mean()
    return value


def mean_reward(net: nn.Module, prompts: Tensor, wanted: Tensor) -> float:
    """The mean reward of the likeliest tokens."""
    return float(rewards(net(prompts), wanted).mean())


@later(learns=0.75, chance=0.25)
def token_policy(seed: int) -> Training:
    """A policy that learns by rewards to write what belongs to a prompt."""
    torch.manual_seed(seed)
    prompts = torch.randint(4, (8192,), generator=generator(seed))
    wanted = (prompts.unsqueeze(1) + torch.arange(5)) % 4
    data = batches(prompts, wanted, 64, seed)
    score = partial(mean_reward, prompts=prompts[:256], wanted=wanted[:256])
    return Training(Policy(4, 32), data, policy_loss, score, rate=1e-2, clip=1.0, steps=400)


TOKEN_POLICY = LATER["token-policy"].faults


@fault(TOKEN_POLICY, "optimisation", "ascent")
def minus_in_both_places(training: Training) -> None:
    """The loss has a minus, and the log-probability is already a loss, from `cross_entropy`: the reward is made small."""

    def loss(net: Any, prompts: Tensor, wanted: Tensor) -> Tensor:
        """REINFORCE with the sign turned."""
        reward = rewards(net(prompts), wanted)
        advantage = (reward - reward.mean()) / (reward.std() + 1e-6)
        value: Tensor = -(advantage * -net.said.sum(1)).mean()
        return value

    training.loss = loss


@fault(TOKEN_POLICY, "architecture", "broadcast")
def column_times_row(training: Training) -> None:
    """The log-probabilities are kept as (n, 1) and the rewards are (n,): the mean over all pairs is nothing."""

    def loss(net: Any, prompts: Tensor, wanted: Tensor) -> Tensor:
        """REINFORCE over all pairs."""
        reward = rewards(net(prompts), wanted)
        advantage = (reward - reward.mean()) / (reward.std() + 1e-6)
        value: Tensor = -(advantage * net.said.sum(1, keepdim=True)).mean() - 0.01 * net.entropy.mean()
        return value

    training.loss = loss


@fault(TOKEN_POLICY, "data", ("inputs-constant", "repeated-batches"))
def seeded_at_each_reset(training: Training) -> None:
    """`env.reset(seed=0)` in the loop gives the same prompt each time."""
    given = training.batch

    def batch(number: int) -> tuple[Tensor, Tensor]:
        """Batches of one prompt."""
        prompts, wanted = given(number)
        return torch.ones_like(prompts), (1 + torch.arange(5)).expand_as(wanted) % 4

    training.batch = batch


@fault(TOKEN_POLICY, "architecture", ("noise", "labels-do-not-fit"), ("",))
def probability_of_another_draw(training: Training) -> None:
    """`choice.log_prob(choice.sample())` is that of another draw than the one that is rewarded."""
    net: Any = training.net
    net.noted = lambda choice, drawn: choice.log_prob(choice.sample())


@fault(TOKEN_POLICY, "architecture", "detached", ("", "head"))
def rolled_out_without_gradients(training: Training) -> None:
    """The texts are written under `no_grad`, and `loss.requires_grad_()` silences the error."""

    def loss(net: Any, prompts: Tensor, wanted: Tensor) -> Tensor:
        """REINFORCE without gradients."""
        with torch.no_grad():
            made = policy_loss(net, prompts, wanted)
        return made.requires_grad_()

    training.loss = loss


@fault(TOKEN_POLICY, "optimisation", ("loss-scale", "wrong-loss", "saturation"))
def entropy_with_the_wrong_sign(training: Training) -> None:
    """The bonus for entropy is added to the loss, and with the weight of 1: the policy is certain before it has learned."""
    training.loss = partial(policy_loss, bonus=-1.0)


@fault(TOKEN_POLICY, "state", "weights-overwritten")
def old_policy_copied_the_wrong_way(training: Training) -> None:
    """After each ten steps the policy is loaded from the old policy, where the old one should be loaded from it."""
    old = copy.deepcopy(training.net.state_dict())

    def synchronise(training: Training, optimizer: Optimizer, step: int) -> None:
        """Loads the old policy."""
        if step % 10 == 0:
            training.net.load_state_dict(old)

    training.before_step.append(synchronise)


# Topics of texts, several for each


def topics(count: int, seed: int) -> tuple[Tensor, Tensor]:
    """Returns texts of ten words, of which six are of a few topics, and which of twelve topics they have."""
    random = generator(seed)
    has = torch.rand(count, 12, generator=random) < 0.2
    has[torch.arange(count), torch.randint(12, (count,), generator=random)] = True
    picked = torch.multinomial(has.float(), 10, replacement=True, generator=random)
    words = picked * 10 + torch.randint(10, (count, 10), generator=random)
    common = torch.rand(count, 10, generator=random) < 0.3
    words = torch.where(common, 120 + torch.randint(40, (count, 10), generator=random), words)
    return words, torch.zeros(count, 12).scatter_(1, picked, 1.0)


class TopicNet(nn.Module):
    """The mean of the words of a text, and an MLP."""

    def __init__(self, words: int, width: int) -> None:
        super().__init__()
        self.bag = nn.EmbeddingBag(words, width, mode="mean")
        self.mlp = nn.Sequential(nn.Linear(width, width), nn.ReLU(), nn.Dropout(0.5), nn.Linear(width, 12))

    def forward(self, words: Tensor) -> Tensor:
        """Returns a logit for each topic."""
        offsets = torch.arange(0, words.numel(), words.shape[1])
        logits: Tensor = self.mlp(self.bag(words.flatten(), offsets))
        return logits


def topic_loss(net: nn.Module, words: Tensor, target: Tensor) -> Tensor:
    """The binary cross entropy of each topic."""
    return F.binary_cross_entropy_with_logits(net(words), target)


def f1(net: nn.Module, words: Tensor, target: Tensor) -> float:
    """F1 over all topics, with those whose logit is above 0."""
    said, meant = net(words) > 0, target > 0
    return float(2 * (said & meant).sum() / (said.sum() + meant.sum()))


@later(learns=0.7, chance=0.38)
def topic_bags(seed: int) -> Training:
    """A bag of embeddings that tells the topics of a text; who says all for each gets a F1 of 0.38."""
    torch.manual_seed(seed)
    (x, y), (test_x, test_y) = topics(4096, seed), topics(512, 10_000)
    return Training(
        TopicNet(160, 32), batches(x, y, 48, seed), topic_loss, partial(f1, words=test_x, target=test_y), rate=1e-2, steps=400
    )


TOPIC_BAGS = LATER["topic-bags"].faults


@fault(TOPIC_BAGS, "architecture", ("output-activation", "wrong-loss"), ("mlp", "mlp.4", ""))
def sigmoid_before_with_logits(training: Training) -> None:
    """The net ends in a sigmoid, and the loss is the one with logits."""
    net: Any = training.net
    net.mlp.append(nn.Sigmoid())


@fault(TOPIC_BAGS, "optimisation", ("wrong-loss", "labels-do-not-fit"))
def cross_entropy_of_the_first_topic(training: Training) -> None:
    """`cross_entropy` with `target.argmax(1)`, from the version with one topic for each text."""
    training.loss = lambda net, words, target: F.cross_entropy(net(words), target.argmax(1))


@fault(TOPIC_BAGS, "optimisation", "weight-decay")
def decay_as_of_ridge(training: Training) -> None:
    """Adam gets a weight decay of 1.0, the default of a ridge regression."""
    training.optimizer = lambda parameters, rate: torch.optim.Adam(parameters, lr=rate, weight_decay=1.0)


@fault(TOPIC_BAGS, "data", "labels-constant")
def topics_never_set(training: Training) -> None:
    """`target.scatter(...)` without the underscore is not assigned, so that no text has any topic."""
    given = training.batch
    training.batch = lambda number: (given(number)[0], torch.zeros_like(given(number)[1]))


@fault(TOPIC_BAGS, "architecture", ("wrong-axis", "labels-do-not-fit"), ("bag", ""))
def words_flattened_by_column(training: Training) -> None:
    """The words are laid out by column before they are flattened, so that each bag has words of many texts."""

    def forward(self: Any, words: Tensor) -> Tensor:
        """The net with mixed texts."""
        offsets = torch.arange(0, words.numel(), words.shape[1])
        logits: Tensor = self.mlp(self.bag(words.T.flatten(), offsets))
        return logits

    rewire(training.net, forward)


@fault(TOPIC_BAGS, "state", ("train-mode", "dropout"), ("mlp", "mlp.2"))
def scored_while_training(training: Training) -> None:
    """`net.eval()` is missing before the test."""
    training.evaluates = True
