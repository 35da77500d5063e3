"""Masks and weights of a big observation, element by element: as exact as if each element were added in float64."""

from __future__ import annotations

import pytest
import torch
from big_tensors import KINDS, SIZE, drawn
from torch import Tensor

from reducers import Mean, Moments, Norm, State, Summary, WeightedMean, WeightedMoments

pytestmark = pytest.mark.usefixtures("with_and_without_a_compiler")
PATTERNS = {(0, 1): "... ->", (0,): "b c -> c", (1,): "b c -> b"}


def draws(x: Tensor) -> Tensor:
    return torch.rand(x.shape, generator=torch.Generator().manual_seed(1))


def selected_moments(x: Tensor, weights: Tensor, axes: tuple[int, ...]) -> tuple[Tensor, Tensor, Tensor]:
    """Sum of the weights, mean, and sum of squared deviations, in float64 and in two passes."""
    weight, wide = weights.double(), x.double()
    total = weight.sum(axes, keepdim=True)
    mean = (weight * wide).sum(axes, keepdim=True) / total
    m2 = (weight * (wide - mean).square()).sum(axes, keepdim=True)
    return total.squeeze(axes), mean.squeeze(axes), m2.squeeze(axes)


def assert_near(found: State, weight: Tensor, mean: Tensor, m2: Tensor) -> None:
    """The errors are those of float64, with room for an outlier about which the loop adds up a part."""
    std = (m2 / weight).sqrt()
    rtol = 1e-9 + 2.3e-15 * mean.abs() / std.clamp(min=1e-300)
    assert ((found["mean"] - mean).abs() <= rtol * std + 1e-300).all()
    assert ((found["m2"] - m2).abs() <= rtol * m2).all()


@pytest.mark.parametrize("axes", [(0, 1), (0,)], ids=str)
@pytest.mark.parametrize("share", [0.7, 0.02])
@pytest.mark.parametrize("kind", KINDS)
def test_what_a_mask_selects_is_as_exact_as_all(kind: str, share: float, axes: tuple[int, ...]) -> None:
    x, pattern = drawn(kind), PATTERNS[axes]
    mask = draws(x) < share
    hidden = torch.where(mask, x, torch.nan)
    found = Summary(pattern).update_masked({}, hidden, mask)
    count, mean, m2 = selected_moments(x, mask, axes)
    assert found["count"].equal(count.long())
    assert_near(found, count, mean, m2)
    assert found["min"].equal(torch.where(mask, x, torch.inf).amin(axes))
    assert found["max"].equal(torch.where(mask, x, -torch.inf).amax(axes))
    assert found["zeros"].equal(((x == 0) & mask).sum(axes))
    wide = torch.where(mask, x.double(), 0.0)
    added = Mean(pattern).update_masked({}, hidden, mask)["sum"]
    assert ((added - wide.sum(axes)).abs() <= 1e-10 * wide.abs().sum(axes)).all()
    squares = Norm(pattern).update_masked({}, hidden, mask)["power"]
    torch.testing.assert_close(squares, wide.square().sum(axes), rtol=1e-10, atol=0.0)
    assert found["nan"].equal(found["inf"])
    assert not found["nan"].any()


@pytest.mark.parametrize("value", [0.0, 0.1, -3.0, 1e30])
def test_selected_elements_that_are_equal_have_no_variance(value: float) -> None:
    x = torch.full((SIZE, 8), 7.0)
    mask = draws(x) < 0.5
    x[mask] = value
    found = Summary("b c -> c").update_masked({}, x, mask)
    exact = x[mask][0].double()
    rounding = mask.sum(0) * (10 * torch.finfo(torch.float64).eps * exact).square()  # as `Moments` says of the error
    assert (found["m2"] <= rounding).all()
    torch.testing.assert_close(found["mean"], exact.expand(8), rtol=1e-14, atol=0)
    assert found["min"].equal(found["max"])
    assert found["zeros"].equal(mask.sum(0) * (value == 0))


