"""TopK and BottomK: the right elements, where they came from, ties, ids and payloads, and merging."""

from __future__ import annotations

from functools import reduce

import laws
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from reducers import ArgumentError, BottomK, DTypeError, PatternError, ReducerTypeError, StateMismatchError, TopK


def by_hand(xs: list[Tensor], k: int, largest: bool) -> list[tuple[float, int, int]]:
    """(value, step, position) of the first k by value, then step, then position."""
    every = [(value, step, i) for step, x in enumerate(xs) for i, value in enumerate(x.reshape(-1).tolist())]
    return sorted(every, key=lambda entry: (-entry[0] if largest else entry[0], entry[1:]))[:k]


def entries(result: dict[str, Tensor]) -> list[tuple[float, int, int]]:
    found = zip(*(result[key].tolist() for key in ("value", "step", "position")), strict=True)
    return [entry for entry in found if entry[1] >= 0]


@settings(max_examples=80)
@given(
    observations=st.lists(st.lists(st.integers(-3, 3), min_size=1, max_size=12), min_size=1, max_size=6),
    k=st.integers(1, 15),
    largest=st.booleans(),
    dtype=st.sampled_from((torch.float32, torch.bfloat16, torch.int64, torch.int8)),
    cut=st.integers(0, 6),
)
def test_ties_go_to_the_earliest_however_merged(
    observations: list[list[int]], k: int, largest: bool, dtype: torch.dtype, cut: int
) -> None:
    xs = [torch.tensor(values, dtype=dtype) for values in observations]
    ends = TopK(k=k) if largest else BottomK(k=k)
    whole = laws.run(ends, xs)
    laws.same_bits(ends.merge(laws.run(ends, xs[:cut]), laws.run(ends, xs[cut:])), whole)
    assert entries(ends.compute(whole)) == by_hand(xs, k, largest)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["normal", "few values", "one value"])
@pytest.mark.parametrize("ends", [TopK(k=20), BottomK(k=20)], ids=str)
def test_big_tensors(ends: TopK | BottomK, kind: str) -> None:
    x = torch.randn(300, 1000, generator=torch.Generator().manual_seed(0))
    x = {"normal": x, "few values": x.round(), "one value": torch.zeros_like(x)}[kind]
    result = ends.compute(ends.update({}, x))
    assert entries(result) == by_hand([x], 20, ends.largest)
    rows = type(ends)("b d -> b", k=20)
    wide = x.repeat(1, 140)[:3]
    found = rows.compute(rows.update({}, wide))
    for row in range(3):
        expected = by_hand([wide[row]], 20, ends.largest)
        assert found["value"][row].tolist() == [value for value, _, _ in expected]
        assert found["position"][row].tolist() == [row * wide.shape[1] + position for _, _, position in expected]


@pytest.mark.parametrize(
    "pattern", ["b c h w -> c", "b c h w -> w c", "b ... -> b", "b c h w -> (h w)", "b c h w -> b c h w", "... ->"]
)
def test_positions_lead_back_to_the_elements(pattern: str) -> None:
    x = torch.randn(3, 4, 2, 5, generator=torch.Generator().manual_seed(0))
    top = TopK(pattern, k=4)
    result = top.compute(top.update({}, x))
    there = result["step"] >= 0
    assert torch.equal(x[torch.unravel_index(result["position"][there], x.shape)], result["value"][there])
    expected = x.movedim(1, 0).reshape(4, -1).amax(1) if pattern == "b c h w -> c" else None
    if expected is not None:
        assert torch.equal(result["value"][:, 0], expected)


def test_ids_and_payload_stay_with_their_elements() -> None:
    generator = torch.Generator().manual_seed(0)
    top = TopK("b c t -> c", k=5)
    xs = [torch.randn(4, 3, 6, generator=generator) for _ in range(5)]
    ids = [torch.arange(4) + 100 * step for step in range(5)]
    inputs = [torch.randn(4, 2, 7, generator=generator) for _ in range(5)]
    state = reduce(lambda state, i: top.update(state, xs[i], ids[i], inputs[i]), range(5), top.init())
    result = top.compute(state)
    assert result["payload"].shape == (3, 5, 2, 7)
    for channel in range(3):
        for slot in range(5):
            step, position = int(result["step"][channel, slot]), int(result["position"][channel, slot])
            sample, where, _ = torch.unravel_index(torch.tensor(position), (4, 3, 6))
            assert where == channel
            assert xs[step].reshape(-1)[position] == result["value"][channel, slot]
            assert ids[step][sample] == result["id"][channel, slot]
            assert torch.equal(inputs[step][sample], result["payload"][channel, slot])
    laws.same_bits(
        reduce(top.merge, [top.update({}, *both) for both in zip(xs, ids, inputs, strict=True)]),
        state,
    )


