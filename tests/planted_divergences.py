"""Twins that differ by one planted fault, each with the module and the operator that must be named."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

WIDTH, HEADS, LENGTH, WORDS = 16, 2, 7, 30

OTHER_NAMES = {
    "embed": "wte",
    "place": "wpe",
    "blocks": "layers",
    "norm1": "ln_1",
    "attend": "self_attn",
    "project": "in_proj",
    "out": "o_proj",
    "norm2": "ln_2",
    "mlp": "ffn",
    "up": "w1",
    "down": "w2",
    "drop": "dropout",
    "last": "ln_f",
    "head": "lm_head",
    "conv": "features",
    "batchnorm": "bn",
    "act": "relu",
    "pool": "gap",
}
"""What the parts are called in a rewrite."""


class Part(nn.Module):
    """A module with a fault or none, whose parts have the names of the original or of a rewrite."""

    def __init__(self, fault: str, rewritten: bool) -> None:
        super().__init__()
        self._fault, self._rewritten = fault, rewritten

    def put(self, **parts: nn.Module) -> None:
        for name, part in parts.items():
            self.add_module(OTHER_NAMES[name] if self._rewritten else name, part)

    def part(self, name: str) -> Any:
        return getattr(self, OTHER_NAMES[name] if self._rewritten else name)

    def has(self, fault: str) -> bool:
        return self._fault == fault


class RMSNorm(Part):
    def __init__(self, fault: str, rewritten: bool) -> None:
        super().__init__(fault, rewritten)
        self.weight = nn.Parameter(torch.rand(WIDTH) + 0.5)

    def forward(self, x: Tensor) -> Tensor:
        square = x.pow(2).mean(-1, keepdim=True)
        if self.has("eps outside of the root"):
            return x / (square.sqrt() + 1e-2) * self.weight
        return x / (square + 1e-2).sqrt() * self.weight


class Doubled(torch.autograd.Function):
    @staticmethod
    def forward(context: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(context: Any, gradient: Tensor) -> Tensor:
        return gradient * 2


class Attention(Part):
    def __init__(self, fault: str, rewritten: bool) -> None:
        super().__init__(fault, rewritten)
        self.put(project=nn.Linear(WIDTH, 3 * WIDTH), out=nn.Linear(WIDTH, WIDTH))

    def turn(self, x: Tensor) -> Tensor:
        size = x.shape[-1]
        base = 1000.0 if self.has("base of rope") else 10000.0
        speeds = base ** (-torch.arange(0, size, 2, dtype=x.dtype) / size)
        angles = torch.arange(x.shape[-2], dtype=x.dtype)[:, None] * speeds
        if self.has("interleaved rope"):
            a, b = x[..., 0::2], x[..., 1::2]
            return torch.stack((a * angles.cos() - b * angles.sin(), b * angles.cos() + a * angles.sin()), -1).flatten(-2)
        a, b = x[..., : size // 2], x[..., size // 2 :]
        return torch.cat((a * angles.cos() - b * angles.sin(), b * angles.cos() + a * angles.sin()), -1)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.part("project")(x).chunk(3, -1)
        if self.has("q and k swapped"):
            q, k = k, q
        if self.has("heads split by the wrong axis"):
            q, k, v = (t.reshape(len(x), HEADS, x.shape[1], -1) for t in (q, k, v))
        else:
            q, k, v = (t.view(len(x), x.shape[1], HEADS, -1).transpose(1, 2) for t in (q, k, v))
        q, k = self.turn(q), self.turn(k)
        scores = q @ k.transpose(-1, -2)
        if not self.has("no scale of attention"):
            scores = scores / math.sqrt(WIDTH // HEADS)
        reach = 1 if self.has("mask off by one") else 0
        seen = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).tril(reach)
        scores = scores.masked_fill(~seen, 0.0 if self.has("masked by zero") else -math.inf)
        if self.has("softmax in bfloat16"):
            weights = scores.bfloat16().softmax(-1).float()
        else:
            weights = scores.softmax(-2 if self.has("softmax over queries") else -1)
        mixed = weights @ v
        mixed = mixed.transpose(1, 2).flatten(2)
        return self.part("out")(mixed)


class MLP(Part):
    def __init__(self, fault: str, rewritten: bool) -> None:
        super().__init__(fault, rewritten)
        self.put(up=nn.Linear(WIDTH, 2 * WIDTH), down=nn.Linear(2 * WIDTH, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        x = self.part("up")(x)
        if self.has("gradient doubled"):
            x = Doubled.apply(x)
        x = F.silu(x) if self.has("silu for gelu") else F.gelu(x, approximate="tanh" if self.has("gelu by tanh") else "none")
        return self.part("down")(x)


class Block(Part):
    def __init__(self, fault: str, rewritten: bool) -> None:
        super().__init__(fault, rewritten)
        self.put(norm1=RMSNorm(fault, rewritten), attend=Attention(fault, rewritten))
        self.put(norm2=nn.LayerNorm(WIDTH), mlp=MLP(fault, rewritten), drop=nn.Dropout(0.1))

    def forward(self, x: Tensor) -> Tensor:
        attended = self.part("attend")(self.part("norm1")(x))
        if self.has("detached"):
            attended = attended.detach()
        x = attended if self.has("no residual") else x + attended
        if self.has("norm after the sum"):
            return self.part("norm2")(x + self.part("drop")(self.part("mlp")(x)))
        return x + self.part("drop")(self.part("mlp")(self.part("norm2")(x)))


class Language(Part):
    """A decoder; the fault is in its second block."""

    def __init__(self, fault: str = "", rewritten: bool = False) -> None:
        super().__init__(fault, rewritten)
        self.put(embed=nn.Embedding(WORDS, WIDTH), place=nn.Embedding(LENGTH + 1, WIDTH))
        self.put(blocks=nn.ModuleList(Block(fault if number == 1 else "", rewritten) for number in range(3)))
        self.put(last=nn.LayerNorm(WIDTH), head=nn.Linear(WIDTH, WORDS, bias=False))
        self.part("head").weight = self.part("embed").weight

    def forward(self, words: Tensor) -> Tensor:
        x = self.part("embed")(words)
        if not self.has("no scale of embeddings"):
            x = x * math.sqrt(WIDTH)
        first = 1 if self.has("positions off by one") else 0
        x = x + self.part("place")(torch.arange(first, first + words.shape[1]))
        for block in self.part("blocks"):
            x = block(x)
        x = x if self.has("no last norm") else self.part("last")(x)
        return self.part("head")(x)


class Vision(Part):
    """A convolution, in evaluation mode."""

    def __init__(self, fault: str = "", rewritten: bool = False) -> None:
        super().__init__(fault, rewritten)
        mode = "circular" if fault == "padded in a circle" else "zeros"
        self.put(conv=nn.Conv2d(3, 8, 3, padding=0 if fault == "no padding" else 1, padding_mode=mode))
        self.put(batchnorm=nn.BatchNorm2d(8), act=nn.ReLU(), head=nn.Linear(8, 5))
        with torch.no_grad():
            self.part("batchnorm").running_mean.normal_()

    def forward(self, x: Tensor) -> Tensor:
        x = self.part("conv")(x)
        if self.has("layers exchanged"):
            x = self.part("batchnorm")(self.part("act")(x))
        else:
            x = self.part("batchnorm")(x)
            x = x if self.has("no activation") else self.part("act")(x)
        x = x.mean((2, 3)) if self.has("mean for sum") else x.sum((2, 3))
        return self.part("head")(x)


def spoil(fault: str, net: Part) -> None:
    """Plants what is not in the code but in the numbers of a net."""
    if isinstance(net, Vision):
        norm = net.part("batchnorm")
        if fault == "stale buffer":
            norm.running_mean.zero_()
        if fault == "eps of the batch norm":
            norm.eps = 1e-3
        return
    block = net.part("blocks")[1]
    out = block.part("attend").part("out")
    if fault == "weight transposed":
        out.weight.data = out.weight.data.T.clone()
    elif fault == "eps of the layer norm":
        block.part("norm2").eps = 1e-4
    elif fault == "bias dropped":
        block.part("mlp").part("up").bias = None
    elif fault == "p of dropout":
        block.part("drop").p = 0.2
    elif fault == "one weight":
        block.part("mlp").part("down").weight.data[3, 5] += 0.01
    elif fault == "head not tied":
        net.part("head").weight = nn.Parameter(net.part("embed").weight.detach().clone())


@dataclass(frozen=True)
class Planted:
    """A fault.

    Attributes:
        name: of the fault.
        module: what must be named, by its name in the original; "" is the net.
        operator: what must be named: in the original, or in the twin if only that calls it.
        phase: of the divergence.
        net: of which there are twins.
        training: whether they are in training mode.
    """

    name: str
    module: str
    operator: str
    phase: str = "forward"
    net: Callable[..., Part] = Language
    training: bool = False


def renamed(name: str) -> str:
    """The name of a module in the rewrite."""
    return ".".join(OTHER_NAMES.get(part, part) for part in name.split("."))


def twins(planted: Planted, rewritten: bool = False) -> tuple[Part, Part]:
    """Two nets with the same parameters, of which the second has the fault."""
    torch.manual_seed(0)
    first = planted.net("")
    with torch.no_grad():
        for parameter in first.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.1)
    second = planted.net(planted.name, rewritten)
    with torch.no_grad():
        own, other = ([*net.parameters(), *net.buffers()] for net in (first, second))
        for to, of in zip(other, own, strict=True):
            to.copy_(of)
        spoil(planted.name, second)
    return first.train(planted.training), second.train(planted.training)


def batch(net: nn.Module) -> Tensor:
    """What a net is called with."""
    generator = torch.Generator().manual_seed(1)
    if isinstance(net, Vision):
        return torch.randn(4, 3, 9, 9, generator=generator)
    return torch.randint(WORDS, (3, LENGTH), generator=generator)


def loss(output: Tensor) -> Tensor:
    """A scalar of which gradients are taken."""
    return output.log_softmax(-1)[..., 0].square().mean()


def again(net: nn.Module) -> nn.Module:
    """A copy."""
    return copy.deepcopy(net)


A, B = "blocks.1.attend", "blocks.1"
PLANTED = [
    Planted("eps of the layer norm", f"{B}.norm2", "aten.native_layer_norm.default"),
    Planted("no scale of attention", A, "aten.div.Tensor"),
    Planted("weight transposed", f"{A}.out", "aten.addmm.default", "parameters"),
    Planted("one weight", f"{B}.mlp.down", "aten.addmm.default", "parameters"),
    Planted("stale buffer", "batchnorm", "aten.native_batch_norm.default", "parameters", Vision),
    Planted("mask off by one", A, "aten.tril.default"),
    Planted("masked by zero", A, "aten.masked_fill.Scalar"),
    Planted("softmax in bfloat16", A, "aten._softmax.default"),
    Planted("softmax over queries", A, "aten._softmax.default"),
    Planted("bias dropped", f"{B}.mlp.up", "aten.addmm.default", "parameters"),
    Planted("mean for sum", "", "aten.sum.dim_IntList", "forward", Vision),
    Planted("gelu by tanh", f"{B}.mlp", "aten.gelu.default"),
    Planted("silu for gelu", f"{B}.mlp", "aten.gelu.default"),
    Planted("p of dropout", f"{B}.drop", "aten.bernoulli_.float", training=True),
    Planted("no residual", B, "aten.add.Tensor"),
    Planted("norm after the sum", B, f"{B}.norm2"),
    Planted("q and k swapped", A, "aten.transpose.int"),
    Planted("heads split by the wrong axis", A, "aten.view.default"),
    Planted("base of rope", A, "aten.pow.Scalar"),
    Planted("interleaved rope", A, "aten.slice.Tensor"),
    Planted("eps outside of the root", f"{B}.norm1", "aten.add.Tensor"),
    Planted("no scale of embeddings", "", "aten.mul.Tensor"),
    Planted("positions off by one", "", "aten.arange.start"),
    Planted("no last norm", "", "aten.native_layer_norm.default"),
    Planted("no padding", "conv", "aten.convolution.default", "forward", Vision),
    Planted("padded in a circle", "conv", "aten.convolution.default", "forward", Vision),
    Planted("eps of the batch norm", "batchnorm", "aten.native_batch_norm.default", "forward", Vision),
    Planted("layers exchanged", "", "batchnorm", "forward", Vision),
    Planted("no activation", "", "aten.relu.default", "forward", Vision),
    Planted("head not tied", "embed", "aten.add.Tensor", "backward"),
    Planted("detached", B, "aten.detach.default", "backward"),
    Planted("gradient doubled", f"{B}.mlp", "aten.clone.default", "backward"),
]
