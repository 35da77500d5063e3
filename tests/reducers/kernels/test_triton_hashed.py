"""Digest and Sketch by Triton's interpreter, on CPU tensors: the bits, and the sums, that plain operations give.

Run with triton (extra `gpu-tests`) and TRITON_INTERPRET=1, in a process of their own: the variable changes what triton compiles.
"""

from __future__ import annotations

import functools
import importlib.util
import math
import os
from collections.abc import Iterator
from typing import Any

import laws
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

if os.environ.get("TRITON_INTERPRET") != "1" or importlib.util.find_spec("triton") is None:
    pytest.skip("needs triton (extra gpu-tests) and TRITON_INTERPRET=1", allow_module_level=True)

from triton.runtime.interpreter import InterpreterBuilder

from recorders import ForwardMonitor
from recorders.ring.ring import PartialStates
from reducers import Digest, Fingerprints, PerObservation, Reducer, Sketch, TensorPart
from reducers.kernels import digests, sketches
from reducers.kernels.hashing import words_of
from reducers.kernels.parts import runs_of
from reducers.kernels.triton import digest, sketch
from reducers.kernels.triton.arguments import DTYPES
from reducers.samples.fingerprints import FingerprintTable
from reducers.statistics import digest as statistic

HASHED = (torch.float32, torch.bfloat16, torch.float64, torch.int32, torch.uint8)
FLOAT8 = (torch.float8_e5m2, torch.float8_e4m3fn, torch.float8_e4m3fnuz)


@pytest.fixture(autouse=True, scope="module")
def few_parts() -> Iterator[None]:
    """Small tensors have several parts of several tiles each, of which some are joined at once."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(digest, "_MOST_PARTS", 3)
        patch.setattr(digest, "_JOINED", 2)
        patch.setattr(digest, "_ABSORBED", 16)
        patch.setattr(sketch, "_most_parts", lambda *_: 5)
        patch.setattr(sketch, "_JOINED", 2)
        patch.setattr(sketch, "_SIGNS", 64)
        yield


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
        for kernels, room, name in ((digests.DIGESTS, digest, "hashed"), (sketches.SKETCHES, sketch, "sketched")):
            patch.setitem(kernels, "cpu", kernels["cuda"])
            patch.setattr(room, name, counted(getattr(room, name)))
        yield calls
    assert failed == []


def plainly(reducer: Reducer, *xs: Tensor) -> dict[str, Tensor]:
    """The state without the kernels."""
    with pytest.MonkeyPatch.context() as patch:
        patch.delitem(digests.DIGESTS, "cpu", raising=False)
        patch.delitem(sketches.SKETCHES, "cpu", raising=False)
        return laws.run(reducer, xs)


def drawn(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Normal numbers with zeros of both signs, NaN of both signs and inf."""
    x = torch.randn(shape, generator=torch.Generator().manual_seed(len(shape))) * 3
    if not dtype.is_floating_point and not dtype.is_complex:
        return x.abs().to(dtype)
    flat = x.view(-1)
    flat[1::7], flat[2::11], flat[::13], flat[3::17], flat[4::19] = torch.nan, -math.nan, torch.inf, -torch.inf, -0.0
    return x.to(dtype)


@pytest.mark.parametrize("dtype", [*DTYPES, *FLOAT8, torch.uint16, torch.uint64, torch.complex64], ids=str)
def test_digests_of_all_dtypes_are_the_same_bits(dtype: torch.dtype, taken: list[Any]) -> None:
    for shape in ((1,), (3, 5, 7), (1024,), (9, 1025)):
        x, calls = drawn(*shape, dtype=dtype), len(taken)
        laws.same_bits(Digest().update({}, x), plainly(Digest(), x))
        assert len(taken) == calls + 1


@settings(max_examples=15)
@given(rows=st.integers(1, 4), size=st.integers(1, 30_000), dtype=st.sampled_from((torch.float32, torch.bfloat16, torch.uint8)))
def test_digests_of_any_size_and_of_stacked_observations(rows: int, size: int, dtype: torch.dtype, taken: list[Any]) -> None:
    xs = drawn(rows, size, dtype=dtype)
    laws.same_bits(Digest().update_all({}, xs), plainly(Digest(), *xs.unbind()))


