"""Small tensors beside the numbers of a tick, bit for bit in every dtype: each is the bytes of a safetensors file."""

from __future__ import annotations

import io
from collections.abc import Mapping

from torch import Tensor

from recorders.errors import StorageError
from recorders.recordings.storage.tensorfile import chunks, describe, read_tensors
from recorders.watch.timeline.rows import text_of

__all__ = ["LARGEST", "tensor_of", "tensors_as_bytes"]

LARGEST = 1 << 20
"""How many bytes a tensor may have."""


def tensors_as_bytes(tensors: Mapping[str, Tensor]) -> dict[str, tuple[str | None, bytes]]:
    """By name, the true dtype if it is stored as another one, and the bytes."""
    found: dict[str, tuple[str | None, bytes]] = {}
    for name, tensor in tensors.items():
        if not isinstance(tensor, Tensor):
            raise TypeError(f"tensors are tensors by name; got {name!r:.100}: {type(tensor).__name__}")
        name = text_of(name, "names of tensors")
        header, ordered, dtypes = describe({"": tensor})
        if (size := tensor.numel() * tensor.element_size()) > LARGEST:
            raise StorageError(
                f"the tensor {name!r} has {size:,} bytes, and a timeline takes {LARGEST:,}: reduce it, or record it with a Recorder"
            )
        found[name] = dtypes.get(""), b"".join(map(bytes, chunks(header, ordered)))
    return found


def tensor_of(dtype: str | None, data: bytes, where: str) -> Tensor:
    """The tensor; `where` is for the error if it cannot be read."""
    dtypes = {} if dtype is None else {"": dtype}
    return read_tensors(io.BytesIO(data), len(data), dtypes, where, len(data))[0][""]
