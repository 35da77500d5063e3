"""TopK and BottomK by Triton's interpreter, on CPU tensors: the slots that plain operations choose, bit for bit.

Run with triton (extra `gpu-tests`) and TRITON_INTERPRET=1, in a process of their own: the variable changes what triton compiles.
"""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Iterator
from typing import Any

import laws
import pytest
import torch
from cases import CASES, Case
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

if os.environ.get("TRITON_INTERPRET") != "1" or importlib.util.find_spec("triton") is None:
    pytest.skip("needs triton (extra gpu-tests) and TRITON_INTERPRET=1", allow_module_level=True)

from triton.runtime.interpreter import InterpreterBuilder

from reducers import BottomK, DTypeError, StateMismatchError, TopK
from reducers.kernels import counting
from reducers.kernels.triton import best, tiling
from reducers.kernels.triton.arguments import DTYPES

TILE = 64


@pytest.fixture(autouse=True, scope="module")
def small_tiles() -> Iterator[None]:
    """Small tensors have many tiles, several parts of several tiles each, and several blocks to rank."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tiling, "_TILE", TILE)
        patch.setattr(tiling, "_MAX_PARTS", 4)
        patch.setattr(best, "_BLOCK", 16)
        yield


@pytest.fixture(scope="module")
def taken() -> Iterator[list[Any]]:
    """What the kernels returned for CPU tensors."""
    calls: list[Any] = []
    failed: list[Exception] = []
    kernel = best.best_elements

    def counted(*args: Any) -> Any:
        calls.append(found := kernel(*args))
        return found

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("reducers.kernels.failing._failed", failed)
        patch.setitem(counting.BEST, "cpu", counting.BEST["cuda"])
        patch.setattr(best, "best_elements", counted)
        yield calls
    assert failed == []


def on_cpu(reducer: Any, *inputs: tuple[Tensor, ...]) -> dict[str, Tensor]:
    """The state by plain operations."""
    state: dict[str, Tensor] = {}
    with pytest.MonkeyPatch.context() as patch:
        patch.delitem(counting.BEST, "cpu", raising=False)
        for xs in inputs:
            state = reducer.update(state, *xs)
    return state


def drawn(*shape: int) -> Tensor:
    """Normal numbers with ties, zeros of both signs, NaN and inf."""
    x = torch.randn(shape, generator=torch.Generator().manual_seed(len(shape)))
    flat = x.view(-1)
    flat[::7], flat[::11], flat[::13], flat[::5], flat[3::17] = torch.nan, torch.inf, -torch.inf, 0, -0.0
    flat[::3] = flat[::3].round()
    return x


LAYOUTS: dict[str, tuple[Any, str]] = {
    "everything": (lambda x: x, "... ->"),
    "last kept": (lambda x: x, "a b c -> c"),
    "channels": (lambda x: x, "a b c -> b"),
    "all but one kept": (lambda x: x, "a b c -> c a"),
    "turned": (lambda x: x.permute(2, 0, 1), "a b c -> b"),
    "gaps": (lambda x: x[:, ::2, 1:], "... ->"),
    "merged": (lambda x: x, "a b c -> (b c)"),
}


@pytest.mark.parametrize("how", LAYOUTS)
@pytest.mark.parametrize("ends", [TopK, BottomK])
def test_all_layouts_choose_as_plain_operations_do(ends: Any, how: str, taken: list[Any]) -> None:
    arranged, pattern = LAYOUTS[how]
    x, reducer, calls = arranged(drawn(4, 5, 6)), ends(pattern, k=3), len(taken)
    ids = torch.arange(14)[: 2 * len(x) : 2]
    found = reducer.update(reducer.update({}, x, ids), x)
    laws.same_bits(found, on_cpu(reducer, (x, ids), (x,)))
    assert len(taken) == calls + (2 if how != "merged" else 0)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_all_dtypes_choose_as_plain_operations_do(dtype: torch.dtype, taken: list[Any]) -> None:
    x = drawn(41, 3)
    x = x.to(dtype) if dtype.is_floating_point else x.mul(3).nan_to_num(1, 2, 3).to(dtype)
    for reducer in (TopK(k=9), BottomK("a b -> b", k=4)):
        laws.same_bits(reducer.update({}, x), on_cpu(reducer, (x,)))
        assert taken[-1] is not None


@settings(max_examples=12)
@given(
    observations=st.lists(st.lists(st.integers(-2, 2), min_size=1, max_size=150), min_size=1, max_size=3),
    k=st.integers(1, 12),
    largest=st.booleans(),
    dtype=st.sampled_from((torch.float32, torch.int8)),
)
def test_ties_go_to_the_earliest(
    observations: list[list[int]], k: int, largest: bool, dtype: torch.dtype, taken: list[Any]
) -> None:
    reducer: Any = TopK(k=k) if largest else BottomK(k=k)
    xs = [torch.tensor(values, dtype=dtype) for values in observations]
    laws.same_bits(laws.run(reducer, xs), on_cpu(reducer, *((x,) for x in xs)))


@pytest.mark.parametrize("size", [1, 2, TILE - 1, TILE, TILE + 1, 4 * TILE + 1, 11 * TILE + 7])
def test_sizes_around_the_borders_of_tiles_and_parts(size: int, taken: list[Any]) -> None:
    laws.same_bits(TopK(k=5).update({}, drawn(size)), on_cpu(TopK(k=5), (drawn(size),)))


def test_ends_of_integers_and_nothing_finite(taken: list[Any]) -> None:
    ends = torch.tensor([-(2**63), 2**63 - 1, 0, -(2**63)])
    nothing = torch.full((9, 2), torch.nan)
    for reducer in (TopK(k=6), BottomK(k=6)):
        laws.same_bits(reducer.update({}, ends), on_cpu(reducer, (ends,)))
        laws.same_bits(reducer.update(reducer.update({}, nothing), drawn(3, 2)), on_cpu(reducer, (nothing,), (drawn(3, 2),)))


def test_the_order_of_programs_changes_no_bit(taken: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    x = drawn(9 * TILE).round()
    forwards = TopK(k=7).update({}, x)
    place = InterpreterBuilder.set_grid_idx
    monkeypatch.setattr(InterpreterBuilder, "set_grid_idx", lambda self, x, y, z: place(self, x, self.grid_dim[1] - 1 - y, z))
    laws.same_bits(TopK(k=7).update({}, x), forwards)


@pytest.mark.parametrize("case", [case for case in CASES if isinstance(case.reducer, (TopK, BottomK))], ids=str)
def test_the_laws_hold_with_the_kernels(case: Case, taken: list[Any]) -> None:
    xs = [drawn(size, *case.trailing) for size in (4, 3, 9)]
    laws.matches(case.reducer, xs, case.reference)
    laws.stream_is_merge(case.reducer, xs[:2])
    laws.pure(case.reducer, xs[:1])


def test_what_the_kernels_do_not_take_is_chosen_all_the_same(taken: list[Any]) -> None:
    x = drawn(6, 4)
    low, small = x.half(), x[:, 0].to(torch.float8_e5m2)
    for reducer in (TopK(k=3), TopK(k=40)):
        for inputs in (((x,), (low,)), ((low,), (x,)), ((small,),), ((x, torch.arange(6), x),), ((x[:0],), (x,))):
            state: dict[str, Tensor] = {}
            for xs in inputs:
                state = reducer.update(state, *xs)
            laws.same_bits(state, on_cpu(reducer, *inputs))
    with pytest.raises(DTypeError):
        TopK().update({}, x * 1j)
    with pytest.raises(StateMismatchError):
        TopK("a b -> b").update(TopK("a b -> b").update({}, x), x[:, :2])
