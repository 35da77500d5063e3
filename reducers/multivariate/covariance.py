"""Covariance matrices of the features of one tensor or of two tensors."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from reducers.core.checks import check_specimen
from reducers.core.inputs import observation
from reducers.core.patterns import arrange, rows, validate_features
from reducers.core.reducer import Reducer
from reducers.core.states import check_states, copy_aliased, require_state, to_device
from reducers.core.statistic import Statistic
from reducers.errors import DTypeError, PatternError, ReducerTypeError
from reducers.kernels import chunks
from reducers.kernels.precision import finite, real, wide_dtype
from reducers.state import Nonfinite, Result, State
from reducers.statistics.moments import check_correction


def finite_rows(xs: Sequence[Tensor], caller: str) -> tuple[list[Tensor], Tensor | None, State]:
    """Return the matrices with non-finite rows zeroed, the mask of the finite rows (None if all are), and the counts of both.

    A row counts as finite if it is finite in every matrix.

    Raises:
        DTypeError: the input is complex or uint64.
    """
    for x in xs:
        if wide_dtype(x, caller).is_complex:
            raise DTypeError(
                f"{caller} is not defined for {x.dtype}: make the real and imaginary parts features, by "
                ".premap(torch.view_as_real) and a pattern such as 'b d part -> (d part)'"
            )
    checked = [finite(x) for x in xs]
    masks = [mask.all(dim=1) for _, mask in checked if mask is not None]
    length = torch.full((), xs[0].shape[0], dtype=torch.int64, device=xs[0].device)
    if not masks:
        return [x for x, _ in checked], None, {"count": length, "nonfinite": torch.zeros_like(length)}
    keep = masks[0] if len(masks) == 1 else masks[0] & masks[-1]
    count = keep.sum()
    filled = [torch.where(keep.unsqueeze(1), x, 0) for x, _ in checked]
    return filled, keep, {"count": count, "nonfinite": length - count}


def nonfinite_rows(state: State) -> Nonfinite | None:
    """Return how many rows were left out, of all; None if the state does not say."""
    number = state.get("nonfinite")
    return None if number is None else Nonfinite(number, state["count"] + number if "count" in state else None)


def centred(x: Tensor, mean: Tensor, keep: Tensor | None) -> Tensor:
    """Return the rows minus their mean, in the dtype of the mean; rows that are not kept become zero."""
    distance = real(x) - mean
    return distance if keep is None else torch.where(keep.unsqueeze(1), distance, 0.0)


def centred_sums(xs: Sequence[Tensor], caller: str, sums: Callable[..., State]) -> tuple[State, list[Tensor]]:
    """Return the row counts with the results of `sums` for the centred finite rows, and the means.

    CPU matrices are processed in blocks of rows, to avoid a float64 copy of the whole matrix.

    Args:
        xs: matrices [n, d] with the same n.
        sums: maps as many centred matrices [m, d] to sums over their m rows; the sums of the blocks are added.
    """
    xs, keep, state = finite_rows(xs, caller)
    divisor = real(state["count"].clamp(min=1))
    means = [x.sum(dim=0, dtype=divisor.dtype) / divisor for x in xs]
    step = xs[0].shape[0]
    if xs[0].device.type == "cpu" and not torch.compiler.is_compiling():
        widest = max(x.shape[1] for x in xs)
        step = max(chunks.CHUNK // widest, widest)  # so that adding d * d sums is cheap compared with computing them
    parts = [torch.split(x, step) if step < x.shape[0] else (x,) for x in xs]
    kept = [None] * len(parts[0]) if keep is None else torch.split(keep, step) if len(parts[0]) > 1 else [keep]
    for *block, mask in zip(*parts, kept, strict=True):
        added = sums(*(centred(x, mean, mask) for x, mean in zip(block, means, strict=True)))
        state.update({key: state[key].add_(value) if key in state else value for key, value in added.items()})
    return state, means


def join_means(a: Tensor, b: Tensor, share: Tensor) -> Tensor:
    """Return the merged mean, if `b` has the given share of all rows."""
    return torch.addcmul(a, b - a, share)


@dataclass(frozen=True)
class Covariance(Statistic):
    """Covariance matrix of the features of a tensor: `sum (x - mean)(x - mean)^T / (count - correction)` over its rows.

    There is one row per position of the reduced axes. Rows with a NaN or infinite entry are excluded and counted. Each batch is
    centred on its own mean, and batches are merged about their means in float64 (Chan, Golub and LeVeque 1983, in matrix form).
    For any merge order, errors are below `1e-12 + 10 eps |mean| / std` of the largest variance, eps = 2.2e-16. A batch is
    reshaped to [n, d], which copies it if the features are not the last axis, and costs n d^2 multiplications; the state holds
    d^2 + d + 2 numbers.

    Pass the result on by `.postmap(...)` to `correlation`, `eigenvalues`, `explained_variance_ratio`, `effective_rank`,
    `participation_ratio` or `intrinsic_dimension(0.9)`.

    Args:
        pattern: keeps one axis, the d features; `"b c h w -> (c h w)"` merges several axes into one.
        correction: 1 for the sample covariance, 0 for the population covariance.

    Returns:
        `count` int64, number of rows; `mean` float64 [d], NaN if there are no rows; `covariance` float64 [d, d], NaN if
        `count <= correction`; `nonfinite` int64, number of excluded rows.

    Raises:
        PatternError: the pattern does not keep exactly one axis.
        ArgumentError: `correction` is not a finite number from 0 up.
        DTypeError: the input is complex or uint64.

    >>> import torch
    >>> covariance = Covariance()
    >>> state = covariance.update({}, torch.tensor([[1.0, 2.0], [3.0, 2.0]]))
    >>> covariance.compute(covariance.update(state, torch.tensor([[2.0, 5.0], [0.0, float("nan")]])))["covariance"]
    tensor([[1., 0.],
            [0., 3.]], dtype=torch.float64)
    """

    pattern: str = "b ... d -> d"
    correction: float = 1

    counts_nonfinite: ClassVar[bool] = False  # whole rows are

    def __post_init__(self) -> None:
        validate_features(self.pattern)
        check_correction(self.correction, "Covariance")

    @property
    def divisible(self) -> bool:
        return False  # a join costs d * d, so `centred_sums` splits big tensors, and they are joined once

    def lift(self, x: Tensor, axes: tuple[int, ...]) -> State:
        state, (mean,) = centred_sums([rows(x, axes)], "Covariance", lambda block: {"m2": block.T @ block})
        return {**state, "mean": mean}

    def lift_masked(self, x: Tensor, mask: Tensor, axes: tuple[int, ...]) -> State:
        state = super().lift_masked(x, mask, axes)  # excludes every row that is masked anywhere
        return {**state, "nonfinite": state["nonfinite"] - (~rows(mask, axes)).any(dim=1).sum()}

    def join(self, a: State, b: State) -> State:
        count = a["count"] + b["count"]
        share = b["count"] / real(count.clamp(min=1))
        delta = b["mean"] - a["mean"]
        return {
            "count": count,
            "nonfinite": a["nonfinite"] + b["nonfinite"],
            "m2": torch.addr(a["m2"] + b["m2"], delta, delta * (share * a["count"])),
            "mean": join_means(a["mean"], b["mean"], share),
        }

    def nonfinite(self, state: State) -> Nonfinite | None:
        return nonfinite_rows(state)

    def read(self, state: State) -> Result:
        count = state["count"]
        dof = real(count) - self.correction
        symmetric = (state["m2"] + state["m2"].T) / 2  # the matrix product is symmetric only up to rounding
        return {
            "count": count,
            "mean": torch.where(count > 0, state["mean"], torch.nan),
            "covariance": torch.where(dof > 0, symmetric / dof, torch.nan),
            "nonfinite": state["nonfinite"],
        }


@dataclass(frozen=True)
class PairStatistic(Reducer):
    """Base class of reducers over the paired rows of two tensors. Subclasses implement `lift`, `join` and `read`.

    Args:
        pattern_x: einops pattern of the first tensor; keeps one axis, its features.
        pattern_y: the same for the second tensor. Rows are paired in the order of the reduced axes, so both have as many rows.
    """

    pattern_x: str = "b ... d -> d"
    pattern_y: str = "b ... d -> d"

    def __post_init__(self) -> None:
        validate_features(self.pattern_x, self.pattern_y)

    @abstractmethod
    def lift(self, x: Tensor, y: Tensor) -> State:
        """Return the state of two matrices [n, p] and [n, q], n > 0."""

    @abstractmethod
    def join(self, a: State, b: State) -> State:
        """Return the merged state; neither argument is empty."""

    @abstractmethod
    def read(self, state: State) -> Result:
        """Return the statistic of a non-empty state."""

    def update(self, state: State, *xs: Tensor) -> State:
        if len(xs) != 2 or not all(isinstance(x, Tensor) for x in xs):
            raise ReducerTypeError(f"{self!r} reduces two tensors at a time; got ({', '.join(type(x).__name__ for x in xs)})")
        x, y = (observation(self, (operand,)) for operand in xs)
        if x.numel() == 0 or y.numel() == 0:
            return state
        left, right = rows(*arrange(x, self.pattern_x)), rows(*arrange(y, self.pattern_y))
        if left.shape[0] != right.shape[0]:
            raise PatternError(
                f"{self!r} pairs the rows of two tensors; shape {tuple(x.shape)} has {left.shape[0]} and {tuple(y.shape)} has "
                f"{right.shape[0]}: reduce axes of the same sizes in both patterns"
            )
        lifted = self.lift(left, right.to(left.device))
        if torch.compiler.is_compiling():  # as in Statistic: strides are unknown while compiling
            lifted = {key: value.contiguous() for key, value in lifted.items()}
        return self.merge(to_device(state, x.device), lifted)

    def merge(self, a: State, b: State) -> State:
        if not a or not b:
            return a or b
        check_states(self, a, b)
        return self.join(a, to_device(b, next(iter(a.values())).device))

    def specimen(self, kept: tuple[int, ...], dtype: torch.dtype, device: str) -> State:
        """Return the state of two observations of zeros with so many features each."""
        x, y = (torch.zeros(4, size, dtype=dtype, device=device) for size in kept)
        return self.lift(x, y)

    def _check(self, state: State) -> None:
        check_specimen(self, state, 2)

    def nonfinite(self, state: State) -> Nonfinite | None:
        return nonfinite_rows(state)

    def compute(self, state: State) -> Result:
        require_state(self, state)
        return copy_aliased(self.read(state), state)


@dataclass(frozen=True)
class CrossCovariance(PairStatistic):
    """Covariance of each feature of one tensor with each of another: `sum (x - mean_x)(y - mean_y)^T / (count - correction)`.

    Like `Covariance`, for two tensors with paired rows, such as the input and the output of a layer
    (`map_=lambda output, inputs: (inputs, output)` on a monitor) or two layers (`Cell(CrossCovariance()).push(x, y)`). A pair is
    excluded if either row has a NaN or infinite entry. `.postmap(correlation)` gives correlations. Costs n p q multiplications.

    Args:
        pattern_x: keeps one axis of the first tensor, its p features.
        pattern_y: keeps one axis of the second tensor, its q features.
        correction: 1 for the sample covariance, 0 for the population covariance.

    Returns:
        `count` int64, number of pairs of rows; `mean_x` and `var_x` float64 [p], `mean_y` and `var_y` [q]; `covariance` float64
        [p, q]; means are NaN if `count` is 0, the others if it is not above `correction`; `nonfinite` int64, number of excluded
        pairs.

    Raises:
        PatternError: a pattern does not keep exactly one axis, or the tensors have different numbers of rows.
        ArgumentError: `correction` is not a finite number from 0 up.
        DTypeError: the input is complex or uint64.

    >>> import torch
    >>> cross = CrossCovariance()
    >>> x = torch.tensor([[1.0], [2.0], [3.0]])
    >>> cross.compute(cross.update({}, x, torch.cat((2 * x, -x), dim=1)))["covariance"]
    tensor([[ 2., -1.]], dtype=torch.float64)
    """

    correction: float = 1

    def __post_init__(self) -> None:
        super().__post_init__()
        check_correction(self.correction, "CrossCovariance")

    def lift(self, x: Tensor, y: Tensor) -> State:
        def sums(x: Tensor, y: Tensor) -> State:
            return {"m2": x.T @ y, "m2_x": x.square().sum(dim=0), "m2_y": y.square().sum(dim=0)}

        state, (mean_x, mean_y) = centred_sums([x, y], "CrossCovariance", sums)
        return {**state, "mean_x": mean_x, "mean_y": mean_y}

    def join(self, a: State, b: State) -> State:
        count = a["count"] + b["count"]
        share = b["count"] / real(count.clamp(min=1))
        x, y = (b[key] - a[key] for key in ("mean_x", "mean_y"))
        weight = share * a["count"]
        return {
            "count": count,
            "nonfinite": a["nonfinite"] + b["nonfinite"],
            "m2": torch.addr(a["m2"] + b["m2"], x, y * weight),
            "m2_x": torch.addcmul(a["m2_x"] + b["m2_x"], x, x * weight),
            "m2_y": torch.addcmul(a["m2_y"] + b["m2_y"], y, y * weight),
            "mean_x": join_means(a["mean_x"], b["mean_x"], share),
            "mean_y": join_means(a["mean_y"], b["mean_y"], share),
        }

    def read(self, state: State) -> Result:
        count = state["count"]
        dof = real(count) - self.correction
        result = {"count": count, "nonfinite": state["nonfinite"]}
        for key in ("mean_x", "mean_y"):
            result[key] = torch.where(count > 0, state[key], torch.nan)
        for key, name in (("m2_x", "var_x"), ("m2_y", "var_y"), ("m2", "covariance")):
            result[name] = torch.where(dof > 0, state[key] / dof, torch.nan)
        return result
