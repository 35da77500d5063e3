"""Launches of a kernel that are made many times: what does not change from one to the next is found once."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import Any

import triton
from torch import Tensor
from triton import knobs
from triton.runtime import driver

from reducers.kernels.triton.arguments import bytes_of

_ALIGNED = 16  # bytes; Triton compiles another kernel for a tensor that does not begin at a multiple of it
_RUNS = "3.4.", "3.5.", "3.6.", "3.7."  # versions of Triton in which `run` of a compiled kernel takes what `_runner` gives it


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

    def __call__(self, kind: Hashable, tensors: tuple[Tensor | None, ...], *last: int, times: int = 1) -> None:
        """Launch the kernel on the current device and stream.

        Args:
            kind: all of which it depends what is compiled: the device, which tensors there are, and whether those whose alignment
                the kernel looks at are aligned. Dtypes must be those of the first call.
            last: numbers of which what is compiled does not depend.
            times: by what the second size of the grid is multiplied.
        """
        run = self._compiled.get(kind)
        if run is not None:
            # Of a tensor Triton would ask the driver whether it is on the GPU.
            run(times, *[None if x is None else x.data_ptr() for x in tensors], *self.fixed, *last)
            return
        arguments = [None if x is None else bytes_of(x) for x in tensors]
        compiled = self.kernel[_grid(self.grid, times)](*arguments, *self.fixed, *last, num_warps=self.warps)
        if isinstance(compiled, triton.compiler.CompiledKernel):
            self._compiled[kind] = _runner(compiled, self.grid)


def launch_of(kernel: Any, grid: tuple[int, int, int], numbers: Sequence[Any], constants: dict[str, Any]) -> Launch:
    """Return a launch with these numbers, which follow the tensors of the kernel, and then these constants."""
    in_order = [constants[name] for name in kernel.arg_names if name in constants]
    return Launch(kernel, grid, (*numbers, *in_order), constants["num_warps"])


def _grid(grid: tuple[int, int, int], times: int) -> tuple[int, int, int]:
    x, y, z = grid
    return x, y * times, z


def _runner(compiled: Any, grid: tuple[int, int, int]) -> Callable[..., None]:
    """Return what launches a compiled kernel on the current stream of the current device, which stays.

    `compiled[grid]` of Triton does the same, but asks for the device at each launch, and makes what hooks are told if there are
    none. What inductor compiles calls `run` as here.
    """
    if not triton.__version__.startswith(_RUNS):
        return lambda times, *arguments: compiled[_grid(grid, times)](*arguments)
    run, function, metadata = compiled.run, compiled.function, compiled.packed_metadata
    device, stream_of = driver.active.get_current_device(), driver.active.get_current_stream
    x, y, z = grid

    def launched(times: int, *arguments: Any) -> None:
        if _has_hooks():  # such as a profiler's
            compiled[x, y * times, z](*arguments)
        else:
            run(x, y * times, z, stream_of(device), function, metadata, None, None, None, *arguments)

    return launched


def _has_hooks() -> bool:
    """Return whether Triton calls anything at a launch. A hook is a function or None, and since 3.5 a chain of functions."""
    for hook in (knobs.runtime.launch_enter_hook, knobs.runtime.launch_exit_hook):
        if hook is not None and getattr(hook, "calls", True):
            return True
    return False
