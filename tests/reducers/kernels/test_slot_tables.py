"""Tables of partial statistics by Triton's interpreter: joined in any groups, they have the bits of one update after another.

Run with triton (extra `gpu-tests`) and TRITON_INTERPRET=1, like test_triton.py.
"""

from __future__ import annotations

import importlib.util
import itertools
import os
from collections.abc import Sequence
from dataclasses import replace

import laws
import pytest
import torch
from torch import Tensor

if os.environ.get("TRITON_INTERPRET") != "1" or importlib.util.find_spec("triton") is None:
    pytest.skip("needs triton (extra gpu-tests) and TRITON_INTERPRET=1", allow_module_level=True)

from reducers import Max, Mean, Min, Moments, Norm, Sparsity, Statistic, Sum, Summary
from reducers.core.patterns import arrange
from reducers.kernels import dispatch, waiting
from reducers.kernels.merging import stack
from reducers.kernels.triton import gpu_slots, lanes, tiling
from reducers.kernels.triton.gpu_slots import SlotTable

# A table is tried with a state that was never written, which may hold any bits: the interpreter warns of some of them.
pytestmark = pytest.mark.filterwarnings("ignore:invalid value encountered in cast:RuntimeWarning")

CPU = torch.device("cpu")
KINDS = ("offset", "holes", "nothing finite", "normal")


