"""Windows, thinning, masks, weights and groups: over every reducer of the table that they take, and by themselves."""

from __future__ import annotations

import math
from typing import Any

import laws
import numpy as np
import pytest
import torch
from cases import CASES, Case
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from reducers import (
    EMA,
    ArgumentError,
    Collect,
    Count,
    EveryNth,
    First,
    FirstNonfinite,
    Geometry,
    GroupBy,
    History,
    Idle,
    Last,
    Masked,
    Max,
    Mean,
    Min,
    Moments,
    Prefilter,
    Premap,
    Product,
    Reducer,
    ReducerTypeError,
    StateMismatchError,
    Statistic,
    Sum,
    Summary,
    TopK,
    WeightedMean,
    WeightedMoments,
    Window,
    from_recipe,
    to_recipe,
)


def observations(case: Case, *sizes: int) -> list[Tensor]:
    xs = [torch.randn(size, *case.trailing, generator=torch.Generator().manual_seed(index)) for index, size in enumerate(sizes)]
    return xs if case.takes_floats else [x.mul(10).long() for x in xs]


def keeps_its_shape(case: Case) -> bool:
    shapes = [
        {key: value.shape for key, value in laws.run(case.reducer, observations(case, *[4] * steps)).items()} for steps in (1, 2, 3)
    ]
    return shapes[0] == shapes[1] == shapes[2]


RINGED = [case for case in CASES if case.merges and keeps_its_shape(case)]
PARTED = [case for case in CASES if isinstance(case.reducer, Statistic) and case.splittable]


def test_the_table_is_covered() -> None:
    assert len(RINGED) > 50
    assert len(PARTED) > 12


@pytest.mark.slow
@pytest.mark.parametrize("case", RINGED, ids=str)
@pytest.mark.parametrize("cut", [0, 1, 2, 5])
def test_windows_and_thinned_streams_are_the_reducer_over_those_observations(case: Case, cut: int) -> None:
    xs = observations(case, *[4] * 5)
    for outer, kept in (
        (Window(case.reducer, 3), xs[-3:]),
        (EveryNth(case.reducer, 2), xs[::2]),
        (EveryNth(case.reducer, 7), xs[:1]),
    ):
        merged = outer.merge(laws.run(outer, xs[:cut]), laws.run(outer, xs[cut:]))
        laws.close(outer.compute(merged), case.reducer.compute(laws.run(case.reducer, kept)))


@pytest.mark.parametrize("case", RINGED, ids=str)
def test_a_history_is_the_reducer_after_each_observation(case: Case) -> None:
    xs = observations(case, *[4] * 5)
    step_time = getattr(case.reducer, "step_time", 1.0)
    history = History(case.reducer, step_time, 2 * step_time, inclusive=True)
    for cut in (0, 2, 4):
        merged = history.merge(laws.run(history, xs[:cut]), laws.run(history, xs[cut:]))
        for back in range(3):
            laws.close(history.view(merged, back * step_time), case.reducer.compute(laws.run(case.reducer, xs[: 5 - back])))


@pytest.mark.parametrize("case", PARTED, ids=str)
def test_masks_and_groups_are_the_reducer_over_those_samples(case: Case) -> None:
    masked, grouped, growing = Masked(case.reducer), GroupBy(case.reducer, 2), GroupBy(case.reducer)
    xs = observations(case, 5, 4, 6)
    labels = [torch.tensor([0, 1, 2, 1, 0, 1])[: len(x)] for x in xs]
    expected = [
        case.reducer.compute(laws.run(case.reducer, [x[of == group] for x, of in zip(xs, labels, strict=True)])) for group in (0, 1)
    ]
    states: list[dict[str, Tensor]] = [{}, {}, {}]
    for x, of in zip(xs, labels, strict=True):
        beside = (of == 0, of, torch.where(of == 2, -100, of))
        states = [
            outer.update(state, x, extra) for outer, state, extra in zip((masked, grouped, growing), states, beside, strict=True)
        ]
    laws.close(masked.compute(states[0]), expected[0])
    for outer, state in zip((grouped, growing), states[1:], strict=True):
        both = laws.flat(outer.compute(state))
        for group in (0, 1):
            laws.close({key: value[group] for key, value in both.items()}, laws.flat(expected[group]))


