"""Launches of a kernel that are made many times: what does not change from one to the next is found once."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import Any

import triton
from torch import Tensor
from torch.library import wrap_triton

__all__ = ["Launch", "is_aligned", "launch_of", "launcher"]

_ALIGNED = 16  # bytes; Triton compiles another kernel for a tensor that does not begin at a multiple of it


def launcher(kernel: Any, traced: bool) -> Any:
    """Return the kernel as a tracer sees it; as it is if it is interpreted, which no tracer can see."""
    return wrap_triton(kernel) if traced and isinstance(kernel, triton.runtime.JITFunction) else kernel


def is_aligned(x: Tensor) -> bool:
    """Return whether a tensor begins where a GPU can read 16 bytes at once."""
    return x.data_ptr() % _ALIGNED == 0


class Launch:
    """A kernel with a grid, numbers and constants that stay. Only tensors, and the last numbers, differ from call to call.

    Triton looks at each argument of a launch to find what was compiled for such arguments, which takes the host several times as
    long as the launch. Here it does so once for each `kind` of tensors.
    """

    def __init__(self, kernel: Any, grid: tuple[int, int, int], fixed: tuple[Any, ...], warps: int) -> None:
        """Keep the arguments that stay; `fixed` stand between the tensors and the last numbers, in the order of the kernel."""
        self.kernel, self.grid, self.fixed, self.warps = kernel, grid, fixed, warps
        self._compiled: dict[Hashable, Callable[..., None]] = {}

    def __call__(self, kind: Hashable, tensors: tuple[Tensor | None, ...], *last: int) -> None:
        """Launch the kernel on the current device and stream.

        Args:
            kind: all of which it depends what is compiled: the device, which tensors there are, and whether those whose alignment
                the kernel looks at are aligned. Dtypes must be those of the first call.
            last: numbers of which what is compiled does not depend.
        """
        run = self._compiled.get(kind)
        if run is not None:
            run(*tensors, *self.fixed, *last)
            return
        compiled = launcher(self.kernel, False)[self.grid](*tensors, *self.fixed, *last, num_warps=self.warps)
        if isinstance(compiled, triton.compiler.CompiledKernel):
            self._compiled[kind] = compiled[self.grid]


def launch_of(kernel: Any, grid: tuple[int, int, int], numbers: Sequence[Any], constants: dict[str, Any]) -> Launch:
    """Return a launch with these numbers, which follow the tensors of the kernel, and then these constants."""
    in_order = [constants[name] for name in kernel.arg_names if name in constants]
    return Launch(kernel, grid, (*numbers, *in_order), constants["num_warps"])
