"""What the law suite does not say of single reducers: digits, dtypes, holes, edges, errors."""

from __future__ import annotations

import math
from dataclasses import replace

import laws
import numpy as np
import pytest
import torch
from cases import CASES, Case, halves
from hypothesis import given, settings
from hypothesis import strategies as st
from names import name_of

import reducers.kernels.chunks
from reducers import (
    CKA,
    Activity,
    ArgumentError,
    BottomK,
    Collect,
    Count,
    Covariance,
    CrossCovariance,
    CumulativeTrace,
    DTypeError,
    EmptyStateError,
    Extremes,
    First,
    FirstNonfinite,
    Idle,
    Last,
    Masked,
    Max,
    Mean,
    Min,
    Moments,
    Norm,
    Premap,
    Quantile,
    Reducer,
    ReducerTypeError,
    Reservoir,
    Sparsity,
    StateMismatchError,
    Sum,
    Summary,
    TopK,
    WeightedMoments,
)
from reducers.kernels.chunks import pieces

every = pytest.mark.parametrize("case", CASES, ids=str)


def of_its_kind(case: Case, x: torch.Tensor) -> torch.Tensor:
    """`x`, or whole numbers made of it for a reducer that takes no others."""
    return x if case.takes_floats else x.nan_to_num().mul(10).long()


def result(reducer: Reducer, *xs: torch.Tensor) -> object:
    return reducer.compute(laws.run(reducer, xs))


# Digits


@pytest.mark.parametrize("centre", [1e4, 1e7, -1e7])
@pytest.mark.parametrize("reducer", [Moments(), Summary(), Moments("b c -> c"), Summary("b c -> c")], ids=str)
def test_variance_far_from_zero(reducer: Reducer, centre: float) -> None:
    x = torch.randn(100_001, 3, generator=torch.Generator().manual_seed(0)) + centre
    exact = x.double().numpy()
    axis = 0 if "c" in reducer.pattern else None  # type: ignore[attr-defined]
    for cuts in ([100_001], [1, 30_000, 70_000], [50_000, 50_000, 1]):
        for taken, variance, mean in ((x.double(), 1e-9, 1e-9), (x, 1e-6, 1e-6)):  # big float32 observations are summed as such
            got = result(reducer, *taken.split(cuts))
            np.testing.assert_allclose(got["var"].numpy(), exact.var(axis=axis, ddof=1), rtol=variance)
            np.testing.assert_allclose(got["mean"].numpy(), exact.mean(axis=axis), rtol=1e-14, atol=mean * exact.std())


def test_narrow_floats_add_up() -> None:
    ones = torch.ones(100_000, dtype=torch.float16)
    assert result(Sum(), ones, ones).item() == 200_000
    assert result(Mean(), ones * 300, ones * 300).item() == 300
    assert result(Norm(), ones * 300).item() == pytest.approx(300 * math.sqrt(100_000))
    assert result(Moments(), ones.bfloat16() * 300)["var"].item() == 0
    assert result(Count(), *[torch.ones(1, dtype=torch.bfloat16)] * 300).item() == 300


def test_integers_add_up_exactly() -> None:
    big = torch.tensor([2**53, 1, 1])
    assert result(Sum(), big, big).item() == 2**54 + 4


@settings(max_examples=30)
@given(
    shape=st.lists(st.integers(1, 9), min_size=1, max_size=4),
    kept=st.sets(st.integers(0, 3)),
    chunk=st.integers(1, 64),
    turned=st.booleans(),
)
def test_pieces_are_views_of_every_element_once(shape: list[int], kept: set[int], chunk: int, turned: bool) -> None:
    x = torch.arange(math.prod(shape)).reshape(shape)
    x = x.permute(*reversed(range(x.ndim))) if turned else x
    axes = tuple(axis for axis in range(x.ndim) if axis not in kept)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(reducers.kernels.chunks, "CHUNK", chunk)
        cut = pieces(x, axes)
    assert sorted(torch.cat([piece.reshape(-1) for piece in cut]).tolist()) == sorted(x.reshape(-1).tolist())
    for piece in cut:
        assert piece.untyped_storage().data_ptr() == x.untyped_storage().data_ptr()
        assert all(piece.shape[axis] == x.shape[axis] for axis in range(x.ndim) if axis in kept)


