"""BatchCourse: what each batch of the inputs, the target or the outputs of a net is like, as one row of numbers."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from recorders.capture.operands import mapped

__all__ = ["BATCH", "LABELS", "rows_of"]

BATCH = (
    "count",  # elements
    "samples",  # along the first axis
    "axes",
    "floating",  # whether these are floating-point numbers, not classes or tokens
    "finite",  # whether all elements are
    "mean",
    "std",
    "min",
    "max",
    "norm",
    "within",  # the mean over features of the variance over samples; NaN of fewer than two samples
    "sigmoid",  # the mean of the sigmoid of each element, which is the mean probability if these are logits of two classes
)
"""The first columns of a row. All from `mean` on are of at most `SAMPLES` samples, and of some of their features."""
LABELS = 64
"""How many columns follow: how often each label comes, modulo this number. They are zero for floating-point numbers."""
SAMPLES, FEATURES = 64, 4096


def rows_of(batch: Any, *_: Any) -> Any:
    """For each tensor of nested ones a row: `BATCH`, then counts of labels. Waits for no device.

    >>> row = rows_of(torch.tensor([[1.0], [3.0]]))
    >>> dict(zip(BATCH, row[0].tolist()))["within"]
    2.0
    """
    return mapped(batch, _row)


def _row(x: Tensor) -> Tensor:
    few = x.detach()[:SAMPLES] if x.ndim else x.detach().reshape(1)
    few = few.reshape(len(few), -1)
    few = few[:, :: max(1, few.shape[1] // FEATURES)]
    exact = few.abs() if few.is_complex() else few
    small = exact.float()
    numbers = [float(x.numel()), float(x.shape[0] if x.ndim else 1), float(x.ndim), float(x.is_floating_point())]
    nothing = small.new_full((), torch.nan)
    measured = [
        torch.isfinite(x.detach().float().sum() if x.numel() else small.new_zeros(())).float(),
        *([small.mean(), small.std(correction=0), small.amin(), small.amax(), small.norm()] if small.numel() else [nothing] * 5),
        small.var(0).mean() if len(small) > 1 and small.numel() else nothing,
        small.sigmoid().mean() if small.numel() else nothing,
    ]
    row = torch.cat([small.new_tensor(numbers), torch.stack(measured), _counts(exact)])
    return row.double().unsqueeze(0) if row.device.type == "cpu" else row.unsqueeze(0)


def _counts(x: Tensor) -> Tensor:
    """How often each label comes; negative ones, by which losses ignore elements, are left out."""
    counts = torch.zeros(LABELS + 1, device=x.device)
    if not x.is_floating_point():
        labels = x.reshape(-1).long()
        counts.scatter_add_(0, torch.where(labels < 0, LABELS, labels % LABELS), counts.new_ones(()).expand(len(labels)))
    return counts[:-1]