def test_digests_of_many_observations_and_states(taken: list[Any]) -> None:
    xs = drawn(70, 3)
    parts = [xs[:1], xs[1:2], xs[2:50], xs[50:]]
    state: dict[str, Tensor] = {}
    for part in parts:
        state = Digest().update_all(state, part)
    laws.same_bits(state, plainly(Digest(), *xs.unbind()))
    laws.same_bits(Digest().merge(state, Digest().update({}, xs)), plainly(Digest(), *xs.unbind(), xs))
    most, least = 2**63 - 1, -(2**63)
    for entries in (([most, least], [least, most], 3), ([0, 0], [1, 0], 0), ([1, -1], [most, most], 2**62)):
        state = {key: torch.tensor(entry) for key, entry in zip(("digest", "factor", "observations"), entries, strict=True)}
        for reduce in (Digest().update, Digest().update_all):
            found = reduce(state, xs)
            with pytest.MonkeyPatch.context() as patch:
                patch.delitem(digests.DIGESTS, "cpu")
                laws.same_bits(found, reduce(state, xs))


@pytest.mark.parametrize("rows", [1, 2, 3, 16, 17, 100])
def test_hashes_are_absorbed_in_order(rows: int) -> None:
    """Beside the joining of states by operations on tensors, which knows nothing of powers for blocks of hashes."""
    hashes = torch.randint(-(2**63), 2**63 - 1, (rows, 2), generator=torch.Generator().manual_seed(rows))
    one = {"factor": words_of(statistic._FACTOR), "observations": torch.tensor(1)}
    wanted: dict[str, Tensor] = {}
    for found in hashes:
        state = {"digest": found, **one}
        wanted = statistic._join_tensors(wanted, state) if wanted else state
    for before in ({}, Digest().update({}, drawn(5))):
        entries = digest.absorbed(hashes, list(before.values()), statistic._FACTOR, statistic._power(rows))
        joined = statistic._join_tensors(before, wanted) if before else wanted
        laws.same_bits(dict(zip(statistic._KEYS, entries, strict=True)), {key: joined[key] for key in statistic._KEYS})


@pytest.mark.parametrize("dtype", HASHED, ids=str)
@pytest.mark.parametrize("shape", [(1,), (5, 7), (8, 512), (3, 2731), (9, 1024)], ids=str)
def test_hashes_of_slots_are_those_of_updates(shape: tuple[int, ...], dtype: torch.dtype, taken: list[Any]) -> None:
    """Observations that begin at any byte, of any number of bytes, in all slots but the first and the last."""
    slots = digests.digest_slots(torch.empty(shape, dtype=dtype))
    assert isinstance(slots, digest.DigestTable)
    xs = [drawn(math.prod(shape) + seed, dtype=dtype)[seed:].view(shape) * (seed + 1) for seed in range(4)]
    table = slots.new_table(6, torch.device("cpu"))
    for slot, x in enumerate(xs, 1):
        assert slots.write(table, x, slot)
    laws.same_bits({"words": slots.words(table, 1, 5)}, {"words": torch.cat([digests.digest_words(x[None]) for x in xs])})
    before = Digest().update({}, drawn(9))
    for state in ({}, before):
        laws.same_bits(Digest().update_slots(state, slots, table, 1, 5), plainly(Digest(), *([drawn(9)] if state else []), *xs))
    each = PerObservation(Digest())
    laws.same_bits(each.compute(each.update_slots({}, slots, table, 1, 5)), each.compute(plainly(each, *xs)))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int32], ids=str)
@pytest.mark.parametrize("shape", [(5, 7), (8, 512), (3, 2731)], ids=str)
def test_fingerprints_in_slots_are_those_of_updates(shape: tuple[int, ...], dtype: torch.dtype, taken: list[Any]) -> None:
    slots = Fingerprints().slots_for(torch.empty(shape, dtype=dtype))
    assert isinstance(slots, FingerprintTable)
    xs = [drawn(math.prod(shape) + seed, dtype=dtype)[seed:].view(shape) * (seed + 1) for seed in range(4)]
    table = slots.new_table(6, torch.device("cpu"))
    for slot, x in enumerate(xs, 1):
        assert slots.write(table, x, slot)
    before, calls = plainly(Fingerprints(), drawn(9, 3, dtype=dtype)), len(taken)
    found = Fingerprints().compute(Fingerprints().update_slots(before, slots, table, 1, 5))
    wanted = Fingerprints().compute(plainly(Fingerprints(), drawn(9, 3, dtype=dtype), *xs))
    laws.same_bits({"digest": found["digest"]}, {"digest": wanted["digest"]})
    laws.close(found, wanted, rtol=1e-12, atol=1e-10)
    assert len(taken) == calls