@every
def test_cutting_big_tensors_changes_nothing(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    x = torch.randn(16, *case.trailing, generator=torch.Generator().manual_seed(0))
    x.view(-1)[5] = float("nan")
    x = of_its_kind(case, x)
    whole = case.reducer.update({}, x)
    monkeypatch.setattr(reducers.kernels.chunks, "CHUNK", 4)
    laws.agree(case.reducer, case.reducer.update({}, x), whole)


# Dtypes


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16, torch.bfloat16, torch.int8, torch.uint8, torch.int64, torch.bool])
def test_extremes_keep_the_dtype(dtype: torch.dtype) -> None:
    x = torch.tensor([0, 1]).to(dtype)
    for reducer, extreme in ((Min(), 0), (Max(), 1)):
        got = result(reducer, x, x)
        assert got.dtype == dtype
        assert got.item() == extreme


@pytest.mark.parametrize(
    ("dtype", "wider"),
    [
        (torch.float8_e4m3fn, torch.float32),
        (torch.float8_e5m2, torch.float32),
        (torch.uint16, torch.int32),
        (torch.uint32, torch.int64),
    ],
)
def test_dtypes_without_arithmetic_are_widened(dtype: torch.dtype, wider: torch.dtype) -> None:
    x = torch.tensor([0.0, 3.0, 1.0]).to(dtype)
    assert result(Max(), x).dtype == wider
    got = result(Summary(), x, x)
    assert [got[name].item() for name in ("count", "mean", "min", "max", "zeros")] == [6, pytest.approx(4 / 3), 0, 3, 2]
    assert result(Activity("b -> b"), x)["dead"].tolist() == [True, False, False]


def test_float8_may_hold_nan() -> None:
    x = torch.tensor([1.0, float("nan")]).to(torch.float8_e4m3fn)
    assert result(Summary(), x)["nan"].item() == 1
    assert result(Count(), x).item() == 1
    assert result(Mean(), x).item() == 1


OF_COMPLEX = (Count(), Sum(), Mean(), Moments(), Norm(), Norm(p=0), Sparsity(), Activity(), Idle(), FirstNonfinite())


@pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")
@pytest.mark.parametrize("reducer", [replace(one, pattern="b c -> c") for one in OF_COMPLEX], ids=str)
def test_complex_halves_are_reduced_as_wider_ones(reducer: Reducer) -> None:
    x = torch.tensor([[1 + 2j, 0j], [complex(math.nan, 1), 3e4 + 3e4j], [complex(1, -math.inf), 3e4 + 3e4j]])
    mask = torch.tensor([[True, True], [False, True], [True, False]])
    narrow, wide = ([one, one[:1]] for one in (x.to(torch.complex32), x))
    laws.close(result(reducer, *narrow), result(reducer, *wide))
    selected = [Masked(reducer).update({}, one, mask) for one in (narrow[0], wide[0])]
    laws.close(*map(reducer.compute, selected))


@pytest.mark.parametrize("reducer", [Min(), Max(), Summary()], ids=str)
def test_complex_numbers_have_no_order(reducer: Reducer) -> None:
    with pytest.raises(DTypeError, match=r"complex64.*premap\(torch.abs\)"):
        reducer.update({}, torch.ones(2, dtype=torch.complex64))


@pytest.mark.parametrize("reducer", [Min(), Max(), Summary(), Sum(), Mean(), Moments(), Norm()], ids=str)
def test_uint64_has_no_wider_dtype(reducer: Reducer) -> None:
    with pytest.raises(DTypeError, match="uint64"):
        reducer.update({}, torch.ones(2, dtype=torch.uint64))


def test_magnitudes_that_the_dtype_does_not_hold() -> None:
    x = torch.tensor([-128, 5], dtype=torch.int8)
    assert result(Summary(), x)["absmax"].item() == 128
    assert result(Norm(p=float("inf")), x).item() == 128
    assert result(Activity("b -> b", eps=100), x)["dead"].tolist() == [False, True]


def test_the_dtype_may_change_between_calls() -> None:
    xs = [torch.tensor([1.0, 2.0]), torch.tensor([3.0], dtype=torch.bfloat16), torch.tensor([4.0], dtype=torch.float16)]
    assert result(Mean(), *xs).item() == 2.5
    assert result(Max(), *xs).item() == 4
    assert result(Collect(), *xs).tolist() == [1, 2, 3, 4]


# Holes


