"""Checks of states that come from files: keys, dtypes and shapes that a reducer can have made, and the cost of its result.

Numbers are not looked at. What a lift makes of tensors on the meta device, which have no numbers and take no memory, shows which
sizes are constant and which follow a kept axis. So a reducer that has `lift`, `join` and `read` declares nothing.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping
from contextlib import suppress
from functools import lru_cache
from typing import Any, NamedTuple, Protocol, TypeAlias

import torch
from torch import Tensor

from reducers.errors import DTypeError, StateError
from reducers.state import Result, State

MAX_RANK = 64
"""PyTorch's operations take no more axes, and `tolist` of 100,000 ends the process."""

_MAX_EMPTY = 1 << 20  # the product of the sizes above 0 of a tensor without elements, which a file holds in no bytes
_FACTOR, _FLOOR = 64, 1 << 20  # a result has at most so many times the bytes of its state, and so many bytes more
_SMALL = 1 << 24  # bytes
_FLOATS = (torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.complex128, torch.complex64)
_INTEGERS = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool, torch.uint16, torch.uint32, torch.uint64)
_EIGHTS = (torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz)
_DTYPES = (*_FLOATS, *_INTEGERS, *_EIGHTS)
_NARROWED = {torch.float64: torch.float32, torch.complex128: torch.complex64}  # on devices without float64

_Shape: TypeAlias = "tuple[int | None, ...]"  # sizes: a constant; `~i` if it is that of the kept axis i; None if it is neither


class _Lifting(Protocol):
    def specimen(self, kept: tuple[int, ...], dtype: torch.dtype, device: str) -> State: ...
    def merge(self, a: State, b: State) -> State: ...
    def compute(self, state: State) -> Result: ...


class _Computing(Protocol):
    def compute(self, state: State) -> Result: ...


class _Sizes(NamedTuple):
    device: str
    """Where further specimens are made: "cpu", which is faster, if they are small."""
    shapes: Mapping[str, _Shape]
    result: list[tuple[int, _Shape]] | None
    """Bytes of an element, and the shape, of each tensor of the result; None if it is unknown."""


def misfit(reducer: object, key: str, wanted: object, got: object) -> StateError:
    """Return the error for an entry of a state."""
    return StateError(f"{reducer!r:.200} has no such state: {key!r:.100} must have {wanted}, and has {got}")


def check_layout(reducer: object, state: State) -> None:
    """Raise `StateError` if a tensor has more than 64 axes, or has no elements and huge axes."""
    for key, value in state.items():
        if value.ndim > MAX_RANK:
            raise misfit(reducer, key, f"at most {MAX_RANK} axes", value.ndim)
        if not value.numel() and math.prod(size or 1 for size in value.shape) > _MAX_EMPTY:
            raise misfit(reducer, key, "elements, or short axes", f"none, and shape {tuple(value.shape)}")


def check_keys(reducer: object, state: State, required: Collection[str], optional: Collection[str] = ()) -> None:
    """Raise `StateError` if a required key is missing, or if there is a key that is neither required nor optional."""
    missing, unknown = set(required) - state.keys(), state.keys() - set(required) - set(optional)
    if missing or unknown:
        wanted = f"{sorted(required)}{f' and may have {sorted(optional)}' if optional else ''}"
        raise StateError(f"{reducer!r:.200} has no such state: its keys must be {wanted}, and are {sorted(state)!r:.500}")


def check_shape(reducer: object, state: State, key: str, wanted: tuple[int, ...], *dtypes: torch.dtype) -> None:
    """Raise `StateError` if the tensor `key` has another shape, or another dtype than those given (any, if none are)."""
    value = state[key]
    if tuple(value.shape) != tuple(wanted):
        raise misfit(reducer, key, f"shape {tuple(wanted)}", tuple(value.shape))
    if dtypes and value.dtype not in dtypes:
        raise misfit(reducer, key, f"dtype {' or '.join(map(str, dtypes))}", value.dtype)


def check_specimen(reducer: _Lifting, state: State, kept: int | None, fixed: bool = True) -> None:
    """Raise `StateError` if no observation can have led to a state of these keys, dtypes and shapes, or if its result is too big.

    Args:
        reducer: `specimen(kept, dtype, device)` returns the lift of zeros whose kept axes have these sizes. If that fails on the
            meta device, nothing is checked, because the reducer looks at numbers.
        kept: number of kept axes; None if it differs from observation to observation.
        fixed: whether the shapes of merged states are those of lifts.
    """
    layout: _Sizes | None = _cached(_layout_of, reducer, kept or 0)
    if layout is None:
        return None
    check_keys(reducer, state, layout.shapes)
    if kept is None:
        kept = max(value.ndim - len(layout.shapes[key]) for key, value in state.items())
        if kept >= MAX_RANK:  # an observation has at least one axis more
            raise StateError(f"{reducer!r:.200} has no such state: it keeps {kept} axes, and an observation has at most {MAX_RANK}")
        layout = _cached(_layout_of, reducer, kept) if kept > 0 else layout
        if layout is None:
            return None
    _check_dtypes(reducer, state, kept, layout.device)
    if not fixed:
        return check_cost(reducer, state)
    sizes: dict[int, int] = {}
    for key, wanted in layout.shapes.items():
        for size, expected in zip(state[key].shape, wanted, strict=False):
            if expected is not None and expected < 0:
                sizes.setdefault(expected, size)
    for key, wanted in layout.shapes.items():
        shape = tuple(state[key].shape)
        resolved = _resolved(wanted, sizes)
        if len(shape) != len(wanted) or any(b is not None and a != b for a, b in zip(shape, resolved, strict=True)):
            raise misfit(reducer, key, f"shape ({', '.join('any' if size is None else str(size) for size in resolved)})", shape)
    if layout.result is not None:
        results = [[width, *_resolved(shape, sizes)] for width, shape in layout.result]
        known = [[size for size in result if size is not None] for result in results]
        if known == results:
            return _check_bytes(reducer, state, sum(map(math.prod, known)), 1)
    return check_cost(reducer, state)


