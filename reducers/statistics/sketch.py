"""Sketch: random projections that tell how far two tensors are apart, and the distance of two of them."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from reducers.core.checks import check_keys, check_shape
from reducers.core.fields import Add, Field, Greatest, Least, join_fields
from reducers.core.inputs import observation
from reducers.core.reducer import Reducer, check_size
from reducers.core.states import check_states, require_state, to_device
from reducers.errors import ArgumentError, StateMismatchError
from reducers.kernels.dispatch import sweep
from reducers.kernels.precision import infinite_to_nan, real
from reducers.kernels.sketches import sketched
from reducers.state import Nonfinite, Result, State
from reducers.statistics.basic import Extremes
from reducers.statistics.norm import Norm

__all__ = ["Sketch", "sketch_distance"]

_COLUMNS = {"count": "count", "nonfinite": "nonfinite", "power": "squares", "min": "min", "max": "max"}
_NORM, _ENDS = Norm(), Extremes()  # which a graph does not make: it is traced
_ONE_SIDED = 2.326  # standard errors that a normal number exceeds in 1 of 100 cases


@dataclass(frozen=True)
class Sketch(Reducer):
    """k random projections of a tensor, from which `sketch_distance` estimates how far two tensors are apart, without either.

    Each finite element is added to one of k sums, with a random sign; both are hashes of its index in the observation, so they are
    the same in every run and on every device. If x and y differ by d, so do their sketches by that of d, whose squared length is
    `|d|^2` on average, with a relative standard error of at most sqrt(2 / k): 9 % for k = 256, and half of that for the distance.
    Sums are rounded in float64, in an order that depends on the kernel: of tensors that are equal, sketches made in different
    ways may differ by about 1e-16 of the norm. `Digest` tells whether they are equal.

    The index begins anew with each observation, so the sketch of several observations is that of their sum, element by
    element. Then the distance is that of the sums: what differs in the same way in each of N observations counts N times, and what
    cancels does not count. For the distance of each observation by itself, reset after each, or use `PerObservation(Sketch(),
    Collect())`. Of ranks that hold parts of one tensor, each part has a sketch of its own; the squares of their distances add up
    to that of the whole.

    Args:
        k: number of projections, a multiple of 64.

    Returns:
        float64: `sketch` [k]; `norm`, the Euclidean norm of all finite elements; `min` and `max` of them, NaN if there are none.
        `count`, int64, is their number. A complex number is two elements.

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

    fields: ClassVar[Mapping[str, Field]] = {
        "sketch": Add(),
        "count": Add(),
        "nonfinite": Add(),
        "power": Add(),
        "min": Least(),
        "max": Greatest(),
    }

    def __post_init__(self) -> None:
        check_size(self, "k")
        if self.k % 64:
            raise ArgumentError(f"Sketch takes k, a multiple of 64, and got {self.k}")

    def update(self, state: State, *xs: Tensor) -> State:
        x = observation(self, xs)
        if x.numel() == 0:
            return state
        x = torch.view_as_real(x.resolve_conj()) if x.is_complex() else x
        x = x.reshape(1) if x.ndim == 0 else x
        axes = tuple(range(x.ndim))
        numbers = None if torch.compiler.is_compiling() else sweep((tuple(_COLUMNS.items()), 0.0), x, axes, {})
        if numbers is None:
            numbers = {**_NORM.observe(x, axes), **_ENDS.observe(x, axes)}
        observed = {"sketch": sketched(x, self.k), **{key: numbers[key] for key in _COLUMNS}}
        observed |= {key: real(observed[key]) for key in ("min", "max")}
        return self.merge(to_device(state, x.device), observed)

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
        ends = {key: infinite_to_nan(state[key]) for key in ("min", "max")}
        return {"sketch": state["sketch"].clone(), "norm": state["power"].sqrt(), **ends, "count": state["count"].clone()}

    def nonfinite(self, state: State) -> Nonfinite | None:
        return Nonfinite(state["nonfinite"].clone(), state["count"] + state["nonfinite"]) if state else None


def sketch_distance(a: Mapping[str, Tensor], b: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return how far apart two tensors are of which these are the results of `Sketch`, with as many observations each.

    Args:
        a: a result of `Sketch`.
        b: a result of `Sketch` with the same k.

    Returns:
        float64, each a number. `distance`: the estimated Euclidean distance, with a relative standard error of at most
        sqrt(1 / (2 k)), and 0 for equal tensors. `relative`: the distance divided by the longer of the two, as estimated; 0 of
        tensors of zeros. `bound`: what the distance exceeds in about 1 of 100 cases.

    Raises:
        StateMismatchError: they have not the same k.

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
    distance = torch.linalg.vector_norm(first - second, dim=-1)
    longer = torch.maximum(*(torch.linalg.vector_norm(one, dim=-1) for one in (first, second)))
    lowest = 1 - _ONE_SIDED * math.sqrt(2 / first.shape[-1])  # of the square, as a share of what it is an estimate of
    return {
        "distance": distance,
        "relative": torch.where(longer > 0, distance / longer, 0.0),
        "bound": distance / math.sqrt(lowest),
    }
