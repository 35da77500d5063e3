"""Centred kernel alignment: against Gram matrices, invariances, bias, cutting, rows left out."""

from __future__ import annotations

import json
import math
from typing import Any

import laws
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import reducers.kernels.chunks
from recorders import Cell
from reducers import CKA, ArgumentError, MinibatchCKA, PatternError, StateMismatchError, from_recipe, to_recipe

FORMS = [CKA(), CKA(unbiased=True), MinibatchCKA()]
form = pytest.mark.parametrize("reducer", FORMS, ids=["exact", "unbiased", "minibatch"])


def features(n: int, p: int, seed: int) -> Tensor:
    return torch.randn(n, p, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def related(n: int, p: int, q: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Two representations that share something, far from zero."""
    x = features(n, p, seed)
    return x + 3, x[:, : min(p, q)] @ features(min(p, q), q, seed + 1) + 2 * features(n, q, seed + 2) - 1


def rotation(d: int, seed: int) -> Tensor:
    return torch.linalg.qr(features(d, d, seed))[0]


def cka(reducer: CKA | MinibatchCKA, *batches: tuple[Tensor, Tensor]) -> float:
    state: dict[str, Tensor] = {}
    for x, y in batches:
        state = reducer.update(state, x, y)
    return reducer.compute(state)["cka"].item()  # type: ignore[index, union-attr]


def batches(x: Tensor, y: Tensor, size: int) -> list[tuple[Tensor, Tensor]]:
    return list(zip(x.split(size), y.split(size), strict=True))


def one_shot(x: Tensor, y: Tensor) -> float:
    """Kornblith et al. 2019, eq. 3 of Gram matrices centred by H."""
    n = len(x)
    h = np.eye(n) - 1 / n
    k, l = (h @ (z @ z.T).numpy().astype(np.longdouble) @ h for z in (x, y))  # noqa: E741
    return float((k * l).sum() / np.sqrt((k * k).sum() * (l * l).sum()))


def hsic(x: Tensor, y: Tensor) -> Any:
    """The U-statistic that the unbiased estimator is, written out over all quadruples of different rows (Song et al. 2012)."""
    k, l = ((z @ z.T).numpy().astype(np.longdouble) for z in (x, y))  # noqa: E741
    n = len(x)
    total, number = np.longdouble(0), 0
    for i in range(n):
        for j in range(n):
            for q in range(n):
                for r in range(n):
                    if len({i, j, q, r}) == 4:
                        total += k[i, j] * (l[i, j] + l[q, r] - 2 * l[i, q])
                        number += 1
    return total / number


def unbiased(*pairs: tuple[Tensor, Tensor]) -> float:
    xy, xx, yy = (np.sum([hsic(pair[a], pair[b]) for pair in pairs]) for a, b in ((0, 1), (0, 0), (1, 1)))
    return float(xy / np.sqrt(xx * yy))


def test_exact_is_the_formula_of_gram_matrices() -> None:
    x, y = related(40, 5, 3)
    assert cka(CKA(), (x, y)) == pytest.approx(one_shot(x, y), rel=1e-12)
    assert cka(CKA(), *batches(x, y, 7)) == pytest.approx(one_shot(x, y), rel=1e-12)


def test_unbiased_is_the_average_over_quadruples() -> None:
    x, y = related(10, 4, 3)
    assert cka(CKA(unbiased=True), (x, y)) == pytest.approx(unbiased((x, y)), rel=1e-10)
    assert cka(CKA(unbiased=True), *batches(x, y, 3)) == pytest.approx(unbiased((x, y)), rel=1e-10)
    assert cka(MinibatchCKA(), *batches(x, y, 5)) == pytest.approx(unbiased(*batches(x, y, 5)), rel=1e-10)


def test_one_batch_is_one_batch_in_both_unbiased_forms() -> None:
    x, y = related(30, 6, 4)
    assert cka(MinibatchCKA(), (x, y)) == pytest.approx(cka(CKA(unbiased=True), (x, y)), rel=1e-11)


@form
@settings(max_examples=20)
@given(seed=st.integers(0, 2**31), scale=st.floats(1e-3, 1e3), shift=st.floats(-100, 100))
def test_turning_scaling_and_moving_change_nothing(reducer: CKA | MinibatchCKA, seed: int, scale: float, shift: float) -> None:
    x, y = related(24, 4, 3, seed)
    before = cka(reducer, *batches(x, y, 8))
    after = cka(reducer, *batches(scale * x @ rotation(4, seed) + scale * shift, -y @ rotation(3, seed + 1), 8))
    assert after == pytest.approx(before, rel=1e-7, abs=1e-7)
    assert cka(reducer, *batches(y, x, 8)) == pytest.approx(before, rel=1e-9)


@form
def test_what_is_equal_is_alike(reducer: CKA | MinibatchCKA) -> None:
    x, _ = related(20, 4, 3)
    assert cka(reducer, (x, x)) == pytest.approx(1, rel=1e-12)
    assert cka(reducer, (x, 5 * x @ rotation(4, 1) - 2)) == pytest.approx(1, rel=1e-12)


@settings(max_examples=30)
@given(seed=st.integers(0, 2**31), n=st.integers(2, 12), p=st.integers(1, 5), q=st.integers(1, 5))
def test_exact_lies_between_0_and_1(seed: int, n: int, p: int, q: int) -> None:
    assert -1e-12 <= cka(CKA(), (features(n, p, seed), features(n, q, seed + 1))) <= 1 + 1e-12


def test_few_rows_of_wide_and_unrelated_features() -> None:
    """The biased form calls them alike, which is why there is an unbiased one."""
    x, y = features(16, 400, 0), features(16, 400, 1)
    assert cka(CKA(), (x, y)) > 0.9
    assert abs(cka(CKA(unbiased=True), (x, y))) < 0.1
    many = [(features(16, 400, 2 * i), features(16, 400, 2 * i + 1)) for i in range(100)]
    error = np.std([cka(CKA(unbiased=True), pair) for pair in many]) / 10  # the standard error of a mean over 100
    assert abs(cka(MinibatchCKA(), *many)) < 4 * error < 0.05


def test_small_batches_estimate_what_all_rows_give() -> None:
    x, y = related(4000, 6, 5)
    whole = cka(CKA(), (x, y))
    assert cka(MinibatchCKA(), *batches(x, y, 8)) == pytest.approx(whole, abs=0.02)
    biased = np.mean([cka(CKA(), pair) for pair in batches(x, y, 8)])
    assert biased > whole + 0.05


@pytest.mark.parametrize("reducer", FORMS[:2], ids=["exact", "unbiased"])
def test_a_thousand_parts_merge_to_one_pass(reducer: CKA) -> None:
    x, y = related(5000, 4, 3)
    states = [reducer.update({}, *pair) for pair in batches(x, y, 5)]
    while len(states) > 1:
        states = [reducer.merge(*states[i : i + 2]) if i + 1 < len(states) else states[i] for i in range(0, len(states), 2)]
    laws.close(reducer.compute(states[0]), reducer.compute(reducer.update({}, x, y)), rtol=1e-12, atol=1e-12)


@form
def test_float32_far_from_zero(reducer: CKA | MinibatchCKA) -> None:
    x, y = (z.float() for z in related(2000, 4, 3))
    x, y = x + 1e4, y - 1e4
    exact = cka(reducer, *batches(x.double() - 1e4, y.double() + 1e4, 50))
    assert cka(reducer, *batches(x, y, 50)) == pytest.approx(exact, rel=1e-9)


@form
def test_rows_with_holes_leave_pairs_out(reducer: CKA | MinibatchCKA) -> None:
    x, y = related(9, 4, 3)
    whole = cka(reducer, (x[2:], y[2:]))
    x[0, 1], y[1, 2] = math.nan, math.inf
    result = reducer.compute(reducer.update({}, x, y))
    assert result["cka"].item() == pytest.approx(whole, rel=1e-11)  # type: ignore[index, union-attr]
    assert result["nonfinite"].item() == 2  # type: ignore[index, union-attr]


@form
@pytest.mark.parametrize("value", [0.0, 0.1, 1e4])
def test_what_does_not_vary_has_no_alignment(reducer: CKA | MinibatchCKA, value: float) -> None:
    x, _ = related(11, 4, 3)
    assert math.isnan(cka(reducer, *batches(x, torch.full((11, 2), value, dtype=torch.float64), 5)))


def test_batches_too_small_are_skipped_and_counted() -> None:
    x, y = related(11, 4, 3)
    state = MinibatchCKA().update(MinibatchCKA().update({}, x[:8], y[:8]), x[8:], y[8:])
    result = MinibatchCKA().compute(state)
    assert (result["observations"].item(), result["skipped"].item()) == (1, 1)
    assert result["cka"].item() == cka(MinibatchCKA(), (x[:8], y[:8]))
    assert math.isnan(cka(MinibatchCKA(), (x[8:], y[8:])))
    assert math.isnan(cka(CKA(unbiased=True), (x[8:], y[8:])))


def test_wide_features_go_through_in_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    x, y = related(12, 50, 7)
    whole = cka(MinibatchCKA(), (x, y))
    monkeypatch.setattr(reducers.kernels.chunks, "CHUNK", 36)
    assert cka(MinibatchCKA(), (x, y)) == pytest.approx(whole, rel=1e-12)


def test_patterns_say_what_is_a_row() -> None:
    images, tokens = torch.randn(6, 3, 2, 2), torch.randn(6, 4, 5)
    pixels = images.movedim(1, -1).reshape(-1, 3)
    got = cka(CKA("b c h w -> c", "b t d -> d"), (images, tokens))
    assert got == pytest.approx(one_shot(pixels.double(), tokens.reshape(-1, 5).double()), rel=1e-10)
    assert cka(MinibatchCKA(), (images, tokens)) == pytest.approx(
        cka(CKA("b ... -> (...)", "b ... -> (...)", unbiased=True), (images, tokens)), rel=1e-9
    )
    with pytest.raises(PatternError, match="has 24 and"):
        CKA("b c h w -> c", "b t d -> d").update({}, images, tokens[:, :3])
    state = CKA("b c h w -> c", "b t d -> d").update({}, images, tokens)
    with pytest.raises(StateMismatchError, match="kept axes must not change"):
        CKA("b c h w -> c", "b t d -> d").update(state, images, tokens[..., :2])


def test_two_networks_meet_in_a_cell() -> None:
    torch.manual_seed(0)
    first, second = torch.nn.Linear(4, 6), torch.nn.Linear(4, 3)
    cell, data = Cell(CKA()), torch.randn(64, 4)
    with torch.no_grad():
        for batch in data.split(10):
            cell.push(first(batch), second(batch))
        exact = one_shot(first(data).double(), second(data).double())
    assert cell.peek()["cka"].item() == pytest.approx(exact, rel=1e-5)


def test_arguments_and_recipes() -> None:
    with pytest.raises(ArgumentError, match="unbiased=True or False"):
        CKA(unbiased=1)  # type: ignore[arg-type]
    for reducer in (*FORMS, CKA("b c h w -> (c h w)", "b d -> d", True)):
        laws.copies(reducer)
        laws.written_as_data(reducer)
        assert from_recipe(json.loads(json.dumps(to_recipe(reducer)))) == reducer
