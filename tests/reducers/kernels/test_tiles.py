"""The tiles of a tensor and of the mask or weights that are read along with it reach each element once, whatever the strides."""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Callable, Iterator
from functools import partial
from random import Random

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from paths import ROOT
from torch import Tensor

from recorders.graphs.reading import MOST_LAYOUTS
from recorders.graphs.sinks import KEY
from recorders.graphs.trace import MOST_TENSORS
from reducers.errors import ArgumentError
from reducers.kernels.cpp.task import MOST_AXES, MOST_RESULTS
from reducers.kernels.triton import lanes, tiling
from reducers.kernels.triton.lanes import MOST_PARTS, LanePlan, cut_many, lane_plan
from reducers.kernels.triton.tiling import JOINED, TilePlan, join_tile, plan

DTYPES = (torch.float32, torch.bfloat16, torch.float64, torch.int64, torch.bool)
Place = tuple[int, int, int]  # kept position, offset in one tensor, offset in the other


shared_plan = partial(lane_plan, shared=True)


SIZES = (1, 2, 3, 7, 32, 33, 64, 511, 512, 513, 768, 1024, 4095, 4096, 50257, 2**20, 2**21 + 1, 2**27 + 3, 2**31, 2**33)


@st.composite
def big_tensors(draw: st.DrawFn) -> tuple[Tensor, Tensor | None, tuple[int, ...], bool]:
    """A tensor of up to 2^33 elements, a mask or weights or none, the axes to reduce, and whether all is computed in float64."""
    sizes, number = [], 1
    for _ in range(draw(st.integers(1, 4))):
        size = draw(st.sampled_from([size for size in SIZES if size * number <= 2**33]))
        sizes.append(size)
        number *= size
    order = draw(st.permutations(range(len(sizes))))
    dtype = draw(st.sampled_from(DTYPES))
    x = torch.empty([sizes[axis] for axis in order], dtype=dtype, device="meta")
    x = x.permute([order.index(axis) for axis in range(len(sizes))])
    if draw(st.booleans()):
        x = x[tuple(slice(None, None, draw(st.sampled_from((1, 1, 2)))) for _ in sizes)]
    if draw(st.integers(0, 4)) == 0:  # many elements in little memory
        x = x[:1].expand(x.shape)
    axes = tuple(sorted(draw(st.sets(st.sampled_from(range(len(sizes))), min_size=1))))
    other = None
    if draw(st.booleans()):
        expanded = [1 if draw(st.booleans()) else size for size in x.shape]
        other = torch.empty(expanded, dtype=torch.bool, device="meta").expand(x.shape)
    return x, other, axes, draw(st.booleans())


def placed(number: int, sizes: tuple[int, ...], *strides: tuple[int, ...]) -> list[int]:
    """The offsets of a position, given by its number, for each of the strides."""
    offsets = [0] * len(strides)
    for axis in reversed(range(len(sizes))):
        number, along = divmod(number, sizes[axis])
        offsets = [offset + along * stride[axis] for offset, stride in zip(offsets, strides, strict=True)]
    return offsets


def reached(tiles: TilePlan) -> Iterator[Place]:
    """What the kernels read, by the numbers that they are given."""
    _, run, run_stride, run_tiles, all_tiles, of_part, parts, *_ = tiles.arguments()
    inner, inner_stride, other_inner, other_run, *_ = tiles.other_arguments()
    step = tiles.rows // tiles.inner_rows
    for part, kept in itertools.product(range(parts), range(tiles.kept)):
        start = placed(kept, tiles.kept_sizes, tiles.kept_strides, tiles.other_kept_strides)
        for tile in range(part * of_part, min((part + 1) * of_part, all_tiles)):
            outer, along = divmod(tile, run_tiles)
            base = placed(outer, tiles.outer_sizes, tiles.outer_strides, tiles.other_outer_strides)
            for row in range(tiles.rows):
                position, within = along * step + row // tiles.inner_rows, row % tiles.inner_rows
                if position < run and within < inner:
                    first = start[0] + base[0] + position * run_stride + within * inner_stride
                    second = start[1] + base[1] + position * other_run + within * other_inner
                    yield kept, first, second


