"""Numbers in the fields of reducers; some may differ from element to element, as nested tuples: these can be compared, hashed and
written as data.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any, TypeAlias, Union

import torch
from torch import Tensor

Constant: TypeAlias = Union[float, complex, tuple["Constant", ...]]
"""A number, or nested tuples of numbers in the shape of a tensor."""


def is_number(value: object) -> bool:
    """Return whether `value` is a float, or an integer that float64 holds."""
    return isinstance(value, float) or (isinstance(value, int) and abs(value) <= sys.float_info.max)


def as_constant(value: Any) -> Any:
    """Return a tensor or nested lists as nested tuples, and anything else as it is."""
    if isinstance(value, Tensor):
        value = value.tolist()
    return tuple(map(as_constant, value)) if isinstance(value, (list, tuple)) else value


def numbers(constant: Any) -> Iterator[Any]:
    """Yield what is in the nested tuples."""
    if isinstance(constant, tuple):
        for part in constant:
            yield from numbers(part)
    else:
        yield constant


def constant_tensor(constant: Any) -> Tensor:
    """Return the tensor of a constant, on the CPU: float64, complex128, int64 or bool."""
    kinds = {type(number) for number in numbers(constant)}
    dtype = torch.complex128 if complex in kinds else torch.float64 if float in kinds else None
    return torch.tensor(constant, dtype=dtype, device="cpu")
