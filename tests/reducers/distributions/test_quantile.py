"""Quantile: the promised error over every kind of data, ends, ranges, memory, and merging."""

from __future__ import annotations

from functools import reduce

import laws
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from reducers import ArgumentError, DTypeError, EmptyStateError, Quantile, StateMismatchError

SHARES = (0.0, 0.001, 0.01, 0.1, 0.25, 0.5, 0.75, 0.9, 0.99, 0.999, 1.0)
KINDS = {
    "normal": lambda rng, n: rng.normal(size=n),
    "far": lambda rng, n: rng.normal(1e4, 1.0, size=n),
    "log-normal": lambda rng, n: rng.lognormal(0.0, 4.0, size=n),
    "Cauchy": lambda rng, n: rng.standard_cauchy(size=n),
    "bimodal": lambda rng, n: np.where(rng.random(n) < 0.3, rng.normal(-1e-3, 1e-5, n), rng.normal(50.0, 0.1, n)),
    "whole": lambda rng, n: rng.integers(-1000, 1000, n).astype(float),
    "constant": lambda rng, n: np.full(n, 0.1),
    "half zero": lambda rng, n: np.maximum(rng.normal(size=n), 0.0),
    "huge": lambda rng, n: rng.normal(size=n) * 1e37,
    "tiny": lambda rng, n: rng.normal(size=n) * 1e-36,
}


def assert_within(found: Tensor, data: Tensor, q: tuple[float, ...], error: float, below: float = 2.0**-126) -> None:
    """Each quantile is no farther than promised from the order statistic of the data themselves."""
    exact = np.quantile(data.double().numpy(), q, method="inverted_cdf")
    allowed = np.where(np.abs(exact) < below, below, np.abs(exact) * (error * (1 + 1e-12)))
    np.testing.assert_array_less(np.abs(found.numpy() - exact), np.maximum(allowed, 1e-300))


@settings(max_examples=60)
@given(
    kind=st.sampled_from(sorted(KINDS)),
    seed=st.integers(0, 2**31),
    n=st.integers(1, 3000),
    bits=st.integers(1, 10),
    dtype=st.sampled_from((torch.float32, torch.float64, torch.bfloat16)),
)
def test_the_error_is_never_above_the_promise(kind: str, seed: int, n: int, bits: int, dtype: torch.dtype) -> None:
    x = torch.from_numpy(KINDS[kind](np.random.default_rng(seed), n)).to(dtype)
    quantile = Quantile(q=SHARES, bits=bits)
    state = quantile.update({}, x)
    assert_within(quantile.compute(state), x, SHARES, quantile.error)
    assert quantile.error == 1 / (2 ** (bits + 1) + 1)


@settings(max_examples=60)
@given(
    values=st.lists(st.floats(allow_nan=False, allow_infinity=False, width=32), min_size=1, max_size=50),
    q=st.lists(st.floats(0, 1), min_size=1, max_size=5).map(tuple),
)
def test_any_float32(values: list[float], q: tuple[float, ...]) -> None:
    x = torch.tensor(values)
    quantile = Quantile(q=q)
    assert_within(quantile.compute(quantile.update({}, x)), x, q, quantile.error)


def test_the_promise_is_reached_at_the_ends_of_a_bucket() -> None:
    quantile = Quantile(q=0.5, bits=3)
    bucket = torch.tensor([-9.0, 1.0, 1000.0])
    found = quantile.compute(quantile.update({}, bucket)).item()
    assert found - 1 == pytest.approx(quantile.error, rel=1e-12)


