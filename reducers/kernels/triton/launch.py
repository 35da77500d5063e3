"""The launches, as operators that `torch.compile` sees through, and as what eager updates call."""

from __future__ import annotations

import math
import struct
from collections.abc import Mapping
from typing import Any, List, Optional, Sequence  # noqa: UP035  # what torch 2.8 can read in the signature of an operator

import torch
import triton
from torch import Tensor
from torch.library import triton_op, wrap_triton

from reducers.errors import ArgumentError
from reducers.kernels.triton.joining import join
from reducers.kernels.triton.layout import plan, power_of_two
from reducers.kernels.triton.sweeping import sweep

__all__ = ["COLUMNS", "DTYPES", "join_partials", "new_partials", "sweep_into", "swept", "swept_in_graph"]

FLOATS = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
DTYPES = (*FLOATS, torch.int8, torch.uint8, torch.int16, torch.int32, torch.int64, torch.bool)
_WARPS = 8
_JOINED = 1024  # partial statistics that one program joins

_TOTALS = ("sum", "exact", "magnitudes", "squares", "active", "peak")
_OUTPUTS = ("count", "mean", "m2", "m3", "m4", "min", "max", "zeros", "nan", "inf")
COLUMNS = (*_OUTPUTS, *_TOTALS)
"""What the kernels compute of the finite elements: a reducer says which of these its state holds.

`sum` is as exact as `mean`, `exact` is added in float64; `magnitudes` and `squares` are sums of |x| and x^2; `active` counts
elements of |x| above a threshold; `peak` is the largest |x|. `nan` and `inf` count what is not finite.
"""


def swept(
    x: Tensor,
    axes: tuple[int, ...],
    columns: Mapping[str, str],
    threshold: float = 0.0,
    state: Mapping[str, Tensor] | None = None,
    mask: Tensor | None = None,
) -> dict[str, Tensor] | None:
    """Return the statistics of `x` over `axes`, joined with those of a state: two launches, which read `x` once.

    What is allocated are the results and one table of partial statistics. Nothing waits for the device, and the work depends on
    shapes and strides only, so that a CUDA graph may hold it. Equal tensors give equal bits.

    Args:
        columns: the keys of the state, and which of `COLUMNS` each of them is.
        threshold: for `active`, at least 0.
        state: a state of the same keys, shapes and dtypes, which is earlier.
        mask: bool, in the shape of `x`, of any strides: the elements that are observed. Integers are float64 then.

    Returns:
        counts int64; `sum` and `exact` int64 for integers; `min` and `max` in the dtype of `x`; all else float64, in the shape of
        the kept axes. None if the dtype of `x` is not supported, or more than `MAX_DIMS` axes are left after merging.

    Raises:
        ArgumentError: the latter, inside a graph that is being compiled.
    """
    if x.dtype not in DTYPES:
        return None
    names = ",".join(columns.values())
    before = [] if not state else [state[key] for key in columns]
    if torch.compiler.is_compiling():
        return dict(zip(columns, swept_in_graph(x, axes, names, threshold, before, mask), strict=True))
    if plan(x, axes, mask) is None:
        return None
    partials = new_partials(x, axes, names, mask)
    shape, dtype = _kept_shape(x, axes), _swept_dtype(x, mask)
    if type(x) is Tensor:  # for which an operator would cost more than the launch
        with torch.cuda.device(x.device if x.is_cuda else -1):
            _sweep(x, partials, axes, names, threshold, None, False, mask)
            results = _join(partials, shape, names, dtype, before, None, False)
    else:
        sweep_into(x, partials, axes, names, threshold, None, mask)
        results = join_partials(partials, shape, names, dtype, before)
    return dict(zip(columns, results, strict=True))


def new_partials(x: Tensor, axes: Sequence[int], columns: str, mask: Tensor | None = None) -> Tensor:
    """Return a table for the partial statistics of `x`: int64, of shape (fields, parts, kept positions)."""
    tiles = plan(x, tuple(axes), mask)
    assert tiles is not None
    order, extremes, counts, total = _family(columns, _swept_dtype(x, mask))
    fields = 1 + order + 2 * extremes + 3 * counts + (total not in ("", "peak"))
    return torch.empty((fields, tiles.parts, tiles.kept), dtype=torch.int64, device=x.device)


