"""BatchCourse: what each batch of the inputs, the target or the outputs of a net is like, as one row of numbers."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from recorders.capture.operands import items

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
"""The first columns of a row. All from `mean` on are of at most `SAMPLES` samples, and of some of their features.

If samples have few features, they are of as many samples as have `FEATURES` elements together.
"""
LABELS = 64
"""How many columns follow: how often each label comes, modulo this number. They are zero for floating-point numbers."""
SAMPLES, FEATURES = 64, 4096
IGNORED = -100
"""The label of elements that losses leave out, which is the default of PyTorch's `ignore_index`."""


def rows_of(batch: Any, *_: Any) -> Any:
    """For each tensor of nested ones a row: `BATCH`, then counts of labels. Waits for no device.

    That of a sparse or nested tensor is as if it were empty: made dense, the matrix of a graph may not fit into memory.

    >>> row = rows_of(torch.tensor([[1.0], [3.0]]))
    >>> round(dict(zip(BATCH, row[0].tolist()))["within"], 6)
    2.0
    """
    if isinstance(batch, Tensor):
        return _row(batch if batch.layout is torch.strided else torch.zeros(0, dtype=batch.dtype, device=batch.device))
    return {key: rows_of(item) for key, item in items(batch)} or batch


def _row(x: Tensor) -> Tensor:
    few = x.detach() if x.ndim else x.detach().reshape(1)
    few = few[: max(SAMPLES, FEATURES * len(few) // max(few.numel(), 1))]
    few = few.flatten(1) if few.ndim > 1 else few[:, None]
    few = few[:, :: max(1, few.shape[1] // FEATURES)]
    exact = few.abs() if few.is_complex() else few
    if _has_ignored(exact):
        exact = exact[exact != IGNORED][:, None]
    small = exact.float()
    numbers = [float(x.numel()), float(x.shape[0] if x.ndim else 1), float(x.ndim), float(x.is_floating_point())]
    measured = torch.stack([torch.isfinite(x.detach().float().sum()), *_measured(small)]) if x.numel() else None
    if small.device.type == "cpu":  # then one tensor is made of numbers, for which nobody waits
        numbers += [1.0, *[torch.nan] * (len(BATCH) - 5)] if measured is None else measured.tolist()
        labels = _NONE if exact.is_floating_point() else _counts(exact).tolist()
        return torch.tensor([numbers + labels], dtype=torch.float64, device="cpu")
    if measured is None:
        measured = small.new_tensor([1.0, *[torch.nan] * (len(BATCH) - 5)])
    return torch.cat([small.new_tensor(numbers), measured, _counts(exact)]).unsqueeze(0)


_NONE = [0.0] * LABELS


def _has_ignored(x: Tensor) -> bool:
    """Whether losses leave out some of the labels, but not all; on a device that is not asked, as one would have to wait for it."""
    if x.is_floating_point() or x.dtype == torch.bool or x.device.type != "cpu" or not x.numel():
        return False
    ignored = x == IGNORED
    return bool(ignored.any()) and not bool(ignored.all())


def _measured(x: Tensor) -> list[Tensor]:
    """The columns from `mean` on, of a matrix with elements."""
    mean, norm = x.mean(), torch.linalg.vector_norm
    within = norm(x - x.mean(0)).square() / ((len(x) - 1) * x.shape[1]) if len(x) > 1 else torch.full_like(mean, torch.nan)
    std = norm(x - mean) / x.numel() ** 0.5  # `std` and `var` take many times as long on the CPU
    return [mean, std, *x.aminmax(), norm(x), within, x.sigmoid().mean()]


def _counts(x: Tensor) -> Tensor:
    """How often each label comes; negative ones, by which losses ignore elements, are left out."""
    counts = torch.zeros(LABELS + 1, device=x.device)
    if not x.is_floating_point():
        labels = x.reshape(-1).long()
        counts.scatter_add_(0, torch.where(labels < 0, LABELS, labels % LABELS), counts.new_ones(()).expand(len(labels)))
    return counts[:-1]
