"""`Digest`: what differs, what is equal, on which ways the bits are read, and ranks and files."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import reduce
from pathlib import Path

import laws
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from world import Place, World, alike

from recorders import ForwardMonitor, Recorder, Recording, Subrecording, load
from recorders.recordings.distributed.merge import join_parts
from recorders.recordings.distributed.placement import Placement
from recorders.recordings.distributed.sync import sync
from reducers import (
    ArgumentError,
    Collect,
    Digest,
    Masked,
    PerObservation,
    Product,
    Reducer,
    ReducerTypeError,
    State,
    StateError,
    StateMismatchError,
    Summary,
    TensorPart,
    from_recipe,
    to_recipe,
)
from reducers.kernels import digests
from reducers.kernels.cpp import library
from reducers.kernels.hashing import words_of
from reducers.statistics import digest as file
from reducers.statistics.digest import digest_of

DIGEST = Digest()
FLOATS = (torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.float8_e5m2, torch.float8_e4m3fn)
OTHERS = (
    *(torch.bool, torch.uint8, torch.int8, torch.int16, torch.uint16, torch.int32, torch.uint32, torch.int64, torch.uint64),
    *(torch.complex64, torch.complex128, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz),
)
SHAPES = ((), (1,), (7,), (3, 5, 7), (1023,), (1024,), (4097,), (33, 700))


def of(*xs: Tensor) -> int:
    return int(DIGEST.compute(laws.run(DIGEST, xs))["digest"])


def draw(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    x = torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * 3
    return x.abs().to(dtype) if dtype in (torch.bool, torch.uint8, torch.uint16, torch.uint32, torch.uint64) else x.to(dtype)


@pytest.fixture(params=[True, False], ids=["loop", "calls"])
def loops(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """With and without the loops in C++."""
    if not request.param:
        monkeypatch.setattr(digests, "looped_digests", lambda *_: None)


# What is equal


@pytest.mark.skipif(not library.in_order(), reason="no C++ compiler")
@pytest.mark.parametrize("dtype", [*FLOATS, *OTHERS], ids=str)
def test_the_loop_and_calls_give_the_same_bits(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    xs = [draw(*shape, dtype=dtype) for shape in SHAPES]
    if dtype.is_floating_point or dtype.is_complex:
        for x in xs[2:]:
            x.view(-1)[1] = math.nan
            x.view(-1)[-1] = -math.nan
    wanted = [of(x) for x in xs]
    monkeypatch.setattr(digests, "looped_digests", lambda *_: None)
    assert [of(x) for x in xs] == wanted
    monkeypatch.setattr(digests, "has_memory", lambda _: False)  # as in vmap, where no bits are seen as words
    monkeypatch.setattr(file, "can_read_values", lambda _: False)
    assert [of(x) for x in xs] == wanted
    assert len({*wanted}) == len(xs)


@pytest.mark.usefixtures("loops")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.complex64], ids=str)
def test_strides_do_not_count(dtype: torch.dtype) -> None:
    x = draw(3, 40, 50, dtype=dtype)
    wide = torch.zeros(3, 40, 100, dtype=dtype)
    wide[..., ::2] = x
    turned = x.permute(2, 0, 1).contiguous().permute(1, 2, 0)
    offset = torch.cat((x.reshape(-1)[:1], x.reshape(-1)))[1:].view_as(x)  # which begins within a word
    assert {of(one) for one in (x, wide[..., ::2], turned, offset, x[0:].clone())} == {of(x)}
    row = draw(50, dtype=dtype)
    assert of(row.expand(7, 50)) == of(row.repeat(7, 1))


@pytest.mark.usefixtures("loops")
@pytest.mark.parametrize("shape", [(700, 1000), (1, 1, 999, 777), (3, 3, 300_001), (2048, 4, 128)], ids=str)
def test_strides_of_big_ones_do_not_count(shape: tuple[int, ...]) -> None:
    x = draw(*shape)
    turned = x.permute(*reversed(range(x.ndim))).contiguous().permute(*reversed(range(x.ndim)))
    assert not turned.is_contiguous()
    assert of(turned) == of(x)


@pytest.mark.parametrize("threads", [1, 2, 3])
def test_threads_do_not_count(threads: int) -> None:
    x = torch.arange(300_001) * 0.1
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(threads)
        assert of(x) == 9091291835380955024
    finally:
        torch.set_num_threads(before)


def test_lazy_conjugates_and_signs_are_resolved() -> None:
    x = draw(5, dtype=torch.complex64)
    assert of(x.conj()) == of(x.conj().resolve_conj()) != of(x)
    assert of(x.conj().imag) == of(x.conj().imag.resolve_neg())


@pytest.mark.usefixtures("loops")
def test_observations_of_one_shape_together_are_those_one_after_another() -> None:
    xs = draw(96, 4, 5)
    before = DIGEST.update({}, draw(3))
    laws.same_bits(DIGEST.update_all(before, xs), laws.run(DIGEST, xs.unbind(), before))


def test_of_a_hundred_observations_without_a_look_at_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    xs = draw(100, 6)
    wanted = laws.run(DIGEST, xs.unbind())
    monkeypatch.setattr(digests, "looped_digests", lambda *_: None)
    monkeypatch.setattr(file, "can_read_values", lambda _: False)
    laws.same_bits(DIGEST.update_all({}, xs), wanted)
    laws.same_bits(laws.run(DIGEST, xs.unbind()), wanted)


@pytest.mark.slow
@pytest.mark.parametrize("dynamic", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64], ids=str)
def test_compiled_for_the_processor(dtype: torch.dtype, dynamic: bool) -> None:
    torch._dynamo.reset()
    update = torch.compile(DIGEST.update, fullgraph=True, dynamic=dynamic)
    state: State = {}
    for size in (3, 2000, 17):
        state = update(state, draw(size, 3, dtype=dtype))
    laws.same_bits(state, laws.run(DIGEST, [draw(size, 3, dtype=dtype) for size in (3, 2000, 17)]))


PAIRS = st.tuples(st.integers(0, 2**64 - 1), st.integers(0, 2**64 - 1))


@given(a=PAIRS, b=PAIRS, c=PAIRS)
def test_pairs_of_words_are_a_ring(a: tuple[int, int], b: tuple[int, int], c: tuple[int, int]) -> None:
    product = file._times(a, b)
    assert file._products(words_of(a), words_of(b)).tolist() == words_of(product).tolist()
    assert file._times(b, a) == product
    assert file._times(product, c) == file._times(a, file._times(b, c))
    assert file._times(a, (1, 0)) == a
    assert file._times((0, 1), file._times((0, 1), (0, 1))) == (1, 0)  # a root of 1


@pytest.mark.parametrize("number", [0, 1, 2, 3, 7, 64, 1000])
def test_powers_of_the_factor(number: int) -> None:
    found = (1, 0)
    for _ in range(number):
        found = file._times(found, file._FACTOR)
    assert file._power(number) == found


# What differs


@pytest.mark.usefixtures("loops")
@settings(max_examples=100)
@given(data=st.data())
def test_any_bit_counts(data: st.DataObject) -> None:
    size = data.draw(st.integers(1, 3000))
    dtype = data.draw(st.sampled_from((torch.int64, torch.int32, torch.int16, torch.uint8)))
    bits = draw(size, dtype=torch.float64).mul(1e6).to(torch.int64).to(dtype)
    place, bit = data.draw(st.integers(0, size - 1)), data.draw(st.integers(0, 8 * dtype.itemsize - 1))
    other = bits.clone()
    other.view(torch.uint8)[place * dtype.itemsize + bit // 8] ^= 1 << bit % 8
    assert of(bits) != of(other)
    if dtype is torch.int32:
        a, b = bits.view(torch.float32), other.view(torch.float32)
        assert of(a) != of(b) or (a.isnan() == b.isnan()).all()


@pytest.mark.usefixtures("loops")
@settings(max_examples=50)
@given(seed=st.integers(0, 2**31), size=st.integers(2, 2500))
def test_order_counts(seed: int, size: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(size, generator=generator)
    order = torch.randperm(size, generator=generator)
    assert (of(x[order]) == of(x)) == torch.equal(x[order], x)
    pair = torch.randperm(size, generator=generator)[:2]
    swapped = x.clone()
    swapped[pair] = x[pair.flip(0)]
    assert of(swapped) != of(x)


ALIKE: dict[str, Callable[[], list[Tensor]]] = {  # what a hash that adds, or xors, or has one weight a place, does not tell apart
    "pairs": lambda: [torch.tensor(some) for some in ([1.0, 1.0, 2.0], [3.0, 3.0, 2.0], [2.0, 1.0, 1.0], [2.0, 0.0, 0.0])],
    "zeros": lambda: [torch.zeros(size) for size in (1, 2, 3, 1024, 2048, 2049)],
    "a one among zeros": lambda: [*torch.eye(3000)[::7]],
    "signs of two": lambda: [torch.ones(2049).index_fill(0, torch.tensor([0, other]), -1) for other in range(1, 2049, 13)],
    "signs of two in float64": lambda: [
        torch.ones(2049, dtype=torch.float64).index_fill(0, torch.tensor([0, other]), -1) for other in range(1, 2049, 13)
    ],
    "signs of many": lambda: [torch.where(torch.arange(4096) // run % 2 == 0, 1.0, -1.0) for run in (1, 2, 4, 8, 64, 1024, 2048)],
    "blocks in another order": lambda: [
        torch.arange(3 * 2048.0).reshape(3, -1)[list(order)] for order in ((0, 1, 2), (1, 0, 2), (2, 1, 0))
    ],
    "equal blocks": lambda: [torch.ones(2048 * blocks) for blocks in (1, 2, 3, 4)],
    "Thue and Morse": lambda: [thue_morse(12).double() * sign for sign in (1, -1)],
    "shapes": lambda: [torch.zeros(shape) for shape in ((), (1,), (1, 1), (6,), (2, 3), (3, 2), (1, 6), (6, 1))],
    "dtypes": lambda: [torch.zeros(8, dtype=dtype) for dtype in (*FLOATS, *OTHERS)],
    "views of the same bytes": lambda: [draw(8).view(dtype) for dtype in (torch.float32, torch.int32, torch.uint32)],
}


def thue_morse(doublings: int) -> Tensor:
    """-1 and 1 in the order of Thue and Morse, which a polynomial modulo a power of 2 does not tell from its complement."""
    found = torch.tensor([1])
    for _ in range(doublings):
        found = torch.cat((found, -found))
    return found


@pytest.mark.usefixtures("loops")
@pytest.mark.parametrize("name", ALIKE)
def test_what_naive_hashes_confuse(name: str) -> None:
    found = [of(x) for x in ALIKE[name]()]
    assert len({*found}) == len(found)


def test_what_naive_hashes_confuse_of_many_observations() -> None:
    a, b = torch.tensor([1.0]), torch.tensor([2.0])
    order = thue_morse(11).tolist()
    streams = [[a, a, b], [b, b, b], [a, b, a], [b, a, a], [a, b], [a], [torch.tensor([1.0, 2.0])]]
    streams += [[a if sign == one else b for sign in order] for one in (1, -1)]
    assert len({of(*xs) for xs in streams}) == len(streams)


def test_random_tensors_of_few_bits_do_not_collide() -> None:
    """Of 2**17 tensors of two elements, whose hashes must spread over at least 2**40 values to be apart."""
    generator = torch.Generator().manual_seed(0)
    xs = torch.unique(torch.randint(0, 2**15, (2**17, 2), generator=generator, dtype=torch.int16), dim=0)
    hashes = digests.digests(xs)
    assert isinstance(hashes, list)
    found = file.digest_of(words_of(hashes).view(-1, 2))
    for shift in (0, 20):  # the low bits, and others
        parts = (found >> shift) & (2**40 - 1)
        assert len(torch.unique(parts)) > len(xs) - 5


def test_bits_of_a_digest_are_even() -> None:
    found = torch.as_tensor([of(torch.tensor([number])) for number in range(2000)])
    share = torch.stack([(found >> bit & 1).double().mean() for bit in range(63)])
    assert (share - 0.5).abs().max() < 5 * 0.5 / math.sqrt(2000)


# Zeros and NaN


@pytest.mark.usefixtures("loops")
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_signs_of_zero_count_and_all_nans_are_one(dtype: torch.dtype) -> None:
    assert of(torch.tensor([0.0]).to(dtype)) != of(torch.tensor([-0.0]).to(dtype))
    size = dtype.itemsize
    kind = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[size]
    magnitude, highest, nan = digests.NANS[dtype]
    sign = -(1 << 8 * size - 1) if size > 1 else 128
    patterns = [highest + 1, magnitude, nan, highest + 1 + sign, magnitude + sign, nan + sign]
    found = []
    for pattern in patterns:
        x = torch.ones(2100, dtype=dtype)
        x.view(kind)[2050] = pattern
        assert int(x.float().isnan().sum()) == 1
        found.append(of(x))
    assert len({*found}) == 1
    x.view(kind)[2050] = highest
    assert not x.float().isnan().any()
    assert of(x) != found[0]
    x.view(kind)[[2050, 2049]] = torch.tensor([highest, nan], dtype=kind)
    assert of(x) != found[0]


# Around it


def test_what_is_no_state_is_refused() -> None:
    state = DIGEST.update({}, torch.ones(2))
    DIGEST.check(state)
    for wrong in ({"digest": state["digest"]}, {**state, "factor": torch.ones(2)}, {**state, "more": torch.ones(1)}):
        with pytest.raises(StateError):
            DIGEST.check(wrong)
    with pytest.raises(StateMismatchError):
        DIGEST.merge(state, {"digest": state["digest"]})


def test_observations_are_taken_whole() -> None:
    with pytest.raises(ReducerTypeError, match="whole"):
        Masked(DIGEST).update({}, torch.ones(3), torch.ones(3) > 0)


def test_one_of_each_observation_beside_other_statistics() -> None:
    xs = [draw(3), draw(5), draw(3)]
    product = Product(each=PerObservation(DIGEST, Collect()), all=Summary())
    result = product.compute(laws.run(product, xs))["each"]["digest"]  # type: ignore[index]
    assert result.tolist() == [of(x) for x in xs]


@pytest.fixture
def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3))


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_in_a_compiled_net_it_is_that_of_the_net(net: nn.Sequential, backend: str) -> None:
    torch._dynamo.reset()
    xs = [draw(size, 4, seed=size) for size in (5, 5, 2)]
    outputs = []
    with Recorder(ForwardMonitor(DIGEST)).modules(net, types=nn.Linear) as recorder:
        compiled = torch.compile(net, fullgraph=True, backend=backend)
        outputs = [compiled(x) for x in xs]
    assert int(recorder["2"].peek()["digest"]) == of(*outputs)


def test_a_filter_and_a_file(net: nn.Sequential, tmp_path: Path) -> None:
    xs = [draw(size, 4, seed=size) for size in (5, 2, 6)]
    seen = [net[:2](x).detach() for x in xs]
    monitor = ForwardMonitor(DIGEST, filter_=lambda output, *_: len(output) > 3)
    with Recorder(monitor).modules(net, types=nn.ReLU) as recorder:
        for x in xs[:2]:
            net(x)
        recorder.save(tmp_path / "first")
        net(xs[2])
        recorder.save(tmp_path / "both")
    assert int(load(tmp_path / "both")["1"].peek()["digest"]) == of(seen[0], seen[2])
    first = load(tmp_path / "first")["1"]
    state = DIGEST.update(first.states[""], seen[2])
    assert int(DIGEST.compute(state)["digest"]) == of(seen[0], seen[2])


def observed(place: Place) -> dict[str, int]:
    rank, group = place
    found = Recording({"x": Subrecording(DIGEST, {"": laws.run(DIGEST, [draw(3, seed=rank), draw(2, seed=rank + 7)])}, 2)})
    return {name: int(value) for name, value in sync(found, group)["x"].peek().items()}


def test_ranks_merge_in_order(world: World) -> None:
    wanted = of(*(x for rank in (0, 1) for x in (draw(3, seed=rank), draw(2, seed=rank + 7))))
    assert alike(world.run(observed, ranks=(0, 1))) == {"digest": wanted, "observations": 4}


# Parts


def cut(x: Tensor, at: int, axis: int) -> list[tuple[tuple[int, ...], Tensor]]:
    """Two parts of a tensor, each with the index at which it begins."""
    start = [0] * x.ndim
    start[axis] = at
    sizes = (at, x.shape[axis] - at)
    return [(tuple(begin), part) for begin, part in zip(([0] * x.ndim, start), x.split(sizes, axis), strict=True) if part.numel()]


@pytest.mark.usefixtures("loops")
@settings(max_examples=60)
@given(data=st.data())
def test_parts_of_a_tensor_add_up_to_the_whole(data: st.DataObject) -> None:
    dtype = data.draw(st.sampled_from((*FLOATS, torch.uint8, torch.int64, torch.complex64)))
    shape = tuple(data.draw(st.lists(st.integers(1, 40), min_size=1, max_size=4)))
    x = draw(*shape, dtype=dtype, seed=data.draw(st.integers(0, 9)))
    if dtype.is_floating_point:
        x.view(-1)[:: data.draw(st.integers(1, 50))] = math.nan
    pieces = [((0,) * x.ndim, x)]
    for axis in data.draw(st.lists(st.integers(0, x.ndim - 1), max_size=4)):
        pieces = [
            (tuple(map(sum, zip(start, more, strict=True))), small)
            for start, piece in pieces
            for more, small in cut(piece, data.draw(st.integers(0, piece.shape[axis])), axis)
        ]
    states = [DIGEST.of_part(TensorPart(shape, start)).update({}, piece) for start, piece in pieces]
    laws.same_bits(reduce(DIGEST.join_parts, states), DIGEST.update({}, x))


@pytest.mark.usefixtures("loops")
@pytest.mark.parametrize("axis", [0, 1])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_big_parts_of_several_observations(axis: int, dtype: torch.dtype) -> None:
    xs = draw(3, 301, 1111, dtype=dtype)
    states = []
    for start, part in cut(xs[0], 100, axis):
        pieces = xs.narrow(axis + 1, start[axis], part.shape[axis])
        states.append(DIGEST.of_part(TensorPart((301, 1111), start)).update_all({}, pieces))
    laws.same_bits(DIGEST.join_parts(states[0], states[1]), laws.run(DIGEST, xs.unbind()))


def test_parts_in_a_graph() -> None:
    torch._dynamo.reset()
    x = draw(6, 5)
    parts = [DIGEST.of_part(TensorPart((6, 5), start)) for start, _ in cut(x, 2, 0)]
    found = [
        torch.compile(one.update, fullgraph=True, backend="aot_eager")({}, piece)
        for one, (_, piece) in zip(parts, cut(x, 2, 0), strict=True)
    ]
    laws.same_bits(DIGEST.join_parts(found[0], found[1]), DIGEST.update({}, x))


def test_each_part_is_a_part_of_the_whole() -> None:
    for wrong in (((2, 3), (0,)), ((2, 3), (0, 3)), ((2, 3), (-1, 0)), ((2.0, 3), (0, 0)), (2, 3), ((1 << 40, 1 << 20), (0, 0))):
        with pytest.raises(ArgumentError, match="the shape of the whole tensor and the index"):
            Digest(wrong)  # type: ignore[arg-type]
    digest = from_recipe(to_recipe(Digest(TensorPart((4, 3), (2, 0)))))
    assert digest == Digest(TensorPart((4, 3), (2, 0)))
    for x in (draw(3, 3), draw(6), draw(2, 4)):
        with pytest.raises(ArgumentError, match=r"which is no part of a tensor of shape \(4, 3\) from \(2, 0\) on"):
            digest.update({}, x)
    parts = [DIGEST.of_part(TensorPart((4, 3), (row, 0))) for row in (0, 2)]
    states = [laws.run(part, [draw(2, 3)] * number) for number, part in enumerate(parts, 1)]
    with pytest.raises(StateMismatchError, match="of one part there were 1 observations, of another 2"):
        DIGEST.join_parts(states[0], states[1])


@pytest.mark.parametrize("reducer", [DIGEST, Product(bits=DIGEST, rest=Summary())], ids=repr)
def test_ranks_with_parts_have_the_digest_of_the_whole(reducer: Reducer) -> None:
    x = draw(6, 4)
    places = [Placement(rank, home=0, axes=2, parts=((0, rank, 2),)) for rank in (0, 1)]
    parts = zip(places, cut(x, 3, 0), strict=True)
    states = {place: reducer.of_part(TensorPart((6, 4), start)).update({}, part) for place, (start, part) in parts}
    joined = join_parts(reducer, states)
    assert joined is not None
    laws.close(joined, reducer.update({}, x))


def test_the_digest_of_one_state_is_that_of_several_at_once() -> None:
    words = torch.randint(-(2**63), 2**63 - 1, (200, 2))
    words = torch.cat((words, torch.tensor([[0, 0], [-1, -1], [-(2**63), 2**63 - 1]])))
    several = digest_of(words)
    assert torch.equal(several, torch.stack([digest_of(one) for one in words]))
    assert torch.equal(several, torch.vmap(digest_of)(words))
    assert bool((several >= 0).all())
