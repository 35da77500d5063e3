"""Observations that wait in rings: of any shape, in any mode, in bounded memory, and nobody can tell but by the calls it takes."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import laws
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from profiled import our_calls_of
from torch import Tensor, nn

from recorders import CallMonitor, ForwardMonitor, Monitor, OperandError, Recorder
from recorders.monitors.buffer import MOST_RINGS, Buffer
from recorders.recordings.distributed.placement import Placement
from recorders.ring import ring as codecs
from recorders.ring.ring import COPIES, LOOKS, Copies, PartialStates, Ring
from reducers import EMA, Collect, FirstNonfinite, Mean, Moments, Norm, Product, Quantile, Reducer, State, Sum, Summary
from reducers.kernels.cpp import library

needs_loop = pytest.mark.skipif(not library.in_order(), reason="no C++ compiler")


def drawn(seed: int, *shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)) + 1


def autocast() -> AbstractContextManager[Any]:
    return torch.autocast("cpu", torch.bfloat16)


def updated(reducer: Reducer, xs: list[Tensor]) -> State:
    state: State = {}
    for x in xs:
        state = reducer.update(state, x)
    return state


def rings(monitor: Monitor) -> list[Ring]:
    return [*monitor.buffer.stored.rings().values()]


def memory(monitor: Monitor) -> int:
    """The bytes of what waits, without what partial states need."""
    return sum(rows.nbytes for ring in rings(monitor) if ring._memory is not None for rows in _tensors(ring))


def _tensors(ring: Ring) -> list[Tensor]:
    found: list[Tensor] = ring._memory[0] if isinstance(ring.codec, Copies) else ring._memory
    return found


def test_shapes_that_alternate_wait_as_one_does() -> None:
    monitor = ForwardMonitor(Summary(), layer := nn.Identity())
    xs = [drawn(size, size, 64) for size in (8, 9)]

    def act() -> None:
        for x in xs:
            layer(x)

    for _ in range(6):
        act()
    assert our_calls_of(act) <= 2 * 11
    assert our_calls_of(lambda: [act() for _ in range(100)]) <= 100 * 2 * 20  # with what joins them
    assert monitor.samples == 2 * 107
    laws.close(monitor.state, updated(Summary(), xs * 107), rtol=1e-12)


def test_so_do_those_of_a_reducer_without_a_kernel(without_loops: None) -> None:
    monitor = ForwardMonitor(Quantile(), layer := nn.Identity())
    xs = [drawn(size, size, 64) for size in (8, 9, 10)]

    def act() -> None:
        for x in xs:
            layer(x)

    for _ in range(4):
        act()
    assert our_calls_of(act) <= 3 * 11
    assert monitor.samples == 3 * 5
    laws.same_bits(monitor.state, updated(Quantile(), xs * 5))  # counts, which no order changes


@needs_loop
@pytest.mark.parametrize("pattern", ["... ->", "b t d -> d"])
def test_batches_of_any_length_wait_in_one_ring(pattern: str) -> None:
    reducer = Moments(pattern)
    monitor = ForwardMonitor(reducer, layer := nn.Identity())
    xs = [drawn(length, 1 + length % 3, length, 16) for length in range(1, 150)]
    layer(drawn(0, 2, 5, 16))
    layer(drawn(1, 2, 6, 16))
    lengths = iter(xs)
    for _ in range(9):
        layer(next(lengths))
    assert len([ring for ring in rings(monitor) if isinstance(ring.codec, PartialStates)]) == 1
    assert our_calls_of(lambda: [layer(x) for x in lengths]) <= 75 * 140  # each is new, so how it is read has to be found
    assert our_calls_of(lambda: [layer(x) for x in xs]) <= 48 * len(xs)  # more than are remembered
    few = xs[-LOOKS // 2 :]
    assert our_calls_of(lambda: [layer(x) for x in few]) <= 22 * len(few)
    assert monitor.samples == 2 + 2 * len(xs) + len(few)
    laws.close(monitor.state, updated(reducer, [drawn(0, 2, 5, 16), drawn(1, 2, 6, 16), *xs, *xs, *few]), rtol=1e-11)


@needs_loop
@pytest.mark.parametrize("pattern", ["... ->", "b t d -> d"])
def test_tokens_after_a_long_prompt_wait_as_copies(pattern: str) -> None:
    reducer = Summary(pattern)
    monitor, alone = ForwardMonitor(reducer, layer := nn.Identity()), ForwardMonitor(reducer, other := nn.Identity())
    prompts, tokens = [drawn(i, 2, 500, 64) for i in range(3)], [drawn(9 + i, 2, 1, 64) for i in range(20)]
    for prompt in prompts:
        layer(prompt)
        for token in tokens:
            layer(token)
    for token in tokens:
        other(token)
    assert our_calls_of(lambda: [layer(token) for token in tokens]) == our_calls_of(lambda: [other(token) for token in tokens])
    assert {type(ring.codec) for ring in rings(monitor)} == {Copies, PartialStates}
    assert alone.samples == 40
    laws.close(monitor.state, updated(reducer, [x for prompt in prompts for x in (prompt, *tokens)] + tokens), rtol=1e-12)


@needs_loop
@pytest.mark.parametrize("reducer", [FirstNonfinite(), Summary("b t d -> d")], ids=str)
def test_prompts_tokens_and_empty_tensors_are_reduced_in_any_turn(reducer: Reducer) -> None:
    monitor = ForwardMonitor(reducer, layer := nn.Identity())
    xs = [drawn(i, 2, (500, 1, 0, 1)[i % 4], 64) for i in range(40)]
    xs[33] = xs[33] * torch.inf
    for x in xs:
        layer(x)
    assert monitor.samples == 40
    laws.close(monitor.state, updated(reducer, xs), rtol=1e-12)


@needs_loop
def test_tokens_of_many_shapes_after_a_long_prompt_wait_in_the_ring_of_the_prompt() -> None:
    monitor = ForwardMonitor(Summary(), layer := nn.Identity())
    xs = [drawn(0, 500, 64), *[drawn(i, i, 64) for i in range(1, 30)]]
    for x in xs * 2:
        layer(x)
    assert [type(ring.codec) for ring in rings(monitor)].count(PartialStates) == 1
    assert our_calls_of(lambda: [layer(x) for x in xs]) <= 22 * len(xs)
    laws.close(monitor.state, updated(Summary(), xs * 3), rtol=1e-12)


@needs_loop
@pytest.mark.parametrize(("reducer", "most"), [(Summary(), 30), (Mean("b c -> c"), 30), (Product(a=Mean(), b=Norm()), 50)], ids=str)
def test_what_waits_is_joined_in_few_calls(reducer: Reducer, most: int) -> None:
    monitor = ForwardMonitor(reducer, layer := nn.Identity())
    x = drawn(0, 256, 128)
    for _ in range(10):
        layer(x)
    monitor.buffer.flush()
    layer(x)
    assert our_calls_of(monitor.buffer.flush) <= most


@needs_loop
@pytest.mark.parametrize("reducer", [Summary("b c -> c"), Product(all=Moments(order=4), first=FirstNonfinite())], ids=str)
def test_rings_that_are_full_at_different_times_have_the_same_bits(reducer: Reducer, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a GPU, on which the first ring of each leaf has another capacity."""
    layer = nn.Sequential(*[nn.Identity() for _ in range(5)])
    monitors = [ForwardMonitor(reducer, each) for each in layer]
    monkeypatch.setattr(codecs, "PARTIAL", codecs.PARTIAL_ON["cpu"])
    capacities = set()
    for seed in range(70):
        layer(drawn(seed, 90 + seed % 3, 64))
        capacities |= {ring.capacity for monitor in monitors for ring in rings(monitor)}
    assert len(capacities) > 4
    for monitor in monitors[1:]:
        laws.same_bits(monitor.state, monitors[0].state)