@pytest.mark.parametrize("outer", [Window, EveryNth, History], ids=lambda outer: outer.__name__)
@pytest.mark.parametrize("inner", [Collect(), Geometry(Mean())], ids=lambda inner: type(inner).__name__)
def test_states_that_grow_are_refused(outer: Any, inner: Reducer) -> None:
    with pytest.raises(StateMismatchError, match="a reducer that grows has none"):
        reducer = outer(inner, 2)
        reducer.compute(laws.run(reducer, [torch.ones(2), torch.ones(2), torch.ones(2)]))


@settings(max_examples=40)
@given(sizes=st.lists(st.integers(0, 6), max_size=4), n=st.integers(1, 5), seed=st.integers(0, 1000))
def test_windows_and_thinned_streams_in_parts(sizes: list[int], n: int, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    parts = [list(torch.randn(size, 2, generator=generator)) for size in sizes]
    whole = [x for part in parts for x in part]
    for inner in (Last(), Moments("a -> a"), EMA(alpha=0.5)):
        for outer, kept in ((Window(inner, n), whole[-n:]), (EveryNth(inner, n), whole[::n])):
            merged: dict[str, Tensor] = {}
            for part in parts:
                merged = outer.merge(merged, laws.run(outer, part))
            laws.agree(outer, merged, laws.run(outer, whole))
            if whole:
                laws.close(outer.compute(merged), inner.compute(laws.run(inner, kept)))


def test_combinators_of_combinators() -> None:
    x, labels = torch.arange(12.0).reshape(4, 3), torch.tensor([0, 1, 0, 1])
    inner = GroupBy(Product(mean=Mean("b c -> c"), n=Count()), 2)
    for outer in (Window(inner, 2), History(inner, duration=2.0), EveryNth(inner, 3)):
        result = outer.compute(outer.update(outer.update({}, x, labels), x, labels))
        assert result["mean"].tolist() == [[3, 4, 5], [6, 7, 8]]
        assert result["n"].tolist() == ([12, 12] if not isinstance(outer, EveryNth) else [6, 6])


def test_padding_tokens_stay_out() -> None:
    x = torch.tensor([[[1.0, 2.0], [3.0, 4.0], [math.nan, 99.0]], [[5.0, math.inf], [99.0, 99.0], [99.0, 99.0]]])
    mask = torch.tensor([[1, 1, 0], [1, 0, 0]])
    summary = Masked(Summary("b t d -> d"))
    result = summary.compute(summary.update({}, x, mask))
    assert {name: result[name].tolist() for name in ("count", "mean", "max", "nan", "inf")} == {
        "count": [3, 2],
        "mean": [3, 3],
        "max": [5, 4],
        "nan": [0, 0],
        "inf": [0, 1],
    }


@settings(max_examples=60)
@given(
    seed=st.integers(0, 10_000),
    shape=st.sampled_from([(4,), (4, 1), (1, 3), (4, 3), ()]),
    dtype=st.sampled_from((torch.float32, torch.bfloat16, torch.int64, torch.uint8, torch.bool)),
)
def test_a_mask_selects(seed: int, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randint(0, 9, (4, 3), generator=generator).to(dtype)
    mask = torch.rand(shape, generator=generator) < 0.5
    selected = x[mask.reshape(*shape, *[1] * (2 - len(shape))).expand(4, 3)].double()
    product = Product(s=Summary(), m=Moments(), total=Sum(), low=Min(), top=Max(), bad=FirstNonfinite())
    result = Masked(product).compute(Masked(product).update({}, x, mask))
    if selected.numel():
        laws.close(result, product.compute(product.update({}, selected)))
    else:
        assert (result["s"]["count"].item(), result["total"].item(), result["bad"].item()) == (0, 0, -1)
        assert result["top"].isnan().item()


def test_exemplars_of_what_the_mask_shows_keep_their_places() -> None:
    x, mask = torch.tensor([[1.0, 9.0], [8.0, 7.0]]), torch.tensor([[True, False], [True, True]])
    result = Masked(TopK(k=2)).compute(Masked(TopK(k=2)).update({}, x, mask))
    assert result["value"].tolist() == [8, 7]
    assert result["position"].tolist() == [2, 3]


def test_big_tensors_are_taken_in_pieces() -> None:
    generator = torch.Generator().manual_seed(0)
    x, beside = torch.randn(700, 5, 100, generator=generator).double(), torch.rand(700, 5, generator=generator)
    for pattern in ("... ->", "b t d -> d", "b t d -> t"):
        masked, plain = Masked(Summary(pattern)), Summary(pattern)
        nan = torch.where((beside > 0.5).unsqueeze(-1), x, math.nan)
        expected = plain.compute(plain.update({}, nan))
        got = masked.compute(masked.update({}, x, beside > 0.5))
        laws.close(got, {**expected, "nan": 0 * expected["nan"]})
        weighted, ones = WeightedMoments(pattern), Moments(pattern)
        got = weighted.compute(weighted.update({}, x, (beside > 0.5).float()))
        laws.close(got["var"], ones.compute(ones.update({}, nan))["var"])


def test_inputs_are_not_written_to() -> None:
    x, mask = torch.ones(3), torch.tensor([True, False, True])
    Masked(Mean()).update({}, x, mask)
    assert x.tolist() == [1, 1, 1]
    assert mask.tolist() == [True, False, True]


def test_predicates_of_elements_observations_and_plain_truth() -> None:
    xs = [torch.tensor([1.0, -1.0]), torch.tensor([5.0, 9.0]), torch.tensor([-3.0, -5.0])]
    positive, rising = Mean().prefilter(lambda x: x > 0), Mean().prefilter(lambda x: x[1] > x[0])
    assert positive.compute(laws.run(positive, xs)).item() == 5
    assert rising.compute(laws.run(rising, xs)).item() == 7
    pairs = Collect().prefilter(lambda x: x.shape == (2,))
    assert pairs.compute(laws.run(pairs, [*xs, torch.ones(3)])).shape == (6,)
    assert laws.run(pairs, [torch.ones(3)]) == {}
    none = Mean().prefilter(lambda x: x > 100)
    assert none.compute(laws.run(none, xs)).isnan().item()


def test_weights_of_one_are_no_weights_and_counts_are_repetitions() -> None:
    x = torch.randn(50, 3, generator=torch.Generator().manual_seed(0)) + 1e4
    plain, weighted = Moments("b c -> c"), WeightedMoments("b c -> c")
    ones = weighted.compute(weighted.update({}, x, torch.ones(50)))
    expected = plain.compute(plain.update({}, x))
    laws.close(
        {**ones, "weight": 0 * ones["weight"]},
        {"weight": 0 * expected["var"], **{key: expected[key] for key in ("mean", "var", "std")}},
    )
    counts = torch.arange(50) % 4
    twice, repeated = WeightedMoments("b c -> c", correction=0), Moments("b c -> c", correction=0)
    got = twice.compute(twice.update({}, x, counts))
    laws.close(got["var"], repeated.compute(repeated.update({}, x.repeat_interleave(counts, 0)))["var"])
    mean = WeightedMean("b c -> c")
    laws.close(mean.compute(mean.update({}, x, counts)), got["mean"])


def test_variance_far_from_zero_in_any_merge_tree() -> None:
    generator = torch.Generator().manual_seed(0)
    x, w = torch.randn(4096, generator=generator) + 1e4, torch.rand(4096, generator=generator)
    moments = WeightedMoments()
    states = [moments.update({}, *part) for part in zip(x.split(7), w.split(7), strict=True)]
    while len(states) > 1:
        pairs = zip(states[::2], [*states[1::2], {}], strict=False)
        states = [moments.merge(a, b) for a, b in pairs]
    expected = float(np.cov(x.double().numpy(), aweights=w.double().numpy()))
    assert moments.compute(states[0])["var"].item() == pytest.approx(expected, rel=1e-10)


def test_weights_that_are_missing_or_zero() -> None:
    x, w = torch.tensor([1.0, math.nan, 3.0, 9.0]), torch.tensor([1.0, 1.0, 1.0, math.nan])
    assert WeightedMean().compute(WeightedMean().update({}, x, w)).item() == 2
    nothing = WeightedMoments().compute(WeightedMoments().update({}, x, torch.zeros(4)))
    assert nothing["weight"].item() == 0
    assert all(nothing[name].isnan().item() for name in ("mean", "var", "std"))
    single = WeightedMoments().compute(WeightedMoments().update({}, torch.tensor([2.0]), torch.tensor([0.3])))
    assert single["mean"].item() == 2
    assert single["var"].isnan().item()
    assert WeightedMoments().update({}, torch.empty(0), torch.empty(0)) == {}


def test_complex_numbers_are_weighted() -> None:
    moments = WeightedMoments(correction=0)
    result = moments.compute(moments.update({}, torch.tensor([1 + 1j, 3 - 1j]), torch.tensor([1.0, 1.0])))
    assert (result["mean"].item(), result["var"].item()) == (2 + 0j, 2)


def test_groups_grow_with_the_labels() -> None:
    experts = GroupBy(Product(n=Count(), load=Sum(), when=FirstNonfinite()))
    state = experts.update({}, torch.tensor([1.0, 2.0]), torch.tensor([-100, 0]))
    assert experts.compute(state)["n"].tolist() == [1]
    later = experts.update(state, torch.tensor([4.0, math.nan]), torch.tensor([1, 3]))
    assert experts.compute(later)["n"].tolist() == [1, 1, 0, 0]
    assert experts.compute(later)["load"].nan_to_num(-1).tolist() == [
        2,
        4,
        0,
        -1,
    ]  # 0 of nothing, and of one that is not finite NaN
    assert experts.compute(later)["when"].tolist() == [-1, -1, -1, 1]
    laws.same_bits(experts.compute(experts.merge(state, experts.merge({}, later))), experts.compute(experts.merge(state, later)))
    nobody = experts.update({}, torch.tensor([1.0]), torch.tensor([-1]))
    assert experts.compute(nobody)["n"].tolist() == []
    laws.same_bits(experts.compute(experts.merge(nobody, later))["load"], experts.compute(later)["load"])


@pytest.mark.parametrize("dtype", [torch.uint8, torch.uint16, torch.uint32, torch.uint64, torch.int8, torch.bool], ids=str)
@pytest.mark.parametrize("groups", [None, 2, 301])
def test_labels_of_any_integers(dtype: torch.dtype, groups: int | None) -> None:
    outer = GroupBy(Sum(), groups)
    labels = torch.tensor([0, 1, 1, 45]).to(dtype)
    found = outer.compute(outer.update({}, torch.tensor([1.0, 2.0, 3.0, 4.0]), labels))
    wanted = torch.zeros(max(len(found), 46), dtype=torch.float64).index_add(
        0, labels.long(), torch.tensor([1.0, 2.0, 3.0, 4.0]).double()
    )
    assert found.equal(wanted[: len(found)])


@pytest.mark.parametrize("dtype", [torch.uint64, torch.uint32, torch.int64], ids=str)
def test_labels_too_large_for_groups(dtype: torch.dtype) -> None:
    most = torch.iinfo(dtype).max
    x, labels = torch.ones(3), torch.tensor([most, most // 2 + 1, 1], dtype=dtype)
    assert GroupBy(Count(), 2).compute(GroupBy(Count(), 2).update({}, x, labels)).tolist() == [0, 1]
    with pytest.raises(ArgumentError, match=f"the label {most}: give `groups`, and labels from there on are in no group"):
        GroupBy(Count()).update({}, x, labels)


@settings(max_examples=30)
@given(seed=st.integers(0, 1000), cut=st.integers(0, 5))
def test_growing_groups_merge_as_fixed_ones(seed: int, cut: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    pairs = [(torch.randn(4, 2, generator=generator), torch.randint(-1, 5, (4,), generator=generator)) for _ in range(5)]
    results = []
    for groups in (None, 6):
        outer = GroupBy(Summary("b c -> c"), groups)
        states: list[dict[str, Tensor]] = [{}, {}]
        for index, pair in enumerate(pairs):
            states[index >= cut] = outer.update(states[index >= cut], *pair)
        results.append(laws.flat(outer.compute(outer.merge(*states))))
    seen = 1 + max(int(labels.max()) for _, labels in pairs)
    laws.same_bits(results[0], {key: value[:seen] for key, value in results[1].items()})


def test_empty_observations_change_nothing() -> None:
    empty, none = torch.empty(0, 3), torch.empty(0)
    for outer in (Masked(Mean()), WeightedMean()):
        assert outer.update({}, empty, none) == {}
    for groups in (None, 2):
        assert GroupBy(Mean(), groups).update({}, empty, none.long()) == {}
    for ring in (Window(Mean(), 2), EveryNth(Mean(), 2)):
        assert ring.update({}, empty) == {}
        state = ring.update({}, torch.ones(2, 3))
        assert ring.update(state, empty) is state


@pytest.mark.parametrize(
    "whole",
    [Last(), Collect(), Geometry(), Premap(Mean(), torch.abs), Window(Mean(), 2), Product(a=Mean(), b=First())],
    ids=lambda whole: type(whole).__name__,
)
def test_what_takes_observations_whole_has_no_parts(whole: Reducer) -> None:
    for outer in (Masked(whole), GroupBy(whole, 2)):
        with pytest.raises(ReducerTypeError, match="takes observations whole"):
            outer.update({}, torch.ones(2), torch.ones(2).long())
    with pytest.raises(ReducerTypeError, match="takes observations whole"):
        Prefilter(whole, lambda x: x > 0).update({}, torch.ones(2))


def test_inputs_are_checked() -> None:
    x = torch.ones(4, 3)
    with pytest.raises(ReducerTypeError, match="an observation and its mask; got 1 of the 2"):
        Masked(Mean()).update({}, x)
    for outer in (Masked(TopK()), GroupBy(TopK()), WeightedMean()):
        with pytest.raises(ReducerTypeError, match="but neither ids nor a payload; got 3 tensors: the `position` of an element"):
            outer.update({}, x, torch.ones(4), torch.arange(4))
    with pytest.raises(ArgumentError, match=r"mask of shape \(3,\) for an observation of shape \(4, 3\)"):
        Masked(Mean()).update({}, x, torch.ones(3))
    with pytest.raises(ArgumentError, match=r"weights of shape \(4, 3, 1\)"):
        WeightedMean().update({}, x, torch.ones(4, 3, 1))
    with pytest.raises(ReducerTypeError, match=r"labels that are integers and got torch\.float32"):
        GroupBy(Mean(), 2).update({}, x, torch.ones(4))
    with pytest.raises(ReducerTypeError, match="must return a bool or a tensor; it returned str"):
        Mean().prefilter(lambda x: "yes").update({}, x)  # type: ignore[arg-type, return-value]


@pytest.mark.parametrize(
    ("make", "error", "told"),
    [
        (lambda: Window(Mean(), 0), ArgumentError, "Window takes n, an integer from 1 to"),
        (lambda: EveryNth(Mean(), 1.5), ArgumentError, "EveryNth takes n"),
        (lambda: GroupBy(Mean(), True), ArgumentError, "GroupBy takes groups"),
        (lambda: WeightedMoments(correction=-1), ArgumentError, "correction from 0 up"),
        (lambda: Masked(Mean), ReducerTypeError, r"write Mean\(\)"),
        (lambda: Window(3, 3), ReducerTypeError, "Window needs a reducer"),
        (lambda: GroupBy(None), ReducerTypeError, "GroupBy needs a reducer"),
        (lambda: Mean().prefilter(None), ReducerTypeError, "Prefilter needs a predicate"),
    ],
)
def test_arguments_are_checked(make: Any, error: type[Exception], told: str) -> None:
    with pytest.raises(error, match=told):
        make()


@pytest.mark.parametrize(
    "reducer",
    [
        Window(Mean(), 3),
        EveryNth(Last(), 2),
        Masked(Product(a=Mean())),
        GroupBy(Summary("b c -> c")),
        GroupBy(Mean(), 3),
        WeightedMoments("b c -> c", correction=0),
    ],
    ids=repr,
)
def test_recipes(reducer: Reducer) -> None:
    assert from_recipe(to_recipe(reducer)) == reducer


def test_ordered_when_the_inner_is_or_time_counts() -> None:
    assert not any(outer.ordered for outer in (Masked(Mean()), GroupBy(Mean(), 2), Mean().prefilter(bool)))
    assert all(
        outer.ordered for outer in (Masked(EMA(alpha=0.5)), GroupBy(FirstNonfinite()), Window(Mean(), 2), EveryNth(Mean(), 2))
    )


def test_of_what_a_mask_selects_nothing_no_observation_counts_as_active() -> None:
    zeros = torch.zeros(4, 1)
    groups = GroupBy(Idle("b c -> c"), 2)
    state = groups.update(groups.update({}, zeros, torch.tensor([0, 0, 1, 1])), zeros, torch.tensor([0, 0, 0, 0]))
    assert {name: x.flatten().tolist() for name, x in groups.compute(state).items()} == {
        "observations": [2, 1],
        "elements": [6, 2],
        "idle": [2, 1],
    }
    masked, x = Masked(Idle("... ->")), torch.zeros(2, 3)
    state = masked.update({}, x, torch.tensor([[True, True, False]] * 2))
    again = masked.update(state, x, torch.zeros(2, 3, dtype=torch.bool))
    assert masked.compute(again) == masked.compute(state) == {"observations": 1, "elements": 4, "idle": 1}
