"""What `data[index]` asks for: positions of rows, as NumPy reads an index of the first axis."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor

Index: TypeAlias = "int | slice | Sequence[int] | Sequence[bool] | Tensor | Any"
"""A whole number, a slice with any step, whole numbers, or a mask of one bool for each row; of Python, PyTorch or NumPy."""

_NONE = torch.empty(0, dtype=torch.int64, device="cpu")


def positions(index: Index, rows: int) -> Tensor:
    """The positions of the rows that an index asks for: int64 of its shape, and of no axis for one row.

    Raises:
        IndexError: a row does not exist, a mask has another length than there are rows, or it is no index.

    >>> positions([True, False, True], 3), positions(slice(None, None, -2), 5), positions(-1, 4)
    (tensor([0, 2]), tensor([4, 2, 0]), tensor(3))
    """
    if isinstance(index, slice):
        chosen = range(rows)[index]
        return torch.arange(chosen.start, chosen.stop, chosen.step, device="cpu") if chosen else _NONE
    found = _as_tensor(index)
    if found.dtype is torch.bool:
        if found.shape != (rows,):
            raise IndexError(f"a mask of shape {tuple(found.shape)} for {rows} rows: give one bool for each row")
        return found.nonzero().flatten()
    wrong = (found < -rows) | (found >= rows)
    if wrong.any():
        raise IndexError(f"row {int(found[wrong][0])} of {rows}")
    return torch.where(found < 0, found + rows, found)


def _as_tensor(index: Any) -> Tensor:
    """The index as int64 or bool, on the CPU."""
    if isinstance(index, Tensor):
        found = index.detach().cpu()
    elif isinstance(index, (Sequence, range)) and not isinstance(index, (tuple, str, bytes)):
        found = _of_list(index)
    elif hasattr(index, "__array__"):
        import numpy

        array = numpy.asarray(index)
        if array.dtype.kind not in "biu":
            raise IndexError(f"an array of {array.dtype} is no index of rows: give whole numbers, or a mask")
        # A copy: PyTorch takes neither negative strides nor bytes in another order.
        found = torch.from_numpy(array.astype(array.dtype.newbyteorder("="), copy=True))
    else:
        found = torch.tensor(_whole(index), device="cpu")
    if found.dtype is torch.bool and found.ndim:
        return found
    if found.dtype is torch.bool or found.is_floating_point() or found.is_complex():
        raise IndexError(f"{found.dtype} {'numbers are' if found.ndim else 'is'} no index of rows: give whole numbers, or a mask")
    wide = found.to(torch.int64)
    if found.dtype is torch.uint64 and (wide < 0).any():
        raise IndexError("a row beyond 2**63 does not exist")
    return wide


def _of_list(index: Sequence[Any]) -> Tensor:
    try:
        found = torch.tensor(index, device="cpu") if len(index) else _NONE
    except (TypeError, ValueError, RuntimeError, OverflowError) as error:
        raise IndexError(f"{index!r:.100} is no index of rows: {error}") from error
    if found.dtype is not torch.bool and any(isinstance(item, bool) for item in index):
        raise IndexError(f"{index!r:.100} holds bools and numbers: give a mask of bools, or whole numbers")
    return found


def _whole(index: Any) -> int:
    if isinstance(index, bool):
        raise IndexError(f"{index} is no row: give a whole number, or a mask of one bool for each row")
    if isinstance(index, tuple):
        raise IndexError("rows have one axis here: read them first, then choose from them, as in data[rows][:, columns]")
    try:
        found = operator.index(index)
    except TypeError as error:
        raise IndexError(f"a {type(index).__name__} is no index of rows: give whole numbers, a slice, or a mask") from error
    if not -(2**63) <= found < 2**63:
        raise IndexError(f"row {found} does not exist")
    return found
