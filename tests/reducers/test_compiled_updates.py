"""Updates are pure, so users may compile them: big observations give what eager updates of them give."""

from __future__ import annotations

from functools import reduce

import laws
import pytest
import torch
from torch import Tensor

from reducers import Activity, Last, Max, Norm, Product, Summary

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning:torch")  # of the compiler, about the machine


@pytest.fixture(autouse=True)
def _fresh(fresh_compiler: None) -> None:
    pass


def drawn(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(0))


@pytest.mark.long
def test_big_observations_by_inductor_give_the_same_results() -> None:
    reducer = Product(summary=Summary("b c ... -> c"), norm=Norm(), top=Max(), active=Activity(), last=Last().premap(torch.abs))
    xs = [drawn(rows, 16, 8, 8) + 3 for rows in (16, 9, 1, 12)]
    xs[1][0, 0, 0, :3] = torch.tensor([torch.nan, torch.inf, -torch.inf])
    state = reduce(torch.compile(reducer.update, fullgraph=True, dynamic=True), xs, {})
    laws.close(reducer.compute(state), reducer.compute(laws.run(reducer, xs)), rtol=1e-6)


@pytest.mark.parametrize("pattern", ["... ->", "b ... d -> d", "b c h w -> c", "b c h w -> h c"])
@pytest.mark.parametrize("kind", ["normal", "offset", "outlier first", "holes", "tiny", "huge", "constant"])
def test_one_loop_is_as_exact_as_several(kind: str, pattern: str) -> None:
    x = drawn(8, 4, 16, 32)
    x = {"offset": x + 1e4, "tiny": x * 1e-30, "huge": x * 1e30, "constant": torch.full_like(x, 0.1)}.get(kind, x)
    if kind == "outlier first":
        x[0, 0, 0, 0] = 1e4
    if kind == "holes":
        x[0, :2] = torch.nan
        x[1, 1] = torch.inf
    eager = Summary(pattern)
    state = eager.update({}, x.double())
    made = torch.compile(eager.update, backend="aot_eager", fullgraph=True)({}, x)
    result, wanted = eager.compute(made), eager.compute(state)
    assert isinstance(result, dict)
    assert isinstance(wanted, dict)
    for key in ("count", "zeros", "nan", "inf"):
        assert result[key].equal(wanted[key]), key
    scale = wanted["var"].sqrt().clamp(min=1e-300)
    assert ((result["mean"] - wanted["mean"]).abs() <= 1e-9 * (scale + wanted["mean"].abs())).all()
    assert ((result["var"] - wanted["var"]).abs() <= 1e-9 * wanted["var"] + 1e-25 * wanted["mean"] ** 2).all()
    assert (result["var"] >= 0).all()