def test_every_bucket_of_the_range_holds_its_ends() -> None:
    for dtype in (torch.float32, torch.float64):
        quantile = Quantile(q=0.5, bits=2, low=2.0**-3, high=2.0**3)
        edges = torch.tensor([2.0**e * (1 + m / 4) for e in range(-3, 3) for m in range(4)], dtype=dtype)
        just_below = torch.nextafter(torch.cat((edges[1:], torch.tensor([8.0], dtype=dtype))), torch.zeros((), dtype=dtype))
        for sign in (1, -1):
            low, high = (quantile.update({}, sign * side)["counts"] for side in (edges, just_below))
            assert torch.equal(low, high)
            assert sorted(low.unique().tolist()) == [0, 1]
            assert low.sum() == 24


def test_ends_and_constants_are_exact() -> None:
    quantile = Quantile(q=(0.0, 0.3, 1.0))
    x = torch.tensor([0.1, -7.3, 123456.7])
    assert quantile.compute(quantile.update({}, x))[[0, 2]].tolist() == [x.min().item(), x.max().item()]
    for constant in (0.1, -3.7, 0.0, 1e-45, 3e38):
        same = torch.full((10,), constant)
        assert quantile.compute(quantile.update({}, same)).tolist() == [same[0].item()] * 3


def test_zeros_stay_zero_beside_other_numbers() -> None:
    quantile = Quantile(q=(0.3, 0.5))
    x = torch.tensor([-1.0, 0.0, -0.0, 0.0, 5.0])
    assert quantile.compute(quantile.update({}, x)).tolist() == [0.0, 0.0]


def test_what_is_not_finite_is_kept_out() -> None:
    quantile = Quantile("b c -> c", q=(0.0, 0.5, 1.0))
    holes = torch.tensor([[float("nan"), float("nan")], [float("inf"), 2.0], [-float("inf"), 2.0], [float("nan"), -float("inf")]])
    state = quantile.update({}, holes)
    assert state["counts"].sum(-1).tolist() == [0, 2]
    found = quantile.compute(state)
    assert found[:, 0].isnan().all()
    assert found[:, 1].tolist() == [2.0] * 3
    signalling = torch.tensor([0x7F800001, 0x3F800000], dtype=torch.int32).view(torch.float32)
    assert Quantile().update({}, signalling)["counts"].sum() == 1


def test_a_range_counts_what_is_outside_of_it() -> None:
    quantile = Quantile(q=(0.2, 0.5, 0.9, 1.0), low=1e-3, high=1e3)
    assert quantile.update({}, torch.zeros(1))["counts"].shape == (2 * 20 * 32 + 3,)
    x = torch.tensor([-1e30, -1e29, 1e-9, 1e-8, 7.0, 8.0, 9.0, 2e6, 3e6, 4e6])
    found = quantile.compute(quantile.update({}, x))
    assert found.tolist() == [-1024.0, pytest.approx(7.0, rel=quantile.error), 1024.0, 4e6]


def test_float64_beyond_float32() -> None:
    x = torch.tensor([1e-200, 1e-100, 1e100, 1e200], dtype=torch.float64)
    default, wide = Quantile(q=(0.25, 0.5, 0.75)), Quantile(q=(0.25, 0.5, 0.75), low=1e-250, high=1e250)
    assert default.compute(default.update({}, x)).tolist() == [1e-200, 1e-200, 2.0**128]
    assert_within(wide.compute(wide.update({}, x)), x, (0.25, 0.5, 0.75), wide.error, below=1e-250)
    # all dtypes share the buckets
    for number in (1.0, -0.3, 100.5, 1e-30, 2.0**-126, 3.0e38):
        narrow = torch.tensor([number])
        assert torch.equal(default.update({}, narrow)["counts"], default.update({}, narrow.double())["counts"])


def test_float16_denormals_are_inside() -> None:
    x = torch.arange(1, 1024, dtype=torch.int16).view(torch.float16)
    quantile = Quantile(q=SHARES)
    assert_within(quantile.compute(quantile.update({}, x)), x, SHARES, quantile.error)


def test_wide_integers() -> None:
    x = torch.tensor([-(2**62), -5, 0, 3, 2**40, 2**62])
    q = (0.1, 0.3, 0.5, 0.6, 0.8, 1.0)
    quantile = Quantile(q=q)
    assert_within(quantile.compute(quantile.update({}, x)), x, q, quantile.error)


