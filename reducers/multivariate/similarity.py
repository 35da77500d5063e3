"""Linear centred kernel alignment (CKA): the similarity of two representations of the same examples."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import product

import torch
from torch import Tensor

from reducers.errors import ArgumentError
from reducers.kernels.chunks import pieces
from reducers.kernels.precision import is_rounding_error, real
from reducers.multivariate.covariance import PairStatistic, centred, centred_sums, finite_rows
from reducers.state import Result, State

_PAIRS = (("x", "x"), ("x", "y"), ("y", "y"))
_UNBIASED_ROWS = 4  # the unbiased estimator needs at least as many


@dataclass(frozen=True)
class CKA(PairStatistic):
    """Linear centred kernel alignment of all rows, exact for any split into batches.

    With X [n, p] and Y [n, q] centred, `CKA = |X^T Y|^2 / (|X^T X| |Y^T Y|)` in Frobenius norms (Kornblith, Norouzi, Lee and Hinton
    2019, "Similarity of neural network representations revisited"). It is 1 for representations equal up to rotation and scale,
    and 0 for uncorrelated ones. If there are few rows for the width, it is biased towards 1. `unbiased=True` uses, for each of
    the three terms, the unbiased estimator of the Hilbert-Schmidt independence criterion over all rows (Song, Smola, Gretton, Bedo
    and Borgwardt 2012, "Feature selection via dependence maximization", eq. 5). It also stores sums of third and fourth powers,
    and its result may be below 0 or above 1.

    The state holds p^2 + p q + q^2 numbers, and a batch of n rows costs n times as many multiplications. If p or q is too large
    for that, for example whole feature maps, use `MinibatchCKA`, an estimate with a state of eight numbers. Compare two layers by
    `Cell(CKA()).push(x, y)`, and the operands of one monitor by its `map_`.

    Args:
        pattern_x: keeps one axis of the first tensor, its p features; all others form the rows.
        pattern_y: keeps one axis of the second tensor, its q features. Rows are paired, so the reduced axes have the same sizes.
        unbiased: use the unbiased estimator; it needs 4 rows.

    Returns:
        `cka`: float64, 0-d, NaN if one tensor is constant or, with `unbiased`, the estimate of a tensor with itself is not above
        rounding error; `count` int64, number of pairs of rows; `nonfinite` int64, number of pairs that were excluded because
        either row has a NaN or infinite entry.

    Raises:
        PatternError: a pattern does not keep exactly one axis, or the tensors have different numbers of rows.
        ArgumentError: `unbiased` is not a bool.
        DTypeError: the input is complex or uint64.

    >>> import torch
    >>> cka = CKA()
    >>> x = torch.tensor([[1.0, 0.0], [0.0, 2.0], [3.0, 1.0], [2.0, 2.0]])
    >>> turned = x @ torch.tensor([[0.0, -5.0], [5.0, 0.0]])
    >>> state = cka.update(cka.update({}, x[:2], turned[:2]), x[2:], turned[2:])
    >>> round(cka.compute(state)["cka"].item(), 9)
    1.0
    """

    unbiased: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        if not isinstance(self.unbiased, bool):
            raise ArgumentError(f"CKA takes unbiased=True or False and got {self.unbiased!r}")

    def lift(self, x: Tensor, y: Tensor) -> State:
        state, means = centred_sums([x, y], "CKA", self._sums)
        return {**state, "mean_x": means[0], "mean_y": means[1]}

    def _sums(self, x: Tensor, y: Tensor) -> State:
        features = {"x": x, "y": y}
        sums = {a + b: features[a].T @ features[b] for a, b in _PAIRS}
        if self.unbiased:
            lengths = {name: value.square().sum(dim=1) for name, value in features.items()}
            sums.update({f"trace_{name}": value.sum() for name, value in lengths.items()})
            for a, b in _PAIRS:
                sums[f"quartic_{a}{b}"] = (lengths[a] * lengths[b]).sum()
            for a, b in product("xy", repeat=2):
                sums[f"cubic_{a}{b}"] = features[a].T @ lengths[b]
        return sums

    def join(self, a: State, b: State) -> State:
        count = a["count"] + b["count"]
        share = b["count"] / real(count.clamp(min=1))
        deltas = {name: b[f"mean_{name}"] - a[f"mean_{name}"] for name in "xy"}
        # recentre both on the common mean: the mean of a is at -share * delta from it, that of b at (1 - share) * delta
        left = self._recentred(a, {name: -share * delta for name, delta in deltas.items()})
        right = self._recentred(b, {name: delta * (a["count"] / real(count.clamp(min=1))) for name, delta in deltas.items()})
        means = {f"mean_{name}": torch.addcmul(a[f"mean_{name}"], delta, share) for name, delta in deltas.items()}
        return {
            "count": count,
            "nonfinite": a["nonfinite"] + b["nonfinite"],
            **{key: value + right[key] for key, value in left.items()},
            **means,
        }

    def _recentred(self, state: State, by: Mapping[str, Tensor]) -> State:
        """Return the sums about another centre, `sum f(x + d)`, for deviations x that sum to 0 and d = mean - centre."""
        count = real(state["count"])
        by = {name: torch.where(count > 0, distance, 0.0) for name, distance in by.items()}  # its square may overflow
        sums = {a + b: torch.addr(state[a + b], by[a], by[b] * count) for a, b in _PAIRS}
        if not self.unbiased:
            return sums
        squares = {name: by[name].square().sum() for name in "xy"}
        traces = {name: state[f"trace_{name}"] for name in "xy"}
        sums.update({f"trace_{name}": trace + count * squares[name] for name, trace in traces.items()})
        for a, b in _PAIRS:
            sums[f"quartic_{a}{b}"] = (
                state[f"quartic_{a}{b}"]
                + 2 * (by[b] @ state[f"cubic_{b}{a}"] + by[a] @ state[f"cubic_{a}{b}"])
                + traces[a] * squares[b]
                + traces[b] * squares[a]
                + 4 * (by[a] @ state[a + b] @ by[b])
                + count * squares[a] * squares[b]
            )
        for a, b in product("xy", repeat=2):
            products = state["xy"].T if a + b == "yx" else state[a + b]
            cubic = state[f"cubic_{a}{b}"] + 2 * (products @ by[b])
            sums[f"cubic_{a}{b}"] = cubic + by[a] * (traces[b] + count * squares[b])
        return sums

    def read(self, state: State) -> Result:
        count = state["count"]
        inner = {a + b: state[a + b].square().sum() for a, b in _PAIRS}
        traces = {name: state[name * 2].diagonal().sum() for name in "xy"}
        varies = torch.ones_like(count, dtype=torch.bool)
        for name, trace in traces.items():
            varies = varies & ~is_rounding_error(trace, count, state[f"mean_{name}"].norm())
        if self.unbiased:
            varies = varies & (count >= _UNBIASED_ROWS)
            for a, b in _PAIRS:
                inner[a + b], scale = hsic(inner[a + b], state[f"quartic_{a}{b}"], traces[a] * traces[b], count)
                if a == b:
                    varies = varies & (inner[a + b] > 1e-12 * scale)
        return {
            "cka": torch.where(varies, inner["xy"] / inner["xx"].sqrt() / inner["yy"].sqrt(), torch.nan),
            "count": count,
            "nonfinite": state["nonfinite"],
        }


@dataclass(frozen=True)
class MinibatchCKA(PairStatistic):
    """Linear centred kernel alignment, estimated per batch, for representations of any width.

    Each batch gives three unbiased estimates of the Hilbert-Schmidt independence criterion: of X with Y, X with X and Y with Y
    (Song, Smola, Gretton, Bedo and Borgwardt 2012, eq. 5). Their means over batches, all with the same weight, give
    `CKA = HSIC(X, Y) / sqrt(HSIC(X, X) HSIC(Y, Y))` (Nguyen, Raghu and Kornblith 2021, "Do wide and deep networks learn the same
    things?"). The result depends on the split into batches, but its expectation does not. A batch of n rows costs n^2 (p + q)
    multiplications and n^2 numbers of temporary memory; the state holds eight numbers for any width.

    Args:
        pattern_x: keeps one axis of the first tensor, its features; by default one row is all features of an example.
        pattern_y: the same for the second tensor. Rows are paired, so the reduced axes have the same sizes.

    Returns:
        `cka`: float64, 0-d, NaN if the mean estimate of either tensor with itself is not above rounding error; `observations`
        int64, number of batches used; `skipped` int64, number of batches with fewer than the 4 finite rows that the estimator
        needs; `nonfinite` int64, number of pairs that were excluded because either row has a NaN or infinite entry.

    Raises:
        PatternError: a pattern does not keep exactly one axis, or the tensors have different numbers of rows.
        DTypeError: the input is complex or uint64.

    >>> import torch
    >>> cka = MinibatchCKA()
    >>> x = torch.arange(24.0).reshape(6, 2, 2).sin()
    >>> state = cka.update({}, x, 3 * x.flip(1))
    >>> round(cka.compute(state)["cka"].item(), 9)
    1.0
    """

    pattern_x: str = "b ... -> (...)"
    pattern_y: str = "b ... -> (...)"

    def lift(self, x: Tensor, y: Tensor) -> State:
        matrices, keep, counted = finite_rows([x, y], "MinibatchCKA")
        count = counted["count"]
        enough = count >= _UNBIASED_ROWS
        grams = {name: _gram(matrix, keep, count) for name, matrix in zip("xy", matrices, strict=True)}
        state = {
            "observations": enough.to(torch.int64),
            "skipped": (~enough).to(torch.int64),
            "nonfinite": counted["nonfinite"],
        }
        for a, b in _PAIRS:
            (left, left_squares), (right, right_squares) = grams[a], grams[b]
            traces = left_squares.sum() * right_squares.sum()
            estimate, scale = hsic((left * right).sum(), (left_squares * right_squares).sum(), traces, count)
            state[f"hsic_{a}{b}"] = torch.where(enough, estimate, 0.0)
            if a == b:
                state[f"scale_{a}{b}"] = torch.where(enough, scale, 0.0)
        return state

    def join(self, a: State, b: State) -> State:
        return {key: value + b[key] for key, value in a.items()}

    def read(self, state: State) -> Result:
        varies = state["observations"] > 0
        for pair in ("xx", "yy"):
            varies = varies & (state[f"hsic_{pair}"] > 1e-12 * state[f"scale_{pair}"])
        quotient = state["hsic_xy"] / state["hsic_xx"].sqrt() / state["hsic_yy"].sqrt()
        counts = {key: state[key] for key in ("observations", "skipped", "nonfinite")}
        return {"cka": torch.where(varies, quotient, torch.nan), **counts}


def hsic(inner: Tensor, quartic: Tensor, traces: Tensor, count: Tensor) -> tuple[Tensor, Tensor]:
    """Return the unbiased estimate of the Hilbert-Schmidt independence criterion, for linear kernels K and L of centred data.

    Song et al. 2012, eq. 5: `(tr(AB) + sum(A) sum(B) / ((n - 1)(n - 2)) - 2 / (n - 2) sum(AB)) / (n (n - 3))`, where A and B are K
    and L with zero diagonals. Translation does not change the estimate, so the data may be centred. Then the rows of A sum to
    minus the diagonal of K, and three sums are sufficient.

    Args:
        inner: sum of K * L over all pairs of rows, 0-d; for features, `|X^T Y|^2`.
        quartic: sum of the product of the diagonals.
        traces: product of the traces.
        count: number of rows; 4 are needed.

    Returns:
        The estimate, and the sum of the magnitudes of its terms, which its rounding error is relative to.
    """
    n = real(count.clamp(min=_UNBIASED_ROWS))
    between, within = traces / ((n - 1) * (n - 2)), quartic * (n / (n - 2))
    divisor = n * (n - 3)
    return (inner + between - within) / divisor, (inner + between + within) / divisor


def _gram(x: Tensor, keep: Tensor | None, count: Tensor) -> tuple[Tensor, Tensor]:
    """Return the Gram matrix [n, n] of the centred rows and its diagonal [n], in blocks of features; 0 for rows not kept."""
    divisor = real(count.clamp(min=1))
    products: Tensor | None = None
    squares = []
    for block in pieces(x, (1,)):
        mean = block.sum(dim=0, dtype=divisor.dtype) / divisor
        deviation = centred(block, mean, keep)
        # constant features become exactly zero, so that their rounding errors do not add up
        deviation = torch.where(is_rounding_error(deviation.square().sum(dim=0), count, mean), 0.0, deviation)
        products = deviation @ deviation.T if products is None else products.addmm_(deviation, deviation.T)
        squares.append(deviation.square().sum(dim=1))
    assert products is not None  # there is at least one feature, so at least one block
    return products, torch.stack(squares).sum(dim=0)
