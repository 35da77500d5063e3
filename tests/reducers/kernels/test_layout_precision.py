"""Big tensors of any layout are reduced in float64 if there is a compiler: those that the loop does not take are copied."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from reducers import Masked, Mean, Moments, Summary, WeightedMean, WeightedMoments
from reducers.kernels.cpp import library

pytestmark = pytest.mark.skipif(not library.in_order(), reason="no C++ compiler")


def drawn(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(0)) * 1e-2 + 1


LAYOUTS: dict[str, tuple[Callable[[], Tensor], str]] = {
    "every other element": (lambda: drawn(200, 40, 20)[..., ::2], "... ->"),
    "every other element, kept": (lambda: drawn(200, 40, 20)[..., ::2], "b c d -> c"),
    "every other element last": (lambda: drawn(200, 40, 20)[..., ::2].permute(2, 0, 1), "b c d -> b"),
    "few columns": (lambda: drawn(20000, 3), "b c -> c"),
    "short rows": (lambda: drawn(4000, 5), "b c -> b"),
    "expanded": (lambda: drawn(9000, 1).expand(9000, 5), "b c -> c"),
    "many axes": (lambda: drawn(*(2,) * 14)[..., ::2].permute(*reversed(range(14))), "... ->"),
    "windows": (lambda: drawn(3000).unfold(0, 7, 1), "n w -> w"),
}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("kind", [Moments, Summary, Mean])
def test_the_accuracy_does_not_depend_on_the_layout(layout: str, kind: type[Mean] | type[Moments] | type[Summary]) -> None:
    make, pattern = LAYOUTS[layout]
    x, reducer = make(), kind(pattern)
    assert x.numel() >= 8192
    empty = reducer.update({}, x[:0])
    for found, exact in (
        (reducer.update({}, x), reducer.update({}, x.double())),
        (reducer.update(reducer.update(empty, x), x), reducer.update(reducer.update({}, x.double()), x.double())),
        (Masked(reducer).update({}, x, x > 0.99), Masked(reducer).update({}, x.double(), x > 0.99)),
    ):
        got, wanted = reducer.compute(found), reducer.compute(exact)
        for name in ("mean", "var") if isinstance(wanted, dict) else ("",):
            one, two = (got[name], wanted[name]) if isinstance(got, dict) and isinstance(wanted, dict) else (got, wanted)
            torch.testing.assert_close(one, two, rtol=1.3e-12, atol=0, equal_nan=True)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("kind", [WeightedMean, WeightedMoments])
@pytest.mark.parametrize("each", ["sample", "element"])
def test_so_is_that_of_weighted_statistics(each: str, kind: type[WeightedMean] | type[WeightedMoments], layout: str) -> None:
    make, pattern = LAYOUTS[layout]
    x, reducer = make(), kind(pattern)
    weights = torch.rand(x.shape[:1] if each == "sample" else x.shape, generator=torch.Generator().manual_seed(1))
    found = reducer.update({}, x, weights)
    for got, wanted in (
        (found, reducer.update({}, x.double(), weights.double())),
        (reducer.update(found, x, weights), reducer.update(found, x.double(), weights.double())),
    ):
        for key, value in wanted.items():
            torch.testing.assert_close(got[key], value, rtol=1.3e-12, atol=0)
