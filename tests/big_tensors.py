"""Big tensors of many kinds, to show how exact a kernel is."""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["KINDS", "SIZE", "drawn"]

SIZE = 1 << 16


def drawn(kind: str) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(SIZE, 8, generator=generator)
    return {
        "normal": lambda: x,
        "mean 1e4": lambda: x + 1e4,
        "two values": lambda: torch.where(x > 0, 0.3, -0.3),
        "rectified": lambda: x.relu(),
        "sorted": lambda: x.flatten().sort().values.view_as(x),
        "a first part far from the rest": lambda: torch.cat((x[: SIZE // 8] + 1e3, x[SIZE // 8 :])),
        "one outlier first": lambda: torch.cat((torch.full((1, 8), 1e6), x[1:])),
        "heavy tails": lambda: x / torch.rand(SIZE, 8, generator=generator),
        "scales that differ": lambda: x * 10.0 ** torch.arange(-8, 8, 2),
        "half precision": lambda: x.half(),
    }[kind]()


KINDS = (
    "normal",
    "mean 1e4",
    "two values",
    "rectified",
    "sorted",
    "a first part far from the rest",
    "one outlier first",
    "heavy tails",
    "scales that differ",
    "half precision",
)
