"""The laws, over the table of all reducers, and over reducers planted to break them."""

from __future__ import annotations

import ast
import inspect
from collections.abc import Iterator
from dataclasses import dataclass
from functools import reduce
from pathlib import Path
from typing import Any

import laws
import pytest
import torch
from cases import CASES, Case
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

import recorders
import reducers
from reducers import (
    Digest,
    Extremes,
    Fingerprints,
    Fold,
    Geometry,
    HeavyHitters,
    Max,
    Mean,
    MinibatchCKA,
    Moments,
    PerObservation,
    Premap,
    Product,
    Reducer,
    Reservoir,
    State,
    Statistic,
    Sum,
    Summary,
)
from reducers.core.fields import Add, Joined
from reducers.kernels.cpp import binned, sweeping, weighting

every = pytest.mark.parametrize("case", CASES, ids=str)
statistics = [case for case in CASES if isinstance(case.reducer, Statistic)]
first_of_a_file = {type(case.reducer).__module__: case for case in reversed(statistics)}.values()
few = pytest.mark.parametrize(
    "case", [case if case in first_of_a_file else pytest.param(case, marks=pytest.mark.slow) for case in CASES], ids=str
)
"""Compiling takes a second each: by default one statistic of each file is compiled, and the others in the slow tests."""
merging = pytest.mark.parametrize("case", [case for case in CASES if case.merges], ids=str)
quick = settings(max_examples=15, suppress_health_check=[HealthCheck.too_slow])

KINDS = ("normal", "offset", "constant", "zeros", "holes", "nothing finite")


def values(kind: str, shape: tuple[int, ...], dtype: torch.dtype, generator: torch.Generator) -> Tensor:
    """A tensor of one of the kinds that break careless statistics."""
    if not (dtype.is_floating_point or dtype.is_complex):
        return torch.randint(0, 2 if kind == "zeros" else 100, shape, generator=generator).to(dtype)
    x = torch.randn(shape, generator=generator, dtype=torch.complex64 if dtype.is_complex else torch.float32)
    if kind == "offset":
        x = x + 1e4
    elif kind == "constant":
        x = torch.full_like(x, 0.1)
    elif kind == "zeros":
        x = torch.where(torch.rand(shape, generator=generator) < 0.5, 0.0, x)
    elif kind == "holes":
        for hole in (float("nan"), float("inf"), -float("inf")):
            x = torch.where(torch.rand(shape, generator=generator) < 0.1, hole, x)
    elif kind == "nothing finite":
        x = torch.full_like(x, float("nan"))
    return x.to(dtype)


def layout(x: Tensor, how: str) -> Tensor:
    """The same values, laid out in memory in another way."""
    if how == "transposed":
        return x.transpose(0, -1).contiguous().transpose(0, -1)
    return x.repeat_interleave(2, dim=-1)[..., ::2] if how == "strided" else x


@st.composite
def streams(draw: st.DrawFn, case: Case) -> list[Tensor]:
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    sizes = draw(st.lists(st.integers(1, 4), min_size=1, max_size=5))
    dtype, how = draw(st.sampled_from(case.dtypes)), draw(st.sampled_from(("contiguous", "transposed", "strided")))
    kind = draw(st.sampled_from(KINDS))
    if case.same_shape:
        sizes = [sizes[0]] * len(sizes)
    return [layout(values(kind, (size, *case.trailing), dtype, generator), how) for size in sizes]


def two_cuts(xs: list[Tensor]) -> st.SearchStrategy[tuple[int, int]]:
    return st.tuples(st.integers(0, len(xs)), st.integers(0, len(xs)))


def test_every_reducer_has_a_row() -> None:
    exported = {getattr(reducers, name) for name in reducers.__all__}
    concrete = {cls for cls in exported if inspect.isclass(cls) and issubclass(cls, Reducer) and not inspect.isabstract(cls)}
    tested = {type(case.reducer) for case in CASES}
    tested |= {type(case.reducer.reducer) for case in CASES if isinstance(case.reducer, Premap)}  # what takes two tensors
    missing = {*(cls.__name__ for cls in concrete), *of_recorders()} - {cls.__name__ for cls in tested}
    assert not missing, f"add a row to tests/cases.py for {sorted(missing)}"


