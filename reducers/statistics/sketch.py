"""Sketch: random projections that tell how far two tensors are apart, and the distance of two of them."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import ClassVar

import torch
from torch import Tensor

from reducers.core.checks import check_keys, check_shape
from reducers.core.fields import Add, Field, Greatest, Least, join_fields
from reducers.core.inputs import check_part, checked_part, observation
from reducers.core.reducer import Reducer, check_size
from reducers.core.states import check_states, require_state, to_device
from reducers.errors import ArgumentError, StateMismatchError
from reducers.kernels.parts import TensorPart
from reducers.kernels.precision import can_read_values, eps_of, infinite_to_nan, no_sum
from reducers.kernels.sketches import sketched
from reducers.state import Nonfinite, Result, State

_VARIANCE = 16 / 7  # of the square of a length, times k, for a length of 1: two elements meet with a probability of at most 8/7 / k
_ONE_SIDED = 2.326  # standard errors that a normal number exceeds in 1 of 100 cases


@dataclass(frozen=True)
class Sketch(Reducer):
    """k random projections of a tensor, from which `sketch_distance` estimates how far two tensors are apart, without either.

    Each finite element is added to one of k sums, with a random sign; both are hashes of its index in the observation, so they
    are the same in every run and on every device. If x and y differ by d, so do their sketches by that of d, whose squared length
    is `|d|^2` on average, with a relative standard error of at most sqrt(16/7 / k): 9 % for k = 256, and half of that for the
    distance. Sums are rounded in float64, in an order that depends on the kernel: of tensors that are equal, sketches made in
    different ways may differ by about 1e-16 of the norm. `Digest` tells whether they are equal.

    The index begins anew with each observation, so the sketch of several observations is that of their sum, element by
    element. Then the distance is that of the sums: what differs in the same way in each of N observations counts N times, and what
    cancels does not count. For the distance of each observation by itself, reset after each, or use `PerObservation(Sketch(),
    Collect())`. Of ranks that hold parts of one tensor, each observes its part with `of_part`, and their sketches merge to that
    of the whole. Recorders do so for DTensors.

    Args:
        k: number of projections, a multiple of 64.
        part: of which tensor the observations are parts; None if they are whole.

    Returns:
        float64: `sketch` [k]; `norm`, the Euclidean norm of all finite elements; `min` and `max` of them, NaN if there are none.
        `eps`, the coarsest machine epsilon of the dtypes that were observed, which tells how finely elements were rounded; that of
        integers is 0. `count`, int64, is the number of finite elements. A complex number is two.

    Raises:
        ArgumentError: `k` is not a multiple of 64.
        DTypeError: an observation is uint64.

    Reference: Thorup and Zhang, "Tabulation based 4-universal hashing with applications to second moment estimation", SODA 2004
    (the count sketch as an estimate of the second moment); Charikar, Chen and Farach-Colton, "Finding frequent items in data
    streams", 2002 (doi:10.1007/3-540-45465-9_59).

    >>> import torch
    >>> sketch, x = Sketch(), torch.linspace(-1, 1, 1000)
    >>> a, b = (sketch.compute(sketch.update({}, one)) for one in (x, x + 0.01))
    >>> apart = sketch_distance(a, b)
    >>> apart["relative"] < 0.025, apart["distance"] < apart["bound"]
    (tensor(True), tensor(True))
    """

    k: int = 256
    part: TensorPart | None = field(default=None, repr=False)

    fields: ClassVar[Mapping[str, Field]] = {
        "sketch": Add(),
        "count": Add(),
        "nonfinite": Add(),
        "power": Add(),
        "min": Least(),
        "max": Greatest(),
        "eps": Greatest(),
    }

    def __post_init__(self) -> None:
        check_size(self, "k")
        if self.k % 64:
            raise ArgumentError(f"Sketch takes k, a multiple of 64, and got {self.k}")
        check_part(self)

    @property
    def batchable(self) -> bool:
        return True

    def update(self, state: State, *xs: Tensor) -> State:
        x = observation(self, xs)
        return self.merge(to_device(state, x.device), self._lifted(x[None])) if x.numel() else state

    def update_all(self, state: State, xs: Tensor) -> State:
        if xs.numel() == 0:
            return state
        xs = observation(self, (xs,))
        return self.merge(to_device(state, xs.device), self._lifted(xs))

    def _lifted(self, xs: Tensor) -> State:
        """Return the state of several observations, stacked along the first axis."""
        if xs.dtype is torch.uint64:
            raise no_sum(xs, f"{self!r}")
        eps = eps_of(xs)
        sums, facts = sketched(xs, self.k, checked_part(self, xs))
        sketch = sums.reshape(self.k) if len(sums) == 1 else sums.sum(dim=0)
        if can_read_values(facts):  # numbers of Python take a third of the time
            count, others, power, low, high = zip(*facts.tolist(), strict=True)
            counts = [torch.full((), int(sum(some)), dtype=torch.int64, device="cpu") for some in (count, others)]
            ends = (sum(power), min(low), max(high), eps)
            numbers = [torch.full((), one, dtype=facts.dtype, device="cpu") for one in ends]
        else:
            added = facts[:, :3].sum(dim=0)
            counts = [one.to(torch.int64) for one in added[:2].unbind()]
            least, greatest = facts[:, 3].amin(dim=0), facts[:, 4].amax(dim=0)
            numbers = [added[2].clone(), least, greatest, torch.full_like(least, eps)]
        return dict(zip(self.fields, (sketch, *counts, *numbers), strict=True))

    def of_part(self, part: TensorPart) -> Sketch:
        return replace(self, part=part)

    def merge(self, a: State, b: State) -> State:
        if not a or not b:
            return a or b
        check_states(self, a, b)
        return join_fields(self.fields, a, to_device(b, a["sketch"].device))

    def _check(self, state: State) -> None:
        check_keys(self, state, self.fields)
        for key in self.fields:
            dtypes = (torch.int64,) if key in ("count", "nonfinite") else (torch.float64, torch.float32)
            check_shape(self, state, key, (self.k,) if key == "sketch" else (), *dtypes)

    def compute(self, state: State) -> Result:
        require_state(self, state)
        kept = {key: state[key].clone() for key in ("eps", "count")}
        ends = {key: infinite_to_nan(state[key]) for key in ("min", "max")}
        return {"sketch": state["sketch"].clone(), "norm": state["power"].sqrt(), **ends, **kept}

    def nonfinite(self, state: State) -> Nonfinite | None:
        return Nonfinite(state["nonfinite"].clone(), state["count"] + state["nonfinite"]) if state else None


def sketch_distance(a: Mapping[str, Tensor], b: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return how far apart two tensors are of which these are the results of `Sketch`, with as many observations each.

    Args:
        a: a result of `Sketch`.
        b: a result of `Sketch` with the same k, of as many finite elements.

    Returns:
        float64, each a number. `distance`: the estimated Euclidean distance, with a relative standard error of at most
        sqrt(1 / (2 k)), and 0 for equal tensors. `relative`: the distance divided by the longer of the two, as estimated; 0 of
        tensors of zeros. `bound`: what the distance exceeds in about 1 of 100 cases.

    Raises:
        StateMismatchError: they have not the same k, or are of different numbers of finite elements.

    >>> import torch
    >>> sketch, x = Sketch(), torch.ones(500)
    >>> zero, x, y = (sketch.compute(sketch.update({}, one)) for one in (0 * x, x, 1.001 * x))
    >>> f"{sketch_distance(x, y)['relative']:.4f}", f"{sketch_distance(x, zero)['relative']:.1f}"
    ('0.0010', '1.0')
    """
    first, second = a["sketch"], b["sketch"].to(a["sketch"].device)
    if first.shape != second.shape:
        raise StateMismatchError(
            f"sketches of {tuple(first.shape)} and {tuple(second.shape)} sums have no distance: use one k for both"
        )
    counts = a["count"], b["count"].to(a["count"].device)
    if (unequal := counts[0] != counts[1]).any():
        one, other = (int(count[unequal].reshape(-1)[0]) for count in counts)
        raise StateMismatchError(
            f"sketches of {one} and of {other} finite elements have no distance: observe tensors of the same shapes, the same "
            "number of times; if that was done, other elements of one are NaN or infinite"
        )
    distance = torch.linalg.vector_norm(first - second, dim=-1)
    longer = torch.maximum(*(torch.linalg.vector_norm(one, dim=-1) for one in (first, second)))
    lowest = 1 - _ONE_SIDED * math.sqrt(_VARIANCE / first.shape[-1])  # of the square, as a share of what it is an estimate of
    return {
        "distance": distance,
        "relative": torch.where(longer > 0, distance / longer, 0.0),
        "bound": distance / math.sqrt(lowest),
    }
