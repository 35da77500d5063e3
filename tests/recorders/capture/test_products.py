"""Products at a hook: what two statistics share while big observations wait changes neither."""

from __future__ import annotations

from itertools import product
from typing import Any

import laws
import pytest
import torch
from torch import nn

from recorders import ForwardMonitor
from reducers import (
    Activity,
    Collect,
    Count,
    Digest,
    Extremes,
    Histogram,
    Max,
    Mean,
    Min,
    Moments,
    Norm,
    Product,
    Quantile,
    Reducer,
    Sketch,
    Sparsity,
    Sum,
    Summary,
    TopK,
)

XS = torch.randn(2, 200, 96, generator=torch.Generator().manual_seed(0)).unbind()


def statistics(pattern: str) -> list[Reducer]:
    kinds: tuple[Any, ...] = (Count, Sum, Mean, Min, Max, Extremes, Norm, Sparsity, Activity, Moments, Summary, Quantile, TopK)
    found: list[Reducer] = [kind(pattern) for kind in kinds]
    return [*found, Histogram(pattern, bins=8, low=-2.0, high=2.0), Moments(pattern, order=4), Norm(pattern, p=1.0)]


@pytest.mark.parametrize("pattern", ["... ->", pytest.param("b c -> c", marks=pytest.mark.slow)])
def test_two_statistics_at_one_hook_are_those_of_each_by_itself(pattern: str) -> None:
    every = [*statistics(pattern), Digest(), Sketch(64), Collect()]
    alone = [laws.run(reducer, XS) for reducer in every]
    layer = nn.Identity()
    for (first, one), (second, other) in product(zip(every, alone, strict=True), repeat=2):
        monitor = ForwardMonitor(Product(a=first, b=second), layer)
        for x in XS:
            layer(x)
        monitor.deregister()
        assert monitor.samples == len(XS), (first, second)
        wanted = {"a": first.compute(one), "b": second.compute(other)}
        torch.testing.assert_close(
            monitor.peek(), wanted, rtol=1e-9, atol=1e-9, msg=lambda text, pair=(first, second): f"{pair}: {text}"
        )