def of_recorders() -> Iterator[str]:
    """The names of the reducers that the other package has for itself; RowCount counts, on the CPU, what goes to a stream."""
    for path in Path(recorders.__file__).parent.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            bases = [getattr(base, "id", "") for base in node.bases] if isinstance(node, ast.ClassDef) else []
            if any(inspect.isclass(found := getattr(reducers, base, None)) and issubclass(found, Reducer) for base in bases):
                yield from {node.name} - {"RowCount"}


@merging
@quick
@given(data=st.data())
def test_associative(case: Case, data: st.DataObject) -> None:
    xs = data.draw(streams(case))
    laws.associative(case.reducer, xs, data.draw(two_cuts(xs)))


@merging
@quick
@given(data=st.data())
def test_identity_and_stream(case: Case, data: st.DataObject) -> None:
    xs = data.draw(streams(case))
    laws.identity(case.reducer, xs)
    laws.stream_is_merge(case.reducer, xs)


@merging
@quick
@given(data=st.data())
def test_together(case: Case, data: st.DataObject) -> None:
    laws.together(case.reducer, data.draw(streams(case)))


@merging
@quick
@given(data=st.data())
def test_reductions(case: Case, data: st.DataObject) -> None:
    xs = data.draw(streams(case))
    laws.reduces(case.reducer, xs, data.draw(st.integers(0, len(xs))))


GATHERED = (Fold, Geometry, MinibatchCKA, PerObservation)
"""Element by element too, in some forms, but that depends on a function, or it is a few numbers, or a state of any names."""


@pytest.mark.parametrize("case", [case for case in CASES if case.merges and not case.reducer.ordered], ids=str)
def test_what_merges_element_by_element_declares_it(case: Case) -> None:
    generator = torch.Generator().manual_seed(0)
    kinds = ("normal", "offset", "holes", "normal", "zeros", "offset")
    xs = [values(kind, (4, *case.trailing), case.dtypes[0], generator) for kind in kinds]
    inner = case.reducer.reducer if isinstance(case.reducer, Premap) else case.reducer
    if not isinstance(inner, GATHERED) and laws.by_element(case.reducer, xs, 3):
        assert case.reducer.reductions_of(laws.run(case.reducer, xs)), "declare `fields`"


@pytest.mark.parametrize("case", [case for case in CASES if case.splittable], ids=str)
@quick
@given(data=st.data())
def test_split_invariant(case: Case, data: st.DataObject) -> None:
    laws.split_invariant(case.reducer, data.draw(streams(case)))


@pytest.mark.parametrize("case", [case for case in CASES if not case.reducer.ordered], ids=str)
@quick
@given(data=st.data())
def test_commutative(case: Case, data: st.DataObject) -> None:
    xs = data.draw(streams(case))
    laws.commutative(case.reducer, xs, data.draw(st.permutations(range(len(xs)))))


@every
@quick
@given(data=st.data())
def test_pure_and_typed(case: Case, data: st.DataObject) -> None:
    xs = data.draw(streams(case))
    laws.pure(case.reducer, xs, merges=case.merges)
    laws.typed(case.reducer, xs)


@few
@quick
@given(data=st.data())
def test_never_looks_at_values_off_the_cpu(case: Case, data: st.DataObject) -> None:
    laws.never_looks(case.reducer, data.draw(streams(case)), merges=case.merges)


@every
@quick
@given(data=st.data())
def test_resumable(case: Case, data: st.DataObject) -> None:
    xs = data.draw(streams(case))
    laws.resumable(case.reducer, xs, data.draw(st.integers(0, len(xs))))


@merging
@quick
@given(data=st.data())
def test_over_ranks(case: Case, data: st.DataObject) -> None:
    xs = data.draw(streams(case))
    laws.over_ranks(case.reducer, xs, data.draw(two_cuts(xs)))


