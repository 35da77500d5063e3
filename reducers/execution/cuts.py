"""Plans how many small tensors become the rows of few matrices: those of one length as they are, others cut into pieces."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from functools import lru_cache
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from reducers.kernels.chunks import BIG, CHUNK

MIN_ROWS = 4  # fewer tensors of one length are lifted as fast one by one
MANY_ROWS = 16  # tensors of one length that are worth a matrix of their own, however many other lengths there are
MIN_CUT = 64  # so many tensors of rare lengths are cut into pieces; fewer are lifted as fast by their lengths
MATRIX = 2 * CHUNK  # elements of a matrix: fewer take more calls, and more leave the cache
MOST_CUT = 1 << 21  # elements that are cut together, because all of them are copied


class Pieces(NamedTuple):
    """Tensors of many lengths, cut into pieces whose lengths are powers of two. All pieces of one length make a matrix.

    Attributes:
        positions: the tensors, in the order in which they are laid end to end.
        matrices: the length of the pieces of each matrix, and where each piece begins.
        levels: how the states of the pieces are joined, level by level: the rows on the left, those on the right, and those that
            are not joined at this level. The next level has the joined rows first. In the end there is one row for each tensor.
        order: the tensor of each row in the end.
    """

    positions: tuple[int, ...]
    matrices: list[tuple[int, array[int]]]
    levels: list[tuple[array[int], array[int], array[int]]]
    order: list[int]


class RowPlan(NamedTuple):
    """Which tensors become the rows of which matrix.

    Attributes:
        matrices: the tensors of each matrix, which have one length.
        pieces: the tensors that are cut into pieces.
        single: the tensors that are lifted one by one.
        inverse: for each tensor its row, if the rows of all matrices, then of all pieces, then the single ones follow each other;
            None if they are in the order of the tensors.
    """

    matrices: list[tuple[int, ...]]
    pieces: list[Pieces]
    single: list[int]
    inverse: array[int] | None


def int_tensor(values: Sequence[int], device: torch.device) -> Tensor:
    """Return the integers as a tensor on `device`, without synchronising it. On the CPU it shares the memory of an `array`."""
    if isinstance(values, array) and device.type == "cpu" and values:
        return torch.frombuffer(values, dtype=torch.int64)
    return torch.tensor(list(values), dtype=torch.int64, device="cpu").to(device, non_blocking=True)


@lru_cache(maxsize=64)
def plan_rows(lengths: tuple[int, ...]) -> RowPlan:
    """Return the plan for tensors with these numbers of elements, which are not 0."""
    by_length: dict[int, list[int]] = {}
    single: list[int] = []
    for position, length in enumerate(lengths):
        (single if length >= BIG else by_length.setdefault(length, [])).append(position)
    rare = {length: positions for length, positions in by_length.items() if len(positions) < MANY_ROWS}
    cut = sum(map(len, rare.values())) >= MIN_CUT
    matrices: list[tuple[int, ...]] = []
    for length, positions in by_length.items():
        if cut and length in rare:
            continue
        if len(positions) < MIN_ROWS:
            single += positions
        else:
            matrices += _split_evenly(positions, max(MIN_ROWS, MATRIX // length))
    pieces = [_cut(part, lengths) for part in _batches(rare, MOST_CUT)] if cut else []
    order = [position for part in [*matrices, *(some.order for some in pieces), single] for position in part]
    inverse = array("q", [0] * len(order))
    for place, position in enumerate(order):
        inverse[position] = place
    return RowPlan(matrices, pieces, single, None if order == sorted(order) else inverse)


def _split_evenly(positions: Sequence[int], most: int) -> list[tuple[int, ...]]:
    """Return parts of at most `most` positions, whose sizes differ by at most 1, so that no part has too few rows."""
    count = -(-len(positions) // most)
    borders = [len(positions) * part // count for part in range(count + 1)]
    return [tuple(positions[start:stop]) for start, stop in pairwise(borders)]


def _batches(by_length: dict[int, list[int]], most: int) -> list[tuple[int, ...]]:
    """Return the positions in batches of about `most` elements. Tensors of one length are in one batch."""
    batches: list[tuple[int, ...]] = []
    batch: list[int] = []
    elements = 0
    for length, positions in by_length.items():
        batch += positions
        elements += length * len(positions)
        if elements >= most:
            batches.append(tuple(sorted(batch)))
            batch, elements = [], 0
    return [*batches, tuple(sorted(batch))] if batch else batches


def _cut(positions: tuple[int, ...], lengths: tuple[int, ...]) -> Pieces:
    """Cut each tensor as the binary digits of its length say: 11 elements are a piece of 8, one of 2 and one of 1."""
    starts: dict[int, list[tuple[int, int]]] = {}  # by the length of a piece: the tensor, and where the piece begins
    start = 0
    for position in positions:
        rest = lengths[position]
        while rest:
            width = 1 << (rest.bit_length() - 1)
            starts.setdefault(width, []).append((position, start))
            start, rest = start + width, rest - width
    rows: dict[int, list[int]] = {position: [] for position in positions}  # of the pieces of each tensor
    matrices, count = [], 0
    for width in sorted(starts, reverse=True):
        parts = _split_evenly([start for _, start in starts[width]], max(1, MATRIX // width))
        matrices += [(width, array("q", part)) for part in parts]
        for position, _ in starts[width]:
            rows[position].append(count)
            count += 1
    return Pieces(positions, matrices, *_levels(rows))


def _levels(rows: dict[int, list[int]]) -> tuple[list[tuple[array[int], array[int], array[int]]], list[int]]:
    """Return how the rows of each tensor are joined, and the order of the tensors in the end."""
    levels = []
    while any(len(mine) > 1 for mine in rows.values()):
        left, right, kept = array("q"), array("q"), array("q")
        joined: dict[int, int] = {}  # how many pairs of each tensor
        for position, mine in rows.items():
            pairs = len(mine) // 2
            joined[position] = pairs
            left.extend(mine[: 2 * pairs : 2])
            right.extend(mine[1 : 2 * pairs : 2])
            kept.extend(mine[2 * pairs :])
        levels.append((left, right, kept))
        first, last = iter(range(len(left))), iter(range(len(left), len(left) + len(kept)))
        rows = {
            position: [next(first) for _ in range(joined[position])] + [next(last) for _ in range(len(mine) % 2)]
            for position, mine in rows.items()
        }
    return levels, sorted(rows, key=lambda position: rows[position][0])