def _resolved(shape: _Shape, sizes: Mapping[int, int]) -> _Shape:
    return tuple(sizes.get(size) if size is not None and size < 0 else size for size in shape)


def _check_dtypes(reducer: _Lifting, state: State, kept: int, device: str) -> None:
    allowed: dict[str, set[torch.dtype]] = {key: set() for key in state}
    for dtype in _DTYPES:
        for key, made in _cached(_dtypes_of, reducer, kept, dtype, device).items():
            allowed.setdefault(key, set()).add(made)
        narrowed = {key: {_NARROWED.get(made, made) for made in kinds} for key, kinds in allowed.items()}
        if any(all(value.dtype in kinds[key] for key, value in state.items()) for kinds in (allowed, narrowed)):
            return
    for key, value in state.items():
        if value.dtype not in allowed[key]:
            raise misfit(reducer, key, f"dtype {' or '.join(sorted(map(str, allowed[key])))}", value.dtype)


def check_cost(reducer: _Computing, state: State, times: int = 1) -> None:
    """Raise `StateError` if the result, or so many results, would take more than 64 times the bytes of the state and 1 MiB.

    The result is computed on the meta device. What that raises is raised, except if numbers are needed, which are not there.
    """
    try:
        result = reducer.compute({key: torch.empty_like(value, device="meta") for key, value in state.items()})
    except Exception as error:
        if "meta" in str(error).lower() or isinstance(error, NotImplementedError):
            return
        raise
    _check_bytes(reducer, state, sum(leaf.nbytes for leaf in _leaves(result)), times)


def _check_bytes(reducer: object, state: State, size: int, times: int) -> None:
    own = sum(value.nbytes for value in state.values())
    if size * times > _FACTOR * own * times + _FLOOR:
        shapes = {key: tuple(value.shape) for key, value in state.items()}
        raise StateError(
            f"{reducer!r:.200} has no such state: its result would take {size * times} bytes, more than {_FACTOR} times the "
            f"{own * times} of the state and {_FLOOR}; its shapes are {shapes!r:.500}"
        )


def _leaves(result: Any) -> Iterator[Tensor]:
    if isinstance(result, Tensor):
        yield result
    elif isinstance(result, Mapping):
        for part in result.values():
            yield from _leaves(part)


def _cached(function: Any, reducer: _Lifting, *args: object) -> Any:
    try:
        return function(reducer, *args)
    except TypeError:  # a reducer with a field that cannot be hashed
        return function.__wrapped__(reducer, *args)


@lru_cache(maxsize=256)
def _layout_of(reducer: _Lifting, kept: int) -> _Sizes | None:
    """Return the layout of states with so many kept axes; None if it cannot be found."""
    base = 2 if kept <= 24 else 1  # a tensor of 2**64 elements is none
    sizes = [tuple(base + (axis == longer) for axis in range(kept)) for longer in range(-1, kept)]
    for dtype in _DTYPES:
        try:
            first = reducer.specimen(sizes[0], dtype, "meta")
            device = "cpu" if sum(value.nbytes for value in first.values()) < _SMALL else "meta"
            states = [reducer.specimen(each, dtype, device) for each in sizes]
        except DTypeError:
            continue
        except Exception:
            return None
        shapes = {key: _followed([tuple(state[key].shape) for state in states], base) for key in states[0]}
        with suppress(Exception):
            results = zip(*(_leaves(reducer.compute(state)) for state in states), strict=True)
            return _Sizes(device, shapes, [(same[0].itemsize, _followed([tuple(x.shape) for x in same], base)) for same in results])
        return _Sizes(device, shapes, None)
    return None


def _followed(shapes: list[tuple[int, ...]], base: int) -> _Shape:
    """Return which kept axis each size follows, from shapes for kept axes of length `base`, then with one after another longer."""
    found: list[int | None] = []
    for place, size in enumerate(shapes[0]):
        others = [shape[place] for shape in shapes[1:]]
        changed = [axis for axis, other in enumerate(others) if other != size]
        follows = len(changed) == 1 and (size, others[changed[0]]) == (base, base + 1)
        found.append(size if not changed else ~changed[0] if follows else None)
    return tuple(found)


@lru_cache(maxsize=1024)
def _dtypes_of(reducer: _Lifting, kept: int, dtype: torch.dtype, device: str) -> Mapping[str, torch.dtype]:
    """Return the dtypes of the merged states of observations of this dtype; none if it is not supported."""
    with suppress(Exception):
        lifted = reducer.specimen((1,) * kept, dtype, device)
        return {key: value.dtype for key, value in {**lifted, **reducer.merge(lifted, lifted)}.items()}
    return {}
