"""Lets the compiler keep graphs with monitors on disk, so that a program that starts again need not compile its net anew.

PyTorch keeps a graph under a key that is made of its nodes, and leaves out graphs with functions that it does not know, since they
might do something else in another process. Ours are told to it, with the code and the abilities of this process as what they stand
for. A node names a monitor by the key of its spec only, so that key says all of which it depends what is traced: see `content_of`.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable
from functools import lru_cache
from pathlib import Path
from typing import Any

from recorders._torch.compiler import keep_graphs_with
from recorders.graphs.operators import can_record
from reducers import Reducer, to_recipe
from reducers._torch import when_dynamo_is_imported
from reducers.errors import ReducerError

_FOLDERS = ("recorders/graphs", "recorders/monitors", "recorders/capture", "recorders/_torch", "reducers/kernels", "reducers/core")
_EFFECT = "torch.ops.higher_order.with_effects"
_PLAIN = (str, int, float, bool, type(None))


def cacheable(function: Callable[..., Any]) -> Callable[..., Any]:
    """Let graphs that call this function, which is a node of theirs, be kept: what it does depends on its arguments alone."""
    when_dynamo_is_imported(lambda: _tell(f"{function.__module__}.{function.__name__}"))
    return function


def _tell(name: str) -> None:
    try:
        stands_for = hashlib.sha256(f"{_code()} {can_record()}".encode()).hexdigest()
    except OSError:  # the package is not a folder of files that can be read
        return
    keep_graphs_with({_EFFECT: stands_for, name: stands_for})


@lru_cache(maxsize=1)
def _code() -> str:
    """Return a hash of the code by which graphs are traced: a release, or an edit, makes others."""
    root = Path(__file__).parents[2]
    found = hashlib.sha256()
    for path in _sources(root):
        found.update(path.read_bytes())
    return found.hexdigest()


def _sources(root: Path) -> Iterable[Path]:
    return sorted(path for folder in _FOLDERS for path in (root / folder).rglob("*.py"))


def content_of(monitor: Any) -> str | None:
    """Return a text that is equal for monitors of which graphs are traced alike, in any process; None if that cannot be told.

    It cannot if what a reducer does is not ours to know, or options are functions.
    """
    reducer, gate = monitor.reducer, monitor.gate
    options = dict(monitor.constructor.options)
    if not all(isinstance(value, _PLAIN) for value in options.values()) or not _is_ours(type(monitor), "recorders"):
        return None
    try:
        recipe = to_recipe(reducer)
    except ReducerError:
        return None
    if not all(_is_ours(kind, "reducers") for kind in _kinds(reducer)):
        return None
    kind = f"{type(monitor).__module__}.{type(monitor).__qualname__}"
    asked = gate.chooses_steps, gate.only_steps_and_mode, monitor.given, monitor.has_callables, monitor.records_recomputed
    return json.dumps([kind, recipe, sorted(options.items()), repr(monitor.attr), *map(repr, asked)])


def _is_ours(kind: type, package: str) -> bool:
    return kind.__module__.partition(".")[0] == package


def _kinds(value: Any) -> list[type]:
    """Return the classes of a reducer, and of those in it."""
    if isinstance(value, Reducer):
        return [type(value), *(kind for part in vars(value).values() for kind in _kinds(part))]
    return [kind for part in value for kind in _kinds(part)] if isinstance(value, tuple) else []
