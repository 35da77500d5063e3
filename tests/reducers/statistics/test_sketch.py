"""`Sketch` and the distance of two: errors within what is said of them, kernels, and what they do not tell."""

from __future__ import annotations

import math
from collections.abc import Callable

import laws
import pytest
import torch
from torch import Tensor, nn

from recorders import ForwardMonitor, Recorder
from recorders.recordings.distributed.merge import join_parts
from recorders.recordings.distributed.placement import Placement
from reducers import ArgumentError, DTypeError, Masked, ReducerTypeError, Sketch, StateError, StateMismatchError, sketch_distance
from reducers.kernels import sketches
from reducers.kernels.cpp import library

SEEDS = 400
SHAPE = (64, 128)

Apart = Callable[[torch.Generator], Tensor]


def apart(sketch: Sketch, x: Tensor, y: Tensor) -> dict[str, float]:
    found = sketch_distance(*(sketch.compute(sketch.update({}, one)) for one in (x, y)))
    return {name: float(value) for name, value in found.items()}


DIFFERENCES: dict[str, Apart] = {
    "everywhere": lambda generator: torch.randn(SHAPE, generator=generator),
    "of one sign": lambda generator: torch.rand(SHAPE, generator=generator) + 0.5,
    "in a column": lambda generator: torch.randn(SHAPE, generator=generator) * (torch.arange(128) == 5),
    "in a row": lambda generator: torch.randn(SHAPE, generator=generator) * (torch.arange(64) == 5)[:, None],
    "of heavy tails": lambda generator: torch.randn(SHAPE, generator=generator) ** 7,
    "in few elements": lambda generator: torch.where(torch.rand(SHAPE, generator=generator) < 0.001, 1.0, 0.0).index_fill(
        1, torch.tensor(0), 0.1
    ),
}


@pytest.mark.parametrize("k", [64, 256])
@pytest.mark.parametrize("name", DIFFERENCES)
def test_errors_are_within_what_is_said(name: str, k: int) -> None:
    """The hashes are fixed, so the difference begins at an element that is drawn, where the signs are other ones."""
    sketch, ratios, beyond = Sketch(k), [], 0
    for seed in range(SEEDS):
        generator = torch.Generator().manual_seed(seed)
        d = DIFFERENCES[name](generator)
        before = int(torch.randint(0, 2**16, (), generator=generator))
        x = torch.zeros(before + d.numel())
        y = torch.cat((x[:before], d.reshape(-1)))
        found, true = apart(sketch, x, y), float(torch.linalg.vector_norm(d.double()))
        ratios.append((found["distance"] / true) ** 2)
        beyond += true > found["bound"]
    squares = torch.tensor(ratios, dtype=torch.float64)
    assert abs(float(squares.mean()) - 1) < 5 * math.sqrt(2 / k / SEEDS)  # no bias
    assert float(squares.var().sqrt()) < math.sqrt(2 / k) * (1 + 5 / math.sqrt(2 * SEEDS))
    assert beyond / SEEDS < 0.035


def test_equal_tensors_have_no_distance_and_one_element_is_exact() -> None:
    x = torch.randn(10_000, generator=torch.Generator().manual_seed(0))
    assert apart(Sketch(), x, x.clone()) == {"distance": 0, "relative": 0, "bound": 0}
    y = x.clone()
    y[1234] += 0.5
    assert apart(Sketch(), x, y)["distance"] == pytest.approx(float(y[1234].double() - x[1234].double()), rel=1e-9)
    assert apart(Sketch(), torch.zeros(5), torch.zeros(5))["relative"] == 0
    assert apart(Sketch(), torch.zeros(5), torch.ones(5))["relative"] == 1


def test_order_counts() -> None:
    x = torch.arange(1000.0)
    assert apart(Sketch(), x, x.flip(0))["distance"] == pytest.approx(float((x - x.flip(0)).norm()), rel=0.3)