@triton_op("reducers::sweep", mutates_args={"partials"})
def sweep_into(
    x: Tensor,
    partials: Tensor,
    axes: Sequence[int],
    columns: str,
    threshold: float = 0.0,
    due: Optional[Tensor] = None,  # noqa: UP045
    mask: Optional[Tensor] = None,  # noqa: UP045
) -> None:
    """Write the partial statistics of `x` into a table as `new_partials` returns it. One launch, and no allocation.

    Args:
        columns: names of `COLUMNS`, with commas between them.
        due: an int32 on the device; if it is 0, nothing is read or written.
        mask: bool, in the shape of `x`: the elements that are observed.
    """
    _sweep(x, partials, axes, columns, threshold, due, True, mask)


@triton_op("reducers::join", mutates_args={})
def join_partials(
    partials: Tensor,
    shape: Sequence[int],
    columns: str,
    dtype: torch.dtype,
    state: Sequence[Tensor],
    due: Optional[Tensor] = None,  # noqa: UP045
) -> List[Tensor]:  # noqa: UP006
    """Return the statistics that a table of partial ones stands for, joined with those of a state. One launch.

    Args:
        shape: of the kept axes.
        columns: names of `COLUMNS`, with commas between them.
        dtype: of the tensor that was swept; float64 for integers under a mask.
        state: the earlier statistics in the order of `columns`, or none.
        due: an int32 on the device; if it is 0, the result is the state.
    """
    return _join(partials, shape, columns, dtype, state, due, True)


@triton_op("reducers::swept", mutates_args={})
def swept_in_graph(
    x: Tensor,
    axes: Sequence[int],
    columns: str,
    threshold: float,
    state: Sequence[Tensor],
    mask: Optional[Tensor] = None,  # noqa: UP045
) -> List[Tensor]:  # noqa: UP006
    """Return what `swept` does, in the order of `columns`: both launches as one node of a graph."""
    if plan(x, tuple(axes), mask) is None:
        raise ArgumentError(f"shape {tuple(x.shape)} with strides {tuple(x.stride())} has too many axes that cannot be merged")
    partials = new_partials(x, axes, columns, mask)
    _sweep(x, partials, axes, columns, threshold, None, True, mask)
    return _join(partials, _kept_shape(x, axes), columns, _swept_dtype(x, mask), state, None, True)


def _kept_shape(x: Tensor, axes: Sequence[int]) -> list[int]:
    return [size for axis, size in enumerate(x.shape) if axis not in axes]


def _swept_dtype(x: Tensor, mask: Tensor | None) -> torch.dtype:
    """Return the dtype of the elements as they are reduced: under a mask integers are float64, as on a CPU."""
    return x.dtype if mask is None or x.dtype.is_floating_point else torch.float64