def test_nothing_but_holes() -> None:
    holes = torch.tensor([float("nan"), float("inf"), -float("inf")])
    for reducer in (Sum(), Mean(), Min(), Max(), Norm(), Norm(p=0), Norm(normalize=True)):
        assert math.isnan(result(reducer, holes).item())
    got = {name: value.item() for name, value in result(Summary(), holes).items()}
    assert (got["count"], got["zeros"], got["nan"], got["inf"]) == (0, 0, 1, 2)
    assert all(math.isnan(got[name]) for name in ("mean", "var", "min", "max", "absmax"))


@pytest.mark.parametrize(
    "case", [case for case in CASES if case.splittable and case.data and case.takes_floats and not case.reducer.ordered], ids=str
)
def test_holes_do_not_outlast_their_batch(case: Case) -> None:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(4, *case.trailing, generator=generator)
    holes = torch.full_like(x, float("nan"))
    for name, value in laws.flat(case.reducer.compute(laws.run(case.reducer, [x, holes, x]))).items():
        assert torch.isfinite(value).all(), name


def of_equal_weights(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return x, torch.ones(len(x), dtype=torch.float64)


SQUARED = (
    *(Moments(), Moments("b c -> c", order=4), Summary(), Covariance(), Premap(WeightedMoments("b c -> c"), of_equal_weights)),
    *(Premap(reducer, halves) for reducer in (CrossCovariance(), CKA(), CKA(unbiased=True))),
)
COMPLEX_SQUARED = (SQUARED[0], SQUARED[4])


@pytest.mark.parametrize(
    ("reducer", "number"), [*((one, 1e160) for one in SQUARED), *((one, 1e160j) for one in COMPLEX_SQUARED)], ids=name_of
)
def test_holes_beside_numbers_whose_squares_overflow(reducer: Reducer, number: complex) -> None:
    huge = torch.full((4, 4), number, dtype=torch.complex128 if isinstance(number, complex) else torch.float64)
    holes = torch.full_like(huge, float("nan"))
    wanted, of_holes = reducer.update({}, huge), reducer.update({}, holes)
    assert all(torch.isfinite(value).all() for value in wanted.values())
    whole = reducer.update({}, torch.cat((huge, holes)))
    for found in (reducer.merge(wanted, of_holes), reducer.merge(of_holes, wanted), whole):
        laws.same_bits(*({key: value for key, value in one.items() if key not in ("nonfinite", "nan")} for one in (found, wanted)))


# Edges


@every
def test_observations_without_elements_change_nothing(case: Case) -> None:
    empty = of_its_kind(case, torch.empty(0, *case.trailing))
    assert case.reducer.update({}, empty) == {}
    with pytest.raises(EmptyStateError, match="nothing to compute"):
        case.reducer.compute({})
    x = of_its_kind(case, torch.randn(2, *case.trailing))
    state = case.reducer.update({}, x)
    laws.same_bits(case.reducer.update(state, empty), state)


@pytest.mark.parametrize("turned", [False, True])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("reducer", [Extremes("b c -> c"), Summary("b c -> c")], ids=str)
def test_integers_that_meet_floats_are_not_rounded(reducer: Reducer, dtype: torch.dtype, turned: bool) -> None:
    xs = [torch.tensor([[2**24 + 1, -(2**24) - 1]]), torch.tensor([[1.5, -1.5]]).to(dtype), torch.full((1, 2), math.nan).to(dtype)]
    for found in (
        result(reducer, *(xs[::-1] if turned else xs)),
        reducer.compute(reducer.merge_all([reducer.update({}, x) for x in xs])),
    ):
        assert found["max"].dtype is found["min"].dtype is torch.float64
        assert (found["max"].tolist(), found["min"].tolist()) == ([2**24 + 1, -1.5], [1.5, -(2**24) - 1])


@pytest.mark.parametrize("kind", [TopK, BottomK])
def test_the_best_of_integers_and_floats(kind: type[TopK]) -> None:
    top, sign = kind(k=4), 1 if kind is TopK else -1
    whole = torch.tensor([sign * (2**24 + 1)])
    found = result(top, whole, torch.tensor([0.5 * sign, math.nan]), whole)
    assert found["value"].nan_to_num(7).tolist() == [sign * (2**24 + 1), sign * (2**24 + 1), sign * 0.5, 7]
    assert found["step"].tolist() == [0, 2, 1, -1]


def test_single_numbers() -> None:
    xs = [torch.tensor(1.0), torch.tensor(3.0)]
    assert result(Mean(), *xs).item() == 2
    assert result(Summary(), *xs)["var"].item() == 2
    assert math.isnan(result(Moments(), xs[0])["var"].item())
    assert result(Moments(correction=0), xs[0])["std"].item() == 0


@pytest.mark.parametrize(
    "reducer", [Mean("b c -> b c"), Max("b c -> b"), Summary("b c -> b"), Norm("b c -> b"), Activity("b c -> b c")], ids=str
)
def test_a_smaller_last_batch_never_broadcasts(reducer: Reducer) -> None:
    state = reducer.update({}, torch.ones(4, 3))
    with pytest.raises(StateMismatchError, match="the kept axes must not change"):
        reducer.update(state, torch.ones(1, 3))


@pytest.mark.parametrize("case", [case for case in CASES if case.takes_floats], ids=str)
def test_gradients_are_left_alone(case: Case) -> None:
    x = torch.randn(2, *case.trailing, requires_grad=True)
    y = x * 2
    state = case.reducer.update({}, y)
    assert not any(value.requires_grad for value in state.values())
    y.sum().backward()
    assert torch.equal(x.grad, torch.full_like(x, 2))


@every
def test_states_made_in_inference_mode_stay_usable(case: Case) -> None:
    with torch.inference_mode():
        state = case.reducer.update({}, of_its_kind(case, torch.ones(2, *case.trailing)))
    case.reducer.compute(case.reducer.update(state, of_its_kind(case, torch.ones(2, *case.trailing))))


@every
def test_channels_last_states_are_contiguous(case: Case) -> None:
    x = torch.randn(2, *case.trailing[::-1]).permute(0, *reversed(range(1, 1 + len(case.trailing))))
    laws.pure(case.reducer, [of_its_kind(case, x)], merges=case.merges)


def test_sparse_and_lazy_tensors() -> None:
    sparse = torch.eye(3).to_sparse()
    assert result(Sum(), sparse).item() == 3
    assert result(Last(), sparse).tolist() == torch.eye(3).tolist()
    lazy = torch.tensor([1 + 2j]).conj()
    kept = First().update({}, lazy)["value"]
    assert not kept.is_conj()
    assert kept.tolist() == [1 - 2j]
    assert result(Mean(), lazy.imag).item() == -2


# Errors


@pytest.mark.parametrize(
    ("make", "told"),
    [
        (lambda: Norm(p=-1), "0 to infinity"),
        (lambda: Norm(p=float("nan")), "0 to infinity"),
        (lambda: Norm(p="2"), "0 to infinity"),
        (lambda: Norm(p=10**400), "0 to infinity"),
        (lambda: Activity(eps=10**400), "eps from 0 up"),
        (lambda: Moments(correction=10**400), "finite correction"),
        (lambda: Quantile(high=10**400), "positive finite magnitude"),
        (lambda: CumulativeTrace(time_constant=2.0, target=10**400), "finite target"),
        (lambda: Moments(correction=-1), "correction from 0 up"),
        (lambda: Moments(correction=float("inf")), "correction from 0 up"),
        (lambda: Activity(eps=-1), "eps from 0 up"),
    ],
)
def test_arguments_out_of_range(make: object, told: str) -> None:
    with pytest.raises(ArgumentError, match=told):
        make()  # type: ignore[operator]


TAKES_COMPANIONS = (TopK, BottomK, Reservoir)


@pytest.mark.parametrize(
    "reducer", [case.reducer for case in CASES if case.data and not isinstance(case.reducer, TAKES_COMPANIONS)], ids=str
)
def test_what_is_no_tensor_is_named(reducer: Reducer) -> None:
    with pytest.raises(ReducerTypeError, match="one tensor at a time; got \\(list\\)"):
        reducer.update({}, [1.0])
    with pytest.raises(ReducerTypeError, match="Tensor, Tensor"):
        reducer.update({}, torch.ones(1), torch.ones(1))


# Single reducers


def test_activity_tells_rare_from_dead() -> None:
    activity = Activity(death=True)
    state = laws.run(activity, [torch.eye(10)[i : i + 1] for i in range(10)])
    got = activity.compute(state)
    assert got["death"].item() == pytest.approx(0.9)
    assert not got["dead"].any()
    assert got["rate"].tolist() == pytest.approx([0.1] * 10)


def test_activity_leaves_unseen_units_out() -> None:
    got = result(Activity(death=True), torch.tensor([[0.0, 1.0, float("nan")]]))
    assert got["dead"].tolist() == [True, False, False]
    assert got["death"].item() == 0.5
    assert math.isnan(got["rate"][2].item())
