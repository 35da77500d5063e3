"""Sinks and specs: what compiled graphs know of monitors, by numbers and names.

Nothing in a graph belongs to a single monitor. If everything that the compiler guards is equal, blocks of one class that are each
compiled by themselves share a graph. So the sink of an observation is an input of the graph: a tensor that holds the sink's
number. The compiler sees of a monitor only a spec, which all monitors made alike share.
"""

from __future__ import annotations

import itertools
from typing import Any
from weakref import WeakValueDictionary

import torch
from torch import Tensor

from recorders._torch import has_dispatch_modes, outside_modes, without_modes

__all__ = ["find_sink", "find_spec", "new_sink", "new_spec_key"]

_numbers = itertools.count()
_sinks: WeakValueDictionary[int, Any] = WeakValueDictionary()
_specs: WeakValueDictionary[str, Any] = WeakValueDictionary()


def new_sink(sink: Any) -> Tensor:
    """Returns a tensor with a new number, by which graphs identify `sink`. `sink` is held weakly.

    When a graph runs, the operators call one of these methods of the sink for each observation:

    - `receive(layout, packs, stream, info)`: the observation is lifted; `packs` hold one State for each leaf, see `unpacked`;
    - `receive_batch(numbers, packs, batch)`, of the class: the same for several sinks, by their numbers;
    - `record_batch(numbers, tensors, batch)`, of the class: the graph lifted nothing; the tensors are to be read;
    - `receive_leaves(leaves, stream, info)`: the graph could not lift the observation; `leaves` are its tensors by path;
    - `receive_call(operands, stream, info)`: callables need the operands; `operands()` returns them;
    - `receive_failure()`: the operands could not be read while the graph was traced;
    - `keep_given()`: a forward begins whose gradient needs what is given now; returns a number by which that is found, or None.

    `info` says which parts of tensors these are, if ranks share them: by path, or of the operands together; see `PlacementInfo`.
    """
    number = next(_numbers)
    _sinks[number] = sink
    plain = not has_dispatch_modes() and not torch.is_inference_mode_enabled()
    found: Tensor = (outside_modes if plain else without_modes)(_numbered, number)
    return found


def _numbered(number: int) -> Tensor:
    """A tensor that holds a number, and has it as an attribute, too: those of many are read in a fraction of the time."""
    tensor = torch.tensor(number, device="cpu")
    tensor.number = number  # type: ignore[attr-defined]
    return tensor


def new_spec_key(spec: Any) -> str:
    """Returns a new key by which graphs identify `spec`: a string, because a graph may turn a number into a variable."""
    key = str(next(_numbers))
    _specs[key] = spec
    return key


def find_sink(sink: Tensor | int) -> Any:
    """Returns the sink of this number, or None if it was freed: a graph may outlive the monitor."""
    return _sinks.get(int(sink))


def find_spec(key: str) -> Any:
    """Returns the spec of this key, or None if it was freed."""
    return _specs.get(key)
