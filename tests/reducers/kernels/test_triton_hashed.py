"""Digest and Sketch by Triton's interpreter, on CPU tensors: the bits, and the sums, that plain operations give.

Run with triton (extra `gpu-tests`) and TRITON_INTERPRET=1, in a process of their own: the variable changes what triton compiles.
"""

from __future__ import annotations

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
from torch import Tensor

if os.environ.get("TRITON_INTERPRET") != "1" or importlib.util.find_spec("triton") is None:
    pytest.skip("needs triton (extra gpu-tests) and TRITON_INTERPRET=1", allow_module_level=True)

from triton.runtime.interpreter import InterpreterBuilder

from reducers import Digest, Reducer, Sketch
from reducers.kernels import digests, sketches
from reducers.kernels.triton import digest, sketch
from reducers.kernels.triton.arguments import DTYPES

FLOAT8 = (torch.float8_e5m2, torch.float8_e4m3fn, torch.float8_e4m3fnuz)


@pytest.fixture(autouse=True, scope="module")
def few_parts() -> Iterator[None]:
    """Small tensors have several parts of several tiles each, of which some are joined at once."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(digest, "_MOST_PARTS", 3)
        patch.setattr(digest, "_JOINED", 2)
        patch.setattr(sketch, "_MOST_PARTS", 5)
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
        patch.setitem(digests.DIGESTS, "cpu", lambda: (counted(digest.hashed), digest.absorbed))
        patch.setitem(sketches.SKETCHES, "cpu", lambda: counted(sketch.sketched))
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


@settings(max_examples=15, deadline=None)
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
    most = 2**61 - 2
    for entries in ((most, most, 3), (0, 1, 0), (1, most, 2**62)):
        state = {key: torch.tensor(entry) for key, entry in zip(("digest", "factor", "observations"), entries, strict=True)}
        found = Digest().update(state, xs)
        with pytest.MonkeyPatch.context() as patch:
            patch.delitem(digests.DIGESTS, "cpu")
            laws.same_bits(found, Digest().update(state, xs))


def test_a_class_with_its_own_merge_is_asked(taken: list[Any]) -> None:
    class Own(Digest):
        def merge(self, a: Any, b: Any) -> Any:
            return {**Digest.merge(self, a, b), "observations": torch.tensor(7)}

    assert int(Own().update({}, drawn(3))["observations"]) == 7


def test_digests_of_what_does_not_begin_at_a_word(taken: list[Any]) -> None:
    x = drawn(4001)
    for one in (x[1:], x[3:4000:2], x[:4000].view(40, 100).T):
        laws.same_bits(Digest().update({}, one), plainly(Digest(), one))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("k", [64, 256, 2048])
def test_sketches_of_all_dtypes_are_those_of_plain_operations(k: int, dtype: torch.dtype, taken: list[Any]) -> None:
    for shape in ((1,), (3, 5, 7), (9, 1025)):
        x, calls = drawn(*shape, dtype=dtype), len(taken)
        laws.close(Sketch(k).update({}, x), plainly(Sketch(k), x), rtol=1e-12, atol=1e-10)
        assert len(taken) == calls + 1
        assert taken[-1] is not None


@settings(max_examples=10, deadline=None)
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