@pytest.fixture(autouse=True)
def on_cpu(without_loops: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Reducers take the kernels for CPU tensors, and small tensors have many tiles in several parts."""
    monkeypatch.setattr(lanes, "_LANES", 8)
    monkeypatch.setattr(lanes, "_EACH", 8)
    monkeypatch.setattr(tiling, "_MAX_PARTS", 4)
    monkeypatch.setattr("reducers.kernels.failing._failed", [])
    monkeypatch.setitem(dispatch.SWEEPS, "cpu", dispatch.SWEEPS["cuda"])
    monkeypatch.setitem(waiting.SLOTS, "cpu", waiting.SLOTS["cuda"])


def drawn(kind: str, seed: int, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    x = torch.randn(shape, generator=torch.Generator().manual_seed(seed))
    flat = x.view(-1)
    if kind == "offset":
        flat += 1e4
    if kind == "holes":
        flat[::7], flat[::11], flat[::13], flat[::5] = torch.nan, torch.inf, -torch.inf, 0
    if kind == "nothing finite":
        flat.fill_(torch.nan)
    return x.to(dtype) if dtype.is_floating_point else x.mul(3).nan_to_num(1, 2, 3).to(dtype)


def filled(reducer: Statistic, xs: Sequence[Tensor], spare: int = 1) -> tuple[SlotTable, Tensor]:
    """A table in which the observations are, after some slots that hold numbers already."""
    slots = reducer.slots_for(xs[0])
    assert isinstance(slots, SlotTable)
    table = slots.new_table(spare + len(xs), CPU)
    assert slots.size * len(table) == table.nbytes
    table.fill_(-7)
    for number, x in enumerate(xs):
        slots.write(table, x, spare + number)
        assert (table[:spare] == -7).all()
        assert (table[spare + number + 1 :] == -7).all()
    return slots, table


def assert_same_bits(reducer: Statistic, xs: Sequence[Tensor]) -> None:
    """Of slots that are joined in any groups, and of those that are read each by itself."""
    slots, table = filled(reducer, xs)
    wanted: dict[str, Tensor] = {}
    for x in xs:
        wanted = reducer.update(wanted, x)
    for borders in ([0, len(xs)], [0, 2, len(xs)]):
        state: dict[str, Tensor] = {}
        for first, last in itertools.pairwise(borders):
            state = reducer.update_slots(state, slots, table, 1 + first, 1 + last)
        laws.same_bits(state, wanted)
    laws.same_bits(reducer.lifted_slots(slots, table, 1, 1 + len(xs)), stack([reducer.update({}, x) for x in xs]))


REDUCERS = [
    *(Summary("b c w -> c"), Moments("b c w -> c", order=4), Moments("b c w -> c"), Mean("b c w -> c"), Sum("b c w -> c")),
    *(Norm("b c w -> c"), Norm("b c w -> c", p=1), Norm("b c w -> c", p=float("inf")), Min("b c w -> c"), Max("b c w -> c")),
    Sparsity("b c w -> c", eps=0.5),
]


@pytest.mark.parametrize("reducer", REDUCERS, ids=str)
def test_slots_joined_in_any_groups_are_one_update_after_another(reducer: Statistic) -> None:
    xs = [drawn(kind, seed, 5, 3, 9) for seed, kind in enumerate(KINDS)]
    assert_same_bits(reducer, xs)
    assert_same_bits(replace(reducer, pattern="... ->"), xs)  # one position is kept


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64, torch.int8, torch.int64, torch.bool], ids=str)
def test_the_same_in_all_dtypes(dtype: torch.dtype) -> None:
    assert_same_bits(Summary(), [drawn(kind, seed, 100, dtype=dtype) for seed, kind in enumerate(KINDS)])
    assert_same_bits(Sum(), [drawn(kind, seed, 100, dtype=dtype) for seed, kind in enumerate(KINDS[:2])])


@pytest.mark.parametrize("pattern", ["a b c ->", "a b c -> c", "a b c -> b", "a b c -> c a", "a b c -> a b c"])
def test_the_same_in_all_layouts(pattern: str) -> None:
    whole = [drawn(kind, seed, 2, 4, 5) for seed, kind in enumerate(KINDS[:3])]
    assert_same_bits(Summary(pattern), whole)
    assert_same_bits(Summary(pattern), [x.permute(2, 0, 1)[:, ::2, 1:] for x in whole])


def test_parts_of_several_slots_are_joined_by_one_launch_before(monkeypatch: pytest.MonkeyPatch) -> None:
    launched: list[tuple[int, int]] = []
    each = gpu_slots.each_joined
    monkeypatch.setattr(gpu_slots, "each_joined", lambda *args: launched.append(args[3:5]) or each(*args))
    xs = [drawn(kind, seed, 5, 3, 9) for seed, kind in enumerate(KINDS)]
    slots, table = filled(Summary("b c w -> c"), xs)
    assert slots._one[1] > 1
    state = slots.join(table, {}, 1, 2)
    launched.clear()
    slots.join(table, state, 2, 3)
    assert launched == []
    slots.join(table, state, 2, 5)
    assert launched == [(2, 5)]
    whole, few = filled(Summary("b c w -> b w"), xs)  # each slot is one part
    whole.join(few, whole.join(few, {}, 1, 2), 2, 5)
    assert launched == [(2, 5)]


@pytest.mark.parametrize("reducer", REDUCERS, ids=str)
def test_counts_of_a_slot_may_exceed_32_bits(reducer: Statistic) -> None:
    """A part has fewer than 2**31 numbers, of which any may be not finite, but a slot has many parts."""
    slots, table = filled(reducer, [drawn("normal", seed, 5, 3, 9) for seed in range(4)])
    table[1:, 0] = (2**31 - 1) * (1 + (1 << 32))
    one = state = slots.join(table, {}, 1, 2)
    for slot in range(2, 5):
        one = slots.join(table, one, slot, slot + 1)
    laws.same_bits(slots.join(table, state, 2, 5), one)
    for key in {"count", "nonfinite"} & one.keys():
        assert (one[key] == 4 * table.shape[2] * (2**31 - 1)).all()


def test_no_slots_leave_the_state_as_it_is() -> None:
    slots, table = filled(Summary(), [drawn("normal", 0, 90)])
    state = Summary().update({}, drawn("holes", 1, 90))
    joined = slots.join(table, state, 1, 1)
    laws.same_bits(joined, state)
    assert all(joined[key].data_ptr() != state[key].data_ptr() for key in state)


def test_nothing_finite_beside_huge_numbers_leaves_them_as_they_are() -> None:
    huge, nothing = torch.tensor([1e200, 1e200], dtype=torch.float64), torch.full((2,), torch.nan, dtype=torch.float64)
    for xs in ((nothing, huge, nothing), (huge, nothing, nothing)):
        slots, table = filled(Moments(order=4), xs)
        state = Moments(order=4).update_slots({}, slots, table, 1, 4)
        assert [state[key].item() for key in ("count", "mean", "m2", "m3", "m4")] == [2, 1e200, 0, 0, 0]


def test_a_state_of_another_dtype_or_device_is_joined_as_by_updates() -> None:
    xs = [drawn("normal", 0, 90).double(), *(drawn(kind, seed, 90) for seed, kind in enumerate(KINDS[:2]))]
    for reducer in (Summary(), Min()):
        wanted = state = reducer.update({}, xs[0])
        slots, table = filled(reducer, xs[1:])
        for x in xs[1:]:
            wanted = reducer.update(wanted, x)
        state = reducer.update_slots(state, slots, table, 1, 3)
        assert state["min"].dtype is torch.float64
        laws.same_bits(state, wanted)


def test_what_no_kernel_takes_does_not_wait() -> None:
    x = drawn("normal", 0, 8, 6)
    assert Summary("a b -> a").slots_for(x) is not None
    many = torch.randn(2, 3, 2, 3, 2, 3, 2, 3, 2, 3)[:, ::2, :, ::2, :, ::2, :, ::2, :, ::2]
    negative = torch.complex(x, x).conj().imag
    for reducer, one in ((Mean("a b -> (a b)"), x), (Mean(), many), (Mean(), x * 1j), (Mean(), negative), (Mean(), x[:0])):
        assert reducer.slots_for(one) is None
    laws.close(Mean().compute(Mean().update({}, negative)), -x.double().mean(), rtol=1e-6, atol=0)


def test_slots_of_one_look_are_planned_once() -> None:
    first, second = (Summary("a b -> b").slots_for(drawn("normal", seed, 8, 6)) for seed in range(2))
    assert first is second
    assert Summary("a b -> b").slots_for(drawn("normal", 0, 6, 8).T) is not first
    assert arrange(drawn("normal", 0, 8, 6), "a b -> b")[1] == first.axes
