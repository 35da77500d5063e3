"""Tensors read into the rows of a ring of graphs, against updates of each: layouts, dtypes, strides, threads, and no compiler."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import Tensor

from recorders.graphs import reading
from recorders.graphs.reading import RowReader, is_read, read_parts_of
from recorders.graphs.ring import GraphRing, Share
from recorders.graphs.sinks import KEY, GraphBatch
from recorders.ring.ring import COPIES
from reducers import Activity, Extremes, Mean, Moments, Norm, Product, Reducer, Sparsity, State, Sum, Summary, WeightedMean
from reducers.kernels.cpp import library

pytestmark = pytest.mark.skipif(not library.in_order(), reason="no C++ compiler")

numbers = itertools.count(-1000, -1)  # of no sink


def ring_of(reducers: Sequence[Reducer], xs: Sequence[Tensor], *, key: str = "k" * KEY, anywhere: bool = False) -> GraphRing:
    """A ring of monitors with these reducers, for tensors like these."""
    parts = [read_parts_of(reducer, "", x) for reducer, x in zip(reducers, xs, strict=True)]
    assert None not in parts
    batch = GraphBatch(key, ("",) * len(xs), (("",),) * len(xs), ("",) * len(xs), read=True)
    return GraphRing(RowReader([part for part in parts if part is not None]), [next(numbers) for _ in xs], batch, anywhere)


def states(ring: GraphRing, reducers: Sequence[Reducer], start: int = 0, stop: int | None = None) -> list[State]:
    """The state of each monitor that rows of the ring make."""
    stop = ring.count if stop is None else stop
    return [Share(ring, index).joined(reducer, {}, start, stop)[""] for index, reducer in enumerate(reducers)]


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


def updated(reducer: Reducer, *xs: Tensor) -> State:
    state: State = {}
    for x in xs:
        state = reducer.update(state, x)
    return state


def check(found: Sequence[State], wanted: Sequence[State]) -> None:
    for one, other in zip(found, wanted, strict=True):
        assert list(one) == list(other)
        for key, value in other.items():
            torch.testing.assert_close(one[key], value, rtol=1e-9, atol=1e-9, equal_nan=True)


SCATTERED = "no neighbours in memory"


def test_each_is_what_an_update_gives() -> None:
    made = {name: (reducer, make()) for name, (reducer, make) in OBSERVATIONS.items() if name != SCATTERED}
    reducers, xs = [reducer for reducer, _ in made.values()], [x for _, x in made.values()]
    ring = ring_of(reducers, xs)
    for _ in range(3):
        assert ring.add(xs)
    check(states(ring, reducers, 0, 1), [updated(reducer, x) for reducer, x in made.values()])
    check(states(ring, reducers), [updated(reducer, x, x, x) for reducer, x in made.values()])
    assert all(is_read(reducer, x) for reducer, x in made.values())


@pytest.mark.parametrize("reducer", [Summary(), Moments("b c -> c"), Product(mean=Mean(), range=Extremes("b c -> c"))], ids=repr)
def test_rows_have_the_bits_of_one_update_after_another_whenever_they_are_joined(reducer: Reducer) -> None:
    xs = [torch.randn(30, 20) for _ in range(20)]
    ring = ring_of([reducer], xs[:1])
    assert all(ring.add([x]) for x in xs)
    whole = Share(ring, 0).joined(reducer, {}, 0, 20)
    twice = Share(ring, 0).joined(reducer, Share(ring, 0).joined(reducer, {}, 0, 7), 7, 20)
    for key, value in updated(reducer, *xs).items():
        assert torch.equal(whole[""][key], value), key
        assert torch.equal(twice[""][key], value), key


def test_strides_may_change_from_call_to_call() -> None:
    reducer, x = Summary("b c -> c"), torch.randn(6, 10)
    ring, turned = ring_of([reducer], [x]), x.t().contiguous().t()
    for row, other in enumerate((x, turned, x)):
        assert ring.add([other])
        check(states(ring, [reducer], row, row + 1), [updated(reducer, x)])


@pytest.mark.parametrize(
    "other",
    [torch.randn(12, 20)[::2, ::2], torch._neg_view(torch.randn(6, 10)), torch.randn(6, 10).bfloat16(), torch.randn(6, 9)],
    ids=["scattered", "negated", "another dtype", "another kept size"],
)
def test_what_has_another_form_is_refused_and_changes_nothing(other: Tensor) -> None:
    reducer, x = Summary("b c -> c"), torch.randn(6, 10)
    ring = ring_of([reducer], [x])
    assert ring.add([x])
    assert not ring.add([other])
    assert ring.add([x])
    check(states(ring, [reducer]), [updated(reducer, x, x)])


def test_a_row_is_not_changed_by_the_next_one() -> None:
    x = torch.randn(30)
    ring = ring_of([Summary()], [x])
    ring.add([x])
    (first,) = states(ring, [Summary()])
    ring.add([x * 2])
    check(states(ring, [Summary()], 0, 1), [first])


def test_more_shapes_than_a_reader_remembers() -> None:
    ring = ring_of([Mean()], [torch.randn(30)])
    for row, number in enumerate([*range(1, 3 * reading.MOST_LAYOUTS), 1, 2, 40, 2]):
        x = torch.randn(number)
        assert ring.add([x])
        check(states(ring, [Mean()], row, row + 1), [updated(Mean(), x)])


def test_a_ring_that_was_made_in_inference_mode_is_written_outside_of_it() -> None:
    xs = [torch.randn(30), torch.randn(1 << 16)]
    with torch.inference_mode():
        ring = ring_of([Summary()] * 2, xs)
        assert ring.add(xs)
        first = states(ring, [Summary()] * 2)
    assert ring.add(xs)
    check(states(ring, [Summary()] * 2, 1, 2), first)


def test_several_threads_may_add_at_once() -> None:
    xs, reducer = [torch.randn(300, 100) for _ in range(8)], Summary("b c -> c")
    ring = ring_of([reducer] * 4, xs[:4])  # so that there is room for some rows
    wanted = {index: updated(reducer, x)["mean"] for index, x in enumerate(xs)}
    with ThreadPoolExecutor(4) as threads:
        added = list(threads.map(lambda index: ring.add([xs[index % 8]] * 4), range(8)))
    assert all(added[: ring.capacity])
    for row in range(ring.count):
        found = states(ring, [reducer] * 4, row, row + 1)
        assert any(torch.allclose(found[0]["mean"], mean, rtol=1e-12) for mean in wanted.values())
        assert all(torch.equal(found[0]["mean"], other["mean"]) for other in found)


def test_threads_do_not_change_a_bit() -> None:
    xs, threads = [torch.randn(100, 300) for _ in range(9)], torch.get_num_threads()
    ring = ring_of([Summary()] * 9, xs)
    try:
        for number in (1, 3):
            torch.set_num_threads(number)
            ring.add(xs)
    finally:
        torch.set_num_threads(threads)
    for one, three in zip(states(ring, [Summary()] * 9, 0, 1), states(ring, [Summary()] * 9, 1, 2), strict=True):
        assert all(torch.equal(value, three[key]) for key, value in one.items())


@pytest.mark.parametrize(
    "x",
    [
        torch.randn(4, 4).double(),
        torch.arange(4),
        torch.randn((1,) * 9),
        torch.randn(4, device="meta"),
        torch.randn(4, dtype=torch.complex64),
    ],
    ids=["float64", "integers", "many axes", "another device", "complex"],
)
def test_what_is_left_to_others(x: Tensor) -> None:
    assert not is_read(Mean(), x)


@pytest.mark.parametrize("x", [torch.randn(0, 4), torch.randn(12, 20)[::2, ::2], torch._neg_view(torch.randn(4, 4))])
def test_what_only_the_tensor_tells_is_found_when_the_graph_runs(x: Tensor) -> None:
    assert is_read(Mean("b c -> c"), x)
    assert read_parts_of(Mean("b c -> c"), "", x) is None


@pytest.mark.parametrize(
    "reducer", [Norm(p=3), WeightedMean(), Mean().premap(torch.abs), Product(a=Mean(), b=Norm(p=3)), Mean("b c -> (b c)")]
)
def test_reducers_that_are_left_to_others(reducer: Reducer) -> None:
    assert not is_read(reducer, torch.randn(4, 4))


def test_rings_of_a_net_of_thousands_of_layers_share_their_memory() -> None:
    xs = [torch.randn(4, 32)] * 1500
    rings = [ring_of([Moments("... c -> c")] * len(xs), xs, key=name * KEY) for name in "abcd"]
    assert all(ring.capacity >= 2 for ring in rings)
    assert sum(ring._rows.nbytes for ring in rings) <= 1.1 * COPIES.together
