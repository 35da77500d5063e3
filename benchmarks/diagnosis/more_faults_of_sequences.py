"""Faults of the first 22 of `MORE`, each a mistake that someone could make in writing just that training."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from types import MethodType
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.diagnosis.more import LANGUAGE, MORE, LanguageModel, Listener, Pooled, Translator
from benchmarks.diagnosis.programs.data import batches, digits, generator
from benchmarks.diagnosis.programs.sequences import put, replace
from benchmarks.diagnosis.training import Training, fault

SIZES: dict[str, Any] = LANGUAGE


def call_by(module: nn.Module, forward: Callable[..., Any]) -> None:
    """Gives a module another forward, of the module and what it is called with."""
    module.forward = MethodType(forward, module)


def batches_by(training: Training, change: Callable[[Any, Any], tuple[Any, Any]]) -> None:
    """Changes the batches of the training by a function of inputs and target."""
    batch = training.batch
    training.batch = lambda number: change(*batch(number))


def inputs_by(training: Training, change: Callable[[Any], Any], name: str = "x") -> None:
    """Changes the inputs, of the training and of the score, which has them by a name."""
    batches_by(training, lambda x, y: (change(x), y))
    score = cast("partial[float]", training.score)
    training.score = partial(score.func, *score.args, **{**score.keywords, name: change(score.keywords[name])})


def layers(net: nn.Module, kinds: type | tuple[type, ...] = (nn.Linear, nn.Embedding)) -> tuple[str, ...]:
    """Returns the names of the layers of some kinds."""
    return tuple(name for name, module in net.named_modules() if isinstance(module, kinds))


# GPT-2


@fault(MORE["gpt2"].faults, "architecture", "mask", ("transformer.h.0.attn", "transformer.h.1.attn"))
def causal_mask_forgotten(training: Training) -> None:
    """In training the attention has no causal mask; later, token by token, there is nothing to be seen behind."""

    def open_in_training(attention: Any, args: Any) -> None:
        attention.is_causal = not attention.training

    for index in (0, 1):
        training.net.get_submodule(f"transformer.h.{index}.attn").register_forward_pre_hook(open_in_training)


@fault(MORE["gpt2"].faults, "data", "labels-do-not-fit")
def labels_shifted_twice(training: Training) -> None:
    """The labels are shifted by one in the collate function, and the model shifts them again."""
    batches_by(training, lambda x, y: (x, F.pad(y[:, 1:], (0, 1), value=-100)))


@fault(MORE["gpt2"].faults, "architecture", "dropout", ("transformer.drop", "transformer.h.0.mlp.dropout"))
def share_kept_for_share_dropped(training: Training) -> tuple[str, ...]:
    """All dropouts are 0.9, which was meant as the share that is kept."""
    for module in training.net.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.9
    return (*layers(training.net, nn.Dropout), "transformer.h.0.attn", "transformer.h.1.attn")


@fault(
    MORE["gpt2"].faults,
    "architecture",
    ("initialisation", "outliers"),
    ("transformer.wpe", "transformer.drop", "transformer.h.0", "transformer.h.0.ln_1"),
)
def places_of_large_weights(training: Training) -> None:
    """The table of places was made longer by hand, with the weights of `nn.Embedding`, which are 50 times those of GPT-2."""
    replace(training.net, "transformer.wpe", nn.Embedding(64, 32))


# Llama


@fault(
    MORE["llama"].faults,
    "architecture",
    ("bottleneck", "vanishing-gradients"),
    (
        *(f"model.layers.{index}{part}" for index in (0, 1) for part in ("", ".self_attn", ".self_attn.o_proj")),
        *(f"model.layers.{index}.post_attention_layernorm" for index in (0, 1)),
    ),
)
def no_residual_around_attention(training: Training) -> None:
    """What attention returns takes the place of the stream; the residual was forgotten."""

    def forward(layer: Any, hidden_states: Tensor, **others: Any) -> Tensor:
        attended: Tensor = layer.self_attn(hidden_states=layer.input_layernorm(hidden_states), **others)[0]
        passed: Tensor = attended + layer.mlp(layer.post_attention_layernorm(attended))
        return passed

    for index in (0, 1):
        call_by(training.net.get_submodule(f"model.layers.{index}"), forward)


@fault(MORE["llama"].faults, "optimisation", ("not-in-optimizer", "frozen"))
def group_overwritten(training: Training) -> tuple[str, ...]:
    """Of the two groups of parameters, with weight decay and without, the optimizer gets the second only: the norms."""
    training.parameters = lambda net: [parameter for parameter in net.parameters() if parameter.dim() < 2]
    return layers(training.net)


@fault(MORE["llama"].faults, "data", "labels-do-not-fit")
def answers_ignored(training: Training) -> None:
    """The mask of the loss is the wrong way round: the first tokens, the prompt, are learned, and the answer is ignored."""
    batches_by(training, lambda x, y: (x, torch.where(torch.arange(y.shape[1]) < 3, y, -100)))


@fault(MORE["llama"].faults, "optimisation", "momentum")
def betas_swapped(training: Training) -> None:
    """The betas of AdamW are swapped, so that gradients are averaged over a thousand steps."""
    training.optimizer = lambda parameters, rate: torch.optim.AdamW(parameters, lr=rate, betas=(0.999, 0.9))


# Mixtral


@fault(
    MORE["mixtral"].faults,
    "architecture",
    ("mask", "bottleneck"),
    tuple(f"model.layers.{index}{part}" for index in (0, 1) for part in ("", ".self_attn")),
)
def window_of_one(training: Training) -> None:
    """The sliding window of the attention is one block by its author's count, but one token by that of the library."""
    from transformers import MixtralConfig, MixtralForCausalLM

    config = MixtralConfig(**SIZES, num_key_value_heads=2, num_local_experts=4, num_experts_per_tok=2, sliding_window=1)
    training.net = MixtralForCausalLM(config)


