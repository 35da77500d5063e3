"""A GPT-2 of Hugging Face, and one written anew, with other names and one fault. Where do they part?

python examples/rewrite.py original run-original
python examples/rewrite.py rewrite run-rewrite
recorders diff run-original run-rewrite

docs/rewrite.md says what comes out. Needs transformers; the weights are random.
"""

from __future__ import annotations

import sys

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import GPT2Config, GPT2LMHeadModel

from recorders import presets

WORDS, WIDTH, HEADS, LAYERS, LENGTH = 64, 48, 3, 3, 16


def original() -> GPT2LMHeadModel:
    """The model of Hugging Face, without dropout."""
    torch.manual_seed(0)
    sizes = {"vocab_size": WORDS, "n_embd": WIDTH, "n_head": HEADS, "n_layer": LAYERS, "n_positions": LENGTH}
    without = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0, "use_cache": False, "bos_token_id": 0, "eos_token_id": 0}
    return GPT2LMHeadModel(GPT2Config(**sizes, **without, initializer_range=0.1))


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.wqkv, self.wo = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        q, k, v = (part.view(batch, length, HEADS, -1).transpose(1, 2) for part in self.wqkv(x).chunk(3, -1))
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.wo(mixed.transpose(1, 2).reshape(batch, length, width))


class FeedForward(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.w1, self.w2 = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.w2(F.gelu(self.w1(x)))  # the fault: GPT-2 approximates it by tanh


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.feed_forward, self.attention = FeedForward(), Attention()
        self.ffn_norm, self.attention_norm = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.attention_norm(x))
        return x + self.feed_forward(self.ffn_norm(x))


class Rewrite(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(WORDS, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.layers, self.norm = nn.ModuleList(Layer() for _ in range(LAYERS)), nn.LayerNorm(WIDTH)
        self.output = nn.Linear(WIDTH, WORDS, bias=False)
        self.output.weight = self.tokens.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.tokens(tokens) + self.places(torch.arange(tokens.shape[1]))
        for layer in self.layers:
            x = layer(x)
        return self.output(self.norm(x))


def rewrite() -> Rewrite:
    """The same, written anew, with the weights of the original."""
    net, given = Rewrite(), original().transformer
    pairs: list[tuple[nn.Module, nn.Module]] = [(net.tokens, given.wte), (net.places, given.wpe), (net.norm, given.ln_f)]
    for layer, block in zip(net.layers, given.h, strict=True):
        pairs += [(layer.attention_norm, block.ln_1), (layer.ffn_norm, block.ln_2)]
        pairs += [(layer.attention.wqkv, block.attn.c_attn), (layer.attention.wo, block.attn.c_proj)]
        pairs += [(layer.feed_forward.w1, block.mlp.c_fc), (layer.feed_forward.w2, block.mlp.c_proj)]
    with torch.no_grad():
        for own, other in pairs:
            own.weight.copy_(other.weight.T if isinstance(own, nn.Linear) else other.weight)
            if getattr(own, "bias", None) is not None:
                own.bias.copy_(other.bias)
    return net


def train(net: nn.Module, to: str, steps: int = 5) -> None:
    """Trains on random texts, and saves what was recorded."""
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-3)
    generator = torch.Generator().manual_seed(1)
    with presets.fingerprints().modules(net) as recorder:
        for _ in range(steps):
            texts = torch.randint(WORDS, (8, LENGTH), generator=generator)
            found = net(texts)
            logits = found if isinstance(found, Tensor) else found.logits
            F.cross_entropy(logits[:, :-1].flatten(0, 1), texts[:, 1:].flatten()).backward()
            optimizer.step()
            optimizer.zero_grad()
    recorder.save(to)
    print(f"{steps} steps in {to}")


if __name__ == "__main__":
    which, to = sys.argv[1:] if len(sys.argv) == 3 else ("rewrite", "run-rewrite")
    train({"original": original, "rewrite": rewrite}[which](), to)