def _sweep(
    x: Tensor,
    partials: Tensor,
    axes: Sequence[int],
    columns: str,
    threshold: float,
    due: Tensor | None,
    traced: bool,
    mask: Tensor | None = None,
) -> None:
    tiles = plan(x, tuple(axes), mask)
    assert tiles is not None
    dtype = _swept_dtype(x, mask)
    order, extremes, counts, total = _family(columns, dtype)
    integer = not dtype.is_floating_point
    _launcher(sweep, traced)[tiles.grid](
        _bytes(x),
        partials,
        due,
        *tiles.arguments(),
        _bits(threshold, dtype),
        *((None,) * 12 if mask is None else (_bytes(mask), *tiles.other_arguments())),
        ORDER=order,
        EXTREMES=extremes,
        COUNTS=counts,
        TOTAL=total,
        DOUBLE=integer or dtype is torch.float64,
        INTEGER=integer,
        LOWEST=_range(dtype)[0],
        HIGHEST=_range(dtype)[1],
        DUE=due is not None,
        MASK=mask is not None,
        INNER=tiles.inner_rows,
        KEPT_DIMS=len(tiles.kept_sizes),
        OUTER_DIMS=len(tiles.outer_sizes),
        AXIS=tiles.axis,
        ROWS=tiles.rows,
        COLUMNS=tiles.columns,
        WIDE=tiles.wide,
        num_warps=max(1, min(_WARPS, tiles.rows * tiles.columns // 128)),
    )


def _join(
    partials: Tensor,
    shape: Sequence[int],
    columns: str,
    dtype: torch.dtype,
    state: Sequence[Tensor],
    due: Tensor | None,
    traced: bool,
) -> list[Tensor]:
    order, extremes, counts, total = _family(columns, dtype)
    names = columns.split(",")
    integer = not dtype.is_floating_point
    _, parts, kept = partials.shape
    results = [torch.empty(shape, dtype=_dtype_of(name, dtype), device=partials.device) for name in names]
    new, old = ({_output(name): _bytes(value) for name, value in zip(names, values, strict=False)} for values in (results, state))
    outputs = (*_OUTPUTS, "total")
    rows = power_of_two(parts, _JOINED)
    width = power_of_two(kept, max(1, _JOINED // rows))
    _launcher(join, traced)[(-(-kept // width), 1, 1)](
        partials,
        due,
        *(new.get(name) for name in outputs),
        *(old.get(name) for name in outputs),
        kept,
        parts,
        ORDER=order,
        EXTREMES=extremes,
        COUNTS=counts,
        TOTAL=total,
        INTEGER=integer,
        WITH_COUNT="count" in names,
        WITH_MEAN="mean" in names,
        WITH_MIN="min" in names,
        WITH_MAX="max" in names,
        LOWEST=_range(dtype)[0],
        HIGHEST=_range(dtype)[1],
        STATE=len(state) > 0,
        DUE=due is not None,
        PARTS=rows,
        COLUMNS=width,
        num_warps=_WARPS,
    )
    return results


def _launcher(kernel: Any, traced: bool) -> Any:
    """Return the kernel as a tracer sees it; as it is if it is interpreted, which no tracer can see."""
    return wrap_triton(kernel) if traced and isinstance(kernel, triton.runtime.JITFunction) else kernel


def _family(columns: str, dtype: torch.dtype) -> tuple[int, int, int, str]:
    """Return the highest power, whether extremes are needed, whether counts are, and which total."""
    names = columns.split(",")
    total = next((name for name in _TOTALS if name in names), "")
    order = sum(name in names for name in ("mean", "m2", "m3", "m4"))
    if total == "sum" and dtype.is_floating_point:
        order = max(order, 1)
    extremes = any(name in names for name in ("min", "max", "peak"))
    return order, int(extremes), int("zeros" in names), total


def _output(name: str) -> str:
    return "total" if name in _TOTALS else name


def _dtype_of(name: str, dtype: torch.dtype) -> torch.dtype:
    if name in ("min", "max"):
        return dtype
    if name in ("count", "zeros", "nan", "inf", "active") or (name in ("sum", "exact") and not dtype.is_floating_point):
        return torch.int64
    return torch.float64


def _bytes(value: Tensor) -> Tensor:
    return value.view(torch.uint8) if value.dtype is torch.bool else value


def _range(dtype: torch.dtype) -> tuple[int, int]:
    """Return the smallest and the largest number of an integer dtype; of floats nothing that is used."""
    if dtype.is_floating_point:
        return 0, 0
    return (0, 255) if dtype is torch.bool else (torch.iinfo(dtype).min, torch.iinfo(dtype).max)


def _bits(threshold: float, dtype: torch.dtype) -> int:
    """Return the bits of the threshold as a float64; for narrower floats, of the largest float32 that is not above it."""
    if dtype.is_floating_point and dtype is not torch.float64:
        (nearest,) = struct.unpack("f", struct.pack("f", min(threshold, torch.finfo(torch.float32).max)))
        threshold = nearest if nearest <= threshold else math.nextafter(nearest, 0.0)
    (bits,) = struct.unpack("q", struct.pack("d", threshold))
    return int(bits)
