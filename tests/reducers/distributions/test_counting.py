"""CountByValue, DistinctCount, HeavyHitters: exact where they say so, within their bounds elsewhere, the same however merged."""

from __future__ import annotations

from collections import Counter
from functools import reduce

import laws
import numpy as np
import pytest
import torch
from torch import Tensor

from reducers import ArgumentError, CountByValue, DistinctCount, DTypeError, HeavyHitters, Reducer


def zipf(n: int, seed: int, most: int = 2**31) -> Tensor:
    """Numbers of which few are frequent and most are rare, as tokens are."""
    drawn = np.random.default_rng(seed).zipf(1.3, n)
    return torch.from_numpy(np.minimum(drawn, most - 1))


def test_counts_of_a_vocabulary() -> None:
    tokens = zipf(300_000, 0, 60_000)
    count = CountByValue(values=50_000)
    result = count.compute(count.update({}, tokens))
    inside = tokens[tokens < 50_000]
    assert torch.equal(result["counts"], torch.bincount(inside, minlength=50_000))
    assert result["outside"] == len(tokens) - len(inside)


def test_counts_per_layer_of_experts() -> None:
    chosen = torch.randint(0, 8, (32, 5, 10), generator=torch.Generator().manual_seed(0))
    result = CountByValue("b layer k -> layer", values=8)
    counts = result.compute(result.update({}, chosen.to(torch.uint8)))["counts"]
    for layer in range(5):
        assert torch.equal(counts[layer], torch.bincount(chosen[:, layer].reshape(-1), minlength=8))


@pytest.mark.parametrize("reducer", [CountByValue(values=40), DistinctCount(), HeavyHitters(k=5)], ids=str)
def test_a_thousand_parts_in_any_order(reducer: Reducer) -> None:
    x = zipf(10_000, 1, 1000)
    parts = [reducer.update({}, part) for part in x.split(10)]
    assert len(parts) == 1000
    shuffled = [parts[i] for i in np.random.default_rng(0).permutation(1000)]
    laws.same_bits(reduce(reducer.merge, shuffled), reducer.update({}, x))


@pytest.mark.parametrize("reducer", [CountByValue(values=40), DistinctCount(), HeavyHitters()], ids=str)
def test_only_integers_are_counted(reducer: Reducer) -> None:
    with pytest.raises(DTypeError, match="counts integers"):
        reducer.update({}, torch.ones(3))


@pytest.mark.parametrize("dtype", [torch.int8, torch.uint8, torch.int16, torch.uint16, torch.int32, torch.uint32, torch.uint64])
def test_all_integers_are_the_same_numbers(dtype: torch.dtype) -> None:
    x = torch.tensor([0, 3, 3, 100])
    for reducer in (CountByValue(values=10), DistinctCount(), HeavyHitters()):
        laws.same_bits(reducer.update({}, x.to(dtype)), reducer.update({}, x))


@pytest.mark.parametrize("bits", [6, 10, 14])
def test_the_error_of_distinct_counts(bits: int) -> None:
    """The relative standard error is the stated one, and there is no bias, from a handful to a million."""
    distinct = DistinctCount(bits=bits)
    stated = 1.04 / 2 ** (bits / 2)
    for n in (30, 1000, 20_000):
        numbers = torch.arange(60 * n).reshape(60, n) * 7919 - 10**9
        found = torch.stack([distinct.compute(distinct.update({}, row)) for row in numbers]) / n - 1
        assert found.square().mean().sqrt() < 1.3 * stated
        assert found.mean().abs() < 4 * stated / 60**0.5


def test_repetitions_do_not_count() -> None:
    distinct = DistinctCount()
    once = distinct.update({}, torch.arange(1000))
    laws.same_bits(distinct.merge(distinct.update({}, torch.arange(1000).repeat(20)), once), once)


def test_distinct_counts_from_one_to_very_many() -> None:
    distinct = DistinctCount(bits=8)
    assert distinct.compute(distinct.update({}, torch.zeros(10, dtype=torch.int64))).item() == pytest.approx(1, rel=0.01)
    full = {"ranks": torch.full((256,), 47, dtype=torch.uint8)}
    assert distinct.compute(full).item() > 2**46
    per_unit = DistinctCount("b c -> c")
    assert per_unit.compute(per_unit.update({}, torch.stack((torch.arange(500), torch.arange(500) % 3), 1))).round().tolist() == [
        pytest.approx(500, rel=0.05),
        3,
    ]


def test_heavy_hitters_of_a_long_tail() -> None:
    """All numbers that make up half a percent are found, in order, never underestimated, within the bound."""
    uniform = torch.randint(0, 2**31, (100_000,), generator=torch.Generator().manual_seed(0))
    tokens = torch.cat((zipf(200_000, 2), torch.full((3000,), 2**31 - 2), uniform))
    hitters = HeavyHitters(k=32)
    result = hitters.compute(hitters.update({}, tokens))
    truth = Counter(tokens.tolist())
    found = dict(zip(result["values"].tolist(), result["counts"].tolist(), strict=True))
    heavy = {value for value, count in truth.items() if count >= len(tokens) // 200}
    assert len(heavy) > 8
    assert heavy <= found.keys()
    for value, count in found.items():
        assert truth[value] <= count <= truth[value] + 2 * len(tokens) / hitters.width
    assert result["counts"].diff().max() <= 0
    assert next(iter(found)) == truth.most_common(1)[0][0]


def test_heavy_hitters_fewer_than_asked_for() -> None:
    hitters = HeavyHitters("b c -> c", k=3, bits=4)
    result = hitters.compute(hitters.update({}, torch.tensor([[1, 15], [1, 16], [2, -1]])))
    assert result["values"].tolist() == [[1, 2, -1], [15, -1, -1]]
    assert result["counts"].tolist() == [[2, 1, 0], [1, 0, 0]]
    assert result["outside"].tolist() == [0, 2]


def test_the_memory_that_is_promised() -> None:
    x = torch.zeros(1, dtype=torch.int64)
    assert sum(value.nbytes for value in DistinctCount(bits=14).update({}, x).values()) == 2**14
    assert sum(value.nbytes for value in HeavyHitters().update({}, x).values()) == 8 * 4 * 1024 * 32 + 8


@pytest.mark.parametrize(
    "wrong",
    [
        lambda: CountByValue(values=0),
        lambda: CountByValue(values=2.5),
        lambda: DistinctCount(bits=3),
        lambda: DistinctCount(bits=19),
        lambda: HeavyHitters(width=1000),
        lambda: HeavyHitters(k=0),
        lambda: HeavyHitters(depth=0),
        lambda: HeavyHitters(bits=63),
    ],
)
def test_arguments(wrong: object) -> None:
    with pytest.raises(ArgumentError, match="takes"):
        wrong()  # type: ignore[operator]
