"""Tiny transformers of Hugging Face with random weights, trained a few steps with `labels=`: nothing is wrong with them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from recorders import findings, load, presets

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]  # of transformers and peft
transformers = pytest.importorskip("transformers")

SIZES = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}


def gpt2() -> nn.Module:
    return transformers.GPT2LMHeadModel(transformers.GPT2Config(vocab_size=64, n_positions=32, n_embd=32, n_layer=2, n_head=2))


def llama() -> nn.Module:
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZES))


def bert() -> nn.Module:
    return transformers.BertForMaskedLM(transformers.BertConfig(**SIZES))


def bert_of_sequences() -> nn.Module:
    return transformers.BertForSequenceClassification(transformers.BertConfig(**SIZES))


def t5() -> nn.Module:
    config = transformers.T5Config(vocab_size=64, d_model=32, d_ff=64, d_kv=16, num_layers=2, num_heads=2, decoder_start_token_id=0)
    return transformers.T5ForConditionalGeneration(config)


def vit() -> nn.Module:
    sizes = {name: size for name, size in SIZES.items() if name != "vocab_size"}
    return transformers.ViTForImageClassification(
        transformers.ViTConfig(**sizes, image_size=8, patch_size=4, num_channels=1, num_labels=4)
    )


NETS: dict[Callable[[], nn.Module], tuple[str, ...]] = {
    gpt2: ("c_attn",),
    llama: ("q_proj", "v_proj"),
    bert: ("query", "value"),
    bert_of_sequences: ("query", "value"),
    t5: ("q", "v"),
    vit: ("q_proj", "v_proj"),
}
"""Each with the layers that get adapters."""


def batch(make: Callable[[], nn.Module]) -> dict[str, Tensor]:
    if make is vit:
        labels = torch.randint(0, 4, (16,))
        return {"pixel_values": torch.randn(16, 1, 8, 8) / 4 + labels[:, None, None, None] - 1.5, "labels": labels}
    start = torch.randint(0, 64, (16, 1))
    ids = (start + torch.arange(16)) % 64
    return {"input_ids": ids, "labels": (start[:, 0] > 31).long() if make is bert_of_sequences else ids}


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
            setattr(net.get_submodule(parent), last, Lora(module, 32))
    return net


def with_peft(net: nn.Module, targets: tuple[str, ...]) -> nn.Module:
    peft = pytest.importorskip("peft")
    adapted: nn.Module = peft.get_peft_model(net, peft.LoraConfig(r=4, target_modules=list(targets), lora_dropout=0.05))
    return adapted


def bare(net: nn.Module, targets: tuple[str, ...]) -> nn.Module:
    return net


@pytest.mark.parametrize("adapt", [bare, with_adapters, with_peft])
@pytest.mark.parametrize("make", NETS)
def test_a_transformer_has_no_findings(make: Callable[[], nn.Module], adapt: Any, tmp_path: Path) -> None:
    torch.manual_seed(0)
    net = adapt(make(), NETS[make]).train()
    optimizer = torch.optim.AdamW([p for p in net.parameters() if p.requires_grad], lr=3e-3 if adapt is bare else 3e-2)
    losses = []
    with presets.health().modules(net) as recorder:
        for _ in range(20):
            loss = net(**batch(make)).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
    assert sum(losses[-5:]) < sum(losses[:5])
    found = findings(recorder)
    assert (list(found), found.unexamined) == ([], ())
    if make is not t5 or adapt is bare:  # of a frozen embedding that is tied, a recording does not tell that it is in use
        assert list(findings(load(recorder.save(tmp_path / "run")))) == []
