"""Geometry: lengths, correlations, and the seams between parts."""

from __future__ import annotations

import math

import laws
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from reducers import ArgumentError, Collect, Geometry, Last, Mean, ReducerTypeError

LISTED = Geometry(Collect())


def listed(*xs: torch.Tensor, geometry: Geometry = LISTED) -> dict[str, list[float]]:
    return {name: value.tolist() for name, value in geometry.compute(laws.run(geometry, xs)).items()}


def test_lengths_and_cosines() -> None:
    got = listed(torch.tensor([3.0, 4.0]), torch.tensor([6.0, 8.0]), torch.tensor([-4.0, 3.0]), torch.tensor([4.0, -3.0]))
    assert got["norm"] == pytest.approx([5, 10, 5, 5])
    assert got["correlation"] == pytest.approx([1, 0, -1])


def test_normalised_length_is_the_root_mean_square() -> None:
    assert listed(torch.full((2, 5), 3.0), geometry=Geometry(Collect(), normalize=True))["norm"] == pytest.approx([3])


def test_the_first_has_no_correlation() -> None:
    assert set(listed(torch.ones(2))) == {"norm"}


def test_another_shape_has_no_correlation_with_the_one_before() -> None:
    got = listed(torch.ones(4, 2), torch.ones(4, 2), torch.ones(1, 2), torch.ones(1, 2), torch.ones(2))
    assert len(got["norm"]) == 5
    assert got["correlation"] == pytest.approx([1, 1])


def test_what_is_not_finite_touches_its_neighbours_only() -> None:
    x, hole = torch.ones(2), torch.tensor([1.0, float("nan")])
    geometry = Geometry()
    got = geometry.compute(laws.run(geometry, [x, x, hole, x, x, x]))
    assert (got["norm"]["count"].item(), got["norm"]["nan"].item()) == (5, 1)
    assert (got["correlation"]["count"].item(), got["correlation"]["nan"].item()) == (3, 2)
    assert got["correlation"]["mean"].item() == pytest.approx(1)


def test_small_gradients_correlate_and_zeros_do_not() -> None:
    x = torch.tensor([1e-6, 2e-6])
    assert listed(x, x, torch.zeros(2), x)["correlation"] == pytest.approx([1, 0, 0])


def test_integers_and_complex_numbers() -> None:
    assert listed(torch.tensor([3, 4]), torch.tensor([3, 4]))["correlation"] == pytest.approx([1])
    turned = listed(torch.tensor([3 + 4j]), torch.tensor([-4 + 3j]).conj().conj())
    assert turned["norm"] == pytest.approx([5, 5])
    assert turned["correlation"] == pytest.approx([0])


@settings(max_examples=30)
@given(seed=st.integers(0, 10_000), scale=st.sampled_from((1e-12, 1.0, 1e12)), same=st.booleans())
def test_correlations_stay_within_one(seed: int, scale: float, same: bool) -> None:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(7, generator=generator) * scale
    y = x * 3 if same else torch.randn(7, generator=generator)
    assert all(-1 <= value <= 1 for value in listed(x, y, -x)["correlation"])


def test_the_seam_between_parts_is_counted() -> None:
    xs = [torch.randn(3, generator=torch.Generator().manual_seed(seed)) for seed in range(5)]
    for cut in range(6):
        merged = LISTED.merge(laws.run(LISTED, xs[:cut]), laws.run(LISTED, xs[cut:]))
        laws.same_bits(LISTED.compute(merged), LISTED.compute(laws.run(LISTED, xs)))


def test_without_correlation_nothing_is_kept() -> None:
    geometry = Geometry(Mean(), correlation=False)
    assert not geometry.ordered
    assert set(laws.run(geometry, [torch.ones(3)] * 2)) == {"norm/count", "norm/nonfinite", "norm/sum"}
    assert Geometry(Last(), correlation=False).ordered


def test_big_tensors_are_taken_in_pieces() -> None:
    x = torch.randn(400_000, generator=torch.Generator().manual_seed(0))
    got = listed(x, x.flip(0))
    assert got["norm"][0] == pytest.approx(x.double().norm().item(), rel=1e-12)
    cosine = (x.double() @ x.double().flip(0) / x.double().square().sum()).item()
    assert got["correlation"] == pytest.approx([cosine], rel=1e-9)
    assert not math.isclose(cosine, 0, abs_tol=1e-6)


def test_arguments_are_checked() -> None:
    with pytest.raises(ReducerTypeError, match=r"write Mean\(\)"):
        Geometry(Mean)  # type: ignore[arg-type]
    with pytest.raises(ArgumentError, match="eps above 0"):
        Geometry(eps=0)
