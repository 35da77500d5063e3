"""Many tensors in two launches: each is a row of the result. Tables on the device say where they are, and how they are cut."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from reducers.kernels.axes import fills_memory
from reducers.kernels.columns import column_dtypes
from reducers.kernels.triton.arguments import fields, takes_columns
from reducers.kernels.triton.join import join_partials
from reducers.kernels.triton.lanes import cut_many
from reducers.kernels.triton.sweep import on_device, sweep_many

Family = tuple[Mapping[str, str], float, Mapping[str, Tensor]]
"""The columns, the threshold and the state of one statistic, as `swept` takes them; the tensors of the state are rows."""


class AddressTables:
    """What the kernels read of many tensors, on the device: where they are, and how they are cut into parts.

    Gradients may be elsewhere in each step. So the addresses are copied again, without waiting, if one of them has changed. How
    tensors are cut depends on their lengths, which stay.
    """

    def __init__(self, lengths: Sequence[int], dtype: torch.dtype, device: torch.device, stream: int) -> None:
        self.lengths, self._kind = list(lengths), (dtype, device, stream)
        self.parts, cuts = cut_many(lengths, dtype)
        self.cuts = _sent(cuts, device)
        self.addresses: Tensor | None = None
        self.aligned = False  # whether each address is a multiple of 16 bytes
        self._sent: list[int] = []

    @classmethod
    def of(cls, xs: Sequence[Tensor | None], before: AddressTables | None) -> AddressTables:
        """Return the tables of these tensors: those from before if they are as long, on the same device and stream."""
        first = next(x for x in xs if x is not None).detach()
        kind = (first.dtype, first.device, _stream(first))
        lengths = [0 if x is None else x.numel() for x in xs]
        if before is not None and len(before.lengths) == len(xs):
            # What is left out keeps its parts, which read nothing: it may come again.
            lengths = [length or known for length, known in zip(lengths, before.lengths, strict=True)]
            if before._kind == kind and before.lengths == lengths:
                return before._placed(xs)
        return cls(lengths, *kind)._placed(xs)

    def _placed(self, xs: Sequence[Tensor | None]) -> AddressTables:
        """Send the addresses if they have changed; return itself."""
        addresses = [0 if x is None else _address(x) for x in xs]
        if addresses != self._sent:
            self._sent = []  # for if it is interrupted
            self.addresses = _sent(addresses, self.cuts.device, self.addresses)
            self.aligned = not any(address % 16 for address in addresses)
            self._sent = addresses
        return self


def swept_rows(
    xs: Sequence[Tensor | None], families: Sequence[Family], before: AddressTables | None
) -> tuple[list[dict[str, Tensor]], AddressTables]:
    """Return the statistics of each tensor over all its elements, joined with those of a state, as rows; and the tables for later.

    Two launches a family, and at most one copy to the device if tensors are as long as before. Allocated are the results and a
    table of partial statistics. Nothing waits for the device. How a tensor is reduced does not depend on the others.

    Args:
        xs: for each row a tensor, or None if the row stays as it is; of one dtype that `row_dtypes` takes, on one device, at least
            one of them. An empty tensor is as None.
        families: for each the state is one of as many rows, or empty; then no tensor may be missing.
        before: the tables of an earlier call.

    """
    first = next(x for x in xs if x is not None).detach()
    dense = [x if x is None else _dense(x) for x in xs]  # copies live until all is launched
    with on_device(first):
        tables = AddressTables.of(dense, before)
        return [_swept(first, tables, *family) for family in families], tables


def row_dtypes(columns: Mapping[str, str], dtype: torch.dtype) -> dict[str, torch.dtype] | None:
    """Return the dtypes of what `swept_rows` returns for tensors of this dtype, by key; None if it does not take them."""
    dtypes = column_dtypes(tuple(columns.values()), dtype)
    return dict(zip(columns, dtypes, strict=True)) if takes_columns(dtype, columns.values()) else None


def _swept(
    x: Tensor, tables: AddressTables, columns: Mapping[str, str], threshold: float, state: Mapping[str, Tensor]
) -> dict[str, Tensor]:
    names, rows = ",".join(columns.values()), len(tables.lengths)
    before = [state[key] for key in columns] if state else []
    partials = torch.empty((fields(names, x.dtype), tables.parts, 1), dtype=torch.int64, device=x.device)
    addresses, cuts = tables.addresses, tables.cuts
    assert addresses is not None
    if tables.parts:
        sweep_many(x, partials, names, threshold, addresses, cuts, tables.aligned)
    results = join_partials(partials, [rows], names, x.dtype, before, cuts=cuts)
    return dict(zip(columns, results, strict=True))


def _dense(x: Tensor) -> Tensor:
    """Return the tensor; a copy if its elements do not fill a piece of memory, or are stored with the other sign."""
    return x if (x.is_contiguous() or fills_memory(x)) and not x.is_neg() else x.resolve_neg().contiguous()


def _address(x: Tensor) -> int:
    return x.data_ptr() if x.numel() else 0


def _stream(x: Tensor) -> int:
    """Return which stream the tables are made on: another one would not wait for them."""
    return torch.cuda.current_stream(x.device).cuda_stream if x.is_cuda and type(x) is Tensor else 0


def _sent(values: Sequence[int], device: torch.device, into: Tensor | None = None) -> Tensor:
    """Return the numbers on the device, in memory that is there if it is given. The host does not wait for the copy."""
    host = torch.tensor(values, dtype=torch.int64, device="cpu")
    if device.type == "cuda" and type(host) is Tensor:
        host = host.pin_memory()  # PyTorch does not use this memory again before the copy is done
    return host.to(device, non_blocking=True) if into is None else into.copy_(host, non_blocking=True)