@pytest.mark.parametrize("shift", [0, 10])
def test_a_first_piece_without_a_selected_element_does_not_change_the_extremes(shift: float) -> None:
    x = drawn("normal") + shift
    mask = torch.ones_like(x, dtype=torch.bool)
    mask[: SIZE // 8] = False
    found = Summary().update_masked({}, x, mask)
    assert (found["min"], found["max"]) == tuple(torch.aminmax(x[SIZE // 8 :]))
    assert_near(found, *selected_moments(x, mask, (0, 1)))


@pytest.mark.parametrize("what", ["nan", "inf", "no element", "one element", "integers", "small", "tiny"])
def test_masks_that_leave_little(what: str) -> None:
    x = drawn("normal")
    mask = draws(x) < 0.5
    if what in ("nan", "inf"):
        x[mask.nonzero()[9].unbind()] = float(what)
    elif what == "no element":
        mask[:, 3] = False
    elif what == "one element":
        mask[:, 3] = torch.arange(len(mask)) == len(mask) - 1
    elif what == "tiny":
        x = x * 1e-30
    else:
        x, mask = (x.mul(9).long(), mask) if what == "integers" else (x[:9], mask[:9])
    found, wide = Moments("b c -> c").update_masked({}, x, mask), x.double()
    shown = mask & wide.isfinite()
    assert found["count"].equal(shown.sum(0))
    for column in range(8):
        chosen = wide[shown[:, column], column]
        if len(chosen):
            torch.testing.assert_close(found["mean"][column], chosen.mean(), rtol=1e-12, atol=1e-12 * chosen.abs().max().item())
            torch.testing.assert_close(found["m2"][column], (chosen - chosen.mean()).square().sum(), rtol=1e-11, atol=0)


WEIGHTS = [(dtype, axes) for dtype in (torch.float32, torch.bfloat16, torch.bool) for axes in ((0, 1), (0,), (1,))]


@pytest.mark.slow
@pytest.mark.parametrize(("dtype", "axes"), WEIGHTS, ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_weighted_moments_are_as_exact(kind: str, dtype: torch.dtype, axes: tuple[int, ...]) -> None:
    x, pattern = drawn(kind), PATTERNS[axes]
    weights = (draws(x) < 0.7) if dtype is torch.bool else draws(x).to(dtype)
    if axes == (1,):
        weights[:, 0] = 1  # no row is left without a weight
    weight, mean, m2 = selected_moments(x, weights, axes)
    found = WeightedMoments(pattern).update({}, x, weights)
    assert_near(
        {key: value[..., :1000] for key, value in found.items()} if axes == (1,) else found,
        *(value[..., :1000] if axes == (1,) else value for value in (weight, mean, m2)),
    )
    torch.testing.assert_close(found["weight"], weight, rtol=1e-12, atol=0.0)
    torch.testing.assert_close(found["squares"], weights.double().square().sum(axes), rtol=1e-12, atol=0.0)
    added = WeightedMean(pattern).update({}, x, weights)
    torch.testing.assert_close(added["weight"], weight, rtol=1e-12, atol=0.0)
    magnitudes = (weights.double() * x.double().abs()).sum(axes)
    assert ((added["sum"] - mean * weight).abs() <= 1e-10 * magnitudes).all()


@pytest.mark.parametrize("what", ["nan", "inf", "weight nan", "no weight", "vanishing weights", "float64 weights", "float64"])
def test_weights_of_all_kinds(what: str) -> None:
    x = drawn("normal")
    weights = draws(x)
    if what in ("nan", "inf"):
        x[9, 3] = float(what)
    elif what == "weight nan":
        weights[9, 3] = torch.nan
    elif what.endswith("weights"):
        weights = weights.double() if what == "float64 weights" else weights * 1e-20
    elif what == "float64":
        x = x.double()
    else:
        weights[:, 3] = 0
    for reducer in (WeightedMean("b c -> c"), WeightedMoments("b c -> c")):
        wide = reducer.compute(reducer.update({}, x.double(), weights))
        found = reducer.compute(reducer.update({}, x, weights))
        torch.testing.assert_close(found, wide, rtol=1e-9, atol=1e-12, equal_nan=True)


@pytest.mark.parametrize("layout", ["rows", "columns", "strided", "transposed"])
def test_weights_and_masks_of_any_layout(layout: str) -> None:
    x = drawn("normal")
    weights = {
        "rows": lambda: draws(x)[:, :1].expand(x.shape),
        "columns": lambda: draws(x)[:1].expand(x.shape),
        "strided": lambda: draws(x).repeat_interleave(2, 1)[:, ::2],
        "transposed": lambda: draws(x).t().contiguous().t(),
    }[layout]()
    for other in (x, x.t().contiguous().t(), x.repeat_interleave(2, 1)[:, ::2]):
        found = WeightedMoments("b c -> c").update({}, other, weights)
        assert_near(found, *selected_moments(x, weights, (0,)))
        masked, shown = Summary("b c -> c").update_masked({}, other, weights > 0.3), (weights > 0.3).any(0)
        assert masked["count"].equal((weights > 0.3).sum(0))
        near = selected_moments(x[:, shown], weights[:, shown] > 0.3, (0,))
        assert_near({key: value[shown] for key, value in masked.items()}, *near)
