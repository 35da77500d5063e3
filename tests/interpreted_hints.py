"""What kernels in Triton tell their compiler of numbers is true: by the interpreter, which otherwise only takes note of it.

A compiler reads several elements at once if it is told that they begin at a multiple of so many, and asks a mask for the first of
them only. If that is false, a GPU reads what is not there, or leaves out what is.
"""

from __future__ import annotations

from typing import Any

__all__ = ["check_hints"]


def check_hints() -> None:
    """From now on an interpreted kernel raises AssertionError if it calls numbers multiples, or neighbours, that are not."""
    import numpy as np  # which not all who run tests have
    from triton.runtime.interpreter import TensorHandle

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
