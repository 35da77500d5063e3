"""Several small tensors read by one call against each of them read by itself: layouts, dtypes, strides, and no compiler."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import Tensor

from recorders.graphs import reading
from recorders.graphs.reading import GraphObservation, Pack, TensorReading, as_text, graph_observations, kinds_of, reader_of
from reducers import Activity, Extremes, Mean, Moments, Norm, Product, Reducer, Sparsity, State, Sum, Summary, WeightedMean
from reducers.kernels.loop import building

pytestmark = pytest.mark.skipif(building.build(1, "Float32") is None, reason="no C++ compiler")

OBSERVATIONS: dict[str, tuple[Reducer, Callable[[], Tensor]]] = {
    "everything": (Summary(), lambda: torch.randn(16, 64)),
    "last axis kept": (Moments("b c -> c"), lambda: torch.randn(7, 11, 13)[0]),
    "first axis kept": (Summary("b ... -> b"), lambda: torch.randn(5, 9, 31)),
    "every position by itself": (Extremes("b c -> b c"), lambda: torch.randn(3, 5)),
    "gaps": (Mean(), lambda: torch.randn(6, 40)[:, 3:-3]),
    "no neighbours in memory": (Sum("b c -> c"), lambda: torch.randn(8, 12)[::2, ::3]),
    "transposed": (Summary("b c -> b"), lambda: torch.randn(30, 20).t()),
    "bfloat16": (Summary(), lambda: torch.randn(9, 33).bfloat16()),
    "float16": (Extremes("b c -> c"), lambda: torch.randn(9, 33).half()),
    "not finite": (Summary(), lambda: torch.tensor([1.0, torch.nan, torch.inf, -2.0, 0.0] * 7)),
    "nothing finite": (Summary(), lambda: torch.full((40,), torch.nan)),
    "a norm": (Norm(), lambda: torch.randn(50)),
    "magnitudes": (Norm(p=1), lambda: torch.randn(50)),
    "a threshold": (Sparsity(eps=0.1), lambda: torch.full((33,), 0.1)),
    "no threshold": (Activity("b c -> c", eps=float("inf")), lambda: torch.randn(4, 9)),
    "a product": (Product(mean=Mean(), peak=Extremes("b c -> c")), lambda: torch.randn(12, 8)),
    "a mapped result": (Mean().postmap(torch.sqrt), lambda: torch.rand(12, 8)),
    "big": (Summary(), lambda: torch.randn(1 << 15)),
    "big, last axis kept": (Moments("b c -> c"), lambda: torch.randn(1 << 12, 9)),
    "big, bfloat16": (Summary("b c -> c"), lambda: torch.randn(1 << 12, 9).bfloat16()),
    "one element": (Summary(), lambda: torch.randn(1)),
    "no axes": (Summary(), lambda: torch.randn(())),
}


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


def told(parts: Sequence[GraphObservation]) -> str:
    """The text that reads all of these into one pack for each dtype and shape."""
    packs: dict[tuple[tuple[int, ...], torch.dtype], int] = {}
    readings = []
    for part in parts:
        places = []
        for key in part.columns:
            _, shape, dtype = part.kinds[key]
            number = packs.get((shape, dtype), 0)
            packs[shape, dtype] = number + 1
            places.append((list(packs).index((shape, dtype)), number))
        names = tuple(part.columns.values())
        readings.append(TensorReading(part.axes, names, part.threshold, tuple(places)))
    return as_text(readings, [Pack(number, shape, dtype) for (shape, dtype), number in packs.items()])


def read(xs: Sequence[Tensor], text: str) -> list[Tensor]:
    """The packs that the reader of a text reads."""
    reader = reader_of(text)
    return [pack[0] for pack in reader.packs(reader.read(xs).unsqueeze(0))]


def states(parts: Sequence[GraphObservation], packs: Sequence[Tensor]) -> list[State]:
    kinds = {(tuple(pack.shape[1:]), pack.dtype): iter(pack) for pack in packs}
    return [{key: next(kinds[part.kinds[key].shape, part.kinds[key].dtype]) for key in part.columns} for part in parts]


def observed(reducer: Reducer, x: Tensor) -> list[GraphObservation]:
    found = graph_observations(reducer, x)
    assert found is not None
    return found


def check(found: Sequence[State], wanted: Sequence[State]) -> None:
    for one, other in zip(found, wanted, strict=True):
        assert one.keys() == other.keys()
        for key, value in one.items():
            assert value.dtype == other[key].dtype
            torch.testing.assert_close(value, other[key], rtol=1e-10, atol=1e-12, equal_nan=True)


def all_at_once() -> tuple[list[list[GraphObservation]], list[State]]:
    made = [(reducer, make()) for reducer, make in OBSERVATIONS.values()]
    return [observed(reducer, x) for reducer, x in made], [reducer.update({}, x) for reducer, x in made]


def joined(parts: Sequence[Sequence[GraphObservation]], found: Sequence[State]) -> list[State]:
    """One state for each observation: those of its statistics have keys of their own."""
    each = iter(found)
    return [{key: value for _ in some for key, value in next(each).items()} for some in parts]


def test_each_is_what_an_update_gives() -> None:
    parts, wanted = all_at_once()
    flat = [part for some in parts for part in some]
    for _ in range(3):
        found = states(flat, read([part.x for part in flat], told(flat)))
        check(joined(parts, found), wanted)


def test_without_a_compiler_a_text_is_read_by_plain_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    parts, wanted = all_at_once()
    flat = [part for some in parts for part in some]
    monkeypatch.setattr(reading, "prepared", lambda *_, **__: None)
    reader_of.cache_clear()
    found = states(flat, read([part.x for part in flat], told(flat)))
    assert not reader_of(told(flat)).exact
    reader_of.cache_clear()
    check(joined(parts, found), wanted)


def test_strides_may_change_from_call_to_call() -> None:
    reducer = Summary("b c -> c")
    x = torch.randn(6, 10)
    (part,) = observed(reducer, x)
    text, wanted = told([part]), reducer.update({}, x)
    for other in (x, x.t().contiguous().t(), torch.randn(12, 20)[::2, ::2].copy_(x), x, torch._neg_view(-x)):
        check(states([part], read([other], text)), [wanted])


def test_dtypes_may_change_from_call_to_call() -> None:
    (part,) = observed(Moments("b c -> c"), torch.randn(6, 10))
    for dtype in (torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.float32):
        x = part.x.to(dtype)
        check(states([part], read([x], told([part]))), [Moments("b c -> c").update({}, x)])


def test_results_belong_to_the_caller() -> None:
    """The next call, which writes to the same memory, does not change them."""
    (part,) = observed(Summary(), torch.randn(30))
    text = told([part])
    first = read([part.x], text)
    before = [pack.clone() for pack in first]
    read([part.x * 2], text)
    assert all(map(torch.equal, first, before))


def test_more_shapes_than_a_reader_remembers() -> None:
    (part,) = observed(Mean(), torch.randn(30))
    text = told([part])
    for number in [*range(1, 3 * reading.MOST_LAYOUTS), 1, 2, 40, 2]:
        x = torch.randn(number)
        check(states([part], read([x], text)), [Mean().update({}, x)])


def test_a_reader_knows_whether_the_tensors_were_read_as_they_are() -> None:
    (part,) = observed(Summary("b c -> c"), torch.randn(6, 10))
    plain, scattered, negated = torch.randn(6, 10), torch.randn(12, 20)[::2, ::2], torch._neg_view(torch.randn(6, 10))
    for x, exact in ((plain, True), (scattered, False), (negated, False)):
        reader_of.cache_clear()
        reader = reader_of(told([part]))
        reader.read([x])
        assert reader.exact == exact


def test_a_text_that_was_first_read_in_inference_mode_is_read_outside_of_it() -> None:
    parts = [*observed(Summary(), torch.randn(30)), *observed(Summary(), torch.randn(1 << 16))]
    text = told(parts)
    reader_of.cache_clear()
    with torch.inference_mode():
        first = read([part.x for part in parts], text)
    assert all(map(torch.equal, first, read([part.x for part in parts], text)))


def test_several_threads_may_read_a_text_at_once() -> None:
    xs = [torch.randn(300, 100) for _ in range(8)]
    (part,) = observed(Summary("b c -> c"), xs[0])
    text = told([part])
    with ThreadPoolExecutor(4) as threads:
        found = list(threads.map(lambda index: read([xs[index % 8]], text), range(200)))
    for index, packs in enumerate(found):
        check(states([part], packs), [Summary("b c -> c").update({}, xs[index % 8])])


def test_threads_do_not_change_a_bit() -> None:
    parts = [part for _ in range(9) for part in observed(Summary(), torch.randn(100, 300))]
    text, threads = told(parts), torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        one = read([part.x for part in parts], text)
        torch.set_num_threads(3)
        three = read([part.x for part in parts], text)
    finally:
        torch.set_num_threads(threads)
    assert all(map(torch.equal, one, three))


@pytest.mark.parametrize(
    "x",
    [
        torch.randn(4, 4).double(),
        torch.arange(4),
        torch.randn(0, 4),
        torch.randn((1,) * 9),
        torch.randn(4, device="meta"),
        torch.randn(4, dtype=torch.complex64),
    ],
    ids=["float64", "integers", "empty", "many axes", "another device", "complex"],
)
def test_what_is_left_to_others(x: Tensor) -> None:
    assert graph_observations(Mean(), x) is None


@pytest.mark.parametrize("reducer", [Norm(p=3), WeightedMean(), Mean().premap(torch.abs), Product(a=Mean(), b=Norm(p=3))])
def test_reducers_that_are_left_to_others(reducer: Reducer) -> None:
    assert graph_observations(reducer, torch.randn(4, 4)) is None


def test_the_kinds_of_results() -> None:
    kinds = kinds_of(torch.randn(3, 5).half(), (0,), {"a": "count", "b": "min", "c": "mean"})
    assert kinds == {"a": Pack(1, (5,), torch.int64), "b": Pack(1, (5,), torch.float16), "c": Pack(1, (5,), torch.float64)}