def test_a_thousand_parts_merge_to_what_one_pass_gives() -> None:
    x = torch.randn(100_000, 3, generator=torch.Generator().manual_seed(0)).exp()
    quantile = Quantile("b c -> c")
    parts = [quantile.update({}, part) for part in x.split(100)]
    assert len(parts) == 1000
    laws.same_bits(reduce(quantile.merge, parts), quantile.update({}, x))


@pytest.mark.slow
def test_big_tensors_are_counted_alike_whatever_their_layout() -> None:
    x = torch.randn(40, 7, 1024, generator=torch.Generator().manual_seed(0))
    whole, features = Quantile(bits=3), Quantile("b c d -> d", bits=3)
    for quantile in (whole, features):
        parts = reduce(quantile.merge, [quantile.update({}, row[None]) for row in x])
        laws.same_bits(parts, quantile.update({}, x))
        laws.same_bits(parts, quantile.update({}, x.transpose(0, 2).contiguous().transpose(0, 2)))


def test_other_quantiles_of_the_same_state() -> None:
    quantile = Quantile("b c -> c", q=0.5)
    state = quantile.update({}, torch.randn(1000, 2, generator=torch.Generator().manual_seed(0)))
    laws.same_bits(quantile.at(state, 0.9), Quantile("b c -> c", q=0.9).compute(state))
    laws.same_bits(quantile.at(state, (0.9,)), Quantile("b c -> c", q=(0.9,)).compute(state))
    assert quantile.compute(state).shape == (2,)
    assert quantile.at(state, (0.1, 0.2, 0.3)).shape == (3, 2)
    laws.same_bits(quantile.iqr(state), quantile.at(state, 0.75) - quantile.at(state, 0.25))
    with pytest.raises(EmptyStateError):
        quantile.at({}, 0.5)
    with pytest.raises(ArgumentError):
        quantile.at(state, 1.5)


def test_the_memory_that_is_promised() -> None:
    for quantile, stated in ((Quantile("b c -> c"), 130_000), (Quantile("b c -> c", low=1e-6, high=1e6), 20_600)):
        state = quantile.update({}, torch.ones(2, 10))
        held = sum(value.nbytes for value in state.values()) / 10
        assert stated * 0.99 < held < stated * 1.01


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"q": 1.01}, "share from 0 to 1"),
        ({"q": ()}, "share from 0 to 1"),
        ({"q": (0.5, float("nan"))}, "share from 0 to 1"),
        ({"bits": 0}, "bits, an integer from 1 to 12"),
        ({"bits": 5.0}, "bits, an integer from 1 to 12"),
        ({"low": 0.0}, "as low"),
        ({"high": float("inf")}, "as high"),
        ({"low": 1.0, "high": 0.5}, "low below high"),
    ],
)
def test_arguments(arguments: dict[str, object], message: str) -> None:
    with pytest.raises(ArgumentError, match=message):
        Quantile(**arguments)  # type: ignore[arg-type]


def test_states_of_other_settings_are_refused() -> None:
    coarse, fine = Quantile(bits=4), Quantile(bits=5)
    with pytest.raises(StateMismatchError):
        fine.merge(fine.update({}, torch.ones(3)), coarse.update({}, torch.ones(3)))
    with pytest.raises(DTypeError, match="no order"):
        fine.update({}, torch.ones(3, dtype=torch.complex64))


@pytest.mark.parametrize("pattern", ["... ->", "b c -> c"])
def test_tensors_with_the_negative_bit_are_counted(pattern: str) -> None:
    x = torch.randn(4, 6, dtype=torch.complex128).conj().imag
    assert x.is_neg()
    quantile = Quantile(pattern)
    assert quantile.compute(quantile.update({}, x)).equal(quantile.compute(quantile.update({}, x.clone())))
