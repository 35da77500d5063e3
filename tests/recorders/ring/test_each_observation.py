"""What is reduced of each observation by itself waits in rings as all else does: the bits of updates, in as few calls."""

from __future__ import annotations

import re
from functools import reduce

import laws
import pytest
import torch
from profiled import our_calls_of
from torch import Tensor, nn

from recorders import ForwardMonitor, Monitor
from recorders.ring.ring import Copies, PartialStates
from reducers import (
    Collect,
    Digest,
    Fingerprints,
    FirstNonfinite,
    Idle,
    Max,
    Mean,
    Moments,
    Norm,
    PerObservation,
    Product,
    Quantile,
    Reducer,
    Summary,
)
from reducers.kernels.cpp import library

needs_loop = pytest.mark.skipif(not library.in_order(), reason="no C++ compiler")

DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.int32, torch.complex64)
SIZES = {"small": (3, 5, 4), "big": (4, 5, Copies.largest // 20)}
IN_SLOTS: list[Reducer] = [
    *(PerObservation(Norm()), PerObservation(Summary("b c w -> c")), PerObservation(Moments(order=4), Mean("o ->"))),
    *(PerObservation(Norm().postmap(torch.log)), PerObservation(Mean(), Max("o ->")), PerObservation(Digest()), Digest()),
    *(PerObservation(Digest(), Collect()), Product(digest=PerObservation(Digest()), each=PerObservation(Norm()), all=Summary())),
    *(Product(digest=Digest(), idle=Idle(), all=Summary()), Fingerprints(), Product(each=Fingerprints(128), mean=Mean())),
    Product(idle=Idle("... ->"), first=FirstNonfinite(), mean=Mean()),
]
OTHERS: list[Reducer] = [
    PerObservation(Quantile()),
    PerObservation(Idle("b c w -> c")),
    PerObservation(Product(a=Digest(), b=Norm())),
]


def name(reducer: Reducer) -> str:
    """Its name for pytest, without addresses of functions."""
    return re.sub(r" at 0x\w+", "", str(reducer))


def drawn(seed: int, size: str, dtype: torch.dtype = torch.float32) -> Tensor:
    x = torch.randn(SIZES[size], generator=torch.Generator().manual_seed(seed)) * 9
    if dtype.is_floating_point and seed % 3 == 1:
        x.view(-1)[::7], x.view(-1)[::11] = torch.nan, torch.inf
    x = x.to(dtype)
    return x.transpose(0, 1).contiguous().transpose(0, 1) if seed % 5 == 4 else x


def supports(reducer: Reducer, x: Tensor) -> bool:
    try:
        reducer.update({}, x)
    except Exception:
        return False
    return True


def codecs(monitor: Monitor) -> set[type]:
    return {type(ring.codec) for ring in monitor.buffer.stored.rings().values()}


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("reducer", [*IN_SLOTS, *OTHERS], ids=name)
def test_observations_that_wait_are_one_update_after_another(reducer: Reducer, size: str) -> None:
    for dtype in DTYPES:
        xs = [drawn(seed, size, dtype) for seed in range(40)]
        if not supports(reducer, xs[0]):
            continue
        layer = nn.Identity()
        monitor, looked = (ForwardMonitor(reducer, layer) for _ in range(2))
        for number, x in enumerate(xs):
            layer(x)
            if number % 9 == 5:
                looked.peek()
        wanted = reduce(reducer.update, xs, {})
        for one in (monitor, looked):
            assert one.samples == len(xs)
            if size == "big" and "over=Mean" not in str(reducer):
                laws.same_bits(one.state, wanted)
            else:  # sums of many observations are added in another order; integers are equal
                laws.close(one.state, wanted)


@needs_loop
@pytest.mark.parametrize("reducer", IN_SLOTS, ids=name)
def test_big_ones_wait_as_partial_states(reducer: Reducer) -> None:
    monitor = ForwardMonitor(reducer, layer := nn.Identity())
    x = drawn(0, "big")
    for _ in range(3):
        layer(x)
    assert codecs(monitor) == {PartialStates}
    assert our_calls_of(lambda: layer(x)) <= (28 if isinstance(reducer, Product) else 17)  # Summary() alone takes 15


@pytest.mark.parametrize("reducer", [PerObservation(Norm()), PerObservation(Digest()), Digest()], ids=name)
def test_small_ones_wait_as_copies(reducer: Reducer) -> None:
    monitor = ForwardMonitor(reducer, layer := nn.Identity())
    x = drawn(0, "small")
    for _ in range(3):
        layer(x)
    assert codecs(monitor) == {Copies}
    assert our_calls_of(lambda: layer(x)) <= 11


@needs_loop
def test_digests_of_all_shapes_wait_in_one_ring_in_order() -> None:
    monitor = ForwardMonitor(PerObservation(Digest(), Collect()), layer := nn.Identity())
    xs = [torch.full((1 + number % 3, Copies.largest), float(number)) for number in range(50)]
    for x in xs:
        layer(x)
    assert len(monitor.buffer.stored.rings()) == 1
    wanted = [Digest().compute(Digest().update({}, x))["digest"] for x in xs]
    assert monitor.compute()["digest"].tolist() == [int(one) for one in wanted]
