"""Histogram and Quantile by Triton's interpreter, on CPU tensors: counts equal to NumPy's and the CPU's, one for one.

Run with triton (extra `gpu-tests`) and TRITON_INTERPRET=1, in a process of their own: the variable changes what triton compiles.
"""

from __future__ import annotations

import ctypes
import importlib.util
import math
import os
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import laws
import numpy as np
import pytest
import torch
from cases import CASES, Case
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

if os.environ.get("TRITON_INTERPRET") != "1" or importlib.util.find_spec("triton") is None:
    pytest.skip("needs triton (extra gpu-tests) and TRITON_INTERPRET=1", allow_module_level=True)

import triton.language as tl
from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

from reducers import DTypeError, Histogram, Quantile, Reducer, StateMismatchError
from reducers.distributions import histogram
from reducers.kernels import counting
from reducers.kernels.triton import bins, tiling
from reducers.kernels.triton.arguments import DTYPES
from reducers.kernels.triton.shared_bins_kernel import WORDS

TILE = 256
EDGES = (-1.0, 0.0, 0.5, 2.0)
KINDS = {
    "few edges": lambda pattern: Histogram(pattern, edges=EDGES),
    "equal bins": lambda pattern: Histogram(pattern, bins=13, low=-2.0, high=2.5),
    "many bins": lambda pattern: Histogram(pattern, bins=1000, low=-3.0, high=3.0),
    "bits": lambda pattern: Quantile(pattern),
    "few bits": lambda pattern: Quantile(pattern, bits=2, low=0.25, high=4.0),
    "beyond float32": lambda pattern: Quantile(pattern, bits=3, low=1e-60, high=1e60),
}


class Instructions:
    """What the few instructions of PTX do, on an array in place of shared memory, which is not cleared before."""

    def __init__(self) -> None:
        self.words = np.full(WORDS, 77, np.int32)

    def __call__(self, asm: str, constraints: str, values: list[Any], *_: Any) -> Any:
        address, *others = np.broadcast_arrays(*(np.asarray(value.data) for value in values))
        found = np.zeros(address.shape, np.int32)
        if ".shared .align" in asm:
            assert f"shared_counts[{WORDS}]" in asm
            self.words[:] = 77
        elif "mad.wide" in asm:
            number, target, slot, nowhere, magnitude, sign, below, most, infinite = others
            np.add.at(self.words, self._placed(address), number if "[$1], $2" in asm else 1)
            distance = (np.minimum(magnitude - below, most) ^ sign) - sign
            self._add((target + 8 * distance.astype(np.int64))[(slot == nowhere) & (magnitude < infinite)])
        elif "global" in asm:
            self._add(address[others[0] != 0])
        elif "st.shared" in asm:
            self.words[self._placed(address)] = 0
        elif "red.shared" in asm:
            np.add.at(self.words, self._placed(address), 1)
        else:
            assert "ld.shared" in asm
            found = self.words[self._placed(address)]
        return SimpleNamespace(get_result=lambda _: TensorHandle(found, tl.int32))

    def _placed(self, address: Any) -> Any:
        words, rest = np.divmod(address, 4)
        assert not rest.any()
        assert 0 <= words.min() <= words.max() < WORDS
        return words

    def _add(self, addresses: Any) -> None:
        for place in addresses.tolist():
            ctypes.c_int64.from_address(place).value += 1