@pytest.mark.parametrize("reducer", [Digest(), PerObservation(Digest()), Fingerprints()], ids=str)
def test_big_observations_wait_in_a_ring(reducer: Reducer, taken: list[Any]) -> None:
    """One launch an observation; what is looked at in between, and of another shape, is in order all the same."""
    layer = nn.Identity()
    monitor = ForwardMonitor(reducer, layer)
    xs = [torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) for seed in range(5) for shape in ((8, 600), (5, 999))]
    calls = len(taken)
    for number, x in enumerate(xs):
        layer(x)
        if number == 6:
            monitor.peek()
    assert {type(ring.codec) for ring in monitor.buffer.stored.rings().values()} == {PartialStates}
    laws.close(monitor.state, plainly(reducer, *xs), rtol=1e-12, atol=1e-10)  # integers, such as those of digests, are equal
    assert len(taken) - calls <= 6  # the first of each shape are updates


def test_a_class_with_its_own_merge_is_asked(taken: list[Any]) -> None:
    class Own(Digest):
        def merge(self, a: Any, b: Any) -> Any:
            return {**Digest.merge(self, a, b), "observations": torch.tensor(7)}

    assert int(Own().update({}, drawn(3))["observations"]) == 7


def test_digests_of_what_does_not_begin_at_a_word(taken: list[Any]) -> None:
    x = drawn(4001)
    for one in (x[1:], x[3:4000:2], x[:4000].view(40, 100).T):
        laws.same_bits(Digest().update({}, one), plainly(Digest(), one))


