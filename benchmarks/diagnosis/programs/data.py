"""Data sets of the programs, all small and at hand without a download; batches by number; and scores."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from sklearn import datasets
from torch import Tensor, nn
from torch.utils import _pytree as pytree

__all__ = ["accuracy", "batches", "digits", "generator", "r2", "split", "table"]

Split = tuple[Tensor, Tensor, Tensor, Tensor]
LOADERS = {
    "breast-cancer": datasets.load_breast_cancer,
    "diabetes": datasets.load_diabetes,
    "iris": datasets.load_iris,
    "wine": datasets.load_wine,
}


def generator(seed: int) -> torch.Generator:
    """Returns a generator of random numbers that others do not disturb."""
    return torch.Generator().manual_seed(seed)


def split(x: Tensor, y: Tensor, share: float = 0.75) -> Split:
    """Returns train_x, train_y, test_x, test_y. The split is random, and the same in every run."""
    order = torch.randperm(len(x), generator=generator(0))
    train, test = order[: int(share * len(x))], order[int(share * len(x)) :]
    return x[train], y[train], x[test], y[test]


@functools.cache
def _digits() -> Split:
    images, labels = datasets.load_digits(return_X_y=True)
    x = torch.from_numpy(images.astype(np.float32)).reshape(-1, 1, 8, 8)
    return split(x / 8 - 1, torch.from_numpy(labels.astype(np.int64)))


def digits() -> Split:
    """Returns train_x, train_y, test_x, test_y of handwritten digits: images (n, 1, 8, 8) in [-1, 1] and labels 0 to 9."""
    return _copied(_digits())


@functools.cache
def _table(name: str) -> Split:
    x, y = LOADERS[name](return_X_y=True)
    regression = name == "diabetes"
    targets = torch.from_numpy(y.astype(np.float32 if regression else np.int64))
    train_x, train_y, test_x, test_y = split(torch.from_numpy(x.astype(np.float32)), targets)
    mean, spread = train_x.mean(0), train_x.std(0)
    train_x, test_x = (train_x - mean) / spread, (test_x - mean) / spread
    if regression:
        mean, spread = train_y.mean(), train_y.std()
        train_y, test_y = (train_y - mean) / spread, (test_y - mean) / spread
    return train_x, train_y, test_x, test_y


def table(name: str) -> Split:
    """Returns train_x, train_y, test_x, test_y of a table.

    The columns are standardised. y (n,) holds labels, or for "diabetes" standardised values.

    Args:
        name: "breast-cancer" (2 classes, 30 columns), "diabetes" (10 columns), "iris" (3, 4) or "wine" (3, 13).
    """
    return _copied(_table(name))


def _copied(data: Split) -> Split:
    a, b, c, d = data  # a fault that writes to the data of one run must not reach the next
    return a.clone(), b.clone(), c.clone(), d.clone()


def batches(x: Any, y: Any, size: int, seed: int) -> Callable[[int], tuple[Any, Any]]:
    """Returns the batch by number. Every epoch is shuffled anew by the seed; a last batch that would not be full is left out.

    Args:
        x: the inputs, a tensor or a tuple or dict of tensors of the same length.
        y: the targets, likewise.
    """
    length = len(pytree.tree_leaves((x, y))[0])
    each = length // size

    @functools.lru_cache(2)
    def order(epoch: int) -> Tensor:
        return torch.randperm(length, generator=generator(seed * 1009 + epoch))

    def batch(number: int) -> tuple[Any, Any]:
        epoch, place = divmod(number, each)
        rows = order(epoch)[place * size : (place + 1) * size]
        return pytree.tree_map(lambda values: values[rows], x), pytree.tree_map(lambda values: values[rows], y)

    return batch


def accuracy(net: nn.Module, x: Any, y: Tensor) -> float:
    """Returns the share of right labels. The network's outputs are logits with the classes last, or one logit for two classes."""
    logits = net(x)
    one = logits.dim() == y.dim() or logits.shape[-1] == 1
    labels = (logits > 0).long().reshape(y.shape) if one else logits.argmax(-1)
    return float((labels == y).float().mean())


def r2(net: nn.Module, x: Any, y: Tensor) -> float:
    """Returns the share of the variance that the network explains: 1 is perfect, 0 is as good as the mean."""
    errors = net(x).reshape(y.shape) - y
    return float(1 - errors.square().mean() / (y - y.mean(0)).square().mean())