@fault(
    MORE["mixtral"].faults,
    "architecture",
    ("nonfinite", "exploding-gradients", "normalisation"),
    tuple(f"model.layers.{index}{part}" for index in (0, 1) for part in (".mlp", ".mlp.experts", ".mlp.gate")),
)
def logits_of_the_router_divided_by_their_sum(training: Training) -> None:
    """The softmax of the router is missing: its two largest logits are divided by their sum, which can be near zero."""

    def forward(gate: Any, hidden_states: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        logits = F.linear(hidden_states.reshape(-1, gate.hidden_dim), gate.weight)
        top, index = logits.topk(gate.top_k, dim=-1)
        return logits, top / top.sum(-1, keepdim=True), index

    for index in (0, 1):
        call_by(training.net.get_submodule(f"model.layers.{index}.mlp.gate"), forward)


@fault(MORE["mixtral"].faults, "data", "repeated-batches")
def loader_begins_anew(training: Training) -> None:
    """`next(iter(loader))` with a fixed seed returns the same batch in each step."""
    batch = training.batch
    training.batch = lambda number: batch(0)


# BERT


@fault(
    MORE["bert"].faults,
    "architecture",
    "mask",
    tuple(f"bert.encoder.layer.{index}.attention{part}" for index in (0, 1) for part in ("", ".self")),
)
def left_as_a_decoder(training: Training) -> None:
    """`is_decoder=True` was left in the configuration, so that no word sees what comes after it."""
    from transformers import BertConfig, BertForMaskedLM

    training.net = BertForMaskedLM(BertConfig(**SIZES, is_decoder=True))


@fault(MORE["bert"].faults, "data", "labels-do-not-fit")
def visible_words_learned(training: Training) -> None:
    """The labels of the masked words are ignored, in place of those of the words that can be seen."""
    batches_by(training, lambda x, y: (x, x["input_ids"].masked_fill(x["input_ids"] == 1, -100)))


@fault(
    MORE["bert"].faults,
    "architecture",
    ("inputs-constant", "symmetry", "bottleneck"),
    ("bert.embeddings", "bert.embeddings.position_embeddings", "bert.embeddings.LayerNorm"),
)
def all_in_the_first_place(training: Training) -> None:
    """The buffer of places is zeros, so that all words stand in the first place."""
    training.net.get_buffer("bert.embeddings.position_ids").zero_()


@fault(
    MORE["bert"].faults,
    "architecture",
    "output-activation",
    ("cls.predictions", "cls.predictions.decoder", "cls.predictions.decoder.0", "cls.predictions.decoder.1"),
)
def softmax_in_the_head(training: Training) -> None:
    """The head returns probabilities, and the loss of the model takes them for logits."""
    replace(
        training.net,
        "cls.predictions.decoder",
        nn.Sequential(training.net.get_submodule("cls.predictions.decoder"), nn.Softmax(-1)),
    )


# BERT, of classes


@fault(MORE["bert-classifier"].faults, "optimisation", "rate-too-low")
def rate_of_fine_tuning(training: Training) -> None:
    """The rate is that of fine-tuning, but the weights are random."""
    training.rate = 2e-5


@fault(MORE["bert-classifier"].faults, "architecture", "frozen")
def body_frozen(training: Training) -> tuple[str, ...]:
    """Only the head is trained, as if the body were pretrained."""
    training.net.get_submodule("bert").requires_grad_(False)
    return ("bert", *(name for name in layers(training.net, (nn.Linear, nn.Embedding, nn.LayerNorm)) if name.startswith("bert")))


@fault(MORE["bert-classifier"].faults, "architecture", ("initialisation", "saturation"))
def range_of_weights_mistyped(training: Training) -> tuple[str, ...]:
    """The `initializer_range` is 2 in place of 0.02."""
    from transformers import BertConfig, BertForSequenceClassification

    training.net = BertForSequenceClassification(BertConfig(**SIZES, initializer_range=2.0))
    blocks = (
        f"bert.encoder.layer.{index}{part}" for index in (0, 1) for part in (".attention", ".attention.self", ".intermediate")
    )
    return (*layers(training.net), *blocks, "bert.pooler", "bert.pooler.activation")


@fault(MORE["bert-classifier"].faults, "data", ("noise", "bottleneck"))
def texts_truncated(training: Training) -> None:
    """The tokenizer truncates the texts to the first three tokens."""
    inputs_by(training, lambda inputs: {name: x[:, :3] for name, x in inputs.items()}, "inputs")


# T5


@fault(
    MORE["t5"].faults,
    "architecture",
    "never-ran",
    tuple(
        f"decoder.block.{index}.layer.1{part}"
        for index in (0, 1)
        for part in ("", ".layer_norm", ".EncDecAttention", *(f".EncDecAttention.{name}" for name in "qkvo"))
    ),
)
def text_not_looked_at(training: Training) -> None:
    """The decoder skips the attention to the text."""

    def forward(layer: Any, hidden_states: Tensor, *args: Any, **others: Any) -> tuple[Tensor, None, None]:
        return hidden_states, None, None

    for index in (0, 1):
        call_by(training.net.get_submodule(f"decoder.block.{index}.layer.1"), forward)


@fault(
    MORE["t5"].faults,
    "architecture",
    "mask",
    (
        *(f"encoder.block.{index}.layer.0{part}" for index in (0, 1) for part in ("", ".SelfAttention")),
        *(f"decoder.block.{index}.layer.1{part}" for index in (0, 1) for part in ("", ".EncDecAttention")),
    ),
)
def padding_attended(training: Training) -> None:
    """The attention mask is 1 where there is padding, and 0 where there are words."""
    inputs_by(training, lambda inputs: {**inputs, "attention_mask": (inputs["input_ids"] == 0).long()}, "inputs")


@fault(MORE["t5"].faults, "data", ("labels-do-not-fit", "noise"))
def texts_beside_other_texts(training: Training) -> None:
    """The texts are shuffled without their continuations."""
    batches_by(training, lambda x, y: ({name: values.roll(1, 0) for name, values in x.items()}, y))


@fault(MORE["t5"].faults, "architecture", ("initialisation", "attention-scale", "saturation"))
def queries_of_usual_weights(training: Training) -> tuple[str, ...]:
    """All linear layers are drawn anew from a normal distribution, though T5 has no scale of the scores but small queries."""
    for module in training.net.modules():
        if isinstance(module, nn.Linear) and module.weight.shape == (32, 32):
            nn.init.normal_(module.weight)
    return tuple(name for name, _ in training.net.named_modules() if "Attention" in name and "bias" not in name)


# ViT


@fault(
    MORE["vit"].faults,
    "architecture",
    "wrong-axis",
    tuple(f"vit.layers.{index}.attention{part}" for index in (0, 1) for part in ("", ".q_proj", ".k_proj", ".v_proj", ".o_proj")),
)
def heads_attend_to_heads(training: Training) -> None:
    """The heads were not put before the patches, so that in each patch the heads attend to one another."""

    def forward(attention: Any, hidden_states: Tensor, *args: Any, **others: Any) -> tuple[Tensor, None]:
        shape = (*hidden_states.shape[:-1], -1, attention.head_dim)
        parts = (layer(hidden_states).view(shape) for layer in (attention.q_proj, attention.k_proj, attention.v_proj))
        return attention.o_proj(F.scaled_dot_product_attention(*parts).flatten(2)), None

    for index in (0, 1):
        call_by(training.net.get_submodule(f"vit.layers.{index}.attention"), forward)


@fault(
    MORE["vit"].faults,
    "architecture",
    ("vanishing-gradients", "bottleneck"),
    (
        *(f"vit.layers.{index}" for index in (0, 1)),
        *(
            f"vit.layers.{index}.{part}"
            for index in (0, 1)
            for part in ("attention", "attention.o_proj", "layernorm_after", "mlp", "mlp.fc2", "dropout")
        ),
    ),
)
def no_residuals(training: Training) -> None:
    """The blocks are run one after the other, without residuals."""

    def forward(layer: Any, hidden_states: Tensor, *args: Any, **others: Any) -> Tensor:
        attended: Tensor = layer.dropout(layer.attention(layer.layernorm_before(hidden_states))[0])
        passed: Tensor = layer.dropout(layer.mlp(layer.layernorm_after(attended)))
        return passed

    for index in (0, 1):
        call_by(training.net.get_submodule(f"vit.layers.{index}"), forward)


@fault(MORE["vit"].faults, "data", "inputs-not-normalised", ("vit.embeddings", "vit.embeddings.patch_embeddings.projection"))
def pixels_in_bytes(training: Training) -> None:
    """The image processor was left out: pixels are 0 to 255."""
    inputs_by(training, lambda inputs: {name: 127.5 * (x + 1) for name, x in inputs.items()}, "inputs")


@fault(MORE["vit"].faults, "data", ("noise", "labels-do-not-fit"))
def digits_turned_and_flipped(training: Training) -> None:
    """The augmentation of satellite images: each digit is turned by a multiple of 90 degrees, and flipped or not."""
    batch = training.batch

    def turned(number: int) -> tuple[Any, Any]:
        x, y = batch(number)
        turns = torch.randint(4, (len(y),), generator=generator(number)).tolist()
        images = [image.rot90(turn, (1, 2)) for image, turn in zip(x["pixel_values"], turns, strict=True)]
        flips = torch.rand(len(y), 1, 1, 1, generator=generator(number)) < 0.5
        images_ = torch.stack(images)
        return {"pixel_values": torch.where(flips, images_.flip(3), images_)}, y

    training.batch = turned


@fault(MORE["vit"].faults, "state", "weights-overwritten")
def average_never_swapped_back(training: Training) -> None:
    """Every ten steps the moving average is loaded for an evaluation, and the weights that were trained are not put back."""
    average = copy.deepcopy(training.net)

    def follow(training: Training, optimizer: torch.optim.Optimizer, step: int) -> None:
        with torch.no_grad():
            for slow, fast in zip(average.parameters(), training.net.parameters(), strict=True):
                slow.lerp_(fast, 0.01)
        if step % 10 == 9:
            training.net.load_state_dict(average.state_dict())

    training.before_step.append(follow)


# Whisper


@fault(MORE["whisper"].faults, "data", "labels-do-not-fit")
def start_token_twice(training: Training) -> None:
    """The labels keep the start token of the tokenizer, and the model puts one before them, too."""
    batches_by(training, lambda x, y: (x, F.pad(y, (1, 0), value=1)[:, :-1]))


@fault(
    MORE["whisper"].faults,
    "architecture",
    ("initialisation", "frozen"),
    ("model.encoder", "model.encoder.embed_positions", "model.encoder.layers.0", "model.encoder.layers.0.self_attn_layer_norm"),
)
def sinusoids_forgotten(training: Training) -> None:
    """The table of places of the encoder, which is not trained, was made with zeros and never filled with sinusoids."""
    nn.init.zeros_(training.net.get_parameter("model.encoder.embed_positions.weight"))


@fault(MORE["whisper"].faults, "data", "noise")
def most_of_the_sound_masked(training: Training) -> None:
    """SpecAugment masks nine tenths of the frames."""
    batch = training.batch

    def masked(number: int) -> tuple[Any, Any]:
        x, y = batch(number)
        sound = x["input_features"]
        return {"input_features": sound * (torch.rand(len(sound), 1, sound.shape[2], generator=generator(number)) < 0.1)}, y

    training.batch = masked


@fault(
    MORE["whisper"].faults,
    "architecture",
    "detached",
    ("model.encoder", "model.encoder.layer_norm", "model.encoder.layers.1", "model.decoder.layers.0.encoder_attn"),
)
def sound_encoded_without_gradients(training: Training) -> None:
    """What the encoder returns is detached, to save memory."""

    def cut(encoder: Any, args: Any, output: Any) -> Any:
        output.last_hidden_state = output.last_hidden_state.detach()
        return output

    training.net.get_submodule("model.encoder").register_forward_hook(cut)


# A language model of LSTM


@fault(MORE["lstm-language-model"].faults, "optimisation", ("exploding-gradients", "rate-too-high", "clipping"))
def clipping_forgotten(training: Training) -> None:
    """Gradients are not clipped, though the rate of 15 counts on it."""
    training.clip = None


@fault(MORE["lstm-language-model"].faults, "architecture", "wrong-axis", ("drop", "lstm", "head"))
def batch_taken_for_time(training: Training) -> None:
    """The LSTM is not told that the batch comes first."""
    put(training.net, batch_first=False)


@fault(MORE["lstm-language-model"].faults, "data", "labels-do-not-fit")
def targets_not_shifted(training: Training) -> None:
    """Each token is its own target."""
    batches_by(training, lambda x, y: (x, x))


class AlwaysDropped(LanguageModel):
    """Drops by a function that is not told whether this is training."""

    def forward(self, tokens: Tensor) -> Tensor:
        states, _ = self.lstm(F.dropout(self.embed(tokens), 0.6))
        logits: Tensor = self.head(F.dropout(states, 0.6))
        return logits


@fault(MORE["lstm-language-model"].faults, "architecture", ("dropout", "train-mode"), ("", "embed", "drop", "lstm", "head"))
def dropped_in_evaluation_too(training: Training) -> None:
    """The dropout is a function that is always on."""
    training.net = AlwaysDropped(8, 48)


# A language model that carries its state


@fault(MORE["carried-state"].faults, "data", ("labels-do-not-fit", "noise", "wrong-axis"))
def texts_cut_across(training: Training) -> None:
    """The long text is put in columns by the wrong `view`, so that tokens that follow one another come from different texts."""
    batch = training.batch
    long = torch.cat([batch(number)[0] for number in range(200)], 1)
    across = long.t().reshape(long.shape)

    def read(number: int) -> tuple[Tensor, Tensor]:
        at = number % 199 * 20
        return across[:, at : at + 20], across[:, at + 1 : at + 21]

    training.batch = read


class Reshaped(LanguageModel):
    """Reads the states as if time came first."""

    def forward(self, tokens: Tensor) -> Tensor:
        states, last = self.lstm(self.drop(self.embed(tokens)), self.state if self.training else None)
        if self.training:
            self.state = tuple(part.detach() for part in last)
        states = states.reshape(states.shape[1], states.shape[0], -1).transpose(0, 1)
        logits: Tensor = self.head(self.drop(states))
        return logits


@fault(MORE["carried-state"].faults, "architecture", "wrong-axis", ("", "lstm", "drop", "head"))
def states_reshaped(training: Training) -> None:
    """The states are reshaped to time first and transposed, though they come batch first."""
    training.net = Reshaped(8, 48)


@fault(MORE["carried-state"].faults, "optimisation", ("schedule", "rate-too-low"))
def decays_by_step(training: Training) -> None:
    """The scheduler that is meant for epochs is stepped at each piece."""
    training.schedule = lambda step, steps: 0.85**step


class LastOnly(LanguageModel):
    """Gives the head the last state."""

    def forward(self, tokens: Tensor) -> Tensor:
        _, last = self.lstm(self.drop(self.embed(tokens)), self.state if self.training else None)
        if self.training:
            self.state = tuple(part.detach() for part in last)
        logits: Tensor = self.head(self.drop(last[0][-1]))
        return logits.unsqueeze(1).expand(-1, tokens.shape[1], -1)


@fault(MORE["carried-state"].faults, "architecture", "bottleneck", ("", "lstm", "drop", "head"))
def last_state_for_all(training: Training) -> None:
    """The head reads the last state of the piece for all of its places."""
    training.net = LastOnly(8, 48)


# Reversing


@fault(
    MORE["reversing"].faults,
    "architecture",
    "mask",
    tuple(
        f"transformer{part}"
        for part in (
            "",
            ".decoder",
            *(f".decoder.layers.{index}{attention}" for index in (0, 1) for attention in ("", ".multihead_attn")),
        )
    ),
)
def source_masked_like_the_target(training: Training) -> None:
    """The causal mask of the target is given for the source, too, so that what stands at the end is not seen at the start."""

    class Masked(Translator):
        def forward(self, texts: tuple[Tensor, Tensor]) -> Tensor:
            source, given = (self.embed(text) + self.places(torch.arange(text.shape[1])) for text in texts)
            mask = nn.Transformer.generate_square_subsequent_mask(given.shape[1])
            logits: Tensor = self.head(self.transformer(source, given, src_mask=mask, tgt_mask=mask, memory_mask=mask))
            return logits

    training.net = Masked()


@fault(MORE["reversing"].faults, "architecture", "never-ran", "places")
def places_never_added(training: Training) -> None:
    """The table of places is made, but never added to the words."""

    class Unplaced(Translator):
        def forward(self, texts: tuple[Tensor, Tensor]) -> Tensor:
            source, given = (self.embed(text) for text in texts)
            mask = nn.Transformer.generate_square_subsequent_mask(given.shape[1])
            logits: Tensor = self.head(self.transformer(source, given, tgt_mask=mask, tgt_is_causal=True))
            return logits

    training.net = Unplaced()


@fault(MORE["reversing"].faults, "architecture", ("wrong-axis", "labels-do-not-fit", "wrong-loss"))
def logits_reshaped_for_the_loss(training: Training) -> None:
    """The classes are brought to the second place by a reshape in place of a transpose."""

    def loss(net: nn.Module, x: Any, y: Tensor) -> Tensor:
        logits = net(x)
        return F.cross_entropy(logits.reshape(logits.shape[0], logits.shape[2], logits.shape[1]), y)

    training.loss = loss


@fault(MORE["reversing"].faults, "data", "labels-do-not-fit")
def target_given_unshifted(training: Training) -> None:
    """The decoder is given the target itself, not shifted by one, and learns to copy."""
    batches_by(training, lambda x, y: ((x[0], y), y))


# Attention over a set


@fault(MORE["set-attention"].faults, "architecture", ("mask", "nonfinite"), ("", "attention", "norm"))
def points_masked(training: Training) -> None:
    """The mask of padding is True for the points that are there."""

    class Masked(Pooled):
        def forward(self, points: Tensor) -> Tensor:
            x = F.relu(self.embed(points))
            there = points.abs().sum(-1) > 0
            pooled, _ = self.attention(self.query.expand(len(x), -1, -1), x, x, key_padding_mask=there)
            logits: Tensor = self.head(self.norm(pooled.squeeze(1)))
            return logits

    training.net = Masked()


@fault(MORE["set-attention"].faults, "architecture", "wrong-axis", ("", "embed", "attention"))
def columns_taken_for_points(training: Training) -> None:
    """The points are transposed, as for a convolution, so that attention pools over columns and cannot tell them apart."""

    class Transposed(Pooled):
        def forward(self, points: Tensor) -> Tensor:
            x = F.relu(self.embed(points.transpose(1, 2)))
            pooled, _ = self.attention(self.query.expand(len(x), -1, -1), x, x)
            logits: Tensor = self.head(self.norm(pooled.squeeze(1)))
            return logits

    training.net = Transposed()
    replace(training.net, "embed", nn.Linear(6, 32))


@fault(MORE["set-attention"].faults, "data", "labels-do-not-fit")
def labels_encoded_apart(training: Training) -> None:
    """The labels of the training are numbered by first occurrence, those of the test by name."""
    batches_by(training, lambda x, y: (x, torch.tensor([1, 2, 0])[y]))


@fault(MORE["set-attention"].faults, "architecture", ("detached", "frozen"), ("", "attention", "embed"))
def pooled_without_gradients(training: Training) -> None:
    """The pooling runs under `no_grad`, so that only the norm and the head learn."""

    class Cut(Pooled):
        def forward(self, points: Tensor) -> Tensor:
            with torch.no_grad():
                x = F.relu(self.embed(points))
                pooled, _ = self.attention(self.query.expand(len(x), -1, -1), x, x)
            logits: Tensor = self.head(self.norm(pooled.squeeze(1)))
            return logits

    training.net = Cut()


# Speech


@fault(MORE["speech"].faults, "architecture", "wrong-axis", ("", "conv", "norm", "gru"))
def time_brought_first_by_reshape(training: Training) -> None:
    """Time is brought to the first place by a reshape in place of a permute."""

    class Reshapes(Listener):
        def forward(self, sound: Tensor) -> Tensor:
            x = F.relu(self.norm(self.conv(sound))).reshape(sound.shape[2], len(sound), -1)
            said: Tensor = self.head(self.gru(x)[0]).log_softmax(-1)
            return said

    training.net = Reshapes()


@fault(MORE["speech"].faults, "architecture", ("wrong-axis", "wrong-loss"), ("", "head"))
def softmax_over_time(training: Training) -> None:
    """The softmax is over the first dimension, which is time."""

    class OverTime(Listener):
        def forward(self, sound: Tensor) -> Tensor:
            x = F.relu(self.norm(self.conv(sound))).permute(2, 0, 1)
            said: Tensor = self.head(self.gru(x)[0]).log_softmax(0)
            return said

    training.net = OverTime()


@fault(MORE["speech"].faults, "optimisation", ("wrong-loss", "labels-do-not-fit"))
def blank_is_the_last(training: Training) -> None:
    """The loss takes the last class for the blank, which is a word."""

    def loss(net: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        said = net(x)
        return F.ctc_loss(said, y, torch.full((len(x),), len(said)), torch.full((len(x),), 4), blank=6)

    training.loss = loss


@fault(MORE["speech"].faults, "architecture", ("bottleneck", "nonfinite", "wrong-loss"), ("", "conv", "head"))
def too_few_frames(training: Training) -> None:
    """A stride of 4 leaves four frames for four words, which is too few if a word comes twice in a row."""
    replace(training.net, "conv", nn.Conv1d(8, 32, 3, stride=4, padding=1))


# A forecast


@fault(MORE["forecast"].faults, "data", "broadcast", ("", "2"))
def column_against_row(training: Training) -> None:
    """The targets lack the last dimension, so that each output is compared with each target."""
    batches_by(training, lambda x, y: (x, y.squeeze(1)))


@fault(MORE["forecast"].faults, "data", ("target-scale", "inputs-not-normalised"), ("", "0", "2"))
def series_in_its_units(training: Training) -> None:
    """The series is not standardised: it is around 5000, and moves by 50."""
    inputs_by(training, lambda x: 5000 + 50 * x)
    batches_by(training, lambda x, y: (x, 5000 + 50 * y))
    score = cast("partial[float]", training.score)
    training.score = partial(score.func, **{**score.keywords, "y": 5000 + 50 * score.keywords["y"]})


@fault(MORE["forecast"].faults, "architecture", ("output-activation", "dead-units"), ("2", "3"))
def forecasts_rectified(training: Training) -> None:
    """The forecast passes a ReLU, though the series goes below zero."""
    cast("nn.Sequential", training.net).append(nn.ReLU())


@fault(MORE["forecast"].faults, "data", "repeated-batches")
def always_the_first_windows(training: Training) -> None:
    """The window of time does not move on."""
    batch = training.batch
    training.batch = lambda number: batch(0)


# Digits


@fault(MORE["probabilities-out"].faults, "data", ("noise", "wrong-axis", "labels-do-not-fit"))
def images_reshaped_from_the_last(training: Training) -> None:
    """The file has images last, and they are brought to the front by a reshape in place of a permute."""

    def mixed(x: Tensor) -> Tensor:
        return x.permute(1, 2, 3, 0).reshape(x.shape)

    x, y, _, _ = digits()
    inputs_by(training, mixed)
    training.batch = batches(mixed(x), y, 64, 0)


@fault(MORE["probabilities-out"].faults, "architecture", "bottleneck", ("1", "2", "3"))
def two_hidden_units(training: Training) -> None:
    """The hidden layer has two units."""
    replace(training.net, "1", nn.Linear(64, 2))
    replace(training.net, "3", nn.Linear(2, 10))


@fault(MORE["probabilities-out"].faults, "optimisation", "wrong-loss")
def logarithms_of_all_classes(training: Training) -> None:
    """The mean of the logarithms is taken over all classes, and the label is not looked at."""
    training.loss = lambda net, x, y: -(net(x) + 1e-9).log().mean()


@fault(MORE["probabilities-out"].faults, "architecture", ("output-activation", "dead-units", "wrong-loss"), ("", "2", "3", "4"))
def activations_exchanged(training: Training) -> None:
    """The ReLU and the softmax are in each other's places."""
    net = cast("nn.Sequential", training.net)
    training.net = nn.Sequential(net[0], net[1], net[4], net[3], net[2])


@fault(MORE["log-probabilities-out"].faults, "optimisation", ("ascent", "wrong-loss"))
def minus_forgotten(training: Training) -> None:
    """The loss is the mean of the logarithms of the right classes, without a minus."""
    training.loss = lambda net, x, y: net(x).gather(1, y[:, None]).mean()


@fault(MORE["log-probabilities-out"].faults, "architecture", ("output-activation", "dead-units"), ("3", "4"))
def rectified_before_the_softmax(training: Training) -> None:
    """The ReLU of the hidden layer stands behind the last layer."""
    net = cast("nn.Sequential", training.net)
    training.net = nn.Sequential(net[0], net[1], net[3], nn.ReLU(), net[4])


@fault(MORE["log-probabilities-out"].faults, "architecture", ("initialisation", "outliers"), ("1", "2", "3", "4"))
def weights_by_randn(training: Training) -> None:
    """All weights are drawn by `torch.randn`, without a scale."""
    for parameter in training.net.parameters():
        nn.init.normal_(parameter)


@fault(MORE["hinge"].faults, "optimisation", ("wrong-loss", "labels-do-not-fit"))
def zeros_for_minus_ones(training: Training) -> None:
    """A hinge for each class, with 0 in place of -1 for the classes that are wrong."""
    training.loss = lambda net, x, y: F.relu(1 - F.one_hot(y, 10) * net(x)).mean()


@fault(MORE["hinge"].faults, "architecture", ("output-activation", "dead-units"), ("3", "4"))
def margins_rectified(training: Training) -> None:
    """The outputs pass a ReLU."""
    cast("nn.Sequential", training.net).append(nn.ReLU())


@fault(MORE["hinge"].faults, "data", "labels-do-not-fit")
def labels_from_one(training: Training) -> None:
    """The labels of the training come from a file in which digits are counted from 1, and the last is 0."""
    batches_by(training, lambda x, y: (x, (y + 1) % 10))


@fault(MORE["hinge"].faults, "optimisation", "epsilon")
def epsilon_of_one(training: Training) -> None:
    """The epsilon of Adam is 1, as for large nets on ImageNet."""
    training.optimizer = lambda parameters, rate: torch.optim.Adam(parameters, lr=rate, eps=1.0)


@fault(MORE["logistic"].faults, "data", ("labels-do-not-fit", "noise"))
def labels_one_row_off(training: Training) -> None:
    """The first row of the labels was taken for a header, so that each image has the label of the next."""
    x, y, _, _ = digits()
    y = y.roll(-1)

    def batch(number: int) -> tuple[Tensor, Tensor]:
        rows = torch.randint(len(y), (64,), generator=generator(number))
        return x[rows], y[rows]

    training.batch = batch


@fault(MORE["logistic"].faults, "architecture", "output-activation", ("1", "2"))
def softmax_of_logits(training: Training) -> None:
    """The net ends in a softmax, and the loss has one of its own."""
    cast("nn.Sequential", training.net).append(nn.Softmax(-1))


@fault(MORE["logistic"].faults, "architecture", ("bottleneck", "wrong-axis"), ("0", "1", "2"))
def mean_over_the_image(training: Training) -> None:
    """The mean over each row is given to the linear layer, in place of all pixels."""
    training.net = nn.Sequential(nn.AvgPool2d((1, 8)), nn.Flatten(), nn.Linear(8, 10))


@fault(MORE["divides-by-255"].faults, "data", "inputs-not-normalised", ("", "net", "net.0", "net.1"))
def divided_twice(training: Training) -> None:
    """The transform of the data set divides by 255, too."""
    inputs_by(training, lambda x: x / 255)


@fault(MORE["divides-by-255"].faults, "architecture", ("bottleneck", "inputs-constant", "noise"), ("", "net", "net.0", "net.1"))
def whole_division(training: Training) -> None:
    """The pixels are divided as whole numbers, so that all but the brightest are zero."""

    def forward(net: Any, images: Tensor) -> Tensor:
        logits: Tensor = net.net((images.long() // 255).float())
        return logits

    call_by(training.net, forward)


@fault(MORE["divides-by-255"].faults, "data", ("labels-do-not-fit", "noise"))
def images_shuffled_alone(training: Training) -> None:
    """The images of each batch are shuffled after the labels were looked up."""
    batch = training.batch

    def shuffled(number: int) -> tuple[Any, Any]:
        x, y = batch(number)
        return x[torch.randperm(len(x), generator=generator(number))], y

    training.batch = shuffled


@fault(MORE["norm-first"].faults, "optimisation", ("not-in-optimizer", "frozen"), ("1", "4"))
def only_the_norm_optimised(training: Training) -> None:
    """The optimizer gets the parameters of the first layer in place of those of the net."""
    training.parameters = lambda net: net.get_submodule("0").parameters()


@fault(MORE["norm-first"].faults, "architecture", ("bottleneck", "wrong-axis"), ("1", "2", "3", "4", "5"))
def averaged_over_the_image(training: Training) -> None:
    """Global average pooling, as after a deep net, comes after the one convolution."""
    net = cast("nn.Sequential", training.net)
    training.net = nn.Sequential(*list(net)[:3], nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(16, 10))


@fault(MORE["norm-first"].faults, "state", "batch-of-one", ("", "0"))
def one_image_at_a_time(training: Training) -> None:
    """The size of a batch is still 1, from debugging."""
    batches_by(training, lambda x, y: (x[:1], y[:1]))


@fault(MORE["spectral"].faults, "state", ("stale-optimizer", "not-in-optimizer", "no-steps"))
def parametrised_after_the_optimizer(training: Training) -> None:
    """The optimizer holds the parameters of the net from before it was rebuilt with parametrised layers."""
    old = copy.deepcopy(training.net)
    training.parameters = lambda net: old.parameters()


@fault(MORE["spectral"].faults, "state", "weights-overwritten")
def weights_still_clamped(training: Training) -> None:
    """The weights are clamped to 0.01 as in a Wasserstein GAN, of which the code was left in."""

    def clamp(training: Training, optimizer: torch.optim.Optimizer, step: int) -> None:
        with torch.no_grad():
            for parameter in training.net.parameters():
                parameter.clamp_(-0.01, 0.01)

    training.before_step.append(clamp)


@fault(MORE["spectral"].faults, "optimisation", "weight-decay")
def decay_of_a_paper(training: Training) -> None:
    """The weight decay is 0.5, in an Adam that adds it to the gradients."""
    training.optimizer = lambda parameters, rate: torch.optim.Adam(parameters, lr=rate, weight_decay=0.5)


@fault(MORE["spectral"].faults, "architecture", ("bottleneck", "saturation", "vanishing-gradients"), ("2", "4", "5"))
def softmax_between_the_layers(training: Training) -> None:
    """The hidden layers have softmax for their activation."""
    replace(training.net, "2", nn.Softmax(-1))
    replace(training.net, "4", nn.Softmax(-1))


@fault(MORE["deep-with-norms"].faults, "architecture", ("normalisation", "vanishing-gradients"))
def norms_left_out(training: Training) -> tuple[str, ...]:
    """There is no batch normalisation between the twelve layers."""
    names = layers(training.net, nn.BatchNorm1d)
    for name in names:
        replace(training.net, name, nn.Identity())
    return (*names, *layers(training.net))


@fault(MORE["deep-with-norms"].faults, "architecture", ("shared-layers", "normalisation"))
def one_block_twelve_times(training: Training) -> tuple[str, ...]:
    """`[block] * 12` is the same block twelve times, whose one norm has the statistics of no depth."""
    net = cast("nn.Sequential", training.net)
    training.net = nn.Sequential(net[0], *[net[1:5]] * 12, net[-1])
    return ("1", "1.1", "1.2", "1.3", "1.4")


@fault(MORE["deep-with-norms"].faults, "architecture", "dropout")
def half_dropped_at_each_layer(training: Training) -> tuple[str, ...]:
    """All twelve dropouts are 0.5."""
    put(training.net, p=0.5)
    return layers(training.net, nn.Dropout)


@fault(MORE["deep-with-norms"].faults, "architecture", "bottleneck", ("20", "21", "22", "25"))
def narrow_in_the_middle(training: Training) -> None:
    """A layer in the middle has two units."""
    for name, module in {
        "21": nn.Linear(64, 2, bias=False),
        "22": nn.BatchNorm1d(2),
        "25": nn.Linear(2, 64, bias=False),
    }.items():
        replace(training.net, name, module)
