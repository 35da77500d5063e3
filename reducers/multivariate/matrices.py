"""Singular values, norms and ranks of weight matrices, as functions for `op_`, `map_` and `premap`."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from reducers.errors import ArgumentError
from reducers.kernels.precision import real


def singular_values(weight: Tensor) -> Tensor:
    """Return the singular values of a weight, largest first.

    All axes after the first are flattened, so a convolution weight [out, in, k, k] is the matrix [out, in * k * k]; a vector is
    a matrix with one column. Costs m n min(m, n) operations and synchronises a GPU, as every torch decomposition does: use
    `every=` in training.

    Args:
        weight: a tensor of any shape and dtype.

    Returns:
        float64 [min(m, n)] for a matrix [m, n], not negative; all NaN if an entry is not finite.

    >>> import torch
    >>> singular_values(torch.tensor([[0.0, 3.0], [-4.0, 0.0]]))
    tensor([4., 3.], dtype=torch.float64)
    """
    matrix, is_finite = _matrix(weight)
    return torch.where(is_finite, torch.linalg.svdvals(matrix), torch.nan)


def spectral_norm(weight: Tensor) -> Tensor:
    """Return the largest singular value, the operator norm of the weight.

    Args:
        weight: as for `singular_values`.

    Returns:
        float64, 0-d; 0 for an empty weight, NaN if an entry is not finite.

    >>> import torch
    >>> spectral_norm(torch.tensor([[0.0, 3.0], [-4.0, 0.0]]))
    tensor(4., dtype=torch.float64)
    """
    values = singular_values(weight)
    return values.amax() if values.numel() else values.sum()


def stable_rank(weight: Tensor) -> Tensor:
    """Return the stable rank `|W|_F^2 / |W|_2^2`: the sum of squared singular values over the largest square.

    It is never above the rank (Rudelson and Vershynin 2007, "Sampling from large matrices").

    Args:
        weight: as for `singular_values`.

    Returns:
        float64, 0-d, in [1, min(m, n)]; NaN if all entries are zero or one is not finite.

    >>> import torch
    >>> stable_rank(torch.diag(torch.tensor([2.0, 1.0, 0.0])))
    tensor(1.2500, dtype=torch.float64)
    """
    return (singular_values(weight) / spectral_norm(weight)).square().sum()


def condition_number(weight: Tensor, p: float | str = 2) -> Tensor:
    """Return the condition number `|W|_p |W^-1|_p`; for p=2, of any matrix, the largest singular value over the smallest.

    It is 1 for a rotation. For a rank-deficient matrix it is infinite or, after rounding, above 1e15. Negative orders, which
    `torch.linalg.cond` accepts, are rejected: p=-2 would return the smallest singular value over the largest, 0.1 for diag(10, 1).

    Args:
        weight: as for `singular_values`.
        p: 2; or, for a square matrix, 1, infinity, "fro" or "nuc": the norm, as in `torch.linalg.matrix_norm`.

    Returns:
        float64, 0-d, from 1 up; infinity if the matrix is singular, NaN if an entry is not finite.

    Raises:
        ArgumentError: `p` is not one of these, or the matrix is not square and `p` is not 2.

    >>> import torch
    >>> condition_number(torch.diag(torch.tensor([10.0, 1.0])))
    tensor(10., dtype=torch.float64)
    """
    if p not in (1, 2, math.inf, "fro", "nuc"):
        raise ArgumentError(f"condition_number takes p = 1, 2, inf, 'fro' or 'nuc' and got {p!r}")
    if p == 2:
        values = singular_values(weight)
        if not values.numel():
            return values.new_full((), torch.nan)
        largest, smallest = values[0], values[-1]
        return torch.where(smallest == 0, torch.inf, largest / smallest)
    matrix, is_finite = _matrix(weight)
    if matrix.shape[0] != matrix.shape[1]:
        raise ArgumentError(f"condition_number with p={p!r} needs a square matrix and got {tuple(matrix.shape)}; p=2 takes any")
    inverse, failed = torch.linalg.inv_ex(matrix)
    product = torch.linalg.matrix_norm(matrix, p) * torch.linalg.matrix_norm(torch.where(failed == 0, inverse, 0.0), p)
    return torch.where(is_finite, torch.where(failed == 0, product, torch.inf), torch.nan)


def _matrix(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Return the weight as a matrix, and whether it is finite; if not, the matrix is zero, because LAPACK raises on NaN."""
    weight = weight.detach()
    wide = weight.to(torch.complex128) if weight.is_complex() else real(weight)
    matrix = wide.reshape(-1, 1) if wide.ndim < 2 else wide.flatten(1)
    is_finite = torch.isfinite(matrix).all()
    return torch.where(is_finite, matrix, 0.0), is_finite
