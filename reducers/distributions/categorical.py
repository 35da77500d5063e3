"""Counts of integers such as token ids or expert indices: per value, of the most frequent values, of distinct values."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from reducers.core.fields import Add, Field, Greatest
from reducers.core.reducer import check_size
from reducers.core.statistic import Statistic
from reducers.errors import ArgumentError, DTypeError
from reducers.kernels.binning import bin_counts, kept_shape, unit_count, unit_index
from reducers.kernels.chunks import pieces
from reducers.kernels.hashing import integers, mix, shift_right
from reducers.kernels.precision import count_of, real
from reducers.state import Result, State


@dataclass(frozen=True)
class CountByValue(Statistic):
    """Number of occurrences of each integer from 0 to `values - 1`; all other integers are counted together.

    Args:
        values: number of distinct values, such as the size of the vocabulary or the number of experts.

    Returns:
        `counts`: int64, of shape `(*kept axes, values)`; `outside`: int64, in the shape of the kept axes, the number of elements
        below 0, or `values` and above.

    Raises:
        ArgumentError: `values` is not a positive integer.
        DTypeError: the input is not an integer tensor.

    >>> import torch
    >>> experts = CountByValue(values=3)
    >>> experts.compute(experts.update({}, torch.tensor([[0, 2], [2, -1]])))
    {'counts': tensor([1, 0, 2]), 'outside': tensor(1)}
    """

    fields: ClassVar[Mapping[str, Field]] = {"counts": Add()}

    counts_nonfinite: ClassVar[bool] = False  # integers are finite

    values: int = 2

    def __post_init__(self) -> None:
        super().__post_init__()
        check_size(self, "values")

    @property
    def divisible(self) -> bool:
        return False  # lift splits the tensor itself, and its pieces share one array of counts

    def lift(self, x: Tensor, axes: tuple[int, ...]) -> State:
        return {"counts": bin_counts(_check_integers(x, "CountByValue"), axes, self.values + 1, self._bin)}

    def lift_masked(self, x: Tensor, mask: Tensor, axes: tuple[int, ...]) -> State:
        counts = self.lift(_mask_as_outside(x, mask, "CountByValue"), axes)["counts"]
        outside = counts[..., -1] - (~mask).sum(dim=axes)
        return {"counts": torch.cat((counts[..., :-1], outside.unsqueeze(-1)), dim=-1)}

    def _bin(self, x: Tensor) -> Tensor:
        x = integers(x)
        return torch.where((x >= 0) & (x < self.values), x, self.values)

    def read(self, state: State) -> Result:
        return {"counts": state["counts"][..., :-1].clone(), "outside": state["counts"][..., -1].clone()}


@dataclass(frozen=True)
class DistinctCount(Statistic):
    """Estimated number of distinct integers (HyperLogLog); it does not depend on batch splits, order or repetition.

    Each integer is hashed to 64 bits: `bits` of them select a register, which keeps the largest rank of the first set bit among
    46 others. Merging takes the maximum of each register, so the merged state equals that of one pass over all data.

    Args:
        bits: 2**bits registers, 4 to 18. The relative standard error is `1.04 / sqrt(2**bits)`: 1.6 % with 12 bits, 0.8 % with
            14; memory is 2**bits bytes per kept position.

    Returns:
        float64, in the shape of the kept axes: an estimate, nearly exact while few registers are in use.

    Raises:
        ArgumentError: `bits` is not an integer from 4 to 18.
        DTypeError: the input is not an integer tensor.

    Reference: Flajolet, Fusy, Gandouet and Meunier, "HyperLogLog", AofA 2007. The estimator, valid for all sizes without tables:
    Ertl, "New cardinality estimation algorithms for HyperLogLog sketches", 2017 (arXiv:1702.01284), algorithm 6.

    >>> import torch
    >>> distinct = DistinctCount()
    >>> round(distinct.compute(distinct.update({}, torch.arange(3000) % 1000)).item())
    997
    """

    fields: ClassVar[Mapping[str, Field]] = {"ranks": Greatest()}

    counts_nonfinite: ClassVar[bool] = False

    bits: int = 12

    def __post_init__(self) -> None:
        super().__post_init__()
        check_size(self, "bits", 4, 18)

    @property
    def divisible(self) -> bool:
        return False  # lift splits the tensor itself, and its pieces share the registers

    def lift(self, x: Tensor, axes: tuple[int, ...]) -> State:
        x = _check_integers(x, "DistinctCount")
        registers = 1 << self.bits
        units = unit_index(x, axes) << self.bits
        ranks = x.new_zeros(unit_count(x, axes) * registers, dtype=torch.int32)
        for piece in pieces(x, axes):
            hashed = mix(integers(piece), 1)
            rank = _trailing_zeros(hashed, _RANKS) + 1
            register = shift_right(hashed, 64 - self.bits) + units
            ranks.scatter_reduce_(0, register.reshape(-1), rank.reshape(-1), "amax")
        return {"ranks": ranks.to(torch.uint8).reshape(*kept_shape(x, axes), registers)}

    def lift_masked(self, x: Tensor, mask: Tensor, axes: tuple[int, ...]) -> State:
        x = integers(_check_integers(x, "DistinctCount"))
        # repetition does not change the state, so masked elements are replaced by an unmasked one
        unmasked = torch.where(mask, x, torch.iinfo(torch.int64).min).amax(dim=axes, keepdim=True)
        ranks = self.lift(torch.where(mask, x, unmasked), axes)["ranks"]
        return {"ranks": torch.where(mask.any(dim=axes).unsqueeze(-1), ranks, 0)}

    def read(self, state: State) -> Tensor:
        ranks = state["ranks"]
        registers = 1 << self.bits
        counts = real(torch.stack([(ranks == rank).sum(-1) for rank in range(_RANKS + 2)]))
        total = registers * _tau(1 - counts[-1] / registers)
        for rank in range(_RANKS, 0, -1):
            total = (total + counts[rank]) / 2
        total = total + registers * _sigma(counts[0] / registers)
        return registers * registers / (2 * math.log(2)) / total


@dataclass(frozen=True)
class HeavyHitters(Statistic):
    """The most frequent integers of a large range, from a sketch that merges by addition.

    Each of `depth` rows hashes every integer to one of `width` cells. A cell counts its integers and, per binary digit, those
    with the digit set. If an integer makes up more than half of a cell in some row, its digits are read from that cell, so
    merging never has to truncate a list of candidates. The estimated count is the minimum over the rows and never too low.

    For n elements, an estimate is too high by more than `2 n / width` with probability below `2**-depth`. An integer that occurs
    f times is missed with probability below `(n / (width f))**depth`. For a small range, use `CountByValue`, which is exact.

    Args:
        k: number of integers to return.
        width: number of cells per row, a power of two from 16 up.
        depth: number of rows.
        bits: integers from 0 to `2**bits - 1` are counted separately; all others are counted together.

    Returns:
        `values` and `counts`: int64, of shape `(*kept axes, k)`, largest estimate first, smaller values first among equals; -1 and
        0 if fewer than k were found; `outside`: int64, in the shape of the kept axes, the number of elements out of range. The
        state takes `8 * depth * width * (1 + bits)` bytes per kept position, 1 MB by default.

    Raises:
        ArgumentError: a parameter is out of range.
        DTypeError: the input is not an integer tensor.

    Reference: Cormode and Muthukrishnan, "What's hot and what's not: tracking most frequent items dynamically", TODS 30, 2005
    (combinatorial group testing); the estimate is that of their Count-Min sketch.

    >>> import torch
    >>> frequent = HeavyHitters(k=2)
    >>> tokens = torch.cat((torch.arange(1000), torch.full((500,), 50256), torch.full((300,), 13)))
    >>> frequent.compute(frequent.update({}, tokens))
    {'values': tensor([50256,    13]), 'counts': tensor([500, 301]), 'outside': tensor(0)}
    """

    fields: ClassVar[Mapping[str, Field]] = {"cells": Add(), "outside": Add()}

    counts_nonfinite: ClassVar[bool] = False

    k: int = 16
    width: int = 1024
    depth: int = 4
    bits: int = 31

    def __post_init__(self) -> None:
        super().__post_init__()
        check_size(self, "width", 16)
        if self.width & (self.width - 1):
            raise ArgumentError(f"HeavyHitters takes width, a power of two from 16 up, and got {self.width!r}")
        for name, most in (("k", self.width), ("depth", 64), ("bits", 62)):
            check_size(self, name, 1, most)

    @property
    def divisible(self) -> bool:
        return False  # lift splits the tensor itself, and its pieces share the cells

    def lift(self, x: Tensor, axes: tuple[int, ...]) -> State:
        x = _check_integers(x, "HeavyHitters")
        kept = kept_shape(x, axes)
        units = unit_index(x, axes) * self.depth
        cells = x.new_zeros(unit_count(x, axes) * self.depth * self.width, 1 + self.bits, dtype=torch.int64)
        inside = x.new_zeros(kept, dtype=torch.int64)
        digits = torch.arange(self.bits, device=x.device)
        for piece in pieces(x, axes):
            value = integers(piece)
            in_range = (value >= 0) & (value < 1 << self.bits)
            inside = inside + in_range.sum(dim=axes)
            one = in_range.reshape(-1, 1).long()
            added = torch.cat((one, one * ((value.reshape(-1, 1) >> digits) & 1)), dim=1)
            for row in range(self.depth):
                cell = (units + row) * self.width + self._cell(value, row)
                cells.index_add_(0, cell.reshape(-1), added)
        outside = count_of(x, None, axes) - inside
        return {"cells": cells.reshape(*kept, self.depth, self.width, 1 + self.bits), "outside": outside}

    def lift_masked(self, x: Tensor, mask: Tensor, axes: tuple[int, ...]) -> State:
        state = self.lift(_mask_as_outside(x, mask, "HeavyHitters"), axes)
        return {**state, "outside": state["outside"] - (~mask).sum(dim=axes)}

    def read(self, state: State) -> Result:
        cells = state["cells"]
        total = cells[..., 0]
        digits = torch.arange(self.bits, device=cells.device)
        candidate = ((2 * cells[..., 1:] > total.unsqueeze(-1)).long() << digits).sum(-1)
        index = torch.arange(self.width, device=cells.device)
        consistent = torch.stack([self._cell(candidate[..., row, :], row) == index for row in range(self.depth)], dim=-2)
        # several rows may yield the same integer: sorting makes duplicates adjacent, and only the first counts
        candidate = torch.where(consistent & (total > 0), candidate, -1).flatten(-2).sort(dim=-1).values
        duplicate = torch.zeros_like(candidate, dtype=torch.bool)
        duplicate[..., 1:] = candidate[..., 1:] == candidate[..., :-1]
        estimates = [total[..., row, :].gather(-1, self._cell(candidate, row)) for row in range(self.depth)]
        count = torch.stack(estimates).amin(0).masked_fill(duplicate | (candidate < 0), 0)
        count, order = count.sort(dim=-1, descending=True, stable=True)
        value = torch.where(count > 0, candidate.gather(-1, order), -1)
        return {"values": value[..., : self.k].clone(), "counts": count[..., : self.k].clone(), "outside": state["outside"]}

    def _cell(self, value: Tensor, row: int) -> Tensor:
        return mix(value, row + 1) & (self.width - 1)


_RANKS = 46  # bits of a hash that remain after 18 bits select the register


def _check_integers(x: Tensor, caller: str) -> Tensor:
    """Return `x`; raise `DTypeError` if it is not an integer tensor."""
    if x.is_floating_point() or x.is_complex():
        raise DTypeError(
            f"{caller} counts integers and got {x.dtype}; convert the input first, for example .premap(torch.Tensor.long)"
        )
    return x


def _mask_as_outside(x: Tensor, mask: Tensor, caller: str) -> Tensor:
    """Return `x` with masked elements replaced by -1, which is outside every range."""
    return torch.where(mask, integers(_check_integers(x, caller)), -1)


def _trailing_zeros(x: Tensor, most: int) -> Tensor:
    """Return the number of trailing zero bits, at most `most`, as int32."""
    x = x | (1 << most)
    # the lowest set bit is a power of two, which float32 holds exactly: its exponent is the position
    return ((x & -x).to(torch.float32).view(torch.int32) >> 23) - 127


def _sigma(x: Tensor) -> Tensor:
    """Return `x + sum x**(2**k) 2**(k - 1)` over k from 1, for the share x of empty registers; infinite if x is 1."""
    total, power = x, x
    for k in range(64):
        power = power * power
        total = total + power * 2.0**k
    return torch.where(x == 1, torch.inf, total)


def _tau(x: Tensor) -> Tensor:
    """Return `(1 - x - sum (1 - x**(2**-k))**2 2**-k) / 3` over k from 1, for the share x of registers that are not full."""
    total, root = 1 - x, x
    for k in range(1, 64):
        root = root.sqrt()
        total = total - (1 - root).square() * 2.0**-k
    return torch.where((x == 0) | (x == 1), 0.0, total / 3)
