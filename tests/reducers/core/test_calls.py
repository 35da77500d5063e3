"""An update takes few calls: what reduces tensors of one layout is found once, and nobody is asked twice for one "no"."""

from __future__ import annotations

import pickle
from functools import partial
from typing import Any

import pytest
import torch
from profiled import our_calls_of

from reducers import Activity, Mean, Summary, WeightedMean
from reducers.kernels import dispatch
from reducers.kernels.cpp.library import loop_for

WITH_LOOPS = pytest.mark.skipif(loop_for("sweep", "Float32", 1) is None, reason="the loops were not built")


def calls_of_a_warm_update(x: torch.Tensor) -> int:
    summary = Summary("b t d -> d")
    state = summary.update({}, x)
    for _ in range(2):
        state = summary.update(state, x)
    return our_calls_of(partial(summary.update, state, x))


@WITH_LOOPS
def test_a_warm_update_by_the_loop_is_12_calls() -> None:
    assert calls_of_a_warm_update(torch.randn(4, 8, 16)) <= 12


def test_a_warm_update_of_integers_is_30_calls() -> None:
    assert calls_of_a_warm_update(torch.arange(512).reshape(4, 8, 16)) <= 30


def test_a_warm_update_without_loops_is_30_calls(without_loops: None) -> None:
    assert calls_of_a_warm_update(torch.randn(4, 8, 16)) <= 30


@pytest.mark.parametrize("dtype", [torch.int64, torch.float64, torch.complex64])
def test_who_says_no_is_asked_once(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []
    loop_plan = dispatch.loop_plan
    monkeypatch.setattr(dispatch, "loop_plan", lambda *key: asked.append(key) or loop_plan(*key))
    mean = Mean("b c -> c")
    state = mean.update({}, torch.ones(3, 4, dtype=dtype))
    asked.clear()
    mean.update(state, torch.ones(3, 4, dtype=dtype))
    assert len(asked) == 1


@WITH_LOOPS
@pytest.mark.parametrize("other", [torch.float64, torch.bfloat16])
def test_a_state_of_another_dtype_is_merged(other: torch.dtype) -> None:
    summary, x = Summary(), torch.randn(100)
    state = summary.update({}, torch.ones(2, dtype=other))
    found = summary.update(state, x)
    for key, value in summary.merge(state, summary.update({}, x)).items():
        assert found[key].equal(value), key


def test_a_reducer_that_was_used_is_equal_to_a_new_one() -> None:
    used = Activity(eps=0.5)
    used.update({}, torch.ones(3, 4))
    copied = pickle.loads(pickle.dumps(used))
    assert used == Activity(eps=0.5) == copied
    assert hash(used) == hash(copied)
    assert repr(used) == repr(Activity(eps=0.5))
    assert copied.update({}, torch.full((2, 3), 0.4))["active"].tolist() == [0, 0, 0]


def test_weighted_observations_of_several_dtypes_are_joined() -> None:
    mean = WeightedMean()
    state = mean.update({}, torch.ones(3).double(), torch.ones(3))
    found = mean.update(state, torch.ones(5), torch.ones(5))
    assert (found["weight"].item(), found["sum"].item()) == (8, 8)
