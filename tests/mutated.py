"""States that were mutated: a reducer refuses them, or all that follows works, or fails by our own errors."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from functools import cache
from typing import Any

import torch
from cases import CASES, Case
from hypothesis import strategies as st
from laws import run
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from recorders import RecorderError, Subrecording
from recorders.errors import CorruptRecordingError
from recorders.recordings.storage.codec import Recipes
from reducers import Fold, History, ReducerError, Scan, State

DTYPES = [
    torch.float32,
    torch.float64,
    torch.bfloat16,
    torch.int64,
    torch.uint8,
    torch.bool,
    torch.complex64,
    torch.uint16,
    torch.float8_e5m2,
]
MEBIBYTE = 2**20


class Largest(TorchDispatchMode):
    """The most bytes that one operation makes, but for those that make views, or tensors without memory."""

    nbytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        made = [x.untyped_storage().nbytes() for x in tree_leaves(out) if isinstance(x, Tensor) and not x.is_meta]
        self.nbytes = max([self.nbytes, *made])
        return out


def observations(case: Case) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [(torch.rand(n, *case.trailing, generator=generator) * 5 - 2).to(case.dtypes[0]) for n in (6, 6, 6)]


@cache
def sound(index: int) -> tuple[State, list[Tensor]]:
    xs = observations(CASES[index])
    return run(CASES[index].reducer, xs), xs


def filled(x: Tensor, number: float) -> Tensor:
    if x.is_floating_point() or x.is_complex():
        return torch.full(x.shape, number, dtype=torch.float64).to(x.dtype)
    return torch.full(x.shape, -1 if number != number else int(max(min(number, 2**62), -(2**62)))).to(x.dtype)


MUTATIONS: dict[str, Callable[[Tensor, int], Tensor]] = {
    "dtype": lambda x, n: (x.real if x.is_complex() else x).to(DTYPES[n % len(DTYPES)]),
    "transposed": lambda x, n: x.movedim(0, -1) if x.ndim else x,
    "flat": lambda x, n: x.reshape(-1),
    "column": lambda x, n: x[..., None],
    "row": lambda x, n: x[None],
    "first": lambda x, n: x[0] if x.ndim and len(x) else x,
    "longer": lambda x, n: x.repeat(*(1,) * (x.ndim - 1), n + 2) if x.ndim else x.repeat(n + 2),
    "shorter": lambda x, n: x[..., : x.shape[-1] // 2] if x.ndim else x,
    "long": lambda x, n: x.new_ones(3000),
    "long column": lambda x, n: x.new_ones(3000, 1),
    "deep": lambda x, n: x.new_ones((1,) * (40, 64, 65, 1000)[n % 4]),
    "empty": lambda x, n: x[..., :0] if x.ndim else x.reshape(1)[:0],
    "huge and empty": lambda x, n: x.new_empty(((10**12, 0), (0, 10**6), (2**16, 0))[n % 3]),
    "numbers": lambda x, n: filled(x, (float("nan"), -1.0, 0.0, 1e300, -1e300)[n % 5]),
}
mutation = st.tuples(st.sampled_from(["drop", "add", "rename", *MUTATIONS]), st.integers(0, 9), st.integers(0, 9))


def mutate(state: State, mutations: list[tuple[str, int, int]]) -> State:
    state = dict(state)
    for kind, place, n in mutations:
        if not state:
            break
        key = list(state)[place % len(state)]
        if kind in {"drop", "rename"}:
            value = state.pop(key)
        if kind in {"add", "rename"}:
            new = (f"{key}/x", "evil", "0", "7", "", "ring/x", "-5", f"{key}x", "correlation/count", "payload")[n]
            state[new] = value if kind == "rename" else state[key].clone()
        if kind in MUTATIONS:
            state[key] = MUTATIONS[kind](state[key], n).contiguous()
    return state


def survives(index: int, mutations: list[tuple[str, int, int]]) -> None:
    """A mutated state is refused, or everything afterwards works, or fails by our errors, in bounded memory."""
    case, (state, xs) = CASES[index], sound(index)
    forged = mutate(state, mutations)
    part = Subrecording(case.reducer, {"": forged}, samples=1)
    own = sum(value.nbytes for value in (*forged.values(), *state.values()))
    limit = max(64 * MEBIBYTE, 64 * own)
    with Largest() as checking:
        try:
            Recipes().check(part, "here")
        except CorruptRecordingError:
            return
    other = Subrecording(case.reducer, {"": state}, samples=1)
    uses: list[Callable[[], object]] = [
        lambda: part.peek(),
        lambda: repr(part),
        lambda: part._repr_html_(),
        lambda: isinstance(case.reducer, History) and case.reducer.dump(forged),
    ]
    combines: list[Callable[[], object]] = [
        lambda: part.merge(other).peek(),
        lambda: other.merge(part).peek(),
        lambda: part.merge(part).peek(),
        lambda: case.reducer.compute(case.reducer.update(forged, xs[0])),
    ]
    with Largest() as using:
        for use in uses if isinstance(case.reducer, (Fold, Scan)) else [*uses, *combines]:  # their function is the caller's
            with suppress(ReducerError, RecorderError):
                use()
    assert max(checking.nbytes, using.nbytes) <= limit
