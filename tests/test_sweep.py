"""One sweep over a big observation: as exact as promised, whatever the numbers are, and left to float64 where it cannot be."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import reducers.sweep
from reducers import Moments, Norm, Summary
from reducers.sweep import BIG, sum_squares, sweep

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


@pytest.mark.parametrize("axes", [(0, 1), (0,)], ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_errors_are_below_a_millionth(kind: str, axes: tuple[int, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reducers.sweep, "PIECE", SIZE)
    x = drawn(kind)
    swept = sweep(x, axes, ends=True)
    assert swept is not None
    wide = x.double()
    mean, m2 = wide.mean(axes), wide.var(axes, correction=0) * wide.numel() / wide.mean(axes).numel()
    std = (m2 / wide.numel() * mean.numel()).sqrt()
    assert ((swept["mean"] - mean).abs() <= 1e-6 * std).all()
    assert ((swept["m2"] - m2).abs() <= 1e-6 * m2).all()
    assert swept["min"].equal(x.amin(axes))
    assert swept["max"].equal(x.amax(axes))
    assert swept["zeros"].equal((x == 0).sum(axes))


@pytest.mark.parametrize("value", [0.0, 0.1, -1e-9, 1e30])
def test_what_is_all_equal_has_no_variance_at_all(value: float) -> None:
    state = Moments().update({}, torch.full((SIZE,), value))
    assert state["m2"].item() == 0
    assert state["mean"].item() == torch.tensor(value).double().item()


@pytest.mark.parametrize(
    "x",
    [
        torch.full((SIZE,), torch.nan),
        torch.cat((torch.zeros(SIZE), torch.tensor([torch.inf]))),
        torch.randn(SIZE) * 1e30,  # the squares overflow
        torch.randn(SIZE) * 1e-30,  # the squares vanish
        1e-3 + torch.randn(SIZE) * 1e-10,  # all but equal
        torch.randn(SIZE).double(),
        torch.arange(SIZE),
        torch.randn(BIG - 1),
    ],
    ids=["nan", "inf", "large", "small", "all but equal", "float64", "integers", "few"],
)
def test_what_float32_cannot_hold_is_left_to_float64(x: Tensor) -> None:
    assert sweep(x, (0,)) is None
    result = Summary().compute(Summary().update({}, x))
    wide = x.double()[x.double().isfinite()]
    if len(wide):
        torch.testing.assert_close(result["var"], wide.var(), rtol=1e-9, atol=0)


@pytest.mark.parametrize("scale", [1.0, 1e30, 1e-30])
def test_norms_are_as_exact_and_know_what_is_zero(scale: float) -> None:
    x = torch.randn(SIZE, 3, generator=torch.Generator().manual_seed(0)) * torch.tensor([1.0, scale, 0.0])
    norm = Norm("b c -> c")
    exact = torch.linalg.vector_norm(x.double(), dim=0)
    torch.testing.assert_close(norm.compute(norm.update({}, x)), exact, rtol=1e-7, atol=0)
    assert (sum_squares(x, (0,)) is None) == (scale != 1)


def test_no_temporary_is_as_big_as_the_observation() -> None:
    x = torch.randn(1 << 22)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        Summary().update({}, x)
    assert max(event.cpu_memory_usage for event in profile.events()) <= 4 * reducers.sweep.PIECE