@pytest.mark.parametrize("mode", [autocast, torch.inference_mode], ids=["autocast", "inference_mode"])
def test_autocast_and_inference_mode_take_the_lane_of_all_others(mode: Callable[[], Any]) -> None:
    layer, same = nn.Identity(), nn.Identity()
    monitor, plain = ForwardMonitor(Summary("b c -> c"), layer), ForwardMonitor(Summary("b c -> c"), same)
    xs = [drawn(number, 8 + number % 2, 16) for number in range(200)]
    with mode():
        for x in xs[:10]:
            layer(x)
        assert our_calls_of(lambda: [layer(x) for x in xs[10:12]]) <= 2 * 11
        for x in xs[12:]:
            layer(x)
    for x in xs:
        same(x)
    laws.same_bits(monitor.state, plain.state)
    assert not any(value.is_inference() for value in monitor.state.values())
    assert not any(rows.is_inference() for ring in rings(monitor) for rows in _tensors(ring))


@pytest.mark.parametrize("size", [8, Copies.largest], ids=["small", "big"])
def test_what_inference_mode_records_goes_on_outside_of_it_and_the_other_way_round(size: int) -> None:
    monitor = ForwardMonitor(Moments(), layer := nn.Identity())
    xs = [drawn(seed, size) for seed in range(12)]
    for number, x in enumerate(xs):
        with torch.inference_mode() if number % 3 else nullcontext():
            layer(x.clone().requires_grad_(number % 3 == 0))
    recorder = Recorder(ForwardMonitor(Mean())).modules(nn.Sequential(layer), leaves=True)
    with torch.inference_mode():
        layer(xs[0])
        assert not any(value.is_inference() for value in monitor.state.values())
        recorder.state_dict()
    layer(xs[0].requires_grad_())
    assert (monitor.samples, recorder[0].samples) == (14, 2)
    laws.close(monitor.state, updated(Moments(), [x.detach() for x in (*xs, xs[0], xs[0])]), rtol=1e-12)


