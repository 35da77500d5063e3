"""Which kernel computes moments: by device in eager mode, and inside compiled graphs. A new one is a file, and a line here."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

import torch
from torch import Tensor

from reducers.kernels.cpu import sweep
from reducers.kernels.inductor import fused_moments
from reducers.state import State

__all__ = ["eager_moments", "traced_moments"]

Kernel: TypeAlias = "Callable[..., State | None]"  # of a tensor, axes, and `with_extremes`

EAGER: dict[str, Kernel] = {"cpu": sweep}  # by type of device
TRACED: Kernel = fused_moments


def eager_moments(x: Tensor, axes: tuple[int, ...], with_extremes: bool = False) -> State | None:
    """The moments of `x` over `axes`, and its extremes, by a kernel that may look at numbers; None if no kernel takes `x`."""
    kernel = EAGER.get(x.device.type)
    return None if kernel is None else kernel(x, axes, with_extremes=with_extremes)


def traced_moments(x: Tensor, axes: tuple[int, ...], with_extremes: bool = False) -> State | None:
    """The same inside a graph that is being compiled; None outside of one, or if the kernel does not take `x`."""
    return TRACED(x, axes, with_extremes=with_extremes) if torch.compiler.is_compiling() else None
