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
from reducers import (
    ArgumentError,
    Collect,
    DTypeError,
    Fingerprints,
    Masked,
    PerObservation,
    Reducer,
    ReducerTypeError,
    Sketch,
    StateError,
    StateMismatchError,
    TensorPart,
    sketch_distance,
)
from reducers.kernels import sketches
from reducers.kernels.cpp import library
from reducers.kernels.cpp.threads import pace

SEEDS = 400
SHAPE = (64, 128)

Apart = Callable[[torch.Generator], Tensor]


def apart(sketch: Reducer, x: Tensor, y: Tensor) -> dict[str, float]:
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
    """The hashes are fixed, so the difference begins at an element that is drawn, so far away that no two draws share a sign."""
    ratios, beyond = [], 0
    for seed in range(SEEDS):
        generator = torch.Generator().manual_seed(seed)
        d = DIFFERENCES[name](generator)
        start = int(torch.randint(0, 2**40, (), generator=generator))
        sketch, x = Sketch(k).of_part(TensorPart((2**41,), (start,))), torch.zeros(d.numel())
        found, true = apart(sketch, x, d.reshape(-1)), float(torch.linalg.vector_norm(d.double()))
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


def spoiled(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    x = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    flat = x.view(-1)
    flat[len(flat) // 2 :: 97] = math.nan
    flat[len(flat) // 3 :: 101] = -math.inf
    return x.to(dtype)


def plain_facts(x: Tensor) -> list[float]:
    wide = x.double().reshape(-1)
    rest = wide[wide.isfinite()]
    ends = [float(rest.min()), float(rest.max())] if len(rest) else [math.inf, -math.inf]
    return [float(len(rest)), float(len(wide) - len(rest)), float(rest.square().sum()), *ends]


@pytest.fixture(params=[True, False], ids=["loop", "calls"])
def loops(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """With and without the loops in C++."""
    if not request.param:
        monkeypatch.setattr(sketches, "looped_sketches", lambda *_: None)


@pytest.mark.skipif(not library.in_order(), reason="no C++ compiler")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.float8_e5m2], ids=str)
@pytest.mark.parametrize("k", [64, 192, 1024])
def test_the_loop_and_calls_give_the_same(k: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    for shape in ((1, 1), (1, 63), (3, 64), (2, 65), (9, 257), (2, 5000), (1, 200_001), (2, 300_007)):
        for x in (spoiled(*shape, dtype=dtype), torch.full(shape, -2.0).to(dtype)):
            with monkeypatch.context() as patch:
                looped = sketches.sketched(x, k)
                patch.setattr(sketches, "looped_sketches", lambda *_: None)
                torch.testing.assert_close(looped, sketches.sketched(x, k), rtol=1e-12, atol=1e-10)


@pytest.mark.usefixtures("loops")
@pytest.mark.parametrize(
    "dtype",
    [*(torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.float8_e5m2), *(torch.int32, torch.uint8, torch.bool)],
    ids=str,
)
def test_facts_of_each_row(dtype: torch.dtype) -> None:
    floats = dtype.is_floating_point
    for shape in ((3, 0), (0, 4), (2, 1), (4, 130), (2, 5, 77), (2, 140_000)):
        xs = (spoiled(*shape) if floats else torch.randn(shape).mul(3).abs()).to(dtype)
        sums, facts = sketches.sketched(xs, 64)
        assert (sums.shape, facts.shape) == ((shape[0], 64), (shape[0], len(sketches.FACTS)))
        assert sums.dtype is facts.dtype is torch.float64
        for row, x in enumerate(xs.unbind()):
            torch.testing.assert_close(facts[row].tolist(), plain_facts(x), rtol=1e-12, atol=1e-30)
            alone = sketches.sketched(x[None], 64)
            torch.testing.assert_close((sums[row], facts[row]), (alone[0][0], alone[1][0]), rtol=1e-12, atol=1e-10)


@pytest.mark.usefixtures("loops")
def test_a_block_may_be_longer_than_the_tensor() -> None:
    x = torch.randn(300_000, generator=torch.Generator().manual_seed(0))
    found = Sketch(1 << 20).update({}, x)
    assert torch.equal(found["sketch"].abs().sort().values[-len(x) :], x.double().abs().sort().values)  # no two elements meet
    whole = TensorPart((2_000_000,), (1_000_000,))
    assert float(Sketch(1 << 20).of_part(whole).update({}, x)["power"]) == pytest.approx(float(x.double().square().sum()))


@pytest.mark.usefixtures("loops")
def test_rows_without_a_finite_element_beside_others() -> None:
    xs = torch.stack((torch.full((300,), math.nan), torch.ones(300), torch.full((300,), -math.inf)))
    sums, facts = sketches.sketched(xs, 64)
    assert facts.tolist() == [plain_facts(x) for x in xs]
    assert not sums[[0, 2]].any()


@pytest.mark.usefixtures("loops")
def test_complex_numbers_strides_and_lazy_signs() -> None:
    x = torch.view_as_complex(torch.randn(6, 50, 2, generator=torch.Generator().manual_seed(0)))
    wanted = sketches.sketched(torch.view_as_real(x), 64)
    for one in (x, x.T.contiguous().T, torch.cat((x, x), 1)[:, :50]):
        torch.testing.assert_close(sketches.sketched(one, 64), wanted)
    torch.testing.assert_close(sketches.sketched(x.conj(), 64), sketches.sketched(x.conj().resolve_conj(), 64))
    torch.testing.assert_close(sketches.sketched(x.conj().imag, 64), sketches.sketched(-x.imag, 64))


def test_inside_vmap_and_in_a_graph() -> None:
    xs = torch.randn(3, 4, 100, generator=torch.Generator().manual_seed(0))
    wanted = [sketches.sketched(x, 64) for x in xs]
    sums, facts = torch.vmap(lambda x: sketches.sketched(x, 64))(xs)
    torch.testing.assert_close((sums, facts), (torch.stack([a for a, _ in wanted]), torch.stack([b for _, b in wanted])))
    torch._dynamo.reset()
    compiled = torch.compile(lambda x: sketches.sketched(x, 64), fullgraph=True, backend="aot_eager", dynamic=True)
    for x in (xs[0], xs[0, :2, :70].half(), torch.complex(xs[1], xs[2])):
        torch.testing.assert_close(compiled(x), sketches.sketched(x, 64))


@pytest.mark.usefixtures("loops")
def test_observations_of_one_shape_together_are_those_one_after_another() -> None:
    sketch, xs = Sketch(64), spoiled(20, 7, 11)
    before = sketch.update({}, torch.ones(3, dtype=torch.bfloat16))
    laws.close(sketch.update_all(before, xs), laws.run(sketch, xs.unbind(), before))
    assert sketch.update_all(before, xs[:0]) is before


def test_the_coarsest_rounding_is_kept() -> None:
    sketch, state = Sketch(64), {}
    dtypes = torch.int64, torch.bool, torch.float64, torch.complex64, torch.bfloat16, torch.float32
    for dtype, eps in zip(dtypes, (0, 0, 2**-52, 2**-23, 2**-7, 2**-7), strict=True):
        state = sketch.update(state, torch.ones(3, dtype=dtype))
        found = sketch.compute(state)["eps"]  # type: ignore[index]
        assert (float(found), found.dtype) == (eps, torch.float64)


@pytest.mark.usefixtures("loops")
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_threads_and_strides_change_no_bit(dtype: torch.dtype) -> None:
    for x in (torch.randn(600, 500, dtype=dtype, generator=torch.Generator().manual_seed(0)), spoiled(3, 200, 1000, dtype=dtype)):
        sketch, before, found = Sketch(), torch.get_num_threads(), []
        try:
            for threads in (1, 2, 3):
                torch.set_num_threads(threads)
                pace.alone_until = 0.0  # or one thread does all for a while
                found += [sketch.update({}, one) for one in (x, x.transpose(0, 1).contiguous().transpose(0, 1))]
                found += [sketch.update_all({}, x[None])]
        finally:
            torch.set_num_threads(before)
        for one in found:
            laws.same_bits(one, found[0])


@pytest.mark.parametrize("finite", [True, False])
def test_numbers_of_different_elements_have_no_distance(finite: bool) -> None:
    sketch = Sketch(64)
    some = torch.tensor([1.0, 2.0, 3.0 if finite else math.nan])
    results = [sketch.compute(laws.run(sketch, xs)) for xs in ([some], [some[:2]] * 2)]
    with pytest.raises(StateMismatchError, match=f"of {3 if finite else 2} and of 4 finite elements .* same number of times"):
        sketch_distance(*results)


def test_distances_of_each_observation_by_itself() -> None:
    each = PerObservation(Sketch(64), Collect())
    xs = torch.randn(3, 40, generator=torch.Generator().manual_seed(0)).double()
    a, b = (each.compute(laws.run(each, one.unbind())) for one in (xs, xs + torch.tensor([0.0, 1.0, 2.0])[:, None]))
    torch.testing.assert_close(sketch_distance(a, b)["distance"], math.sqrt(40) * torch.arange(3.0).double(), rtol=0.3, atol=1e-9)
    c = each.compute(laws.run(each, [xs[0], xs[1], xs[2, :30]]))
    with pytest.raises(StateMismatchError, match="of 40 and of 30"):
        sketch_distance(a, c)


def test_numbers_whose_squares_are_too_big_are_finite() -> None:
    x = torch.tensor([1e200, -3e200, 1.0, math.nan], dtype=torch.float64)
    sums, facts = sketches.sketched(x[None], 64)
    assert facts.tolist() == [[3, 1, math.inf, -3e200, 1e200]]
    assert sums.isfinite().all()
    assert sorted(sums.abs().flatten().tolist())[-3:] == [1, 1e200, 3e200]


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
    for wrong in ({"sketch": torch.ones(128, dtype=torch.float64)}, {"count": torch.ones(())}, {"eps": torch.ones(2)}):
        with pytest.raises(StateError):
            Sketch(64).check({**state, **wrong})
    with pytest.raises(StateError):
        Sketch(64).check({key: value for key, value in state.items() if key != "eps"})
    with pytest.raises(StateError):
        Sketch(128).check(state)
    with pytest.raises(StateMismatchError, match="one k"):
        sketch_distance(*(Sketch(k).compute(Sketch(k).update({}, torch.ones(3))) for k in (64, 128)))
    for reducer in (Sketch(), Fingerprints()):
        with pytest.raises(DTypeError, match="uint64"):
            reducer.update({}, torch.ones(3, dtype=torch.uint64))
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


@pytest.mark.usefixtures("loops")
@pytest.mark.parametrize("k", [64, 192, 1024])
@pytest.mark.parametrize(
    ("shape", "axis", "at"), [((6, 400), 0, 2), ((6, 400), 1, 130), ((5, 7, 30), 1, 3), ((700, 900), 1, 333)], ids=str
)
def test_parts_of_a_tensor_merge_to_the_whole(shape: tuple[int, ...], axis: int, at: int, k: int) -> None:
    sketch, xs = Sketch(k), spoiled(2, *shape)
    states = []
    for start, size in ((0, at), (at, shape[axis] - at)):
        part = sketch.of_part(TensorPart(shape, tuple(start * (one == axis) for one in range(len(shape)))))
        states.append(part.update_all({}, xs.narrow(axis + 1, start, size)))
    laws.close(sketch.merge(*states), laws.run(sketch, xs.unbind()), rtol=1e-12, atol=1e-10)


def test_ranks_with_parts_have_the_sketch_of_the_whole() -> None:
    sketch, x = Sketch(64), torch.randn(6, 400, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    places = [Placement(rank, home=0, axes=2, parts=((0, rank, 2),)) for rank in (0, 1)]
    parts = [sketch.of_part(TensorPart((6, 400), (row, 0))).update({}, x[row : row + 3]) for row in (0, 3)]
    joined = join_parts(sketch, dict(zip(places, parts, strict=True)))
    assert joined is not None
    laws.close(joined, sketch.update({}, x))


def test_a_complex_part_and_one_in_a_graph() -> None:
    torch._dynamo.reset()
    sketch, x = Sketch(64), torch.view_as_complex(torch.randn(6, 50, 2, generator=torch.Generator().manual_seed(0)))
    parts = [sketch.of_part(TensorPart((6, 50), (0, column))) for column in (0, 20)]
    update = [torch.compile(parts[0].update, fullgraph=True, backend="aot_eager"), parts[1].update]
    laws.close(sketch.merge(update[0]({}, x[:, :20]), update[1]({}, x[:, 20:])), sketch.update({}, x))


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
