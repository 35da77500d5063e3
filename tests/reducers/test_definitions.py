"""Definitions that monitorch's users know, written out as plain loops, and the compositions that give them here."""

from __future__ import annotations

import math
from itertools import pairwise

import pytest
import torch
from torch import Tensor

from reducers import Activity, Collect, Geometry, Moments


def batches(*shape: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(3)
    return [torch.randn(*shape, generator=generator).clamp(min=-0.2 * index).relu() for index in range(1, 6)]


def reduced(reducer, observations):  # type: ignore[no-untyped-def]
    state = {}
    for x in observations:
        state = reducer.update(state, x)
    return reducer.compute(state)


@pytest.mark.parametrize(("shape", "pattern", "axes"), [((6, 5), "b c -> c", (0,)), ((6, 5, 3, 2), "b c ... -> c", (0, 2, 3))])
def test_activity_is_a_share_of_samples_and_positions_and_death_of_units_a_batch(
    shape: tuple[int, ...], pattern: str, axes: tuple[int, ...]
) -> None:
    data = batches(*shape)
    data[2][:, 1] = 0.0
    rates = [(x.abs() > 1e-8).double().mean(dim=axes) for x in data]
    result = reduced(Activity(pattern, death=True), data)
    torch.testing.assert_close(result["rate"], torch.stack(rates).mean(0))
    torch.testing.assert_close(result["death"], torch.stack([(rate == 0).double().mean() for rate in rates]).mean())
    assert not result["dead"][1]  # dead in one batch is not dead over the window


@pytest.mark.parametrize("channels_last", [False, True])
def test_the_pattern_says_where_channels_are(channels_last: bool) -> None:
    data = batches(4, 3, 5)
    moved = [x.movedim(1, -1) for x in data] if channels_last else data
    expected = reduced(Activity("b c ... -> c"), data)["rate"]
    torch.testing.assert_close(reduced(Activity("b ... c -> c" if channels_last else "b c ... -> c"), moved)["rate"], expected)


@pytest.mark.parametrize("normalize", [False, True])
def test_output_norm_is_the_mean_of_the_norms_of_samples(normalize: bool) -> None:
    data = batches(6, 5, 3)
    size = 15 if normalize else 1
    expected = torch.stack([x.flatten(1).double().norm(dim=1).mean() / math.sqrt(size) for x in data])
    result = reduced(Moments().premap(lambda x: x.flatten(1).double().norm(dim=1) / math.sqrt(size)), data)
    torch.testing.assert_close(result["mean"], expected.mean())


@pytest.mark.parametrize("normalize", [False, True])
def test_parameter_norm_is_one_number_an_observation(normalize: bool) -> None:
    data = batches(7, 4)
    expected = torch.stack([x.double().norm() / (math.sqrt(28) if normalize else 1) for x in data])
    norms = reduced(Geometry(Collect(), normalize=normalize, correlation=False), data)["norm"]
    torch.testing.assert_close(norms.double(), expected)


def test_correlation_is_with_the_tensor_before_and_the_first_has_none() -> None:
    data = [x.double() for x in batches(7, 4)]
    eps, norm, previous, correlations = 1e-8, 1.0, torch.zeros(7, 4, dtype=torch.float64), []
    for x in data:
        correlations.append((previous * x).sum() / (norm * x.norm() + eps))
        norm, previous = x.norm(), x
    result = reduced(Geometry(Collect(), eps=eps), data)
    assert correlations[0] == 0
    torch.testing.assert_close(result["correlation"].double(), torch.stack(correlations[1:]))
    updates = [b - a for a, b in pairwise(data)]
    torch.testing.assert_close(reduced(Geometry(Collect()), updates)["norm"].double(), torch.stack([u.norm() for u in updates]))
