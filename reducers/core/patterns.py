"""Einops patterns: which axes of a tensor a statistic reduces, and the order of the kept axes."""

from __future__ import annotations

from difflib import get_close_matches
from functools import lru_cache
from typing import NamedTuple

from einops import EinopsError, rearrange
from einops.parsing import ParsedExpression
from torch import Tensor

from reducers._torch import constant_in_graphs
from reducers.errors import PatternError

CHANNELS = "channels"
"""Stands for the pattern that keeps the channels of a layer; who knows the layer puts it in place by `with_channels`."""

_MAX_LENGTH = 1000
_ELLIPSIS = "\u2026"  # the einops parser replaces "..." by this


class Arrangement(NamedTuple):
    """The steps from a tensor to the input of `lift`: permute (a view) or rearrange, then reduce `axes`."""

    permute: tuple[int, ...] | None
    rearrange: str | None
    axes: tuple[int, ...]


@lru_cache(maxsize=1024)
def _parse(pattern: str) -> tuple[ParsedExpression, ParsedExpression, str, str]:
    left, arrow, right = pattern.partition("->")
    if pattern == CHANNELS:
        raise PatternError(
            f"pattern {pattern!r} is the channel axis of a layer, and here is none: put the reducer on a layer by a ForwardMonitor "
            "or a BackwardMonitor, or write the pattern, 'b c ... -> c' for convolutions and '... c -> c' for linear layers"
        )
    if not arrow:
        guess = "did you mean 'channels'? " if get_close_matches(pattern, [CHANNELS]) else ""
        raise PatternError(
            f"pattern {pattern!r} has no '->': {guess}write all axes, '->', then the axes to keep, as in 'b c h w -> c'"
        )
    try:
        parsed = ParsedExpression(left), ParsedExpression(right)
    except EinopsError as error:
        raise PatternError(
            f"pattern {pattern!r} is malformed: {str(error).splitlines()[0]}; name each axis once on each side of the '->', as in "
            "'b c h w -> c'"
        ) from None
    if any(side.has_non_unitary_anonymous_axes for side in parsed):
        raise PatternError(f"pattern {pattern!r} has a number in place of an axis name: give it a name")
    if any(axis != _ELLIPSIS and len(axis) > 1 for axis in parsed[0].composition):
        raise PatternError(f"pattern {pattern!r} has parentheses on its left side: only the right side may group axes")
    unknown = {name for name in parsed[1].identifiers if isinstance(name, str)} - parsed[0].identifiers
    if unknown:
        missing = sorted("..." if name == _ELLIPSIS else name for name in unknown)
        raise PatternError(f"pattern {pattern!r} keeps {missing}, which its left side does not name: write all axes on the left")
    return *parsed, left.strip(), right.strip()


def validate(pattern: str) -> None:
    """Raise `PatternError` if `pattern` is neither an einops pattern of the form `"axes -> axes to keep"` nor `"channels"`."""
    if not isinstance(pattern, str):
        raise PatternError(f"a pattern is a string such as 'b c h w -> c'; got {type(pattern).__name__} {pattern!r}")
    if len(pattern) > _MAX_LENGTH:
        raise PatternError(f"a pattern has at most {_MAX_LENGTH} characters; got {len(pattern)}")
    if pattern != CHANNELS:
        _parse(pattern)


def sides(pattern: str) -> tuple[str, str]:
    """Return the left and the right side of a pattern; raise `PatternError` if it has none."""
    return _parse(pattern)[2:]


def kept_axes(pattern: str) -> int | None:
    """Return the number of axes that a pattern keeps; None if it keeps any number of them."""
    if pattern == CHANNELS:
        return 1
    kept = _parse(pattern)[1].composition
    return None if _ELLIPSIS in kept else len(kept)


def validate_features(*patterns: str) -> None:
    """Raise `PatternError` unless each pattern keeps exactly one axis and all reduce shared axes in the same order."""
    reduced = []
    for pattern in patterns:
        validate(pattern)
        if pattern == CHANNELS:
            continue
        left, right, _, _ = _parse(pattern)
        if len(right.composition) != 1 or not right.identifiers or right.composition == [_ELLIPSIS]:
            raise PatternError(
                f"pattern {pattern!r} must keep one axis, the features, as in 'b ... d -> d': "
                "merge several axes by parentheses, as in 'b c h w -> (c h w)' or 'b ... -> (...)'"
            )
        names = [name for axis in left.composition for name in ([axis] if axis == _ELLIPSIS else axis)]
        reduced.append([name for name in names if name not in right.identifiers])
    shared = [[name for name in names if all(name in others for others in reduced)] for names in reduced]
    if any(names != shared[0] for names in shared):
        raise PatternError(f"patterns {patterns} reduce the same axes in different orders, so their rows would not match")


@constant_in_graphs
def _layout(pattern: str, ndim: int) -> Arrangement | str:
    """Return the layout or an error message. An exception raised in here would break the compiled program of the caller."""
    try:
        return _cached_layout(pattern, ndim)
    except PatternError as error:
        return str(error)


