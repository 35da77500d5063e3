"""The tiles of a tensor and of the mask or weights that are read along with it reach each element once, whatever the strides."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from random import Random

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from reducers.kernels.triton import layout
from reducers.kernels.triton.layout import Plan, plan

Place = tuple[int, int, int]  # kept position, offset in one tensor, offset in the other


def placed(number: int, sizes: tuple[int, ...], *strides: tuple[int, ...]) -> list[int]:
    """The offsets of a position, given by its number, for each of the strides."""
    offsets = [0] * len(strides)
    for axis in reversed(range(len(sizes))):
        number, along = divmod(number, sizes[axis])
        offsets = [offset + along * stride[axis] for offset, stride in zip(offsets, strides, strict=True)]
    return offsets


def reached(tiles: Plan) -> Iterator[Place]:
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
        patch.setattr(layout, "_TILE", 16)
        patch.setattr(layout, "_MAX_PARTS", 3)
        tiles = plan(x, axes, other, double)
    assert tiles is not None
    assert sorted(reached(tiles)) == sorted(elements(x, other, axes))


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