@pytest.mark.skipif(not library.in_order(), reason="no C++ compiler")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("k", [64, 192, 1024])
def test_the_loop_and_calls_give_the_same(k: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    generator = torch.Generator().manual_seed(0)
    for size in (1, 63, 64, 65, 257, 5000, 200_001):
        x = torch.randn(size, generator=generator).to(dtype)
        x[size // 2 :: 97] = math.nan
        x[size // 3 :: 101] = -math.inf
        with monkeypatch.context() as patch:
            looped = sketches.sketched(x, k)
            patch.setattr(sketches, "looped_sketch", lambda *_: None)
            torch.testing.assert_close(looped, sketches.sketched(x, k), rtol=1e-12, atol=1e-10)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_threads_and_strides_change_no_bit(dtype: torch.dtype) -> None:
    x = torch.randn(600, 500, dtype=dtype, generator=torch.Generator().manual_seed(0))
    sketch, before, found = Sketch(), torch.get_num_threads(), []
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            found += [sketch.update({}, one)["sketch"] for one in (x, x.T.contiguous().T)]
    finally:
        torch.set_num_threads(before)
    assert all(torch.equal(one, found[0]) for one in found)


def test_it_is_linear() -> None:
    sketch, generator = Sketch(), torch.Generator().manual_seed(0)
    xs = [torch.randn(50, 7, generator=generator).double() for _ in range(5)]
    summed = laws.run(sketch, xs)
    torch.testing.assert_close(summed["sketch"], sketch.update({}, sum(xs[1:], xs[0]))["sketch"])
    assert int(summed["count"]) == 5 * 350


def test_batches_are_compared_with_as_many_batches() -> None:
    """What differs in the same way adds up; what cancels is not seen."""
    sketch, generator = Sketch(1024), torch.Generator().manual_seed(0)
    xs = [torch.randn(40, 10, generator=generator).double() for _ in range(4)]
    d = torch.randn(40, 10, generator=generator).double()

    def far(*signs: int) -> float:
        ys = [x + sign * d for x, sign in zip(xs, signs, strict=True)]
        return float(sketch_distance(*(sketch.compute(laws.run(sketch, some)) for some in (xs, ys)))["distance"])

    assert far(1, 1, 1, 1) == pytest.approx(4 * float(d.norm()), rel=0.1)
    assert far(1, -1, 1, -1) < 1e-9


def test_what_is_not_finite_counts_as_nothing() -> None:
    sketch, x = Sketch(), torch.tensor([1.0, math.nan, 2.0, -math.inf])
    state = sketch.update({}, x)
    assert torch.equal(state["sketch"], sketch.update({}, torch.tensor([1.0, 0.0, 2.0, 0.0]))["sketch"])
    result = sketch.compute(state)
    assert [float(result[key]) for key in ("norm", "min", "max", "count")] == [pytest.approx(math.sqrt(5)), 1, 2, 2]
    found = sketch.nonfinite(state)
    assert found is not None
    assert (int(found.number), int(found.of)) == (2, 4)  # type: ignore[arg-type]


def test_arguments_and_states_are_checked() -> None:
    for k in (0, 63, 65, 2**40, 64.0):
        with pytest.raises(ArgumentError, match="k"):
            Sketch(k)  # type: ignore[arg-type]
    state = Sketch(64).update({}, torch.ones(3))
    Sketch(64).check(state)
    for wrong in ({**state, "sketch": torch.ones(128, dtype=torch.float64)}, {**state, "count": torch.ones(())}):
        with pytest.raises(StateError):
            Sketch(64).check(wrong)
    with pytest.raises(StateError):
        Sketch(128).check(state)
    with pytest.raises(StateMismatchError, match="one k"):
        sketch_distance(*(Sketch(k).compute(Sketch(k).update({}, torch.ones(3))) for k in (64, 128)))
    with pytest.raises(DTypeError, match="uint64"):
        Sketch().update({}, torch.ones(3, dtype=torch.uint64))
    with pytest.raises(ReducerTypeError, match="whole"):
        Masked(Sketch()).update({}, torch.ones(3), torch.ones(3) > 0)


@pytest.mark.parametrize(
    "dtype", [torch.bool, torch.uint8, torch.uint16, torch.int64, torch.float8_e4m3fn, torch.complex64], ids=str
)
def test_dtypes(dtype: torch.dtype) -> None:
    x = torch.tensor([0.0, 1.0, 1.0, 3.0]).to(dtype)
    result = Sketch().compute(Sketch().update({}, x))
    assert float(result["norm"]) == pytest.approx(math.sqrt(3 if dtype is torch.bool else 11))
    assert float(result["sketch"].norm()) == pytest.approx(float(result["norm"]))  # so few elements do not meet
    assert float(result["min"]) == 0


def test_parts_of_a_tensor_have_sketches_whose_squares_add_up() -> None:
    generator, sketch = torch.Generator().manual_seed(0), Sketch(1024)
    x, y = (torch.randn(6, 400, generator=generator).double() for _ in range(2))
    places = [Placement(rank, home=0, axes=2, parts=((0, rank, 2),)) for rank in (0, 1)]
    assert join_parts(sketch, {place: sketch.update({}, part) for place, part in zip(places, x.chunk(2), strict=True)}) is None
    squares = sum(apart(sketch, *parts)["distance"] ** 2 for parts in zip(x.chunk(2), y.chunk(2), strict=True))
    assert math.sqrt(squares) == pytest.approx(float((x - y).norm()), rel=0.1)


def test_in_a_compiled_net() -> None:
    torch._dynamo.reset()
    torch.manual_seed(0)
    net, sketch = nn.Sequential(nn.Linear(4, 8), nn.Tanh()), Sketch(64)
    with Recorder(ForwardMonitor(sketch)).modules(net, types=nn.Tanh) as recorder:
        output = torch.compile(net, fullgraph=True, backend="aot_eager")(torch.randn(3, 4))
    wanted = sketch.compute(sketch.update({}, output.detach()))
    torch.testing.assert_close(recorder["1"].peek()["sketch"], wanted["sketch"])


@pytest.mark.slow
@pytest.mark.parametrize("dynamic", [True, False])
def test_compiled_for_the_processor(dynamic: bool) -> None:
    torch._dynamo.reset()
    sketch = Sketch(64)
    update = torch.compile(sketch.update, fullgraph=True, dynamic=dynamic)
    xs = [torch.randn(size, 3, generator=torch.Generator().manual_seed(size)) for size in (3, 200, 17)]
    state = {}
    for x in xs:
        state = update(state, x)
    torch.testing.assert_close(state, laws.run(sketch, xs))