@lru_cache(maxsize=1024)
def _cached_layout(pattern: str, ndim: int) -> Arrangement:
    left, right, left_text, right_text = _parse(pattern)
    plain = all(
        axis == _ELLIPSIS or (len(axis) == 1 and axis != [_ELLIPSIS]) for side in (left, right) for axis in side.composition
    )
    if not plain:
        flat = [name for axis in left.composition for name in ([axis] if axis == _ELLIPSIS else axis)]
        reduced = [name for name in flat if name not in right.identifiers]
        reduced_ndim = len(reduced)
        if _ELLIPSIS in reduced:  # stands for all unnamed axes, possibly none
            reduced_ndim += ndim - len(left.composition)
        names = " ".join("..." if name == _ELLIPSIS else name for name in reduced)
        return Arrangement(None, f"{left_text} -> {names} {right_text}", tuple(range(reduced_ndim)))
    names_left = [axis if axis == _ELLIPSIS else axis[0] for axis in left.composition]
    unnamed = ndim - len(names_left) + left.has_ellipsis
    if (unnamed < 0) or (not left.has_ellipsis and unnamed != 0):
        raise PatternError(
            f"pattern {pattern!r} needs {'at least ' if left.has_ellipsis else ''}{len(names_left) - left.has_ellipsis} axes, "
            f"got {ndim}; write '...' for any number of axes, as in 'b ... c -> c'"
        )
    dims: dict[str, list[int]] = {}
    start = 0
    for name in names_left:
        width = unnamed if name == _ELLIPSIS else 1
        dims[name] = list(range(start, start + width))
        start += width
    names_right = [axis if axis == _ELLIPSIS else axis[0] for axis in right.composition]
    kept = [dim for name in names_right for dim in dims[name]]
    axes = tuple(dim for dim in range(ndim) if dim not in kept)
    order = iter(kept)
    permute = tuple(dim if dim in axes else next(order) for dim in range(ndim))
    return Arrangement(None if permute == tuple(range(ndim)) else permute, None, axes)


def arrange(x: Tensor, pattern: str) -> tuple[Tensor, tuple[int, ...]]:
    """Return the tensor and the axes to reduce; the other axes are in the order of the pattern's right side.

    Plain patterns return a view of `x`, without a copy; patterns with parentheses rearrange it. There is always at least one
    axis to reduce (of length 1 if the pattern keeps all axes), because `sum(dim=())` would reduce all.

    Raises:
        PatternError: the pattern does not match the shape of `x`.
    """
    layout = _layout(pattern, x.ndim)
    if isinstance(layout, str) or layout.rearrange is not None:
        return _rearranged(x, pattern, layout, 0)
    if layout.permute is not None:
        x = x.permute(layout.permute)
    return (x, layout.axes) if layout.axes else (x.unsqueeze(0), (0,))


def fits(pattern: str, ndim: int) -> bool:
    """Return whether a tensor with so many axes matches a pattern, as far as their number tells.

    >>> fits("... c -> c", 1), fits("... c -> c", 0), fits("... ->", 0)
    (True, False, True)
    """
    return not isinstance(_layout(pattern, ndim), str)


def moves_nothing(pattern: str, ndim: int) -> bool:
    """Return whether `arrange` returns a view of a tensor with so many axes, or raises; patterns with parentheses may copy."""
    layout = _layout(pattern, ndim)
    return isinstance(layout, str) or layout.rearrange is None


def arrange_all(xs: Tensor, pattern: str) -> tuple[Tensor, tuple[int, ...]]:
    """Return the same for observations stacked along a new first axis, which the pattern does not name and which is reduced."""
    return _rearranged(xs, pattern, _layout(pattern, xs.ndim - 1), 1)


def _rearranged(x: Tensor, pattern: str, layout: Arrangement | str, stacked: int) -> tuple[Tensor, tuple[int, ...]]:
    try:
        if isinstance(layout, str):
            raise PatternError(layout)
        if layout.rearrange is not None:
            x = rearrange(x, f"observations {layout.rearrange.replace('->', '-> observations')}" if stacked else layout.rearrange)
        elif layout.permute is not None:
            x = x.permute(*range(stacked), *(stacked + axis for axis in layout.permute))
    except (PatternError, EinopsError) as error:
        reason = (
            str(error) if isinstance(error, PatternError) else f"pattern {pattern!r}: {str(error).strip().splitlines()[-1].strip()}"
        )
        raise PatternError(f"shape {tuple(x.shape)} does not fit: {reason}") from None
    if stacked:
        return x, (0, *(1 + axis for axis in layout.axes))
    return (x, layout.axes) if layout.axes else (x.unsqueeze(0), (0,))


def rows(x: Tensor, axes: tuple[int, ...]) -> Tensor:
    """Return the output of `arrange`, for a pattern that keeps one axis, as a matrix [n, d]: one row per reduced position."""
    feature = next(axis for axis in range(x.ndim) if axis not in axes)
    return x.movedim(feature, -1).reshape(-1, x.shape[feature])
