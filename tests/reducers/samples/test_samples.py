"""First, Last, Fold, Collect: observations kept whole, in storages of their own."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import laws
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from recorders import ForwardMonitor, Recorder, load
from reducers import Collect, First, Fold, Last, Reducer, ReducerTypeError, StateMismatchError, Whole


def result(reducer: Reducer, *xs: torch.Tensor) -> torch.Tensor:
    return reducer.compute(laws.run(reducer, xs))


def test_first_and_last_hold_no_view() -> None:
    big = torch.zeros(1000, 10)
    for reducer in (First(), Last()):
        assert reducer.update({}, big[0])["value"].untyped_storage().nbytes() == 40


def test_fold() -> None:
    total = Fold(torch.add)
    assert result(total, torch.tensor([1.0]), torch.tensor([2.0]), torch.tensor([4.0])).tolist() == [7]
    with pytest.raises(ReducerTypeError, match="needs a function"):
        Fold(3)  # type: ignore[arg-type]
    bad = Fold(lambda a, b: (a + b).tolist())
    with pytest.raises(ReducerTypeError, match="must return a tensor and returned list"):
        laws.run(bad, [torch.ones(1), torch.ones(1)])


def test_fold_may_return_what_it_was_given() -> None:
    x = torch.ones(2)
    laws.pure(Fold(lambda a, b: b), [x, x + 1])
    laws.pure(Fold(lambda a, b: a), [x, x + 1])


def test_collect_stacks_single_numbers() -> None:
    assert result(Collect(), *(torch.tensor(float(i)) for i in range(5))).tolist() == [0, 1, 2, 3, 4]


@settings(max_examples=30)
@given(sizes=st.lists(st.integers(1, 20), min_size=1, max_size=60))
def test_collect_keeps_few_blocks_each_half_the_one_before(sizes: list[int]) -> None:
    collect = Collect()
    state = laws.run(collect, [torch.zeros(size) for size in sizes])
    rows = [len(state[str(index)]) for index in range(len(state))]
    assert sum(rows) == sum(sizes)
    assert all(earlier >= 2 * later for earlier, later in pairwise(rows))


def test_collect_copies_each_row_a_logarithmic_number_of_times() -> None:
    collect, state, copied = Collect(), {}, 0
    for _ in range(1024):
        before = {value.data_ptr() for value in state.values()}
        state = collect.update(state, torch.zeros(1))
        copied += sum(len(value) for value in state.values() if value.data_ptr() not in before)
    assert copied <= 1024 * 11


def test_collect_reads_its_blocks_in_order_of_time_whatever_the_order_of_keys() -> None:
    collect = Collect()
    state = laws.run(collect, [torch.arange(7.0), torch.arange(7.0, 10.0), torch.tensor([10.0])])
    assert len(state) == 3
    turned = dict(sorted(state.items(), reverse=True))
    assert collect.compute(collect.update(turned, torch.tensor([11.0]))).tolist() == list(range(12))


def test_collect_names_the_shapes_that_do_not_fit() -> None:
    state = Collect().update({}, torch.zeros(2, 3))
    with pytest.raises(StateMismatchError, match=r"\(\*, 3\).*\(2, 4\).*only the first axis"):
        Collect().update(state, torch.zeros(2, 4))


def test_whole_observations_are_recorded_saved_and_resumed(tmp_path: Path) -> None:
    layer = torch.nn.Identity()
    observed = [torch.randn(size, 2) for size in (3, 1, 4)] + [torch.arange(3), torch.tensor(2.5)]
    with Recorder(ForwardMonitor(Whole())).modules(layer) as recorder:
        for x in observed[:3]:
            layer(x)
        recorder.save(tmp_path / "run")
    loaded = load(tmp_path / "run")
    with Recorder(ForwardMonitor(Whole())).modules(layer) as resumed:
        resumed.merge(loaded)
        for x in observed[3:]:
            layer(x)
    found = resumed[0].peek()
    assert list(found) == ["0", "1", "2", "3", "4"]
    for x, kept in zip(observed, found.values(), strict=True):
        torch.testing.assert_close(kept, x, rtol=0, atol=0)
        assert kept.dtype == x.dtype
