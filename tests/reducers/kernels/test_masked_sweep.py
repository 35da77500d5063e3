"""Masks and weights of a big observation, element by element: as exact as promised, and left to float64 if it cannot be."""

from __future__ import annotations

import pytest
import torch
from big_tensors import KINDS, SIZE, drawn
from torch import Tensor

import reducers.kernels.masked
import reducers.kernels.weighted
from reducers import WeightedMean, WeightedMoments
from reducers.kernels.masked import masked_sweep
from reducers.kernels.weighted import weighted_sum, weighted_sweep

pytestmark = pytest.mark.usefixtures("with_and_without_a_compiler")


def draws(x: Tensor) -> Tensor:
    return torch.rand(x.shape, generator=torch.Generator().manual_seed(1))


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (reducers.kernels.masked, reducers.kernels.weighted):
        monkeypatch.setattr(module, "PIECE", SIZE)


def selected_moments(x: Tensor, weights: Tensor, axes: tuple[int, ...]) -> tuple[Tensor, Tensor, Tensor]:
    """Sum of the weights, mean, and sum of squared deviations, in float64 and in two passes."""
    weight, wide = weights.double(), x.double()
    total = weight.sum(axes, keepdim=True)
    mean = (weight * wide).sum(axes, keepdim=True) / total
    m2 = (weight * (wide - mean).square()).sum(axes, keepdim=True)
    return total.squeeze(axes), mean.squeeze(axes), m2.squeeze(axes)


def assert_near(found: dict[str, Tensor], weight: Tensor, mean: Tensor, m2: Tensor) -> None:
    assert ((found["mean"] - mean).abs() <= 1e-6 * (m2 / weight).sqrt()).all()
    assert ((found["m2"] - m2).abs() <= 1e-6 * m2).all()


@pytest.mark.parametrize("axes", [(0, 1), (0,)], ids=str)
@pytest.mark.parametrize("share", [0.7, 0.02])
@pytest.mark.parametrize("kind", KINDS)
def test_what_a_mask_selects_has_errors_below_a_millionth(kind: str, share: float, axes: tuple[int, ...]) -> None:
    x = drawn(kind)
    mask = draws(x) < share
    found = masked_sweep(torch.where(mask, x, torch.nan), mask, axes)
    assert found is not None
    count, mean, m2 = selected_moments(x, mask, axes)
    assert found["count"].equal(count.long())
    assert_near(found, count, mean, m2)
    assert found["min"].equal(torch.where(mask, x, torch.inf).amin(axes))
    assert found["max"].equal(torch.where(mask, x, -torch.inf).amax(axes))
    assert found["zeros"].equal(((x == 0) & mask).sum(axes))
    wide = torch.where(mask, x.double(), 0.0)
    assert ((found["sum"] - wide.sum(axes)).abs() <= 1e-6 * wide.abs().sum(axes)).all()
    torch.testing.assert_close(found["squares"], wide.square().sum(axes), rtol=1e-6, atol=0.0)
    assert found["nan"].equal(found["inf"])
    assert not found["nan"].any()


@pytest.mark.parametrize("value", [0.0, 0.1, -3.0, 1e30])
def test_selected_elements_that_are_equal_have_no_variance(value: float) -> None:
    x = torch.full((SIZE, 8), 7.0)
    mask = draws(x) < 0.5
    x[mask] = value
    found = masked_sweep(x, mask, (0,))
    assert found is not None
    assert not found["m2"].any()
    assert found["mean"].equal(torch.full((8,), value).double())
    assert found["min"].equal(found["max"])
    assert found["zeros"].equal(mask.sum(0) * (value == 0))


def test_a_first_piece_without_a_selected_element_does_not_change_the_extremes() -> None:
    x = drawn("normal")
    mask = torch.ones_like(x, dtype=torch.bool)
    mask[: SIZE // 8] = False
    found = masked_sweep(x, mask, (0, 1))
    assert found is not None
    assert (found["min"], found["max"]) == tuple(torch.aminmax(x[SIZE // 8 :]))
    assert_near(found, *selected_moments(x, mask, (0, 1)))
    assert masked_sweep(x + 10, mask, (0, 1)) is None  # no element is near 0, where the first sweep begins


@pytest.mark.parametrize("what", ["nan", "inf", "no element", "one element", "integers", "small", "tiny"])
def test_a_mask_is_left_to_float64(what: str) -> None:
    x = drawn("normal")
    mask = draws(x) < 0.5
    if what in ("nan", "inf"):
        x[mask.nonzero()[9].unbind()] = float(what)
    elif what == "no element":
        mask[:, 3] = False
    elif what == "one element":
        mask[:, 3] = torch.arange(len(mask)) == len(mask) - 1  # no variance is exact about another centre
    elif what == "tiny":
        x = x * 1e-30
    else:
        x, mask = (x.long(), mask) if what == "integers" else (x[:9], mask[:9])
    assert masked_sweep(x, mask, (0,)) is None


# Of bools there may be a row with one element, which is left to float64: see below.
WEIGHTS = [(dtype, axes) for dtype in (torch.float32, torch.bfloat16) for axes in ((0, 1), (0,), (1,))]
WEIGHTS += [(torch.bool, (0, 1)), (torch.bool, (0,))]


@pytest.mark.slow
@pytest.mark.parametrize(("dtype", "axes"), WEIGHTS, ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_weighted_moments_have_errors_below_a_millionth(kind: str, dtype: torch.dtype, axes: tuple[int, ...]) -> None:
    x = drawn(kind)
    weights = (draws(x) < 0.7) if dtype is torch.bool else draws(x).to(dtype)
    weight, mean, m2 = selected_moments(x, weights, axes)
    found = weighted_sweep(x, weights, axes)
    assert found is not None
    assert_near(found, weight, mean, m2)
    torch.testing.assert_close(found["weight"], weight, rtol=1e-6, atol=0.0)
    torch.testing.assert_close(found["squares"], weights.double().square().sum(axes), rtol=1e-6, atol=0.0)
    added = weighted_sum(x, weights, axes)
    assert added is not None
    torch.testing.assert_close(added["weight"], weight, rtol=1e-6, atol=0.0)
    magnitudes = (weights.double() * x.double().abs()).sum(axes)
    assert ((added["sum"] - mean * weight).abs() <= 1e-6 * magnitudes).all()


@pytest.mark.parametrize("what", ["nan", "inf", "weight nan", "no weight", "vanishing weights", "float64 weights", "float64"])
def test_weights_are_left_to_float64(what: str) -> None:
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
    assert weighted_sweep(x, weights, (0,)) is None
    for reducer in (WeightedMean("b c -> c"), WeightedMoments("b c -> c")):  # and float64 takes them
        slow = reducer.compute(reducer.update({}, x.double(), weights))
        found = reducer.compute(reducer.update({}, x, weights))
        torch.testing.assert_close(found, slow, rtol=1e-6, atol=1e-9, equal_nan=True)


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
        found, masked = weighted_sweep(other, weights, (0,)), masked_sweep(other, weights > 0.3, (0,))
        assert found is not None
        assert_near(found, *selected_moments(x, weights, (0,)))
        if layout == "columns":
            assert masked is None
        else:
            assert masked is not None
            assert_near(masked, *selected_moments(x, weights > 0.3, (0,)))
