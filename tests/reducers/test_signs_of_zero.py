"""A result that is zero is 0.0, never -0.0, in every order and on every path: -0.0 and 0.0 are equal, so kernels take either."""

from __future__ import annotations

from functools import reduce
from itertools import product
from typing import Any

import pytest
import torch
from cases import CASES
from laws import flat
from torch import Tensor

from reducers import Masked, Reducer, State, Statistic
from reducers.execution.stacked import is_stackable, lift_stacked

REDUCERS = {str(case): case.reducer for case in CASES if isinstance(case.reducer, Statistic) and torch.float32 in case.dtypes}
UNORDERED = {name: reducer for name, reducer in REDUCERS.items() if not reducer.ordered}


def states(reducer: Reducer, xs: list[Tensor]) -> list[State]:
    """Of the same observations, on all paths."""
    lifts = [reducer.update({}, x) for x in xs]
    found = [
        reduce(reducer.update, xs, {}),
        reducer.update_all({}, torch.stack(xs)),
        reducer.update({}, torch.cat(xs)),
        reducer.merge(*lifts),
        reducer.merge(*reversed(lifts)),
        reducer.merge_all([*lifts, *lifts, *reversed(lifts)]),
        reducer.update_masked({}, torch.cat(xs), torch.ones_like(torch.cat(xs), dtype=torch.bool)),
        Masked(reducer).update({}, torch.cat([*xs, xs[0] - 1]), torch.arange(3 * len(xs[0])) < 2 * len(xs[0])),
    ]
    if is_stackable(reducer):
        rows = lift_stacked(reducer, xs * 4)
        found += [{key: value[row] for key, value in rows.items()} for row in range(2)]
    return found


def negative_zeros(result: Any) -> list[str]:
    found = {name: value for name, value in flat(result).items() if value.is_floating_point()}
    return [name for name, value in found.items() if bool(((value == 0) & value.signbit()).any())]


@pytest.mark.parametrize("name", UNORDERED)
def test_a_zero_has_no_sign(name: str, with_and_without_a_compiler: str) -> None:
    reducer, case = UNORDERED[name], next(case for case in CASES if str(case) == name)
    wrong = []
    big = () if "HeavyHitters" in name or "1e-60" in name else (3000,)
    for rows, dtype, signs in product((1, 4, *big), (torch.float32, torch.float64), product((0.0, -0.0), repeat=2)):
        xs = [torch.full((rows, *case.trailing), zero, dtype=dtype) for zero in signs]
        for path, state in enumerate(states(reducer, xs)):
            wrong += [f"{rows} {dtype} {signs} path {path}: {key}" for key in negative_zeros(reducer.compute(state))]
    assert wrong == []
