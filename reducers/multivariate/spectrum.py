"""Functions of a covariance matrix: correlations, eigenvalues, and measures of dimension."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple, TypeAlias, Union

import torch
from torch import Tensor

from reducers.errors import ArgumentError
from reducers.kernels.precision import real

Covariances: TypeAlias = Union[Tensor, Mapping[str, Tensor]]


def correlation(covariance: Covariances) -> Tensor:
    """Return the Pearson correlations `C_ij / sqrt(C_ii C_jj)`.

    Args:
        covariance: the result of `Covariance` or `CrossCovariance`, or a covariance matrix [d, d].

    Returns:
        float64 [d, d] (for two tensors [p, q]), in [-1, 1]; NaN if one of the two features is constant.

    Raises:
        ArgumentError: the input is not a square matrix.

    >>> import torch
    >>> correlation(torch.tensor([[4.0, 3.0], [3.0, 9.0]]))
    tensor([[1.0000, 0.5000],
            [0.5000, 1.0000]], dtype=torch.float64)
    """
    if isinstance(covariance, Mapping) and "var_x" in covariance:
        scale_x, scale_y = (_scale(_without_rounding_error(covariance[f"var_{name}"], covariance[f"mean_{name}"])) for name in "xy")
        return (covariance["covariance"] / scale_x.unsqueeze(1) / scale_y).clamp(-1.0, 1.0)
    matrix = _matrix(covariance)
    scale = _scale(matrix.diagonal())
    coefficients = (matrix / scale.unsqueeze(1) / scale).clamp(-1.0, 1.0)
    diagonal = torch.eye(len(scale), dtype=torch.bool, device=scale.device)
    return torch.where(diagonal & torch.isfinite(coefficients), 1.0, coefficients)


def eigenvalues(covariance: Covariances) -> Tensor:
    """Return the eigenvalues of a covariance matrix, largest first: the variances along its principal axes.

    Args:
        covariance: the result of `Covariance`, or a symmetric matrix [d, d] without negative eigenvalues.

    Returns:
        float64 [d]; values that rounding made negative are 0; all NaN if an entry is not finite.

    Raises:
        ArgumentError: the input is not a square matrix.

    >>> import torch
    >>> eigenvalues(torch.tensor([[2.0, 1.0], [1.0, 2.0]]))
    tensor([3., 1.], dtype=torch.float64)
    """
    matrix = _matrix(covariance)
    is_finite = torch.isfinite(matrix).all()
    values = torch.linalg.eigvalsh(torch.where(is_finite, matrix, 0.0))  # LAPACK raises on NaN
    return torch.where(is_finite, values.flip(0).clamp(min=0.0), torch.nan)


class PrincipalAxes(NamedTuple):
    """The variances `values` [d], largest first, and the axes, which are the columns of `vectors` [d, d]."""

    values: Tensor
    vectors: Tensor


def principal_axes(covariance: Covariances) -> PrincipalAxes:
    """Return the principal axes of a covariance matrix and the variances along them: principal component analysis.

    `(x - mean) @ axes.vectors[:, :k]` projects rows of features onto the first k axes. The entry of each axis with the largest
    magnitude is positive, so that two runs can be compared.

    Args:
        covariance: the result of `Covariance`, or a symmetric matrix [d, d] without negative eigenvalues.

    Returns:
        `values` float64 [d], those of `eigenvalues`; `vectors` float64 [d, d], a column of length 1 for each value. All NaN if an
        entry is not finite.

    Raises:
        ArgumentError: the input is not a square matrix.

    >>> import torch
    >>> values, vectors = principal_axes(torch.diag(torch.tensor([1.0, 3.0])))
    >>> values, vectors[:, 0]
    (tensor([3., 1.], dtype=torch.float64), tensor([0., 1.], dtype=torch.float64))
    """
    matrix = _matrix(covariance)
    is_finite = torch.isfinite(matrix).all()
    values, vectors = (part.flip(-1) for part in torch.linalg.eigh(torch.where(is_finite, matrix, 0.0)))  # LAPACK raises on NaN
    largest = vectors.gather(0, vectors.abs().argmax(dim=0, keepdim=True)) if len(values) else vectors
    vectors = torch.where(largest < 0, -vectors, vectors)
    return PrincipalAxes(torch.where(is_finite, values.clamp(min=0.0), torch.nan), torch.where(is_finite, vectors, torch.nan))


def explained_variance_ratio(covariance: Covariances) -> Tensor:
    """Return the share of the variance along each principal axis, largest first: `l_i / sum l`.

    Args:
        covariance: the result of `Covariance`, or a covariance matrix [d, d].

    Returns:
        float64 [d], with sum 1; NaN if all features are constant or an entry is not finite.

    Raises:
        ArgumentError: the input is not a square matrix.

    >>> import torch
    >>> explained_variance_ratio(torch.diag(torch.tensor([1.0, 3.0])))
    tensor([0.7500, 0.2500], dtype=torch.float64)
    """
    values = eigenvalues(covariance)
    return values / values.sum()


def effective_rank(covariance: Covariances) -> Tensor:
    """Return the effective rank `exp(-sum p_i log p_i)`, for the shares p of the eigenvalues.

    It is d if all eigenvalues are equal, and 1 if all but one are zero (Roy and Vetterli 2007, "The effective rank: a measure of
    effective dimensionality"). The shares are those of the singular values of the covariance matrix, not of the data matrix,
    whose singular values are proportional to their square roots.

    Args:
        covariance: the result of `Covariance`, or a covariance matrix [d, d].

    Returns:
        float64, 0-d, in [1, d]; NaN if all features are constant or an entry is not finite.

    Raises:
        ArgumentError: the input is not a square matrix.

    >>> import torch
    >>> round(effective_rank(torch.diag(torch.tensor([2.0, 2.0, 0.0]))).item(), 9)
    2.0
    """
    entropy: Tensor = torch.special.entr(explained_variance_ratio(covariance)).sum()
    return entropy.exp()


def participation_ratio(covariance: Covariances) -> Tensor:
    """Return the participation ratio `(sum l_i)^2 / sum l_i^2` = `tr(C)^2 / tr(C^2)`, without a decomposition.

    It is d if all eigenvalues l are equal, and 1 if all but one are zero (Gao et al. 2017, "A theory of multineuronal
    dimensionality, dynamics and measurement").

    Args:
        covariance: the result of `Covariance`, or a covariance matrix [d, d].

    Returns:
        float64, 0-d, in [1, d]; NaN if all features are constant or an entry is not finite.

    Raises:
        ArgumentError: the input is not a square matrix.

    >>> import torch
    >>> participation_ratio(torch.diag(torch.tensor([2.0, 2.0, 0.0])))
    tensor(2., dtype=torch.float64)
    """
    matrix = _matrix(covariance)
    shares = matrix / matrix.diagonal().sum()  # avoids overflow of the squares
    return 1 / shares.square().sum()


@dataclass(frozen=True)
class intrinsic_dimension:  # named like the functions of this module; a class, so that it equals itself after pickling
    """Function that returns the smallest number of principal axes that together reach a share of the variance.

    Unlike the other functions of covariances it is given to `postmap` with its threshold: `.postmap(intrinsic_dimension(0.9))`. A
    share within 1e-12 of the threshold counts as reached, so that rounding does not matter.

    Args:
        threshold: share of the variance, above 0 and at most 1.

    Returns:
        A function of the result of `Covariance`, or of a covariance matrix [d, d]. It returns int64, 0-d, from 1 to d; 0 if all
        features are constant or an entry is not finite.

    Raises:
        ArgumentError: `threshold` is not in (0, 1], or the function is called without a square matrix.

    >>> import torch
    >>> intrinsic_dimension(0.8)(torch.diag(torch.tensor([6.0, 3.0, 1.0])))
    tensor(2)
    >>> from reducers import Covariance
    >>> dimension = Covariance().postmap(intrinsic_dimension(0.8))
    >>> dimension.compute(dimension.update({}, torch.tensor([[0.0, 1.0], [9.0, 2.0], [5.0, 1.0]])))
    tensor(1)
    """

    threshold: float = 0.99

    def __post_init__(self) -> None:
        if not isinstance(self.threshold, (int, float)) or not 0 < self.threshold <= 1:
            got = "a covariance" if isinstance(self.threshold, (Mapping, Tensor)) else repr(self.threshold)
            raise ArgumentError(
                f"intrinsic_dimension takes a threshold above 0 and at most 1, and got {got}: "
                "write .postmap(intrinsic_dimension(0.99))"
            )

    def __call__(self, covariance: Covariances) -> Tensor:
        reached = explained_variance_ratio(covariance).cumsum(0)
        before = (reached < self.threshold * (1 - 1e-12)).sum()
        return torch.where(torch.isfinite(reached).all(), (before + 1).clamp(max=len(reached)), 0)


def _matrix(covariance: Covariances) -> Tensor:
    matrix = covariance["covariance"] if isinstance(covariance, Mapping) and "covariance" in covariance else covariance
    if not isinstance(matrix, Tensor) or matrix.ndim != 2 or matrix.shape[0] != matrix.shape[1]:
        got = tuple(matrix.shape) if isinstance(matrix, Tensor) else type(matrix).__name__
        raise ArgumentError(f"a covariance matrix [d, d], or the result of Covariance, is needed; got {got}")
    matrix = real(matrix)
    if not isinstance(covariance, Mapping):
        return matrix
    varies = _without_rounding_error(matrix.diagonal(), covariance["mean"]) != 0
    return torch.where(varies & varies.unsqueeze(1), matrix, 0.0)


def _without_rounding_error(variance: Tensor, mean: Tensor) -> Tensor:
    """Return the variances with 0 for those that are no more than the rounding error of a constant feature."""
    return torch.where(variance <= (8 * torch.finfo(variance.dtype).eps * mean).square(), 0.0, variance)


def _scale(variance: Tensor) -> Tensor:
    return torch.where(variance > 0, variance.sqrt(), torch.nan)
