"""The numbers of one tick, from what is appended to a timeline."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TypeAlias

import torch
from torch import Tensor

__all__ = ["TimelineRows", "numbers_of"]

TimelineRows: TypeAlias = Mapping[str, Mapping[str, "float | Tensor"]]


def numbers_of(rows: TimelineRows) -> dict[tuple[str, str], float]:
    """All values as floats by (name, statistic); one transfer for each device and dtype."""
    values: dict[tuple[str, str], float] = {}
    tensors: dict[tuple[torch.device, torch.dtype], dict[tuple[str, str], Tensor]] = {}
    for name, statistics in rows.items():
        for statistic, value in statistics.items():
            key = (name, statistic)
            if not isinstance(name, str) or not isinstance(statistic, str):
                raise TypeError(f"names and statistics are strings; got {key!r}")
            if isinstance(value, Tensor) and value.numel() == 1 and not value.is_complex():
                tensors.setdefault((value.device, value.dtype), {})[key] = value.detach().reshape(())
                values[key] = math.nan  # keeps the place; replaced below
            elif not isinstance(value, Tensor) and hasattr(value, "__float__"):
                values[key] = float(value)
            else:
                what = f"a tensor of shape {tuple(value.shape)}, {value.dtype}" if isinstance(value, Tensor) else repr(value)
                raise TypeError(f"{statistic!r} of {name!r} must be a number or a real tensor of one element; got {what}")
    for group in tensors.values():
        values.update(zip(group, torch.stack(list(group.values())).cpu().double().tolist(), strict=True))
    return values