@st.composite
def cuts(draw: st.DrawFn) -> tuple[tuple[int, ...], list[tuple[tuple[int, ...], tuple[int, ...]]]]:
    """The shape of a tensor of some blocks, and parts of it: where each begins, and its shape. Every axis may be cut."""
    shape = (*draw(st.lists(st.integers(1, 6), max_size=3)), draw(st.sampled_from((1, 5, 64, 96, 600, 1024, 2003))))
    parts = [((0,) * len(shape), shape)]
    for axis in draw(st.lists(st.integers(0, len(shape) - 1), min_size=1, max_size=3)):
        cut: list[tuple[tuple[int, ...], tuple[int, ...]]] = []
        for start, sizes in parts:
            at = draw(st.one_of(st.integers(0, sizes[axis]), st.sampled_from((0, sizes[axis] // 2, sizes[axis] // 8 * 4))))
            for begin, size in ((0, at), (at, sizes[axis] - at)):
                if size:
                    there = start[axis] + begin
                    cut.append(((*start[:axis], there, *start[axis + 1 :]), (*sizes[:axis], size, *sizes[axis + 1 :])))
        parts = cut
    return shape, parts


def part_of(x: Tensor, start: tuple[int, ...], sizes: tuple[int, ...]) -> Tensor:
    return x[tuple(slice(at, at + size) for at, size in zip(start, sizes, strict=True))]


@settings(max_examples=20)
@given(cut=cuts(), rows=st.integers(1, 2), dtype=st.sampled_from(HASHED))
def test_parts_have_the_digest_of_the_whole(cut: Any, rows: int, dtype: torch.dtype, taken: list[Any]) -> None:
    """The kernel takes them unless one run begins at another byte of a word than the next."""
    shape, parts = cut
    xs = drawn(rows, *shape, dtype=dtype)
    states = []
    for start, sizes in parts:
        part, calls = TensorPart(shape, start), len(taken)
        piece = part_of(xs, (0, *start), (rows, *sizes))
        states.append(Digest().of_part(part).update_all({}, piece))
        words = [runs.number == 1 or runs.stride * dtype.itemsize % 8 == 0 for _, runs in runs_of(piece, part)]
        assert [found is not None for found in taken[calls:]] == words
    laws.same_bits(functools.reduce(Digest().join_parts, states), plainly(Digest(), *xs.unbind()))


def test_a_complex_part_has_its_digest(taken: list[Any]) -> None:
    x = drawn(6, 700, dtype=torch.complex64)
    parts = [
        Digest().of_part(TensorPart((6, 700), (0, column))).update({}, some) for column, some in ((0, x[:, :51]), (51, x[:, 51:]))
    ]
    laws.same_bits(Digest().join_parts(*parts), plainly(Digest(), x))
    assert all(found is not None for found in taken[-2:])


@settings(max_examples=20)
@given(cut=cuts(), rows=st.integers(1, 2), dtype=st.sampled_from(HASHED), k=st.sampled_from((64, 128, 512)))
def test_parts_have_the_sketch_of_the_whole(cut: Any, rows: int, dtype: torch.dtype, k: int, taken: list[Any]) -> None:
    shape, parts = cut
    xs = drawn(rows, *shape, dtype=dtype)
    calls = len(taken)
    states = [
        Sketch(k).of_part(TensorPart(shape, start)).update_all({}, part_of(xs, (0, *start), (rows, *sizes)))
        for start, sizes in parts
    ]
    assert len(taken) >= calls + len(parts)
    assert all(found is not None for found in taken[calls:])
    laws.close(functools.reduce(Sketch(k).merge, states), plainly(Sketch(k), *xs.unbind()), rtol=1e-12, atol=1e-10)


@pytest.mark.parametrize("finite", [True, False])
@pytest.mark.parametrize("start", [0, 1, 63, 64, 1000])
def test_one_run_from_anywhere_is_sketched_as_it_is(start: int, finite: bool, taken: list[Any]) -> None:
    """Most tiles are there as a whole, and are read once if all is finite; the first and the last are not."""
    x = torch.randn(9000, generator=torch.Generator().manual_seed(start)) if finite else drawn(9000)
    sketched = Sketch(64).of_part(TensorPart((20_000,), (start,)))
    laws.close(sketched.update({}, x), plainly(sketched, x), rtol=1e-12, atol=1e-10)
    assert taken[-1] is not None


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("k", [64, 256, 2048])
def test_sketches_of_all_dtypes_are_those_of_plain_operations(k: int, dtype: torch.dtype, taken: list[Any]) -> None:
    for shape in ((1,), (3, 5, 7), (9, 1025)):
        x, calls = drawn(*shape, dtype=dtype), len(taken)
        laws.close(Sketch(k).update({}, x), plainly(Sketch(k), x), rtol=1e-12, atol=1e-10)
        assert len(taken) == calls + 1
        assert taken[-1] is not None


@settings(max_examples=10)
@given(rows=st.integers(1, 4), size=st.integers(1, 12_000), dtype=st.sampled_from((torch.float32, torch.bfloat16, torch.int16)))
def test_sketches_of_any_size_and_of_stacked_observations(rows: int, size: int, dtype: torch.dtype, taken: list[Any]) -> None:
    xs = drawn(rows, size, dtype=dtype)
    laws.close(Sketch(64).update_all({}, xs), plainly(Sketch(64), *xs.unbind()), rtol=1e-12, atol=1e-10)


def test_the_order_of_programs_changes_no_bit_of_a_sketch(taken: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    x = drawn(9000)
    forwards = Sketch(64).update({}, x)
    place = InterpreterBuilder.set_grid_idx
    monkeypatch.setattr(InterpreterBuilder, "set_grid_idx", lambda self, x, y, z: place(self, self.grid_dim[0] - 1 - x, y, z))
    laws.same_bits(Sketch(64).update({}, x), forwards)


def test_nothing_finite_and_what_the_kernel_does_not_take(taken: list[Any]) -> None:
    for x, k in ((torch.full((300,), torch.nan), 64), (drawn(300), 192), (drawn(30, dtype=torch.float8_e5m2), 64)):
        laws.close(Sketch(k).update({}, x), plainly(Sketch(k), x))
