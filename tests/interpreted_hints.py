"""What kernels in Triton take for granted is true: by the interpreter, which otherwise only takes note of it.

A compiler reads several elements at once if it is told that they begin at a multiple of so many, and asks a mask for the first of
them only. If that is false, a GPU reads what is not there, or leaves out what is. And a kernel gets the address of a tensor: all
but those that it gets with strides must be contiguous, or it reads the numbers of other places.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

__all__ = ["check_hints"]

STRIDED = ("x", "mask", "weights")
"""The tensors that kernels get with strides, if they are not copied before."""


def check_hints() -> None:
    """From now on an interpreted kernel raises AssertionError if what it takes for granted is false.

    That is numbers that it calls multiples, or neighbours, and tensors that it takes to be contiguous.
    """
    import numpy as np  # which not all who run tests have
    from triton.runtime.interpreter import GridExecutor, TensorHandle

    noted = TensorHandle.set_attr

    def checked(handle: Any, name: str, values: list[int]) -> None:
        if name == "tt.divisibility":
            data = np.atleast_1d(handle.data)
            runs = handle.attr.get("tt.contiguity", [1] * data.ndim)  # of neighbours, of which the first is a multiple
            for axis, (run, value) in enumerate(zip(runs, values, strict=True)):
                begins = range(0, data.shape[axis], run)
                first = data.take(begins, axis)
                assert (first % value == 0).all(), f"{first} were called multiples of {value}"
                for later in range(1, run if value > 1 else 1):
                    neighbours = data.take([begin + later for begin in begins], axis)
                    assert (neighbours == first + later).all(), f"{first} and {neighbours} were called {later} apart"
        noted(handle, name, values)

    TensorHandle.set_attr = checked
    launched = GridExecutor.__call__

    def launched_checked(executor: Any, *args: Any, **kwargs: Any) -> Any:
        for name, arg in {**dict(zip(executor.arg_names, args, strict=False)), **kwargs}.items():
            if isinstance(arg, Tensor) and name not in STRIDED:
                assert arg.is_contiguous(), f"{name} of shape {tuple(arg.shape)} has strides {arg.stride()}"
        return launched(executor, *args, **kwargs)

    GridExecutor.__call__ = launched_checked
