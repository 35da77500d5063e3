"""How numbers are distributed, as the methods that choose a range see it: from a `Quantile`, or from a tensor itself."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from reducers import Quantile, State
from reducers.errors import ArgumentError


@dataclass(frozen=True)
class Distribution:
    """Intervals, and how many numbers lie in each: of one tensor, or of each channel or group. All tensors are float64.

    Attributes:
        lower: the lower end of each interval, of shape (..., intervals).
        upper: its upper end, in the same shape; equal to `lower` if the numbers are known exactly.
        mass: how much the numbers in it count together, in the same shape.
        low: the least number, of shape (...).
        high: the greatest number, of shape (...).
    """

    lower: Tensor
    upper: Tensor
    mass: Tensor
    low: Tensor
    high: Tensor

    @classmethod
    def of_quantile(cls, quantile: Quantile, state: State) -> Distribution:
        """The distribution that a state of `Quantile` holds: its buckets, cut at the least and the greatest number.

        Args:
            quantile: the reducer.
            state: its state, with counts of shape (..., buckets).

        >>> import torch
        >>> quantile = Quantile()
        >>> found = Distribution.of_quantile(quantile, quantile.update({}, torch.tensor([1.0, 1.01, 3.0])))
        >>> found.lower.tolist(), found.upper.tolist(), found.mass.tolist()
        ([1.0, 3.0], [1.03125, 3.0], [2.0, 1.0])
        """
        counts, low, high = (state[key].cpu() for key in ("counts", "min", "max"))
        used = counts.reshape(-1, counts.shape[-1]).any(dim=0).nonzero().squeeze(-1)
        edges, low, high = quantile.edges(), low.double(), high.double()
        lower, upper = (ends[used].clamp(low.unsqueeze(-1), high.unsqueeze(-1)) for ends in (edges[:-1], edges[1:]))
        return cls(lower, upper, counts[..., used].double(), low, high)

    @classmethod
    def of_tensor(cls, x: Tensor, importance: Tensor | None = None) -> Distribution:
        """The distribution of the numbers along the last axis of a tensor, each known exactly.

        Args:
            x: the numbers, of shape (..., n).
            importance: how much each counts, in a shape that broadcasts to that of `x`; all alike if None.

        >>> import torch
        >>> Distribution.of_tensor(torch.tensor([[1.0, -2.0]])).low.tolist()
        [-2.0]
        """
        exact = x.detach().double().cpu()
        mass = torch.ones_like(exact) if importance is None else importance.detach().double().cpu().expand_as(exact)
        return cls(exact, exact, mass, exact.amin(dim=-1), exact.amax(dim=-1))

    @property
    def values(self) -> Tensor:
        """One number for each interval: the harmonic mean of its ends, as `Quantile` has it, or 0 if it holds zero."""
        product, total = self.lower * self.upper, self.lower + self.upper
        inside = torch.where(product > 0, 2 * product / total, 0.0)
        return torch.where(self.lower == self.upper, self.lower, inside)

    def magnitudes(self) -> Distribution:
        """The distribution of the magnitudes."""
        least = torch.maximum(self.lower, -self.upper).clamp(min=0.0)
        largest = torch.maximum(-self.low, self.high)
        return Distribution(least, torch.maximum(-self.lower, self.upper), self.mass, torch.zeros_like(largest), largest)

    def quantile(self, share: float) -> Tensor:
        """The smallest of `values` such that at least this share of the mass lies at it or below it, of shape (...).

        Args:
            share: from 0 to 1.
        """
        values, order = self.values.sort(dim=-1)
        cumulative = self.mass.gather(-1, order).cumsum(-1)
        at = torch.searchsorted(cumulative, share * cumulative[..., -1:]).clamp(max=values.shape[-1] - 1)
        return values.gather(-1, at).squeeze(-1)

    def rows(self) -> list[Distribution]:
        """The distribution of each channel or group, in order; this one alone if it is of one tensor."""
        wide = [each.reshape(-1, each.shape[-1]) for each in (self.lower, self.upper, self.mass)]
        return [Distribution(*each) for each in zip(*wide, self.low.reshape(-1), self.high.reshape(-1), strict=True)]


def pooled(state: State, size: int | None = None) -> State:
    """The state of `Quantile` that it would have for groups of so many neighbouring channels; all channels are one if None.

    It is exact, because counts add: one pass that keeps channels serves groups of any size, and whole tensors.

    Args:
        state: with counts of shape (channels, buckets).
        size: of a group, in channels.

    Raises:
        ArgumentError: the channels are no multiple of `size`.

    >>> import torch
    >>> x, channels, groups = torch.randn(5, 6), Quantile("b c -> c"), Quantile("b g c -> g")
    >>> state = pooled(channels.update({}, x), 3)
    >>> all(state[key].equal(value) for key, value in groups.update({}, x.unflatten(1, (2, 3))).items())
    True
    """
    channels = state["min"].numel()
    if size is not None and (state["min"].ndim != 1 or channels % size):
        raise ArgumentError(f"groups of {size} channels do not fit counts of shape {tuple(state['counts'].shape)}")
    shape = (1, channels) if size is None else (channels // size, size)
    grouped = {key: value.reshape(*shape, *value.shape[state["min"].ndim :]) for key, value in state.items()}
    joined = {
        "counts": grouped["counts"].sum(dim=1),
        "min": grouped["min"].amin(dim=1),
        "max": grouped["max"].amax(dim=1),
        "nonfinite": grouped["nonfinite"].sum(dim=1),
    }
    return {key: value.squeeze(0) for key, value in joined.items()} if size is None else joined
