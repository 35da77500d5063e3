"""Counts of whole numbers, such as token ids or the experts that were chosen: of each, of the most frequent, of distinct ones."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from reducers.core.statistic import Statistic
from reducers.errors import ArgumentError, DTypeError
from reducers.kernels.binning import count_of_units, kept_shape, of_units, tally
from reducers.kernels.chunks import pieces
from reducers.kernels.hashing import integers, mix, shift_right
from reducers.kernels.precision import count_of, real
from reducers.state import Result, State

__all__ = ["CountByValue", "DistinctCount", "HeavyHitters"]


@dataclass(frozen=True)
class CountByValue(Statistic):
    """How often each whole number from 0 to `values - 1` occurs; others are counted together.

    Args:
        values: how many there are: the size of the vocabulary, the number of experts.

    Returns:
        `counts`: int64, of shape (*kept axes, values); `outside`: int64, in the shape of the kept axes, how many elements were
        negative, or `values` and more.

    Raises:
        ArgumentError: `values` is not a positive whole number.
        DTypeError: the elements are no integers.

    >>> import torch
    >>> experts = CountByValue(values=3)
    >>> experts.compute(experts.update({}, torch.tensor([[0, 2], [2, -1]])))
    {'counts': tensor([1, 0, 2]), 'outside': tensor(1)}
    """

    values: int = 2

    def __post_init__(self) -> None:
        super().__post_init__()
        if not isinstance(self.values, int) or self.values < 1:
            raise ArgumentError(f"CountByValue takes a positive whole number of values and got {self.values!r}")

    @property
    def divisible(self) -> bool:
        return False  # a lift is cut inside, where its pieces share one array of counts

    def lift(self, x: Tensor, axes: tuple[int, ...]) -> State:
        return {"counts": tally(_whole(x, "CountByValue"), axes, self.values + 1, self._bin)}

    def lift_masked(self, x: Tensor, mask: Tensor, axes: tuple[int, ...]) -> State:
        counts = self.lift(_outside(x, mask, "CountByValue"), axes)["counts"]
        outside = counts[..., -1] - (~mask).sum(dim=axes)
        return {"counts": torch.cat((counts[..., :-1], outside.unsqueeze(-1)), dim=-1)}

    def _bin(self, x: Tensor) -> Tensor:
        x = integers(x)
        return torch.where((x >= 0) & (x < self.values), x, self.values)

    def join(self, a: State, b: State) -> State:
        return {"counts": a["counts"] + b["counts"]}

    def read(self, state: State) -> Result:
        return {"counts": state["counts"][..., :-1].clone(), "outside": state["counts"][..., -1].clone()}


@dataclass(frozen=True)
class DistinctCount(Statistic):
    """How many different whole numbers were seen, by HyperLogLog: the same from any cut, order or repetition of the data.

    Each number is hashed to 64 bits; `bits` of them choose a register, which keeps the greatest rank of the first bit that is set
    among 46 others. Merging takes the greater of two registers, so it is exact: what is merged equals one pass over everything.

    Args:
        bits: 2**bits registers, 4 to 18. The relative standard error is `1.04 / sqrt(2**bits)`: 1.6 % with 12 bits, 0.8 % with
            14; memory is 2**bits bytes per kept position.

    Returns:
        float64, in the shape of the kept axes: an estimate, nearly exact while few of the registers are taken.

    Raises:
        ArgumentError: `bits` is not a whole number from 4 to 18.
        DTypeError: the elements are no integers.

    Reference: Flajolet, Fusy, Gandouet and Meunier, "HyperLogLog", AofA 2007; the estimator, good for all sizes without tables:
    Ertl, "New cardinality estimation algorithms for HyperLogLog sketches", 2017 (arXiv:1702.01284), algorithm 6.

    >>> import torch
    >>> distinct = DistinctCount()
    >>> round(distinct.compute(distinct.update({}, torch.arange(3000) % 1000)).item())
    997
    """

    bits: int = 12

    def __post_init__(self) -> None:
        super().__post_init__()
        if not isinstance(self.bits, int) or not 4 <= self.bits <= 18:
            raise ArgumentError(f"DistinctCount takes from 4 to 18 bits and got {self.bits!r}")

    @property
    def divisible(self) -> bool:
        return False  # a lift is cut inside, where its pieces share the registers

    def lift(self, x: Tensor, axes: tuple[int, ...]) -> State:
        x = _whole(x, "DistinctCount")
        registers = 1 << self.bits
        units = of_units(x, axes) << self.bits
        ranks = torch.zeros(count_of_units(x, axes) * registers, dtype=torch.int32, device=x.device)
        for piece in pieces(x, axes):
            hashed = mix(integers(piece), 1)
            rank = _trailing_zeros(hashed, _RANKS) + 1
            register = shift_right(hashed, 64 - self.bits) + units
            ranks.scatter_reduce_(0, register.reshape(-1), rank.reshape(-1), "amax")
        return {"ranks": ranks.to(torch.uint8).reshape(*kept_shape(x, axes), registers)}

    def lift_masked(self, x: Tensor, mask: Tensor, axes: tuple[int, ...]) -> State:
        x = integers(_whole(x, "DistinctCount"))
        # a number that is seen again changes nothing, so one that counts stands in for those that do not
        seen = torch.where(mask, x, torch.iinfo(torch.int64).min).amax(dim=axes, keepdim=True)
        ranks = self.lift(torch.where(mask, x, seen), axes)["ranks"]
        return {"ranks": torch.where(mask.any(dim=axes).unsqueeze(-1), ranks, 0)}

    def join(self, a: State, b: State) -> State:
        return {"ranks": torch.maximum(a["ranks"], b["ranks"])}

    def read(self, state: State) -> Tensor:
        ranks = state["ranks"]
        registers = 1 << self.bits
        having = real(torch.stack([(ranks == rank).sum(-1) for rank in range(_RANKS + 2)]))
        total = registers * _tau(1 - having[-1] / registers)
        for rank in range(_RANKS, 0, -1):
            total = (total + having[rank]) / 2
        total = total + registers * _sigma(having[0] / registers)
        return registers * registers / (2 * math.log(2)) / total


@dataclass(frozen=True)
class HeavyHitters(Statistic):
    """The most frequent whole numbers of a range too wide to count each of, from a sketch that merges by addition.

    In each of `depth` rows every number is hashed to one of `width` cells, which holds how many fell into it and, per binary
    digit, how many of these had it set. A number that makes up more than half of its cell in some row is read from the digits
    directly, so no list of candidates is kept that merging would have to cut; its count is estimated by the smallest of its
    cells, one per row, and never too low.

    With n numbers seen, an estimate is too high by more than `2 n / width` with probability below `2**-depth`; a number seen
    f times is missed with probability below `(n / (width f))**depth`. Where the range is small, `CountByValue` is exact.

    Args:
        k: how many to return.
        width: cells of a row, a power of two from 16 up.
        depth: rows.
        bits: numbers from 0 to `2**bits - 1` are told apart; others are counted together.

    Returns:
        `values` and `counts`: int64, of shape (*kept axes, k), largest estimate first, then smaller values first; -1 and 0 where
        fewer were found; `outside`: int64, in the shape of the kept axes, how many elements were out of range. The state takes
        `8 * depth * width * (1 + bits)` bytes per kept position: 1 MB.

    Raises:
        ArgumentError: a parameter is out of its range.
        DTypeError: the elements are no integers.

    Reference: Cormode and Muthukrishnan, "What's hot and what's not: tracking most frequent items dynamically", TODS 30, 2005
    (combinatorial group testing); the estimate is that of their Count-Min sketch.

    >>> import torch
    >>> frequent = HeavyHitters(k=2)
    >>> tokens = torch.cat((torch.arange(1000), torch.full((500,), 50256), torch.full((300,), 13)))
    >>> frequent.compute(frequent.update({}, tokens))
    {'values': tensor([50256,    13]), 'counts': tensor([500, 301]), 'outside': tensor(0)}
    """

    k: int = 16
    width: int = 1024
    depth: int = 4
    bits: int = 31

    def __post_init__(self) -> None:
        super().__post_init__()
        if not isinstance(self.width, int) or self.width < 16 or self.width & (self.width - 1):
            raise ArgumentError(f"HeavyHitters takes a power of two from 16 up as width and got {self.width!r}")
        for name, most in (("k", self.width), ("depth", 64), ("bits", 62)):
            value = getattr(self, name)
            if not isinstance(value, int) or not 1 <= value <= most:
                raise ArgumentError(f"HeavyHitters takes {name} from 1 to {most} and got {value!r}")

    @property
    def divisible(self) -> bool:
        return False  # a lift is cut inside, where its pieces share the cells

    def lift(self, x: Tensor, axes: tuple[int, ...]) -> State:
        x = _whole(x, "HeavyHitters")
        kept = kept_shape(x, axes)
        units = of_units(x, axes) * self.depth
        cells = torch.zeros(count_of_units(x, axes) * self.depth * self.width, 1 + self.bits, dtype=torch.int64, device=x.device)
        inside = torch.zeros(kept, dtype=torch.int64, device=x.device)
        digits = torch.arange(self.bits, device=x.device)
        for piece in pieces(x, axes):
            value = integers(piece)
            known = (value >= 0) & (value < 1 << self.bits)
            inside = inside + known.sum(dim=axes)
            one = known.reshape(-1, 1).long()
            added = torch.cat((one, one * ((value.reshape(-1, 1) >> digits) & 1)), dim=1)
            for row in range(self.depth):
                cell = (units + row) * self.width + self._cell(value, row)
                cells.index_add_(0, cell.reshape(-1), added)
        outside = count_of(x, None, axes) - inside
        return {"cells": cells.reshape(*kept, self.depth, self.width, 1 + self.bits), "outside": outside}

    def lift_masked(self, x: Tensor, mask: Tensor, axes: tuple[int, ...]) -> State:
        state = self.lift(_outside(x, mask, "HeavyHitters"), axes)
        return {**state, "outside": state["outside"] - (~mask).sum(dim=axes)}

    def join(self, a: State, b: State) -> State:
        return {key: value + b[key] for key, value in a.items()}

    def read(self, state: State) -> Result:
        cells = state["cells"]
        total = cells[..., 0]
        places = torch.arange(self.bits, device=cells.device)
        candidate = ((2 * cells[..., 1:] > total.unsqueeze(-1)).long() << places).sum(-1)
        own = torch.arange(self.width, device=cells.device)
        home = torch.stack([self._cell(candidate[..., row, :], row) == own for row in range(self.depth)], dim=-2)
        # every number may be read from several rows: sorted, its copies lie side by side, and only the first counts
        candidate = torch.where(home & (total > 0), candidate, -1).flatten(-2).sort(dim=-1).values
        copy = torch.zeros_like(candidate, dtype=torch.bool)
        copy[..., 1:] = candidate[..., 1:] == candidate[..., :-1]
        estimates = [total[..., row, :].gather(-1, self._cell(candidate, row)) for row in range(self.depth)]
        count = torch.stack(estimates).amin(0).masked_fill(copy | (candidate < 0), 0)
        count, order = count.sort(dim=-1, descending=True, stable=True)
        value = torch.where(count > 0, candidate.gather(-1, order), -1)
        return {"values": value[..., : self.k].clone(), "counts": count[..., : self.k].clone(), "outside": state["outside"]}

    def _cell(self, value: Tensor, row: int) -> Tensor:
        return mix(value, row + 1) & (self.width - 1)


_RANKS = 46  # so many bits of a hash remain beside those that choose one of 2**18 registers


def _whole(x: Tensor, who: str) -> Tensor:
    """`x`, or `DTypeError` where it does not hold integers."""
    if x.is_floating_point() or x.is_complex():
        raise DTypeError(
            f"{who} counts whole numbers and got {x.dtype}; convert them first, for example .premap(torch.Tensor.long)"
        )
    return x


def _outside(x: Tensor, mask: Tensor, who: str) -> Tensor:
    """`x` with -1, which is outside of every range, where the mask is not True."""
    return torch.where(mask, integers(_whole(x, who)), -1)


def _trailing_zeros(x: Tensor, most: int) -> Tensor:
    """How many of the lowest `most` bits are zero before the first that is not, int32."""
    x = x | (1 << most)
    # the lowest bit that is set is a power of two, which float32 holds exactly: its exponent is the place
    return ((x & -x).to(torch.float32).view(torch.int32) >> 23) - 127


def _sigma(x: Tensor) -> Tensor:
    """`x + sum x**(2**k) 2**(k - 1)` over k from 1: what registers that are still empty say; infinite where all are."""
    total, power = x, x
    for k in range(64):
        power = power * power
        total = total + power * 2.0**k
    return torch.where(x == 1, torch.inf, total)


def _tau(x: Tensor) -> Tensor:
    """`(1 - x - sum (1 - x**(2**-k))**2 2**-k) / 3` over k from 1: what registers that are full say."""
    total, root = 1 - x, x
    for k in range(1, 64):
        root = root.sqrt()
        total = total - (1 - root).square() * 2.0**-k
    return torch.where((x == 0) | (x == 1), 0.0, total / 3)
