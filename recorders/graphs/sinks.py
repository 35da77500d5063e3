"""What compiled graphs know of monitors, by numbers and names: sinks, specs, and the batch of observations of one call.

Nothing in a graph belongs to a single monitor. If everything that the compiler guards is equal, blocks of one class that are each
compiled by themselves share a graph. So the sink of an observation is an input of the graph: a tensor that holds the sink's
number. The compiler sees of a monitor only a spec, which all monitors made alike share.
"""

from __future__ import annotations

import ast
import hashlib
import itertools
import secrets
from dataclasses import dataclass
from functools import lru_cache
from typing import Any
from weakref import WeakValueDictionary

import torch
import torch.distributed as dist
from torch import Tensor

from recorders._torch import without_modes
from reducers._torch import constant_in_graphs

_PROCESS = secrets.token_hex(8)
KEY = 16  # characters at the beginning of the text of a batch, by which the operator in C++ finds a ring

_numbers = itertools.count()
_alike: dict[str, int] = {}  # the number of the last spec of a content, by its hash
_sinks: WeakValueDictionary[int, Any] = WeakValueDictionary()
_specs: WeakValueDictionary[str, Any] = WeakValueDictionary()


def new_sink(sink: Any) -> Tensor:
    """Returns a tensor with a new number, by which graphs identify `sink`. `sink` is held weakly.

    When a graph runs, the operators call one of these methods of the sink for each observation:

    - `record_batch(numbers, tensors, batch)`, of the class: tensors of several sinks, by their numbers; see `GraphBatch`;
    - `receive_call(operands, stream, info)`: callables need the operands; `operands()` returns them;
    - `receive_failure()`: the operands could not be read while the graph was traced;
    - `keep_given()`: a forward begins whose gradient needs what is given now; returns a number by which that is found, or None.

    `info` says which part of a tensor the operands are, if ranks share it; see `PlacementInfo`.
    """
    number = next(_numbers)
    _sinks[number] = sink
    found: Tensor = without_modes(torch.tensor, number)
    return found


def new_spec_key(spec: Any, content: str | None) -> str:
    """Returns a new key by which graphs identify `spec`: a text, because a graph may turn a number into a variable.

    Args:
        content: all that graphs depend on. In another process, the first spec of this content has the same key, the second has that
            of the second, and so on: so what the compiler has kept on disk is found again. None if no other process may find it.
    """
    if content is None:
        key = f"{next(_numbers)}_{_PROCESS}"
    else:
        alike = hashlib.sha256(content.encode()).hexdigest()[:16]
        number = _alike[alike] = _alike.get(alike, -1) + 1
        key = f"{alike}_{number}"
    _specs[key] = spec
    return key


@constant_in_graphs
def among_ranks() -> bool:
    """Whether there may be DTensors. Dynamo cannot be asked: it does not tell DTensors from other tensors."""
    return dist.is_available() and dist.is_initialized()


def key_in_graph(key: str, handle: Tensor | None) -> str:
    """Returns the key of a spec for the graph that is being traced. If that has something of this process, no other finds it.

    With handles these are places of accumulators; among ranks it may be which part of a tensor this rank holds.
    """
    return key if handle is None and not among_ranks() else f"{key} {_PROCESS}"


def find_sink(sink: Tensor | int) -> Any:
    """Returns the sink of this number, or None if it was freed: a graph may outlive the monitor."""
    return _sinks.get(int(sink))


def find_spec(key: str) -> Any:
    """Returns the spec of this key, or None if it was freed."""
    return _specs.get(key.partition(" ")[0])


@dataclass(frozen=True, eq=False)  # found by its text, so each exists once, and is compared by identity
class GraphBatch:
    """What a graph tells of observations that it hands over by one call, one of each of several sinks.

    Attributes:
        key: what the text of all of it begins with.
        streams: of each observation.
        paths: those of its leaves, whose tensors follow each other.
        info: which parts of tensors the leaves are; see `layouts.as_text`.
        read: whether the loops in C++ may read all of them, without a question to the monitors.
    """

    key: str
    streams: tuple[str, ...]
    paths: tuple[tuple[str, ...], ...]
    info: tuple[str, ...]
    read: bool


@lru_cache(maxsize=1024)
def batch_from_text(text: str) -> GraphBatch:
    """Returns the batch of a text of `batch_as_text`."""
    return GraphBatch(text[:KEY], *ast.literal_eval(text[KEY:]))


def batch_as_text(streams: tuple[str, ...], paths: tuple[tuple[str, ...], ...], info: tuple[str, ...], read: bool) -> str:
    """Returns the text of a `GraphBatch`: an argument of an operator, because the same graph may run in another process."""
    text = repr((streams, paths, info, read))
    return hashlib.sha256(text.encode()).hexdigest()[:KEY] + text
