"""Where the elements of a tile are in memory, by the axes that are left after merging."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def offset_of(number, size_0, size_1, size_2, stride_0, stride_1, stride_2, stride_3, DIMS: tl.constexpr):
    """Return the offset of a position from its number, which runs through `DIMS` axes, the innermost of which is axis 0."""
    if DIMS < 2:
        offset = number * stride_0
    else:
        offset = number % size_0 * stride_0
        rest = number // size_0
        if DIMS > 2:
            offset += rest % size_1 * stride_1
            rest = rest // size_1
        if DIMS > 3:
            offset += rest % size_2 * stride_2
            rest = rest // size_2
        offset += rest * (stride_1 if DIMS == 2 else stride_2 if DIMS == 3 else stride_3)
    return offset
