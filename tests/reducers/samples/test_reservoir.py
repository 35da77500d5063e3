"""Reservoir: uniform, without replacement, independent of how it was merged, and each sample with where it came from."""

from __future__ import annotations

from functools import reduce

import laws
import pytest
import torch
from scipy import stats
from torch import Tensor

from reducers import ArgumentError, Reservoir, StateMismatchError


def drawn(reservoir: Reservoir, xs: list[Tensor]) -> list[float]:
    return reservoir.compute(laws.run(reservoir, xs))["value"].tolist()


@pytest.mark.slow
def test_every_sample_is_as_likely() -> None:
    """How often each of 60 samples is drawn, over 1500 reservoirs of 6, merged from streams of unequal lengths."""
    often = torch.zeros(60)
    for seed in range(1500):
        reservoir = Reservoir(k=6, seed=seed)
        x = torch.arange(60.0)
        parts = [
            laws.run(reservoir, list(x[:5].split(1))),
            reservoir.update({}, x[5:50]),
            laws.run(reservoir, list(x[50:].split(4))),
        ]
        often[reservoir.compute(reduce(reservoir.merge, parts))["value"].long()] += 1
    assert often.sum() == 6 * 1500
    assert stats.chisquare(often.numpy() * 60 / 54).pvalue > 1e-3  # drawn without replacement, counts vary less than a die's


@pytest.mark.slow
def test_pairs_are_as_likely() -> None:
    """How often each pair of 8 samples is drawn together: lots are independent, within an observation and across."""
    together = torch.zeros(8, 8)
    for seed in range(4000):
        x = torch.arange(8.0)
        chosen = torch.tensor(drawn(Reservoir(k=2, seed=seed), [x[:3], x[3:4], x[4:]])).long().sort().values
        together[chosen[0], chosen[1]] += 1
    pairs = together[torch.triu_indices(8, 8, offset=1).unbind()]
    assert pairs.sum() == 4000
    assert stats.chisquare(pairs.numpy()).pvalue > 1e-3


def test_data_alone_make_the_lots_independent() -> None:
    """One seed, as all ranks have: which places are drawn from observations that differ in one bit somewhere."""
    often = torch.zeros(40)
    reservoir = Reservoir(k=4)
    for run in range(3000):
        x = torch.zeros(40, 3)
        x[run % 40, run % 3] = 1.0 + run * 2.0**-20
        often[reservoir.compute(reservoir.update({}, x))["position"]] += 1
    assert stats.chisquare(often.numpy() * 40 / 36).pvalue > 1e-3


def test_copies_of_an_observation_stay_together_unless_ids_tell_them_apart() -> None:
    reservoir = Reservoir(k=10)
    x = torch.arange(100.0)
    same = reservoir.compute(laws.run(reservoir, [x, x]))
    assert same["value"].unique().numel() == 5
    apart = reservoir.update(reservoir.update({}, x, torch.arange(100)), x, torch.arange(100, 200))
    assert reservoir.compute(apart)["value"].unique().numel() > 5
    assert torch.equal(apart["id"], apart["step"] * 100 + apart["position"])


def test_entries_know_where_they_came_from() -> None:
    generator = torch.Generator().manual_seed(0)
    xs = [torch.randn(size, 2, 3, generator=generator) for size in (5, 1, 9)]
    inputs = [torch.randn(len(x), 4, generator=generator) for x in xs]
    reservoir = Reservoir(k=6, seed=3)
    state = reduce(lambda state, i: reservoir.update(state, xs[i], torch.arange(len(xs[i])) + 10 * i, inputs[i]), range(3), {})
    result = reservoir.compute(state)
    for slot, (step, position) in enumerate(zip(result["step"].tolist(), result["position"].tolist(), strict=True)):
        assert torch.equal(result["value"][slot], xs[step][position])
        assert torch.equal(result["payload"][slot], inputs[step][position])
        assert result["id"][slot] == 10 * step + position
    assert len({*zip(result["step"].tolist(), result["position"].tolist(), strict=True)}) == 6


@pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")
@pytest.mark.parametrize(
    "dtype", [torch.float16, torch.bfloat16, torch.float32, torch.complex64, torch.complex32, torch.int32, torch.bool, torch.uint8]
)
def test_samples_of_every_dtype_are_kept_as_they_are(dtype: torch.dtype) -> None:
    numbers = torch.randint(0, 16, (20, 3), generator=torch.Generator().manual_seed(0))
    reservoir = Reservoir(k=50)
    state = laws.run(reservoir, [numbers.to(dtype), numbers.to(dtype)[:10]])
    result = reservoir.compute(state)
    assert result["value"].dtype == dtype
    places, value = result["position"][:30], result["value"].to(torch.complex64)
    assert torch.equal(value[:30], numbers.to(dtype).to(torch.complex64)[places])
    assert sorted(places.tolist()) == sorted([*range(20), *range(10)])
    assert result["position"].tolist()[30:] == result["step"].tolist()[30:] == [-1] * 20
    assert not value[30:].any()


def test_lazy_views_are_other_numbers() -> None:
    x = torch.randn(20, 3, dtype=torch.complex64, generator=torch.Generator().manual_seed(0))
    reservoir = Reservoir(k=5)
    for lazy in (x.conj(), x.conj().imag):
        laws.same_bits(reservoir.update({}, lazy), reservoir.update({}, lazy.resolve_conj().resolve_neg()))


def test_layout_and_cuts_of_memory_do_not_change_the_lots() -> None:
    x = torch.randn(400, 1000, generator=torch.Generator().manual_seed(0))
    reservoir = Reservoir(k=5)
    laws.same_bits(reservoir.update({}, x), reservoir.update({}, x.t().contiguous().t()))


def test_single_numbers_and_single_elements() -> None:
    assert sorted(drawn(Reservoir(k=3), [torch.tensor(1.0), torch.tensor(2.0), torch.empty(0)])) == [0, 1, 2]
    elements = Reservoir(k=6).premap(torch.ravel)
    assert sorted(elements.compute(elements.update({}, torch.arange(6.0).reshape(2, 3)))["value"].tolist()) == [0, 1, 2, 3, 4, 5]


def test_another_seed_draws_others() -> None:
    xs = [torch.arange(1000.0)]
    assert drawn(Reservoir(k=5), xs) == drawn(Reservoir(k=5), xs)
    assert len({tuple(drawn(Reservoir(k=5, seed=seed), xs)) for seed in (-1, 0, 1, 2**60)}) == 4


def test_what_does_not_fit() -> None:
    reservoir = Reservoir(k=2)
    with pytest.raises(StateMismatchError, match="keeps shape"):
        laws.run(reservoir, [torch.ones(4, 2), torch.ones(4, 3)])
    for wrong in ({"k": 0}, {"seed": 0.5}, {"seed": 2**63}):
        with pytest.raises(ArgumentError, match="integer"):
            Reservoir(**wrong)  # type: ignore[arg-type]