@pytest.fixture(autouse=True, scope="module", params=["in registers", "in shared memory"])
def small_tiles(request: pytest.FixtureRequest) -> Iterator[bool]:
    """Small tensors have many tiles, and several parts of several tiles each; one program prepares most states."""
    shared = request.param == "in shared memory"
    instructions = Instructions()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(bins, "_takes_shared", lambda x: shared)
        patch.setattr(bins, "_LANES", 128)
        patch.setattr(bins, "_EACH", TILE // 128)
        patch.setattr(bins, "_FEWEST_LANES", 1)
        patch.setattr(InterpreterBuilder, "create_inline_asm", lambda _, *args: instructions(*args))
        patch.setattr(tiling, "_TILE", TILE)
        patch.setattr(tiling, "_MAX_PARTS", 4)
        patch.setattr(bins, "_BLOCK", 1 << 16)
        yield shared


@pytest.fixture(scope="module")
def taken() -> Iterator[list[Any]]:
    """What the kernels returned for CPU tensors."""
    calls: list[Any] = []
    failed: list[Exception] = []

    def counted(kernel: Any) -> Any:
        def call(*args: Any) -> Any:
            calls.append(found := kernel(*args))
            return found

        return call

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("reducers.kernels.failing._failed", failed)
        patch.setitem(counting.BINS, "cpu", counting.BINS["cuda"])
        for name in ("binned_by_edges", "binned_by_bits"):
            patch.setattr(bins, name, counted(getattr(bins, name)))
        yield calls
    assert failed == []


def on_cpu(reducer: Reducer, *xs: Tensor) -> dict[str, Tensor]:
    """The state by plain operations."""
    with pytest.MonkeyPatch.context() as patch:
        patch.delitem(counting.BINS, "cpu", raising=False)
        return laws.run(reducer, xs)


def drawn(*shape: int) -> Tensor:
    """Normal numbers of many magnitudes, with zeros of both signs, NaN and inf."""
    generator = torch.Generator().manual_seed(len(shape))
    x = torch.randn(shape, generator=generator) * torch.exp(torch.randn(shape, generator=generator))
    flat = x.view(-1)
    flat[::7], flat[::11], flat[::13], flat[::5], flat[3::17] = torch.nan, torch.inf, -torch.inf, 0, -0.0
    return x


def in_dtype(x: Tensor, dtype: torch.dtype) -> Tensor:
    return x.to(dtype) if dtype.is_floating_point else x.mul(3).nan_to_num(1, 2, 3).to(dtype)


def bucket(x: float, bits: int, first: int, end: int) -> int:
    """The bin of a number by its definition, without a look at bits."""
    size, per_sign = abs(x), (end - first) << bits
    if size < 2.0**first:
        index = 0
    elif size >= 2.0**end:
        index = per_sign + 1
    else:
        mantissa, exponent = math.frexp(size)
        index = 1 + ((exponent - 1 - first) << bits) + math.floor((2 * mantissa - 1) * 2**bits)
    return per_sign + 1 + (index if x > 0 else -index)


def assert_counts(reducer: Any, x: Tensor, axes: tuple[int, ...], state: dict[str, Tensor]) -> None:
    """The counts are those of NumPy in float64; of a `Quantile`, those of `bucket`, and the extremes are exact."""
    kept = [axis for axis in range(x.ndim) if axis not in axes]
    counts = state["counts"]
    assert counts.shape[:-1] == tuple(x.shape[axis] for axis in kept)
    rows = x.permute(*kept, *axes).reshape(-1, math.prod(x.shape[axis] for axis in axes))
    for place, row in enumerate(rows):
        values, found = row.double().numpy(), counts.reshape(-1, counts.shape[-1])[place].numpy()
        if isinstance(reducer, Histogram):
            edges = reducer._edges(torch.device("cpu")).numpy()
            inside = np.histogram(values[~np.isnan(values)], bins=edges)[0]
            wanted = [(values < edges[0]).sum(), *inside, (values > edges[-1]).sum(), np.isnan(values).sum()]
        else:
            finite = values[np.isfinite(values)]
            bins = [bucket(value, reducer.bits, *reducer._exponents) for value in finite.tolist()]
            wanted = np.bincount(bins, minlength=len(found))
            assert state["min"].reshape(-1)[place].item() == min(finite, default=math.inf)
            assert state["max"].reshape(-1)[place].item() == max(finite, default=-math.inf)
        np.testing.assert_array_equal(found, wanted)


LAYOUTS: dict[str, tuple[Any, str, tuple[int, ...]]] = {
    "everything": (lambda x: x, "... ->", (0, 1, 2, 3)),
    "last kept": (lambda x: x, "a b c d -> d", (0, 1, 2)),
    "channels": (lambda x: x, "a b c d -> b", (0, 2, 3)),
    "channels last": (lambda x: x.contiguous(memory_format=torch.channels_last), "a b c d -> b", (0, 2, 3)),
    "first kept": (lambda x: x, "a b c d -> a", (1, 2, 3)),
    "two kept": (lambda x: x, "a b c d -> b d", (0, 2)),
    "all but one kept": (lambda x: x, "a b c d -> a b d", (2,)),
    "gaps": (lambda x: x[:, ::2, 1:, ::3], "a b c d -> b d", (0, 2)),
    "turned": (lambda x: x.permute(3, 1, 0, 2), "a b c d -> a d", (1, 2)),
    "expanded": (lambda x: x[:1].expand(3, *x.shape[1:]), "a b c d -> b c", (0, 3)),
}


@pytest.mark.parametrize("how", LAYOUTS)
@pytest.mark.parametrize("kind", ["many bins", "few bits"])
def test_all_layouts_count_as_numpy_does(kind: str, how: str, taken: list[Any]) -> None:
    arranged, pattern, axes = LAYOUTS[how]
    x, reducer = arranged(drawn(3, 6, 5, 7)), KINDS[kind](pattern)
    state = reducer.update({}, x)
    assert state is taken[-1]
    assert_counts(reducer, x, axes, state)
    laws.same_bits(state, on_cpu(reducer, x))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("kind", ["equal bins", "bits", "beyond float32"])
def test_all_dtypes_count_as_numpy_does(kind: str, dtype: torch.dtype, taken: list[Any]) -> None:
    reducer, x = KINDS[kind]("a b -> b"), in_dtype(drawn(90, 3), dtype)
    state = reducer.update({}, x)
    assert state is taken[-1]
    assert_counts(reducer, x, (0,), state)
    laws.same_bits(state, on_cpu(reducer, x))


@pytest.mark.parametrize("size", [1, 2, TILE - 1, TILE, TILE + 1, 4 * TILE + 1, 11 * TILE + 7])
def test_sizes_around_the_borders_of_tiles_and_parts(size: int, taken: list[Any]) -> None:
    for kind in ("equal bins", "bits"):
        reducer, x = KINDS[kind]("... ->"), drawn(size)
        state = reducer.update({}, x)
        assert_counts(reducer, x, (0,), state)
        assert state is taken[-1]


@pytest.mark.parametrize("size", [1, 3, 9])
@pytest.mark.parametrize("kept", [1, 8, 33])
def test_sizes_around_the_borders_of_tiles_with_columns(size: int, kept: int, taken: list[Any]) -> None:
    for kind in ("few edges", "few bits"):
        for x, pattern, axes in ((drawn(size, kept), "a b -> b", (0,)), (drawn(kept, size), "a b -> a", (1,))):
            reducer = KINDS[kind](pattern)
            assert_counts(reducer, x, axes, reducer.update({}, x))


SPECIAL = (0.0, -0.0, 5e-324, 1e-45, 2.0**-149, -(2.0**-126), 2.0**-127, 1.0, math.nan, math.inf, -math.inf, 3.4e38, 1e300, 2.5)


@settings(max_examples=30)
@given(
    values=st.lists(st.floats() | st.sampled_from((*SPECIAL, *EDGES)), min_size=1, max_size=60),
    dtype=st.sampled_from((torch.float64, torch.float32, torch.float16)),
    kind=st.sampled_from(sorted(KINDS)),
)
def test_all_magnitudes_and_what_is_no_number(values: list[float], dtype: torch.dtype, kind: str, taken: list[Any]) -> None:
    reducer, x = KINDS[kind]("... ->"), torch.tensor(values, dtype=torch.float64).to(dtype)
    assert_counts(reducer, x, (0,), reducer.update({}, x))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_numbers_on_and_next_to_an_edge(dtype: torch.dtype, taken: list[Any]) -> None:
    reducer = Histogram(bins=70, low=0.1, high=0.8)
    edges = reducer._edges(torch.device("cpu"))
    near = [edges, torch.nextafter(edges, edges + 1), torch.nextafter(edges, edges - 1)]
    x = torch.cat([part.to(dtype) for part in near] + [torch.nextafter(edges.to(dtype), edges.to(dtype) + 1)])
    assert_counts(reducer, x, (0,), reducer.update({}, x))


@pytest.mark.parametrize("kind", KINDS)
def test_nothing_finite_is_counted_and_has_no_extremes(kind: str, taken: list[Any]) -> None:
    x = torch.tensor([[torch.nan, torch.inf, -torch.inf]]).expand(9, 3)
    for dtype in (torch.float32, torch.bfloat16, torch.float64):
        reducer = KINDS[kind]("a b -> b")
        assert_counts(reducer, x.to(dtype), (0,), reducer.update({}, x.to(dtype)))


def test_big_integers_have_exact_extremes(taken: list[Any]) -> None:
    x = torch.tensor([2**62, -(2**62), 2**53 + 1, 7, -(2**63), 2**63 - 1])
    state = Quantile().update({}, x)
    assert (state["min"].item(), state["max"].item()) == (-(2**63), 2**63 - 1)
    laws.same_bits(state, on_cpu(Quantile(), x))


@pytest.mark.parametrize("kind", ["equal bins", "few bits"])
def test_bins_of_a_program_and_of_the_state_count_alike(kind: str, taken: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    x = drawn(30, 3, 11)
    for pattern in ("... ->", "a b c -> b"):
        reducer, found = KINDS[kind](pattern), []
        for most in (0, 1 << 20):
            monkeypatch.setattr(bins, "_OWN_BINS", most)
            found.append(reducer.update({}, x))
        laws.same_bits(*found)


def test_the_order_of_programs_changes_no_bit(taken: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    x = drawn(5 * TILE)
    reducers = [KINDS[kind]("... ->") for kind in ("equal bins", "many bins", "few bits")]
    forwards = [reducer.update({}, x) for reducer in reducers]
    place = InterpreterBuilder.set_grid_idx

    def backwards(self: Any, x: int, y: int, z: int) -> None:
        place(self, self.grid_dim[0] - 1 - x, self.grid_dim[1] - 1 - y, z)

    monkeypatch.setattr(InterpreterBuilder, "set_grid_idx", backwards)
    for reducer, state in zip(reducers, forwards, strict=True):
        laws.same_bits(reducer.update({}, x), state)


@pytest.fixture
def added(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many numbers each atomic call adds."""
    sums: list[int] = []
    call = InterpreterBuilder.create_atomic_rmw

    def counted(self: Any, operation: Any, pointer: Any, value: Any, mask: Any, *rest: Any) -> Any:
        sums.append(int(np.sum(mask.data)))
        return call(self, operation, pointer, value, mask, *rest)

    monkeypatch.setattr(InterpreterBuilder, "create_atomic_rmw", counted)
    return sums


TILES = 8
PEAKED = {
    "zeros": torch.zeros(TILES * TILE),
    "constant": torch.full((TILES * TILE,), 0.1),
    "half zeros, half bounded": torch.tensor([0.0, 6.0]).repeat(TILES * TILE // 2),
    "signs": torch.tensor([-1.0, 0.0, 1.0, 1.0]).repeat(TILES * TILE // 4),
}


@pytest.mark.parametrize("kind", PEAKED)
def test_equal_numbers_are_added_together(kind: str, taken: list[Any], added: list[int]) -> None:
    # Two bins a tile, what a program says at its end, and nothing for each element.
    state = Quantile().update({}, PEAKED[kind])
    assert_counts(Quantile(), PEAKED[kind], (0,), state)
    assert sum(added) <= 2 * TILES + 4 * 4


WINDOWS = {
    "two magnitudes": torch.tensor([1e-30, 1.0]).repeat(20)[:, None] * drawn(40, 40).nan_to_num(0.5, 2, 3),
    "one after the other": torch.tensor([1e-30] * 20 + [1.0] * 20)[:, None] * drawn(40, 40).nan_to_num(0.5, 2, 3),
    "small": drawn(40, 40).nan_to_num(0.5, 2, 3) * 1e-6,
    "not finite": drawn(40, 40),
}


@pytest.mark.parametrize("kind", WINDOWS)
def test_numbers_beyond_the_window_of_a_program_are_counted_too(kind: str, taken: list[Any]) -> None:
    x = WINDOWS[kind]
    uneven = tuple((np.arange(-300, 300) ** 3 / 1e6).tolist())
    for reducer in (
        Quantile("a b -> b"),
        Quantile("a b -> b", low=1e-3, high=0.5),
        Histogram("a b -> b", bins=500, low=-2.0, high=2.0),
        Histogram("a b -> b", edges=uneven),
    ):
        assert_counts(reducer, x, (0,), reducer.update({}, x))


def test_few_bins_are_added_once_a_program(taken: list[Any], added: list[int]) -> None:
    reducer = Histogram(bins=20, low=-2.0, high=2.0)
    reducer.update({}, drawn(TILES * TILE))
    assert 0 < sum(added) <= 4 * 23


@pytest.mark.parametrize("kind", KINDS)
def test_a_state_is_joined_without_being_changed(kind: str, taken: list[Any]) -> None:
    parts = [drawn(50, 4), torch.full((2, 4), torch.nan), drawn(300, 4).mul(1e3)]
    reducer = KINDS[kind]("a b -> b")
    state: dict[str, Tensor] = {}
    for part in parts:
        before = {key: value.clone() for key, value in state.items()}
        after = reducer.update(state, part)
        assert after is taken[-1]
        laws.same_bits(state, before)
        state = after
    assert_counts(reducer, torch.cat(parts), (0,), state)


def test_offsets_beyond_32_bits(taken: list[Any]) -> None:
    storage = torch.empty(2**31 + 5000, dtype=torch.int8)  # only the pages that are touched take memory
    x = storage.as_strided((2, 3), (2**31 + 100, 1))
    x.copy_(torch.tensor([[1, 2, 3], [4, 5, -6]]))
    for kind, pattern, axes in (("few edges", "... ->", (0, 1)), ("few bits", "a b -> b", (0,))):
        reducer = KINDS[kind](pattern)
        assert_counts(reducer, x, axes, reducer.update({}, x))


BY_BINS = [case for case in CASES if isinstance(case.reducer, (Histogram, Quantile))]


@pytest.mark.parametrize("case", BY_BINS, ids=str)
def test_the_laws_hold_with_the_kernels(case: Case, taken: list[Any]) -> None:
    calls = len(taken)
    xs = [drawn(size, *case.trailing) for size in (4, 3, 40)]
    laws.matches(case.reducer, xs, case.reference)
    laws.stream_is_merge(case.reducer, xs)
    laws.associative(case.reducer, xs[:2], (1, 2))
    laws.pure(case.reducer, xs[:2])
    laws.together(case.reducer, xs[:2])
    assert len(taken) > calls + 10
    assert None not in taken[calls:]


def test_masked_observations(taken: list[Any]) -> None:
    x = drawn(60, 5)
    mask = torch.rand(60, 5, generator=torch.Generator().manual_seed(0)) < 0.5
    for reducer in (KINDS[kind]("a b -> b") for kind in ("few edges", "few bits")):
        found = reducer.update_masked({}, x, mask)
        with pytest.MonkeyPatch.context() as patch:
            patch.delitem(counting.BINS, "cpu")
            laws.same_bits(found, reducer.update_masked({}, x, mask))


def test_what_the_kernels_do_not_take_is_counted_all_the_same(taken: list[Any]) -> None:
    many = torch.randn(2, 3, 2, 3, 2, 3, 2, 3, 2, 3)[:, ::2, :, ::2, :, ::2, :, ::2, :, ::2]
    low, wide = torch.tensor([1.0, -3.0]).half(), torch.tensor([0.5, 2.0])
    small = torch.tensor([0.5, 2.0, -1.0]).to(torch.float8_e5m2)
    for reducer in (Quantile(), Histogram(edges=EDGES)):
        for stream in ((many,), (low, wide), (wide, low), (small,), (wide.to(torch.uint16),), (wide[:0], wide)):
            laws.same_bits(laws.run(reducer, stream), on_cpu(reducer, *stream))
        with pytest.raises(DTypeError):
            reducer.update({}, wide * 1j)
    kept = Quantile("b c -> c")
    with pytest.raises(StateMismatchError):
        kept.update(kept.update({}, torch.ones(2, 3)), torch.ones(2, 4))
    finer = Quantile(bits=6).update({}, wide)
    with pytest.raises(StateMismatchError):
        Quantile().update(finer, wide)


def test_only_the_result_and_a_table_are_allocated(taken: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[Any] = []
    x, empty = drawn(300, 3), torch.empty

    def counted(*args: Any, **kwargs: Any) -> Tensor:
        made.append(args[0])
        return empty(*args, **kwargs)

    monkeypatch.setattr(torch, "empty", counted)
    Quantile("b c -> c", bits=2, low=0.25, high=4.0).update({}, x)
    assert made == [(3, 35), [3], [3], (3, 3), [3]]  # with the number of those that are not finite
    made.clear()
    Histogram("b c -> c", edges=EDGES).update({}, x)
    assert made == [(3, 6)]


def test_edges_are_copied_to_a_device_once() -> None:
    device = torch.device("cpu")
    kept = histogram._kept_bounds(Histogram(edges=EDGES), device, True)
    assert histogram._kept_bounds(Histogram(edges=EDGES), device, True) is kept
    assert histogram._kept_bounds(Histogram(edges=EDGES), device, False).dtype is torch.float64
    with torch.inference_mode():
        assert not histogram._kept_bounds(Histogram(edges=(0.0, 0.75)), device, True).is_inference()


def test_a_kernel_that_cannot_be_compiled_loses_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: Any) -> Any:
        raise RuntimeError("Failed to find C compiler. Please specify via CC environment variable.")

    x = drawn(50)
    for reducer in (Quantile(), Histogram(edges=EDGES)):
        monkeypatch.setattr("reducers.kernels.failing._failed", [])
        monkeypatch.setitem(counting.BINS, "cpu", lambda: SimpleNamespace(binned_by_edges=broken, binned_by_bits=broken))
        with pytest.warns(RuntimeWarning, match="failed on .*, which takes longer: RuntimeError: Failed to find C compiler"):
            state = reducer.update({}, x)
        laws.same_bits(reducer.update(state, x), on_cpu(reducer, x, x))