def elements(x: Tensor, other: Tensor, axes: tuple[int, ...]) -> Iterator[Place]:
    """The same by the shape."""
    shape = [size for axis, size in enumerate(x.shape) if axis not in axes]
    for index in itertools.product(*map(range, x.shape)):
        kept = 0
        for size, at in zip(shape, (at for axis, at in enumerate(index) if axis not in axes), strict=True):
            kept = kept * size + at
        offsets = [sum(at * stride for at, stride in zip(index, tensor.stride(), strict=True)) for tensor in (x, other)]
        yield kept, offsets[0], offsets[1]


@given(
    st.lists(st.sampled_from((1, 2, 3, 5, 9)), min_size=1, max_size=4),
    st.randoms(use_true_random=False),
    st.integers(1, 15),
    st.booleans(),
)
def test_each_element_is_reached_once_with_its_own_mask(sizes: list[int], random: Random, expanded: int, double: bool) -> None:
    order = random.sample(range(len(sizes)), len(sizes))
    axes = tuple(sorted(random.sample(range(len(sizes)), random.randint(1, len(sizes)))))
    x = torch.empty([sizes[axis] for axis in order], device="meta").permute([order.index(axis) for axis in range(len(sizes))])
    other = torch.empty([1 if expanded >> axis & 1 else size for axis, size in enumerate(sizes)], device="meta").expand(sizes)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tiling, "_TILE", 16)
        patch.setattr(tiling, "_MAX_PARTS", 3)
        patch.setattr(lanes, "_LANES", 4)
        patch.setattr(lanes, "_EACH", 8)
        for planned in (plan, lane_plan, shared_plan):
            tiles = planned(x, axes, other, double)
            assert tiles is not None
            assert sorted(reached(tiles)) == sorted(elements(x, other, axes)), planned


