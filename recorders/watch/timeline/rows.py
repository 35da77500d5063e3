"""What is appended to a timeline, checked: numbers, texts, and small tensors as the bytes of a safetensors file."""

from __future__ import annotations

import math
import operator
from collections.abc import Mapping
from typing import Any, TypeAlias

import torch
from torch import Tensor

from recorders.errors import StorageError, TickError
from recorders.recordings.storage.tensors import chunks, describe, why_no_memory

LARGEST = 1 << 20
"""How many bytes a tensor may have."""

TimelineRows: TypeAlias = Mapping[str, Mapping[str, "float | Tensor"]]


def tick_of(tick: Any) -> int:
    """The number of a tick as SQLite returns it; raises `TickError` if it is no whole number of 64 bits."""
    if isinstance(tick, bool) or not isinstance(tick, int) or not -(2**63) <= tick < 2**63:
        raise TickError(f"a tick is a whole number of at most 64 bits, such as an epoch; got {tick!r:.100}")
    return int(tick)


def step_of(step: Any) -> int | None:
    """The number of a step likewise, or None; raises `TickError`."""
    try:
        found = None if step is None else operator.index(step)
    except TypeError:
        found = 2**63
    if isinstance(step, bool) or (found is not None and not 0 <= found < 2**63):
        raise TickError(f"a step is the number of optimizer steps that ended before a tick, or None; got {step!r:.100}")
    return found


def text_of(text: Any, what: str) -> str:
    """A text as SQLite returns it; raises `TypeError` if it is none, and `StorageError` if it cannot be encoded."""
    if not isinstance(text, str):
        raise TypeError(f"{what} are strings; got {text!r:.100}")
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise StorageError(f"{what} hold no lone surrogates, as no file can; got {text!r:.100}") from error
    return str.__str__(text)


def texts_of(notes: Mapping[Any, Any]) -> dict[str, str]:
    """Notes by key as SQLite returns them; raises as `text_of`."""
    return {text_of(key, "keys of notes"): text_of(text, "notes") for key, text in notes.items()}


def numbers_of(rows: TimelineRows) -> dict[tuple[str, str], float]:
    """All values as floats by (name, statistic); one transfer for each device and dtype."""
    values: dict[tuple[str, str], float] = {}
    tensors: dict[tuple[torch.device, torch.dtype], dict[tuple[str, str], Tensor]] = {}
    for name, statistics in rows.items():
        stored = text_of(name, "names")
        if not isinstance(statistics, Mapping):
            raise TypeError(f"{name!r} has no statistics but {statistics!r:.100}: give a mapping, such as {{'value': 0.5}}")
        for statistic, value in statistics.items():
            key = (stored, text_of(statistic, "statistics"))
            if isinstance(value, Tensor) and value.layout is torch.strided and (reason := why_no_memory(value)):
                raise TypeError(f"{statistic!r} of {name!r} must be a number, and is a tensor {reason}")
            if isinstance(value, Tensor) and value.numel() == 1 and not value.is_complex():
                tensors.setdefault((value.device, value.dtype), {})[key] = value.detach().reshape(())
                values[key] = math.nan  # keeps the place; replaced below
            elif not isinstance(value, Tensor) and hasattr(value, "__float__"):
                try:
                    values[key] = float(value)
                except OverflowError as error:
                    raise TypeError(f"{statistic!r} of {name!r} is a number that no float holds") from error
            else:
                what = f"a tensor of shape {tuple(value.shape)}, {value.dtype}" if isinstance(value, Tensor) else repr(value)
                raise TypeError(f"{statistic!r} of {name!r} must be a number or a real tensor of one element; got {what}")
    for group in tensors.values():
        values.update(zip(group, torch.stack(list(group.values())).cpu().double().tolist(), strict=True))
    return values


def tensors_as_bytes(tensors: Mapping[str, Tensor]) -> dict[str, tuple[str | None, bytes]]:
    """By name, the true dtype if it is stored as another one, and the bytes."""
    found: dict[str, tuple[str | None, bytes]] = {}
    for name, tensor in tensors.items():
        if not isinstance(tensor, Tensor):
            raise TypeError(f"tensors are tensors by name; got {name!r:.100}: {type(tensor).__name__}")
        name = text_of(name, "names of tensors")
        try:
            header, ordered, dtypes = describe({"": tensor})
        except StorageError as error:
            raise StorageError(f"the tensor {name!r} cannot be stored: {error}") from error
        if (size := tensor.numel() * tensor.element_size()) > LARGEST:
            raise StorageError(
                f"the tensor {name!r} has {size:,} bytes, and a timeline takes {LARGEST:,}: reduce it, or record it with a Recorder"
            )
        found[name] = dtypes.get(""), b"".join(map(bytes, chunks(header, ordered)))
    return found
