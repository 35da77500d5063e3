"""Runs of one net in two layouts: the Llama of Hugging Face, and one with the names of torchtitan."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from recorders import Recorder, divergence, presets

transformers = pytest.importorskip("transformers")
pytestmark = pytest.mark.slow

WIDTH, HEADS, GROUPS, LAYERS, WORDS, LENGTH = 64, 4, 2, 3, 50, 12
SIZE = WIDTH // HEADS
NAMES = {
    "model.embed_tokens": "tok_embeddings",
    "model.": "",
    "lm_head": "output",
    "self_attn": "attention",
    "q_proj": "wq",
    "k_proj": "wk",
    "v_proj": "wv",
    "o_proj": "wo",
    "mlp": "feed_forward",
    "gate_proj": "w1",
    "down_proj": "w2",
    "up_proj": "w3",
    "input_layernorm": "attention_norm",
    "post_attention_layernorm": "ffn_norm",
}


def original(pad: int | None = None) -> nn.Module:
    torch.manual_seed(0)
    sizes = {"hidden_size": WIDTH, "intermediate_size": 3 * WIDTH, "num_hidden_layers": LAYERS, "num_attention_heads": HEADS}
    tokens = {"vocab_size": WORDS, "pad_token_id": pad, "bos_token_id": 1, "eos_token_id": 2}
    config = transformers.LlamaConfig(
        **sizes, **tokens, num_key_value_heads=GROUPS, use_cache=False, initializer_range=0.1, attn_implementation="eager"
    )
    net: nn.Module = transformers.LlamaForCausalLM(config)
    return net


class RMSNorm(nn.Module):
    def __init__(self, eps: float) -> None:
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.ones(WIDTH)), eps

    def forward(self, x: Tensor) -> Tensor:
        return self.weight * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps))


def rotated(x: Tensor, interleaved: bool) -> Tensor:
    angles = torch.arange(x.shape[-2])[:, None] / 10000 ** (torch.arange(0, SIZE, 2) / SIZE)
    if interleaved:  # what the weights of Hugging Face are permuted for
        a, b = x[..., ::2], x[..., 1::2]
        return torch.stack([a * angles.cos() - b * angles.sin(), a * angles.sin() + b * angles.cos()], -1).flatten(-2)
    a, b = x.chunk(2, -1)
    return x * torch.cat([angles.cos()] * 2, -1) + torch.cat([-b, a], -1) * torch.cat([angles.sin()] * 2, -1)


class Attention(nn.Module):
    def __init__(self, interleaved: bool) -> None:
        super().__init__()
        self.interleaved = interleaved
        self.wq, self.wo = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(2))
        self.wk, self.wv = (nn.Linear(WIDTH, GROUPS * SIZE, bias=False) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        batch, length, _ = x.shape
        q, k, v = (wide(x).view(batch, length, -1, SIZE).transpose(1, 2) for wide in (self.wq, self.wk, self.wv))
        q, k = rotated(q, self.interleaved), rotated(k, self.interleaved)
        k, v = (one.repeat_interleave(HEADS // GROUPS, 1) for one in (k, v))
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        out: Tensor = self.wo(mixed.transpose(1, 2).reshape(batch, length, WIDTH))
        return out


class FeedForward(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.w1, self.w3 = (nn.Linear(WIDTH, 3 * WIDTH, bias=False) for _ in range(2))
        self.w2 = nn.Linear(3 * WIDTH, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.w2(F.silu(self.w1(x)) * self.w3(x))
        return out


class Block(nn.Module):
    def __init__(self, interleaved: bool, eps: float) -> None:
        super().__init__()
        self.attention, self.feed_forward = Attention(interleaved), FeedForward()
        self.attention_norm, self.ffn_norm = RMSNorm(eps), RMSNorm(eps)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.attention_norm(x))
        out: Tensor = x + self.feed_forward(self.ffn_norm(x))
        return out


class Rewrite(nn.Module):
    def __init__(self, interleaved: bool = False, eps: float = 1e-6, pad: int | None = None) -> None:
        super().__init__()
        self.tok_embeddings, self.norm = nn.Embedding(WORDS, WIDTH), RMSNorm(eps)
        self.layers = nn.ModuleDict({str(layer): Block(interleaved, eps) for layer in range(LAYERS)})
        self.output = nn.Linear(WIDTH, WORDS, bias=False)
        given = {}
        for name, value in original(pad).state_dict().items():
            for theirs, ours in NAMES.items():
                name = name.replace(theirs, ours)
            given[name] = value
        self.load_state_dict(given)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.tok_embeddings(tokens)
        for layer in self.layers.values():
            x = layer(x)
        out: Tensor = self.output(self.norm(x))
        return out


def train(net: nn.Module) -> Recorder:
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-3)
    generator = torch.Generator().manual_seed(1)
    with presets.fingerprints().modules(net) as recorder:
        for _ in range(3):
            tokens = torch.randint(WORDS, (4, LENGTH), generator=generator)
            found = net(tokens)
            logits = found if isinstance(found, Tensor) else found.logits
            F.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten()).backward()
            optimizer.step()
            optimizer.zero_grad()
    return recorder


@pytest.fixture(scope="module")
def healthy() -> Recorder:
    return train(original())


def test_layouts_do_not_part(healthy: Recorder) -> None:
    found = divergence(healthy, train(Rewrite()))
    assert not found, found


def test_rotary_embeddings_that_interleave(healthy: Recorder) -> None:
    found = divergence(healthy, train(Rewrite(interleaved=True)))
    assert (found.phase, found.step, found.name, found.name_b) == (
        "forward",
        0,
        "model.layers.0.self_attn",
        "layers.0.attention",
    )


def test_another_eps(healthy: Recorder) -> None:
    found = divergence(healthy, train(Rewrite(eps=1e-5)))
    assert (found.phase, found.step, found.name, found.name_b) == (
        "forward",
        0,
        "model.layers.0.input_layernorm",
        "layers.0.attention_norm",
    )


def test_a_padding_index_keeps_gradients_from_a_word() -> None:
    found = divergence(train(original(pad=0)), train(Rewrite(pad=0)))
    assert (found.phase, found.step, found.name_b) == ("backward", 0, "tok_embeddings")