def lane_elements(tiles: LanePlan) -> list[tuple[int, int]]:
    """The row and the column of a tile that each element of each lane is, as the kernel numbers them."""
    near, across = tiles.lanes * tiles.vector, tiles.lanes * tiles.vector // tiles.columns
    if tiles.axis == 1:
        return [(piece * across + at % across, at // across) for at in range(near) for piece in range(tiles.unroll)]
    return [(piece * across + at // tiles.columns, at % tiles.columns) for at in range(near) for piece in range(tiles.unroll)]


@given(st.data())
def test_the_lanes_of_a_program_have_each_element_of_a_tile_once(data: st.DataObject) -> None:
    x, other, axes, double = data.draw(big_tensors())
    tiles = data.draw(st.sampled_from((lane_plan, shared_plan)))(x, axes, other, double)
    assert tiles is not None
    for number in (tiles.lanes, tiles.vector, tiles.unroll, tiles.columns, tiles.rows):
        assert number & (number - 1) == 0
    assert tiles.lanes <= 128
    assert sorted(lane_elements(tiles)) == sorted(itertools.product(range(tiles.rows), range(tiles.columns)))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64, torch.int8], ids=str)
def test_neighbours_in_memory_are_read_by_16_bytes(dtype: torch.dtype) -> None:
    """Of what is kept, a lane has few: each of them has sums of its own."""
    x = torch.empty(64, 512, 1024, dtype=dtype, device="meta")
    everything, features, samples = (lane_plan(x, axes) for axes in ((0, 1, 2), (0, 1), (1, 2)))
    assert everything is not None
    assert features is not None
    assert samples is not None
    assert everything.vector * dtype.itemsize == samples.vector * dtype.itemsize == 16
    assert features.vector == (4 if dtype.is_floating_point and dtype.itemsize <= 4 else 2)
    assert features.columns * dtype.itemsize >= 128
    shifted = lane_plan(torch.empty(64, 1023, dtype=dtype, device="meta")[:, 1:], (0, 1))  # whose rows begin anywhere
    assert shifted is not None
    assert shifted.vector == 1


def test_a_piece_does_not_reach_over_the_end_of_a_short_axis() -> None:
    """What follows there in memory is not the next element: here each token has four, of which two are reduced."""
    x = torch.empty(64, 4, device="meta")[:, :2]
    weights = torch.empty(64, 1, device="meta").expand(x.shape)
    for planned in (lane_plan, shared_plan):
        tiles = planned(x, (0, 1), weights)
        assert tiles is not None
        assert (tiles.inner_rows, tiles.vector) == (2, 2)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_weights_of_tokens_leave_most_tiles_full(dtype: torch.dtype) -> None:
    """Also if the number of features is not a power of two; and neighbours that share a weight are as many as without one."""
    shapes = {(0, 1, 2): (8, 512, 768), (1, 2): (8, 512, 768), (2,): (8, 512, 768), (0, 2): (64, 256, 3136)}
    for axes, shape in shapes.items():
        x, weights = torch.empty(shape, dtype=dtype, device="meta"), torch.empty(*shape[:-1], 1, device="meta")
        tiles = shared_plan(x, axes, weights.expand(shape))
        assert tiles is not None
        assert tiles.inner == tiles.inner_rows
        assert tiles.run % (tiles.rows // tiles.inner_rows) == 0
        assert (tiles.vector * dtype.itemsize, tiles.lanes) == (16, 128)
        assert tiles.unroll * tiles.vector >= 16


def test_a_mask_of_tokens_leaves_no_tile_small() -> None:
    """If the axes of a mask do not merge with those of the tensor, a tile still has as many elements as threads want."""
    for features in (16, 56, 64, 768, 1024):
        x = torch.empty(8, 512, features, device="meta")
        tiles = plan(x, (0, 1, 2), torch.empty(8, 512, 1, dtype=torch.bool, device="meta").expand(x.shape))
        assert tiles is not None
        assert tiles.rows * tiles.columns == 4096
        assert (tiles.inner, tiles.inner_stride) == (features, 1)


def test_a_mask_that_lies_as_the_tensor_changes_no_tile() -> None:
    x = torch.empty(8, 512, 64, device="meta")
    for axes in ((0, 1, 2), (0, 1), (1,), (2,)):
        assert plan(x, axes, torch.empty_like(x, dtype=torch.bool)) == plan(x, axes)


def test_a_mask_whose_offsets_need_64_bits_makes_both_wide() -> None:
    x, far = torch.empty(3, 4, device="meta"), torch.empty((), dtype=torch.bool, device="meta").as_strided((3, 4), (2**30, 1))
    near, both = plan(x, (0,)), plan(x, (0,), far)
    assert near is not None
    assert both is not None
    assert (near.wide, both.wide) == (False, True)


def test_axes_that_only_the_mask_keeps_apart_can_be_too_many() -> None:
    x = torch.empty([2] * 12, device="meta")
    mask = torch.empty([2, 1] * 6, dtype=torch.bool, device="meta").expand(x.shape)
    assert plan(x, tuple(range(12))) is not None
    assert plan(x, tuple(range(12)), mask) is None


@given(big_tensors(), st.sampled_from((plan, lane_plan, shared_plan)))
def test_no_plan_has_more_parts_than_are_joined(
    drawn: tuple[Tensor, Tensor | None, tuple[int, ...], bool], planned: Callable[..., TilePlan | None]
) -> None:
    """One program joins the parts of a column, all of them; and they hold every tile once."""
    x, other, axes, double = drawn
    tiles = planned(x, axes, other, double)
    assert tiles is not None
    rows, width = join_tile(tiles.parts, tiles.kept)
    assert tiles.parts <= rows <= JOINED
    assert rows * width <= JOINED
    run_tiles, all_tiles, of_part = tiles.arguments()[3:6]
    assert all_tiles == run_tiles * math.prod(tiles.outer_sizes)
    assert (tiles.parts - 1) * of_part < all_tiles <= tiles.parts * of_part  # no part is empty, and none is missing
    assert (run_tiles - 1) * (tiles.rows // tiles.inner_rows) < tiles.run <= run_tiles * (tiles.rows // tiles.inner_rows)
    assert tiles.inner <= tiles.inner_rows
    assert tiles.kept * tiles.run * tiles.inner * math.prod(tiles.outer_sizes) == x.numel()
    assert tiles.grid[0] * tiles.columns >= tiles.kept


@given(big_tensors(), st.sampled_from((plan, lane_plan, shared_plan)))
def test_no_number_in_a_kernel_is_too_big_for_its_type(
    drawn: tuple[Tensor, Tensor | None, tuple[int, ...], bool], planned: Callable[..., TilePlan | None]
) -> None:
    """Offsets, and numbers of tiles and positions, are of 32 bits unless the plan is wide; counts of a part always are."""
    x, other, axes, double = drawn
    tiles = planned(x, axes, other, double)
    assert tiles is not None
    strides = [*zip(tiles.kept_sizes, tiles.kept_strides, tiles.other_kept_strides, strict=True)]
    strides += zip(tiles.outer_sizes, tiles.outer_strides, tiles.other_outer_strides, strict=True)
    strides += [(tiles.run, tiles.run_stride, tiles.other_run_stride), (tiles.inner, tiles.inner_stride, tiles.other_inner_stride)]
    run_tiles, all_tiles, of_part = tiles.arguments()[3:6]
    numbers = [sum((axis[0] - 1) * axis[which] for axis in strides) for which in (1, 2)]
    numbers += [all_tiles + of_part, run_tiles * (tiles.rows // tiles.inner_rows), tiles.grid[0] * tiles.columns]
    assert tiles.wide or max(numbers) < 2**31
    assert of_part * tiles.rows < 2**31


@given(st.lists(st.integers(0, 2**33), min_size=1, max_size=20), st.sampled_from(DTYPES))
def test_no_tensor_of_many_has_more_parts_than_are_joined(lengths: list[int], dtype: torch.dtype) -> None:
    parts, cuts = cut_many(lengths, dtype)
    owners, firsts, sizes = (cuts[parts * part : parts * (part + 1)] for part in range(3))
    starts, numbers = cuts[3 * parts :][: len(lengths)], cuts[3 * parts :][len(lengths) :]
    assert max(numbers, default=0) <= MOST_PARTS <= JOINED
    assert sum(numbers) == parts
    for owner, (length, start, number) in enumerate(zip(lengths, starts, numbers, strict=True)):
        own = slice(start, start + number)
        assert owners[own] == [owner] * number
        ends = [first + size for first, size in zip(firsts[own], sizes[own], strict=True)]
        assert [*firsts[own], length] == [0, *ends]
        assert max(sizes[own], default=0) < 2**31


def test_what_has_too_many_parts_is_not_joined() -> None:
    """Such a table is of no plan; without the check half of it would be left out."""
    with pytest.raises(ArgumentError, match="513 parts cannot be joined: a program joins at most 512"):
        join_tile(JOINED + 1, 1)


def test_the_source_of_the_loop_has_the_limits_that_python_has() -> None:
    """They are arrays there, and lengths of them here."""
    source = "".join(
        path.read_text() for path in (ROOT / "reducers/kernels/cpp/partition.h", ROOT / "recorders/graphs/reading.cpp")
    )
    for told in (f"MOST_AXES = {MOST_AXES};", f"MOST_RESULTS = {MOST_RESULTS};", f"layout[{MOST_LAYOUTS}];", f"key[{KEY}];"):
        assert told in source, told
    (most,) = re.findall(r"MOST_TENSORS = (\d+);", source)
    assert int(most) >= MOST_TENSORS
