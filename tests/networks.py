"""Real networks, tiny and with random weights, and how each is fed: what `test_real_networks.py` trains."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

__all__ = ["NETWORKS", "Network"]

TOKENS = 40


@dataclass(frozen=True)
class Network:
    """How a network is made, and what it is given.

    Attributes:
        make: builds it; where it works in place, `make(inplace=False)` builds the same one that does not, and where it has layers
            `make(layers=1)` one with so many.
        feed: one batch of inputs by name, of so many samples; the network returns something with a `loss`.
        ours: written here, and so switched to checkpointing by an attribute.
        another: with checkpointing it is another network: its blocks return tensors with gradients that have none without.
        cut: compiled with checkpointing its graph breaks by itself, and at other places where it is recorded: last bits may differ.
        reentrant: can be trained with reentrant checkpointing; not where a loss is taken of what modules inside return.
    """

    make: Callable[..., nn.Module]
    feed: Callable[[int], dict[str, Tensor]]
    ours: bool = False
    another: bool = False
    cut: bool = False
    reentrant: bool = True

    def checkpointed(self, net: nn.Module, use_reentrant: bool) -> None:
        """Switches activation checkpointing on."""
        if self.ours:
            net.use_reentrant = use_reentrant
        else:
            net.config.use_cache = False  # or it is switched off with a warning, at which a compiled graph breaks
            switch = getattr(net, "activation_checkpointing_enable", None) or net.gradient_checkpointing_enable
            switch({"use_reentrant": use_reentrant})


def words(samples: int) -> dict[str, Tensor]:
    """Tokens, the last two of the first sample masked out."""
    tokens = torch.randint(2, TOKENS, (samples, 7))
    mask = torch.ones_like(tokens)
    mask[0, -2:] = 0
    return {"input_ids": tokens, "attention_mask": mask, "labels": tokens}


def pictures(samples: int) -> dict[str, Tensor]:
    return {"pixel_values": torch.randn(samples, 3, 8, 8), "labels": torch.randint(0, 2, (samples,))}


def sequences(samples: int) -> dict[str, Tensor]:
    return {"x": torch.randn(samples, 5, 6)}


def images(samples: int) -> dict[str, Tensor]:
    return {"x": torch.randn(samples, 3, 8, 8)}


def _hugging_face(kind: str, config: str, **options: Any) -> Callable[..., nn.Module]:
    def make(inplace: bool = True, layers: int = 2) -> nn.Module:
        import transformers

        count = next(name for name in ("num_hidden_layers", "n_layer", "num_layers") if name in options)
        net: nn.Module = getattr(transformers, kind)(getattr(transformers, config)(**{**options, count: layers}))
        return net

    return make


class Checkpointed(nn.Module):
    """Runs a part of itself under activation checkpointing where it is told to."""

    use_reentrant: bool | None = None

    def part(self, function: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
        if self.use_reentrant is None:
            return function(x)
        found: Tensor = checkpoint(function, x, use_reentrant=self.use_reentrant)
        return found


class Recurrent(Checkpointed):
    """Two recurrent layers with dropout between projections; its recurrent module returns nested tuples."""

    def __init__(self, kind: type[nn.RNNBase]) -> None:
        super().__init__()
        self.inner = nn.Linear(6, 8)
        self.rnn = kind(8, 8, num_layers=2, dropout=0.1, batch_first=True)
        self.head = nn.Linear(8, 2)

    def forward(self, x: Tensor) -> Mapping[str, Any]:
        out = self.part(lambda hidden: self.rnn(hidden)[0], self.inner(x))
        return Output(loss=self.head(out).square().mean(), last=out[:, -1])


class Output(dict[str, Any]):
    """A mapping whose values are attributes too."""

    @property
    def loss(self) -> Tensor:
        found: Tensor = self["loss"]
        return found


class UNet(Checkpointed):
    """Convolutions down and up again, with one ReLU in place for all of them, one convolution used twice, and skips.

    Each module is compiled with all its monitors, which takes seconds: so there are few, and pooling is no module.
    """

    def __init__(self, inplace: bool) -> None:
        super().__init__()
        self.inplace = inplace
        self.act = nn.ReLU(inplace=inplace)
        self.down = nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), nn.BatchNorm2d(4), self.act)
        self.twice = nn.Conv2d(4, 4, 3, padding=1)
        self.head = nn.Sequential(self.act, nn.Dropout2d(0.1), nn.Conv2d(8, 1, 1))

    def middle(self, x: Tensor) -> Tensor:
        found: Tensor = self.twice(self.act(self.twice(x)))
        return found

    def forward(self, x: Tensor) -> Mapping[str, Any]:
        skip = self.down(x)
        low = self.part(self.middle, F.max_pool2d(skip, 2))
        if self.inplace:
            low += 1
        else:
            low = low + 1
        out = self.head(torch.cat([skip, F.interpolate(low, scale_factor=2)], dim=1))
        return Output(loss=out.square().mean(), mask=out > 0)


SMALL = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 24}
LLAMA = {**SMALL, "vocab_size": TOKENS, "num_key_value_heads": 1, "max_position_embeddings": 32}
ENDS = {"bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 0}

NETWORKS: dict[str, Network] = {
    "gpt2": Network(
        _hugging_face("GPT2LMHeadModel", "GPT2Config", vocab_size=TOKENS, n_embd=16, n_layer=2, n_head=2, n_positions=32, **ENDS),
        words,
    ),
    "llama": Network(_hugging_face("LlamaForCausalLM", "LlamaConfig", **LLAMA, **ENDS), words),
    "bert": Network(_hugging_face("BertForMaskedLM", "BertConfig", vocab_size=TOKENS, **SMALL), words),
    "t5": Network(
        _hugging_face(
            "T5ForConditionalGeneration",
            "T5Config",
            vocab_size=TOKENS,
            d_model=16,
            d_kv=8,
            d_ff=24,
            num_layers=2,
            num_heads=2,
            decoder_start_token_id=0,
            pad_token_id=0,
            eos_token_id=1,
        ),
        words,
        another=True,
        cut=True,
    ),
    "vit": Network(
        _hugging_face(
            "ViTForImageClassification",
            "ViTConfig",
            image_size=8,
            patch_size=4,
            num_labels=2,
            problem_type="single_label_classification",
            **SMALL,
        ),
        pictures,
    ),
    "mixtral": Network(
        _hugging_face(
            "MixtralForCausalLM",
            "MixtralConfig",
            **LLAMA,
            **ENDS,
            num_local_experts=3,
            num_experts_per_tok=2,
            output_router_logits=True,
        ),
        words,
        reentrant=False,
    ),
    "lstm": Network(lambda inplace=True, layers=2: Recurrent(nn.LSTM), sequences, ours=True),
    "gru": Network(lambda inplace=True, layers=2: Recurrent(nn.GRU), sequences, ours=True),
    "unet": Network(lambda inplace=True, layers=2: UNet(inplace), images, ours=True),
}