def test_slots_without_elements_say_so() -> None:
    top = TopK(k=4)
    x = torch.tensor([[float("nan"), 1.0], [float("inf"), -float("inf")]])
    result = top.compute(top.update({}, x, torch.tensor([7, 8]), torch.ones(2, 3)))
    assert result["value"].isnan().tolist() == [False, True, True, True]
    assert result["step"].tolist() == [0, -1, -1, -1]
    assert result["position"].tolist() == [1, -1, -1, -1]
    assert result["id"].tolist() == [7, -1, -1, -1]
    assert result["payload"].sum(1).tolist() == [3, 0, 0, 0]


def test_the_least_integer_is_an_element_like_others() -> None:
    least = torch.iinfo(torch.int64).min
    top = TopK(k=3)
    state = top.update(top.update({}, torch.tensor([least])), torch.tensor([least, 5]))
    assert entries(top.compute(state)) == [(5, 1, 1), (least, 0, 0), (least, 1, 0)]


def test_steps_count_on_over_what_is_merged() -> None:
    top = TopK(k=3)
    first, second = (laws.run(top, [torch.tensor([value]) for value in values]) for values in ((1.0, 9.0), (5.0, 3.0, 7.0)))
    assert entries(top.compute(top.merge(first, second))) == [(9.0, 1, 0), (7.0, 4, 0), (5.0, 2, 0)]
    assert laws.run(top, [torch.empty(0, 3), torch.tensor(4.0)])["step"].tolist() == [0, -1, -1]


def test_the_state_does_not_grow() -> None:
    top = TopK("b c -> c", k=4)
    sizes = {sum(value.nbytes for value in laws.run(top, [torch.randn(8, 3)] * n).values()) for n in (1, 2, 20)}
    assert len(sizes) == 1


def test_what_does_not_fit() -> None:
    x, top = torch.ones(4, 2), TopK(k=2)
    for wrong in ((), (x, torch.arange(4), x, x), (x, None)):
        with pytest.raises(ReducerTypeError, match="ids of its samples"):
            top.update({}, *wrong)  # type: ignore[arg-type]
    with pytest.raises(ReducerTypeError, match="payload comes third"):
        top.update({}, x, torch.ones(4))
    for ids in (torch.arange(3), torch.arange(8).reshape(4, 2)):
        with pytest.raises(StateMismatchError, match="give one id per sample"):
            top.update({}, x, ids)
    with pytest.raises(StateMismatchError, match="one row per sample"):
        top.update({}, x, torch.arange(4), torch.ones(3, 2))
    with pytest.raises(StateMismatchError, match="different keys"):
        top.update(top.update({}, x), x, torch.arange(4), x)
    with pytest.raises(StateMismatchError, match="keeps shape"):
        top.merge(top.update({}, x), TopK(k=3).update({}, x))
    with pytest.raises(DTypeError, match="no order"):
        top.update({}, x.cfloat())
    with pytest.raises(ArgumentError, match="k, an integer from 1 to"):
        TopK(k=0)
    with pytest.raises(PatternError):
        BottomK("b c", k=3)


def test_payloads_of_every_dtype() -> None:
    x, ids = torch.tensor([[1.0], [3.0], [2.0]]), torch.arange(3)
    rows = torch.arange(6).reshape(3, 2)
    for dtype in (torch.bool, torch.uint16, torch.uint64, torch.float8_e5m2, torch.float64, torch.complex64):
        top = TopK(k=2)
        result = top.compute(top.update(top.update({}, x, ids, rows.to(dtype)), x, ids, rows.to(dtype).conj()))
        assert torch.equal(result["payload"].to(torch.complex64), rows.to(dtype).to(torch.complex64)[[1, 1]])
    sparse = BottomK(k=2)
    assert sparse.compute(sparse.update({}, x.to_sparse()))["value"].tolist() == [1, 2]


def test_payloads_of_another_shape_are_to_be_padded() -> None:
    topk = TopK("b c -> c", k=1)
    state = topk.update({}, torch.ones(2, 2), torch.arange(2), torch.ones(2, 3))
    with pytest.raises(StateMismatchError, match=r"payloads of shape \(3,\) so far and now met \(4,\): pad them to one shape"):
        topk.update(state, torch.ones(2, 2), torch.arange(2), torch.ones(2, 4))
