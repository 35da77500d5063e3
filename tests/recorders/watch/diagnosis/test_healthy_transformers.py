"""Models of transformers that learn, whole or by adapters: `findings` finds nothing wrong with them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from recorders import Recorder, findings, load, presets

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]  # of transformers and peft
transformers = pytest.importorskip("transformers")

STEPS = 60
WORDS = 64
SIZES: dict[str, Any] = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
LANGUAGE: dict[str, Any] = SIZES | {"vocab_size": WORDS, "max_position_embeddings": 32}
FOUR: dict[str, Any] = {"encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 4, "decoder_attention_heads": 4}
TALK: dict[str, Any] = FOUR | {"d_model": 64, "encoder_ffn_dim": 128, "decoder_ffn_dim": 128, "vocab_size": WORDS}

Batch = dict[str, Tensor]
Adapt = Callable[[nn.Module, tuple[str, ...]], nn.Module]


def sentences(task: int, samples: int = 16, length: int = 16) -> Tensor:
    """Words, each of which mostly follows from the one before; in each task in another way."""
    words = [torch.randint(2, WORDS, (samples, 1))]
    for _ in range(length - 1):
        follows = (words[-1] * (5 + 2 * task) + 3) % (WORDS - 2) + 2
        words.append(torch.where(torch.rand(samples, 1) < 0.1, torch.randint(2, WORDS, (samples, 1)), follows))
    return torch.cat(words, 1)


def continued(task: int) -> Batch:
    words = sentences(task)
    return {"input_ids": words, "labels": words}


def turned(task: int) -> Batch:
    words = sentences(task)
    return {"input_ids": words, "labels": words.flip(1)}


def masked(task: int) -> Batch:
    """A word many times, some of them masked."""
    words = torch.randint(2, WORDS, (32, 1)).expand(32, 12)
    hidden = torch.rand(words.shape) < 0.3
    return {"input_ids": words.masked_fill(hidden, 1), "labels": ((words + 7 * task) % WORDS).masked_fill(~hidden, -100)}


def told(task: int) -> Batch:
    """Which half of all words the first word is in."""
    words = sentences(task)
    return {"input_ids": words, "labels": (words[:, 0] > WORDS // 2).long() ^ task}


def seen(task: int) -> Batch:
    """A bright quarter of a picture."""
    labels, pictures = torch.randint(4, (16,)), 0.5 * torch.randn(16, 3, 16, 16)
    quarters = pictures.unflatten(3, (2, 8)).unflatten(2, (2, 8))
    quarters[torch.arange(16), :, labels // 2, :, labels % 2] += 1
    return {"pixel_values": pictures, "labels": (labels + task) % 4}


def heard(task: int) -> Batch:
    """Eight tones, and the words that they stand for."""
    words, sound = sentences(task, 8, 8), 0.3 * torch.randn(8, 16, 8, 8)
    sound.transpose(1, 2)[torch.arange(8)[:, None], torch.arange(8), words % 16] += 1.5
    return {"input_features": sound.flatten(2), "labels": words}


@dataclass(frozen=True)
class Learner:
    """A model, what it learns from, and the layers that get an adapter."""

    model: str
    config: str
    options: dict[str, Any]
    feed: Callable[[int], Batch]
    adapted: tuple[str, ...] = ("q_proj", "v_proj")

    def make(self) -> nn.Module:
        net: nn.Module = getattr(transformers, self.model)(getattr(transformers, self.config)(**self.options))
        return net


LEARNERS = {
    "GPT-2": Learner(
        "GPT2LMHeadModel",
        "GPT2Config",
        {"n_embd": 64, "n_layer": 2, "n_head": 4, "vocab_size": WORDS, "n_positions": 32, "bos_token_id": 0, "eos_token_id": 0},
        continued,
        ("c_attn",),  # a `Conv1D`
    ),
    "Llama": Learner("LlamaForCausalLM", "LlamaConfig", LANGUAGE, continued),
    "BERT": Learner("BertForMaskedLM", "BertConfig", LANGUAGE, masked, ("query", "value")),
    "BERT for sequences": Learner("BertForSequenceClassification", "BertConfig", LANGUAGE, told, ("query", "value")),
    "T5": Learner(
        "T5ForConditionalGeneration",
        "T5Config",
        {"d_model": 64, "d_ff": 128, "num_layers": 2, "num_heads": 4, "d_kv": 16, "vocab_size": WORDS, "decoder_start_token_id": 0},
        turned,
        ("q", "v"),
    ),
    "ViT": Learner("ViTForImageClassification", "ViTConfig", SIZES | {"image_size": 16, "patch_size": 4, "num_labels": 4}, seen),
    "Whisper": Learner(
        "WhisperForConditionalGeneration",
        "WhisperConfig",
        TALK
        | {"num_mel_bins": 16, "max_source_positions": 32, "max_target_positions": 16, "decoder_start_token_id": 0}
        | {"pad_token_id": 0, "bos_token_id": 0, "eos_token_id": 0},
        heard,
    ),
    "Mixtral": Learner(
        "MixtralForCausalLM",
        "MixtralConfig",
        LANGUAGE | {"num_key_value_heads": 2, "num_local_experts": 4, "num_experts_per_tok": 2, "output_router_logits": True},
        continued,
    ),
}


def train(net: nn.Module, feed: Callable[[int], Batch], task: int, steps: int, recorder: Recorder | None = None) -> list[float]:
    optimizer = torch.optim.AdamW((weight for weight in net.parameters() if weight.requires_grad), lr=2e-3)
    warm_up = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / 10))
    losses = []
    for _ in range(steps):
        loss = net(**feed(task)).loss
        if recorder is not None:
            recorder.push("loss", loss)
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(net.parameters(), 1.0)
        optimizer.step()
        warm_up.step()
        losses.append(loss.item())
    return losses


class Lora(nn.Module):
    """A layer with an adapter of low rank, which begins at zero; with containers that stay empty, as in peft."""

    def __init__(self, base: nn.Module, width: int) -> None:
        super().__init__()
        self.base_layer, self.lora_dropout = base, nn.ModuleDict({"default": nn.Dropout(0.05)})
        outputs = base(torch.zeros(1, width)).shape[-1]
        self.lora_A = nn.ModuleDict({"default": nn.Linear(width, 4, bias=False)})
        self.lora_B = nn.ModuleDict({"default": nn.Linear(4, outputs, bias=False)})
        self.lora_embedding_A, self.lora_embedding_B = nn.ParameterDict(), nn.ParameterDict()
        nn.init.zeros_(self.lora_B["default"].weight)

    def forward(self, x: Tensor) -> Tensor:
        adapted = self.lora_B["default"](self.lora_A["default"](self.lora_dropout["default"](x)))
        out: Tensor = self.base_layer(x) + 2 * adapted
        return out


def with_adapters(net: nn.Module, targets: tuple[str, ...]) -> nn.Module:
    net.requires_grad_(False)
    for name, module in list(net.named_modules()):
        parent, _, last = name.rpartition(".")
        if last in targets:
            setattr(net.get_submodule(parent), last, Lora(module, 64))
    return net


def with_peft(net: nn.Module, targets: tuple[str, ...]) -> nn.Module:
    peft = pytest.importorskip("peft")
    adapted: nn.Module = peft.get_peft_model(net, peft.LoraConfig(r=4, target_modules=list(targets), lora_dropout=0.05))
    return adapted


def watch(net: nn.Module, learner: Learner, task: int, tmp_path: Path) -> None:
    """Nothing is found of a training, by its recorder and in its file."""
    with presets.health().modules(net) as recorder:
        losses = train(net, learner.feed, task, STEPS, recorder)
    assert sum(losses[-5:]) < 0.95 * sum(losses[:5])
    found = findings(recorder)
    assert (list(found), found.unexamined) == ([], ())
    assert list(findings(load(recorder.save(tmp_path / "run")))) == []


@pytest.mark.parametrize("name", LEARNERS)
def test_a_transformer_has_no_findings(name: str, tmp_path: Path) -> None:
    watch(LEARNERS[name].make().train(), LEARNERS[name], 0, tmp_path)


@pytest.mark.parametrize(
    ("name", "adapt"), [*((name, with_peft) for name in LEARNERS), ("GPT-2", with_adapters), ("T5", with_adapters)]
)
def test_adapters_that_begin_at_zero_have_no_findings(name: str, adapt: Adapt, tmp_path: Path) -> None:
    learner = LEARNERS[name]
    net = learner.make().train()
    train(net, learner.feed, 0, STEPS)
    watch(adapt(net, learner.adapted), learner, 1, tmp_path)
    if name == "T5":  # modules of the encoder and the decoder share the weights of this one, which a file does not tell
        (notice,) = [notice for notice in findings(load(tmp_path / "run")).notices if notice.kind == "never-ran"]
        assert notice.layer.endswith("shared")