@pytest.mark.parametrize("reducer", [Summary(), Summary("b d -> d"), Moments(), Extremes()], ids=str)
@pytest.mark.parametrize("dtype", [torch.int64, torch.uint8, torch.bool, torch.float16])
def test_dtypes_of_a_state_are_those_of_the_cpu_where_no_value_may_be_looked_at(reducer: Reducer, dtype: torch.dtype) -> None:
    """The extremes of integers were float32 there."""
    x = torch.tensor([[1, 0, 3]]).to(dtype)
    here, there = reducer.update({}, x), reducer.update({}, x.to("meta"))
    assert {key: value.dtype for key, value in there.items()} == {key: value.dtype for key, value in here.items()}


HOLES = (float("nan"), float("inf"), -float("inf"))


def holed(size: int, case: Case, dtype: torch.dtype, generator: torch.Generator, holes: tuple[float, ...]) -> Tensor:
    """Numbers among which there are some that are not finite, in each column of the last axis but for the last column."""
    x = values("normal", (size, *case.trailing), dtype, generator)
    for row, hole in enumerate(holes):
        x[row::7, ..., :-1] = hole
    return x


@pytest.fixture(params=[True, False], ids=["loop", "calls"])
def loops(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """With and without a C++ compiler."""
    for module in (sweeping, weighting, binned) if not request.param else ():
        monkeypatch.setattr(module, "loop_for", lambda *_: None)
    sweeping.call_for.cache_clear()
    yield
    sweeping.call_for.cache_clear()


@merging
@pytest.mark.usefixtures("loops")
def test_what_is_left_out_is_counted(case: Case) -> None:
    for holes in (HOLES, *((hole,) for hole in HOLES)):
        counts_what_is_left_out(case, 9, holes, case.dtypes)


@merging
@pytest.mark.slow
@pytest.mark.usefixtures("loops")
def test_what_is_left_out_of_big_ones_is_counted(case: Case) -> None:
    for holes in (HOLES, HOLES[2:]):
        counts_what_is_left_out(case, 1 << 13, holes, case.dtypes[:1])


def counts_what_is_left_out(case: Case, size: int, holes: tuple[float, ...], dtypes: tuple[torch.dtype, ...]) -> None:
    reducer = case.reducer
    if isinstance(case.left_out, str):
        laws.counted(reducer, [reducer.update({}, torch.ones(4, *case.trailing).to(dtypes[0]))], None)
        return
    generator = torch.Generator().manual_seed(0)
    for dtype in (dtype for dtype in dtypes if dtype.is_floating_point or dtype.is_complex):
        xs = [holed(size, case, dtype, generator, holes) for _ in range(3)]
        wanted = case.left_out([x.numpy() if dtype.is_complex else x.double().numpy() for x in xs])
        assert wanted > 0 or len(holes) == 1
        lifted = laws.lifts(reducer, xs)
        stacked = reducer.update_all(lifted[0], torch.stack(xs[1:]))
        merged = reducer.merge(lifted[0], reducer.merge(lifted[1], lifted[2]))
        laws.counted(reducer, [laws.run(reducer, xs), stacked, merged, reducer.merge_all(lifted)], wanted)


@pytest.mark.usefixtures("loops")
@pytest.mark.parametrize("size", [4, pytest.param(3000, marks=pytest.mark.slow)])
@every
def test_inside_transforms(case: Case, size: int) -> None:
    generator = torch.Generator().manual_seed(0)
    xs = [values(kind, (size, *case.trailing), case.dtypes[0], generator) for kind in ("normal", "holes", "zeros", "offset")]
    laws.transformed(case.reducer, xs[:2], xs[2:])


ENDS = (torch.bool, torch.uint8, torch.int8, torch.int16, torch.uint16, torch.int32, torch.uint32, torch.int64)
NOT_THE_SAME = (HeavyHitters, Reservoir, Digest, Fingerprints)
"""Which of several that are equally good they keep is not that of the reference; or it cannot tell the dtype from the numbers."""


@pytest.mark.usefixtures("loops")
@pytest.mark.parametrize("case", [case for case in CASES if not isinstance(case.reducer, NOT_THE_SAME)], ids=str)
def test_integers_at_the_ends_of_their_dtype(case: Case) -> None:
    for dtype in ENDS:
        if dtype in (torch.uint16, torch.uint32) and (not case.data or isinstance(case.reducer, Fold)):
            continue  # PyTorch does not compare them, and the function of the user does
        if dtype is torch.int64 and isinstance(case.reducer, Sum):
            continue  # it wraps around, as its documentation says
        low, high = (0, 1) if dtype is torch.bool else (torch.iinfo(dtype).min, torch.iinfo(dtype).max)
        mixed = (
            [] if dtype is torch.int64 else [[low, high, high - 1, low + 1]]
        )  # in float64, which references have, some are equal
        for numbers in ([high] * 4, [low] * 4, *mixed):
            xs = [torch.tensor(some).to(dtype).reshape(4, *(1 for _ in case.trailing)) for some in (numbers, numbers[::-1])]
            laws.matches(case.reducer, [x.expand(4, *case.trailing) for x in xs], case.reference)


@every
@settings(quick, max_examples=50)
@given(data=st.data())
def test_equals_reference(case: Case, data: st.DataObject) -> None:
    laws.matches(case.reducer, data.draw(streams(case)), case.reference)


@every
def test_copies(case: Case) -> None:
    laws.copies(case.reducer)
    if case.data:
        laws.written_as_data(case.reducer)


@few
def test_compiled(case: Case) -> None:
    sizes = [4] * 12 if case.same_shape else range(3, 15)
    sizes = sizes[: case.graphs] if case.grows else sizes
    xs = [torch.randn(size, *case.trailing, generator=torch.Generator().manual_seed(size)) for size in sizes]
    xs[2].view(-1)[0] = float("nan")
    if case.takes_floats:
        laws.compiled(case.reducer, xs, graphs=case.graphs)
    laws.compiled(case.reducer, [x.nan_to_num().mul(10).long() for x in xs], graphs=case.graphs)


@every
def test_a_state_grows_only_if_the_reducer_says_so(case: Case) -> None:
    if isinstance(case.reducer, Fold):
        pytest.skip("the function decides")
    generator = torch.Generator().manual_seed(0)
    state: State = {}
    sizes = []
    for number in range(1, 129):
        x = torch.randn(4, *case.trailing, generator=generator).mul(10)
        state = case.reducer.update(state, x if case.takes_floats else x.long())
        if number in (64, 128):
            sizes.append(sum(value.numel() for value in state.values()))
    assert (sizes[0] == sizes[1]) == case.reducer.bounded


def stream(*sizes: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(size, 3, generator=generator) for size in sizes]


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
@every
def test_on_cuda(case: Case) -> None:
    xs = [torch.randn(4, *case.trailing, generator=torch.Generator().manual_seed(seed)) for seed in range(3)]
    if not case.takes_floats:
        xs = [x.mul(10).long() for x in xs]
    there = [x.cuda() for x in xs]
    with torch.cuda.device(0):
        torch.cuda.set_sync_debug_mode("error")
        try:
            state = laws.run(case.reducer, there)
        finally:
            torch.cuda.set_sync_debug_mode("default")
    laws.typed(case.reducer, there)
    close = {key: value.cpu() for key, value in laws.flat(case.reducer.compute(state)).items()}
    laws.close(close, laws.flat(case.reducer.compute(laws.run(case.reducer, xs))), rtol=1e-6, atol=1e-6)


@dataclass(frozen=True)
class MeanOfMeans(Statistic):
    """Wrong: batches of different sizes weigh the same."""

    def lift(self, x: Tensor, axes: tuple[int, ...]) -> State:
        return {"mean": x.double().mean(dim=axes)}

    def join(self, a: State, b: State) -> State:
        return {"mean": (a["mean"] + b["mean"]) / 2}

    def read(self, state: State) -> Tensor:
        return state["mean"]


@dataclass(frozen=True)
class InPlace(Statistic):
    """Wrong: adds into a state that somebody else may hold."""

    def lift(self, x: Tensor, axes: tuple[int, ...]) -> State:
        return {"sum": x.double().sum(dim=axes)}

    def join(self, a: State, b: State) -> State:
        return {"sum": a["sum"].add_(b["sum"])}

    def read(self, state: State) -> Tensor:
        return state["sum"]


@dataclass(frozen=True)
class KeepsInput(Statistic):
    """Wrong: the state is a view of the input, which the next layer may overwrite."""

    fixed_shape = False

    def lift(self, x: Tensor, axes: tuple[int, ...]) -> State:
        return {"last": x}

    def join(self, a: State, b: State) -> State:
        return b

    def read(self, state: State) -> Tensor:
        return state["last"].double().sum()


@dataclass(frozen=True)
class Narrow(Statistic):
    """Wrong: adds in the dtype of the input."""

    def lift(self, x: Tensor, axes: tuple[int, ...]) -> State:
        return {"sum": x.sum(dim=axes)}

    def join(self, a: State, b: State) -> State:
        return {"sum": a["sum"] + b["sum"]}

    def read(self, state: State) -> Tensor:
        return state["sum"]


@dataclass(frozen=True)
class Peeks(InPlace):
    """Wrong: a branch on the data, for which a GPU must stop and a compiler must break the graph."""

    def lift(self, x: Tensor, axes: tuple[int, ...]) -> State:
        return {"sum": x.double().sum(dim=axes) if x.amax() > 0 else x.double().mean(dim=axes)}

    def join(self, a: State, b: State) -> State:
        return {"sum": a["sum"] + b["sum"]}


@dataclass(frozen=True)
class Twins(InPlace):
    """Wrong: two keys share one storage, which safetensors refuses."""

    def lift(self, x: Tensor, axes: tuple[int, ...]) -> State:
        total = x.double().sum(dim=axes)
        return {"sum": total, "again": total}

    def join(self, a: State, b: State) -> State:
        return {key: a[key] + b[key] for key in a}


@dataclass(frozen=True)
class Mixes(InPlace):
    """Wrong: says that its join treats each element by itself, and adds what all elements have together."""

    fields = {"sum": Joined()}  # noqa: RUF012
    divisible = True  # type: ignore[assignment]

    def join(self, a: State, b: State) -> State:
        return {"sum": a["sum"] + b["sum"] + (a["sum"] * b["sum"]).sum()}


@dataclass(frozen=True)
class DeathPerBatch(Statistic):
    """Wrong: says that observations may be lifted together, and looks at each as a whole."""

    def lift(self, x: Tensor, axes: tuple[int, ...]) -> State:
        return {"spread": x.double().amax(dim=axes) - x.double().amin(dim=axes)}

    def join(self, a: State, b: State) -> State:
        return {"spread": a["spread"] + b["spread"]}

    def read(self, state: State) -> Tensor:
        return state["spread"]


@dataclass(frozen=True)
class Overdeclared(Mean):
    """Wrong: declares a sum, and merges about the means."""

    fields = {"mean": Add(), "count": Add()}  # noqa: RUF012

    def lift(self, x: Tensor, axes: tuple[int, ...]) -> State:
        return {"mean": x.double().mean(dim=axes), "count": torch.ones_like(x, dtype=torch.int64).sum(dim=axes)}

    observe = Statistic.observe

    def join(self, a: State, b: State) -> State:
        count = a["count"] + b["count"]
        return {"mean": (a["mean"] * a["count"] + b["mean"] * b["count"]) / count, "count": count}


@dataclass(frozen=True)
class Halfdeclared(Overdeclared):
    """Wrong: declares the key that is a sum, and needs it to merge the other."""

    def reductions_of(self, state: State) -> Any:
        return {"count": "sum"}


@pytest.mark.parametrize(
    ("mutant", "law", "arguments"),
    [
        (MeanOfMeans(), laws.associative, ((1, 2),)),
        (MeanOfMeans(), laws.split_invariant, ()),
        (MeanOfMeans(), laws.over_ranks, ((1, 1),)),
        (MeanOfMeans(), laws.commutative, ((2, 0, 1),)),
        (MeanOfMeans(), laws.matches, (CASES[3].reference,)),
        (Mixes(), laws.together, ()),
        (DeathPerBatch(), laws.together, ()),
        (InPlace(), laws.pure, ()),
        (KeepsInput(), laws.pure, ()),
        (KeepsInput(), laws.commutative, ((2, 0, 1),)),
        (Narrow(), laws.typed, ()),
        (Twins(), laws.pure, ()),
        (Overdeclared(), laws.reduces, (2,)),
        (Halfdeclared(), laws.reduces, (2,)),
    ],
    ids=lambda value: getattr(value, "__name__", type(value).__name__),
)
def test_planted_mistakes_are_caught(mutant: Reducer, law: Any, arguments: tuple[Any, ...]) -> None:
    with pytest.raises(AssertionError):
        law(mutant, stream(4, 2, 1), *arguments)


@dataclass(frozen=True)
class Doubled(Mean):
    """Merges otherwise than its base class, and says nothing of it."""

    def join(self, a: State, b: State) -> State:
        return {key: 2 * value for key, value in super().join(a, b).items()}


@dataclass(frozen=True)
class Noted(Mean):
    """Has a tensor more than its base class declares."""

    def observe(self, x: Tensor, axes: tuple[int, ...]) -> State:
        state = super().observe(x, axes)
        return {**state, "first": state["sum"].clone()}


@dataclass(frozen=True, init=False, repr=False)
class Swapped(Product):
    """Merges otherwise than its base class, and says nothing of it."""

    def merge(self, a: State, b: State) -> State:
        return super().merge(b, a)


def test_what_a_base_class_declares_is_of_its_own_join() -> None:
    assert Mean().reductions_of(laws.run(Mean(), stream(2, 2))) == dict.fromkeys(("count", "nonfinite", "sum"), "sum")
    for other in (Doubled(), Noted(), Swapped(mean=Mean())):
        assert other.reductions_of(other.update({}, torch.ones(2))) == {}
    mixed = Product(mean=Mean(), moments=Moments(), deep=Product(top=Max()))
    sums = ("mean/count", "mean/nonfinite", "mean/sum", "deep/top/count", "deep/top/nonfinite")
    assert mixed.reductions_of(mixed.update({}, torch.ones(2))) == {**dict.fromkeys(sums, "sum"), "deep/top/max": "max"}


def test_looking_at_values_is_caught() -> None:
    with pytest.raises(RuntimeError, match="meta"):
        laws.never_looks(Peeks(), stream(4, 2))
    with pytest.raises(torch._dynamo.exc.Unsupported, match=r"[Dd]ata-dependent"):
        laws.compiled(Peeks(), stream(4, 2), graphs=4)


@pytest.mark.long
def test_inductor_gives_what_eager_gives() -> None:
    product = Product(
        **{
            f"r{i}": case.reducer
            for i, case in enumerate(CASES)
            if case.trailing == (3,) and case.data and case.takes_floats and not case.same_shape
        }
    )
    xs = [*stream(4, 5, 6), torch.tensor([[1.0, float("nan"), float("inf")]])]
    torch._dynamo.reset()
    laws.agree(product, laws.run(product, xs), reduce(torch.compile(product.update, fullgraph=True), xs, {}))


@dataclass(frozen=True)
class Lifted(Mean):
    """Lifts otherwise than its base class, and says nothing of it."""

    def lift(self, x: Tensor, axes: tuple[int, ...]) -> State:
        return super().lift(2 * x, axes)


def test_what_a_gpu_kernel_computes_is_of_the_base_class() -> None:
    assert Mean().columns
    assert [other.columns for other in (Lifted(), Doubled(), Noted())] == [{}, {}, {}]