def test_the_memory_of_all_rings_of_a_monitor_is_that_of_one() -> None:
    for reducer in (Summary(), Quantile(), Product(mean=Mean(), moments=Moments())):
        monitor = ForwardMonitor(reducer, layer := nn.Identity())
        xs = [drawn(size, size, 64) for size in range(8, 8 + 2 * MOST_RINGS)]
        for number in range(400):
            layer(xs[number % len(xs) if number % 7 else number % 3])
            assert len(rings(monitor)) <= MOST_RINGS
            assert memory(monitor) <= COPIES.enough
        assert monitor.samples == 400
        seen = [xs[number % len(xs) if number % 7 else number % 3] for number in range(400)]
        laws.close(monitor.state, updated(reducer, seen), rtol=1e-11)


@pytest.mark.parametrize("size", [2048, 1 << 15])
def test_rings_of_thousands_of_layers_fit_into_the_memory_of_all(size: int) -> None:
    monitors = [CallMonitor(Moments("... c -> c")) for _ in range(2000)]
    x = torch.ones(size // 512, 128)
    for _ in range(3):
        for monitor in monitors:
            monitor.push(x)
    waiting = [ring for monitor in monitors for ring in rings(monitor) if ring.count]
    assert len(waiting) > 1000
    assert sum(map(memory, monitors)) <= COPIES.together
    assert {monitor.samples for monitor in monitors} == {3}


def test_shapes_that_come_no_more_make_room_for_others(without_loops: None) -> None:
    monitor = ForwardMonitor(Quantile(), layer := nn.Identity())
    for size in range(1, 3 * MOST_RINGS):
        for _ in range(3):
            layer(drawn(size, size))
    last = drawn(0, 3 * MOST_RINGS - 1)
    assert our_calls_of(lambda: layer(last)) <= 11
    assert monitor.samples == 3 * (3 * MOST_RINGS - 1) + 1


def test_what_depends_on_the_order_keeps_it() -> None:
    reducer = Product(summary=Summary(), ema=EMA("b c -> c", alpha=0.5), all=Collect())
    monitor = ForwardMonitor(reducer, layer := nn.Identity())
    xs = [drawn(seed, 2 + (seed // 3) % 2, 3) for seed in range(40)]
    for x in xs:
        layer(x)
    laws.close(monitor.state, updated(reducer, xs), rtol=1e-12)


SIZES = ("8", "8", "9", "9", "10", "big", "bigger")
ACTS = (*SIZES, "double", "turned", "wrong", "peek", "samples", "states", "autocast", "inference")


@pytest.mark.filterwarnings("ignore:.*keeps shape")
@settings(max_examples=60)
@given(acts=st.lists(st.sampled_from(ACTS), max_size=60), reducer=st.sampled_from([Summary("b c -> c"), Quantile("b c -> c")]))
def test_whatever_comes_is_recorded_once_and_looking_changes_no_bit(acts: list[str], reducer: Reducer) -> None:
    layers = [nn.Identity(), nn.Identity()]
    monitor, twin = (ForwardMonitor(reducer, layer) for layer in layers)
    xs: list[Tensor] = []
    for seed, act in enumerate(acts):
        if act == "peek":
            monitor.peek()
            monitor.snapshot()
        elif act == "samples":
            assert monitor.samples == len(xs)
        elif act == "states":
            for one in (monitor, twin):
                assert (one.states != {}) == (xs != [])
        else:
            size = {"big": 3000, "bigger": 3001, "9": 9, "10": 10}.get(act, 8)
            x = drawn(seed, size, 5 if act == "wrong" and xs else 4)
            x = x.double() if act == "double" else x.t().contiguous().t() if act == "turned" else x
            mode = autocast() if act == "autocast" else torch.inference_mode() if act == "inference" else nullcontext()
            with mode:
                for layer in layers:
                    layer(x)
            if x.shape[1] == 4:
                xs.append(x)
    assert monitor.samples == twin.samples == len(xs)
    laws.same_bits(monitor.state, twin.state)
    if xs:
        laws.close(monitor.peek(), reducer.compute(updated(reducer, xs)), rtol=1e-6)


@settings(max_examples=40)
@given(acts=st.lists(st.sampled_from(("8", "9", "10", "big", "bigger", "save", "peek")), max_size=60))
def test_runs_that_save_at_the_same_steps_are_alike_however_often_they_are_resumed(acts: list[str]) -> None:
    def new() -> tuple[Recorder, nn.Module]:
        net = nn.Sequential(nn.Identity())
        return Recorder(ForwardMonitor(Summary())).modules(net, leaves=True), net

    goes_on, resumed = new(), new()
    for seed, act in enumerate(acts):
        if act == "save":
            held = resumed[0].state_dict()
            goes_on[0].state_dict()
            resumed = new()
            resumed[0].load_state_dict(held)
        elif act == "peek":
            goes_on[0].compute()
        else:
            x = drawn(seed, {"big": 3000, "bigger": 3001}.get(act) or int(act), 3)
            goes_on[1](x)
            resumed[1](x)
    assert goes_on[0][0].samples == resumed[0][0].samples
    laws.same_bits(goes_on[0][0].state, resumed[0][0].state)


@pytest.mark.parametrize("shapes", [[(2, 3)], [(2, 3), (4,)]], ids=["a leaf", "two leaves"])
def test_tensors_that_ranks_share_do_not_join_those_that_wait_from_before(shapes: list[tuple[int, ...]]) -> None:
    """Of what waits the leaves are known, whatever the key is by which the ring is found."""
    buffer = Buffer(Sum())
    inputs = {str(number): (torch.ones(shape),) for number, shape in enumerate(shapes)}
    for _ in range(3):
        buffer.add(inputs)
    buffer.stored = buffer.stored._replace(states={})  # as if all of it waited
    for path in inputs:
        with pytest.raises(OperandError, match="do not fit together"):
            buffer.place({path: Placement(0, True, 0, 2, ((0, 0, 2),))})
